"""Parameters of tests of which some run by default: types that cover each kind, and so architectures."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

COMMON = ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4", "F16")  # weight types of each kind that people run

# plain, without rotation, norms of queries, fused, windows, shared keys, sinks, experts, convolution, states
SOME_ARCHITECTURES = (
    *("llama", "smollm3", "qwen3", "phi3", "gemma3_text", "gemma4_text", "gpt_oss", "olmoe", "lfm2"),
    *("granitemoehybrid", "qwen3_5_text", "olmo2"),
)


def some(form: str = "{}") -> list[str]:
    """Patterns of the ids of `SOME_ARCHITECTURES`, for the mark `full(but=...)`; `form` is the whole id."""
    return [form.format(name) for name in SOME_ARCHITECTURES]


def quick(values: Iterable[Any], kept: Container[Any]) -> list[Any]:
    """The values, or tuples of them; those that are not kept for the default suite are marked as slow."""
    return [value if value in kept else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
