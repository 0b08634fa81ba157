"""Requests that a server admits, refuses, and ends."""

from __future__ import annotations

import gzip
import json
import logging
import re
import socket
import threading
from contextlib import contextmanager
from hashlib import sha256
from urllib.parse import urljoin, urlsplit

import httpx
import pytest

from kukri import LLM
from kukri.errors import ConfigError
from kukri.server.keys import KeyRing
from kukri.server.logs import JsonFormatter, LoggedLines, TextFormatter
from kukri.server.rates import RateLimiter
from kukri.server.settings import ServerSettings
from tests.server.bodies import check_error, events
from tests.server.live_server import MODEL, serving

ASK = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 2, "temperature": 0}
LONG = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True}
POSTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
)
GETS = ("/v1/models", f"/v1/models/{MODEL}", "/metrics", "/openapi.json")


@pytest.fixture(scope="module")
def small(smollm2_path):
    """A model to serve with other settings, one server at a time."""
    with LLM(smollm2_path, max_context=1024, max_requests=2) as llm:
        yield llm


@contextmanager
def streaming(server, body, **options):
    """The lines of a stream, as they come."""
    with (
        server.http(**options) as http,
        http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response,
    ):
        assert response.status_code == 200, response.read()
        yield response.iter_lines()


def ask_once(url):
    assert httpx.post(f"{url}/v1/completions", json=ASK, timeout=60).status_code == 200


# --- keys


@pytest.mark.representative(2)
def test_every_route_but_health_needs_a_key(small):
    """Catches a route that was added below the guard, and metrics that tell strangers about the traffic."""
    with serving(small, api_keys=("right", "other")) as server, server.http() as http:
        assert http.get("/health").status_code == http.get("/ready").status_code == 200
        for header in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "right"},
            {"authorization": "Basic right"},
        ):
            for path in GETS:
                check_error(http.get(path, headers=header), 401)
            for path in POSTS:
                response = http.post(path, json=ASK, headers=header)
                check_error(response, 401)
                assert response.headers["www-authenticate"] == "Bearer"
        for key in ("right", "other"):
            allowed = {"authorization": f"Bearer {key}"}
            assert http.post("/v1/completions", json=ASK, headers=allowed).status_code == 200
            assert all(http.get(path, headers=allowed).status_code == 200 for path in GETS)


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer ", "Bearer rightx", "Bearer righ", "Bearer \udcff", "bearer"]
)
def test_wrong_keys_are_wrong(given):
    """Catches an empty key that passes, and a header that cannot be compared."""
    assert KeyRing(["right"]).find(given) is None


def test_the_right_key_is_found():
    """Catches keys that are compared with the wrong one."""
    ring = KeyRing(["a", "b"])
    assert [ring.find("Bearer a"), ring.find("bearer b")] == ring.clients
    assert (
        ring.find("Basic xyz", "b") == ring.find("Bearer x", "b") == ring.find(None, " b") == ring.clients[1]
    )


@pytest.mark.parametrize("keys", [("a b priority=x",), ("k priority=",), ("k priority=1.5",)])
def test_a_priority_that_is_no_number_is_refused(keys):
    """Catches a bound that is taken for a part of the key and never holds."""
    with pytest.raises(ConfigError, match="priority=5"):
        ServerSettings(api_keys=keys)


@pytest.mark.full
def test_keys_share_no_prefixes_unless_told(small):
    """Catches a client that asks for a prompt and sees by cached_tokens that another had it before."""
    prompt = (
        "Once upon a time there was a secret that nobody but one client of this server should know of. " * 3
    )

    def cached(http, key):
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
        answer = http.post("/v1/completions", json=body, headers={"x-api-key": key}).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    for shares, seen in ((False, [False, False, True, True]), (True, [False, True, True, True])):
        with serving(small, api_keys=("one", "two"), shares_prefixes=shares) as server, server.http() as http:
            assert [cached(http, key) for key in ("one", "two", "one", "two")] == seen
        small.engine.pool.forget()


def test_a_key_has_a_bound_on_its_priority(small):
    """Catches a client that goes before all others because it says so."""
    with serving(small, api_keys=("slow one priority=5", "two")) as server, server.http() as http:
        for path, body in (
            ("/v1/completions", ASK),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
        ):

            def status(key, path=path, body=body, **more):
                return http.post(path, json=body | more, headers={"x-api-key": key}).status_code

            assert [status("one"), status("one", priority=5), status("one", priority=7)] == [200] * 3
            assert [status("one", priority=4), status("one", priority=-1)] == [400] * 2
            assert status("two", priority=-1) == 200
    assert KeyRing(["a k priority=5"]).clients[0].priority(None) == 5


# --- limits


def test_a_large_body_is_refused(small):
    """Catches a limit that a body without a length gets around, and one that reads it all first."""
    with serving(small, max_body_bytes=2000) as server, server.http() as http:
        body = json.dumps(ASK | {"prompt": "x" * 3000}).encode()
        assert "2000" in check_error(http.post("/v1/completions", content=body), 413)

        def chunks():
            for start in range(0, len(body), 100):
                yield body[start : start + 100]

        headers = {"content-type": "application/json"}
        check_error(http.post("/v1/completions", content=chunks(), headers=headers), 413)
        assert http.post("/v1/completions", json=ASK).status_code == 200


def test_a_slow_body_is_refused(small):
    """Catches a client that holds a connection open by sending nothing."""
    with serving(small, read_s=0.3) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n")
            slow.sendall(b"content-type: application/json\r\n\r\n{")
            assert b" 408 " in slow.recv(1000).split(b"\r\n")[0]


def test_a_rate_is_kept_for_each_key(small):
    """Catches a limit shared by all keys, one that never lets go, a 429 that does not say when, and GETs
    without a limit."""
    with serving(small, api_keys=("a", "b"), rate_limit=2) as server, server.http() as http:

        def ask(key):
            return http.post("/v1/completions", json=ASK, headers={"authorization": f"Bearer {key}"})

        assert [ask("a").status_code, ask("a").status_code] == [200, 200]
        refused = ask("a")
        check_error(refused, 429)
        assert 1 <= int(refused.headers["retry-after"]) <= 31
        assert ask("b").status_code == 200
        looks = [http.get("/v1/models", headers={"authorization": "Bearer a"}) for _ in range(21)]
        assert [look.status_code for look in looks] == [200] * 20 + [429]
        check_error(looks[-1], 429)
        assert http.get("/health").status_code == 200


def test_a_rate_comes_back_with_time():
    """Catches buckets that overflow, or fill too slowly."""
    rates = RateLimiter(60)
    assert [rates.take("a", 0.0) for _ in range(60)] == [0.0] * 60
    assert rates.take("a", 0.0) == pytest.approx(1.0)
    assert rates.take("a", 0.5) == pytest.approx(0.5)
    assert rates.take("a", 1.01) == 0.0
    assert [rates.take("a", 1e6) for _ in range(60)] == [0.0] * 60
    assert rates.take("a", 1e6) > 0
    for i in range(20_000):
        rates.take(str(i), 0.0)
    assert len(rates._buckets) <= 10_000


def test_a_full_queue_says_when_to_come_back(small):
    """Catches a queue without an end, and places in it that are not given back."""
    with serving(small, max_waiting=2) as server:
        with streaming(server, LONG) as one, streaming(server, LONG) as two:
            next(one), next(two)  # both run: all places of the batch are taken
            with server.http() as http:
                waiting = [threading.Thread(target=ask_once, args=[server.url]) for _ in range(2)]
                for thread in waiting:
                    thread.start()
                server.wait_until(lambda: server.served.bridge.loop.status().n_waiting == 2)
                refused = http.post("/v1/completions", json=ASK)
                check_error(refused, 503)
                assert int(refused.headers["retry-after"]) >= 1
                one.close(), two.close()
        for thread in waiting:
            thread.join(20)
        with server.http() as http:
            assert http.post("/v1/completions", json=ASK).status_code == 200


def test_more_answers_than_the_queue_holds_are_a_mistake(served):
    """Catches a request that is told to try again forever."""
    with served.http() as http:
        message = check_error(http.post("/v1/completions", json=ASK | {"prompt": ["a"] * 65}), 400, "prompt")
    assert "65" in message
    assert "64" in message


@pytest.mark.full
def test_a_deadline_ends_an_answer(small):
    """Catches an answer that continues forever, or ends without a word."""
    with serving(small, deadline_s=1.5) as server, server.http() as http:
        check_error(http.post("/v1/completions", json=LONG), 503)
        *chunks, last = events(http.post("/v1/completions", json=LONG | {"stream": True}))
        assert chunks
        assert "1.5" in last["error"]["message"]
        server.wait_until(lambda: server.pages_used() == 0)
        assert http.post("/v1/completions", json=ASK).status_code == 200


def test_a_silent_stream_is_kept_alive(small):
    """Catches proxies that cut a stream while its request waits, and silence about how far its prompt is."""
    with (
        serving(small, keep_alive_s=0.1) as server,
        streaming(server, LONG) as one,
        streaming(server, LONG) as two,
    ):
        next(one), next(two)
        with streaming(server, ASK) as waiting:
            assert re.fullmatch(r": prompt: 0 of \d+ tokens", next(waiting))
            assert next(waiting) == ": keep-alive"


# --- those who leave


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(served, stream):
    """Catches requests that are computed for nobody."""
    before, status = served.pages_used(), served.served.bridge.loop.status
    n_generated = status().n_generated
    with served.http() as http:
        if stream:
            with http.stream("POST", "/v1/completions", json=LONG | {"stream": True, "n": 2}) as response:
                lines = response.iter_lines()  # kept: httpx hangs up where it is collected
                next(lines)
                assert served.pages_used() > before
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/completions", json=LONG, timeout=0.3)
    served.wait_until(lambda: served.pages_used() == before)
    assert status().n_running == 0
    assert status().n_generated - n_generated < LONG["max_tokens"]


def test_a_client_that_leaves_before_its_body_has_come_is_no_failure(served, caplog):
    """Catches a traceback in the log, and a 500 in the metrics, for each connection that breaks."""
    caplog.set_level(logging.INFO, "kukri.server")
    host, port = served.url.removeprefix("http://").split(":")
    paths = "/v1/chat/completions", "/v1/completions"
    for path in paths:
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((host, int(port)), timeout=20) as leaving:
            leaving.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
        served.wait_until(lambda path=path: any(getattr(r, "path", "") == path for r in caplog.records))
    ended = [r for r in caplog.records if r.message == "request"]
    assert [r.status for r in ended if r.path in paths] == [0, 0]
    assert not [r for r in caplog.records if r.levelno > logging.INFO]


@pytest.mark.full
def test_a_client_that_leaves_the_queue_is_forgotten(small):
    """Catches requests of the queue that outlive their clients."""
    with serving(small) as server, streaming(server, LONG) as one, streaming(server, LONG) as two:
        next(one), next(two)
        with server.http() as http, pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=ASK, timeout=0.2)
        status = server.served.bridge.loop.status
        server.wait_until(lambda: status().n_waiting == 0)
        assert status().n_running == 2, "those whom it waited for are not done"


# --- ids, logs, origins


def test_request_ids_go_in_and_out(served, caplog):
    """Catches answers that cannot be found in the log, and ids that write lines of their own into it."""
    caplog.set_level(logging.INFO, "kukri.server")
    with served.http() as http:
        response = http.post("/v1/completions", json=ASK, headers={"x-request-id": "mine-1"})
        assert response.headers["x-request-id"] == "mine-1"
        assert http.get("/nowhere").headers["x-request-id"].startswith("req_")
        assert (
            http.get("/health", headers={"x-request-id": "a b\t{}"})
            .headers["x-request-id"]
            .startswith("req_")
        )
    record = next(r for r in caplog.records if getattr(r, "request_id", "") == "mine-1")
    entry = json.loads(JsonFormatter().format(record))
    assert entry["path"] == "/v1/completions"
    assert entry["status"] == 200
    assert entry["n_generated"] == 2
    assert entry["duration_s"] >= entry["first_token_s"] > 0
    assert 'request_id="mine-1"' in TextFormatter().format(record)
    record.msg, record.path = "two\nlines\x1b[31m", "/\r\n\x1b"
    assert re.fullmatch(r"[ -~]+", TextFormatter().format(record))


def test_the_log_names_keys_and_leaves_polls_and_files_out(small, caplog):
    """Catches keys that are numbers, a log full of probes and scripts, and events that are missing."""
    caplog.set_level(logging.INFO, "kukri.server")
    keys = ("alice one", "two")
    with serving(small, api_keys=keys) as server, server.http() as http:
        for key in ("one", "two"):
            assert http.get("/v1/models", headers={"x-api-key": key}).status_code == 200
        for path in ("/ui/static/page.css", "/ready", "/health"):
            http.get(path)
        server.served.bridge.drain(60)
        server.wait_until(lambda: "draining" in caplog.messages)
    requests = [r for r in caplog.records if r.message == "request"]
    assert [r.path for r in requests] == ["/v1/models"] * 2
    assert [r.client for r in requests] == ["key alice", f"key {sha256(b'two').hexdigest()[:8]}"]
    assert [m for m in caplog.messages if m != "request"] == ["started", "draining", "stopped"]
    line = TextFormatter().format(requests[0])
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ info request ", line)


def test_lines_of_stderr_become_events(caplog):
    """Catches a line that is no JSON among those that a program reads, and a warning that is not one."""
    caplog.set_level(logging.INFO, "kukri.server")
    stream = LoggedLines()
    for piece in ("kukri: compil", "ing kernels\nwarning: every", "body may ask\n\n", "error: no room\nrest"):
        stream.write(piece)
    assert [(r.levelname, r.message) for r in caplog.records] == [
        ("INFO", "kukri: compiling kernels"), ("WARNING", "everybody may ask"), ("ERROR", "no room"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("trusted", "forwarded", "client"),
    [
        ((), "1.2.3.4", "127.0.0.1"),
        (("127.0.0.0/8",), "1.2.3.4", "1.2.3.4"),
        (("127.0.0.1", "10.0.0.0/8"), "6.6.6.6, 1.2.3.4, 10.0.0.9", "1.2.3.4"),
        (("127.0.0.1",), "1.2.3.4, 10.0.0.9", "10.0.0.9"),
        (("127.0.0.1",), "::1", "::1"),
        (("127.0.0.1",), "", "127.0.0.1"),
        (("127.0.0.1",), "not an address", "127.0.0.1"),
        (("192.0.2.1",), "1.2.3.4", "127.0.0.1"),
    ],
)
def test_forwarded_addresses_are_believed_of_trusted_proxies(small, caplog, trusted, forwarded, client):
    """Catches a client that chooses its own address, and a proxy that stands for all of them."""
    caplog.set_level(logging.INFO, "kukri.server")
    with serving(small, trusted_proxies=trusted) as server, server.http() as http:
        http.get("/v1/models", headers={"x-forwarded-for": forwarded})
    (record,) = [r for r in caplog.records if r.message == "request"]
    assert record.client == client


def test_only_listed_origins_may_ask(small):
    """Catches pages of strangers that use the server through a visitor's browser."""
    with (
        serving(small, api_keys=("k",), cors_origins=("https://good.example",)) as server,
        server.http() as http,
    ):
        ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        good = http.options("/v1/completions", headers=ask | {"origin": "https://good.example"})
        assert good.headers["access-control-allow-origin"] == "https://good.example"
        bad = http.options("/v1/completions", headers=ask | {"origin": "https://bad.example"})
        assert "access-control-allow-origin" not in bad.headers
        refused = http.post("/v1/completions", json=ASK, headers={"origin": "https://good.example"})
        check_error(refused, 401)
        assert refused.headers["access-control-allow-origin"] == "https://good.example"


def test_a_body_that_is_packed_is_refused_for_that(small):
    """Catches "the body is not JSON" for a client that compresses its requests."""
    body = json.dumps({"prompt": "Hi", "max_tokens": 1}).encode()
    path = "/v1/completions"
    with serving(small) as server, server.http() as http:
        headers = {"content-type": "application/json"}
        packed = http.post(path, content=gzip.compress(body), headers={**headers, "content-encoding": "gzip"})
        assert packed.headers["accept-encoding"] == "identity"
        assert check_error(packed, 415) == "content-encoding 'gzip' is not supported: send the body as it is"
        plain = http.post(path, content=body, headers={**headers, "content-encoding": "identity"})
        assert plain.status_code == 200


def test_a_page_of_the_internet_may_ask_a_private_address(small):
    """Catches a browser that lets no page call this machine, though the server allows its origin."""
    asked = {
        "origin": "https://good.example",
        "access-control-request-method": "POST",
        "access-control-request-private-network": "true",
    }
    with serving(small, cors_origins=("https://good.example",)) as server, server.http() as http:
        allowed = http.options("/v1/completions", headers=asked)
        assert (allowed.status_code, allowed.headers["access-control-allow-private-network"]) == (200, "true")
        other = http.options("/v1/completions", headers={**asked, "origin": "https://bad.example"})
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers


def test_a_preflight_needs_no_key(small):
    """Catches a browser's preflight, which carries no key, that is refused for it; and headers of clients."""
    ask = {
        "origin": "https://good.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-stainless-lang",
    }
    with serving(small, api_keys=("k",)) as server, server.http() as http:
        refused = http.options("/v1/completions", headers=ask)
        assert refused.status_code == 405
        assert "access-control-allow-origin" not in refused.headers
    with (
        serving(small, api_keys=("k",), cors_origins=("https://good.example",)) as server,
        server.http() as http,
    ):
        allowed = http.options("/v1/completions", headers=ask)
        assert allowed.status_code == 200
        assert "x-stainless-lang" in allowed.headers["access-control-allow-headers"]


def test_any_model_may_be_named_if_the_server_says_so(small):
    """Catches a name that is refused though every one is served, and an answer under a stranger's name."""
    with serving(small, any_model=True) as server, server.http() as http:
        answer = http.post("/v1/completions", json=ASK | {"model": "gpt-9"})
        assert answer.json()["model"] == MODEL


def test_metrics_count_what_happened(small):
    """Catches histograms that nobody feeds, and pages or tokens that are not counted."""
    with serving(small) as server, server.http() as http:
        assert (
            http.post("/v1/completions", json=ASK | {"max_tokens": 5, "ignore_eos": True}).status_code == 200
        )
        with streaming(server, LONG) as lines:
            next(lines)
        http.get(f"/no/such/path/{'x' * 50}")
        server.wait_until(lambda: server.pages_used() == 0)
        lines = http.get("/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    label = f'{{model="{MODEL}"}}'
    assert float(values[f"kukri_time_to_first_token_seconds_count{label}"]) == 2
    assert float(values[f"kukri_inter_token_seconds_count{label}"]) >= 4
    assert float(values[f"kukri_end_to_end_seconds_count{label}"]) == 2
    assert float(values[f"kukri_queue_seconds_count{label}"]) == 2
    assert float(values[f'kukri_requests_total{{model="{MODEL}",reason="length"}}']) == 1
    assert float(values[f'kukri_requests_total{{model="{MODEL}",reason="abort"}}']) == 1
    assert float(values[f"kukri_generated_tokens_total{label}"]) >= 6
    assert float(values[f"kukri_kv_pages{label}"]) == 128
    assert float(values[f"kukri_kv_pages_held{label}"]) == 0
    assert float(values['kukri_http_responses_total{path="other",status="404"}']) == 1


def test_settings_that_make_no_sense_are_refused():
    """Catches a server that starts and then refuses everything."""
    for wrong in (
        {"model_names": ("",)},
        {"model_names": ("a",), "max_waiting": 0},
        {"model_names": ("a",), "deadline_s": 0},
        {"model_names": ("a",), "api_keys": ("bad\nkey",)},
        {"model_names": ("a",), "trusted_proxies": ("proxy.local",)},
    ):
        with pytest.raises(ConfigError):
            ServerSettings(**wrong)
    assert "secret" not in repr(ServerSettings(("a",), api_keys=("secret",)))


# --- a prefix


@pytest.mark.full
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "cut off"])
def test_a_proxy_may_serve_it_under_a_prefix(small, keeps):
    """Catches links of the page and URLs of the document that lead out of the prefix, a key that is not asked
    for there, errors in another API's form, and a proxy that cuts the prefix off, or one that does not."""
    with serving(small, root_path="/ai/kukri", api_keys=("k",)) as server, server.http() as http:

        def via_proxy(method, path, **given):
            assert path.startswith("/ai/kukri/"), f"{path} leads out of the prefix"
            return http.request(method, path if keeps else path.removeprefix("/ai/kukri"), **given)

        page = via_proxy("GET", "/ai/kukri/")
        links = re.findall(r'(?:href|src|hx-get|hx-post)="([^"#][^"]*)"', page.text)
        assert len(links) > 6
        key = {"authorization": "Bearer k"}
        for link in links:
            path = urljoin("/ai/kukri/", link)
            found = via_proxy("GET", path, headers=key)
            assert found.status_code == 200 or (link, found.status_code) == ("ui/answers", 405)
        check_error(via_proxy("POST", "/ai/kukri/v1/completions", json=ASK), 401)
        assert via_proxy("POST", "/ai/kukri/v1/completions", json=ASK, headers=key).status_code == 200
        document = via_proxy("GET", "/ai/kukri/openapi.json", headers=key).json()
        assert document["servers"] == [{"url": "/ai/kukri"}]
        slash = via_proxy("POST", "/ai/kukri/v1/completions/", json=ASK, headers=key)
        assert urlsplit(slash.headers["location"]).path == "/ai/kukri/v1/completions"
        assert via_proxy("POST", "/ai/kukri/v1/messages", json={}).json()["type"] == "error"
        assert isinstance(via_proxy("POST", "/ai/kukri/api/chat", json={}).json()["error"], str)
        lost = via_proxy("POST", "/ai/kukri/activations", json={}, headers=key).json()["error"]["message"]
        assert lost == "POST /activations was not found; it is at /v1/activations"


@pytest.mark.parametrize("path", ["kukri", "/a//b", "/v1", "/api/x", "/a?b", "//a"])
def test_a_prefix_that_cannot_be_one_is_refused(path):
    """Catches a prefix under which nothing, or something else, is found."""
    with pytest.raises(ConfigError, match="'root_path' must be"):
        ServerSettings(root_path=path)
