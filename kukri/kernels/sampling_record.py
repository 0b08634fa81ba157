"""A row's record: what a request asks of its row of logits, and what came of it, as every backend reads it.

The arithmetic is defined so that backends agree to the bit however they order their sums:

- A token's *depth* is t = (logit - peak) * (scale * log2(e)), in float32: its odds are 2^t. The peak is the
  largest logit in play, and the scale what temperatures have made of 1.
- Its *weight* is 2^t in units of 1 / WEIGHT_ONE, rounded to a whole number, by float32 arithmetic without
  fused operations. Sums of weights are whole numbers below 2^53: exact in float64 in
  any order. So a token some 10^10 times less likely than the likeliest is never drawn.
- Other sums (`lane_sum`) add value i to lane i mod 16, in float64, then the upper half of the lanes to the
  lower until one is left.
- Logarithms and powers are those of `log_of` and `exp_of`, plain float64 operations that kernels compile.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

WEIGHT_BITS = 33
WEIGHT_ONE = float(2**WEIGHT_BITS)
MIN_DEPTH = -35.0  # the weight is 0 from there down
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
# 2^f = 1 + f * (these, of f's powers from 4 down to 0) for f from -0.5 to 0.5, within 2e-7 of the value
POWER_TERMS = (
    1.326472614891827e-3, 9.671512991189957e-3, 5.550733581185341e-2, 2.4022242426872253e-1,
    6.931470036506653e-1,
)  # fmt: skip
MAX_VOCAB = 2**20  # weights of so many tokens add up exactly
MIN_SCALE, MAX_SCALE = 1e-30, 1e6
MIROSTAT_TOKENS = 100  # that mirostat 1 estimates Zipf's exponent from

# Stages, in the order of SamplingParams.samplers, then mirostat's
(
    END, PENALTIES, DRY, TOP_N_SIGMA, TOP_K, TYPICAL_P, TOP_P, MIN_P, XTC, TEMPERATURE,
    MIROSTAT_1, MIROSTAT_2,
) = range(12)  # fmt: skip
MAX_STAGES = 12

# What became of a row
CHOSEN, NOT_FINITE, NONE_ALLOWED = range(3)

_INTEGERS = (
    "row",  # address of the logits, set by the backend
    "is_given",  # 1: `token` is given, and only its log-probability is wanted
    "is_greedy",
    "top_k",
    "xtc_applies",  # 1: this time
    "n_top",  # most likely tokens to report; -1: and no log-probabilities
    "top_ids", "top_logits",  # int32 and float32 [n_top]: the n_top_found likeliest, in order of id
    "n_top_found",
    "n_bias", "bias_ids", "bias_values",  # int32, float64: added to logits
    "n_seen", "seen_ids", "seen_counts", "generated_counts",  # int32 each: tokens to be penalized
    "n_dry", "dry_ids", "dry_values",  # int32, float64: DRY's penalties
    "n_forbidden", "forbidden_ids",  # int32: tokens that may not come
    "n_allowed", "allowed_words",  # int32: where there are any, the tokens whose bits are 0 may not come
    "status", "token",
)  # fmt: skip
_DOUBLES = (
    "u",  # the random number, 0 <= u < 1
    "top_p", "typical_p",
    "min_p_depth",  # log(min_p)
    "top_n_sigma", "xtc_threshold",
    "temperature", "temperature_range", "temperature_exponent",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
    "surprise_power",  # 2^mu of mirostat
    "probability",  # of the chosen token among those left
    "peak", "sum_exp",  # of the row as given: its largest logit, and the sum of exp(logit - peak)
)  # fmt: skip
_TABLES = {
    "bias": ("bias_ids", "bias_values"),
    "seen": ("seen_ids", "seen_counts", "generated_counts"),
    "dry": ("dry_ids", "dry_values"),
    "forbidden": ("forbidden_ids",),
    "allowed": ("allowed_words",),
    "top": ("top_ids", "top_logits"),
}


class SamplingRecord(ctypes.Structure):
    """See the lists above. `stages` are codes, ended by END; tables are kept by `set_table`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _INTEGERS),
        *((name, ctypes.c_double) for name in _DOUBLES),
        ("stages", ctypes.c_int64 * MAX_STAGES),
    ]

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.tables: dict[str, tuple[npt.NDArray[Any], ...]] = {}
        self.address = ctypes.addressof(self)
        self.own_row: npt.NDArray[np.float32] | None = None  # to be looked at in the place of the step's
        for name in _TABLES:
            self.set_table(name, 0)
        self.n_top = -1

    def set_table(self, name: str, n: int, *arrays: npt.NDArray[Any]) -> None:
        """Points to the first `n` entries of a table's arrays, and keeps the arrays."""
        self.tables[name] = arrays
        setattr(self, f"n_{name}", n)
        for field, array in zip(_TABLES[name], arrays, strict=bool(arrays)):
            setattr(self, field, array.__array_interface__["data"][0])

    def table(self, name: str) -> tuple[npt.NDArray[Any], ...]:
        """The entries in use of a table's arrays."""
        n = getattr(self, f"n_{name}")
        return tuple(array[:n] for array in self.tables[name])


def log_of(x: float) -> float:
    """The natural logarithm of x, finite and above 0, within 4 ulp or so."""
    n = 0
    while x > 1.4142135623730951:
        x *= 0.5
        n += 1
    while x < 0.7071067811865476:
        x *= 2.0
        n -= 1
    s = (x - 1.0) / (x + 1.0)
    total = 0.0
    for k in range(25, 0, -2):
        total = total * (s * s) + 1.0 / k
    return 2.0 * s * total + n * 0.6931471805599453


def exp_of(x: float) -> float:
    """e^x, with x limited to -700 to 700."""
    x = min(max(x, -700.0), 700.0)
    n = int(x * 1.4426950408889634 + (0.5 if x >= 0.0 else -0.5))
    r = x - n * 0.6931471805599453
    total = 1.0
    for k in range(18, 0, -1):
        total = 1.0 + total * r / k
    while n > 0:
        total *= 2.0
        n -= 1
    while n < 0:
        total *= 0.5
        n += 1
    return total


def f32(x: float) -> np.float32:
    """x as float32, limited to finite values."""
    limit = 3.4028234663852886e38
    return np.float32(min(max(x, -limit), limit))
