"""API keys, and what a server knows of a client: its name, its prefixes, what it may do, what it has used."""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256

from kukri.dataclass import dataclass, field
from kukri.errors import ConfigError, RequestError, brief

# what a key may do beyond asking for answers: steer models and read activations; change the server's models
SCOPES = frozenset({"interp", "manage"})
_DAY_S = 24 * 3600
_PRIORITY = re.compile(r"-?[0-9]{1,4}")
_TOKENS = re.compile(r"[0-9]{1,15}")


class Meter:
    """Tokens that a client has used since the server's start, and since midnight UTC."""

    def __init__(self, now_s: Callable[[], float] = time.time) -> None:
        self.n_prompt = self.n_generated = 0
        self._now_s = now_s
        self._day = self._n_today = 0

    def add(self, n_prompt: int, n_generated: int) -> None:
        """Counts tokens of prompts and of answers."""
        self.n_prompt += n_prompt
        self.n_generated += n_generated
        self._n_today = self.n_today + n_prompt + n_generated

    @property
    def n_today(self) -> int:
        """Tokens of both kinds since midnight."""
        day = int(self._now_s() // _DAY_S)
        if day != self._day:
            self._day, self._n_today = day, 0
        return self._n_today

    @property
    def left_s(self) -> float:
        """Seconds until midnight."""
        return _DAY_S - self._now_s() % _DAY_S


@dataclass(frozen=True)
class Client:
    """The sender of a request. Cached prefixes are shared only within one `prefix_scope`.

    `first_priority` is the most urgent priority that its requests may have, and that of those which name
    none; the lower, the more urgent. None: any, and 0. `scopes` are what it may do beyond asking for answers,
    `models` the names of those that it may use (None: all), `daily_tokens` how many tokens a day.
    """

    name: str  # for the log
    bucket: str  # for rates, and for the queue's fairness: one for each key, or for each network
    prefix_scope: str = ""
    first_priority: int | None = None
    usual_priority: int | None = None  # for requests that name none, if it is not the first
    scopes: frozenset[str] = SCOPES  # all without keys
    models: frozenset[str] | None = None
    daily_tokens: int | None = None
    digest: bytes = field(default=b"", repr=False)  # SHA-256 of its key; empty without keys
    meter: Meter = field(default_factory=Meter, repr=False, compare=False)

    def priority(self, wanted: int | None) -> int:
        """A request's priority. Raises RequestError if it is more urgent than the client may be."""
        first = self.first_priority
        if wanted is None:
            return (first or 0) if self.usual_priority is None else self.usual_priority
        if first is not None and wanted < first:
            raise RequestError.of("priority", f"must be at least {first} for this API key, not {wanted}")
        return wanted

    def queue(self, user: str | None) -> str:
        """The name in the queue, which is fair among clients and their users."""
        return f"{self.bucket}/{user or ''}"

    @property
    def owner(self) -> str:
        """Who keeps things in this process's memory: a key's hash, which is not to be written down."""
        return self.digest.hex()

    def may_use(self, names: Iterable[str]) -> bool:
        """True if the client may use a model of these names."""
        return self.models is None or not self.models.isdisjoint(names)

    @property
    def is_over_budget(self) -> bool:
        """True if the client has used its tokens of today."""
        return self.daily_tokens is not None and self.meter.n_today >= self.daily_tokens


class KeyRing:
    """API keys, compared in a time that does not depend on how much of a key is right.

    A key is written `KEY` or `NAME KEY`, perhaps with options after it: `priority=N`, `scope=NAME,...`,
    `models=NAME,...` and `daily-tokens=N`. Its client has its name, or else a part of its hash. Unless
    `shares_prefixes`, keys share no prefixes with each other.
    """

    def __init__(self, keys: Sequence[str], *, shares_prefixes: bool = False) -> None:
        """Raises ConfigError for a line of another form."""
        self._shares_prefixes = shares_prefixes
        self._clients: dict[bytes, Client] = {}  # by the hash of the key
        self.replace(keys)

    def __bool__(self) -> bool:
        """True if there are keys at all."""
        return bool(self._clients)

    @property
    def clients(self) -> list[Client]:
        """The client of each key."""
        return list(self._clients.values())

    def replace(self, keys: Sequence[str]) -> None:
        """Takes other keys; those that stay keep their counts. Raises ConfigError and keeps the old."""
        clients: dict[bytes, Client] = {}
        for line in keys:
            client = self._client(line)
            if client.digest in clients:
                raise ConfigError(f"the API key of {client.name} must appear once: remove one of the lines")
            clients[client.digest] = client
        self._clients = clients

    def find(self, authorization: str | None, x_api_key: str | None = None) -> Client | None:
        """The client whose key is in an Authorization header or in X-API-Key; None if neither is known.

        An Authorization of another scheme than Bearer is not ours: a proxy may have added it.
        """
        scheme, _, bearer = (authorization or "").partition(" ")
        given = [bearer] if scheme.lower() == "bearer" else []
        found = None
        for key in (*given, *([] if x_api_key is None else [x_api_key])):
            digest = sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
            for known, client in self._clients.items():  # all of them, always
                if hmac.compare_digest(digest, known):
                    found = client
        return found

    def holds(self, client: Client) -> bool:
        """True if a client's key is still valid."""
        return client.digest in self._clients

    def _client(self, line: str) -> Client:
        if not (line.isascii() and line.isprintable() and line.strip()):
            raise ConfigError("an API key must be printable ASCII and not empty")
        words, options = _parts(line)
        *name, key = words
        scopes = frozenset(_names(options.get("scope", "")))
        if unknown := sorted(scopes - SCOPES):
            raise ConfigError(
                f"the scope {brief(unknown[0])} of an API key is not supported: use "
                f"{', '.join(sorted(SCOPES))}"
            )
        if "models" in options and not _names(options["models"]):
            raise ConfigError("'models' of an API key must not be empty: leave models= out to allow all")
        digest = sha256(key.encode()).digest()
        old = self._clients.get(digest)
        return Client(
            name=f"key {' '.join(name) or digest.hex()[:8]}",
            bucket=digest.hex(),
            prefix_scope="" if self._shares_prefixes else digest.hex(),
            first_priority=_number(options, "priority", _PRIORITY, "from -9999 to 9999, as in priority=5"),
            scopes=scopes,
            models=frozenset(_names(options["models"])) if "models" in options else None,
            daily_tokens=_number(
                options, "daily-tokens", _TOKENS, "a number of tokens, as in daily-tokens=1000000"
            ),
            digest=digest,
            meter=Meter() if old is None else old.meter,
        )


_OPTIONS = ("priority=", "scope=", "models=", "daily-tokens=")


def key_header(keys: str | None) -> dict[str, str]:
    """Return the header that sends a key: of several, as $KUKRI_API_KEY has them for a server, the first."""
    words, _ = _parts((keys or "").partition(",")[0])
    return {"authorization": f"Bearer {words[-1]}"} if words else {}


def _parts(line: str) -> tuple[list[str], dict[str, str]]:
    """The words of a key's line, its name and the key, and the options after them."""
    words, options = line.split(), {}
    while len(words) > 1 and words[-1].startswith(_OPTIONS):
        name, _, value = words.pop().partition("=")
        options[name] = value
    return words, options


def _names(listed: str) -> list[str]:
    return [name for name in listed.split(",") if name]


def _number(options: dict[str, str], name: str, form: re.Pattern[str], wanted: str) -> int | None:
    """The number of an option; None without it. Raises ConfigError."""
    value = options.get(name)
    if value is not None and not form.fullmatch(value):
        raise ConfigError(f"{name!r} of an API key must be {wanted}")
    return None if value is None else int(value)
