"""Sounds to texts on the engine of one process: every window of every sound is a call like any other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy.typing as npt

from kukri.calls.engine_calls import EngineCalls
from kukri.calls.speech import Asked, Speech, SpeechOptions, Transcription
from kukri.kernels.arrays import FloatArray
from kukri.sound.files import decode_sound, read_sound_file
from kukri.sound.samples import checked_samples

# a path, the bytes of a file, or numbers [n] at 16 kHz
Sound: TypeAlias = str | os.PathLike[str] | bytes | npt.NDArray[Any]


def read_sound(sound: Sound) -> FloatArray:
    """The samples of a sound, float32 [n] at 16 kHz. Raises as `kukri.sound.files.decode_sound` does."""
    if isinstance(sound, str | os.PathLike):
        return read_sound_file(Path(sound), "sound")
    if isinstance(sound, bytes):
        return decode_sound(sound, "sound")
    return checked_samples(sound)


def transcribe(
    calls: EngineCalls, speech: Speech, sounds: Sequence[FloatArray], options: SpeechOptions
) -> list[Transcription]:
    """The transcription of each sound, in order; the next windows of all are one batch."""
    under_way = [speech.transcribe(samples, options) for samples in sounds]
    found: list[Any] = [None] * len(sounds)
    asked: dict[int, Asked] = {i: next(one) for i, one in enumerate(under_way)}
    while asked:
        batch = [calls.call(one.prompt, one.params) for one in asked.values()]
        for call, one in zip(batch, asked.values()):
            for listener in one.listeners:
                call.answers[0].request.listen(listener)
        for i, result in zip(list(asked), calls.run(batch)):
            try:
                asked[i] = under_way[i].send(result.token_ids)
            except StopIteration as end:
                found[i] = end.value
                del asked[i]
    return found
