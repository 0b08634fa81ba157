"""The spans of a request: which of its tokens become rows of inputs, and how far it can be computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kukri.engine.spans.encoder import SpanEncoder
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.models.both_ways import BothWaysLayers
from kukri.models.spans import SpanInput


class _Run(NamedTuple):
    """Tokens `start` to `stop` - 1 of the prompt, rows of input number `number` from `first_row` on."""

    start: int
    stop: int
    number: int
    first_row: int
    encoder: SpanEncoder


class EmbeddingSpans:
    """The spans of a prompt, as in `SpanPrompt`, whose inputs have an encoder each; none by default.

    Attributes: inputs; rows [n_tokens, D] of inputs that have been encoded, by their numbers; n_deep, layers
    for which rows hold what is added there, after the embeddings.
    """

    def __init__(
        self,
        inputs: Sequence[SpanInput] = (),
        spans: Sequence[tuple[int, int, int]] = (),
        encoders: Sequence[SpanEncoder] = (),
    ) -> None:
        self.inputs, self.n_deep = inputs, max((encoder.n_deep for encoder in encoders), default=0)
        self.rows: dict[int, FloatArray] = {}
        self._given: set[int] = set()  # numbers of inputs that no encoder makes again
        self._runs: list[_Run] = []
        n_rows = [0] * len(encoders)
        for start, n_tokens, number in spans:
            self._runs.append(_Run(start, start + n_tokens, number, n_rows[number], encoders[number]))
            n_rows[number] += n_tokens
        places = [encoder.places(given) for encoder, given in zip(encoders, inputs, strict=True)]
        self._positions = self._placed(places)

    def give(self, rows: Sequence[FloatArray]) -> None:
        """Takes the rows of all inputs as they are, instead of what the encoder makes."""
        self.rows = dict(enumerate(rows))
        self._given = set(self.rows)

    def wanted(self, n_cached: int) -> int | None:
        """Return the number of the next input to encode, for a request with `n_cached` tokens in the cache.

        Rows that are in the cache are dropped.
        """
        to_come = [run.number for run in self._runs if run.stop > n_cached]
        for number in self.rows.keys() - {*to_come, *self._given}:
            del self.rows[number]
        return next((number for number in to_come if number not in self.rows), None)

    def n_ready(self, n_cached: int, n_tokens: int) -> int:
        """Tokens up to which the request's `n_tokens` can be computed, whose next is `n_cached`."""
        for run in self._runs:
            if run.stop > n_cached:
                if run.number not in self.rows:
                    return max(run.start, n_cached)
                if run.encoder.attends_both_ways:
                    return run.stop if run.start <= n_cached else run.start
        return n_tokens

    def attends_both_ways(self, start: int) -> BothWaysLayers:
        """The layers in which the token at `start` sees later rows of its run, which is then not cut."""
        runs = (run for run in self._runs if run.start <= start < run.stop)
        return next((run.encoder.attends_both_ways for run in runs), "")

    def most_rows(self, first: int, stop: int) -> int:
        """The most of tokens `first` to `stop` - 1 that are in one run which must not be cut."""
        runs = (run for run in self._runs if run.encoder.attends_both_ways)
        return max((min(run.stop, stop) - max(run.start, first) for run in runs), default=0)

    def mark_seen_ahead(self, seen: npt.NDArray[np.bool_], window: int | None) -> None:
        """Sets in `seen`, of queries by keys [T, T], later keys that a query sees too, as both are rows of
        one run, in a layer with this window or without one.
        """
        layers = ("all",) if window is None else ("all", "windows")
        for run in self._runs:
            if run.encoder.attends_both_ways in layers:
                tokens = slice(run.start, run.stop)
                seen[tokens, tokens] |= ~np.tri(run.stop - run.start, dtype=np.bool_)

    def identity(self, start: int, stop: int) -> bytes:
        """What tokens `start` to `stop` - 1 depend on besides their ids: b"" without rows of inputs."""
        parts: list[bytes] = []
        for run in self._runs:
            first, last = max(run.start, start), min(run.stop, stop)
            if first < last:
                row = run.first_row + first - run.start
                place = b"".join(n.to_bytes(4, "little") for n in (first - start, last - first, row))
                parts.append(place + self.inputs[run.number].digest)
        return b"".join(parts)

    def fill(self, x: FloatArray, start: int, depth: int = 0) -> None:
        """Writes rows over embeddings x [n, D] of the tokens from `start` on.

        With a `depth` from 1 to `n_deep` it adds to x what that layer is to add.
        """
        stop, columns = start + len(x), slice(depth * x.shape[1], (depth + 1) * x.shape[1])
        for run in self._runs:
            first, last = max(run.start, start), min(run.stop, stop)
            if first < last and depth <= run.encoder.n_deep:
                row = run.first_row + first - run.start
                own, rows = slice(first - start, last - start), slice(row, row + last - first)
                before = x[own] if depth else 0
                x[own] = before + self.rows[run.number][rows, columns]

    def blank(self, ids: IntArray, start: int) -> None:
        """Writes what stands for placeholders over the ids of tokens from `start` on, if something does."""
        for run in self._runs:
            if (blank_id := run.encoder.blank_id) is not None:
                ids[max(run.start - start, 0) : max(run.stop - start, 0)] = blank_id

    def has_rows(self, start: int, stop: int) -> bool:
        """True if one of tokens `start` to `stop` - 1 is a row of an input."""
        return any(run.start < stop and run.stop > start for run in self._runs)

    def places(self, number: int) -> IntArray:
        """The indices of the tokens that take the rows of an input, in the order of its rows."""
        runs = [np.arange(run.start, run.stop) for run in self._runs if run.number == number]
        return np.concatenate(runs, dtype=np.int32)

    def positions(self, start: int, stop: int) -> IntArray | None:
        """The positions [3, n] by which tokens `start` to `stop` - 1 rotate; None: those that count them."""
        n = self._positions.shape[1]
        if n == 0:
            return None
        found = self._positions[:, start:stop]
        if stop > n:
            first = max(start, n)
            after = np.arange(first, stop, dtype=np.int32) + (self._next - n)
            found = np.concatenate([found, np.broadcast_to(after, (3, stop - first))], axis=1)
        return found

    def _placed(self, places: Sequence[IntArray | None]) -> IntArray:
        """Return the positions up to the last rows that have places: text counts on from the largest before
        it, and so do places.
        """
        ends = [run.stop for run in self._runs if places[run.number] is not None]
        positions = np.empty((3, max(ends, default=0)), np.int32)
        stop = after = 0  # tokens that are placed, and the position that comes next
        for run in self._runs:
            own = places[run.number]
            if own is None:
                continue
            positions[:, stop : run.start] = np.arange(run.start - stop) + after
            own = own[:, run.first_row : run.first_row + run.stop - run.start]
            positions[:, run.start : run.stop] = own + (after + run.start - stop)
            after, stop = int(positions[:, run.start : run.stop].max()) + 1, run.stop
        self._next = after
        return positions


NO_SPANS = EmbeddingSpans()  # for prompts of tokens alone
