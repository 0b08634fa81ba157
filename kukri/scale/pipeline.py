"""Stages of a model that Ray places on machines, and places again if one is lost.

Each stage is an actor that listens as `kukri stage` does: activations go over TCP from stage to stage, and
Ray carries none. A placement group keeps memory and processors for them, on as many machines as there are.
"""

from __future__ import annotations

import logging
import os
import threading
from secrets import token_hex
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kukri.dataclass import dataclass
from kukri.errors import ConfigError, StageError
from kukri.kernels.cpu.compile.features import usable_cores
from kukri.kernels.cpu.run.read_speed import measure_read_speed
from kukri.opening.stage_model import read_stage_model
from kukri.stages.greeting import listen
from kukri.stages.pipeline import SPEED_TEST
from kukri.stages.processes import Address
from kukri.stages.server import StageOptions, serve_stage

log = logging.getLogger("kukri.scale")
_PLACE_S = 60.0  # for Ray to find room
_START_S = 60.0  # for a stage to start, elsewhere if its machine is lost
_PROCESS_BYTES = 300 << 20  # memory of a stage besides weights and cache
_OWN_CPUS = 0.001  # CPUs reserved for the engine in the placement group
_OBJECT_STORE_BYTES = 100 << 20  # for a Ray started here, through which nothing large goes


@dataclass(frozen=True)
class RayStages:
    """A model in `n_stages` stages, the last one in the process that opens it: for `LLM(stages=...)`.

    Each has as many of Ray's processors as threads; unless their number is given, the stages on a machine
    share its processors.
    """

    n_stages: int

    def place(self, n_bytes: int, n_threads: int | None) -> PlacedStages:
        """See StagePlacer.place."""
        _join()
        return PlacedStages(self.n_stages - 1, n_bytes, n_threads or _threads_each(self.n_stages))


class PlacedStages:
    """Stages that run: see StageSource."""

    is_remote = True

    def __init__(self, n: int, n_bytes: int, n_threads: int) -> None:
        """Place `n` stages, each of `n_bytes` and `n_threads`. Raises ConfigError if they find no room."""
        self._n, self._token = n, token_hex(32).encode()
        resources = {"CPU": float(n_threads), "memory": float(n_bytes + _PROCESS_BYTES)}
        own_machine = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        self._group = placement_group(
            [{"CPU": _OWN_CPUS}, *[resources] * n],  # the first for this process: others are put elsewhere
            strategy="SPREAD",
            bundle_label_selector=[own_machine, *[{}] * n],
        )
        if not self._group.wait(_PLACE_S):
            self.close()
            raise ConfigError(
                f"{n} stages of {n_threads} processors and {resources['memory'] / 2**30:.2f} GiB cannot "
                f"fit next to this process on {_machines()}: add machines or stages, or lower the threads"
            )
        self._actors = [self._placed(i + 1, resources, n_threads) for i in range(n)]

    def _placed(self, bundle: int, resources: dict[str, float], n_threads: int) -> Any:
        options = {
            "num_cpus": resources["CPU"],
            "memory": resources["memory"],
            "max_restarts": -1,
            "max_task_retries": -1,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, bundle),
        }
        return ray.remote(StageActor).options(**options).remote(self._token, n_threads)

    def __len__(self) -> int:
        """See StageSource."""
        return self._n

    def start(self) -> list[tuple[Address, bytes]]:
        """See StageSource.start: Ray starts lost actors by itself; this waits until all listen."""
        try:
            addresses = ray.get([actor.address.remote() for actor in self._actors], timeout=_START_S)
        except RayError as error:
            raise StageError(f"Ray has not started a stage again within {_START_S:g} s: {error}") from None
        return [(address, self._token) for address in addresses]

    def end(self) -> None:
        """See StageSource.end: they wait for the engine's next connection."""

    def close(self) -> None:
        """See StageSource.close."""
        if ray.is_initialized():
            remove_placement_group(self._group)


class StageActor:
    """A stage as Ray runs it: its process serves engines that know the token, one after another."""

    def __init__(self, token: bytes, n_threads: int) -> None:
        self._listener = listen(ray.util.get_node_ip_address(), 0)
        own = StageOptions(None, n_threads, measure_read_speed(n_threads, *SPEED_TEST))
        threading.Thread(target=self._serve, args=(token, own), daemon=True).start()

    def address(self) -> Address:
        """The address that it listens on."""
        host, port = self._listener.getsockname()[:2]
        return Address(host, port)

    def _serve(self, token: bytes, own: StageOptions) -> None:
        try:
            serve_stage(self._listener, token, own, read_stage_model)
        except BaseException:
            log.critical("the stage stopped", exc_info=True)
            os._exit(1)  # Ray starts another


def _join() -> None:
    """Joins the cluster that this machine belongs to, else starts a Ray of our own. Raises ConfigError."""
    if ray.is_initialized():
        return
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        ray.init(address="auto", **quiet)
    except ConnectionError:
        own = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
        try:
            ray.init(address="local", num_cpus=usable_cores(), **own, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"Ray cannot start on this machine: {error}") from None


def _cpus() -> list[int]:
    """The processors of each machine that has any."""
    found = (int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"])
    return [n for n in found if n]


def _threads_each(n_stages: int) -> int:
    """Return the threads of a stage: the smallest machine's threads, shared by the stages on it."""
    cpus = _cpus()
    n_together = -(-n_stages // max(len(cpus), 1))
    return max(min(cpus, default=1) // n_together, 1)


def _machines() -> str:
    cpus = _cpus()
    return f"{len(cpus)} machine{'s' * (len(cpus) != 1)} with {', '.join(map(str, cpus))} processors"
