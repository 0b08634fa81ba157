"""A prototype: the gated delta rule in chunks of tokens, by matrix products, as a Triton kernel.

Chunks begin at multiples of CHUNK in position, and all products have whole chunks, with zeros for rows that
are not there: a token's row depends on none after it. The state is that before the open chunk, next to which
the chunk's inputs are kept. So a token's bits are the same however a sequence is cut into steps, one by one
too; they differ from the bits of `recurrent_kernels.delta_rule`. No model uses this kernel: see
docs/gpu/design.md.
"""

import triton
import triton.language as tl

from kukri.kernels.gpu.bits import sigmoid, tree_sum
from kukri.kernels.gpu.recurrent_kernels import _sequence, _softplus

CHUNK = tl.constexpr(16)
MAX_REGISTERS = 255  # a thread's
STATE_ROWS = 32  # rows of a state: a step of its products


@triton.jit
def _rows(x, kept, token, row, start, stop, stride, kept_stride, at, width, C: tl.constexpr):
    """float32 [C, columns] of a chunk's tokens: those of the step from x, those before it from `kept`."""
    is_new, inside = (token >= start) & (token < stop), (at < width)[None, :]
    where = tl.where(is_new, token, 0).to(tl.int64)[:, None] * stride + at[None, :]
    new = tl.load(x + where, mask=is_new[:, None] & inside, other=0)
    old = tl.load(
        kept + row[:, None] * kept_stride + at[None, :], mask=(token < start)[:, None] & inside, other=0
    )
    return new + old


@triton.jit
def delta_chunks(
    q, k, v, decay, beta, a, dt_bias, states, kept_k, kept_v, kept_decay, kept_beta, y, query_start,
    context_len, state_slots, q_stride, k_stride, v_stride, decay_stride, beta_stride, n_heads, n_groups,
    K: tl.constexpr, KB: tl.constexpr, P: tl.constexpr, PB: tl.constexpr,
):  # fmt: skip
    """PB columns of one head of `recurrent_kernels.delta_rule`. The rows of the open chunk are kept as they
    came, [slots, CHUNK, width of each]; who launches this keeps the last ones after it.

    The state stays in memory and is read KB rows at a time: of products of float32 that are unrolled
    over more, the assembler spills.
    """
    start, stop, slot, _ = _sequence(query_start, context_len, state_slots)
    head = tl.program_id(1)
    key_head = head // (n_heads // n_groups)
    p, n, row = tl.program_id(2) * PB + tl.arange(0, PB), tl.arange(0, KB), tl.arange(0, CHUNK)
    at, inside = states + (slot * n_heads + head) * (K * P) + n[:, None] * P + p[None, :], (p < P)[None, :]
    rate, shift = tl.load(a + head), tl.load(dt_bias + head)
    n_keys, n_values = n_groups * K, n_heads * P
    q += key_head * K
    k += key_head * K
    kept_k += slot * CHUNK * n_keys + key_head * K
    kept_v += slot * CHUNK * n_values + head * P
    kept_decay += slot * CHUNK * n_heads + head
    kept_beta += slot * CHUNK * n_heads + head
    one = tl.arange(0, 1)
    n_before = tl.load(context_len + tl.program_id(0)) - (stop - start)
    n_there = tl.where(n_before >= CHUNK, K, 0)  # rows of the state: none before the first chunk is full
    for first in range(start - n_before % CHUNK, stop, CHUNK):
        token = first + row
        there = token < stop
        value = _rows(v + head * P, kept_v, token, row, start, stop, v_stride, n_values, p, P, CHUNK)
        gate = _rows(decay + head, kept_decay, token, row, start, stop, decay_stride, n_heads, one, 1, CHUNK)
        write = _rows(beta + head, kept_beta, token, row, start, stop, beta_stride, n_heads, one, 1, CHUNK)
        log = tl.where(there[:, None], _softplus(gate + shift) * rate, 0.0)
        total = tl.cumsum(tl.reshape(log, [CHUNK]), 0)
        share = tl.where(there[:, None], sigmoid(write), 0.0)  # [CHUNK, 1]
        behind = row[:, None] >= row[None, :]
        ratio = tl.where(behind, tl.exp(tl.where(behind, total[:, None] - total[None, :], 0.0)), 0.0)
        left = tl.exp(total)[:, None]
        among, between = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
        found, seen = tl.zeros([CHUNK, PB], tl.float32), tl.zeros([CHUNK, PB], tl.float32)
        for i in range(0, K, KB):
            key = _rows(k, kept_k, token, row, start, stop, k_stride, n_keys, i + n, K, CHUNK)
            query = _rows(q, kept_k, token, row, start, stop, q_stride, n_keys, i + n, K, CHUNK)
            state = tl.load(at + i * P, mask=(i + n < n_there)[:, None] & inside, other=0)
            among = tl.dot(key, tl.trans(key), among, input_precision="ieee")
            between = tl.dot(query, tl.trans(key), between, input_precision="ieee")
            found = tl.dot(key, state, found, input_precision="ieee")
            seen = tl.dot(query, state, seen, input_precision="ieee")
        among = tl.where(row[:, None] > row[None, :], share * ratio * among, 0.0)
        wanted = share * (value - left * found)
        change = tl.zeros([CHUNK, PB], tl.float32)
        for i in range(CHUNK):
            own = (row == i)[:, None]
            weight = tl.sum(tl.where(own, among, 0.0), axis=0)  # row i: all others are zeros
            mine = tl.sum(tl.where(own, wanted, 0.0), axis=0)
            known = tree_sum(tl.trans(weight[:, None] * change), PB, CHUNK)
            change = tl.where(own, (mine - known)[None, :], change)
        out = left * seen + tl.dot(ratio * between, change, input_precision="ieee")
        to = (token.to(tl.int64)[:, None] * n_heads + head) * P + p[None, :]
        tl.store(y + to, out, mask=((token >= start) & there)[:, None] & inside)
        if first + CHUNK <= stop:
            last = tl.sum(tl.where(row == CHUNK - 1, total, 0.0), axis=0)
            faded = tl.exp(last - total)[:, None] * change
            for i in range(0, K, KB):
                key = _rows(k, kept_k, token, row, start, stop, k_stride, n_keys, i + n, K, CHUNK)
                state = tl.load(at + i * P, mask=(i + n < n_there)[:, None] & inside, other=0)
                state = tl.dot(tl.trans(key), faded, tl.exp(last) * state, input_precision="ieee")
                tl.store(at + i * P, state, mask=(i + n < K)[:, None] & inside)
            n_there = n_there * 0 + K
            tl.debug_barrier()  # threads read what others have written
