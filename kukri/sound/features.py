"""The log-mel spectrogram that Whisper reads (Radford et al. 2022), of samples at 16 kHz."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from kukri.kernels.arrays import FloatArray
from kukri.sound.bounds import RATE

HOP = 160  # samples from a frame to the next
_HALF = 200  # half of the samples of a frame
_AT_ONCE = 3000  # frames: the spectra of hours do not fit into memory
_LEAST_POWER, _RANGE = 1e-10, 8.0  # the logarithm is cut off there, and this far below its largest
_LINEAR_HZ, _LINEAR_MEL, _MEL_STEP = 1000.0, 15.0, np.log(6.4) / 27.0  # Slaney's scale of pitch
_SILENCE = np.float32(np.log10(_LEAST_POWER))


def log_mel(samples: FloatArray, n_frames: int, n_bands: int) -> FloatArray:
    """The logarithm of the power in each band of each frame, about -1 to 1: float32 [frames, bands].

    Of samples [n] at 16 kHz, up to `n_frames` * 160 of them, silence follows the last. A frame has the 400
    samples around its place.
    """
    # frames beyond the samples are silence, whose logarithm is known
    n_heard = min(-(-(len(samples) + _HALF) // HOP), n_frames)
    if n_heard == n_frames:  # the end is mirrored there, as the beginning is
        heard = np.pad(samples[: n_frames * HOP], (0, n_frames * HOP - len(samples)))
        heard = np.concatenate([heard, heard[-2 : -_HALF - 2 : -1]])
    else:
        heard = np.pad(samples, (0, n_heard * HOP + _HALF - len(samples)))
    heard = np.concatenate([heard[_HALF:0:-1], heard])
    frames = np.lib.stride_tricks.sliding_window_view(heard, 2 * _HALF)[::HOP]
    found = np.full((n_frames, n_bands), _SILENCE, np.float32)
    for start in range(0, n_heard, _AT_ONCE):
        some = slice(start, min(start + _AT_ONCE, n_heard))
        power = np.abs(np.fft.rfft(frames[some] * _window())) ** 2
        for band, (first, weights) in enumerate(_bands(n_bands)):
            # a sum of products in NumPy's own order: libraries of matrix products have one for each processor
            sums = (power[:, first : first + len(weights)] * weights).sum(axis=1)
            found[some, band] = np.log10(np.maximum(sums, _LEAST_POWER))
    scaled: FloatArray = (np.maximum(found, found.max() - np.float32(_RANGE)) + np.float32(4)) / np.float32(4)
    return scaled


@cache
def _window() -> npt.NDArray[np.float64]:
    """Hann's window, of a period."""
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(2 * _HALF) / (2 * _HALF))


@cache
def _bands(n_bands: int) -> list[tuple[int, npt.NDArray[np.float64]]]:
    """The first frequency of the spectrum that counts in each band, and the weights from it on.

    Bands are triangles of equal width on Slaney's scale, up to half of the rate, each of area 1.
    """
    frequencies = np.linspace(0, RATE / 2, _HALF + 1)
    top = _LINEAR_MEL + np.log(RATE / 2 / _LINEAR_HZ) / _MEL_STEP
    mels = np.linspace(0, top, n_bands + 2)
    linear = mels * (_LINEAR_HZ / _LINEAR_MEL)
    edges = np.where(mels < _LINEAR_MEL, linear, _LINEAR_HZ * np.exp(_MEL_STEP * (mels - _LINEAR_MEL)))
    found = []
    for low, middle, high in zip(edges, edges[1:], edges[2:]):
        rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
        weights = np.maximum(np.minimum(rising, falling), 0) * (2 / (high - low))
        counts = np.flatnonzero(weights)
        first, stop = (int(counts[0]), int(counts[-1]) + 1) if len(counts) else (0, 1)
        found.append((first, weights[first:stop]))
    return found
