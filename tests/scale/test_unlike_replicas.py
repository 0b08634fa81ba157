"""Replicas whose processors multiply in other ways continue each other's answers, on the portable backend."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kukri.opening.model_options import ModelOptions
from tests.kernels.test_cpu_lowerings import runnable
from tests.scale.clusters import LocalCluster, cluster, until
from tests.scale.test_front import BODIES, answers_alone, ask, plain
from tests.tiny_gguf import tiny_config, write_tiny

_PROGRAM = """
import asyncio, json, sys
from kukri import LLM
from kukri.scale.replica import EngineReplica
from kukri.engine.traces import open_traces

async def serve():
    llm = LLM(**json.loads(sys.argv[1]))
    replica = EngineReplica(llm, "another processor", open_traces(None))
    replica.start()
    print("there", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        host, port, secret = line.split()
        await replica.connect(host, int(port), secret)

asyncio.run(serve())
"""


class _Another:
    """A replica in a process of its own, for another level of processors."""

    def __init__(self, options: ModelOptions, level: str) -> None:
        given = json.dumps({"model": options.model, "backend": "portable", "n_threads": 1, "max_requests": 8})
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        env = os.environ | {"KUKRI_CPU": level}
        self.process = subprocess.Popen([sys.executable, "-c", _PROGRAM, given], env=env, **pipes)
        self.process.stdout.readline()  # it is there

    async def join(self, made: LocalCluster) -> None:
        """Connects it to a front, by what the front tells replicas when it wants more."""
        invite, loop = made._invite, made.loop

        async def invite_all(host: str, port: int, secret: str, n_waiting: int) -> None:
            print(host, port, secret, file=self.process.stdin, flush=True)
            await invite(host, port, secret, n_waiting)

        loop._invite = invite_all
        await made.joined(2)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["another", "own"])
def test_replicas_of_unlike_processors_continue_each_others_answers(dies: str, tmp_path: Path) -> None:
    """Catches an answer that continues with other tokens on a machine that multiplies in another way."""
    if "avx2" not in [level.name for level in runnable()]:
        pytest.skip("this host has no other lowering")
    path = write_tiny(tmp_path / "tiny.gguf", tiny_config(max_context=1024))
    options = ModelOptions(model=str(path), backend="portable", n_threads=1, max_requests=8)
    expected = answers_alone(options)

    async def check() -> None:
        async with cluster(options, 1) as made:
            another = await asyncio.to_thread(_Another, options, "avx2")
            try:
                await another.join(made)
                work: asyncio.Task[Any] = asyncio.create_task(ask(made, BODIES))
                await until(lambda: made.loop.n_generated > 300)
                assert min(len(one.live) for one in made.loop._replicas.values()) > 1, "one has nothing to do"
                if dies == "another":
                    another.kill()
                else:
                    await made.kill(next(iter(made.replicas)))
                found = await work
                assert made.loop.n_retries > 1, "nothing was running when the replica died"
                assert [plain(one.body) for one in found] == expected
            finally:
                another.kill()

    asyncio.run(check())
