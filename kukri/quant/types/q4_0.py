"""Q4_0 and Q5_0: 32 weights d * (q - 8) or d * (q - 16), of 4 or 5 bits."""

from kukri.quant.types.schema import Bits, Block, Numbers, QuantType, TileWords, struct_of

FIVE_WORDS = [(word, "u1", 4) for word in "abcde"]


def five_bits(group: str, first: int = 0) -> Numbers:
    """32 quants of 5 bits, four to a word: the first 20 in five words, the bits of the last 12 above them."""
    low = (Bits(f"{group}.{word}", 5, n=1, first=first + 4 * j) for j, word in enumerate("abcde"))
    above = (("a", 3, 5, 0, 20), ("b", 2, 5, 3, 20), ("c", 3, 5, 0, 24), ("d", 2, 5, 3, 24))
    last = (("e", 3, 5, 0, 28), ("b", 1, 7, 3, 28), ("d", 1, 7, 4, 28))
    high = (
        Bits(f"{group}.{word}", n_bits, start=start, n=1, left=left, first=first + j)
        for word, n_bits, start, left, j in (*above, *last)
    )
    return (*low, *high)


TILE_5 = TileWords(struct_of(("g", FIVE_WORDS)), five_bits("g"))

Q4_0 = QuantType(
    *("Q4_0", 2, 32, 18),
    Block(struct_of(("d", "<f2"), ("q", "u1", 16)), (Bits("q", 4, run=16),), offset=8),
    file_type=2,
)
Q5_0 = QuantType(
    *("Q5_0", 6, 32, 22),
    Block(
        struct_of(("d", "<f2"), ("high", "u1", 4), ("q", "u1", 16)),
        (Bits("q", 4, run=16), Bits("high", 1, left=4)),
        offset=16,
        tile=TILE_5,
    ),
    file_type=8,
)
