"""Tokenizers of text in the middle of another text: nothing is added or removed at its ends."""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import normalizers, pre_tokenizers


def inner_text(text: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer, sharing its vocabulary, without a space before a text."""
    inner = tokenizers.Tokenizer(text.model)
    if text.normalizer is not None:
        steps = [step for step in _steps(text.normalizer, "normalizers") if step["type"] not in _AT_ENDS]
        inner.normalizer = _sequence(normalizers.Sequence([]), "normalizers", steps)
    if text.pre_tokenizer is not None:
        steps = [_unprefixed(step) for step in _steps(text.pre_tokenizer, "pretokenizers")]
        if any(step["type"] == "Metaspace" for step in steps):  # it alone keeps the spaces between words
            steps = [step for step in steps if step["type"] != "WhitespaceSplit"]
        inner.pre_tokenizer = _sequence(pre_tokenizers.Sequence([]), "pretokenizers", steps)
    inner.add_tokens(list(text.get_added_tokens_decoder().values()))
    return inner


_AT_ENDS = ("Prepend", "Strip")  # normalizers that change the beginning or the ends of a text


def _steps(made: Any, inside: str) -> list[dict[str, Any]]:
    state = json.loads(made.__getstate__())
    steps: list[dict[str, Any]] = state[inside] if state["type"] == "Sequence" else [state]
    return steps


def _sequence(empty: Any, inside: str, steps: list[dict[str, Any]]) -> Any:
    empty.__setstate__(json.dumps({"type": "Sequence", inside: steps}).encode())
    return empty


def _unprefixed(step: dict[str, Any]) -> dict[str, Any]:
    """A pre-tokenizer that puts no space before a text."""
    changes = {"prepend_scheme": "never", "add_prefix_space": False}
    return {**step, **{key: value for key, value in changes.items() if key in step}}
