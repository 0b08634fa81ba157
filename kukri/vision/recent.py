"""`Recent`: values by digest within a budget of bytes, for pictures and their encodings."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Values by digest, up to `max_bytes` in all; the least recently used are forgotten first.

    Several threads may use it. Attributes: max_bytes; n_bytes, the bytes of all kept values.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.n_bytes = max_bytes, 0
        self._kept: OrderedDict[bytes, tuple[T, int]] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, digest: bytes) -> T | None:
        """The value, which counts as used; None if it is not kept."""
        with self._lock:
            if digest not in self._kept:
                return None
            self._kept.move_to_end(digest)
            return self._kept[digest][0]

    def keep(self, digest: bytes, value: T, n_bytes: int) -> None:
        """Keep a value that is not kept already, and forget old values to make room."""
        with self._lock:
            if digest in self._kept:
                return
            self._kept[digest] = value, n_bytes
            self.n_bytes += n_bytes
            while self.n_bytes > self.max_bytes:
                self.n_bytes -= self._kept.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._kept.clear()
            self.n_bytes = 0
