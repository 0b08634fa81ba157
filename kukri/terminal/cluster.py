"""`kukri cluster`: a model served by replicas on Ray, and their state."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

from kukri.dataclass import dataclass
from kukri.errors import ConfigError, KukriError, UnsupportedError
from kukri.host.installed import needs_package
from kukri.terminal.options import ClusterOptions
from kukri.terminal.output import say
from kukri.terminal.serve_options import ServeOptions

if TYPE_CHECKING:
    from kukri.opening.model_options import ModelOptions
    from kukri.scale.facts import ReplicaFacts
    from kukri.scale.serve import ReplicaOptions

_OBJECT_STORE_BYTES = 100 << 20  # for a Ray started here, through which nothing large goes
_ONE_MODEL = (
    "config",
    "preset",
    "model_dir",
    "pin",
    "memory_bytes",
    "idle_unload_s",
    "manages_models",
    "adapter_dir",
)


def serve_cluster(
    model: str | None, options: ClusterOptions, serving: ServeOptions, loading: dict[str, Any]
) -> None:
    """Serves a model by replicas until SIGTERM or SIGINT; `loading` are options of LLM for each."""
    from kukri.terminal.serve import announce, require_web_stack, run_app, server_settings, socket_of

    require_web_stack("kukri cluster serve")
    require_ray("kukri cluster serve")
    from kukri.opening.model_options import ModelOptions
    from kukri.opening.option_fields import flag_of
    from kukri.server.logs import configure_logs
    from kukri.server.settings import default_name, setting_fields

    given = next((name for name in _ONE_MODEL if getattr(serving, name)), None)
    if given is not None:
        flag = flag_of(setting_fields()[given]) if given in setting_fields() else f"--{given}"
        raise ConfigError(
            f"{flag} is not supported with replicas, which serve one model from the start: use `kukri serve`"
        )
    names = tuple(dict.fromkeys([*(serving.alias or []), default_name(model)]))
    settings = server_settings(serving, loading.get("kv_bytes"), names)
    configure_logs(as_json=serving.log_json, level=serving.log_level)
    name = re.sub(r"[^\w.-]", "-", names[-1])
    with (
        socket_of(serving) as bound,
        replicas_on_ray(
            ModelOptions(model=model, **loading),
            options,
            settings.drain_s,
            f"kukri-serve-{name}-{bound.getsockname()[1]}",
            settings.traces,
        ) as cluster,
    ):
        from kukri.scale.serve import server

        app = server(cluster.handle, cluster.facts, cluster.options, settings, cluster.host)
        announce(names, settings, bound)
        where = f"on {cluster.n_machines} machine{'s' * (cluster.n_machines > 1)}"
        say(f"{options.n_replicas} replicas {where}")
        run_app(app, settings, bound)


@dataclass(frozen=True)
class Cluster:
    """Replicas that run. `host` is this machine's address among them."""

    handle: Any
    facts: ReplicaFacts
    options: ModelOptions
    host: str
    n_machines: int


@contextmanager
def replicas_on_ray(
    options: ModelOptions,
    wanted: ClusterOptions,
    drain_s: float,
    application: str,
    traces: str | None = None,
) -> Iterator[Cluster]:
    """Replicas of a model on Ray, within the `with` block; a Ray of our own ends with it.

    `application` is their name in Ray Serve. Replicas that a run of this name left behind are taken over.
    """
    from dataclasses import replace

    from kukri.kernels.cpu.compile.features import usable_cores

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # for our own Ray: 15 lets all else go first
    import logging

    import ray
    from ray import serve

    from kukri.scale.serve import ReplicaOptions, replicas

    is_own = wanted.address is None
    most = max(wanted.n_replicas, wanted.max_replicas or 1)
    if is_own and options.n_threads is None and wanted.cpus is None:
        options = replace(options, n_threads=max(usable_cores() // most, 1))
    how = ReplicaOptions(
        n_replicas=wanted.n_replicas,
        max_replicas=wanted.max_replicas,
        cpus=wanted.cpus,
        gpus=wanted.gpus,
        drain_s=drain_s,
        spare_s=wanted.spare_s,
        traces=traces,
    )
    own = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES, "num_cpus": usable_cores()}
    with redirect_stdout(sys.stderr):  # Ray reports there on its processes
        try:
            ray.init(
                address=wanted.address or "local",
                logging_level=logging.ERROR,
                log_to_driver=False,
                **(own if is_own else {}),
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"Ray cannot be used at {wanted.address or 'this machine'}: {error}") from None
        try:
            deployment = replicas(options, how)
            _check_room(how, deployment)
            serve.start(proxy_location="Disabled")
            try:
                handle = serve.run(deployment, name=application, route_prefix=None)
            except RuntimeError as error:
                raise KukriError(_start_problem(application) or str(error)) from None
            facts = handle.facts.remote().result()
            host = "127.0.0.1" if is_own else ray.util.get_node_ip_address()
            yield Cluster(handle, facts, options, host, sum(node["Alive"] for node in ray.nodes()))
        finally:
            if not is_own:
                serve.delete(application)
            ray.shutdown()


def _start_problem(application: str) -> str | None:
    """The last error of replicas that did not start; None if Serve knows of none."""
    from ray import serve

    found = serve.status().applications.get(application)
    messages = [one.message for one in found.deployments.values()] if found is not None else []
    lines = [line for message in messages for line in message.splitlines() if line.strip()]
    return f"the replicas do not start: {lines[-1].strip()}" if lines else None


def _check_room(how: ReplicaOptions, deployment: Any) -> None:
    """Raises ConfigError if Ray's machines have too few processors for the replicas."""
    import ray

    cpus = deployment._bound_deployment.ray_actor_options["num_cpus"]
    machines = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    n_fit = sum(int(n // cpus) for n in machines) if cpus else how.n_replicas
    if n_fit < how.n_replicas:
        raise ConfigError(
            f"{how.n_replicas} replicas of {cpus:g} processors cannot fit on machines with "
            f"{', '.join(f'{n:g}' for n in machines)}: lower --threads or --cpus, or add machines"
        )


def require_ray(command: str) -> None:
    """Raises UnsupportedError, with the remedy, if Ray is not installed."""
    try:
        import ray  # noqa: F401
        from ray import serve  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(needs_package(command, error.name, "serve", "ray")) from None


_SAMPLE = re.compile(r'^kukri_(\w+)\{model="[^"]*",replica="([^"]*)"\} (\S+)$')


def show_cluster(url: str, api_key: str | None, *, as_json: bool) -> None:
    """Prints a line for each replica of a server: its requests, KV pages and tokens."""
    from kukri.terminal.ps import fetched
    from kukri.terminal.tables import print_table

    text = fetched(url.rstrip("/").removesuffix("/v1"), "/metrics", api_key).decode()
    found: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if (match := _SAMPLE.match(line)) is not None:
            found.setdefault(match[2], {})[match[1]] = float(match[3])
    if as_json:
        print(json.dumps(found))
        return
    if not found:
        print("this server has no replicas: start one with `kukri cluster serve`")
        return
    rows = [
        (
            name,
            f"{counts['running_requests']:.0f}",
            f"{counts['waiting_requests']:.0f}",
            f"{counts['kv_pages_held'] / counts['kv_pages']:.0%}",
            f"{counts['generated_tokens_total']:,.0f}",
            f"{counts['prefix_hit_tokens_total']:,.0f}",
        )
        for name, counts in sorted(found.items())
    ]
    print_table("replicas", ["name", "running", "waiting", "KV used", "tokens", "from cache"], rows)
