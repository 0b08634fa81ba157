"""Chooses the replica that runs a request: by the longest prefix in its cache, then by its load.

A prompt's pages have keys (`kukri.engine.pages`), each the hash of its tokens and of the key before it, so
that equal keys mean equal prefixes. The router remembers the keys of the prompts that it has sent to each
replica, as many as its cache has pages. A prompt that nobody knows goes by rendezvous hashing of its first
page (Thaler and Ravishankar 1998), so that fronts that know nothing of one another choose alike. No replica
gets much more than its share of the load (Mirrokni, Thorup and Zadimoghaddam 2018, "Consistent Hashing with
Bounded Loads").
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from math import ceil

from kukri.engine.pages import PageKey

_EXCESS = 1.25  # the most of the mean load that a replica may have and still get a request for its prefix


class PrefixRouter:
    """Chooses replicas by the requests that it has sent them. Replicas are known by a name."""

    def __init__(self) -> None:
        self._known: dict[str, OrderedDict[PageKey, None]] = {}  # the longest unused first
        self._n_pages: dict[str, int] = {}

    def add(self, replica: str, n_pages: int) -> None:
        """Adds a replica whose cache has `n_pages` pages."""
        self._known[replica], self._n_pages[replica] = OrderedDict(), n_pages

    def remove(self, replica: str) -> None:
        """Forgets a replica and its pages."""
        self._known.pop(replica, None)
        self._n_pages.pop(replica, None)

    def choose(self, keys: Sequence[PageKey], loads: Mapping[str, int], free: Iterable[str]) -> str:
        """The replica for a prompt with these page keys, of the `free` ones, of which there is at least one.

        `loads` are the numbers of requests of all replicas, also of replicas that are not free.
        """
        names = list(free)
        most = max(ceil(_EXCESS * (sum(loads.values()) + 1) / max(len(loads), 1)), 2)
        within = [name for name in names if loads[name] < most] or names
        longest = {name: self._n_known(name, keys) for name in within}
        best = max(longest.values())
        if best:
            within = [name for name in within if longest[name] == best]
        elif keys:  # the first to see this prefix
            return max(within, key=lambda name: _rank(keys[0], name))
        return min(within, key=lambda name: (loads[name], name))

    def note(self, replica: str, keys: Sequence[PageKey]) -> None:
        """Remembers that a replica gets a prompt with these page keys."""
        known = self._known[replica]
        for key in reversed(keys):  # a prefix is forgotten after its continuations, as in the cache
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._n_pages[replica]:
            known.popitem(last=False)

    def _n_known(self, replica: str, keys: Sequence[PageKey]) -> int:
        known = self._known[replica]
        n = 0
        while n < len(keys) and keys[n] in known:
            n += 1
        return n


def _rank(key: PageKey, replica: str) -> bytes:
    return blake2b(key + replica.encode(), digest_size=8).digest()
