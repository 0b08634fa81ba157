"""`Keys`: typed access to a configuration's keys, GGUF's or config.json's. Errors name the key."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from kukri.errors import FormatError, UnsupportedError, brief, reading

# The element-wise ops of activations, by the names of transformers. An op's first name is the written one.
ACTIVATIONS = {
    **{
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu_exact",
        "gelu_pytorch_tanh": "gelu",
        "gelu_new": "gelu",
    },
    **{"gelu_fast": "gelu", "relu": "relu", "relu2": "relu_squared", "sigmoid": "sigmoid", "tanh": "tanh"},
    "linear": "itself",
}


def activation_name(op: str) -> str:
    """Return transformers' name of an activation's op."""
    return next(name for name, own in ACTIVATIONS.items() if own == op)


class Keys:
    """The keys below `prefix`. An absent key has its value in `defaults`; one that is null has none."""

    def __init__(
        self,
        values: Mapping[str, Any],
        path: Path,
        prefix: str = "",
        defaults: Mapping[str, Any] | None = None,
        tensors: Collection[str] = (),
    ) -> None:
        """`tensors` are the names of a GGUF file's, which say what no key does."""
        self.tensors = tensors
        self.values, self.path, self.prefix, self.defaults = values, path, prefix, defaults or {}
        self.last: str | None = None  # the key that was read last

    def reading(self) -> AbstractContextManager[None]:
        """Turns whatever goes wrong within it into a FormatError: see `kukri.errors.reading`."""
        return reading(self.path, lambda: self.last)

    def error(self, key: str, message: str) -> FormatError:
        """A FormatError about a key."""
        return FormatError(f"key {brief(self.prefix + key)} {message}", path=self.path)

    def unsupported(self, key: str, message: str) -> UnsupportedError:
        """An UnsupportedError about a key."""
        return UnsupportedError(f"{self.path}: key {brief(self.prefix + key)} {message}")

    def has(self, key: str) -> bool:
        """True if the file has the key."""
        return self.prefix + key in self.values

    def value(self, key: str, default: Any = None) -> Any:
        """The key's value, the default, or None."""
        self.last = self.prefix + key
        if self.has(key):
            return self.values[self.prefix + key]
        return self.defaults.get(key, default)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._stated(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be text, not {type(value).__name__}")
        return value

    def whole(self, key: str, default: int | None = None, *, least: int = 1, most: float = 2**31 - 1) -> int:
        """A whole number between bounds, both included."""
        value = self._stated(key, default)
        if type(value) is not int:
            raise self.error(key, f"must be a whole number, not {type(value).__name__}")
        if not least <= value <= most:
            raise self.error(key, f"must be from {least} to {most:.0f}, not {brief(value)}")
        return value

    def positive(self, key: str, default: float | None = None, *, most: float = sys.float_info.max) -> float:
        """A finite number above 0."""
        return self.as_positive(key, self._stated(key, default), most=most)

    def as_positive(self, key: str, value: Any, *, most: float = sys.float_info.max) -> float:
        """A key's value, or an entry of it, as a finite number above 0."""
        if type(value) not in (int, float):
            raise self.error(key, f"must be a number, not {type(value).__name__}")
        if not 0 < value <= most:
            bound = f" up to {most:g}" if most < sys.float_info.max else ""
            raise self.error(key, f"must be a finite number above 0{bound}, not {brief(value)}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self._stated(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {brief(value)}")
        return value

    def rule(self, rule: str | bool) -> bool:
        """A truth that always holds, or that a key says."""
        return self.flag(rule) if isinstance(rule, str) else rule

    def activation(self, key: str, default: str | None = None) -> str:
        """The op of an activation. Raises UnsupportedError for one that has none."""
        name = self.text(key, default)
        if name not in ACTIVATIONS:
            raise self.unsupported(key, f"is {brief(name)}: only {', '.join(ACTIVATIONS)} are supported")
        return ACTIVATIONS[name]

    def items(self, key: str, kind: type) -> list[Any]:
        """A list of values of a type; true and false count as 1 and 0."""
        value = self._stated(key)
        if isinstance(value, np.ndarray) and value.ndim == 1:
            value = value.tolist()
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            name = {int: "whole numbers", str: "texts", float: "numbers", object: "numbers"}[kind]
            raise self.error(key, f"must be a list of {name}, not {brief(value)}")
        return value

    def each(self, key: str, n: int, *, least: int = 1, most: float = 2**31 - 1) -> list[int]:
        """A whole number for each of `n` layers, by a list of them or by one number for all."""
        if type(self._stated(key)) is int:
            return [self.whole(key, least=least, most=most)] * n
        stated = self.items(key, int)
        if len(stated) != n:
            raise self.error(key, f"must have {n} entries, not {len(stated)}")
        if wrong := [number for number in stated if not least <= number <= most]:
            raise self.error(key, f"must hold numbers from {least} to {most:.0f}, not {brief(wrong[0])}")
        return stated

    def first(self, key: str, kind: type, n: int) -> list[Any]:
        """Return the first `n` values of a list, which may be longer, as in transformers' lists of layers."""
        stated = self.items(key, kind)
        if len(stated) < n:
            raise self.error(key, f"must have {n} entries, not {len(stated)}")
        return stated[:n]

    def expect(self, key: str, value: Any) -> None:
        """Raises UnsupportedError if the key is there and holds anything but `value`."""
        if self.value(key, value) != value:
            raise self.unsupported(key, f"is {brief(self.value(key))}: only {value!r} is supported")

    def _stated(self, key: str, default: Any = None) -> Any:
        value = self.value(key, default)
        if value is None:
            raise self.error(key, "is missing")
        return value
