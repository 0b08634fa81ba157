"""Hooks, interventions and captures of one request, while it generates alongside others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kukri.dataclass import dataclass
from kukri.engine import Request
from kukri.errors import ActivationLimitError, HookError
from kukri.interp.cache import ActivationCache
from kukri.interp.hooks.hook_names import POS_AXIS, Point
from kukri.interp.hooks.hook_values import Model, Rows
from kukri.interp.hooks.listening import Listening, StepListener
from kukri.interp.interventions.edits import Edit, Source, When
from kukri.interp.interventions.intervention import Resolved
from kukri.interp.interventions.read_limiter import ReadLimiter
from kukri.kernels.arrays import FloatArray


class RequestTaps:
    """The taps of one request: see `kukri.kernels.taps.SequenceListener`.

    Captures are of each token that was an input, the prompt's and all generated but the last; edits are made
    to each chunk of the prompt and to each token. A request that is preempted is recomputed, edits
    included. More than `max_bytes` of captured activations end it with ActivationLimitError; None is no
    limit.
    """

    def __init__(
        self,
        model: Model,
        wanted: Sequence[Point],
        hooks: Sequence[Listening] = (),
        max_bytes: int | None = None,
    ) -> None:
        for point in (*wanted, *(listening.point for listening in hooks)):
            if point.form == "logits":
                raise HookError(f"{point.name} is not supported in requests: use run_with_hooks()")
        for listening in hooks:
            point = listening.point
            if point.form in ("scores", "pattern") or (
                point.layer is None and point.edit_tap != "hook_embed"
            ):
                raise HookError(
                    f"hooks on {point.name} are not supported in requests or with images: use "
                    "run_with_hooks()"
                )
        self._model, self._wanted, self._hooks = model, wanted, hooks
        self._keep = {tap for point in wanted for tap in point.needs}
        self.begin(0, 1)
        self.names = self._listener.names
        self.edits = bool(hooks)
        self._max_bytes, self._n_bytes = max_bytes, 0
        self._kept: dict[str, dict[int, tuple[int, FloatArray]]] = {
            tap: {} for tap in self._keep
        }  # by the first position

    def begin(self, start: int, n_tokens: int) -> None:
        """Announces a chunk."""
        rows = Rows(np.array([n_tokens], np.int32))
        self._start, self._n_tokens = start, n_tokens
        self._listener = StepListener(self._model, rows, _NO_IDS, self._hooks, self._keep, start)

    def __call__(self, name: str, x: FloatArray) -> None:
        """Shows the chunk's rows at a tap."""
        self._listener(name, x)
        if name in self._keep:
            kept, chunks = self._listener.kept[name], self._kept[name]
            if self._start == 0:  # a request that was preempted begins again, perhaps in other chunks
                self._n_bytes -= sum(x.nbytes for _, x in chunks.values())
                chunks.clear()
            self._n_bytes += kept.nbytes
            if self._max_bytes is not None and self._n_bytes > self._max_bytes:
                raise ActivationLimitError(self._max_bytes)
            chunks[self._start] = self._n_tokens, kept

    def cache(self, request: Request) -> ActivationCache:
        """Captures of a request that has ended. Raises ActivationLimitError."""
        return joined_cache([self], [request])

    def taken(self, n: int) -> dict[str, FloatArray]:
        """The taps of the first n tokens, as rows."""
        return {tap: _joined(dict(chunks), n) for tap, chunks in self._kept.items()}


def joined_cache(taps: Sequence[RequestTaps], requests: Sequence[Request]) -> ActivationCache:
    """One cache of requests that have ended and captured the same. Raises ActivationLimitError."""
    first = taps[0]
    # the last token generated was not an input
    texts = [
        request.sequence.tokens[: request.sequence.n_tokens - (request.output == "tokens")]
        for request in requests
    ]
    kept = [one.taken(len(ids)) for one, ids in zip(taps, texts, strict=True)]
    joined = {tap: np.concatenate([each[tap] for each in kept]) for tap in kept[0]}
    lengths = np.array([len(ids) for ids in texts], np.int32)
    rows = Rows(lengths, [request.sequence.spans for request in requests])
    names = [point.name for point in first._wanted]
    limit = first._max_bytes
    if limit is not None and sum(first._model.n_bytes(point, rows) for point in first._wanted) > limit:
        raise ActivationLimitError(limit)
    return ActivationCache(first._model, joined, rows, np.concatenate(texts), names)


@dataclass(frozen=True)
class Readout:
    """Readings of a token by probes, autoencoders: `values` by their names, numbers by label or feature."""

    position: int
    token_id: int
    values: dict[str, dict[str, float]]


class InterventionTaps:
    """The interventions of one request: see `kukri.kernels.taps.SequenceListener`.

    Edits of a tap come first, so that captures and readouts see the edited values. `max_bytes` as in
    RequestTaps. Readings that take long wait as `limiter` says.
    """

    def __init__(
        self,
        model: Model,
        resolved: Resolved,
        max_bytes: int | None = None,
        limiter: ReadLimiter | None = None,
    ) -> None:
        self._limiter = limiter or ReadLimiter()
        self._model, self._readings, self._max_bytes = model, resolved.readings, max_bytes
        self._positions = {point.name: spans for point, spans in resolved.captures}
        self._captured = RequestTaps(model, [point for point, _ in resolved.captures], max_bytes=max_bytes)
        self._edits: dict[str, list[Edit]] = {}
        for edit in resolved.edits:
            self._edits.setdefault(edit.tap, []).append(edit)
        self._conditions: dict[str, list[When]] = {}
        for when in {edit.when: None for edit in resolved.edits if edit.when is not None}:
            self._conditions.setdefault(when.point.tap, []).append(when)
        self._sources: dict[str, list[Source]] = {}
        for source in {source: None for edit in resolved.edits for source in edit.sources}:
            self._sources.setdefault(source.point.tap, []).append(source)
        # for the tokens of the chunk under way
        self._holds: dict[When, Any] = {}
        self._found: dict[Source, FloatArray] = {}
        self._unread: list[dict[int, FloatArray]] = [{} for _ in self._readings]  # by position
        self._n_read = [0] * len(self._readings)  # positions that are kept, or were read already
        read = {reading.point.tap for reading in self._readings}
        self.names = self._captured.names | self._edits.keys() | self._conditions.keys() | read
        self.names |= self._sources.keys()
        self.edits = bool(resolved.edits)

    def begin(self, start: int, n_tokens: int) -> None:
        """Announces a chunk."""
        self._start, self._n_tokens = start, n_tokens
        self._captured.begin(start, n_tokens)

    def __call__(self, name: str, x: FloatArray) -> None:
        """Edits and shows the chunk's rows at a tap."""
        start, n_tokens = self._start, self._n_tokens
        for when in self._conditions.get(name, ()):
            self._holds[when] = when.holds(self._value(when.point, x))
        for edit in self._edits.get(name, ()):
            edit(x, start, n_tokens, None if edit.when is None else self._holds[edit.when], self._found)
        for source in self._sources.get(name, ()):
            if source.spans.mask(start, n_tokens).any():
                self._found[source] = source.read(self._value(source.point, x))
        if name in self._captured.names:
            self._captured(name, x)
        for i, reading in enumerate(self._readings):
            if reading.point.tap == name:
                self._keep_to_read(i, x)

    def _keep_to_read(self, i: int, x: FloatArray) -> None:
        reading, start, n_tokens = self._readings[i], self._start, self._n_tokens
        wanted = reading.spans.mask(start, n_tokens)
        wanted[: max(self._n_read[i] - start, 0)] = False
        if wanted.any():
            value = self._value(reading.point, x)
            self._n_read[i] = start + n_tokens
            self._unread[i].update((start + int(p), value[p].copy()) for p in np.flatnonzero(wanted))
            unread = zip(self._readings, self._unread)
            n_bytes = 4 * sum(each.reader.width * len(kept) for each, kept in unread)
            if self._max_bytes is not None and n_bytes > self._max_bytes:
                raise ActivationLimitError(self._max_bytes)

    def _value(self, point: Point, x: FloatArray) -> FloatArray:
        """A point's value for the rows of its tap, [tokens, width]."""
        rows, n_tokens = Rows(np.array([self._n_tokens], np.int32)), self._n_tokens
        value: FloatArray = self._model.value(point, {point.tap: x}, rows, _NO_IDS)[0]
        return value.reshape(n_tokens, -1)

    @property
    def has_unread(self) -> bool:
        """True if there may be something to read out."""
        return any(self._unread)

    @property
    def captures(self) -> bool:
        """True if activations are wanted."""
        return bool(self._positions)

    def readouts(self, request: Request, *, is_done: bool = False) -> list[Readout]:
        """Removes and returns what can be read by now, in the order of positions. Any thread may call it.

        Tokens of a step that is under way come once it is over, and tokens that large readers read come
        several at a time; `is_done` says that no step follows.
        """
        if not is_done and not self._limiter.allows(self):
            return []
        since = self._limiter.now()
        limit = request.sequence.n_tokens if is_done else request.sequence.n_cached
        values: dict[int, dict[str, dict[str, float]]] = {}
        for reading, unread in zip(self._readings, self._unread):
            positions = sorted(p for p in tuple(unread) if p < limit)
            if positions:
                rows = np.stack([unread.pop(p) for p in positions])
                for p, found in zip(positions, reading.read(rows)):
                    values.setdefault(p, {})[reading.name] = found
        if is_done:
            self._limiter.forget(self)
        else:
            self._limiter.took(self, since)
        return [Readout(p, int(request.sequence.tokens[p]), values[p]) for p in sorted(values)]

    def activations(self, request: Request) -> dict[str, FloatArray]:
        """Captures of a request that has ended, by name: [1, pos, ...] of the positions wanted.

        Raises ActivationLimitError.
        """
        cache = self._captured.cache(request)
        found: dict[str, FloatArray] = {}
        for name in cache:
            axis = POS_AXIS.get(cache.form(name), 1)
            chosen = self._positions[name].mask(0, cache[name].shape[axis])
            found[name] = np.compress(chosen, cache[name], axis)
        return found


_NO_IDS: Any = np.zeros(0, np.int32)


def _joined(chunks: dict[int, tuple[int, FloatArray]], n: int) -> FloatArray:
    """The first n tokens of chunks, which come by their first token, with their number of tokens."""
    parts = [
        x[: max(0, n - start) * (len(x) // n_tokens)]
        for start, (n_tokens, x) in sorted(chunks.items())
        if start < n
    ]
    return np.concatenate(parts)
