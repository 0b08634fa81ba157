"""Sources of the stages before the last: processes of this machine, addresses, or a placer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from kukri.errors import ConfigError, StageError
from kukri.stages.processes import MIN_TOKEN, TOKEN_VARIABLE, Address, StageProcess


class StageSource(Protocol):
    """Stages before the last one, which listen for the engine."""

    @property
    def is_remote(self) -> bool:
        """True if they may be on other machines."""

    def __len__(self) -> int:
        """The number of stages."""

    def start(self) -> list[tuple[Address, bytes]]:
        """Return the address and the token of each stage, once it listens. Lost stages are started again.

        Raises StageError if one cannot be had.
        """

    def end(self) -> None:
        """Called when the engine has hung up: ends stages that serve no other engine."""

    def close(self) -> None:
        """Ends them for good."""


class StagePlacer(Protocol):
    """Starts stages somewhere: of `ModelOptions.stages`. Attributes: n_stages, the last one counted."""

    n_stages: int

    def place(self, n_bytes: int, n_threads: int | None) -> StageSource:
        """Place the stages before the last, each with room for `n_bytes` bytes. Raises ConfigError without
        room.

        `n_threads` is the number of threads of each stage; None leaves it to the placer.
        """


class OwnProcesses(StageSource):
    """Stages in processes of this machine, which live as long as their connection."""

    is_remote = False

    def __init__(self, n: int) -> None:
        self._n = n
        self._processes: list[StageProcess] = []

    def __len__(self) -> int:
        return self._n

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [process.pid for process in self._processes]

    def start(self) -> list[tuple[Address, bytes]]:
        try:
            self._processes = [StageProcess() for _ in range(self._n)]
            return [(process.address, process.token) for process in self._processes]
        except StageError:
            self.end()
            raise

    def end(self) -> None:
        for process in self._processes:
            process.end()
        self._processes = []

    close = end


class StagesAt(StageSource):
    """Stages at fixed addresses, which are started, and started again, from outside."""

    is_remote = True

    def __init__(self, addresses: list[Address], token: bytes) -> None:
        self._found = [(address, token) for address in addresses]

    def __len__(self) -> int:
        return len(self._found)

    def start(self) -> list[tuple[Address, bytes]]:
        return self._found

    def end(self) -> None:
        """See StageSource.end: they wait for the next engine."""

    close = end


def stage_source(
    stages: int | Sequence[str] | StagePlacer,
    n_devices: int,
    n_layers: int,
    n_bytes: int,
    n_threads: int | None,
) -> StageSource:
    """The stages before the last, by their number, devices, addresses or placer.

    `n_bytes` are the bytes of the weights, and of the keys and values of a context; `n_threads` the threads
    of each stage. Raises ConfigError on anything that makes no pipeline.
    """
    addresses: list[Address] = []
    if isinstance(stages, int):
        if n_devices and stages not in (1, n_devices):
            raise ConfigError(
                f"stages (--stages) must be the number of devices, {n_devices}, not {stages}: leave it out"
            )
        n_stages = max(stages, n_devices)
    elif isinstance(stages, Sequence):
        addresses = _addresses(stages)
        n_stages = len(addresses) + 1
    else:
        n_stages = stages.n_stages
    if not 2 <= n_stages <= n_layers:
        raise ConfigError(f"the number of stages must be from 2 to {n_layers} for this model, not {n_stages}")
    if isinstance(stages, int):
        return OwnProcesses(n_stages - 1)
    if n_devices:
        raise ConfigError("devices (--devices) cannot be combined with remote stages, which choose their own")
    if not isinstance(stages, Sequence):
        return stages.place(n_bytes // n_stages, n_threads)
    token = os.environ.get(TOKEN_VARIABLE, "").encode()
    if len(token) < MIN_TOKEN:
        raise ConfigError(
            f"{TOKEN_VARIABLE} is required here and for each stage: {MIN_TOKEN} random characters or more"
        )
    return StagesAt(addresses, token)


def _addresses(texts: Sequence[str]) -> list[Address]:
    try:
        return [Address.parse(text) for text in texts]
    except ValueError as error:
        raise ConfigError(f"a stage must be HOST:PORT, not {str(error)!r}") from None
