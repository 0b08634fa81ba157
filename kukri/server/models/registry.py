"""Loads the models of a server when a request needs them, and unloads them when idle or when memory is short.

A request holds a *lease* on its model from `acquire` to the end of its response, and a model is unloaded only
without leases. A request for a model that is not there waits in `ModelEntry.waiters`, and gets its lease in
the moment in which the model is ready, so that nothing can take the model away in between.

One model at a time is loaded or unloaded, under a lock that nobody holds while he waits for an answer to end:
an answer without an end delays only those who want its model's memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from starlette.requests import Request
from starlette.types import Scope

from kukri.engine.loop import EngineLoop, EngineStatus
from kukri.errors import CapacityError, KukriError
from kukri.host.hardware import available_bytes
from kukri.host.os_calls import return_large_arrays
from kukri.llm import LLM
from kukri.opening.memory import MemoryNeed, memory_need
from kukri.opening.model_options import ModelOptions
from kukri.server.errors import ModelNotFoundError
from kukri.server.keys import KeyRing
from kukri.server.metrics import Metrics
from kukri.server.models.allocator import close_and_free
from kukri.server.models.bridge import LoopMaker
from kukri.server.models.catalog import Catalog
from kukri.server.models.entry import ModelEntry
from kukri.server.models.pulling import Pulls
from kukri.server.models.served_model import OpenModel, ServedModel
from kukri.server.models.warm_up import warm_up
from kukri.server.settings import ModelSpec, ServerSettings

log = logging.getLogger("kukri.server")
_STOP_S = 5.0  # for what still runs when every connection is closed
_CHECK_S = 1.0  # between two looks at a model that is idle but for an answer without a request
_LEAVE_S = 30.0  # that a model takes no requests for, so that another gets its memory
_POLL_S = 0.02  # between two looks at models that are to be unloaded
_MEMORY_SHARE = 0.9  # share of the free memory for models
_KV_SHARE = 0.5  # share of the models' memory for keys and values
_SHUTDOWN = "the server is shutting down: try again later"


def registry_of(request: Request) -> ModelRegistry:
    """The models of the application that a request came to."""
    registry: ModelRegistry = request.app.state.registry
    return registry


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
        self.keys = KeyRing(settings.api_keys, shares_prefixes=settings.shares_prefixes)
        self.metrics.watch_keys(self.keys)
        entries = [ModelEntry(spec) for spec in models]
        if llm is not None:
            served = ServedModel(llm, settings, settings.model_names, self.metrics, make_loop)
            entry = ModelEntry(ModelSpec(settings.model_names, llm.options, True), served)
            entry.n_bytes = llm.memory_bytes
            entries.insert(0, entry)
        self.catalog = Catalog(settings, entries)
        self.pulls = Pulls()
        self.metrics.watch_engines(self.statuses)
        self.is_draining = False
        self.memory_bytes = settings.memory_bytes or int(_MEMORY_SHARE * available_bytes())
        self._kv_bytes = settings.kv_bytes or int(_KV_SHARE * self.memory_bytes)
        self._changing = asyncio.Lock()  # held while a model is loaded or unloaded
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def entries(self) -> list[ModelEntry]:
        """Every model that is known."""
        return self.catalog.entries

    async def start(self) -> None:
        """Starts the engines of loaded models and loads the pinned ones. Raises KukriError if one fails."""
        self._loop = asyncio.get_running_loop()
        return_large_arrays()
        for entry in list(self.entries):
            if entry.served is not None:
                entry.served.bridge.start()
                entry.served.grammars.start_soon()
            elif entry.spec.is_pinned:
                await self._load_if_room(entry)

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
        await entry.look_at_file()
        if entry.is_deleted:
            raise ModelNotFoundError(entry.name, [])
        if entry.is_ready and not entry.is_stale:
            entry.n_leases += 1
            served = entry.served
            assert served is not None, "it is ready"
        else:
            served = await self._wait(entry)
        if entry.timer is not None:
            entry.timer.cancel()
        scope["kukri.on_end"].append(lambda: self._release(entry))
        scope["kukri.load_s"] = monotonic() - started_s
        return served

    async def served(self, name: str | None, scope: Scope) -> ServedModel:
        """The served model by its name, as `acquire` gives it. Raises as `find` and `acquire` do."""
        return await self.acquire(await self.catalog.find(name, scope), scope)

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
        """Unloads a model when its running requests have ended; one that is not loaded stays as it is.

        Raises CapacityError if they do not end in time.
        """
        if entry.is_owned and not await self._vacate([entry], reason, lambda: True):
            raise CapacityError(f"the model {entry.name!r} still answers requests: try again later")

    async def delete(self, entry: ModelEntry, remove: Callable[[], object]) -> None:
        """Unloads a model and removes its files by `remove`; requests find it no more.

        Raises as `unload` and `remove` do, and the model is served as before then.
        """
        entry.is_deleted = True
        self._fail(entry, ModelNotFoundError(entry.name, []))
        try:
            await self.unload(entry, "deleted")
            await asyncio.to_thread(remove)
        except BaseException:
            entry.is_deleted = False
            raise
        self.catalog.entries.remove(entry)

    # Leases

    async def _wait(self, entry: ModelEntry) -> ServedModel:
        """Waits until the model is loaded; the lease is counted then."""
        if self.is_draining:
            raise CapacityError(_SHUTDOWN)
        if len(entry.waiters) >= self.settings.max_waiting:
            raise CapacityError(
                f"{len(entry.waiters)} requests are already waiting for the model {entry.name!r}: try "
                "again later"
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
                raise CapacityError(
                    f"the model {entry.name!r} is still loading after {limit}: try again later"
                ) from None
            raise

    def _release(self, entry: ModelEntry) -> None:
        entry.n_leases -= 1
        entry.used_s = monotonic()
        if entry.n_leases == 0:
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
            self._fail(entry, CapacityError(_SHUTDOWN))

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

    # Loading and unloading

    async def _bring(self, entry: ModelEntry) -> None:
        """Gives the requests that wait for a model their leases, as soon as it is loaded, or fails them."""
        try:
            while entry.waiters:
                if entry.is_leaving:
                    await asyncio.sleep(_POLL_S)
                elif entry.served is None:
                    busy = await self._load_if_room(entry)
                    await self._vacate(busy, "memory", lambda: bool(entry.waiters))
                elif not entry.is_stale or not await self._vacate(
                    [entry], "changed", lambda: bool(entry.waiters)
                ):
                    self._give_leases(entry)
        except Exception as error:
            log.error("model not loaded: %s", error, exc_info=not isinstance(error, KukriError),
                      extra={"model": entry.name})  # fmt: skip
            self._fail(entry, _load_error(entry, error))
        finally:
            entry.task = None

    @staticmethod
    def _give_leases(entry: ModelEntry) -> None:
        served = entry.served
        assert served is not None, "it is loaded"
        waiters, entry.waiters = entry.waiters, []
        for waiter in waiters:
            if not waiter.done():
                entry.n_leases += 1
                waiter.set_result(served)

    async def _vacate(self, models: Sequence[ModelEntry], reason: str, is_wanted: Callable[[], bool]) -> bool:
        """Unloads the first of some loaded models that no request uses; True if one of them is unloaded.

        One of them takes no requests meanwhile, each time another, for no longer than _LEAVE_S: answers may
        have no end.
        """
        staying = [one for one in models if not one.is_leaving]
        leaving = min(staying, key=lambda one: (one.asked_s, one.used_s), default=None)
        if leaving is not None:
            leaving.is_leaving, leaving.asked_s = True, monotonic()
        ends_s = monotonic() + _LEAVE_S
        try:
            while models and monotonic() < ends_s:
                async with self._changing:
                    if not is_wanted() or any(one.served is None for one in models):
                        break
                    free = (one for one in models if one is leaving or not one.is_leaving)
                    found = next((one for one in free if one.is_free), None)
                    if found is not None:
                        await self._unload(found, reason)
                        break
                await asyncio.sleep(_POLL_S)
        finally:
            if leaving is not None:
                leaving.is_leaving = False
        return any(one.served is None for one in models)

    async def _unload_idle(self, entry: ModelEntry) -> None:
        async with self._changing:
            if entry.served is not None and entry.is_idle:
                await self._unload(entry, "idle")

    async def _load_if_room(self, entry: ModelEntry) -> list[ModelEntry]:
        """Loads a model, after idle ones have made room for it, and gives its waiters their leases.

        Returns the models that may be unloaded for it, if that takes one which is not idle.
        """
        async with self._changing:
            if not (entry.waiters or entry.spec.is_pinned):  # they have all left
                return []
            share = self._kv_bytes // min(max(len(self.entries), 1), self.settings.max_loaded)
            need = await asyncio.to_thread(memory_need, entry.spec.options, share)
            busy = await self._make_room(entry, need)
            if not busy:
                await self._load(entry, need)
            return busy

    async def _load(self, entry: ModelEntry, need: MemoryNeed) -> None:
        started_s = monotonic()
        log.info("loading", extra={"model": entry.name, "memory_bytes": need.n_bytes})
        given = entry.spec.options.adapters
        for name in await asyncio.to_thread(_gone, {**entry.adapters}):
            if name not in given:
                log.warning("adapter gone", extra={"model": entry.name, "adapter": name})
                del entry.adapters[name]
        wanted, context = entry.spec.options.max_context, need.max_context
        if context != wanted:
            log.warning("max_context %s is more than the model's: it has %s", wanted, context,
                        extra={"model": entry.name})  # fmt: skip
        options = replace(
            entry.spec.options, kv_bytes=need.kv_bytes, max_context=context, adapters={**entry.adapters}
        )
        served = await asyncio.to_thread(self._opened, entry, options)
        if self.is_draining:
            await asyncio.to_thread(served.llm.close)
            raise CapacityError(_SHUTDOWN)
        served.bridge.start()
        entry.served, entry.n_bytes = served, need.n_bytes
        entry.loaded_s = entry.used_s = monotonic()
        await entry.note_file()
        self.metrics.load.labels(entry.name).observe(monotonic() - started_s)
        log.info("loaded", extra={"model": entry.name, "duration_s": round(monotonic() - started_s, 3)})
        self._give_leases(entry)
        if not entry.n_leases:
            self._watch(entry)
        served.grammars.start_soon()

    def _opened(self, entry: ModelEntry, options: ModelOptions) -> ServedModel:
        """On a thread of its own: the model, opened and warm."""
        llm = LLM(**vars(options))
        try:
            warm_up(llm)
            return ServedModel(llm, self.settings, entry.spec.names, self.metrics, presets=entry.spec.presets)
        except BaseException:
            llm.close()
            raise

    async def _make_room(self, entry: ModelEntry, need: MemoryNeed) -> list[ModelEntry]:
        """Unloads idle models, the one used longest ago first, until there is memory for another.

        Returns those that could be unloaded too if there is not, none if there is. Raises CapacityError, and
        unloads nothing, if all of them would not do.
        """
        loaded = [one for one in self.entries if one.served is not None and one is not entry]
        movable = [one for one in loaded if not one.spec.is_pinned]
        kept_bytes = sum(one.n_bytes for one in loaded) - sum(one.n_bytes for one in movable)
        if len(loaded) - len(movable) >= self.settings.max_loaded:
            raise CapacityError(
                f"the model {entry.name!r} cannot be loaded: pinned models already fill --max-loaded "
                f"({len(loaded)})"
            )
        if kept_bytes + need.n_bytes > self.memory_bytes:
            pinned = f", and pinned models use {_mib(kept_bytes)}" if kept_bytes else ""
            raise CapacityError(
                f"the model {entry.name!r} requires {_mib(need.n_bytes)} of memory "
                f"({_mib(need.weight_bytes)} of weights, {_mib(need.kv_bytes)} of KV cache), but models "
                f"may use {_mib(self.memory_bytes)}{pinned}: lower its KV cache or context, or raise "
                "--memory"
            )
        while len(loaded) >= self.settings.max_loaded or not self._has_room(loaded, need):
            idle = [one for one in movable if one.is_idle]
            if not movable:
                raise CapacityError(
                    f"the model {entry.name!r} requires {_mib(need.n_bytes)} of memory, but only "
                    f"{_mib(available_bytes())} are free"
                )
            if not idle:
                return movable
            oldest = min(idle, key=lambda one: one.used_s)
            await self._unload(oldest, "memory")
            movable.remove(oldest)
            loaded.remove(oldest)
        return []

    def _has_room(self, loaded: Iterable[ModelEntry], need: MemoryNeed) -> bool:
        """True if a model fits alongside the loaded ones: into the server's memory, and the machine's."""
        taken = sum(one.n_bytes for one in loaded)
        return taken + need.n_bytes <= self.memory_bytes and need.n_bytes <= available_bytes()

    async def _unload(self, entry: ModelEntry, reason: str) -> None:
        """Unloads a model that nothing uses; requests that come meanwhile wait until it is back."""
        entry.is_leaving = True
        if entry.timer is not None:
            entry.timer.cancel()
        try:
            assert entry.served is not None, "it is loaded"
            held, entry.served = [entry.served], None
            await held[0].close(None)
            await asyncio.to_thread(close_and_free, held)
        finally:
            entry.is_leaving = False
        entry.n_bytes = 0
        self.metrics.unloads.labels(entry.name, reason).inc()
        log.info("unloaded", extra={"model": entry.name, "reason": reason})


def _gone(adapters: Mapping[str, str]) -> list[str]:
    """The names of adapters whose files are not there."""
    return [name for name, path in adapters.items() if not Path(path).exists()]


def _load_error(entry: ModelEntry, error: Exception) -> KukriError:
    """The error of requests whose model could not be loaded, without paths of this machine."""
    if isinstance(error, CapacityError):
        return error
    text = str(error) if isinstance(error, KukriError) else "see the server's log"
    text = text.replace(str(entry.spec.options.model), "its file")
    return KukriError(f"the model {entry.name!r} cannot be loaded: {text}")


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.0f} MiB"
