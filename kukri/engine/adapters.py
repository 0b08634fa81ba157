"""The adapters of an engine: each has a name, a slot in the programs, and cached prefixes of its own."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from typing import Any, Protocol
from weakref import WeakSet

from kukri.errors import CapacityError, ConfigError, RequestError
from kukri.kernels.weight_handles import AdapterSlots
from kukri.models.adapter import Adapter

MAX_ADAPTERS = 64  # loaded at a time
_NAME = re.compile(r"[^\s=]{1,200}")


class LoadedAdapter:
    """An adapter in its slot."""

    def __init__(self, name: str, adapter: Adapter, slot: int) -> None:
        self.name, self.adapter, self.slot = name, adapter, slot
        self.requests: WeakSet[Any] = WeakSet()  # the requests made with it; guarded by `LoadedAdapters`


class UsesAdapter(Protocol):
    """A request, as far as adapters know it."""

    def use_adapter(self, adapter: LoadedAdapter, digest: bytes) -> None:
        """Makes a new request one of an adapter, whose prefixes are kept apart by `digest`."""

    @property
    def has_ended(self) -> bool:
        """True once it no longer needs an adapter."""


class LoadedAdapters:
    """The adapters by name. Changed between steps; any thread may look one up for a request.

    An adapter that is removed keeps its slot until the last request that was made with it has ended.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, LoadedAdapter] = {}
        self._slots: list[LoadedAdapter | None] = []
        self._lock = threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may give, in the order of loading."""
        return tuple(self._by_name)

    @property
    def slots(self) -> AdapterSlots:
        """The updates of each slot; nothing if there is no adapter."""
        slots = [None if one is None else one.adapter.updates for one in self._slots]
        return slots if any(slots) else ()

    @property
    def has_leaving(self) -> bool:
        """True if an adapter that was removed is still in its slot."""
        return sum(one is not None for one in self._slots) > len(self._by_name)

    def get(self, name: str) -> Adapter:
        """An adapter. Raises RequestError if there is none of this name."""
        return self._find(name).adapter

    def use(self, name: str, request: UsesAdapter) -> None:
        """Makes a new request one of an adapter. Raises RequestError if no adapter has this name."""
        with self._lock:
            found = self._find(name)
            request.use_adapter(found, found.adapter.digest)
            found.requests.add(request)

    def add(self, name: str, adapter: Adapter) -> None:
        """Gives an adapter a name and a slot.

        Raises ConfigError on a name that is taken or cannot be one, CapacityError if there are too many.
        """
        if _NAME.fullmatch(name) is None:
            raise ConfigError(
                f"an adapter's name must be up to 200 characters without space or '=', not {name!r}"
            )
        if name in self._by_name:
            raise ConfigError(
                f"the name of an adapter must be new, not {name!r}: unload the other one, or choose "
                "another name"
            )
        free = [i for i, one in enumerate(self._slots) if one is None]
        slot = free[0] if free else len(self._slots)
        if slot == MAX_ADAPTERS:
            raise CapacityError(f"{MAX_ADAPTERS} adapters are already loaded: unload one first")
        _ = adapter.digest  # computed here, not while a request waits
        made = LoadedAdapter(name, adapter, slot)
        self._slots[slot : slot + 1] = [made]
        self._by_name[name] = made

    def remove(self, name: str) -> None:
        """Removes an adapter's name. Raises RequestError if there is none of this name."""
        self._find(name)
        del self._by_name[name]

    def release(self) -> bool:
        """Empties the slots of removed adapters that no request uses any more; True if there were some."""
        known = set(self._by_name.values())
        with self._lock:
            done = [
                one.slot
                for one in self._slots
                if one is not None and one not in known and all(r.has_ended for r in one.requests)
            ]
        for slot in done:
            self._slots[slot] = None
        return bool(done)

    def _find(self, name: str) -> LoadedAdapter:
        found = self._by_name.get(name)
        if found is None:
            raise unknown_adapter(name, self._by_name)
        return found


def unknown_adapter(name: str, known: Iterable[str]) -> RequestError:
    """The error for a name that no loaded adapter has."""
    loaded = ", ".join(known)
    remedy = f"choose one of {loaded}" if loaded else "no adapters are loaded"
    return RequestError(f"adapter {name!r} was not found: {remedy}", param="adapter")
