"""The cache of a backend on the host: keys and values in pages, recurrent states in slots."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.errors import UnsupportedError
from kukri.kernels.arrays import FloatArray
from kukri.kernels.cache import Cache, CacheLayout, KVLayer, KVType, StateLayer, pool_layouts, pool_windows
from kukri.kernels.kv_types import KV_TYPES

PAGE_TOKENS = 16  # tokens of a page: one SIMD vector of scores

_Form = tuple[np.dtype[Any], tuple[int, ...]]  # dtype and shape of an array


class PagedKV(Cache):
    """Keys and values of the KV layers by page, arrays of the state layers by slot, under a layer's number.

    Pages are of pools (`pool_windows`): `pool_of[layer]` is the number of a layer's.

    A page has B tokens. Types of numbers without scales (`kv_types`) lie as `keys[layer]` [P, G, K, B] and
    `values[layer]` [P, G, B, K], by the layer's own G and K: keys keep the 16 tokens of a page side by side,
    so that a page of scores is one vector. Those with n scales of a head are records: keys [P, G, n] of
    "quants" [K/n, B] and "scales" float16 [B], values [P, G] of quants [B, K] and scales [n, B]; K stands for
    the numbers that a type keeps of a head.

    Memory is reserved at once and taken from the system as it is written, in pieces of up to 2 MiB: so a
    page's layers lie together, and a short context does not touch one such piece per layer.

    `states[layer]` has the arrays of a state layer by name, float32 [n_states, *shape]. What is in a slot
    that no sequence has may be anything.
    """

    page_tokens = PAGE_TOKENS

    def __init__(
        self,
        layout: CacheLayout,
        n_pages: int | Sequence[int],
        n_states: int = 0,
        kv_type: KVType = "f16",
    ) -> None:
        """`n_pages`: of each pool, or of all alike. Raises UnsupportedError on types for GPUs alone, and if
        `kv_type` cannot hold heads of a layer's size; MemoryError.
        """
        if KV_TYPES[kv_type].encode is None:
            raise UnsupportedError(
                f"a KV cache of {kv_type} is not supported on CPUs: choose another type, or --backend torch"
            )
        self.layout, self.n_states = tuple(layout), n_states
        self.kv_type: KVType = kv_type
        windows = pool_windows(layout)
        self.n_pages = pages_of_pools(n_pages, len(windows))
        halves = [page_bytes(layers, kv_type) // 2 for layers in pool_layouts(layout)]
        self._keys, self._values = (
            [np.zeros((n, half), np.uint8) for n, half in zip(self.n_pages, halves)] for _ in range(2)
        )
        self.pool_of: dict[int, int] = {}
        self.keys: dict[int, npt.NDArray[Any]] = {}
        self.values: dict[int, npt.NDArray[Any]] = {}
        self.states: dict[int, dict[str, FloatArray]] = {}
        starts = [0] * len(windows)
        for i, layer in enumerate(self.layout):
            if isinstance(layer, StateLayer):
                shapes = dict(layer.shapes)
                self.states[i] = {n: np.zeros((n_states, *shape), np.float32) for n, shape in shapes.items()}
            else:
                key, value = _forms(layer, kv_type)
                pool = self.pool_of[i] = windows.index(layer.window)
                start, stop = starts[pool], starts[pool] + _n_bytes(key)
                self.keys[i] = _view(self._keys[pool][:, start:stop], key)
                self.values[i] = _view(self._values[pool][:, start:stop], value)
                starts[pool] = stop

    def page_stride(self, layer: int) -> int:
        """Bytes from a page to the next, in a layer's keys and in its values."""
        return self._keys[self.pool_of[layer]].shape[1]

    @property
    def n_bytes(self) -> int:
        pages = sum(array.nbytes for array in (*self._keys, *self._values))
        return pages + self.n_states * state_bytes(self.layout)

    def copy_page(self, source: int, target: int, pool: int = 0) -> None:
        for array in (self._keys[pool], self._values[pool]):
            array[target] = array[source]

    def page_data(self, pages: Sequence[int]) -> bytes:
        halves = zip(self._keys, self._values, pages, strict=True)
        return b"".join(array[page].tobytes() for *both, page in halves for array in both)

    def set_page_data(self, pages: Sequence[int], data: bytes | memoryview) -> None:
        found, start = np.frombuffer(data, np.uint8), 0
        for keys, values, page in zip(self._keys, self._values, pages, strict=True):
            half = keys.shape[1]
            keys[page], values[page] = found[start : start + 2 * half].reshape(2, half)
            start += 2 * half

    def copy_state(self, source: int, target: int) -> None:
        for arrays in self.states.values():
            for array in arrays.values():
                array[target] = array[source]

    def state_data(self, slot: int) -> bytes:
        return b"".join(array[slot].tobytes() for arrays in self.states.values() for array in arrays.values())

    def set_state_data(self, slot: int, data: bytes | memoryview) -> None:
        found, start = np.frombuffer(data, np.float32), 0
        for arrays in self.states.values():
            for array in arrays.values():
                array[slot] = found[start : start + array[slot].size].reshape(array.shape[1:])
                start += array[slot].size


def pages_of_pools(n_pages: int | Sequence[int], n_pools: int) -> tuple[int, ...]:
    """Return the number of pages of each pool; a single number counts for every pool."""
    if isinstance(n_pages, int):
        return (n_pages,) * n_pools
    assert len(n_pages) == n_pools, f"{len(n_pages)} numbers of pages for {n_pools} pools"
    return tuple(n_pages)


def page_bytes(layout: CacheLayout, kv_type: KVType) -> int:
    """Bytes of a page in all layers, keys and values. Raises UnsupportedError as `PagedKV` does."""
    layers = [layer for layer in layout if isinstance(layer, KVLayer)]
    return sum(_n_bytes(form) for layer in layers for form in _forms(layer, kv_type))


def token_bytes(layout: CacheLayout, kv_type: KVType) -> int:
    """Bytes of one token in all layers, keys and values: a page's, by its tokens."""
    return page_bytes(layout, kv_type) // PAGE_TOKENS


def state_bytes(layout: CacheLayout) -> int:
    """Bytes of one slot of recurrent state, all layers."""
    layers = [layer for layer in layout if isinstance(layer, StateLayer)]
    return sum(4 * prod(shape) for layer in layers for _, shape in layer.shapes)


def head_bytes(d_head: int, kv_type: KVType) -> int:
    """Bytes of one head's keys in a page, and of its values."""
    return page_bytes([KVLayer(1, d_head)], kv_type) // 2


def _forms(layer: KVLayer, kv_type: KVType) -> tuple[_Form, _Form]:
    """The arrays of a layer's keys and values in one page; both take as many bytes."""
    kept, n_heads = KV_TYPES[kv_type], layer.n_kv_heads
    dtype, width, n_scales = np.dtype(kept.dtype), kept.width(layer.d_head), kept.n_scales(layer.d_head)
    if not n_scales:
        return (dtype, (n_heads, width, PAGE_TOKENS)), (dtype, (n_heads, PAGE_TOKENS, width))
    key = [("quants", dtype, (width // n_scales, PAGE_TOKENS)), ("scales", np.float16, (PAGE_TOKENS,))]
    value = [("quants", dtype, (PAGE_TOKENS, width)), ("scales", np.float16, (n_scales, PAGE_TOKENS))]
    return (np.dtype(key), (n_heads, n_scales)), (np.dtype(value), (n_heads,))


def _n_bytes(form: _Form) -> int:
    dtype, shape = form
    return dtype.itemsize * prod(shape)


def _view(memory: npt.NDArray[np.uint8], form: _Form) -> npt.NDArray[Any]:
    """Bytes [P, n] as an array of this form for each page."""
    dtype, shape = form
    return memory.view(dtype).reshape(len(memory), *shape)
