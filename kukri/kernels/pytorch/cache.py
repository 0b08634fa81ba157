"""The cache of the torch backend: keys and values by page, recurrent states by slot, in device memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kukri.dataclass import dataclass
from kukri.kernels.cache import Cache, CacheLayout, KVLayer, KVType, StateLayer, pool_layouts, pool_windows
from kukri.kernels.kv_types import KV_TYPES
from kukri.kernels.paged_kv import PAGE_TOKENS, page_bytes, pages_of_pools, state_bytes
from kukri.kernels.pytorch.kv_types import TENSOR_TYPES


@dataclass(frozen=True, eq=False)
class LayerKV:
    """One layer's keys and values [P, G, 16, K], token by token: a token's head is one run of memory.

    K stands for the numbers that the type keeps of a head (`kv_types`); scales, if it has any, are float16
    [P, G, 16, scales of a head]. Between the pages of a layer lie the other layers' pages.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, by page."""
        return [t for t in (self.keys, self.values, self.key_scales, self.value_scales) if t is not None]


class TensorCache(Cache):
    """See `cache.Cache`. Numbers beyond float16 (fp8: beyond 448) are clamped when stored; NaN stays.

    `kv[layer]` and `states[layer]` have the tensors of KV and state layers, `pool_of[layer]` the number of a
    layer's pool. After the `n_pages` of a pool there is a spare page, and after the `n_states` a spare slot,
    which padding writes to and reads.
    """

    page_tokens = PAGE_TOKENS

    def __init__(
        self,
        layout: CacheLayout,
        n_pages: int | Sequence[int],
        n_states: int,
        kv_type: KVType,
        device: torch.device,
    ) -> None:
        """Raises UnsupportedError if `kv_type` cannot hold heads of a layer's size, MemoryError."""
        self.layout, self.n_states, self.kv_type = tuple(layout), n_states, kv_type
        windows = pool_windows(layout)
        self.n_pages = pages_of_pools(n_pages, len(windows))
        halves = [page_bytes(layers, kv_type) // 2 for layers in pool_layouts(layout)]
        self._keys, self._values = (
            [_zeros((n + 1, half), device) for n, half in zip(self.n_pages, halves)] for _ in range(2)
        )
        self.pool_of: dict[int, int] = {}
        self.kv: dict[int, LayerKV] = {}
        self.states: dict[int, dict[str, Tensor]] = {}
        starts = [0] * len(windows)
        for i, layer in enumerate(self.layout):
            if isinstance(layer, StateLayer):
                self.states[i] = {
                    name: torch.zeros((n_states + 1, *shape), device=device) for name, shape in layer.shapes
                }
            else:
                pool = self.pool_of[i] = windows.index(layer.window)
                start, stop = starts[pool], starts[pool] + page_bytes([layer], kv_type) // 2
                keys, key_scales = _views(self._keys[pool][:, start:stop], layer, kv_type)
                values, value_scales = _views(self._values[pool][:, start:stop], layer, kv_type)
                self.kv[i] = LayerKV(keys, values, key_scales, value_scales)
                starts[pool] = stop

    @property
    def n_slots(self) -> int | None:
        """Slots of states that a step may use; None for a model without recurrent layers."""
        return self.n_states if self.states else None

    @property
    def n_bytes(self) -> int:
        pages = sum(tensor.nbytes for tensor in (*self._keys, *self._values))
        return pages + (self.n_states + 1) * state_bytes(self.layout)

    def copy_page(self, source: int, target: int, pool: int = 0) -> None:
        for tensor in (self._keys[pool], self._values[pool]):
            tensor[target] = tensor[source]

    def page_data(self, pages: Sequence[int]) -> bytes:
        halves = zip(self._keys, self._values, pages, strict=True)
        data = torch.cat([tensor[page] for *both, page in halves for tensor in both])
        found: bytes = data.cpu().numpy().tobytes()
        return found

    def set_page_data(self, pages: Sequence[int], data: bytes | memoryview) -> None:
        found = torch.from_numpy(np.array(np.frombuffer(data, np.uint8))).to(self._keys[0].device)
        start = 0
        for keys, values, page in zip(self._keys, self._values, pages, strict=True):
            half = keys.shape[1]
            keys[page], values[page] = found[start : start + 2 * half].view(2, half)
            start += 2 * half

    def copy_state(self, source: int, target: int) -> None:
        for arrays in self.states.values():
            for array in arrays.values():
                array[target] = array[source]

    def state_data(self, slot: int) -> bytes:
        arrays = [array[slot] for arrays in self.states.values() for array in arrays.values()]
        return b"".join(array.cpu().numpy().tobytes() for array in arrays)

    def set_state_data(self, slot: int, data: bytes | memoryview) -> None:
        found, start = torch.from_numpy(np.array(np.frombuffer(data, np.float32))), 0
        for arrays in self.states.values():
            for array in arrays.values():
                array[slot] = found[start : start + array[slot].numel()].view(array.shape[1:])
                start += array[slot].numel()


def _zeros(shape: tuple[int, int], device: torch.device) -> Tensor:
    """uint8 zeros; on the CPU the system gives memory as it is written."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, np.uint8))
    try:
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from error


def _views(memory: Tensor, layer: KVLayer, kv_type: KVType) -> tuple[Tensor, Tensor | None]:
    """Bytes [P, n] as numbers and scales: see `LayerKV`."""
    kept, dtype = KV_TYPES[kv_type], TENSOR_TYPES[kv_type].dtype
    width, n_scales = kept.width(layer.d_head), kept.n_scales(layer.d_head)
    shape = len(memory), layer.n_kv_heads, PAGE_TOKENS
    n_bytes = layer.n_kv_heads * PAGE_TOKENS * width * dtype.itemsize
    numbers = memory[:, :n_bytes].view(dtype).view(*shape, width)
    scales = memory[:, n_bytes:].view(torch.float16).view(*shape, n_scales) if n_scales else None
    return numbers, scales
