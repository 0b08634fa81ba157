"""Several models in one server: loaded on demand, unloaded when idle or for want of memory, nothing lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from kukri import LLM
from kukri.cli import app
from kukri.errors import ConfigError
from kukri.opening.memory import memory_need
from kukri.opening.model_options import ModelOptions
from kukri.server.models import catalog as catalog_module
from kukri.server.models import registry as registry_module
from kukri.server.models.served_model import ServedModel
from kukri.server.settings import ModelSpec, duration_s
from tests.models.tiny_encoders import save
from tests.server.live_server import Served, serving
from tests.tiny_gguf import random_arrays, tiny_config, write_tiny

NAMES = ("red", "green", "blue")
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three tiny models with other weights each."""
    folder, config = tmp_path_factory.mktemp("models"), tiny_config()
    return {
        name: write_tiny(folder / f"{name}.gguf", config, random_arrays(config, seed))
        for seed, name in enumerate(NAMES)
    }


@pytest.fixture(scope="module")
def answers(files: dict[str, Path]) -> dict[str, str]:
    """The answer of each model to its own name."""
    texts = {}
    for name, path in files.items():
        with LLM(path) as llm:
            texts[name] = llm.generate(name, **GREEDY, logit_bias=None).text
    assert len(set(texts.values())) == 3, "else the models could not be told apart"
    return texts


def options(path: Path, **more: Any) -> ModelOptions:
    return ModelOptions(model=str(path), max_requests=4, **more)


def served_models(files: dict[str, Path], **more: Any) -> list[ModelSpec]:
    return [ModelSpec((name,), options(path), **more) for name, path in files.items()]


def body(name: str, **more: Any) -> dict[str, Any]:
    return {"model": name, "prompt": name, **GREEDY, **more}


def states(served: Served) -> dict[str, str]:
    with served.http() as http:
        return {model["id"]: model["state"] for model in http.get("/v1/models").json()["data"]}


@pytest.mark.full
@pytest.mark.parametrize("n_requests", [24, pytest.param(198, marks=pytest.mark.slow)])
def test_alternating_requests_for_more_models_than_fit_lose_none(n_requests, files, answers):
    """Catches a request dropped while its model is unloaded, another model's answer, a starved one."""
    with serving(None, served_models(files), max_loaded=2) as served, served.http() as http:

        def ask(i: int) -> tuple[str, str, int]:
            name = NAMES[i % 3]
            if i % 4:
                response = http.post("/v1/completions", json=body(name))
                return name, response.json()["choices"][0]["text"], response.status_code
            lines = http.post("/v1/completions", json=body(name, stream=True)).text.split("\n\n")
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            return name, "".join(chunk["choices"][0]["text"] for chunk in chunks), 200

        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(ask, range(n_requests)))
        assert [status for _, _, status in results] == [200] * n_requests
        assert all(text == answers[name] for name, text, _ in results)
        assert sorted(states(served).values()) == ["loaded", "loaded", "unloaded"]
        text = http.get("/metrics").text
    unloads = [line for line in text.splitlines() if line.startswith("kukri_model_unloads_total")]
    assert unloads
    assert all('reason="memory"' in line for line in unloads)
    assert f'kukri_requests_total{{model="red",reason="length"}} {n_requests / 3}' in text


def test_a_lone_model_shows_its_memory(files):
    """Catches a model opened before the server, whose memory `kukri ps` would not know."""
    with LLM(files["red"]) as llm, serving(llm) as served, served.http() as http:
        (model, *_) = http.get("/v1/models").json()["data"]
        cache = llm.engine.runner.cache
        assert model["memory_bytes"] == llm.memory_bytes > cache.n_bytes > 0


@pytest.mark.full
def test_pinned_models_stay(files):
    """Catches the eviction of a pinned model, and a pinned model that is not loaded at the start."""
    models = [ModelSpec(("red",), options(files["red"]), is_pinned=True), *served_models(files)[1:]]
    with serving(None, models, max_loaded=2) as served, served.http() as http:
        assert states(served) == {"red": "loaded", "green": "unloaded", "blue": "unloaded"}
        for name in ("green", "blue", "green"):
            assert http.post("/v1/completions", json=body(name)).status_code == 200
        assert states(served) == {"red": "loaded", "green": "loaded", "blue": "unloaded"}


@pytest.mark.representative(3)
def test_an_idle_model_is_unloaded(files, answers):
    """Catches a timer that ends a model in use, and one that comes back with other weights."""
    with serving(None, served_models(files, keep_alive_s=0.3)) as served, served.http() as http:
        for _ in range(2):
            text = http.post("/v1/completions", json=body("red")).json()["choices"][0]["text"]
            assert text == answers["red"]
            assert states(served)["red"] == "loaded"
            served.wait_until(lambda: states(served)["red"] == "unloaded")


@pytest.mark.full
def test_requests_at_the_moment_of_unloading_are_answered(files, answers):
    """Catches a request that reaches an idle model while it is being unloaded."""
    with serving(None, served_models(files, keep_alive_s=0.05)) as served, served.http() as http:

        def ask(i: int) -> tuple[int, str]:
            threading.Event().wait(0.04 + 0.002 * (i % 12))  # around the time at which it is idle
            response = http.post("/v1/completions", json=body("red"))
            return response.status_code, response.text if response.is_error else response.json()["choices"][
                0
            ]["text"]

        for _ in range(5):  # on a busy machine two threads may leave no pause
            with ThreadPoolExecutor(2) as pool:
                found = list(pool.map(ask, range(36)))
            assert found == [(200, answers["red"])] * len(found)
            text = http.get("/metrics").text
            n_unloads = re.search(r'kukri_model_unloads_total\{model="red",reason="idle"\} (\d+)', text)
            if n_unloads is not None and int(n_unloads[1]) >= 2:
                break
    assert n_unloads is not None
    assert int(n_unloads[1]) >= 2, "the premise: it was unloaded meanwhile"


def test_streams_are_kept_alive_while_their_model_loads(files, answers, monkeypatch):
    """Catches a proxy that gives up on a stream whose model takes long, a client that ends the loading."""
    release, opened = threading.Event(), registry_module.ModelRegistry._opened

    def slow(*arguments: Any) -> Any:
        assert release.wait(20)
        return opened(*arguments)

    monkeypatch.setattr(registry_module.ModelRegistry, "_opened", slow)
    with serving(None, served_models(files), keep_alive_s=0.05) as served, served.http() as http:
        with http.stream("POST", "/v1/completions", json=body("red", stream=True)) as response:
            lines = response.iter_lines()
            assert next(lines) == ": keep-alive"
        entry = served.registry.catalog.named("red")
        served.wait_until(lambda: not entry.waiters)  # the client has left
        with http.stream("POST", "/v1/completions", json=body("red", stream=True)) as response:
            lines = response.iter_lines()
            assert next(lines) == ": keep-alive"
            assert states(served)["red"] == "loading"
            release.set()
            events = [line[6:] for line in lines if line.startswith("data: ")]
        texts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
        assert ("".join(texts), events[-1]) == (answers["red"], "[DONE]")


def test_a_model_that_cannot_be_loaded_fails_its_requests_alone(files, answers, tmp_path):
    """Catches a broken file that takes the server, or requests for other models, with it."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(files["red"].read_bytes()[:2000])
    models = [*served_models(files), ModelSpec(("broken",), options(broken))]
    with serving(None, models, keep_alive_s=0.01) as served, served.http() as http:
        for stream in (False, True):
            failed = http.post("/v1/completions", json=body("broken", stream=stream))
            assert "the model 'broken' cannot be loaded: " in failed.text
            assert str(tmp_path) not in failed.text
            assert failed.status_code == 500 or failed.text.startswith(": keep-alive")
        assert http.post("/v1/completions", json=body("red")).json()["choices"][0]["text"] == answers["red"]
        broken.write_bytes(files["red"].read_bytes())
        assert http.post("/v1/completions", json=body("broken")).status_code == 200


def test_a_model_that_never_fits_is_refused_in_one_line(files):
    """Catches models that are unloaded for one that cannot fit anyway, and a system that swaps."""
    need = memory_need(options(files["red"])).n_bytes
    models = [*served_models(files)[:2], ModelSpec(("blue",), options(files["blue"], kv_bytes=1 << 30))]
    with serving(None, models, memory_bytes=3 * need, kv_bytes=1 << 40) as served, served.http() as http:
        assert http.post("/v1/completions", json=body("red")).status_code == 200
        refused = http.post("/v1/completions", json=body("blue"))
        assert refused.status_code == 503
        message = refused.json()["error"]["message"]
        assert message.startswith("the model 'blue' requires 1,0")
        assert "\n" not in message
        assert states(served)["red"] == "loaded"


@pytest.mark.full
def test_a_changed_file_is_loaded_again(files, answers, tmp_path):
    """Catches a server that must be restarted for a new version of a model."""
    path = tmp_path / "model.gguf"
    shutil.copy(files["red"], path)
    with serving(None, [ModelSpec(("m",), options(path))]) as served, served.http() as http:

        def answer() -> str:
            return http.post("/v1/completions", json=body("m", prompt="green")).json()["choices"][0]["text"]

        before = answer()
        assert before != answers["green"]
        fresh = tmp_path / "fresh"
        shutil.copy(files["green"], fresh)
        then_s = time.time() - 100
        os.utime(fresh, (then_s, then_s))
        fresh.replace(path)
        served.wait_until(lambda: answer() == answers["green"])
        assert 'model_unloads_total{model="m",reason="changed"} 1.0' in http.get("/metrics").text


def test_models_of_a_directory_come_and_go_by_name(files, tmp_path):
    """Catches a directory that is read at the start alone."""
    shutil.copy(files["red"], tmp_path / "one.gguf")
    with serving(None, model_dir=tmp_path) as served, served.http() as http:
        assert states(served) == {"one": "unloaded"}
        shutil.copy(files["green"], tmp_path / "two.gguf")
        assert http.post("/v1/completions", json=body("two")).status_code == 200
        assert http.post("/v1/completions", json=body("three")).status_code == 404


def test_an_encoder_is_served_beside_language_models(files, tmp_path):
    """Catches a model without text that cannot be loaded, and a 500 where it is asked for text."""
    save(tmp_path, "bert", "Model")
    encoder = ModelSpec(("embed",), options(tmp_path))
    with serving(None, [*served_models(files), encoder]) as served, served.http() as http:
        vectors = http.post("/v1/embeddings", json={"model": "embed", "input": ["a", "b"]})
        assert len(vectors.json()["data"]) == 2
        assert http.post("/v1/completions", json=body("red")).status_code == 200
        refused = http.post("/v1/completions", json=body("embed"))
        assert refused.status_code == 400
        assert "makes embeddings and cannot generate" in refused.json()["error"]["message"]


def test_a_context_for_several_models_is_cut_for_the_smaller_ones(files, tmp_path, caplog):
    """Catches --max-context for a large model, which made each request for a smaller one a 500."""
    save(tmp_path, "bert", "Model")
    models = [
        ModelSpec(("large",), options(files["red"], max_context=100)),
        ModelSpec(("small",), options(tmp_path, max_context=100)),
    ]
    with serving(None, models) as served, served.http() as http:
        assert http.post("/v1/embeddings", json={"model": "small", "input": "a"}).status_code == 200
        assert http.post("/v1/completions", json=body("large")).status_code == 200
        sizes = {one["id"]: one["max_model_len"] for one in http.get("/v1/models").json()["data"]}
    assert sizes == {"large": 100, "small": 96}
    (line,) = [one for one in caplog.records if "max_context" in one.getMessage()]
    assert (line.model, line.getMessage()) == ("small", "max_context 100 is more than the model's: it has 96")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rope-scaling", "yarn", "--rope-factor", "4"], "RoPE scaling (--rope-scaling) is not supported"),
        (["--quantize", "Q8_0"], "'quantize' is not supported"),
        (["--mmproj", "x.gguf"], "'mmproj' (--mmproj) is not supported"),
        (["--draft-model", "DRAFT"], "is an encoder and generates no text"),
    ],
)
def test_an_option_that_one_of_several_models_cannot_have_ends_the_start(
    flags, message, files, tmp_path, monkeypatch
):
    """Catches options for all models that make the first request for one of them a 500."""
    save(tmp_path, "bert", "Model")
    models = ["--model", f"a={files['red']}", "--model", f"b={tmp_path}"]
    command = ["serve", *models, "--port", "0", *flags]
    command = [str(files["red"]) if word == "DRAFT" else word for word in command]
    monkeypatch.setattr("kukri.terminal.serve.run_app", lambda *_: None)
    monkeypatch.setattr("kukri.server.logs.configure_logs", lambda **_: None)  # stays for all that follows
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2, done.output
    assert message in " ".join(done.stderr.split())
    assert f"the model {'a' if 'quantize' in message else 'b'!r} cannot be loaded" in done.stderr


_RSS = """
import json, sys, time
import httpx
from tests.server.live_server import serving
from kukri.opening.model_options import ModelOptions
from kukri.server.models.served_model import ServedModel
from kukri.server.settings import ModelSpec

def rss():
    return next(int(l.split()[1]) / 1024 for l in open("/proc/self/status") if l.startswith("VmRSS"))

model = ModelSpec(("m",), ModelOptions(model=sys.argv[1], max_context=1024), keep_alive_s=0.2)
found = []
with serving(None, [model]) as served, served.http() as http:
    for _ in range(3):
        assert http.post("/v1/completions", json={"model": "m", "prompt": "Hi"}).status_code == 200
        loaded = rss()
        served.wait_until(lambda: http.get("/v1/models").json()["data"][0]["state"] == "unloaded")
        found.append((loaded, rss()))
print(json.dumps(found))
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_unloading_gives_the_memory_back(smollm2_path):
    """Catches weights, tiles or a KV cache that something still holds."""
    done = subprocess.run(
        [sys.executable, "-c", _RSS, str(smollm2_path)], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    # the first round loads libraries too
    (loaded, before), *_, (_, after) = json.loads(done.stdout.splitlines()[-1])
    assert loaded - before > 100
    assert after < 1.1 * before


def test_times_are_read_as_they_are_written():
    """Catches a minute that is a second, and text that is taken for a time."""
    cases = {"300": 300, "10m": 600, "1h30m": 5400, "250ms": 0.25, "-1": -1, "-1m": -60, 5: 5, 0: 0}
    assert {value: duration_s(value, "t") for value in cases} == cases
    for wrong in ("", "m", "1 day", "1e3", "10m5", True, "1" * 40):
        with pytest.raises(ConfigError, match="t must be a time"):
            duration_s(wrong, "t")


_MANY = 100  # tokens of an answer that takes half a minute


def endless(http: Any, name: str) -> Any:
    """A stream that does not end in a test's time, unless its client leaves."""
    return http.stream("POST", "/v1/completions", json=body(name, stream=True, max_tokens=_MANY))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the answers of `endless` slow."""
    params = ServedModel.params

    def slowed(self: ServedModel, sampling: Any) -> Any:
        made = params(self, sampling)
        is_slow = made.max_tokens == _MANY
        return replace(made, logits_processors=(_wait,)) if is_slow else made

    monkeypatch.setattr(ServedModel, "params", slowed)


def _wait(_: Any, logits: Any) -> Any:
    time.sleep(0.3)
    return logits


@pytest.mark.full
def test_a_stream_without_an_end_delays_no_other_model(files, answers, slow, monkeypatch):
    """Catches an eviction that waits for a busy model under the lock, and one for a client that has left."""
    monkeypatch.setattr(registry_module, "_LEAVE_S", 0.5)
    with (
        serving(None, served_models(files), max_loaded=1) as served,
        served.http() as http,
        endless(http, "red") as stream,
        ThreadPoolExecutor(2) as pool,
    ):
        lines = stream.iter_lines()  # which closes the stream when it is forgotten
        assert next(lines).startswith("data: ")
        red, green = (served.registry.catalog.named(name) for name in ("red", "green"))
        with pytest.raises(httpx.TimeoutException):
            http.post("/v1/completions", json=body("green", stream=True), timeout=0.2)
        served.wait_until(lambda: not (green.waiters or red.is_leaving))
        assert states(served)["red"] == "loaded"  # nobody wants its memory any more

        waiting = pool.submit(http.post, "/v1/completions", json=body("green"))
        served.wait_until(lambda: red.is_leaving)
        meanwhile = pool.submit(http.post, "/v1/completions", json=body("red"))
        assert meanwhile.result(20).json()["choices"][0]["text"] == answers["red"]
        assert not waiting.done()
        next(lines)
        stream.close()
        assert waiting.result(20).json()["choices"][0]["text"] == answers["green"]


@pytest.mark.full
def test_another_busy_model_is_unloaded_where_the_first_does_not_end(files, answers, slow, monkeypatch):
    """Catches a server whose every load waits for one stream while another model becomes free."""
    monkeypatch.setattr(registry_module, "_LEAVE_S", 0.3)
    with (
        serving(None, served_models(files), max_loaded=2) as served,
        served.http() as http,
        endless(http, "red") as first,
        endless(http, "green") as second,
        ThreadPoolExecutor(1) as pool,
    ):
        streams = [first.iter_lines(), second.iter_lines()]
        assert all(next(lines).startswith("data: ") for lines in streams)
        blue = pool.submit(http.post, "/v1/completions", json=body("blue"))
        green = served.registry.catalog.named("green")
        served.wait_until(lambda: green.is_leaving)
        second.close()
        assert blue.result(20).json()["choices"][0]["text"] == answers["blue"]
        assert states(served) == {"red": "loaded", "green": "unloaded", "blue": "loaded"}
        assert next(streams[0]) is not None


@pytest.mark.full
def test_a_model_is_unloaded_by_a_client_while_it_streams(files, slow, monkeypatch):
    """Catches a client's unloading that waits for a stream forever, and takes the model from others."""
    monkeypatch.setattr(registry_module, "_LEAVE_S", 0.3)
    with (
        serving(None, served_models(files), max_loaded=1) as served,
        served.http() as http,
        endless(http, "red") as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        refused = http.post("/api/generate", json={"model": "red", "keep_alive": 0})
        assert (refused.status_code, refused.json()["error"]) == (
            503,
            "the model 'red' still answers requests: try again later",
        )
        assert http.post("/v1/completions", json=body("red")).status_code == 200
        stream.close()
        assert http.post("/api/generate", json={"model": "red", "keep_alive": 0}).status_code == 200
        assert states(served)["red"] == "unloaded"


def test_directories_are_looked_at_off_the_loop_and_seldom(files, tmp_path, monkeypatch):
    """Catches a slow disk that stops every stream, and a client that reads the disk as fast as it can ask."""
    shutil.copy(files["red"], tmp_path / "one.gguf")
    looks: list[tuple[str, float]] = []

    def slowly(directory: Path) -> Any:
        looks.append((threading.current_thread().name, time.monotonic()))
        time.sleep(0.2)
        return [("one", tmp_path / "one.gguf")]

    with serving(None, model_dir=tmp_path) as served, served.http() as http, ThreadPoolExecutor(8) as pool:
        monkeypatch.setattr(catalog_module, "models_in", slowly)
        paths = [*(["/v1/models"] * 6), *(f"/v1/models/unknown-{i}" for i in range(6))]
        statuses = [response.status_code for response in pool.map(http.get, paths)]
    assert statuses == [*([200] * 6), *([404] * 6)]
    assert not any(name.endswith("(run)") for name, _ in looks), "that is the server's own thread"
    assert 1 <= len(looks) <= 3
    assert all(later - earlier >= 0.99 for (_, earlier), (_, later) in pairwise(looks))


_CUT = """
import json, os, sys, time
from tests.server.live_server import serving
from kukri.opening.loading import ModelOptions
from kukri.server.settings import ModelSpec

models = [ModelSpec((path,), ModelOptions(model=path, max_requests=2)) for path in sys.argv[1:]]
with serving(None, models) as served, served.http() as http:

    def ask(path):
        body = {"model": path, "prompt": "".join(map(chr, range(33, 120))), "temperature": 0, "max_tokens": 4}
        response = http.post("/v1/completions", json=body)
        return response.status_code, response.json().get("choices", [{}])[0].get("text")

    before = [ask(path) for path in sys.argv[1:]]
    os.truncate(sys.argv[1], 0)
    right_after = [ask(path) for path in sys.argv[1:]]
    deadline_s = time.monotonic() + 20
    while (refused := ask(sys.argv[1]))[0] == 200 and time.monotonic() < deadline_s:
        time.sleep(0.1)
    print(json.dumps([before, right_after, refused[0], ask(sys.argv[2]), http.get("/ready").status_code]))
"""


@pytest.mark.full
def test_a_model_file_that_is_cut_short_fails_its_model_alone(files, tmp_path):
    """Catches a served file that shrinks and ends the process by SIGBUS, the other models with it."""
    paths = [str(shutil.copy(files[name], tmp_path)) for name in ("red", "green")]
    done = subprocess.run([sys.executable, "-c", _CUT, *paths], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    before, right_after, refused, other, ready = json.loads(done.stdout.splitlines()[-1])
    assert [status for status, _ in before] == [200, 200]
    assert right_after == before
    assert (refused, other, ready) == (500, before[1], 200)
