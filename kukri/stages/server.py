"""A process that computes some layers of a model for an engine elsewhere: `kukri stage`."""

from __future__ import annotations

import logging
import platform
import socket
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, NamedTuple

from kukri.dataclass import dataclass
from kukri.engine.model_identity import code_digest
from kukri.errors import ConfigError, KukriError, StageError
from kukri.host.hardware import available_bytes
from kukri.kernels.arrays import FloatArray
from kukri.kernels.backend import Backend, CompiledProgram
from kukri.kernels.step import StepLimits
from kukri.models import Model
from kukri.stages.connection import Connection, LostError
from kukri.stages.greeting import Door, connect
from kukri.stages.messages import (
    Kind,
    from_text,
    rows_from_bytes,
    rows_to_bytes,
    step_bounds,
    step_from_bytes,
    to_text,
)
from kukri.stages.stage import Stage

logger = logging.getLogger("kukri.stages")

_NEIGHBOUR_S = 60.0  # for the previous and the next stage to connect


@dataclass(frozen=True)
class StageOptions:
    """Settings that a stage decides for itself; None leaves it to the engine.

    `speed` is the speed that it reports, in bytes of weights a second.
    """

    device: str | None = None
    n_threads: int | None = None
    speed: float = 1.0


class StageModel(NamedTuple):
    """A model of which a stage computes some layers. `identity` is the hash of its weights."""

    model: Model
    backend: Backend
    identity: str


# Reads the model by the engine's options, some of which the stage decides for itself. Raises KukriError.
ReadModel = Callable[[Mapping[str, Any], StageOptions], StageModel]


def serve_stage(
    listener: socket.socket, token: bytes, own: StageOptions, read: ReadModel, *, once: bool = False
) -> None:
    """Serves engines, one after another; with `once` only the first."""
    door = Door(listener, token)
    while True:
        engine = door.accept("engine", "the engine")
        try:
            _serve(engine, door, token, own, read)
        except StageError as error:  # the engine has ended, another stage has, or this one has failed
            logger.info("%s", error)
        finally:
            engine.close()
        if once:
            return


def _serve(engine: Connection, door: Door, token: bytes, own: StageOptions, read: ReadModel) -> None:
    """Serves an engine until it hangs up or something fails, which the engine is told; raises StageError."""
    neighbours = _Neighbours(engine)
    try:
        facts = {"code": code_digest().hex(), "free_bytes": available_bytes(), "speed": own.speed}
        facts["machine"] = platform.node()
        engine.send(Kind.FACTS, to_text(facts))
        opened = from_text(engine.expect(Kind.OPEN))
        neighbours.meet(opened, door, token)
        stage = OpenStage(opened, own, read)
        bounds = step_bounds(stage.limits, stage.width, stage.n_pools)
        engine.bounds = neighbours.before.bounds = bounds
        engine.send(Kind.READY, to_text(stage.facts))
        _run(stage, engine, neighbours)
    except Exception as error:  # whatever it is, the next engine is served
        if not isinstance(error, KukriError):
            logger.exception("the stage failed")
        text = str(error) if isinstance(error, KukriError) else f"{type(error).__name__}: {error}"
        engine.send(Kind.LOST if isinstance(error, LostError) else Kind.ERROR, text.encode())
        raise StageError(text) from error
    finally:
        neighbours.close()


class _Neighbours:
    """The connections that activations come from and go to; the engine's for the ends."""

    def __init__(self, engine: Connection) -> None:
        self._engine = self.before = self.following = engine
        self._own: list[Connection] = []

    def meet(self, opened: dict[str, Any], door: Door, token: bytes) -> None:
        """Connects to the next stage, and waits for the one before. Raises StageError."""
        if (following := opened.get("next")) is not None:  # first, as the next stage waits for it
            host, port, key = following["host"], int(following["port"]), following["token"]
            key = token if key is None else key.encode()
            self.following = connect(host, port, key, "stage", "the next stage", _NEIGHBOUR_S)
            self._own.append(self.following)
        if opened.get("has_previous"):
            self.before = door.accept(
                "stage", "the previous stage", engine=self._engine, timeout_s=_NEIGHBOUR_S
            )
            self._own.append(self.before)

    def close(self) -> None:
        """Ends them."""
        for connection in self._own:
            connection.close()


class OpenStage:
    """The layers of a model that an engine wants, loaded. Raises KukriError on anything that does not fit."""

    def __init__(self, opened: dict[str, Any], own: StageOptions, read: ReadModel) -> None:
        try:
            start, stop = map(int, opened["layers"])
            self.limits = StepLimits(*map(int, opened["limits"]))
            n_pages, n_states = [*map(int, opened["n_pages"])], int(opened["n_states"])
            kv_type, options = opened["kv_type"], opened["options"]
        except (KeyError, TypeError, ValueError) as error:
            raise StageError(f"the engine's message is incomplete: {error}") from None
        model, backend, identity = read(options, own)
        config = model.config
        if not 0 <= start < stop <= config.n_layers or min(vars(self.limits).values()) < 0:
            raise ConfigError(f"layers must be from 0 to {config.n_layers}, not {start} to {stop}")
        stage = Stage(model, backend, range(start, stop), n_pages, n_states, kv_type)
        self._is_first, self.width = start == 0, config.d_model
        self._program: CompiledProgram = stage.compile(model, self.limits)
        self.change, self.n_pools = stage.change, len(n_pages)
        self.facts = {"identity": identity, "arithmetic": backend.arithmetic}

    def run(self, step: memoryview, activations: FloatArray | None) -> FloatArray:
        """A step's activations [T, D] after these layers."""
        return self._program(step_from_bytes(step, self.limits, self._program.inputs, activations)).numpy()

    @property
    def is_first(self) -> bool:
        """True if it begins with the embedding, and takes no activations."""
        return self._is_first


def _run(stage: OpenStage, engine: Connection, neighbours: _Neighbours) -> None:
    while True:
        kind, body = engine.receive()
        if kind is Kind.STEP:
            x, computed_s = None, 0.0
            if not stage.is_first:
                x, computed_s = rows_from_bytes(neighbours.before.expect(Kind.ACTIVATIONS))
            started_s = perf_counter()
            rows = stage.run(body, x)
            computed_s += perf_counter() - started_s
            neighbours.following.send(Kind.ACTIVATIONS, *rows_to_bytes(rows, computed_s))
        elif kind is Kind.ACTIVATIONS:
            raise StageError(f"the engine sent {kind.name}")
        else:
            stage.change(kind, body)
