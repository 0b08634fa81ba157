"""y = x Wᵀ for packed weight tiles, one kernel per weight type.

Every output is summed block by block along the input, whatever the number of tokens: a token's result does
not depend on its batch mates, on the tile it lands in or on the thread. Integers inside a block are exact;
the block's sum is folded into float32 by one multiply and one fused multiply-add.

A weight type is one *block function*: (out, w, x) -> out after one block, where `out` is a tile of one
vector (16 rows) per token, `w` the address of the block in the weight tile, `x` in the panel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kukri.kernels.cpu.jit import KernelSource
from kukri.kernels.cpu.layouts import (
    F32_INPUT_BYTES,
    LAYOUTS,
    Q8_BLOCK_BYTES,
    Q8_NEGATIVE_SUMS,
    Q8_SCALED_SUMS,
    Q8_SCALES,
    ROWS,
    TOKENS,
)
from kukri.kernels.cpu.simd import (
    device,
    high_nibbles,
    load_bf16x16,
    load_f16x16,
    load_f32x16,
    load_i64,
    load_u8x64,
    low_nibbles,
    signed_dot_shift,
    tile_add,
    tile_dot4,
    tile_dot4_signed,
    tile_fma,
    tile_fold,
    tile_offset_start,
    tile_store,
    tile_zeros_f32,
    tile_zeros_like,
)

_GROUP = 4 * TOKENS  # bytes from one group of 4 inputs to the next in a q8 panel
_SIGNED_SHIFT = signed_dot_shift()
_CLAIM_BYTES = 20_000  # weights per claimed tile in decode: about half a microsecond of memory bandwidth
_PANELS_PER_CLAIM = 16  # tokens / 8 per claimed tile in prefill
_ROW_TILES_PER_CLAIM = 4


@device
def _dot_nibbles(acc, w, x):
    """acc += the block's 32 nibbles: byte 4j+b of a row holds input 4j+b (low) and 16+4j+b (high)."""
    for j in range(4):
        packed = load_u8x64(w + 64 * j)
        acc = tile_dot4(acc, low_nibbles(packed), x + j * _GROUP, 4)
        acc = tile_dot4(acc, high_nibbles(packed), x + (4 + j) * _GROUP, 4)
    return acc


@device
def _block_q4_0(out, w, x):
    # weights are d * (q - 8): start at -8 times the sum of the inputs
    acc = tile_offset_start(out, x + Q8_NEGATIVE_SUMS, 3)
    acc = _dot_nibbles(acc, w, x)
    return tile_fold(out, acc, load_f16x16(w + 256), x + Q8_SCALES)


@device
def _block_q4_1(out, w, x):
    # weights are d * q + m: the min meets the scaled sum of the inputs
    acc = _dot_nibbles(tile_zeros_like(out), w, x)
    out = tile_fold(out, acc, load_f16x16(w + 256), x + Q8_SCALES)
    return tile_fma(out, load_f16x16(w + 288), x + Q8_SCALED_SUMS, 4)


@device
def _block_q8_0(out, w, x):
    acc = tile_offset_start(out, x + Q8_NEGATIVE_SUMS, _SIGNED_SHIFT)
    for j in range(8):
        acc = tile_dot4_signed(acc, load_u8x64(w + 64 * j), x + j * _GROUP, 4)
    return tile_fold(out, acc, load_f16x16(w + 512), x + Q8_SCALES)


@device
def _block_f32(out, w, x):
    return tile_fma(out, load_f32x16(w), x, 4)


@device
def _block_f16(out, w, x):
    return tile_fma(out, load_f16x16(w), x, 4)


@device
def _block_bf16(out, w, x):
    return tile_fma(out, load_bf16x16(w), x, 4)


def _in_two_terms(block: Any) -> Any:
    @device
    def both_terms(out, w, x):
        """The block function for q8x2 panels."""
        return block(block(out, w, x), w, x + Q8_BLOCK_BYTES)

    return both_terms


def _make_linear(name: str, block: Any, w_step: int, x_step: int) -> KernelSource:
    """A kernel from a block function and the bytes of a block in weight tiles and panels."""

    def make_row_tile(n: int) -> Callable[..., Any]:
        @device
        def row_tile(w, x, n_blocks, y, y_stride, bias, residual, residual_stride, count):
            """16 rows times `count` <= n tokens of one panel."""
            out = tile_zeros_f32(n)
            for _ in range(n_blocks):
                out = block(out, w, x)
                w += w_step
                x += x_step
            if bias != 0:
                out = tile_add(out, bias, 0, count)
            if residual != 0:
                out = tile_add(out, residual, residual_stride, count)
            tile_store(out, y, y_stride, count)

        return row_tile

    row_tile_1, row_tile_2, row_tile_4, row_tile_8 = (make_row_tile(n) for n in (1, 2, 4, 8))

    def linear(tile, rows, w, x, n_row_tiles, n_blocks, y, y_stride, bias, residual, residual_stride):
        """`rows` is the address of the number of tokens; strides are bytes; 0 for no bias or residual."""
        n_tokens = load_i64(rows)
        n_panels = (n_tokens + TOKENS - 1) >> 3
        w_tile_bytes = n_blocks * w_step
        if n_tokens <= TOKENS:
            per_claim = max(_CLAIM_BYTES // w_tile_bytes, 1)
        else:
            per_claim = _ROW_TILES_PER_CLAIM
        n_row_claims = (n_row_tiles + per_claim - 1) // per_claim
        if tile < 0:
            return n_row_claims * ((n_panels + _PANELS_PER_CLAIM - 1) // _PANELS_PER_CLAIM)
        first_row = (tile % n_row_claims) * per_claim
        first_panel = (tile // n_row_claims) * _PANELS_PER_CLAIM
        stop_row = min(first_row + per_claim, n_row_tiles)
        panel_step = n_blocks * x_step
        for panel in range(first_panel, min(first_panel + _PANELS_PER_CLAIM, n_panels)):
            token = panel * TOKENS
            count = min(n_tokens - token, TOKENS)
            xp = x + panel * panel_step
            for row in range(first_row, stop_row):
                wp = w + row * w_tile_bytes
                yp = y + token * y_stride + row * (4 * ROWS)
                bp = bias + row * (4 * ROWS) if bias != 0 else 0
                rp = residual + token * residual_stride + row * (4 * ROWS) if residual != 0 else 0
                if count == 1:
                    row_tile_1(wp, xp, n_blocks, yp, y_stride, bp, rp, residual_stride, count)
                elif count == 2:
                    row_tile_2(wp, xp, n_blocks, yp, y_stride, bp, rp, residual_stride, count)
                elif count <= 4:
                    row_tile_4(wp, xp, n_blocks, yp, y_stride, bp, rp, residual_stride, count)
                else:
                    row_tile_8(wp, xp, n_blocks, yp, y_stride, bp, rp, residual_stride, count)
        return 0

    return KernelSource(name, linear)


_BLOCKS = {
    "F32": _block_f32,
    "F16": _block_f16,
    "BF16": _block_bf16,
    "Q4_0": _block_q4_0,
    "Q4_1": _block_q4_1,
    "Q8_0": _block_q8_0,
}

KERNELS: dict[str, KernelSource] = {}
for _type, _block in _BLOCKS.items():
    _step = LAYOUTS[_type].tile_block_bytes
    if LAYOUTS[_type].panel == "f32":
        KERNELS[f"linear_{_type}"] = _make_linear(f"linear_{_type}", _block, _step, F32_INPUT_BYTES)
    else:
        KERNELS[f"linear_{_type}"] = _make_linear(f"linear_{_type}", _block, _step, Q8_BLOCK_BYTES)
        KERNELS[f"linear_{_type}_x2"] = _make_linear(
            f"linear_{_type}_x2", _in_two_terms(_block), _step, 2 * Q8_BLOCK_BYTES
        )
