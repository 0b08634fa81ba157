"""Brings weight rows from the file's order into weight tiles (see layouts.py)."""

from __future__ import annotations

from typing import Any

from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.cpu.compile.kernel_source import KernelSource
from kukri.kernels.cpu.kernels.intrinsics import (
    device,
    load_i32,
    load_i64,
    load_u8,
    load_u16,
    stack_bytes,
    store_i32,
    store_u8,
    store_u16,
)
from kukri.kernels.cpu.pack.layouts import LAYOUTS, NO_QUANTS, ROWS, side_by_side
from kukri.quant.types import QUANT_TYPES

# orders of words: numbers of the types that they are named by
_Q5_0, _Q8_0, _Q2_K, _Q3_K, _Q4_K, _Q5_K, _Q6_K, _TQ2_0 = (
    QUANT_TYPES[name].ggml_id for name in ("Q5_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ2_0")
)
_1_BIT, _2_BITS = side_by_side(1), side_by_side(2)
_FOR_MATRIX = cpu_target().has_int8_matrix
_SIGN_FLIP = 0x80808080 if cpu_target().has_signed_bias else 0
_MOST_WORDS_BYTES = 4 * max(layout.n_words for layout in LAYOUTS.values())


@device
def turn_bits(word):
    """Moves bit 4j + b to bit 8b + j, for j < 8 and b < 4."""
    turned = 0
    for b in range(4):
        # every fourth bit from b on, gathered into a byte: pairs, then fours, then eights
        x = (word >> b) & 0x11111111
        x = (x | (x >> 3)) & 0x03030303
        x = (x | (x >> 6)) & 0x000F000F
        x = (x | (x >> 12)) & 0xFF
        turned |= x << (8 * b)
    return turned


# The four bytes of word j of a group of 32 inputs are its inputs 4j to 4j + 3. In a file (`source`) words of
# several groups of a block of 256 share bytes; in a tile (`words`) a group has words of its own. Weights of
# 3, 5 and 6 bits lie side by side in bytes, so that most are a mask away, and few are put together.

_NIBBLES, _PAIRS, _BITS = 0x0F0F0F0F, 0x03030303, 0x01010101


@device
def _put(words, j, value):
    store_i32(words + 4 * j, value)


@device
def _get(words, j):
    return load_i32(words + 4 * j)


@device
def _nibbles(quarters, g, j):
    """Word j of a group's nibbles, of quarters as in Q4_K."""
    return (_get(quarters + 32 * (g >> 1), j) >> (4 * (g & 1))) & _NIBBLES


def _make_put_five_bits(word: Any) -> Any:
    """A function that writes 8 words of 5 bits a byte, `word(source, which, j)`, as 5 words.

    They are the first five, and the last three in their top bits.
    """

    @device
    def put(words, source, which):
        f = word(source, which, 5)
        g = word(source, which, 6)
        h = word(source, which, 7)
        _put(words, 0, word(source, which, 0) | ((f & 0x07070707) << 5))
        _put(words, 1, word(source, which, 1) | (((f >> 3) & _PAIRS) << 5) | (((h >> 3) & _BITS) << 7))
        _put(words, 2, word(source, which, 2) | ((g & 0x07070707) << 5))
        _put(words, 3, word(source, which, 3) | (((g >> 3) & _PAIRS) << 5) | (((h >> 4) & _BITS) << 7))
        _put(words, 4, word(source, which, 4) | ((h & 0x07070707) << 5))

    return put


@device
def _five_bits(source, bits, j):
    """Word j of a block of Q5_0, whose fifth bits were turned."""
    nibbles = (_get(source, 1 + (j & 3)) >> (j & 4)) & _NIBBLES
    return nibbles | (((bits >> j) & _BITS) << 4)


_put_q5_0 = _make_put_five_bits(_five_bits)


@device
def _q5_0_words(source, words):
    _put_q5_0(words, source, turn_bits(_get(source, 0)))


@device
def _q4_k_groups(source, words):
    for j in range(3):
        _put(words, j, _get(source, j))
    for g in range(8):
        for j in range(4):
            high = _nibbles(source + 12, g, 4 + j)
            _put(words, 3 + 4 * g + j, _nibbles(source + 12, g, j) | (high << 4))


@device
def _q5_k_word(source, g, j):
    return _nibbles(source + 44, g, j) | (((_get(source, 3 + j) >> g) & _BITS) << 4)


_put_q5_k = _make_put_five_bits(_q5_k_word)


@device
def _q5_k_groups(source, words):
    for j in range(3):
        _put(words, j, _get(source, j))
    for g in range(8):
        _put_q5_k(words + 12 + 20 * g, source, g)


@device
def _swap_middle_bytes(word):
    return (word & 0xFF0000FF) | ((word & 0xFF00) << 8) | ((word >> 8) & 0xFF00)


@device
def _q6_k_groups(source, words):
    for k in range(16):  # 16 inputs with a scale of their own
        low = source + 64 * (k >> 3) + 32 * ((k >> 1) & 1) + 16 * (k & 1)
        high = source + 128 + 32 * (k >> 3) + 16 * (k & 1)
        a, b, c, last = _q6_k_words(low, high, 4 * ((k >> 2) & 1), 2 * ((k >> 1) & 3))
        first = 1 + 3 * k + (k >> 2)
        _put(words, first, a | ((last & 0x30303030) << 2))
        _put(words, first + 1, b | ((last & 0x0C0C0C0C) << 4))
        _put(words, first + 2, c | ((last & _PAIRS) << 6))
    for j in range(4):
        _put(words, 13 * j, _swap_middle_bytes(_get(source, 48 + j)))


@device
def _six_bits(low, high, right, high_right, j):
    return ((_get(low, j) >> right) & _NIBBLES) | (((_get(high, j) >> high_right) & _PAIRS) << 4)


@device
def _q6_k_words(low, high, right, high_right):
    return (
        _six_bits(low, high, right, high_right, 0),
        _six_bits(low, high, right, high_right, 1),
        _six_bits(low, high, right, high_right, 2),
        _six_bits(low, high, right, high_right, 3),
    )


@device
def _three_bits(source, g, j):
    two = (_get(source, 8 + 8 * (g >> 2) + j) >> (2 * (g & 3))) & _PAIRS
    return two | (((_get(source, j) >> g) & _BITS) << 2)


@device
def _q3_k_groups(source, words):
    for g in range(8):
        a = _three_bits(source, g, 0) | (_three_bits(source, g, 1) << 3)
        b = _three_bits(source, g, 2) | (_three_bits(source, g, 3) << 3)
        c = _three_bits(source, g, 4) | (_three_bits(source, g, 5) << 3)
        d = _three_bits(source, g, 6)
        e = _three_bits(source, g, 7)
        _put(words, 3 * g, a | ((d & _PAIRS) << 6))
        _put(words, 3 * g + 1, b | (((d >> 2) & _BITS) << 6) | (((e >> 2) & _BITS) << 7))
        _put(words, 3 * g + 2, c | ((e & _PAIRS) << 6))
    for half in range(2):  # a group's two scales, the first in the lower 16 bits
        low = 0
        for g in range(4):
            for i in range(2):
                k = 8 * half + 2 * g + i
                low |= ((load_u8(source + 96 + (k & 7)) >> (4 * (k >> 3))) & 15) << (4 * g + 16 * i)
        _put(words, 24 + half, low)
    top = 0
    for k in range(16):
        two = (load_u8(source + 104 + (k & 3)) >> (2 * (k >> 2))) & 3
        top |= two << (2 * (k >> 1) + 16 * (k & 1))
    _put(words, 26, top)


@device
def _two_bits(source, words):
    """Words of 16 inputs, of 2 bits that lie as in Q2_K."""
    for k in range(16):
        word = 0
        for j in range(4):
            two = _get(source, 8 * (k >> 3) + 4 * (k & 1) + j) >> (2 * ((k >> 1) & 3))
            word |= (two & _PAIRS) << (2 * j)
        _put(words, k, word)


@device
def _q2_k_groups(source, words):
    for j in range(4):
        _put(words, j, _swap_middle_bytes(_get(source, j)))
    _two_bits(source + 16, words + 16)


@device
def _turn_pairs(word):
    """Moves 2 bits k of byte b to 2 bits b of byte k."""
    moved = (word ^ (word >> 6)) & 0x00CC00CC
    word = word ^ moved ^ (moved << 6)
    moved = (word ^ (word >> 12)) & 0x0000F0F0
    return word ^ moved ^ (moved << 12)


@device
def _arrange(order, source, n_words, words):
    """Writes the words of a row's block, at `source` in the file's order, to `words` in the tile's."""
    if order == _Q4_K:
        _q4_k_groups(source, words)
    elif order == _Q5_K:
        _q5_k_groups(source, words)
    elif order == _Q6_K:
        _q6_k_groups(source, words)
    elif order == _Q3_K:
        _q3_k_groups(source, words)
    elif order == _Q2_K:
        _q2_k_groups(source, words)
    elif order == _Q5_0:
        _q5_0_words(source, words)
    elif order == _TQ2_0:
        _two_bits(source, words)
    elif order == _2_BITS:
        for j in range(n_words):
            _put(words, j, _turn_pairs(_get(source, j)))
    elif order == _1_BIT:
        for j in range(n_words):
            _put(words, j, turn_bits(_get(source, j)))
    else:
        flip = _SIGN_FLIP if order == _Q8_0 else 0
        for j in range(n_words):
            _put(words, j, _get(source, j) ^ flip)


# Tiles for matrix products of int8 (layouts.py) are tiles of other rows, mixed from 16: lane i takes words of
# row i >> 1 and of row 8 + (i >> 1) in turn, of each two words the first or, if i is odd, the last.


@device
def _quants(order, n_words):
    """(The first word of a block that holds quants, the one after the last.)"""
    if order in (_Q4_K, _Q5_K):
        return 3, n_words
    if order == NO_QUANTS:
        return 0, 0
    if order == _Q2_K:
        return 4, n_words
    if order == _Q3_K:
        return 0, 24
    if order == _Q6_K:
        return 0, 48
    if order == _Q5_0:
        return 1, n_words  # without the fifth bits
    return n_words & 1, n_words  # IQ4_XS has scales in word 0


@device
def _mix_rows(order, n_words, lane, own, first, last, words):
    """Writes a lane's block, in the file's order: scales of its own row, quants of two others."""
    start, stop = _quants(order, n_words)
    for j in range(n_words):
        _put(words, j, _get(own, j))
    if order in (_2_BITS, _1_BIT):  # a word has inputs of several groups: its fields alternate
        n_bits = 8 if order == _2_BITS else 4  # those of a tile's word, side by side in the file
        mask = 0x00FF00FF if order == _2_BITS else 0x0F0F0F0F
        for j in range(n_words):
            a = (_get(first, j) >> (n_bits * (lane & 1))) & mask
            b = (_get(last, j) >> (n_bits * (lane & 1))) & mask
            _put(words, j, a | (b << n_bits))
        return
    for j in range(start, stop, 2):
        _put(words, j, _get(first, j + (lane & 1)))
        _put(words, j + 1, _get(last, j + (lane & 1)))
    if order == _Q5_0:  # a bit for each input: nibbles alternate
        right = 4 * (lane & 1)
        _put(words, 0, ((_get(first, 0) >> right) & _NIBBLES) | (((_get(last, 0) >> right) & _NIBBLES) << 4))


def pack(
    tile, row_addresses, n_row_tiles, n_blocks, block_bytes, word, n_words, order, half, n_halves,
    exponent, out, tile_bytes,
):  # fmt: skip
    """`row_addresses`: int64 per row, padded to whole tiles; the rest as in TileLayout."""
    if tile < 0:
        return n_row_tiles
    tile_block_bytes = ROWS * (4 * n_words + 2 * n_halves + (1 if exponent >= 0 else 0))
    words = stack_bytes(_MOST_WORDS_BYTES)
    for row in range(ROWS):
        source = load_i64(row_addresses + 8 * (tile * ROWS + row))
        target = out + tile * tile_bytes
        for block in range(n_blocks):
            if _FOR_MATRIX:
                others = row_addresses + 8 * (tile * ROWS + (row >> 1))
                at = word + block * block_bytes
                mixed = stack_bytes(_MOST_WORDS_BYTES)
                first = load_i64(others) + at
                last = load_i64(others + 4 * ROWS) + at
                _mix_rows(order, n_words, row, source + word, first, last, mixed)
                _arrange(order, mixed, n_words, words)
            else:
                _arrange(order, source + word, n_words, words)
            for j in range(n_words):
                store_i32(target + (j * ROWS + row) * 4, load_i32(words + 4 * j))
            halves = target + n_words * ROWS * 4
            for j in range(n_halves):
                store_u16(halves + (j * ROWS + row) * 2, load_u16(source + half + 2 * j))
            if exponent >= 0:
                store_u8(halves + n_halves * ROWS * 2 + row, load_u8(source + exponent))
            source += block_bytes
            target += tile_block_bytes
    return 0


KERNELS = {"pack": KernelSource("pack", pack)}
