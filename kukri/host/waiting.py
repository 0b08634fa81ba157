"""Waiting for sockets and pipes: by poll(), and on Windows by select(), which takes sockets alone."""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Sequence
from math import inf
from threading import Thread
from time import monotonic

_STEP_S = 0.1  # without poll(): how often it is looked whether a socket has hung up
_PIECE = 1 << 16  # bytes that are sent at a time without MSG_DONTWAIT


def ready(
    read: Sequence[socket.socket],
    write: Sequence[socket.socket] = (),
    watched: Sequence[socket.socket] = (),
    wait_s: float | None = None,
) -> tuple[set[int], set[int]]:
    """Wait until a socket is ready, at most `wait_s`. Raises ValueError if one is closed, and OSError.

    Returns file descriptors: of `read` with input and of `watched` that have hung up; of `write` that take
    bytes. Lost sockets are in both sets.
    """
    if sys.platform == "win32":
        return _selected(read, write, watched, inf if wait_s is None else monotonic() + wait_s)
    hung_up = getattr(select, "POLLRDHUP", 0)  # elsewhere poll always tells
    events: dict[int, int] = {}
    for sockets, event in ((read, select.POLLIN), (write, select.POLLOUT), (watched, hung_up)):
        for one in sockets:
            events[one.fileno()] = events.get(one.fileno(), 0) | event
    poll = select.poll()  # not select(), which refuses file descriptors from 1,024 on
    for descriptor, event in events.items():
        poll.register(descriptor, event)
    found = poll.poll(None if wait_s is None else 1000 * wait_s)
    readable = {descriptor for descriptor, event in found if event & ~select.POLLOUT}
    return readable, {descriptor for descriptor, event in found if event & ~select.POLLIN}


def _selected(
    read: Sequence[socket.socket],
    write: Sequence[socket.socket],
    watched: Sequence[socket.socket],
    until_s: float,
) -> tuple[set[int], set[int]]:
    while True:
        lost = {one.fileno() for one in watched if _has_hung_up(one)}
        left_s = 0.0 if lost else max(until_s - monotonic(), 0.0)
        readable, writable, _ = select.select(read, write, [], min(left_s, _STEP_S))
        if lost or readable or writable or left_s <= _STEP_S:
            return lost | {one.fileno() for one in readable}, lost | {one.fileno() for one in writable}


def _has_hung_up(one: socket.socket) -> bool:
    try:
        return bool(select.select([one], [], [], 0)[0]) and not one.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def send_now(one: socket.socket, parts: Sequence[bytes | memoryview]) -> int:
    """Send what the system takes without waiting, and return the number of bytes. Raises OSError."""
    if sys.platform != "win32":
        try:
            return one.sendmsg(parts, [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
    return one.send(b"".join(parts)[:_PIECE]) if select.select([], [one], [], 0)[1] else 0


def read_pipe(descriptor: int, n_bytes: int, wait_s: float) -> bytes:
    """Read what a pipe has, at most `n_bytes`. Empty at its end, and if nothing comes within `wait_s`, after
    which the other side has to be ended. Raises OSError.
    """
    if sys.platform != "win32":
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return os.read(descriptor, n_bytes) if poll.poll(1000 * wait_s) else b""
    found: list[bytes] = []
    reader = Thread(target=lambda: found.append(os.read(descriptor, n_bytes)), daemon=True)
    reader.start()
    reader.join(wait_s)
    return b"".join(found)
