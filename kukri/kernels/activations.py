"""The element-wise ops: y = value(x, other, a, b), number by number. Each is a row of `ACTIVATIONS`.

A formula is written over `xp`, the functions that NumPy and PyTorch have in common, so that one formula
serves the reference backend, the tape of gradients, PyTorch and the GPU. The CPU backend computes a row by
the function of vectors that `kukri.kernels.cpu.codegen.elementwise` has under the row's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kukri.dataclass import dataclass

_GELU_SCALE = math.sqrt(2 / math.pi)
_erf = np.vectorize(math.erf, otypes=[np.float64])


class NumPyFunctions:
    """The functions of NumPy, and those that PyTorch has and NumPy lacks, under PyTorch's names."""

    def __getattr__(self, name: str) -> Any:
        """A function of NumPy."""
        return getattr(np, name)

    def erf(self, x: Any) -> Any:
        """The error function, by Python's."""
        return _erf(x).astype(np.float32)

    def sigmoid(self, x: Any) -> Any:
        """1 / (1 + exp(-x))."""
        return 1 / (1 + np.exp(-x))

    def silu(self, x: Any) -> Any:
        """x * sigmoid(x)."""
        return x / (1 + np.exp(-x))

    def gelu(self, x: Any, approximate: str = "none") -> Any:
        """x times the share of a normal distribution that lies below x, by the error function or by tanh."""
        return x / 2 * (1 + (_gelu_tanh(self, x) if approximate == "tanh" else self.erf(x / math.sqrt(2))))


NUMPY = NumPyFunctions()


@dataclass(frozen=True)
class Activation:
    """An element-wise op, which reads of `other`, a and b what its formula takes.

    `slopes` gives the derivatives by x and, if the op reads it, by `other`, which is then a gate.
    """

    value: Callable[..., Any]  # (xp, x, other, a, b) -> y
    slopes: Callable[..., tuple[Any, ...]]  # (xp, x, other, a, b) -> (dy / dx,) or (dy / dx, dy / d other)


def activate(xp: Any, name: str, x: Any, other: Any = None, a: float = 0.0, b: float = 0.0) -> Any:
    """Return the row's y. A note on an exception says which op raised it."""
    with _naming(name):
        return ACTIVATIONS[name].value(xp, x, other, a, b)


def slopes(xp: Any, name: str, x: Any, other: Any = None, a: float = 0.0, b: float = 0.0) -> tuple[Any, ...]:
    """Return the row's derivatives. A note on an exception says which op raised it."""
    with _naming(name):
        return ACTIVATIONS[name].slopes(xp, x, other, a, b)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"in the element-wise op '{name}' of kukri.kernels.activations")
        raise


def _gelu_tanh(xp: Any, x: Any) -> Any:
    return xp.tanh(_GELU_SCALE * (x + 0.044715 * x**3))


def _gelu_slope(xp: Any, x: Any) -> Any:
    t = _gelu_tanh(xp, x)
    return (1 + t) / 2 + x / 2 * (1 - t * t) * _GELU_SCALE * (1 + 3 * 0.044715 * x * x)


def _exact_gelu_slope(xp: Any, x: Any) -> Any:
    return (1 + xp.erf(x / math.sqrt(2))) / 2 + x * xp.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _silu_slope(xp: Any, x: Any) -> Any:
    s = xp.sigmoid(x)
    return s * (1 + x * (1 - s))


def _sigmoid_slope(xp: Any, x: Any) -> Any:
    s = xp.sigmoid(x)
    return s * (1 - s)


def _tanh_slope(xp: Any, x: Any) -> Any:
    t = xp.tanh(x)
    return 1 - t * t


def _xielu(xp: Any, x: Any, other: Any, high: float, low: float) -> Any:
    negative = xp.clip(x, None, 0.0)
    return high * xp.square(xp.clip(x, 0.0, None)) + low * (xp.expm1(negative) - negative)


def _xielu_slopes(xp: Any, x: Any, other: Any, high: float, low: float) -> tuple[Any]:
    return (2 * high * xp.clip(x, 0.0, None) + low * xp.expm1(xp.clip(x, None, 0.0)),)


def _clamped_swiglu(xp: Any, up: Any, gate: Any, alpha: float, limit: float) -> Any:
    gate = xp.clip(gate, None, limit)
    return (xp.clip(up, -limit, limit) + 1) * gate * xp.sigmoid(alpha * gate)


def _clamped_swiglu_slopes(xp: Any, up: Any, gate: Any, alpha: float, limit: float) -> tuple[Any, Any]:
    low, high = xp.clip(gate, None, limit), xp.clip(up, -limit, limit)
    s = xp.sigmoid(alpha * low)
    by_gate = (high + 1) * s * (1 + alpha * low * (1 - s)) * (gate <= limit)
    return low * s * (abs(up) <= limit), by_gate


def _plain(function: Callable[[Any, Any], Any], slope: Callable[[Any, Any], Any]) -> Activation:
    """A function (xp, x) of x alone."""
    return Activation(
        lambda xp, x, other, a, b: function(xp, x),
        lambda xp, x, other, a, b: (slope(xp, x),),
    )


def _gated(function: Callable[[Any, Any], Any], slope: Callable[[Any, Any], Any]) -> Activation:
    """x times a function (xp, gate) of `other`."""
    return Activation(
        lambda xp, x, gate, a, b: x * function(xp, gate),
        lambda xp, x, gate, a, b: (function(xp, gate), x * slope(xp, gate)),
    )


# Functions of an MLP and their derivatives. Each is an op, and so is x times the function of a gate.
FUNCTIONS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "itself": (lambda xp, x: x, lambda xp, x: 1.0),
    "relu": (lambda xp, x: xp.clip(x, 0.0, None), lambda xp, x: x > 0),
    # max(x, 0)^2 (So et al. 2021)
    "relu_squared": (
        lambda xp, x: xp.square(xp.clip(x, 0.0, None)),
        lambda xp, x: 2 * xp.clip(x, 0.0, None),
    ),
    "sigmoid": (lambda xp, x: xp.sigmoid(x), _sigmoid_slope),
    "tanh": (lambda xp, x: xp.tanh(x), _tanh_slope),
    "silu": (lambda xp, x: xp.silu(x), _silu_slope),
    # GELU (Hendrycks and Gimpel 2016) by tanh: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
    "gelu": (lambda xp, x: xp.gelu(x, approximate="tanh"), _gelu_slope),
    # x / 2 * (1 + erf(x / sqrt(2)))
    "gelu_exact": (lambda xp, x: xp.gelu(x), _exact_gelu_slope),
}


ACTIVATIONS = {
    **{name: _plain(*both) for name, both in FUNCTIONS.items()},
    # SwiGLU and GeGLU among them (Shazeer 2020)
    **{f"gated_{name}": _gated(*both) for name, both in FUNCTIONS.items()},
    # a * x^2 above 0, b * (exp(x) - 1 - x) below: xIELU without its x (Huang and Schlag 2024)
    "xielu": Activation(_xielu, _xielu_slopes),
    # scores and logits of Gemma 2, within -a and a
    "softcap": Activation(
        lambda xp, x, other, cap, b: xp.tanh(x / cap) * cap,
        lambda xp, x, other, cap, b: (_tanh_slope(xp, x / cap),),
    ),
    # numbers below a become a, and those above b become b; either may be infinite
    "clamp": Activation(
        lambda xp, x, other, low, high: xp.clip(x, low, high),
        lambda xp, x, other, low, high: ((x >= low) & (x <= high),),
    ),
    # (up + 1) * gate * sigmoid(a * gate), of x, up, clamped to within b, and `other`, the gate, clamped to at
    # most b: the activation of gpt-oss (OpenAI 2025)
    "clamped_swiglu": Activation(_clamped_swiglu, _clamped_swiglu_slopes),
}
