"""SentencePiece's unigram tokenizers (Kudo 2018) from GGUF: text becomes the pieces with the most score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from kukri.errors import FormatError
from kukri.tokenizer.vocabulary import BYTE, SPACE_MARK, Vocabulary


def unigram(
    vocabulary: Vocabulary,
    scores: npt.NDArray[np.floating[Any]],
    charsmap: bytes,
    *,
    adds_space: bool,
    joins_spaces: bool,
    error: Callable[[str], FormatError] = FormatError,
) -> tokenizers.Tokenizer:
    """The tokenizer of plain text.

    `charsmap` is SentencePiece's compiled normalization, empty for none. `adds_space` puts a space before a
    text; `joins_spaces` makes one of several, and none at the ends. Raises an `error` for what does not fit.
    """
    unknown = vocabulary.unk_id
    if unknown is None:
        raise error("a unigram tokenizer requires an unknown token")
    ids = vocabulary.text_ids()
    pieces = [
        # text never becomes "": so a token is hidden, and the others keep their ids
        (token if ids.get(token) == i else "", float(score))
        for i, (token, score) in enumerate(zip(vocabulary.tokens, scores, strict=True))
    ]
    try:
        text = tokenizers.Tokenizer(models.Unigram(pieces, unknown, byte_fallback=BYTE in vocabulary.types))
        steps: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
    except Exception as raised:  # `tokenizers` raises no narrower one
        raise error(f"must be a tokenizer: {' '.join(str(raised).split())[:200]}") from None
    if joins_spaces:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    elif adds_space:  # Metaspace puts none before another
        steps += [normalizers.Prepend(" ")]
    if steps:
        text.normalizer = normalizers.Sequence(steps)
    scheme = "always" if adds_space and joins_spaces else "never"
    splits = not any(SPACE_MARK in token[1:] for token in ids)  # no piece continues after a space
    text.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, scheme, splits)
    return text


def check_charsmap(charsmap: bytes, error: Callable[[str], FormatError]) -> None:
    """Raises `error` for a compiled normalization with an offset outside of its bytes.

    Its size in bytes and units of a double array (darts-clone), then texts that end with 0: a unit has a
    label in bits 0 to 7, in bit 8 that a text belongs to it, and the way to its block from bit 10 on, times
    256 with bit 9. A unit with bit 31 is the place of a text.
    """
    size = int.from_bytes(charsmap[:4], "little")
    units, texts = (
        np.frombuffer(charsmap[4 : 4 + size // 4 * 4], "<u4").astype(np.int64),
        charsmap[4 + size :],
    )
    blocks = np.arange(len(units)) ^ (units >> 10 << (units >> 6 & 8))
    is_node = units < 1 << 31
    is_broken = size != 4 * len(units) or bool((blocks[is_node] | 255 >= len(units)).any())
    if charsmap and not is_broken:
        places = units[blocks[is_node & (units >> 8 & 1 == 1)]] & (1 << 31) - 1
        begins = np.frombuffer(texts, np.uint8) & 0xC0 != 0x80  # a character
        is_broken = not len(units) or bool((places >= len(texts)).any()) or not bool(begins[places].all())
    if charsmap and is_broken:
        raise error("the tokenizer's compiled normalization is broken")
