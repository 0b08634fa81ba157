"""The element-wise ops as one Triton function, written from the formulas of `kukri.kernels.activations`.

A formula is called with texts in the place of arrays: its operators and the functions of `xp` write an
expression of Triton, in which a function of `xp` is the function of this module with the same name.
"""

import linecache
from typing import Any

import triton
import triton.language as tl

from kukri.kernels.activations import ACTIVATIONS, activate
from kukri.kernels.gpu.bits import sigmoid


@triton.jit
def silu(x):
    """x * sigmoid(x)."""
    return x * sigmoid(x)


@triton.jit
def tanh(x):
    """1 - 2 / (exp(2x) + 1)."""
    return 1.0 - 2.0 / (tl.exp2(x * 2.885390081777927) + 1.0)


@triton.jit
def gelu(x, approximate: tl.constexpr = "none"):
    """x times the share of a normal distribution that lies below x, by the error function or by tanh."""
    if approximate == "tanh":
        share = sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        share = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
    return x * share


@triton.jit
def expm1(x):
    """exp(x) - 1, which near 0 is within 1e-7 and not within the last bits."""
    return tl.exp(x) - 1.0


@triton.jit
def square(x):
    """x * x."""
    return x * x


@triton.jit
def clip(x, low, high):
    """Return x between two bounds; a bound of None is left out, and NaN stays."""
    if low is not None:
        x = tl.where(x < low, low, x)
    if high is not None:
        x = tl.where(x > high, high, x)
    return x


def _operator(sign: str) -> tuple[Any, Any]:
    """An operator between an expression and what is on its right, and on its left."""
    return lambda x, y: _Text(f"({x} {sign} {y})"), lambda x, y: _Text(f"({y} {sign} {x})")


class _Text:
    """An expression."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text

    def __neg__(self) -> "_Text":
        return _Text(f"(-{self})")

    __add__, __radd__ = _operator("+")
    __sub__, __rsub__ = _operator("-")
    __mul__, __rmul__ = _operator("*")
    __truediv__, __rtruediv__ = _operator("/")


class _Calls:
    """Calls of the functions of this module."""

    def __getattr__(self, name: str) -> Any:
        def call(*inputs: Any, **options: Any) -> _Text:
            texts = [repr(x) for x in inputs] + [f"{key}={value!r}" for key, value in options.items()]
            return _Text(f"{name}({', '.join(texts)})")

        return call


def _written() -> Any:
    """The function (NAME, x, other, a, b) -> y. Triton reads its text from `linecache`, as `inspect` does."""
    inputs: list[Any] = [_Text(name) for name in ("x", "other", "a", "b")]
    lines = ["def activation(NAME: tl.constexpr, x, other, a, b):", "    y = x"]
    for name in ACTIVATIONS:
        lines += [f"    if NAME == {name!r}:", f"        y = {activate(_Calls(), name, *inputs)}"]
    text, path = "\n".join([*lines, "    return y", ""]), f"{__file__}: activation"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    names = dict(globals())
    exec(compile(text, path, "exec"), names)
    return triton.jit(names["activation"])


activation = _written()
