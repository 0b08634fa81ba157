"""How long a server keeps what requests leave: finished calls, idle connections, a process that hangs."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import time
import weakref
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from kukri import LLM, Grammar
from kukri.errors import CapacityError
from kukri.server.chat import grammar_check
from kukri.server.connection import protocol_with_timeout, uvicorn_options
from kukri.server.models.bridge import Bridge
from kukri.server.settings import ServerSettings
from tests.server.live_server import ASK, TEXT, serving
from tests.tiny_gguf import write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    with LLM(write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf"), max_requests=4) as llm:
        yield llm


@pytest.mark.full
def test_finished_calls_are_forgotten_before_their_deadline(tiny, monkeypatch):
    """Catches a deadline's timer that keeps each finished or abandoned call and its tokens in memory."""
    calls, n_calls = weakref.WeakSet(), []
    submit = Bridge.submit

    def watched(self, call, deadline_s):
        calls.add(call)
        n_calls.append(1)
        submit(self, call, deadline_s)

    monkeypatch.setattr(Bridge, "submit", watched)
    with serving(tiny, deadline_s=600.0) as served, served.http() as http:
        for more in ({}, {"stream": True}, {"n": 2}, {"max_tokens": 100}):
            assert http.post(TEXT, json={**ASK[TEXT], **more}).status_code == 200
        with http.stream("POST", TEXT, json={**ASK[TEXT], "max_tokens": 100, "stream": True}) as left:
            assert left.status_code == 200
        assert len(n_calls) == 5, "the premise"
        served.wait_until(lambda: gc.collect() >= 0 and not calls)


def test_a_deadline_still_ends_a_call(tiny):
    """Catches a timer that is cancelled too early."""
    with serving(tiny, deadline_s=1e-6) as served, served.http() as http:
        late = http.post(TEXT, json={**ASK[TEXT], "max_tokens": 100})
        assert (late.status_code, late.json()["error"]["code"]) == (503, "deadline_exceeded")


def test_an_idle_connection_stays_open_for_the_next_request(tiny):
    """Catches uvicorn's 5 s, after which a client's pool sends into a connection that is being closed."""
    assert uvicorn_options(ServerSettings())["timeout_keep_alive"] == 75
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with serving(tiny, idle_connection_s=1.0) as served:
        port = int(served.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            for _ in range(2):
                connection.sendall(request)
                assert connection.recv(4096).startswith(b"HTTP/1.1 200")
                time.sleep(0.5)
            idle_s = time.monotonic()
            assert connection.recv(4096) == b""
            assert time.monotonic() - idle_s < 5


@pytest.mark.full
def test_a_grammar_does_not_wait_for_ever(tiny, monkeypatch):
    """Catches a request that hangs with the process that checks its grammar, and a server that stays so; a
    process that starts only with the first grammar.
    """
    pytest.importorskip("llguidance")

    async def scenario() -> None:
        check = grammar_check.GrammarCheck(tiny.tokenizer)
        try:
            monkeypatch.setattr(grammar_check, "_SETTLE_S", 0.0)
            check.start_soon()
            await check._start
            assert check._process is not None
            await check.check(Grammar.regex("a+"))
            os.kill(check._process.pid, signal.SIGSTOP)
            monkeypatch.setattr(grammar_check, "_ANSWER_S", 0.5)
            with pytest.raises(CapacityError, match="too many grammars"):
                await check.check(Grammar.regex("b+"))
            monkeypatch.undo()
            await check.check(Grammar.regex("b+"))
        finally:
            await check.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_chunk_for_a_client_that_has_left_is_lost(loop):
    """Catches an answer that fails, with a traceback in the log, because its client left a moment ago."""
    new_loop = asyncio.new_event_loop if loop == "asyncio" else pytest.importorskip("uvloop").new_event_loop

    async def scenario() -> None:
        config = uvicorn.Config(lambda: None, http=protocol_with_timeout(5.0), log_config=None)
        config.load()
        state = ServerState()
        made: list[Any] = []

        def protocol() -> asyncio.Protocol:
            made.append(config.http_protocol_class(config=config, server_state=state, app_state={}))
            return made[-1]

        server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        while not made or made[0].transport is None:
            await asyncio.sleep(0.01)
        made[0].write_chunk(b"a")
        writer.transport.abort()
        while not made[0].transport.is_closing():
            await asyncio.sleep(0.01)
        made[0].write_chunk(b"b")
        server.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())
