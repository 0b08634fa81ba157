"""Attention by products of whole numbers, of caches of int8 with scales (q8_0).

A query's 32 dimensions that share a scale of keys are rounded to int8, as inputs of matrices are. The weights
of a chunk's values, exponentials times the values' scales, are rounded to int16: those of a row and of 32
dimensions so that their sum is 32,767. Sums of products of whole numbers are exact, in any order.

A chunk's keys are rearranged once for all query rows of a work entry, as the tiles of a Q8_0 matrix whose
rows are keys, and its values as pairs of keys. Then up to 16 rows at a time go through scores, softmax and
values. One token and many do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from kukri.kernels.cpu.codegen.attention_rows import (
    NO_SCORE,
    PAGES_BYTES,
    RANGE_BYTES,
    load_pages,
    make_load_rows,
)
from kukri.kernels.cpu.codegen.blocks import signed_bytes
from kukri.kernels.cpu.codegen.kv_types import CachedNumbers
from kukri.kernels.cpu.codegen.panels import quantize_row
from kukri.kernels.cpu.codegen.prompt_attention import (
    LANES,
    LANES_BYTES,
    ROW_SCORES,
    bounds,
    make_endings,
    make_fetch,
    make_softmax,
)
from kukri.kernels.cpu.codegen.tile_products import tile_dot2_rows
from kukri.kernels.cpu.codegen.tiles import (
    make_tile_zeros,
    tile_merge,
    tile_rows,
    tile_scaled,
    tile_store,
    tile_zeros_like,
)
from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.cpu.compile.intrinsics import (
    constant,
    device,
    load_f32,
    load_i64,
    operation,
    pointer,
    stack_bytes,
    store_i64,
)
from kukri.kernels.cpu.compile.simd import (
    TO_WHOLE,
    fma,
    load_f16x16,
    load_f32x16,
    load_u8x64,
    splat,
    store_f16x16,
    store_f32x16,
    store_whole_pairs,
    sum_rows,
    zero_below,
    zero_outside,
)
from kukri.kernels.cpu.pack.layouts import LAYOUTS, Q8_BLOCK, Q8_BLOCK_BYTES, TOKENS
from kukri.kernels.cpu.run.abi import (
    CHUNK_PAGES,
    CHUNK_TOKENS,
    WORK_CHUNK,
    WORK_CHUNK_STOP,
    WORK_N_TOKENS,
    WORK_PARTIAL,
)
from kukri.kernels.paged_kv import PAGE_TOKENS

_WEIGHTS_SUM = 32767.0
_LEAST_SUM = 1e-30  # values whose weights sum up to less count for nothing
_BLOCK_BYTES = LAYOUTS["Q8_0"].tile_block_bytes  # a page's keys, 32 dimensions
_ROW_WEIGHTS = 2 * CHUNK_TOKENS
_WEIGHTS_BYTES, _SCORES_BYTES = LANES * _ROW_WEIGHTS, LANES * ROW_SCORES
_TILE = TOKENS if cpu_target().has_wide_registers else TOKENS // 2  # rows whose sums registers hold

_I8, _I16, _I32 = (ir.IntType(n) for n in (8, 16, 32))


# --- a chunk in tiles -------------------------------------------------------------------------------


@operation(types.void, types.int64, types.int64)
def store_key_words(builder: Any, target: Any, source: Any) -> None:
    """Stores 8 dimensions [8, 16] of a page's keys as two words of each key, as tiles have signed bytes."""
    both = builder.load(pointer(builder, source, ir.VectorType(_I8, 128)), align=1)
    if cpu_target().has_int8_matrix:  # 8 bytes of keys 0 to 7, then of keys 8 to 15
        order = [16 * d + key for key in range(16) for d in range(8)]
    else:
        order = [16 * d + key for first in (0, 4) for key in range(16) for d in range(first, first + 4)]
    words = builder.shuffle_vector(both, both, ir.Constant(ir.VectorType(_I32, 128), order))
    if cpu_target().has_signed_bias:
        words = builder.xor(words, constant(words.type, 128))
    builder.store(words, pointer(builder, target, words.type), align=1)


@operation(types.void, types.int64, types.int64, types.int64)
def store_value_pairs(builder: Any, target: Any, first: Any, second: Any) -> None:
    """Stores 16 int8 of each of two keys' values as 16 pairs of int16."""
    numbers = ir.VectorType(_I8, 16)
    a, b = (builder.load(pointer(builder, source, numbers), align=1) for source in (first, second))
    lanes = [half + i for i in range(16) for half in (0, 16)]
    mixed = builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, 32), lanes))
    pairs = builder.sext(mixed, ir.VectorType(_I16, 32))
    builder.store(pairs, pointer(builder, target, pairs.type), align=1)


def _make_rearrange(cached: CachedNumbers, d_head: int) -> tuple[Any, Any]:
    """Functions that bring the keys, and the values, of a chunk into tiles.

    Keys: [4 pages, K/32] tiles of Q8_0. Values: [K/16, 2, 16, 16, 2] int16, those of pages 0 and 1, then of 2
    and 3, by key, dimension and page; then float32 scales [K/32, 64].
    """
    value_scale = cached.value_scale
    n_blocks, n_vectors = d_head // Q8_BLOCK, d_head // 16
    vector_bytes, scales = CHUNK_TOKENS * 32, CHUNK_TOKENS * 2 * d_head

    @device
    def rearrange_keys(keys, pages, n_pages, target):
        for page in range(n_pages):
            for block in range(n_blocks):
                source = keys + load_i64(pages + 8 * page) + block * _BLOCK_BYTES
                place = target + (page * n_blocks + block) * _BLOCK_BYTES
                for i in range(0, 16 * Q8_BLOCK, 128):
                    store_key_words(place + i, source + i)
                store_f16x16(place + 16 * Q8_BLOCK, load_f16x16(source + 16 * Q8_BLOCK))

    @device
    def rearrange_values(values, pages, first, last, target):
        """Scales of keys outside first to last are 0."""
        for page in range(0, CHUNK_PAGES, 2):
            source = values + load_i64(pages + 8 * page)
            other = values + load_i64(pages + 8 * page + 8)
            for v in range(n_vectors):
                place = target + v * vector_bytes + page * (PAGE_TOKENS * 32)
                for key in range(PAGE_TOKENS):
                    number = key * d_head + 16 * v
                    store_value_pairs(place + 64 * key, source + number, other + number)
        for page in range(CHUNK_PAGES):
            source = values + load_i64(pages + 8 * page)
            for block in range(n_blocks):
                scale = zero_outside(value_scale(source, 2 * block, d_head), PAGE_TOKENS * page, first, last)
                store_f32x16(target + scales + block * ROW_SCORES + 64 * page, scale)

    return rearrange_keys, rearrange_values


# --- rows ---------------------------------------------------------------------------------------------


def _make_tiles(rows: int, make: Callable[[int], Any]) -> Any:
    """Return a function that covers `rows` rows by calls of `make(n)`'s functions with their first rows."""
    n_whole, n_left = divmod(rows, _TILE)
    whole = make(_TILE)
    if not n_left:

        @device
        def tiles(*arguments):
            for tile in range(n_whole):
                whole(tile * _TILE, *arguments)

        return tiles
    left = make(n_left)

    @device
    def tiles_and_rest(*arguments):
        for tile in range(n_whole):
            whole(tile * _TILE, *arguments)
        left(n_whole * _TILE, *arguments)

    return tiles_and_rest


def _make_scores(rows: int, d_head: int) -> Any:
    """A function for the scores of rows, in panels, and the keys of a chunk's pages first to stop - 1."""
    n_blocks = d_head // Q8_BLOCK
    panel_bytes = TOKENS * n_blocks * Q8_BLOCK_BYTES
    column = cpu_target().column_bytes
    zeros = make_tile_zeros("q8")

    def make_tile(n: int) -> Any:
        # an instruction that multiplies matrices takes two rows
        n_sums = n + n % 2 if n > 1 and cpu_target().has_int8_matrix else n

        @device
        def tile_scores(row, panels, keys, first, stop, scores):
            x = panels + row // TOKENS * panel_bytes + row % TOKENS * column
            for page in range(first, stop):
                s = zeros(n_sums, TOKENS)
                for block in range(n_blocks):
                    tile = keys + (page * n_blocks + block) * _BLOCK_BYTES
                    s = signed_bytes(s, tile, x + block * (TOKENS * Q8_BLOCK_BYTES))
                tile_store(tile_rows(s), scores + row * ROW_SCORES + 64 * page, ROW_SCORES, n)

        return tile_scores

    return _make_tiles(rows, make_tile)


def _make_weights(rows: int) -> Any:
    """A function of exponentials and scales of values: for whole weights, pairs of int16 of keys of a page
    and the next, and what they stand for, by row.
    """

    @device
    def round_weights(scores, scales, weights, factors):
        lanes = stack_bytes(LANES_BYTES)
        inverses = stack_bytes(64)
        for row in range(rows):
            s = scores + row * ROW_SCORES
            w0 = load_f32x16(s) * load_f32x16(scales)
            w1 = load_f32x16(s + 64) * load_f32x16(scales + 64)
            w2 = load_f32x16(s + 128) * load_f32x16(scales + 128)
            w3 = load_f32x16(s + 192) * load_f32x16(scales + 192)
            store_f32x16(lanes + 64 * row, (w0 + w1) + (w2 + w3))
        sums = sum_rows(lanes)
        store_f32x16(inverses, zero_below(sums, _LEAST_SUM, splat(_WEIGHTS_SUM) / sums))
        store_f32x16(factors, sums * splat(1.0 / _WEIGHTS_SUM))
        for row in range(rows):
            inverse = splat(load_f32(inverses + 4 * row))
            for i in range(0, ROW_SCORES, 128):
                s = scores + row * ROW_SCORES + i
                first = load_f32x16(s) * load_f32x16(scales + i)
                last = load_f32x16(s + 64) * load_f32x16(scales + i + 64)
                store_whole_pairs(
                    weights + row * _ROW_WEIGHTS + i // 2,
                    fma(first, inverse, splat(TO_WHOLE)),
                    fma(last, inverse, splat(TO_WHOLE)),
                )

    return round_weights


def _make_values(rows: int, d_head: int) -> Any:
    """A function that adds a chunk's values, times weights, to the sums of rows.

    Pairs of pages first to stop - 1 are those that a row sees.
    """
    zeros, round_weights = make_tile_zeros("i16"), _make_weights(rows)
    row_bytes, vector_bytes, scales = 4 * d_head, CHUNK_TOKENS * 32, CHUNK_TOKENS * 2 * d_head

    def make_tile(n: int) -> Any:
        @device
        def tile_values(row, weights, factors, values, first, stop, sums, keep, take):
            for v in range(2):
                acc = tile_zeros_like(zeros(n, TOKENS))
                for pair in range(PAGE_TOKENS * first, PAGE_TOKENS * stop):
                    value = load_u8x64(values + v * vector_bytes + 64 * pair)
                    weight = weights + row * _ROW_WEIGHTS + 4 * pair
                    acc = tile_dot2_rows(acc, value, weight, _ROW_WEIGHTS)
                place = sums + row * row_bytes + 64 * v
                o = tile_scaled(acc, factors + 4 * row)
                tile_merge(o, place, row_bytes, keep + 4 * row, take + 4 * row)

        return tile_values

    tile_values = _make_tiles(rows, make_tile)

    @device
    def row_values(scores, values, first, stop, sums, keep, take):
        weights = stack_bytes(_WEIGHTS_BYTES)
        factors = stack_bytes(64)
        for block in range(d_head // Q8_BLOCK):
            round_weights(scores, values + scales + block * ROW_SCORES, weights, factors)
            source = values + 2 * block * vector_bytes
            tile_values(weights, factors, source, first, stop, sums + 128 * block, keep, take)

    return row_values


# --- a work entry -------------------------------------------------------------------------------------


def make_int8_entry(cached: CachedNumbers, group: int, n_tokens: int, d_head: int, ending: str) -> Any:
    """A function that attends for one work entry of up to `n_tokens` tokens and one key head."""
    rows = min(group * n_tokens, LANES)  # at a time
    room = -(-group * n_tokens // LANES) * LANES
    load_rows = make_load_rows(group, d_head)
    rearrange_keys, rearrange_values = _make_rearrange(cached, d_head)
    row_scores, row_values = _make_scores(rows, d_head), _make_values(rows, d_head)
    softmax = make_softmax(ending, rows)
    fetch = make_fetch(cached, d_head)
    finish_rows, store_partial = make_endings(cached, group, d_head)
    row_bytes, n_blocks = 4 * d_head, d_head // Q8_BLOCK
    panel_bytes = TOKENS * n_blocks * Q8_BLOCK_BYTES
    q_bytes, range_bytes, lane_bytes = room * row_bytes, RANGE_BYTES * room, 4 * room
    panels_bytes, vector_bytes = room // TOKENS * panel_bytes, 32 * (room // LANES)
    key_bytes = CHUNK_PAGES * n_blocks * _BLOCK_BYTES
    value_bytes = CHUNK_TOKENS * 2 * d_head + n_blocks * ROW_SCORES

    @device
    def start(work, n_rows, panels, ranges, seen, top, total, sums):
        """Rounds queries, stores what rows see, taken together, and that no row has a result yet.

        Gives the first key that any row sees and one past the last.
        """
        first_visible = load_rows(work, n_rows, sums, ranges)
        n_context = 0
        for row in range(n_rows):
            quantize_row(sums + row * row_bytes, d_head, panels, row, TOKENS)
        for row in range(0, n_rows, rows):
            first, all_first, all_last, last = bounds(ranges, row, rows)
            place = seen + 2 * row
            store_i64(place, first)
            store_i64(place + 8, all_first)
            store_i64(place + 16, all_last)
            store_i64(place + 24, last)
            n_context = max(n_context, last + 1)
            store_f32x16(top + 4 * row, splat(NO_SCORE))
            store_f32x16(total + 4 * row, splat(0.0))
        for i in range(0, n_rows * row_bytes, 64):
            store_f32x16(sums + i, splat(0.0))
        return first_visible, n_context

    @device
    def attend_entry(work):
        panels = stack_bytes(panels_bytes)
        ranges = stack_bytes(range_bytes)
        seen = stack_bytes(vector_bytes)
        scores = stack_bytes(_SCORES_BYTES)
        keys = stack_bytes(key_bytes)
        values = stack_bytes(value_bytes)
        pages = stack_bytes(PAGES_BYTES)
        top = stack_bytes(lane_bytes)
        total = stack_bytes(lane_bytes)
        keep = stack_bytes(64)
        take = stack_bytes(64)
        sums = stack_bytes(q_bytes)
        n_rows = load_i64(work.entry + WORK_N_TOKENS) * group
        n_padded = (n_rows + rows - 1) // rows * rows
        first_visible, n_context = start(work, n_padded, panels, ranges, seen, top, total, sums)
        first_chunk = load_i64(work.entry + WORK_CHUNK)
        stop_chunk = load_i64(work.entry + WORK_CHUNK_STOP)
        for chunk in range(first_chunk, stop_chunk):
            base = chunk * CHUNK_TOKENS
            n_pages = (min(n_context - base, CHUNK_TOKENS) + PAGE_TOKENS - 1) >> 4
            load_pages(work, base, n_context, pages)
            if chunk == first_chunk:
                fetch(work.values, pages, n_pages, 0, 1)
            rearrange_keys(work.keys, pages, n_pages, keys)
            rearrange_values(work.values, pages, first_visible - base, n_context - 1 - base, values)
            next_keys, n_keys_pages, n_values_pages = work.next_keys, n_pages, 0
            if chunk + 1 < stop_chunk:
                load_pages(work, base + CHUNK_TOKENS, n_context, pages)
                next_keys, n_keys_pages, n_values_pages = work.keys, CHUNK_PAGES, CHUNK_PAGES
            for row in range(0, n_padded, rows):
                fetch(next_keys, pages, n_keys_pages, row // rows, n_padded // rows)
                fetch(work.values, pages, n_values_pages, row // rows, n_padded // rows)
                first = load_i64(seen + 2 * row)
                last = load_i64(seen + 2 * row + 24)
                if last >= base and first < base + CHUNK_TOKENS:
                    start_key = max(first - base, 0)
                    stop_key = min(last + 1 - base, CHUNK_TOKENS)
                    is_masked = (
                        load_i64(seen + 2 * row + 8) > base
                        or load_i64(seen + 2 * row + 16) < base + CHUNK_TOKENS - 1
                    )
                    x = panels + row // TOKENS * panel_bytes
                    row_scores(x, keys, start_key >> 4, (stop_key + PAGE_TOKENS - 1) >> 4, scores)
                    softmax(
                        scores, work.cap, ranges + RANGE_BYTES * row, base, is_masked,
                        top + 4 * row, total + 4 * row, keep, take,
                    )  # fmt: skip
                    row_values(
                        scores,
                        values,
                        start_key >> 5,
                        (stop_key + 31) >> 5,
                        sums + row * row_bytes,
                        keep,
                        take,
                    )
        if load_i64(work.entry + WORK_PARTIAL) >= 0:
            store_partial(work.partials, n_rows, top, total, sums)
        else:
            finish_rows(work, n_rows, top, total, sums)

    return attend_entry
