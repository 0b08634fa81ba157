"""Late interaction (ColBERT): vectors of tokens by transformers and PyLate's definition, and MaxSim."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kukri import LLM
from kukri.cli import app
from kukri.errors import ContextLengthError, FormatError, KukriError, RequestError, UnsupportedError
from kukri.sampling import SamplingParams
from kukri.scale.wire import request_from_json, request_to_json
from kukri.terminal.convert import convert_model
from tests.lazy_imports import lazy_imports
from tests.models.tiny_colbert import PREFIXES, WIDTH, defined, save_late
from tests.server.live_server import MODEL, serving
from tests.tasks.test_tasks import make

with lazy_imports():
    from safetensors.torch import load_file, save_file

QUERY, DOCUMENTS = "cats sat, on!", ["the cat sat on the mat.", "a, b! c?", "mats", "the mat " * 9]
TOLERANCES = {"reference": 1e-5, "torch": 1e-5, "cpu": 2e-3}
SEEN, PLAIN = {"attend_to_expansion_tokens": True}, {"do_query_expansion": False}
# 70 tokens, most of which nobody sees, are several pages and work entries of a kernel
LONG = {"query_length": 70, "document_length": 80}


@pytest.mark.parametrize("backend", TOLERANCES)
@pytest.mark.parametrize(
    ("name", "settings"),
    [("bert", {}), ("modernbert", {}), ("bert", LONG), ("bert", SEEN), ("modernbert", PLAIN)],
)
def test_vectors_are_those_of_the_definition(
    name: str, settings: dict[str, Any], backend: Any, tmp_path: Path
) -> None:
    """Expansion that the query's words see, a prefix in another place, punctuation kept, no dense layer."""
    hf = save_late(tmp_path, name, **settings)
    with LLM(tmp_path, backend=backend, n_threads=1) as llm:
        for prompt_name, texts in (("query", [QUERY, "a"]), ("document", DOCUMENTS)):
            found = llm.embed_tokens(texts, prompt_name=prompt_name)
            for text, vectors in zip(texts, found, strict=True):
                wanted = defined(tmp_path, hf, text, prompt_name == "query", **settings)
                np.testing.assert_allclose(vectors, wanted, atol=TOLERANCES[backend], rtol=0)
                alone = llm.embed_tokens(text, prompt_name=prompt_name)
                # PyTorch's products on the CPU depend on how many rows they have, on some processors
                np.testing.assert_allclose(alone, vectors, atol=1e-6 if backend == "torch" else 0, rtol=0)
        llm.engine.check_integrity()
    if not settings:  # the premise: it matters who sees the expansion
        seen = defined(tmp_path, hf, QUERY, True, **SEEN)
        assert np.abs(seen - defined(tmp_path, hf, QUERY, True)).max() > 0.05


def max_sims(query: np.ndarray, documents: list[np.ndarray]) -> list[float]:
    """MaxSim as it is defined, one product at a time."""
    return [sum(max(float(q @ d) for d in document) for q in query) for document in documents]


@pytest.mark.full
def test_documents_are_ranked_by_their_tokens(tmp_path: Path) -> None:
    """A mean of tokens, a maximum over the query's, a server or command that compares vectors of texts."""
    hf = save_late(tmp_path, "bert")
    query = defined(tmp_path, hf, QUERY, True)
    wanted = max_sims(query, [defined(tmp_path, hf, text, False) for text in DOCUMENTS])
    order = np.argsort(wanted)[::-1].tolist()
    assert np.diff(sorted(wanted)).min() > 0.01
    with LLM(tmp_path, n_threads=1) as llm:
        found = llm.rerank(QUERY, DOCUMENTS)
        assert [one.index for one in found] == order
        np.testing.assert_allclose([one.score for one in found], sorted(wanted)[::-1], atol=0.02)
        with serving(llm) as server, server.http() as http:

            def post(path: str, **body: Any) -> Any:
                answer = http.post(path, json={"model": MODEL, **body})
                assert answer.status_code == 200, answer.text
                return answer.json()

            ranked = post("/v1/rerank", query=QUERY, documents=DOCUMENTS)["results"]
            same = [(one.index, pytest.approx(one.score, rel=1e-6)) for one in found]
            assert [(one["index"], one["relevance_score"]) for one in ranked] == same
            scores = post("/v1/score", text_1=QUERY, text_2=DOCUMENTS)["data"]
            np.testing.assert_allclose([one["score"] for one in scores], wanted, atol=0.02)
            pooled = post("/pooling", input=QUERY, prompt_name="query")["data"][0]["data"]
            np.testing.assert_allclose(pooled, query, atol=2e-3)
            for form in ("float", "base64"):
                (one,) = post("/v1/embeddings", input=QUERY, prompt_name="query", encoding_format=form)[
                    "data"
                ]
                got = one["embedding"]
                if form == "base64":
                    got = np.frombuffer(base64.b64decode(got), "<f4").reshape(-1, WIDTH)
                np.testing.assert_allclose(got, query, atol=2e-3)
            for wrong in (
                {"pooling": "mean"},
                {"dimensions": 8},
                {"prompt_name": "title"},
                {"input": [5, 6], "allow_token_ids": True},
            ):
                answer = http.post("/v1/embeddings", json={"input": "a", **wrong})
                assert answer.status_code == 400, wrong
            assert http.post("/api/embed", json={"model": MODEL, "input": "a"}).status_code == 400
    done = CliRunner().invoke(app, ["rerank", "-m", str(tmp_path), QUERY, *DOCUMENTS, "--json"])
    assert done.exit_code == 0, done.output
    assert [one["index"] for one in json.loads(done.output)["results"]] == order


def test_texts_that_are_too_long_are_refused_or_cut(tmp_path: Path) -> None:
    """A limit that forgets the prefix, and a last token that is not the end."""
    hf = save_late(tmp_path, "bert")
    long = "the cat sat on a mat " * 20
    with LLM(tmp_path, backend="reference") as llm:
        for prompt_name in ("query", "document"):
            with pytest.raises(ContextLengthError):
                llm.embed_tokens(long, prompt_name=prompt_name)
            wanted = defined(tmp_path, hf, long, prompt_name == "query")
            found = llm.embed_tokens(long, prompt_name=prompt_name, truncate=True)
            np.testing.assert_allclose(found, wanted, atol=1e-5)
        with pytest.raises(RequestError, match="embed_tokens"):
            llm.embed("a")


def test_a_replica_hears_what_nobody_sees(tmp_path: Path) -> None:
    """Mask tokens that all see, as soon as the engine is in another process."""
    save_late(tmp_path, "bert")
    with LLM(tmp_path, backend="reference") as llm:
        encoded = llm.text_encoder.encode_tokens([QUERY], prompt_name="query")
        (sent,) = llm.text_encoder.token_requests(llm.engine.maker, encoded)
        got = request_from_json(
            json.loads(json.dumps(request_to_json(sent))), llm.engine.maker, SamplingParams()
        )
        assert got.n_unseen == sent.n_unseen > 5


def test_stanfords_format_is_read(tmp_path: Path) -> None:
    """A dense layer that is left out, and settings under other names."""
    hf = save_late(tmp_path, "bert")
    tensors = {f"bert.{name}": tensor for name, tensor in hf.state_dict().items()}
    tensors |= load_file(tmp_path / "1_Dense" / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["HF_ColBERT"]}))
    for name in ("modules.json", "config_sentence_transformers.json"):
        (tmp_path / name).unlink()
    stated: dict[str, Any] = {"query_token_id": "[Q] ", "doc_token_id": "[D] ", "query_maxlen": 20}
    stated |= {"doc_maxlen": 40, "attend_to_mask_tokens": False, "mask_punctuation": True}
    (tmp_path / "artifact.metadata").write_text(json.dumps(stated))
    with LLM(tmp_path, backend="reference") as llm:
        for text, name in ((QUERY, "query"), *((text, "document") for text in DOCUMENTS)):
            wanted = defined(tmp_path, hf, text, name == "query")
            np.testing.assert_allclose(llm.embed_tokens(text, prompt_name=name), wanted, atol=1e-5)
    (tmp_path / "artifact.metadata").unlink()  # then its own prefixes, which this tokenizer does not have
    with pytest.raises(UnsupportedError, match="unused0"):
        LLM(tmp_path, backend="reference")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("bert", {"query_prefix": "[X] "}, "must be a token"),
        ("modernbert", {"query_length": 50}, "with windows shorter than"),
        ("bert", {"query_length": 0}, "query_length"),
        ("bert", {"skiplist_words": "a"}, "skiplist_words"),
        ("bert", {"document_prefix": 5}, "document_prefix"),
    ],
)
def test_wrong_settings_are_refused(
    name: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A setting that is left out, whose vectors would be those of no model."""
    save_late(tmp_path, name, **settings)
    with pytest.raises((UnsupportedError, FormatError), match=message):
        LLM(tmp_path, backend="reference")


def test_what_is_not_run_is_refused(tmp_path: Path) -> None:
    """A residual of a dense layer, and the settings lost in a GGUF file."""
    save_late(tmp_path, "bert")
    with pytest.raises(UnsupportedError, match=r"vectors of tokens \(ColBERT\) are not supported in GGUF"):
        convert_model(tmp_path, tmp_path / "m.gguf", "F32", dry_run=False, as_json=True)
    path = tmp_path / "1_Dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_residual": True}))
    with pytest.raises(KukriError, match="use_residual"):
        LLM(tmp_path, backend="reference")


def test_a_bidirectional_model_is_not_run_as_a_causal_one(tmp_path: Path) -> None:
    """A class with Llama's type and tensors, whose tokens see later ones."""
    make(tmp_path, "llama", "Model")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["LlamaBidirectionalModel"]}))
    with pytest.raises(UnsupportedError, match="LlamaBidirectionalModel"):
        LLM(tmp_path, backend="reference")


def test_other_models_have_vectors_of_tokens_too(tmp_path: Path) -> None:
    """A prefix for a model that has none."""
    save_late(tmp_path, "bert")
    (tmp_path / "config_sentence_transformers.json").unlink()
    with LLM(tmp_path, backend="reference") as llm:
        vectors = llm.embed_tokens("the cat")
        n_tokens = len(llm.tokenizer.encode("the cat", add_special=True))
        assert vectors.shape == (n_tokens, WIDTH)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        assert set(PREFIXES.values()) <= set(llm.tokenizer.vocabulary.tokens)
