"""The models of a server by their names: those given at its start, of its directory, and of the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from starlette.types import Scope

from kukri.errors import KukriError, RequestError
from kukri.formats.gguf.split import is_mmproj
from kukri.formats.hub import is_known
from kukri.formats.model_cache import cached_models, cached_path
from kukri.formats.repos import parse_name
from kukri.opening.model_options import ModelOptions
from kukri.server.access import client_of
from kukri.server.errors import ModelNotFoundError
from kukri.server.models.created_presets import MAX_PRESETS, read_presets, write_presets
from kukri.server.models.entry import ModelEntry
from kukri.server.preset import Preset
from kukri.server.settings import ModelSpec, ServerSettings

_LOOK_S = 1.0  # between two looks at the directory and the cache


class _Found(NamedTuple):
    """A model that lies in the directory or in the cache."""

    name: str
    path: Path
    is_cached: bool


class Catalog:
    """Finds models. Belongs to the event loop; files are looked at on one thread besides it."""

    def __init__(self, settings: ServerSettings, entries: Iterable[ModelEntry]) -> None:
        self.settings, self.entries = settings, list(entries)
        self._looking = asyncio.Lock()  # a file system that hangs holds one thread, not all
        self._looked_s = monotonic()
        for found in self._found():
            self._add(*found)
        self._created = read_presets() if settings.manages_models else []  # (name of the model, preset)
        for model, preset in self._created:
            if (entry := self.named(model)) is not None and self.named(preset.name) is None:
                entry.change_presets([*entry.spec.presets, preset])

    async def find(self, name: str | None, scope: Scope, *, exactly: bool = False) -> ModelEntry:
        """The model of a name that a request's client may use. Raises ModelNotFoundError if there is none.

        A name may end with ":latest", as Ollama's clients write it. None is the first model. With `any_model`
        that one answers for an unknown name, unless it is to be found `exactly`.
        """
        client = client_of(scope)
        if name is not None:
            entry = self.named(name) or await self._look_for(name)
            if entry is not None and client.may_use(entry.spec.names):
                return entry
        usable = [one for one in self.entries if not one.is_deleted and client.may_use(one.spec.names)]
        if usable and (name is None or (self.settings.any_model and not exactly)):
            return usable[0]
        raise ModelNotFoundError(name or "", [known for one in usable for known in one.names])

    def named(self, name: str) -> ModelEntry | None:
        """The model of a name, among those that are known."""
        names = {name, name.removesuffix(":latest")}
        known = (one for one in self.entries if not one.is_deleted)
        return next((one for one in known if not names.isdisjoint(one.names)), None)

    async def listed(self, scope: Scope) -> list[ModelEntry]:
        """The models that a request's client may use, with those that had come a second ago."""
        await self._look()
        client = client_of(scope)
        return [one for one in self.entries if not one.is_deleted and client.may_use(one.spec.names)]

    async def add_cached(self, name: str) -> None:
        """Serves a model of the cache by a name that `kukri pull` takes, besides others that it may have.

        Raises KukriError if it is not in the cache.
        """
        path = await asyncio.to_thread(cached_path, name)
        if (same := self._at(path)) is None:
            self._add(name, path, is_cached=True)
        elif self.named(name) is None:
            same.add_name(name)

    async def add_preset(self, entry: ModelEntry, preset: Preset) -> None:
        """Serves a model under the name of a preset too, now and after a restart.

        It replaces a preset that a client created. Raises RequestError if the name is that of anything else,
        or there are too many, KukriError if it cannot be saved.
        """
        async with self._looking:
            created = [one for one in self._created if one[1].name != preset.name]
            is_new = len(created) == len(self._created)
            if is_new and self.named(preset.name) is not None:
                raise RequestError.of("model", f"must be a new name: {preset.name!r} is a loaded model")
            if len(created) >= MAX_PRESETS:
                raise RequestError.of(
                    "model", f"cannot be created: {MAX_PRESETS} presets exist, so delete some"
                )
            created.append((entry.spec.names[0], preset))
            await asyncio.to_thread(write_presets, created)
            self._forget(preset.name)
            self._created = created
            entry.change_presets([*entry.spec.presets, preset])

    async def drop_preset(self, name: str) -> bool:
        """Forgets a preset that a client created; False if there is none of that name."""
        plain = name.removesuffix(":latest")
        async with self._looking:
            left = [one for one in self._created if one[1].name != plain]
            if len(left) == len(self._created):
                return False
            await asyncio.to_thread(write_presets, left)
            self._created = left
            self._forget(plain)
        return True

    def _forget(self, name: str) -> None:
        for entry in self.entries:
            if entry.preset(name) is not None:
                entry.change_presets([one for one in entry.spec.presets if one.name != name])

    async def _look_for(self, name: str) -> ModelEntry | None:
        """The model of a name that is not known yet.

        A client that asks for a model of its own waits for a look that is not older than its request.
        """
        asked_s = None if self.settings.any_model else monotonic()
        await self._look(asked_s)
        plain = name.removesuffix(":latest")
        if self.settings.manages_models and (is_known(plain) or parse_name(plain) is not None):
            async with self._looking:  # a name other than its file's, such as org/repo:Q4_K_M
                with suppress(KukriError, OSError):
                    if not await asyncio.to_thread(Path(plain).expanduser().exists):
                        await self.add_cached(plain)
        return self.named(name)

    async def _look(self, asked_s: float | None = None) -> None:
        """Adds the models that have come and drops those that left, at most once a second.

        With `asked_s` the look begins after that time.
        """
        if self.settings.model_dir is None and not self.settings.manages_models:
            return
        async with self._looking:
            wait_s = self._looked_s + _LOOK_S - monotonic()
            if wait_s > 0 and (asked_s is None or self._looked_s > asked_s):
                return
            await asyncio.sleep(wait_s)
            places = [entry.found for entry in self.entries if entry.found is not None]
            found, gone = await asyncio.to_thread(self._scan, places)
            self.entries[:] = [
                entry for entry in self.entries if entry.found not in gone or entry.state != "unloaded"
            ]
            for one in found:
                self._add(*one)

    def _scan(self, places: Sequence[Path]) -> tuple[list[_Found], set[Path]]:
        """What there is now, and which of the places are gone; on a thread, which may start late."""
        self._looked_s = monotonic()
        return list(self._found()), _gone(places)

    def _found(self) -> Iterator[_Found]:
        """The models of the directory and, if clients may pull, of the cache. Looks at files."""
        if self.settings.model_dir is not None:
            for name, path in models_in(self.settings.model_dir):
                yield _Found(name, path, False)
        if self.settings.manages_models:
            for model in cached_models():
                yield _Found(model.name, model.path, True)

    def _add(self, name: str, path: Path, is_cached: bool) -> None:
        """Serves the model at a path, unless it is served already or the name is taken."""
        if self._at(path) is None and all(name not in entry.names for entry in self.entries):
            entry = ModelEntry(ModelSpec((name,), ModelOptions(model=str(path))))
            entry.found, entry.is_cached = path, is_cached
            self.entries.append(entry)

    def _at(self, path: Path) -> ModelEntry | None:
        """The model that was found at a path."""
        return next((one for one in self.entries if one.found == path and not one.is_deleted), None)


def _gone(places: Iterable[Path]) -> set[Path]:
    return {path for path in places if not path.exists()}


def models_in(directory: Path) -> Iterator[tuple[str, Path]]:
    """The models of a directory: each .gguf file but encoders of images, by its stem, and each safetensors
    directory.
    """
    with suppress(OSError):
        for path in sorted(directory.iterdir()):
            if is_mmproj(path.name):
                continue
            if path.suffix == ".gguf" and path.is_file():
                yield path.stem, path
            elif (path / "config.json").is_file():
                yield path.name, path
