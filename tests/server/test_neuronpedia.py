"""Neuronpedia's inference API: features of prompts and steering, against NumPy and the offline model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from kukri import LLM
from kukri.server.neuronpedia.steering import others
from tests.interp.interventions.test_interventions import sae_files
from tests.server.live_server import Served, serving
from tests.tiny_gguf import write_tiny

D, F = 64, 100
KEYS = ("plain", "alice researcher scope=interp")
ALLOWED = {"x-api-key": "researcher"}
PROMPT = "The cat sat on the mat"
SAE = "1-res"


def arrays(layer: int) -> dict[str, np.ndarray]:
    """A transcoder's layer."""
    rng = np.random.default_rng(layer)
    names = {name: rng.standard_normal((F, D)).astype(np.float32) for name in ("W_enc", "W_dec")}
    return names | {"b_enc": rng.standard_normal(F).astype(np.float32), "b_dec": np.zeros(D, np.float32)}


@pytest.fixture(scope="module")
def open_llm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Opens the model: an engine belongs to a server, or to who calls it."""
    path = write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf")
    folder: Path = tmp_path_factory.mktemp("mlps")
    for layer in (0, 1):
        safetensors.numpy.save_file(arrays(layer), folder / f"layer_{layer}.safetensors")
    sae: Path = tmp_path_factory.mktemp("sae") / SAE
    sae_files(sae, n=F)
    return lambda: LLM(
        path, backend="reference", max_requests=4, transcoders={"mlps": folder}, saes={SAE: sae}
    )


@pytest.fixture(scope="module")
def llm(open_llm: Any) -> Iterator[LLM]:
    """The model without a server."""
    with open_llm() as opened:
        yield opened


@pytest.fixture(scope="module")
def http(open_llm: Any) -> Iterator[httpx.Client]:
    with (
        open_llm() as opened,
        serving(opened, api_keys=KEYS, has_interp=True) as server,
        server.http(headers=ALLOWED) as client,
    ):
        client.served = server  # type: ignore[attr-defined]
        yield client


def features(llm: LLM, layer: int) -> np.ndarray:
    """The features of the prompt in a layer of the transcoders, by NumPy: [tokens, F]."""
    _, cache = llm.run_with_cache(PROMPT)
    made = arrays(layer)
    x = cache[llm.interp.catalog.transcoders["mlps"].reader(layer).name][0]
    return np.maximum(x @ made["W_enc"].T + made["b_enc"], 0)


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_features_activations(http: httpx.Client, llm: LLM) -> None:
    """Catches another layer's feature, or a vector's product with another hook."""
    expected = features(llm, 1)
    found = post(http, "/v1/activation/single", prompt=PROMPT, model="smol", source="1-mlps", index=7)
    np.testing.assert_allclose(found["activation"]["values"], expected[:, 7], rtol=1e-3, atol=1e-3)
    assert found["activation"]["max_value_index"] == int(expected[:, 7].argmax())
    assert "".join(found["tokens"]).endswith(PROMPT)
    vector, hook = np.linspace(-1, 1, D).tolist(), "blocks.0.hook_resid_post"
    _, cache = llm.run_with_cache(PROMPT)
    found = post(http, "/v1/activation/single", prompt=PROMPT, vector=vector, hook=hook)
    np.testing.assert_allclose(
        found["activation"]["values"], cache[hook][0] @ np.float32(vector), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("indexes", [[], [2, 4]])
def test_the_most_active_features_of_a_set(http: httpx.Client, llm: LLM, indexes: list[int]) -> None:
    """Catches layers that are mixed up, an order by another sum, and a first token that counts."""
    body = {"prompt": PROMPT, "source_set": "mlps", "sort_by_token_indexes": indexes, "num_results": 6}
    found = post(http, "/v1/activation/all", **body, selected_sources=[], ignore_bos=True)["activations"]
    expected = []
    for layer in (0, 1):
        values = features(llm, layer)
        values[0] = 0  # the tiny model's texts begin with a BOS
        score = values[indexes].sum(axis=0) if indexes else values.max(axis=0)
        expected += [(-float(score[i]), f"{layer}-mlps", i) for i in range(F)]
    expected.sort()
    assert [(one["source"], one["index"]) for one in found] == [one[1:] for one in expected[:6]]
    scores = [one["sum_values" if indexes else "max_value"] for one in found]
    np.testing.assert_allclose(scores, [-one[0] for one in expected[:6]], rtol=1e-3)
    only = post(http, "/v1/activation/all", **body, selected_sources=["0-mlps"], feature_filter=[3, 5])
    assert {(one["source"], one["index"]) for one in only["activations"]} == {("0-mlps", 3), ("0-mlps", 5)}
    of_sae = post(http, "/v1/activation/all", prompt=PROMPT, source_set="res")["activations"]
    assert {one["source"] for one in of_sae} == {SAE}


def test_the_most_active_features_of_each_token(http: httpx.Client, llm: LLM) -> None:
    """Catches tokens out of place."""
    expected = features(llm, 0)
    body = {"prompt": PROMPT, "source": "0-mlps", "top_k": 3, "ignore_bos": False}
    found = post(http, "/v1/activation/topk-by-token", **body)
    assert len(found["results"]) == len(found["tokens"]) == len(expected)
    for i, one in enumerate(found["results"]):
        top = np.argsort(-expected[i], kind="stable")[:3].tolist()
        assert (one["token_position"], one["token"]) == (i, found["tokens"][i])
        assert [feature["feature_index"] for feature in one["top_features"]] == top


def test_features_that_point_alike(http: httpx.Client) -> None:
    """Catches cosines of encoders, or lengths that count."""
    rows = arrays(1)["W_dec"]
    cosines = rows @ rows[9] / np.linalg.norm(rows, axis=1) / np.linalg.norm(rows[9])
    path, feature = "/v1/util/sae-topk-by-decoder-cossim", {"source": "1-mlps", "index": 9}
    found = post(http, path, feature=feature, source="1-mlps", num_results=4)["topk_decoder_cossim_features"]
    assert [one["feature"]["index"] for one in found] == np.argsort(-cosines, kind="stable")[:4].tolist()
    assert found[0]["cosine_similarity"] == pytest.approx(1, abs=1e-5)
    again = post(http, path, vector=(3 * rows[9]).tolist(), source="1-mlps", num_results=4)
    assert [one["feature"] for one in again["topk_decoder_cossim_features"]] == [
        one["feature"] for one in found
    ]


STEER: dict[str, Any] = {
    "types": ["STEERED", "DEFAULT"], "n_completion_tokens": 6, "temperature": 0, "seed": 42,
    "strength_multiplier": 2.0, "freq_penalty": 0.0, "steer_method": "SIMPLE_ADDITIVE",
    "normalize_steering": False, "n_logprobs": 2,
}  # fmt: skip


@pytest.mark.parametrize("method", ["SIMPLE_ADDITIVE", "ORTHOGONAL_DECOMP"])
def test_steered_completions(http: httpx.Client, llm: LLM, method: str) -> None:
    """Catches a strength that counts once, a steered answer that is not, a default one that is."""
    reader = llm.interp.catalog.transcoders["mlps"].reader(1)
    vector = reader.decoders([3])[0, 0]
    features = [{"model": "smol", "source": "1-mlps", "index": 3, "strength": 4.0}]
    body = {**STEER, "prompt": PROMPT, "features": features, "steer_method": method}
    found = post(http, "/v1/steer/completion", **body)["outputs"]
    op = "add" if method == "SIMPLE_ADDITIVE" else "scale"
    edit = {"op": op, "name": reader.writes[0], "vector": vector, "strength": 8.0}
    options: Any = {"temperature": 0, "max_tokens": 6}
    steered = llm.generate(PROMPT, interventions=[edit], **options).text
    plain = llm.generate(PROMPT, **options).text
    assert steered != plain
    outputs = [(one["type"], one["output"]) for one in found]
    assert outputs == [("STEERED", PROMPT + steered), ("DEFAULT", PROMPT + plain)]
    assert all(len(token["top_logprobs"]) == 2 for one in found for token in one["logprobs"])
    raw = {"steering_vector": vector.tolist(), "hook": reader.writes[0], "strength": 4.0}
    again = {**STEER, "prompt": PROMPT, "vectors": [raw], "steer_method": method, "stream": True}
    answer = http.post("/v1/steer/completion", json=again)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert json.loads(answer.text.removeprefix("data: "))["outputs"] == found


def test_part_along_a_vector_is_scaled(llm: LLM) -> None:
    """Catches a scaled part of another length: (I - P) h + s P h."""
    name, vector = "blocks.0.hook_resid_post", np.arange(D, dtype=np.float32)
    edit = {"op": "scale", "name": name, "vector": vector, "strength": 3.0}
    _, before = llm.run_with_cache(PROMPT, names=name)
    _, after = llm.run_with_cache(PROMPT, names=name, interventions=[edit])
    unit = vector / np.linalg.norm(vector)
    expected = before[name] + 2 * (before[name] @ unit)[..., None] * unit
    np.testing.assert_allclose(after[name], expected, rtol=1e-4, atol=1e-4)


def test_steered_chats(http: httpx.Client, llm: LLM) -> None:
    """Catches control tokens that are steered though they must not be, and chats without their prompt."""
    messages = [{"role": "user", "content": "Hi"}]
    raw = {"steering_vector": [1.0] * D, "hook": "blocks.1.hook_resid_post", "strength": 9.0}
    outputs = []
    for special in (True, False):
        body = {**STEER, "prompt": messages, "vectors": [raw], "steer_special_tokens": special}
        found = post(http, "/v1/steer/completion-chat", **body)
        steered, plain = found["outputs"]
        expected = llm.chat(messages, temperature=0, max_tokens=6).text
        assert plain["chat_template"] == [*messages, {"role": "assistant", "content": expected}]
        assert plain["raw"] == found["input"]["raw"] + expected
        outputs.append(steered["raw"])
    assert "Hi" in found["input"]["raw"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("activation/single", {"prompt": "a"}, "'source' and 'index'"),
        ("activation/single", {"prompt": "a", "source": "9-mlps", "index": 1}, "layer"),
        ("activation/single", {"prompt": "a", "source": "x", "index": 1}, "the source "),
        ("activation/single", {"prompt": "a", "source": "1-mlps", "index": F}, "'index' must be"),
        ("activation/single", {"prompt": "a", "vector": [1], "hook": "resid_post1"}, "64 numbers"),
        ("activation/single", {"prompt": "a", "vector": [1], "hook": "nowhere"}, "nowhere"),
        ("activation/all", {"prompt": "a", "source_set": "x"}, "the source set"),
        ("activation/all", {"prompt": "a", "source_set": "mlps", "feature_filter": [1]}, "feature_filter"),
        ("activation/all", {"prompt": "a", "source_set": "mlps", "sort_by_token_indexes": [99]}, "below"),
        (
            "util/sae-topk-by-decoder-cossim",
            {"source": "1-mlps", "num_results": 2},
            "either 'feature' or 'vector' is required",
        ),
        ("steer/completion", {**STEER, "prompt": "a"}, "either 'features' or 'vectors' is required"),
    ],
)
def test_wrong_requests(http: httpx.Client, path: str, body: dict[str, Any], words: str) -> None:
    """Catches a 500, or an answer about something else."""
    answer = http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


def test_keys_need_the_scope(http: httpx.Client) -> None:
    """Catches activations for everybody."""
    site: Served = http.served  # type: ignore[attr-defined]
    with site.http(headers={"x-api-key": "plain"}) as other:
        answer = other.post("/v1/activation/single", json={"prompt": "a", "source": "1-mlps", "index": 1})
    assert answer.status_code == 403


def test_control_tokens_can_be_spared() -> None:
    """Catches a steered control token, or a text's token that is spared with it."""
    assert others([], 6) == "all"
    assert others([0, 3], 6) == [[1, 3], [4, None]]
    assert others([5], 6) == [[0, 5], [6, None]]
