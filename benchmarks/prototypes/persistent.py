"""Launches the prototype of a persistent kernel: see `layer_kernel.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from benchmarks.prototypes import layer_kernel
from kukri.kernels.gpu import attention, tiles
from kukri.kernels.gpu.assembler import has_ptx
from kukri.kernels.gpu.pack import PAIR, Matrix
from kukri.kernels.specs import AttentionSpec


@dataclass(frozen=True, eq=False)
class LayerMatrices:
    """A layer's matrices, all of one type, and the weights of its norms, float32 [D]."""

    norm: Tensor
    qkv: Matrix
    out: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix


def layer(
    x: Tensor,
    matrices: LayerMatrices,
    eps: float,
    table: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    cache: attention.PagedTensors,
    query_start: Tensor,
    context_len: Tensor,
    page_table: Tensor,
    spec: AttentionSpec,
    n_programs: int,
) -> Tensor:
    """x float32 [T, D], a new token of each of at most 8 sequences, after a layer -> float32 [T, D].

    Of devices n_programs is at most what they run at once; under the interpreter it is 1.
    """
    (n_tokens, d_model), d_ffn = x.shape, matrices.down.n_columns
    widest = triton.cdiv(max(d_model, d_ffn, spec.n_heads * spec.d_head), PAIR) * PAIR
    m = triton.next_power_of_2(n_tokens)
    tile, keys = tiles.fused_tile(m), tiles.attention_tile(spec.group, spec.d_head, is_prefill=False)
    planes = (matrices.qkv, matrices.out, matrices.gate_up, matrices.down)

    def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    y = room(n_tokens, d_model)
    options: dict[str, int] = {"launch_cooperative_grid": True} if x.device.type == "cuda" else {}
    options |= {"maxnreg": layer_kernel.MAX_REGISTERS} if has_ptx(x) else {}
    layer_kernel.layer[(n_programs,)](
        x,
        matrices.norm,
        matrices.mlp_norm,
        *(plane for one in planes for plane in (one.quants, one.high, one.scales)),
        room(n_tokens, widest // 4, dtype=torch.int32),
        *(room(widest // 32, n_tokens) for _ in range(2)),
        room(widest // 32, n_tokens, dtype=torch.int32),
        room(n_tokens, matrices.qkv.n_rows),
        room(n_tokens, spec.n_heads * spec.d_head),
        room(n_tokens, d_model),
        room(n_tokens, matrices.gate_up.n_rows),
        y,
        *table,
        positions,
        slots,
        *cache.tensors,
        query_start,
        context_len,
        page_table,
        torch.zeros(1, dtype=torch.int32, device=x.device),
        eps,
        spec.scale * attention.LOG2E,
        spec.window or attention.NO_WINDOW,
        *cache.strides,
        page_table.stride(0),
        n_tokens,
        d_model,
        d_ffn,
        spec.n_kv_heads,
        TYPE=matrices.qkv.form,
        GROUP=spec.group,
        K=spec.d_head,
        KW=attention.head_width(spec),
        BM=keys.rows,
        TILE=keys.tokens,
        ROTARY=2 * table[0].shape[1],
        KV=cache.kind,
        M=m,
        BN=tile.rows,
        W=tiles.fused_columns(d_model, m, is_norm=True),
        W_PART=tiles.fused_columns(d_ffn, m, is_norm=False),
        ASM=has_ptx(x),
        num_warps=tile.n_warps,
        **options,
    )
    return y
