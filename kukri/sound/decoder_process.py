"""A process that decodes one sound file by FFmpeg: it can open nothing, and has little memory and time.

Its arguments are FFmpeg's name of the format and the name of the parameter; stdin is the file. It writes
samples at 16 kHz to stdout, float32, and what is damaged to stderr, and ends with 0. A file without sound
makes it end with 2, and stderr says why.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from io import BytesIO
from typing import Any

from kukri.errors import RequestError
from kukri.host.limits import forbid_files, limit_cpu, limit_memory, lower_priority
from kukri.sound.bounds import RATE, check_facts, check_length

_NICENESS = 10  # streams come first
_MAX_CPU_S = 60
_MAX_BYTES = 1 << 30  # bytes of address space
_NUMBERS = ("u8", "s16le", "s16be", "s24le", "s24be", "s32le", "s32be", "f32le", "f32be", "f64le")
_CODECS = ("aac", "alac", "flac", "mp3", "mp3float", "opus", "libopus", "vorbis")
_OPTIONS = {
    "protocol_whitelist": "",
    "codec_whitelist": ",".join([*_CODECS, *(f"pcm_{name}" for name in _NUMBERS)]),
}


def main() -> None:
    """Decode the file of stdin."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy's threads take address space
    av = import_module("av")
    for name in ("numpy", "av.subtitles.stream"):  # which av would import when no file can be opened any more
        import_module(name)
    lower_priority(_NICENESS)
    limit_cpu(_MAX_CPU_S)
    limit_memory(_MAX_BYTES)
    forbid_files()
    _, form, param = sys.argv
    decoder = Decoder(av, param)
    try:
        for piece in decoder.pieces(BytesIO(sys.stdin.buffer.read()), form):
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
    except RequestError as error:
        sys.stderr.write(str(error))
        sys.exit(2)
    if decoder.n_damaged:
        sys.stderr.write(f"is damaged in {decoder.n_damaged} places, which are left out")


class Decoder:
    """Decodes a file. Attribute: n_damaged, the packets that are no sound."""

    def __init__(self, av: Any, param: str) -> None:
        self._av, self._param, self.n_damaged = av, param, 0

    def pieces(self, file: BytesIO, form: str) -> Iterator[bytes]:
        """The samples of a file. Raises RequestError."""
        n = 0
        for frame in self._resampled(self._frames(file, form)):
            n += frame.samples
            check_length(self._param, n / RATE)
            yield frame.to_ndarray().mean(axis=0).tobytes()
        if n == 0:
            raise RequestError.of(self._param, "must have at least one sample that can be decoded")

    def _frames(self, file: BytesIO, form: str) -> Iterator[Any]:
        """The frames of the first track of sound, as far as they can be decoded."""
        broken = (self._av.error.FFmpegError, ValueError, OverflowError)  # what damaged facts raise
        try:
            container = self._av.open(file, format=form, options=_OPTIONS, metadata_errors="ignore")
        except broken:
            raise RequestError.of(self._param, "must be a sound file, but its beginning is damaged") from None
        if not container.streams.audio:
            raise RequestError.of(self._param, "must hold sound, and has no track of it")
        stream = container.streams.audio[0]
        if stream.codec_context is None:
            raise RequestError.of(self._param, "must be encoded by a codec of its format")
        check_length(self._param, (container.duration or 0) / self._av.time_base)
        stream.codec_context.thread_count = 1
        packets = container.demux(stream)
        while True:
            try:
                packet = next(packets, None)
                if packet is None:
                    return
                yield from packet.decode()
            except broken:
                self.n_damaged += 1

    def _resampled(self, frames: Iterator[Any]) -> Iterator[Any]:
        """The frames as floats [channels, n] at 16 kHz. Their form may change on the way."""
        known: Any = None
        heard: Any = None
        resampler: Any = None
        for frame in frames:
            check_facts(self._param, frame.layout.nb_channels, frame.sample_rate)
            form = frame.layout.name, frame.sample_rate, frame.format.name
            if form != known:
                yield from _rest(heard, resampler)
                known, heard = form, self._av.AudioFifo()
                resampler = self._av.AudioResampler("fltp", frame.layout, RATE)
            frame.pts = None  # damaged times would be refused
            heard.write(frame)
            if heard.samples >= frame.sample_rate:  # frames of 20 ms cost more one by one
                yield from resampler.resample(heard.read())
        yield from _rest(heard, resampler)


def _rest(heard: Any, resampler: Any) -> Iterator[Any]:
    """What is left of the frames of one form, if there were any."""
    if heard is not None:
        for frame in [*([heard.read()] if heard.samples else []), None]:
            yield from resampler.resample(frame)


if __name__ == "__main__":
    main()
