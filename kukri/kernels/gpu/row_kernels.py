"""Triton kernels that work on rows: RMSNorm, element-wise ops, and int8 quantization of matrix inputs.

A program has one row (or a part of one), so that no result depends on other rows. Quantized rows are as
`linear_kernels.py` reads them: int8 [T, n_pairs * 64], zeros beyond the width, with a float32 scale, the
sum times that scale, and a word of two int16 sums for each 32, these [n_pairs * 2,
T]. A block that holds NaN gets NaN as its scale, and with it the outputs.
"""

import triton
import triton.language as tl

from kukri.kernels.gpu.activation_function import activation
from kukri.kernels.gpu.bits import round_even, tree_sum
from kukri.kernels.gpu.overlap import await_inputs


@triton.jit
def _store_q8(v, xq, xd, xm, xs, row, n_rows, first, n_columns, R: tl.constexpr, W: tl.constexpr):
    """Stores columns first … first + W - 1 of rows `row` [R] of n_rows as int8; v [R, W] is 0 beyond them."""
    blocks = tl.reshape(v, [R, W // 32, 32])
    largest = tl.max(tl.abs(blocks), axis=2)
    has_nan = tl.max((blocks != blocks).to(tl.int32), axis=2) > 0
    inverse = tl.where(largest > 0, tl.div_rn(tl.full([R, W // 32], 127.0, tl.float32), largest), 0.0)
    q = round_even(blocks * inverse[:, :, None]).to(tl.int32)
    sums = tl.sum(tl.reshape(q, [R, W // 32, 2, 16]), axis=3)
    low = tl.sum(tl.where((tl.arange(0, 2) == 0)[None, None, :], sums, 0), axis=2)
    high = tl.sum(tl.where((tl.arange(0, 2) == 1)[None, None, :], sums, 0), axis=2)
    column = first + tl.arange(0, W)
    inside = (row < n_rows)[:, None]
    at = row[:, None] * n_columns + column[None, :]
    tl.store(xq + at, tl.reshape(q, [R, W]).to(tl.int8), mask=inside & (column < n_columns)[None, :])
    block, n_blocks = first // 32 + tl.arange(0, W // 32), n_columns // 32
    scale = tl.where(has_nan, float("nan"), tl.div_rn(largest, tl.full([R, W // 32], 127.0, tl.float32)))
    at, mask = block[None, :] * n_rows + row[:, None], inside & (block < n_blocks)[None, :]
    tl.store(xd + at, scale, mask=mask)
    tl.store(xm + at, (low + high).to(tl.float32) * scale, mask=mask)
    tl.store(xs + at, (low & 0xFFFF) | (high << 16), mask=mask)


@triton.jit
def _load_rows(x, row, n_rows, stride, at, width):
    """Columns `at` of rows `row`: float32 [R, W], 0 beyond the last row and the width."""
    mask = (row < n_rows)[:, None] & (at < width)[None, :]
    return tl.load(x + row[:, None] * stride + at[None, :], mask=mask, other=0)


@triton.jit
def _normalized(x, weight, row, n_rows, stride, width, eps, R: tl.constexpr, W: tl.constexpr):
    """x / sqrt(mean(x^2) + eps) * weight of rows `row` [R], float32 [R, W], 0 beyond the width."""
    at = tl.arange(0, W)
    v = _load_rows(x, row, n_rows, stride, at, width)
    root = tl.sqrt_rn(tree_sum(v * v, R, W) / width + eps)
    return tl.div_rn(v, root[:, None] + v * 0) * tl.load(weight + at, mask=at < width, other=0)[None, :]


@triton.jit
def _activated(x, other, row, n_rows, stride, at, width, a, b, NAME: tl.constexpr):
    """The element-wise op NAME, columns `at` of rows `row`: float32 [R, W], 0 beyond the width."""
    v = _load_rows(x, row, n_rows, stride, at, width)
    y = activation(NAME, v, _load_rows(other, row, n_rows, stride, at, width), a, b)
    return tl.where((at < width)[None, :], y, 0.0)


@triton.jit
def _own_row():
    """The row of this program, int64 [1]."""
    return tl.program_id(0).to(tl.int64) + tl.arange(0, 1)


@triton.jit
def rms_norm(x, weight, y, stride, width, eps, W: tl.constexpr):
    """A row, or with `stride` = width a head: float32 in and out. W is a power of two >= width."""
    await_inputs()
    row, at = _own_row(), tl.arange(0, W)
    v = _normalized(x, weight, row, tl.num_programs(0), stride, width, eps, 1, W)
    tl.store(y + row[:, None] * width + at[None, :], v, mask=(at < width)[None, :])


@triton.jit
def rms_norm_q8(x, weight, xq, xd, xm, xs, stride, width, n_columns, eps, W: tl.constexpr):
    """A row normalized and quantized; n_columns = n_pairs * 64 <= W."""
    await_inputs()
    row, n_rows = _own_row(), tl.num_programs(0)
    v = _normalized(x, weight, row, n_rows, stride, width, eps, 1, W)
    _store_q8(v, xq, xd, xm, xs, row, n_rows, 0, n_columns, 1, W)


@triton.jit
def quantize_q8(x, xq, xd, xm, xs, stride, width, n_columns, W: tl.constexpr):
    """W columns of a row quantized."""
    await_inputs()
    row, n_rows, first = _own_row(), tl.num_programs(0), tl.program_id(1) * W
    v = _load_rows(x, row, n_rows, stride, first + tl.arange(0, W), width)
    _store_q8(v, xq, xd, xm, xs, row, n_rows, first, n_columns, 1, W)


@triton.jit
def activate(x, other, y, stride, width, a, b, NAME: tl.constexpr, W: tl.constexpr):
    """An element-wise op, W columns of a row."""
    await_inputs()
    row, at = _own_row(), tl.program_id(1) * W + tl.arange(0, W)
    v = _activated(x, other, row, tl.num_programs(0), stride, at, width, a, b, NAME)
    tl.store(y + row[:, None] * width + at[None, :], v, mask=(at < width)[None, :])


@triton.jit
def activate_q8(
    x, other, xq, xd, xm, xs, stride, width, n_columns, a, b, NAME: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """The same, quantized for the down projection."""
    await_inputs()
    row, n_rows, first = _own_row(), tl.num_programs(0), tl.program_id(1) * W
    v = _activated(x, other, row, n_rows, stride, first + tl.arange(0, W), width, a, b, NAME)
    _store_q8(v, xq, xd, xm, xs, row, n_rows, first, n_columns, 1, W)


@triton.jit
def prepare_rows(
    x, other, xq, xd, xm, xs, n_rows, stride, width, n_columns, a, b, INPUT: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """All rows, R at most, quantized as the kernels above do, within a program of a matrix kernel.

    Every program writes all of them, the same bytes to the same places, so that none waits for another.
    INPUT says what they are: "rms_norm" of x by the weight `other` and the eps a, with W >= n_columns;
    "plain" x, or the element-wise op of this name, these W columns at a time.
    """
    row = tl.arange(0, R)
    if INPUT == "rms_norm":
        v = _normalized(x, other, row, n_rows, stride, width, a, R, W)
        _store_q8(v, xq, xd, xm, xs, row, n_rows, 0, n_columns, R, W)
    else:
        for first in range(0, n_columns, W):
            at = first + tl.arange(0, W)
            if INPUT == "plain":
                v = _load_rows(x, row, n_rows, stride, at, width)
            else:
                v = _activated(x, other, row, n_rows, stride, at, width, a, b, INPUT)
            _store_q8(v, xq, xd, xm, xs, row, n_rows, first, n_columns, R, W)
    tl.debug_barrier()  # a thread reads what others of the program have written
