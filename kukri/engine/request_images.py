"""The images of a request: which of its tokens become their rows, and how far it can be computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kukri.kernels.arrays import FloatArray, IntArray
from kukri.models.both_ways import BothWaysLayers
from kukri.vision.image import ImagePrompt


class _Run(NamedTuple):
    """Tokens `start` to `stop` - 1 of the prompt, rows of `image` from `first_row` on."""

    start: int
    stop: int
    image: int
    first_row: int


class RequestImages:
    """The images of a prompt. `rows` [n_tokens, D] of those that have been encoded, by their numbers.

    With `attends_both_ways` a run of rows is computed in one step, in a chunk of its own. With `n_deep` rows
    hold embeddings and what `n_deep` layers add, one after another. With `merge` each has three
    positions, by its place in the image's grid, whose sides in patches are divided by `merge`. A step reads
    `blank_id`, if there is one, in place of the tokens that mark them.
    """

    def __init__(
        self,
        prompt: ImagePrompt,
        *,
        attends_both_ways: BothWaysLayers = "",
        n_deep: int = 0,
        merge: int = 0,
        blank_id: int | None = None,
    ) -> None:
        self.images, self.attends_both_ways, self.n_deep = prompt.images, attends_both_ways, n_deep
        self._blank_id = blank_id
        self.rows: dict[int, FloatArray] = {}
        self._given: set[int] = set()  # numbers of those that no encoder makes again
        self._runs: list[_Run] = []
        n_rows = [0] * len(prompt.images)
        for start, n_tokens, image in prompt.spans:
            self._runs.append(_Run(start, start + n_tokens, image, n_rows[image]))
            n_rows[image] += n_tokens
        self._positions = self._placed(len(prompt), merge) if merge else None

    @property
    def n_tokens(self) -> list[int]:
        """Tokens of the prompt that each image takes."""
        return [image.n_tokens for image in self.images]

    def give(self, rows: Sequence[FloatArray]) -> None:
        """Takes the rows of all images as they are, instead of what the encoder makes."""
        self.rows = dict(enumerate(rows))
        self._given = set(self.rows)

    def wanted(self, n_cached: int) -> int | None:
        """Return the number of the next image to encode, for a request with `n_cached` tokens in the cache.

        Rows that are in the cache are dropped.
        """
        to_come = [run.image for run in self._runs if run.stop > n_cached]
        for image in [image for image in self.rows if image not in to_come and image not in self._given]:
            del self.rows[image]
        return next((image for image in to_come if image not in self.rows), None)

    def n_ready(self, n_cached: int, n_tokens: int) -> int:
        """Tokens up to which the request's `n_tokens` can be computed, whose next is `n_cached`."""
        for run in self._runs:
            if run.stop > n_cached:
                if run.image not in self.rows:
                    return max(run.start, n_cached)
                if self.attends_both_ways:
                    return run.stop if run.start <= n_cached else run.start
        return n_tokens

    def is_whole(self, start: int) -> bool:
        """True if the token at `start` belongs to a run whose rows see each other, up to the run's end."""
        return bool(self.attends_both_ways) and self.has_rows(start, start + 1)

    def most_rows(self, first: int, stop: int) -> int:
        """The most of tokens `first` to `stop` - 1 that are in one run which must not be cut."""
        runs = self._runs if self.attends_both_ways else ()
        return max((min(run.stop, stop) - max(run.start, first) for run in runs), default=0)

    def mark_seen_ahead(self, seen: npt.NDArray[np.bool_], window: int | None) -> None:
        """Sets in `seen`, of queries by keys [T, T], later keys that a query sees too, as both are rows of
        one run, in a layer with this window or without one.
        """
        if self.attends_both_ways == "all" or (self.attends_both_ways == "windows" and window is not None):
            for run in self._runs:
                tokens = slice(run.start, run.stop)
                seen[tokens, tokens] |= ~np.tri(run.stop - run.start, dtype=np.bool_)

    def identity(self, start: int, stop: int) -> bytes:
        """What tokens `start` to `stop` - 1 depend on besides their ids: b"" without rows of images."""
        parts: list[bytes] = []
        for run in self._runs:
            first, last = max(run.start, start), min(run.stop, stop)
            if first < last:
                row = run.first_row + first - run.start
                place = b"".join(n.to_bytes(4, "little") for n in (first - start, last - first, row))
                parts.append(place + self.images[run.image].digest)
        return b"".join(parts)

    def fill(self, x: FloatArray, start: int, depth: int = 0) -> None:
        """Writes rows over embeddings x [n, D] of the tokens from `start` on.

        With a `depth` from 1 to `n_deep` it adds to x what that layer is to add.
        """
        stop, columns = start + len(x), slice(depth * x.shape[1], (depth + 1) * x.shape[1])
        for run in self._runs:
            first, last = max(run.start, start), min(run.stop, stop)
            if first < last:
                row = run.first_row + first - run.start
                own, rows = slice(first - start, last - start), slice(row, row + last - first)
                before = x[own] if depth else 0
                x[own] = before + self.rows[run.image][rows, columns]

    def blank(self, ids: IntArray, start: int) -> None:
        """Writes `blank_id` over the ids of tokens from `start` on that are rows of images."""
        if self._blank_id is None:
            return
        for run in self._runs:
            ids[max(run.start - start, 0) : max(run.stop - start, 0)] = self._blank_id

    def has_rows(self, start: int, stop: int) -> bool:
        """True if one of tokens `start` to `stop` - 1 is a row of an image."""
        return any(run.start < stop and run.stop > start for run in self._runs)

    def positions(self, start: int, stop: int) -> IntArray | None:
        """The positions [3, n] by which tokens `start` to `stop` - 1 rotate; None: those that count them."""
        if self._positions is None:
            return None
        found = self._positions[:, start:stop]
        if stop > (n := self._positions.shape[1]):  # after the prompt
            first = max(start, n)
            after = np.arange(first, stop, dtype=np.int32) + (self._next - n)
            found = np.concatenate([found, np.broadcast_to(after, (3, stop - first))], axis=1)
        return found

    def _placed(self, n_tokens: int, merge: int) -> IntArray:
        """The positions of a prompt: text counts on from the largest before it.

        A row has the image's first position, that plus its row in the image, and that plus its column.
        """
        positions = np.empty((3, n_tokens), np.int32)
        stop = after = 0  # tokens that are placed, and the position that comes next
        for run in self._runs:
            positions[:, stop : run.start] = np.arange(run.start - stop) + after
            after += run.start - stop
            height, width = (side // merge for side in self.images[run.image].grid[-2:])
            places = np.indices((1, height, width), np.int32).reshape(3, -1)
            positions[:, run.start : run.stop] = places + after
            after, stop = after + max(height, width), run.stop
        positions[:, stop:] = np.arange(n_tokens - stop) + after
        self._next = after + n_tokens - stop
        return positions
