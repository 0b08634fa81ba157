"""A connection between two stages: framed messages over TCP."""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

from kukri.errors import StageError
from kukri.host import waiting
from kukri.stages.messages import Kind, text_bounds

_HEADER = struct.Struct("<2I")  # kind, bytes
_SILENCE_S = 20  # after which the system gives up a machine that does not answer
_PIECE = 1 << 18  # bytes that are sent at a time


class LostError(StageError):
    """A connection has ended. The cause is elsewhere."""


class Connection:
    """One side of a connection. Raises LostError once it is lost.

    Attributes: bounds, the maximum bytes of each kind of message; name, the other side; engine, a connection:
    if it ends, waiting for messages of this one ends too.
    """

    def __init__(self, sock: socket.socket, name: str, engine: Connection | None = None) -> None:
        self.bounds: Mapping[Kind, int] = text_bounds()
        self.name, self.engine = name, engine
        self.socket = sock
        _watch(sock)

    def fileno(self) -> int:
        """The file descriptor of the socket, -1 once it is closed."""
        return self.socket.fileno()

    def send(self, kind: Kind, *parts: bytes | memoryview, inbox: Inbox | None = None) -> None:
        """Send a message. While the other side does not read, `inbox` takes in messages, because two sides
        that send to each other would wait forever.
        """
        message = (_HEADER.pack(kind, sum(map(len, parts))), *parts)
        try:
            # at once if it can be, as each piece would wake the other side
            n_sent = waiting.send_now(self.socket, message)
            if n_sent < sum(map(len, message)):
                self._send_all(memoryview(b"".join(message))[n_sent:], inbox)
        except (OSError, ValueError) as error:  # ValueError: it is closed
            raise self._lost(error) from None

    def receive(self) -> tuple[Kind, memoryview]:
        """The next message.

        Raises StageError on one of a kind or size that is out of bounds, and with the other side's error.
        """
        number, n_bytes = _HEADER.unpack(self._read(_HEADER.size))
        kind = next((kind for kind in self.bounds if kind == number), None)
        if kind is None or n_bytes > self.bounds[kind]:
            raise StageError(f"{self.name} sent a message of kind {number} and {n_bytes} bytes")
        body = self._read(n_bytes)
        if kind in (Kind.ERROR, Kind.LOST):
            raised = StageError if kind is Kind.ERROR else LostError
            raise raised(f"{self.name}: {bytes(body).decode(errors='replace')}")
        return kind, body

    def expect(self, kind: Kind) -> memoryview:
        """The next message, which must be of this kind. Raises StageError as `receive` does."""
        found, body = self.receive()
        if found is not kind:
            raise StageError(f"{self.name} sent {found.name} instead of {kind.name}")
        return body

    def close(self) -> None:
        """Ends the connection, for a thread that reads it too."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _send_all(self, left: memoryview, inbox: Inbox | None) -> None:
        if inbox is None:
            self.socket.sendall(left)
            return
        while left:
            if self.fileno() in waiting.ready([inbox.connection.socket], [self.socket])[1]:
                left = left[waiting.send_now(self.socket, [left[:_PIECE]]) :]
            else:
                inbox.take_in()

    def _read(self, n_bytes: int) -> memoryview:
        body = memoryview(bytearray(n_bytes))
        n_read = 0
        try:
            while n_read < n_bytes:
                self._watch_engine()
                n = self.socket.recv_into(body[n_read:])
                if n == 0:
                    raise EOFError("the connection has ended")
                n_read += n
        except (OSError, EOFError, ValueError) as error:
            raise self._lost(error) from None
        return body

    def _watch_engine(self) -> None:
        """Waits for something to read. Raises LostError if the engine hangs up instead."""
        if self.engine is None:
            return
        if self.fileno() not in waiting.ready([self.socket], watched=[self.engine.socket])[0]:
            raise self.engine._lost(EOFError("it has hung up"))

    def _lost(self, error: Exception) -> LostError:
        return LostError(f"{self.name} is lost: {error}")


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


def ready(connections: Sequence[Connection], timeout_s: float | None) -> list[Connection]:
    """The connections that have something to read or have ended; waits `timeout_s` for the first of them."""
    found, _ = waiting.ready([connection.socket for connection in connections], wait_s=timeout_s)
    return [connection for connection in connections if connection.fileno() in found]


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
