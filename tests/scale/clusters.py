"""A front and its replicas in one process, without Ray: what runs on Ray, but for the starting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI

from kukri import LLM
from kukri.engine.traces import open_traces
from kukri.opening.model_options import ModelOptions
from kukri.scale.facts import replica_facts
from kukri.scale.front import ReplicaLoop
from kukri.scale.front_model import RemoteModel
from kukri.scale.replica import EngineReplica
from kukri.server.app import create_app
from kukri.server.settings import ServerSettings


class LocalCluster:
    """Replicas of a model, and a server in front of them. Attributes: app, model, loop (the front's)."""

    def __init__(self, options: ModelOptions, **settings: Any) -> None:
        self._options, self._n_made, self.n_died = options, 0, 0
        self._traces: str | None = settings.get("traces")
        self._poison: list[int] | None = None
        self.replicas: dict[str, EngineReplica] = {}
        with LLM(**vars(options)) as llm:
            self.model = RemoteModel(options, replica_facts(llm, "first"))
        make_loop = partial(ReplicaLoop, model_identity=self.model.identity, invite=self._invite)
        self.app: FastAPI = create_app(
            self.model, ServerSettings(("tiny",), has_page=False, **settings), make_loop=make_loop
        )

    @property
    def loop(self) -> ReplicaLoop:
        return self.app.state.registry.entries[0].served.bridge.loop

    async def add(self, **changes: Any) -> str:
        """Starts a replica; its name."""
        self._n_made += 1
        name = f"replica-{self._n_made}"
        llm = await asyncio.to_thread(lambda: LLM(**vars(replace(self._options, **changes))))
        replica = self.replicas[name] = EngineReplica(llm, name, open_traces(self._traces))
        if self._poison is not None:
            self._watch(name)
        replica.start()
        return name

    async def kill(self, name: str) -> None:
        """Ends a replica without a word to anybody."""
        await self.replicas.pop(name).close()

    def die_of(self, prompt: list[int]) -> None:
        """From now on each replica that gets this prompt ends, and another one starts."""
        self._poison = prompt
        for name in list(self.replicas):
            self._watch(name)

    def _watch(self, name: str) -> None:
        replica = self.replicas[name]
        run = replica._take

        async def take(front: Any, given: list[dict[str, Any]]) -> None:
            if any(fields["prompt"] == self._poison for fields in given):
                self.n_died += 1
                await self.kill(name)
                await self.add()
            else:
                await run(front, given)

        replica._take = take  # type: ignore[method-assign]

    @property
    def address(self) -> tuple[str, int]:
        """Where the front listens."""
        server = self.loop._server
        assert server is not None
        return server.sockets[0].getsockname()[:2]

    async def joined(self, n: int) -> None:
        """Waits until `n` replicas are connected."""
        await until(lambda: len(self.loop.replicas) == n)

    async def _invite(self, host: str, port: int, secret: str, n_waiting: int) -> None:
        for replica in list(self.replicas.values()):
            await replica.connect(host, port, secret)


@asynccontextmanager
async def cluster(options: ModelOptions, n: int, **settings: Any) -> AsyncIterator[LocalCluster]:
    """A running server in front of `n` replicas."""
    made = await asyncio.to_thread(lambda: LocalCluster(options, **settings))
    async with made.app.router.lifespan_context(made.app):
        for _ in range(n):
            await made.add()
        await made.joined(n)
        yield made
    for name in list(made.replicas):
        await made.kill(name)


async def until(is_true: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not is_true():
            await asyncio.sleep(0.002)
