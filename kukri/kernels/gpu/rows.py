"""Launches the kernels that work on rows: RMSNorm, SwiGLU, and int8 quantization of matrix inputs.

Shapes: T tokens. Tensors are contiguous unless said otherwise, on one device, and are trusted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton

from kukri.kernels.gpu import row_kernels, tiles
from kukri.kernels.gpu.pack import PAIR


@dataclass(frozen=True, eq=False)
class Q8Rows:
    """Activations of T tokens as int8: see linear_kernels.py."""

    quants: torch.Tensor  # int8 [T, n_pairs * 64]
    scales: torch.Tensor  # float32 [n_pairs * 2, T]
    scaled_sums: torch.Tensor  # float32 [n_pairs * 2, T]
    sums: torch.Tensor  # int32 [n_pairs * 2, T]


@dataclass(frozen=True, eq=False)
class Recipe:
    """Rows that a matrix reads, to be computed: x itself, its RMSNorm by the weight `other`, silu(x) * other.

    x is float32 [T, width], a view with any row stride; the second factor of SwiGLU has the same.
    """

    kind: Literal["plain", "rms_norm", "silu_mul"]
    x: torch.Tensor
    other: torch.Tensor
    eps: float = 0.0


def quantize(x: torch.Tensor) -> Q8Rows:
    """float32 [T, width], rows `stride(0)` apart -> int8 rows."""
    rows, n_columns = empty_q8(x, x.shape[1])
    grid = (len(x), triton.cdiv(n_columns, tiles.ROW_COLUMNS))
    row_kernels.quantize_q8[grid](
        x,
        rows.quants,
        rows.scales,
        rows.scaled_sums,
        rows.sums,
        x.stride(0),
        x.shape[1],
        n_columns,
        W=tiles.ROW_COLUMNS,
        num_warps=tiles.row_warps(tiles.ROW_COLUMNS),
    )
    return rows


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """float32 [rows, width] -> the same shape."""
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(x.shape[1])
    row_kernels.rms_norm[(len(x),)](
        x, weight, y, x.stride(0), x.shape[1], eps, W=width, num_warps=tiles.row_warps(width)
    )
    return y


def rms_norm_q8(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Q8Rows:
    """The same, quantized."""
    rows, n_columns = empty_q8(x, x.shape[1])
    width = triton.next_power_of_2(n_columns)
    row_kernels.rms_norm_q8[(len(x),)](
        x,
        weight,
        rows.quants,
        rows.scales,
        rows.scaled_sums,
        rows.sums,
        x.stride(0),
        x.shape[1],
        n_columns,
        eps,
        W=width,
        num_warps=tiles.row_warps(width),
    )
    return rows


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of float32 [T, width] views with one row stride -> float32 [T, width]."""
    y = torch.empty(gate.shape, dtype=torch.float32, device=gate.device)
    grid = (len(gate), triton.cdiv(gate.shape[1], tiles.ROW_COLUMNS))
    row_kernels.silu_mul[grid](
        gate,
        up,
        y,
        gate.stride(0),
        gate.shape[1],
        W=tiles.ROW_COLUMNS,
        num_warps=tiles.row_warps(tiles.ROW_COLUMNS),
    )
    return y


def silu_mul_q8(gate: torch.Tensor, up: torch.Tensor) -> Q8Rows:
    """The same, quantized."""
    rows, n_columns = empty_q8(gate, gate.shape[1])
    grid = (len(gate), triton.cdiv(n_columns, tiles.ROW_COLUMNS))
    row_kernels.silu_mul_q8[grid](
        gate,
        up,
        rows.quants,
        rows.scales,
        rows.scaled_sums,
        rows.sums,
        gate.stride(0),
        gate.shape[1],
        n_columns,
        W=tiles.ROW_COLUMNS,
        num_warps=tiles.row_warps(tiles.ROW_COLUMNS),
    )
    return rows


def floats(recipe: Recipe) -> torch.Tensor:
    """The rows of a recipe, float32."""
    if recipe.kind == "rms_norm":
        return rms_norm(recipe.x, recipe.other, recipe.eps)
    return silu_mul(recipe.x, recipe.other) if recipe.kind == "silu_mul" else recipe.x


def quantized(recipe: Recipe) -> Q8Rows:
    """The rows of a recipe, quantized by a launch of its own."""
    if recipe.kind == "rms_norm":
        return rms_norm_q8(recipe.x, recipe.other, recipe.eps)
    return silu_mul_q8(recipe.x, recipe.other) if recipe.kind == "silu_mul" else quantize(recipe.x)


def empty_q8(x: torch.Tensor, width: int) -> tuple[Q8Rows, int]:
    """Room for rows of `width` numbers, and the columns with padding."""
    n_columns = triton.cdiv(width, PAIR) * PAIR
    blocks = (n_columns // 32, len(x))
    quants = torch.empty((len(x), n_columns), dtype=torch.int8, device=x.device)
    scales, scaled = (torch.empty(blocks, dtype=torch.float32, device=x.device) for _ in range(2))
    return Q8Rows(quants, scales, scaled, torch.empty(blocks, dtype=torch.int32, device=x.device)), n_columns
