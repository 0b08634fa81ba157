"""A connection between two stages: framed messages over TCP, between processes that know one token.

Each side proves that it knows the token before the other reads anything else of it; the token itself is not
sent. Nothing is encrypted: between machines, use a private network.
"""

from __future__ import annotations

import hmac
import select
import socket
import struct
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from secrets import token_bytes
from typing import Literal

from kukri.errors import StageError
from kukri.stages.messages import Kind, text_bounds

Role = Literal["engine", "stage"]  # of who connects: the engine's process, or the stage before
_HEADER = struct.Struct("<2I")  # kind, bytes
_GREETING = b"kukri stage 1\n"
_ROLES: dict[Role, bytes] = {"engine": b"E", "stage": b"S"}
_NONCE, _PROOF = 32, 32  # bytes
_GREETING_S = 10.0  # for a stranger to prove that it is none
_SILENCE_S = 20  # after which the system gives up a machine that does not answer
_PIECE = 1 << 18  # bytes that are sent at a time


class Connection:
    """One side. `bounds` are the most bytes of the kinds that may come. Raises StageError once it is lost."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.bounds: Mapping[Kind, int] = text_bounds()
        self.name = name
        self._socket = sock
        _watch(sock)

    def send(self, kind: Kind, *parts: bytes | memoryview, inbox: Inbox | None = None) -> None:
        """Sends a message. While it waits for the other side to read, `inbox` takes in what comes: two sides
        that send to each other in a circle would wait forever.
        """
        message = (_HEADER.pack(kind, sum(map(len, parts))), *parts)
        try:
            n_sent = 0
            # at once if it can be, as each piece would wake the other side
            with suppress(BlockingIOError):
                n_sent = self._socket.sendmsg(message, [], socket.MSG_DONTWAIT)
            if n_sent < sum(map(len, message)):
                self._send_all(memoryview(b"".join(message))[n_sent:], inbox)
        except (OSError, ValueError) as error:  # ValueError: it is closed
            raise self._lost(error) from None

    def receive(self) -> tuple[Kind, memoryview]:
        """The next message. Raises StageError on one of a kind or size that is out of bounds."""
        number, n_bytes = _HEADER.unpack(self._read(_HEADER.size))
        kind = next((kind for kind in self.bounds if kind == number), None)
        if kind is None or n_bytes > self.bounds[kind]:
            raise StageError(f"{self.name} sent a message of kind {number} and {n_bytes} bytes")
        return kind, self._read(n_bytes)

    def expect(self, kind: Kind) -> memoryview:
        """The next message, which must be of this kind. Raises StageError with the other side's error."""
        found, body = self.receive()
        if found is Kind.ERROR:
            raise StageError(f"{self.name}: {bytes(body).decode(errors='replace')}")
        if found is not kind:
            raise StageError(f"{self.name} sent {found.name} instead of {kind.name}")
        return body

    def close(self) -> None:
        """Ends the connection, for a thread that reads it too."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send_all(self, left: memoryview, inbox: Inbox | None) -> None:
        if inbox is None:
            self._socket.sendall(left)
            return
        while left:
            readable, writable, _ = select.select([inbox.connection._socket], [self._socket], [])
            if readable and not writable:
                inbox.take_in()
            if writable:
                left = left[self._socket.send(left[:_PIECE], socket.MSG_DONTWAIT) :]

    def _read(self, n_bytes: int) -> memoryview:
        body = memoryview(bytearray(n_bytes))
        n_read = 0
        try:
            while n_read < n_bytes:
                n = self._socket.recv_into(body[n_read:])
                if n == 0:
                    raise EOFError("the connection has ended")
                n_read += n
        except (OSError, EOFError, ValueError) as error:
            raise self._lost(error) from None
        return body

    def _lost(self, error: Exception) -> StageError:
        return StageError(f"{self.name} is lost: {error}")


class Inbox:
    """Received messages of a connection that are not consumed yet."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._bodies: deque[memoryview] = deque()

    def take_in(self) -> None:
        """Reads a message of activations."""
        self._bodies.append(self.connection.expect(Kind.ACTIVATIONS))

    def next(self) -> memoryview:
        """The next message of activations. Waits for it."""
        if not self._bodies:
            self.take_in()
        return self._bodies.popleft()


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens for engines and stages."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family)


def accept(listener: socket.socket, token: bytes, role: Role, name: str) -> Connection:
    """The next connection of a process that knows the token and has this role; others are turned away."""
    while True:
        sock, _ = listener.accept()
        with suppress(OSError, EOFError):
            sock.settimeout(_GREETING_S)
            own = token_bytes(_NONCE)
            sock.sendall(_GREETING + own)
            answer = _read_exactly(sock, 1 + _NONCE + _PROOF)
            who, other, proof = answer[:1], answer[1 : 1 + _NONCE], answer[1 + _NONCE :]
            if who == _ROLES[role] and hmac.compare_digest(proof, _proof(token, who, own, other)):
                sock.sendall(_proof(token, b"A", other, own))
                sock.settimeout(None)
                return Connection(sock, name)
        sock.close()


def connect(host: str, port: int, token: bytes, role: Role, name: str, timeout_s: float) -> Connection:
    """A connection to a stage that listens there. Raises StageError if it does not, or has another token."""
    who = _ROLES[role]
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
        greeting = _read_exactly(sock, len(_GREETING) + _NONCE)
        if not greeting.startswith(_GREETING):
            raise ValueError("no stage of this version listens there")
        theirs, own = greeting[len(_GREETING) :], token_bytes(_NONCE)
        sock.sendall(who + own + _proof(token, who, theirs, own))
        if not hmac.compare_digest(_read_exactly(sock, _PROOF), _proof(token, b"A", own, theirs)):
            raise ValueError("it does not know the token")
        sock.settimeout(None)
    except (OSError, EOFError, ValueError) as error:
        reason = error if str(error) else "it hangs up: does it have the same token?"
        raise StageError(f"no connection to {name} at {host}:{port}: {reason}") from None
    return Connection(sock, name)


def _proof(token: bytes, role: bytes, challenge: bytes, own: bytes) -> bytes:
    return hmac.digest(token, role + challenge + own, "sha256")


def _read_exactly(sock: socket.socket, n_bytes: int) -> bytes:
    data = b""
    while len(data) < n_bytes:
        piece = sock.recv(n_bytes - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def _watch(sock: socket.socket) -> None:
    """Disables Nagle's algorithm, and turns TCP keep-alive on to notice a lost machine."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = {"TCP_KEEPIDLE": _SILENCE_S // 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": _SILENCE_S // 4}
    for name, value in probes.items():
        if hasattr(socket, name):  # macOS names the first otherwise
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENCE_S)
