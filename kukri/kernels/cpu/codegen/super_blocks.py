"""Block functions of weight types with blocks of 256 weights: 8 groups of 32, with scales of their own.

See `blocks` for what a block function is. Each group has a panel block, and its words lie side by side in a
tile (`schema.TileWords`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kukri.kernels.cpu.codegen.group_dots import (
    SMALL_SHIFT,
    dot_five_bits,
    dot_iq4,
    dot_nibbles,
    make_dot_runs,
)
from kukri.kernels.cpu.codegen.tile_folds import (
    tile_add_min,
    tile_fold_halves,
    tile_fold_mins,
    tile_fold_raised,
    tile_fold_short_halves,
    tile_fold_sums,
    tile_half_start,
    tile_raised_start,
    tile_scale_halves,
    tile_scales_weights,
    tile_short_half_start,
)
from kukri.kernels.cpu.codegen.tile_products import (
    fetch_ahead,
    tile_dot4_short,
    tile_scaled_short_end,
    tile_short_start,
)
from kukri.kernels.cpu.codegen.tiles import (
    panel_block_bytes,
    tile_add_scaled,
    tile_sums_like,
    tile_zeros_like,
)
from kukri.kernels.cpu.codegen.unpack import (
    add_to_pairs,
    byte_bits,
    byte_pairs,
    byte_to_f32,
    either,
    either_word,
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
from kukri.kernels.cpu.compile.intrinsics import device
from kukri.kernels.cpu.compile.simd import load_f16x16, load_i32x16, load_u8x64, load_u16x16, splat
from kukri.quant.types.iq1 import IQ1_TILES
from kukri.quant.types.iq2 import IQ2_TILES
from kukri.quant.types.iq3 import IQ3_S_TILES, IQ3_XXS_TILES

# Fetching a few lines at a time, as they are used: all of a block of 256 at once would fill the CPU's queue
_ahead_3, _ahead_4, _ahead_5, _ahead_6, _ahead_7 = (fetch_ahead(n) for n in (3, 4, 5, 6, 7))


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


_iq4_xs = _make_iq4_xs_block(dot_iq4)
_iq3_xxs = _make_iq4_xs_block(
    make_dot_runs(IQ3_XXS_TILES.layout.values or (), 5, 1), IQ3_XXS_TILES.layout.factor
)
_iq3_s = _make_iq4_xs_block(make_dot_runs(IQ3_S_TILES.layout.values or (), 4, 2))


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


_q4_k = _make_k_block(dot_nibbles, _ahead_5, 4)
_q5_k = _make_k_block(dot_five_bits, _ahead_6, 5)


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
    _make_values_group(IQ1_TILES.layout.values or (), SMALL_SHIFT, True), IQ1_TILES.layout.factor
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


SUPER_BLOCK_FUNCTIONS = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
    "IQ1_TILES": _iq1,
    "IQ2_TILES": _iq2,
    "IQ3_XXS_TILES": _iq3_xxs,
    "IQ3_S_TILES": _iq3_s,
}
