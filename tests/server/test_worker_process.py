"""Processes that answer the server over a pipe."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import uvloop

from kukri.server.worker_process import WorkerProcess

MODULE = "kukri.server.body_worker"
LINE = b"kukri.server.schema:CompletionBody 2\n"


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("wait_s", [0.0, 0.001, 0.05, 0.5])
def test_one_that_was_killed_loses_what_is_sent(new_loop, wait_s):
    """Catches the error of one event loop, at one moment: pipes close before processes end."""

    async def scenario() -> None:
        process = await WorkerProcess.start(MODULE, 1 << 20)
        assert not process.has_ended
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.sleep(wait_s)
        for _ in range(3):
            await process.send(LINE, b"{}" * 500_000)
            assert await process.read_line() == b""
        await process.kill()
        assert process.has_ended

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())
