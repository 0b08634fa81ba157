"""Ollama's API, by its own Python package and by plain requests."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants
from pydantic import BaseModel, ConfigDict, Field

from kukri import LLM
from kukri.formats import hub
from kukri.formats.model_cache import remove as remove_files
from kukri.formats.repos import parse_name
from kukri.opening.model_options import ModelOptions
from kukri.server.models import catalog, created_presets
from kukri.server.models.pulling import MAX_PULLS
from kukri.server.ollama import models as ollama_models
from kukri.server.settings import ModelSpec
from tests.dialects.families import FAMILIES, write_family
from tests.fake_hub import TINY
from tests.lazy_imports import lazy_imports
from tests.server.forcing import force
from tests.server.live_server import MODEL, Served, serving
from tests.tiny_gguf import write_tiny

with lazy_imports():
    import ollama

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
LIKELIEST = {"temperature": 0, "frequency_penalty": 0, "presence_penalty": 0}
GREEDY = {**LIKELIEST, "num_predict": 12}


@pytest.fixture(scope="module")
def client(served: Served) -> ollama.Client:
    return ollama.Client(served.url)


@pytest.fixture(scope="module")
def expected(offline) -> str:
    return offline.chat(QUESTION, **LIKELIEST, max_tokens=12).text


def test_a_chat_is_that_of_the_other_apis(client, expected):
    """Catches a prompt, options or text that differ from OpenAI's endpoint, and counts or times left out."""
    answer = client.chat(MODEL, QUESTION, options=GREEDY)
    assert (answer.message.role, answer.message.content) == ("assistant", expected)
    assert (answer.done, answer.done_reason, answer.model) == (True, "length", MODEL)
    assert answer.eval_count == 12
    assert answer.prompt_eval_count > 10
    assert answer.total_duration > answer.eval_duration > 0
    assert answer.prompt_eval_duration > 0
    assert answer.created_at.endswith("Z")
    stopped = client.chat(f"{MODEL}:latest", QUESTION, options={**GREEDY, "stop": [expected[6:10]]})
    assert (stopped.done_reason, stopped.message.content) == ("stop", expected.partition(expected[6:10])[0])


def test_streams_are_lines(client, served, expected):
    """Catches a last line without counts, and lines that are no JSON of their own."""
    parts = list(client.chat(MODEL, QUESTION, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == expected
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == 12
    with served.http() as http:
        response = http.post("/api/chat", json={"model": MODEL, "messages": QUESTION, "options": GREEDY})
    assert response.headers["content-type"] == "application/x-ndjson"
    assert all(json.loads(line)["model"] == MODEL for line in response.text.splitlines())


@pytest.mark.full
def test_generate_is_a_message_or_raw(client, expected, offline):
    """Catches a raw prompt that gets the template, a prompt without it, and a system text lost."""
    prompt = QUESTION[0]["content"]
    assert client.generate(MODEL, prompt, options=GREEDY).response == expected
    parts = client.generate(MODEL, prompt, options=GREEDY, stream=True)
    assert "".join(part.response for part in parts) == expected
    raw = client.generate(MODEL, "Once upon a time", raw=True, options=GREEDY)
    same = {**LIKELIEST, "max_tokens": 12}
    assert raw.response == offline.generate("Once upon a time", **same).text
    messages = [{"role": "system", "content": "Answer in French."}, *QUESTION]
    french = client.generate(MODEL, prompt, system="Answer in French.", options=GREEDY)
    assert french.response == offline.chat(messages, **same).text


def test_many_at_a_time_from_the_async_client(served, expected):
    """Catches a client's stream that waits for another's."""

    async def ask() -> list[str]:
        client = ollama.AsyncClient(served.url)

        async def one() -> str:
            parts = await client.chat(MODEL, QUESTION, options=GREEDY, stream=True)
            return "".join([part.message.content async for part in parts])

        whole = await client.chat(MODEL, QUESTION, options=GREEDY)
        return [whole.message.content, *await asyncio.gather(*(one() for _ in range(4)))]

    assert asyncio.run(ask()) == [expected] * 5


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=10**8)


def test_answers_have_the_form_that_is_asked_for(client):
    """Catches a schema that is left out."""
    options = {**GREEDY, "num_predict": 80}
    answer = client.chat(MODEL, QUESTION, format=City.model_json_schema(), options=options)
    assert City.model_validate_json(answer.message.content).name
    free = client.generate(MODEL, "A person, as JSON", format="json", options={**GREEDY, "num_predict": 4})
    assert free.response.startswith("{")


def get_time(city: str) -> str:
    """The time in a city.

    Args:
      city: its name
    """
    return f"12:30 in {city}"


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_answered(tmp_path, monkeypatch, stream):
    """Catches arguments that are text, a call that is streamed in pieces, and results without their calls."""
    family, wanted = FAMILIES["qwen"], [("get_time", {"city": "Paris"}), ("get_time", {"city": "Rome"})]
    model = MODEL
    with LLM(write_family(tmp_path / "tiny.gguf", family), max_requests=2) as llm, serving(llm) as served:
        client = ollama.Client(served.url)
        force(served.served, monkeypatch, family.before + family.write(wanted), with_marks=True)
        given: Any = client.chat(model, QUESTION, tools=[get_time], stream=stream, options={"temperature": 0})
        parts = list(given) if stream else [given]
        calls = [call for part in parts for call in part.message.tool_calls or ()]
        assert [(call.function.name, call.function.arguments) for call in calls] == wanted
        assert "".join(part.message.content for part in parts) == family.before.rstrip()
        history = [*QUESTION, {"role": "assistant", "tool_calls": [call.model_dump() for call in calls]}]
        results = [
            {"role": "tool", "tool_name": "get_time", "content": get_time(city)} for city in ("Paris", "Rome")
        ]
        assert client.chat(model, [*history, *results], tools=[get_time]).done


@pytest.mark.full
def test_vectors_are_those_of_the_other_api(client, served, offline):
    """Catches vectors of other lengths, and the older form."""
    texts = ["a cat", "a train"]
    expected = offline.embed(texts)
    np.testing.assert_allclose(client.embed(MODEL, texts).embeddings, expected, atol=1e-6)
    np.testing.assert_allclose(client.embed(MODEL, texts[0]).embeddings, expected[:1], atol=1e-6)
    np.testing.assert_allclose(client.embeddings(MODEL, texts[0]).embedding, expected[0], atol=1e-6)
    long = "word " * 3000
    assert len(client.embed(MODEL, long).embeddings[0]) == len(expected[0])
    with pytest.raises(ollama.ResponseError, match="context"):
        client.embed(MODEL, long, truncate=False)


def test_the_models_are_listed_and_described(client, served):
    """Catches lists that the client's types do not take, and sizes of nothing."""
    (first, _) = client.list().models
    assert first.model == f"{MODEL}:latest"
    assert first.size > 9e7
    assert (first.details.family, first.details.format, first.details.parameter_size) == (
        "llama",
        "gguf",
        "134.52M",
    )
    assert first.details.quantization_level == "Q4_1"
    (running,) = client.ps().models
    assert running.context_length == 1024
    shown = client.show(MODEL)
    assert shown.modelinfo["llama.context_length"] == 8192
    assert "<|im_start|>" in shown.template
    assert "completion" in shown.capabilities
    with served.http() as http:
        assert http.head("/").status_code == 200
        version = http.get("/api/version").json()["version"]
        assert tuple(map(int, version.split("."))) >= (0, 13, 4), "the least that codex --oss works with"


def test_errors_have_ollamas_form(client, served):
    """Catches OpenAI's errors, which its clients do not read, and prompts cut in silence."""
    with pytest.raises(ollama.ResponseError, match="was not found") as caught:
        client.chat("gpt-9", QUESTION)
    assert caught.value.status_code == 404
    for body, words in (
        ({"messages": QUESTION, "options": {"temperature": -1}}, "options.temperature"),
        ({"messages": QUESTION, "options": {"num_ctx": 4}}, "the context holds 4"),
        ({"messages": [{"role": "user", "content": "", "images": ["aGk="]}]}, "messages[0].images"),
        ({"messages": QUESTION, "format": {"type": "array", "uniqueItems": True}}, "format"),
        ({"messages": QUESTION, "keep_alive": "soon"}, "'keep_alive' must be a time"),
    ):
        with served.http() as http:
            response = http.post("/api/chat", json={"model": MODEL, "stream": False, **body})
        assert response.status_code == 400
        assert words in response.json()["error"]
    cut = client.chat(MODEL, QUESTION, options={**GREEDY, "num_predict": -1, "num_ctx": 40})
    assert (cut.prompt_eval_count + cut.eval_count, cut.done_reason) == (40, "length")


def test_bodies_need_no_content_type_unless_a_page_sends_them(served):
    """Catches clients that do not say JSON, and web pages that reach the server without asking first."""
    body = json.dumps({"model": MODEL, "messages": QUESTION, "stream": False, "options": GREEDY})
    with served.http() as http:
        assert http.post("/api/chat", content=body).json()["done"]
        for header in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
            plain = {"content-type": "text/plain", **header}
            assert http.post("/api/chat", content=body, headers=plain).status_code == 403


@pytest.mark.full
def test_a_model_is_loaded_and_unloaded_by_keep_alive(tmp_path):
    """Catches keep_alive that is ignored: seconds, forever, or not at all."""
    path = write_tiny(tmp_path / "tiny.gguf")
    models = [ModelSpec(("tiny",), ModelOptions(model=str(path), max_requests=2))]
    with serving(None, models) as served:
        client = ollama.Client(served.url)
        assert client.ps().models == []
        loaded = client.generate("tiny", keep_alive=-1)
        assert (loaded.done_reason, len(client.ps().models)) == ("load", 1)
        assert client.ps().models[0].expires_at.year > 9000
        client.generate("tiny", "Hi", keep_alive="1h", options={"num_predict": 2})
        assert served.registry.catalog.named("tiny").keep_alive_s == 3600
        assert client.generate("tiny", keep_alive=0).done_reason == "unload"
        assert client.ps().models == []
        client.chat("tiny", [{"role": "user", "content": "Hi"}], keep_alive=0, options={"num_predict": 2})
        served.wait_until(lambda: client.ps().models == [])


def write_tiny_cached(name: str) -> None:
    """Puts a tiny model where the known one belongs."""
    path = hub.MODELS[name].path
    path.parent.mkdir(parents=True)
    write_tiny(path)


@pytest.fixture
def cached(tmp_path, monkeypatch) -> str:
    """The name of a known model, whose cache is empty."""
    monkeypatch.setenv("KUKRI_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return hub.DEFAULT_MODEL


@pytest.mark.full
def test_models_are_pulled_and_deleted_if_allowed(tiny_hub):
    """Catches a client that changes a server which does not allow it, and a model served that is gone."""
    with serving(None, manages_models=True) as served:
        client = ollama.Client(served.url)
        steps = [step.status for step in client.pull(TINY, stream=True)]
        assert (steps[0], steps[-1]) == ("pulling manifest", "success")
        assert client.generate(TINY, "Hi", options={"num_predict": 2, "temperature": 0}).eval_count == 2
        time.sleep(1.1)  # until the cache is looked at again, which has it by its file's name
        assert [model.model for model in client.list().models] == [f"{TINY}:latest"]
        assert (
            client.generate(
                f"{TINY}:tiny.gguf", "Hi", options={"num_predict": 2, "temperature": 0}
            ).eval_count
            == 2
        )
        assert len(client.ps().models) == 1, "one model of two names is loaded once"
        assert client.delete(TINY).status == "success"
        assert client.list().models == []
        with pytest.raises(ollama.ResponseError, match="the repository org/none or its file was not found"):
            client.pull("org/none")
        with pytest.raises(ollama.ResponseError, match="was not found"):
            client.pull("/etc/passwd")


@pytest.mark.full
def test_a_client_that_leaves_ends_its_download(tiny_hub):
    """Catches gigabytes that come for nobody, and progress that says nothing."""
    tiny_hub.stall_at = 21_000_000
    n_bytes = len(tiny_hub.repos[TINY]["tiny.gguf"])
    with serving(None, manages_models=True) as served, served.http() as http:
        with http.stream("POST", "/api/pull", json={"model": TINY}) as response:
            lines = map(json.loads, response.iter_lines())
            # all that comes before the line goes silent, in as many steps as this machine's time allows
            told = next(line for line in lines if line.get("completed", 0) >= 20 << 20)
            assert (told["completed"], told["total"]) == (20 << 20, n_bytes)
        served.wait_until(lambda: tiny_hub.n_lost == 1)
        served.wait_until(lambda: not list(Path(constants.HF_HUB_CACHE).rglob("*.incomplete")))
        tiny_hub.released.set()
        assert http.post("/api/pull", json={"model": TINY, "stream": False}).json() == {"status": "success"}


@pytest.mark.full
def test_downloads_at_a_time_have_a_bound(tiny_hub):
    """Catches a client that has a server start processes without an end."""
    tiny_hub.stall_at = 1000
    with serving(None, manages_models=True) as served, ThreadPoolExecutor(MAX_PULLS) as pool:
        body = {"model": TINY, "stream": False}
        with served.http() as http:
            begun = [pool.submit(http.post, "/api/pull", json=body) for _ in range(MAX_PULLS)]
            served.wait_until(lambda: served.registry.pulls.n_running == MAX_PULLS)
            refused = http.post("/api/pull", json=body)
            assert "try again" in refused.json()["error"]
            tiny_hub.released.set()
            assert [one.result(60).json() for one in begun] == [{"status": "success"}] * MAX_PULLS


def test_a_name_that_any_model_answers_for_deletes_nothing(cached):
    """Catches the default model deleted in place of one that is not there."""
    write_tiny_cached(cached)
    with serving(None, manages_models=True, any_model=True) as served:
        client = ollama.Client(served.url)
        assert client.generate("gpt-4", "Hi", options={"num_predict": 2, "temperature": 0}).eval_count == 2
        with pytest.raises(ollama.ResponseError, match="'gpt-4' was not found") as caught:
            client.delete("gpt-4")
        assert caught.value.status_code == 404
        assert hub.MODELS[cached].path.exists()


@pytest.mark.full
def test_a_model_that_is_being_deleted_is_not_loaded_again(cached, monkeypatch):
    """Catches a request between unloading and deletion, whose model stays in memory and in no list."""
    write_tiny_cached(cached)
    begun, may_continue = threading.Event(), threading.Event()

    def remove(name: str) -> int:
        begun.set()
        assert may_continue.wait(20)
        return remove_files(name)

    monkeypatch.setattr(ollama_models, "remove", remove)
    with serving(None, manages_models=True) as served, ThreadPoolExecutor(1) as pool:
        client = ollama.Client(served.url)
        assert client.generate(cached, "Hi", options={"num_predict": 2, "temperature": 0}).eval_count == 2
        (entry,) = served.registry.entries
        deleted = pool.submit(client.delete, cached)
        assert begun.wait(20)
        with pytest.raises(ollama.ResponseError, match="was not found"):
            client.generate(cached, "Hi")
        may_continue.set()
        assert deleted.result(20).status == "success"
        assert (served.registry.entries, entry.served) == ([], None)


def test_models_are_not_changed_unless_allowed(client, tmp_path):
    """Catches a server whose models any client deletes."""
    for change in (
        client.pull,
        client.delete,
        partial(client.create, from_=MODEL),
        partial(client.copy, "a"),
    ):
        with pytest.raises(ollama.ResponseError, match="--manage-models") as caught:
            change(MODEL)
        assert caught.value.status_code == 403
    path = write_tiny(tmp_path / "tiny.gguf")
    with (
        serving(None, [ModelSpec(("tiny",), ModelOptions(model=str(path)))], manages_models=True) as served,
        pytest.raises(ollama.ResponseError, match="the server was started with it"),
    ):
        ollama.Client(served.url).delete("tiny")
    assert path.exists()


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache directory of the test's own, and a model that is not in it."""
    monkeypatch.setenv("KUKRI_CACHE_DIR", str(tmp_path / "cache"))
    return [ModelSpec(("tiny",), ModelOptions(model=str(write_tiny(tmp_path / "tiny.gguf"))))]


def test_presets_are_created_copied_and_deleted(own_cache, monkeypatch):
    """Catches a preset that changes nothing, is lost in a restart, or stays after its deletion."""
    one = {"temperature": 0, "num_predict": 3}
    with serving(None, own_cache, manages_models=True) as served:
        client = ollama.Client(served.url)
        assert client.create("brief", from_="tiny", system="Be brief.", parameters=one).status == "success"
        steps = client.create("briefer", from_="brief", parameters={"num_predict": 2}, stream=True)
        assert [step.status for step in steps][-1] == "success"
        client.copy("briefer", "copied")
        lengths = {name: client.generate(name, "Hi").eval_count for name in ("brief", "briefer", "copied")}
        assert lengths == {"brief": 3, "briefer": 2, "copied": 2}
        assert client.show("copied").modelfile.count('SYSTEM """Be brief."""') == 1
        assert {m.model for m in client.list().models} == {f"{n}:latest" for n in ("tiny", *lengths)}
        client.create("brief", from_="tiny", parameters=one | {"num_predict": 4})
        assert client.generate("brief", "Hi").eval_count == 4
        assert client.generate("briefer", "Hi", options={"temperature": 0}).eval_count == 2, (
            "it was made from the one before"
        )
    with serving(None, own_cache, manages_models=True) as served:
        client = ollama.Client(served.url)
        assert client.generate("copied", "Hi", options={"temperature": 0}).eval_count == 2
        client.delete("copied")
        with pytest.raises(ollama.ResponseError, match="was not found"):
            client.generate("copied", "Hi")
        assert client.generate("brief", "Hi").eval_count == 4
        monkeypatch.setattr(catalog, "MAX_PRESETS", 2)
        with pytest.raises(ollama.ResponseError, match="2 presets exist"):
            client.copy("tiny", "more")


@pytest.mark.full(only=["body3-400-template"])
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "tiny", "from": "tiny"}, 400, "'tiny' is a loaded model"),
        ({"model": "a", "from": "b"}, 404, "was not found"),
        ({"model": "a"}, 400, "from"),
        ({"model": "a", "from": "tiny", "template": "{{ .Prompt }}"}, 400, "template"),
        ({"model": "a", "from": "tiny", "files": {"a.gguf": "sha256:0"}}, 400, "--model-dir"),
        ({"model": "a", "from": "tiny", "quantize": "q4_K_M"}, 400, "kukri quantize MODEL"),
        ({"model": "a", "from": "tiny", "parameters": {"top_p": 7}}, 400, "top_p"),
        ({"model": "a", "from": "tiny", "messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0]"),
    ],
)
def test_what_is_no_preset_is_refused(own_cache, body, status, message):
    """Catches a preset that would answer otherwise than its creator thinks."""
    with serving(None, own_cache, manages_models=True) as served, served.http() as http:
        response = http.post("/api/create", json=body)
        assert response.status_code == status, response.text
        assert message in response.json()["error"]
        assert len(http.get("/api/tags").json()["models"]) == 1


def test_the_file_of_a_model_is_refused_for_what_it_is(own_cache, tmp_path):
    """Catches advice to raise --max-body for gigabytes that no option makes welcome."""
    blob = tmp_path / "large.gguf"
    blob.write_bytes(bytes(3_000_000))
    with serving(None, own_cache, manages_models=True, max_body_bytes=1 << 20) as served:
        with pytest.raises(ollama.ResponseError, match="'files' is not supported") as caught:
            ollama.Client(served.url).create_blob(blob)
        assert caught.value.status_code == 400
        with served.http() as http:
            assert http.head("/api/blobs/sha256:0").status_code == 404
            sent = http.post("/api/blobs/sha256:0", content=blob.read_bytes())
            assert (sent.status_code, "--model-dir" in sent.json()["error"]) == (400, True)
            large = http.post("/api/create", content=blob.read_bytes())
            assert large.status_code == 413
    with serving(None, own_cache) as served, pytest.raises(ollama.ResponseError, match="--manage-models"):
        ollama.Client(served.url).create_blob(blob)


@pytest.mark.full
def test_names_in_ollamas_form_are_pulled(tiny_hub):
    """Catches qwen3:0.6b as a name that nobody knows, though qwen3-0.6b is the same model."""
    repo = parse_name("qwen3-0.6b")
    assert repo is not None
    tiny_hub.repos[repo.repo] = {f"tiny-{repo.choice}.gguf": tiny_hub.repos[TINY]["tiny.gguf"]}
    with serving(None, manages_models=True) as served:
        client = ollama.Client(served.url)
        for name in ("qwen3:0.6b", "qwen3-0.6b:latest"):
            assert client.pull(name).status == "success"
            assert client.generate(name, "Hi", options={"num_predict": 2, "temperature": 0}).eval_count == 2
        assert len(client.ps().models) == 1


def test_a_broken_file_of_presets_is_left_alone(own_cache, tmp_path):
    """Catches a server that does not start, or overwrites what somebody may want to mend."""
    path = tmp_path / "cache" / "presets.json"
    path.parent.mkdir(mode=0o700)
    for text in ("{", "[1]", '[{"model": 1}]', '[{"model": "tiny", "name": "a", "messages": null}]'):
        path.write_text(text)
        path.chmod(0o600)
        assert created_presets.read_presets() == []
    with serving(None, own_cache, manages_models=True) as served, served.http() as http:
        assert len(http.get("/api/tags").json()["models"]) == 1
    assert path.read_text() == text


def test_keys_and_hosts_hold_here_too(tmp_path):
    """Catches routes that need no key."""
    models = [ModelSpec(("tiny",), ModelOptions(model=str(write_tiny(tmp_path / "tiny.gguf"))))]
    with serving(None, models, api_keys=("k",), allowed_hosts=("127.0.0.1",)) as served:
        with pytest.raises(ollama.ResponseError, match="API key") as caught:
            ollama.Client(served.url).list()
        assert caught.value.status_code == 401
        ollama.Client(served.url, headers={"authorization": "Bearer k"}).list()
        with served.http(headers={"authorization": "Bearer k", "host": "evil.example"}) as http:
            assert http.get("/api/tags").json() == {"error": http.get("/api/tags").json()["error"]}
            assert http.get("/api/tags").status_code == 403
