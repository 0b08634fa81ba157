"""Integer sums of 32 inputs, which block functions of several weight types share.

Addresses are those of `blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kukri.kernels.cpu.codegen.tile_folds import tile_raised_offset_start, tile_raised_start
from kukri.kernels.cpu.codegen.tile_products import (
    tile_dot4_short,
    tile_dot4_signed,
    tile_short_end,
    tile_short_start,
)
from kukri.kernels.cpu.codegen.unpack import byte_bits, either, look_up, low_bits
from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.cpu.compile.intrinsics import device
from kukri.kernels.cpu.compile.simd import load_u8x64
from kukri.quant.types.iq4 import IQ4_VALUES

_HAS_SIGNED_BIAS = cpu_target().has_signed_bias
# Looked-up values of up to 5 bits are kept with 16 added, as runs in int16 need, or 32, as sums begin with it
SMALL_SHIFT = 4 if cpu_target().lowering == "avx2" else 5


@device
def signed_start(out, x):
    """Initial sums of `tile_dot4_signed` over a block."""
    return tile_raised_offset_start(out, x, 7) if _HAS_SIGNED_BIAS else tile_raised_start(out)


# Words that are alternately of the first and of the last rows (layouts.py) are written out in pairs: LLVM
# drops what a word has no part in (`_matrix_dots`).
TURNS = 2 if cpu_target().has_int8_matrix else 1


@device
def dot_nibbles(acc, w, x):
    """acc += 32 nibbles: byte 4j+b of a row holds input 4j+b (low) and 16+4j+b (high)."""
    short = tile_short_start(acc)
    for turns in range(4 // TURNS):
        j = TURNS * turns
        packed = load_u8x64(w + 64 * j)
        short = tile_dot4_short(short, low_bits(packed, 15), x, j)
        short = tile_dot4_short(short, byte_bits(packed, 4, 15, 0), x, 4 + j)
        if TURNS == 2:
            packed = load_u8x64(w + 64 * j + 64)
            short = tile_dot4_short(short, low_bits(packed, 15), x, j + 1)
            short = tile_dot4_short(short, byte_bits(packed, 4, 15, 0), x, 5 + j)
    return tile_short_end(acc, short)


@device
def dot_five_bits(acc, w, x):
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


def make_dot_values(values: Sequence[int]) -> Any:
    """A function for the integer sums of 32 values that nibbles look up."""
    stored = [value + (128 if _HAS_SIGNED_BIAS else 0) for value in values]
    low, high = look_up(stored, 0), look_up(stored, 4)

    @device
    def dot(out, w, x):
        acc = signed_start(out, x)
        for turns in range(4 // TURNS):
            j = TURNS * turns
            packed = load_u8x64(w + 64 * j)
            acc = tile_dot4_signed(acc, low(packed), x, j)
            acc = tile_dot4_signed(acc, high(packed), x, 4 + j)
            if TURNS == 2:
                packed = load_u8x64(w + 64 * j + 64)
                acc = tile_dot4_signed(acc, low(packed), x, j + 1)
                acc = tile_dot4_signed(acc, high(packed), x, 5 + j)
        return acc

    return dot


dot_iq4 = make_dot_values(IQ4_VALUES)


def make_dot_runs(values: Sequence[int], shift: int, n_words: int) -> Any:
    """The same for values kept as value + 2^shift, of few bits: runs of two dots for each of `n_words` words.

    Where words are written out in pairs, so are the signed values.
    """
    if TURNS == 2:
        return make_dot_values(values)
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
