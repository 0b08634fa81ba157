"""The encoder of sound: rows that no token of the text is, and that its cross-attention alone reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kukri.config import ModelConfig
from kukri.engine.spans.images import ImageEncoder
from kukri.kernels.arrays import FloatArray
from kukri.kernels.backend import Backend, CompiledProgram
from kukri.kernels.step import StepLimits, rows_batch
from kukri.sound.prompt import SoundInput
from kukri.sound.whisper import WhisperEncoder, neighbours


class SoundEncoder(ImageEncoder):
    """Makes the rows of sounds, in slices as the rows of images. Rows of zeros fill the last page."""

    input_type = SoundInput

    def __init__(self, model: WhisperEncoder, backend: Backend) -> None:
        super().__init__(model, backend)
        self._encoder = model
        self._stem_program: CompiledProgram | None = None  # compiled at the first sound

    def check(self, given: Any, text: ModelConfig) -> None:
        self._encoder.check(given)

    def places(self, given: Any) -> None:
        return None

    def encode(self, given: Any, is_brief: Callable[[], bool]) -> Iterator[FloatArray | None]:
        for rows in super().encode(self._stem(given.features), is_brief):
            yield None if rows is None else np.pad(rows, ((0, given.n_tokens - len(rows)), (0, 0)))

    def _stem(self, features: FloatArray) -> Any:
        """The first convolution of a window of features [frames, bands] -> [frames, D]."""
        if self._stem_program is None:
            limits = StepLimits.of_rows(len(features))
            self._stem_program = self._backend.compile(self._encoder.stem, None, limits)
        return self._stem_program(rows_batch(neighbours(features))).numpy().copy()
