"""Q6_K: 256 weights in 16 groups, d s (q - 32); q of 6 bits, s of 8, signed."""

from kukri.quant.types.schema import Bits, Block, Numbers, QuantType, TileWords, struct_of

# a quarter of a tile's block: four scales, of the first and of the last halves of two groups, then
# three words for each of them
_PART = [("s", "<u2", 2), *((f"{word}{k}", "u1", 4) for k in range(4) for word in "abc")]


def _six_bits(part: str, k: int, first: int) -> Numbers:
    """16 quants of 6 bits: the first 12 in three words, the bits of the last four above them."""
    low = (Bits(f"{part}.{word}{k}", 6, n=1, first=first + 4 * j) for j, word in enumerate("abc"))
    high = (
        Bits(f"{part}.{word}{k}", 2, start=6, left=left, first=first + 12)
        for word, left in (("a", 4), ("b", 2), ("c", 0))
    )
    return (*low, *high)


Q6_K = QuantType(
    *("Q6_K", 14, 256, 210),
    Block(
        struct_of(("q", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), ("d", "<f2")),
        (Bits("q", 4, run=64), Bits("high", 2, run=32, left=4)),
        offset=32,
        scales=(Bits("scales", 8),),
        tile=TileWords(
            struct_of(*((f"p{i}", _PART) for i in range(4))),
            tuple(part for i in range(16) for part in _six_bits(f"p{i // 4}", i % 4, 16 * i)),
            scales=tuple(Bits(f"p{i}.s", 8, run=2, first=4 * i) for i in range(4)),
        ),
        is_slow_to_unpack=True,
    ),
    file_type=18,
    stand_in="Q8_0",
)
