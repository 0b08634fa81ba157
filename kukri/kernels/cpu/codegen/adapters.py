"""Adapters' low-rank updates (Hu et al. 2021): y += scale * (x Aᵀ) Bᵀ, for each row with its own A and B.

`adapter_runs` finds, once a step, runs of rows with one adapter; rows without one cost no product. Two
kernels follow each product: `adapter_down` makes scale * (x Aᵀ), `adapter_up` adds its product with B. Each
output is summed along the inputs in one order, whatever the run: no row's bits depend on others. Of a
mixture `expert_runs` makes each row a run, whose slot is the adapter's and the expert's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kukri.kernels.cpu.codegen.tile_products import fetch_ahead
from kukri.kernels.cpu.codegen.tiles import (
    tile_add,
    tile_fma,
    tile_store,
    tile_sum,
    tile_zeros_f32,
)
from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.cpu.compile.intrinsics import (
    device,
    f32_of_bits,
    load_f32,
    load_i32,
    load_i64,
    stack_bytes,
    store_f32,
    store_i64,
)
from kukri.kernels.cpu.compile.kernel_source import KernelSource
from kukri.kernels.cpu.compile.simd import load_bf16x16, load_f16x16, load_f32x16, splat, store_f32x16
from kukri.kernels.cpu.pack.layouts import ROWS
from kukri.kernels.cpu.run.abi import (
    ADAPTERS,
    MAX_RUN_ROWS,
    N_RUNS,
    N_TOKENS,
    PART_BYTES,
    PART_COLUMN,
    PART_N_COLUMNS,
    QUERY_START,
    RUN_BYTES,
    RUN_N_ROWS,
    RUN_ROW,
    RUN_SLOT,
    RUNS_HEADER_BYTES,
    UPDATE_BYTES,
    UPDATE_DOWN,
    UPDATE_DOWN_TYPE,
    UPDATE_RANK,
    UPDATE_SCALE,
    UPDATE_UP,
    UPDATE_UP_TYPE,
)

_LANES_BYTES = 4 * ROWS
_OUT_BYTES = MAX_RUN_ROWS * _LANES_BYTES
_MOST_ROWS = MAX_RUN_ROWS if cpu_target().has_wide_registers else 2  # rows of a run: what registers hold
_TILES_PER_CLAIM = 8


@device
def _add_runs(runs, slot, first, stop):
    """Adds the runs of rows `first` to `stop` - 1."""
    n_runs = load_i64(runs + N_RUNS)
    row = first
    while row < stop:
        n_rows = _MOST_ROWS
        while n_rows > stop - row:
            n_rows >>= 1
        run = runs + RUNS_HEADER_BYTES + n_runs * RUN_BYTES
        store_i64(run + RUN_SLOT, slot)
        store_i64(run + RUN_ROW, row)
        store_i64(run + RUN_N_ROWS, n_rows)
        n_runs += 1
        row += n_rows
    store_i64(runs + N_RUNS, n_runs)


def adapter_runs(tile, batch, rows, indices, runs):
    """Finds runs of rows with one adapter, or none, whose slot is -1.

    `indices` is the address of the address of the rows' tokens, 0 if rows are tokens.
    """
    if tile < 0:
        return 1
    starts = load_i64(batch + QUERY_START)
    slots = load_i64(batch + ADAPTERS)
    store_i64(runs + N_RUNS, 0)
    n_rows = load_i64(rows)
    sequence = 0
    first = 0
    last_slot = -1
    for row in range(n_rows):
        token = row if indices == 0 else load_i32(load_i64(indices) + 4 * row)
        if token < load_i32(starts + 4 * sequence):
            sequence = 0
        while token >= load_i32(starts + 4 * sequence + 4):
            sequence += 1
        slot = load_i32(slots + 4 * sequence)
        if slot != last_slot:
            _add_runs(runs, last_slot, first, row)
            first = row
            last_slot = slot
    _add_runs(runs, last_slot, first, n_rows)
    return 0


def expert_runs(tile, batch, n_experts, n_used, experts, runs):
    """Make a run for each row of a mixture whose token has an adapter: slot * n_experts + expert."""
    if tile < 0:
        return 1
    starts = load_i64(batch + QUERY_START)
    slots = load_i64(batch + ADAPTERS)
    store_i64(runs + N_RUNS, 0)
    sequence = 0
    for token in range(load_i64(batch + N_TOKENS)):
        while token >= load_i32(starts + 4 * sequence + 4):
            sequence += 1
        slot = load_i32(slots + 4 * sequence)
        if slot >= 0:
            for row in range(token * n_used, (token + 1) * n_used):
                expert = load_i32(experts + 4 * row)
                if expert >= 0:
                    _add_runs(runs, slot * n_experts + expert, row, row + 1)
    return 0


class _Product(NamedTuple):
    """The addresses of rows' inputs, of rows to add to their outputs (0 for none), and of the outputs."""

    x: int
    x_stride: int
    n_inputs: int
    added: int  # with the outputs' stride
    residual: int
    residual_stride: int
    y: int
    y_stride: int


def _make_rows(n: int, load: Any, step: int) -> Callable[..., Any]:
    fetch_pair_ahead = fetch_ahead(2 * step // 64)

    @device
    def product(w, of):
        """16 rows of weights at w times n rows of inputs.

        Even and odd inputs have sums of their own, as each addition to a sum has to wait for the one before.
        """
        sums = tile_zeros_f32(n, n)
        odd_sums = tile_zeros_f32(n, n)
        x = of.x
        for _ in range(of.n_inputs >> 1):
            fetch_pair_ahead(sums, w)
            sums = tile_fma(sums, load(w), x, of.x_stride)
            odd_sums = tile_fma(odd_sums, load(w + step), x + 4, of.x_stride)
            w += 2 * step
            x += 8
        if of.n_inputs & 1:
            sums = tile_fma(sums, load(w), x, of.x_stride)
        sums = tile_sum(sums, odd_sums)
        if of.added != 0:
            sums = tile_add(sums, of.added, of.y_stride, n)
        if of.residual != 0:
            sums = tile_add(sums, of.residual, of.residual_stride, n)
        tile_store(sums, of.y, of.y_stride, n)

    return product


def _make_type(load: Any, step: int) -> Callable[..., Any]:
    product_1, product_2, product_4 = (_make_rows(min(n, _MOST_ROWS), load, step) for n in (1, 2, 4))
    product_most = _make_rows(_MOST_ROWS, load, step)

    @device
    def product(n_rows, w, of):
        if n_rows == 1:
            product_1(w, of)
        elif n_rows == 2:
            product_2(w, of)
        elif n_rows == 4:
            product_4(w, of)
        else:
            product_most(w, of)

    return product


_f32_product = _make_type(load_f32x16, 4 * ROWS)
_f16_product = _make_type(load_f16x16, 2 * ROWS)
_bf16_product = _make_type(load_bf16x16, 2 * ROWS)


@device
def _product(type, w, tile, n_rows, of):
    """A weight tile times rows of inputs, by the weights' type."""
    if type == 0:
        _f32_product(n_rows, w + tile * of.n_inputs * (4 * ROWS), of)
    elif type == 1:
        _f16_product(n_rows, w + tile * of.n_inputs * (2 * ROWS), of)
    else:
        _bf16_product(n_rows, w + tile * of.n_inputs * (2 * ROWS), of)


def adapter_down(tile, runs, updates, n_parts, rank_tiles, repeats, x, x_stride, n_inputs, y, y_stride):
    """y = scale * (x Aᵀ) of each run; a part of y has `rank_tiles` tiles. A tile is one of A's, for a run.

    `repeats` rows of y share a row of x; they are then runs of one row each.
    """
    per_run = n_parts * rank_tiles
    if tile < 0:
        return load_i64(runs + N_RUNS) * per_run
    run = runs + RUNS_HEADER_BYTES + tile // per_run * RUN_BYTES
    place = tile % per_run
    rank_tile = place % rank_tiles
    update = _update_of(run, updates, n_parts, place // rank_tiles)
    if update == 0 or rank_tile * ROWS >= load_i64(update + UPDATE_RANK):
        return 0
    row = load_i64(run + RUN_ROW)
    n_rows = load_i64(run + RUN_N_ROWS)
    out = stack_bytes(_OUT_BYTES)
    type = load_i64(update + UPDATE_DOWN_TYPE)
    source = x + row // repeats * x_stride
    of = _Product(source, x_stride, n_inputs, 0, 0, 0, out, _LANES_BYTES)
    _product(type, load_i64(update + UPDATE_DOWN), rank_tile, n_rows, of)
    scale = splat(f32_of_bits(load_i64(update + UPDATE_SCALE)))
    target = y + row * y_stride + place * _LANES_BYTES
    for i in range(n_rows):
        store_f32x16(target + i * y_stride, load_f32x16(out + i * _LANES_BYTES) * scale)
    return 0


@device
def _update_of(run, updates, n_parts, part):
    """The address of the update of a matrix by a run's adapter, 0 if there is none."""
    slot = load_i64(run + RUN_SLOT)
    update = updates + (slot * n_parts + part) * UPDATE_BYTES
    if slot < 0 or load_i64(update + UPDATE_DOWN) == 0:
        return 0
    return update


@device
def _n_claims(part):
    """Claims of the columns of a part."""
    n_tiles = (load_i64(part + PART_N_COLUMNS) + ROWS - 1) // ROWS
    return (n_tiles + _TILES_PER_CLAIM - 1) // _TILES_PER_CLAIM


@device
def _add_rows(target, target_stride, added, added_stride, n_rows, n_columns):
    """Adds up to 16 columns of some rows."""
    for i in range(n_rows):
        to = target + i * target_stride
        of = added + i * added_stride
        if n_columns >= ROWS:
            store_f32x16(to, load_f32x16(to) + load_f32x16(of))
        else:  # the columns after it are another part's
            for j in range(0, 4 * n_columns, 4):
                store_f32(to + j, load_f32(to + j) + load_f32(of + j))


def adapter_up(
    tile, runs, updates, n_parts, rank_tiles, parts, x, x_stride, residual, residual_stride, y, y_stride
):  # fmt: skip
    """y += x Bᵀ of each run, x as `adapter_down` leaves it, then `residual`, which is 0 for none.

    A tile is some columns of a part, for a run. Runs of the same columns follow one another, so that a thread
    has about the columns that it computed in the product before: they lie in its caches.
    """
    n_runs = load_i64(runs + N_RUNS)
    if tile < 0:
        per_run = 0
        for i in range(n_parts):
            per_run += _n_claims(parts + i * PART_BYTES)
        return n_runs * per_run
    run = runs + RUNS_HEADER_BYTES + tile % n_runs * RUN_BYTES
    claim = tile // n_runs
    part = 0
    while claim >= _n_claims(parts + part * PART_BYTES):
        claim -= _n_claims(parts + part * PART_BYTES)
        part += 1
    update = _update_of(run, updates, n_parts, part)
    if update == 0 and residual == 0:
        return 0
    row = load_i64(run + RUN_ROW)
    n_rows = load_i64(run + RUN_N_ROWS)
    n_columns = load_i64(parts + part * PART_BYTES + PART_N_COLUMNS)
    column = 4 * load_i64(parts + part * PART_BYTES + PART_COLUMN)
    source = x + row * x_stride + part * rank_tiles * _LANES_BYTES
    target = y + row * y_stride + column
    before = residual + row * residual_stride + column
    out = stack_bytes(_OUT_BYTES)
    first = claim * _TILES_PER_CLAIM
    for row_tile in range(first, min(first + _TILES_PER_CLAIM, (n_columns + ROWS - 1) // ROWS)):
        n_left = min(n_columns - row_tile * ROWS, ROWS)
        to = target + row_tile * _LANES_BYTES
        added = before + row_tile * _LANES_BYTES if residual != 0 else 0
        if update != 0:
            type = load_i64(update + UPDATE_UP_TYPE)
            rank = load_i64(update + UPDATE_RANK)
            if n_left == ROWS:
                of = _Product(source, x_stride, rank, to, added, residual_stride, to, y_stride)
            else:
                of = _Product(source, x_stride, rank, 0, 0, 0, out, _LANES_BYTES)
            _product(type, load_i64(update + UPDATE_UP), row_tile, n_rows, of)
            if n_left == ROWS:
                continue
            _add_rows(to, y_stride, out, _LANES_BYTES, n_rows, n_left)
        if residual != 0:
            _add_rows(to, y_stride, added, residual_stride, n_rows, n_left)
    return 0


_KERNELS = (adapter_runs, expert_runs, adapter_down, adapter_up)
_SOURCES = [KernelSource(kernel.__name__, kernel) for kernel in _KERNELS]
KERNELS = {source.name: source for source in _SOURCES}
