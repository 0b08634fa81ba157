"""The settings of a server: models, access, limits, each declared once (`kukri.opening.option_fields`).

The command line reads this at each start: what only checks need is imported where it is needed.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kukri.dataclass import Field, dataclass, fields
from kukri.opening.model_options import ModelOptions
from kukri.opening.option_fields import (
    as_file,
    as_integer,
    as_names,
    as_size,
    as_switch,
    as_text,
    as_time,
    at_least_one,
    declared,
    describe,
    flag_of,
    read_fields,
)
from kukri.opening.option_fields import (
    duration_s as duration_s,
)

if TYPE_CHECKING:
    from kukri.server.preset import Preset

_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+")


def default_name(model: str | None) -> str:
    """The name under which a model is served: a known name as it is, a path without its directories.

    The digest that pins it is no part of it.
    """
    if model is None:
        from kukri.formats.hub import DEFAULT_MODEL

        return DEFAULT_MODEL
    from kukri.formats.digests import split_digest

    model, _ = split_digest(model)
    path = Path(model)
    is_file = path.suffix == ".gguf" or path.exists()
    return (path.stem if path.suffix == ".gguf" else path.resolve().name) if is_file else model


@dataclass(frozen=True)
class ModelSpec:
    """A model that a server loads when it is needed.

    `names` are those that requests may use; the first is the one that answers carry. A pinned model is loaded
    at the start and stays. `keep_alive_s` is the idle time after which the model is unloaded, instead of the
    server's `idle_unload_s`.
    """

    names: tuple[str, ...]
    options: ModelOptions
    is_pinned: bool = False
    keep_alive_s: float | None = None
    presets: tuple["Preset", ...] = ()  # whose names are among `names`


def _as_keys(value: Any) -> tuple[str, ...]:
    from kukri.server.keys import KeyRing

    KeyRing(value)
    return tuple(value)


def _as_networks(value: Any) -> tuple[str, ...]:
    from ipaddress import ip_network

    for one in as_names(value):
        try:
            ip_network(one)
        except ValueError:
            raise ValueError("addresses or networks") from None
    return as_names(value)


def _as_collector(value: Any) -> str:
    from kukri.engine.traces import collector_url

    collector_url(as_text(value))
    return as_text(value)


def _as_prefix(value: Any) -> str:
    prefix = as_text(value).rstrip("/")
    if prefix and (not _PREFIX.fullmatch(prefix) or prefix.split("/")[1] in ("v1", "api", "ui")):
        raise ValueError("a path such as /kukri, and must not begin with /v1, /api or /ui")
    return prefix


def _flag(
    read: Callable[[Any], Any], help: str, flag: str, metavar: str | None, default: Any, **facts: Any
) -> Any:
    """A setting with a flag, by default named like it; its help ends with its default."""
    shown = f"{default >> 20}MiB" if metavar == "SIZE" and default else f"{default:g}" if default else ""
    text = f"{help} [default: {shown}]" if shown else help
    return declared(read, text, "server", default=default, flag=flag, metavar=metavar, **facts)


def _switch(help: str, flag: str) -> Any:
    return _flag(as_switch, help, flag, None, False)


def _count(help: str, default: int | None = None) -> Any:
    return _flag(at_least_one(as_integer), help, "", "N", default)


def _size(help: str, flag: str, default: int | None = None) -> Any:
    return _flag(at_least_one(as_size), help, flag, "SIZE", default)


def _time(help: str, flag: str, default: float | None = None) -> Any:
    return _flag(as_time, help, flag, "TIME", default)


def _path(help: str, metavar: str = "FILE") -> Any:
    return _flag(as_file, help, "", metavar, None)


def _list(help: str, flag: str, metavar: str, read: Callable[[Any], Any] = as_names) -> Any:
    return declared(read, help, "server", default=(), flag=flag, metavar=metavar, repeats=True)


@dataclass(frozen=True, eq=False)
class ServerSettings:
    """Names, keys and limits of a server. Sizes in bytes, times in seconds."""

    model_names: tuple[str, ...] = declared(
        as_names, "Names of a model that is already open; answers carry the first.", default=()
    )
    api_keys: tuple[str, ...] = declared(
        _as_keys,
        "API keys, as `KeyRing` reads them; empty if no key is required.",
        default=(),
        is_shown=False,
    )
    headers_s: float = declared(as_time, "Time to receive a request's headers.", default=10.0)
    read_s: float = declared(as_time, "Time to receive a request's body.", default=30.0)
    keep_alive_s: float = declared(
        as_time, "Seconds without output before a stream sends a keep-alive comment.", default=15.0
    )
    kv_bytes: int | None = declared(
        at_least_one(as_size), "Memory for the KV caches of all models; None for half of `memory_bytes`."
    )
    ssl_certfile: Path | None = _path("Serve HTTPS with this certificate chain (PEM).")
    ssl_keyfile: Path | None = _path("Private key (PEM) of --ssl-certfile, if it is in another file.")
    model_dir: Path | None = _path("Also serve every model in this directory.", "DIR")
    adapter_dir: Path | None = _path("Let clients load and unload LoRA adapters from this directory.", "DIR")
    max_loaded: int = _count("Maximum models in memory.", 3)
    memory_bytes: int | None = _size("Memory for models. [default: 90% of free memory]", "--memory")
    idle_unload_s: float | None = _time(
        "Unload models idle for this long, such as 10m. [default: never]", "--idle-unload"
    )
    manages_models: bool = _switch(
        "Let clients pull and delete models (keys require scope=manage), and serve cached models.",
        "--manage-models",
    )
    api_key_file: Path | None = _path(
        "API keys, one [NAME] KEY [priority=N] [scope=interp,manage] [models=NAME,...] [daily-tokens=N] "
        "per line; read again on SIGHUP. [default: $KUKRI_API_KEY]"
    )
    shares_prefixes: bool = _switch(
        "Share cached prompts between keys, which can then detect each other's prefixes.", "--share-prefixes"
    )
    allowed_hosts: tuple[str, ...] = _list(
        "Allowed name in Host headers; repeatable.", "--allowed-host", "NAME"
    )
    trusted_proxies: tuple[str, ...] = _list(
        "Proxy whose X-Forwarded-For is trusted; repeatable.", "--trusted-proxy", "ADDRESS", _as_networks
    )
    root_path: str = _flag(_as_prefix, "Path prefix under which a proxy serves the server.", "", "PATH", "")
    cors_origins: tuple[str, ...] = _list(
        "Origin of web pages that may use the server (* for all); repeatable.", "--cors-origin", "URL"
    )
    has_interp: bool = _switch(
        "Let clients steer the model and read activations (keys require scope=interp).", "--interp"
    )
    max_activation_bytes: int = _size("Maximum activations per request.", "--max-activations", 64 << 20)
    max_graph_bytes: int | None = _size(
        "Maximum memory of an attribution graph. [default: half of the free memory]", "--max-graph"
    )
    any_model: bool = _switch("Accept any model name in requests.", "--any-model")
    allows_token_ids: bool = _switch(
        "Accept token ids as the input of /v1/embeddings, which must be the model's own.",
        "--allow-token-ids",
    )
    batch_dir: Path | None = _path("Serve /v1/files and /v1/batches, stored here.", "DIR")
    response_dir: Path | None = _path(
        "Store responses (for previous_response_id) in this directory, too.", "DIR"
    )
    max_waiting: int = _count("Maximum requests in the queue; others get a 503.", 256)
    max_body_bytes: int = _size("Maximum request size; larger ones get a 413.", "--max-body", 2 << 20)
    max_image_bytes: int = _size(
        "Maximum size of images per request, on top of --max-body; larger ones get a 413.",
        "--max-images",
        32 << 20,
    )
    fetches_images: bool = _switch("Fetch images from public URLs in requests.", "--image-urls")
    max_upload_bytes: int = _size(
        "Maximum size of an uploaded file: requests of a batch, or a sound.", "--max-upload", 200 << 20
    )
    rate_limit: int | None = _count(
        "POST requests per minute and key (or address), and ten times as many others; more get a 429."
    )
    deadline_s: float | None = _time("Time limit for an answer, such as 300 or 10m.", "--deadline")
    stream_interval: int = _count("Tokens per stream chunk, after the first.", 1)
    drain_s: float = _time("Time after SIGTERM for running answers to finish.", "--drain", 60.0)
    idle_connection_s: float = _time("Time to keep an idle connection open.", "--keep-alive-timeout", 75.0)
    idle_exit_s: float | None = _time(
        "End the server after this long without a request, such as 30m.", "--idle-exit"
    )
    in_use: Path | None = _path("With --idle-exit: stay while another process locks this file.")
    has_page: bool = declared(
        as_switch, "Do not serve the chat page at /.", "server", flag="--no-page", default=True
    )
    traces: str | None = _flag(
        _as_collector,
        "Send traces to this OTLP collector. [default: $OTEL_EXPORTER_OTLP_ENDPOINT]",
        "",
        "URL",
        None,
    )

    def __post_init__(self) -> None:
        """Raises ConfigError on values out of range."""
        read_fields(self, lambda one: repr(one.name))


def setting_fields() -> dict[str, Field[Any]]:
    """The settings that have flags, by name."""
    return {one.name: one for one in fields(ServerSettings) if flag_of(one)}


describe(ServerSettings)
