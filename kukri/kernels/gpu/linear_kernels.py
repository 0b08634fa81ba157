"""Triton kernels for products with quantized matrices: weights as `pack.py` lays them out, int8 activations.

One order of operations serves GEMV and GEMM, so that a row of activations gives the same bits in any batch:
products inside a block of 32 are integers, exact on every unit; a block is folded into a float32 sum by one
multiplication and one or two fused multiply-adds; a row has LANES = 8 sums,
pair p (two blocks) going to sum p mod 8
in order; the eight are added one after another, then come bias and residual.

Activations are int8 [T, n_pairs * 64]. For each 32 of them there are a float32 scale `xd`,
the sum of the 32 times
that scale `xm` (float32), and a word of two int16 sums of 16 `xs`, all [n_pairs * 2, T],
so that a tile of tokens
is one run of memory. Padding columns are zeros.
"""

import triton
import triton.language as tl

from kukri.kernels.gpu.bits import (
    dp4a,
    high_half,
    iq4_selectors,
    iq4_values,
    levels_of_bytes,
    low_half,
    tree_sum,
)
from kukri.kernels.gpu.overlap import await_inputs
from kukri.kernels.gpu.row_kernels import prepare_rows

LANES = tl.constexpr(8)
MAX_REGISTERS = 255  # per thread: left to itself the assembler spills some bytes of grouped products
_NIBBLES = tl.constexpr(0x0F0F0F0F)


@triton.jit
def _load_words(base, at, mask, N: tl.constexpr):
    """N words from base + at, as one wide load: […, N]."""
    return tl.load(base + tl.expand_dims(at, -1) + tl.arange(0, N), mask=tl.expand_dims(mask, -1), other=0)


@triton.jit
def _pick(words, i: tl.constexpr, N: tl.constexpr):
    """Word i of […, N]; a selection from registers."""
    return tl.sum(tl.where(tl.arange(0, N) == i, words, 0), axis=-1)


@triton.jit
def _scale_words(scales, row, pair, n_pairs, mask, TYPE: tl.constexpr):
    """The words of `scales` that a pair needs, three or fewer, in the shape of row, pair and mask."""
    of_256 = row * (n_pairs // 4) + pair // 4
    if TYPE.has_steps and TYPE.group == 16:
        a = tl.load(scales + of_256 * 5 + (pair & 3), mask=mask, other=0)
        b = tl.load(scales + of_256 * 5 + 4, mask=mask, other=0)
        return a, b, a
    elif TYPE.has_steps and TYPE.has_minimum:
        words = _load_words(scales, of_256 * 4, mask, 4)
        a, b, c, d = _pick(words, 0, 4), _pick(words, 1, 4), _pick(words, 2, 4), _pick(words, 3, 4)
        # scales and minimums of 4 groups a word, then this pair's in the low 16 bits
        first = (pair & 2) == 0
        s = tl.where(first, b & 0x3F3F3F3F, (d & _NIBBLES) | ((b >> 2) & 0x30303030))
        t = tl.where(first, c & 0x3F3F3F3F, ((d >> 4) & _NIBBLES) | ((c >> 2) & 0x30303030))
        shift = (pair & 1) * 16
        return a, s >> shift, t >> shift
    elif TYPE.has_steps:
        words = _load_words(scales, of_256 * 2, mask, 2)
        a, b = _pick(words, 0, 2), _pick(words, 1, 2)
        return a, b >> ((pair & 3) * 8), a >> (12 + (pair & 3) * 4)
    elif TYPE.has_powers:
        a = tl.load(scales + row * ((n_pairs + 1) // 2) + pair // 2, mask=mask, other=0) >> ((pair & 1) * 16)
        return a, a, a
    elif TYPE.has_minimum or TYPE.group == 16:
        words = _load_words(scales, (row * n_pairs + pair) * 2, mask, 2)
        a, b = _pick(words, 0, 2), _pick(words, 1, 2)
        return a, b, a
    else:
        at = row * (n_pairs // TYPE.pairs) + pair // TYPE.pairs
        a = tl.load(scales + at, mask=mask, other=0)
        return a, a, a


@triton.jit
def _block_scales(a, b, c, TYPE: tl.constexpr, C: tl.constexpr):
    """For block C of a pair: its scale, its minimum or the scale of its last half, and the steps of both
    halves, in whose upper 4 bits are the multiples of the minimum if there is one.

    Products of a float16 and a whole number of 6 bits are exact in float32.
    """
    if TYPE.has_steps and TYPE.group == 16:
        s0, s1 = (a << (24 - 16 * C)) >> 24, (a << (16 - 16 * C)) >> 24
        if TYPE.has_minimum:
            return low_half(b), -high_half(b), s0, s1
        else:
            d = b.to(tl.float32, bitcast=True)
            return d, d, s0, s1
    elif TYPE.has_steps and TYPE.has_minimum:
        s, t = ((b >> (8 * C)) & 63).to(tl.float32), ((c >> (8 * C)) & 63).to(tl.float32)
        return low_half(a) * s, -high_half(a) * t, a, a
    elif TYPE.has_steps:
        s = ((b >> (4 * C)) & 15 | (c >> (2 * C)) & 0x30) - 32
        d = low_half(a) * s.to(tl.float32)
        if TYPE.factor != 1:
            d = d * TYPE.factor
        return d, d, a, a
    elif TYPE.has_powers:
        exponent = (a >> (8 * C)) & 255
        d = tl.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23).to(tl.float32, bitcast=True)
        return d, d, a, a
    elif TYPE.has_minimum or TYPE.group == 16:
        w = a if C == 0 else b
        return low_half(w), high_half(w), w, w
    else:
        d = low_half(a) if C == 0 else high_half(a)
        return d, d * -TYPE.offset, a, a


@triton.jit
def _fold(acc, e0, e1, x_scale, x_min, x_sums, d, m, s0, s1, TYPE: tl.constexpr):
    """acc plus a block; e0 and e1 are the exact sums of its halves, e0 of the whole for types with a scale
    for 32 weights.

    Each integer that becomes a float is below 2^24, so it is not rounded.
    """
    if TYPE.has_steps and TYPE.group == 16:
        if TYPE.has_minimum:
            least = ((s0 >> 4) & 15) * ((x_sums << 16) >> 16) + ((s1 >> 4) & 15) * (x_sums >> 16)
            acc = tl.fma(least.to(tl.float32) * m, x_scale, acc)
            e0 = (s0 & 15) * e0 + (s1 & 15) * e1
        else:
            e0 = s0 * (e0 - TYPE.offset * ((x_sums << 16) >> 16)) + s1 * (e1 - TYPE.offset * (x_sums >> 16))
    acc = tl.fma(e0.to(tl.float32) * d, x_scale, acc)
    if TYPE.group == 16 and not TYPE.has_steps:
        acc = tl.fma(e1.to(tl.float32) * m, x_scale, acc)
    elif TYPE.group == 32 and (TYPE.has_minimum or TYPE.offset != 0):
        acc = tl.fma(m, x_min, acc)
    return acc


@triton.jit
def _finish(y, total, bias, residual, at, column, mask, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    """Stores total at y + at, with the bias at `column` and the residual at `at` added."""
    if HAS_BIAS:
        total += tl.load(bias + column, mask=mask, other=0)
    if HAS_RESIDUAL:
        total += tl.load(residual + at, mask=mask, other=0)
    tl.store(y + at, total, mask=mask)


@triton.jit
def _add_lanes(sums, lane):
    """sums [BN, LANES] -> [BN], added one after another; zeros around a lane pick it."""
    total = tl.sum(tl.where((lane == 0)[None, :], sums, 0.0), axis=1)
    for i in tl.static_range(1, LANES):
        total += tl.sum(tl.where((lane == i)[None, :], sums, 0.0), axis=1)
    return total


@triton.jit
def gemv(
    quants, high, scales, xq, xd, xm, xs, y, bias, residual, x, other, n_tokens, n_rows, n_pairs, y_stride,
    x_stride, width, a, b,
    TYPE: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, ASM: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, INPUT: tl.constexpr, W: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """y[t, n] = x[t] · W[n] for M tokens (a power of two) and BN rows a program; `xq` as int32 words.

    INPUT "q8": the int8 rows are there. Otherwise they are made first, from x, other, a and b (see
    `prepare_rows`), which saves a launch.
    """
    await_inputs()
    if INPUT != "q8":
        x8 = xq.to(tl.pointer_type(tl.int8))
        prepare_rows(x, other, x8, xd, xm, xs, n_tokens, x_stride, width, n_pairs * 64, a, b, INPUT, M, W)
    token0 = (tl.program_id(1) * M).to(tl.int64)
    gemv_rows(
        tl.program_id(0), token0, token0, 0, quants, high, scales, xq, xd, xm, xs, y, bias, residual,
        n_tokens, n_rows, n_pairs, y_stride, TYPE, M, BN, ASM, HAS_BIAS, HAS_RESIDUAL, UNROLL,
    )  # fmt: skip


@triton.jit
def gemv_of_experts(
    quants, high, scales, xq, xd, xm, xs, y, bias, experts, n_tokens, n_rows, n_pairs, y_stride, rows_each,
    TYPE: tl.constexpr, BN: tl.constexpr, ASM: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The same for rows of y that have an expert each, int32 `experts`, -1 for none: its matrix is one of
    those that lie one above the other, n_rows each. `rows_each` rows of y read one of the n_tokens rows of x.
    """
    await_inputs()
    row = tl.program_id(1).to(tl.int64)
    expert = tl.load(experts + row)
    if expert >= 0:
        gemv_rows(
            tl.program_id(0), row, row // rows_each, expert, quants, high, scales, xq, xd, xm, xs, y, bias, y,
            n_tokens, n_rows, n_pairs, y_stride, TYPE, 1, BN, ASM, HAS_BIAS, HAS_RESIDUAL, UNROLL,
        )  # fmt: skip


@triton.jit
def gemv_rows(
    block, y_row, token0, expert, quants, high, scales, xq, xd, xm, xs, y, bias, residual, n_tokens, n_rows,
    n_pairs, y_stride,
    TYPE: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, ASM: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Rows block * BN … of an expert's matrix (0 if there is one matrix) times tokens token0 … of x, written
    to rows y_row … of y.

    A thread has a pair: its weights come by 128-bit loads and stay in registers for all M tokens.
    UNROLL pairs are under way at once.
    """
    row = block * BN + tl.arange(0, BN)
    lane, word = tl.arange(0, LANES), tl.arange(0, 4)
    column = row + expert * n_rows
    row64 = column.to(tl.int64)[:, None]
    WORDS: tl.constexpr = 2 * TYPE.low
    if TYPE.n_levels == 16:
        t0, t1, t2, t3 = tl.load(high), tl.load(high + 1), tl.load(high + 2), tl.load(high + 3)
    q_row = quants + row64 * n_pairs * WORDS  # [BN, 1]
    sums = ()  # float32 [BN, LANES] for each token
    for _token in tl.static_range(M):
        sums = sums + (tl.zeros([BN, LANES], tl.float32),)  # noqa: RUF005
    for first in tl.range(0, n_pairs, LANES, loop_unroll_factor=UNROLL):
        pair = first + lane
        inside = pair < n_pairs
        mask = (row < n_rows)[:, None] & inside[None, :]  # [BN, LANES]
        at = row64 * n_pairs + pair[None, :]
        pq = (q_row + (pair * WORDS)[None, :])[:, :, None] + word
        if WORDS > 0:
            q0 = tl.load(pq, mask=mask[:, :, None], other=0)  # [BN, LANES, 4]
        if WORDS > 4:
            q1 = tl.load(pq + 4, mask=mask[:, :, None], other=0)
        if TYPE.low == 8:
            q2 = tl.load(pq + 8, mask=mask[:, :, None], other=0)
            q3 = tl.load(pq + 12, mask=mask[:, :, None], other=0)
        elif TYPE.n_levels == 16:
            q0, half0 = iq4_selectors(q0)
            q1, half1 = iq4_selectors(q1)
        a, b, c = _scale_words(scales, row64, pair[None, :], n_pairs, mask, TYPE)
        if TYPE.high > 0:
            top = _load_words(high, at * (2 * TYPE.high), mask, 2 * TYPE.high)
        for C in tl.static_range(2):
            if TYPE.low == 8:
                w0, w1 = (q0, q1) if C == 0 else (q2, q3)
            elif TYPE.n_levels == 16:
                w0 = iq4_values(q0, half0, t0, t1, t2, t3, C, ASM)
                w1 = iq4_values(q1, half1, t0, t1, t2, t3, C, ASM)
            elif TYPE.low == 4:
                w0, w1 = (q0 >> (4 * C)) & _NIBBLES, (q1 >> (4 * C)) & _NIBBLES
            elif TYPE.low == 2:
                w0, w1 = (q0 >> (4 * C)) & 0x03030303, (q0 >> (4 * C + 2)) & 0x03030303
            else:
                w0, w1 = tl.zeros([BN, LANES, 4], tl.int32), tl.zeros([BN, LANES, 4], tl.int32)
            if TYPE.high == 1:
                h = _pick(top, C, 2)[:, :, None]
                w0 |= (h >> (word + (4 - TYPE.left))) & (0x01010101 << TYPE.left)
                w1 |= ((h << (4 - word)) >> (4 - TYPE.left)) & (0x01010101 << TYPE.left)
            elif TYPE.high == 2:
                h0, h1 = _pick(top, 2 * C, 4)[:, :, None], _pick(top, 2 * C + 1, 4)[:, :, None]
                w0 |= tl.where(word < 2, h0 >> (2 * word), h0 << (8 - 2 * word)) & 0x30303030
                w1 |= tl.where(word < 2, h1 >> (2 * word), h1 << (8 - 2 * word)) & 0x30303030
            if TYPE.n_levels == 8:
                w0 = levels_of_bytes(w0, TYPE.levels[0], TYPE.levels[1], ASM)
                w1 = levels_of_bytes(w1, TYPE.levels[0], TYPE.levels[1], ASM)
            d, m, s0, s1 = _block_scales(a, b, c, TYPE, C)
            folded = ()
            for i in tl.static_range(M):
                x_at = (token0 + i) * n_pairs + pair
                x_mask = pair < tl.where(token0 + i < n_tokens, n_pairs, 0)
                px = (xq + x_at * 16 + 8 * C)[:, None] + word
                x0 = tl.load(px, mask=x_mask[:, None], other=0)[None]  # [1, LANES, 4]
                x1 = tl.load(px + 4, mask=x_mask[:, None], other=0)[None]
                at_block = (pair * 2 + C) * n_tokens + token0 + i
                x_scale = tl.load(xd + at_block, mask=x_mask, other=0)[None]  # [1, LANES]
                x_min = tl.load(xm + at_block, mask=x_mask, other=0)[None]
                x_sums = tl.load(xs + at_block, mask=x_mask, other=0)[None]
                zero = tl.zeros([BN, LANES, 4], tl.int32)
                if TYPE.group == 16:
                    e0 = tl.sum(dp4a(w0, x0, zero, ASM), axis=2)
                    e1 = tl.sum(dp4a(w1, x1, zero, ASM), axis=2)
                else:
                    e0 = tl.sum(dp4a(w1, x1, dp4a(w0, x0, zero, ASM), ASM), axis=2)  # [BN, LANES]
                    e1 = e0
                folded = folded + (_fold(sums[i], e0, e1, x_scale, x_min, x_sums, d, m, s0, s1, TYPE),)  # noqa: RUF005
            sums = folded
    for i in tl.static_range(M):
        mask = row < tl.where(token0 + i < n_tokens, n_rows, 0)
        total = _add_lanes(sums[i], lane)
        at = (y_row + i) * y_stride + row
        _finish(y, total, bias, residual, at, column, mask, HAS_BIAS, HAS_RESIDUAL)


@triton.jit
def _block_bytes(quants8, high, row_pair, k, mask, TYPE: tl.constexpr, C: tl.constexpr, ASM: tl.constexpr):
    """Block C of pairs `row_pair` [BN] as int8 [BN, 32], quants without their offset."""
    if TYPE.low == 8:
        q = tl.load(quants8 + row_pair[:, None] * 64 + 32 * C + k[None, :], mask=mask[:, None], other=0)
    elif TYPE.n_levels == 16:
        # 4 weights from 16 bits of a word, then the 4 bytes of each
        p = (quants8 + row_pair[:, None] * 32).to(tl.pointer_type(tl.int32)) + tl.arange(0, 8)[None, :]
        within, half = iq4_selectors(tl.load(p, mask=mask[:, None], other=0))
        t0, t1, t2, t3 = tl.load(high), tl.load(high + 1), tl.load(high + 2), tl.load(high + 3)
        values = iq4_values(within, half, t0, t1, t2, t3, C, ASM)  # [BN, 8]
        shifts = tl.arange(0, 4) * 8
        q = tl.reshape((values[:, :, None] >> shifts[None, None, :]).to(tl.int8), [values.shape[0], 32])
    elif TYPE.low == 4:
        q = tl.load(quants8 + row_pair[:, None] * 32 + k[None, :], mask=mask[:, None], other=0)
        q = (q >> (4 * C)) & 15
    elif TYPE.low == 2:
        q = tl.load(quants8 + row_pair[:, None] * 16 + (k % 16)[None, :], mask=mask[:, None], other=0)
        q = (q >> (4 * C + 2 * (k // 16))[None, :]) & 3
    else:
        q = tl.zeros([row_pair.shape[0], 32], tl.uint8)
    if TYPE.high == 1:
        h = tl.load(high + row_pair * 2 + C, mask=mask, other=0)[:, None]
        q |= (((h >> (8 * (k % 4) + (k // 4 + 4) % 8)[None, :]) & 1) << TYPE.left).to(tl.uint8)
    elif TYPE.high == 2:
        h0 = tl.load(high + row_pair * 4 + 2 * C, mask=mask, other=0)[:, None]
        h1 = tl.load(high + row_pair * 4 + 2 * C + 1, mask=mask, other=0)[:, None]
        h = tl.where((k < 16)[None, :], h0, h1)
        q |= (((h >> (8 * (k % 4) + (2 * (k // 4) + 4) % 8)[None, :]) & 3) << 4).to(tl.uint8)
    if TYPE.n_levels == 8:
        levels = tl.where(q < 4, TYPE.levels[0], TYPE.levels[1])
        q = levels >> (8 * (q & 3)).to(tl.int32)
    return q.to(tl.int8)


@triton.jit
def _tile_rows(
    order, work, n_tokens, n_rows, rows_each, n_steps, BM: tl.constexpr, EXPERTS: tl.constexpr
):  # fmt: skip
    """A GEMM program's rows of y and which of them there are [BM], their tokens, the rows above
    their matrix, and its steps, none if it has no rows.

    With EXPERTS these are rows of one expert, as in `gemv_of_experts`: `order` has them by expert, `work`
    int32 [tiles, 3] the expert, first and end of each program's.
    """
    if EXPERTS:
        tile = work + 3 * tl.program_id(1)
        first, stop = tl.load(tile + 1), tl.load(tile + 2)
        place = first + tl.arange(0, BM)
        ok = place < stop
        y_row = tl.load(order + place, mask=ok, other=0).to(tl.int64)
        return y_row, ok, y_row // rows_each, tl.load(tile) * n_rows, tl.where(first < stop, n_steps, 0)
    else:
        y_row = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
        return y_row, y_row < n_tokens, y_row, 0, n_steps


@triton.jit
def gemm(
    quants8, high, scales, xq, xd, xm, xs, y, bias, residual, order, work, n_tokens, n_rows, n_pairs,
    y_stride, rows_each,
    TYPE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, ASM: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, EXPERTS: tl.constexpr, UNROLL: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """The same for BM tokens a program (see `_tile_rows`), on int8 matrix units; `quants8` is the plane as
    bytes, `xq` int8.

    With SPLIT a program has one of the LANES sums of its rows, the third number of the grid, and y is
    [LANES, n_tokens, n_rows]: `add_lanes` adds them. So a matrix of few rows has programs for a whole device.
    """
    await_inputs()
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    y_row, ok_t, token64, above, n_steps = _tile_rows(
        order, work, n_tokens, n_rows, rows_each, n_pairs, BM, EXPERTS
    )
    column = row + above
    ok_r = row < n_rows
    k = tl.arange(0, 32)
    row64 = column.to(tl.int64)
    total = tl.zeros([BN, BM], tl.float32)
    first_lane = tl.program_id(2) if SPLIT else 0
    for lane in range(first_lane, first_lane + 1 if SPLIT else LANES):
        acc = tl.zeros([BN, BM], tl.float32)
        for pair in tl.range(lane, n_steps, LANES, loop_unroll_factor=UNROLL):
            row_pair = row64 * n_pairs + pair
            a, b, c = _scale_words(scales, row64, pair, n_pairs, ok_r, TYPE)
            for C in tl.static_range(2):
                w8 = _block_bytes(quants8, high, row_pair, k, ok_r, TYPE, C, ASM)
                px = xq + ((token64 * n_pairs + pair) * 64 + 32 * C)[None, :] + k[:, None]
                x8 = tl.load(px, mask=ok_t[None, :], other=0)  # [32, BM]
                at_block = (pair * 2 + C) * n_tokens + token64
                x_scale = tl.load(xd + at_block, mask=ok_t, other=0)[None, :]
                x_min = tl.load(xm + at_block, mask=ok_t, other=0)[None, :]
                x_sums = tl.load(xs + at_block, mask=ok_t, other=0)[None, :]
                if TYPE.group == 16:
                    e0 = tl.dot(w8, tl.where((k < 16)[:, None], x8, 0).to(tl.int8), out_dtype=tl.int32)
                    e1 = tl.dot(w8, tl.where((k < 16)[:, None], 0, x8).to(tl.int8), out_dtype=tl.int32)
                else:
                    e0 = tl.dot(w8, x8, out_dtype=tl.int32)
                    e1 = e0
                d, m, s0, s1 = _block_scales(a, b, c, TYPE, C)
                acc = _fold(
                    acc,
                    e0,
                    e1,
                    x_scale,
                    x_min,
                    x_sums,
                    d[:, None],
                    m[:, None],
                    s0[:, None],
                    s1[:, None],
                    TYPE,
                )
        total += acc
    at = y_row[None, :] * y_stride + row[:, None]
    if SPLIT:
        at += first_lane.to(tl.int64) * n_tokens * n_rows
    mask = ok_r[:, None] & ok_t[None, :]
    _finish(y, total, bias, residual, at, column[:, None] + at * 0, mask, HAS_BIAS, HAS_RESIDUAL)


@triton.jit
def add_lanes(
    parts, y, bias, residual, n_tokens, n_rows, y_stride,
    W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """y[t, n] = the LANES sums `parts` [LANES, n_tokens, n_rows], one after another, bias and residual."""
    await_inputs()
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * W + tl.arange(0, W)
    mask = row < n_rows
    total = tl.zeros([W], tl.float32)
    for lane in tl.static_range(LANES):
        total += tl.load(parts + (lane * n_tokens + token) * n_rows + row, mask=mask, other=0)
    _finish(y, total, bias, residual, token * y_stride + row, row, mask, HAS_BIAS, HAS_RESIDUAL)


@triton.jit
def gemv_f32(
    w, x, y, bias, residual, experts, n_rows, n_columns, x_stride, y_stride, rows_each,
    BN: tl.constexpr, BK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    """float32 weights [n_rows, n_columns] and activations: BN rows for one token, in BK sums that a tree
    adds. For small matrices, routers of experts above all, and for any number of tokens.

    With EXPERTS each row of y has one, as in `gemv_of_experts`.
    """
    await_inputs()
    row, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    y_row = tl.program_id(1).to(tl.int64)
    if EXPERTS:
        expert = tl.load(experts + y_row)
        token, column = y_row // rows_each, row + expert * n_rows
        ok = row < tl.where(expert >= 0, n_rows, 0)
    else:
        token, column, ok = y_row, row, row < n_rows
    acc = tl.zeros([BN, BK], tl.float32)
    for first in range(0, n_columns, BK):
        inside = first + k < n_columns
        at = column.to(tl.int64)[:, None] * n_columns + (first + k)[None, :]
        weights = tl.load(w + at, mask=ok[:, None] & inside[None, :], other=0)
        values = tl.load(x + token * x_stride + first + k, mask=inside, other=0)
        acc = tl.fma(weights, values[None, :] + weights * 0, acc)
    at = y_row * y_stride + row
    _finish(y, tree_sum(acc, BN, BK), bias, residual, at, column, ok, HAS_BIAS, HAS_RESIDUAL)


@triton.jit
def gemm_float(
    w, x, y, bias, residual, order, work, n_tokens, n_rows, n_columns, y_stride, rows_each,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, UPCAST: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """float16 or bfloat16 weights [n_rows, n_columns] and activations of that dtype; float32 sums, BK at a
    time. A program has BM rows of y (see `_tile_rows`).

    It serves one token too: a result depends on the columns' order alone, as long as BN and BK stay as they
    are. UPCAST multiplies in float32, for Triton's interpreter, which cannot multiply bfloat16.
    """
    await_inputs()
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    y_row, ok_t, token, above, stop = _tile_rows(
        order, work, n_tokens, n_rows, rows_each, n_columns, BM, EXPERTS
    )
    column, ok_r = row + above, row < n_rows
    k = tl.arange(0, BK)
    pw = w + column.to(tl.int64)[:, None] * n_columns + k[None, :]
    px = x + token[None, :] * n_columns + k[:, None]
    acc = tl.zeros([BN, BM], tl.float32)
    for first in range(0, stop, BK):
        inside = first + k < n_columns
        w_tile = tl.load(pw + first, mask=ok_r[:, None] & inside[None, :], other=0)
        x_tile = tl.load(px + first, mask=inside[:, None] & ok_t[None, :], other=0)
        if UPCAST:
            w_tile, x_tile = w_tile.to(tl.float32), x_tile.to(tl.float32)
        acc = tl.dot(w_tile, x_tile, acc)
    at = y_row[None, :] * y_stride + row[:, None]
    mask = ok_r[:, None] & ok_t[None, :]
    _finish(y, acc, bias, residual, at, column[:, None] + at * 0, mask, HAS_BIAS, HAS_RESIDUAL)
