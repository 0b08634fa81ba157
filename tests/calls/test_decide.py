"""`LLM.decide` and /v1/decide: the probabilities that logits give, computed another way here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri import LLM
from kukri.calls import decide
from kukri.dialects.model_dialect import ModelDialect
from kukri.errors import ContextLengthError, RequestError
from tests.dialects.families import FAMILIES, write_family
from tests.server.bodies import check_error
from tests.server.live_server import MODEL, serving

PROMPT = "The colour of the sky at noon is"
CHOICES = ["blue", "blue-grey", "red", "b", "green and very long"]
MESSAGES = [{"role": "user", "content": "Is it noon?"}]


@pytest.fixture(scope="module", params=["reference", "cpu"])
def llm(request: pytest.FixtureRequest, tiny_path: Path) -> Iterator[LLM]:
    with LLM(tiny_path, backend=request.param) as made:
        yield made


def direct(llm: LLM, prompt_ids: Sequence[int], text: str) -> float:
    """P(text | prompt) from the logits of both as one text, token by token."""
    ids = llm.tokenizer.encode_inside(text)
    logits = llm.logits([*prompt_ids, *ids]).astype(np.float64)
    probability = 1.0
    for i, token in enumerate(ids):
        row = np.exp(logits[len(prompt_ids) - 1 + i])
        probability *= row[token] / row.sum()
    return float(probability)


def test_probabilities_are_those_of_the_logits(llm: LLM) -> None:
    """Catches rows of another token, a first token that counts alone, and choices that share a beginning."""
    ids = llm.tokenizer.encode(PROMPT, add_special=True)
    p = {text: direct(llm, ids, text) for text in CHOICES}
    wanted = {**p, "blue": p["blue"] - p["blue-grey"], "b": p["b"] - p["blue"]}
    found = llm.decide(PROMPT, CHOICES)
    assert found.n_prompt_tokens == len(ids)
    assert found.mass == pytest.approx(sum(wanted.values()), rel=1e-4)
    for text, probability in wanted.items():
        assert np.exp(found.logprobs[text]) == pytest.approx(probability, rel=1e-4)
        assert found.probabilities[text] == pytest.approx(probability / sum(wanted.values()), rel=1e-4)
    assert found.choice == str(found) == max(wanted, key=lambda text: wanted[text])
    assert found.expected is None


def test_normalizations_and_a_content_free_prompt(llm: LLM) -> None:
    """Catches a mean over the wrong length, and a calibration that multiplies."""
    texts = ["yes", "maybe ünot"]
    ids, free = (llm.tokenizer.encode(text, add_special=True) for text in (PROMPT, "N/A"))
    p = np.array([[direct(llm, prompt, text) for text in texts] for prompt in (ids, free)])
    lengths = {
        "sequence": [1, 1],
        "token": [len(llm.tokenizer.encode_inside(text)) for text in texts],
        "byte": [3, 11],
    }
    for name, n in lengths.items():
        per = p ** (1 / np.array(n))
        plain = llm.decide(PROMPT, texts, normalization=name)
        assert list(plain.probabilities.values()) == pytest.approx((per[0] / per[0].sum()).tolist(), rel=1e-3)
        fair = llm.decide(PROMPT, texts, normalization=name, content_free="N/A")
        ratio = per[0] / per[1]
        assert list(fair.probabilities.values()) == pytest.approx((ratio / ratio.sum()).tolist(), rel=1e-3)
        assert fair.logprobs == plain.logprobs
    same = llm.decide(PROMPT, texts, content_free=PROMPT)
    assert list(same.probabilities.values()) == [0.5, 0.5]


def test_scores_have_a_mean(llm: LLM) -> None:
    """Catches "1" that takes the probability of "10" for its own."""
    ids = llm.tokenizer.encode(PROMPT, add_special=True)
    p = {n: direct(llm, ids, str(n)) for n in range(-2, 11)}
    p[1] -= p[10]
    found = llm.decide(PROMPT, scores=(-2, 10))
    assert list(found.probabilities) == [str(n) for n in p]
    mean = sum(n * one for n, one in p.items()) / sum(p.values())
    assert found.expected == pytest.approx(mean, rel=1e-3)


def test_messages_are_answered_without_reasoning(tmp_path: Path) -> None:
    """Catches probabilities of an answer in the place where a model thinks."""
    for name in ("hermes", "gpt_oss"):
        path = write_family(tmp_path / f"{name}.gguf", FAMILIES[name])
        with LLM(path, backend="reference") as made:
            ids = ModelDialect(made.chat_template, made.tokenizer).answer_prompt_ids(MESSAGES)
            if name == "gpt_oss":
                assert made.tokenizer.decode(ids).endswith("<|channel|>final<|message|>")
            p = [direct(made, ids, text) for text in ("yes", "no")]
            assert made.decide(MESSAGES).probabilities["yes"] == pytest.approx(p[0] / sum(p), rel=1e-4)


def test_batches_change_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches texts that are lost between batches, or computed twice."""
    wanted = llm.decide(PROMPT, CHOICES).probabilities
    monkeypatch.setattr(decide, "_MAX_ROWS_BYTES", 1)
    assert llm.decide(PROMPT, CHOICES).probabilities == pytest.approx(wanted, rel=1e-4)


def test_choices_of_one_token_take_the_prompt_alone(llm: LLM) -> None:
    """Catches a request for each of a hundred choices, where one row says all."""
    question = decide.Question(llm.tokenizer, [1, 2, 3], ["a", "b", "c"])
    assert question.texts == [[1, 2, 3]]
    question = decide.Question(llm.tokenizer, [1], ["ab", "abcd", "x"])
    assert len(question.texts) == 1


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"choices": ["a"]}, "choices"), ({"choices": ["a", "a"]}, "choices"),
        ({"choices": ["a", ""]}, "choices"), ({"choices": "ab"}, "choices"),
        ({"choices": [f"c{i}" for i in range(257)]}, "choices"), ({"choices": ["a", "b" * 5000]}, "choices"),
        ({"scores": (1, 1)}, "scores"), ({"scores": (0, 256)}, "scores"), ({"scores": (1, 2.5)}, "scores"),
        ({"choices": ["a", "b"], "scores": (1, 2)}, "scores"), ({"normalization": "words"}, "normalization"),
    ],
)  # fmt: skip
def test_wrong_choices_are_named(llm: LLM, given: dict[str, Any], param: str) -> None:
    """Catches an error that says nothing of what to change."""
    with pytest.raises(RequestError) as caught:
        llm.decide(PROMPT, **given)
    assert caught.value.param == param


def test_prompts_that_are_too_long(llm: LLM) -> None:
    """Catches a choice that grows past the context unseen."""
    with pytest.raises(ContextLengthError):
        llm.decide("a" * 127, ["x", "long enough"])


def test_decisions_over_http(tiny_path: Path) -> None:
    """Catches other numbers than LLM's, a field that is ignored, and an error that names another field."""
    with LLM(tiny_path, backend="reference") as llm, serving(llm) as server, server.http() as http:
        ids = llm.tokenizer.encode(PROMPT, add_special=True)

        def ask(**body: Any) -> Any:
            return http.post("/v1/decide", json={"model": MODEL, **body})

        p = [direct(llm, ids, text) for text in ("red", "green")]
        found = ask(prompt=PROMPT, choices=["red", "green"]).json()
        assert found["choices"][0]["probability"] == pytest.approx(p[0] / sum(p), rel=1e-4)
        assert found["mass"] == pytest.approx(sum(p), rel=1e-4)
        assert found["choice"] == ("red" if p[0] > p[1] else "green")
        assert found["usage"]["prompt_tokens"] == len(ids)
        same = ask(prompt=ids, choices=["red", "green"], content_free=PROMPT).json()
        assert [one["probability"] for one in same["choices"]] == [0.5, 0.5]
        chat = ask(messages=MESSAGES, scores={"min": 1, "max": 5}, normalization="token").json()
        assert [one["text"] for one in chat["choices"]] == ["1", "2", "3", "4", "5"]
        assert 1 < chat["expected"] < 5
        for body, param in (
            ({}, "prompt"), ({"prompt": "a", "messages": MESSAGES}, "prompt"),
            ({"prompt": "a", "content_free": MESSAGES}, "content_free"),
            ({"prompt": "a" * 200}, "prompt"), ({"prompt": "a", "content_free": "b" * 200}, "content_free"),
            ({"prompt": "a", "choices": ["b", "b"]}, "choices"), ({"prompt": "a", "choice": ["b"]}, "choice"),
            ({"prompt": "a", "normalization": "words"}, "normalization"),
            ({"prompt": "a", "scores": {"min": 1, "max": 1}}, "scores"),
            ({"prompt": "a", "adapter": "x"}, "adapter"),
        ):  # fmt: skip
            response = ask(**body)
            check_error(response, 400)
            assert response.json()["error"]["param"] == param, body
