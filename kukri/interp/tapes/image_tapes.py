"""Tapes of an encoder of images with its projector, and of a text with rows of images in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kukri.engine.spans.embedding_spans import EmbeddingSpans
from kukri.interp.hooks.attention import seen_keys
from kukri.interp.tapes.tape import Matrices, Tape, TextRows, Variable
from kukri.kernels.arrays import FloatArray
from kukri.kernels.rope_rows import RopeRows
from kukri.kernels.specs import AttentionSpec, ConvSpec
from kukri.kernels.taps import tap_name
from kukri.kernels.weight_handles import RopeFrequencies
from kukri.vision.encoder import ImagePart, VisionModel


class EncoderTape(Tape):
    """An encoder and its projector on one part of an image.

    Patterns are computed again on the way back, because for thousands of patches they are larger than all
    else.
    """

    keeps_patterns = False

    def __init__(
        self,
        matrices: Matrices,
        ropes: dict[RopeFrequencies, RopeRows],
        model: VisionModel,
        given: Mapping[str, FloatArray] | None = None,
    ) -> None:
        super().__init__(matrices, ropes, given)
        self._model, self._layer = model, 0

    def see(self, part: ImagePart, until: str | None = None) -> Variable:
        """The part's rows [R, width], or the value at the tap `until` [T, width]."""
        config, n = self._model.config, len(part.patches)
        self._windows = part.windows
        self._read = self._new(part.patches, lambda g: None)
        batch = TextRows.of([np.zeros(n, np.int32)], part.positions)
        hidden = self.run(self._model.encode, batch)
        if until is not None:
            return self._tapped[until]
        deep = [self._tapped[f"blocks.{layer}.hook_resid_post"] for layer in config.deep_layers]
        self._read = self._merged([hidden, *deep], part.grid)
        return self.run(self._model.project, batch)

    def activations(self, batch: TextRows, width: int) -> Variable:
        """Return the patches, or the projector's input."""
        return self._read

    def attention(
        self, q: Variable, k: Variable | None, v: Variable | None, spec: AttentionSpec, batch: TextRows
    ) -> Variable:
        """Attention within windows, in layers that have some."""
        return super().attention(q, k, v, spec, self._by_window(batch))

    def conv(self, x: Variable, spec: ConvSpec, batch: TextRows) -> Variable:
        return super().conv(x, spec, self._by_window(batch))

    def _by_window(self, batch: TextRows) -> TextRows:
        if not self._model.config.has_windows(self._layer):
            return batch
        return TextRows.of([np.zeros(n, np.int32) for n in self._windows])

    def tap(self, name: str, layer: int | None, x: Variable) -> Variable:
        self._layer = self._layer if layer is None else layer
        return super().tap(name, layer, x)

    def _merged(self, states: Sequence[Variable], grid: tuple[int, int]) -> Variable:
        model = self._model
        parts = [model.merged(state.x, grid) for state in states]

        def pull(g: FloatArray) -> None:
            for state, own in zip(states, np.split(g, len(states), axis=1)):
                state.add(model.unmerged(own, grid))

        return self._new(np.concatenate(parts, axis=1), pull)


class SeeingTape(Tape):
    """A text with images, whose rows stand in place of embeddings, and are added to deeper layers."""

    def __init__(
        self,
        matrices: Matrices,
        ropes: dict[RopeFrequencies, RopeRows],
        spans: EmbeddingSpans,
    ) -> None:
        """`spans` have the rows of all."""
        super().__init__(matrices, ropes)
        self._spans = spans
        numbers = range(len(spans.inputs))
        self._places = [spans.places(number) for number in numbers]
        self.row_grads = [np.zeros_like(spans.rows[number]) for number in numbers]  # after `backward`
        deep = {f"blocks.{i}.hook_resid_post": i + 1 for i in range(spans.n_deep)}
        self._depths = {"hook_embed": 0, **deep}

    def seen(self, spec: AttentionSpec, n_tokens: int) -> npt.NDArray[np.bool_]:
        """Rows of an image that see each other do so both ways."""
        found = seen_keys(spec, n_tokens)
        self._spans.mark_seen_ahead(found, spec.window)
        return found

    def tap(self, name: str, layer: int | None, x: Variable) -> Variable:
        depth = self._depths.get(tap_name(name, layer))
        return super().tap(name, layer, x if depth is None else self._filled(x, depth))

    def _filled(self, x: Variable, depth: int) -> Variable:
        y = x.x.copy()
        self._spans.fill(y, 0, depth)
        columns = slice(depth * y.shape[1], (depth + 1) * y.shape[1])
        rows = list(zip(self._places, self.row_grads))

        def pull(g: FloatArray) -> None:
            back = g.copy()
            for places, grads in rows:
                grads[:, columns] = g[places]
                if not depth:
                    back[places] = 0
            x.add(back)

        return self._new(y, pull)
