"""Samples of sound: checked, and brought to the rate that models hear."""

from __future__ import annotations

from typing import Any

import numpy as np

from kukri.errors import RequestError
from kukri.kernels.arrays import FloatArray
from kukri.sound.bounds import MAX_RATE, MIN_RATE, RATE

_PIECE_S = 60  # seconds that are resampled at once


def checked_samples(samples: Any, rate: int = RATE) -> FloatArray:
    """Samples [n] of one channel, from -1 to 1, at 16 kHz. Raises RequestError on anything else."""
    try:
        found = np.asarray(samples)
    except ValueError:
        found = np.empty((0, 0))
    if found.ndim != 1 or found.dtype.kind not in "fiu":
        raise RequestError.of("samples", f"must be numbers [n] of one channel, not {list(found.shape)}")
    if found.dtype.kind != "f":
        raise RequestError.of("samples", f"must be floats from -1 to 1, not {found.dtype}")
    if not len(found):
        raise RequestError.of("samples", "must have at least one number")
    if not np.isfinite(found).all():
        raise RequestError.of("samples", "must be finite numbers")
    return resampled(found.astype(np.float32), rate)


def resampled(samples: FloatArray, rate: int) -> FloatArray:
    """Samples [n] at 16 kHz, without frequencies above this rate's half. Raises RequestError on the rate."""
    if not MIN_RATE <= rate <= MAX_RATE:
        raise RequestError.of("rate", f"must be from {MIN_RATE} to {MAX_RATE} samples a second, not {rate}")
    if rate == RATE:
        return samples
    pieces = []
    for start in range(0, len(samples), _PIECE_S * rate):  # with a second before and after each
        first = max(start - rate, 0)
        piece = _by_spectrum(samples[first : start + (_PIECE_S + 1) * rate], rate)
        pieces.append(piece[(start - first) // rate * RATE :][: _PIECE_S * RATE])
    return np.concatenate(pieces)[: -(-len(samples) * RATE // rate)]


def _by_spectrum(samples: FloatArray, rate: int) -> FloatArray:
    """`resampled` of a piece; a second of silence keeps its ends apart."""
    n_whole = -(-len(samples) // rate) + 1  # seconds
    spectrum = np.fft.rfft(samples, n_whole * rate)
    n = n_whole * RATE
    made = np.fft.irfft(spectrum[: n // 2 + 1], n) * (RATE / rate)
    return made.astype(np.float32)
