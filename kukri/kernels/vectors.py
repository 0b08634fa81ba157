"""Widths of heads and states in the CPU's kernels, which compute whole vectors."""

from __future__ import annotations

from kukri.dataclass import replace
from kukri.kernels.cache import CacheLayout, KVLayer, StateLayer


def padded(n: int) -> int:
    """Return n rounded up to whole vectors of the CPU, as its kernels have the widths of heads and states."""
    return -(-n // 16) * 16


def in_vectors(layout: CacheLayout) -> CacheLayout:
    """A layout whose heads and states have the widths that the CPU's kernels run."""
    return [
        replace(layer, d_head=padded(layer.d_head))
        if isinstance(layer, KVLayer)
        else StateLayer(tuple((name, (n, *map(padded, widths))) for name, (n, *widths) in layer.shapes))
        for layer in layout
    ]
