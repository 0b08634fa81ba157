"""y = x Wᵀ for packed weight tiles, one kernel per weight type.

Every output is summed block by block along the input, whatever the number of tokens: a token's result does
not depend on its batch mates, on the tile it lands in or on the thread. Integers inside a block are exact;
the block's sum is folded into float32 by one multiply and one fused multiply-add.

The arithmetic of a weight type is its block function, in blocks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kukri.kernels.cpu.codegen.blocks import BLOCK_FUNCTIONS, i16_pair
from kukri.kernels.cpu.codegen.tiles import (
    make_tile_zeros,
    tile_add,
    tile_fma,
    tile_pair_sums,
    tile_rows,
    tile_store,
)
from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.cpu.compile.intrinsics import device, load_i64, stack_bytes
from kukri.kernels.cpu.compile.kernel_source import KernelSource
from kukri.kernels.cpu.compile.simd import load_f32x16, splat, store_f32x16
from kukri.kernels.cpu.pack.layouts import (
    LAYOUTS,
    PER_TOKEN_TYPE,
    ROW_SUM_BYTES,
    ROWS,
    TOKENS,
    PanelKind,
    inputs_bytes,
    linear_kernel,
)

CLAIM_BYTES = 20_000  # weights per claimed tile in decode: about half a microsecond of memory bandwidth
_PANELS_PER_CLAIM = 16  # tokens / 8 per claimed tile in prefill
ROW_TILES_PER_CLAIM = 2
_PAIR_BYTES = 2 * 64 * TOKENS  # the size of the sums of two row tiles


class Steps(NamedTuple):
    """The bytes of a product's steps: a block of a weight tile and of a panel, and the rest after the last
    block.

    Bytes of inputs are for each token of a panel's width.
    """

    weights: int
    weights_tail: int
    inputs: int
    inputs_tail: int
    n_terms: int  # lanes of a panel for a token


def steps(weight_type: str, kind: PanelKind) -> Steps:
    """The steps of a weight type and panels of a kind."""
    layout, per_token = LAYOUTS[weight_type], kind == "q8t"
    return Steps(
        layout.tile_block_bytes,
        ROW_SUM_BYTES if per_token else 0,
        inputs_bytes(kind, layout.block_size),
        cpu_target().column_bytes if per_token else 0,
        2 if kind == "q8x2" else 1,
    )


def make_panel_tile(weight_type: str, kind: PanelKind) -> Any:
    """A function that multiplies one weight tile, 16 rows, with the first `count` tokens of one panel."""
    block = BLOCK_FUNCTIONS[weight_type]
    per_token = kind == "q8t"
    w_step, _, x_token_step, _, n_terms = steps(weight_type, kind)
    inputs = kind if kind in ("f32", "q16", "i16") else "q8"
    column = 4 if kind in ("f32", "i16") else cpu_target().column_bytes
    most = (8 if cpu_target().has_wide_registers else 4) // n_terms  # tokens that registers hold

    def make_row_tile(n: int, width: int, half: int | None = None) -> Callable[..., Any]:
        n_vectors, n_lanes = n * n_terms, width * n_terms
        tile_zeros = make_tile_zeros(inputs, half)

        @device
        def row_tile(w, x, n_blocks, y, y_stride, bias, residual, residual_stride, count):
            """16 rows, or half of them, times `count` <= n tokens of a panel that is `width` wide."""
            out = tile_zeros(n_vectors, n_lanes)
            x_step = x_token_step * n_lanes
            for _ in range(n_blocks):
                out = block(out, w, x)
                w += w_step
                x += x_step
            out = tile_rows(out)
            if n_terms == 2:
                out = tile_pair_sums(out)
            if per_token:
                out = tile_fma(out, load_f32x16(w), x, column)
            if bias != 0:
                out = tile_add(out, bias, 0, count)
            if residual != 0:
                out = tile_add(out, residual, residual_stride, count)
            tile_store(out, y, y_stride, count)

        return row_tile

    def make_row_tiles(n: int, width: int) -> Callable[..., Any]:
        row_tile = make_row_tile(n, width)

        @device
        def row_tiles(w, x, n_blocks, y, y_stride, bias, residual, residual_stride, count):
            """16 rows times `count` tokens of one panel, n at a time: their weights are read as often."""
            for first in range(0, count, n):
                yp = y + first * y_stride
                rp = residual + first * residual_stride if residual != 0 else 0
                xp = x + column * n_terms * first
                row_tile(w, xp, n_blocks, yp, y_stride, bias, rp, residual_stride, count - first)

        return row_tiles

    def make_row_halves() -> Callable[..., Any]:
        first_rows, last_rows = (make_row_tile(TOKENS, TOKENS, half) for half in (0, 1))

        @device
        def row_halves(w, x, n_blocks, y, y_stride, bias, residual, residual_stride, count):
            """The first 8 rows times all tokens of a panel, then the last: each weight is unpacked once."""
            first_rows(w, x, n_blocks, y, y_stride, bias, residual, residual_stride, count)
            last_rows(w, x, n_blocks, y, y_stride, bias, residual, residual_stride, count)

        return row_halves

    # AVX2 has registers for sums of 4 tokens and 16 rows, or of 8 tokens and 8 rows. The latter unpacks
    # weights once, not twice, but loads inputs twice as often: a gain only for types that are slow to unpack
    facts = LAYOUTS[weight_type].block
    is_slow = facts is not None and facts.is_slow_to_unpack
    by_halves = is_slow and kind == "q8" and cpu_target().lowering == "avx2"

    def make(n: int) -> Callable[..., Any]:
        if by_halves and n == TOKENS:
            return make_row_halves()
        return make_row_tile(n, n) if n <= most else make_row_tiles(most, n)

    row_tile_1, row_tile_2, row_tile_4, row_tile_8 = (make(n) for n in (1, 2, 4, TOKENS))

    @device
    def panel_tile(w, x, n_blocks, y, y_stride, bias, residual, residual_stride, count):
        if count == 1:
            row_tile_1(w, x, n_blocks, y, y_stride, bias, residual, residual_stride, count)
        elif count == 2:
            row_tile_2(w, x, n_blocks, y, y_stride, bias, residual, residual_stride, count)
        elif count <= 4:
            row_tile_4(w, x, n_blocks, y, y_stride, bias, residual, residual_stride, count)
        else:
            row_tile_8(w, x, n_blocks, y, y_stride, bias, residual, residual_stride, count)

    return panel_tile


def _make_row_tiles(weight_type: str, kind: PanelKind) -> tuple[Any, int]:
    """A function that multiplies `n` weight tiles with tokens of one panel, and how many `n` may be."""
    panel_tile = make_panel_tile(weight_type, kind)

    @device
    def one(n, w, w_tile_bytes, x, n_blocks, y, y_stride, bias, residual, residual_stride, count):
        panel_tile(w, x, n_blocks, y, y_stride, bias, residual, residual_stride, count)

    if kind != "i16" or not cpu_target().has_wide_registers:
        return one, 1
    w_step, _, x_token_step, _, _ = steps(weight_type, kind)
    zeros = make_tile_zeros("i16")

    @device
    def finish(sums, y, y_stride, bias, residual, residual_stride, count):
        out = tile_add(zeros(TOKENS, TOKENS), sums, 64, TOKENS)
        if bias != 0:
            out = tile_add(out, bias, 0, count)
        if residual != 0:
            out = tile_add(out, residual, residual_stride, count)
        tile_store(out, y, y_stride, count)

    @device
    def two(n, w, w_tile_bytes, x, n_blocks, y, y_stride, bias, residual, residual_stride, count):
        if n < 2 or count <= TOKENS // 2:
            for i in range(n):
                bp = bias + 64 * i if bias != 0 else 0
                rp = residual + 64 * i if residual != 0 else 0
                wp = w + i * w_tile_bytes
                panel_tile(wp, x, n_blocks, y + 64 * i, y_stride, bp, rp, residual_stride, count)
            return
        sums = stack_bytes(_PAIR_BYTES)
        for i in range(0, _PAIR_BYTES, 64):
            store_f32x16(sums + i, splat(0.0))
        for _ in range(n_blocks):
            i16_pair(zeros(TOKENS, TOKENS), w, w + w_tile_bytes, x, sums)
            w += w_step
            x += x_token_step * TOKENS
        for i in range(2):
            bp = bias + 64 * i if bias != 0 else 0
            rp = residual + 64 * i if residual != 0 else 0
            finish(sums + 64 * TOKENS * i, y + 64 * i, y_stride, bp, rp, residual_stride, count)

    return two, 2


def _make_linear(weight_type: str, kind: PanelKind) -> KernelSource:
    """The kernel of a weight type, for panels of a kind."""
    w_step, w_tail, x_step, x_tail, n_terms = steps(weight_type, kind)
    multiply_tiles, at_once = _make_row_tiles(weight_type, kind)

    def linear(tile, rows, w, x, n_row_tiles, n_blocks, y, y_stride, bias, residual, residual_stride):
        """`rows` is the address of the number of tokens; strides are bytes; 0 for no bias or residual."""
        n_tokens = load_i64(rows)
        n_panels = (n_tokens + TOKENS - 1) >> 3
        w_tile_bytes = n_blocks * w_step + w_tail
        if n_tokens <= TOKENS:
            per_claim = max(CLAIM_BYTES // w_tile_bytes, 1)
        else:
            per_claim = ROW_TILES_PER_CLAIM
        n_row_claims = (n_row_tiles + per_claim - 1) // per_claim
        if tile < 0:
            return n_row_claims * ((n_panels + _PANELS_PER_CLAIM - 1) // _PANELS_PER_CLAIM)
        first_row = (tile % n_row_claims) * per_claim
        first_panel = (tile // n_row_claims) * _PANELS_PER_CLAIM
        stop_row = min(first_row + per_claim, n_row_tiles)
        panel_step = TOKENS * (n_blocks * x_step * n_terms + x_tail)
        for panel in range(first_panel, min(first_panel + _PANELS_PER_CLAIM, n_panels)):
            token = panel * TOKENS
            count = min(n_tokens - token, TOKENS)
            xp = x + panel * panel_step
            for row in range(first_row, stop_row, at_once):
                wp = w + row * w_tile_bytes
                yp = y + token * y_stride + row * (4 * ROWS)
                bp = bias + row * (4 * ROWS) if bias != 0 else 0
                rp = residual + token * residual_stride + row * (4 * ROWS) if residual != 0 else 0
                n = min(at_once, stop_row - row)
                multiply_tiles(
                    n, wp, w_tile_bytes, xp, n_blocks, yp, y_stride, bp, rp, residual_stride, count
                )
        return 0

    return KernelSource(linear_kernel(weight_type, kind), linear)


def _panel_kinds(weight_type: str) -> list[PanelKind]:
    if (panel := LAYOUTS[weight_type].panel) in ("f32", "i16"):
        return [panel]
    kinds: list[PanelKind] = ["q8", "q8x2"]
    if not cpu_target().has_int8_dot:
        kinds.append("q16")
    return [*kinds, "q8t"] if weight_type == PER_TOKEN_TYPE else kinds


_SOURCES = [_make_linear(name, kind) for name in BLOCK_FUNCTIONS for kind in _panel_kinds(name)]
KERNELS = {source.name: source for source in _SOURCES}
