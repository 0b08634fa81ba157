"""Stages on this machine: processes of `kukri stage` that listen on the loopback interface."""

from __future__ import annotations

import os
import subprocess
import sys
from secrets import token_hex

from kukri.dataclass import dataclass
from kukri.errors import StageError

TOKEN_VARIABLE = "KUKRI_STAGE_TOKEN"  # environment variable with the secret of stages and engine
MIN_TOKEN = 16  # characters of it, at least
_END_S = 5.0  # for a process to end by itself


@dataclass(frozen=True)
class Address:
    """A stage that listens."""

    host: str
    port: int

    def __str__(self) -> str:
        """As `parse` reads it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """The address of HOST:PORT; an IPv6 host in brackets. Raises ValueError."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(text)
        return cls(host.removeprefix("[").removesuffix("]"), int(port))


class StageProcess:
    """A process with a stage for only this one; it ends with its connection."""

    def __init__(self) -> None:
        """Starts it, and waits until it listens. Raises StageError if it does not."""
        self.token = token_hex(32).encode()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kukri", "stage", "--listen", "127.0.0.1:0", "--once"],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env={**os.environ, TOKEN_VARIABLE: self.token.decode()},
            text=True,
        )
        self._address: Address | None = None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def address(self) -> Address:
        """The address of the stage, which it prints once it listens."""
        if self._address is None:
            assert self._process.stdout is not None, "it is a pipe"
            line = self._process.stdout.readline()
            try:
                self._address = Address.parse(line.strip())
            except ValueError:
                self.end()
                raise StageError("a process for a stage did not start: see its output above") from None
        return self._address

    def end(self) -> None:
        """Waits for it to exit; kills it if that takes long."""
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
