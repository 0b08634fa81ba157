"""Launches the kernels of recurrent layers on PyTorch tensors, and gives what they write [T, …], float32.

Rows of inputs may lie any stride apart. States are written in place: see `recurrent_kernels.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from kukri.kernels.gpu import recurrent_kernels, tiles
from kukri.kernels.gpu.assembler import launch_options
from kukri.kernels.pytorch.step import DeviceBatch
from kukri.kernels.specs import ConvSpec, DeltaSpec, ScanSpec
from kukri.kernels.weight_handles import Vector

Vectors = Callable[[Vector], Tensor]  # gives a constant on the device


def conv(x: Tensor, states: Tensor, spec: ConvSpec, vector: Vectors, batch: DeviceBatch) -> Tensor:
    """A causal convolution of x [T, C]; states [slots, K - 1, C]."""
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    width = x.shape[1]
    recurrent_kernels.conv[batch.host.n_sequences, triton.cdiv(width, tiles.CONV_COLUMNS)](
        x,
        vector(spec.taps),
        y if spec.bias is None else vector(spec.bias),
        states,
        y,
        *_sequences(batch),
        x.stride(0),
        width,
        N_TAPS=spec.n_taps,
        TOKENS=1 if batch.is_decode else tiles.CONV_TOKENS,
        W=tiles.CONV_COLUMNS,
        HAS_BIAS=spec.bias is not None,
        IS_ACTIVATED=spec.is_activated,
        num_warps=4,
        **launch_options(x),
    )
    return y


def scan(
    x: Tensor, b: Tensor, c: Tensor, dt: Tensor, states: Tensor, spec: ScanSpec, vector: Vectors,
    batch: DeviceBatch,
) -> Tensor:  # fmt: skip
    """The state space of `Ops.scan`; states [slots, H, N, P]."""
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    recurrent_kernels.scan[_grid(batch, spec.n_heads, spec.d_head)](
        x,
        b,
        c,
        dt,
        *(vector(each) for each in (spec.a, spec.d, spec.dt_bias)),
        states,
        y,
        *_sequences(batch),
        *(each.stride(0) for each in (x, b, c, dt)),
        *spec.limits,
        spec.n_heads,
        spec.n_heads // spec.n_groups,
        N=spec.d_state,
        NW=triton.next_power_of_2(spec.d_state),
        P=spec.d_head,
        PB=tiles.STATE_COLUMNS,
        num_warps=4,
        **launch_options(x),
    )
    return y


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, spec: DeltaSpec,
    vector: Vectors, batch: DeviceBatch,
) -> Tensor:  # fmt: skip
    """The gated delta rule of `Ops.delta_rule`; states [slots, H, K, P]."""
    y = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    recurrent_kernels.delta_rule[_grid(batch, spec.n_heads, spec.d_head)](
        q,
        k,
        v,
        decay,
        beta,
        vector(spec.a),
        vector(spec.dt_bias),
        states,
        y,
        *_sequences(batch),
        *(each.stride(0) for each in (q, k, v, decay, beta)),
        spec.n_heads,
        spec.n_groups,
        K=spec.d_state,
        KW=triton.next_power_of_2(spec.d_state),
        P=spec.d_head,
        PB=tiles.STATE_COLUMNS,
        ARE_TILED=spec.are_tiled,
        num_warps=4,
        **launch_options(q),
    )
    return y


def _grid(batch: DeviceBatch, n_heads: int, d_head: int) -> tuple[int, int, int]:
    return batch.host.n_sequences, n_heads, triton.cdiv(d_head, tiles.STATE_COLUMNS)


def _sequences(batch: DeviceBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return batch.query_start, batch.context_len, batch.state_slots, batch.state_saves
