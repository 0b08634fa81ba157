"""Refuses grammars that take too long to compile, before the engine's process compiles them.

A schema of 1 kB can keep a compiler busy for minutes, and nothing inside a process can stop it. So each new
grammar is first compiled in another process (`grammar_worker.py`), which is killed when its time is over.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from contextlib import suppress
from hashlib import sha256

from kukri.errors import KukriError, RequestError
from kukri.sampling import Grammar
from kukri.tokenizer import Tokenizer

_MOST_S = 60.0  # until an answer, or until the process is ready
_MAX_KNOWN = 1000  # grammars that passed
_MAX_LINE = 1 << 20  # bytes of an answer


class GrammarCheck:
    """Has new grammars compiled elsewhere, one at a time. Belongs to one event loop.

    The process for it starts with the first grammar and lives until `close`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._process: Process | None = None
        self._lock = asyncio.Lock()
        self._known: OrderedDict[bytes, None] = OrderedDict()

    async def check(self, grammar: Grammar) -> None:
        """Returns if the grammar compiles in time; raises RequestError if not."""
        if importlib.util.find_spec("llguidance") is None:
            return  # the engine says so
        line = json.dumps({"kind": grammar.kind, "source": grammar.source, "reasoning": grammar.reasoning,
                           "param": grammar.param})  # fmt: skip
        key = sha256(line.encode()).digest()
        if key in self._known:
            self._known.move_to_end(key)
            return
        async with self._lock:
            failure = await self._failure(line)
        if failure is not None:
            raise RequestError(failure, param=grammar.param, code="invalid_value")
        self._known[key] = None
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    async def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _failure(self, line: str) -> str | None:
        try:
            process = self._process or await self._start()
            failure: str | None = json.loads(await self._ask(process, line))
        except BaseException:  # a request that is cancelled leaves an answer that nobody reads
            await self.close()
            raise
        return failure

    async def _start(self) -> Process:
        tokenizer = self._tokenizer
        vocabulary = {
            "tokens": [tokenizer.token_bytes(i).decode("latin-1") for i in range(tokenizer.n_vocab)],
            "eos_ids": sorted(tokenizer.eos_ids),
            "special_ids": sorted(tokenizer.special_ids),
        }
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kukri.server.grammar_worker", stdin=PIPE, stdout=PIPE, limit=_MAX_LINE
        )
        await self._ask(process, json.dumps(vocabulary))
        return process

    @staticmethod
    async def _ask(process: Process, line: str) -> bytes:
        """The line that answers a line. Raises KukriError if the process has ended."""
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        async with asyncio.timeout(_MOST_S):
            with suppress(ConnectionError):
                process.stdin.write(line.encode() + b"\n")
                await process.stdin.drain()
            answer = await process.stdout.readline()
        if not answer:
            raise KukriError("the process that compiles grammars has ended: see the log")
        return answer
