"""The stages before the last one, as the process of the engine sees them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic, sleep
from typing import Any

from kukri.dataclass import dataclass
from kukri.engine.model_identity import code_digest
from kukri.errors import ConfigError, StageError
from kukri.kernels.arrays import FloatArray
from kukri.kernels.step import StepLimits
from kukri.stages.connection import Connection, Inbox, LostError, ready
from kukri.stages.cut import StageRoom
from kukri.stages.greeting import connect
from kukri.stages.messages import Kind, from_text, rows_from_bytes, step_bounds, to_text
from kukri.stages.processes import Address
from kukri.stages.sources import StageSource

logger = logging.getLogger("kukri.stages")

SPEED_TEST = 64 << 20, 5  # bytes, and passes over them, by which machines are compared
_CONNECT_S = 10.0
_CAUSE_S = 0.2  # for each stage to say why it ended
_RETURN_S = 60.0  # for a lost stage on another machine to listen again


@dataclass(frozen=True)
class Opening:
    """Settings that open the stages: a part for each stage, and the sizes that all have in common."""

    parts: tuple[Mapping[str, Any], ...]
    limits: StepLimits
    width: int
    n_pools: int


def open_pipeline(source: StageSource) -> Pipeline:
    """Return the connected stages. Raises ConfigError if one cannot be reached."""
    try:
        return Pipeline(source)
    except StageError as error:
        raise ConfigError(str(error)) from None


class Pipeline:
    """The stages before the last, in order.

    After a StageError it has no connections; the next call of `broadcast` starts over, with empty caches.

    Attributes: source; rooms, of each stage.
    """

    def __init__(self, source: StageSource) -> None:
        """Connects. Raises StageError, ConfigError on a stage of another version."""
        self.source = source
        self._found: list[tuple[Address, bytes]] = []
        self._stages: list[Connection] = []
        self._inbox: Inbox | None = None
        self._opening: Opening | None = None
        self._loss: StageError | None = None  # an error that has not been reported yet
        self.rooms = self._connect()

    def __len__(self) -> int:
        """The number of stages."""
        return len(self.source)

    def open(self, opening: Opening) -> None:
        """Have the stages load their layers. `wait` waits until they have."""
        self._opening = opening
        try:
            self._send_opening(opening)
        except StageError as error:
            self.close()
            raise ConfigError(str(error)) from None

    def wait(self) -> list[dict[str, Any]]:
        """Wait until all stages are open, and return the facts of each. Raises ConfigError if one fails."""
        try:
            return self._wait()
        except StageError as error:
            raise ConfigError(str(self._end(error))) from None

    def broadcast(self, kind: Kind, *parts: bytes) -> None:
        """Sends a message to all stages. Raises StageError if one is lost, or none can be had again."""
        self._raise_loss()
        try:
            if self._inbox is None:
                self._begin_again()
            for stage in self._stages:
                stage.send(kind, *parts, inbox=self._inbox)
        except StageError as error:
            raise self._end(error) from None

    def change(self, kind: Kind, *parts: bytes) -> None:
        """Sends all stages a change to the caches. A loss is raised with the next step, not here."""
        if self._inbox is not None:
            try:
                self.broadcast(kind, *parts)
            except StageError as error:
                self._loss = error

    def activations(self) -> tuple[FloatArray, float]:
        """The activations [T, D] of the oldest step that was not asked for, and the seconds that the stages
        computed. Waits for them.
        """
        self._raise_loss()
        try:
            if self._inbox is None:
                raise StageError("a stage was lost")
            return rows_from_bytes(self._inbox.next())
        except StageError as error:
            raise self._end(error) from None

    def _raise_loss(self) -> None:
        """Raises a loss that has not been raised yet."""
        if self._loss is not None:
            loss, self._loss = self._loss, None
            raise loss

    def _end(self, error: StageError) -> StageError:
        """Close the connections, and return the error of the stage that seems to have failed first."""
        if isinstance(error, LostError):  # stages in a row lose one another
            error = self._cause(error)
        self.close()
        return error

    def _cause(self, error: StageError) -> StageError:
        """The first stage's own error, if there is one, else the first loss of a stage in their order."""
        losses: list[StageError] = []
        for stage in self._stages:
            try:
                while ready([stage], _CAUSE_S):
                    stage.receive()
            except LostError as loss:
                losses.append(loss)
            except (StageError, ValueError) as own:  # ValueError: it is closed
                if isinstance(own, StageError):
                    return own
        return [*losses, error][0]

    def close(self) -> None:
        """Ends the connections."""
        self._inbox = None
        for stage in self._stages:
            stage.close()
        self._stages = []
        self.source.end()

    def _connect(self) -> list[StageRoom]:
        """Connect to all stages, and return the resources of each."""
        try:
            self._found = self.source.start()
            rooms = []
            for i, (address, token) in enumerate(self._found):
                name = f"stage {i + 1} of {len(self) + 1}"
                stage = connect(address.host, address.port, token, "engine", name, _CONNECT_S)
                self._stages.append(stage)
                facts = from_text(stage.expect(Kind.FACTS))
                if facts.get("code") != code_digest().hex():
                    raise ConfigError(f"{name} must run the same version of kukri")
                rooms.append(
                    StageRoom(int(facts["free_bytes"]), float(facts["speed"]), str(facts["machine"]))
                )
        except BaseException:
            self.close()
            raise
        return rooms

    def _send_opening(self, opening: Opening) -> None:
        for i, (stage, part) in enumerate(zip(self._stages, opening.parts, strict=True)):
            following: dict[str, Any] | None = None
            if i + 1 < len(self._found):
                address, token = self._found[i + 1]
                following = {"host": address.host, "port": address.port}
                following["token"] = None if self.source.is_remote else token.decode()  # None: it has its own
            stage.send(Kind.OPEN, to_text({**part, "next": following, "has_previous": i > 0}))

    def _wait(self) -> list[dict[str, Any]]:
        assert self._opening is not None, "call open() first"
        facts: dict[Connection, dict[str, Any]] = {}
        while waiting := [stage for stage in self._stages if stage not in facts]:
            for stage in ready(waiting, None):  # not in their order: one may fail while another still loads
                facts[stage] = from_text(stage.expect(Kind.READY))
        opening = self._opening
        for stage in self._stages:
            stage.bounds = step_bounds(opening.limits, opening.width, opening.n_pools)
        self._inbox = Inbox(self._stages[-1])
        return [facts[stage] for stage in self._stages]

    def _begin_again(self) -> None:
        """Starts lost processes, connects and opens as before. Raises StageError if that fails."""
        if self._opening is None:
            raise StageError("the stages are closed")
        logger.warning("a stage was lost, so the stages are started again")
        give_up_s = monotonic() + (_RETURN_S if self.source.is_remote else 0.0)
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
