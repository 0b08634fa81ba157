"""The settings of a server: names, access, limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_network

from kukri.errors import ConfigError


@dataclass(frozen=True)
class ServerSettings:
    """Names, keys and limits of a server. Sizes in bytes, times in seconds.

    Without `api_keys` no key is needed. `rate_limit` counts requests a minute of one key, or of one address
    if there are no keys; None is no limit.
    """

    model_names: tuple[str, ...]  # the first is the one that answers carry
    any_model: bool = False  # requests may name any model, and get this one
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # KEY, or NAME KEY: the log has the name
    allowed_hosts: tuple[str, ...] = ()  # that a Host header may name; none: all of them
    trusted_proxies: tuple[str, ...] = ()  # addresses or networks whose X-Forwarded-For is believed
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 2 << 20
    max_waiting: int = 256  # requests in the engine's queue
    rate_limit: int | None = None
    deadline_s: float | None = None  # of one request, from its arrival to its last token
    headers_s: float = 10.0  # until a request's headers have to be there
    read_s: float = 30.0  # until a request's body has to be there
    keep_alive_s: float = 15.0  # of silence before a stream gets a comment
    drain_s: float = 60.0  # for running answers after the signal to stop
    has_page: bool = True  # at /, to chat in a browser

    def __post_init__(self) -> None:
        """Raises ConfigError on values out of range."""
        if not self.model_names or not all(self.model_names):
            raise ConfigError("a served model needs a name")
        for name in ("max_body_bytes", "max_waiting", "rate_limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        for name in ("deadline_s", "headers_s", "read_s", "keep_alive_s", "drain_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, not {value}")
        if not all(key.isascii() and key.isprintable() and key.strip() for key in self.api_keys):
            raise ConfigError("an API key must be printable ASCII and not empty")
        for proxy in self.trusted_proxies:
            try:
                ip_network(proxy)
            except ValueError as error:
                raise ConfigError(f"a trusted proxy must be an address or a network: {error}") from None
