"""Prompts of token ids and texts between them, and as objects, as llama.cpp's server takes them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, ClassVar

from pydantic import Field

from kukri.server.body import Body, Refused
from kukri.server.schema import MAX_IDS, TEXT_ONLY
from kukri.tokenizer import Tokenizer


class MarkedText(Body):
    """A prompt as an object."""

    refused: ClassVar[Refused] = {"multimodal_data": (([],), TEXT_ONLY)}
    prompt_string: str


Mixed = Annotated[list[int | str], Field(min_length=1, max_length=MAX_IDS)]


def encode_mixed(
    tokenizer: Tokenizer,
    parts: Sequence[int | str],
    *,
    parse_special: bool,
    max_tokens: int | None = None,
    continues: bool = False,
) -> list[int]:
    """The token ids of a prompt; a text at its beginning gets BOS, unless it `continues` one.

    Raises what `Tokenizer.encode` raises.
    """
    ids: list[int] = []
    for i, part in enumerate(parts):
        if isinstance(part, int):
            ids.append(part)
        else:
            encode = (
                tokenizer.encode_inside if i or continues else partial(tokenizer.encode, add_special=True)
            )
            ids += encode(part, parse_special=parse_special, max_tokens=max_tokens)
    return ids
