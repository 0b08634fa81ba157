"""Encodes images between steps, a little at a time, and keeps their rows of embeddings by digest.

An encoder runs in programs of its own: one for a part of an image (`VisionModel.parts`), one for its
projector. While others generate, a part is cut at its layers into slices of a few milliseconds. No bit of a
row depends on slices, on other images, or on whether the row was kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import numpy as np

from kukri.kernels.arrays import FloatArray
from kukri.kernels.backend import Backend, CompiledProgram
from kukri.kernels.step import ForwardBatch, StepLimits
from kukri.vision.encoder import ImagePart, VisionModel
from kukri.vision.image import ImageInput

_SLICE_S = 0.005  # a slice of layers runs at least so long while others generate


class Encodings:
    """Rows of embeddings by digest, up to `max_bytes` of them, the least recently used forgotten first.

    Attributes: model; n_encoded, images encoded so far; n_found, those whose rows were kept.
    """

    def __init__(
        self,
        model: VisionModel,
        backend: Backend,
        max_bytes: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.model, self._max_bytes, self._clock = model, max_bytes, clock
        self._programs = _EncoderPrograms(model, backend)
        self._kept: OrderedDict[bytes, FloatArray] = OrderedDict()
        self._n_bytes = 0
        self._job: _Job | None = None
        self.n_encoded = self.n_found = 0

    def find(self, image: ImageInput) -> FloatArray | None:
        """The rows [n_tokens, D] of an image that was encoded, if they are kept."""
        rows = self._kept.get(image.digest)
        if rows is not None:
            self._kept.move_to_end(image.digest)
            self.n_found += 1
        return rows

    def advance(self, image: ImageInput, *, is_brief: bool) -> FloatArray | None:
        """Encodes an image for a while, by parts or, with `is_brief`, by slices; the rows once it is done.

        An image that is not finished is continued by the next call with it, and begun again after another.
        """
        if self._job is None or self._job.image.digest != image.digest:
            self._job = _Job(image, self.model)
        deadline_s = self._clock() + _SLICE_S
        while not self._programs.advance(self._job, is_brief=is_brief) or self._job.next_part():
            if self._clock() > deadline_s:
                return None
        rows, self._job = np.concatenate(self._job.rows), None
        rows.flags.writeable = False
        self._keep(image.digest, rows)
        self.n_encoded += 1
        return rows

    def is_under_way(self, image: ImageInput) -> bool:
        """True if an image has been begun."""
        return self._job is not None and self._job.image.digest == image.digest

    def _keep(self, digest: bytes, rows: FloatArray) -> None:
        self._kept[digest] = rows
        self._n_bytes += rows.nbytes
        while self._n_bytes > self._max_bytes:
            self._n_bytes -= self._kept.popitem(last=False)[1].nbytes


class _Job:
    """An image under way: the rows of its parts so far, and the hidden states of the part that is cut."""

    def __init__(self, image: ImageInput, model: VisionModel) -> None:
        self.image, self._parts = image, model.parts(image)
        self.part: ImagePart = next(self._parts)
        self.rows: list[FloatArray] = []
        self.n_cuts = 0
        self.hidden: FloatArray | None = None

    def next_part(self) -> bool:
        """Moves on; False if there is no further part."""
        self.n_cuts, self.hidden = 0, None
        following = next(self._parts, None)
        if following is not None:
            self.part = following
        return following is not None


class _EncoderPrograms:
    """An encoder and its projector, compiled at the first image, and again for a larger one."""

    def __init__(self, model: VisionModel, backend: Backend) -> None:
        self._model, self._backend = model, backend
        self._compiled: tuple[CompiledProgram, CompiledProgram] | None = None
        self._n_patches = model.config.side**2  # that there is room for
        n_layers = model.config.encoder.n_layers
        taps = ("hook_resid_pre", "hook_resid_mid")
        # a part may be cut where the residual stream is all that later layers read
        self._cuts = [f"blocks.{layer}.{tap}" for layer in range(n_layers) for tap in taps][1:]

    def advance(self, job: _Job, *, is_brief: bool) -> bool:
        """Runs a slice of the job's part, or what is left of it; True once its rows are there."""
        encoder, projector = self._programs(len(job.part.patches))
        is_brief = is_brief and self._backend.begins_at_taps
        start = self._cuts[job.n_cuts - 1] if job.n_cuts else None
        stop = self._cuts[job.n_cuts] if is_brief and job.n_cuts < len(self._cuts) else None

        def on_tap(name: str, x: FloatArray) -> None:
            if name == start and job.hidden is not None:
                x[:] = job.hidden
            elif name == stop:
                job.hidden = x.copy()

        batch = _batch(job.part.patches, self._backend.page_tokens)
        result = encoder(batch, on_tap, start=start, stop=stop)
        if stop is not None:
            job.n_cuts += 1
            return False
        merged = self._model.merged(result.numpy(), job.part.grid)
        rows = projector(_batch(merged, self._backend.page_tokens))
        job.rows.append(rows.numpy().copy())
        return True

    def _programs(self, n_patches: int) -> tuple[CompiledProgram, CompiledProgram]:
        """The encoder and the projector, for parts of up to so many patches."""
        if self._compiled is None or self._n_patches < n_patches:
            while self._n_patches < n_patches:
                self._n_patches *= 2
            self._compiled, backend, model = None, self._backend, self._model
            n_pages = -(-self._n_patches // backend.page_tokens)
            cache = backend.new_cache([model.cache_layer], n_pages, 0, backend.exact_kv_type)
            limits = StepLimits(self._n_patches, 1, 1, n_pages)
            n_rows = self._n_patches // model.config.merge**2
            self._compiled = (
                backend.compile(model.encode, cache, limits, frozenset(self._cuts)),
                backend.compile(model.project, cache, replace(limits, max_tokens=n_rows)),
            )
        return self._compiled


def _batch(activations: FloatArray, page_tokens: int) -> ForwardBatch:
    """One sequence of rows, without logits."""
    n, one = len(activations), np.array([0], np.int32)
    places = np.arange(n, dtype=np.int32)
    n_pages = -(-n // page_tokens)
    return ForwardBatch(
        np.zeros(n, np.int32),
        places,
        places,
        np.array([0, n], np.int32),
        np.array([n], np.int32),
        np.arange(n_pages, dtype=np.int32)[None],
        one[:0],
        activations=activations,
    )
