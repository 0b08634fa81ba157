"""Attention over KV pages, for decoding and prompts alike, and for texts that see all of themselves.

Keys are taken in *chunks* of 64, fixed in absolute position. A chunk gives a partial result per query row
(its maximum, its sum of exponentials and its weighted values); partials are merged in chunk order, as in
FlashAttention (Dao et al. 2022). Whether one thread runs over all chunks or several share them, and
whatever the other rows are, a row's result is bit-identical.

Here one token attends: its rows, the heads that share a key head, meet keys and values as the cache has them.
Scores of a page of 16 keys are one vector: lanes are keys. `prompt_attention.py` attends for several tokens,
of one sequence, or of several that decode from the same prefix; `int8_attention.py` for one and for several
on caches of int8.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kukri.kernels.cache import MAX_HEAD
from kukri.kernels.cpu.codegen.attention_rows import (
    ADJUSTED,
    NO_SCORE,
    PAGES_BYTES,
    RANGE_BYTES,
    Work,
    each,
    finish,
    finish_rotated,
    load_pages,
    make_load_rows,
)
from kukri.kernels.cpu.codegen.int8_attention import make_int8_entry
from kukri.kernels.cpu.codegen.kv_types import CACHED, CachedNumbers
from kukri.kernels.cpu.codegen.panels import first_row, panel_width, quantize_row, row_tiles, stop_row
from kukri.kernels.cpu.codegen.prompt_attention import make_prompt_entry
from kukri.kernels.cpu.codegen.tiles import tile_add_scaled, tile_fma, tile_store, tile_zeros_f32
from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.cpu.compile.intrinsics import (
    device,
    f32_of_bits,
    load_f32,
    load_i64,
    prefetch,
    stack_bytes,
    store_f32,
)
from kukri.kernels.cpu.compile.kernel_source import KernelSource
from kukri.kernels.cpu.compile.simd import (
    fma,
    load_f32x16,
    mask_outside,
    max_lanes,
    maximum,
    softmax_exponential,
    splat,
    store_f32x16,
    sum_lanes,
)
from kukri.kernels.cpu.run.abi import (
    CHUNK_TOKENS,
    MAX_TILE_ROWS,
    N_PARTS,
    N_SHARED,
    N_TOKENS,
    N_WORK,
    PART_SUMS,
    PART_VALUES,
    PARTS_BYTES,
    PARTS_FIRST,
    PARTS_TOKEN,
    SHARED_FIRST,
    SHARED_STEP,
    SHARED_TOKEN,
    TOKEN_PARTS,
    WORK,
    WORK_BYTES,
    WORK_CHUNK,
    WORK_CHUNK_STOP,
    WORK_N_TOKENS,
    WORK_PARTIAL,
    WORK_TOKEN,
    partial_bytes,
    prompt_tokens,
    query_tokens,
)
from kukri.kernels.paged_kv import PAGE_TOKENS

_MOST_STATE_BYTES = partial_bytes(MAX_TILE_ROWS, MAX_HEAD)


@device
def _start(state, rows, d_head):
    store_f32x16(state, splat(NO_SCORE))
    store_f32x16(state + PART_SUMS, splat(0.0))
    for i in range(0, rows * d_head * 4, 64):
        store_f32x16(state + PART_VALUES + i, splat(0.0))


@device
def _merge(state, part, first, rows, d_head):
    """state = state and `rows` rows of part, from `first` on: partial results over neighbouring keys."""
    weights = stack_bytes(128)
    old = load_f32x16(state)
    new = load_f32x16(part + 4 * first)  # and numbers of no row, which come to nothing
    top = maximum(old, new)
    keep = softmax_exponential(old - top)
    take = softmax_exponential(new - top)
    store_f32x16(weights, keep)
    store_f32x16(weights + 64, take)
    store_f32x16(state, top)
    sums = fma(load_f32x16(part + PART_SUMS + 4 * first), take, load_f32x16(state + PART_SUMS) * keep)
    store_f32x16(state + PART_SUMS, sums)
    values = part + PART_VALUES + first * d_head * 4
    for row in range(rows):
        a = splat(load_f32(weights + 4 * row))
        b = splat(load_f32(weights + 64 + 4 * row))
        for i in range(row * d_head * 4, (row + 1) * d_head * 4, 64):
            value = load_f32x16(state + PART_VALUES + i) * a
            store_f32x16(state + PART_VALUES + i, fma(load_f32x16(values + i), b, value))


def _make_scores(cached: CachedNumbers, rows: int, d_head: int, n_pages: int) -> Any:
    """A function for the scores of `rows` query rows and the keys of `n_pages` pages.

    The pages' values are prefetched on the way, and the next page's keys if `n_pages` is 1.
    """
    load_key, key_scale = cached.key, cached.key_scale
    n_vectors, span = d_head // 16, cached.vectors_per_scale(d_head)
    dim_bytes = cached.head_bytes(d_head) // d_head  # bytes of a page's keys, and of its values
    n_fetches = max(n_pages * dim_bytes // 64, 1)  # in turn, instead of all at every line, which branches
    addresses = each(n_pages, lambda p: lambda keys, pages: keys + load_i64(pages + 8 * p))
    zeros = each(n_pages, lambda p: lambda: tile_zeros_f32(rows, 1))
    add = each(
        n_pages, lambda p: lambda s, keys, v, d, q: tile_fma(s[p], load_key(keys[p], v, d), q, 4 * d_head)
    )
    if key_scale is None:
        fold = each(n_pages, lambda p: lambda s, part, keys, v: part[p])
    else:
        fold = each(
            n_pages,
            lambda p: lambda s, part, keys, v: tile_add_scaled(s[p], part[p], key_scale(keys[p], v, d_head)),
        )
    store = each(
        n_pages, lambda p: lambda s, scores: tile_store(s[p], scores + 64 * p, 4 * CHUNK_TOKENS, rows)
    )

    @device
    def page_scores(q, keys, values, pages, scores):
        at = addresses(keys, pages)
        s = zeros()
        for first in range(0, n_vectors, span):
            part = zeros()
            for v in range(first, first + span):
                for d in range(16):
                    offset = dim_bytes * (16 * v + d)
                    for i in range(n_fetches):
                        page = (n_fetches * d + i) % n_pages
                        prefetch(values + load_i64(pages + 8 * page) + offset)
                    if n_pages == 1:
                        prefetch(keys + load_i64(pages + 8) + offset)
                    part = add(part, at, v, d, q + 4 * (16 * v + d))
            s = fold(s, part, at, first)
        store(s, scores)

    return page_scores


def _make_weights(cached: CachedNumbers, rows: int, d_head: int, together: int) -> Any:
    """A function for the weights of a chunk's values, from vector `first` on: scores times their scales.

    A scale that `together` vectors do not share needs weights of its own.
    """
    value_scale = cached.value_scale
    span = cached.vectors_per_scale(d_head)
    n_scales = max(1, together // span)
    n_bytes = n_scales * rows * 4 * CHUNK_TOKENS

    @device
    def scaled(scores, values, pages, n_keys, first):
        weights = stack_bytes(n_bytes)
        for i in range(n_scales):
            for page in range((n_keys + PAGE_TOKENS - 1) >> 4):
                scale = value_scale(values + load_i64(pages + 8 * page), first + i * span, d_head)
                for row in range(rows):
                    score = load_f32x16(scores + row * 4 * CHUNK_TOKENS + 64 * page)
                    place = (i * rows + row) * 4 * CHUNK_TOKENS + 64 * page
                    store_f32x16(weights + place, score * scale)
        return weights

    return scaled


@device
def _scores_alone(scores, values, pages, n_keys, first):
    return scores


def _make_values(cached: CachedNumbers, rows: int, d_head: int, together: int) -> Any:
    """A function for the weighted sum of values, `together` vectors of 16 dimensions at a time.

    Keys that are multiplied next are prefetched on the way.
    """
    load_value = cached.value
    n_vectors, span = d_head // 16, cached.vectors_per_scale(d_head)
    if cached.value_scale is None:
        scaled, span, next_scale = _scores_alone, n_vectors, 0
    else:
        scaled, next_scale = _make_weights(cached, rows, d_head, together), rows * 4 * CHUNK_TOKENS
    zeros = each(together, lambda j: lambda: tile_zeros_f32(rows, 1))
    add = each(
        together,
        lambda j: (
            lambda o, page, key, i, weights: tile_fma(
                o[j], load_value(page, key, i + j, d_head), weights + j // span * next_scale, 4 * CHUNK_TOKENS
            )
        ),
    )
    store = each(together, lambda j: lambda o, out: tile_store(o[j], out + 64 * j, 4 * d_head, rows))
    step = max(span, together)
    n_passes = n_vectors // together
    key_bytes = cached.head_bytes(d_head) // PAGE_TOKENS // n_passes  # for a pass to fetch
    lines = max(key_bytes // 64, 1)

    @device
    def weighted_values(scores, values, pages, first_key, n_keys, part, next_keys):
        for first in range(0, n_vectors, step):
            weights = scaled(scores, values, pages, n_keys, first)
            for i in range(first, first + step, together):
                o = zeros()
                for key in range(first_key, n_keys):
                    offset = load_i64(pages + 8 * (key >> 4))
                    place = (i // together * PAGE_TOKENS + (key & 15)) * (64 * lines)
                    for line in range(lines):
                        prefetch(next_keys + offset + place + 64 * line)
                    o = add(o, values + offset, key & 15, i, weights + 4 * key)
                store(o, part + PART_VALUES + 64 * i)

    return weighted_values


def _make_chunk(cached: CachedNumbers, rows: int, d_head: int, adjust: Any) -> Any:
    """A function for one chunk of keys and `rows` query rows."""
    row_scores = 4 * CHUNK_TOKENS
    # pages, or vectors of values, at a time: enough to keep the FMA units busy, if registers hold their sums
    # and what goes into them (12 sums of three rows and two pages do not fit into 16 with their factors)
    if cpu_target().has_wide_registers:
        n_pages = 4 if rows <= 4 else 2 if rows <= 8 else 1
    else:
        n_pages = {1: 4, 2: 2}.get(rows, 1)
    page_scores = _make_scores(cached, rows, d_head, n_pages)
    together = next(n for n in (4, 2, 1) if n <= n_pages and d_head // 16 % n == 0)
    weighted_values = _make_values(cached, rows, d_head, together)

    @device
    def softmax(scores, cap, base, seen, part, row):
        """Turns a row of scores into exponentials; stores their maximum and sum."""
        s = scores + row * row_scores
        first = load_i64(seen)
        last = load_i64(seen + 8)
        biases = load_i64(seen + 16) + 4 * base
        s0 = mask_outside(adjust(load_f32x16(s), cap, biases), base, first, last)
        s1 = mask_outside(adjust(load_f32x16(s + 64), cap, biases + 64), base + 16, first, last)
        s2 = mask_outside(adjust(load_f32x16(s + 128), cap, biases + 128), base + 32, first, last)
        s3 = mask_outside(adjust(load_f32x16(s + 192), cap, biases + 192), base + 48, first, last)
        largest = max(max_lanes(maximum(maximum(s0, s1), maximum(s2, s3))), NO_SCORE)
        top = splat(largest)
        s0 = softmax_exponential(s0 - top)
        s1 = softmax_exponential(s1 - top)
        s2 = softmax_exponential(s2 - top)
        s3 = softmax_exponential(s3 - top)
        store_f32x16(s, s0)
        store_f32x16(s + 64, s1)
        store_f32x16(s + 128, s2)
        store_f32x16(s + 192, s3)
        store_f32(part + 4 * row, largest)
        store_f32(part + PART_SUMS + 4 * row, sum_lanes((s0 + s1) + (s2 + s3)))

    @device
    def chunk_part(q, cap, ranges, keys, values, next_keys, pages, base, first_key, n_keys, part, scores):
        """The partial result of keys base + first_key to base + n_keys - 1.

        `pages`: the byte offsets of their 4 pages and of the next; `next_keys` are of the head that follows.
        What lies before the first key may be anything, and so may be its page.
        """
        for page in range(0, (n_keys + PAGE_TOKENS - 1) >> 4, n_pages):
            page_scores(q, keys, values, pages + 8 * page, scores + 64 * page)
        for row in range(rows):
            softmax(scores, cap, base, ranges + RANGE_BYTES * row, part, row)
        weighted_values(scores, values, pages, first_key, n_keys, part, next_keys)

    return chunk_part


def _make_token_entry(cached: CachedNumbers, group: int, n_tokens: int, d_head: int, ending: str) -> Any:
    """A function that attends for one work entry of up to `n_tokens` tokens and one key head."""
    rows = group * n_tokens
    load_rows = make_load_rows(group, d_head)
    chunk_part = _make_chunk(cached, rows, d_head, ADJUSTED[ending])
    scratch_bytes = partial_bytes(rows, d_head)
    finish_rows = _make_finish_rows(cached.is_rotated)
    q_bytes, range_bytes, score_bytes = 4 * rows * d_head, RANGE_BYTES * rows, 4 * rows * CHUNK_TOKENS

    @device
    def attend_token(work):
        rows_q = stack_bytes(q_bytes)
        ranges = stack_bytes(range_bytes)
        scores = stack_bytes(score_bytes)
        pages = stack_bytes(PAGES_BYTES)
        part = stack_bytes(scratch_bytes)
        merged = stack_bytes(scratch_bytes)
        first_visible = load_rows(work, rows, rows_q, ranges)
        n_context = load_i64(ranges + RANGE_BYTES * (rows - 1) + 8) + 1
        is_partial = load_i64(work.entry + WORK_PARTIAL) >= 0  # one chunk has nothing to merge it with
        state = work.partials if is_partial else merged
        _start(state, rows, d_head)
        for chunk in range(load_i64(work.entry + WORK_CHUNK), load_i64(work.entry + WORK_CHUNK_STOP)):
            base = chunk * CHUNK_TOKENS
            first_key = max(first_visible - base, 0)
            n_keys = min(n_context - base, CHUNK_TOKENS)
            load_pages(work, base, n_context, pages)
            target = state if is_partial else part
            chunk_part(
                rows_q, work.cap, ranges, work.keys, work.values, work.next_keys, pages, base, first_key,
                n_keys, target, scores,
            )  # fmt: skip
            if not is_partial:
                _merge(state, part, 0, rows, d_head)
        if not is_partial:
            for i in range(load_i64(work.entry + WORK_N_TOKENS)):
                token = work.y + (load_i64(work.entry + WORK_TOKEN) + i) * work.y_stride
                finish_rows(state, i * group, work.head, token, work.sinks, group, d_head)

    return attend_token


def _make_finish_rows(is_rotated: bool) -> Any:
    """A function that finishes the rows of one token and key head, from `first` on."""
    finish_row = finish_rotated if is_rotated else finish

    @device
    def finish_rows(state, first, head, y, sinks, group, d_head):
        for i in range(group):
            h = head * group + i
            values = state + PART_VALUES + (first + i) * 4 * d_head
            top = state + 4 * (first + i)
            finish_row(top, top + PART_SUMS, values, y + h * 4 * d_head, d_head, sinks + 4 * h)

    return finish_rows


def _make_attend(cached: CachedNumbers, ending: str, group: int, d_head: int) -> KernelSource:
    """`attend_f16[group,d_head]`: every work entry for every key head.

    `attend_f16_softcap` caps scores, `attend_f16_biased` adds to them by distance. Fewer work entries than
    `busy_entries` are cut into their key heads, to keep threads busy.
    """
    n_few, n_many = query_tokens(group), prompt_tokens(group, d_head)
    make_entry = make_int8_entry if cached.has_int8_products else _make_token_entry
    one_token = make_entry(cached, group, 1, d_head, ending)
    few_tokens = one_token if n_few == 1 else make_entry(cached, group, n_few, d_head, ending)
    if cached.has_int8_products:
        many_tokens = make_int8_entry(cached, group, n_many, d_head, ending)
    else:
        many_tokens = make_prompt_entry(cached, group, d_head, ending)
    head_bytes = cached.head_bytes(d_head)
    slot_bytes = partial_bytes(group * query_tokens(group), d_head)

    def attend(
        tile, batch, q, q_stride, scale, softcap, n_kv_heads, busy_entries, keys, values, page_stride, window,
        n_ahead, first_key, stop_key, distances, distance_stride, sinks, partials, y, y_stride,
    ):  # fmt: skip
        n_work = load_i64(batch + N_WORK)
        n_parts = n_kv_heads if n_work < busy_entries else 1
        if tile < 0:
            return n_work * n_parts
        entry = load_i64(batch + WORK) + tile // n_parts * WORK_BYTES
        n_heads = n_kv_heads // n_parts
        stop = tile % n_parts * n_heads + n_heads
        for head in range(stop - n_heads, stop):
            partial = partials + (load_i64(entry + WORK_PARTIAL) * n_kv_heads + head) * slot_bytes
            work = Work(
                batch, entry, head, q, q_stride, splat(f32_of_bits(scale)), splat(f32_of_bits(softcap)),
                keys + head * head_bytes, values + head * head_bytes,
                keys + min(head + 1, stop - 1) * head_bytes, page_stride, window, n_ahead,
                first_key, stop_key,
                distances, distance_stride, sinks, partial, y, y_stride,
            )  # fmt: skip
            n_tokens = load_i64(entry + WORK_N_TOKENS)
            if n_tokens == 1:
                one_token(work)
            elif n_tokens <= n_few:  # as many rows as one pass over keys and values holds
                few_tokens(work)
            else:
                many_tokens(work)
        return 0

    return KernelSource(f"attend_{cached.kv_type}{ending}[{group},{d_head}]", attend)


def _make_attend_finish(is_rotated: bool) -> KernelSource:
    """`attend_finish`: merges partial results, then quantizes rows for the next linear.

    `attend_finish_rotated` rotates heads back. One kernel does for heads of all sizes: it is a small part of
    attention, and compiling it for each would not be.
    """
    finish_rows = _make_finish_rows(is_rotated)

    @device
    def merge_token(state, parts, token_parts, part_stride, group, d_head):
        """Merges the partial results of one token and key head, in the order of their keys."""
        _start(state, group, d_head)
        shared = load_i64(token_parts + SHARED_FIRST)
        row = load_i64(token_parts + SHARED_TOKEN) * group
        for i in range(load_i64(token_parts + N_SHARED)):
            number = shared + i * load_i64(token_parts + SHARED_STEP)
            _merge(state, parts + number * part_stride, row, group, d_head)
        own = load_i64(token_parts + PARTS_FIRST)
        row = load_i64(token_parts + PARTS_TOKEN) * group
        for number in range(own, own + load_i64(token_parts + N_PARTS)):
            _merge(state, parts + number * part_stride, row, group, d_head)

    def attend_finish(
        tile, batch, group, n_kv_heads, d_head, sinks, partials, part_bytes, y, y_stride, panels
    ):
        """`panels` (q8) may be 0: not wanted."""
        n_rows = load_i64(batch + N_TOKENS)
        if tile < 0:
            return row_tiles(n_rows)
        state = stack_bytes(_MOST_STATE_BYTES)
        for t in range(first_row(tile, n_rows), stop_row(tile, n_rows)):
            token_parts = load_i64(batch + TOKEN_PARTS) + PARTS_BYTES * t
            if load_i64(token_parts + PARTS_FIRST) >= 0:
                for head in range(n_kv_heads):
                    parts = partials + head * part_bytes
                    merge_token(state, parts, token_parts, n_kv_heads * part_bytes, group, d_head)
                    finish_rows(state, 0, head, y + t * y_stride, sinks, group, d_head)
            if panels != 0:
                width = panel_width(t, n_rows)
                quantize_row(y + t * y_stride, n_kv_heads * group * d_head, panels, t, width)
        return 0

    suffix = "_rotated" if is_rotated else ""
    return KernelSource(f"attend_finish{suffix}", attend_finish)


KERNELS = {
    **{
        f"attend_{cached.kv_type}{ending}": partial(_make_attend, cached, ending)
        for cached in CACHED
        for ending in ADJUSTED
    },
    **{source.name: source for source in map(_make_attend_finish, (False, True))},
}
