"""Sounds encoded by FFmpeg in each format that is read."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest

# name of a file: FFmpeg's format, its encoder, the rate, and how far the tone may be from what was encoded
FORMATS = {
    "flac": ("flac", "flac", 44100, 1e-4),
    "mp3": ("mp3", "libmp3lame", 22050, 0.03),
    "ogg": ("ogg", "libopus", 48000, 0.03),
    "m4a": ("ipod", "aac", 44100, 0.03),
    "mp4": ("mp4", "alac", 44100, 1e-4),
    "webm": ("webm", "libopus", 48000, 0.03),
    "aac": ("adts", "aac", 44100, 0.03),
    "mka": ("matroska", "pcm_f32le", 8000, 1e-4),
}


def tone(rate: int, seconds: float = 1.0) -> Any:
    """A tone of 440 Hz, float32 [n]."""
    return (0.5 * np.sin(2 * np.pi * 440 * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


def encoded(samples: Any, format: str, codec: str, rate: int, layout: str = "mono") -> bytes:
    """A file of samples [n], in each channel of up to 8. Skips the test without PyAV."""
    av: Any = pytest.importorskip("av")
    made = BytesIO()
    with av.open(made, "w", format=format) as file:
        stream = file.add_stream(codec, rate=rate, layout=layout)
        context = stream.codec_context
        frame = av.AudioFrame.from_ndarray(
            np.tile(samples, (context.layout.nb_channels, 1)), format="fltp", layout=layout
        )
        frame.sample_rate = rate
        convert, queue = av.AudioResampler(context.format.name, layout, rate), av.AudioFifo()
        for one in [*convert.resample(frame), *convert.resample(None)]:
            queue.write(one)
        while (one := queue.read(context.frame_size or 1024, partial=True)) is not None:
            file.mux(stream.encode(one))
        file.mux(stream.encode(None))
    return made.getvalue()


def encoded_tone(name: str, seconds: float = 1.0) -> bytes:
    """A file of `tone`, in a format by its name."""
    format, codec, rate, _ = FORMATS[name]
    return encoded(tone(rate, seconds), format, codec, rate)
