"""/v1/rerank and /v1/embeddings of encoders: their own numbers, and a 400 for whatever is wrong."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kukri import LLM
from kukri.cli import app
from kukri.opening.model_options import ModelOptions
from kukri.server.asgi_client import post
from tests.models.tiny_encoders import save
from tests.scale.clusters import cluster
from tests.server.bodies import check_error
from tests.server.live_server import MODEL, serving

DOCUMENTS = ["the mat", "cats", "a cat sat on a mat, sitting"]


@pytest.mark.parametrize("head", ["ForSequenceClassification", "Model"])
def test_rankings_over_http(head: str, tmp_path: Path) -> None:
    """Scores of another document, fields of one of the two forms, errors that are a 500."""
    more = {"num_labels": 1} if head != "Model" else {}
    save(tmp_path, "bert", head, **more)
    with LLM(tmp_path, n_threads=1) as llm:
        wanted = [(one.index, one.score) for one in llm.rerank("cat?", DOCUMENTS)]
    with LLM(tmp_path, n_threads=1) as llm, serving(llm) as server, server.http() as http:

        def post(path: str = "/v1/rerank", **fields: object) -> tuple[int, dict]:
            body = {"model": MODEL, "query": "cat?", "documents": DOCUMENTS, **fields}
            answer = http.post(path, json=body)
            return answer.status_code, answer.json()

        status, jina = post()
        assert status == 200, jina
        got = [(one["index"], one["relevance_score"]) for one in jina["results"]]
        assert [i for i, _ in got] == [i for i, _ in wanted]
        np.testing.assert_allclose([s for _, s in got], [s for _, s in wanted], rtol=1e-6)
        assert jina["results"][0]["document"] == {"text": DOCUMENTS[wanted[0][0]]}
        assert jina["usage"]["total_tokens"] > 9
        objects = [{"text": text} for text in DOCUMENTS]
        cohere = post("/rerank", documents=objects, top_n=1, return_documents=False)[1]
        assert [set(one) for one in cohere["results"]] == [{"index", "relevance_score"}]
        assert cohere["meta"]["billed_units"]
        keyed = [{"text": text, "id": i, "url": {"of": text}} for i, text in enumerate(DOCUMENTS)]
        given = post(documents=keyed)[1]["results"]
        assert [(one["index"], one["document"]) for one in given] == [(i, keyed[i]) for i, _ in wanted]
        status, second = post("/v2/rerank", documents=DOCUMENTS, top_n=2, max_tokens_per_doc=4096)
        assert status == 200
        assert second["results"] == [{"index": i, "relevance_score": score} for i, score in got[:2]]
        assert second["meta"]["api_version"] == {"version": "2"}
        assert "document" in post("/v2/rerank", return_documents=True)[1]["results"][0]
        for wrong, path in (({"id": 1}, "documents[1].text"), (5, "documents[1]")):
            error = post(documents=["a", wrong])[1]["error"]
            assert error["param"] == path
            assert error["message"].startswith(f"'{path}'")
        long = "cat " * 200
        for wrong in (
            {"documents": [long]},
            {"documents": []},
            {"documents": [5]},
            {"query": ""},
            {"top_n": 0},
            {"query": None},
        ):
            status, answer = post(**wrong)
            assert status == 400, wrong
            assert answer["error"]["message"]
        status, answer = post(documents=["a", long], truncate=True)
        assert (status, answer["truncated"]) == (200, [1])
        if head == "Model":
            embed = {"model": MODEL, "input": ["a", long]}
            assert http.post("/v1/embeddings", json=embed).status_code == 400
            cut = http.post("/v1/embeddings", json={**embed, "truncate": True, "dimensions": 8}).json()
            assert cut["truncated"] == [1]
            assert {len(one["embedding"]) for one in cut["data"]} == {8}
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}
        answer = http.post("/v1/chat/completions", json=chat)
        assert answer.status_code == 400
        assert http.post("/v1/completions", json={"model": MODEL, "prompt": "a"}).status_code == 400


def test_rankings_of_a_batch_and_of_replicas(tmp_path: Path) -> None:
    """Catches a batch that refuses rankings, and replicas that score other pairs."""
    save(tmp_path / "model", "bert", "ForSequenceClassification", num_labels=1)
    path = str(tmp_path / "model")
    with LLM(path, n_threads=1) as llm:
        wanted = [(one.index, one.score) for one in llm.rerank("cat?", DOCUMENTS)]
    body = {"model": "tiny", "query": "cat?", "documents": DOCUMENTS}

    async def by_replicas() -> dict:
        async with cluster(ModelOptions(model=path, n_threads=1), 2) as made:
            return (await post(made.app, "/v1/rerank", body)).body

    line = {"custom_id": "a", "method": "POST", "url": "/v1/rerank", "body": body}
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(line))
    done = CliRunner().invoke(app, ["batch", str(source), str(target), "-m", path, "--alias", "tiny"])
    assert done.exit_code == 0, done.output
    for found in (asyncio.run(by_replicas()), json.loads(target.read_text())["response"]["body"]):
        assert [(one["index"], one["relevance_score"]) for one in found["results"]] == wanted


def test_scores_are_those_of_the_ranking(served):
    """Catches pairs that are mixed up, and a list of queries that meets every document."""
    documents = ["Paris is the capital of France.", "Cats sleep a lot."]
    query = "What is the capital of France?"
    with served.http() as http:
        ranked = http.post("/v1/rerank", json={"query": query, "documents": documents}).json()["results"]
        want = [one["relevance_score"] for one in sorted(ranked, key=lambda one: one["index"])]
        for names in (("text_1", "text_2"), ("queries", "documents")):
            body = dict(zip(names, (query, documents), strict=True))
            answer = http.post("/v1/score", json=body).json()
            assert [one["score"] for one in answer["data"]] == pytest.approx(want, abs=1e-6)
            assert answer["usage"]["prompt_tokens"] > 10
        pairs = {"text_1": [query, query], "text_2": documents[::-1]}
        answer = http.post("/score", json=pairs).json()
        assert [one["score"] for one in answer["data"]] == pytest.approx(want[::-1], abs=1e-6)
        check_error(http.post("/score", json={"text_1": ["a", "b"], "text_2": "c"}), 400, "text_1")
