"""The pool of slots for recurrent states: one for each request that runs, and snapshots of past states.

A snapshot is the state after a cached page, under the key of that page: a prompt that begins with the
page's tokens, and all those before it, continues from there. Which are taken: `snapshot_places`. The one that
was used least recently makes room for others.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from kukri.engine.pages import PageKey

_FIRST_STEP = 64  # tokens from a prompt's last snapshot to the one before; then twice as many, and so on


class StatePool:
    """Slots 0 to n_slots - 1: free, held by a request, or holding a snapshot."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self._free = list(range(n_slots - 1, -1, -1))
        self._snapshots: OrderedDict[PageKey, int] = OrderedDict()  # by page; the longest unused first

    @property
    def n_free(self) -> int:
        """Slots that can be allocated."""
        return len(self._free) + len(self._snapshots)

    @property
    def n_snapshots(self) -> int:
        """Snapshots that may be found."""
        return len(self._snapshots)

    def allocate(self) -> int:
        """Allocates a slot, evicting the least recently used snapshot if none is free; there must be one."""
        if self._free:
            return self._free.pop()
        return self._snapshots.popitem(last=False)[1]

    def free(self, slot: int) -> None:
        """Gives a slot back."""
        self._free.append(slot)

    def keep(self, key: PageKey, slot: int) -> None:
        """Makes a held slot the snapshot after a page; if there is one already, its bits are the same."""
        if key in self._snapshots:
            self.free(slot)
            self._snapshots.move_to_end(key)
        else:
            self._snapshots[key] = slot

    def find(self, key: PageKey) -> int | None:
        """The slot of the snapshot after a page, which counts as used now."""
        if key in self._snapshots:
            self._snapshots.move_to_end(key)
        return self._snapshots.get(key)

    def touch(self, keys: Iterable[PageKey]) -> None:
        """The snapshots after some pages count as used now."""
        for key in keys:
            self.find(key)

    def drop(self, key: PageKey) -> None:
        """Forgets a snapshot, if it is there."""
        slot = self._snapshots.pop(key, None)
        if slot is not None:
            self.free(slot)

    def forget(self) -> None:
        """Forgets every snapshot."""
        self._free += self._snapshots.values()
        self._snapshots.clear()

    def check_integrity(self, held: Iterable[int]) -> None:
        """Asserts that `held`, the slots of requests, are all that are neither free nor snapshots."""
        counts = Counter([*held, *self._free, *self._snapshots.values()])
        assert counts == Counter(range(self.n_slots)), "a state is lost, or held twice"


def snapshot_places(n_prompt: int, n_found: int, page_tokens: int) -> list[int]:
    """Prompt lengths (whole pages) after which a snapshot is taken, the longest first.

    After the last page that leaves a token to compute, and 64, 192, 448 … tokens earlier: then a prompt that
    shares all but its end computes at most about twice what it does not share, or 64 tokens. Also after the
    `n_found` tokens whose pages were cached: others share them.
    """
    last = (n_prompt - 1) // page_tokens * page_tokens
    places, step = {n_found} if 0 < n_found < last else set[int](), _FIRST_STEP
    while last > 0:
        places.add(last // page_tokens * page_tokens)
        last, step = last - step, 2 * step
    return sorted(places - {0}, reverse=True)
