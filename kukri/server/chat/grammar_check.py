"""Refuses grammars that take too long to compile, before the engine's process compiles them.

A schema of 1 kB can keep a compiler busy for minutes, and nothing inside a process can stop it. So each new
grammar is first compiled in another process (`grammar_worker.py`), which is killed when its time is over.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
from collections import OrderedDict
from contextlib import suppress
from hashlib import sha256
from itertools import count

from kukri.errors import CapacityError, KukriError, RequestError
from kukri.sampling import Grammar
from kukri.server.chat.grammar_worker import Outcome
from kukri.server.worker_process import WorkerProcess
from kukri.tokenizer import Tokenizer

log = logging.getLogger("kukri.server")

_SETTLE_S = 2.0  # from when a model is ready
_MOST_S = 60.0  # until the process is ready
_ANSWER_S = 30.0  # a worker gives each grammar a few seconds: without an answer by then it hangs
_MAX_KNOWN = 1000  # grammars that passed
_MAX_LINE = 1 << 20  # bytes of an answer

_Answer = asyncio.Future[tuple[Outcome, str | None]]


class GrammarCheck:
    """Has new grammars compiled elsewhere, a few at a time. Belongs to one event loop.

    The process for it starts after `start_soon`, or the first grammar, and lives until `close`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._process: WorkerProcess | None = None
        self._start: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._numbers = count(1)
        self._answers: dict[int, _Answer] = {}  # that are awaited
        self._checks: dict[bytes, _Answer] = {}  # by grammar
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def start_soon(self) -> None:
        """Starts the process once the first requests are under way, so that no grammar waits for it.

        Encoders, whose texts have no end, have no grammars.
        """
        if importlib.util.find_spec("llguidance") is not None and self._tokenizer.eos_ids:
            self._start = asyncio.create_task(self._start_later())

    async def check(self, grammar: Grammar) -> None:
        """Returns if the grammar compiles in time.

        Raises RequestError if not, and CapacityError if the machine was too busy to tell.
        """
        if importlib.util.find_spec("llguidance") is None:
            return  # the engine says so
        source = json.dumps({"kind": grammar.kind, "source": grammar.source, "before": grammar.before,
                             "param": grammar.param})  # fmt: skip
        key = sha256(source.encode()).digest()
        if key in self._known:
            self._known.move_to_end(key)
            return
        if key not in self._checks:  # the same grammar many times at once is compiled once
            self._checks[key] = check = asyncio.ensure_future(self._outcome(source))
            check.add_done_callback(lambda check: self._forget(key, check))
        outcome, reason = await asyncio.shield(self._checks[key])
        if outcome == "busy":
            raise CapacityError("too many grammars are being compiled: try again later")
        if outcome == "bad":
            raise RequestError(reason or "", param=grammar.param, code="invalid_value")
        if reason is not None and key not in self._known:
            log.warning("%s: its schemas are enforced only in part: %s", grammar.param, reason)
        self._known[key] = None
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def _forget(self, key: bytes, check: _Answer) -> None:
        del self._checks[key]
        if not check.cancelled():
            check.exception()  # which nobody may have waited for

    async def close(self) -> None:
        """Ends the process."""
        if self._start is not None:
            self._start.cancel()
            await asyncio.gather(self._start, return_exceptions=True)
        await self._kill()
        if self._reader is not None:
            await self._reader

    async def _start_later(self) -> None:
        await asyncio.sleep(_SETTLE_S)
        with suppress(KukriError, OSError):  # the first grammar tries again, and its request fails
            await self._running()

    async def _kill(self) -> None:
        """Ends the process, if there is one; whoever waits for its answers gets KukriError."""
        process, self._process = self._process, None
        if process is None:
            return
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(
                    KukriError("the process that compiles grammars has ended: see the server's log")
                )
        await process.kill()

    async def _outcome(self, source: str) -> tuple[Outcome, str | None]:
        process = await self._running()
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            async with asyncio.timeout(_ANSWER_S):
                await process.send(f"[{number}, {source}]\n".encode())
                outcome: tuple[Outcome, str | None] = await answer
        except TimeoutError:
            log.error(
                "the process that compiles grammars does not answer and is restarted for the next grammar"
            )
            for other in self._answers.values():
                if not other.done():
                    other.set_result(("busy", None))
            await self._kill()
            return "busy", None
        finally:
            del self._answers[number]
        return outcome

    async def _running(self) -> WorkerProcess:
        """The process, ready. Raises KukriError if it does not start."""
        async with self._starting:
            if self._process is not None and self._process.has_ended:
                await self._kill()
            if self._process is None:
                self._process = process = await WorkerProcess.start(
                    "kukri.server.chat.grammar_worker", _MAX_LINE
                )
                try:
                    await self._send_vocabulary(process)
                except BaseException:
                    await self._kill()
                    raise
                self._reader = asyncio.create_task(self._read_answers(process))
            return self._process

    async def _send_vocabulary(self, process: WorkerProcess) -> None:
        """Returns when the process is ready for grammars."""
        vocabulary = await asyncio.to_thread(self._vocabulary)  # a tenth of a second, perhaps amid streams
        async with asyncio.timeout(_MOST_S):
            await process.send(vocabulary)
            if not await process.read_line():
                raise KukriError("the process that compiles grammars has ended: see the server's log")

    def _vocabulary(self) -> bytes:
        """The line of JSON that tells the process which tokens there are."""
        tokenizer = self._tokenizer
        vocabulary = {
            "tokens": [tokenizer.token_bytes(i).decode("latin-1") for i in range(tokenizer.n_vocab)],
            "eos_ids": sorted(tokenizer.eos_ids),
            "special_ids": sorted(tokenizer.special_ids),
        }
        return json.dumps(vocabulary).encode() + b"\n"

    async def _read_answers(self, process: WorkerProcess) -> None:
        """Hands out the lines of the process until it ends."""
        while line := await process.read_line():
            number, outcome, reason = json.loads(line)
            if number in self._answers and not self._answers[number].done():
                self._answers[number].set_result((outcome, reason))
        if self._process is process:  # the next grammar starts another
            await self._kill()
