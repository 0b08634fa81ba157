"""Who may do what: scopes, models and tokens of keys, pages of other sites, keys that change."""

from __future__ import annotations

import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from kukri import LLM
from kukri.errors import ConfigError
from kukri.opening.loading import ModelOptions
from kukri.server.keys import KeyRing, Meter
from kukri.server.rates import RateLimiter, WrongKeys, network_of
from kukri.server.settings import ModelSpec
from kukri.terminal.serve import bound_unix_socket, server_settings
from kukri.terminal.serve_options import ServeOptions
from tests.server.live_server import ASK, CHAT, MODEL, TEXT, serving
from tests.tiny_gguf import random_arrays, tiny_config, write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    with LLM(write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf"), max_requests=4) as llm:
        yield llm


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


# --- scopes


@pytest.mark.full
def test_a_key_without_the_scope_changes_nothing_for_others(tiny, tmp_path, monkeypatch):
    """Catches any route by which every key deletes, pulls, unloads or pins models, or changes adapters."""
    monkeypatch.setenv("KUKRI_CACHE_DIR", str(tmp_path / "cache"))
    model = write_tiny(tmp_path / "own.gguf")
    models = [ModelSpec(("own",), ModelOptions(model=str(model), max_requests=2))]
    adapter = {"lora_name": "a", "lora_path": "none"}
    prompt = {"model": "own", "prompt": "Hi", "stream": False, "options": {"num_predict": 1}}
    managing: list[tuple[str, str, dict[str, Any], int]] = [
        ("POST", "/api/pull", {"model": "/not/a/name"}, 400),
        ("DELETE", "/api/delete", {"model": "own"}, 400),
        ("POST", "/api/generate", {"model": "own", "keep_alive": 0}, 200),
        ("POST", "/api/generate", {"model": "own", "keep_alive": -1}, 200),
        ("POST", "/api/generate", {**prompt, "keep_alive": 0}, 200),
        ("POST", "/api/chat", {"model": "own", "messages": [], "keep_alive": "-1m"}, 200),
        ("POST", "/api/embed", {"model": "own", "input": "a", "keep_alive": 0}, 200),
        ("POST", "/v1/load_lora_adapter", adapter, 400),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "a"}, 404),
    ]
    keys = ("plain", "boss scope=manage")
    settings = {"manages_models": True, "adapter_dir": tmp_path, "api_keys": keys}
    with serving(None, models, **settings) as served, served.http() as http:
        for method, path, body, status in managing:
            refused = http.request(method, path, json=body, headers=key("plain"))
            assert (refused.status_code, "does not have the scope 'manage'" in refused.text) == (403, True), (
                path
            )
            allowed = http.request(method, path, json=body, headers=key("boss"))
            assert allowed.status_code == status, (path, allowed.text)
        longer = {**prompt, "keep_alive": "99h"}
        assert http.post("/api/generate", json=longer, headers=key("plain")).status_code == 200
        entry = served.registry.catalog.named("own")
        assert entry.keep_alive_s == 0, "the boss's last word"
    with serving(tiny) as served, served.http() as http:
        assert http.post("/api/generate", json={"model": MODEL, "keep_alive": 0}).status_code == 200


def test_a_key_sees_and_uses_its_models_alone(tmp_path):
    """Catches a list of models that one of the APIs, or a default, goes around."""
    config = tiny_config()
    models = [
        ModelSpec((name,), ModelOptions(model=str(write_tiny(tmp_path / f"{name}.gguf", config,
                  random_arrays(config, seed))), max_requests=2))
        for seed, name in enumerate(("red", "green"))
    ]  # fmt: skip
    keys = ("all", "some models=green,blue")
    with serving(None, models, api_keys=keys, any_model=True) as served, served.http() as http:
        some = key("some")
        assert [one["id"] for one in http.get("/v1/models", headers=some).json()["data"]] == ["green"]
        assert len(http.get("/v1/models", headers=key("all")).json()["data"]) == 2
        tags = http.get("/api/tags", headers=some).json()["models"]
        assert [one["name"] for one in tags] == ["green:latest"]
        assert "red" not in http.get("/ui/model", headers=some).text
        body = {"prompt": "Hi", "max_tokens": 1}
        for name, answered_by in (
            (None, "green"),
            ("green", "green"),
            ("unknown", "green"),
            ("red", "green"),
        ):
            answer = http.post(TEXT, json={**body, "model": name}, headers=some)
            assert answer.json()["model"] == answered_by
        assert http.post(TEXT, json={**body, "model": "red"}, headers=key("all")).json()["model"] == "red"
    with serving(None, models, api_keys=keys) as served, served.http() as http:
        for path, more in (
            (TEXT, body),
            ("/v1/embeddings", {"input": "a"}),
            ("/tokenize", {"prompt": "a"}),
            ("/completion", {"prompt": "a"}),
            ("/api/show", {}),
            ("/api/generate", {"prompt": "a"}),
        ):
            refused = http.post(path, json={**more, "model": "red"}, headers=some)
            assert refused.status_code == 404, (path, refused.text)
            assert "red" not in refused.text.replace("'red'", "")
        assert http.get("/v1/models/red", headers=some).status_code == 404
        assert http.get("/props?model=red", headers=some).status_code == 404


def test_a_key_has_its_tokens_a_day(tiny):
    """Catches a budget that counts answers or prompts alone, and one that ends with the first request."""
    body = {"model": MODEL, "prompt": [5] * 10, "max_tokens": 10, "ignore_eos": True}
    keys = ("ann ka daily-tokens=40", "bob kb", "ann kc")
    with serving(tiny, api_keys=(*keys, "ops kd scope=manage")) as served, served.http() as http:
        assert http.post(TEXT, json=body, headers=key("ka")).status_code == 200
        streamed = http.post(TEXT, json={**body, "stream": True}, headers=key("ka"))
        assert streamed.text.endswith("[DONE]\n\n")
        refused = http.post(TEXT, json=body, headers=key("ka"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
        assert 0 < int(refused.headers["retry-after"]) <= 24 * 3600
        assert http.get("/v1/models", headers=key("ka")).status_code == 200
        other = http.post(TEXT, json=body, headers={"x-api-key": "ka"})
        assert other.json()["error"]["code"] == "insufficient_quota", "a key has one budget in both headers"
        for sender in ("kb", "kc"):
            assert http.post(TEXT, json=body, headers=key(sender)).status_code == 200
        body = {"input": [[5] * 7], "model": MODEL, "allow_token_ids": True}
        embedded = http.post("/v1/embeddings", json=body, headers=key("kb"))
        assert embedded.status_code == 200
        text = http.get("/metrics", headers=key("kd")).text
        counts = dict(re.findall(r'kukri_key_(\w+_tokens_total\{key="\w+"\}) (\S+)', text))
        assert counts['prompt_tokens_total{key="ann"}'] == "30.0"
        assert counts['generated_tokens_total{key="ann"}'] == "30.0"
        assert counts['prompt_tokens_total{key="bob"}'] == "17.0"
        assert counts['generated_tokens_total{key="ops"}'] == "0.0"
        assert "kukri_key_" not in http.get("/metrics", headers=key("kb")).text


def test_a_day_ends_at_midnight():
    """Catches tokens of yesterday that count today."""
    now_s = [86400.0 * 5 + 100]
    meter = Meter(lambda: now_s[0])
    meter.add(3, 4)
    assert (meter.n_today, meter.left_s) == (7, 86300)
    now_s[0] += meter.left_s
    assert (meter.n_today, meter.n_prompt, meter.n_generated) == (0, 3, 4)


@pytest.mark.parametrize(
    "line", ["k models=", "k daily-tokens=x", "k daily-tokens=-1", "k scope=root", "k priority=", "\u00e4"]
)
def test_a_wrong_line_of_the_keys_file_is_refused(line):
    """Catches an option of a key that is taken for a part of the key, or for no limit at all."""
    with pytest.raises(ConfigError, match="API key"):
        KeyRing([line])
    with pytest.raises(ConfigError, match="must appear once"):
        KeyRing(["a k", "b k"])


# --- pages of other sites

OTHER = "https://evil.example"
CROSS = [
    {"sec-fetch-site": "cross-site", "origin": OTHER},
    {"sec-fetch-site": "cross-site"},  # an image, a plain form: GETs have no origin
    {"sec-fetch-site": "same-site", "origin": "http://localhost:9999"},  # another port of this machine
    {"origin": OTHER},  # what a browser sends that says no more
    {"origin": "null"},  # a file, or a frame in a sandbox
]


@pytest.mark.parametrize("headers", CROSS, ids=str)
def test_pages_of_other_sites_are_refused(tiny, tmp_path, headers):
    """Catches a web page that uses, fills or stops a local server of its visitor, by any method."""
    form = {"files": {"file": ("a", b"x")}, "data": {"purpose": "batch"}}
    with serving(tiny, batch_dir=tmp_path) as served, served.http(headers=headers) as http:
        refused = [http.post(path, json=body) for path, body in ASK.items()]
        refused += [
            http.get(path) for path in ("/v1/models", "/props?model=x", "/slots", "/ui/model", "/metrics")
        ]
        refused += [
            http.post("/v1/files", **form),
            http.post("/v1/audio/transcriptions", **form),
            http.post("/v1/audio/translations", **form),
            http.delete("/v1/files/x"),
            http.post("/api/chat", json={}),
        ]
        assert {response.status_code for response in refused} == {403}
        assert all("--cors-origin" in response.text for response in refused)
        assert refused[0].json()["error"]["code"] == "origin_not_allowed"
        assert http.get("/").status_code == http.get("/health").status_code == 200  # links lead here
        assert list(tmp_path.glob("file-*")) == []


def test_own_pages_allowed_origins_and_programs_are_served(tiny):
    """Catches a guard that stops the chat page, an allowed origin, or a client that is no browser."""
    with serving(tiny, cors_origins=("https://app.example",)) as served, served.http() as http:
        host = served.url.partition("://")[2]
        for headers in (
            {},
            {"sec-fetch-site": "same-origin", "origin": served.url},
            {"sec-fetch-site": "none"},
            {"origin": served.url},
            {"origin": f"http://{host}".upper().replace("HTTP", "http")},
            {"sec-fetch-site": "same-origin", "origin": "https://behind.a.proxy"},
            {"sec-fetch-site": "cross-site", "origin": "https://app.example"},
            {"origin": "https://app.example"},
        ):
            assert http.post(CHAT, json=ASK[CHAT], headers=headers).status_code == 200, headers
        other = {"sec-fetch-site": "cross-site", "origin": "https://app.example.evil.example"}
        assert http.post(CHAT, json=ASK[CHAT], headers=other).status_code == 403
    with serving(tiny, cors_origins=("*",)) as served, served.http() as http:
        assert http.post(CHAT, json=ASK[CHAT], headers=CROSS[0]).status_code == 200


# --- rates and guesses


def test_networks_are_what_one_customer_has():
    """Catches 2^64 addresses of one customer that are as many clients."""
    assert network_of("2001:db8:1:2:3:4:5:6") == network_of("2001:db8:1:2::") == "2001:db8:1:2::/64"
    assert network_of("2001:db8:1:3::") != network_of("2001:db8:1:2::")
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") == "10.0.0.1"
    assert network_of("local") == "local"


def test_rates_are_of_keys_not_of_names(tiny):
    """Catches two keys of one name that share a rate."""
    with serving(tiny, api_keys=("ann a", "ann b"), rate_limit=1) as served, served.http() as http:
        statuses = [http.post(TEXT, json=ASK[TEXT], headers=key(one)).status_code for one in "aabb"]
        for one in "ab":  # in the other header
            statuses.append(http.post(TEXT, json=ASK[TEXT], headers={"x-api-key": one}).status_code)
    assert statuses == [200, 429, 200, 429, 429, 429]


def test_guesses_are_limited_and_lock_nobody_out():
    """Catches keys that can be guessed as fast as the server answers, and a guesser who locks others out."""
    wrong, here, digest = WrongKeys(per_minute=3), "10.0.0.1", b"right"
    assert wrong.wait_s(here, digest) == 0
    assert [wrong.wait_s(here, None) > 0 for _ in range(5)] == [False, False, False, True, True]
    assert wrong.wait_s(here, digest) == 0  # it was right before
    assert wrong.wait_s(here, b"guessed") > 0
    assert wrong.wait_s("10.0.0.2", b"guessed") == 0
    assert RateLimiter(60).wait_s("new") == 0


def test_a_server_limits_guesses(tiny):
    """Catches a limit that is never asked, and one that counts requests without a key."""
    with serving(tiny, api_keys=("right",)) as served, served.http() as http:
        statuses = [http.get("/v1/models").status_code for _ in range(80)]
        assert set(statuses) == {401}
        assert http.get("/v1/models", headers=key("right")).status_code == 200
        statuses = [http.get("/v1/models", headers=key(f"x{i}")).status_code for i in range(80)]
        assert statuses[:60] == [401] * 60
        assert 429 in statuses[60:]
        assert http.get("/v1/models", headers=key("right")).status_code == 200


# --- keys that change


@pytest.mark.full
@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no SIGHUP on this system")
def test_keys_are_read_again_on_sighup(tmp_path):
    """Catches a removed key that works until the restart, and a broken file that ends the server."""
    file, model = tmp_path / "keys", write_tiny(tmp_path / "tiny.gguf")
    file.write_text("ann one\n")
    command = [sys.executable, "-m", "kukri", "serve", str(model), "--port", "0", "--api-key-file", str(file)]
    with subprocess.Popen([*command, "--max-requests", "2"], stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            url = ""
            while not url:
                found = re.search(r"(http://\S+)/v1", line := server.stderr.readline())
                assert line, "it has ended"
                url = found[1] if found else ""

            def status(name: str) -> int:
                return httpx.get(f"{url}/v1/models", headers=key(name), timeout=30).status_code

            def wait_until(expected: tuple[int, int]) -> None:
                deadline_s = time.monotonic() + 20
                while (status("one"), status("two")) != expected:
                    assert time.monotonic() < deadline_s
                    time.sleep(0.05)

            wait_until((200, 401))
            file.write_text("bob two scope=manage\n")
            os.kill(server.pid, signal.SIGHUP)
            wait_until((401, 200))
            file.write_text("bob two scope=none\n")
            os.kill(server.pid, signal.SIGHUP)
            time.sleep(0.3)
            wait_until((401, 200))
        finally:
            server.terminate()
            server.wait(30)


def test_other_keys_keep_their_counts():
    """Catches a budget that begins again when the file is read."""
    ring = KeyRing(["ann one daily-tokens=5", "two"])
    ring.clients[0].meter.add(2, 2)
    ring.replace(["three", "ann one daily-tokens=9"])
    assert [client.meter.n_today for client in ring.clients] == [0, 4]
    with pytest.raises(ConfigError):
        ring.replace(["one scope=x"])
    assert len(ring.clients) == 2


def test_no_key_is_written_down(tiny, tmp_path: Path):
    """Catches a hash of a short key next to its files, which a backup lets others guess."""
    with (
        serving(tiny, batch_dir=tmp_path, api_keys=("short",)) as served,
        served.http(headers=key("short")) as http,
    ):
        form = {"files": {"file": ("a", b"{}")}, "data": {"purpose": "batch"}}
        assert http.post("/v1/files", **form).status_code == 200
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    for data in (b"short", sha256(b"short").digest()):
        assert data not in written
        assert data.hex().encode() not in written


# --- sockets and TLS


@pytest.mark.full
def test_a_unix_socket_serves(tmp_path):
    """Catches a server that needs a port, a socket that others may use, a file that is written over."""
    model, path = write_tiny(tmp_path / "tiny.gguf"), tmp_path / "server.sock"
    with bound_unix_socket(path):
        pass  # an earlier server left it
    command = [
        sys.executable,
        "-m",
        "kukri",
        "serve",
        str(model),
        "--unix-socket",
        str(path),
        "--max-requests",
        "2",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            while (line := server.stderr.readline()) and f"on the Unix socket {path}" not in line:
                pass
            with httpx.Client(
                transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost"
            ) as http:
                assert http.post(TEXT, json={"prompt": "Hi", "max_tokens": 1}, timeout=60).status_code == 200
            assert path.stat().st_mode & 0o777 == 0o600
            with pytest.raises(ConfigError, match="another server"):
                bound_unix_socket(path)
        finally:
            server.terminate()
            server.wait(30)
    with pytest.raises(ConfigError, match="cannot serve"):
        bound_unix_socket(model)


def test_https_serves(tiny, tmp_path):
    """Catches a certificate that is read and not used, and a stream that goes around its encryption."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate")
    certificate, private = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", private, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    trust = ssl.create_default_context(cafile=str(certificate))
    with serving(tiny, ssl_certfile=certificate, ssl_keyfile=private) as served:
        url = served.url.replace("http:", "https:")
        body = {**ASK[TEXT], "stream": True, "max_tokens": 5, "ignore_eos": True}
        with httpx.Client(base_url=url, verify=trust, timeout=60) as http:
            lines = http.post(TEXT, json=body).text.splitlines()
        assert lines[-2] == "data: [DONE]"
    options = ServeOptions(ssl_certfile=private)
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        server_settings(options, None)
