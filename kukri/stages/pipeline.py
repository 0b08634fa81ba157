"""The stages before the last one, as the process of the engine sees them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

from kukri.errors import ConfigError, StageError
from kukri.kernels.arrays import FloatArray
from kukri.kernels.step import StepLimits
from kukri.model_identity import code_digest
from kukri.stages.connection import Connection, Inbox, connect
from kukri.stages.cut import StageRoom
from kukri.stages.messages import Kind, from_text, rows_from_bytes, step_bounds, to_text
from kukri.stages.processes import MIN_TOKEN, TOKEN_VARIABLE, Address, StageProcess

logger = logging.getLogger("kukri.stages")

SPEED_TEST = 64 << 20, 5  # bytes, and passes over them, by which machines are compared
_CONNECT_S = 10.0
_RETURN_S = 60.0  # for a lost stage on another machine to listen again


@dataclass(frozen=True)
class Opening:
    """What stages are opened with: of each its own part, and the sizes that all have in common."""

    parts: tuple[Mapping[str, Any], ...]
    limits: StepLimits
    width: int
    n_pages: int


def open_pipeline(stages: int | Sequence[str], n_devices: int, n_layers: int) -> Pipeline:
    """The stages before the last: of so many in all, or of devices, or those that listen at addresses.

    Raises ConfigError on anything that makes no pipeline, or if a stage cannot be had.
    """
    addresses: list[Address] = []
    if not isinstance(stages, int):
        try:
            addresses = [Address.parse(text) for text in stages]
        except ValueError as error:
            raise ConfigError(f"a stage is given as HOST:PORT, not {str(error)!r}") from None
    elif n_devices and stages not in (1, n_devices):
        raise ConfigError(f"{stages} stages on {n_devices} devices: leave stages (--stages) out")
    n_stages = (
        len(addresses) + 1 if addresses else max(int(stages) if isinstance(stages, int) else 1, n_devices)
    )
    if not 2 <= n_stages <= n_layers:
        raise ConfigError(f"this model can be cut into 2 to {n_layers} stages, not {n_stages}")
    if addresses and n_devices:
        raise ConfigError("stages at addresses have devices of their own: leave devices (--devices) out")
    token = os.environ.get(TOKEN_VARIABLE, "").encode()
    if addresses and len(token) < MIN_TOKEN:
        raise ConfigError(
            f"set {TOKEN_VARIABLE} here and for each stage: {MIN_TOKEN} random characters or more"
        )
    try:
        return Pipeline(addresses, token, n_stages - 1)
    except StageError as error:
        raise ConfigError(str(error)) from None


class Pipeline:
    """The stages before the last, in order: at `addresses`, or `n_processes` on this machine.

    After a StageError it has no connections; the next call of `broadcast` begins anew, with empty caches.
    """

    def __init__(self, addresses: Sequence[Address], token: bytes, n_processes: int) -> None:
        """Connects. Raises StageError, ConfigError on a stage of another version."""
        self._remote, self._token, self._n_processes = tuple(addresses), token, n_processes
        self._processes: list[StageProcess] = []
        self._stages: list[Connection] = []
        self._inbox: Inbox | None = None
        self._opening: Opening | None = None
        self._loss: StageError | None = None  # that nobody has been told of
        self.rooms = self._connect()

    def __len__(self) -> int:
        """The number of stages."""
        return len(self._remote) or self._n_processes

    @property
    def is_remote(self) -> bool:
        """True if its stages may be on other machines."""
        return bool(self._remote)

    @property
    def pids(self) -> list[int]:
        """The numbers of the processes on this machine."""
        return [process.pid for process in self._processes]

    def open(self, opening: Opening) -> None:
        """Has the stages load their layers; `wait` waits for that."""
        self._opening = opening
        try:
            self._send_opening(opening)
        except StageError as error:
            self.close()
            raise ConfigError(str(error)) from None

    def wait(self) -> list[dict[str, Any]]:
        """Waits until all stages are open; the facts of each. Raises ConfigError if one cannot be."""
        try:
            return self._wait()
        except StageError as error:
            self.close()
            raise ConfigError(str(error)) from None

    def broadcast(self, kind: Kind, *parts: bytes) -> None:
        """Sends a message to all stages. Raises StageError if one is lost, or none can be had again."""
        self._raise_loss()
        try:
            if self._inbox is None:
                self._begin_again()
            for stage in self._stages:
                stage.send(kind, *parts, inbox=self._inbox)
        except StageError:
            self.close()
            raise

    def change(self, kind: Kind, *parts: bytes) -> None:
        """The same for a change to the caches. A loss is raised with the next step, not here."""
        if self._inbox is not None:
            try:
                self.broadcast(kind, *parts)
            except StageError as error:
                self._loss = error

    def activations(self) -> FloatArray:
        """The activations [T, D] of the oldest step that was not asked for. Waits for them."""
        self._raise_loss()
        try:
            if self._inbox is None:
                raise StageError("a stage was lost")
            return rows_from_bytes(self._inbox.next())
        except StageError:
            self.close()
            raise

    def _raise_loss(self) -> None:
        """Raises the loss that nobody has been told of."""
        if self._loss is not None:
            loss, self._loss = self._loss, None
            raise loss

    def close(self) -> None:
        """Ends the connections, and with them the processes."""
        self._inbox = None
        for stage in self._stages:
            stage.close()
        for process in self._processes:
            process.end()
        self._stages, self._processes = [], []

    def _connect(self) -> list[StageRoom]:
        """Connects to all stages; the room that each has."""
        try:
            if not self._remote:
                self._processes = [StageProcess() for _ in range(self._n_processes)]
            tokens = [process.token for process in self._processes] or [self._token] * len(self._remote)
            rooms = []
            for i, (address, token) in enumerate(zip(self._addresses(), tokens)):
                name = f"stage {i + 1} of {len(self) + 1}"
                stage = connect(address.host, address.port, token, "engine", name, _CONNECT_S)
                self._stages.append(stage)
                facts = from_text(stage.expect(Kind.FACTS))
                if facts.get("code") != code_digest().hex():
                    raise ConfigError(f"{name} runs another version of kukri: install the same")
                rooms.append(StageRoom(int(facts["free_bytes"]), float(facts["speed"]), memory=name))
        except BaseException:
            self.close()
            raise
        return rooms

    def _addresses(self) -> list[Address]:
        return [process.address for process in self._processes] or list(self._remote)

    def _send_opening(self, opening: Opening) -> None:
        addresses = self._addresses()
        tokens = [process.token.decode() for process in self._processes]
        for i, (stage, part) in enumerate(zip(self._stages, opening.parts, strict=True)):
            following: dict[str, Any] | None = None
            if i + 1 < len(addresses):
                address = addresses[i + 1]
                following = {"host": address.host, "port": address.port}
                following["token"] = tokens[i + 1] if tokens else None  # else it has its own
            stage.send(Kind.OPEN, to_text({**part, "next": following, "has_previous": i > 0}))

    def _wait(self) -> list[dict[str, Any]]:
        assert self._opening is not None, "open() comes before"
        facts = [from_text(stage.expect(Kind.READY)) for stage in self._stages]
        opening = self._opening
        for stage in self._stages:
            stage.bounds = step_bounds(opening.limits, opening.width, opening.n_pages)
        self._inbox = Inbox(self._stages[-1])
        return facts

    def _begin_again(self) -> None:
        """Starts lost processes, connects and opens as before. Raises StageError if that fails."""
        if self._opening is None:
            raise StageError("the stages are closed")
        logger.warning("a stage was lost: the stages are started again")
        give_up_s = monotonic() + (_RETURN_S if self._remote else 0.0)
        while True:
            try:
                self._connect()
                self._send_opening(self._opening)
                self._wait()
            except (StageError, ConfigError) as error:
                self.close()
                if monotonic() > give_up_s:
                    raise StageError(f"a stage was lost and cannot be started again: {error}") from None
                with suppress(KeyboardInterrupt):
                    sleep(0.5)
            else:
                return
