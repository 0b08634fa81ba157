"""How two stages meet: each proves that it knows the token before the other reads anything else of it.

The token itself is not sent. Nothing is encrypted: between machines, use a private network.
"""

from __future__ import annotations

import hmac
import select
import socket
from contextlib import suppress
from secrets import token_bytes
from time import monotonic
from typing import Literal

from kukri.errors import StageError
from kukri.stages.connection import HANG_UP, Connection
from kukri.stages.processes import TOKEN_VARIABLE

Role = Literal["engine", "stage"]  # who connects: the engine's process, or the stage before
_GREETING = b"kukri stage 2\n"
_ROLES: dict[Role, bytes] = {"engine": b"E", "stage": b"S"}
_ACCEPTED, _BUSY = b"A", b"B"  # what the proof of the listening side says
_NONCE, _PROOF = 32, 32  # bytes
_ANSWER = 1 + _NONCE + _PROOF
_GREETING_S = 10.0  # within which a peer must prove that it knows the token
_NEVER_S = float("inf")
_MAX_GUESTS = 64  # peers that are greeted at a time: the oldest is dropped for another


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens for engines and stages."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family)


class Door:
    """Lets engines and stages in that know the token. A peer that says nothing delays no other."""

    def __init__(self, listener: socket.socket, token: bytes) -> None:
        self._listener, self._token = listener, token
        self._guests: dict[int, _Guest] = {}  # by file descriptor, in order of arrival

    def accept(
        self, role: Role, name: str, *, engine: Connection | None = None, timeout_s: float | None = None
    ) -> Connection:
        """The next connection of a process with this role; others are turned away.

        Raises StageError after `timeout_s`, and when `engine` hangs up.
        """
        now_s = monotonic()
        give_up_s = _NEVER_S if timeout_s is None else now_s + timeout_s
        for guest in self._guests.values():  # those that came while nobody was at the door
            guest.until_s = now_s + _GREETING_S
        while now_s < give_up_s:
            for fd in self._ready(engine, give_up_s - now_s):
                if engine is not None and fd == engine.fileno():
                    raise StageError(f"{engine.name} has hung up")
                if fd == self._listener.fileno():
                    self._greet()
                elif fd in self._guests and self._guests[fd].has_answered():
                    guest = self._guests.pop(fd)
                    with suppress(OSError):
                        if guest.is_welcome(self._token, role):
                            return Connection(guest.sock, name, engine)
                    guest.close()
            now_s = monotonic()
            for fd in [fd for fd, guest in self._guests.items() if guest.until_s < now_s]:
                self._guests.pop(fd).close()
        raise StageError(f"{name} has not connected within {timeout_s:g} s")

    def _ready(self, engine: Connection | None, timeout_s: float) -> list[int]:
        """Waits for news; the file descriptors that have some."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        if engine is not None:
            poll.register(engine, HANG_UP)
        for guest in self._guests.values():
            poll.register(guest, select.POLLIN)
        wait_s = min(timeout_s, _GREETING_S if self._guests else _NEVER_S)
        return [fd for fd, _ in poll.poll(None if wait_s == _NEVER_S else 1000 * wait_s + 1)]

    def _greet(self) -> None:
        with suppress(OSError):  # it has left again
            sock, _ = self._listener.accept()
            if len(self._guests) == _MAX_GUESTS:
                self._guests.pop(next(iter(self._guests))).close()
            self._guests[sock.fileno()] = _Guest(sock)


class _Guest:
    """A peer that has connected and has not proved yet that it knows the token."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.until_s = sock, monotonic() + _GREETING_S
        self._own, self._answer = token_bytes(_NONCE), b""
        sock.setblocking(False)
        with suppress(OSError):  # reading will tell
            sock.sendall(_GREETING + self._own)  # the buffer of a new connection has room for it

    def fileno(self) -> int:
        """The file descriptor of the socket."""
        return self.sock.fileno()

    def close(self) -> None:
        """Turns it away."""
        self.sock.close()

    def has_answered(self) -> bool:
        """Reads what has come; True once that is a whole answer, or all there will be."""
        try:
            piece = self.sock.recv(_ANSWER - len(self._answer))
        except BlockingIOError:
            return False
        except OSError:
            piece = b""
        self._answer += piece
        return not piece or len(self._answer) == _ANSWER

    def is_welcome(self, token: bytes, role: Role) -> bool:
        """True if it knows the token and has the role; it is told so, and a peer of another role why not."""
        who, theirs, proof = self._answer[:1], self._answer[1 : 1 + _NONCE], self._answer[1 + _NONCE :]
        if not hmac.compare_digest(proof, _proof(token, who, self._own, theirs)):
            return False
        is_expected = who == _ROLES[role]
        self.sock.sendall(_proof(token, _ACCEPTED if is_expected else _BUSY, theirs, self._own))
        self.sock.setblocking(True)
        return is_expected


def connect(host: str, port: int, token: bytes, role: Role, name: str, timeout_s: float) -> Connection:
    """A connection to a stage that listens there.

    Raises StageError, with the reason, if there is none, if it serves another engine or has another token.
    """
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
        try:
            _prove(sock, token, _ROLES[role])
        except BaseException:
            sock.close()
            raise
    except (OSError, ValueError) as error:
        raise StageError(f"no connection to {name} at {host}:{port}: {error}") from None
    sock.settimeout(None)
    return Connection(sock, name)


def _prove(sock: socket.socket, token: bytes, who: bytes) -> None:
    """Proves to the listening side that this one knows the token. Raises ValueError unless it is accepted."""
    try:
        greeting = _read_exactly(sock, len(_GREETING) + _NONCE)
        if not greeting.startswith(_GREETING):
            raise ValueError("no stage of this version listens there")
        theirs, own = greeting[len(_GREETING) :], token_bytes(_NONCE)
        sock.sendall(who + own + _proof(token, who, theirs, own))
        answer = _read_exactly(sock, _PROOF)
    except TimeoutError:
        raise ValueError("it does not answer: it may be serving another engine") from None
    except (EOFError, ConnectionError):
        raise ValueError(f"it hangs up: does it have the same token ({TOKEN_VARIABLE})?") from None
    if hmac.compare_digest(answer, _proof(token, _BUSY, own, theirs)):
        raise ValueError("it is serving another engine")
    if not hmac.compare_digest(answer, _proof(token, _ACCEPTED, own, theirs)):
        raise ValueError("it does not know the token")


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
