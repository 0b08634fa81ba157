"""Encodes inputs between steps, a little at a time, and keeps their rows by digest.

No bit of a row depends on slices, on other inputs, or on whether the row was kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from time import perf_counter

from kukri.engine.spans.encoder import SpanEncoder
from kukri.kernels.arrays import FloatArray
from kukri.models.spans import SpanInput
from kukri.vision.recent import Recent

_SLICE_S = 0.005  # slices run at least so long while others generate


class Encodings:
    """Rows by digest, up to `max_bytes` of them: see `Recent`.

    Attributes: n_encoded, inputs encoded so far; n_found, inputs whose rows were kept.
    """

    def __init__(
        self,
        encoders: Mapping[type, SpanEncoder],
        max_bytes: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._encoders, self._clock = encoders, clock
        self._kept: Recent[FloatArray] = Recent(max_bytes)
        self._under_way: dict[bytes, Iterator[FloatArray | None]] = {}  # by digest, at most one
        self._is_brief = False
        self.n_encoded = self.n_found = 0

    def find(self, given: SpanInput) -> FloatArray | None:
        """The rows [n_tokens, ...] of an input that was encoded, if they are kept."""
        rows = self._kept.find(given.digest)
        if rows is not None:
            self.n_found += 1
        return rows

    def advance(self, given: SpanInput, *, is_brief: bool) -> FloatArray | None:
        """Encode an input for a while, by parts or, with `is_brief`, by slices; the rows once it is done.

        An input that is not finished is continued by the next call with it, and begun again after another.
        """
        encoder = self._encoders[type(given)]
        encoding = self._under_way.get(given.digest) or encoder.encode(given, lambda: self._is_brief)
        self._under_way.clear()
        self._is_brief, deadline_s = is_brief, self._clock() + _SLICE_S
        while (rows := next(encoding)) is None:
            if self._clock() > deadline_s:
                self._under_way[given.digest] = encoding
                return None
        rows.flags.writeable = False
        self._kept.keep(given.digest, rows, rows.nbytes)
        self.n_encoded += 1
        return rows

    def is_under_way(self, given: SpanInput) -> bool:
        """True if an input has been begun."""
        return given.digest in self._under_way
