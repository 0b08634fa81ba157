"""The sampling kernel: the stages of `reference_sampling`, bit-identical, without sorting a vocabulary.

A row that is edited is copied to its thread's scratch, where it stays in a near cache. A stage is a function
of a context (sampling_scratch.py): it edits or narrows the tokens in play, which are those of the whole row
until the first stage that filters gathers candidates (candidates.py), each by a bound of its own. One bound
for all would be of no use: the weights of nearly all tokens of a model's rows are above 0.

`choose_tokens` runs on all threads: each tile is a thread's scratch, and takes rows until none is left.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from kukri.kernels import sampling_record
from kukri.kernels import sampling_stages as stages
from kukri.kernels.cpu.codegen.candidates import (
    LOWEST,
    copy_row,
    count_from,
    f32,
    find_peak,
    first_of,
    first_of_peak,
    gather,
    in_play,
    is_whole,
    keep_from,
    keep_largest,
    keep_most,
    mean_depth,
    narrow,
    peak_of,
    scale_of,
    sigma_cut,
    sum_exp,
    sum_weights,
    token_at,
    total_weight,
    weigh,
    weigh_candidates,
)
from kukri.kernels.cpu.codegen.sampling_scratch import ARRAYS, BLOCK_SUMS, CONTEXT, SUM_BLOCK, padded_size
from kukri.kernels.cpu.compile.intrinsics import (
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
from kukri.kernels.cpu.compile.kernel_source import KernelSource
from kukri.kernels.cpu.compile.simd import splat, store_f32x16
from kukri.kernels.cpu.run.atomics import atomic_count
from kukri.kernels.sampling_record import (
    LN_2,
    LOG2_E,
    MAX_SCALE,
    MIN_SCALE,
    MIROSTAT_TOKENS,
    RECORD,
    WEIGHT_ONE,
)
from kukri.kernels.sampling_stages import EDITS, END, MAX_STAGES

_INFINITE = float("inf")
_ALL_WEIGHTS = 36.0  # a depth below which all weights are 0
_MARGIN = 1.0  # for a depth found from a weight: half a unit rounds up to 1
_RECORD_BYTES = RECORD.itemsize
_OFFSETS = {name: place[1] for name, place in (RECORD.fields or {}).items()}
_AT = namedtuple("_AT", _OFFSETS)(**_OFFSETS)  # byte offsets of a record's fields
_WRITING = (*EDITS, stages.XTC)  # stages that write to the row
_padded_size = device(padded_size)
_log_of, _exp_of = routine(sampling_record.log_of), routine(sampling_record.exp_of)


@device
def _record(c):
    return load_i64(c + CONTEXT.record)


@device
def _table(c, field):
    """The address of a table, whose first word in the pool the record's field says."""
    return load_i64(c + CONTEXT.pool) + 4 * load_i64(_record(c) + field)


# ---- edits


@device
def _logit_of(c, token):
    """The address of a token's logit, 0 if it is not in play."""
    if is_whole(c):
        return load_i64(c + CONTEXT.row) + 4 * token
    ids = load_i64(c + CONTEXT.ids)
    count = load_i64(c + CONTEXT.n_candidates)
    low = 0
    high = count
    while low < high:
        middle = (low + high) >> 1
        if load_i32(ids + 4 * middle) < token:
            low = middle + 1
        else:
            high = middle
    if low < count and load_i32(ids + 4 * low) == token:
        return load_i64(c + CONTEXT.logits) + 4 * low
    return 0


@routine
def _penalize(c):
    record = _record(c)
    n_seen = load_i64(record + _AT.n_seen)
    seen = _table(c, _AT.seen)
    repetition = load_f64(record + _AT.repetition_penalty)
    presence = load_f64(record + _AT.presence_penalty)
    frequency = load_f64(record + _AT.frequency_penalty)
    scale = scale_of(c)
    for i in range(seen, seen + 4 * n_seen, 4):
        logit = _logit_of(c, load_i32(i))
        if logit != 0:
            x = np.float64(load_f32(logit)) * scale
            if load_i32(i + 4 * n_seen) > 0:
                x = x / repetition if x > 0.0 else x * repetition
            n = load_i32(i + 8 * n_seen)
            x = x - (presence if n > 0 else 0.0)
            x = (x - frequency * n) / scale
            store_f32(logit, np.float32(x))


@routine
def _penalize_dry(c):
    n = load_i64(_record(c) + _AT.n_dry)
    values = _table(c, _AT.dry)
    scale = scale_of(c)
    for i in range(n):
        logit = _logit_of(c, load_i32(values + 8 * n + 4 * i))
        if logit != 0:
            x = np.float64(load_f32(logit)) - load_f64(values + 8 * i) / scale
            store_f32(logit, np.float32(x))


@routine
def _allow(words, n, row):
    """Set the elements, of n, whose bits are 0 in int32 words to -inf."""
    for i in range(0, n, 16):
        bits = (load_i32(words + 4 * (i >> 5)) >> (i & 16)) & 0xFFFF
        if bits == 0:
            store_f32x16(row + 4 * i, splat(-_INFINITE))
        elif bits != 0xFFFF:
            for lane in range(16):
                if (bits >> lane) & 1 == 0:
                    store_f32(row + 4 * (i + lane), np.float32(-_INFINITE))


@routine
def _edit_row(c):
    """Adds the bias and forbids tokens, before all stages."""
    record = _record(c)
    row = load_i64(c + CONTEXT.row)
    n = load_i64(record + _AT.n_bias)
    values = _table(c, _AT.bias)
    for i in range(n):
        where = row + 4 * load_i32(values + 8 * n + 4 * i)
        store_f32(where, np.float32(np.float64(load_f32(where)) + load_f64(values + 8 * i)))
    if load_i64(record + _AT.n_allowed) != 0:
        _allow(_table(c, _AT.allowed), load_i64(c + CONTEXT.n), row)
    forbidden = _table(c, _AT.forbidden)
    for i in range(forbidden, forbidden + 4 * load_i64(record + _AT.n_forbidden), 4):
        store_f32(row + 4 * load_i32(i), np.float32(-_INFINITE))


# ---- filters


@routine
def _top_p(c):
    p = load_f64(_record(c) + _AT.top_p)
    total = total_weight(c)
    was_whole = is_whole(c)
    depth = 4.0
    while True:  # larger depths until the nucleus is seen to lie in what was gathered
        depth = min(depth, _ALL_WEIGHTS)
        if was_whole:
            gather(c, f32(peak_of(c) - depth / (scale_of(c) * LOG2_E)))
        if weigh_candidates(c) >= p * total or depth == _ALL_WEIGHTS or not was_whole:
            break
        depth *= 1.4
    keep_most(c, load_i64(c + CONTEXT.logits), load_i64(c + CONTEXT.weights), p * total)


@routine
def _typical_p(c):
    p = load_f64(_record(c) + _AT.typical_p)
    total, mean = mean_depth(c)
    was_whole = is_whole(c)
    depths = load_i64(c + CONTEXT.depths)
    weights = load_i64(c + CONTEXT.weights)
    depth = 8.0
    while True:
        # what lies deeper is further from the mean than all that was gathered: it is not needed if that
        # holds the share p; the margin is for the rounding of depths
        if was_whole:
            gather(c, f32(peak_of(c) - depth / (scale_of(c) * LOG2_E)))
        weigh_candidates(c)
        found = 0.0
        for i in range(0, 4 * load_i64(c + CONTEXT.n_candidates), 4):
            if load_f32(depths + i) >= 0.01 - depth:
                found += np.float64(load_f32(weights + i))
        if (found >= p * total and 0.02 - depth <= 2.0 * mean) or depth > 100.0 or not was_whole:
            break
        depth *= 1.5
    for i in range(depths, depths + 4 * load_i64(c + CONTEXT.n_candidates), 4):
        store_f32(i, -np.float32(abs(np.float64(load_f32(i)) - mean)))
    keep_most(c, depths, weights, p * total)
    store_i64(c + CONTEXT.is_edited, 1)  # the largest may be gone


@routine
def _xtc(c):
    record = _record(c)
    if load_i64(record + _AT.xtc_applies) == 0:
        return
    least_weight = max(load_f64(record + _AT.xtc_threshold) * total_weight(c), 1.0)
    was_whole = is_whole(c)
    if was_whole:
        scale = scale_of(c)
        gather(c, f32(peak_of(c) - _log_of(WEIGHT_ONE / least_weight) / scale - _MARGIN / scale))
    weigh_candidates(c)
    row = load_i64(c + CONTEXT.row)
    ids = load_i64(c + CONTEXT.ids)
    logits = load_i64(c + CONTEXT.logits)
    weights = load_i64(c + CONTEXT.weights)
    stop = 4 * load_i64(c + CONTEXT.n_candidates)
    least = -1
    n_choices = 0
    for i in range(0, stop, 4):
        if load_f32(weights + i) >= least_weight:
            n_choices += 1
            if least < 0 or load_f32(logits + i) <= load_f32(logits + least):
                least = i
    for i in range(0, stop, 4):
        if n_choices >= 2 and i != least and load_f32(weights + i) >= least_weight:
            store_f32(logits + i, np.float32(-_INFINITE))
            if was_whole:
                store_f32(row + 4 * load_i32(ids + i), np.float32(-_INFINITE))
    if was_whole:
        store_i64(c + CONTEXT.n_candidates, -1)
    else:
        keep_from(c, logits, np.float32(LOWEST))
    store_i64(c + CONTEXT.is_edited, 1)


@device
def _finite_in_play(c):
    logits, padded = in_play(c)
    return np.float64(count_from(logits, padded, np.float32(LOWEST)))


@routine
def _set_temperature(c):
    record = _record(c)
    value = load_f64(record + _AT.temperature)
    span = load_f64(record + _AT.temperature_range)
    if span > 0.0:
        n = _finite_in_play(c)
        if n < 2.0:
            return
        low = max(value - span, 0.0)
        high = value + span
        total, mean = mean_depth(c)
        share = (_log_of(total / WEIGHT_ONE) * LOG2_E - mean) / (_log_of(n) * LOG2_E)
        exponent = load_f64(record + _AT.temperature_exponent)
        power = _exp_of(exponent * _log_of(share)) if share > 1e-9 else 0.0
        value = low + (high - low) * (power if exponent > 0.0 else 1.0)
    store_f64(c + CONTEXT.scale, min(max(scale_of(c) / max(value, 1e-9), MIN_SCALE), MAX_SCALE))


@routine
def _mirostat_k(depths, m, n, surprise_power):
    """The number of tokens to keep of `n`, by the m largest depths, which are sorted here."""
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
def _mirostat_1(c):
    """Comes before all filters, so that the whole row is in play."""
    n = _finite_in_play(c)
    keep_largest(c, MIROSTAT_TOKENS)
    weigh_candidates(c)
    power = load_f64(_record(c) + _AT.surprise_power)
    k = _mirostat_k(load_i64(c + CONTEXT.depths), load_i64(c + CONTEXT.n_candidates), n, power)
    store_i64(c + CONTEXT.n_candidates, -1)
    keep_largest(c, k)


@routine
def _mirostat_2(c):
    least_weight = max(total_weight(c) / load_f64(_record(c) + _AT.surprise_power), 1.0)
    depth = _log_of(WEIGHT_ONE / min(least_weight, WEIGHT_ONE)) + _MARGIN
    narrow(c, f32(peak_of(c) - depth / scale_of(c)))
    weigh_candidates(c)
    logits, padded = in_play(c)
    weights = load_i64(c + CONTEXT.weights)
    best = first_of(logits, padded, np.float32(peak_of(c)))
    store_f32(weights + 4 * best, np.float32(_INFINITE))  # the likeliest stays in any case
    keep_from(c, weights, least_weight)


@part
def _run_stage(c, stage):
    record = _record(c)
    if stage == stages.PENALTIES:
        _penalize(c)
    elif stage == stages.DRY:
        _penalize_dry(c)
    elif stage == stages.TOP_K:
        keep_largest(c, np.int64(load_f64(record + _AT.top_k)))
    elif stage == stages.TOP_P:
        _top_p(c)
    elif stage == stages.MIN_P:
        narrow(c, f32(peak_of(c) + load_f64(record + _AT.min_p_depth) / scale_of(c)))
    elif stage == stages.TOP_N_SIGMA:
        narrow(c, sigma_cut(c, load_f64(record + _AT.top_n_sigma)))
    elif stage == stages.TYPICAL_P:
        _typical_p(c)
    elif stage == stages.XTC:
        _xtc(c)
    elif stage == stages.TEMPERATURE:
        _set_temperature(c)
    elif stage == stages.MIROSTAT_1:
        _mirostat_1(c)
    elif stage == stages.MIROSTAT_2:
        _mirostat_2(c)


@device
def _run_stages(c):
    """Runs the stages of a row; a greedy one has edits alone. Ends early if no token is left."""
    record = _record(c)
    is_greedy = load_i64(record + _AT.is_greedy) != 0
    for i in range(MAX_STAGES):
        stage = load_i64(record + _AT.stages + 8 * i)
        if stage == END:
            return
        is_edit = stage in EDITS
        if is_greedy and not is_edit:
            continue
        if not is_edit and load_i64(c + CONTEXT.is_edited) != 0:
            find_peak(c)
            if not np.isfinite(peak_of(c)):
                return
        _run_stage(c, stage)
        if is_edit:
            store_i64(c + CONTEXT.is_edited, 1)


# ---- one row


@routine
def _draw(c):
    """Draws a token and stores it."""
    record = _record(c)
    logits, padded = in_play(c)
    block_sums = c + BLOCK_SUMS
    total = 0.0
    for begin in range(0, padded, SUM_BLOCK):
        block = sum_weights(c, logits + 4 * begin, min(SUM_BLOCK, padded - begin))
        store_f64(block_sums + 8 * (begin // SUM_BLOCK), block)
        total += block
    left = min(np.floor(load_f64(record + _AT.u) * total), total - 1.0)
    start = 0
    while left >= load_f64(block_sums + 8 * (start // SUM_BLOCK)):
        left -= load_f64(block_sums + 8 * (start // SUM_BLOCK))
        start += SUM_BLOCK
    weigh(c, logits + 4 * start, min(SUM_BLOCK, padded - start))
    weights = load_i64(c + CONTEXT.weights)
    place = 0
    weight = np.float64(load_f32(weights))
    while left >= weight:
        left -= weight
        place += 1
        weight = np.float64(load_f32(weights + 4 * place))
    store_i64(record + _AT.token, token_at(c, start + place))
    store_f64(record + _AT.probability, weight / total)


@routine
def _report_top(c):
    """Stores the sum of exp and the most likely tokens of the row as given."""
    record = _record(c)
    row, padded = in_play(c)
    store_f64(record + _AT.sum_exp, sum_exp(row, padded, peak_of(c)))
    n_top = load_i64(record + _AT.n_top)
    if n_top > 0:
        keep_largest(c, n_top)
        m = load_i64(c + CONTEXT.n_candidates)
        ids = load_i64(c + CONTEXT.ids)
        logits = load_i64(c + CONTEXT.logits)
        top = _table(c, _AT.top)
        for i in range(0, 4 * m, 4):
            store_i32(top + i, load_i32(ids + i))
            store_f32(top + 4 * n_top + i, load_f32(logits + i))
        store_i64(record + _AT.n_top_found, m)
        store_i64(c + CONTEXT.n_candidates, -1)


@device
def _store_status(c):
    """Stores the status that follows from the largest logit in play; whether a token can be chosen."""
    peak = peak_of(c)
    status = sampling_record.CHOSEN
    if not np.isfinite(peak):
        status = sampling_record.NONE_ALLOWED if peak == -_INFINITE else sampling_record.NOT_FINITE
        store_f64(_record(c) + _AT.peak, peak)
    store_i64(_record(c) + _AT.status, status)
    return status == sampling_record.CHOSEN


@device
def _is_read_only(record, n):
    """True if the row can be looked at in place: nothing edits it, and it is whole vectors."""
    n_edits = load_i64(record + _AT.n_bias) + load_i64(record + _AT.n_forbidden) + (n & 15)
    n_edits += load_i64(record + _AT.n_allowed)
    for i in range(MAX_STAGES):
        stage = load_i64(record + _AT.stages + 8 * i)
        if stage in _WRITING:
            n_edits += 1
    return n_edits == 0


@part
def _choose(c, record, pool, row, n):
    """Chooses a token for one row of n logits; `c` is the address of a scratch."""
    step = 4 * _padded_size(n)
    arrays = c + ARRAYS
    store_i64(c + CONTEXT.record, record)
    store_i64(c + CONTEXT.pool, pool)
    store_i64(c + CONTEXT.n, n)
    store_i64(c + CONTEXT.n_candidates, -1)
    store_i64(c + CONTEXT.maxima, arrays)
    store_i64(c + CONTEXT.ids, arrays + 2 * step)
    store_i64(c + CONTEXT.logits, arrays + 3 * step)
    store_i64(c + CONTEXT.depths, arrays + 4 * step)
    store_i64(c + CONTEXT.weights, arrays + 5 * step)
    store_f64(c + CONTEXT.scale, 1.0)
    is_edited = not _is_read_only(record, n)
    if is_edited:
        store_f64(c + CONTEXT.peak, np.float64(copy_row(row, n, arrays + step)))
        row = arrays + step
    store_i64(c + CONTEXT.row, row)
    if not is_edited or load_i64(record + _AT.has_logprobs) != 0:
        find_peak(c)
    store_f64(record + _AT.peak, peak_of(c))
    if not _store_status(c):
        return
    if load_i64(record + _AT.has_logprobs) != 0:
        _report_top(c)
    if load_i64(record + _AT.is_given) != 0:
        return
    if is_edited:
        _edit_row(c)
        store_i64(c + CONTEXT.is_edited, 1)
    _run_stages(c)
    if load_i64(c + CONTEXT.is_edited) != 0:
        find_peak(c)
    if not _store_status(c):
        return
    if load_i64(record + _AT.is_greedy) != 0:
        store_i64(record + _AT.token, first_of_peak(c))
    else:
        _draw(c)


def choose_tokens(
    tile, records, n_rows, pool, logits, stride, n, counter, scratch, scratch_stride, n_workers
):
    """Chooses a token for each of `n_rows` records, by rows of n logits that are `stride` bytes apart."""
    if tile < 0:
        return min(n_workers, n_rows)
    while True:
        i = atomic_count(counter, 1)
        if i >= n_rows:
            return 0
        record = records + i * _RECORD_BYTES
        row = logits + load_i64(record + _AT.row) * stride
        _choose(scratch + tile * scratch_stride, record, pool, row, n)


KERNELS = {"choose_tokens": KernelSource("choose_tokens", choose_tokens)}
