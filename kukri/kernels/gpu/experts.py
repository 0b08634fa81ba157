"""Launches the kernels of mixtures of experts: routes, products with each row's expert, sums.

T tokens use up to n_used of E experts each: row t * n_used + j belongs to token t and its j-th expert, by
their numbers. Nothing here reads the device, so that a graph may record it.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kukri.kernels.expert_choice import Routes
from kukri.kernels.gpu import expert_kernels, linear_kernels, products, tiles
from kukri.kernels.gpu.assembler import launch_options
from kukri.kernels.gpu.pack import Matrix
from kukri.kernels.gpu.products import Output, RowsByExpert
from kukri.kernels.gpu.rows import Q8Rows
from kukri.kernels.specs import Routing


def route(logits: Tensor, routing: Routing) -> Routes:
    """The experts of logits float32 [T, E]."""
    n_experts = routing.n_experts
    weights = torch.empty((len(logits), n_experts), dtype=torch.float32, device=logits.device)
    experts = torch.empty((len(logits), routing.n_used), dtype=torch.int32, device=logits.device)
    expert_kernels.route[(len(logits),)](
        logits,
        weights,
        experts,
        n_experts,
        logits.stride(0),
        N_USED=routing.n_used,
        E=triton.next_power_of_2(n_experts),
        NORMALIZED=routing.normalized,
        num_warps=1,
        **launch_options(logits),
    )
    return Routes(weights, experts)


def linear(x: Q8Rows, routes: Routes, matrix: Matrix, bias: Tensor | None) -> Tensor:
    """x times the transposed matrix of each row's expert -> float32 [T * n_used, rows of an expert].

    x has T rows, or T * n_used. `matrix` has the experts' one above the other, `bias` [E * rows of one] too.
    A row is bit-identical for any T. Rows without an expert are undefined.
    """
    out, n_experts = _output(routes, matrix.n_rows, bias)
    if len(routes.experts) <= tiles.MAX_EXPERT_GEMV_TOKENS:
        _gemv(x, routes.experts, matrix, out)
    else:
        tile = tiles.expert_tile(len(out.y) // n_experts)
        products.gemm(x, matrix, out, tile, _groups(routes.experts, n_experts, tile.tokens))
    return out.y


def linear_float(x: Tensor, routes: Routes, w: Tensor, bias: Tensor | None) -> Tensor:
    """The same for w [E * rows of one, columns] in float16 or bfloat16, and contiguous x of that dtype."""
    out, n_experts = _output(routes, len(w), bias)
    tile = tiles.float_tile(len(out.y) // n_experts)
    products.gemm_float(x, w, out, tile, _groups(routes.experts, n_experts, tile.tokens))
    return out.y


def linear_f32(x: Tensor, routes: Routes, w: Tensor, bias: Tensor | None) -> Tensor:
    """The same product in float32: a GEMV for each row, for any T."""
    out, _ = _output(routes, len(w), bias)
    products.linear_f32(x, w, out, routes.experts)
    return out.y


def _output(routes: Routes, n_rows: int, bias: Tensor | None) -> tuple[Output, int]:
    """Room for a row for each token and expert, of matrices with n_rows in all; the number of experts."""
    (n_tokens, n_used), n_experts = routes.experts.shape, routes.weights.shape[1]
    shape, device = (n_tokens * n_used, n_rows // n_experts), routes.experts.device
    return Output(torch.empty(shape, dtype=torch.float32, device=device), bias), n_experts


def _gemv(x: Q8Rows, experts: Tensor, matrix: Matrix, out: Output) -> None:
    """The product for few tokens: a GEMV for each row."""
    n_all, n_rows = out.y.shape
    tile = tiles.gemv_tile(matrix.form, 1)
    linear_kernels.gemv_of_experts[triton.cdiv(n_rows, tile.rows), n_all](
        *products.gemv_tensors(matrix, x),
        *out.tensors[:2],
        experts,
        len(x.quants),
        n_rows,
        matrix.n_pairs,
        out.y.stride(0),
        n_all // len(x.quants),
        BN=tile.rows,
        UNROLL=tile.unroll,
        num_warps=tile.n_warps,
        **launch_options(out.y),
        **products.product_constants(matrix, out),
    )


def _groups(experts: Tensor, n_experts: int, n_rows: int) -> RowsByExpert:
    """Tiles of at most n_rows rows of one expert each.

    As many tiles as any routes need; those left over are empty.
    """
    device = experts.device
    by_expert, order = torch.sort(experts.flatten(), stable=True)
    starts = torch.searchsorted(by_expert, torch.arange(n_experts + 1, dtype=torch.int32, device=device))
    n_tiles = (starts.diff() + (n_rows - 1)) // n_rows
    ends = n_tiles.cumsum(0)
    tile = torch.arange(len(order) // n_rows + min(n_experts, len(order)), device=device)
    expert = torch.searchsorted(ends, tile, right=True)
    is_used, expert = expert < n_experts, expert.clamp(max=n_experts - 1)
    first = starts[expert] + (tile - ends[expert] + n_tiles[expert]) * n_rows
    end = torch.minimum(first + n_rows, starts[expert + 1])
    work = torch.stack([expert, first, torch.where(is_used, end, first)], 1)
    return RowsByExpert(order.to(torch.int32), work.to(torch.int32))


def combine(x: Tensor, routes: Routes, residual: Tensor | None) -> Tensor:
    """The sum over its experts of each token's rows of x [T * n_used, D], weighted -> float32 [T, D]."""
    n_tokens, n_used = routes.experts.shape
    y = torch.empty((n_tokens, x.shape[1]), dtype=torch.float32, device=x.device)
    expert_kernels.combine[n_tokens, triton.cdiv(x.shape[1], tiles.ROW_COLUMNS)](
        x,
        routes.weights,
        routes.experts,
        y if residual is None else residual,
        y,
        x.shape[1],
        routes.weights.shape[1],
        N_USED=n_used,
        W=tiles.ROW_COLUMNS,
        HAS_RESIDUAL=residual is not None,
        num_warps=tiles.row_warps(tiles.ROW_COLUMNS),
        **launch_options(x),
    )
    return y
