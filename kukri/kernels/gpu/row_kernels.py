"""Triton kernels that work on rows: RMSNorm, SwiGLU, and int8 quantization of matrix inputs.

A program has one row (or a part of one), so that no result depends on other rows. Quantized rows are as
`linear_kernels.py` reads them: int8 [T, n_pairs * 64], zeros beyond the width, with a float32 scale, the
sum times that scale, and a word of two int16 sums for each 32, these [n_pairs * 2,
T]. A block that holds NaN gets NaN as its scale, and with it the outputs.
"""

import triton
import triton.language as tl

from kukri.kernels.gpu.bits import round_even, sigmoid, tree_sum


@triton.jit
def _store_q8(v, xq, xd, xm, xs, row, first, n_columns, W: tl.constexpr):
    """Stores columns first … first + W - 1 of a row as int8; v [W] is 0 beyond the width."""
    blocks = tl.reshape(v, [W // 32, 32])
    largest = tl.max(tl.abs(blocks), axis=1)
    has_nan = tl.max((blocks != blocks).to(tl.int32), axis=1) > 0
    inverse = tl.where(largest > 0, tl.div_rn(tl.full([W // 32], 127.0, tl.float32), largest), 0.0)
    q = round_even(blocks * inverse[:, None]).to(tl.int32)
    sums = tl.sum(tl.reshape(q, [W // 32, 2, 16]), axis=2)
    low = tl.sum(tl.where((tl.arange(0, 2) == 0)[None, :], sums, 0), axis=1)
    high = tl.sum(tl.where((tl.arange(0, 2) == 1)[None, :], sums, 0), axis=1)
    column = first + tl.arange(0, W)
    tl.store(xq + row * n_columns + column, tl.reshape(q, [W]).to(tl.int8), mask=column < n_columns)
    block, n_blocks = first // 32 + tl.arange(0, W // 32), n_columns // 32
    scale = tl.where(has_nan, float("nan"), tl.div_rn(largest, tl.full([W // 32], 127.0, tl.float32)))
    at = block * tl.num_programs(0) + row  # a program has a row
    tl.store(xd + at, scale, mask=block < n_blocks)
    tl.store(xm + at, (low + high).to(tl.float32) * scale, mask=block < n_blocks)
    tl.store(xs + at, (low & 0xFFFF) | (high << 16), mask=block < n_blocks)


@triton.jit
def _normalized(x, weight, row, stride, width, eps, W: tl.constexpr):
    """x / sqrt(mean(x^2) + eps) * weight of a row, float32 [W], 0 beyond the width."""
    at = tl.arange(0, W)
    v = tl.load(x + row * stride + at, mask=at < width, other=0)
    mean = tree_sum(tl.reshape(v * v, [1, W]), 1, W) / width  # [1]
    root = tl.sqrt_rn(mean + eps)
    return tl.div_rn(v, root + v * 0) * tl.load(weight + at, mask=at < width, other=0)


@triton.jit
def rms_norm(x, weight, y, stride, width, eps, W: tl.constexpr):
    """A row, or with `stride` = width a head: float32 in and out. W is a power of two >= width."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, W)
    tl.store(y + row * width + at, _normalized(x, weight, row, stride, width, eps, W), mask=at < width)


@triton.jit
def rms_norm_q8(x, weight, xq, xd, xm, xs, stride, width, n_columns, eps, W: tl.constexpr):
    """A row normalized and quantized; n_columns = n_pairs * 64 <= W."""
    row = tl.program_id(0).to(tl.int64)
    _store_q8(_normalized(x, weight, row, stride, width, eps, W), xq, xd, xm, xs, row, 0, n_columns, W)


@triton.jit
def quantize_q8(x, xq, xd, xm, xs, stride, width, n_columns, W: tl.constexpr):
    """W columns of a row quantized."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * W
    at = first + tl.arange(0, W)
    v = tl.load(x + row * stride + at, mask=at < width, other=0)
    _store_q8(v, xq, xd, xm, xs, row, first, n_columns, W)


@triton.jit
def _gated(gate, up, row, stride, at, width):
    g = tl.load(gate + row * stride + at, mask=at < width, other=0)
    u = tl.load(up + row * stride + at, mask=at < width, other=0)
    return g * sigmoid(g) * u


@triton.jit
def silu_mul(gate, up, y, stride, width, W: tl.constexpr):
    """silu(gate) * up, W columns of a row."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * W + tl.arange(0, W)
    tl.store(y + row * width + at, _gated(gate, up, row, stride, at, width), mask=at < width)


@triton.jit
def silu_mul_q8(gate, up, xq, xd, xm, xs, stride, width, n_columns, W: tl.constexpr):
    """The same, quantized for the down projection."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * W
    v = _gated(gate, up, row, stride, first + tl.arange(0, W), width)
    _store_q8(v, xq, xd, xm, xs, row, first, n_columns, W)
