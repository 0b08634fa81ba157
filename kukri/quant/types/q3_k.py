"""Q3_K: 256 weights in 16 groups, d (s - 32) (q - 4); q of 3 bits, s of 6."""

from kukri.quant.types.schema import Bits, Block, Numbers, QuantType, TileWords, struct_of

STRUCT = struct_of(("high", "u1", 32), ("q", "u1", 64), ("scales", "u1", 8), ("tops", "u1", 4), ("d", "<f2"))
QUANTS = (Bits("q", 2, run=32), Bits("high", 1, run=32, left=2))
SCALES = (Bits("scales", 4, run=8), Bits("tops", 2, run=4, left=4))


def _three_bits(group: str, first: int) -> Numbers:
    """32 quants: the first 24 in three words, the bits of the last eight above them."""
    low = (Bits(f"{group}.{word}", 3, run=4, n=2, first=first + 8 * j) for j, word in enumerate("abc"))
    above = (("a", 2, 6, 0, 24), ("b", 1, 6, 2, 24), ("c", 2, 6, 0, 28), ("b", 1, 7, 2, 28))
    high = (
        Bits(f"{group}.{word}", n_bits, start=start, n=1, left=left, first=first + j)
        for word, n_bits, start, left, j in above
    )
    return (*low, *high)


_GROUPS = [(f"g{i}", [(word, "u1", 4) for word in "abc"]) for i in range(8)]
TILE = TileWords(
    struct_of(*_GROUPS, ("low", "<u2", 4), ("tops", "<u2", 2)),
    tuple(part for i in range(8) for part in _three_bits(f"g{i}", 32 * i)),
    scales=(Bits("low", 4, run=2), Bits("tops", 2, run=2, left=4)),
)

Q3_K = QuantType(
    *("Q3_K", 11, 256, 110),
    Block(STRUCT, QUANTS, offset=4, scales=SCALES, plus=-32, tile=TILE),
    stand_in="Q4_0",
)
