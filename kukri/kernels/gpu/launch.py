"""Launches the Triton kernels on PyTorch tensors: one function for each, which picks tiles and strides.

Shapes: T tokens, S sequences, H query heads, G key/value heads, K head size. Tensors are contiguous unless
said otherwise, on one device, and their arguments are trusted: `ForwardBatch` has been checked by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import triton

from kukri.kernels.gpu import attention_kernels, linear_kernels, rope_kernels, row_kernels, tiles
from kukri.kernels.gpu.pack import PAIR, Planes, Words
from kukri.kernels.specs import AttentionSpec

CHUNK = attention_kernels.CHUNK.value  # tokens of a part of a split decode
NO_WINDOW = 1 << 30
LOG2E = 1.4426950408889634


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


@dataclass(frozen=True, eq=False)
class PagedTensors:
    """One layer's keys and values [pages, G, 16, K]: float16, e4m3 as uint8, or int8 with float16 scales
    [pages, G, 16, K / 32].

    Views with a stride between pages are taken. Without scales the keys and values stand in for them.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor
    value_scales: torch.Tensor

    @property
    def kind(self) -> str:
        """The numbers, by the name that kernels know."""
        return {torch.float16: "f16", torch.uint8: "fp8", torch.int8: "q8_0"}[self.keys.dtype]

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Page and head strides, of numbers and of scales."""
        keys, scales = self.keys, self.key_scales
        return keys.stride(0), keys.stride(1), scales.stride(0), scales.stride(1)


def to_device(parts: Iterable[Planes], n_rows: int, device: torch.device | str) -> Matrix:
    """Copies packed matrices of one type, n_rows in all, to the device, one above the other.

    `parts` may be made one by one: the host then holds one of them.
    """
    start = 0
    for part in parts:
        if not start:
            planes = [_room(plane, n_rows, device) for plane in (part.quants, part.high, part.scales)]
            first = part
        stop = start + part.n_rows
        for target, plane in zip(planes, (part.quants, part.high, part.scales), strict=True):
            (target if plane.ndim == 1 else target[start:stop]).copy_(torch.from_numpy(plane))
        start = stop
    return Matrix(first.type_name, n_rows, first.n_columns, first.n_pairs, *planes)


def _room(plane: Words, n_rows: int, device: torch.device | str) -> torch.Tensor:
    """Memory for n_rows rows of such planes; a table is one for all."""
    shape = plane.shape if plane.ndim == 1 else (n_rows, *plane.shape[1:])
    return torch.empty(shape, dtype=torch.int32, device=device)


def quantize(x: torch.Tensor) -> Q8Rows:
    """float32 [T, width], rows `stride(0)` apart -> int8 rows."""
    rows, n_columns = _empty_q8(x, x.shape[1])
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
    rows, n_columns = _empty_q8(x, x.shape[1])
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
    rows, n_columns = _empty_q8(gate, gate.shape[1])
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


def linear(
    x: Q8Rows,
    matrix: Matrix,
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> None:
    """Writes x Wᵀ (+ bias + residual) to y float32 [T, rows], a view with any row stride.

    `residual` has the shape and the strides of y. A row of y is the same to the bit for any T.
    """
    n_tokens, n_rows = len(x.quants), matrix.n_rows
    if n_tokens <= tiles.MAX_GEMV_TOKENS:
        tile = tiles.gemv_tile(matrix.type_name, triton.next_power_of_2(n_tokens))
        _gemv(x, matrix, y, bias, residual, tile, None)
        return
    tile = tiles.gemm_tile(matrix.type_name, n_tokens)
    grid = (triton.cdiv(n_rows, tile.rows), triton.cdiv(n_tokens, tile.tokens))
    linear_kernels.gemm[grid](
        *gemm_tensors(matrix, x),
        y,
        y if bias is None else bias,
        y if residual is None else residual,
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
        **product_constants(matrix, y, bias, residual),
    )


def linear_of(
    recipe: Recipe,
    matrix: Matrix,
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> Q8Rows:
    """`linear` of the rows of a recipe, quantized in the same launch -> these rows, for other matrices.

    The same bits as `quantized` and `linear`. At most MAX_GEMV_TOKENS tokens; y must not overlap the recipe.
    """
    rows, _ = _empty_q8(recipe.x, matrix.n_columns)
    tile = tiles.fused_tile(triton.next_power_of_2(len(recipe.x)))
    _gemv(rows, matrix, y, bias, residual, tile, recipe)
    return rows


def _gemv(
    rows: Q8Rows,
    matrix: Matrix,
    y: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    tile: tiles.Tile,
    recipe: Recipe | None,
) -> None:
    """The product for few tokens, of rows that are there or that a recipe makes."""
    n_tokens = len(rows.quants)
    x, other = (y, y) if recipe is None else (recipe.x, recipe.other)
    kind = "q8" if recipe is None else recipe.kind
    linear_kernels.gemv[triton.cdiv(matrix.n_rows, tile.rows), triton.cdiv(n_tokens, tile.tokens)](
        matrix.quants,
        matrix.high,
        matrix.scales,
        rows.quants.view(torch.int32),
        rows.scales,
        rows.scaled_sums,
        rows.sums,
        y,
        y if bias is None else bias,
        y if residual is None else residual,
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
        **product_constants(matrix, y, bias, residual),
    )


def gemv_of_experts(
    x: Q8Rows,
    experts: torch.Tensor,
    matrix: Matrix,
    y: torch.Tensor,
    bias: torch.Tensor | None,
    rows_each: int,
    n_experts: int,
) -> None:
    """Writes to each row of y one of x times its expert's matrix: see `experts.linear`."""
    tile, n_rows = tiles.gemv_tile(matrix.type_name, 1), y.shape[1]
    linear_kernels.gemv_of_experts[triton.cdiv(n_rows, tile.rows), len(y)](
        matrix.quants,
        matrix.high,
        matrix.scales,
        x.quants.view(torch.int32),
        x.scales,
        x.scaled_sums,
        x.sums,
        y,
        y if bias is None else bias,
        experts,
        len(x.quants),
        n_rows,
        matrix.n_pairs,
        y.stride(0),
        rows_each,
        n_experts,
        BN=tile.rows,
        num_warps=tile.n_warps,
        **product_constants(matrix, y, bias, None),
    )


def gemm_tensors(matrix: Matrix, x: Q8Rows) -> tuple[torch.Tensor, ...]:
    """A matrix and rows as `gemm` takes them."""
    planes = (matrix.quants.view(torch.uint8), matrix.high, matrix.scales)
    return (*planes, x.quants, x.scales, x.scaled_sums, x.sums)


def product_constants(
    matrix: Matrix, y: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> dict[str, Any]:
    """The constants that all products have."""
    return {
        "TYPE": matrix.type_name,
        "ASM": has_ptx(y),
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
    }


def linear_f32(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> None:
    """The same for w [rows, columns] and x [T, columns] in float32."""
    linear_kernels.gemv_f32[triton.cdiv(len(w), tiles.F32_ROWS), len(x)](
        w,
        x,
        y,
        y if bias is None else bias,
        y if residual is None else residual,
        len(w),
        w.shape[1],
        x.stride(0),
        y.stride(0),
        BN=tiles.F32_ROWS,
        BK=tiles.F32_COLUMNS,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        num_warps=4,
    )


def linear_float(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> None:
    """The same for w [rows, columns] in float16 or bfloat16 and x [T, columns] of that dtype."""
    (n_tokens, n_columns), n_rows = x.shape, len(w)
    tile = tiles.float_tile(n_tokens)
    grid = (triton.cdiv(n_rows, tile.rows), triton.cdiv(n_tokens, tile.tokens))
    linear_kernels.gemm_float[grid](
        w,
        x,
        y,
        y if bias is None else bias,
        y if residual is None else residual,
        n_tokens,
        n_rows,
        n_columns,
        y.stride(0),
        BN=tile.rows,
        BM=tile.tokens,
        BK=tiles.FLOAT_COLUMNS,
        UPCAST=w.device.type == "cpu",
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        num_warps=tile.n_warps,
        num_stages=tile.n_stages,
    )


def rope_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor] | None,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: PagedTensors,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Rotates q [T, H*K] and k [T, G*K], stores k and v -> the queries, float16 [T, H, K].

    `table` has cos and sin float32 [positions, rotary_dim / 2]; None for layers without RoPE.
    """
    q_out = torch.empty((len(q), spec.n_heads, spec.d_head), dtype=torch.float16, device=q.device)
    cos, sin = table or (q, q)
    grid = (len(q), spec.n_heads + 2 * spec.n_kv_heads)
    rope_kernels.rope_and_store[grid](
        q,
        k,
        v,
        cos,
        sin,
        positions,
        slots,
        q_out,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        *cache.strides,
        spec.n_heads,
        spec.n_kv_heads,
        K=spec.d_head,
        KW=head_width(spec),
        ROTARY=2 * cos.shape[1] if table else 0,
        KV=cache.kind,
        num_warps=1,
    )
    return q_out


def prefill_tiles(query_start: Sequence[int], spec: AttentionSpec, rows: int) -> list[tuple[int, int]]:
    """(sequence, first token) of each tile of `rows` query rows."""
    step = rows // (spec.n_heads // spec.n_kv_heads)
    return [
        (s, token)
        for s in range(len(query_start) - 1)
        for token in range(query_start[s], query_start[s + 1], step)
    ]


def attention(
    q: torch.Tensor,
    cache: PagedTensors,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    page_table: torch.Tensor,
    work: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    is_prefill: bool,
) -> torch.Tensor:
    """Causal attention of q float16 [T, H, K] over the cache, in one pass -> float32 [T, H, K].

    `work` int32 [tiles, 2] comes from `prefill_tiles`, with the rows of `tiles.attention_tile`. `sinks` [H]
    are those of the spec, on the device. `decode` is compared with this on its tiles (`is_prefill` False).
    """
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    tile = tiles.attention_tile(spec.group, spec.d_head, is_prefill)
    attention_kernels.attention[(len(work), spec.n_kv_heads)](
        q,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        out if sinks is None else sinks,
        out,
        query_start,
        context_len,
        page_table,
        work,
        spec.scale * LOG2E,
        spec.softcap or 0.0,
        spec.window or NO_WINDOW,
        *cache.strides,
        page_table.stride(0),
        spec.n_heads,
        HAS_SINKS=sinks is not None,
        **_attention_constants(spec, cache, tile),
    )
    return out


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor] | None,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: PagedTensors,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    page_table: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None = None,
    n_chunks: int = 1,
) -> torch.Tensor:
    """`rope_and_store` and `attention` of one new token a sequence, in one launch -> float32 [T, H, K].

    With n_chunks > 1, which must hold the longest context, each chunk of keys has its own program, and a
    second launch merges them. All are equal to the bit.
    """
    n_sequences, is_split, width = len(context_len), n_chunks > 1, spec.d_head
    empty = partial(torch.empty, dtype=torch.float32, device=q.device)
    out = empty((n_sequences, spec.n_heads, width))
    parts = empty((n_sequences, spec.n_heads, n_chunks, width)) if is_split else out
    tops = empty((n_sequences, spec.n_heads, n_chunks, 2)) if is_split else out
    sinks_or_none = out if sinks is None else sinks
    window = spec.window or NO_WINDOW
    cos, sin = table or (q, q)
    grid = (n_sequences, spec.n_kv_heads, n_chunks)
    attention_kernels.decode[grid](
        q,
        k,
        v,
        cos,
        sin,
        positions,
        slots,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        sinks_or_none,
        parts,
        tops,
        query_start,
        context_len,
        page_table,
        spec.scale * LOG2E,
        spec.softcap or 0.0,
        window,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        *cache.strides,
        page_table.stride(0),
        spec.n_heads,
        n_chunks,
        ROTARY=2 * cos.shape[1] if table else 0,
        HAS_SINKS=sinks is not None,
        SPLIT=is_split,
        **_attention_constants(spec, cache, tiles.attention_tile(spec.group, width, is_prefill=False)),
    )
    if is_split:
        attention_kernels.merge[n_sequences, triton.cdiv(spec.n_heads, tiles.MERGE_HEADS)](
            parts,
            tops,
            sinks_or_none,
            out,
            query_start,
            context_len,
            window,
            spec.n_heads,
            n_chunks,
            K=width,
            KW=head_width(spec),
            HB=tiles.MERGE_HEADS,
            HAS_SINKS=sinks is not None,
            num_warps=4,
        )
    return out


def _attention_constants(spec: AttentionSpec, cache: PagedTensors, tile: tiles.Tile) -> dict[str, Any]:
    return {
        "GROUP": spec.group,
        "K": spec.d_head,
        "KW": head_width(spec),
        "BM": tile.rows,
        "TILE": tile.tokens,
        "KV": cache.kind,
        "SOFTCAP": bool(spec.softcap),
        "num_warps": tile.n_warps,
        "num_stages": tile.n_stages,
        **register_options(cache.keys, attention_kernels.MAX_REGISTERS),
    }


def register_options(x: torch.Tensor, most: int | None) -> dict[str, int]:
    """The option that lets a thread have `most` registers, on NVIDIA's devices."""
    return {"maxnreg": most} if most is not None and has_ptx(x) else {}


def head_width(spec: AttentionSpec) -> int:
    """The power of two that holds a head, and is wide enough for a matrix product."""
    return max(16, 1 << (spec.d_head - 1).bit_length())


def _empty_q8(x: torch.Tensor, width: int) -> tuple[Q8Rows, int]:
    """Room for rows of `width` numbers, and the columns with padding."""
    n_columns = triton.cdiv(width, PAIR) * PAIR
    blocks = (n_columns // 32, len(x))
    quants = torch.empty((len(x), n_columns), dtype=torch.int8, device=x.device)
    scales, scaled = (torch.empty(blocks, dtype=torch.float32, device=x.device) for _ in range(2))
    return Q8Rows(quants, scales, scaled, torch.empty(blocks, dtype=torch.int32, device=x.device)), n_columns


def has_ptx(x: torch.Tensor) -> bool:
    """True on a device that runs inline PTX."""
    return x.device.type == "cuda" and torch.version.hip is None
