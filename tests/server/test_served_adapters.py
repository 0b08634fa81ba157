"""LoRA adapters over HTTP: chosen by model or field, loaded and unloaded while serving, kept apart."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kukri import LLM
from kukri.errors import ConfigError
from kukri.opening.model_options import ModelOptions
from kukri.server.settings import ModelSpec
from kukri.terminal.serve_options import ServeOptions
from kukri.terminal.served_models import served_models
from tests.lazy_imports import lazy_imports
from tests.models.lora_files import Updates, write_gguf_adapter, write_peft
from tests.server.live_server import Served, serving
from tests.tiny_gguf import random_arrays, tiny_config, write_tiny

with lazy_imports():
    import openai
    import torch

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
MESSAGES: Any = [{"role": "user", "content": "Hello"}]
PROMPT = "Hello"


def updates(seed: int) -> Updates:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"model.layers.{i}.self_attn.{name}": (
            torch.randn(4, 64, generator=generator) * 0.2,
            torch.randn(n_out, 4, generator=generator) * 0.2,
        )
        for i in range(2)
        for name, n_out in (("q_proj", 64), ("v_proj", 32), ("o_proj", 64))
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and three adapters, one of them outside of the directory that clients may use."""
    root = tmp_path_factory.mktemp("served")
    write_tiny(root / "base.gguf", tiny_config(), random_arrays(tiny_config()))
    write_peft(root / "sql", updates(1))
    (root / "adapters").mkdir()
    write_peft(root / "adapters" / "json", updates(2))
    write_gguf_adapter(root / "adapters" / "poem.gguf", updates(3), 16)
    (root / "adapters" / "link").symlink_to(root / "sql")
    return root


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str | None, str]:
    """The completion by each adapter, and without one."""
    paths = {"sql": "sql", "json": "adapters/json", "poem": "adapters/poem.gguf"}
    with LLM(folder / "base.gguf", adapters={name: folder / p for name, p in paths.items()}) as llm:
        found = {name: llm.generate(PROMPT, adapter=name, **GREEDY).text for name in (None, *paths)}
    assert len(set(found.values())) == 4, "the premise: they can be told apart"
    return found


def options(folder: Path, **more: Any) -> ModelOptions:
    path = str(folder / "base.gguf")
    return ModelOptions(model=path, max_requests=4, adapters={"sql": str(folder / "sql")}, **more)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    model = ModelSpec(("base", "alias"), options(folder))
    with serving(None, [model], adapter_dir=folder / "adapters") as made:
        yield made


def completion(http: httpx.Client, model: str, **more: Any) -> str:
    response = http.post("/v1/completions", json={"model": model, "prompt": PROMPT, **GREEDY, **more})
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    text: str = response.json()["choices"][0]["text"]
    return text


def test_an_adapter_is_a_model(served: Served, answers: dict[str | None, str]) -> None:
    """A name that is listed and not served, an answer of the base model, streams that are others."""
    listed = {model.id: model.model_dump() for model in served.client.models.list()}
    assert {"base", "alias", "sql"} <= listed.keys()
    assert listed["sql"]["parent"] == "base"
    assert "parent" not in listed["alias"]
    assert served.client.models.retrieve("sql").id == "sql"
    with served.http() as http:
        for model, name in (("base", None), ("alias", None), ("sql", "sql")):
            assert completion(http, model) == answers[name]
        assert completion(http, "base", adapter="sql") == answers["sql"]
    stream = served.client.completions.create(
        model="sql", prompt=PROMPT, stream=True, max_tokens=8, temperature=0
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == answers["sql"]


def test_every_api_takes_the_name(served: Served) -> None:
    """An endpoint that answers with the base model under the adapter's name."""
    texts: dict[str, list[str]] = {"base": [], "sql": []}
    with served.http() as http:
        for model, found in texts.items():
            chat = http.post(
                "/v1/chat/completions", json={"model": model, "messages": MESSAGES, **GREEDY}
            ).json()
            found.append(chat["choices"][0]["message"]["content"])
            answer = {"model": model, "max_tokens": 8, "temperature": 0, "messages": MESSAGES}
            message = http.post("/v1/messages", json=answer).json()
            found.append(message["content"][0]["text"])
            body = {"model": model, "input": "Hello", "max_output_tokens": 8, "temperature": 0}
            response = http.post("/v1/responses", json=body).json()
            found.append(response["output"][0]["content"][0]["text"])
            ollama = {"stream": False, "options": {"temperature": 0, "num_predict": 8}}
            body = {"model": f"{model}:latest", "messages": MESSAGES, **ollama}
            found.append(http.post("/api/chat", json=body).json()["message"]["content"])
            body = {"model": model, "prompt": PROMPT, "raw": True, **ollama}
            found.append(http.post("/api/generate", json=body).json()["response"])
            vector = http.post("/v1/embeddings", json={"model": model, "input": "Hello"}).json()
            found.append(str(vector["data"][0]["embedding"]))
            ranking = {"model": model, "query": "Hello", "documents": ["a text", "another"]}
            ranked = http.post("/v1/rerank", json=ranking).json()
            assert ranked["model"] == model
            found.append(str([one["relevance_score"] for one in ranked["results"]]))
        explicit = http.post(
            "/v1/embeddings", json={"model": "base", "input": "Hello", "adapter": "sql"}
        ).json()
        assert str(explicit["data"][0]["embedding"]) == texts["sql"][-2]
        assert {"base:latest", "sql:latest"} <= {
            one["name"] for one in http.get("/api/tags").json()["models"]
        }
    for of_base, of_adapter in zip(texts["base"], texts["sql"], strict=True):
        assert of_base != of_adapter


def test_loading_and_unloading_while_others_run(served: Served, answers: dict[str | None, str]) -> None:
    """An answer of another adapter, or a request that is lost, while adapters come and go."""
    with served.http() as http, ThreadPoolExecutor(4) as pool:
        asked = [("base", None), ("sql", "sql")] * 10
        running = [(name, pool.submit(completion, http, model)) for model, name in asked]
        for name, path in (("json", "json"), ("poem", "poem.gguf")):
            body = {"lora_name": name, "lora_path": path}
            response = http.post("/v1/load_lora_adapter", json=body)
            assert response.status_code == 200, response.text
            assert completion(http, name) == answers[name]
            assert name in {model.id for model in served.client.models.list()}
        assert all(future.result() == answers[name] for name, future in running)
        again = http.post("/v1/load_lora_adapter", json={"lora_name": "json", "lora_path": "json"})
        assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
        for name in ("json", "poem"):
            body = {"lora_name": name, "lora_int_id": 3}
            assert http.post("/v1/unload_lora_adapter", json=body).status_code == 200
            gone = http.post("/v1/completions", json={"model": name, "prompt": PROMPT})
            assert gone.status_code == 404
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "json"}).status_code == 404
        assert completion(http, "sql") == answers["sql"]


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"lora_name": "x", "lora_path": "../sql"}, 400, "'../sql' was not found in the adapter directory"),
        ({"lora_name": "x", "lora_path": "/etc/passwd"}, 400, "in the adapter directory"),
        ({"lora_name": "x", "lora_path": "link"}, 400, "'link' was not found in the adapter directory"),
        ({"lora_name": "x", "lora_path": "."}, 400, "in the adapter directory"),
        ({"lora_name": "x", "lora_path": "nothing\0"}, 400, "in the adapter directory"),
        ({"lora_name": "x", "lora_path": "a" * 900}, 400, "in the adapter directory"),
        ({"lora_name": "base", "lora_path": "json"}, 400, "must be a new name: 'base'"),
        ({"lora_name": "a b", "lora_path": "json"}, 400, "lora_name"),
        ({"lora_name": "x", "lora_path": "json", "model": "other"}, 404, "was not found"),
        ({"lora_name": "x", "lora_path": "json", "load_inplace": True}, 400, "unload the adapter first"),
        ({"lora_name": "x"}, 400, "'lora_path' is required"),
    ],
)
def test_wrong_requests(served: Served, body: dict[str, Any], status: int, text: str) -> None:
    """A file that lies elsewhere is read, or a name means two things."""
    with served.http() as http:
        response = http.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == status, response.text
    assert text in response.json()["error"]["message"]


def test_a_broken_adapter_names_no_path_of_the_machine(served: Served, folder: Path) -> None:
    """A server that tells where its files lie; one that ends."""
    write_peft(folder / "adapters" / "dora", updates(4), use_dora=True)
    with served.http() as http:
        response = http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "dora"})
        assert response.status_code == 400
        assert "DoRA" in response.json()["error"]["message"]
        assert str(folder) not in response.text
        unknown = http.post("/v1/completions", json={"model": "base", "prompt": "a", "adapter": "nope"})
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "adapter")
        assert http.get("/health").json() == {"status": "ok"}


def test_without_the_directory_clients_change_nothing(folder: Path, answers: dict[str | None, str]) -> None:
    """An administrator's endpoint open to all."""
    adapters = {"sql": folder / "sql"}
    with (
        LLM(folder / "base.gguf", adapters=adapters, max_requests=4) as llm,
        serving(llm) as served,
        served.http() as http,
    ):
        load = http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "json"})
        unload = http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
        assert (load.status_code, unload.status_code) == (403, 403)
        assert completion(http, "sql") == answers["sql"]


@pytest.mark.full
def test_adapters_outlive_an_unloaded_model(folder: Path, answers: dict[str | None, str]) -> None:
    """A name that is forgotten when its model is unloaded; a model that a lost file keeps from loading."""
    write_peft(folder / "adapters" / "brief", updates(2))
    model = ModelSpec(("base",), options(folder))
    with serving(None, [model], adapter_dir=folder / "adapters") as served, served.http() as http:
        for name, path in (("json", "json"), ("brief", "brief")):
            body = {"lora_name": name, "lora_path": path, "model": "base"}
            assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
        assert completion(http, "brief") == answers["json"]
        (folder / "adapters" / "brief").rename(folder / "away")
        body = {"model": "base", "keep_alive": 0}
        assert http.post("/api/generate", json=body).status_code == 200
        served.wait_until(lambda: served.registry.entries[0].served is None)
        assert completion(http, "json") == answers["json"]
        assert completion(http, "sql") == answers["sql"]
        with pytest.raises(openai.NotFoundError):
            served.client.completions.create(model="brief", prompt=PROMPT)


def test_names_on_the_command_line(folder: Path) -> None:
    """A name of a model and an adapter; adapters given to the wrong one of several models."""
    base, loading = str(folder / "base.gguf"), {"adapters": {"sql": "sql"}}
    (model,) = served_models([base], ServeOptions(), loading)
    assert model.options.adapters == {"sql": "sql"}
    with pytest.raises(ConfigError, match="two models cannot have the name 'base'"):
        served_models([base], ServeOptions(), {"adapters": {"base": "sql"}})
    with pytest.raises(ConfigError, match="not supported with several models"):
        served_models([base, f"other={base}"], ServeOptions(), loading)
    config = folder / "models.toml"
    config.write_text(f'[models.a]\nmodel = "{base}"\nadapter = {{ sql = "sql" }}\n')
    (model,) = served_models([], ServeOptions(config=config), {})
    assert model.options.adapters == {"sql": "sql"}
    config.write_text(f'[models.a]\nmodel = "{base}"\nadapter = "sql"\n')
    with pytest.raises(ConfigError, match="must be a table of files"):
        served_models([], ServeOptions(config=config), {})
