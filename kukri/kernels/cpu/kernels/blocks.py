"""The arithmetic of each weight type: block functions, from which `linear` makes its kernels.

A block function is (out, w, x) -> out after one block: `out` is a tile of one vector (16 rows) per token, `w`
the address of the block in the weight tile, `x` that of its inputs in the panel, of which 4 are a group. Byte
layouts of the blocks are stated in `kukri.quant`; in a tile, word j of a block is the 64 bytes at 64 j:
4 bytes of each row, which packing has put in another order for some types (pack_kernels.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.cpu.kernels.intrinsics import device
from kukri.kernels.cpu.kernels.simd import (
    load_bf16x16,
    load_f16x16,
    load_f32x16,
    load_i32x16,
    load_u8x64,
    load_u16x16,
    splat,
)
from kukri.kernels.cpu.kernels.tile_folds import (
    tile_add_min,
    tile_fold,
    tile_fold_halves,
    tile_fold_into,
    tile_fold_mins,
    tile_fold_raised,
    tile_fold_short_halves,
    tile_fold_sums,
    tile_half_start,
    tile_offset_start,
    tile_raised_half_start,
    tile_raised_offset_start,
    tile_raised_start,
    tile_scale_halves,
    tile_scales_weights,
    tile_short_half_start,
)
from kukri.kernels.cpu.kernels.tile_products import (
    fetch_ahead,
    tile_dot2,
    tile_dot4_short,
    tile_dot4_signed,
    tile_scaled_short_end,
    tile_short_end,
    tile_short_start,
)
from kukri.kernels.cpu.kernels.tiles import (
    panel_block_bytes,
    tile_add_scaled,
    tile_fma,
    tile_sums_like,
    tile_zeros_like,
)
from kukri.kernels.cpu.kernels.unpack import (
    add_to_pairs,
    byte_bits,
    byte_pairs,
    byte_to_f32,
    either,
    either_word,
    load_powers,
    look_up,
    look_up_pairs_of_bits,
    low_bits,
    multiples,
    next_byte,
    repeat_first,
    repeat_last,
    signed_byte_pairs,
    two_bits_and_one,
    word_bits,
    words_to_f32,
)
from kukri.kernels.cpu.pack.layouts import I16_SCALES, I16_TILES, TOKENS
from kukri.quant.types.fp4 import FP4_VALUES
from kukri.quant.types.iq1 import IQ1_TILES
from kukri.quant.types.iq2 import IQ2_TILES
from kukri.quant.types.iq3 import IQ3_S_TILES, IQ3_XXS_TILES
from kukri.quant.types.iq4 import IQ4_VALUES

_HAS_SIGNED_BIAS = cpu_target().has_signed_bias
# Looked-up values of up to 5 bits are kept with 16 added, as runs in int16 need, or 32, as sums begin with it
_SMALL_SHIFT = 4 if cpu_target().lowering == "avx2" else 5

# Fetching a few lines at a time, as they are used: all of a block of 256 at once would fill the CPU's queue
_ahead_1, _ahead_2, _ahead_3, _ahead_4, _ahead_5, _ahead_6, _ahead_7, _ahead_9 = (
    fetch_ahead(n) for n in (1, 2, 3, 4, 5, 6, 7, 9)
)

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
def _signed_start(out, x):
    """Initial sums of `tile_dot4_signed` over a block."""
    return tile_raised_offset_start(out, x, 7) if _HAS_SIGNED_BIAS else tile_raised_start(out)


# Words that are alternately of the first and of the last rows (layouts.py) are written out in pairs: LLVM
# drops what a word has no part in (`_matrix_dots`).
_TURNS = 2 if cpu_target().has_int8_matrix else 1


@device
def _dot_nibbles(acc, w, x):
    """acc += 32 nibbles: byte 4j+b of a row holds input 4j+b (low) and 16+4j+b (high)."""
    short = tile_short_start(acc)
    for turns in range(4 // _TURNS):
        j = _TURNS * turns
        packed = load_u8x64(w + 64 * j)
        short = tile_dot4_short(short, low_bits(packed, 15), x, j)
        short = tile_dot4_short(short, byte_bits(packed, 4, 15, 0), x, 4 + j)
        if _TURNS == 2:
            packed = load_u8x64(w + 64 * j + 64)
            short = tile_dot4_short(short, low_bits(packed, 15), x, j + 1)
            short = tile_dot4_short(short, byte_bits(packed, 4, 15, 0), x, 5 + j)
    return tile_short_end(acc, short)


@device
def _dot_five_bits(acc, w, x):
    """acc += 32 weights of 5 bits in 5 words: the low bits of each, and three in their top bits together."""
    a = load_u8x64(w)
    b = load_u8x64(w + 64)
    c = load_u8x64(w + 128)
    d = load_u8x64(w + 192)
    e = load_u8x64(w + 256)
    short = tile_dot4_short(tile_short_start(acc), low_bits(a, 31), x, 0)
    short = tile_dot4_short(short, low_bits(b, 31), x, 1)
    short = tile_dot4_short(short, low_bits(c, 31), x, 2)
    acc = tile_short_end(acc, tile_dot4_short(short, low_bits(d, 31), x, 3))
    short = tile_dot4_short(tile_short_start(acc), low_bits(e, 31), x, 4)
    short = tile_dot4_short(short, either(byte_bits(a, 5, 7, 0), byte_bits(b, 5, 3, 3)), x, 5)
    short = tile_dot4_short(short, either(byte_bits(c, 5, 7, 0), byte_bits(d, 5, 3, 3)), x, 6)
    last = either(byte_bits(e, 5, 7, 0), either(byte_bits(b, 7, 1, 3), byte_bits(d, 7, 1, 4)))
    return tile_short_end(acc, tile_dot4_short(short, last, x, 7))


@device
def _q4_0(out, w, x):
    _ahead_5(out, w)
    acc = _dot_nibbles(tile_raised_offset_start(out, x, 3), w, x)
    return tile_fold_raised(out, acc, load_f16x16(w + 256), x)


@device
def _q4_1(out, w, x):
    _ahead_5(out, w)
    acc = _dot_nibbles(tile_raised_start(out), w, x)
    out = tile_fold_raised(out, acc, load_f16x16(w + 256), x)
    return tile_add_min(out, load_f16x16(w + 288), x)


@device
def _q5_0(out, w, x):
    _ahead_6(out, w)
    acc = _dot_five_bits(tile_raised_offset_start(out, x, 4), w, x)
    return tile_fold_raised(out, acc, load_f16x16(w + 320), x)


@device
def _q5_1(out, w, x):
    _ahead_6(out, w)
    acc = _dot_five_bits(tile_raised_start(out), w, x)
    out = tile_fold_raised(out, acc, load_f16x16(w + 320), x)
    return tile_add_min(out, load_f16x16(w + 352), x)


@device
def signed_bytes(out, w, x):
    """A block of Q8_0 that is in cache: nothing is fetched."""
    acc = _signed_start(out, x)
    for turns in range(8 // _TURNS):
        j = _TURNS * turns
        acc = tile_dot4_signed(acc, load_u8x64(w + 64 * j), x, j)
        if _TURNS == 2:
            acc = tile_dot4_signed(acc, load_u8x64(w + 64 * j + 64), x, j + 1)
    return tile_fold_raised(out, acc, load_f16x16(w + 512), x)


@device
def _q8_0(out, w, x):
    _ahead_9(out, w)
    return signed_bytes(out, w, x)


def _make_dot_values(values: Sequence[int]) -> Any:
    """A function for the integer sums of 32 values that nibbles look up."""
    stored = [value + (128 if _HAS_SIGNED_BIAS else 0) for value in values]
    low, high = look_up(stored, 0), look_up(stored, 4)

    @device
    def dot(out, w, x):
        acc = _signed_start(out, x)
        for turns in range(4 // _TURNS):
            j = _TURNS * turns
            packed = load_u8x64(w + 64 * j)
            acc = tile_dot4_signed(acc, low(packed), x, j)
            acc = tile_dot4_signed(acc, high(packed), x, 4 + j)
            if _TURNS == 2:
                packed = load_u8x64(w + 64 * j + 64)
                acc = tile_dot4_signed(acc, low(packed), x, j + 1)
                acc = tile_dot4_signed(acc, high(packed), x, 5 + j)
        return acc

    return dot


_dot_iq4 = _make_dot_values(IQ4_VALUES)
_low_fp4, _high_fp4 = (
    look_up([value + (1 << _SMALL_SHIFT) for value in FP4_VALUES], right) for right in (0, 4)
)


def _make_dot_runs(values: Sequence[int], shift: int, n_words: int) -> Any:
    """The same for values kept as value + 2^shift, of few bits: runs of two dots for each of `n_words` words.

    Where words are written out in pairs, so are the signed values.
    """
    if _TURNS == 2:
        return _make_dot_values(values)
    low, high = (look_up([value + (1 << shift) for value in values], right) for right in (0, 4))

    @device
    def dot(out, w, x):
        acc = tile_raised_offset_start(out, x, shift)
        for run in range(4 // n_words):
            short = tile_short_start(acc)
            for j in range(n_words):
                packed = load_u8x64(w + 64 * n_words * run + 64 * j)
                short = tile_dot4_short(short, low(packed), x, n_words * run + j)
                short = tile_dot4_short(short, high(packed), x, 4 + n_words * run + j)
            acc = tile_short_end(acc, short)
        return acc

    return dot


_dot_mxfp4 = _make_dot_runs(FP4_VALUES, 4, 2)  # five bits


@device
def _iq4_nl(out, w, x):
    _ahead_5(out, w)
    return tile_fold_raised(out, _dot_iq4(out, w, x), load_f16x16(w + 256), x)


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
    acc = tile_raised_half_start(out, x, _SMALL_SHIFT, half)
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


# --- blocks of 256, in 8 groups of 32 inputs, which have a panel block each ---
#
# Their words are put in the order of the groups when packed (pack_kernels.py).


# Loops over groups stay loops: eight groups written out would take four times as long to compile. So scales
# are shifted from group to group.


def _make_iq4_xs_block(dot: Any, factor: float = 1.0) -> Any:
    """A function for blocks of IQ4_XS whose nibbles are read by `dot`, times a factor."""

    @device
    def block(out, w, x):
        # word 0: low 4 bits of the group scales, words 1 to 32: nibbles, then d and the scales' top 2 bits
        low_bits_of_scales = load_i32x16(w)
        d = load_f16x16(w + 2112)
        if factor != 1:
            d = d * splat(factor)
        high_bits = load_u16x16(w + 2144)
        for g in range(8):
            _ahead_5(out, w + 320 * g)
            scale = either_word(
                word_bits(low_bits_of_scales, 4 * g, 15, 0), word_bits(high_bits, 2 * g, 3, 4)
            )
            acc = dot(out, w + 64 + 256 * g, x)
            out = tile_fold_raised(out, acc, d * (words_to_f32(scale) - splat(32.0)), x)
            x += panel_block_bytes(out)
        return out

    return block


_iq4_xs = _make_iq4_xs_block(_dot_iq4)
_iq3_xxs = _make_iq4_xs_block(
    _make_dot_runs(IQ3_XXS_TILES.layout.values or (), 5, 1), IQ3_XXS_TILES.layout.factor
)
_iq3_s = _make_iq4_xs_block(_make_dot_runs(IQ3_S_TILES.layout.values or (), 4, 2))


@device
def _low_scales(w, j):
    """Scales (j = 0) or mins (j = 1) of groups 0 to 3, a byte each, from the 12 bytes of Q4_K and Q5_K."""
    return word_bits(load_i32x16(w + 64 * j), 0, 0x3F3F3F3F, 0)


@device
def _high_scales(w, j):
    """The scales of groups 4 to 7."""
    low = word_bits(load_i32x16(w + 128), 4 * j, 0x0F0F0F0F, 0)
    return either_word(low, word_bits(load_i32x16(w + 64 * j), 6, 0x03030303, 4))


@device
def _fold_with_min(out, acc, d, scales, dmin, mins, x):
    """Adds a group; its scale and min are the lowest bytes."""
    out = tile_fold_raised(out, acc, d * byte_to_f32(scales, 0, 0), x)
    return tile_add_min(out, dmin * byte_to_f32(mins, 0, 0), x)


def _make_k_block(dot: Any, ahead: Any, n_words: int) -> Any:
    """A function for Q4_K's or Q5_K's blocks: 8 groups of `n_words` words, read by `dot`.

    Lines are prefetched in steady steps from block to block: if each half of a block starts again, Zen 5
    reads Q4_K from memory a quarter slower.
    """
    group_bytes = 64 * n_words
    ends = 192 + 8 * group_bytes
    ahead_step = (ends + 64) // 8

    @device
    def block(out, w, x):
        # words 0 to 2: scales and mins, then the groups, then d and dmin
        d = load_f16x16(w + ends)
        dmin = splat(0.0) - load_f16x16(w + ends + 32)
        scales = _low_scales(w, 0)
        last_scales = _high_scales(w, 0)
        mins = _low_scales(w, 1)
        last_mins = _high_scales(w, 1)
        next_lines = w
        for _ in range(2):
            for _ in range(4):
                ahead(out, next_lines)
                next_lines += ahead_step
                out = _fold_with_min(out, dot(tile_raised_start(out), w + 192, x), d, scales, dmin, mins, x)
                scales = next_byte(scales)
                mins = next_byte(mins)
                w += group_bytes
                x += panel_block_bytes(out)
            scales = last_scales
            mins = last_mins
        return out

    return block


_q4_k = _make_k_block(_dot_nibbles, _ahead_5, 4)
_q5_k = _make_k_block(_dot_five_bits, _ahead_6, 5)


# Q6_K, Q3_K and Q2_K have a scale for each 16 inputs: two integer sums a group, each multiplied by its scale
# as a whole number. Their float scales are the block's, and multiply its sums


@device
def _q6_k_half_group(acc, w, x, first, scales):
    """acc += 16 weights of 6 bits in 3 words: the low bits of each, and the top two of all three together."""
    a = load_u8x64(w)
    b = load_u8x64(w + 64)
    c = load_u8x64(w + 128)
    short = tile_dot4_short(tile_short_start(acc), low_bits(a, 63), x, first)
    acc = tile_scaled_short_end(acc, tile_dot4_short(short, low_bits(b, 63), x, first + 1), scales)
    short = tile_dot4_short(tile_short_start(acc), low_bits(c, 63), x, first + 2)
    last = either(byte_bits(a, 6, 3, 4), either(byte_bits(b, 6, 3, 2), byte_bits(c, 6, 3, 0)))
    return tile_scaled_short_end(acc, tile_dot4_short(short, last, x, first + 3), scales)


@device
def _q6_k_group(sums, w, x, scales):
    first = _q6_k_half_group(tile_half_start(sums, x, 5, 0), w, x, 0, repeat_first(scales))
    last = _q6_k_half_group(tile_half_start(sums, x, 5, 1), w + 192, x, 4, repeat_last(scales))
    return tile_fold_halves(sums, first, last, scales, 5, x)


@device
def _q6_k(out, w, x):
    # four times int8 scales, byte k and 2 + k for a group, and 12 words of two groups, then d. Scales apart
    # from their groups would take a third of the speed from memory: the CPU prefetches what is read in order
    d = load_f16x16(w + 3328)
    sums = tile_sums_like(out)
    next_lines = w  # 53 in 8 steps
    for _ in range(4):
        scales = load_i32x16(w)
        _ahead_7(out, next_lines)
        sums = _q6_k_group(sums, w + 64, x, signed_byte_pairs(scales, 0))
        x += panel_block_bytes(out)
        _ahead_7(out, next_lines + 424)
        next_lines += 848
        sums = _q6_k_group(sums, w + 448, x, signed_byte_pairs(scales, 1))
        x += panel_block_bytes(out)
        w += 832
    return tile_add_scaled(out, sums, d)


@device
def _q3_k_group(sums, w, x, scales):
    """3 words: two weights of 3 bits in each, and two in their top bits together."""
    a = load_u8x64(w)
    b = load_u8x64(w + 64)
    c = load_u8x64(w + 128)
    first = tile_short_half_start(sums, x, 2, 0)
    last = tile_short_half_start(sums, x, 2, 1)
    short = tile_dot4_short(tile_short_start(first), low_bits(a, 7), x, 0)
    short = tile_dot4_short(short, byte_bits(a, 3, 7, 0), x, 1)
    short = tile_dot4_short(short, low_bits(b, 7), x, 2)
    short = tile_dot4_short(short, byte_bits(b, 3, 7, 0), x, 3)
    first = tile_scaled_short_end(first, short, repeat_first(scales))
    short = tile_dot4_short(tile_short_start(last), low_bits(c, 7), x, 4)
    short = tile_dot4_short(short, byte_bits(c, 3, 7, 0), x, 5)
    short = tile_dot4_short(short, either(byte_bits(a, 6, 3, 0), byte_bits(b, 6, 1, 2)), x, 6)
    short = tile_dot4_short(short, either(byte_bits(c, 6, 3, 0), byte_bits(b, 7, 1, 2)), x, 7)
    last = tile_scaled_short_end(last, short, repeat_last(scales))
    return tile_fold_short_halves(sums, first, last, scales, 2, x)


def _make_q3_k_block(group: Any, factor: float = 1.0) -> Any:
    """A function for blocks of Q3_K whose groups are read by `group`, times a factor."""

    @device
    def block(out, w, x):
        # words 0 to 23: the groups, 24 and 25: low 4 bits of scales + 32, 26: their top 2 bits, then d
        d = load_f16x16(w + 1728)
        if factor != 1:
            d = d * splat(factor)
        top = load_i32x16(w + 1664)
        scales = w + 1536
        sums = tile_sums_like(out)
        for half in range(2):
            low = load_i32x16(scales + 64 * half)
            for g in range(4):
                _ahead_4(out, w + 64 * (4 * half + g))
                both = either_word(byte_pairs(low, 0, 15, 0), byte_pairs(top, 0, 3, 4))
                sums = group(sums, w, x, add_to_pairs(both, -32))
                low = byte_pairs(low, 4, 0xFFF, 0)
                top = byte_pairs(top, 2, 0x3FFF, 0)
                w += 192
                x += panel_block_bytes(out)
        return tile_add_scaled(out, sums, d)

    return block


def _make_values_group(values: Sequence[int], shift: int, in_one_run: bool) -> Any:
    """A function for a group of Q3_K's whose 3 bits look up values, kept as value + 2^shift.

    Four dots are a run, if the values have five bits, or each is one.
    """
    first_three, next_three = (look_up([v + (1 << shift) for v in values], right) for right in (0, 3))

    @device
    def half_group(acc, a, b, c, d, x, first, scale):
        short = tile_dot4_short(tile_short_start(acc), a, x, first)
        if in_one_run:
            short = tile_dot4_short(short, b, x, first + 1)
            short = tile_dot4_short(short, c, x, first + 2)
            return tile_scaled_short_end(acc, tile_dot4_short(short, d, x, first + 3), scale)
        acc = tile_scaled_short_end(acc, short, scale)
        short = tile_dot4_short(tile_short_start(acc), b, x, first + 1)
        acc = tile_scaled_short_end(acc, short, scale)
        short = tile_dot4_short(tile_short_start(acc), c, x, first + 2)
        acc = tile_scaled_short_end(acc, short, scale)
        short = tile_dot4_short(tile_short_start(acc), d, x, first + 3)
        return tile_scaled_short_end(acc, short, scale)

    @device
    def group(sums, w, x, scales):
        a = load_u8x64(w)
        b = load_u8x64(w + 64)
        c = load_u8x64(w + 128)
        first = half_group(
            tile_half_start(sums, x, shift, 0),
            first_three(a),
            next_three(a),
            first_three(b),
            next_three(b),
            x,
            0,
            repeat_first(scales),
        )
        last = half_group(
            tile_half_start(sums, x, shift, 1),
            first_three(c),
            next_three(c),
            first_three(two_bits_and_one(a, b, 6, 6)),
            first_three(two_bits_and_one(c, b, 6, 7)),
            x,
            4,
            repeat_last(scales),
        )
        return tile_fold_halves(sums, first, last, scales, shift, x)

    return group


_q3_k = _make_q3_k_block(_q3_k_group)
_iq1 = _make_q3_k_block(
    _make_values_group(IQ1_TILES.layout.values or (), _SMALL_SHIFT, True), IQ1_TILES.layout.factor
)
_iq2 = _make_q3_k_block(_make_values_group(IQ2_TILES.layout.values or (), 6, False), IQ2_TILES.layout.factor)


@device
def _q2_k_half_group(acc, w, x, first, scales):
    """acc += 16 weights of 2 bits in a word."""
    packed = load_u8x64(w)
    short = tile_dot4_short(tile_short_start(acc), low_bits(packed, 3), x, first)
    short = tile_dot4_short(short, byte_bits(packed, 2, 3, 0), x, first + 1)
    short = tile_dot4_short(short, byte_bits(packed, 4, 3, 0), x, first + 2)
    return tile_scaled_short_end(
        acc, tile_dot4_short(short, byte_bits(packed, 6, 3, 0), x, first + 3), scales
    )


@device
def _q2_k_scaled_half_group(acc, w, x, first, tables):
    """acc += 16 weights of 2 bits in a word, times their scales, in the tables."""
    packed = load_u8x64(w)
    for j in range(4):
        acc = tile_dot4_short(acc, look_up_pairs_of_bits(packed, 2 * j, tables), x, first + j)
    return acc


@device
def _q2_k_group(sums, w, x, scales):
    zeros = tile_zeros_like(sums)
    if tile_scales_weights(sums):
        acc = _q2_k_scaled_half_group(zeros, w, x, 0, multiples(scales, 0))
        acc = _q2_k_scaled_half_group(acc, w + 64, x, 4, multiples(scales, 1))
        return tile_fold_sums(sums, acc, x)
    first = _q2_k_half_group(zeros, w, x, 0, repeat_first(scales))
    last = _q2_k_half_group(zeros, w + 64, x, 4, repeat_last(scales))
    return tile_fold_sums(sums, tile_scale_halves(first, last, scales), x)


@device
def _q2_k(out, w, x):
    # words 0 to 3: scales and, above them, mins of 4 bits, byte k and 2 + k for a group, 4 to 19: the groups,
    # then d and dmin
    d = load_f16x16(w + 1280)
    dmin = load_f16x16(w + 1312)
    s = w
    sums = tile_sums_like(out)
    low = tile_sums_like(out)
    w += 256
    for pair in range(4):
        both = load_i32x16(s)
        _ahead_3(out, w + 128 * pair)
        scales = byte_pairs(both, 0, 15, 0)
        sums = _q2_k_group(sums, w, x, scales)
        low = tile_fold_mins(low, byte_pairs(both, 4, 15, 0), x)
        x += panel_block_bytes(out)
        _ahead_3(out, w + 128 * pair + 192)
        scales = byte_pairs(both, 8, 15, 0)
        sums = _q2_k_group(sums, w + 128, x, scales)
        low = tile_fold_mins(low, byte_pairs(both, 12, 15, 0), x)
        x += panel_block_bytes(out)
        w += 256
        s += 64
    return tile_add_scaled(tile_add_scaled(out, sums, d), low, dmin)


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
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
    "TQ2_0": _tq2_0,
    "IQ1_TILES": _iq1,
    "IQ2_TILES": _iq2,
    "IQ3_XXS_TILES": _iq3_xxs,
    "IQ3_S_TILES": _iq3_s,
    "NVFP4_TILES": _nvfp4,
}
