"""How two processes meet: each proves that it knows a token before the other reads anything else of it.

The token itself is not sent. Nothing is encrypted: between machines, use a private network.
"""

from __future__ import annotations

import hmac
import socket
from contextlib import suppress
from secrets import token_bytes
from time import monotonic
from typing import Literal

from kukri.errors import StageError
from kukri.host.waiting import ready
from kukri.stages.connection import Connection
from kukri.stages.processes import TOKEN_VARIABLE

Role = Literal["engine", "stage", "replica"]  # the connecting process: an engine, the stage before, …
_GREETING = b"kukri stage 2\n"
_ROLES: dict[Role, bytes] = {"engine": b"E", "stage": b"S", "replica": b"R"}
_ACCEPTED, _BUSY = b"A", b"B"  # the verdicts of the listening side
_NONCE, _PROOF = 32, 32  # bytes
HELLO_BYTES, ANSWER_BYTES, VERDICT_BYTES = len(_GREETING) + _NONCE, 1 + _NONCE + _PROOF, _PROOF
_GREETING_S = 10.0  # within which a peer must prove that it knows the token
_NEVER_S = float("inf")
_MAX_GUESTS = 64  # peers that are greeted at a time: the oldest is dropped for another


class Host:
    """The listening side: says `hello`, reads an answer of ANSWER_BYTES, and tells its verdict."""

    def __init__(self, token: bytes) -> None:
        self._token, self._own = token, token_bytes(_NONCE)
        self.hello = _GREETING + self._own

    def verdict(self, answer: bytes, role: Role) -> tuple[bytes, bool]:
        """What to send, nothing to a peer that does not know the token, and whether it may stay."""
        who, theirs, proof = answer[:1], answer[1 : 1 + _NONCE], answer[1 + _NONCE :]
        if not hmac.compare_digest(proof, _proof(self._token, who, self._own, theirs)):
            return b"", False
        is_expected = who == _ROLES[role]
        return _proof(self._token, _ACCEPTED if is_expected else _BUSY, theirs, self._own), is_expected


class Guest:
    """The connecting side: answers a hello of HELLO_BYTES, and reads a verdict of VERDICT_BYTES."""

    def __init__(self, token: bytes, role: Role) -> None:
        self._token, self._who, self._own = token, _ROLES[role], token_bytes(_NONCE)
        self._theirs = b""

    def answer(self, hello: bytes) -> bytes:
        """The proof that this side knows the token. Raises ValueError for a hello of another version."""
        if not hello.startswith(_GREETING):
            raise ValueError("a stage of this version was not found there")
        self._theirs = hello[len(_GREETING) :]
        return self._who + self._own + _proof(self._token, self._who, self._theirs, self._own)

    def check(self, verdict: bytes) -> None:
        """Raises ValueError unless the peer knows the token and accepts this side."""
        if hmac.compare_digest(verdict, _proof(self._token, _BUSY, self._own, self._theirs)):
            raise ValueError("it is serving another engine")
        if not hmac.compare_digest(verdict, _proof(self._token, _ACCEPTED, self._own, self._theirs)):
            raise ValueError("it does not know the token")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens for engines and stages."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family)


class Door:
    """Lets engines and stages in that know the token. A peer that says nothing delays no other."""

    def __init__(self, listener: socket.socket, token: bytes) -> None:
        self._listener, self._token = listener, token
        self._guests: dict[int, _Arrival] = {}  # by file descriptor, in order of arrival

    def accept(
        self, role: Role, name: str, *, engine: Connection | None = None, timeout_s: float | None = None
    ) -> Connection:
        """Return the next connection of a process with this role; connections of other roles are refused.

        Raises StageError after `timeout_s`, and when `engine` hangs up.
        """
        now_s = monotonic()
        give_up_s = _NEVER_S if timeout_s is None else now_s + timeout_s
        for guest in self._guests.values():  # peers that connected before this call
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
                        if guest.is_welcome(role):
                            return Connection(guest.sock, name, engine)
                    guest.close()
            now_s = monotonic()
            for fd in [fd for fd, guest in self._guests.items() if guest.until_s < now_s]:
                self._guests.pop(fd).close()
        raise StageError(f"{name} has not connected within {timeout_s:g} s")

    def _ready(self, engine: Connection | None, timeout_s: float) -> set[int]:
        """Wait for input, and return the file descriptors that have input."""
        wait_s = min(timeout_s, _GREETING_S if self._guests else _NEVER_S)
        return ready(
            [self._listener, *(guest.sock for guest in self._guests.values())],
            watched=[] if engine is None else [engine.socket],
            wait_s=None if wait_s == _NEVER_S else wait_s + 0.001,
        )[0]

    def _greet(self) -> None:
        with suppress(OSError):  # it has left again
            sock, _ = self._listener.accept()
            if len(self._guests) == _MAX_GUESTS:
                self._guests.pop(next(iter(self._guests))).close()
            self._guests[sock.fileno()] = _Arrival(sock, self._token)


class _Arrival:
    """A peer that has connected and has not proved yet that it knows the token."""

    def __init__(self, sock: socket.socket, token: bytes) -> None:
        self.sock, self.until_s = sock, monotonic() + _GREETING_S
        self._host, self._answer = Host(token), b""
        sock.setblocking(False)
        with suppress(OSError):  # reading will tell
            sock.sendall(self._host.hello)  # the buffer of a new connection has room for it

    def fileno(self) -> int:
        """The file descriptor of the socket."""
        return self.sock.fileno()

    def close(self) -> None:
        """Turns it away."""
        self.sock.close()

    def has_answered(self) -> bool:
        """Read what has arrived. Return True once the answer is complete or the peer has hung up."""
        try:
            piece = self.sock.recv(ANSWER_BYTES - len(self._answer))
        except BlockingIOError:
            return False
        except OSError:
            piece = b""
        self._answer += piece
        return not piece or len(self._answer) == ANSWER_BYTES

    def is_welcome(self, role: Role) -> bool:
        """Return True if the peer knows the token and has the role, and send it the verdict."""
        verdict, is_welcome = self._host.verdict(self._answer, role)
        self.sock.sendall(verdict)
        self.sock.setblocking(True)
        return is_welcome


def connect(host: str, port: int, token: bytes, role: Role, name: str, timeout_s: float) -> Connection:
    """A connection to a stage that listens there.

    Raises StageError, with the reason, if there is none, if it serves another engine or has another token.
    """
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
        try:
            _prove(sock, Guest(token, role))
        except BaseException:
            sock.close()
            raise
    except (OSError, ValueError) as error:
        raise StageError(f"{name} at {host}:{port} cannot be reached: {error}") from None
    sock.settimeout(None)
    return Connection(sock, name)


def _prove(sock: socket.socket, guest: Guest) -> None:
    """Proves to the listening side that this one knows the token. Raises ValueError unless it is accepted."""
    try:
        sock.sendall(guest.answer(_read_exactly(sock, HELLO_BYTES)))
        guest.check(_read_exactly(sock, VERDICT_BYTES))
    except TimeoutError:
        raise ValueError("it does not answer, and may be serving another engine") from None
    except (EOFError, ConnectionError):
        raise ValueError(f"it hangs up: check that it has the same token ({TOKEN_VARIABLE})") from None


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
