"""Attribution graphs over HTTP in the form of Neuronpedia's graph server, against the offline model's."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from kukri import LLM
from kukri.opening.model_options import ModelOptions
from kukri.server.neuronpedia import graphs as graphs_module
from kukri.server.neuronpedia.graph_worker import outcome_of
from kukri.server.neuronpedia.graphs import Graphs
from kukri.server.settings import ModelSpec
from tests.server.live_server import MODEL, Served, serving
from tests.server.test_neuronpedia import ALLOWED, KEYS, PROMPT, arrays
from tests.tiny_gguf import write_tiny

PATH = "/generate-graph"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny.gguf, transcoders of its two layers in mlps/, and of its first alone in half/."""
    folder = tmp_path_factory.mktemp("graphs")
    write_tiny(folder / "tiny.gguf")
    for name, layers in (("mlps", (0, 1)), ("half", (0,))):
        (folder / name).mkdir()
        for layer in layers:
            save_file(arrays(layer), folder / name / f"layer_{layer}.safetensors")
    return folder


def opened(files: Path, *names: str, **options: Any) -> LLM:
    """The model with these transcoders."""
    transcoders = {name: files / name for name in names}
    return LLM(files / "tiny.gguf", backend="reference", max_requests=4, transcoders=transcoders, **options)


@pytest.fixture(scope="module")
def site(files: Path) -> Iterator[Served]:
    with opened(files, "mlps") as llm, serving(llm, api_keys=KEYS, has_interp=True) as server:
        yield server


@pytest.fixture
def http(site: Served) -> Iterator[httpx.Client]:
    with site.http(headers=ALLOWED) as client:
        yield client


def close(part: dict[str, Any]) -> dict[str, Any]:
    """What equals a node or link whose numbers differ in their last digits."""
    return {
        name: pytest.approx(value, rel=1e-3, abs=1e-5) if isinstance(value, float) else value
        for name, value in part.items()
    }


@pytest.mark.full
def test_a_graph_is_the_offline_models(http: httpx.Client, files: Path) -> None:
    """Catches options that are lost on the way, tokens of another prompt, features without theirs."""
    given = {"max_n_logits": 3, "desired_logit_prob": 0.5, "max_feature_nodes": 60}
    thresholds = {"node_threshold": 0.6, "edge_threshold": 0.9}
    body = {"prompt": PROMPT, "model_id": MODEL, "slug_identifier": "cat", "batch_size": 48, **given}
    answer = http.post(PATH, json={**body, **thresholds, "compress": True, "signed_url": None})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-encoding"] == "gzip"
    found = answer.json()
    with opened(files, "mlps") as llm:
        graph = llm.attribute(PROMPT, files / "mlps", max_logits=3, logit_share=0.5, max_features=60)
        expected = graph.as_json(lambda i: llm.tokenizer.decode([i], continues=True), "cat", **thresholds)
        written = llm.weights.W_U.T @ arrays(1)["W_dec"].T  # [V, F]
    for node in found["nodes"]:
        top = node.pop("top_tokens", None)
        assert (top is not None) == (node["feature_type"] == "cross layer transcoder")
        if node["layer"] == "1" and top:
            feature = int(node["node_id"].split("_")[1])
            best = np.argsort(-written[:, feature])[: len(top)].tolist()
            assert top == [llm.tokenizer.decode([i], continues=True) for i in best]
    for name in ("nodes", "links"):
        for mine, other in zip(found[name], expected[name], strict=True):
            assert mine == close(other)  # sums depend on the number of threads
    assert "".join(found["metadata"]["prompt_tokens"]) == found["metadata"]["prompt"] == PROMPT
    assert found["metadata"]["generation_settings"] == given
    assert found["metadata"]["pruning_settings"] == thresholds


@pytest.mark.full
def test_a_graph_of_a_chat(http: httpx.Client) -> None:
    """Catches a chat without its template."""
    messages = [{"role": "user", "content": "Hi"}]
    found = http.post(PATH, json={"messages": messages, "max_feature_nodes": 4}).json()["metadata"]
    asked = http.post("/tokenize", json={"messages": messages, "return_token_strs": True}).json()
    assert len(found["prompt_tokens"]) == asked["count"]
    assert "Hi" in found["prompt"]


def test_likeliest_next_tokens(http: httpx.Client, files: Path) -> None:
    """Catches the logits of another position, and tokens beyond the share that is asked for."""
    found = http.post("/forward-pass", json={"prompt": PROMPT, "desired_logit_prob": 0.2}).json()
    with opened(files, "mlps") as llm:
        ids = llm.tokenizer.encode(PROMPT, add_special=True)
        logits = llm.logits(ids)[-1].astype(np.float64)
    shares = np.exp(logits) / np.exp(logits).sum()
    order = np.argsort(-shares)
    n = found["total_salient_tokens"]
    assert [one["token_id"] for one in found["salient_logits"]] == order[:n].tolist()
    assert shares[order[: n - 1]].sum() < 0.2 <= found["cumulative_probability"]
    np.testing.assert_allclose(found["cumulative_probability"], shares[order[:n]].sum(), rtol=1e-3)
    assert len(found["input_tokens"]) == len(ids)


def test_features_of_a_graph_are_set(http: httpx.Client, files: Path) -> None:
    """Catches a value of another token, steps that are steered with the prompt, rows that are late."""
    features = [
        {"layer": 0, "index": 3, "token_active_position": 2, "steer_position": 4, "delta": 25.0},
        {"layer": 1, "index": 7, "token_active_position": 1, "steer_generated_tokens": True, "ablate": True},
        {"layer": 1, "index": 9, "token_active_position": 3, "steer_generated_tokens": True, "delta": 40.0},
    ]
    body = {"prompt": PROMPT, "model_id": MODEL, "features": features, "n_tokens": 6, "top_k": 3}
    answer = http.post("/steer", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    with opened(files, "mlps") as llm:
        ids = llm.tokenizer.encode(PROMPT, add_special=True)
        clamps = []
        for one, positions in zip(features, ([4], "generated", "generated")):
            reader = llm.interp.catalog.transcoders["mlps"].reader(one["layer"])
            _, cache = llm.run_with_cache(ids, names=[reader.name])
            now = reader.features(cache[reader.name][0])[one["token_active_position"], one["index"]]
            strength = 0.0 if one.get("ablate") else float(now) + one["delta"]
            of = {"transcoder": "mlps", "layer": one["layer"], "features": [one["index"]]}
            clamps.append({"op": "clamp", **of, "strength": strength, "positions": positions})
        for kind, edits in (("DEFAULT", []), ("STEERED", clamps)):
            made = llm.generate(ids, max_tokens=7, temperature=0, logprobs=3, interventions=edits)
            rows = found[f"{kind}_LOGITS_BY_TOKEN"]
            tokens = [*ids, *made.token_ids[:6]]
            assert [row["token"] for row in rows] == [
                llm.tokenizer.decode([i], continues=True) for i in tokens
            ]
            assert found[f"{kind}_GENERATION"] == "".join(row["token"] for row in rows)
            assert not any(row["top_logits"] for row in rows[: len(ids) - 1])
            for row, token in zip(rows[len(ids) - 1 :], made.logprobs, strict=True):
                shares = [math.exp(logprob) for _, logprob in token.top_logprobs]
                assert [one["prob"] for one in row["top_logits"]] == pytest.approx(shares, rel=1e-3)
    assert found["DEFAULT_GENERATION"] != found["STEERED_GENERATION"]
    again = http.post("/steer", json={**body, "features": []}).json()
    assert again["STEERED_LOGITS_BY_TOKEN"] == again["DEFAULT_LOGITS_BY_TOKEN"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"delta": None}, "either 'delta' or 'ablate' is required, not both"),
        ({"ablate": True}, "either 'delta' or 'ablate' is required, not both"),
        ({"steer_generated_tokens": True}, "either 'steer_position' or 'steer_generated_tokens'"),
        ({"steer_position": 99}, "'steer_position' must be below the"),
        ({"token_active_position": 99}, "'token_active_position' must be below the"),
        ({"index": 10_000}, "'index' must be from 0 to"),
        ({"layer": 9}, "'layer' must be one of transcoder"),
    ],
)  # fmt: skip
def test_steering_that_is_refused(http: httpx.Client, change: dict[str, Any], words: str) -> None:
    """Catches an edit of nothing, and an index error."""
    feature = {"layer": 0, "index": 3, "token_active_position": 2, "steer_position": 4, "delta": 25.0}
    answer = http.post("/steer", json={"prompt": PROMPT, "features": [{**feature, **change}]})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    frozen = http.post("/steer", json={"prompt": PROMPT, "features": [feature], "freeze_attention": True})
    assert frozen.status_code == 400


def children() -> list[str]:
    """The processes of this one that make graphs."""
    found = []
    for one in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = f"\nPPid:\t{os.getpid()}\n" in (one / "status").read_text()
            if is_ours and b"graph_worker" in (one / "cmdline").read_bytes():
                found.append(one.name)
        except OSError:  # it has ended
            continue
    return found


def test_progress_of_a_graph(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a line of progress that is taken for the graph, and progress that is left after it."""
    graphs = Graphs()
    told = [["tracing", [3, 8]], ["tracing", [8, 8]], ["made", ""], {"nodes": []}]
    states: list[dict[str, Any]] = []

    class Scripted:
        @classmethod
        async def start(cls, module: str, max_line: int) -> Scripted:
            return cls()

        async def send(self, *parts: bytes) -> None: ...
        async def kill(self) -> None: ...
        async def read_line(self) -> bytes:
            states.append(graphs.state())
            return json.dumps(told.pop(0)).encode()

    monkeypatch.setattr(graphs_module, "WorkerProcess", Scripted)
    assert asyncio.run(graphs._made({})) == b'{"nodes": []}'
    assert [one.get("progress") for one in states[:3]] == [
        None,
        {"done": 3, "total": 8},
        {"done": 8, "total": 8},
    ]
    assert http.get("/check-busy").json() == {"busy": False}


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_one_graph_at_a_time_which_ends_with_its_client(site: Served, http: httpx.Client) -> None:
    """Catches a second graph alongside the first, one that nobody waits for, streams that wait for one."""

    def is_busy() -> bool:
        return bool(http.get("/check-busy").json()["busy"])

    body = json.dumps({"prompt": PROMPT}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: a\r\nx-api-key: researcher\r\ncontent-type: application/json\r\n"
    first = socket.create_connection(("127.0.0.1", int(site.url.rpartition(":")[2])))
    first.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    site.wait_until(lambda: is_busy() and bool(children()))
    second = http.post(PATH, json={"prompt": PROMPT})
    assert second.status_code == 503
    assert second.headers["retry-after"]
    assert "another attribution graph" in second.json()["error"]["message"]
    answer = http.post("/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 3})
    assert answer.status_code == 200
    first.close()
    site.wait_until(lambda: not is_busy() and not children())
    assert http.get("/check-busy").json() == {"busy": False}
    assert http.post(PATH, json={"prompt": "again", "max_feature_nodes": 4}).status_code == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            {"signed_url": "http://169.254.169.254/"},
            "'signed_url' is not supported: the graph is the response",
        ),
        ({"enable_qk_tracing": True}, "'enable_qk_tracing' is not supported"),
        ({"prompt": ""}, "either 'prompt' or 'messages' is required"),
        ({"prompt": "a" * 300}, "at most 256 tokens, not 300: use `kukri circuit`"),
        ({"transcoder": "x"}, "the transcoder 'x' was not found: there are mlps"),
        ({"max_feature_nodes": 10_001}, "max_feature_nodes"),
        ({"node_threshold": 1.1}, "node_threshold"),
        ({"max_n_logits": 0}, "max_n_logits"),
    ],
)
def test_wrong_requests(http: httpx.Client, body: dict[str, Any], words: str) -> None:
    """Catches a 500, an address that is written to, a graph without bounds."""
    answer = http.post(PATH, json={"prompt": PROMPT, **body})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


def test_graphs_need_the_scope_and_a_model(site: Served, http: httpx.Client) -> None:
    """Catches graphs for everybody, and the graph of another model than the one that is named."""
    with site.http(headers={"x-api-key": "plain"}) as other:
        assert other.post(PATH, json={"prompt": PROMPT}).status_code == 403
        assert other.get("/check-busy").status_code == 403
    answer = http.post(PATH, json={"prompt": PROMPT, "model_id": "google/gemma-2-2b"})
    assert answer.status_code == 404
    assert "google/gemma-2-2b" in answer.json()["error"]["message"]


def test_nodes_of_another_graph(http: httpx.Client) -> None:
    """Catches an index error for features or layers that these transcoders do not have."""
    for place, words in (
        ({"layer": 1, "features": [100]}, "from 0 to 99"),
        ({"layer": 7, "features": [1]}, "'layer' must be one of transcoder 'mlps' (0, 1), not 7"),
    ):
        edit = {"op": "scale", "transcoder": "mlps", "strength": 2, **place}
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "interventions": [edit]}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]


@pytest.mark.full
def test_transcoders_that_cannot_make_a_graph(files: Path) -> None:
    """Catches a choice that nobody made, layers that are missing, memory beyond the bound."""
    with (
        opened(files, "mlps", "half") as llm,
        serving(llm, has_interp=True, max_graph_bytes=1 << 20) as server,
        server.http() as http,
    ):
        for more, words in (
            ({}, "'transcoder' is required: choose one of mlps, half"),
            (
                {"transcoder": "half"},
                "'transcoder' 'half' cannot be used: the transcoders must have 2 layers of width 64",
            ),
            ({"transcoder": "mlps"}, "must take at most 1 MiB of memory"),
        ):
            answer = http.post(PATH, json={"prompt": PROMPT, **more})
            assert answer.status_code == 400, answer.text
            assert words in answer.json()["error"]["message"]


def test_transcoders_of_another_width_are_named_by_the_error(files: Path, tmp_path: Path) -> None:
    """Catches a traceback, or a path of the server in an answer."""
    for layer in (0, 1):
        narrow = {
            name: one[..., :60].copy() if one.shape[-1] == 64 else one for name, one in arrays(layer).items()
        }
        save_file(narrow, tmp_path / f"layer_{layer}.safetensors")
    options = ModelOptions(model=str(files / "tiny.gguf"), transcoders={"mlps": tmp_path})
    with serving(None, [ModelSpec(("red",), options)], has_interp=True) as server, server.http() as http:
        answer = http.post(PATH, json={"prompt": PROMPT, "model_id": "red"})
    assert answer.status_code == 500
    assert "must have 2 layers of width 64, as the model, not 2 of 60" in answer.json()["error"]["message"]
    assert str(tmp_path) not in answer.text


def test_the_process_tells_whose_fault_it_is(files: Path, tmp_path: Path) -> None:
    """Catches a client that is blamed for a file of the server."""
    job: dict[str, Any] = {
        "model": {"model": str(files / "tiny.gguf")}, "transcoders": str(files / "mlps"), "ids": [5, 6, 7],
        "attributed": {"max_features": 4}, "written": {"slug": "a"}, "metadata": {"prompt": "abc"},
    }  # fmt: skip
    seen: list[tuple[int, int]] = []
    outcome, text = outcome_of(job, lambda done, total: seen.append((done, total)))
    assert seen
    assert seen[-1][0] == seen[-1][1]
    assert outcome == "made"
    assert json.loads(text)["metadata"]["prompt"] == "abc"
    assert outcome_of({**job, "ids": [10**6]})[0] == "refused"
    assert outcome_of({**job, "transcoders": str(tmp_path)}) == (
        "failed",
        f"{tmp_path} must have layer_0.safetensors, W_enc_0.safetensors or folders",
    )
