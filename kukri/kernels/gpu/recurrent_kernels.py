"""Triton kernels of recurrent layers: a causal convolution, a state space, the gated delta rule.

A program has one sequence of the step and some columns, and takes the sequence's tokens one after another,
as no column needs another's state: so a result depends on nothing but its own sequence, and chunks change no
bit. States are float32, in the slots of `state_slots`; a sequence whose tokens are all in the step begins
with zeros. After token t the state is copied to slot `state_saves[t]`, if that is not -1. Sums are trees.
"""

import triton
import triton.language as tl

from kukri.kernels.gpu.bits import sigmoid, tree_sum
from kukri.kernels.gpu.overlap import await_inputs


@triton.jit
def _sequence(query_start, context_len, state_slots):
    """First and last + 1 token of this program's sequence, its slot, and whether it continues from there."""
    sequence = tl.program_id(0)
    start, stop = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    has_past = tl.load(context_len + sequence) > stop - start
    return start, stop, tl.load(state_slots + sequence).to(tl.int64), has_past


@triton.jit
def _softplus(x):
    """log(1 + exp(x))."""
    e = tl.exp(-tl.abs(x))
    return tl.maximum(x, 0.0) + tl.where(e < 1e-3, e - 0.5 * e * e, tl.log(1.0 + e))


@triton.jit
def conv(
    x, taps, bias, states, y, query_start, context_len, state_slots, state_saves, x_stride, width,
    N_TAPS: tl.constexpr, TOKENS: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_ACTIVATED: tl.constexpr,
):  # fmt: skip
    """Each of W columns times the taps [N_TAPS, width] of it and the inputs before it; TOKENS at a time.

    x [T, width], rows `x_stride` apart -> y [T, width]. States [slots, N_TAPS - 1, width] have the last
    inputs, the oldest first.
    """
    await_inputs()
    start, stop, slot, has_past = _sequence(query_start, context_len, state_slots)
    column = tl.program_id(1) * W + tl.arange(0, W)
    inside = (column < width)[None, :]
    N_BEFORE: tl.constexpr = N_TAPS - 1
    past = states + slot * (N_BEFORE * width)
    kept = tl.where(has_past, N_BEFORE, 0)  # inputs that the state has
    for first in range(start, stop, TOKENS):
        token = first + tl.arange(0, TOKENS)
        ok = (token < stop)[:, None] & inside
        save = tl.load(state_saves + token, mask=token < stop, other=-1).to(tl.int64)
        total = tl.zeros([TOKENS, W], tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + column, mask=column < width, other=0)[None, :]
        for i in tl.static_range(N_TAPS):
            seen = _inputs(
                x, past, token - (N_BEFORE - i), start, kept, ok, column, x_stride, width, N_BEFORE
            )
            total += tl.load(taps + i * width + column, mask=column < width, other=0)[None, :] * seen
            if i > 0:  # the inputs that the next token sees before its own
                target = states + (save * N_BEFORE + (i - 1))[:, None] * width + column[None, :]
                tl.store(target, seen, mask=ok & (save >= 0)[:, None])
        if IS_ACTIVATED:
            total = total * sigmoid(total)
        tl.store(y + token.to(tl.int64)[:, None] * width + column[None, :], total, mask=ok)
    # what is stored last is read before any of it is written
    back = tl.arange(0, 16)
    last = _inputs(
        x, past, stop - N_BEFORE + back, start, kept, (back < N_BEFORE)[:, None] & inside, column, x_stride,
        width, N_BEFORE,
    )  # fmt: skip
    tl.debug_barrier()
    tl.store(past + back[:, None] * width + column[None, :], last, mask=(back < N_BEFORE)[:, None] & inside)


@triton.jit
def _inputs(x, past, token, start, kept, ok, column, x_stride, width, N_BEFORE: tl.constexpr):
    """Inputs float32 [tokens, W] of tokens: from x, before `start` from the state, before that zeros."""
    is_new = token >= start
    at = tl.where(is_new, token, 0).to(tl.int64)[:, None] * x_stride + column[None, :]
    new = tl.load(x + at, mask=ok & is_new[:, None], other=0)
    row = token - start + N_BEFORE
    is_kept = ~is_new & (row >= 0) & (row >= N_BEFORE - kept)
    old = tl.load(past + row[:, None] * width + column[None, :], mask=ok & is_kept[:, None], other=0)
    return tl.where(is_new[:, None], new, old)


@triton.jit
def scan(
    x, b, c, dt, a, d, dt_bias, states, y, query_start, context_len, state_slots, state_saves,
    x_stride, b_stride, c_stride, dt_stride, least, most, n_heads, group,
    N: tl.constexpr, NW: tl.constexpr, P: tl.constexpr, PB: tl.constexpr,
):  # fmt: skip
    """PB columns of one head: S = exp(a dt) S + dt b xT, y = cT S + d x, token by token.

    x [T, H*P], b and c [T, G*N], dt [T, H], rows strides apart -> y [T, H*P]. `group` heads share b and c. A
    program keeps S transposed, [PB, NW]; states [slots, H, N, P] are as the reference has them.
    """
    await_inputs()
    start, stop, slot, has_past = _sequence(query_start, context_len, state_slots)
    head = tl.program_id(1)
    p, n = tl.program_id(2) * PB + tl.arange(0, PB), tl.arange(0, NW)
    at = head * N * P + n[None, :] * P + p[:, None]
    mask = (p < P)[:, None] & (n < N)[None, :]
    state = tl.load(
        states + slot * n_heads * (N * P) + at, mask=mask & (p < tl.where(has_past, P, 0))[:, None], other=0
    )
    rate, skip, shift = tl.load(a + head), tl.load(d + head), tl.load(dt_bias + head)
    row = start.to(tl.int64)
    for _token in range(start, stop):
        step = _softplus(tl.load(dt + row * dt_stride + head) + shift)
        step = tl.minimum(tl.maximum(step, least), most)
        value = tl.load(x + row * x_stride + head * P + p, mask=p < P, other=0)
        write = tl.load(b + row * b_stride + head // group * N + n, mask=n < N, other=0)
        read = tl.load(c + row * c_stride + head // group * N + n, mask=n < N, other=0)
        state = state * tl.exp(step * rate) + (step * write)[None, :] * value[:, None]
        out = skip * value + tree_sum(read[None, :] * state, PB, NW)
        tl.store(y + (row * n_heads + head) * P + p, out, mask=p < P)
        save = tl.load(state_saves + row).to(tl.int64)
        tl.store(
            states + save * n_heads * (N * P) + at,
            state,
            mask=mask & (p < tl.where(save >= 0, P, 0))[:, None],
        )
        row += 1
    tl.store(states + slot * n_heads * (N * P) + at, state, mask=mask)


@triton.jit
def delta_rule(
    q, k, v, decay, beta, a, dt_bias, states, y, query_start, context_len, state_slots, state_saves,
    q_stride, k_stride, v_stride, decay_stride, beta_stride, n_heads, n_groups,
    K: tl.constexpr, KW: tl.constexpr, P: tl.constexpr, PB: tl.constexpr, ARE_TILED: tl.constexpr,
):  # fmt: skip
    """PB columns of one head: S = exp(a softplus(decay + dt_bias)) S; S += k (sigmoid(beta) (v - kT S));
    y = qT S, token by token.

    q and k [T, G*K], v [T, H*P], decay and beta [T, H] -> y [T, H*P]; S as in `scan`.
    """
    await_inputs()
    start, stop, slot, has_past = _sequence(query_start, context_len, state_slots)
    head = tl.program_id(1)
    key_head = head % n_groups if ARE_TILED else head // (n_heads // n_groups)
    p, n = tl.program_id(2) * PB + tl.arange(0, PB), tl.arange(0, KW)
    at = head * K * P + n[None, :] * P + p[:, None]
    mask = (p < P)[:, None] & (n < K)[None, :]
    state = tl.load(
        states + slot * n_heads * (K * P) + at, mask=mask & (p < tl.where(has_past, P, 0))[:, None], other=0
    )
    rate, shift = tl.load(a + head), tl.load(dt_bias + head)
    row = start.to(tl.int64)
    for _token in range(start, stop):
        kept = tl.exp(_softplus(tl.load(decay + row * decay_stride + head) + shift) * rate)
        key = tl.load(k + row * k_stride + key_head * K + n, mask=n < K, other=0)[None, :]
        query = tl.load(q + row * q_stride + key_head * K + n, mask=n < K, other=0)[None, :]
        value = tl.load(v + row * v_stride + head * P + p, mask=p < P, other=0)
        state = state * kept
        found = tree_sum(key * state, PB, KW)
        change = sigmoid(tl.load(beta + row * beta_stride + head)) * (value - found)
        state += key * change[:, None]
        tl.store(y + (row * n_heads + head) * P + p, tree_sum(query * state, PB, KW), mask=p < P)
        save = tl.load(state_saves + row).to(tl.int64)
        tl.store(
            states + save * n_heads * (K * P) + at,
            state,
            mask=mask & (p < tl.where(save >= 0, P, 0))[:, None],
        )
        row += 1
    tl.store(states + slot * n_heads * (K * P) + at, state, mask=mask)
