"""Launches the prototype of recurrent layers in chunks: see `delta_chunks_kernel.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from benchmarks.prototypes import delta_chunks_kernel
from kukri.kernels.gpu import tiles
from kukri.kernels.gpu.assembler import has_ptx

CHUNK: int = delta_chunks_kernel.CHUNK.value


@dataclass(frozen=True, eq=False)
class ChunkedState:
    """States [slots, H, K, P] before the open chunks, and what came since, [slots, CHUNK, width of each]."""

    states: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor

    @classmethod
    def empty(cls, n_slots: int, n_groups: int, n_heads: int, d_state: int, d_head: int) -> ChunkedState:
        """Room for n_slots sequences, not written to."""
        widths = (n_groups * d_state, n_heads * d_head, n_heads, n_heads)
        states = torch.empty((n_slots, n_heads, d_state, d_head), dtype=torch.float32)
        return cls(states, *(torch.empty((n_slots, CHUNK, n), dtype=torch.float32) for n in widths))

    def keep(
        self, inputs: tuple[Tensor, ...], start: list[int], context: list[int], slots: list[int]
    ) -> None:
        """Keeps the inputs of the chunks that are open after a step."""
        for s, (n, slot) in enumerate(zip(context, slots, strict=True)):
            n_open = n % CHUNK
            n_new = min(n_open, start[s + 1] - start[s])
            for kept, new in zip((self.k, self.v, self.decay, self.beta), inputs, strict=True):
                kept[slot, n_open - n_new : n_open] = new[start[s + 1] - n_new : start[s + 1]]


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, a: Tensor, dt_bias: Tensor,
    state: ChunkedState, start: list[int], context: list[int], slots: list[int],
) -> Tensor:  # fmt: skip
    """`recurrent.delta_rule` in chunks; sequence s has rows start[s] … start[s + 1] - 1 of the step and
    context[s] tokens after it.
    """
    n_heads, d_state, d_head = state.states.shape[1:]
    y = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    tensors = (torch.tensor(each, dtype=torch.int32, device=v.device) for each in (start, context, slots))
    kept = (state.k, state.v, state.decay, state.beta)
    grid = (len(slots), n_heads, triton.cdiv(d_head, tiles.STATE_COLUMNS))
    delta_chunks_kernel.delta_chunks[grid](
        q,
        k,
        v,
        decay,
        beta,
        a,
        dt_bias,
        state.states,
        *kept,
        y,
        *tensors,
        *(each.stride(0) for each in (q, k, v, decay, beta)),
        n_heads,
        k.shape[1] // d_state,
        K=d_state,
        KB=delta_chunks_kernel.STATE_ROWS,
        P=d_head,
        PB=tiles.STATE_COLUMNS,
        num_warps=4,
        num_stages=1,
        **({"maxnreg": delta_chunks_kernel.MAX_REGISTERS} if has_ptx(y) else {}),
    )
    state.keep((k, v, decay, beta), start, context, slots)
    return y
