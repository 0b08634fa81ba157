"""Row-wise kernels: norms and activations.

Each has its definition in `kukri.kernels.reference`. Most are written as the work on one row, from which
`row_kernel` makes the kernel. Buffers are float32, strides are bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kukri.kernels.cpu.codegen.panels import panel_of, quantize_block, row_kernel
from kukri.kernels.cpu.compile.intrinsics import device, f32_of_bits, load_f32, load_i32, load_i64, store_f32
from kukri.kernels.cpu.compile.simd import (
    absolute,
    exponential,
    first_lane,
    fma,
    hyperbolic_tangent,
    load_f32x16,
    maximum,
    minimum,
    splat,
    store_f32x16,
    sum_lanes,
)
from kukri.kernels.cpu.pack.layouts import Q8_BLOCK, Q8_BLOCK_BYTES

# --- norms and activations ----------------------------------------------------------------------------
#
# The result is written to y, to its q8 panels, or to both; either may be 0: not wanted. Rows have room for
# whole vectors: what lies after their n columns is computed too, and no sum reads it. With panels n is 32 m.


def _make_write(value: Callable[..., Any]) -> Any:
    """A function that writes columns of one row; value(i, …) gives the 16 of them at byte i."""

    @device
    def write(row, width, start, stop, n, y, y_stride, panels, *arguments):
        if y != 0:
            for i in range(start, stop, 64):
                store_f32x16(y + row * y_stride + i, value(i, *arguments))
        if panels != 0:
            target = panel_of(panels, n // Q8_BLOCK * Q8_BLOCK_BYTES, row)
            target += start // 128 * (Q8_BLOCK_BYTES * width)
            for i in range(start, stop, 128):
                quantize_block(value(i, *arguments), value(i + 64, *arguments), target, row & 7, width)
                target += Q8_BLOCK_BYTES * width

    return write


@device
def _inverse_deviation(x, n, mean, eps):
    """A vector of 1 / sqrt(the mean of (x - mean)^2 + eps)."""
    total = splat(0.0)
    for i in range(0, 4 * (n & -16), 64):
        v = load_f32x16(x + i) - mean
        total = fma(v, v, total)
    rest = np.float32(0.0)
    for i in range(4 * (n & -16), 4 * n, 4):
        w = load_f32(x + i) - first_lane(mean)
        rest += w * w
    return splat(1.0 / ((sum_lanes(total) + rest) / n + f32_of_bits(eps)) ** 0.5)


@device
def _scaled(i, x, factor, weight):
    return load_f32x16(x + i) * factor * load_f32x16(weight + i)


@device
def _scaled_and_added(i, x, factor, weight, residual):
    return load_f32x16(x + i) * factor * load_f32x16(weight + i) + load_f32x16(residual + i)


@device
def _sum(i, x, scale, residual):
    return load_f32x16(x + i) * scale + load_f32x16(residual + i)


@device
def _centred(i, x, mean, factor, weight, bias):
    return (load_f32x16(x + i) - mean) * factor * load_f32x16(weight + i) + load_f32x16(bias + i)


# Functions of each number of x, of `other` with it, and of two numbers a and b. Most need only some of these.


@device
def _itself(x, other, a, b):
    return x


@device
def _silu(x, other, a, b):
    return x / (splat(1.0) + exponential(splat(0.0) - x))


@device
def _sigmoid(x, other, a, b):
    return splat(1.0) / (splat(1.0) + exponential(splat(0.0) - x))


@device
def _sigmoid_gated(x, gate, a, b):
    return x / (splat(1.0) + exponential(splat(0.0) - gate))


@device
def _clamped_swiglu(up, gate, alpha, limit):
    g = minimum(gate, limit)
    u = maximum(minimum(up, limit), splat(0.0) - limit)
    return (u + splat(1.0)) * g / (splat(1.0) + exponential(splat(0.0) - alpha * g))


@device
def _gelu_tanh(x, other, a, b):
    """x * sigmoid(2u) is x / 2 * (1 + tanh(u))."""
    u = fma(x * x * x, splat(0.044715), x) * splat(-1.5957691216)  # -2 sqrt(2 / pi)
    return x / (splat(1.0) + exponential(u))


@device
def _gelu_erf(x, other, a, b):
    """x / 2 * (1 + erf(x / sqrt(2))), erf by formula 7.1.26 of Abramowitz and Stegun: within 1.5e-7."""
    size = absolute(x) * splat(0.70710678118)
    t = splat(1.0) / fma(size, splat(0.3275911), splat(1.0))
    p = fma(t, splat(1.061405429), splat(-1.453152027))
    p = fma(p, t, splat(1.421413741))
    p = fma(p, t, splat(-0.284496736))
    p = fma(p, t, splat(0.254829592)) * t
    tail = p * exponential(splat(0.0) - size * size)  # 1 - erf(size)
    # the half of a negative x is x / 2 * tail, that of a positive one x - x / 2 * tail
    return maximum(x, splat(0.0)) - absolute(x) * splat(0.5) * tail


@device
def _tanh(x, other, a, b):
    """2 / (1 + exp(-2x)) - 1."""
    return splat(2.0) / (splat(1.0) + exponential(x * splat(-2.0))) - splat(1.0)


@device
def _relu(x, other, a, b):
    return maximum(x, splat(0.0))


@device
def _relu_squared(x, other, a, b):
    positive = maximum(x, splat(0.0))
    return positive * positive


@device
def _xielu(x, other, high, low):
    positive = maximum(x, splat(0.0))
    negative = minimum(x, splat(0.0))
    return fma(positive * positive, high, (exponential(negative) - splat(1.0) - negative) * low)


@device
def _softcap(x, other, cap, b):
    return hyperbolic_tangent(x / cap) * cap


@device
def _clamp(x, other, low, high):
    return maximum(minimum(x, high), low)


def _gated(value: Callable[..., Any]) -> Any:
    """x times a function of the gate."""

    @device
    def gated(x, gate, a, b):
        return value(gate, gate, a, b) * x

    return gated


PART_COLUMNS = 512  # columns of an activation's row, so that a single token is shared between threads


@device
def activation_parts(n):
    """Parts of a row of n columns."""
    return (n + PART_COLUMNS - 1) // PART_COLUMNS


@device
def _columns(part, n):
    """(the first byte of a part's columns, the byte after its last)."""
    start = 4 * PART_COLUMNS * part
    return start, min(start + 4 * PART_COLUMNS, 4 * n)


_write_scaled, _write_centred = _make_write(_scaled), _make_write(_centred)
_write_scaled_and_added, _write_sum = _make_write(_scaled_and_added), _make_write(_sum)


def rms_norm(row, width, x, x_stride, n, weight, eps, y, y_stride, panels):
    """y = x / sqrt(mean(x^2) + eps) * weight."""
    source = x + row * x_stride
    factor = _inverse_deviation(source, n, splat(0.0), eps)
    _write_scaled(row, width, 0, 4 * n, n, y, y_stride, panels, source, factor, weight)


def rms_norm_add(row, width, x, x_stride, n, weight, eps, residual, residual_stride, y, y_stride, panels):
    """y = x / sqrt(mean(x^2) + eps) * weight + residual."""
    source = x + row * x_stride
    factor = _inverse_deviation(source, n, splat(0.0), eps)
    added = residual + row * residual_stride
    _write_scaled_and_added(row, width, 0, 4 * n, n, y, y_stride, panels, source, factor, weight, added)


def add(row, width, x, x_stride, n, residual, residual_stride, scale, y, y_stride, panels):
    """y = x * scale + residual."""
    source = x + row * x_stride
    added = residual + row * residual_stride
    _write_sum(row, width, 0, 4 * n, n, y, y_stride, panels, source, splat(f32_of_bits(scale)), added)


def scale(row, part, x, x_stride, n, factor, y, y_stride):
    """y = x * factor, in whole vectors: rows have room for them."""
    start, stop = _columns(part, n)
    for i in range(start, stop, 64):
        store_f32x16(y + row * y_stride + i, load_f32x16(x + row * x_stride + i) * splat(f32_of_bits(factor)))


def head_norm(row, x, x_stride, n_heads, d_head, weight, eps):
    """Each head of x as rms_norm, by one weight [d_head]; in place."""
    for head in range(n_heads):
        target = x + row * x_stride + 4 * head * d_head
        factor = _inverse_deviation(target, d_head, splat(0.0), eps)
        for i in range(0, 4 * (d_head & -16), 64):
            store_f32x16(target + i, _scaled(i, target, factor, weight))
        for i in range(4 * (d_head & -16), 4 * d_head, 4):  # the next head begins within the vector
            store_f32(target + i, load_f32(target + i) * first_lane(factor) * load_f32(weight + i))


def layer_norm(row, width, x, x_stride, n, weight, bias, eps, y, y_stride, panels):
    """y = (x - mean) / sqrt(var + eps) * weight + bias."""
    source = x + row * x_stride
    total = splat(0.0)
    for i in range(0, 4 * (n & -16), 64):
        total = total + load_f32x16(source + i)
    rest = np.float32(0.0)
    for i in range(4 * (n & -16), 4 * n, 4):
        rest += load_f32(source + i)
    mean = splat((sum_lanes(total) + rest) / n)
    factor = _inverse_deviation(source, n, mean, eps)
    _write_centred(row, width, 0, 4 * n, n, y, y_stride, panels, source, mean, factor, weight, bias)


def _make_elementwise(name: str, value: Callable[..., Any]) -> Callable[..., None]:
    """The kernel of y = value(x, other, a, b), number by number; x stands for an `other` that is not used."""

    @device
    def at(i, x, other, a, b):
        return value(load_f32x16(x + i), load_f32x16(other + i), a, b)

    write = _make_write(at)

    def elementwise(row, width, part, x, x_stride, n, other, other_stride, a, b, y, y_stride, panels):
        start, stop = _columns(part, n)
        source = x + row * x_stride
        others = other + row * other_stride
        va = splat(f32_of_bits(a))
        vb = splat(f32_of_bits(b))
        write(row, width, start, stop, n, y, y_stride, panels, source, others, va, vb)

    elementwise.__name__ = name
    return elementwise


def fit_heads(row, x, x_stride, n_heads, d_head, x_step, y, y_stride, d_target, y_step):
    """y [n_heads, d_target] = x [n_heads, d_head]: each head's first columns, zeros after them.

    Heads begin `x_step` and `y_step` bytes apart.
    """
    for head in range(n_heads):
        source = x + row * x_stride + head * x_step
        target = y + row * y_stride + head * y_step
        for i in range(0, 4 * min(d_head, d_target), 4):
            store_f32(target + i, load_f32(source + i))
        for i in range(4 * d_head, 4 * d_target, 4):
            store_f32(target + i, np.float32(0.0))


def repeat(row, x, x_stride, n, times, y, y_stride):
    """y [n, times] = x[i] in each column of row i."""
    target = y + row * y_stride
    for i in range(0, 4 * n, 4):
        value = load_f32(x + row * x_stride + i)
        for j in range(0, 4 * times, 4):
            store_f32(target + i * times + j, value)


def gather_rows(row, indices, x, x_stride, n, y, y_stride):
    """y[i] = x[indices[i]], rows of n float32. `indices` is the address of the int32 array's address."""
    source = x + load_i32(load_i64(indices) + 4 * row) * x_stride
    for i in range(0, 4 * n, 4):
        store_f32(y + row * y_stride + i, load_f32(source + i))


_WHOLE_ROWS = (rms_norm, rms_norm_add, add, head_norm, layer_norm, fit_heads, repeat, gather_rows)
_ROW_KERNELS = [row_kernel(each) for each in _WHOLE_ROWS]
_FUNCTIONS = {
    "itself": _itself,
    "relu": _relu,
    "relu_squared": _relu_squared,
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "silu": _silu,
    "gelu": _gelu_tanh,
    "gelu_exact": _gelu_erf,
}
_ELEMENTWISE = {
    **_FUNCTIONS,
    **{f"gated_{name}": _gated(value) for name, value in _FUNCTIONS.items()},
    "gated_sigmoid": _sigmoid_gated,
    "xielu": _xielu,
    "softcap": _softcap,
    "clamp": _clamp,
    "clamped_swiglu": _clamped_swiglu,
}
_IN_PARTS = [scale, *(_make_elementwise(name, value) for name, value in _ELEMENTWISE.items())]
_ROW_KERNELS += [row_kernel(each, activation_parts) for each in _IN_PARTS]
KERNELS = {source.name: source for source in _ROW_KERNELS}
