"""Sound files to samples: WAV files here, and files of other formats by FFmpeg in a process of its own."""

from __future__ import annotations

import logging
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from kukri.errors import RequestError, UnsupportedError
from kukri.host.installed import needs_package
from kukri.kernels.arrays import FloatArray
from kukri.sound.bounds import MAX_FILE_BYTES
from kukri.sound.wav import decode_wav, is_wav

_MAX_WAIT_S = 120.0  # for a decoder, however busy the machine is; its own limit is of processor time
_log = logging.getLogger("kukri.sound")


def read_sound_file(path: Path, param: str = "file") -> FloatArray:
    """`decode_sound` of a file."""
    try:
        with path.open("rb") as file:  # a pipe or a device states no size
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise RequestError.of(param, f"cannot be read: {error.strerror or error}") from None
    return decode_sound(data, param)


def decode_sound(data: bytes | bytearray, param: str = "file") -> FloatArray:
    """The samples of a sound file at 16 kHz, float32 [n] from -1 to 1, its channels mixed.

    Of a file that is damaged, what can be read, with a warning in the log. Raises RequestError that names
    what is wrong, and UnsupportedError without PyAV on a format other than WAV.
    """
    if len(data) > MAX_FILE_BYTES:
        raise RequestError.of(param, f"must have at most {MAX_FILE_BYTES >> 20} MiB")
    if is_wav(data):
        return decode_wav(data, param)
    if not data:
        raise RequestError.of(param, "must not be empty")
    form = format_of(data[:12])
    if form is None:
        raise RequestError.of(param, "must be a sound file: WAV, FLAC, MP3, AAC, Ogg, M4A, MP4 or WebM")
    if find_spec("av") is None:
        raise UnsupportedError(needs_package("sound other than WAV", "av", "audio"))
    numbers, warning = _decoded(data, form, param)
    samples = np.frombuffer(numbers, np.float32)
    if not np.isfinite(samples).all():
        raise RequestError.of(param, "must hold finite numbers")
    if warning:
        _log.warning("a sound file %s", warning)
    return np.clip(samples, -1, 1)


def format_of(head: bytes | bytearray) -> str | None:
    """FFmpeg's name of a file's format, by its first bytes: FFmpeg's own guess would know playlists."""
    for start, name in (
        (b"fLaC", "flac"),
        (b"OggS", "ogg"),
        (b"ID3", "mp3"),
        (b"\x1a\x45\xdf\xa3", "matroska"),
    ):
        if head.startswith(start):
            return name
    if head[4:8] == b"ftyp":
        return "mp4"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:  # a frame of MPEG
        return "mp3" if head[1] & 6 else "aac"
    return None


def _decoded(data: bytes | bytearray, form: str, param: str) -> tuple[bytes, str]:
    """The samples that a new process decodes, as bytes, and what is damaged. Raises RequestError."""
    worker = [sys.executable, "-P", "-m", "kukri.sound.decoder_process", form, param]
    with suppress(subprocess.TimeoutExpired):  # a session of its own: Ctrl-C at a terminal is not for it
        ended = subprocess.run(
            worker, input=data, capture_output=True, timeout=_MAX_WAIT_S, start_new_session=True
        )
        said = ended.stderr.decode("utf-8", "replace").strip()
        if ended.returncode == 0:
            return ended.stdout, said
        if ended.returncode == 2:
            raise RequestError(said, param=param)
    raise RequestError.of(
        param, "must be decoded within the limits of time and memory: convert it to WAV first"
    )
