"""Quantizer kernels: rows of float32 to blocks, `encode_TYPE` for each weight type.

A kernel encodes whole rows on one thread; `kukri.kernels.cpu.quantize` runs it on parts of a matrix. Layouts
of blocks are those of `kukri.quant.blocks`. Memory comes as NumPy arrays here, without bounds checks.

Q4_0 to Q8_0 and Q8_K round exactly as GGML's reference does, but for Q4_0 to Q5_1 with importances. The
others search for scales: each group of 16 or 32 weights tries a row of scales and takes the one whose
least-squares fit loses least, then the block's own scale (and minimum) is fitted again to the quants that
came out. The squared error is minimized, that of large weights and of important columns counting more, as in
GGML. Sums may be reordered (`_SEARCH`) if no bits are promised, or nothing here would use vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from kukri.kernels.cpu.intrinsics import array_at, stack_bytes
from kukri.kernels.cpu.kernel_cache import KernelSource

_EXACT: Any = {"nogil": True, "error_model": "numpy", "boundscheck": False, "_nrt": False}
_SEARCH: Any = {**_EXACT, "fastmath": {"reassoc", "contract", "nsz", "arcp"}}

_floats, _bytes = array_at(types.float32, 1), array_at(types.uint8, 1)
_rows, _byte_rows = array_at(types.float32, 2), array_at(types.uint8, 2)
_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
_TINY = np.float32(1e-15)  # groups whose weights are all smaller become zero
# what the quants of IQ4_NL and IQ4_XS stand for, and the bounds between them
_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # of MXFP4
_BOUNDS = ((_VALUES[1:] + _VALUES[:-1]) / 2).astype(np.float32)


@njit(**_EXACT)
def _copy(source, into):
    for i in range(len(source)):
        into[i] = source[i]


@njit(**_EXACT)
def _half_bits(value):
    """float32 -> the bits of the nearest float16, ties to even."""
    bits = np.int64(np.float32(value).view(np.uint32))
    sign, size = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    if size > 0x7F800000:
        return sign | 0x7E00
    if size >= 0x477FF000:  # 65520 and more
        return sign | 0x7C00
    if size < 0x38800000:  # below the least normal float16: a multiple of 2^-24
        return sign | np.int64(np.rint(abs(np.float64(value)) * 16777216.0))
    return sign | ((size + 0xFFF + ((size >> 13) & 1) - 0x38000000) >> 13)


@njit(**_EXACT)
def _of_half(bits):
    """The bits of a finite float16 -> float32."""
    exponent, fraction = (bits >> 10) & 31, bits & 1023
    if exponent == 0:
        size = np.float32(fraction * (1.0 / 16777216.0))
    else:
        size = np.float32((1024 + fraction) * 2.0 ** (exponent - 25))
    return -size if bits & 0x8000 else size


@njit(**_EXACT)
def _put_half(block, at, value):
    bits = _half_bits(value)
    block[at], block[at + 1] = bits & 255, bits >> 8


@njit(**_EXACT)
def _rounded(value):
    """The nearest float16 as float32, the largest finite one beyond the range."""
    bits = _half_bits(value)
    return _of_half(bits - 1 if bits & 0x7FFF == 0x7C00 else bits)


@njit(**_EXACT)
def _inverse(scale):
    """1 / scale, and 0 if the scale is 0 or so small that its inverse overflows (undefined in GGML)."""
    inverse = _ONE / scale
    return _ZERO if np.isinf(inverse) else inverse


@njit(**_EXACT)
def _extreme(x):
    """The first weight of the largest size."""
    size, found = _ZERO, _ZERO
    for i in range(len(x)):
        if abs(x[i]) > size:
            size, found = abs(x[i]), x[i]
    return found


@njit(**_EXACT)
def _put_five_bits(block, high, low, q):
    """32 quants of 5 bits: the top ones from byte `high`, the others as nibbles from byte `low`."""
    for i in range(4):
        bits = 0
        for j in range(8):
            bits |= (q[8 * i + j] >> 4) << j
        block[high + i] = bits
    for i in range(16):
        block[low + i] = (q[i] & 15) | (q[i + 16] & 15) << 4


@njit(**_EXACT)
def _encode_0(rows, importance, into, most, block_bytes):
    """Q4_0 and Q5_0: the weight of largest size becomes q = 0; `most` is the largest quant.

    With importances the scale is looked for.
    """
    middle = np.float32((most + 1) // 2)
    q, w = _bytes(stack_bytes(32), (32,)), _floats(stack_bytes(128), (32,))
    for r in range(rows.shape[0]):
        for b in range(rows.shape[1] // 32):
            x, block = rows[r, 32 * b : 32 * b + 32], into[r, block_bytes * b : block_bytes * (b + 1)]
            scale = _extreme(x) / -middle
            if len(importance):
                _weigh(x, importance, 32 * b, 32, w)
                scale = _rounded(_fit_symmetric(x, w, (most + 1) // 2))
            inverse = _inverse(scale)
            for i in range(32):
                q[i] = max(0, min(np.int32(x[i] * inverse + (middle + _HALF)), most))
            _put_half(block, 0, scale)
            _put_quants(block, 2, q, most)


@njit(**_EXACT)
def _encode_1(rows, importance, into, most, block_bytes):
    """Q4_1 and Q5_1: the smallest weight becomes q = 0, the largest `most`.

    With importances scale and minimum are looked for.
    """
    q, w = _bytes(stack_bytes(32), (32,)), _floats(stack_bytes(128), (32,))
    for r in range(rows.shape[0]):
        for b in range(rows.shape[1] // 32):
            x, block = rows[r, 32 * b : 32 * b + 32], into[r, block_bytes * b : block_bytes * (b + 1)]
            least, largest = x[0], x[0]
            for i in range(32):
                least, largest = min(least, x[i]), max(largest, x[i])
            scale = (largest - least) / np.float32(most)
            if len(importance):
                _weigh(x, importance, 32 * b, 32, w)
                scale, minimum = _fit_affine(x, w, most, -0.9, 0.1, 19)
                scale, least = _rounded(scale), -_rounded(minimum)
            inverse = _inverse(scale)
            for i in range(32):
                q[i] = max(0, min(np.int32((x[i] - least) * inverse + _HALF), most))
            _put_half(block, 0, scale)
            _put_half(block, 2, least)
            _put_quants(block, 4, q, most)


@njit(**_EXACT)
def _put_quants(block, at, q, most):
    if most == 15:
        for i in range(16):
            block[at + i] = q[i] | q[i + 16] << 4
    else:
        _put_five_bits(block, at, at + 4, q)


@njit(**_EXACT)
def _q4_0(rows, importance, into):
    """Blocks of Q4_0."""
    _encode_0(rows, importance, into, 15, 18)


@njit(**_EXACT)
def _q5_0(rows, importance, into):
    """Blocks of Q5_0."""
    _encode_0(rows, importance, into, 31, 22)


@njit(**_EXACT)
def _q4_1(rows, importance, into):
    """Blocks of Q4_1."""
    _encode_1(rows, importance, into, 15, 20)


@njit(**_EXACT)
def _q5_1(rows, importance, into):
    """Blocks of Q5_1."""
    _encode_1(rows, importance, into, 31, 24)


@njit(**_EXACT)
def _q8_0(rows, importance, into):
    """Blocks of Q8_0. Ties round away from zero."""
    for r in range(rows.shape[0]):
        for b in range(rows.shape[1] // 32):
            x, block = rows[r, 32 * b : 32 * b + 32], into[r, 34 * b : 34 * b + 34]
            size = _ZERO
            for i in range(32):
                size = max(size, abs(x[i]))
            scale = size / np.float32(127)
            inverse = _inverse(scale)
            for i in range(32):
                value = x[i] * inverse
                whole = np.trunc(value)
                block[2 + i] = np.int32(whole + np.trunc((value - whole) * np.float32(2))) & 255
            _put_half(block, 0, scale)


@njit(**_EXACT)
def _q8_k(rows, importance, into):
    """Blocks of Q8_K: a float32 scale, 256 signed bytes, and the sums of each 16."""
    for r in range(rows.shape[0]):
        for b in range(rows.shape[1] // 256):
            x, block = rows[r, 256 * b : 256 * b + 256], into[r, 292 * b : 292 * b + 292]
            block[:] = 0
            extreme = _extreme(x)
            if extreme == 0:
                continue
            inverse = np.float32(-127) / extreme
            bits = np.int64(np.float32(_ONE / inverse).view(np.uint32))
            for i in range(4):
                block[i] = (bits >> (8 * i)) & 255
            for g in range(16):
                total = 0
                for i in range(16 * g, 16 * g + 16):
                    q = min(127, np.int32(np.rint(x[i] * inverse)))
                    block[4 + i] = q & 255
                    total += q
                block[260 + 2 * g], block[261 + 2 * g] = total & 255, (total >> 8) & 255


@njit(**_SEARCH)
def _weigh(x, importance, first, group, w):
    """The weight of each error: w [n], from the value's size and its column's importance."""
    total = _ZERO
    for i in range(len(x)):
        total += x[i] * x[i]
    mean = total / np.float32(len(x))
    for g in range(len(x) // group):
        here = _ZERO
        for i in range(group * g, group * (g + 1)):
            here += x[i] * x[i]
        size = np.sqrt(here / np.float32(group))
        for i in range(group * g, group * (g + 1)):
            if len(importance):
                w[i] = importance[first + i] * np.sqrt(mean + mean + x[i] * x[i])
            else:
                w[i] = size + abs(x[i])


@njit(**_SEARCH)
def _fit_affine(x, w, most, first, step, n_steps):
    """scale, minimum: x is about scale * q - minimum with q from 0 to `most` and minimum from 0."""
    least, largest = _ZERO, x[0]
    sw, sx = _ZERO, _ZERO
    for i in range(len(x)):
        least, largest = min(least, x[i]), max(largest, x[i])
        sw += w[i]
        sx += w[i] * x[i]
    if largest - least < _TINY or sw <= 0:
        return _ZERO, -least
    top = np.float32(most)
    best_gain, scale, minimum = np.float32(-np.inf), (largest - least) / top, least
    for k in range(n_steps):
        inverse = (top + np.float32(first) + np.float32(step) * np.float32(k)) / (largest - least)
        sl, sll, sxl = _ZERO, _ZERO, _ZERO
        for i in range(len(x)):
            q = min(top, np.floor((x[i] - least) * inverse + _HALF))
            sl += w[i] * q
            sll += w[i] * q * q
            sxl += w[i] * q * x[i]
        determinant = sw * sll - sl * sl
        if determinant <= 0:
            continue
        a, b = (sw * sxl - sx * sl) / determinant, (sll * sx - sl * sxl) / determinant
        if b > 0:
            a, b = sxl / sll, _ZERO
        # what the squared error is less than the sum of w x^2
        gain = a * (np.float32(2) * sxl - a * sll) + b * (np.float32(2) * (sx - a * sl) - b * sw)
        if gain > best_gain and a > 0:
            best_gain, scale, minimum = gain, a, b
    return scale, -minimum


@njit(**_SEARCH)
def _whole_scales(values, weights, most, into):
    """The float16 scale (as float32) with which `values` from 0 become whole numbers up to `most`."""
    largest = _ZERO
    for i in range(len(values)):
        largest = max(largest, values[i])
    if largest < _TINY:
        into[:] = 0
        return _ZERO
    best_error, best = np.float32(np.inf), largest / np.float32(most)
    for k in range(-8, 17):
        trial = largest / (np.float32(most) + np.float32(0.1) * np.float32(k))
        svl, sll = _ZERO, _ZERO
        for i in range(len(values)):
            q = min(np.float32(most), np.floor(values[i] / trial + _HALF))
            svl += weights[i] * values[i] * q
            sll += weights[i] * q * q
        if sll <= 0:
            continue
        trial = svl / sll
        error = _ZERO
        for i in range(len(values)):
            q = min(np.float32(most), np.floor(values[i] / trial + _HALF))
            error += weights[i] * (values[i] - trial * q) ** 2
        if error < best_error:
            best_error, best = error, trial
    best = _rounded(best)
    inverse = _inverse(best)
    for i in range(len(values)):
        into[i] = min(np.float32(most), np.floor(values[i] * inverse + _HALF))
    return best


@njit(**_SEARCH)
def _affine_block(x, w, group, most, steps, scale_most, s, t, q, trial_q, scales, minimums, group_w):
    """d, m: x is about d s[g] q - m t[g] for the 256 weights of a block; s, t, q are filled."""
    first, step, n_steps = steps
    n_groups = len(x) // group
    for g in range(n_groups):
        part = slice(group * g, group * (g + 1))
        scales[g], minimums[g] = _fit_affine(x[part], w[part], most, first, step, n_steps)
        group_w[g] = w[part].sum()
    d = _whole_scales(scales[:n_groups], group_w[:n_groups], scale_most, s)
    m = _whole_scales(minimums[:n_groups], group_w[:n_groups], scale_most, t)
    best_error, best_d, best_m = np.float32(np.inf), d, m
    for _ in range(3):
        error = _ZERO
        dd, dm, mm, dx, mx = _ZERO, _ZERO, _ZERO, _ZERO, _ZERO
        for g in range(n_groups):
            scale, minimum = d * s[g], m * t[g]
            inverse = _inverse(scale)
            for i in range(group * g, group * (g + 1)):
                whole = min(np.float32(most), max(_ZERO, np.floor((x[i] + minimum) * inverse + _HALF)))
                trial_q[i] = whole
                error += w[i] * (scale * whole - minimum - x[i]) ** 2
                # normal equations of d and m, the quants being what they are
                a, b = s[g] * whole, -t[g]
                dd += w[i] * a * a
                dm += w[i] * a * b
                mm += w[i] * b * b
                dx += w[i] * a * x[i]
                mx += w[i] * b * x[i]
        if not error < best_error:
            break
        best_error, best_d, best_m = error, d, m
        _copy(trial_q, q)
        determinant = dd * mm - dm * dm
        if determinant > 0:
            d, m = (mm * dx - dm * mx) / determinant, (dd * mx - dm * dx) / determinant
        elif dd > 0:
            d, m = dx / dd, _ZERO
        if m < 0:
            d, m = (dx / dd if dd > 0 else _ZERO), _ZERO
        d, m = _rounded(max(d, _ZERO)), _rounded(m)
    return best_d, best_m


@njit(**_SEARCH)
def _put_six_bit_scales(block, s, t):
    """The 8 scales and 8 minimums of Q4_K and Q5_K: bytes 4 to 15 of a block."""
    for g in range(4):
        low_s, low_t = np.uint8(s[g]), np.uint8(t[g])
        high_s, high_t = np.uint8(s[g + 4]), np.uint8(t[g + 4])
        block[4 + g] = low_s | (high_s >> 4) << 6
        block[8 + g] = low_t | (high_t >> 4) << 6
        block[12 + g] = (high_s & 15) | (high_t & 15) << 4


@njit(**_SEARCH)
def _encode_affine(rows, importance, into, group, most, steps, scale_most, block_bytes):
    """Q2_K, Q4_K and Q5_K, told apart by the largest quant."""
    w, q, trial = (
        _floats(stack_bytes(1024), (256,)),
        _floats(stack_bytes(1024), (256,)),
        _floats(stack_bytes(1024), (256,)),
    )
    s, t = _floats(stack_bytes(64), (256 // group,)), _floats(stack_bytes(64), (256 // group,))
    scales, minimums = _floats(stack_bytes(64), (16,)), _floats(stack_bytes(64), (16,))
    group_w, whole = _floats(stack_bytes(64), (16,)), _bytes(stack_bytes(256), (256,))
    q[:] = 0
    for r in range(rows.shape[0]):
        for b in range(rows.shape[1] // 256):
            x, block = rows[r, 256 * b : 256 * b + 256], into[r, block_bytes * b : block_bytes * (b + 1)]
            _weigh(x, importance, 256 * b, group, w)
            d, m = _affine_block(
                x, w, group, most, steps, scale_most, s, t, q, trial, scales, minimums, group_w
            )
            for i in range(256):
                whole[i] = np.uint8(q[i])
            if most == 3:
                for g in range(16):
                    block[g] = np.uint8(s[g]) | np.uint8(t[g]) << 4
                _put_two_bits(block, 16, whole)
                _put_half(block, 80, d)
                _put_half(block, 82, m)
                continue
            _put_half(block, 0, d)
            _put_half(block, 2, m)
            _put_six_bit_scales(block, s, t)
            at = 16
            if most == 31:
                for i in range(32):
                    bits = 0
                    for g in range(8):
                        bits |= (whole[32 * g + i] >> 4) << g
                    block[16 + i] = bits
                at = 48
            for g in range(4):
                for i in range(32):
                    low, high = whole[64 * g + i], whole[64 * g + 32 + i]
                    block[at + 32 * g + i] = (low & 15) | (high & 15) << 4


@njit(**_EXACT)
def _put_two_bits(block, at, q):
    """The low 2 bits of 256 quants in 64 bytes."""
    for half in range(2):
        for i in range(32):
            bits = 0
            for g in range(4):
                bits |= (q[128 * half + 32 * g + i] & 3) << (2 * g)
            block[at + 32 * half + i] = bits


@njit(**_EXACT)
def _q2_k(rows, importance, into):
    """Blocks of Q2_K."""
    _encode_affine(rows, importance, into, 16, 3, (-0.7, 0.1, 20), 15, 84)


@njit(**_EXACT)
def _q4_k(rows, importance, into):
    """Blocks of Q4_K."""
    _encode_affine(rows, importance, into, 32, 15, (-1.0, 0.1, 21), 63, 144)


@njit(**_EXACT)
def _q5_k(rows, importance, into):
    """Blocks of Q5_K."""
    _encode_affine(rows, importance, into, 32, 31, (-0.9, 0.1, 19), 63, 176)


@njit(**_SEARCH)
def _fit_symmetric(x, w, half):
    """scale: x is about scale * q, q from -half to half - 1."""
    extreme = _extreme(x)
    if abs(extreme) < _TINY:
        return _ZERO
    low, high = np.float32(-half), np.float32(half - 1)
    best_gain, scale = np.float32(-np.inf), extreme / low
    for k in range(-9, 10):
        inverse = (low + np.float32(0.1) * np.float32(k)) / extreme
        sxl, sll = _ZERO, _ZERO
        for i in range(len(x)):
            q = max(low, min(high, np.floor(x[i] * inverse + _HALF)))
            sxl += w[i] * q * x[i]
            sll += w[i] * q * q
        if sll > 0 and sxl * sxl > best_gain * sll:
            scale = sxl / sll
            best_gain = sxl * scale
    return scale


@njit(**_SEARCH)
def _place(value, bounds):
    """The number of bounds below the value."""
    place = _ZERO
    for k in range(15):
        place += _ONE if value > bounds[k] else _ZERO
    return place


@njit(**_SEARCH)
def _fit_table(x, w, values, bounds):
    """scale: x is about scale * one of 16 values."""
    extreme = _extreme(x)
    if abs(extreme) < _TINY:
        return _ZERO
    best_gain, scale = np.float32(-np.inf), extreme / values[0]
    for k in range(-7, 8):
        inverse = (values[0] + np.float32(k)) / extreme
        sxl, sll = _ZERO, _ZERO
        for i in range(len(x)):
            q = values[np.int32(_place(x[i] * inverse, bounds))]
            sxl += w[i] * q * x[i]
            sll += w[i] * q * q
        if sll > 0 and sxl * sxl > best_gain * sll:
            scale = sxl / sll
            best_gain = sxl * scale
    return scale


@njit(**_SEARCH)
def _signed_scales(values, weights, half, into):
    """The float16 scale (as float32) with which `values` become whole numbers from -half to half - 1."""
    d = _rounded(_fit_symmetric(values, weights, half))
    inverse = _inverse(d)
    for i in range(len(values)):
        into[i] = max(np.float32(-half), min(np.float32(half - 1), np.floor(values[i] * inverse + _HALF)))
    return d


@njit(**_SEARCH)
def _symmetric_block(x, w, group, half, scale_half, s, q, trial_q, scales, group_w):
    """d: x is about d s[g] q for the 256 weights of a block; s and q are filled."""
    for g in range(len(s)):
        part = slice(group * g, group * (g + 1))
        scales[g] = _fit_symmetric(x[part], w[part], half)
        group_w[g] = w[part].sum()
    d = _signed_scales(scales[: len(s)], group_w[: len(s)], scale_half, s)
    best_error, best_d = np.float32(np.inf), d
    low, high = np.float32(-half), np.float32(half - 1)
    for _ in range(3):
        error, dd, dx = _ZERO, _ZERO, _ZERO
        for g in range(len(s)):
            scale = d * s[g]
            inverse = _inverse(scale)
            for i in range(group * g, group * (g + 1)):
                whole = min(high, max(low, np.floor(x[i] * inverse + _HALF)))
                trial_q[i] = whole
                error += w[i] * (scale * whole - x[i]) ** 2
                dd += w[i] * (s[g] * whole) ** 2
                dx += w[i] * s[g] * whole * x[i]
        if not error < best_error:
            break
        best_error, best_d = error, d
        _copy(trial_q, q)
        if dd <= 0:
            break
        d = _rounded(dx / dd)
    return best_d


@njit(**_SEARCH)
def _encode_symmetric(rows, importance, into, half, scale_half, block_bytes):
    """Q3_K and Q6_K, told apart by `half`, the middle of the quants."""
    w, q, trial = (
        _floats(stack_bytes(1024), (256,)),
        _floats(stack_bytes(1024), (256,)),
        _floats(stack_bytes(1024), (256,)),
    )
    s, scales = _floats(stack_bytes(64), (16,)), _floats(stack_bytes(64), (16,))
    group_w, whole = _floats(stack_bytes(64), (16,)), _bytes(stack_bytes(256), (256,))
    q[:] = 0
    for r in range(rows.shape[0]):
        for b in range(rows.shape[1] // 256):
            x, block = rows[r, 256 * b : 256 * b + 256], into[r, block_bytes * b : block_bytes * (b + 1)]
            _weigh(x, importance, 256 * b, 16, w)
            d = _symmetric_block(x, w, 16, half, scale_half, s, q, trial, scales, group_w)
            for i in range(256):
                whole[i] = np.uint8(q[i] + half)
            if half == 4:
                _put_q3_k(block, whole, s, d)
            else:
                _put_q6_k(block, whole, s, d)


@njit(**_EXACT)
def _put_q3_k(block, q, s, d):
    for i in range(32):
        bits = 0
        for g in range(8):
            bits |= (q[32 * g + i] >> 2) << g
        block[i] = bits
    _put_two_bits(block, 32, q)
    for g in range(8):
        block[96 + g] = (np.int32(s[g] + 32) & 15) | (np.int32(s[g + 8] + 32) & 15) << 4
    for g in range(4):
        bits = 0
        for k in range(4):
            bits |= (np.int32(s[g + 4 * k] + 32) >> 4) << (2 * k)
        block[104 + g] = bits
    _put_half(block, 108, d)


@njit(**_EXACT)
def _put_q6_k(block, q, s, d):
    for half in range(2):
        for i in range(64):
            block[64 * half + i] = (q[128 * half + i] & 15) | (q[128 * half + 64 + i] & 15) << 4
        for i in range(32):
            bits = 0
            for g in range(4):
                bits |= (q[128 * half + 32 * g + i] >> 4) << (2 * g)
            block[128 + 32 * half + i] = bits
    for g in range(16):
        block[192 + g] = np.int32(s[g]) & 255
    _put_half(block, 208, d)


@njit(**_EXACT)
def _q3_k(rows, importance, into):
    """Blocks of Q3_K."""
    _encode_symmetric(rows, importance, into, 4, 32, 110)


@njit(**_EXACT)
def _q6_k(rows, importance, into):
    """Blocks of Q6_K."""
    _encode_symmetric(rows, importance, into, 32, 128, 210)


@njit(**_SEARCH)
def _table_block(x, w, scale_half, s, q, trial_q, scales, group_w, values, bounds):
    """d: x is about d s[g] values[q] for the groups of 32 of a block; s and q are filled.

    A block of one group has no scales of its own: s is 1.
    """
    for g in range(len(s)):
        part = slice(32 * g, 32 * (g + 1))
        scales[g] = _fit_table(x[part], w[part], values, bounds)
        group_w[g] = w[part].sum()
    if len(s) == 1:
        s[0], d = _ONE, _rounded(scales[0])
    else:
        d = _signed_scales(scales[: len(s)], group_w[: len(s)], scale_half, s)
    best_error, best_d = np.float32(np.inf), d
    for _ in range(3):
        error, dd, dx = _ZERO, _ZERO, _ZERO
        for g in range(len(s)):
            scale = d * s[g]
            inverse = _inverse(scale)
            for i in range(32 * g, 32 * (g + 1)):
                place = _place(x[i] * inverse, bounds)
                value = values[np.int32(place)]
                trial_q[i] = place
                error += w[i] * (scale * value - x[i]) ** 2
                dd += w[i] * (s[g] * value) ** 2
                dx += w[i] * s[g] * value * x[i]
        if not error < best_error:
            break
        best_error, best_d = error, d
        _copy(trial_q, q)
        if dd <= 0:
            break
        d = _rounded(dx / dd)
    return best_d


@njit(**_SEARCH)
def _encode_table(rows, importance, into, block_size, block_bytes):
    """IQ4_NL, of one group, and IQ4_XS, of eight."""
    n_groups = block_size // 32
    w, q = _floats(stack_bytes(1024), (block_size,)), _floats(stack_bytes(1024), (block_size,))
    trial, s = _floats(stack_bytes(1024), (block_size,)), _floats(stack_bytes(32), (n_groups,))
    scales, group_w = _floats(stack_bytes(32), (n_groups,)), _floats(stack_bytes(32), (n_groups,))
    q[:] = 0
    values, bounds = _VALUES, _BOUNDS
    for r in range(rows.shape[0]):
        for b in range(rows.shape[1] // block_size):
            x = rows[r, block_size * b : block_size * (b + 1)]
            block = into[r, block_bytes * b : block_bytes * (b + 1)]
            _weigh(x, importance, block_size * b, 32, w)
            d = _table_block(x, w, 32, s, q, trial, scales, group_w, values, bounds)
            _put_half(block, 0, d)
            at = 2
            if n_groups == 8:
                at = 8
                high = 0
                for g in range(8):
                    high |= (np.int32(s[g] + 32) >> 4) << (2 * g)
                block[2], block[3] = high & 255, high >> 8
                for g in range(4):
                    block[4 + g] = (np.int32(s[2 * g] + 32) & 15) | (np.int32(s[2 * g + 1] + 32) & 15) << 4
            for g in range(n_groups):
                for i in range(16):
                    low, top = np.uint8(q[32 * g + i]), np.uint8(q[32 * g + 16 + i])
                    block[at + 16 * g + i] = low | top << 4


@njit(**_EXACT)
def _iq4_nl(rows, importance, into):
    """Blocks of IQ4_NL."""
    _encode_table(rows, importance, into, 32, 18)


@njit(**_EXACT)
def _iq4_xs(rows, importance, into):
    """Blocks of IQ4_XS."""
    _encode_table(rows, importance, into, 256, 136)


@njit(**_EXACT)
def _mxfp4(rows, importance, into):
    """Blocks of MXFP4: the scale follows from the largest weight, so importances change nothing."""
    for r in range(rows.shape[0]):
        for b in range(rows.shape[1] // 32):
            x, block = rows[r, 32 * b : 32 * b + 32], into[r, 17 * b : 17 * b + 17]
            size = abs(_extreme(x))
            # 2^2 is the highest power of two among the values: 4 and 6 have it
            exponent = max((np.int64(np.float32(size).view(np.uint32)) >> 23) - 2, 0)
            scale = np.float32(2.0 ** (exponent - 128)) if size > 0 else _ZERO
            block[0] = exponent
            for i in range(16):
                block[1 + i] = _nearest_fp4(x[i], scale) | _nearest_fp4(x[16 + i], scale) << 4


@njit(**_EXACT)
def _nearest_fp4(weight, scale):
    """The first quant of MXFP4 whose value is nearest."""
    best, least = 0, abs(weight)
    for q in range(1, 16):
        error = abs(scale * _FP4[q] - weight)
        if error < least:
            best, least = q, error
    return best


def _make_kernel(weight_type: str, encode: Any) -> KernelSource:
    """`encode_TYPE`: fills `into`, rows of blocks; `importance` holds float32 [n_columns] or none."""

    def kernel(tile, rows, n_rows, n_columns, importance, n_importance, into, row_bytes):
        encode(
            _rows(rows, (n_rows, n_columns)),
            _floats(importance, (n_importance,)),
            _byte_rows(into, (n_rows, row_bytes)),
        )
        return 0

    return KernelSource(f"encode_{weight_type}", kernel)


_ENCODERS = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "Q8_K": _q8_k,
    "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip
_SOURCES = [_make_kernel(*entry) for entry in _ENCODERS.items()]
KERNELS = {source.name: source for source in _SOURCES}
