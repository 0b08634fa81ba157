"""The memory of sequences: each layer's layout, and the interface of a backend's cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kukri.config import KVType as KVType


@dataclass(frozen=True)
class KVLayer:
    """A layer that caches keys and values of each token; a query sees `window` of them, or all.

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


def has_states(layout: CacheLayout) -> bool:
    """True if a layer keeps a recurrent state."""
    return any(isinstance(layer, StateLayer) for layer in layout)


class Cache(Protocol):
    """The memory of a model's sequences: keys and values in pages, recurrent states in slots.

    It belongs to the backend that made it, which alone knows how it lies in memory. A page has room for
    `page_tokens` tokens, in all layers; page p has the slots p * page_tokens and on. Pages are not cleared:
    what lies where no token of a context is may be anything, NaN included (see `Backend`).
    """

    layout: tuple[KVLayer | StateLayer, ...]
    n_pages: int
    n_states: int
    kv_type: KVType
    page_tokens: int

    @property
    def n_bytes(self) -> int:
        """Bytes reserved."""

    def copy_page(self, source: int, target: int) -> None:
        """Copies a page's contents."""

    def page_data(self, page: int) -> bytes:
        """A copy of a page's bytes, for `set_page_data` of a cache of the same layout, type and backend."""

    def set_page_data(self, page: int, data: bytes | memoryview) -> None:
        """Fills a page with the bytes of another."""

    def copy_state(self, source: int, target: int) -> None:
        """Copies the recurrent state of a sequence from one slot to another."""
