"""The tape on PyTorch's autograd, on the device that the LLM runs on: see `kukri.interp.tapes.tape`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kukri.interp.hooks.attention import keys_ahead, seen_keys
from kukri.interp.tapes.tape import TextRows
from kukri.kernels.arrays import FloatArray
from kukri.kernels.cache import CacheLayout
from kukri.kernels.host_step import StateStep
from kukri.kernels.op_set import Program
from kukri.kernels.pytorch.cache import TensorCache
from kukri.kernels.pytorch.constants import DeviceConstants
from kukri.kernels.pytorch.ops import TorchOps, softmax
from kukri.kernels.specs import AttentionSpec
from kukri.kernels.taps import tap_name


class TorchTape(TorchOps):
    """The ops of the torch backend with gradients, for whole texts, which read and write no cache."""

    def __init__(
        self, constants: DeviceConstants, layout: CacheLayout, given: Mapping[str, FloatArray] | None = None
    ) -> None:
        """`constants` are in float32; `given` as in Tape."""
        super().__init__(constants, TensorCache(layout, 0, 0, "f32", constants.device))
        self.matrices, self._given = constants, given or {}
        self._tapped: dict[str, Tensor] = {}
        self._kv: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: others may read them

    def run(self, program: Program, batch: TextRows) -> Tensor:
        """The program's result, [rows, width]."""
        device = self.constants.device
        positions = torch.from_numpy(batch.positions).to(device)
        rotated_by = batch.positions if batch.rope_positions is None else batch.rope_positions
        on_device = SimpleNamespace(
            host=batch,
            token_ids=torch.from_numpy(batch.token_ids).to(device),
            token_types=torch.from_numpy(batch.token_types).to(device),
            positions=positions,
            rope_positions=torch.from_numpy(rotated_by).to(device),
            max_position=int(batch.positions.max()),
        )
        result: Tensor = program(self, on_device)
        return result

    def backward(self, result: Tensor, grad: FloatArray) -> None:
        """Fills in the gradients, of sum(result * grad)."""
        result.backward(torch.from_numpy(grad).to(result.device))  # type: ignore[no-untyped-call]

    def values(self, result: Tensor) -> FloatArray:
        """The numbers of a result."""
        found: FloatArray = result.detach().cpu().numpy()
        return found

    def value(self, tap: str) -> FloatArray:
        """The value at a tap, [rows, width]."""
        return self.values(self._tapped[tap])

    def gradient(self, tap: str) -> FloatArray:
        """The gradient there, of the same shape: zeros if the result does not depend on it."""
        tensor = self._tapped[tap]
        return self.values(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)

    def attention(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, spec: AttentionSpec, batch: Any
    ) -> Tensor:
        """Softmax attention within each text -> [T, H*K]."""
        if k is None or v is None:
            k, v = self._kv[spec.kv_layer]
        self._kv[spec.layer] = k, v
        sinks = None if spec.sinks is None else self.constants.vector(spec.sinks).view(spec.n_heads, 1, 1)
        parts: list[Tensor] = []
        for rows in batch.host.texts:
            heads = q[rows].view(-1, spec.n_heads, spec.d_head).transpose(0, 1)  # [H, T, K]
            keys, values = (
                x[rows]
                .view(-1, spec.n_kv_heads, spec.d_head)
                .transpose(0, 1)
                .repeat_interleave(spec.group, 0)
                for x in (k, v)
            )
            scores = heads @ keys.transpose(1, 2) * spec.scale
            if spec.softcap is not None:
                scores = self.map("softcap", scores, a=spec.softcap)
            if (biases := spec.biases(keys_ahead(heads.shape[1]))) is not None:
                scores = scores + torch.from_numpy(biases).to(q.device)
            is_seen = torch.from_numpy(seen_keys(spec, heads.shape[1])).to(q.device)
            shares = softmax(scores.masked_fill(~is_seen, -torch.inf), sinks)
            parts.append((shares @ values).transpose(0, 1).reshape(-1, spec.n_heads * spec.d_head))
        return torch.cat(parts)

    def logit_rows(self, x: Tensor, batch: Any) -> Tensor:
        """All rows: the metric sees all."""
        return x

    def tap(self, name: str, layer: int | None, x: Tensor) -> Tensor:
        """x under its name, or the value given in its place; its gradient is kept."""
        full_name = tap_name(name, layer)
        given = self._given.get(full_name)
        if given is not None:
            x = torch.from_numpy(given).to(x.device)
        x = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
        x.retain_grad()
        self._tapped[full_name] = x
        return x

    def _shows(self, full_name: str) -> bool:
        return True

    def _seen(self, batch: Any) -> Iterator[tuple[int, int, int]]:
        """The rows of each text, all of them seen."""
        for rows in batch.host.texts:
            yield rows.start, rows.stop, rows.stop - rows.start

    def _states(self, name: str, layer: int, batch: Any) -> Iterator[tuple[StateStep, Any, Tensor]]:
        """A state of zeros for each text, used once."""
        zeros = self.cache.states[layer][name][0]
        for i, rows in enumerate(batch.host.texts):
            yield StateStep(rows.start, rows.stop, i, True, ()), {}, zeros
