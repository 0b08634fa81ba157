"""A model of a server: what is known of it, loaded or not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Literal

from kukri.errors import KukriError
from kukri.formats.model_cache import cached_path
from kukri.server.models.capabilities import file_capabilities
from kukri.server.models.served_model import ServedModel
from kukri.server.preset import Preset
from kukri.server.settings import ModelSpec

ModelState = Literal["unloaded", "loading", "loaded", "unloading"]
_CHECK_S = 1.0  # between two looks at a model's file
_SETTLE_S = 1.0  # a file that changed less than this ago may still be written


class ModelEntry:
    """A model of a server, loaded or not. Belongs to the event loop."""

    def __init__(self, spec: ModelSpec, served: ServedModel | None = None) -> None:
        self.spec, self.served = spec, served
        self.adapters = dict(spec.options.adapters)  # paths by name; clients may load and unload some
        self.is_owned = served is None  # else whoever opened the model closes it
        self.found: Path | None = None  # its files in the directory or the cache: it goes with them
        self.is_cached = False  # clients may delete it, if they may delete models
        self.created = int(time.time())
        self.n_bytes = 0  # size of the loaded model, as estimated before it was loaded
        self.loaded_s = self.used_s = 0.0  # monotonic: when it was loaded, and when it was last used
        self.keep_alive_s = spec.keep_alive_s  # None: the server's; a request may change it
        self.n_leases = 0
        self.waiters: list[asyncio.Future[ServedModel]] = []  # requests that wait for the model
        self.is_leaving = False  # no new leases: it is to be unloaded
        self.asked_s = 0.0  # monotonic: when it was last to be unloaded for another model
        self.is_stale = False  # its file has changed since it was loaded
        self.is_deleted = False  # nobody finds it any more
        self.task: asyncio.Task[None] | None = None  # that loads it
        self.timer: asyncio.TimerHandle | None = None  # that unloads it
        self._stamp: tuple[float, int] | None = None  # mtime and size of the loaded file
        self._checked_s = 0.0
        self._capabilities: tuple[tuple[float, int] | None, tuple[str, ...] | None] | None = None

    @property
    def name(self) -> str:
        """The name that answers carry."""
        return self.spec.names[0]

    @property
    def path(self) -> Path:
        """The file or directory of the model. Raises KukriError if it is not on this machine."""
        return self.served.llm.path if self.served is not None else cached_path(self.spec.options.model)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that requests may give as their model: its own, and its adapters'."""
        return (*self.spec.names, *self.adapters)

    def capabilities(self) -> tuple[str, ...] | None:
        """Return what the model is for; None if its files cannot be read. Reads headers once they change."""
        try:
            path = self.path
        except KukriError:
            return None
        stamp = _stamp(path)
        if self._capabilities is None or self._capabilities[0] != stamp:
            self._capabilities = stamp, file_capabilities(path, self.spec.options)
        return self._capabilities[1]

    def can_chat(self) -> bool:
        """Return whether the model writes text, as far as its files tell."""
        found = self.capabilities()
        return found is None or "completion" in found

    def preset(self, name: str) -> Preset | None:
        """The preset of a name, which may end with ":latest"; None if it is not one of this model."""
        plain = name.removesuffix(":latest")
        return next((one for one in self.spec.presets if one.name == plain), None)

    def change_presets(self, presets: Sequence[Preset]) -> None:
        """Serves these presets in the place of others, loaded or not."""
        old = {one.name for one in self.spec.presets}
        names = [name for name in self.spec.names if name not in old] + [one.name for one in presets]
        self.spec = replace(self.spec, names=tuple(names), presets=tuple(presets))
        if self.served is not None:
            self.served.rename(self.spec.names, presets)

    def add_name(self, name: str) -> None:
        """Serves it under another name too, loaded or not."""
        self.spec = replace(self.spec, names=(*self.spec.names, name))
        if self.served is not None:
            self.served.rename(self.spec.names, self.spec.presets)

    @property
    def is_ready(self) -> bool:
        """True if requests can use it now."""
        return self.served is not None and not self.is_leaving

    @property
    def state(self) -> ModelState:
        """The model's state now."""
        if self.is_leaving:
            return "unloading"
        if self.served is not None:
            return "loaded"
        return "unloaded" if self.task is None else "loading"

    @property
    def is_free(self) -> bool:
        """True if no request uses it."""
        return not (self.n_leases or (self.served and self.served.bridge.is_busy))

    @property
    def is_idle(self) -> bool:
        """True if no request uses it or waits for it."""
        return self.is_free and not self.waiters

    async def note_file(self) -> None:
        """Remembers the state of the file that has been loaded."""
        assert self.served is not None, "it is loaded"
        self._stamp = await asyncio.to_thread(_stamp, self.served.llm.path)
        self.is_stale, self._checked_s = False, monotonic()

    async def look_at_file(self) -> None:
        """Finds out whether the file has changed since it was loaded, once a second at most."""
        now_s = monotonic()
        if self.served is None or not self.is_owned or now_s - self._checked_s < _CHECK_S:
            return
        self._checked_s = now_s
        stamp = await asyncio.to_thread(_stamp, self.served.llm.path)
        self.is_stale = stamp not in (None, self._stamp) and time.time() - stamp[0] > _SETTLE_S


def _stamp(path: Path) -> tuple[float, int] | None:
    """Latest modification time and total bytes of a model's files; None if one is missing."""
    try:
        files = [path, *path.iterdir()] if path.is_dir() else [path]
        stats = [file.stat() for file in files]
    except OSError:
        return None
    return max(stat.st_mtime for stat in stats), sum(stat.st_size for stat in stats)
