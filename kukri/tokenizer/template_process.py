"""Renders a chat template in a process of its own, which the system stops when it takes too much.

A template comes with a downloaded model and is not trusted. Within a process nothing can stop one sort, one
comparison or one replacement that takes minutes or gigabytes; the system's limits on a process can.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kukri.host.waiting import read_pipe

_WORKER = Path(__file__).with_name("sandbox.py")
_MAX_WAIT_S = 20.0  # for an answer, however busy the machine is; the worker's own limit is of processor time


class TemplateFailure(Exception):
    """A template gave no text. `kind`: one of the worker's (`kukri.tokenizer.sandbox`), or stopped."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class TemplateProcess:
    """A template's process: started at the first use, again after it was stopped or this one was forked.

    Methods may be called from several threads, and take turns.
    """

    def __init__(self, source: str) -> None:
        self._source, self._lock = source, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # process id of the starting process

    def render(self, variables: Mapping[str, Any]) -> str:
        """The template's text. Raises TemplateFailure, and TypeError for variables that JSON cannot hold."""
        request = json.dumps(variables, default=_plain).encode()
        with self._lock:
            process = self._running()
            try:
                _send(process, request)
                answer = _receive(process)
            except OSError:
                answer = b""
            if not answer:
                process.kill()
                process.wait()
                self._process = None
        if not answer:
            raise TemplateFailure("stopped", "it took more time or memory than a template may")
        kind, text = answer[:1].decode(), answer[1:].decode("utf-8", "surrogatepass")
        if kind != "T":
            raise TemplateFailure(kind, text)
        return text

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid():
            self._process, self._owner = _take_process(), os.getpid()
            weakref.finalize(self, _stop, self._process, self._owner)
            _send(self._process, self._source.encode("utf-8", "surrogatepass"))
        return self._process


def start_early() -> None:
    """Starts the process of the first template now: its 80 ms pass while a model loads.

    For programs that will render one. It ends with the program if none is.
    """
    _waiting.append((os.getpid(), _start()))


_waiting: list[tuple[int, subprocess.Popen[bytes]]] = []  # with the process that started each


def _take_process() -> subprocess.Popen[bytes]:
    while _waiting:
        owner, process = _waiting.pop()
        if owner == os.getpid():
            return process
    return _start()


def _start() -> subprocess.Popen[bytes]:
    # a session of its own: Ctrl-C at a terminal is not for it
    return subprocess.Popen(
        [sys.executable, "-P", str(_WORKER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
    )


def _plain(value: Any) -> Any:
    """A mapping that is not a dict, as one."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a chat template takes JSON, not {type(value).__name__}")


def _stop(process: subprocess.Popen[bytes], owner: int) -> None:
    if owner == os.getpid():
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _send(process: subprocess.Popen[bytes], data: bytes) -> None:
    """Raises OSError if the process has ended."""
    assert process.stdin is not None
    view = memoryview(len(data).to_bytes(8, "little") + data)
    while view:
        view = view[process.stdin.write(view) :]


def _receive(process: subprocess.Popen[bytes]) -> bytes:
    """One answer; empty if the process ended without, or says nothing for too long."""
    assert process.stdout is not None
    received, wanted, deadline = bytearray(), 8, time.monotonic() + _MAX_WAIT_S
    while len(received) < wanted:
        part = read_pipe(process.stdout.fileno(), 1 << 20, max(0.0, deadline - time.monotonic()))
        if not part:
            return b""
        received += part
        if len(received) >= 8:
            wanted = 8 + int.from_bytes(received[:8], "little")
    return bytes(received[8:])
