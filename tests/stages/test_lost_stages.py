"""Stages that lose one another, or never meet: none hangs, each says why, and serves the next engine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from kukri import LLM
from kukri.config import LayerConfig
from kukri.errors import StageError
from kukri.kernels.arrays import FloatArray
from kukri.opening.stage_model import read_stage_model
from kukri.stages import server as stage_process
from kukri.stages.connection import Connection, LostError
from kukri.stages.greeting import Door, connect, listen
from kukri.stages.messages import Kind, to_text
from kukri.stages.server import StageOptions, serve_stage
from tests.tiny_gguf import tiny_config, write_tiny

TOKEN = b"a token that only these tests know"
OPTIONS: dict[str, Any] = {"max_context": 256, "max_requests": 4, "n_threads": 1, "max_step_tokens": 48}


@pytest.fixture
def port() -> int:
    """The port of a stage on a thread of this process."""
    listener = listen("127.0.0.1", 0)
    threading.Thread(
        target=serve_stage, args=(listener, TOKEN, StageOptions(), read_stage_model), daemon=True
    ).start()
    return int(listener.getsockname()[1])


@contextmanager
def engine_at(port: int, timeout_s: float = 5.0) -> Iterator[Connection]:
    """An engine's connection to a stage, which has said who it is."""
    engine = connect("127.0.0.1", port, TOKEN, "engine", "the stage", timeout_s)
    try:
        engine.expect(Kind.FACTS)
        yield engine
    finally:
        engine.close()


def opening(**changes: Any) -> bytes:
    return to_text({"next": None, "has_previous": False, "options": {}, **changes})


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def test_a_stage_whose_neighbour_never_comes_serves_the_next_engine(port: int) -> None:
    """Catches a stage that waits for the one before, deaf to the engine, which has given up: forever."""
    for _ in range(2):
        with engine_at(port) as engine:
            engine.send(Kind.OPEN, opening(has_previous=True))
            with pytest.raises(StageError, match="serving another engine"), engine_at(port):
                pass  # the first is waited for


def test_a_stage_gives_its_neighbour_up(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an engine that is alive and never told that two stages do not meet."""
    monkeypatch.setattr(stage_process, "_NEIGHBOUR_S", 0.2)
    with engine_at(port) as engine:
        engine.send(Kind.OPEN, opening(has_previous=True))
        with pytest.raises(StageError, match="the previous stage has not connected within"):
            engine.receive()
    with engine_at(port):
        pass


def test_a_stage_says_that_it_cannot_reach_the_next(port: int) -> None:
    """Catches "the connection has ended" where the cause is a port that nobody listens on."""
    following = {"host": "127.0.0.1", "port": closed_port(), "token": None}
    with engine_at(port) as engine:
        engine.send(Kind.OPEN, opening(next=following))
        with pytest.raises(StageError, match=f"the next stage at .*:{following['port']} cannot be reached: "):
            engine.receive()
    with engine_at(port):
        pass


@pytest.mark.parametrize("error", [MemoryError("no room"), KeyError("layers"), OSError("disk")])
def test_no_error_of_one_engine_ends_a_stage(
    port: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a process that dies of an opening, and tells nobody what it died of."""

    def fail(*given: object) -> None:
        raise error

    for body in (b"{}", b"[]", b"\xff", opening(next={})):
        with engine_at(port) as engine:
            engine.send(Kind.OPEN, body)
            with pytest.raises(StageError, match=r"is incomplete|JSON|KeyError"):
                engine.receive()
    with monkeypatch.context() as patched, engine_at(port) as engine:
        patched.setattr(stage_process, "OpenStage", fail)
        engine.send(Kind.OPEN, opening())
        with pytest.raises(StageError, match=f"the stage: {type(error).__name__}: "):
            engine.receive()
    with engine_at(port):
        pass


def test_silent_peers_delay_no_engine(port: int) -> None:
    """Catches greetings one after another: a port scanner holds each of them for ten seconds."""
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        started_s = monotonic()
        stack.enter_context(engine_at(port))
        assert monotonic() - started_s < 3


def test_a_stage_that_serves_does_not_answer_others(port: int) -> None:
    """Catches "does it have the same token?" of a stage that has it and is busy."""
    with engine_at(port), pytest.raises(StageError, match="may be serving another engine"):
        connect("127.0.0.1", port, TOKEN, "engine", "the stage", 0.3)
    with pytest.raises(StageError, match="it hangs up: check that it has the same token"):
        connect("127.0.0.1", port, b"another token of some length", "engine", "the stage", 5.0)


def test_waiting_for_activations_ends_with_the_engine() -> None:
    """Catches a stage that waits for a step of the one before while the engine, its steps unread, is gone."""
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        connected: list[Connection] = []

        def call(role: Any) -> None:
            connected.append(connect("127.0.0.1", port, TOKEN, role, "it", 5.0))

        ends: list[Connection] = []
        door = Door(listener, TOKEN)
        for role in ("engine", "stage"):
            caller = threading.Thread(target=call, args=(role,))
            caller.start()
            ends.append(door.accept(role, f"the {role}", engine=ends[0] if ends else None))
            caller.join()
        before = ends[1]
        connected[0].send(Kind.OPEN, b"{}")  # that nobody reads: the end comes after it
        timer = threading.Timer(0.2, connected[0].close)
        timer.start()
        with pytest.raises(LostError, match="the engine is lost"):
            before.receive()
        timer.join()
        for connection in (*ends, connected[1]):
            connection.close()


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = replace(tiny_config(256), n_layers=4, layers=(LayerConfig(),) * 4)
    return write_tiny(tmp_path_factory.mktemp("stages") / "tiny.gguf", config, weight_type="Q8_0")


REQUEST: dict[str, Any] = {"max_tokens": 60, "temperature": 0.9, "seed": 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def expected(tiny_path: Path) -> str:
    with LLM(tiny_path, **OPTIONS) as llm:
        return llm.generate("tell me", **REQUEST).text


@pytest.mark.full
def test_any_of_three_stages_may_die(tiny_path: Path, expected: str) -> None:
    """Catches a loss between two stages before the engine's that leaves the other one waiting."""
    with LLM(tiny_path, stages=3, **OPTIONS) as llm:
        backend: Any = llm._backend
        for index in (0, 1):
            pids = backend.pipeline.source.pids
            stream = llm.stream("tell me", **REQUEST)
            texts = [next(stream).text for _ in range(5)]
            os.kill(pids[index], signal.SIGKILL)
            assert "".join([*texts, *(chunk.text for chunk in stream)]) == expected
            assert not set(pids) & set(backend.pipeline.source.pids)


@pytest.mark.full
def test_a_stage_elsewhere_comes_back(
    tiny_path: Path, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a stage that outlives its neighbour and takes no engine any more until somebody restarts it."""
    monkeypatch.setenv("KUKRI_STAGE_TOKEN", TOKEN.decode())
    processes = [_start(), _start()]
    try:
        addresses = [address for address, _ in processes]
        with LLM(tiny_path, stages=addresses, **OPTIONS) as llm:
            for index in (0, 1):
                stream = llm.stream("tell me", **REQUEST)
                texts = [next(stream).text for _ in range(5)]
                address, process = processes[index]
                process.kill()
                process.communicate()
                processes[index] = _start(address)
                assert "".join([*texts, *(chunk.text for chunk in stream)]) == expected
    finally:
        for _, process in processes:
            process.kill()
            process.communicate()


def _start(address: str = "127.0.0.1:0") -> tuple[str, subprocess.Popen[str]]:
    command = [sys.executable, "-m", "kukri", "stage", "--listen", address, "--threads", "1"]
    for _ in range(20):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None, "it is a pipe"
        if found := process.stdout.readline().strip():
            return found, process
        process.communicate()
        sleep(0.2)  # until the port is free again
    raise AssertionError("no stage has started")


def test_the_stage_that_failed_is_named(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches "stage 2: the previous stage is lost" where stage 1 had said that its memory is full."""
    listeners = [listen("127.0.0.1", 0) for _ in range(2)]
    for listener in listeners:
        threading.Thread(
            target=serve_stage, args=(listener, TOKEN, StageOptions(), read_stage_model), daemon=True
        ).start()
    monkeypatch.setenv("KUKRI_STAGE_TOKEN", TOKEN.decode())
    addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]

    def fail(stage: stage_process.OpenStage, step: memoryview, activations: FloatArray | None) -> FloatArray:
        if stage.is_first:
            raise MemoryError("no room for the step")
        return run(stage, step, activations)

    run = stage_process.OpenStage.run
    with LLM(tiny_path, stages=addresses, **OPTIONS) as llm:
        assert llm.generate("tell me", max_tokens=2, ignore_eos=True).text
        with monkeypatch.context() as patched:
            patched.setattr(stage_process.OpenStage, "run", fail)
            with pytest.raises(StageError, match="stage 1 of 3: MemoryError: no room for the step"):
                llm.generate("tell me", max_tokens=2)
        assert llm.generate("tell me", max_tokens=2, ignore_eos=True).text
