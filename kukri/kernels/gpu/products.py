"""Launches the products with matrices: of int8 rows with packed ones, and of floats.

Shapes: T tokens. Tensors are contiguous unless said otherwise, on one device, and are trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from kukri.dataclass import dataclass
from kukri.host.mapped_files import release_pages
from kukri.kernels.gpu import linear_kernels, tiles
from kukri.kernels.gpu.assembler import has_ptx, launch_options
from kukri.kernels.gpu.pack import PAIR, Matrix, pack
from kukri.kernels.gpu.rows import Q8Rows, Recipe, empty_q8
from kukri.kernels.weight_handles import Weight


@dataclass(frozen=True, eq=False)
class Output:
    """The rows y float32 [T, rows] that a product writes, a view with any row stride, and what it adds to
    them: `bias` [rows], and `residual`, of the shape and the strides of y.
    """

    y: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None

    def columns(self, start: int, stop: int) -> Output:
        """A part of all."""
        part = slice(start, stop)
        bias = None if self.bias is None else self.bias[part]
        return Output(self.y[:, part], bias, None if self.residual is None else self.residual[:, part])

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """y, bias and residual as kernels take them: y stands in for what there is not."""
        y, bias, residual = self.y, self.bias, self.residual
        return y, y if bias is None else bias, y if residual is None else residual

    @property
    def constants(self) -> dict[str, bool]:
        """The constants that say which of them there are."""
        return {"HAS_BIAS": self.bias is not None, "HAS_RESIDUAL": self.residual is not None}


@dataclass(frozen=True, eq=False)
class RowsByExpert:
    """Rows of an output that have an expert each, in tiles of a single expert's rows."""

    order: Tensor  # int32 [rows]: their numbers, by expert
    work: Tensor  # int32 [tiles, 3]: each tile's expert, first and end in `order`


def to_device(weights: Sequence[Weight], device: torch.device | str) -> Matrix:
    """Packs matrices of one type and columns, and copies them to the device, one above the other.

    The host holds some rows of one at a time: pages of a mapped file are given back after them.
    """
    n_rows, start = sum(weight.shape[0] for weight in weights), 0
    planes: list[Tensor] = []
    for weight in weights:
        for part in pack(weight, device):
            planes = planes or [_room(plane, n_rows) for plane in part.planes]
            stop = start + part.n_rows
            for target, plane in zip(planes, part.planes, strict=True):
                (target if plane.ndim == 1 else target[start:stop]).copy_(plane)
            start = stop
        release_pages(weight.stored)
    return Matrix(part.form, n_rows, part.n_columns, *planes)


def _room(plane: Tensor, n_rows: int) -> Tensor:
    """Memory for n_rows rows of such planes; a table is one for all."""
    return torch.empty_like(plane) if plane.ndim == 1 else plane.new_empty((n_rows, *plane.shape[1:]))


def linear(x: Q8Rows, matrix: Matrix, out: Output) -> None:
    """Writes x Wᵀ. A row of the result is bit-identical for any T."""
    n_tokens = len(x.quants)
    if n_tokens <= tiles.MAX_GEMV_TOKENS:
        tile = tiles.gemv_tile(matrix.form, triton.next_power_of_2(n_tokens))
        gemv(x, matrix, out, tile)
    else:
        gemm(x, matrix, out, tiles.gemm_tile(matrix.form, n_tokens))


def gemm(
    x: Q8Rows, matrix: Matrix, out: Output, tile: tiles.Tile, groups: RowsByExpert | None = None
) -> None:
    """The product for many tokens. With groups, `matrix` has the matrices of all experts, one above the
    other, and the bias is [E * rows]; each row of x has as many rows of y, one after another.
    """
    y, n_tokens = out.y, len(x.quants)
    grid, order, work = _grid(y, tile, groups)
    is_split = groups is None and tiles.splits_sums(grid[0] * grid[1], n_tokens)
    whole, lanes = out, tiles.LANES if is_split else 1
    if is_split:
        out = Output(torch.empty((lanes, *y.shape), dtype=torch.float32, device=y.device))
    linear_kernels.gemm[*grid, lanes](
        *gemm_tensors(matrix, x),
        *out.tensors,
        order,
        work,
        n_tokens,
        y.shape[1],
        matrix.n_pairs,
        out.y.stride(-2),
        len(y) // n_tokens,
        EXPERTS=groups is not None,
        SPLIT=is_split,
        UNROLL=tile.unroll,
        **_tile_constants(tile),
        **launch_options(y, None if groups is None else linear_kernels.MAX_REGISTERS),
        **product_constants(matrix, out),
    )
    if is_split:
        _add_lanes(out.y, whole)


def _add_lanes(parts: Tensor, out: Output) -> None:
    """Writes the sum of float32 [LANES, T, rows] over its lanes, in order."""
    n_tokens, n_rows = out.y.shape
    linear_kernels.add_lanes[triton.cdiv(n_rows, tiles.LANE_ROWS), n_tokens](
        parts,
        *out.tensors,
        n_tokens,
        n_rows,
        out.y.stride(0),
        W=tiles.LANE_ROWS,
        num_warps=4,
        **launch_options(parts),
        **out.constants,
    )


def _grid(y: Tensor, tile: tiles.Tile, groups: RowsByExpert | None) -> tuple[tuple[int, int], Tensor, Tensor]:
    """The programs of a GEMM, and the order and work of groups, for which y stands in."""
    n = triton.cdiv(y.shape[1], tile.rows)
    if groups is None:
        return (n, triton.cdiv(len(y), tile.tokens)), y, y
    return (n, len(groups.work)), groups.order, groups.work


def _tile_constants(tile: tiles.Tile) -> dict[str, int]:
    return {"BN": tile.rows, "BM": tile.tokens, "num_warps": tile.n_warps, "num_stages": tile.n_stages}


def linear_of(recipe: Recipe, matrix: Matrix, out: Output) -> Q8Rows:
    """`linear` of the rows of a recipe, quantized in the same launch -> these rows, for other matrices.

    The same bits as `quantized` and `linear`. At most MAX_GEMV_TOKENS tokens; y must not overlap the recipe.
    """
    rows, _ = empty_q8(recipe.x, matrix.n_columns)
    gemv(rows, matrix, out, tiles.fused_tile(triton.next_power_of_2(len(recipe.x))), recipe)
    return rows


def gemv(rows: Q8Rows, matrix: Matrix, out: Output, tile: tiles.Tile, recipe: Recipe | None = None) -> None:
    """The product for few tokens, of rows that are there or that a recipe makes."""
    n_tokens, y = len(rows.quants), out.y
    x, other = (y, y) if recipe is None else (recipe.x, recipe.other)
    kind = "q8" if recipe is None else recipe.kind
    linear_kernels.gemv[triton.cdiv(matrix.n_rows, tile.rows), triton.cdiv(n_tokens, tile.tokens)](
        *gemv_tensors(matrix, rows),
        *out.tensors,
        x,
        other,
        n_tokens,
        matrix.n_rows,
        matrix.n_pairs,
        y.stride(0),
        x.stride(0),
        matrix.n_columns,
        0.0 if recipe is None else recipe.a,
        0.0 if recipe is None else recipe.b,
        M=tile.tokens,
        BN=tile.rows,
        UNROLL=tile.unroll,
        INPUT=kind,
        W=0 if kind == "q8" else tiles.fused_columns(matrix.n_pairs * PAIR, tile.tokens, kind == "rms_norm"),
        num_warps=tile.n_warps,
        **launch_options(y, None if recipe is None else linear_kernels.MAX_REGISTERS),
        **product_constants(matrix, out),
    )


def gemv_tensors(matrix: Matrix, x: Q8Rows) -> tuple[Tensor, ...]:
    """A matrix and rows as `gemv` takes them."""
    quants, *rest = x.tensors
    return matrix.quants, matrix.high, matrix.scales, quants.view(torch.int32), *rest


def gemm_tensors(matrix: Matrix, x: Q8Rows) -> tuple[Tensor, ...]:
    """A matrix and rows as `gemm` takes them."""
    return matrix.quants.view(torch.uint8), matrix.high, matrix.scales, *x.tensors


def product_constants(matrix: Matrix, out: Output) -> dict[str, Any]:
    """The constants that all products with packed matrices have."""
    return {"TYPE": matrix.form, "ASM": has_ptx(out.y), **out.constants}


def linear_f32(x: Tensor, w: Tensor, out: Output, experts: Tensor | None = None) -> None:
    """The same for w [rows, columns] and x [T, columns] in float32, for any T.

    With `experts` int32 [rows of y], each row of y has one, -1 if none, as in `gemm`.
    """
    y = out.y
    linear_kernels.gemv_f32[triton.cdiv(y.shape[1], tiles.F32_ROWS), len(y)](
        w,
        x,
        *out.tensors,
        y if experts is None else experts,
        y.shape[1],
        w.shape[1],
        x.stride(0),
        y.stride(0),
        len(y) // len(x),
        BN=tiles.F32_ROWS,
        BK=tiles.F32_COLUMNS,
        EXPERTS=experts is not None,
        num_warps=4,
        **launch_options(y),
        **out.constants,
    )


def linear_float(x: Tensor, w: Tensor, out: Output) -> None:
    """The same for w [rows, columns] in float16 or bfloat16 and x [T, columns] of that dtype."""
    gemm_float(x, w, out, tiles.float_tile(len(x)))


def gemm_float(
    x: Tensor, w: Tensor, out: Output, tile: tiles.Tile, groups: RowsByExpert | None = None
) -> None:
    """The same by tiles, with experts as in `gemm`."""
    y = out.y
    grid, order, work = _grid(y, tile, groups)
    linear_kernels.gemm_float[grid](
        w,
        x,
        *out.tensors,
        order,
        work,
        len(x),
        y.shape[1],
        w.shape[1],
        y.stride(0),
        len(y) // len(x),
        BK=tiles.FLOAT_COLUMNS,
        UPCAST=w.device.type == "cpu",
        EXPERTS=groups is not None,
        **launch_options(y),
        **_tile_constants(tile),
        **out.constants,
    )
