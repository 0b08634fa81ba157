"""WAV files to samples. Whatever comes is hostile: its facts are checked before memory is taken by them."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.errors import RequestError
from kukri.kernels.arrays import FloatArray
from kukri.sound.bounds import check_facts, check_length
from kukri.sound.samples import resampled

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_TYPES = {
    (_PCM, 8): "u1",
    (_PCM, 16): "<i2",
    (_PCM, 24): "u1",
    (_PCM, 32): "<i4",
    (_FLOAT, 32): "<f4",
    (_FLOAT, 64): "<f8",
}


def is_wav(data: bytes | bytearray) -> bool:
    """Whether a file begins as WAV files do."""
    return data[:4] == b"RIFF" and data[8:12] == b"WAVE"


def decode_wav(data: bytes | bytearray, param: str = "file") -> FloatArray:
    """The samples of a WAV file at 16 kHz, float32 [n] from -1 to 1: the mean of its channels.

    Integers of 8 to 32 bits and floats are read; of a file that is cut off, what is there. Raises
    RequestError that names what is wrong.
    """
    facts: bytes | None = None
    start = 12
    while start + 8 <= len(data):
        name, size = data[start : start + 4], int.from_bytes(data[start + 4 : start + 8], "little")
        body = memoryview(data)[start + 8 : start + 8 + size]
        if name == b"fmt ":
            facts = bytes(body[:40])
        elif name == b"data":
            if facts is None:
                break
            return _samples(facts, body, param)
        start += 8 + size + size % 2
    raise RequestError.of(param, f"must have the part {'fmt' if facts is None else 'data'} before its end")


def _samples(facts: bytes, body: memoryview, param: str) -> FloatArray:
    if len(facts) < 16:
        raise RequestError.of(param, "must have 16 bytes in its part 'fmt'")
    form, n_channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", facts)
    if form == _EXTENSIBLE and len(facts) >= 26:
        form = int.from_bytes(facts[24:26], "little")
    dtype = _TYPES.get((form, bits))
    if dtype is None:
        raise RequestError.of(param, f"must hold integers or floats, not form {form} of {bits} bits")
    check_facts(param, n_channels, rate)
    n = len(body) // (n_channels * bits // 8)
    if n == 0:
        raise RequestError.of(param, "must have at least one sample")
    check_length(param, n / rate)
    numbers = np.frombuffer(body[: n * n_channels * bits // 8], dtype)
    channels = _scaled(numbers, bits).reshape(n, n_channels)
    mixed = channels[:, 0] if n_channels == 1 else channels.mean(axis=1, dtype=np.float32)
    if not np.isfinite(mixed).all():
        raise RequestError.of(param, "must hold finite numbers")
    return resampled(np.clip(mixed, -1, 1), rate)


def _scaled(numbers: npt.NDArray[Any], bits: int) -> FloatArray:
    """Numbers as floats from -1 to 1; numbers of 8 bits have no sign, and 24 bits come as bytes."""
    if numbers.dtype.kind == "f":
        return numbers.astype(np.float32)
    if bits == 24:
        padded = np.zeros((len(numbers) // 3, 4), np.uint8)
        padded[:, 1:] = numbers.reshape(-1, 3)
        numbers, bits = padded.view("<i4").reshape(-1), 32
    found = numbers.astype(np.float32)  # in place from here on: a file may be all that fits into memory
    if bits == 8:
        found -= np.float32(128)
    found /= np.float32(1 << (bits - 1))
    return found
