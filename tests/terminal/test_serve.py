"""`kukri serve` as a process: how it starts, what it says, how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import pytest

from kukri.errors import ConfigError
from kukri.host.installed import needs_package
from kukri.opening.option_fields import size_bytes
from kukri.terminal.serve import read_keys
from kukri.terminal.served_models import default_name

pytestmark = pytest.mark.usefixtures("compiled_kernels")


class Process:
    """A `kukri serve` of its own; `url` once it is up, `said` all lines of its stderr."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kukri", "serve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        self.said: list[str] = []
        self._reader = threading.Thread(target=lambda: self.said.extend(self.process.stderr))
        self._reader.start()
        deadline = time.monotonic() + 60
        while not (found := re.search(r"http://\S+:(\d+)/v1", "".join(self.said))):
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.02)
        self.url = f"http://127.0.0.1:{found[1]}"
        while True:
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                assert time.monotonic() < deadline, self.said
                time.sleep(0.02)

    def wait(self, timeout_s: float = 30) -> int:
        status = self.process.wait(timeout_s)
        self._reader.join(5)
        return status


@contextmanager
def process(*arguments: str, **environment: str) -> Iterator[Process]:
    started = Process(*arguments, **environment)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
        started.wait()


def wait_until_refused(url: str) -> None:
    """Until nobody new is let in."""
    deadline = time.monotonic() + 10
    with suppress(httpx.TransportError):
        while time.monotonic() < deadline:
            httpx.get(f"{url}/health", timeout=5)
        raise AssertionError("new requests are let in")


@pytest.mark.full
def test_sigterm_finishes_what_runs_and_exits_0(smollm2_path):
    """Catches answers that a restart cuts off, and an exit status that looks like a crash."""
    options = ("--port", "0", "--max-context", "1024", "--max-requests", "2", "--log-json")
    with (
        process(str(smollm2_path), *options) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        (name,) = [model["id"] for model in http.get("/v1/models").json()["data"]]
        body = {
            "model": name,
            "prompt": "Once upon a time",
            "max_tokens": 300,
            "ignore_eos": True,
            "stream": True,
            "speculation": "off",  # a chunk a token
        }
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            wait_until_refused(server.url)
            assert server.process.poll() is None, "the answer is not finished"
            rest = list(lines)
        assert rest[-2] == "data: [DONE]"
        assert sum(line.startswith("data: {") for line in rest) > 250
        assert server.wait() == 0, server.said
    said = "".join(server.said)
    assert "Traceback" not in said
    assert '"event": "request"' in said
    told = [json.loads(line) for line in server.said]
    assert {"started", "draining", "stopped"} <= {entry["event"] for entry in told}
    assert '"n_generated": 300' in said


@pytest.mark.representative(6)
def test_a_second_signal_ends_it_at_once(smollm2_path):
    """Catches a server that Ctrl-C does not stop while an answer continues."""
    options = ("--port", "0", "--max-context", "8192", "--max-requests", "1")
    with (
        process(str(smollm2_path), *options) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        name = http.get("/v1/models").json()["data"][0]["id"]
        body = {"model": name, "prompt": "Once", "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGINT)
            wait_until_refused(server.url)
            server.process.send_signal(signal.SIGINT)
            assert server.wait(10) == 0, server.said


@pytest.mark.full
def test_everybody_may_ask_is_said(smollm2_path):
    """Catches a server open to the network without a word, and a KV cache of another size than asked."""
    options = [
        "--host",
        "0.0.0.0",
        "--port",
        "0",
        "--kv-memory",
        "90MiB",
        "--max-requests",
        "4",
        "--alias",
        "smol",
    ]
    with process(str(smollm2_path), *options) as server:
        said = "".join(server.said)
        assert "warning: everybody who reaches 0.0.0.0" in said
        assert "KV cache 90 MiB: 4,096 tokens, 4 requests" in said
        assert f"serving smol, {smollm2_path.stem} on" in said
        assert "a page to chat on at http://0.0.0.0:" in said
        body = {"model": "smol", "prompt": [5] * 4097, "max_tokens": 1}
        refused = httpx.post(f"{server.url}/v1/completions", json=body)
        assert refused.status_code == 400
        assert "the context holds 4096" in refused.json()["error"]["message"]
    with process(str(smollm2_path), *options, "--no-page", KUKRI_API_KEY="k1,k2") as server:
        assert "everybody who reaches" not in "".join(server.said)
        assert "page" not in "".join(server.said)
        assert httpx.get(f"{server.url}/ready").status_code == 200
        models = f"{server.url}/v1/models"
        assert httpx.get(models).status_code == 401
        assert httpx.get(models, headers={"authorization": "Bearer k2"}).status_code == 200


def failure(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kukri", "serve", *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert not done.stdout
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.full
def test_what_is_wrong_is_said_in_one_line(smollm2_path, tmp_path):
    """Catches tracebacks, and a model that is loaded before an option is found to be wrong."""
    model = str(smollm2_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert port in failure(model, "--port", port)
    assert "--max-body" in failure(model, "--max-body", "big")
    assert "--max-waiting" in failure(model, "--max-waiting", "0")
    assert "API keys" in failure(model, "--api-key-file", str(tmp_path / "nowhere"))
    assert "chat template" in failure(model, "--chat-template-file", str(tmp_path / "nowhere"))
    assert "nowhere.gguf" in failure("nowhere.gguf", "--port", "0")
    assert "max_context" in failure(model, "--port", "0", "--max-context", "99999999")
    assert "--log-level must be one of" in failure(model, "--log-level", "loud")


def test_without_the_extra_it_says_how_to_get_it(tmp_path):
    """Catches a ModuleNotFoundError as the first thing that a new user sees."""
    (tmp_path / "fastapi.py").write_text("raise ModuleNotFoundError('no', name='fastapi')")
    done = subprocess.run(
        [sys.executable, "-m", "kukri", "serve"],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    assert done.returncode == 2
    assert done.stderr == f"error: {needs_package('kukri serve', 'fastapi', 'serve')}\n"


def test_keys_come_from_a_file_or_the_environment(tmp_path, monkeypatch):
    """Catches comments or empty lines that become keys: an empty key would let everybody in."""
    monkeypatch.setenv("KUKRI_API_KEY", " a, ,b,a ")
    assert read_keys(None) == ("a", "b")
    monkeypatch.delenv("KUKRI_API_KEY")
    assert read_keys(None) == ()
    file = tmp_path / "keys"
    file.write_text("# ours\n\none\n two # hers\r\none\n")
    assert read_keys(file) == ("one", "two")
    file.write_text("# nothing\n\n")
    with pytest.raises(ConfigError, match="must hold API keys"):
        read_keys(file)


def test_memory_sizes_are_read_in_bytes():
    """Catches units that are confused, and text that is taken for a size."""
    assert size_bytes("2GiB", "x") == 2 << 30
    assert size_bytes("1.5 MiB", "x") == 3 << 19
    assert size_bytes("3KB", "x") == 3000
    assert size_bytes("77", "x") == 77
    for wrong in ("", "-1", "1TB", "GiB", "1e9", "٣"):
        with pytest.raises(ConfigError):
            size_bytes(wrong, "x")


def test_models_are_served_under_their_names(tmp_path):
    """Catches paths that are shown to strangers."""
    assert default_name(None) == "smollm2-135m"
    assert default_name("some/where/model.Q4_K.gguf") == "model.Q4_K"
    assert default_name(str(tmp_path)) == tmp_path.name
    assert default_name("org/repo:Q4_K_M") == "org/repo:Q4_K_M"
