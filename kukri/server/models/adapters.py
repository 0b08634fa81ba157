"""LoRA adapters that clients load and unload while their model is served."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from starlette.types import Scope

from kukri.engine import Engine
from kukri.engine.loop import EngineLoop
from kukri.errors import CapacityError, KukriError, RequestError
from kukri.formats.adapters import read_adapter
from kukri.server.access import check_manages_adapters
from kukri.server.errors import ModelNotFoundError
from kukri.server.models.registry import ModelRegistry
from kukri.server.models.served_model import ServedModel

log = logging.getLogger("kukri.server")


class ClientAdapters:
    """Loads adapters of the adapter directory, and unloads any."""

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry

    async def load(self, model: str | None, name: str, path: str, scope: Scope) -> None:
        """Loads an adapter of the adapter directory for a model, which is loaded too if need be.

        Raises ForbiddenError if the client may not, RequestError on a path outside of the directory, a name
        that is taken, and files that are wrong.
        """
        directory = check_manages_adapters(self._registry.settings, scope)
        file = await asyncio.to_thread(_path, directory, path)
        taken = self._registry.catalog.named(name)
        if taken is not None:
            raise RequestError(f"the name {name!r} is taken by {taken.name}", param="lora_name")
        entry = await self._registry.catalog.find(model, scope)
        served = await self._registry.acquire(entry, scope)
        try:
            engine, loop = _single_engine(served)
            adapter = await asyncio.to_thread(read_adapter, file, engine.model)
            await asyncio.wrap_future(loop.call(lambda: engine.load_adapter(name, adapter)))
        except CapacityError:
            raise
        except KukriError as error:
            text = str(error).replace(str(file), path)  # no paths of this machine
            raise RequestError(text, param="lora_path") from None
        entry.adapters[name] = str(file)
        log.info("adapter loaded", extra={"model": entry.name, "adapter": name})

    async def unload(self, name: str, scope: Scope) -> None:
        """Forgets an adapter. Raises ForbiddenError if the client may not, ModelNotFoundError without it."""
        check_manages_adapters(self._registry.settings, scope)
        entries = self._registry.catalog.entries
        entry = next((one for one in entries if name in one.adapters), None)
        if entry is None:
            raise ModelNotFoundError(name, [name for one in entries for name in one.adapters])
        if entry.served is not None:
            engine, loop = _single_engine(entry.served)
            await asyncio.wrap_future(loop.call(lambda: engine.unload_adapter(name)))
        entry.adapters.pop(name, None)
        log.info("adapter unloaded", extra={"model": entry.name, "adapter": name})


def _path(directory: Path, path: str) -> Path:
    """The path of an adapter in the directory. Raises RequestError for any other."""
    try:
        root = directory.resolve()
        found = (root / path).resolve()
        is_there = found.is_relative_to(root) and found != root and found.exists()
    except (OSError, ValueError):  # a name that no file can have
        is_there = False
    if not is_there:
        raise RequestError(f"there is no {path[:200]!r} in the adapter directory", param="lora_path")
    return found


def _single_engine(served: ServedModel) -> tuple[Engine, EngineLoop]:
    """The engine of a served model, and its loop. Raises RequestError if there are several, elsewhere."""
    engine, loop = served.llm.engine, served.bridge.loop
    if not (isinstance(engine, Engine) and isinstance(loop, EngineLoop)):
        raise RequestError("with several engines, adapters are loaded only at startup", param="lora_name")
    return engine, loop
