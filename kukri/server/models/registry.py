"""The models of a server: loaded when a request needs them, unloaded when idle or when memory is short.

A request holds a *lease* on its model from `acquire` to the end of its response, and a model is unloaded only
without leases. One model at a time is loaded or unloaded; the tasks that do it wait for each other in the
order of their requests. A request for a model that is not there waits in `ModelEntry.waiters`, and gets its
lease in the moment in which the model is ready, so that nothing can take the model away in between.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from starlette.exceptions import HTTPException
from starlette.types import Scope

from kukri.engine import Engine
from kukri.engine.loop import EngineLoop, EngineStatus
from kukri.errors import CapacityError, KukriError, RequestError
from kukri.formats.adapters import read_adapter
from kukri.formats.hub import MODELS
from kukri.formats.model_cache import cached_models, cached_path
from kukri.formats.repos import parse_name
from kukri.host.hardware import available_bytes
from kukri.llm import LLM
from kukri.loading import MemoryNeed, ModelOptions, memory_need
from kukri.server.errors import ModelNotFoundError
from kukri.server.metrics import Metrics
from kukri.server.models.allocator import close_and_free, return_large_arrays
from kukri.server.models.bridge import LoopMaker
from kukri.server.models.served_model import OpenModel, ServedModel
from kukri.server.models.warm_up import warm_up
from kukri.server.settings import ModelSpec, ServerSettings

log = logging.getLogger("kukri.server")
ModelState = Literal["unloaded", "loading", "loaded", "unloading"]
_STOP_S = 5.0  # for what still runs when every connection is closed
_CHECK_S = 1.0  # between two looks at a model's file
_SETTLE_S = 1.0  # a file that changed less than this ago may still be written
_MEMORY_SHARE = 0.9  # of the free memory, for models
_KV_SHARE = 0.5  # of the memory for models, for keys and values


class ModelEntry:
    """A model of a server, loaded or not. Belongs to the event loop."""

    def __init__(self, spec: ModelSpec, served: ServedModel | None = None) -> None:
        self.spec, self.served = spec, served
        self.adapters = dict(spec.options.adapters)  # paths by name; clients may load and unload some
        self.is_owned = served is None  # else whoever opened the model closes it
        self.found: Path | None = None  # its files in the directory or the cache: it goes with them
        self.is_cached = False  # clients may delete it, if they may delete models
        self.created = int(time.time())
        self.n_bytes = 0  # of the loaded model, estimated before it was loaded
        self.loaded_s = self.used_s = 0.0  # monotonic: when it was loaded, and when it was last used
        self.keep_alive_s = spec.keep_alive_s  # None: the server's; a request may change it
        self.n_leases = 0
        self.waiters: list[asyncio.Future[ServedModel]] = []  # requests that wait for the model
        self.is_leaving = False  # no new leases: it is about to be unloaded
        self.task: asyncio.Task[None] | None = None  # that loads it
        self.timer: asyncio.TimerHandle | None = None  # that unloads it
        self.unused = asyncio.Event()  # without leases
        self.unused.set()
        self._stamp: tuple[float, int] | None = None  # of the file that is loaded
        self._checked_s = 0.0

    @property
    def name(self) -> str:
        """The name that answers carry."""
        return self.spec.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that requests may give as their model: its own, and its adapters'."""
        return (*self.spec.names, *self.adapters)

    @property
    def is_ready(self) -> bool:
        """True if it gives leases."""
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
    def is_gone(self) -> bool:
        """True if its files have left the directory or the cache, and nothing uses it."""
        return self.found is not None and self.state == "unloaded" and not self.found.exists()

    @property
    def is_idle(self) -> bool:
        """True if no request uses it or waits for it."""
        return not (self.n_leases or self.waiters or (self.served and self.served.bridge.is_busy))

    def note_file(self) -> None:
        """Remembers the state of the file that has been loaded."""
        assert self.served is not None, "it is loaded"
        self._stamp, self._checked_s = _stamp(self.served.llm.path), monotonic()

    def is_stale(self) -> bool:
        """True if the file has changed since it was loaded; looks once a second at most."""
        now_s = monotonic()
        if self.served is None or not self.is_owned or now_s - self._checked_s < _CHECK_S:
            return False
        self._checked_s = now_s
        stamp = _stamp(self.served.llm.path)
        return stamp is not None and stamp != self._stamp and time.time() - stamp[0] > _SETTLE_S


class ModelRegistry:
    """All models of a server. Belongs to the event loop, but for `drain` and `statuses`."""

    def __init__(
        self,
        settings: ServerSettings,
        models: Sequence[ModelSpec] = (),
        llm: OpenModel | None = None,
        make_loop: LoopMaker = EngineLoop,
    ) -> None:
        """`llm` is a model that is open already: its caller closes it, and it is never unloaded.

        `make_loop` makes the loop that runs its requests.
        """
        self.settings, self.metrics = settings, Metrics()
        self.entries: list[ModelEntry] = []
        if llm is not None:
            served = ServedModel(llm, settings, settings.model_names, self.metrics, make_loop)
            entry = ModelEntry(ModelSpec(settings.model_names, llm.options, True), served)
            entry.n_bytes = llm.memory_bytes
            self.entries.append(entry)
        self.entries += map(ModelEntry, models)
        self._find_models()
        self.metrics.watch_engines(self.statuses)
        self.is_draining = False
        self.memory_bytes = settings.memory_bytes or int(_MEMORY_SHARE * available_bytes())
        self._kv_bytes = settings.kv_bytes or int(_KV_SHARE * self.memory_bytes)
        self._changing = asyncio.Lock()  # held while a model is loaded or unloaded
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def default(self) -> ModelEntry:
        """The model of requests that name none. Raises ModelNotFoundError if nothing is served."""
        if not self.entries:
            raise ModelNotFoundError("", [])
        return self.entries[0]

    def find(self, name: str | None) -> ModelEntry:
        """The model of a name. Raises ModelNotFoundError if there is none.

        A name may end with ":latest", as Ollama's clients write it.
        """
        if name is None:
            return self.default
        plain = name.removesuffix(":latest")
        entry = self._named(name, plain)
        if entry is None:
            self._find_models()
            self._find_cached(plain)
            entry = self._named(name, plain)
        if entry is not None:
            return entry
        if self.settings.any_model:
            return self.default
        raise ModelNotFoundError(name, [name for entry in self.entries for name in entry.names])

    def _named(self, *names: str) -> ModelEntry | None:
        return next((one for one in self.entries if not {*names}.isdisjoint(one.names)), None)

    def listed(self) -> list[ModelEntry]:
        """Every model, those that have come to the directory or the cache since the last time included."""
        self._find_models()
        return list(self.entries)

    def _find_models(self) -> None:
        """Adds the models of the directory and, if clients may pull, of the cache; drops those that left."""
        self.entries = [entry for entry in self.entries if not entry.is_gone]
        if self.settings.model_dir is not None:
            for name, path in models_in(self.settings.model_dir):
                self._add(name, path)
        if self.settings.manages_models:
            for model in cached_models():
                self._add(model.name, model.path, is_cached=True)

    def _add(self, name: str, path: Path, *, is_cached: bool = False) -> None:
        """Serves the model at a path, unless the name is taken."""
        if all(name not in entry.names for entry in self.entries):
            entry = ModelEntry(ModelSpec((name,), ModelOptions(model=str(path))))
            entry.found, entry.is_cached = path, is_cached
            self.entries.append(entry)

    def add_cached(self, name: str) -> None:
        """Serves a model of the cache by a name that `kukri pull` takes. Raises KukriError without it."""
        self._add(name, cached_path(name), is_cached=True)

    def _find_cached(self, name: str) -> None:
        """Adds a model of the cache under another name than its file's, such as org/repo:Q4_K_M."""
        is_name = name in MODELS or parse_name(name) is not None
        if self.settings.manages_models and is_name and not Path(name).expanduser().exists():
            with suppress(KukriError, OSError):
                self.add_cached(name)

    def forget(self, entry: ModelEntry) -> None:
        """Serves a model no longer; it has been unloaded."""
        self.entries.remove(entry)

    async def start(self) -> None:
        """Starts the engines of loaded models and loads the pinned ones. Raises KukriError if one fails."""
        self._loop = asyncio.get_running_loop()
        return_large_arrays()
        for entry in list(self.entries):
            if entry.served is not None:
                entry.served.bridge.start()
                entry.served.grammars.start_soon()
            elif entry.spec.is_pinned:
                async with self._changing:
                    await self._load(entry)

    async def stop(self) -> None:
        """Unloads everything, without waiting long for what still runs."""
        self.is_draining = True
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for entry in self.entries:
            if entry.timer is not None:
                entry.timer.cancel()
            if entry.served is not None:
                await entry.served.close(_STOP_S)
                if entry.is_owned:
                    await asyncio.to_thread(entry.served.llm.close)

    def drain(self, timeout_s: float) -> None:
        """Refuses new requests; those that still run after the timeout end with an error.

        Safe to call from a signal handler.
        """
        self.is_draining = True
        for entry in self.entries:
            if entry.served is not None:
                entry.served.bridge.drain(timeout_s)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._refuse_waiters)

    @property
    def is_stepping(self) -> bool:
        """True if the engine of every loaded model runs."""
        return all(entry.served.bridge.loop.is_stepping for entry in self.entries if entry.served)

    def statuses(self) -> Mapping[str, Mapping[str, EngineStatus]]:
        """The counts of each model's engines, by its name and theirs; none of one that is not loaded."""
        return {entry.name: s.bridge.loop.statuses() if (s := entry.served) else {} for entry in self.entries}

    async def acquire(self, entry: ModelEntry, scope: Scope) -> ServedModel:
        """Loads the model if need be, and gives it with a lease that ends with the request.

        Raises CapacityError if there is no memory for it now, or the deadline is over, and the error that
        ended its loading.
        """
        started_s = monotonic()
        if entry.is_ready and not entry.is_stale():
            entry.n_leases += 1
            served = entry.served
            assert served is not None, "it is ready"
        else:
            served = await self._wait(entry)
        entry.unused.clear()
        if entry.timer is not None:
            entry.timer.cancel()
        scope["kukri.on_end"].append(lambda: self._release(entry))
        scope["kukri.load_s"] = monotonic() - started_s
        return served

    async def served(self, name: str | None, scope: Scope) -> ServedModel:
        """The served model by its name, as `acquire` gives it. Raises as `find` and `acquire` do."""
        return await self.acquire(self.find(name), scope)

    def keep(self, entry: ModelEntry, seconds: float | None) -> None:
        """Sets the idle time after which the model is unloaded: 0 for at once, below 0 for never."""
        if seconds is not None and not entry.spec.is_pinned:
            entry.keep_alive_s = seconds

    def expires_s(self, entry: ModelEntry) -> float | None:
        """Seconds until an idle model will be unloaded; None for never."""
        limit_s = self.settings.idle_unload_s if entry.keep_alive_s is None else entry.keep_alive_s
        if entry.spec.is_pinned or limit_s is None or limit_s < 0:
            return None
        return max(entry.used_s + limit_s - monotonic(), 0.0) if entry.is_idle else limit_s

    async def unload(self, entry: ModelEntry, reason: str) -> None:
        """Unloads a model when its running requests have ended; one that is not loaded stays as it is."""
        async with self._changing:
            if entry.served is not None and entry.is_owned:
                await self._unload(entry, reason)

    # Adapters

    async def load_adapter(self, model: str | None, name: str, path: str, scope: Scope) -> None:
        """Loads an adapter of the adapter directory for a model, which is loaded too if need be.

        Raises HTTPException 403 if clients may not, RequestError on a path outside of the directory, a name
        that is taken, and files that are wrong.
        """
        file = self._adapter_path(path)
        taken = self._named(name)
        if taken is not None:
            raise RequestError(f"the name {name!r} is taken by {taken.name}", param="lora_name")
        entry = self.find(model)
        served = await self.acquire(entry, scope)
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

    async def unload_adapter(self, name: str) -> None:
        """Forgets an adapter. Raises HTTPException 403 if clients may not, ModelNotFoundError without it."""
        self._check_manages_adapters()
        entry = next((one for one in self.entries if name in one.adapters), None)
        if entry is None:
            raise ModelNotFoundError(name, [name for one in self.entries for name in one.adapters])
        if entry.served is not None:
            engine, loop = _single_engine(entry.served)
            await asyncio.wrap_future(loop.call(lambda: engine.unload_adapter(name)))
        entry.adapters.pop(name, None)
        log.info("adapter unloaded", extra={"model": entry.name, "adapter": name})

    def _check_manages_adapters(self) -> Path:
        """The adapter directory. Raises HTTPException 403 without one."""
        directory = self.settings.adapter_dir
        if directory is None:
            message = "this server's adapters cannot be changed: kukri serve --adapter-dir allows it"
            raise HTTPException(403, message)
        return directory

    def _adapter_path(self, path: str) -> Path:
        """The path of an adapter in the directory. Raises RequestError for any other."""
        directory = self._check_manages_adapters().resolve()
        try:
            found = (directory / path).resolve()
            is_there = found.is_relative_to(directory) and found != directory and found.exists()
        except (OSError, ValueError):  # a name that no file can have
            is_there = False
        if not is_there:
            raise RequestError(f"there is no {path[:200]!r} in the adapter directory", param="lora_path")
        return found

    # Leases

    async def _wait(self, entry: ModelEntry) -> ServedModel:
        """Waits until the model is loaded; the lease is counted then."""
        if self.is_draining:
            raise CapacityError("the server is shutting down: ask another, or later")
        if len(entry.waiters) >= self.settings.max_waiting:
            raise CapacityError(
                f"{len(entry.waiters)} requests wait for {entry.name} already: try again later"
            )
        waiter: asyncio.Future[ServedModel] = asyncio.get_running_loop().create_future()
        entry.waiters.append(waiter)
        if entry.task is None:
            entry.task = self._run(self._bring(entry))
        try:
            async with asyncio.timeout(self.settings.deadline_s):
                return await waiter
        except BaseException as error:
            with suppress(ValueError):
                entry.waiters.remove(waiter)
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._release(entry)  # it came while this request was being ended
            if isinstance(error, TimeoutError):
                limit = f"{self.settings.deadline_s:g} s"
                raise CapacityError(f"{entry.name} was not loaded within {limit}: try again later") from None
            raise

    def _release(self, entry: ModelEntry) -> None:
        entry.n_leases -= 1
        entry.used_s = monotonic()
        if entry.n_leases == 0:
            entry.unused.set()
            self._watch(entry)

    def _watch(self, entry: ModelEntry) -> None:
        """Unloads the model after its idle time, unless it is used meanwhile."""
        if entry.timer is not None:
            entry.timer.cancel()
        left_s = self.expires_s(entry)
        if entry.served is not None and left_s is not None and self._loop is not None:
            entry.timer = self._loop.call_later(left_s, self._expire, entry)

    def _expire(self, entry: ModelEntry) -> None:
        left_s = self.expires_s(entry)
        if entry.is_idle and left_s is not None and left_s <= 0:
            self._run(self._unload_idle(entry))
        elif not entry.n_leases:  # an answer is still computed after its request has ended
            assert self._loop is not None, "the server runs"
            entry.timer = self._loop.call_later(_CHECK_S, self._expire, entry)

    def _refuse_waiters(self) -> None:
        for entry in self.entries:
            self._fail(entry, CapacityError("the server is shutting down: ask another, or later"))

    @staticmethod
    def _fail(entry: ModelEntry, error: Exception) -> None:
        waiters, entry.waiters = entry.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Loading and unloading; whoever calls these holds `_changing`, but for `_bring` and `_unload_idle`

    async def _bring(self, entry: ModelEntry) -> None:
        """Loads the model for those who wait for it, or fails them."""
        if entry.served is not None and not entry.is_leaving:
            entry.is_leaving = True  # its file has changed
        try:
            async with self._changing:
                if entry.served is not None:
                    await self._unload(entry, "changed")
                if not entry.waiters:  # they have all left
                    return
                await self._load(entry)
        except Exception as error:
            log.error("model not loaded: %s", error, exc_info=not isinstance(error, KukriError),
                      extra={"model": entry.name})  # fmt: skip
            self._fail(entry, _load_error(entry, error))
        finally:
            entry.task = None

    async def _unload_idle(self, entry: ModelEntry) -> None:
        async with self._changing:
            if entry.served is not None and entry.is_idle:
                await self._unload(entry, "idle")

    async def _load(self, entry: ModelEntry) -> None:
        """Loads a model, after others have made room for it, and gives its waiters their leases."""
        started_s = monotonic()
        share = self._kv_bytes // min(max(len(self.entries), 1), self.settings.max_loaded)
        need = await asyncio.to_thread(memory_need, entry.spec.options, share)
        await self._make_room(entry, need)
        log.info("loading", extra={"model": entry.name, "memory_bytes": need.n_bytes})
        for name in entry.adapters.keys() - entry.spec.options.adapters.keys():
            if not Path(entry.adapters[name]).exists():
                log.warning("adapter gone", extra={"model": entry.name, "adapter": name})
                del entry.adapters[name]
        adapters = dict(entry.adapters)
        options = replace(entry.spec.options, kv_bytes=need.kv_bytes, adapters=adapters)
        served = await asyncio.to_thread(self._opened, entry, options)
        if self.is_draining:
            await asyncio.to_thread(served.llm.close)
            raise CapacityError("the server is shutting down: ask another, or later")
        served.bridge.start()
        entry.served, entry.n_bytes = served, need.n_bytes
        entry.loaded_s = entry.used_s = monotonic()
        entry.note_file()
        self.metrics.load.labels(entry.name).observe(monotonic() - started_s)
        log.info("loaded", extra={"model": entry.name, "duration_s": round(monotonic() - started_s, 3)})
        waiters, entry.waiters = entry.waiters, []
        for waiter in waiters:
            if not waiter.done():
                entry.n_leases += 1
                entry.unused.clear()
                waiter.set_result(served)
        if not entry.n_leases:
            self._watch(entry)
        served.grammars.start_soon()

    def _opened(self, entry: ModelEntry, options: ModelOptions) -> ServedModel:
        """On a thread of its own: the model, opened and warm."""
        llm = LLM(**vars(options))
        try:
            warm_up(llm)
            return ServedModel(llm, self.settings, entry.spec.names, self.metrics)
        except BaseException:
            llm.close()
            raise

    async def _make_room(self, entry: ModelEntry, need: MemoryNeed) -> None:
        """Unloads models, the one used longest ago first, until there is memory for another.

        Raises CapacityError, and unloads nothing, if that would not do.
        """
        loaded = [one for one in self.entries if one.served is not None and one is not entry]
        movable = [one for one in loaded if not one.spec.is_pinned]
        kept_bytes = sum(one.n_bytes for one in loaded) - sum(one.n_bytes for one in movable)
        if (
            kept_bytes + need.n_bytes > self.memory_bytes
            or len(loaded) - len(movable) >= self.settings.max_loaded
        ):
            pinned = f", of which pinned models take {_mib(kept_bytes)}" if kept_bytes else ""
            raise CapacityError(
                f"{entry.name} needs {_mib(need.n_bytes)} of memory ({_mib(need.weight_bytes)} of weights, "
                f"{_mib(need.kv_bytes)} of KV cache), and there are {_mib(self.memory_bytes)} for models"
                f"{pinned}: give it a smaller KV cache or context, or the server more --memory"
            )
        while len(loaded) >= self.settings.max_loaded or not self._has_room(loaded, need):
            victim = min(movable, key=lambda one: (not one.is_idle, one.used_s), default=None)
            if victim is None:
                raise CapacityError(
                    f"{entry.name} needs {_mib(need.n_bytes)} of memory: {_mib(available_bytes())} are free"
                )
            await self._unload(victim, "memory")
            movable.remove(victim)
            loaded.remove(victim)

    def _has_room(self, loaded: Iterable[ModelEntry], need: MemoryNeed) -> bool:
        """True if a model fits beside the loaded ones: into the server's memory, and the machine's."""
        taken = sum(one.n_bytes for one in loaded)
        return taken + need.n_bytes <= self.memory_bytes and need.n_bytes <= available_bytes()

    async def _unload(self, entry: ModelEntry, reason: str) -> None:
        """Unloads a model as soon as nothing uses it; requests that come meanwhile wait until it is back."""
        entry.is_leaving = True
        if entry.timer is not None:
            entry.timer.cancel()
        try:
            await entry.unused.wait()
            assert entry.served is not None, "it is loaded"
            held, entry.served = [entry.served], None
            await held[0].close(None)
            await asyncio.to_thread(close_and_free, held)
        finally:
            entry.is_leaving = False
        entry.n_bytes = 0
        self.metrics.unloads.labels(entry.name, reason).inc()
        log.info("unloaded", extra={"model": entry.name, "reason": reason})


def _single_engine(served: ServedModel) -> tuple[Engine, EngineLoop]:
    """The engine of a served model, and its loop. Raises RequestError if there are several, elsewhere."""
    engine, loop = served.llm.engine, served.bridge.loop
    if not (isinstance(engine, Engine) and isinstance(loop, EngineLoop)):
        raise RequestError("adapters of several engines are loaded at the start alone", param="lora_name")
    return engine, loop


def models_in(directory: Path) -> Iterator[tuple[str, Path]]:
    """The models of a directory: each .gguf file, by its stem, and each safetensors directory."""
    with suppress(OSError):
        for path in sorted(directory.iterdir()):
            if path.suffix == ".gguf" and path.is_file():
                yield path.stem, path
            elif (path / "config.json").is_file():
                yield path.name, path


def _stamp(path: Path) -> tuple[float, int] | None:
    """Latest modification time and total bytes of a model's files; None if one is missing."""
    try:
        files = [path, *path.iterdir()] if path.is_dir() else [path]
        stats = [file.stat() for file in files]
    except OSError:
        return None
    return max(stat.st_mtime for stat in stats), sum(stat.st_size for stat in stats)


def _load_error(entry: ModelEntry, error: Exception) -> KukriError:
    """The error of requests whose model could not be loaded, without paths of this machine."""
    if isinstance(error, CapacityError):
        return error
    text = str(error) if isinstance(error, KukriError) else "see the server's log"
    text = text.replace(str(entry.spec.options.model), "its file")
    return KukriError(f"the model {entry.name!r} cannot be loaded: {text}")


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.0f} MiB"
