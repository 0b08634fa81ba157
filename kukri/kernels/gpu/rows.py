"""Launches the kernels that work on rows: RMSNorm, element-wise ops, and int8 quantization of matrix inputs.

Shapes: T tokens. Tensors are contiguous unless said otherwise, on one device, and are trusted.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from kukri.dataclass import dataclass
from kukri.kernels.gpu import row_kernels, tiles
from kukri.kernels.gpu.assembler import launch_options
from kukri.kernels.gpu.pack import PAIR


@dataclass(frozen=True, eq=False)
class Q8Rows:
    """Activations of T tokens as int8: see linear_kernels.py."""

    quants: Tensor  # int8 [T, n_pairs * 64]
    scales: Tensor  # float32 [n_pairs * 2, T]
    scaled_sums: Tensor  # float32 [n_pairs * 2, T]
    sums: Tensor  # int32 [n_pairs * 2, T]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All, in the order in which kernels take them."""
        return self.quants, self.scales, self.scaled_sums, self.sums


@dataclass(frozen=True, eq=False)
class Recipe:
    """Rows that a matrix reads, to be computed.

    `kind` is "plain" for x itself, "rms_norm" for its RMSNorm by the weight `other` and the eps a, or an
    element-wise op of x, `other`, a and b. x is float32 [T, width], a view with any row stride; `other` of an
    element-wise op has the same shape and stride.
    """

    kind: str
    x: Tensor
    other: Tensor
    a: float = 0.0
    b: float = 0.0


def quantize(x: Tensor) -> Q8Rows:
    """float32 [T, width], rows `stride(0)` apart -> int8 rows."""
    return _quantized_parts(row_kernels.quantize_q8, x)


def _quantized_parts(
    kernel: Any, x: Tensor, *more: Tensor, numbers: tuple[float, ...] = (), **constants: str
) -> Q8Rows:
    """int8 rows that a kernel makes of views like x, a program for ROW_COLUMNS of a row."""
    rows, n_columns = empty_q8(x, x.shape[1])
    kernel[len(x), triton.cdiv(n_columns, tiles.ROW_COLUMNS)](
        x,
        *more,
        *rows.tensors,
        x.stride(0),
        x.shape[1],
        n_columns,
        *numbers,
        W=tiles.ROW_COLUMNS,
        num_warps=tiles.row_warps(tiles.ROW_COLUMNS),
        **constants,
        **launch_options(x),
    )
    return rows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """float32 [rows, width] -> the same shape."""
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(x.shape[1])
    row_kernels.rms_norm[(len(x),)](
        x,
        weight,
        y,
        x.stride(0),
        x.shape[1],
        eps,
        W=width,
        num_warps=tiles.row_warps(width),
        **launch_options(x),
    )
    return y


def rms_norm_q8(x: Tensor, weight: Tensor, eps: float) -> Q8Rows:
    """The same, quantized."""
    rows, n_columns = empty_q8(x, x.shape[1])
    width = triton.next_power_of_2(n_columns)
    row_kernels.rms_norm_q8[(len(x),)](
        x,
        weight,
        *rows.tensors,
        x.stride(0),
        x.shape[1],
        n_columns,
        eps,
        W=width,
        num_warps=tiles.row_warps(width),
        **launch_options(x),
    )
    return rows


def activate(recipe: Recipe) -> Tensor:
    """An element-wise op -> float32 [T, width]."""
    x = recipe.x
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    grid = (len(x), triton.cdiv(x.shape[1], tiles.ROW_COLUMNS))
    row_kernels.activate[grid](
        x,
        recipe.other,
        y,
        x.stride(0),
        x.shape[1],
        recipe.a,
        recipe.b,
        NAME=recipe.kind,
        W=tiles.ROW_COLUMNS,
        num_warps=tiles.row_warps(tiles.ROW_COLUMNS),
        **launch_options(y),
    )
    return y


def activate_q8(recipe: Recipe) -> Q8Rows:
    """The same, quantized."""
    numbers = recipe.a, recipe.b
    return _quantized_parts(
        row_kernels.activate_q8, recipe.x, recipe.other, numbers=numbers, NAME=recipe.kind
    )


def floats(recipe: Recipe) -> Tensor:
    """The rows of a recipe, float32."""
    if recipe.kind == "rms_norm":
        return rms_norm(recipe.x, recipe.other, recipe.a)
    return recipe.x if recipe.kind == "plain" else activate(recipe)


def quantized(recipe: Recipe) -> Q8Rows:
    """The rows of a recipe, quantized by a launch of its own."""
    if recipe.kind == "rms_norm":
        return rms_norm_q8(recipe.x, recipe.other, recipe.a)
    return quantize(recipe.x) if recipe.kind == "plain" else activate_q8(recipe)


def empty_q8(x: Tensor, width: int) -> tuple[Q8Rows, int]:
    """Room for rows of `width` numbers, and the columns with padding."""
    n_columns = triton.cdiv(width, PAIR) * PAIR
    blocks = (n_columns // 32, len(x))
    quants = torch.empty((len(x), n_columns), dtype=torch.int8, device=x.device)
    scales, scaled = (torch.empty(blocks, dtype=torch.float32, device=x.device) for _ in range(2))
    return Q8Rows(quants, scales, scaled, torch.empty(blocks, dtype=torch.int32, device=x.device)), n_columns
