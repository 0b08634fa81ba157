"""The slots of adapters while requests begin and end."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from kukri.engine.adapters import LoadedAdapters


class Beginning:
    """A request that begins while another thread empties the slots of adapters that were removed."""

    has_ended = False

    def __init__(self, adapters: LoadedAdapters) -> None:
        self._adapters, self.released = adapters, []
        self.releasing = threading.Thread(target=self._release)

    def _release(self) -> None:
        self.released.append(self._adapters.release())

    def use_adapter(self, adapter: Any, digest: bytes) -> None:
        self._adapters.remove("one")
        self.releasing.start()
        self.releasing.join(0.1)  # it waits for the request


def test_a_slot_is_kept_for_a_request_that_begins() -> None:
    """Catches an adapter that is removed between a request's choice of it and its first step: the slot
    would be empty, or another adapter's.
    """
    adapters = LoadedAdapters()
    adapters.add("one", SimpleNamespace(digest=b"1", updates={"x": 1}))  # type: ignore[arg-type]
    request = Beginning(adapters)
    adapters.use("one", request)
    request.releasing.join()
    assert request.released == [False]
    assert adapters.has_leaving
    request.has_ended = True
    assert adapters.release()
    assert not adapters.has_leaving
