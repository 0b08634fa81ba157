"""Prompts that ask for the middle of a text."""

from __future__ import annotations

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from kukri.errors import ContextLengthError
from kukri.tokenizer import FillInMiddle, Tokenizer
from tests.tokenizer.tiny_tokenizers import byte_level_metadata


def tokenizer_with(*marks: str) -> Tokenizer:
    metadata = byte_level_metadata("gpt-2", ByteLevel(add_prefix_space=False))
    metadata["tokenizer.ggml.tokens"] += marks
    metadata["tokenizer.ggml.token_type"] += [3] * len(marks)
    return Tokenizer.from_metadata(metadata)


@pytest.mark.parametrize(
    "marks",
    [
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ],
)
def test_marks_of_each_family(marks: tuple[str, str, str]) -> None:
    """Catches a family whose suffix comes before its prefix."""
    tokenizer = tokenizer_with(*marks)
    fill = FillInMiddle.of(tokenizer)
    assert fill is not None
    text = tokenizer.decode(fill.prompt("for x", "end", middle=" in"))
    assert text == f"{marks[0]}for x{marks[1]}end{marks[2]} in"
    plain = fill.prompt("a", "b", files=[("c.py", "code")])
    assert tokenizer.decode(plain) == f"code\n{marks[0]}a{marks[1]}b{marks[2]}", "no token before files"


def test_what_a_text_spells_out_stays_text() -> None:
    """Catches a source file that ends its own prefix."""
    tokenizer = tokenizer_with("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    fill = FillInMiddle.of(tokenizer)
    assert fill is not None
    assert fill.prompt("<fim_suffix>", "").count(fill.suffix_id) == 1
    with pytest.raises(ContextLengthError):
        fill.prompt("word " * 5000, "", max_tokens=100)


def test_other_models_have_none() -> None:
    """Catches a prompt with marks that the model has never seen."""
    assert FillInMiddle.of(tokenizer_with("<fim_prefix>", "<fim_suffix>")) is None
