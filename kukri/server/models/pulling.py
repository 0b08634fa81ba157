"""Fetching models for clients, in processes of their own (`pull_worker.py`)."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

from kukri.errors import CapacityError, DownloadError
from kukri.server.worker_process import WorkerProcess

MAX_PULLS = 4  # at a time
_MAX_LINE = 1 << 16  # bytes


class Pulls:
    """The downloads of a server that are under way."""

    def __init__(self) -> None:
        self.n_running = 0

    async def fetch(self, name: str) -> AsyncGenerator[tuple[int, int]]:
        """Fetches a model that `kukri pull` takes; yields now and then the bytes done and all, 0 if unknown.

        The download ends when this is closed. Raises DownloadError if the model cannot be had, CapacityError
        if too many are under way.
        """
        if self.n_running >= MAX_PULLS:
            raise CapacityError(f"{MAX_PULLS} downloads are already running: try again later")
        self.n_running += 1
        try:
            worker = await WorkerProcess.start("kukri.server.models.pull_worker", _MAX_LINE)
            try:
                await worker.send(name.encode() + b"\n")
                while isinstance(told := _read(await worker.read_line()), list):
                    yield told[0], told[1]
            finally:
                worker.dismiss()
        finally:
            self.n_running -= 1
        if told is not None:
            raise DownloadError(told)


def _read(line: bytes) -> list[int] | str | None:
    """What a line says: progress, an error, or None at a good end."""
    told: list[int] | str | None = json.loads(line or b'"the process that fetches the model has ended"')
    return told
