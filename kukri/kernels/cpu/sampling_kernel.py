"""The sampling kernel: the stages of `reference_sampling`, to the bit, without sorting a vocabulary.

A row is copied to its thread's scratch, where it stays in a near cache and may be edited. The first stage
that filters narrows it to candidates (candidates.py); from then on only those are looked at.

`choose_tokens` runs on all threads: each tile is a thread's scratch, and takes rows until none is left.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kukri.kernels import sampling_record
from kukri.kernels.cpu.atomics import atomic_add
from kukri.kernels.cpu.candidates import (
    LOWEST,
    bound_of_largest,
    copy_row,
    count_from,
    f32,
    first_of,
    gather,
    keep_from,
    keep_most,
    largest,
    mean_depth,
    sigma_cut,
    sum_exp,
    survey,
    weigh,
    weigh_only,
)
from kukri.kernels.cpu.intrinsics import (
    device,
    load_f32,
    load_f64,
    load_i32,
    load_i64,
    part,
    routine,
    store_f32,
    store_f64,
    store_i32,
    store_i64,
)
from kukri.kernels.cpu.kernel_cache import KernelSource
from kukri.kernels.cpu.simd import splat, store_f32x16
from kukri.kernels.cpu.state import (
    SCRATCH_ARRAYS,
    SCRATCH_BLOCK_SUMS,
    SCRATCH_HISTOGRAM,
    SUM_BLOCK,
    padded_size,
)
from kukri.kernels.sampling_record import (
    LN_2,
    LOG2_E,
    MAX_SCALE,
    MIN_SCALE,
    MIROSTAT_TOKENS,
    WEIGHT_ONE,
    SamplingRecord,
)

_INFINITE = float("inf")
_ALL_WEIGHTS = 36.0  # a depth below which all weights are 0
_MARGIN = 1.0  # of a depth found from a weight: half a unit rounds up to 1
_padded_size = device(padded_size)
_log_of, _exp_of = routine(sampling_record.log_of), routine(sampling_record.exp_of)

# Where a record's fields are
_FIELDS: Any = SamplingRecord
_ROW, _IS_GIVEN, _IS_GREEDY = _FIELDS.row.offset, _FIELDS.is_given.offset, _FIELDS.is_greedy.offset
_TOP_K, _XTC_APPLIES = _FIELDS.top_k.offset, _FIELDS.xtc_applies.offset
_N_TOP, _TOP_IDS, _TOP_LOGITS = _FIELDS.n_top.offset, _FIELDS.top_ids.offset, _FIELDS.top_logits.offset
_N_TOP_FOUND = _FIELDS.n_top_found.offset
_N_BIAS, _BIAS_IDS = _FIELDS.n_bias.offset, _FIELDS.bias_ids.offset
_BIAS_VALUES = _FIELDS.bias_values.offset
_N_SEEN, _SEEN_IDS = _FIELDS.n_seen.offset, _FIELDS.seen_ids.offset
_SEEN_COUNTS, _GENERATED_COUNTS = _FIELDS.seen_counts.offset, _FIELDS.generated_counts.offset
_N_DRY, _DRY_IDS, _DRY_VALUES = _FIELDS.n_dry.offset, _FIELDS.dry_ids.offset, _FIELDS.dry_values.offset
_N_FORBIDDEN, _FORBIDDEN_IDS = _FIELDS.n_forbidden.offset, _FIELDS.forbidden_ids.offset
_N_ALLOWED, _ALLOWED_WORDS = _FIELDS.n_allowed.offset, _FIELDS.allowed_words.offset
_STATUS, _TOKEN, _U = _FIELDS.status.offset, _FIELDS.token.offset, _FIELDS.u.offset
_TOP_P, _TYPICAL_P, _MIN_P_DEPTH = (
    _FIELDS.top_p.offset,
    _FIELDS.typical_p.offset,
    _FIELDS.min_p_depth.offset,
)
_TOP_N_SIGMA, _XTC_THRESHOLD = _FIELDS.top_n_sigma.offset, _FIELDS.xtc_threshold.offset
_TEMPERATURE, _TEMPERATURE_RANGE = _FIELDS.temperature.offset, _FIELDS.temperature_range.offset
_TEMPERATURE_EXPONENT = _FIELDS.temperature_exponent.offset
_REPETITION, _PRESENCE = _FIELDS.repetition_penalty.offset, _FIELDS.presence_penalty.offset
_FREQUENCY, _SURPRISE_POWER = _FIELDS.frequency_penalty.offset, _FIELDS.surprise_power.offset
_PROBABILITY, _PEAK, _SUM_EXP = _FIELDS.probability.offset, _FIELDS.peak.offset, _FIELDS.sum_exp.offset
_STAGES = _FIELDS.stages.offset


# ---- edits: on the row (m < 0), or on candidates that hold the id


@device
def _place(ids, m, token):
    """The place of a token among the candidates, -1 where it is not; in the whole row it is the id."""
    if m < 0:
        return token
    low = 0
    high = m
    while low < high:
        middle = (low + high) >> 1
        if load_i32(ids + 4 * middle) < token:
            low = middle + 1
        else:
            high = middle
    if low < m and load_i32(ids + 4 * low) == token:
        return low
    return -1


@routine
def _penalize(record, logits, ids, m, scale):
    seen, counts = load_i64(record + _SEEN_IDS), load_i64(record + _SEEN_COUNTS)
    generated = load_i64(record + _GENERATED_COUNTS)
    repetition, presence = load_f64(record + _REPETITION), load_f64(record + _PRESENCE)
    frequency = load_f64(record + _FREQUENCY)
    for i in range(0, 4 * load_i64(record + _N_SEEN), 4):
        place = _place(ids, m, load_i32(seen + i))
        if place >= 0:
            x = np.float64(load_f32(logits + 4 * place)) * scale
            if load_i32(counts + i) > 0:
                x = x / repetition if x > 0.0 else x * repetition
            n = load_i32(generated + i)
            x = x - (presence if n > 0 else 0.0)
            x = (x - frequency * n) / scale
            store_f32(logits + 4 * place, np.float32(x))


@device
def _take(table, values, n, logits, ids, m, scale):
    """Takes `values` / scale from the logits of a table's ids."""
    for i in range(n):
        place = _place(ids, m, load_i32(table + 4 * i))
        if place >= 0:
            x = np.float64(load_f32(logits + 4 * place))
            store_f32(logits + 4 * place, np.float32(x - load_f64(values + 8 * i) / scale))


@routine
def _allow(words, n, row):
    """Makes -inf those of n elements whose bits are 0 in int32 words."""
    for i in range(0, n, 16):
        bits = (load_i32(words + 4 * (i >> 5)) >> (i & 16)) & 0xFFFF
        if bits == 0:
            store_f32x16(row + 4 * i, splat(-_INFINITE))
        elif bits != 0xFFFF:
            for lane in range(16):
                if (bits >> lane) & 1 == 0:
                    store_f32(row + 4 * (i + lane), np.float32(-_INFINITE))


@routine
def _edit_row(record, n, row):
    """The bias, and the tokens that may not come."""
    ids, values = load_i64(record + _BIAS_IDS), load_i64(record + _BIAS_VALUES)
    for i in range(load_i64(record + _N_BIAS)):
        where = row + 4 * load_i32(ids + 4 * i)
        store_f32(where, np.float32(np.float64(load_f32(where)) + load_f64(values + 8 * i)))
    if load_i64(record + _N_ALLOWED) != 0:
        _allow(load_i64(record + _ALLOWED_WORDS), n, row)
    forbidden = load_i64(record + _FORBIDDEN_IDS)
    for i in range(load_i64(record + _N_FORBIDDEN)):
        store_f32(row + 4 * load_i32(forbidden + 4 * i), np.float32(-_INFINITE))


# ---- stages. Each returns the number of candidates, -1 while the whole row is in play.


@device
def _is_edit(stage):
    return stage == sampling_record.PENALTIES or stage == sampling_record.DRY


@routine
def _run_edit(record, stage, logits, ids, m, scale):
    if stage == sampling_record.PENALTIES:
        _penalize(record, logits, ids, m, scale)
    else:
        n = load_i64(record + _N_DRY)
        _take(load_i64(record + _DRY_IDS), load_i64(record + _DRY_VALUES), n, logits, ids, m, scale)


@routine
def _run_top_k(k, row, padded, maxima, m, peak, ids, logits, histogram):
    if m < 0:
        m = gather(row, padded, maxima, bound_of_largest(row, padded, maxima, k, peak), ids, logits)
    if k >= m:
        return m
    return keep_most(logits, np.int64(0), m, float(k), ids, logits, histogram)


@routine
def _run_cut(bound, row, padded, maxima, m, ids, logits):
    """Keeps logits that are at least `bound`."""
    if m < 0:
        return gather(row, padded, maxima, bound, ids, logits)
    return keep_from(logits, m, bound, ids, logits)


@routine
def _run_top_p(p, row, padded, maxima, m, peak, scale, ids, logits, depths, weights, histogram):
    if m < 0:
        total = weigh_only(row, padded, peak, scale)
        depth = 4.0
        while True:  # larger depths until the nucleus is seen to lie in what was gathered
            depth = min(depth, _ALL_WEIGHTS)
            m = gather(row, padded, maxima, f32(peak - depth / (scale * LOG2_E)), ids, logits)
            found = weigh(logits, (m + 15) & -16, peak, scale, depths, weights)
            if found >= p * total or depth == _ALL_WEIGHTS:
                break
            depth *= 1.4
    else:
        total = weigh(logits, (m + 15) & -16, peak, scale, depths, weights)
    return keep_most(logits, weights, m, p * total, ids, logits, histogram)


@routine
def _run_typical(p, row, padded, maxima, m, peak, scale, ids, logits, depths, weights, histogram):
    if m < 0:
        total, mean = mean_depth(row, padded, peak, scale)
        depth = 8.0
        while True:
            # what lies deeper is further from the mean than all that was gathered: it is not needed if that
            # holds the share p; the margin is for the rounding of depths
            m = gather(row, padded, maxima, f32(peak - depth / (scale * LOG2_E)), ids, logits)
            weigh(logits, (m + 15) & -16, peak, scale, depths, weights)
            found = 0.0
            for i in range(0, 4 * m, 4):
                if load_f32(depths + i) >= 0.01 - depth:
                    found += np.float64(load_f32(weights + i))
            if (found >= p * total and 0.02 - depth <= 2.0 * mean) or depth > 100.0:
                break
            depth *= 1.5
    else:
        total, mean = mean_depth(logits, (m + 15) & -16, peak, scale)
        weigh(logits, (m + 15) & -16, peak, scale, depths, weights)
    for i in range(0, 4 * m, 4):
        store_f32(depths + i, -np.float32(abs(np.float64(load_f32(depths + i)) - mean)))
    return keep_most(depths, weights, m, p * total, ids, logits, histogram)


@routine
def _run_xtc(threshold, row, padded, maxima, m, peak, scale, ids, logits, depths, weights):
    if m < 0:
        total = weigh_only(row, padded, peak, scale)
        least_weight = max(threshold * total, 1.0)
        bound = f32(peak - _log_of(WEIGHT_ONE / least_weight) / scale - _MARGIN / scale)
        n = gather(row, padded, maxima, bound, ids, logits)
        weigh(logits, (n + 15) & -16, peak, scale, depths, weights)
    else:
        n = m
        least_weight = max(threshold * weigh(logits, (m + 15) & -16, peak, scale, depths, weights), 1.0)
    least = -1
    n_choices = 0
    for i in range(n):
        if load_f32(weights + 4 * i) >= least_weight:
            n_choices += 1
            if least < 0 or load_f32(logits + 4 * i) <= load_f32(logits + 4 * least):
                least = i
    if n_choices < 2:
        return m
    count = 0
    for i in range(n):
        if load_f32(weights + 4 * i) < least_weight or i == least:
            store_i32(ids + 4 * count, load_i32(ids + 4 * i))
            store_f32(logits + 4 * count, load_f32(logits + 4 * i))
            count += 1
        elif m < 0:
            store_f32(row + 4 * load_i32(ids + 4 * i), np.float32(-_INFINITE))
    store_f32x16(logits + 4 * count, splat(-_INFINITE))
    return np.int64(-1) if m < 0 else count


@routine
def _new_scale(record, logits, padded, peak, scale):
    """The scale after a temperature."""
    value = load_f64(record + _TEMPERATURE)
    span = load_f64(record + _TEMPERATURE_RANGE)
    if span > 0.0:
        n = np.float64(count_from(logits, padded, np.float32(LOWEST)))
        if n < 2.0:
            return scale
        low = max(value - span, 0.0)
        high = value + span
        total, mean = mean_depth(logits, padded, peak, scale)
        share = (_log_of(total / WEIGHT_ONE) * LOG2_E - mean) / (_log_of(n) * LOG2_E)
        exponent = load_f64(record + _TEMPERATURE_EXPONENT)
        power = _exp_of(exponent * _log_of(share)) if share > 1e-9 else 0.0
        value = low + (high - low) * (power if exponent > 0.0 else 1.0)
    return min(max(scale / max(value, 1e-9), MIN_SCALE), MAX_SCALE)


@routine
def _mirostat_k(depths, m, n, surprise_power):
    """How many of `n` tokens to keep, by the m largest depths, which are sorted here."""
    for i in range(1, m):
        value = load_f32(depths + 4 * i)
        j = i - 1
        while j >= 0 and load_f32(depths + 4 * j) < value:
            store_f32(depths + 4 * (j + 1), load_f32(depths + 4 * j))
            j -= 1
        store_f32(depths + 4 * (j + 1), value)
    products = 0.0
    squares = 0.0
    for i in range(m - 1):
        ratio = _log_of((i + 2.0) / (i + 1.0))
        here, after = np.float64(load_f32(depths + 4 * i)), np.float64(load_f32(depths + 4 * i + 4))
        if after == -_INFINITE:
            break
        products += ratio * (here - after) * LN_2
        squares += ratio * ratio
    if products <= 0.0 or n < 2.0:
        return 1
    exponent = products / squares
    epsilon = exponent - 1.0
    divisor = 1.0 - _exp_of(-epsilon * _log_of(n))
    if divisor == 0.0 or epsilon * surprise_power / divisor <= 0.0:
        return 1
    k = _exp_of(_log_of(epsilon * surprise_power / divisor) / exponent)
    return np.int64(min(max(k, 1.0), n))


@routine
def _mirostat_count(record, row, padded, maxima, peak, scale, ids, logits, depths, weights, histogram):
    """How many tokens of the whole row mirostat 1 keeps."""
    m = _run_top_k(np.int64(MIROSTAT_TOKENS), row, padded, maxima, np.int64(-1), peak, ids, logits, histogram)
    weigh(logits, (m + 15) & -16, peak, scale, depths, weights)
    n = np.float64(count_from(row, padded, np.float32(LOWEST)))
    return _mirostat_k(depths, m, n, load_f64(record + _SURPRISE_POWER))


@routine
def _run_mirostat_2(surprise_power, row, padded, maxima, peak, scale, ids, logits, depths, weights):
    """Keeps those of the whole row that are not too surprising."""
    total = weigh_only(row, padded, peak, scale)
    least_weight = max(total / surprise_power, 1.0)
    depth = _log_of(WEIGHT_ONE / min(least_weight, WEIGHT_ONE)) + _MARGIN
    m = gather(row, padded, maxima, f32(peak - depth / scale), ids, logits)
    weigh(logits, (m + 15) & -16, peak, scale, depths, weights)
    best = first_of(logits, (m + 15) & -16, np.float32(peak))
    store_f32(weights + 4 * best, np.float32(_INFINITE))  # the likeliest stays in any case
    return keep_from(weights, m, least_weight, ids, logits)


# ---- the draw


@routine
def _draw(record, row, padded, m, peak, scale, ids, logits, depths, weights, block_sums):
    """Draws a token and stores it."""
    u = load_f64(record + _U)
    start = 0
    if m < 0:
        total = 0.0
        for begin in range(0, padded, SUM_BLOCK):
            block = weigh_only(row + 4 * begin, min(SUM_BLOCK, padded - begin), peak, scale)
            store_f64(block_sums + 8 * (begin // SUM_BLOCK), block)
            total += block
        left = min(np.floor(u * total), total - 1.0)
        while left >= load_f64(block_sums + 8 * (start // SUM_BLOCK)):
            left -= load_f64(block_sums + 8 * (start // SUM_BLOCK))
            start += SUM_BLOCK
        weigh(row + 4 * start, min(SUM_BLOCK, padded - start), peak, scale, depths, weights)
    else:
        total = weigh(logits, (m + 15) & -16, peak, scale, depths, weights)
        left = min(np.floor(u * total), total - 1.0)
    place = 0
    weight = np.float64(load_f32(weights))
    while left >= weight:
        left -= weight
        place += 1
        weight = np.float64(load_f32(weights + 4 * place))
    store_i64(record + _TOKEN, start + place if m < 0 else load_i32(ids + 4 * place))
    store_f64(record + _PROBABILITY, weight / total)


# ---- one row


@routine
def _report_top(record, row, padded, maxima, peak, ids, logits, histogram):
    store_f64(record + _SUM_EXP, sum_exp(row, padded, peak))
    n_top = load_i64(record + _N_TOP)
    if n_top > 0:
        m = _run_top_k(n_top, row, padded, maxima, np.int64(-1), peak, ids, logits, histogram)
        store_i64(record + _N_TOP_FOUND, m)
        top_ids, top_logits = load_i64(record + _TOP_IDS), load_i64(record + _TOP_LOGITS)
        for i in range(0, 4 * m, 4):
            store_i32(top_ids + i, load_i32(ids + i))
            store_f32(top_logits + i, load_f32(logits + i))


@device
def _store_status(record, peak):
    """Stores what became of a row whose largest logit is `peak`; whether a token can be chosen."""
    store_f64(record + _PEAK, peak)
    if peak > -_INFINITE and peak < _INFINITE:
        store_i64(record + _STATUS, sampling_record.CHOSEN)
        return True
    is_empty = peak == -_INFINITE
    store_i64(record + _STATUS, sampling_record.NONE_ALLOWED if is_empty else sampling_record.NOT_FINITE)
    return False


@device
def _is_read_only(record, n):
    """Whether the row can be looked at where it is: nothing edits it, and it is whole vectors."""
    n_edits = load_i64(record + _N_BIAS) + load_i64(record + _N_FORBIDDEN) + (n & 15)
    n_edits += load_i64(record + _N_ALLOWED)
    for i in range(sampling_record.MAX_STAGES):
        stage = load_i64(record + _STAGES + 8 * i)
        if stage == sampling_record.PENALTIES or stage == sampling_record.DRY or stage == sampling_record.XTC:
            n_edits += 1
    return n_edits == 0


@part
def _choose(record, n, scratch, scratch_padded):
    padded = (n + 15) & -16
    histogram = scratch + SCRATCH_HISTOGRAM
    maxima = scratch + SCRATCH_ARRAYS
    row = maxima + 4 * scratch_padded
    ids = row + 4 * scratch_padded
    logits = ids + 4 * scratch_padded
    depths = logits + 4 * scratch_padded
    weights = depths + 4 * scratch_padded
    is_edited = not _is_read_only(record, n)  # `peak` and `maxima` are not those of the row any more
    if is_edited:
        peak = np.float64(copy_row(load_i64(record + _ROW), n, row))
    else:
        row = load_i64(record + _ROW)
        peak = np.float64(survey(row, padded, maxima))
    if not _store_status(record, peak):
        return
    raw_peak = peak
    if load_i64(record + _N_TOP) >= 0:
        if is_edited:
            survey(row, padded, maxima)
        _report_top(record, row, padded, maxima, peak, ids, logits, histogram)
    if load_i64(record + _IS_GIVEN) != 0:
        return
    _edit_row(record, n, row)
    is_greedy = load_i64(record + _IS_GREEDY) != 0
    m = np.int64(-1)
    scale = 1.0
    for i in range(sampling_record.MAX_STAGES):
        stage = load_i64(record + _STAGES + 8 * i)
        if stage == sampling_record.END:
            break
        if _is_edit(stage):
            _run_edit(record, stage, row if m < 0 else logits, ids, m, scale)
            is_edited = True
            continue
        if is_greedy:
            continue
        if is_edited:
            is_edited = False
            if m < 0:
                peak = np.float64(survey(row, padded, maxima))
            else:
                peak = np.float64(largest(logits, (m + 15) & -16))
            if not (peak > -_INFINITE and peak < _INFINITE):
                break
        if stage == sampling_record.TOP_K or stage == sampling_record.MIROSTAT_1:
            k = load_i64(record + _TOP_K)
            if stage == sampling_record.MIROSTAT_1:
                k = _mirostat_count(
                    record, row, padded, maxima, peak, scale, ids, logits, depths, weights, histogram
                )
            m = _run_top_k(k, row, padded, maxima, m, peak, ids, logits, histogram)
        elif stage == sampling_record.TOP_P:
            p = load_f64(record + _TOP_P)
            m = _run_top_p(p, row, padded, maxima, m, peak, scale, ids, logits, depths, weights, histogram)
        elif stage == sampling_record.MIN_P or stage == sampling_record.TOP_N_SIGMA:
            if stage == sampling_record.MIN_P:
                bound = f32(peak + load_f64(record + _MIN_P_DEPTH) / scale)
            else:
                n_sigma = load_f64(record + _TOP_N_SIGMA)
                if m < 0:
                    bound = sigma_cut(row, padded, peak, n_sigma)
                else:
                    bound = sigma_cut(logits, (m + 15) & -16, peak, n_sigma)
            m = _run_cut(bound, row, padded, maxima, m, ids, logits)
        elif stage == sampling_record.TYPICAL_P:
            p = load_f64(record + _TYPICAL_P)
            m = _run_typical(p, row, padded, maxima, m, peak, scale, ids, logits, depths, weights, histogram)
            is_edited = True  # the largest may be gone
        elif stage == sampling_record.XTC:
            if load_i64(record + _XTC_APPLIES) != 0:
                threshold = load_f64(record + _XTC_THRESHOLD)
                m = _run_xtc(threshold, row, padded, maxima, m, peak, scale, ids, logits, depths, weights)
                is_edited = True
        elif stage == sampling_record.TEMPERATURE:
            if m < 0:
                scale = _new_scale(record, row, padded, peak, scale)
            else:
                scale = _new_scale(record, logits, (m + 15) & -16, peak, scale)
        elif stage == sampling_record.MIROSTAT_2:
            power = load_f64(record + _SURPRISE_POWER)
            m = _run_mirostat_2(power, row, padded, maxima, peak, scale, ids, logits, depths, weights)
    if is_edited:
        if m < 0:
            peak = np.float64(largest(row, padded))
        else:
            peak = np.float64(largest(logits, (m + 15) & -16))
    if not _store_status(record, peak):
        return
    store_f64(record + _PEAK, raw_peak)
    if is_greedy:
        store_i64(record + _TOKEN, first_of(row, padded, np.float32(peak)))
    else:
        block_sums = scratch + SCRATCH_BLOCK_SUMS
        _draw(record, row, padded, m, peak, scale, ids, logits, depths, weights, block_sums)


def choose_tokens(tile, records, n_rows, n, counter, scratch, scratch_stride, n_workers):
    """Chooses a token for each of `n_rows` rows of n logits; `records` are addresses of RowRecords."""
    if tile < 0:
        return min(n_workers, n_rows)
    while True:
        i = atomic_add(counter, 1)
        if i >= n_rows:
            return 0
        _choose(load_i64(records + 8 * i), n, scratch + tile * scratch_stride, _padded_size(n))


KERNELS = {"choose_tokens": KernelSource("choose_tokens", choose_tokens)}
