"""The end of a server that nobody uses: `--idle-exit`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from kukri.errors import ConfigError
from kukri.host.os_calls import lock_file

if TYPE_CHECKING:
    from kukri.server.models.registry import ModelRegistry
    from kukri.server.settings import ServerSettings

_LOOK_S = 1.0


class IdleExit:
    """Tells a server when it has had no request for `idle_exit_s`, and no process locks `in_use`."""

    def __init__(
        self, registry: ModelRegistry, settings: ServerSettings, now_s: Callable[[], float] = monotonic
    ) -> None:
        """Raises ConfigError if `in_use` names a file but this system has no locks."""
        if settings.in_use is not None and sys.platform == "win32":
            raise ConfigError("--in-use is not supported on this system")
        self._registry, self._limit_s, self._in_use = registry, settings.idle_exit_s, settings.in_use
        self._now_s, self._n_requests = now_s, 0
        self._used_s = self._looked_s = now_s()

    def is_over(self, n_requests: int) -> bool:
        """Return whether the server is to end, which has got `n_requests` so far; looks once a second.

        The lock is held from then on to the end of this process, so that who waits for it finds no server.
        """
        now_s = self._now_s()
        if self._limit_s is None or now_s - self._looked_s < _LOOK_S:
            return False
        self._looked_s = now_s
        lock = None if self._in_use is None else lock_file(self._in_use, wait=False)
        is_idle = n_requests == self._n_requests and all(one.is_idle for one in self._registry.entries)
        if not is_idle or (self._in_use is not None and lock is None):
            self._n_requests, self._used_s = n_requests, now_s
        is_over = now_s - self._used_s >= self._limit_s
        if lock is not None and not is_over:
            os.close(lock)
        return is_over
