"""The memory of sequences: each layer's layout, and the interface of a backend's cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kukri.config import KVType as KVType
from kukri.dataclass import dataclass, replace

MAX_HEAD = 1 << 10  # d_head: a larger claim of a file is damage, and kernels have room on their stacks by it


@dataclass(frozen=True)
class KVLayer:
    """A layer that caches keys and values of each token; a query sees the last `window` of them, or all.

    Without heads it takes no memory: a layer whose cache is elsewhere.
    """

    n_kv_heads: int
    d_head: int
    window: int | None = None


@dataclass(frozen=True)
class StateLayer:
    """A layer that keeps a recurrent state of fixed size for each sequence: float32 arrays, (name, shape).

    The order of an array's numbers is the backend's own.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]


CacheLayout = Sequence[KVLayer | StateLayer]  # an entry for each layer of a model


def pool_windows(layout: CacheLayout) -> tuple[int | None, ...]:
    """The pools that a layout's keys and values lie in, by the window of their layers: one for the layers
    that see all (None), one for each window, the widest first.

    A sequence holds pages of a pool only as far back as its window reaches.
    """
    windows = {layer.window for layer in layout if isinstance(layer, KVLayer)}
    return tuple(sorted(windows, key=lambda window: -(window or 1 << 60))) or (None,)


def without_windows(layout: CacheLayout) -> CacheLayout:
    """A layout whose pages are all in one pool, and stay as long as their sequence."""
    return [replace(layer, window=None) if isinstance(layer, KVLayer) else layer for layer in layout]


def pool_layouts(layout: CacheLayout) -> list[list[KVLayer]]:
    """The layers of each pool."""
    layers = [layer for layer in layout if isinstance(layer, KVLayer)]
    return [[layer for layer in layers if layer.window == window] for window in pool_windows(layout)]


def has_states(layout: CacheLayout) -> bool:
    """True if a layer keeps a recurrent state."""
    return any(isinstance(layer, StateLayer) for layer in layout)


class Cache(Protocol):
    """The memory of a model's sequences: keys and values in pages, recurrent states in slots.

    It belongs to the backend that made it; only that knows its layout in memory. Pages are of a pool
    (`pool_windows`): a page has room for `page_tokens` tokens in all layers of its pool; page p has the slots
    p * page_tokens and on. Pages are not cleared: what lies where no token of a context is may be anything,
    NaN included (see `Backend`).
    """

    layout: tuple[KVLayer | StateLayer, ...]
    n_pages: tuple[int, ...]  # per pool
    n_states: int
    kv_type: KVType
    page_tokens: int

    @property
    def n_bytes(self) -> int:
        """Bytes reserved."""

    def copy_page(self, source: int, target: int, pool: int = 0) -> None:
        """Copies the contents of a pool's page to another of the pool."""

    def page_data(self, pages: Sequence[int]) -> bytes:
        """A copy of the bytes of pages, one of each pool, for `set_page_data` of a cache of the same layout,
        type and backend.
        """

    def set_page_data(self, pages: Sequence[int], data: bytes | memoryview) -> None:
        """Fills pages, one of each pool, with the bytes of others."""

    def copy_state(self, source: int, target: int) -> None:
        """Copies the recurrent state of a sequence from one slot to another."""

    def state_data(self, slot: int) -> bytes:
        """A copy of a slot's state, of all layers, for `set_state_data` of a cache of the same layout and
        backend.
        """

    def set_state_data(self, slot: int, data: bytes | memoryview) -> None:
        """Fills a slot with the state of another."""
