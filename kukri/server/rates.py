"""How often a client may ask: requests a minute, and wrong keys a minute."""

from __future__ import annotations

import time
from collections import OrderedDict
from ipaddress import IPv6Address, ip_address

_MAX_CLIENTS = 10_000  # whose rates are known
_WRONG_PER_MINUTE = 60


def network_of(address: str) -> str:
    """What an address counts as: a network of /64, which is one customer's, or the IPv4 address."""
    try:
        found = ip_address(address)
    except ValueError:  # a socket without addresses
        return address
    if isinstance(found, IPv6Address) and found.ipv4_mapped is None:
        return f"{IPv6Address(int(found) >> 64 << 64)}/64"
    return str(getattr(found, "ipv4_mapped", None) or found)


class RateLimiter:
    """A bucket of tokens for each client: `per_minute` fit in, and as many come back a minute."""

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # left, and when that was

    def take(self, client: str, now_s: float | None = None) -> float:
        """Takes one token; returns 0, or the seconds until there will be one."""
        now_s = time.monotonic() if now_s is None else now_s
        wait_s = self.wait_s(client, now_s)
        self._buckets[client] = (self._left(client, now_s) - (not wait_s), now_s)
        self._buckets.move_to_end(client)
        if len(self._buckets) > _MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return wait_s

    def wait_s(self, client: str, now_s: float | None = None) -> float:
        """Seconds until there is a token; 0 if there is one."""
        left = self._left(client, time.monotonic() if now_s is None else now_s)
        return 0.0 if left >= 1 else (1 - left) * 60 / self.per_minute

    def _left(self, client: str, now_s: float) -> float:
        left, then_s = self._buckets.get(client, (float(self.per_minute), now_s))
        return min(left + (now_s - then_s) * self.per_minute / 60, float(self.per_minute))


class WrongKeys:
    """Limits the guesses of keys from one network; clients there whose key was right before are not hit."""

    def __init__(self, per_minute: int = _WRONG_PER_MINUTE) -> None:
        self._rates = RateLimiter(per_minute)
        self._right: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def wait_s(self, network: str, digest: bytes | None) -> float:
        """Seconds until a key of this hash may be tried again; None stands for a wrong one, and counts."""
        wait_s = self._rates.wait_s(network)
        if digest is None:
            self._rates.take(network)
        elif not wait_s or (network, digest) in self._right:
            self._right[network, digest] = None
            self._right.move_to_end((network, digest))
            if len(self._right) > _MAX_CLIENTS:
                self._right.popitem(last=False)
            return 0.0
        return wait_s
