"""`Adapter`: a LoRA adapter of a model, as low-rank updates of its matrices (Hu et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np

from kukri.dataclass import dataclass
from kukri.kernels.weight_handles import LowRank


@dataclass(frozen=True, eq=False)
class Adapter:
    """The updates of an adapter's files by the names of the matrices they change. Fits one model's shapes."""

    path: Path
    updates: Mapping[str, LowRank]

    @property
    def rank(self) -> int:
        """The largest rank of its updates."""
        return max(update.rank for update in self.updates.values())

    @cached_property
    def digest(self) -> bytes:
        """A SHA-256 of all that it computes: keys and values of equal ones are equal."""
        found = sha256()
        for name, update in sorted(self.updates.items()):
            parts = ((w.type.name, w.shape) for w in (update.down, update.up))
            found.update(repr((name, float(update.scale), *parts)).encode())
            for weight in (update.down, update.up):
                found.update(np.ascontiguousarray(weight.data).data)
        return found.digest()

    @property
    def n_bytes(self) -> int:
        """Bytes of its numbers."""
        return sum(w.stored.nbytes for update in self.updates.values() for w in (update.down, update.up))
