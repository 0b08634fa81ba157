"""Prompts to load a server with: random words, or the lines of a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from kukri.errors import ConfigError

# Each of these, with a space before it, is one token in most vocabularies.
_WORDS = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point home
water room mother area money story fact month lot right study book eye job word business issue side kind
head house service friend father power hour game line end member law car city community name president
team minute idea body information back parent face level office door health person art war history party
result change morning reason research girl moment air teacher force education foot boy age policy music
market sense river road tree paper field bird stone light wind sea fire bread table window garden letter
picture bridge winter summer north south east west"""
WORDS = tuple(_WORDS.split())


def random_prompts(n_words: int, seed: int) -> Iterator[str]:
    """Yield texts of `n_words` random words without end, the same for the same seed."""
    random = np.random.default_rng(seed)
    while True:
        yield " ".join(WORDS[i] for i in random.integers(0, len(WORDS), n_words))


def as_body(text: str, kind: str) -> dict[str, Any]:
    """The field of a request that holds a prompt, `chat` or `completions`."""
    return {"prompt": text} if kind == "completions" else {"messages": [{"role": "user", "content": text}]}


def file_prompts(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Fields of requests, one for each line of a JSONL file, over and over.

    A line is a text, or an object with `prompt` or (for a chat) `messages`, and perhaps `max_tokens`. Raises
    ConfigError, with the number of the line, for anything else, before the first is given.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompts cannot be read: {error}") from None
    bodies = [_line(line, kind, f"{path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not bodies:
        raise ConfigError(f'{path} must have prompts, one per line, like {{"prompt": "Hello"}}')
    return cycle(bodies)


def _line(line: str, kind: str, where: str) -> dict[str, Any]:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where} must be JSON") from None
    fields: dict[str, Any] = {"prompt": given} if isinstance(given, str) else given
    if not isinstance(fields, dict) or len({"prompt", "messages"} & fields.keys()) != 1:
        raise ConfigError(f'{where} must be a text, or an object with "prompt" or "messages"')
    if unknown := fields.keys() - {"prompt", "messages", "max_tokens"}:
        raise ConfigError(f"{where}: {sorted(unknown)[0]!r} must be prompt, messages or 'max_tokens'")
    if "messages" in fields:
        if kind != "chat":
            raise ConfigError(f"{where}: messages require --endpoint chat")
        return fields
    if not isinstance(fields["prompt"], str):
        raise ConfigError(f"{where}: the prompt must be a text")
    prompt = fields.pop("prompt")
    return fields | as_body(prompt, kind)
