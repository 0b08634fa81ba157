"""Replicas on Ray Serve, and the server in front of them.

Serve starts the replicas, watches them, replaces those that die, adds and removes some as the load changes,
and rolls out new versions. Requests and tokens do not go through it: a front has a channel to each replica
(`channel.py`), as an item through a Serve handle takes milliseconds and a message over TCP microseconds.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from math import ceil
from typing import Any

import ray
import yaml
from fastapi import FastAPI
from ray import serve

from kukri.dataclass import dataclass, fields
from kukri.engine.traces import open_traces
from kukri.errors import ConfigError
from kukri.llm import LLM
from kukri.opening.model_options import ModelOptions
from kukri.scale.facts import ReplicaFacts
from kukri.scale.front import Invite, ReplicaLoop
from kukri.scale.front_model import RemoteModel
from kukri.scale.replica import EngineReplica
from kukri.server.app import create_app
from kukri.server.models.warm_up import warm_up
from kukri.server.settings import ServerSettings, default_name

_REPLICA = "KukriReplica"
_CALL_S = 10.0  # time limit of a call to all replicas
_FULL = 0.9  # share of KV pages in use above which a replica counts as busy
_SLACK_S = 10.0  # for a drained replica to end


@dataclass(frozen=True)
class ReplicaOptions:
    """Number of replicas that Serve runs, and the nodes they run on.

    With `max_replicas` their number follows the load, from `n_replicas` (0: none without requests) on:
    as many as keep each at `target_requests` requests that run or wait, and its KV pages from filling up.
    There are fewer once fewer have been enough for `spare_s`.
    """

    n_replicas: int = 1
    max_replicas: int | None = None
    target_requests: int | None = None  # None: three quarters of `max_requests` of a replica
    cpus: float | None = None  # reserved by Ray for each replica; None: its threads, or a machine's
    gpus: float = 0
    drain_s: float = 60.0  # for running requests of a replica that is removed
    spare_s: float = 120.0  # seconds
    one_per_machine: bool = False
    traces: str | None = None  # URL of an OTLP collector; None: of a replica's environment, if it names one

    def __post_init__(self) -> None:
        """Raises ConfigError on numbers out of range."""
        if self.n_replicas < (0 if self.max_replicas else 1):
            raise ConfigError(f"'replicas' must be at least 1, not {self.n_replicas}")
        if self.max_replicas is not None and self.max_replicas < max(self.n_replicas, 1):
            raise ConfigError(f"'max_replicas' must be at least {self.n_replicas}, not {self.max_replicas}")


class ReplicaActor:
    """An `EngineReplica` as Ray Serve runs it."""

    def __init__(self, options: ModelOptions, drain_s: float, traces: str | None) -> None:
        llm = LLM(**vars(options))
        warm_up(llm)
        context = serve.get_replica_context()
        name = context.replica_id.unique_id
        self._replica, self._drain_s = EngineReplica(llm, name, open_traces(traces)), drain_s
        self._is_started = False

    async def connect(self, host: str, port: int, secret: str) -> None:
        """Serves the front that listens there."""
        self._start()
        await self._replica.connect(host, port, secret)

    async def facts(self) -> ReplicaFacts:
        """The facts that a front must know."""
        self._start()
        return self._replica.facts

    async def wake(self) -> None:
        """Does nothing: a call that waits for a replica makes Serve start one."""

    def check_health(self) -> None:
        """Raises RuntimeError if the engine has ended or is stuck: Serve then replaces the replica."""
        if not self._replica.is_well:
            raise RuntimeError("the engine has ended, or is stuck in a step")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The load that `wanted_replicas` looks at."""
        replica = self._replica
        return {
            "n_ongoing": replica.n_ongoing,
            "n_held_back": replica.n_held_back,
            "kv_share": replica.kv_share,
        }

    async def __del__(self) -> None:
        """Called by Serve before it ends the process: lets running requests finish."""
        with suppress(Exception):
            await self._replica.drain(self._drain_s)
            await self._replica.close()

    def _start(self) -> None:
        if not self._is_started:
            self._is_started = True
            self._replica.start()


class LoadPolicy:
    """Serve's autoscaling policy: as many replicas as the requests need, more if their KV pages run out."""

    def __init__(self, target_requests: int) -> None:
        """`target_requests` run or wait on a replica."""
        self._target = target_requests

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """(the number of replicas, no state) for Serve's AutoscalingContext."""
        raw = context.raw_metrics or {}

        def latest(name: str) -> list[float]:
            series = (list(one) for one in raw.get(name, {}).values())
            return [float(one[-1].value) for one in series if one]

        n_requests = sum(latest("n_ongoing")) + max(latest("n_held_back"), default=0.0)
        if not context.current_num_replicas:  # calls of `wake` wait for a replica
            n_requests = max(n_requests, context.total_num_requests)
        wanted = ceil(n_requests / self._target)
        shares = latest("kv_share")
        if len(shares) < len(context.running_replicas):  # some are new: how busy they are is not known yet
            wanted = max(wanted, context.current_num_replicas)
        if shares and sum(shares) / len(shares) > _FULL:
            wanted = max(wanted, context.current_num_replicas + 1)
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(low, min(wanted, high)), {}


def replicas(options: ModelOptions, how: ReplicaOptions) -> Any:
    """The Serve application of the replicas alone."""
    settings: dict[str, Any] = {
        "name": _REPLICA,
        "max_ongoing_requests": 1 << 16,  # a front holds back what a replica has no room for
        "health_check_period_s": 5.0,
        "health_check_timeout_s": 30.0,
        "graceful_shutdown_timeout_s": how.drain_s + _SLACK_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "logging_config": {"enable_access_log": False},  # fronts call every second
        "ray_actor_options": {"num_cpus": _cpus(options, how), "num_gpus": how.gpus},
    }
    if how.one_per_machine:
        settings["max_replicas_per_node"] = 1
    if how.max_replicas is None:
        settings["num_replicas"] = how.n_replicas
    else:
        target = how.target_requests or max(3 * (options.max_requests or 16) // 4, 1)
        policy = {
            "policy_function": LoadPolicy,
            "policy_kwargs": {"target_requests": target},
        }
        settings["autoscaling_config"] = {
            "min_replicas": how.n_replicas,
            "max_replicas": how.max_replicas,
            "upscale_delay_s": 5.0,
            "downscale_delay_s": how.spare_s,
            "policy": policy,
        }
    return serve.deployment(ReplicaActor).options(**settings).bind(options, how.drain_s, how.traces)


def server(
    handle: Any, facts: ReplicaFacts, options: ModelOptions, settings: ServerSettings, host: str
) -> FastAPI:
    """The ASGI application in front of the replicas of a Serve handle; it listens for them on `host`.

    Raises KukriError if the model's files here differ from the replicas' files.
    """
    model = RemoteModel(options, facts)
    make_loop = partial(ReplicaLoop, model_identity=model.identity, invite=inviting(handle), host=host)
    return create_app(model, settings, make_loop=make_loop)


def inviting(handle: Any) -> Invite:
    """The function by which a front has the replicas of a Serve handle connect to it."""
    waking: set[asyncio.Task[Any]] = set()

    async def wake() -> None:
        with suppress(Exception):  # it is called again
            await handle.wake.remote()

    async def invite(host: str, port: int, secret: str, n_waiting: int) -> None:
        response = handle.broadcast("connect", host, port, secret)
        with suppress(Exception):  # from replicas that have just gone; the others were told
            await response.results_async(timeout_s=_CALL_S)
        if n_waiting and not waking:
            task = asyncio.get_running_loop().create_task(wake())
            waking.add(task)
            task.add_done_callback(waking.discard)

    return invite


async def facts_of(handle: Any) -> ReplicaFacts:
    """The facts of a replica, as soon as there is one."""
    found: ReplicaFacts = await handle.facts.remote()
    return found


class FrontActor:
    """The server as a deployment of Ray Serve, behind Serve's own proxy: of `build`."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, handle: Any, options: ModelOptions, settings: ServerSettings
    ) -> None:
        facts, host = await facts_of(handle), ray.util.get_node_ip_address()
        self._app = await asyncio.to_thread(server, handle, facts, options, settings, host)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The application that Serve runs."""
        return self._app


def build(
    options: ModelOptions | dict[str, Any],
    how: ReplicaOptions | None = None,
    settings: ServerSettings | None = None,
) -> Any:
    """The Serve application for `serve run`, `serve deploy` and KubeRay: a server in front of replicas.

    `options` may be a dictionary of fields of ModelOptions and ReplicaOptions, and of `api_keys` with commas
    between, as `serve run kukri.scale.serve:build model=... n_replicas=2` and a Serve configuration give it.
    """
    if isinstance(options, dict):
        options, how, settings = from_arguments(options)
    how = how or ReplicaOptions()
    front = serve.deployment(serve.ingress()(FrontActor)).options(
        name="KukriFront",
        num_replicas=1,  # one queue and one set of counts for all clients
        max_ongoing_requests=1 << 12,
        ray_actor_options={"num_cpus": 0.5},
        graceful_shutdown_timeout_s=how.drain_s + _SLACK_S,
    )
    names = (default_name(options.model),)
    return front.bind(replicas(options, how), options, settings or ServerSettings(names))


def from_arguments(given: dict[str, Any]) -> tuple[ModelOptions, ReplicaOptions, ServerSettings]:
    """The options in a dictionary, whose numbers may be texts. Raises ConfigError for unknown ones."""
    parts: dict[type, dict[str, Any]] = {ModelOptions: {}, ReplicaOptions: {}}
    keys = tuple(key.strip() for key in str(given.get("api_keys", "")).split(",") if key.strip())
    for name, value in given.items():
        owner = next((part for part in parts if name in {one.name for one in fields(part)}), None)
        if owner is not None:
            is_number = owner is ReplicaOptions and isinstance(value, str) and name != "traces"
            parts[owner][name] = yaml.safe_load(value) if is_number else value
        elif name != "api_keys":
            raise ConfigError(f"{name!r} is not supported")
    options, how = ModelOptions(**parts[ModelOptions]), ReplicaOptions(**parts[ReplicaOptions])
    names = (default_name(options.model),)
    return options, how, ServerSettings(names, api_keys=keys, traces=how.traces)


def _cpus(options: ModelOptions, how: ReplicaOptions) -> float:
    """Return the processors that Ray reserves for a replica: by default its threads, or a machine's."""
    if how.cpus is not None:
        return how.cpus
    if options.n_threads is not None:
        return options.n_threads
    machines = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    return min((n for n in machines if n), default=1)
