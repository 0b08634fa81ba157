"""Weights for the Triton kernels: a file's blocks as planes of 32-bit words, repacked once when a model is
loaded.

Blocks of 18, 22, 34 or 210 bytes cannot be read by aligned 128-bit loads, so quants and scales become planes.
The unit is a pair: two consecutive blocks of 32 weights, c = 0 and 1. An odd last block gets a partner of
zeros.

`quants`, int32 words [rows, n_pairs, 4, 8 or 16]:
  low 4 bits of Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K: byte k of a pair has weight k of both blocks, block
  0 in the low nibble. (That is the file's own order for Q4_K and Q5_K.)
  IQ4_NL, IQ4_XS, MXFP4: word w has weights 4w … 4w + 3 of block 0 in its low 4 nibbles, of block 1 in its
  high ones.
  Q8_0: 16 words, block 0 then block 1.
  Q2_K, Q3_K: 4 words, byte k has weights k and k + 16 of block 0 and those of block 1, from the lowest bits.
`high`, the bits above those: Q3_K, Q5 [rows, n_pairs, 2], a word a block, weight k in bit (k div 4 + 4) mod
  8 of byte k mod 4; Q6_K [rows, n_pairs, 4], a word for 16 weights, weight k in the 2 bits from
  (2 (k div 4) + 4) mod 8 of byte k mod 4. So one shift brings bits to where a mask finds them next to the
  low 4. IQ4 and MXFP4: the 16 values, 4 words.
`scales`: Q4_0, Q5_0, Q8_0, IQ4_NL one word a pair, d of both blocks; Q4_1, Q5_1 two, d and m of each;
  Q4_K, Q5_K the file's first 16 bytes of each 256 weights, IQ4_XS its first 8; Q6_K and Q3_K five, 16 int8
  and d as float32; Q2_K five, the file's 16 bytes and d, dmin; MXFP4 one for two pairs, the four exponents.

Planes have as many bytes as the file, but for Q6_K (212 bytes instead of 210), Q3_K (116 instead of 110) and
padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kukri.errors import UnsupportedError
from kukri.kernels.arrays import ByteArray, IntArray
from kukri.kernels.weight_handles import Weight
from kukri.quant.types.fp4 import FP4_VALUES
from kukri.quant.types.iq4 import IQ4_VALUES

PAIR = 64  # weights of two blocks
_PIECE_WEIGHTS = 1 << 20  # repacked at a time
_OF_32 = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
_OF_256 = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
PACKED_TYPES = (*_OF_32, *_OF_256)
_TABLES = {"IQ4_NL": IQ4_VALUES, "IQ4_XS": IQ4_VALUES, "MXFP4": FP4_VALUES}


@dataclass(frozen=True, eq=False)
class Planes:
    """Rows of a packed matrix: see the module. `high` is empty for types that need none."""

    type_name: str
    n_rows: int
    n_columns: int
    quants: IntArray
    high: IntArray
    scales: IntArray

    @property
    def n_pairs(self) -> int:
        """Pairs of blocks in a row, padding included."""
        return int(self.quants.shape[1])

    @property
    def n_bytes(self) -> int:
        """ByteArray of all planes."""
        return self.quants.nbytes + self.high.nbytes + self.scales.nbytes


def pack(weight: Weight) -> Iterator[Planes]:
    """The planes of a quantized matrix, some rows at a time, so that the host never holds all of them.

    Raises UnsupportedError for types that the kernels do not read.
    """
    name, (n_rows, n_columns) = weight.type.name, weight.shape
    if name not in PACKED_TYPES:
        raise UnsupportedError(f"no Triton kernel reads {name}: they read {', '.join(PACKED_TYPES)}")
    pack_blocks = _pack_32 if name in _OF_32 else _pack_256
    step = max(1, _PIECE_WEIGHTS // n_columns)
    data = weight.data
    for start in range(0, n_rows, step):
        rows = np.ascontiguousarray(data[start : start + step])
        quants, high, scales = pack_blocks(name, rows.reshape(len(rows), -1, weight.type.block_bytes))
        if name in _TABLES:
            high = np.array(_TABLES[name], np.int8).view(np.int32)
        yield Planes(name, len(rows), n_columns, quants, high, scales)


def _pack_32(name: str, blocks: ByteArray) -> tuple[IntArray, IntArray, IntArray]:
    """Planes of blocks uint8 [rows, n_blocks, bytes] of 32 weights."""
    if blocks.shape[1] % 2:
        blocks = np.pad(blocks, ((0, 0), (0, 1), (0, 0)))
    if name == "MXFP4":
        return _pack_mxfp4(blocks)
    has_min, has_high = name in ("Q4_1", "Q5_1"), name.startswith("Q5")
    at = 4 if has_min else 2
    scales = _words(blocks[:, :, :at].reshape(len(blocks), -1, 2 * at))
    no_high = np.zeros((*scales.shape[:2], 0), np.int32)
    if name == "Q8_0":
        return _words(blocks[:, :, 2:].reshape(len(blocks), -1, PAIR)), no_high, scales
    high = no_high
    if has_high:
        bits = np.unpackbits(blocks[:, :, at : at + 4], axis=-1, bitorder="little")  # [rows, n_blocks, 32]
        high, at = _words(_spread(bits, 1)), at + 4
    packed = blocks[:, :, at:]
    quants = np.concatenate([packed & 15, packed >> 4], axis=-1)
    join = _join_for_tables if name == "IQ4_NL" else _join
    return _words(join(quants)), high, scales


def _pack_mxfp4(blocks: ByteArray) -> tuple[IntArray, IntArray, IntArray]:
    """Planes of an even number of blocks: an exponent, then 16 bytes of two quants each."""
    exponents = np.pad(blocks[:, :, 0], ((0, 0), (0, -blocks.shape[1] % 4)))
    quants = _words(_join_for_tables(np.concatenate([blocks[:, :, 1:] & 15, blocks[:, :, 1:] >> 4], axis=-1)))
    no_high = np.zeros((*quants.shape[:2], 0), np.int32)
    return quants, no_high, _words(exponents.reshape(len(blocks), -1, 4))


def _pack_256(name: str, blocks: ByteArray) -> tuple[IntArray, IntArray, IntArray]:
    """Planes of blocks uint8 [rows, n_blocks, bytes] of 256 weights."""
    no_high = np.zeros((len(blocks), blocks.shape[1] * 4, 0), np.int32)
    if name == "Q2_K":
        quants = _fields(blocks[..., 16:80], 2, 32).reshape(len(blocks), -1, 32)
        scales = np.concatenate([blocks[..., :16], blocks[..., 80:]], axis=-1)
        return _words(_join_quarters(quants)), no_high, _words(scales)
    if name == "Q3_K":
        return _pack_q3_k(blocks)
    if name == "Q4_K":
        return _words(blocks[..., 16:], 4), no_high, _words(blocks[..., :16])
    if name == "Q5_K":
        bits = _fields(blocks[..., 16:48], 1, 32).reshape(len(blocks), -1, 32)
        return _words(blocks[..., 48:], 4), _words(_spread(bits, 1)), _words(blocks[..., :16])
    if name == "IQ4_XS":
        packed = blocks[..., 8:].reshape(len(blocks), -1, 16)
        quants = np.concatenate([packed & 15, packed >> 4], axis=-1)
        return _words(_join_for_tables(quants)), no_high, _words(blocks[..., :8])
    low = _fields(blocks[..., :128], 4, 64).reshape(len(blocks), -1, 32)
    top = _fields(blocks[..., 128:192], 2, 32).reshape(len(blocks), -1, 32)
    d = np.ascontiguousarray(blocks[..., 208:210]).view(np.float16).astype(np.float32)
    scales = np.concatenate([_words(blocks[..., 192:208]), d.view(np.int32)], axis=-1)
    return _words(_join(low)), _words(_spread(top, 2)), scales


def _pack_q3_k(blocks: ByteArray) -> tuple[IntArray, IntArray, IntArray]:
    """Planes of blocks of 32 bytes of high bits, 64 of low ones, 16 scales of 6 bits in 12, and d."""
    quants = _fields(blocks[..., 32:96], 2, 32).reshape(len(blocks), -1, 32)
    bits = _fields(blocks[..., :32], 1, 32).reshape(len(blocks), -1, 32)
    low, top = _fields(blocks[..., 96:104], 4, 8), _fields(blocks[..., 104:108], 2, 4)
    scales = ((low | (top << np.uint8(4))).view(np.int8) - np.int8(32)).view(np.int32)
    d = np.ascontiguousarray(blocks[..., 108:]).view(np.float16).astype(np.float32).view(np.int32)
    return _words(_join_quarters(quants)), _words(_spread(bits, 1)), np.concatenate([scales, d], axis=-1)


def _fields(packed: ByteArray, n_bits: int, run: int) -> ByteArray:
    """[…, bytes] -> […, bytes * 8 / n_bits]: fields that share bytes, the lowest of `run` bytes first."""
    shifts = np.arange(0, 8, n_bits, dtype=np.uint8)
    fields = packed.reshape(*packed.shape[:-1], -1, 1, run) >> shifts[:, None]
    return (fields & np.uint8((1 << n_bits) - 1)).reshape(*packed.shape[:-1], -1)


def _join(quants: ByteArray) -> ByteArray:
    """Low nibbles [rows, n_blocks, 32] -> bytes [rows, n_pairs, 32]: weight k of both blocks in byte k."""
    pairs = quants.reshape(len(quants), -1, 2, 32)
    joined: ByteArray = np.bitwise_or(pairs[:, :, 0], pairs[:, :, 1] << np.uint8(4), dtype=np.uint8)
    return joined


def _join_quarters(quants: ByteArray) -> ByteArray:
    """2 bits [rows, n_blocks, 32] -> bytes [rows, n_pairs, 16]: weights k and k + 16 of both blocks."""
    quarters = quants.reshape(len(quants), -1, 4, 16) << np.array([[0], [2], [4], [6]], np.uint8)
    joined: ByteArray = np.bitwise_or.reduce(quarters, axis=2)
    return joined


def _join_for_tables(quants: ByteArray) -> ByteArray:
    """Nibbles [rows, n_blocks, 32] -> bytes [rows, n_pairs, 32]: 4 of block 0, then 4 of block 1."""
    pairs = quants.reshape(len(quants), -1, 2, 8, 2, 2).swapaxes(
        2, 3
    )  # [rows, n_pairs, word, block, byte, 2]
    joined: ByteArray = np.bitwise_or(pairs[..., 0], pairs[..., 1] << np.uint8(4), dtype=np.uint8)
    return joined.reshape(*pairs.shape[:2], 32)


def _spread(fields: ByteArray, n_bits: int) -> ByteArray:
    """Top bits [rows, n_blocks, 32] of 1 or 2 bits -> bytes [rows, n_pairs, 8 n_bits], as the module says."""
    per_byte = 8 // n_bits
    grouped = fields.reshape(
        *fields.shape[:2], -1, per_byte, 4
    )  # weight k: word, place in a byte, byte k mod 4
    shifts = ((np.arange(per_byte, dtype=np.uint8) * n_bits + 4) % 8)[:, None]
    packed: ByteArray = np.bitwise_or.reduce(grouped << shifts, axis=-2)
    return packed.reshape(len(fields), -1, 8 * n_bits)


def _words(data: ByteArray, split: int = 1) -> IntArray:
    """uint8 […, n] -> int32 […, n / 4]; with `split`, each block becomes that many entries."""
    words = np.ascontiguousarray(data).view(np.int32)
    return words.reshape(words.shape[0], words.shape[1] * split, -1)
