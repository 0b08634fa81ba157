"""Requests made to keep the server busy: each is answered or closed soon, and streams continue."""

from __future__ import annotations

import json
import os
import signal
import socket
import string
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from kukri import LLM
from kukri.server.chat.grammar_worker import BUDGET_S, MAX_AT_ONCE
from kukri.terminal.serve import host_names
from tests.server.bodies import check_error, events
from tests.server.live_server import MODEL, serving
from tests.stopwatch import waited_less

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "Hi"}]
BOMBS = {
    "patterns": {"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in string.ascii_lowercase[:20]]},
    "multiple_of": {"type": "integer", "multipleOf": 9999991},
    "multiples_of": {"allOf": [{"type": "integer", "multipleOf": p} for p in (9973, 9967, 9949, 9941)]},
    "properties": {
        "type": "object",
        "properties": {f"property_{i}": {"type": "integer"} for i in range(4200)},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def small(smollm2_path):
    with LLM(smollm2_path, max_context=1024, max_requests=8) as llm:
        yield llm


@contextmanager
def running_streams(server, n: int):
    """Streams that continue meanwhile; the times of their chunks."""
    times: list[list[float]] = [[] for _ in range(n)]
    stop = threading.Event()

    def read(own: list[float]) -> None:
        body = {"model": MODEL, "prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with server.http() as http, http.stream("POST", TEXT, json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    own.append(time.perf_counter())
                if stop.is_set():
                    return

    threads = [threading.Thread(target=read, args=[own]) for own in times]
    for thread in threads:
        thread.start()
    try:
        server.wait_until(lambda: all(times))
        yield times
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)


@pytest.mark.full
def test_bombs_of_schemas_are_refused_while_streams_continue(small):
    """Catches a schema that is compiled for a minute, and one that stands in the way of all others."""
    with serving(small) as server, server.http() as http:

        def ask(schema: Any) -> httpx.Response:
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            body = {"model": MODEL, "messages": QUESTION, "max_tokens": 20, "response_format": form}
            return http.post(CHAT, json=body)

        assert ask({"enum": ["first"]}).status_code == 200  # the process that compiles is there
        with running_streams(server, 2) as times:
            for schema in BOMBS.values():
                n_before = [len(own) for own in times]
                started = time.perf_counter()
                message = check_error(ask(schema), 400, "response_format")
                seconds = time.perf_counter() - started
                assert "to compile" in message
                assert waited_less(seconds - BUDGET_S, 1.5), "the limit, and what a machine adds"
                assert all(len(own) > n for own, n in zip(times, n_before, strict=True))
                answer = ask({"enum": ["one", "two"]})
                assert json.loads(answer.json()["choices"][0]["message"]["content"]) in ("one", "two")


@pytest.mark.full
def test_a_known_grammar_is_not_compiled_again(small):
    """Catches a process that every request has to wait for."""
    with serving(small) as server, server.http() as http:
        body = {"model": MODEL, "prompt": "A", "max_tokens": 2, "structured_outputs": {"regex": "[a-z]+"}}
        assert http.post(TEXT, json=body).status_code == 200
        os.kill(server.served.grammars._process.pid, signal.SIGKILL)
        assert http.post(TEXT, json=body).status_code == 200
        server.wait_until(lambda: server.served.grammars._process is None)
        body["structured_outputs"] = {"regex": "[a-z]{2,}"}
        assert http.post(TEXT, json=body).status_code == 200, "in a new one"


@pytest.mark.representative(3)
def test_bombs_at_once_are_all_answered_in_time(small):
    """Catches bombs that wait for each other, and a grammar that waits for all of them."""
    with serving(small) as server, server.http() as http:

        def ask(schema: Any) -> tuple[int, float]:
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            body = {"model": MODEL, "messages": QUESTION, "max_tokens": 20, "response_format": form}
            started = time.perf_counter()
            return http.post(CHAT, json=body).status_code, time.perf_counter() - started

        assert ask({"enum": ["first"]})[0] == 200  # the process that compiles is there
        (bomb, *_) = BOMBS.values()
        with ThreadPoolExecutor(2 * MAX_AT_ONCE) as pool:
            asked = [pool.submit(ask, {**bomb, "title": str(i)}) for i in range(10)]
            same = [pool.submit(ask, {**bomb, "title": "same"}) for _ in range(MAX_AT_ONCE)]
            good = pool.submit(ask, {"enum": ["one", "two"]})
        outcomes = [one.result() for one in (*asked, *same)]
        assert {status for status, _ in outcomes} <= {400, 503}, "503: too little processor time to tell"
        assert waited_less(max(seconds for _, seconds in outcomes) - BUDGET_S, 2.5), "and what a machine adds"
        assert good.result()[0] == 200


@pytest.mark.full
def test_a_cancelled_check_leaves_the_others_alone(small):
    """Catches a client that goes away with the process that others wait for."""
    with serving(small) as server, server.http() as http:
        (bomb, *_) = BOMBS.values()
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": bomb}}
        body = {"model": MODEL, "messages": QUESTION, "max_tokens": 20, "response_format": form}
        with pytest.raises(httpx.ReadTimeout):
            http.post(CHAT, json=body, timeout=0.1)
        body["response_format"]["json_schema"]["schema"] = {"enum": ["one", "two"]}
        assert http.post(CHAT, json=body).status_code == 200


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_prompt_far_too_long_is_refused_before_it_is_encoded(small, path):
    """Catches a MiB that is encoded to the end to say that it is too long."""
    text = "1" * (1 << 20)
    more = {"prompt": text} if path == TEXT else {"messages": [{"role": "user", "content": text}]}
    with serving(small) as server, server.http() as http:
        response = http.post(path, json={"model": MODEL, "max_tokens": 1} | more)
    message = check_error(response, 400, "prompt" if path == TEXT else "messages")
    assert response.json()["error"]["code"] == "context_length_exceeded"
    n_tokens = int(message.split("at least ")[1].split()[0])
    assert 1024 < n_tokens < 100_000, "the first slice alone was encoded"


@pytest.mark.full
def test_encoding_lets_other_threads_run(small):
    """Catches a long text that stops every stream while it is encoded."""
    gaps, done = [], threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    started = time.perf_counter()
    small.tokenizer.encode("1" * (1 << 19))
    seconds = time.perf_counter() - started
    done.set()
    thread.join()
    assert max(gaps) < seconds / 2


@pytest.mark.full
def test_headers_that_dribble_are_cut_off(small):
    """Catches connections that are held open by a byte now and then, before a request or after one."""
    with serving(small, headers_s=0.5) as server:
        host, port = server.url.removeprefix("http://").split(":")
        many = [socket.create_connection((host, int(port)), timeout=20) for _ in range(200)]
        whole = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
        many[0].sendall(whole)
        assert b"200" in many[0].recv(1000)
        for connection in many:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-a: ")
        left, deadline = set(many), time.monotonic() + 15
        while left and time.monotonic() < deadline:
            for connection in list(left):
                try:
                    connection.sendall(b"a")
                    connection.setblocking(False)
                    if connection.recv(1000) == b"":
                        left.discard(connection)
                except BlockingIOError:
                    pass
                except OSError:
                    left.discard(connection)
                finally:
                    connection.setblocking(True)
            time.sleep(0.05)
        for connection in many:
            connection.close()
        assert not left
        with server.http() as http:
            slow = {"model": MODEL, "prompt": "Once", "max_tokens": 150, "ignore_eos": True}
            assert http.post(TEXT, json=slow).json()["usage"]["completion_tokens"] == 150


def test_a_strange_host_is_refused(small):
    """Catches a page of a stranger whose name was made to lead to this machine."""
    names = host_names("127.0.0.1", ["Box.local"])
    with serving(small, allowed_hosts=names) as server, server.http() as http:
        port = server.url.rpartition(":")[2]
        good = ("127.0.0.1", f"127.0.0.1:{port}", "localhost", "LOCALHOST:1", f"[::1]:{port}", "box.local:80")
        for host in good:
            assert http.get("/v1/models", headers={"host": host}).status_code == 200, host
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", ""):
            check_error(http.get("/v1/models", headers={"host": host}), 403)
            assert http.get("/health", headers={"host": host}).status_code == 403
    assert host_names("0.0.0.0", []) == ()
    assert "0.0.0.0" in host_names("0.0.0.0", ["a"])


def test_an_expired_drain_ends_streams_with_an_error(small):
    """Catches streams that are cut off without a word."""
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with serving(small) as server, server.http() as http:
        with http.stream("POST", TEXT, json=body) as response:
            server.wait_until(lambda: server.served.bridge.loop.status().n_running == 1)
            server.served.bridge.drain(0.3)
            *chunks, last = events(response)
        assert chunks
        assert "shutting down" in last["error"]["message"]
        check_error(http.post(TEXT, json=body), 503)
