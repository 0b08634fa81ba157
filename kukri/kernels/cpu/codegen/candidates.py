"""Tokens in play while a row is sampled: passes over their logits, and selections among them.

At first all tokens of the row are in play. The first stage that filters narrows them to *candidates*: ids,
ascending, with their logits, padded with -inf to whole vectors. They are gathered above a bound that provably
lies at or under the cut that is sought. The largest by count or by weight are found by a radix selection on
the bits of float32 keys, so that nothing is ever sorted.

`c` is the address of a context (sampling_scratch.py), which knows which tokens are in play.
"""

from __future__ import annotations

import numpy as np

from kukri.kernels import sampling_record
from kukri.kernels.cpu.codegen.sampling_scratch import CONTEXT, GROUP, HISTOGRAM, N_DIGITS
from kukri.kernels.cpu.compile.intrinsics import (
    device,
    load_f32,
    load_f64,
    load_i32,
    load_i64,
    routine,
    store_f32,
    store_f64,
    store_i32,
    store_i64,
)
from kukri.kernels.cpu.compile.simd import (
    add_f64,
    exponential,
    lanes_from,
    lanes_nan,
    load_f32x16,
    max_lanes,
    maximum,
    multiply_f64,
    power_of_two,
    round_even,
    splat,
    splat_f64,
    store_f32x16,
    sum_lanes,
    sum_lanes_f64,
    to_i32,
    widen,
    zero_below,
)
from kukri.kernels.sampling_record import LOG2_E, MIN_DEPTH, WEIGHT_BITS

_P4, _P3, _P2, _P1, _P0 = sampling_record.POWER_TERMS
LOWEST = -3.4028234663852886e38  # the lowest finite float32
_INFINITE = float("inf")
f32 = device(sampling_record.f32)


# ---- the tokens in play


@device
def is_whole(c):
    """True if every token of the row is in play."""
    return load_i64(c + CONTEXT.n_candidates) < 0


@device
def in_play(c):
    """(address, number) of the logits in play, padded with -inf to whole vectors."""
    count = load_i64(c + CONTEXT.n_candidates)
    if count < 0:
        return load_i64(c + CONTEXT.row), (load_i64(c + CONTEXT.n) + 15) & -16
    return load_i64(c + CONTEXT.logits), (count + 15) & -16


@device
def token_at(c, place):
    """Return the token whose logit is number `place` of the logits in play."""
    return place if is_whole(c) else load_i32(load_i64(c + CONTEXT.ids) + 4 * place)


@device
def peak_of(c):
    """The largest logit in play."""
    return load_f64(c + CONTEXT.peak)


@device
def scale_of(c):
    """The scale of the logits: 1 after all temperatures so far."""
    return load_f64(c + CONTEXT.scale)


@routine
def find_peak(c):
    """Finds the largest logit in play once more, and the maxima that `gather` needs."""
    logits, padded = in_play(c)
    if is_whole(c):
        peak = survey(logits, padded, load_i64(c + CONTEXT.maxima))
    else:
        best = splat(-_INFINITE)
        for i in range(0, 4 * padded, 64):
            best = maximum(best, load_f32x16(logits + i))
        peak = max_lanes(best)
    store_f64(c + CONTEXT.peak, np.float64(peak))
    store_i64(c + CONTEXT.is_edited, 0)


@routine
def gather(c, bound):
    """Makes the tokens of the row whose logits are at least `bound`, a finite number, the candidates."""
    row = load_i64(c + CONTEXT.row)
    padded = (load_i64(c + CONTEXT.n) + 15) & -16
    maxima = load_i64(c + CONTEXT.maxima)
    ids = load_i64(c + CONTEXT.ids)
    logits = load_i64(c + CONTEXT.logits)
    count = 0
    for start in range(0, padded, 16 * GROUP):
        if lanes_from(load_f32x16(maxima + 4 * start // GROUP), bound) == 0:
            continue
        for i in range(start, min(start + 16 * GROUP, padded), 16):
            bits = lanes_from(load_f32x16(row + 4 * i), bound)
            if bits != 0:
                for lane in range(16):
                    store_i32(ids + 4 * count, i + lane)
                    store_f32(logits + 4 * count, load_f32(row + 4 * (i + lane)))
                    count += (bits >> lane) & 1
    store_f32x16(logits + 4 * count, splat(-_INFINITE))
    store_i64(c + CONTEXT.n_candidates, count)


@routine
def keep_from(c, values, bound):
    """Narrows the candidates to those whose value is at least `bound`."""
    ids = load_i64(c + CONTEXT.ids)
    logits = load_i64(c + CONTEXT.logits)
    count = 0
    for i in range(0, 4 * load_i64(c + CONTEXT.n_candidates), 4):
        if load_f32(values + i) >= bound:
            store_i32(ids + 4 * count, load_i32(ids + i))
            store_f32(logits + 4 * count, load_f32(logits + i))
            count += 1
    store_f32x16(logits + 4 * count, splat(-_INFINITE))
    store_i64(c + CONTEXT.n_candidates, count)


@device
def narrow(c, bound):
    """Narrows the tokens in play to those whose logits are at least `bound`."""
    if is_whole(c):
        gather(c, bound)
    else:
        keep_from(c, load_i64(c + CONTEXT.logits), bound)


@routine
def keep_most(c, values, weights, target):
    """Narrows the candidates to the fewest of the largest values that weigh `target`; weights 0: 1 each."""
    target = max(target, 1.0)
    m = load_i64(c + CONTEXT.n_candidates)
    ids = load_i64(c + CONTEXT.ids)
    logits = load_i64(c + CONTEXT.logits)
    cut, reached = _cut(values, weights, m, target, c + HISTOGRAM)
    count = 0
    for i in range(0, 4 * m, 4):
        key = _key(load_i32(values + i))
        if key > cut or (key == cut and reached < target):
            if key == cut:
                reached += np.float64(load_f32(weights + i)) if weights != 0 else 1.0
            store_i32(ids + 4 * count, load_i32(ids + i))
            store_f32(logits + 4 * count, load_f32(logits + i))
            count += 1
    store_f32x16(logits + 4 * count, splat(-_INFINITE))
    store_i64(c + CONTEXT.n_candidates, count)


@routine
def keep_largest(c, k):
    """Narrows the tokens in play to the k largest logits."""
    if is_whole(c):
        gather(c, _bound_of_largest(c, k))
    if k < load_i64(c + CONTEXT.n_candidates):
        keep_most(c, load_i64(c + CONTEXT.logits), 0, float(k))


@routine
def _bound_of_largest(c, k):
    """Return a bound that at least k logits of the row reach, and few more, or that all finite logits reach.

    At least as many elements reach a bound as maxima of groups do, so the maxima are used if there are
    enough.
    """
    values, n_values = in_play(c)
    n_maxima = (n_values // GROUP + 15) & -16
    if 4 * k <= n_maxima:
        values = load_i64(c + CONTEXT.maxima)
        n_values = n_maxima
    peak = peak_of(c)
    few = k + k // 4 + 8
    depth = 2.0
    outside = 0.0
    bound = np.float32(peak)
    count = 0
    while True:
        bound = f32(peak - depth)
        count = count_from(values, n_values, bound)
        if count >= k or bound <= np.float32(LOWEST):
            break
        outside = depth
        depth *= 2.0
    for _ in range(10):
        if count <= few:
            break
        middle = 0.5 * (outside + depth)
        tried = f32(peak - middle)
        n = count_from(values, n_values, tried)
        if n >= k:
            depth = middle
            bound = tried
            count = n
        else:
            outside = middle
    return bound


@device
def _key(bits):
    """The bits of a float32, sign-extended, as an integer from 0 to 2^32 - 1 in the floats' order."""
    if bits == -2147483648:  # -0.0
        bits = 0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) + 2147483648


@device
def _cut(values, weights, m, target, histogram):
    """(the key down to which values weigh `target`, the weight above it); weights 0: 1 each."""
    prefix = 0
    above = 0.0
    for level in range(4):
        shift = 24 - 8 * level
        for i in range(0, 8 * N_DIGITS, 64):
            store_f32x16(histogram + i, splat(0.0))
        for i in range(0, 4 * m, 4):
            key = _key(load_i32(values + i))
            if (key >> (shift + 8)) == prefix:
                where = histogram + 8 * ((key >> shift) & 255)
                weight = np.float64(load_f32(weights + i)) if weights != 0 else 1.0
                store_f64(where, load_f64(where) + weight)
        digit = 255
        while digit > 0 and above + load_f64(histogram + 8 * digit) < target:
            above += load_f64(histogram + 8 * digit)
            digit -= 1
        prefix = (prefix << 8) | digit
    return prefix, above


# ---- passes over arrays of logits, padded with -inf to whole vectors


@routine
def copy_row(row, n, out):
    """Copies n float32, padded with -inf; returns the largest, or nan if any is nan."""
    whole = n & -16
    best = splat(-_INFINITE)
    has_nan = 0
    for i in range(0, 4 * whole, 64):
        v = load_f32x16(row + i)
        store_f32x16(out + i, v)
        best = maximum(best, v)
        has_nan |= lanes_nan(v)
    store_f32x16(out + 4 * whole, splat(-_INFINITE))
    for i in range(4 * whole, 4 * n, 4):
        store_f32(out + i, load_f32(row + i))
    v = load_f32x16(out + 4 * whole)
    has_nan |= lanes_nan(v)
    largest = max_lanes(maximum(best, v))
    return largest if has_nan == 0 else largest * np.float32(np.nan)


@routine
def survey(row, padded, maxima):
    """Stores the largest of each GROUP elements a vector apart; returns the largest of all, or nan."""
    best = splat(-_INFINITE)
    has_nan = 0
    for start in range(0, 4 * padded, 64 * GROUP):
        group = splat(-_INFINITE)
        for i in range(row + start, row + min(start + 64 * GROUP, 4 * padded), 64):
            v = load_f32x16(i)
            group = maximum(group, v)
            has_nan |= lanes_nan(v)
        store_f32x16(maxima + start // GROUP, group)
        best = maximum(best, group)
    largest = max_lanes(best)
    return largest if has_nan == 0 else largest * np.float32(np.nan)


@routine
def first_of(logits, padded, value):
    """The index of the first element equal to `value`, which is in the array."""
    for i in range(0, padded, 16):
        if lanes_from(load_f32x16(logits + 4 * i), value) != 0:
            for lane in range(16):
                if load_f32(logits + 4 * (i + lane)) == value:
                    return i + lane
    return 0


@routine
def first_of_peak(c):
    """The first token of the row with its largest logit, while the maxima are true: one group is searched."""
    row = load_i64(c + CONTEXT.row)
    padded = (load_i64(c + CONTEXT.n) + 15) & -16
    maxima = load_i64(c + CONTEXT.maxima)
    peak = np.float32(peak_of(c))
    start = 0
    while start + 16 * GROUP < padded and lanes_from(load_f32x16(maxima + 4 * start // GROUP), peak) == 0:
        start += 16 * GROUP
    return start + first_of(row + 4 * start, min(16 * GROUP, padded - start), peak)


@routine
def count_from(logits, padded, bound):
    """The number of elements that are at least `bound`."""
    one = splat(1.0)
    count = splat(0.0)
    for i in range(0, 4 * padded, 64):
        count = count + zero_below(load_f32x16(logits + i), bound, one)
    return np.int64(sum_lanes(count))


@device
def _weight(depth):
    """The weights of 16 depths: as `weights_of` of the reference, operation by operation."""
    t = maximum(depth, splat(MIN_DEPTH))
    n = round_even(t)
    f = t - n
    p = splat(_P4) * f + splat(_P3)
    p = p * f + splat(_P2)
    p = p * f + splat(_P1)
    p = p * f + splat(_P0)
    p = p * f + splat(1.0)
    return round_even(p * power_of_two(to_i32(n + splat(float(WEIGHT_BITS)))))


@routine
def weigh(c, logits, padded):
    """Stores the depths and weights of logits; returns the weights' sum."""
    depths = load_i64(c + CONTEXT.depths)
    weights = load_i64(c + CONTEXT.weights)
    top = splat(np.float32(peak_of(c)))
    factor = splat(np.float32(scale_of(c) * LOG2_E))
    total = splat_f64(0.0)
    for i in range(0, 4 * padded, 64):
        depth = (load_f32x16(logits + i) - top) * factor
        weight = _weight(depth)
        store_f32x16(depths + i, depth)
        store_f32x16(weights + i, weight)
        total = add_f64(total, widen(weight))
    return sum_lanes_f64(total)


@device
def weigh_candidates(c):
    """Stores the candidates' depths and weights; returns the weights' sum."""
    return weigh(c, load_i64(c + CONTEXT.logits), (load_i64(c + CONTEXT.n_candidates) + 15) & -16)


@routine
def sum_weights(c, logits, padded):
    """The sum of the weights of logits."""
    top = splat(np.float32(peak_of(c)))
    factor = splat(np.float32(scale_of(c) * LOG2_E))
    total = splat_f64(0.0)
    for i in range(0, 4 * padded, 64):
        total = add_f64(total, widen(_weight((load_f32x16(logits + i) - top) * factor)))
    return sum_lanes_f64(total)


@device
def total_weight(c):
    """The sum of the weights in play."""
    logits, padded = in_play(c)
    return sum_weights(c, logits, padded)


@routine
def mean_depth(c):
    """(the sum of the weights in play, the mean depth of a token drawn)."""
    logits, padded = in_play(c)
    top = splat(np.float32(peak_of(c)))
    factor = splat(np.float32(scale_of(c) * LOG2_E))
    total = splat_f64(0.0)
    mean = splat_f64(0.0)
    for i in range(0, 4 * padded, 64):
        depth = (load_f32x16(logits + i) - top) * factor
        weight = widen(_weight(depth))
        total = add_f64(total, weight)
        mean = add_f64(mean, multiply_f64(weight, widen(maximum(depth, splat(MIN_DEPTH)))))
    weight_sum = sum_lanes_f64(total)
    return weight_sum, sum_lanes_f64(mean) / weight_sum


@routine
def sigma_cut(c, n_sigma):
    """The logit that lies `n_sigma` standard deviations of the logits in play below the largest."""
    logits, padded = in_play(c)
    top = splat(np.float32(peak_of(c)))
    one = splat(1.0)
    lowest = np.float32(LOWEST)
    count = splat(0.0)
    total = splat_f64(0.0)
    squares = splat_f64(0.0)
    for i in range(0, 4 * padded, 64):
        x = load_f32x16(logits + i)
        count = count + zero_below(x, lowest, one)
        below = widen(zero_below(x, lowest, maximum(x - top, splat(lowest))))
        total = add_f64(total, below)
        squares = add_f64(squares, multiply_f64(below, below))
    n = np.float64(sum_lanes(count))
    mean = sum_lanes_f64(total) / n
    deviation = np.sqrt(max(sum_lanes_f64(squares) / n - mean * mean, 0.0))
    return f32(peak_of(c) - n_sigma * deviation)


@routine
def sum_exp(logits, padded, peak):
    """The sum of exp(x - peak)."""
    top = splat(np.float32(peak))
    total = splat_f64(0.0)
    for i in range(0, 4 * padded, 64):
        total = add_f64(total, widen(exponential(load_f32x16(logits + i) - top)))
    return sum_lanes_f64(total)
