"""Triton kernels for causal attention over a paged KV cache, laid out as `rope_kernels.py` writes it.

FlashAttention-2's scheme (Dao 2023): tiles of keys, a running maximum and sum, float16 products with float32
sums. What is added here is a fixed order: keys are taken in chunks of CHUNK tokens at multiples of CHUNK in
absolute position,
tiles of TILE inside them; a chunk begins anew and is merged into what came before it. Masked
keys, tiles and chunks change no bit of a row, so it does not matter which rows share a tile,
how a prompt was cut
into steps, or whether one program walks over the chunks (`attention`, `decode`) or each chunk has its own
(`split`, `merge`). Decode rotates a sequence's new token and stores it, as rope_kernels.py does, by itself.

A tile of queries has BM rows: BM // GROUP tokens of one sequence, each with the GROUP heads that share keys.
Scores are in units of log 2: `scale` is the layer's scale times log2(e).
"""

import triton
import triton.language as tl

from kukri.kernels.gpu.bits import tree_sum
from kukri.kernels.gpu.rope_kernels import PAGE, rotated, store_head

CHUNK = tl.constexpr(256)
_NO_SCORE = tl.constexpr(-1e30)  # finite, so that differences stay defined
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_tile(data, scales, table, token, inside, page_stride, scale_page_stride, dim,
               K: tl.constexpr, KV8: tl.constexpr):  # fmt: skip
    """float16 [TILE, KW]: keys or values of the tokens, zeros for those outside."""
    page = tl.load(table + token // PAGE, mask=inside, other=0).to(tl.int64)
    mask = inside[:, None] & (dim < K)[None, :]
    x = tl.load(data + (page * page_stride + (token % PAGE) * K)[:, None] + dim[None, :], mask=mask, other=0)
    if KV8:
        TILE: tl.constexpr = x.shape[0]
        KW: tl.constexpr = x.shape[1]
        block = tl.arange(0, KW // 32)
        at = (page * scale_page_stride + (token % PAGE) * (K // 32))[:, None] + block[None, :]
        scale = tl.load(scales + at, mask=inside[:, None] & (block < K // 32)[None, :], other=0).to(
            tl.float32
        )
        x = tl.reshape(x.to(tl.float32), [TILE, KW // 32, 32]) * scale[:, :, None]
        x = tl.reshape(x, [TILE, KW]).to(tl.float16)
    return x


@triton.jit
def _attend(
    q, keys, values, key_scales, value_scales, table, first, stop, begin, end, scale, softcap, page_stride,
    scale_page_stride, dim, K: tl.constexpr, KW: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr,
    KV8: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """(maximum, sum, weighted values) of q [BM, KW] over tokens first … stop - 1 of one chunk.

    Row i sees the tokens begin[i] … end[i] - 1.
    """
    top = tl.full([BM], _NO_SCORE, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, KW], tl.float32)
    for start in range(first, stop, TILE):
        token = start + tl.arange(0, TILE)
        inside = token < stop
        k = _load_tile(keys, key_scales, table, token, inside, page_stride, scale_page_stride, dim, K, KV8)
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
        v = _load_tile(
            values, value_scales, table, token, inside, page_stride, scale_page_stride, dim, K, KV8
        )
        total = tl.fma(total, shrink, tree_sum(p, BM, TILE))
        acc = tl.dot(p.to(tl.float16), v, acc * shrink[:, None])
        top = new_top
    return top, total, acc


@triton.jit
def _merge(top, total, acc, top2, total2, acc2):
    """Merges the next chunk's (top, total, acc) into those of the chunks before it."""
    new = tl.maximum(top, top2)
    a, b = tl.exp2(top - new), tl.exp2(top2 - new)
    total = tl.fma(total, a, total2 * b)
    acc = tl.fma(acc, a[:, None] + acc * 0, acc2 * b[:, None])
    return new, total, acc


@triton.jit
def _query_rows(
    sequence, token0, group, query_start, context_len, window, GROUP: tl.constexpr, BM: tl.constexpr
):
    """Rows of a tile: token and head of each, which are in use, and the tokens that each sees."""
    row = tl.arange(0, BM)
    stop = tl.load(query_start + sequence + 1)
    context = tl.load(context_len + sequence)
    token = token0 + row // GROUP
    ok = (token < stop) & (row < BM // GROUP * GROUP)
    end = tl.where(ok, context - (stop - 1 - token), 0)
    begin = tl.maximum(end - window, 0)
    return token.to(tl.int64), group * GROUP + row % GROUP, ok, begin, end


@triton.jit
def attention(
    q, keys, values, key_scales, value_scales, out, query_start, context_len, page_table, work, scale,
    softcap, window,
    page_stride, head_stride, scale_page_stride, scale_head_stride, table_stride, n_heads,
    GROUP: tl.constexpr, K: tl.constexpr, KW: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr,
    KV8: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Prefill: program (tile, KV head) walks over all chunks that its rows see; the step's keys are stored.

    `work` int32 [tiles, 2]: sequence and first token (in T) of each tile. `window` in tokens, 2^30 for none.
    q float16 [T, H, K] -> out float32 [T, H, K].
    """
    sequence = tl.load(work + 2 * tl.program_id(0))
    token0 = tl.load(work + 2 * tl.program_id(0) + 1)
    group = tl.program_id(1)
    token, head, ok, begin, end = _query_rows(
        sequence, token0, group, query_start, context_len, window, GROUP, BM
    )
    dim = tl.arange(0, KW)
    at = (token * n_heads + head)[:, None] * K + dim[None, :]
    q_mask = ok[:, None] & (dim < K)[None, :]
    qs = tl.load(q + at, mask=q_mask, other=0)
    stop = tl.max(end, axis=0)
    first = tl.min(tl.where(ok, begin, stop), axis=0) // CHUNK * CHUNK
    top = tl.full([BM], _NO_SCORE, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, KW], tl.float32)
    for chunk in range(first, stop, CHUNK):
        top2, total2, acc2 = _attend(
            qs, keys + group * head_stride, values + group * head_stride,
            key_scales + group * scale_head_stride,
            value_scales + group * scale_head_stride, page_table + sequence.to(tl.int64) * table_stride,
            chunk,
            tl.minimum(chunk + CHUNK, stop), begin, end, scale, softcap, page_stride, scale_page_stride, dim,
            K, KW, BM, TILE, KV8, SOFTCAP,
        )  # fmt: skip
        top, total, acc = _merge(top, total, acc, top2, total2, acc2)
    tl.store(out + at, acc / tl.where(total == 0, 1.0, total)[:, None], mask=q_mask)


@triton.jit
def _new_token(
    q, k, v, cos, sin, positions, slots, keys, values, key_scales, value_scales, token0, group, stores,
    q_stride, k_stride, v_stride, page_stride, head_stride, scale_page_stride,
    scale_head_stride,
    GROUP: tl.constexpr, K: tl.constexpr, KW: tl.constexpr, BM: tl.constexpr, ROTARY: tl.constexpr,
    KV8: tl.constexpr,
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
            scale_head_stride, dim, K, KW, KV8,
        )  # fmt: skip
        store_head(
            new_v, values, value_scales, slot, group, page_stride, head_stride, scale_page_stride,
            scale_head_stride, dim, K, KW, KV8,
        )  # fmt: skip
    tl.debug_barrier()  # other threads of the program read the key and the value
    head = tl.arange(0, BM)[:, None]
    source = q + row * q_stride + group * (GROUP * K) + head * K
    mask = (head < GROUP) & (dim < K)[None, :]
    return rotated(source, dim[None, :], mask, cos, sin, position, ROTARY, ROTARY).to(tl.float16)


@triton.jit
def decode(
    q, k, v, cos, sin, positions, slots, keys, values, key_scales, value_scales, out, query_start,
    context_len, page_table, scale, softcap, window, q_stride, k_stride, v_stride,
    page_stride, head_stride, scale_page_stride, scale_head_stride, table_stride, n_heads,
    GROUP: tl.constexpr, K: tl.constexpr, KW: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr,
    ROTARY: tl.constexpr, KV8: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One new token a sequence in one pass: program (sequence, KV head) rotates, stores and attends.

    q, k and v are float32, a row for each token. Results are those of `rope_and_store` and `attention`.
    """
    sequence, group = tl.program_id(0), tl.program_id(1)
    token0 = tl.load(query_start + sequence + 1) - 1
    _token, _head, ok, begin, end = _query_rows(
        sequence, token0, group, query_start, context_len, window, GROUP, BM
    )
    qs = _new_token(
        q, k, v, cos, sin, positions, slots, keys, values, key_scales, value_scales, token0, group, True,
        q_stride, k_stride, v_stride, page_stride, head_stride, scale_page_stride, scale_head_stride, GROUP,
        K, KW, BM, ROTARY, KV8,
    )  # fmt: skip
    dim = tl.arange(0, KW)
    stop = tl.max(end, axis=0)
    first = tl.min(tl.where(ok, begin, stop), axis=0) // CHUNK * CHUNK
    top = tl.full([BM], _NO_SCORE, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, KW], tl.float32)
    for chunk in range(first, stop, CHUNK):
        top2, total2, acc2 = _attend(
            qs, keys + group * head_stride, values + group * head_stride,
            key_scales + group * scale_head_stride,
            value_scales + group * scale_head_stride, page_table + sequence.to(tl.int64) * table_stride,
            chunk,
            tl.minimum(chunk + CHUNK, stop), begin, end, scale, softcap, page_stride, scale_page_stride, dim,
            K, KW, BM, TILE, KV8, SOFTCAP,
        )  # fmt: skip
        top, total, acc = _merge(top, total, acc, top2, total2, acc2)
    row = tl.arange(0, BM)[:, None]
    at = (token0.to(tl.int64) * n_heads + group * GROUP) * K + row * K + dim[None, :]
    mask = (row < GROUP) & (dim < K)[None, :]
    tl.store(out + at, acc / tl.where(total == 0, 1.0, total)[:, None], mask=mask)


@triton.jit
def split(
    q, k, v, cos, sin, positions, slots, keys, values, key_scales, value_scales, part_acc, part_top,
    query_start, context_len, page_table, scale, softcap, window, q_stride, k_stride, v_stride,
    page_stride, head_stride, scale_page_stride, scale_head_stride, table_stride, n_heads, n_chunks,
    GROUP: tl.constexpr, K: tl.constexpr, KW: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr,
    ROTARY: tl.constexpr, KV8: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The same for long contexts: program (sequence, KV head, chunk) stores its chunk's part.

    That of the last chunk stores the new token. part_acc float32 [S, H, n_chunks, K]; part_top [S, H,
    n_chunks, 2] has maximum and sum.
    """
    sequence, group, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token0 = tl.load(query_start + sequence + 1) - 1
    _token, head, ok, begin, end = _query_rows(
        sequence, token0, group, query_start, context_len, window, GROUP, BM
    )
    stop, first = tl.max(end, axis=0), tl.min(tl.where(ok, begin, 2147483647), axis=0)
    if (chunk * CHUNK < stop) & (chunk * CHUNK + CHUNK > first):
        dim = tl.arange(0, KW)
        qs = _new_token(
            q, k, v, cos, sin, positions, slots, keys, values, key_scales, value_scales, token0, group,
            chunk == (stop - 1) // CHUNK, q_stride, k_stride, v_stride, page_stride, head_stride,
            scale_page_stride, scale_head_stride, GROUP, K, KW, BM, ROTARY, KV8,
        )  # fmt: skip
        top, total, acc = _attend(
            qs, keys + group * head_stride, values + group * head_stride,
            key_scales + group * scale_head_stride,
            value_scales + group * scale_head_stride, page_table + sequence.to(tl.int64) * table_stride,
            chunk * CHUNK,
            tl.minimum(chunk * CHUNK + CHUNK, stop), begin, end, scale, softcap, page_stride,
            scale_page_stride, dim,
            K, KW, BM, TILE, KV8, SOFTCAP,
        )  # fmt: skip
        at = (sequence.to(tl.int64) * n_heads + head) * n_chunks + chunk
        tl.store(part_acc + at[:, None] * K + dim[None, :], acc, mask=ok[:, None] & (dim < K)[None, :])
        tl.store(part_top + 2 * at, top, mask=ok)
        tl.store(part_top + 2 * at + 1, total, mask=ok)


@triton.jit
def merge(
    part_acc, part_top, out, query_start, context_len, window, n_heads, n_chunks,
    K: tl.constexpr, KW: tl.constexpr, HB: tl.constexpr,
):  # fmt: skip
    """Merges the parts of a sequence's chunks in order, HB heads a program."""
    sequence = tl.program_id(0)
    head = tl.program_id(1) * HB + tl.arange(0, HB)
    dim = tl.arange(0, KW)
    mask = (head < n_heads)[:, None] & (dim < K)[None, :]
    end = tl.load(context_len + sequence)
    token = tl.load(query_start + sequence + 1).to(tl.int64) - 1
    top = tl.full([HB], _NO_SCORE, tl.float32)
    total = tl.zeros([HB], tl.float32)
    acc = tl.zeros([HB, KW], tl.float32)
    for chunk in range(tl.maximum(end - window, 0) // CHUNK, (end + CHUNK - 1) // CHUNK):
        at = (sequence.to(tl.int64) * n_heads + head) * n_chunks + chunk
        acc2 = tl.load(part_acc + at[:, None] * K + dim[None, :], mask=mask, other=0)
        top2 = tl.load(part_top + 2 * at, mask=head < n_heads, other=0)
        total2 = tl.load(part_top + 2 * at + 1, mask=head < n_heads, other=0)
        top, total, acc = _merge(top, total, acc, top2, total2, acc2)
    at = (token * n_heads + head)[:, None] * K + dim[None, :]
    tl.store(out + at, acc / tl.where(total == 0, 1.0, total)[:, None], mask=mask)
