"""Launches RoPE with the cache, and attention, on PyTorch tensors: a function for each kernel.

Shapes: T tokens, S sequences, H query heads, G key/value heads, K head size. Tensors are contiguous unless
said otherwise, on one device, and their arguments are trusted: `ForwardBatch` has been checked by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from kukri.dataclass import dataclass
from kukri.kernels.gpu import attention_kernels, rope_kernels, tiles
from kukri.kernels.gpu.assembler import launch_options
from kukri.kernels.gpu.kv_types import kv_name
from kukri.kernels.specs import AttentionSpec

CHUNK = attention_kernels.CHUNK.value  # tokens of a part of a split decode
NO_WINDOW = 1 << 30
LOG2E = 1.4426950408889634


@dataclass(frozen=True, eq=False)
class PagedTensors:
    """One layer's keys and values [pages, G, 16, K], and the scales of types that have them: see kv_types.py.

    Views with a stride between pages are taken. Without scales the keys and values stand in for them.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor
    value_scales: Tensor

    @property
    def kind(self) -> str:
        """The numbers, by the name that kernels know."""
        return kv_name(self.keys)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All, in the order in which kernels take them."""
        return self.keys, self.values, self.key_scales, self.value_scales

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Page and head strides, of numbers and of scales."""
        keys, scales = self.keys, self.key_scales
        return keys.stride(0), keys.stride(1), scales.stride(0), scales.stride(1)


@dataclass(frozen=True, eq=False)
class NewTokens:
    """A step's tokens, before their rotation: q [T, H*K], k and v [T, G*K], float32, rows any stride apart.

    A layer that reads another's keys and values has no k and v: q stands in for them.
    `table` has cos and sin float32 [positions, rotary_dim / 2]; None for layers without RoPE.
    """

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    table: tuple[Tensor, Tensor] | None
    positions: Tensor  # int32 [T]
    slots: Tensor  # int32 [T], of the cache

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All, in the order in which kernels take them: q stands in for a table that there is not."""
        return *self._qkv, *(self.table or (self.q, self.q)), self.positions, self.slots

    @property
    def strides(self) -> tuple[int, int, int]:
        """Row strides of q, k and v."""
        q, k, v = self._qkv
        return q.stride(0), k.stride(0), v.stride(0)

    @property
    def _qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.k is None or self.v is None:
            return self.q, self.q, self.q
        return self.q, self.k, self.v

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that are rotated."""
        return 2 * self.table[0].shape[1] if self.table else 0


def rope_and_store(new: NewTokens, cache: PagedTensors, spec: AttentionSpec) -> Tensor:
    """Rotates queries and keys, stores keys and values -> the queries, float16 [T, H, K]."""
    q_out = torch.empty((len(new.q), spec.n_heads, spec.d_head), dtype=torch.float16, device=new.q.device)
    n_stored = 0 if new.k is None else spec.n_kv_heads
    grid = (len(new.q), spec.n_heads + 2 * n_stored)
    rope_kernels.rope_and_store[grid](
        *new.tensors,
        q_out,
        *cache.tensors,
        *new.strides,
        *cache.strides,
        spec.n_heads,
        n_stored,
        K=spec.d_head,
        KW=head_width(spec),
        ROTARY=new.rotary_dim,
        KV=cache.kind,
        num_warps=1,
        **launch_options(q_out),
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
    q: Tensor,
    cache: PagedTensors,
    query_start: Tensor,
    context_len: Tensor,
    page_table: Tensor,
    work: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None,
    is_prefill: bool,
) -> Tensor:
    """Causal attention of q float16 [T, H, K] over the cache, in one pass -> float32 [T, H, K].

    `work` int32 [tiles, 2] comes from `prefill_tiles`, with the rows of `tiles.attention_tile`. `sinks` [H]
    come from the spec, on the device. `decode` is compared with this on its tiles (`is_prefill` False).
    """
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    tile = tiles.attention_tile(spec.group, spec.d_head, is_prefill)
    attention_kernels.attention[(len(work), spec.n_kv_heads)](
        q,
        *cache.tensors,
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
        **_attention_constants(spec, cache, tile, is_prefill),
    )
    return out


def decode(
    new: NewTokens,
    cache: PagedTensors,
    query_start: Tensor,
    context_len: Tensor,
    page_table: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
    n_chunks: int = 1,
) -> Tensor:
    """`rope_and_store` and `attention` of one new token a sequence, in one launch -> float32 [T, H, K].

    With n_chunks > 1, which must hold the longest context, each chunk of keys has its own program, and a
    second launch merges them. All are bit-identical.
    """
    n_sequences, is_split, width = len(context_len), n_chunks > 1, spec.d_head
    empty = partial(torch.empty, dtype=torch.float32, device=new.q.device)
    out = empty((n_sequences, spec.n_heads, width))
    parts = empty((n_sequences, spec.n_heads, n_chunks, width)) if is_split else out
    tops = empty((n_sequences, spec.n_heads, n_chunks, 2)) if is_split else out
    sinks_or_none = out if sinks is None else sinks
    window = spec.window or NO_WINDOW
    grid = (n_sequences, spec.n_kv_heads, n_chunks)
    attention_kernels.decode[grid](
        *new.tensors,
        *cache.tensors,
        sinks_or_none,
        parts,
        tops,
        query_start,
        context_len,
        page_table,
        spec.scale * LOG2E,
        spec.softcap or 0.0,
        window,
        *new.strides,
        *cache.strides,
        page_table.stride(0),
        spec.n_heads,
        n_chunks,
        ROTARY=new.rotary_dim,
        HAS_SINKS=sinks is not None,
        SPLIT=is_split,
        STORES=new.k is not None,
        **_attention_constants(
            spec, cache, tiles.attention_tile(spec.group, width, is_prefill=False), is_prefill=False
        ),
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
            **launch_options(out),
        )
    return out


def _attention_constants(
    spec: AttentionSpec, cache: PagedTensors, tile: tiles.Tile, is_prefill: bool
) -> dict[str, Any]:
    most = attention_kernels.max_registers(cache.kind, spec.d_head, is_prefill)
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
        **launch_options(cache.keys, most),
    }


def head_width(spec: AttentionSpec) -> int:
    """The power of two that holds a head, and is wide enough for a matrix product."""
    return max(16, 1 << (spec.d_head - 1).bit_length())
