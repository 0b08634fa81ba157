"""Parameters of a test of which some run by default; `pytest -m slow` runs the others."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

COMMON = ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4", "F16")  # weight types of each kind that people run


def quick(values: Iterable[Any], kept: Container[Any]) -> list[Any]:
    """The values, or tuples of them; those that are not kept for the default suite are marked as slow."""
    return [value if value in kept else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
