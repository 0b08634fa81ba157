"""The settings of a server: models, access, limits."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path

from kukri.errors import ConfigError
from kukri.formats.hub import DEFAULT_MODEL
from kukri.model_options import ModelOptions
from kukri.server.keys import KeyRing
from kukri.traces import collector_url

_DURATION = re.compile(r"(?:\d+(?:\.\d*)?(?:ms|h|m|s))+|\d+(?:\.\d*)?")
_TIMES = (
    "deadline_s", "headers_s", "read_s", "keep_alive_s", "drain_s", "idle_unload_s", "idle_connection_s"
)  # fmt: skip
_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration_s(value: float | str, name: str) -> float:
    """The seconds of a number, or of a text such as 300, 10m or 1h30m; -1 stays -1.

    Raises ConfigError, about `name`, for anything else.
    """
    text = str(value).strip()
    if len(text) <= 32 and not isinstance(value, bool) and _DURATION.fullmatch(text.removeprefix("-")):
        parts = re.findall(r"([\d.]+)(ms|h|m|s)?", text)
        seconds = sum(float(number) * _UNITS_S[unit or "s"] for number, unit in parts)
        return -seconds if text.startswith("-") else seconds
    raise ConfigError(f"{name} must be a time such as 300, 10m or 1h30m, not {value!r}")


def default_name(model: str | None) -> str:
    """The name under which a model is served: a known name as it is, a path without its directories."""
    if model is None:
        return DEFAULT_MODEL
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


@dataclass(frozen=True)
class ServerSettings:
    """Names, keys and limits of a server. Sizes in bytes, times in seconds.

    Attributes:
        model_names: Names of a model that is open already; answers carry the first.
        any_model: Requests may name any model, and get this one.
        api_keys: Keys in the form that `KeyRing` reads; without any, no key is needed.
        api_key_file: The file that they are from, if they are: `kukri serve` reads it again on SIGHUP.
        shares_prefixes: Keys share cached prefixes, so that one may find out how another's prompts begin.
        allowed_hosts: Hosts that a Host header may name; empty for all.
        trusted_proxies: Addresses or networks whose X-Forwarded-For header is believed.
        cors_origins: Origins whose pages may use the server from a browser; "*" for all.
        ssl_certfile: Certificate chain (PEM) for HTTPS; None serves plain HTTP.
        ssl_keyfile: Its private key, if it is not in the same file.
        max_body_bytes: Largest request body; larger ones get 413.
        max_waiting: Most requests in the engine's queue; more get 503.
        rate_limit: Requests a minute of one key, or of one address if there are no keys; more get 429. None
            for no limit.
        deadline_s: Time of a request from its arrival to its last token; None for no limit.
        headers_s: Time to receive a request's headers.
        read_s: Time to receive a request's body.
        keep_alive_s: Silence after which a stream gets a comment.
        stream_interval: Tokens of an answer from one chunk of its stream to the next.
        drain_s: Time for running answers after the signal to stop.
        idle_connection_s: Time that a connection without a request stays open for the next one. Pools of
            clients reuse connections that are a minute old.
        batch_dir: Directory of clients' files and batches; None refuses them.
        has_page: Serves the chat page at /.
        traces: URL of an OTLP collector; None for the one that the environment names, if it does.
        idle_unload_s: Time without requests after which a model is unloaded; None for never.
        max_loaded: Most models in memory at a time.
        memory_bytes: Memory for all models; None for nine tenths of what is free at the start.
        kv_bytes: Memory for the KV caches of all models; None for half of `memory_bytes`.
        model_dir: Directory whose .gguf files and safetensors directories are served too.
        adapter_dir: Directory whose LoRA adapters clients may load and unload; None refuses that.
        has_interp: Lets clients steer models and read activations: keys with the scope `interp`, or all
            without keys.
        max_activation_bytes: Most bytes of activations of one request.
        manages_models: Clients may pull and delete models; those in the cache are served too.
    """

    model_names: tuple[str, ...] = ()
    any_model: bool = False
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: Path | None = None
    shares_prefixes: bool = False
    allowed_hosts: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    max_body_bytes: int = 2 << 20
    max_waiting: int = 256
    rate_limit: int | None = None
    deadline_s: float | None = None
    headers_s: float = 10.0
    read_s: float = 30.0
    keep_alive_s: float = 15.0
    stream_interval: int = 1
    drain_s: float = 60.0
    idle_connection_s: float = 75.0
    batch_dir: Path | None = None
    has_page: bool = True
    traces: str | None = None
    idle_unload_s: float | None = None
    max_loaded: int = 3
    memory_bytes: int | None = None
    kv_bytes: int | None = None
    model_dir: Path | None = None
    adapter_dir: Path | None = None
    has_interp: bool = False
    max_activation_bytes: int = 64 << 20
    manages_models: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError on values out of range."""
        if not all(self.model_names):
            raise ConfigError("a served model needs a name")
        whole = ("max_body_bytes", "max_waiting", "rate_limit", "max_loaded", "memory_bytes", "kv_bytes")
        for name in (*whole, "max_activation_bytes", "stream_interval"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        for name in _TIMES:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, not {value}")
        KeyRing(self.api_keys)
        if self.traces is not None:
            collector_url(self.traces)
        for proxy in self.trusted_proxies:
            try:
                ip_network(proxy)
            except ValueError as error:
                raise ConfigError(f"a trusted proxy must be an address or a network: {error}") from None
