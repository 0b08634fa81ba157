"""The arithmetic of each weight type: block functions, from which `linear` makes its kernels.

A block function is (out, w, x) -> out after one block: `out` is a tile of one vector (16 rows) per token, `w`
the address of the block in the weight tile, `x` that of its inputs in the panel, of which 4 are a group. Byte
layouts of the blocks are stated in `kukri.quant`; in a tile, word j of a block is the 64 bytes at 64 j:
4 bytes of each row, in another order than in the file for types that say so (`schema.TileWords`).

Blocks of 256 weights, whose groups have scales of their own, are in `super_blocks`; the table has all.
"""

from __future__ import annotations

from typing import Any

from kukri.kernels.cpu.codegen.group_dots import (
    SMALL_SHIFT,
    TURNS,
    dot_five_bits,
    dot_iq4,
    dot_nibbles,
    make_dot_runs,
    signed_start,
)
from kukri.kernels.cpu.codegen.super_blocks import SUPER_BLOCK_FUNCTIONS
from kukri.kernels.cpu.codegen.tile_folds import (
    tile_add_min,
    tile_fold,
    tile_fold_into,
    tile_fold_raised,
    tile_fold_sums,
    tile_offset_start,
    tile_raised_half_start,
    tile_raised_offset_start,
    tile_raised_start,
)
from kukri.kernels.cpu.codegen.tile_products import (
    fetch_ahead,
    tile_dot2,
    tile_dot4_short,
    tile_dot4_signed,
    tile_short_end,
    tile_short_start,
)
from kukri.kernels.cpu.codegen.tiles import (
    panel_block_bytes,
    tile_add_scaled,
    tile_fma,
    tile_sums_like,
    tile_zeros_like,
)
from kukri.kernels.cpu.codegen.unpack import byte_bits, load_powers, look_up, low_bits
from kukri.kernels.cpu.compile.intrinsics import device
from kukri.kernels.cpu.compile.simd import load_bf16x16, load_f16x16, load_f32x16, load_u8x64
from kukri.kernels.cpu.pack.layouts import I16_SCALES, I16_TILES, TOKENS
from kukri.quant.types.fp4 import FP4_VALUES

_ahead_1, _ahead_2, _ahead_5, _ahead_6, _ahead_9 = (fetch_ahead(n) for n in (1, 2, 5, 6, 9))


# --- float weights ---


@device
def _f32(out, w, x):
    _ahead_1(out, w)
    return tile_fma(out, load_f32x16(w), x, 4)


@device
def _f16(out, w, x):
    _ahead_1(out, w)
    return tile_fma(out, load_f16x16(w), x, 4)


@device
def _bf16(out, w, x):
    _ahead_1(out, w)
    return tile_fma(out, load_bf16x16(w), x, 4)


@device
def i16_pair(out, w, other, x, sums):
    """Adds a block of two weight tiles, whose inputs are read once for both, to sums over blocks in memory:
    registers hold the whole numbers of both.
    """
    a = tile_zeros_like(out)
    b = tile_zeros_like(out)
    for pair in range(32):
        _ahead_1(out, w + 64 * pair)
        _ahead_1(out, other + 64 * pair)
        a = tile_dot2(a, load_u8x64(w + 64 * pair), x, pair)
        b = tile_dot2(b, load_u8x64(other + 64 * pair), x, pair)
    tile_fold_into(a, load_f32x16(w + 16 * I16_SCALES), x, sums)
    tile_fold_into(b, load_f32x16(other + 16 * I16_SCALES), x, sums + 64 * TOKENS)


@device
def _i16(out, w, x):
    """64 floats as int16, a pair in a word."""
    acc = tile_zeros_like(out)
    for pair in range(32):
        _ahead_1(out, w + 64 * pair)
        acc = tile_dot2(acc, load_u8x64(w + 64 * pair), x, pair)
    return tile_fold(out, acc, load_f32x16(w + 16 * I16_SCALES), x)


# --- blocks of 32 ---


@device
def _q4_0(out, w, x):
    _ahead_5(out, w)
    acc = dot_nibbles(tile_raised_offset_start(out, x, 3), w, x)
    return tile_fold_raised(out, acc, load_f16x16(w + 256), x)


@device
def _q4_1(out, w, x):
    _ahead_5(out, w)
    acc = dot_nibbles(tile_raised_start(out), w, x)
    out = tile_fold_raised(out, acc, load_f16x16(w + 256), x)
    return tile_add_min(out, load_f16x16(w + 288), x)


@device
def _q5_0(out, w, x):
    _ahead_6(out, w)
    acc = dot_five_bits(tile_raised_offset_start(out, x, 4), w, x)
    return tile_fold_raised(out, acc, load_f16x16(w + 320), x)


@device
def _q5_1(out, w, x):
    _ahead_6(out, w)
    acc = dot_five_bits(tile_raised_start(out), w, x)
    out = tile_fold_raised(out, acc, load_f16x16(w + 320), x)
    return tile_add_min(out, load_f16x16(w + 352), x)


@device
def signed_bytes(out, w, x):
    """A block of Q8_0 that is in cache: nothing is fetched."""
    acc = signed_start(out, x)
    for turns in range(8 // TURNS):
        j = TURNS * turns
        acc = tile_dot4_signed(acc, load_u8x64(w + 64 * j), x, j)
        if TURNS == 2:
            acc = tile_dot4_signed(acc, load_u8x64(w + 64 * j + 64), x, j + 1)
    return tile_fold_raised(out, acc, load_f16x16(w + 512), x)


@device
def _q8_0(out, w, x):
    _ahead_9(out, w)
    return signed_bytes(out, w, x)


_low_fp4, _high_fp4 = (
    look_up([value + (1 << SMALL_SHIFT) for value in FP4_VALUES], right) for right in (0, 4)
)


_dot_mxfp4 = make_dot_runs(FP4_VALUES, 4, 2)  # five bits


@device
def _iq4_nl(out, w, x):
    _ahead_5(out, w)
    return tile_fold_raised(out, dot_iq4(out, w, x), load_f16x16(w + 256), x)


@device
def _mxfp4(out, w, x):
    _ahead_5(out, w)
    # scales of 2^104 and more, which no model has, would give no number
    return tile_fold_raised(out, _dot_mxfp4(out, w, x), load_powers(w + 256), x)


# --- blocks of 2 bits and of 1, whose words hold 16 and 32 inputs in a row ---


@device
def _dot_two_bits(out, w, x):
    """Integer sums of 32 weights q - 1 of 2 bits, in two words."""
    acc = tile_offset_start(out, x, 0)
    short = tile_short_start(acc)
    for j in range(2):
        packed = load_u8x64(w + 64 * j)
        short = tile_dot4_short(short, low_bits(packed, 3), x, 4 * j)
        short = tile_dot4_short(short, byte_bits(packed, 2, 3, 0), x, 4 * j + 1)
        short = tile_dot4_short(short, byte_bits(packed, 4, 3, 0), x, 4 * j + 2)
        short = tile_dot4_short(short, byte_bits(packed, 6, 3, 0), x, 4 * j + 3)
    return tile_short_end(acc, short)


@device
def _dot_signs(out, w, x):
    """Integer sums of 32 weights 2 q - 1 of 1 bit, in a word."""
    acc = tile_offset_start(out, x, 0)
    short = tile_short_start(acc)
    packed = load_u8x64(w)
    for j in range(4):
        short = tile_dot4_short(short, byte_bits(packed, 2 * j, 1, 1), x, 2 * j)
        short = tile_dot4_short(short, byte_bits(packed, 2 * j + 1, 1, 1), x, 2 * j + 1)
    return tile_short_end(acc, short)


def _make_even_block(dot: Any, ahead: Any, n_groups: int, n_words: int) -> Any:
    """A function for blocks with one scale: groups of 32 inputs with `n_words` words each, then d."""

    @device
    def block(out, w, x):
        d = load_f16x16(w + 64 * n_words * n_groups)
        sums = tile_sums_like(out)
        for _ in range(n_groups):
            ahead(out, w)
            sums = tile_fold_sums(sums, dot(out, w, x), x)
            w += 64 * n_words
            x += panel_block_bytes(out)
        return tile_add_scaled(out, sums, d)

    return block


_q1_0 = _make_even_block(_dot_signs, _ahead_1, 4, 1)
_q2_0 = _make_even_block(_dot_two_bits, _ahead_2, 2, 2)
_tq2_0 = _make_even_block(_dot_two_bits, _ahead_2, 8, 2)


# --- NVFP4: blocks of 64 in 4 groups of 16 with a float scale each ---


@device
def _dot_half_of_fp4(out, w, x, half):
    """Integer sums of 16 values, kept with an offset, in two words: the low nibbles are the first 8."""
    acc = tile_raised_half_start(out, x, SMALL_SHIFT, half)
    short = tile_short_start(acc)
    packed = load_u8x64(w)
    short = tile_dot4_short(short, _low_fp4(packed), x, 4 * half)
    short = tile_dot4_short(short, _high_fp4(packed), x, 4 * half + 2)
    packed = load_u8x64(w + 64)
    short = tile_dot4_short(short, _low_fp4(packed), x, 4 * half + 1)
    short = tile_dot4_short(short, _high_fp4(packed), x, 4 * half + 3)
    return tile_short_end(acc, short)


@device
def _nvfp4(out, w, x):
    d = w + 512
    for _ in range(2):
        _ahead_5(out, w)
        out = tile_fold_raised(out, _dot_half_of_fp4(out, w, x, 0), load_f16x16(d), x)
        out = tile_fold_raised(out, _dot_half_of_fp4(out, w + 128, x, 1), load_f16x16(d + 32), x)
        w += 256
        d += 64
        x += panel_block_bytes(out)
    return out


BLOCK_FUNCTIONS = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    I16_TILES: _i16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "MXFP4": _mxfp4,
    "IQ4_NL": _iq4_nl,
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
    "TQ2_0": _tq2_0,
    "NVFP4_TILES": _nvfp4,
    **SUPER_BLOCK_FUNCTIONS,
}
