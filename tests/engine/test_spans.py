"""A second kind of spans, which the engine serves without a line of its own: rows looked up by numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kukri import LLM
from kukri.config import ModelConfig
from kukri.engine.spans.encoder import SpanEncoder
from kukri.errors import RequestError
from kukri.kernels.arrays import FloatArray
from kukri.models.spans import SpanInput, check_spans
from kukri.opening import loading
from tests.tiny_gguf import random_arrays, tiny_config, write_tiny

CONFIG = tiny_config(max_context=256)
TABLE = random_arrays(CONFIG)["model.embed_tokens.weight"]
HOLE = 7  # the token at the places of rows
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


@dataclass(frozen=True)
class Numbers:
    """Numbers that become the rows of these tokens."""

    noun: ClassVar[str] = "number"
    values: tuple[int, ...]

    @property
    def n_tokens(self) -> int:
        return len(self.values)

    @property
    def digest(self) -> bytes:
        return sha256(repr((self.noun, self.values)).encode()).digest()


class Squares(Numbers):
    """Numbers that become the rows of other tokens."""

    noun: ClassVar[str] = "square"


@dataclass(frozen=True)
class NumberPrompt:
    """Tokens with holes for numbers."""

    token_ids: list[int]
    inputs: tuple[SpanInput, ...]
    spans: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        check_spans(self)

    def __len__(self) -> int:
        return len(self.token_ids)


class NumberEncoder(SpanEncoder):
    """Looks up the rows of numbers."""

    input_type = Numbers

    def check(self, given: Numbers, text: ModelConfig) -> None:
        if max(self.ids(given)) >= text.n_vocab:
            raise RequestError("a number is outside the table", param="numbers")

    def ids(self, given: Numbers) -> list[int]:
        """The tokens that have the same rows."""
        return list(given.values)

    def encode(self, given: Numbers, is_brief: Callable[[], bool]) -> Iterator[FloatArray | None]:
        yield from [None] * given.n_tokens  # as if each took a while
        yield TABLE[self.ids(given)]


class SquareEncoder(NumberEncoder):
    """The same of squares."""

    input_type = Squares

    def ids(self, given: Numbers) -> list[int]:
        return [value**2 for value in given.values]


def mixed(*parts: str | Numbers) -> tuple[Any, list[int]]:
    """A prompt of texts and numbers, and the tokens that have the same embeddings."""
    ids: list[int] = []
    same: list[int] = []
    inputs: list[Numbers] = []
    spans: list[tuple[int, int, int]] = []
    for part in parts:
        if isinstance(part, str):
            ids, same = [*ids, *part.encode()], [*same, *part.encode()]
        else:
            spans.append((len(ids), part.n_tokens, len(inputs)))
            inputs.append(part)
            encoder = SquareEncoder() if isinstance(part, Squares) else NumberEncoder()
            ids, same = [*ids, *[HOLE] * part.n_tokens], [*same, *encoder.ids(part)]
    return NumberPrompt(ids, tuple(inputs), tuple(spans)), same


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("spans") / "tiny.gguf", CONFIG, random_arrays(CONFIG))


@pytest.fixture
def llm(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """A model with two kinds of spans, whose prompts are computed in several chunks."""
    monkeypatch.setattr(loading, "_encoders", lambda read, backend: [NumberEncoder(), SquareEncoder()])
    with LLM(path, backend="reference", max_prompt_tokens=24, max_requests=4) as opened:
        yield opened


def test_a_kind_of_its_own_is_batched_with_texts(path: Path, llm: LLM) -> None:
    """Catches rows at wrong tokens, chunks that begin before rows are there, and one kind for a prompt."""
    asked = [
        mixed("A text before ", Numbers((65, 66, 67, 68)), " and one after"),
        mixed("plain"),
        mixed(Squares((3, 4, 5, 6) * 8), "x", Numbers((100,)), "y"),
    ]
    prompts: Any = [asked[0][0], asked[1][1], asked[2][0]]
    found = llm.generate(prompts, **GREEDY)
    with LLM(path, backend="reference") as plain:
        want = [plain.generate(same, **GREEDY).text for _, same in asked]
    assert [result.text for result in found] == want
    assert llm.engine.encodings.n_encoded == 3


def test_pages_and_rows_are_found_by_digest(llm: LLM) -> None:
    """Catches pages found by tokens alone, which are holes, and inputs that are encoded at each turn."""
    first, other = Numbers(tuple(range(40, 60))), Numbers(tuple(range(60, 80)))
    ends = " and a text that fills a page"
    results = [llm.generate(mixed("Say ", numbers, ends)[0], **GREEDY) for numbers in (first, other, first)]
    assert results[0].text == results[2].text
    assert [result.usage.cached_tokens for result in results] == [0, 0, 48]
    assert (llm.engine.encodings.n_encoded, llm.engine.encodings.n_found) == (2, 0)
    elsewhere, same = mixed("Elsewhere ", first)
    assert llm.generate(elsewhere, **GREEDY).text == llm.generate(same, **GREEDY).text
    assert (llm.engine.encodings.n_encoded, llm.engine.encodings.n_found) == (2, 1)


def test_inputs_that_nobody_reads_are_refused(path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches holes that are read as tokens, and an encoder whose check nobody calls."""
    with pytest.raises(RequestError, match="a number is outside the table"):
        llm.generate(mixed(Numbers((9999,)))[0])
    monkeypatch.setattr(loading, "_encoders", lambda read, backend: [])
    with LLM(path, backend="reference") as blind, pytest.raises(RequestError, match="numbers are not supp"):
        blind.generate(mixed(Numbers((1,)))[0])


def test_spans_that_do_not_fit_are_refused() -> None:
    """Catches a kind whose prompts could write rows beyond a step's arrays."""
    with pytest.raises(RequestError, match="number 0 must have 2 tokens in the prompt, not 1"):
        NumberPrompt([HOLE], (Numbers((1, 2)),), ((0, 1, 0),))
