"""Attention of several tokens at once: a prompt's tokens, or tokens of sequences that share a prefix.

A chunk's keys are widened to float32 once for all query rows of a work entry, then its values. Rows meet
them in tiles, as many sums as registers hold, whatever a row's token and head. Softmax takes 16 rows at
a time. A row has the same operations, and so the same bits, as in `attention.py`, which attends for one
token.
"""

from __future__ import annotations

from typing import Any

from kukri.kernels.cpu.codegen.attention_rows import (
    ADJUSTED,
    NO_SCORE,
    PAGES_BYTES,
    RANGE_BYTES,
    each,
    finish,
    finish_rotated,
    load_pages,
    make_load_rows,
)
from kukri.kernels.cpu.codegen.kv_types import CachedNumbers
from kukri.kernels.cpu.codegen.tiles import tile_add_scaled, tile_fma, tile_merge, tile_store, tile_zeros_f32
from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.cpu.compile.intrinsics import (
    device,
    load_f32,
    load_i64,
    prefetch,
    stack_bytes,
    store_f32,
    store_i64,
)
from kukri.kernels.cpu.compile.simd import (
    fma,
    load_f32x16,
    mask_outside,
    max_rows,
    maximum,
    softmax_exponential,
    splat,
    store_f32x16,
    sum_rows,
)
from kukri.kernels.cpu.run.abi import (
    CHUNK_PAGES,
    CHUNK_TOKENS,
    PART_SUMS,
    PART_VALUES,
    WORK_CHUNK,
    WORK_CHUNK_STOP,
    WORK_N_TOKENS,
    WORK_PARTIAL,
    WORK_TOKEN,
    prompt_tokens,
)
from kukri.kernels.paged_kv import PAGE_TOKENS

_TILE_ROWS = 6  # 24 sums of 6 rows and 4 vectors leave registers for what goes into them; 6 and 1 do on AVX2
LANES = 16  # rows whose softmax is taken at a time
LANES_BYTES = 64 * LANES
ROW_SCORES = 4 * CHUNK_TOKENS  # bytes of a row's scores


def _together(n_vectors: int) -> int:
    """Vectors of keys or of a value that a tile's rows meet at a time."""
    most = 4 if cpu_target().has_wide_registers else 1
    return next(n for n in (4, 2, 1) if n <= most and n_vectors % n == 0)


# --- a chunk in float32 -------------------------------------------------------------------------------
# Keys: [4 pages, K, 16]; values: [64, K]. Then, of types with scales: [scales of a head, 64].


def _make_widen(cached: CachedNumbers, d_head: int) -> tuple[Any, Any]:
    """Functions that widen the keys, and the values, of a chunk's first `n_pages` pages."""
    load_key, load_value = cached.key, cached.value
    key_scale, value_scale = cached.key_scale, cached.value_scale
    n_vectors, span = d_head // 16, cached.vectors_per_scale(d_head)
    scales = 4 * d_head * CHUNK_TOKENS

    def make_widen_scales(scale: Any) -> Any:
        if scale is None:
            return device(lambda page, wide: None)

        @device
        def widen_scales(page, wide):
            for first in range(0, n_vectors, span):
                store_f32x16(wide + scales + first // span * ROW_SCORES, scale(page, first, d_head))

        return widen_scales

    key_scales, value_scales = make_widen_scales(key_scale), make_widen_scales(value_scale)

    @device
    def widen_keys(keys, pages, n_pages, wide):
        for page in range(n_pages):
            source = keys + load_i64(pages + 8 * page)
            for v in range(n_vectors):
                for d in range(16):
                    place = (page * d_head + 16 * v + d) * (4 * PAGE_TOKENS)
                    store_f32x16(wide + place, load_key(source, v, d))
            key_scales(source, wide + 64 * page)

    @device
    def widen_values(values, pages, n_pages, wide):
        for page in range(n_pages):
            source = values + load_i64(pages + 8 * page)
            for key in range(PAGE_TOKENS):
                for v in range(n_vectors):
                    place = (PAGE_TOKENS * page + key) * (4 * d_head) + 64 * v
                    store_f32x16(wide + place, load_value(source, key, v, d_head))
            value_scales(source, wide + 64 * page)

    return widen_keys, widen_values


# --- tiles --------------------------------------------------------------------------------------------


def _make_scores(cached: CachedNumbers, d_head: int) -> Any:
    """A function for the scores of a tile's rows and a chunk's keys, widened."""
    n_vectors, span = d_head // 16, cached.vectors_per_scale(d_head)
    n_pages = _together(CHUNK_PAGES)
    page_bytes, scales = 64 * d_head, 4 * d_head * CHUNK_TOKENS
    zeros = each(n_pages, lambda p: lambda: tile_zeros_f32(_TILE_ROWS, 1))
    add = each(
        n_pages,
        lambda p: lambda s, key, q: tile_fma(s[p], load_f32x16(key + p * page_bytes), q, 4 * d_head),
    )
    if cached.key_scale is None:
        fold = each(n_pages, lambda p: lambda s, part, scale: part[p])
    else:
        fold = each(
            n_pages,
            lambda p: lambda s, part, scale: tile_add_scaled(s[p], part[p], load_f32x16(scale + 64 * p)),
        )
    store = each(
        n_pages, lambda p: lambda s, scores: tile_store(s[p], scores + 64 * p, ROW_SCORES, _TILE_ROWS)
    )

    @device
    def tile_scores(q, keys, scores):
        for page in range(0, CHUNK_PAGES, n_pages):
            s = zeros()
            for first in range(0, n_vectors, span):
                part = zeros()
                for d in range(16 * first, 16 * (first + span)):
                    part = add(part, keys + page * page_bytes + 64 * d, q + 4 * d)
                s = fold(s, part, keys + scales + first // span * ROW_SCORES + 64 * page)
            store(s, scores + 64 * page)

    return tile_scores


def _make_values(cached: CachedNumbers, d_head: int) -> Any:
    """A function that adds a chunk's weighted values, widened, to the sums of a tile's rows."""
    n_vectors, span = d_head // 16, cached.vectors_per_scale(d_head)
    together = _together(n_vectors)
    scales, is_scaled = 4 * d_head * CHUNK_TOKENS, cached.value_scale is not None
    n_scales = max(1, together // span)  # scales of the vectors that are taken together
    next_scale = _TILE_ROWS * ROW_SCORES if is_scaled and n_scales > 1 else 0
    zeros = each(together, lambda j: lambda: tile_zeros_f32(_TILE_ROWS, 1))
    add = each(
        together,
        lambda j: (
            lambda o, value, weights: tile_fma(
                o[j], load_f32x16(value + 64 * j), weights + j // span * next_scale, ROW_SCORES
            )
        ),
    )
    merge = each(
        together,
        lambda j: lambda o, sums, keep, take: tile_merge(o[j], sums + 64 * j, 4 * d_head, keep, take),
    )

    @device
    def scaled(scores, scale, weights):
        for i in range(n_scales):
            for row in range(_TILE_ROWS):
                for at in range(0, ROW_SCORES, 64):
                    weight = load_f32x16(scores + row * ROW_SCORES + at)
                    weight = weight * load_f32x16(scale + i * ROW_SCORES + at)
                    store_f32x16(weights + (i * _TILE_ROWS + row) * ROW_SCORES + at, weight)
        return weights

    @device
    def as_they_are(scores, scale, weights):
        return scores

    weigh = scaled if is_scaled else as_they_are
    room = n_scales * _TILE_ROWS * ROW_SCORES if is_scaled else 64

    @device
    def tile_values(scores, values, first_key, n_keys, sums, keep, take):
        weights = stack_bytes(room)
        for i in range(0, n_vectors, together):
            weighed = weigh(scores, values + scales + i // span * ROW_SCORES, weights)
            o = zeros()
            for key in range(first_key, n_keys):
                o = add(o, values + key * (4 * d_head) + 64 * i, weighed + 4 * key)
            merge(o, sums + 64 * i, keep, take)

    return tile_values


def make_softmax(ending: str, rows: int = LANES) -> Any:
    """A function for the softmax of up to 16 rows of scores, and how results so far and the chunk's merge."""
    adjust, changes_all = ADJUSTED[ending], ending != ""

    @device
    def limit(scores, cap, ranges, base, is_masked):
        """Adjust scores, and mask the scores of keys that a row does not see."""
        for row in range(rows):
            seen = ranges + RANGE_BYTES * row
            first = load_i64(seen)
            last = load_i64(seen + 8)
            biases = load_i64(seen + 16) + 4 * base
            for i in range(0, CHUNK_TOKENS, 16):
                place = scores + row * ROW_SCORES + 4 * i
                s = adjust(load_f32x16(place), cap, biases + 4 * i)
                store_f32x16(place, mask_outside(s, base + i, first, last) if is_masked else s)

    @device
    def softmax(scores, cap, ranges, base, is_masked, top, total, keep, take):
        """`top` and `total` are the rows' maxima and sums; what is kept and taken of values is stored."""
        lanes = stack_bytes(LANES_BYTES)
        tops = stack_bytes(64)
        if changes_all or is_masked:
            limit(scores, cap, ranges, base, is_masked)
        for row in range(rows):
            s = scores + row * ROW_SCORES
            larger = maximum(load_f32x16(s), load_f32x16(s + 64))
            largest = maximum(larger, maximum(load_f32x16(s + 128), load_f32x16(s + 192)))
            store_f32x16(lanes + 64 * row, largest)
        new = maximum(splat(NO_SCORE), max_rows(lanes))
        store_f32x16(tops, new)
        for row in range(rows):
            s = scores + row * ROW_SCORES
            largest = splat(load_f32(tops + 4 * row))
            s0 = softmax_exponential(load_f32x16(s) - largest)
            s1 = softmax_exponential(load_f32x16(s + 64) - largest)
            s2 = softmax_exponential(load_f32x16(s + 128) - largest)
            s3 = softmax_exponential(load_f32x16(s + 192) - largest)
            store_f32x16(s, s0)
            store_f32x16(s + 64, s1)
            store_f32x16(s + 128, s2)
            store_f32x16(s + 192, s3)
            store_f32x16(lanes + 64 * row, (s0 + s1) + (s2 + s3))
        old = load_f32x16(top)
        merged = maximum(old, new)
        kept = softmax_exponential(old - merged)
        taken = softmax_exponential(new - merged)
        store_f32x16(top, merged)
        store_f32x16(total, fma(sum_rows(lanes), taken, load_f32x16(total) * kept))
        store_f32x16(keep, kept)
        store_f32x16(take, taken)

    return softmax


# --- a work entry -------------------------------------------------------------------------------------


@device
def bounds(ranges, row, n):
    """The least and the largest first key, and last key, that one of n rows from `row` on sees."""
    least_first = load_i64(ranges + RANGE_BYTES * row)
    most_first = least_first
    least_last = load_i64(ranges + RANGE_BYTES * row + 8)
    most_last = least_last
    for i in range(row + 1, row + n):
        first = load_i64(ranges + RANGE_BYTES * i)
        last = load_i64(ranges + RANGE_BYTES * i + 8)
        least_first = min(least_first, first)
        most_first = max(most_first, first)
        least_last = min(least_last, last)
        most_last = max(most_last, last)
    return least_first, most_first, least_last, most_last


def make_fetch(cached: CachedNumbers, d_head: int) -> Any:
    """A function that prefetches a share of a chunk's keys, or values, while other numbers are multiplied.

    All at once, they are more lines than a core can wait for, so that its loads would wait with them.
    """
    page_lines = -(-cached.head_bytes(d_head) // 64)

    @device
    def fetch(numbers, pages, n_pages, share, n_shares):
        n_lines = n_pages * page_lines
        for line in range(share * n_lines // n_shares, (share + 1) * n_lines // n_shares):
            prefetch(numbers + load_i64(pages + 8 * (line // page_lines)) + 64 * (line % page_lines))

    return fetch


def make_endings(cached: CachedNumbers, group: int, d_head: int) -> tuple[Any, Any]:
    """Functions that finish the rows of a work entry, and that store them as its partial result."""
    finish_row = finish_rotated if cached.is_rotated else finish
    row_bytes = 4 * d_head

    @device
    def finish_rows(work, n_rows, top, total, sums):
        for row in range(n_rows):
            t = load_i64(work.entry + WORK_TOKEN) + row // group
            of_head = work.head * group + row % group
            y = work.y + t * work.y_stride + of_head * row_bytes
            values = sums + row * row_bytes
            finish_row(top + 4 * row, total + 4 * row, values, y, d_head, work.sinks + 4 * of_head)

    @device
    def store_partial(part, n_rows, top, total, sums):
        for row in range(n_rows):
            store_f32(part + 4 * row, load_f32(top + 4 * row))
            store_f32(part + PART_SUMS + 4 * row, load_f32(total + 4 * row))
        for i in range(0, n_rows * row_bytes, 64):
            store_f32x16(part + PART_VALUES + i, load_f32x16(sums + i))

    return finish_rows, store_partial


def make_prompt_entry(cached: CachedNumbers, group: int, d_head: int, ending: str) -> Any:
    """A function that attends for one work entry of several tokens and one key head, scores by `ADJUSTED`."""
    most_rows = group * prompt_tokens(group, d_head)
    room = -(-most_rows // 48) * 48  # whole tiles, and whole vectors of rows
    load_rows = make_load_rows(group, d_head)
    widen_keys, widen_values = _make_widen(cached, d_head)
    tile_scores, tile_values = _make_scores(cached, d_head), _make_values(cached, d_head)
    softmax = make_softmax(ending)
    fetch = make_fetch(cached, d_head)
    finish_rows, store_partial = make_endings(cached, group, d_head)
    row_bytes = 4 * d_head
    n_scales = d_head // 16 // cached.vectors_per_scale(d_head)
    q_bytes, range_bytes, score_bytes = room * row_bytes, RANGE_BYTES * room, room * ROW_SCORES
    wide_bytes = CHUNK_TOKENS * (row_bytes + 4 * n_scales)
    tile_bytes, vector_bytes, lane_bytes = 16 * (room // _TILE_ROWS), 16 * (room // LANES), 4 * room

    @device
    def store_bounds(ranges, n_tiles, n_vectors, tile_ranges, all_see):
        """Store which keys any row of a tile sees, and which keys all of 16 rows see."""
        n_context = 0
        for tile in range(n_tiles):
            first, _, _, last = bounds(ranges, tile * _TILE_ROWS, _TILE_ROWS)
            store_i64(tile_ranges + 16 * tile, first)
            store_i64(tile_ranges + 16 * tile + 8, last)
            n_context = max(n_context, last + 1)
        for vector in range(n_vectors):
            _, first, last, _ = bounds(ranges, vector * LANES, LANES)
            store_i64(all_see + 16 * vector, first)
            store_i64(all_see + 16 * vector + 8, last)
        return n_context

    @device
    def attend_prompt(work):
        q = stack_bytes(q_bytes)
        ranges = stack_bytes(range_bytes)
        scores = stack_bytes(score_bytes)
        wide = stack_bytes(wide_bytes)
        pages = stack_bytes(PAGES_BYTES)
        tile_ranges = stack_bytes(tile_bytes)
        all_see = stack_bytes(vector_bytes)
        top = stack_bytes(lane_bytes)
        total = stack_bytes(lane_bytes)
        keep = stack_bytes(lane_bytes)
        take = stack_bytes(lane_bytes)
        sums = stack_bytes(q_bytes)
        n_rows = load_i64(work.entry + WORK_N_TOKENS) * group
        n_tiles = (n_rows + _TILE_ROWS - 1) // _TILE_ROWS
        n_vectors = (n_rows + LANES - 1) // LANES
        load_rows(work, max(n_tiles * _TILE_ROWS, n_vectors * LANES), q, ranges)
        n_context = store_bounds(ranges, n_tiles, n_vectors, tile_ranges, all_see)
        for i in range(0, 4 * LANES * n_vectors, 64):
            store_f32x16(top + i, splat(NO_SCORE))
            store_f32x16(total + i, splat(0.0))
        for i in range(0, n_tiles * _TILE_ROWS * row_bytes, 64):
            store_f32x16(sums + i, splat(0.0))
        stop_chunk = load_i64(work.entry + WORK_CHUNK_STOP)
        for chunk in range(load_i64(work.entry + WORK_CHUNK), stop_chunk):
            base = chunk * CHUNK_TOKENS
            n_pages = (min(n_context - base, CHUNK_TOKENS) + PAGE_TOKENS - 1) >> 4
            load_pages(work, base, n_context, pages)
            widen_keys(work.keys, pages, n_pages, wide)
            for tile in range(n_tiles):
                fetch(work.values, pages, n_pages, tile, n_tiles)
                first = load_i64(tile_ranges + 16 * tile)
                last = load_i64(tile_ranges + 16 * tile + 8)
                if last >= base and first < base + CHUNK_TOKENS:
                    row = tile * _TILE_ROWS
                    tile_scores(q + row * row_bytes, wide, scores + row * ROW_SCORES)
            for vector in range(n_vectors):
                first = load_i64(all_see + 16 * vector)
                last = load_i64(all_see + 16 * vector + 8)
                is_masked = first > base or last < base + CHUNK_TOKENS - 1
                row = vector * LANES
                softmax(
                    scores + row * ROW_SCORES, work.cap, ranges + RANGE_BYTES * row, base, is_masked,
                    top + 4 * row, total + 4 * row, keep + 4 * row, take + 4 * row,
                )  # fmt: skip
            widen_values(work.values, pages, n_pages, wide)
            n_next = 0
            if chunk + 1 < stop_chunk:
                load_pages(work, base + CHUNK_TOKENS, n_context, pages)
                n_next = CHUNK_PAGES
            for tile in range(n_tiles):
                fetch(work.keys, pages, n_next, tile, n_tiles)
                first = load_i64(tile_ranges + 16 * tile)
                last = load_i64(tile_ranges + 16 * tile + 8)
                if last >= base and first < base + CHUNK_TOKENS:
                    row = tile * _TILE_ROWS
                    start = max(first - base, 0)
                    stop = min(last + 1 - base, CHUNK_TOKENS)
                    weights = scores + row * ROW_SCORES
                    tile_values(
                        weights, wide, start, stop, sums + row * row_bytes, keep + 4 * row, take + 4 * row
                    )
        if load_i64(work.entry + WORK_PARTIAL) >= 0:
            store_partial(work.partials, n_rows, top, total, sums)
        else:
            finish_rows(work, n_rows, top, total, sums)

    return attend_prompt
