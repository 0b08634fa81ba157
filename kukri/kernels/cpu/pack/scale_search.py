"""The search for scales of quantizer kernels: least-squares fits of a block's weights.

Each group of 16 or 32 weights tries a row of scales and takes the one whose fit loses least, then the
block's own scale (and minimum) is fitted again to the quants that came out. The squared error is minimized,
that of large weights and of important columns counting more, as in GGML. Sums are reordered, as no
bits are promised.
"""

from __future__ import annotations

import numpy as np

from kukri.kernels.cpu.compile.intrinsics import reordered, routine
from kukri.quant.types.iq4 import IQ4_VALUES

ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
_TINY = np.float32(1e-15)  # groups whose weights are all smaller become zero
VALUES = np.array(IQ4_VALUES, np.float32)  # and the bounds between them
BOUNDS = ((VALUES[1:] + VALUES[:-1]) / 2).astype(np.float32)


@routine
def _copy(source, into):
    for i in range(len(source)):
        into[i] = source[i]


@routine
def half_bits(value):
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


@routine
def _of_half(bits):
    """The bits of a finite float16 -> float32."""
    exponent, fraction = (bits >> 10) & 31, bits & 1023
    if exponent == 0:
        size = np.float32(fraction * (1.0 / 16777216.0))
    else:
        size = np.float32((1024 + fraction) * 2.0 ** (exponent - 25))
    return -size if bits & 0x8000 else size


@routine
def rounded(value):
    """The nearest float16 as float32, the largest finite one beyond the range."""
    bits = half_bits(value)
    return _of_half(bits - 1 if bits & 0x7FFF == 0x7C00 else bits)


@routine
def inverted(scale):
    """1 / scale, and 0 if the scale is 0 or so small that its inverse overflows (undefined in GGML)."""
    inverse = ONE / scale
    return ZERO if np.isinf(inverse) else inverse


@routine
def extreme_of(x):
    """The first weight of the largest size."""
    size, found = ZERO, ZERO
    for i in range(len(x)):
        if abs(x[i]) > size:
            size, found = abs(x[i]), x[i]
    return found


@reordered
def weigh(x, importance, first, group, w):
    """The weight of each error: w [n], from the value's size and its column's importance."""
    total = ZERO
    for i in range(len(x)):
        total += x[i] * x[i]
    mean = total / np.float32(len(x))
    for g in range(len(x) // group):
        here = ZERO
        for i in range(group * g, group * (g + 1)):
            here += x[i] * x[i]
        size = np.sqrt(here / np.float32(group))
        for i in range(group * g, group * (g + 1)):
            if len(importance):
                w[i] = importance[first + i] * np.sqrt(mean + mean + x[i] * x[i])
            else:
                w[i] = size + abs(x[i])


@reordered
def fit_affine(x, w, most, first, step, n_steps):
    """scale, minimum: x is about scale * q - minimum with q from 0 to `most` and minimum from 0."""
    least, largest = ZERO, x[0]
    sw, sx = ZERO, ZERO
    for i in range(len(x)):
        least, largest = min(least, x[i]), max(largest, x[i])
        sw += w[i]
        sx += w[i] * x[i]
    if largest - least < _TINY or sw <= 0:
        return ZERO, -least
    top = np.float32(most)
    best_gain, scale, minimum = np.float32(-np.inf), (largest - least) / top, least
    for k in range(n_steps):
        inverse = (top + np.float32(first) + np.float32(step) * np.float32(k)) / (largest - least)
        sl, sll, sxl = ZERO, ZERO, ZERO
        for i in range(len(x)):
            q = min(top, np.floor((x[i] - least) * inverse + HALF))
            sl += w[i] * q
            sll += w[i] * q * q
            sxl += w[i] * q * x[i]
        determinant = sw * sll - sl * sl
        if determinant <= 0:
            continue
        a, b = (sw * sxl - sx * sl) / determinant, (sll * sx - sl * sxl) / determinant
        if b > 0:
            a, b = sxl / sll, ZERO
        # what the squared error is less than the sum of w x^2
        gain = a * (np.float32(2) * sxl - a * sll) + b * (np.float32(2) * (sx - a * sl) - b * sw)
        if gain > best_gain and a > 0:
            best_gain, scale, minimum = gain, a, b
    return scale, -minimum


@reordered
def _whole_scales(values, weights, most, into):
    """The float16 scale (as float32) with which `values` from 0 become whole numbers up to `most`."""
    largest = ZERO
    for i in range(len(values)):
        largest = max(largest, values[i])
    if largest < _TINY:
        into[:] = 0
        return ZERO
    best_error, best = np.float32(np.inf), largest / np.float32(most)
    for k in range(-8, 17):
        trial = largest / (np.float32(most) + np.float32(0.1) * np.float32(k))
        svl, sll = ZERO, ZERO
        for i in range(len(values)):
            q = min(np.float32(most), np.floor(values[i] / trial + HALF))
            svl += weights[i] * values[i] * q
            sll += weights[i] * q * q
        if sll <= 0:
            continue
        trial = svl / sll
        error = ZERO
        for i in range(len(values)):
            q = min(np.float32(most), np.floor(values[i] / trial + HALF))
            error += weights[i] * (values[i] - trial * q) ** 2
        if error < best_error:
            best_error, best = error, trial
    best = rounded(best)
    inverse = inverted(best)
    for i in range(len(values)):
        into[i] = min(np.float32(most), np.floor(values[i] * inverse + HALF))
    return best


@reordered
def affine_block(x, w, group, most, steps, scale_most, s, t, q, trial_q, scales, minimums, group_w):
    """d, m: x is about d s[g] q - m t[g] for the 256 weights of a block; s, t, q are filled."""
    first, step, n_steps = steps
    n_groups = len(x) // group
    for g in range(n_groups):
        part = slice(group * g, group * (g + 1))
        scales[g], minimums[g] = fit_affine(x[part], w[part], most, first, step, n_steps)
        group_w[g] = w[part].sum()
    d = _whole_scales(scales[:n_groups], group_w[:n_groups], scale_most, s)
    m = _whole_scales(minimums[:n_groups], group_w[:n_groups], scale_most, t)
    best_error, best_d, best_m = np.float32(np.inf), d, m
    for _ in range(3):
        error = ZERO
        dd, dm, mm, dx, mx = ZERO, ZERO, ZERO, ZERO, ZERO
        for g in range(n_groups):
            scale, minimum = d * s[g], m * t[g]
            inverse = inverted(scale)
            for i in range(group * g, group * (g + 1)):
                whole = min(np.float32(most), max(ZERO, np.floor((x[i] + minimum) * inverse + HALF)))
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
            d, m = dx / dd, ZERO
        if m < 0:
            d, m = (dx / dd if dd > 0 else ZERO), ZERO
        d, m = rounded(max(d, ZERO)), rounded(m)
    return best_d, best_m


@reordered
def fit_symmetric(x, w, half):
    """scale: x is about scale * q, q from -half to half - 1."""
    extreme = extreme_of(x)
    if abs(extreme) < _TINY:
        return ZERO
    low, high = np.float32(-half), np.float32(half - 1)
    best_gain, scale = np.float32(-np.inf), extreme / low
    for k in range(-9, 10):
        inverse = (low + np.float32(0.1) * np.float32(k)) / extreme
        sxl, sll = ZERO, ZERO
        for i in range(len(x)):
            q = max(low, min(high, np.floor(x[i] * inverse + HALF)))
            sxl += w[i] * q * x[i]
            sll += w[i] * q * q
        if sll > 0 and sxl * sxl > best_gain * sll:
            scale = sxl / sll
            best_gain = sxl * scale
    return scale


@reordered
def _place(value, bounds):
    """The number of bounds below the value."""
    place = ZERO
    for k in range(15):
        place += ONE if value > bounds[k] else ZERO
    return place


@reordered
def _fit_table(x, w, values, bounds):
    """scale: x is about scale * one of 16 values."""
    extreme = extreme_of(x)
    if abs(extreme) < _TINY:
        return ZERO
    best_gain, scale = np.float32(-np.inf), extreme / values[0]
    for k in range(-7, 8):
        inverse = (values[0] + np.float32(k)) / extreme
        sxl, sll = ZERO, ZERO
        for i in range(len(x)):
            q = values[np.int32(_place(x[i] * inverse, bounds))]
            sxl += w[i] * q * x[i]
            sll += w[i] * q * q
        if sll > 0 and sxl * sxl > best_gain * sll:
            scale = sxl / sll
            best_gain = sxl * scale
    return scale


@reordered
def _signed_scales(values, weights, half, into):
    """The float16 scale (as float32) with which `values` become whole numbers from -half to half - 1."""
    d = rounded(fit_symmetric(values, weights, half))
    inverse = inverted(d)
    for i in range(len(values)):
        into[i] = max(np.float32(-half), min(np.float32(half - 1), np.floor(values[i] * inverse + HALF)))
    return d


@reordered
def symmetric_block(x, w, group, half, scale_half, s, q, trial_q, scales, group_w):
    """d: x is about d s[g] q for the 256 weights of a block; s and q are filled."""
    for g in range(len(s)):
        part = slice(group * g, group * (g + 1))
        scales[g] = fit_symmetric(x[part], w[part], half)
        group_w[g] = w[part].sum()
    d = _signed_scales(scales[: len(s)], group_w[: len(s)], scale_half, s)
    best_error, best_d = np.float32(np.inf), d
    low, high = np.float32(-half), np.float32(half - 1)
    for _ in range(3):
        error, dd, dx = ZERO, ZERO, ZERO
        for g in range(len(s)):
            scale = d * s[g]
            inverse = inverted(scale)
            for i in range(group * g, group * (g + 1)):
                whole = min(high, max(low, np.floor(x[i] * inverse + HALF)))
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
        d = rounded(dx / dd)
    return best_d


@reordered
def table_block(x, w, scale_half, s, q, trial_q, scales, group_w, values, bounds):
    """d: x is about d s[g] values[q] for the groups of 32 of a block; s and q are filled.

    A block of one group has no scales of its own: s is 1.
    """
    for g in range(len(s)):
        part = slice(32 * g, 32 * (g + 1))
        scales[g] = _fit_table(x[part], w[part], values, bounds)
        group_w[g] = w[part].sum()
    if len(s) == 1:
        s[0], d = ONE, rounded(scales[0])
    else:
        d = _signed_scales(scales[: len(s)], group_w[: len(s)], scale_half, s)
    best_error, best_d = np.float32(np.inf), d
    for _ in range(3):
        error, dd, dx = ZERO, ZERO, ZERO
        for g in range(len(s)):
            scale = d * s[g]
            inverse = inverted(scale)
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
        d = rounded(dx / dd)
    return best_d
