"""/classify, /pooling and /v1/answers: what `LLM` and transformers say of the same texts."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest

from kukri import LLM
from tests.lazy_imports import lazy_imports
from tests.models.tiny_encoders import hf_states, save
from tests.server.bodies import check_error
from tests.server.live_server import MODEL, serving
from tests.tasks.test_tasks import CONTEXT, LABELS, QUESTION, QUESTIONS, TEXTS, make

with lazy_imports():
    import torch

SAID = ["the cat sat on the mat.", "a", "cats, sitting!"]


def test_labels_are_those_of_the_model(tmp_path: Path) -> None:
    """Catches probabilities in the order of their size, the label of another text, and a wrong row."""
    make(tmp_path, "smollm3", TEXTS, pad_token_id=0)
    with LLM(tmp_path, n_threads=1) as llm:
        wanted = [{one.label: one.score for one in llm.classify(text)} for text in SAID]
        ids = [llm.tokenizer.encode(text, add_special=True) for text in SAID]
        with serving(llm) as server, server.http() as http:
            for given in (SAID, ids):
                found = http.post("/classify", json={"model": MODEL, "input": given}).json()
                assert [one["index"] for one in found["data"]] == [0, 1, 2]
                for one, scores in zip(found["data"], wanted, strict=True):
                    np.testing.assert_allclose(one["probs"], [scores[LABELS[i]] for i in range(3)], rtol=1e-6)
                    assert one["label"] == max(scores, key=lambda label: scores[label])
                    assert one["num_classes"] == 3
            assert found["usage"]["prompt_tokens"] == sum(map(len, ids))
            pooled = http.post("/pooling", json={"input": SAID, "use_activation": False}).json()
            raw = np.array([one["data"] for one in pooled["data"]])
            soft = np.exp(raw) / np.exp(raw).sum(1, keepdims=True)
            np.testing.assert_allclose(soft, [one["probs"] for one in found["data"]], rtol=1e-4)
            check_error(http.post("/v1/answers", json={"question": "a?", "context": "b"}), 400, "model")
            check_error(http.post("/pooling", json={"input": "a", "task": "token_classify"}), 400, "model")
            check_error(http.post("/classify", json={"input": "a" * 999}), 400, "input")


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    """Catches the tokens of a neighbour, vectors that are not of length 1, and base64 in another order."""
    hf = save(tmp_path, "bert")
    with LLM(tmp_path, n_threads=1) as llm:
        wanted = llm.embed(SAID)
    with LLM(tmp_path, n_threads=1) as llm, serving(llm) as server, server.http() as http:
        found = http.post("/pooling", json={"input": SAID}).json()["data"]
        for one, text in zip(found, SAID, strict=True):
            state = hf_states(hf, llm.tokenizer.encode(text, add_special=True))[-1]
            state /= np.linalg.norm(state, axis=1, keepdims=True)
            np.testing.assert_allclose(one["data"], state, atol=3e-3)
        packed = http.post("/pooling", json={"input": SAID, "encoding_format": "base64"}).json()["data"]
        for one, floats in zip(packed, found, strict=True):
            numbers = np.frombuffer(base64.b64decode(one["data"]), "<f4")
            np.testing.assert_allclose(numbers, np.ravel(floats["data"]), rtol=1e-6)
        vectors = http.post("/pooling", json={"input": SAID, "task": "embed"}).json()["data"]
        np.testing.assert_allclose([one["data"] for one in vectors], wanted, atol=1e-6)


@pytest.mark.full
def test_labels_of_tokens(tmp_path: Path) -> None:
    """Catches a softmax over tokens, and tokens that were left out."""
    hf = save(tmp_path, "bert", "ForTokenClassification", num_labels=3)
    with LLM(tmp_path, n_threads=1) as llm, serving(llm) as server, server.http() as http:
        (found,) = http.post("/pooling", json={"input": SAID[0]}).json()["data"]
        with torch.no_grad():
            ids = torch.tensor([llm.tokenizer.encode(SAID[0], add_special=True)])
            wanted = hf(ids).logits[0].softmax(-1).numpy()
        np.testing.assert_allclose(found["data"], wanted, atol=3e-3)


def test_answers_are_those_of_the_model(tmp_path: Path) -> None:
    """Catches offsets of bytes, fewer answers than asked for, and numbers without bounds."""
    make(tmp_path, "llama", QUESTIONS)
    with LLM(tmp_path, n_threads=1) as llm:
        wanted = llm.extract(QUESTION, CONTEXT, top_k=3)
        with serving(llm) as server, server.http() as http:
            body = {"model": MODEL, "question": QUESTION, "context": CONTEXT, "top_k": 3}
            found = http.post("/v1/answers", json=body).json()
            for one, span in zip(found["data"], wanted, strict=True):
                assert {name: one[name] for name in ("text", "start", "stop")} == {
                    name: getattr(span, name) for name in ("text", "start", "stop")
                }
                assert one["score"] == pytest.approx(span.score, rel=1e-6)
                assert CONTEXT[one["start"] : one["stop"]] == one["text"]
            assert found["usage"]["prompt_tokens"] > len(CONTEXT)
            for wrong in (
                {"top_k": 0},
                {"max_answer_tokens": 10**9},
                {"question": ""},
                {"context": " " * 999},
            ):
                assert http.post("/v1/answers", json=body | wrong).status_code == 400, wrong
            check_error(http.post("/classify", json={"input": "a"}), 400, "model")
