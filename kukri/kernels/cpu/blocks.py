"""The arithmetic of each weight type: block functions, from which `linear` makes its kernels.

A block function is (out, w, x) -> out after one block: `out` is a tile of one vector (16 rows) per token, `w`
the address of the block in the weight tile, `x` that of its inputs in the panel, of which 4 are a group. Byte
layouts of the blocks are drawn in `kukri.quant.blocks`; in a tile, word j of a block is the 64 bytes at 64 j:
4 bytes of each row.
"""

from __future__ import annotations

from kukri.kernels.cpu.intrinsics import device
from kukri.kernels.cpu.simd import (
    byte_bits,
    byte_to_f32,
    either,
    either_word,
    high_nibbles,
    load_bf16x16,
    load_f16x16,
    load_f32x16,
    load_i32x16,
    load_powers,
    load_u8x64,
    load_u16x16,
    look_up,
    low_nibbles,
    multiply_bytes,
    signed_byte_to_f32,
    splat,
    word_bits,
    words_to_f32,
)
from kukri.kernels.cpu.tiles import (
    fetch_ahead,
    has_few_tokens,
    has_signed_bias,
    panel_block_bytes,
    tile_add_min,
    tile_dot4_short,
    tile_dot4_signed,
    tile_fma,
    tile_fold,
    tile_offset_add,
    tile_offset_start,
    tile_scale_sum,
    tile_short_end,
    tile_short_start,
    tile_take_min,
    tile_zeros_like,
)
from kukri.quant.blocks import IQ4_VALUES, MXFP4_VALUES

# Fetching a few lines at a time, as they are used: all of a block of 256 at once would fill the CPU's queue
_ahead_1, _ahead_3, _ahead_4, _ahead_5, _ahead_6, _ahead_7, _ahead_9 = (
    fetch_ahead(n) for n in (1, 3, 4, 5, 6, 7, 9)
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


# --- blocks of 32 ---


@device
def _offset_start(out, x, shift):
    """-(sum of the block's inputs) << shift: the initial sums for weights q - 2^shift."""
    return tile_offset_add(tile_offset_start(out, x, 0, shift), x, 1, shift)


@device
def _signed_start(out, x):
    """Initial sums of `tile_dot4_signed` over a block."""
    return _offset_start(out, x, 7) if has_signed_bias(out) else tile_zeros_like(out)


@device
def _dot_nibbles(acc, w, x):
    """acc += 32 nibbles: byte 4j+b of a row holds input 4j+b (low) and 16+4j+b (high)."""
    short = tile_short_start(acc)
    for j in range(4):
        packed = load_u8x64(w + 64 * j)
        short = tile_dot4_short(short, low_nibbles(packed), x, j)
        short = tile_dot4_short(short, high_nibbles(packed), x, 4 + j)
    return tile_short_end(acc, short)


@device
def _dot_five_bit_words(acc, w, x, bits, first):
    """acc += 16 nibbles of 2 words and their fifth bits."""
    short = tile_short_start(acc)
    for j in range(first, first + 2):
        packed = load_u8x64(w + 64 + 64 * j)
        low = either(low_nibbles(packed), byte_bits(bits, j, 1, 4))
        high = either(high_nibbles(packed), byte_bits(bits, 4 + j, 1, 4))
        short = tile_dot4_short(short, low, x, j)
        short = tile_dot4_short(short, high, x, 4 + j)
    return tile_short_end(acc, short)


@device
def _dot_five_bits(acc, w, x):
    """acc += 32 nibbles and fifth bits: word 0 holds the bits (turned when packed), then the nibbles."""
    bits = load_u8x64(w)
    return _dot_five_bit_words(_dot_five_bit_words(acc, w, x, bits, 0), w, x, bits, 2)


@device
def _q4_0(out, w, x):
    _ahead_5(out, w)
    acc = _dot_nibbles(_offset_start(out, x, 3), w, x)
    return tile_fold(out, acc, load_f16x16(w + 256), x)


@device
def _q4_1(out, w, x):
    _ahead_5(out, w)
    acc = _dot_nibbles(tile_zeros_like(out), w, x)
    out = tile_fold(out, acc, load_f16x16(w + 256), x)
    return tile_add_min(out, load_f16x16(w + 288), x)


@device
def _q5_0(out, w, x):
    _ahead_6(out, w)
    acc = _dot_five_bits(_offset_start(out, x, 4), w, x)
    return tile_fold(out, acc, load_f16x16(w + 320), x)


@device
def _q5_1(out, w, x):
    _ahead_6(out, w)
    acc = _dot_five_bits(tile_zeros_like(out), w, x)
    out = tile_fold(out, acc, load_f16x16(w + 320), x)
    return tile_add_min(out, load_f16x16(w + 352), x)


@device
def _q8_0(out, w, x):
    _ahead_9(out, w)
    acc = _signed_start(out, x)
    for j in range(8):
        acc = tile_dot4_signed(acc, load_u8x64(w + 64 * j), x, j)
    return tile_fold(out, acc, load_f16x16(w + 512), x)


def _make_dot_values(values):
    """A function for the integer sums of 32 values that nibbles look up."""

    @device
    def dot(out, w, x):
        acc = _signed_start(out, x)
        for j in range(4):
            packed = load_u8x64(w + 64 * j)
            acc = tile_dot4_signed(acc, values(low_nibbles(packed)), x, j)
            acc = tile_dot4_signed(acc, values(high_nibbles(packed)), x, 4 + j)
        return acc

    return dot


_dot_iq4, _dot_mxfp4 = (
    _make_dot_values(look_up([int(value) for value in values])) for values in (IQ4_VALUES, MXFP4_VALUES)
)


@device
def _iq4_nl(out, w, x):
    _ahead_5(out, w)
    return tile_fold(out, _dot_iq4(out, w, x), load_f16x16(w + 256), x)


@device
def _mxfp4(out, w, x):
    _ahead_5(out, w)
    return tile_fold(out, _dot_mxfp4(out, w, x), load_powers(w + 256), x)


# --- blocks of 256, in 8 groups of 32 inputs, which have a panel block each ---


@device
def _iq4_xs(out, w, x):
    # word 0: low 4 bits of the group scales, words 1 to 32: nibbles, then d and the scales' top 2 bits
    low_bits = load_i32x16(w)
    d = load_f16x16(w + 2112)
    high_bits = load_u16x16(w + 2144)
    for g in range(8):
        _ahead_5(out, w + 320 * g)
        scale = either_word(word_bits(low_bits, 4 * g, 15, 0), word_bits(high_bits, 2 * g, 3, 4))
        acc = _dot_iq4(out, w + 64 + 256 * g, x)
        out = tile_fold(out, acc, d * (words_to_f32(scale) - splat(32.0)), x)
        x += panel_block_bytes(out)
    return out


@device
def _low_scales(w, j):
    """Scales (j = 0) or mins (j = 1) of groups 0 to 3, a byte each, from the 12 bytes of Q4_K and Q5_K."""
    return word_bits(load_i32x16(w + 64 * j), 0, 0x3F3F3F3F, 0)


@device
def _high_scales(w, j):
    """Those of groups 4 to 7."""
    low = word_bits(load_i32x16(w + 128), 4 * j, 0x0F0F0F0F, 0)
    return either_word(low, word_bits(load_i32x16(w + 64 * j), 6, 0x03030303, 4))


@device
def _fold_with_min(out, acc, d, scales, dmin, mins, g, x):
    out = tile_fold(out, acc, d * byte_to_f32(scales, g & 3, 0), x)
    return tile_add_min(out, dmin * byte_to_f32(mins, g & 3, 0), x)


@device
def _q4_k_group(out, w, x, g, d, scales, dmin, mins):
    """Group g: nibbles of the 8 words that it shares with its neighbour."""
    acc = tile_zeros_like(out)
    short = tile_short_start(acc)
    for j in range(8):
        packed = load_u8x64(w + 256 * (g & 6) + 64 * j)
        short = tile_dot4_short(short, byte_bits(packed, 4 * (g & 1), 15, 0), x, j)
    acc = tile_short_end(acc, short)
    return _fold_with_min(out, acc, d, scales, dmin, mins, g, x)


@device
def _q4_k(out, w, x):
    # words 0 to 2: scales and mins, 3 to 34: nibbles, then d and dmin
    d = load_f16x16(w + 2240)
    dmin = splat(0.0) - load_f16x16(w + 2272)
    scales = _low_scales(w, 0)
    mins = _low_scales(w, 1)
    for g in range(4):
        _ahead_5(out, w + 320 * g)
        out = _q4_k_group(out, w + 192, x + panel_block_bytes(out) * g, g, d, scales, dmin, mins)
    scales = _high_scales(w, 0)
    mins = _high_scales(w, 1)
    for g in range(4, 8):
        _ahead_5(out, w + 320 * g)
        out = _q4_k_group(out, w + 192, x + panel_block_bytes(out) * g, g, d, scales, dmin, mins)
    return out


@device
def _q5_k_half_group(acc, w, x, g, first):
    """acc += 16 weights of group g: nibbles as in Q4_K, and bit g of the 8 words before them."""
    short = tile_short_start(acc)
    for j in range(first, first + 4):
        four = byte_bits(load_u8x64(w + 512 + 256 * (g & 6) + 64 * j), 4 * (g & 1), 15, 0)
        fifth = byte_bits(load_u8x64(w + 64 * j), g, 1, 4)
        short = tile_dot4_short(short, either(four, fifth), x, j)
    return tile_short_end(acc, short)


@device
def _q5_k_group(out, w, x, g, d, scales, dmin, mins):
    acc = _q5_k_half_group(tile_zeros_like(out), w, x, g, 0)
    acc = _q5_k_half_group(acc, w, x, g, 4)
    return _fold_with_min(out, acc, d, scales, dmin, mins, g, x)


@device
def _q5_k(out, w, x):
    # words 0 to 2: scales and mins, 3 to 10: fifth bits, 11 to 42: nibbles, then d and dmin
    d = load_f16x16(w + 2752)
    dmin = splat(0.0) - load_f16x16(w + 2784)
    scales = _low_scales(w, 0)
    mins = _low_scales(w, 1)
    for g in range(4):
        _ahead_6(out, w + 384 * g)
        out = _q5_k_group(out, w + 192, x + panel_block_bytes(out) * g, g, d, scales, dmin, mins)
    scales = _high_scales(w, 0)
    mins = _high_scales(w, 1)
    for g in range(4, 8):
        _ahead_6(out, w + 384 * g)
        out = _q5_k_group(out, w + 192, x + panel_block_bytes(out) * g, g, d, scales, dmin, mins)
    return out


# Q6_K, Q3_K and Q2_K have a scale for each 16 inputs: two integer sums a group, or one if scaled weights
# fit a byte, as Q2_K's do


@device
def _q6_k_half_group(acc, low, shift, high, high_shift, x, group):
    """acc += 16 weights of 4 low and 2 high bits: 4 words at `low` and at `high`; inputs from `group` on."""
    for run in range(2):
        short = tile_short_start(acc)
        for j in range(2 * run, 2 * run + 2):
            four = byte_bits(load_u8x64(low + 64 * j), shift, 15, 0)
            two = byte_bits(load_u8x64(high + 64 * j), high_shift, 3, 4)
            short = tile_dot4_short(short, either(four, two), x, group + j)
        acc = tile_short_end(acc, short)
    return acc


@device
def _q6_k(out, w, x):
    # words 0 to 31: low 4 bits, 32 to 47: high 2 bits, 48 to 51: int8 scales, then d
    d = load_f16x16(w + 3328)
    for half in range(2):
        for g in range(4):
            _ahead_7(out, w + 448 * (4 * half + g))
            low = w + 1024 * half + 512 * (g & 1)
            high = w + 2048 + 512 * half
            first = tile_offset_start(out, x, 0, 5)
            last = tile_offset_start(out, x, 1, 5)
            first = _q6_k_half_group(first, low, 4 * (g >> 1), high, 2 * g, x, 0)
            last = _q6_k_half_group(last, low + 256, 4 * (g >> 1), high + 256, 2 * g, x, 4)
            scales = load_i32x16(w + 3072 + 128 * half + 64 * (g >> 1))
            out = tile_fold(out, first, d * signed_byte_to_f32(scales, 2 * (g & 1)), x)
            out = tile_fold(out, last, d * signed_byte_to_f32(scales, 2 * (g & 1) + 1), x)
            x += panel_block_bytes(out)
    return out


@device
def _q3_k_half_group(acc, low, shift, high, high_shift, x, group):
    """acc += 16 weights of 2 low bits and a high one."""
    short = tile_short_start(acc)
    for j in range(4):
        two = byte_bits(load_u8x64(low + 64 * j), shift, 3, 0)
        one = byte_bits(load_u8x64(high + 64 * j), high_shift, 1, 2)
        short = tile_dot4_short(short, either(two, one), x, group + j)
    return tile_short_end(acc, short)


@device
def _q3_k_scales(w, k):
    """Scales + 32 of half groups 4k to 4k + 3, a byte each, from the 12 bytes at word 24."""
    low = word_bits(load_i32x16(w + 1536 + 64 * (k & 1)), 4 * (k >> 1), 0x0F0F0F0F, 0)
    return either_word(low, word_bits(load_i32x16(w + 1664), 2 * k, 0x03030303, 4))


@device
def _q3_k(out, w, x):
    # words 0 to 7: high bits, 8 to 23: low 2 bits, 24 to 26: scales, then d
    d = load_f16x16(w + 1728)
    for half in range(2):
        for g in range(4):
            _ahead_4(out, w + 256 * (4 * half + g))
            low = w + 512 + 512 * half
            first = tile_offset_start(out, x, 0, 2)
            last = tile_offset_start(out, x, 1, 2)
            first = _q3_k_half_group(first, low, 2 * g, w, 4 * half + g, x, 0)
            last = _q3_k_half_group(last, low + 256, 2 * g, w + 256, 4 * half + g, x, 4)
            scales = _q3_k_scales(w, 2 * half + (g >> 1))
            out = tile_fold(out, first, d * byte_to_f32(scales, 2 * (g & 1), -32), x)
            out = tile_fold(out, last, d * byte_to_f32(scales, 2 * (g & 1) + 1, -32), x)
            x += panel_block_bytes(out)
    return out


@device
def _q2_k_half_group(acc, low, shift, x, group):
    """acc += 16 weights of 2 bits."""
    short = tile_short_start(acc)
    for j in range(4):
        two = byte_bits(load_u8x64(low + 64 * j), shift, 3, 0)
        short = tile_dot4_short(short, two, x, group + j)
    return tile_short_end(acc, short)


@device
def _q2_k_scaled_half_group(acc, low, shift, scale, x, group):
    """acc += 16 weights of 2 bits times their rows' scales of 4 bits: whole numbers up to 45."""
    for run in range(2):
        short = tile_short_start(acc)
        for j in range(2 * run, 2 * run + 2):
            two = byte_bits(load_u8x64(low + 64 * j), shift, 3, 0)
            short = tile_dot4_short(short, multiply_bytes(two, scale), x, group + j)
        acc = tile_short_end(acc, short)
    return acc


@device
def _q2_k(out, w, x):
    # words 0 to 3: scales (low nibbles) and mins (high), 4 to 19: 2 bits each, then d and dmin
    d = load_f16x16(w + 1280)
    dmin = load_f16x16(w + 1312)
    for half in range(2):
        for g in range(4):
            _ahead_3(out, w + 192 * (4 * half + g))
            low = w + 256 + 512 * half
            both = load_i32x16(w + 128 * half + 64 * (g >> 1))
            mins = word_bits(both, 4, 0x0F0F0F0F, 0)
            k = 2 * (g & 1)
            scale = word_bits(both, 8 * k, 15, 0)
            last_scale = word_bits(both, 8 * k + 8, 15, 0)
            acc = tile_zeros_like(out)
            if has_few_tokens(out):  # the same whole numbers, whether weights or their sums are scaled
                last = _q2_k_half_group(acc, low + 256, 2 * g, x, 4)
                acc = tile_scale_sum(_q2_k_half_group(acc, low, 2 * g, x, 0), scale, last, last_scale)
            else:
                acc = _q2_k_scaled_half_group(acc, low, 2 * g, scale, x, 0)
                acc = _q2_k_scaled_half_group(acc, low + 256, 2 * g, last_scale, x, 4)
            out = tile_fold(out, acc, d, x)
            out = tile_take_min(out, dmin * byte_to_f32(mins, k, 0), x, 0)
            out = tile_take_min(out, dmin * byte_to_f32(mins, k + 1, 0), x, 1)
            x += panel_block_bytes(out)
    return out


BLOCK_FUNCTIONS = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
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
}
