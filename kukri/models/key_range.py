"""Where keys lie whose matrix has a bias, as far as the bias says it.

Qwen2's biases reach hundreds in dimensions that hardly rotate, where the rest of a key is a few units large.
One scale for all dimensions leaves the others no bits. SageAttention (Zhang et al. 2024) subtracts the mean
of a prompt's keys, KIVI (Liu et al. 2024) has a scale for each dimension. A bias is known
before any token is, so here no number depends on the contents of a cache.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kukri.kernels.arrays import FloatArray
from kukri.kernels.specs import KeyRange
from kukri.kernels.weight_handles import RopeFrequencies, Vector

_POSITIONS = 8192  # first positions, over which a rotating bias is averaged
_PLAIN_REACH = 4.0  # how large the numbers of a key are without their bias
_STEP = 1 / 16  # middles are its multiples, so that no function's last bit decides one


def key_range(bias: FloatArray, rope: RopeFrequencies | None) -> KeyRange:
    """The range of keys that have this bias [G, K] before their rotation, the same everywhere to the bit."""
    middle = bias.astype(np.float64)
    spread = np.zeros_like(middle)  # the mean square of what rotates away from the middle
    if rope is not None:
        half = rope.rotary_dim // 2
        low, high = slice(0, half), slice(half, 2 * half)
        pairs = rope.scale * (middle[:, low] + 1j * middle[:, high])
        mean = pairs * _mean_turn(np.array(rope.inverse))
        middle[:, low], middle[:, high] = mean.real, mean.imag
        spread[:, low] = spread[:, high] = np.abs(pairs) ** 2 - np.abs(mean) ** 2
    reach = np.exp2(np.rint(np.log2(np.sqrt(spread + _PLAIN_REACH**2))))  # powers of two: nothing is rounded
    whole = np.rint(middle / _STEP) * _STEP
    return KeyRange(*(Vector(side.astype(np.float32).reshape(-1)) for side in (whole, reach)))


def _mean_turn(frequencies: npt.NDArray[np.float64]) -> npt.NDArray[np.complex128]:
    """The mean of exp(i position frequency) over the first positions, of each frequency."""
    turn = 1j * np.maximum(frequencies, 1e-30)
    mean: npt.NDArray[np.complex128] = np.expm1(_POSITIONS * turn) / (_POSITIONS * np.expm1(turn))
    return mean
