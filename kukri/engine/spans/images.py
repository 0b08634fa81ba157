"""The encoder of images: the first kind of rows that replace embeddings.

An encoder runs in two programs of its own, for a part of an image (`VisionModel.parts`) and for its
projector. While other requests generate, a part is cut into slices of some milliseconds: at its layers, and
layers and the projector by rows. Where attention is cut, a layer's keys and values are stored in slices
before it, and computed again with the queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from kukri.config import ModelConfig
from kukri.engine.spans.encoder import SpanEncoder
from kukri.errors import RequestError
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.backend import Backend, CompiledProgram
from kukri.kernels.step import StepLimits, plain_batch, rows_batch
from kukri.kernels.taps import Hooks, TapListener
from kukri.models.spans import SpanInput
from kukri.vision.encoder import ImagePart, VisionModel
from kukri.vision.image import ImageInput

_MLP_ROWS, _PROJECTED_ROWS = 1024, 64  # most rows of a slice
_CUT_FROM = 1.5  # slices as long as an MLP's that a layer's attention takes at least before it is cut


class ImageEncoder(SpanEncoder):
    """Makes the rows of images. Attributes: model."""

    input_type: type[SpanInput] = ImageInput

    def __init__(self, model: VisionModel, backend: Backend) -> None:
        config = model.config
        self.model, self._backend = model, backend
        self.attends_both_ways, self.most_run_rows = config.attends_both_ways, config.most_run_rows
        self.n_deep, self.blank_id = len(config.deep_layers), config.blank_id
        self._programs = _EncoderPrograms(model, backend)
        self._listening = self._programs  # with the taps that `listen` had last

    def check(self, given: ImageInput, text: ModelConfig) -> None:
        if self.model.config.has_places and not text.rope.axes:
            raise RequestError(
                "'mrope_section' is required in the model's config.json for images: add the original's",
                param="images",
            )
        self.model.check(given)

    def places(self, given: ImageInput) -> IntArray | None:
        """The row and column of each row of embeddings in the image's grid."""
        config = self.model.config
        if not config.has_places:
            return None
        height, width = (side // config.merge for side in given.grid[-2:])
        return np.indices((1, height, width), np.int32).reshape(3, -1)

    def encode(self, given: ImageInput, is_brief: Callable[[], bool]) -> Iterator[FloatArray | None]:
        job = _Job((part, Hooks()) for part in self.model.parts(given))
        while not self._programs.advance(job, is_brief=is_brief()) or job.next_part():
            yield None
        yield _together(job.rows)

    def listen(self, parts: Iterator[tuple[ImagePart, TapListener]]) -> FloatArray:
        """Return the rows [n_tokens, D] of an image, encoded at once whether or not its rows are kept.

        Each part's listener is shown taps [T, width], and all parts' listeners need the same taps. The rows
        are not kept.
        """
        job = _Job(parts)
        if not job.listener.names <= self._listening.taps:
            self._listening = _EncoderPrograms(self.model, self._backend, job.listener.names)
        while not self._listening.advance(job, is_brief=False) or job.next_part():
            pass
        return _together(job.rows)


class _Job:
    """An image under way: the rows of its finished parts, and the state of the part that is cut."""

    def __init__(self, parts: Iterator[tuple[ImagePart, TapListener]]) -> None:
        self._parts = parts
        self.rows: list[FloatArray] = []
        self.next_part()

    def next_part(self) -> bool:
        """Moves on; False if there is no further part."""
        following = next(self._parts, None)
        if following is None:
            return False
        self.part, self.listener = following
        self.n_cuts = 0
        self.hidden: FloatArray | None = None  # hidden states at the last cut
        self.n_stored = 0  # rows of the next attention layer whose keys and values are in the cache
        self.deep: dict[str, list[FloatArray]] = {}  # further inputs of the projector, by tap, in order
        self.merged: dict[
            str | None, FloatArray
        ] = {}  # the projector's inputs, by tap; None: the last states
        self.slices: list[FloatArray] = []  # finished rows of the next result
        return True

    @property
    def n_sliced(self) -> int:
        """Rows in `slices`."""
        return sum(map(len, self.slices))

    def add_slice(self, rows: FloatArray, n_rows: int) -> FloatArray | None:
        """Adds a slice; all `n_rows` rows once they are there."""
        self.slices.append(rows)
        if self.n_sliced < n_rows:
            return None
        whole, self.slices = _together(self.slices), []
        return whole


class _EncoderPrograms:
    """An encoder and its projector, compiled at the first image, and again for a larger one.

    The listeners of jobs are shown `taps`.
    """

    def __init__(self, model: VisionModel, backend: Backend, taps: frozenset[str] = frozenset()) -> None:
        self._model, self._backend, self.taps = model, backend, taps
        self._compiled: tuple[CompiledProgram, CompiledProgram] | None = None
        config = model.config
        self._n_patches, self._n_windows = config.n_patches, 1  # capacity: patches and windows
        layers = range(config.encoder.n_layers)
        places = ("hook_resid_pre", "hook_resid_mid")
        # a part may be cut where the residual stream is all that later layers read
        self._cuts = [f"blocks.{layer}.{tap}" for layer in layers for tap in places][1:]
        self._deep = [f"blocks.{layer}.hook_resid_post" for layer in config.deep_layers]
        self._has_windows = [config.has_windows(layer) for layer in layers]

    def advance(self, job: _Job, *, is_brief: bool) -> bool:
        """Runs a slice of the job's part, or all up to the next cut that it needs; True once its rows are
        there.
        """
        part = job.part
        encoder, projector = self._programs(len(part.patches), max(len(part.windows), 1))
        if None not in job.merged:
            self._encode(job, encoder, is_brief=is_brief and self._backend.begins_at_taps)
            return False
        first, n_rows = job.n_sliced, len(job.merged[None])
        own = slice(first, first + _PROJECTED_ROWS if is_brief else n_rows)
        following = np.concatenate([job.merged[name][own] for name in (None, *self._deep)], axis=1)
        rows = projector(rows_batch(following)).numpy().copy()
        projected = job.add_slice(rows, n_rows)
        if projected is None:
            return False
        job.rows.append(projected)
        return True

    def _encode(self, job: _Job, encoder: CompiledProgram, *, is_brief: bool) -> None:
        """Runs a slice of the job's layers, or all up to the next cut that they need."""
        part, n_rows = job.part, len(job.part.patches)
        is_brief = is_brief or max(job.n_sliced, job.n_stored) > 0
        start = self._cuts[job.n_cuts - 1] if job.n_cuts else None
        n_cuts = self._next_cut(job.n_cuts, is_brief=is_brief)
        stop = None if n_cuts is None else self._cuts[n_cuts]
        rows, lengths, n_context = self._slice(job, is_brief=is_brief)
        ends: list[FloatArray] = []
        is_begun = start is None

        def on_tap(name: str, x: FloatArray) -> FloatArray:
            nonlocal is_begun
            if name == start and job.hidden is not None:
                x[:] = job.hidden[rows]  # these rows were shown before
                is_begun = True
            elif is_begun:  # backends that begin at no tap compute earlier layers again, with other windows
                replacement = job.listener(name, x)
                x = x if replacement is None else replacement
            if name == stop:
                ends.append(x.copy())
            if name in self._deep:
                job.deep.setdefault(name, []).append(x.copy())
            return x

        positions = None if part.positions is None else part.positions[:, rows]
        patches, page_tokens = part.patches[rows], self._backend.page_tokens
        batch = plain_batch(lengths or [len(patches)], page_tokens)
        if n_context:
            pages = np.arange(-(-n_rows // page_tokens), dtype=np.int32)
            batch = plain_batch([len(patches)], page_tokens, [pages[None]], starts=[rows.start])
            batch = replace(batch, context_len=np.array([n_context], np.int32))
        batch = replace(batch, rope_positions=positions, activations=patches)
        result = encoder(batch, on_tap, start=start, stop=stop)
        if n_context == 1:
            job.n_stored = rows.stop
            return
        job.n_stored = 0 if rows.stop == n_rows else job.n_stored
        hidden = job.add_slice(result.numpy().copy() if n_cuts is None else ends[0], n_rows)
        if hidden is None:
            return
        job.hidden = hidden
        for name, states in job.deep.items():
            job.merged[name] = self._model.merged(_together(states), part.grid)
        job.deep.clear()
        if n_cuts is None:
            job.merged[None] = self._model.merged(hidden, part.grid)
        else:
            job.n_cuts = n_cuts + 1

    def _slice(self, job: _Job, *, is_brief: bool) -> tuple[slice, Sequence[int], int]:
        """The rows that are computed next, the lengths of their windows, and the tokens that they see.

        Those are 1 for rows whose keys and values are to be stored, and 0 if rows see themselves alone.
        """
        part, first, n_rows = job.part, job.n_sliced, len(job.part.patches)
        is_mlp, config = job.n_cuts % 2 == 1, self._model.config.encoder
        # the layer whose attention comes next says what patches attend to
        layer = min((job.n_cuts + 1) // 2, len(self._has_windows) - 1)
        has_windows = self._has_windows[layer]
        if not is_brief:
            return slice(0, n_rows), part.windows if has_windows else (), 0
        if is_mlp:
            return slice(first, min(first + _MLP_ROWS, n_rows)), (), 0
        if self._model.config.convolves(layer):  # over neighbouring windows, for the time of half an MLP
            return slice(0, n_rows), part.windows, 0
        if has_windows:
            ends = np.cumsum(part.windows)
            start = int(np.searchsorted(ends, first, "right"))
            stop = max(int(np.searchsorted(ends, first + _MLP_ROWS, "right")), start + 1)
            return slice(first, int(ends[stop - 1])), part.windows[start:stop], 0
        # as many rows as take the time of an MLP's; attention takes twice as long an operation
        most = max(_MLP_ROWS * config.d_ffn // (2 * config.d_model + 2 * n_rows), 1)
        if n_rows <= _CUT_FROM * most:
            return slice(0, n_rows), (), 0
        if job.n_stored < n_rows:
            return slice(job.n_stored, min(job.n_stored + _MLP_ROWS, n_rows)), (), 1
        return slice(first, min(first + most, n_rows)), (), n_rows

    def _next_cut(self, n_cuts: int, *, is_brief: bool) -> int | None:
        """The number of the cut that ends a slice: the next, or the one before layers that see more or less;
        None if the slice is the last.
        """
        if is_brief:
            return n_cuts if n_cuts < len(self._cuts) else None
        layer = (n_cuts + 1) // 2
        for after in range(layer + 1, len(self._has_windows)):
            if self._has_windows[after] != self._has_windows[layer]:
                return 2 * after - 1
        return None

    def _programs(self, n_patches: int, n_windows: int) -> tuple[CompiledProgram, CompiledProgram]:
        """Return the encoder and the projector for parts of at most `n_patches` and `n_windows`."""
        if self._compiled is None or self._n_patches < n_patches or self._n_windows < n_windows:
            while self._n_patches < n_patches:
                self._n_patches *= 2
            self._n_windows = max(self._n_windows, n_windows)
            self._compiled, backend, model = None, self._backend, self._model
            most_pages = -(-self._n_patches // backend.page_tokens)
            n_pages = most_pages + self._n_windows  # each window's last may be full in part
            cache = backend.new_cache([model.cache_layer], n_pages, 0, backend.exact_kv_type)
            n = self._n_patches
            limits = StepLimits(n, self._n_windows, n, most_pages, free_contexts=True)
            self._compiled = (
                backend.compile(model.encode, cache, limits, self.taps.union(self._cuts, self._deep)),
                backend.compile(model.project, None, StepLimits.of_rows(n // model.config.merge**2)),
            )
        return self._compiled


def _together(slices: Sequence[FloatArray]) -> FloatArray:
    """Concatenate slices of rows; a single slice is returned without a copy."""
    return slices[0] if len(slices) == 1 else np.concatenate(slices)
