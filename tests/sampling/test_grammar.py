"""Grammars over a real vocabulary: what may come next, and when a text may end."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest

from kukri.dialects.call_grammar import Spelling, reasoning_grammar
from kukri.dialects.families import GENERIC
from kukri.errors import RequestError, UnsupportedError
from kukri.kernels.reference_sampling import ReferenceSampling
from kukri.sampling import Grammar, RequestSampler, SamplingError, SamplingParams, resolve_texts
from kukri.sampling.grammar import CompiledGrammar, compiled
from kukri.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(smollm2_path) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_path)


def allowed(matcher) -> np.ndarray:
    """The ids that may come next."""
    assert matcher.update() == ""
    return np.flatnonzero(np.unpackbits(matcher.allowed.view(np.uint8), bitorder="little"))


def walk(grammar: CompiledGrammar, tokenizer: Tokenizer, seed: int, max_tokens: int = 200) -> str | None:
    """A text of tokens drawn from those allowed, the end when it is; None if it did not end."""
    rng, matcher, text = np.random.default_rng(seed), grammar.matcher(), b""
    for _ in range(max_tokens):
        ids = allowed(matcher)
        ends = [i for i in ids if i in tokenizer.eos_ids]
        if ends and (len(ends) == len(ids) or rng.random() < 0.5):
            return text.decode()
        token_id = int(rng.choice([i for i in ids if i not in tokenizer.eos_ids]))
        text += tokenizer.token_bytes(token_id)
        matcher.take(token_id)
    return None


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar.regex(r"[a-f]{2,5}-\d+"), r"[a-f]{2,5}-\d+"),
        (Grammar.regex(r"é?(😀|ж)"), r"é?(😀|ж)"),
        (Grammar.choice(["yes", "yes, but", 'a "quoted" \\ one', "né"]), None),
        (Grammar.text('start: "a" NUMBER ("," NUMBER)*\nNUMBER: /[0-9]{1,3}/\n'), r"a\d{1,3}(,\d{1,3})*"),
        (Grammar.text('root ::= ("x" | "y")+ end\nend ::= "." [0-9]?\n'), r"[xy]+\.\d?"),
    ],
    ids=["regex", "unicode", "choice", "lark", "gbnf"],
)
def test_what_may_come_makes_texts_of_the_grammar(tokenizer, grammar, pattern):
    """Would catch bytes of tokens that are not those of the text, and an end that comes too early."""
    fitted = compiled(grammar, tokenizer)
    texts = [walk(fitted, tokenizer, seed) for seed in range(40)]
    finished = {text for text in texts if text is not None}
    assert len(finished) > 2
    for text in finished:
        if pattern is None:
            assert text in json.loads(grammar.source)
        else:
            assert re.fullmatch(pattern, text)


def test_the_end_comes_when_the_text_is_whole_and_then_alone(tokenizer):
    """Would catch an end in the middle, a text that may continue after its end, and control tokens within."""
    matcher = compiled(Grammar.choice(["ab", "abc"]), tokenizer).matcher()
    for letter in "ab":
        assert not tokenizer.eos_ids & set(allowed(matcher).tolist())
        matcher.take(tokenizer.encode(letter)[0])
    ids = set(allowed(matcher).tolist())
    assert ids & tokenizer.eos_ids
    assert ids - tokenizer.eos_ids == {tokenizer.encode("c")[0]}
    matcher.take(tokenizer.encode("c")[0])
    assert set(allowed(matcher).tolist()) <= tokenizer.eos_ids


def test_white_space_has_an_end(tokenizer):
    """Would catch JSON that an unsure model fills with blanks until its tokens are used up."""
    matcher = compiled(Grammar.json(PERSON), tokenizer).matcher()
    matcher.take(tokenizer.encode("{")[0])
    n = 0
    while True:
        blank = [i for i in allowed(matcher) if tokenizer.token_bytes(int(i)).isspace()]
        if not blank:
            break
        matcher.take(int(blank[0]))
        n += 1
        assert n < 100


def test_matchers_of_one_grammar_go_their_own_ways(tokenizer):
    """Would catch answers to one prompt that share where they are."""
    fitted = compiled(Grammar.choice(["ab", "cd"]), tokenizer)
    first, second = fitted.matcher(), fitted.matcher()
    first.take(tokenizer.encode("a")[0])
    assert tokenizer.encode("b")[0] in allowed(first)
    assert tokenizer.encode("c")[0] in allowed(second)
    assert tokenizer.encode("b")[0] not in allowed(second)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sampler_chooses_what_the_grammar_allows(tokenizer, temperature):
    """Would catch a mask that filters, penalties or the bias undo, and one that is a step late."""
    params = SamplingParams(
        temperature=temperature, top_k=5, repetition_penalty=1.2, logit_bias={0: 50.0}, seed=3,
        grammar=Grammar.regex("[0-9]{6}"),
    )  # fmt: skip
    sampler = RequestSampler(
        resolve_texts(params, tokenizer), [1], tokenizer.n_vocab, ReferenceSampling(), tokenizer.eos_ids
    )
    rng, ids = np.random.default_rng(1), []
    while not ids or ids[-1] not in tokenizer.eos_ids:
        ids.append(sampler(rng.normal(0, 4, tokenizer.n_vocab).astype(np.float32)).id)
        assert len(ids) < 8
    assert re.fullmatch("[0-9]{6}", tokenizer.decode(ids[:-1]))


def test_thoughts_come_before_the_answer(tokenizer):
    """Would catch a grammar that lets a model not think, or whose text may begin inside its thoughts."""
    spell = Spelling({}, frozenset())
    for thoughts, texts in (
        ("open", ["hm {\n\n</think>\n\n{}", "</think>{}"]),
        ("possible", ["{}", "<think>hm</think>\n{}"]),
    ):
        before = reasoning_grammar(GENERIC, spell, thoughts)
        fitted = compiled(Grammar("json", '{"type": "object"}', before), tokenizer)
        for text in texts:
            matcher = fitted.matcher()
            for token_id in tokenizer.encode(text):
                assert token_id in allowed(matcher), (text, token_id)
                matcher.take(token_id)
            assert tokenizer.eos_ids & set(allowed(matcher).tolist())
    first = tokenizer.encode("hm")[0]
    assert first not in allowed(fitted.matcher()), "without <think> there are no thoughts"


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.json({"type": "strin"}), "strin"),
        (Grammar.json({"not": {"type": "string"}}), "not"),
        (Grammar.json({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Grammar.json({"$ref": "https://example.com/schema"}), "example.com"),
        (Grammar.json({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (Grammar.json({"type": "integer", "minimum": 3, "maximum": 2}), ""),
        (Grammar.regex("(a"), "regex"),
        (Grammar.text("start: missing"), "missing"),
        (Grammar.text("root ::= ("), ""),
    ],
    ids=lambda value: value.source[:20] if isinstance(value, Grammar) else "",
)
def test_what_cannot_be_served_says_why(tokenizer, grammar, reason):
    """Would catch a keyword that is ignored in silence, and an error of many lines."""
    with pytest.raises(RequestError) as caught:
        compiled(grammar, tokenizer)
    message = str(caught.value)
    assert message.startswith("'grammar' cannot be used: ")
    assert reason in message
    assert "\n" not in message
    assert caught.value.param == "grammar"


def test_wrong_sources_are_refused_before_they_are_compiled():
    """Would catch a schema of a million lines that is compiled, and sources of wrong types."""
    with pytest.raises(RequestError, match="must have at most"):
        Grammar.regex("a" * 300_000)
    with pytest.raises(RequestError, match="JSON"):
        Grammar.json({"const": object()})
    with pytest.raises(RequestError, match="a choice must be a list of texts, not empty"):
        Grammar.choice([])
    for field in ({"ignore_eos": True}, {"min_tokens": 2}):
        with pytest.raises(RequestError, match="grammar"):
            SamplingParams(grammar=Grammar.json(), **field)
    with pytest.raises(RequestError, match="Grammar"):
        SamplingParams(grammar="start: x")
    with pytest.raises(RequestError, match="compiled"):
        RequestSampler(SamplingParams(grammar=Grammar.json()), [1], 10, ReferenceSampling())


def test_a_missing_package_is_one_line(tokenizer, monkeypatch):
    """Would catch an ImportError that does not say how to get the package."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError, match=r"needs the package llguidance: run `pip install "):
        compiled(Grammar.json(), tokenizer)


def test_a_grammar_that_gives_up_fails_its_request(tokenizer):
    """Would catch a token outside of the grammar that goes unnoticed."""
    params = resolve_texts(SamplingParams(grammar=Grammar.choice(["ab"])), tokenizer)
    sampler = RequestSampler(params, [1], tokenizer.n_vocab, ReferenceSampling())
    sampler._matcher.take(tokenizer.encode("z")[0])
    with pytest.raises(SamplingError, match="the grammar failed"):
        sampler(np.zeros(tokenizer.n_vocab, np.float32))
