"""Products on a GPU by tile: `python -m benchmarks.gpu_tiles`, for the sizes in `kukri.kernels.gpu.tiles`.

Each product with a packed matrix of a 3B model is timed for 1 to 512 tokens with several tiles, as a graph of
launches that read matrices in turn, so that neither Python nor the cache is measured. What the tiles in use
take comes first, then the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from unittest import mock

import numpy as np
import torch

from benchmarks.harness import Experiment, Table, run
from kukri.errors import UnsupportedError
from kukri.kernels.gpu import products, tiles
from kukri.kernels.gpu.pack import Matrix, form_of, pack
from kukri.kernels.gpu.products import Output
from kukri.kernels.gpu.rows import quantize
from kukri.kernels.gpu.tiles import Tile
from kukri.kernels.weight_handles import Weight
from kukri.quant.types import QUANT_TYPES

SHAPES = {"q k v": (3072, 2048), "output": (2048, 2048), "gate up": (22016, 2048), "down": (2048, 11008)}
_BYTES = 1 << 28  # of matrices read in turn: more than a cache holds


@dataclass(frozen=True)
class Timed:
    """Microseconds of a product with a tile; `split` if a program has one of its sums."""

    type: str
    shape: str
    n_tokens: int
    tile: Tile
    split: bool
    us: float


def candidates(n_tokens: int) -> Iterator[tuple[Tile, bool]]:
    """Tiles and whether sums are split, for a number of tokens."""
    if n_tokens <= tiles.MAX_GEMV_TOKENS:
        for (rows, warps), unroll in product(((8, 2), (16, 2), (16, 4), (32, 4), (64, 8)), (1, 2, 4)):
            yield Tile(rows, n_tokens, warps, unroll=unroll), False
        return
    for (rows, warps), tokens, unroll in product(((32, 4), (64, 4), (128, 8)), (16, 32, 64), (1, 2)):
        if tokens < 2 * n_tokens:
            yield from ((Tile(rows, tokens, warps, unroll=unroll), split) for split in (False, True))


def matrices(type_name: str, n_rows: int, n_columns: int) -> list[Matrix]:
    """Packed matrices of random bits with small scales."""
    type = QUANT_TYPES[type_name]
    (row,) = pack(Weight(np.zeros((1, type.row_bytes(n_columns)), np.uint8), type, (1, n_columns)))

    def bits(plane: torch.Tensor) -> torch.Tensor:
        shape = n_rows, *plane.shape[1:]
        return torch.randint(-(1 << 31), (1 << 31) - 1, shape, dtype=torch.int32, device="cuda")

    def matrix() -> Matrix:
        scales = torch.full((n_rows, row.scales.shape[1]), 0x1C001C00, dtype=torch.int32, device="cuda")
        return Matrix(row.form, n_rows, n_columns, bits(row.quants), bits(row.high), scales)

    return [matrix() for _ in range(max(1, _BYTES // (n_rows * row.quants.nbytes)))]


def microseconds(launch: Callable[[int], None], n_launches: int) -> float:
    """Time of a launch in a graph of them, the best of three replays; the first launch compiles."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(n_launches):
            launch(i)
    best = float("inf")
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / n_launches)
    return best


def measure(type_name: str, shape: str, n_tokens: int) -> Iterator[Timed]:
    """Each candidate's time."""
    n_rows, n_columns = SHAPES[shape]
    weights = matrices(type_name, n_rows, n_columns)
    x = quantize(torch.randn(n_tokens, n_columns, device="cuda"))
    out = Output(torch.empty(n_tokens, n_rows, device="cuda"))
    for tile, split in candidates(n_tokens):

        def launch(i: int, tile: Tile = tile) -> None:
            if n_tokens <= tiles.MAX_GEMV_TOKENS:
                products.gemv(x, weights[i % len(weights)], out, tile)
            else:
                products.gemm(x, weights[i % len(weights)], out, tile)

        with mock.patch.object(tiles, "splits_sums", lambda *_, split=split: split):
            us = microseconds(launch, 20 if n_tokens < 64 else 4)
        yield Timed(type_name, shape, n_tokens, tile, split, us)


def in_use(type_name: str, shape: str, n_tokens: int) -> tuple[Tile, bool]:
    """The tile that is launched, and whether its sums are split."""
    if n_tokens <= tiles.MAX_GEMV_TOKENS:
        return tiles.gemv_tile(form_of(QUANT_TYPES[type_name]), n_tokens), False
    tile = tiles.gemm_tile(form_of(QUANT_TYPES[type_name]), n_tokens)
    n_programs = -(-SHAPES[shape][0] // tile.rows) * -(-n_tokens // tile.tokens)
    return tile, tiles.splits_sums(n_programs, n_tokens)


def main() -> None:
    """Parses options, measures, reports."""
    experiment = Experiment("gpu_tiles", "Times of products on a GPU by the sizes of their tiles.")
    experiment.options.add_argument("--types", default="Q4_K,Q6_K", help="weight types (Q4_K,Q6_K)")
    experiment.options.add_argument("--tokens", default="1,4,16,512", help="numbers of tokens (1,4,16,512)")
    given = experiment.parse()
    if not torch.cuda.is_available():
        raise UnsupportedError("gpu_tiles needs a GPU that PyTorch sees")
    found, rows = [], []
    for name, shape, n_tokens in product(given.types.split(","), SHAPES, map(int, given.tokens.split(","))):
        experiment.say(f"{name}, {shape}, {n_tokens} tokens")
        timed = sorted(measure(name, shape, n_tokens), key=lambda one: one.us)
        found += timed
        now = [one for one in timed if (one.tile, one.split) == in_use(name, shape, n_tokens)]
        rows += [
            [name, shape, str(n_tokens), what, f"{one.us:.1f}", _name(one)]
            for what, one in (*(("in use", one) for one in now), *(("fastest", one) for one in timed[:3]))
        ]
    header = ["type", "matrix", "tokens", "", "us", "rows x tokens, warps, unroll, split"]
    experiment.show({"timed": [asdict(one) for one in found]}, Table("products", header, rows))


def _name(one: Timed) -> str:
    tile = one.tile
    return f"{tile.rows} x {tile.tokens}, {tile.n_warps}, {tile.unroll}{', split' if one.split else ''}"


if __name__ == "__main__":
    run(main)
