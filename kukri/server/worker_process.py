"""A process that answers the server over a pipe: what could stand it still runs there."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from typing import Self


class WorkerProcess:
    """A module of ours that runs as a process of its own. Belongs to one event loop."""

    def __init__(self, process: Process) -> None:
        """`process` has pipes for stdin and stdout."""
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout

    @classmethod
    async def start(cls, module: str, max_line: int) -> Self:
        """Runs `module`, whose answers are lines of at most `max_line` bytes. Raises OSError."""
        arguments = (sys.executable, "-m", module)
        return cls(await asyncio.create_subprocess_exec(*arguments, stdin=PIPE, stdout=PIPE, limit=max_line))

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it takes nothing more. The pipe may know before anybody has waited for the process."""
        return self._process.returncode is not None or self._stdin.is_closing()

    async def send(self, *parts: bytes) -> None:
        """Writes the parts. A process that has ended loses them: its next line is empty."""
        if not self.has_ended:  # uvloop raises RuntimeError on a closed pipe, asyncio ConnectionError
            with suppress(ConnectionError):
                self._stdin.writelines(parts)
                await self._stdin.drain()

    async def read_line(self) -> bytes:
        """The next line; an empty one if the process has ended. Raises ValueError if it is too long."""
        return await self._stdout.readline()

    def dismiss(self) -> None:
        """Closes its stdin, at which it is to end."""
        self._stdin.close()

    async def kill(self) -> None:
        """Ends the process."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
