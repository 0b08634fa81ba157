"""Triton kernels for causal attention over a paged KV cache, laid out as `kv_types.py` writes it.

FlashAttention-2's scheme (Dao 2023): tiles of keys, a running maximum and sum, float16 products with float32
sums. What is added here is a fixed order: keys are taken in chunks of CHUNK tokens at multiples of CHUNK in
absolute position, tiles of TILE inside them; each chunk starts from zero and is merged into those before it,
and a head's sink after the last. Masked keys, tiles and chunks change no bit of a row, so it does not matter
which rows share a tile, how a prompt was cut into steps, or whether one program walks over the chunks or each
chunk has its own (`decode` with SPLIT, and `merge`). Decode rotates a sequence's new token and stores it, as
rope_kernels.py does, by itself.

A tile of queries has BM rows: BM // GROUP tokens of one sequence, each with the GROUP heads that share keys.
Scores are in units of log 2: `scale` is the layer's scale times log2(e). KV says what the cache holds.
"""

import triton
import triton.language as tl

from kukri.kernels.gpu.bits import tree_sum
from kukri.kernels.gpu.kv_types import load_tile, store_head
from kukri.kernels.gpu.overlap import await_inputs
from kukri.kernels.gpu.rope_kernels import rotated

CHUNK = tl.constexpr(256)
_IS_OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
_NO_SCORE = tl.constexpr(-1e30)  # finite, so that differences stay defined
_LOG2E = tl.constexpr(1.4426950408889634)


def max_registers(kv: str, d_head: int, is_prefill: bool) -> int | None:
    """Registers of a thread to ask for: the assembler spills some bytes to fit more programs, unless told not
    to, before Triton 3.9 everywhere.
    """
    if _IS_OLD or (d_head > 128 and not is_prefill):
        return 255
    return 128 if kv == "f16" and d_head <= 64 and not is_prefill else None


@triton.jit
def _of_head(data, scales, group, page_stride, head_stride, scale_page_stride, scale_head_stride):
    """A KV head's numbers and scales, and the strides between their pages."""
    return data + group * head_stride, scales + group * scale_head_stride, page_stride, scale_page_stride


@triton.jit
def _attend(
    q, keys, values, table, first, stop, begin, end, lowest, scale, softcap, dim, K: tl.constexpr,
    KW: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr, KV: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """(maximum, sum, weighted values) of q [BM, KW] over tokens first … stop - 1 of one chunk.

    Row i sees the tokens begin[i] … end[i] - 1. No row sees one before `lowest`, whose page may be anything.
    """
    top = tl.full([BM], _NO_SCORE, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, KW], tl.float32)
    for start in range(first, stop, TILE):
        token = start + tl.arange(0, TILE)
        # clamped, not masked: a mask takes registers, and then the compiler spills
        read = tl.minimum(tl.maximum(token, lowest), stop - 1)
        k = load_tile(keys, table, read, dim, K, KV)
        scores = tl.dot(q, tl.trans(k)) * scale
        if SOFTCAP:
            # softcap * tanh(score / softcap), the score in units of log 2
            x = tl.exp2(scores * (2.0 / softcap))
            scores = softcap * _LOG2E * (1.0 - 2.0 / (x + 1.0))
        sees = (token[None, :] >= begin[:, None]) & (token[None, :] < end[:, None])
        scores = tl.where(sees, scores, _NO_SCORE)
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        p = tl.where(sees, tl.exp2(scores - new_top[:, None]), 0.0)
        shrink = tl.exp2(top - new_top)
        v = load_tile(values, table, read, dim, K, KV)
        total = tl.fma(total, shrink, tree_sum(p, BM, TILE))
        acc = tl.dot(p.to(tl.float16), v, acc * shrink[:, None])
        top = new_top
    return top, total, acc


@triton.jit
def _merge(top, total, acc, top2, total2, acc2):
    """Merges the next chunk's (top, total, acc) into the results of the chunks before it."""
    new = tl.maximum(top, top2)
    a, b = tl.exp2(top - new), tl.exp2(top2 - new)
    total = tl.fma(total, a, total2 * b)
    acc = tl.fma(acc, a[:, None] + acc * 0, acc2 * b[:, None])
    return new, total, acc


@triton.jit
def _walk(
    q, keys, values, table, first, stop, begin, end, scale, softcap, dim, K: tl.constexpr, KW: tl.constexpr,
    BM: tl.constexpr, TILE: tl.constexpr, KV: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """`_attend` over all chunks from the chunk of token `first` to `stop`, merged in order."""
    top = tl.full([BM], _NO_SCORE, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, KW], tl.float32)
    for chunk in range(first // CHUNK * CHUNK, stop, CHUNK):
        top2, total2, acc2 = _attend(
            q, keys, values, table, chunk, tl.minimum(chunk + CHUNK, stop), begin, end, first, scale, softcap,
            dim, K, KW, BM, TILE, KV, SOFTCAP,
        )  # fmt: skip
        top, total, acc = _merge(top, total, acc, top2, total2, acc2)
    return top, total, acc


@triton.jit
def _weighted_mean(top, total, acc, sinks, head, ok, HAS_SINKS: tl.constexpr):
    """acc / total after the heads' sinks, a score without a value; zeros for a row that saw nothing."""
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=ok, other=0) * _LOG2E
        top, total, acc = _merge(top, total, acc, sink, tl.full(sink.shape, 1.0, tl.float32), acc * 0)
    return acc / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit
def _query_rows(
    sequence, token0, group, query_start, context_len, window, GROUP: tl.constexpr, BM: tl.constexpr
):
    """Rows of a tile: token and head of each, which are in use, the tokens that each sees, and the first and
    the end of what all see.
    """
    row = tl.arange(0, BM)
    stop = tl.load(query_start + sequence + 1)
    context = tl.load(context_len + sequence)
    token = token0 + row // GROUP
    ok = (token < stop) & (row < BM // GROUP * GROUP)
    end = tl.where(ok, context - (stop - 1 - token), 0)
    begin = tl.maximum(end - window, 0)
    last = tl.max(end, axis=0)
    first = tl.min(tl.where(ok, begin, last), axis=0)
    return token.to(tl.int64), group * GROUP + row % GROUP, ok, begin, end, first, last


@triton.jit
def attention(
    q, keys, values, key_scales, value_scales, sinks, out, query_start, context_len, page_table, work, scale,
    softcap, window,
    page_stride, head_stride, scale_page_stride, scale_head_stride, table_stride, n_heads,
    GROUP: tl.constexpr, K: tl.constexpr, KW: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr,
    KV: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Prefill: program (tile, KV head) walks over all chunks that its rows see; the step's keys are stored.

    `work` int32 [tiles, 2]: sequence and first token (in T) of each tile. `window` in tokens, 2^30 for none.
    q float16 [T, H, K] -> out float32 [T, H, K].
    """
    await_inputs()
    sequence = tl.load(work + 2 * tl.program_id(0))
    token0 = tl.load(work + 2 * tl.program_id(0) + 1)
    group = tl.program_id(1)
    token, head, ok, begin, end, first, stop = _query_rows(
        sequence, token0, group, query_start, context_len, window, GROUP, BM
    )
    dim = tl.arange(0, KW)
    at = (token * n_heads + head)[:, None] * K + dim[None, :]
    mask = ok[:, None] & (dim < K)[None, :]
    k = _of_head(keys, key_scales, group, page_stride, head_stride, scale_page_stride, scale_head_stride)
    v = _of_head(values, value_scales, group, page_stride, head_stride, scale_page_stride, scale_head_stride)
    top, total, acc = _walk(
        tl.load(q + at, mask=mask, other=0), k, v, page_table + sequence.to(tl.int64) * table_stride, first,
        stop, begin, end, scale, softcap, dim, K, KW, BM, TILE, KV, SOFTCAP,
    )  # fmt: skip
    tl.store(out + at, _weighted_mean(top, total, acc, sinks, head, ok, HAS_SINKS), mask=mask)


@triton.jit
def _new_token(
    q, k, v, cos, sin, positions, slots, keys, values, key_scales, value_scales, token0, group, stores,
    q_stride, k_stride, v_stride, page_stride, head_stride, scale_page_stride,
    scale_head_stride,
    GROUP: tl.constexpr, K: tl.constexpr, KW: tl.constexpr, BM: tl.constexpr, ROTARY: tl.constexpr,
    KV: tl.constexpr,
):  # fmt: skip
    """Stores the key and the value of a sequence's new token, if `stores`, and gives its queries, rotated:
    float16 [BM, KW].
    """
    dim, row = tl.arange(0, KW), token0.to(tl.int64)
    position = tl.load(positions + token0).to(tl.int64)
    if stores:
        slot = tl.load(slots + token0)
        new_k = rotated(k + row * k_stride + group * K, dim, dim < K, cos, sin, position, ROTARY, ROTARY)
        new_v = tl.load(v + row * v_stride + group * K + dim, mask=dim < K, other=0)
        store_head(
            new_k, keys, key_scales, slot, group, page_stride, head_stride, scale_page_stride,
            scale_head_stride, dim, K, KW, KV,
        )  # fmt: skip
        store_head(
            new_v, values, value_scales, slot, group, page_stride, head_stride, scale_page_stride,
            scale_head_stride, dim, K, KW, KV,
        )  # fmt: skip
    tl.debug_barrier()  # other threads of the program read the key and the value
    head = tl.arange(0, BM)[:, None]
    source = q + row * q_stride + group * (GROUP * K) + head * K
    mask = (head < GROUP) & (dim < K)[None, :]
    return rotated(source, dim[None, :], mask, cos, sin, position, ROTARY, ROTARY).to(tl.float16)


@triton.jit
def decode_head(
    sequence, group, chunk,
    q, k, v, cos, sin, positions, slots, keys, values, key_scales, value_scales, sinks, out, part_top,
    query_start, context_len, page_table, scale, softcap, window, q_stride, k_stride, v_stride,
    page_stride, head_stride, scale_page_stride, scale_head_stride, table_stride, n_heads, n_chunks,
    GROUP: tl.constexpr, K: tl.constexpr, KW: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr,
    ROTARY: tl.constexpr, KV: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    SPLIT: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    """A program's work in `decode`: one KV head of one sequence, all chunks or one of them."""
    token0 = tl.load(query_start + sequence + 1) - 1
    token, head, ok, begin, end, first, stop = _query_rows(
        sequence, token0, group, query_start, context_len, window, GROUP, BM
    )
    stores = STORES
    if SPLIT:
        if STORES:
            stores = chunk == (stop - 1) // CHUNK
        first, stop = tl.maximum(first, chunk * CHUNK), tl.minimum(stop, chunk * CHUNK + CHUNK)
    if first < stop:  # the sequence sees this chunk
        qs = _new_token(
            q, k, v, cos, sin, positions, slots, keys, values, key_scales, value_scales, token0, group,
            stores, q_stride, k_stride, v_stride, page_stride, head_stride, scale_page_stride,
            scale_head_stride, GROUP, K, KW, BM, ROTARY, KV,
        )  # fmt: skip
        dim = tl.arange(0, KW)
        ks = _of_head(keys, key_scales, group, page_stride, head_stride, scale_page_stride, scale_head_stride)
        vs = _of_head(
            values, value_scales, group, page_stride, head_stride, scale_page_stride, scale_head_stride
        )
        top, total, acc = _walk(
            qs, ks, vs, page_table + sequence.to(tl.int64) * table_stride, first, stop, begin, end, scale,
            softcap, dim, K, KW, BM, TILE, KV, SOFTCAP,
        )  # fmt: skip
        mask = ok[:, None] & (dim < K)[None, :]
        if SPLIT:
            at = (sequence.to(tl.int64) * n_heads + head) * n_chunks + chunk
            tl.store(out + at[:, None] * K + dim[None, :], acc, mask=mask)
            tl.store(part_top + 2 * at, top, mask=ok)
            tl.store(part_top + 2 * at + 1, total, mask=ok)
        else:
            mean = _weighted_mean(top, total, acc, sinks, head, ok, HAS_SINKS)
            tl.store(out + (token * n_heads + head)[:, None] * K + dim[None, :], mean, mask=mask)


@triton.jit
def decode(
    q, k, v, cos, sin, positions, slots, keys, values, key_scales, value_scales, sinks, out, part_top,
    query_start, context_len, page_table, scale, softcap, window, q_stride, k_stride, v_stride,
    page_stride, head_stride, scale_page_stride, scale_head_stride, table_stride, n_heads, n_chunks,
    GROUP: tl.constexpr, K: tl.constexpr, KW: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr,
    ROTARY: tl.constexpr, KV: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    SPLIT: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    """One new token a sequence: program (sequence, KV head) rotates, stores and attends.

    q, k and v are float32, a row for each token; out is float32 [T, H, K]. Results are those of
    `rope_and_store` and `attention`. With SPLIT, for long contexts, program (sequence, KV head, chunk) stores
    its chunk's part: `out` is float32 [S, H, n_chunks, K] then, and part_top [S, H, n_chunks, 2] has maximum
    and sum; the program of the last chunk stores the new token.
    Without STORES none does: the layer reads another's keys and values.
    """
    await_inputs()
    decode_head(
        tl.program_id(0), tl.program_id(1), tl.program_id(2),
        q, k, v, cos, sin, positions, slots, keys, values, key_scales, value_scales, sinks, out, part_top,
        query_start, context_len, page_table, scale, softcap, window, q_stride, k_stride, v_stride,
        page_stride, head_stride, scale_page_stride, scale_head_stride, table_stride, n_heads, n_chunks,
        GROUP, K, KW, BM, TILE, ROTARY, KV, SOFTCAP, HAS_SINKS, SPLIT, STORES,
    )  # fmt: skip


@triton.jit
def merge(
    part_acc, part_top, sinks, out, query_start, context_len, window, n_heads, n_chunks,
    K: tl.constexpr, KW: tl.constexpr, HB: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merges the parts of a sequence's chunks in order, HB heads a program."""
    await_inputs()
    sequence = tl.program_id(0)
    head = tl.program_id(1) * HB + tl.arange(0, HB)
    dim = tl.arange(0, KW)
    ok = head < n_heads
    mask = ok[:, None] & (dim < K)[None, :]
    end = tl.load(context_len + sequence)
    token = tl.load(query_start + sequence + 1).to(tl.int64) - 1
    top = tl.full([HB], _NO_SCORE, tl.float32)
    total = tl.zeros([HB], tl.float32)
    acc = tl.zeros([HB, KW], tl.float32)
    for chunk in range(tl.maximum(end - window, 0) // CHUNK, (end + CHUNK - 1) // CHUNK):
        at = (sequence.to(tl.int64) * n_heads + head) * n_chunks + chunk
        acc2 = tl.load(part_acc + at[:, None] * K + dim[None, :], mask=mask, other=0)
        top2 = tl.load(part_top + 2 * at, mask=ok, other=0)
        total2 = tl.load(part_top + 2 * at + 1, mask=ok, other=0)
        top, total, acc = _merge(top, total, acc, top2, total2, acc2)
    at = (token * n_heads + head)[:, None] * K + dim[None, :]
    tl.store(out + at, _weighted_mean(top, total, acc, sinks, head, ok, HAS_SINKS), mask=mask)
