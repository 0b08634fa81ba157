"""Launches the products with matrices: of int8 rows with packed ones, and of floats.

Shapes: T tokens. Tensors are contiguous unless said otherwise, on one device, and are trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from kukri.kernels.constants import Weight
from kukri.kernels.gpu import linear_kernels, tiles
from kukri.kernels.gpu.assembler import has_ptx, register_options
from kukri.kernels.gpu.pack import PAIR, Words, pack
from kukri.kernels.gpu.rows import Q8Rows, Recipe, empty_q8
from kukri.mapped_files import release_pages


@dataclass(frozen=True, eq=False)
class Matrix:
    """A packed matrix on the device."""

    type_name: str
    n_rows: int
    n_columns: int
    n_pairs: int
    quants: torch.Tensor  # int32 [rows, n_pairs, 8 or 16]
    high: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, eq=False)
class Output:
    """The rows y float32 [T, rows] that a product writes, a view with any row stride, and what it adds to
    them: `bias` [rows], and `residual`, of the shape and the strides of y.
    """

    y: torch.Tensor
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None

    def columns(self, start: int, stop: int) -> Output:
        """A part of all."""
        part = slice(start, stop)
        bias = None if self.bias is None else self.bias[part]
        return Output(self.y[:, part], bias, None if self.residual is None else self.residual[:, part])

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """y, bias and residual as kernels take them: y stands in for what there is not."""
        y, bias, residual = self.y, self.bias, self.residual
        return y, y if bias is None else bias, y if residual is None else residual

    @property
    def constants(self) -> dict[str, bool]:
        """The constants that say which of them there are."""
        return {"HAS_BIAS": self.bias is not None, "HAS_RESIDUAL": self.residual is not None}


def to_device(weights: Sequence[Weight], device: torch.device | str) -> Matrix:
    """Packs matrices of one type and columns, and copies them to the device, one above the other.

    The host holds some rows of one at a time: pages of a mapped file are given back after them.
    """
    n_rows, start = sum(weight.shape[0] for weight in weights), 0
    planes: list[torch.Tensor] = []
    for weight in weights:
        for part in pack(weight):
            if not planes:
                planes = [_room(plane, n_rows, device) for plane in (part.quants, part.high, part.scales)]
                first = part
            stop = start + part.n_rows
            for target, plane in zip(planes, (part.quants, part.high, part.scales), strict=True):
                (target if plane.ndim == 1 else target[start:stop]).copy_(torch.from_numpy(plane))
            start = stop
        release_pages(weight.stored)
    return Matrix(first.type_name, n_rows, first.n_columns, first.n_pairs, *planes)


def _room(plane: Words, n_rows: int, device: torch.device | str) -> torch.Tensor:
    """Memory for n_rows rows of such planes; a table is one for all."""
    shape = plane.shape if plane.ndim == 1 else (n_rows, *plane.shape[1:])
    return torch.empty(shape, dtype=torch.int32, device=device)


def linear(x: Q8Rows, matrix: Matrix, out: Output) -> None:
    """Writes x Wᵀ. A row of the result is the same to the bit for any T."""
    n_tokens, n_rows = len(x.quants), matrix.n_rows
    if n_tokens <= tiles.MAX_GEMV_TOKENS:
        tile = tiles.gemv_tile(matrix.type_name, triton.next_power_of_2(n_tokens))
        _gemv(x, matrix, out, tile, None)
        return
    tile = tiles.gemm_tile(matrix.type_name, n_tokens)
    grid = (triton.cdiv(n_rows, tile.rows), triton.cdiv(n_tokens, tile.tokens))
    y = out.y
    linear_kernels.gemm[grid](
        *gemm_tensors(matrix, x),
        *out.tensors,
        y,
        y,
        n_tokens,
        n_rows,
        matrix.n_pairs,
        y.stride(0),
        1,
        BN=tile.rows,
        BM=tile.tokens,
        EXPERTS=False,
        num_warps=tile.n_warps,
        num_stages=tile.n_stages,
        **product_constants(matrix, out),
    )


def linear_of(recipe: Recipe, matrix: Matrix, out: Output) -> Q8Rows:
    """`linear` of the rows of a recipe, quantized in the same launch -> these rows, for other matrices.

    The same bits as `quantized` and `linear`. At most MAX_GEMV_TOKENS tokens; y must not overlap the recipe.
    """
    rows, _ = empty_q8(recipe.x, matrix.n_columns)
    _gemv(rows, matrix, out, tiles.fused_tile(triton.next_power_of_2(len(recipe.x))), recipe)
    return rows


def _gemv(rows: Q8Rows, matrix: Matrix, out: Output, tile: tiles.Tile, recipe: Recipe | None) -> None:
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
        0.0 if recipe is None else recipe.eps,
        M=tile.tokens,
        BN=tile.rows,
        INPUT=kind,
        W=0 if kind == "q8" else tiles.fused_columns(matrix.n_pairs * PAIR, tile.tokens, kind == "rms_norm"),
        num_warps=tile.n_warps,
        **register_options(y, None if recipe is None else linear_kernels.MAX_REGISTERS),
        **product_constants(matrix, out),
    )


def gemv_tensors(matrix: Matrix, x: Q8Rows) -> tuple[torch.Tensor, ...]:
    """A matrix and rows as `gemv` takes them."""
    quants, *rest = x.tensors
    return matrix.quants, matrix.high, matrix.scales, quants.view(torch.int32), *rest


def gemm_tensors(matrix: Matrix, x: Q8Rows) -> tuple[torch.Tensor, ...]:
    """A matrix and rows as `gemm` takes them."""
    return matrix.quants.view(torch.uint8), matrix.high, matrix.scales, *x.tensors


def product_constants(matrix: Matrix, out: Output) -> dict[str, Any]:
    """The constants that all products with packed matrices have."""
    return {"TYPE": matrix.type_name, "ASM": has_ptx(out.y), **out.constants}


def linear_f32(x: torch.Tensor, w: torch.Tensor, out: Output) -> None:
    """The same for w [rows, columns] and x [T, columns] in float32."""
    linear_kernels.gemv_f32[triton.cdiv(len(w), tiles.F32_ROWS), len(x)](
        w,
        x,
        *out.tensors,
        len(w),
        w.shape[1],
        x.stride(0),
        out.y.stride(0),
        BN=tiles.F32_ROWS,
        BK=tiles.F32_COLUMNS,
        num_warps=4,
        **out.constants,
    )


def linear_float(x: torch.Tensor, w: torch.Tensor, out: Output) -> None:
    """The same for w [rows, columns] in float16 or bfloat16 and x [T, columns] of that dtype."""
    (n_tokens, n_columns), n_rows = x.shape, len(w)
    tile = tiles.float_tile(n_tokens)
    grid = (triton.cdiv(n_rows, tile.rows), triton.cdiv(n_tokens, tile.tokens))
    linear_kernels.gemm_float[grid](
        w,
        x,
        *out.tensors,
        n_tokens,
        n_rows,
        n_columns,
        out.y.stride(0),
        BN=tile.rows,
        BM=tile.tokens,
        BK=tiles.FLOAT_COLUMNS,
        UPCAST=w.device.type == "cpu",
        num_warps=tile.n_warps,
        num_stages=tile.n_stages,
        **out.constants,
    )
