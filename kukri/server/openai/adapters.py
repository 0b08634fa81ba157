"""LoRA adapters that clients load and unload while their model is served."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kukri.engine import Engine
from kukri.engine.loop import EngineLoop
from kukri.errors import CapacityError, KukriError, RequestError
from kukri.formats.adapters import read_adapter
from kukri.server.errors import ModelNotFoundError
from kukri.server.models.registry import registry_of
from kukri.server.models.served_model import ServedModel
from kukri.server.schema import LoadAdapterBody, UnloadAdapterBody

log = logging.getLogger("kukri.server")


async def load_adapter(body: LoadAdapterBody, http: Request) -> Response:
    """Load an adapter of the adapter directory for a model, which is loaded too if need be.

    Raises RequestError on a path outside of the directory, a name that is taken, and files that are wrong.
    """
    registry, name = registry_of(http), body.lora_name
    assert registry.settings.adapter_dir is not None, "the permission is for servers that have it"
    file = await asyncio.to_thread(_path, registry.settings.adapter_dir, body.lora_path)
    taken = registry.catalog.named(name)
    if taken is not None:
        raise RequestError.of("lora_name", f"must be a new name: {name!r} is loaded from {taken.name}")
    entry = await registry.catalog.find(body.model, http.scope)
    served = await registry.acquire(entry, http.scope)
    try:
        engine, loop = _single_engine(served)
        adapter = await asyncio.to_thread(read_adapter, file, engine.model)
        await asyncio.wrap_future(loop.call(lambda: engine.load_adapter(name, adapter)))
    except CapacityError:
        raise
    except KukriError as error:
        text = str(error).replace(str(file), body.lora_path)  # no paths of this machine
        raise RequestError(text, param="lora_path") from None
    entry.adapters[name] = str(file)
    log.info("adapter loaded", extra={"model": entry.name, "adapter": name})
    return JSONResponse({"message": f"the adapter {name!r} is loaded"})


async def unload_adapter(body: UnloadAdapterBody, http: Request) -> Response:
    """Forget an adapter. Raises ModelNotFoundError without it."""
    name, entries = body.lora_name, registry_of(http).catalog.entries
    entry = next((one for one in entries if name in one.adapters), None)
    if entry is None:
        raise ModelNotFoundError(name, [name for one in entries for name in one.adapters])
    if entry.served is not None:
        engine, loop = _single_engine(entry.served)
        await asyncio.wrap_future(loop.call(lambda: engine.unload_adapter(name)))
    entry.adapters.pop(name, None)
    log.info("adapter unloaded", extra={"model": entry.name, "adapter": name})
    return JSONResponse({"message": f"the adapter {name!r} is unloaded"})


def _path(directory: Path, path: str) -> Path:
    """The path of an adapter in the directory. Raises RequestError for any other."""
    try:
        root = directory.resolve()
        found = (root / path).resolve()
        is_there = found.is_relative_to(root) and found != root and found.exists()
    except (OSError, ValueError):  # a name that no file can have
        is_there = False
    if not is_there:
        raise RequestError(f"{path[:200]!r} was not found in the adapter directory", param="lora_path")
    return found


def _single_engine(served: ServedModel) -> tuple[Engine, EngineLoop]:
    """The engine of a served model, and its loop. Raises RequestError if there are several, elsewhere."""
    engine, loop = served.llm.engine, served.bridge.loop
    if not (isinstance(engine, Engine) and isinstance(loop, EngineLoop)):
        raise RequestError("loading adapters is not supported with several engines", param="lora_name")
    return engine, loop
