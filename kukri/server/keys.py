"""API keys, and what a server knows of a client: its name, its prefixes, its priority."""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from kukri.errors import ConfigError, RequestError, brief

SCOPES = frozenset({"interp"})  # to steer models and read their activations
_PRIORITY = re.compile(r"-?[0-9]{1,4}")


@dataclass(frozen=True)
class Client:
    """The sender of a request. Cached prefixes are shared only within one `prefix_scope`.

    `first_priority` is the most urgent priority that its requests may have, and that of those which name
    none; the lower, the more urgent. None: any, and 0. `scopes` are what it may do beyond asking for answers.
    """

    name: str  # for the log, the queue's fairness and the rates
    prefix_scope: str = ""
    first_priority: int | None = None
    scopes: frozenset[str] = SCOPES  # all without keys
    owner: str = ""  # of files and batches: a key's hash; without keys they are everybody's

    def priority(self, wanted: int | None) -> int:
        """A request's priority. Raises RequestError if it is more urgent than the client may be."""
        first = self.first_priority
        if wanted is None:
            return first or 0
        if first is not None and wanted < first:
            raise RequestError(
                f"the priority of this key's requests is {first} or more, not {wanted}", param="priority"
            )
        return wanted

    def queue(self, user: str | None) -> str:
        """The name in the queue, which is fair among clients and their users."""
        return f"{self.name}/{user or ''}"


class KeyRing:
    """API keys, compared in a time that does not depend on how much of a key is right.

    A key is written `KEY` or `NAME KEY`, perhaps with ` priority=N` and ` scope=NAME,...` after it. Its
    client has its name, or else a part of its hash. Unless `shares_prefixes`, keys share no prefixes with
    each other.
    """

    def __init__(self, keys: Sequence[str], *, shares_prefixes: bool = False) -> None:
        """Raises ConfigError for a line of another form."""
        self._digests: list[bytes] = []
        self.clients: list[Client] = []
        for line in keys:
            words, options = _parts(line)
            *name, key = words
            priority = _number(options.get("priority"))
            scopes = frozenset(options["scope"].split(",")) if "scope" in options else frozenset()
            if unknown := sorted(scopes - SCOPES):
                raise ConfigError(f"an API key has the unknown scope {brief(unknown[0])}: there is interp")
            digest = sha256(key.encode()).digest()
            self._digests.append(digest)
            scope = "" if shares_prefixes else digest.hex()
            shown = f"key {' '.join(name) or digest.hex()[:8]}"
            self.clients.append(Client(shown, scope, priority, scopes, digest.hex()))

    def __bool__(self) -> bool:
        """True if there are keys at all."""
        return bool(self._digests)

    def find(self, authorization: str | None, x_api_key: str | None = None) -> int | None:
        """The index of the key in an Authorization header, or else in X-API-Key; None for none of them."""
        scheme, _, key = (authorization or f"bearer {x_api_key or ''}").partition(" ")
        digest = sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for i, known in enumerate(self._digests):  # all of them, always
            if hmac.compare_digest(digest, known):
                found = i
        return found if scheme.lower() == "bearer" else None


def _parts(line: str) -> tuple[list[str], dict[str, str]]:
    """The words of a key's line, its name and the key, and the options behind them."""
    words, options = line.split(), {}
    while len(words) > 1 and words[-1].startswith(("priority=", "scope=")):
        name, _, value = words.pop().partition("=")
        options[name] = value
    return words, options


def _number(priority: str | None) -> int | None:
    """The number of a priority. Raises ConfigError."""
    if priority is not None and not _PRIORITY.fullmatch(priority):
        raise ConfigError("the priority of an API key is a number from -9999 to 9999, as in priority=5")
    return None if priority is None else int(priority)
