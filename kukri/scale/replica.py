"""A replica: an engine that runs the requests of fronts.

A front sends requests in messages of the kind "run", and "end" for those whose clients have left. A step's
tokens go back in one message for all requests of a front, and messages follow one another after 10 ms at the
earliest: each costs both sides a wake-up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

from kukri.dataclass import asdict, dataclass, field
from kukri.engine import EngineLoop, Request, StepOutput
from kukri.engine.traces import Traces
from kukri.errors import KukriError
from kukri.llm import LLM
from kukri.sampling import resolve_texts
from kukri.scale import wire
from kukri.scale.channel import BEAT_S, Channel
from kukri.scale.facts import ReplicaFacts, replica_facts

log = logging.getLogger("kukri.scale")
_JOIN_S = 0.010  # between two messages with tokens
_MAX_QUEUE = 1 << 20  # requests: fronts have limits of their own


@dataclass(eq=False)
class _Running:
    """A request of a front, by the ticket that the front gave it."""

    ticket: int
    request: Request
    front: _Front
    is_new: bool = True  # nothing has been sent


@dataclass(eq=False)
class _Front:
    """A front that is connected."""

    channel: Channel
    running: dict[int, _Running] = field(default_factory=dict)  # by ticket
    dropped: set[int] = field(default_factory=set)  # tickets that ended while their requests were made
    unsent: dict[int, dict[str, Any]] = field(default_factory=dict)  # news of requests, by ticket
    sent_s: float = 0.0
    timer: asyncio.TimerHandle | None = None
    n_waiting: int = 0  # requests that the front holds back for want of room
    has_parted: bool = False  # it sends no more requests, as the replica drains


class EngineReplica:
    """An open model that runs requests of fronts. Belongs to one event loop.

    Attributes: facts.
    """

    def __init__(self, llm: LLM, name: str, traces: Traces | None = None) -> None:
        self._llm, self._tokenizer, self._traces = llm, llm.tokenizer, traces
        self.facts: ReplicaFacts = replica_facts(llm, name)
        self._loop = EngineLoop(llm.engine, self._deliver, max_waiting=_MAX_QUEUE)
        self._fronts: dict[str, _Front | None] = {}  # by secret; None while it is being connected
        self._running: dict[int, _Running] = {}  # by request id
        self._n_taking = 0  # messages whose requests are being made
        self._tasks: set[asyncio.Task[None]] = set()
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self.is_draining = False

    @property
    def is_well(self) -> bool:
        """False if the engine has ended, or is stuck in a step."""
        return self._event_loop is None or self._loop.is_stepping

    @property
    def n_ongoing(self) -> int:
        """Requests that run or wait here."""
        return len(self._running)

    @property
    def kv_share(self) -> float:
        """The share of the KV pages that requests hold."""
        status = self._loop.status()
        return status.n_pages_held / status.n_pages

    @property
    def n_held_back(self) -> int:
        """Requests that fronts hold back for lack of room, at most: all replicas are told the same."""
        return max((front.n_waiting for front in self._fronts.values() if front is not None), default=0)

    def start(self) -> None:
        """Starts the engine's thread; it delivers to the event loop that runs now."""
        self._event_loop = asyncio.get_running_loop()
        self._loop.start()
        self._run(self._beat())

    async def connect(self, host: str, port: int, secret: str) -> None:
        """Serves the front that listens there until it goes, unless it is served already."""
        if secret in self._fronts or self.is_draining or not self.is_well:
            return
        self._fronts[secret] = None
        try:
            channel = await Channel.connected(host, port, secret)
        except (OSError, ValueError) as error:
            del self._fronts[secret]
            log.warning("no front listens on %s port %d: %s", host, port, error)
            return
        channel.send({"kind": "hello", "facts": asdict(self.facts)})
        channel.send(self._status())
        front = self._fronts[secret] = _Front(channel)
        self._run(self._serve(front, secret))

    async def drain(self, timeout_s: float) -> None:
        """Have the fronts send no more requests, and wait until the running requests have ended."""
        self.is_draining = True
        self._tell({"kind": "draining"})
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.is_well and not self._is_idle:
                    await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Ends all connections and the engine's thread."""
        self._leave()
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self._loop.stop)
        await asyncio.to_thread(self._llm.close)
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)

    @property
    def _is_idle(self) -> bool:
        """True if nothing runs or is about to, may still come from a front, or is to be sent to one."""
        fronts = self._connected()
        is_quiet = all(front.has_parted and not front.unsent for front in fronts)
        return is_quiet and not self._running and not self._n_taking

    def _connected(self) -> list[_Front]:
        return [front for front in self._fronts.values() if front is not None]

    def _run(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _status(self) -> dict[str, Any]:
        return {"kind": "status", "status": asdict(self._loop.status())}

    def _tell(self, message: dict[str, Any]) -> None:
        for front in self._connected():
            front.channel.send(message)

    async def _beat(self) -> None:
        """Report the engine's counts to the fronts every second; disconnect if the engine is stuck."""
        while True:
            if self.is_well:
                self._tell(self._status())
            else:
                self._leave()
            await asyncio.sleep(BEAT_S)

    def _leave(self) -> None:
        """Ends all connections, so that the fronts let other replicas run their requests."""
        for front in self._connected():
            front.channel.close()

    async def _serve(self, front: _Front, secret: str) -> None:
        """Run a front's requests until it disconnects; then abort the running requests."""
        try:
            while (message := await front.channel.receive()) is not None:
                if message["kind"] == "run":
                    self._n_taking += 1
                    self._run(self._take(front, message["requests"]))
                elif message["kind"] == "end":
                    self._end(front, message["ticket"])
                elif message["kind"] == "parted":
                    front.has_parted = True
                elif message["kind"] == "beat":
                    front.n_waiting = message["n_waiting"]
        finally:
            front.channel.close()
            self._fronts.pop(secret, None)
            for running in list(front.running.values()):
                self._forget(running)
                self._loop.abort(running.request)

    async def _take(self, front: _Front, given: Sequence[dict[str, Any]]) -> None:
        """Makes a front's requests and queues them. The first of several answers to one prompt leads them."""
        try:
            self._queue(front, given, await asyncio.to_thread(self._make, given))
        finally:
            self._n_taking -= 1

    def _queue(
        self, front: _Front, given: Sequence[dict[str, Any]], made: Sequence[Request | KukriError]
    ) -> None:
        for fields, result in zip(given, made, strict=True):
            ticket = fields["ticket"]
            if ticket in front.dropped:
                front.dropped.discard(ticket)
                continue
            error = result if isinstance(result, KukriError) else None
            if isinstance(result, Request):
                leader = front.running.get(fields["leader"])
                result.sequence.leader = None if leader is None else leader.request.sequence
                if self._traces is not None and fields["traceparent"] is not None:
                    result.times.trace = self._traces.beneath(fields["traceparent"])
                front.running[ticket] = self._running[result.id] = _Running(ticket, result, front)
                try:
                    self._loop.submit([result])
                except KukriError as raised:
                    self._forget(front.running[ticket])
                    error = raised
            if error is not None:
                front.unsent[ticket] = {"end": {"reason": "error", "error": wire.error_to_json(error)}}
                self._send_soon(front)

    def _make(self, given: Sequence[dict[str, Any]]) -> list[Request | KukriError]:
        """Return each request, with its grammar compiled, or its error."""
        made: list[Request | KukriError] = []
        for fields in given:
            try:
                params = resolve_texts(wire.params_from_json(fields.get("params", {})), self._tokenizer)
                made.append(wire.request_from_json(fields, self._llm.engine.maker, params))
            except KukriError as error:
                made.append(error)
            except Exception as error:  # else its client would wait forever
                log.exception("a request of a front could not be made")
                made.append(KukriError(f"the request could not be made: {error}"))
        return made

    def _end(self, front: _Front, ticket: int) -> None:
        running = front.running.get(ticket)
        if running is None:
            front.dropped.add(ticket)
        else:
            self._forget(running)
            self._loop.abort(running.request)

    def _forget(self, running: _Running) -> None:
        running.front.running.pop(running.ticket, None)
        self._running.pop(running.request.id, None)

    def _deliver(self, outputs: list[StepOutput]) -> None:
        """On the engine's thread: hands a step's outputs to the event loop."""
        assert self._event_loop is not None, "the replica has been started"
        # now: the next step changes them
        states = [None if one.request.sampler is None else one.request.sampler.mirostat_mu for one in outputs]
        with suppress(RuntimeError):  # the event loop has been closed
            self._event_loop.call_soon_threadsafe(self._receive, outputs, states)

    def _receive(self, outputs: list[StepOutput], mirostat_states: list[float | None]) -> None:
        if self._loop.has_failed:
            self._leave()
            return
        fronts: dict[int, _Front] = {}
        for (request, token, finish_reason), mirostat_mu in zip(outputs, mirostat_states, strict=True):
            running = self._running.get(request.id)
            if running is None:  # dropped meanwhile
                continue
            self._note(running, token, finish_reason)
            if mirostat_mu is not None:
                running.front.unsent[running.ticket]["mirostat_mu"] = mirostat_mu
            fronts[id(running.front)] = running.front
        for front in fronts.values():
            self._send_soon(front)

    def _note(self, running: _Running, token: Any, finish_reason: str | None) -> None:
        """Adds an output to the news of its request."""
        request = running.request
        news = running.front.unsent.setdefault(running.ticket, {"tokens": []})
        if running.is_new:
            running.is_new = False
            news["queue_s"] = max(request.times.started_s - request.times.arrived_s, 0.0)
            news["n_prefix_hit"] = request.sequence.n_prefix_hit
            if request.answer.prompt_logprobs:
                news["prompt_logprobs"] = list(map(wire.token_to_json, request.answer.prompt_logprobs))
        if token is not None:
            news["tokens"].append(wire.token_to_json(token))
        if finish_reason is not None:
            self._forget(running)
            news["end"] = {
                "reason": finish_reason,
                "stop_reason": request.answer.stop_reason,
                "error": None if request.answer.error is None else wire.error_to_json(request.answer.error),
                "rows": None if request.answer.rows is None else wire.rows_to_json(request.answer.rows),
                "n_drafted": request.sequence.n_drafted,
                "n_accepted": request.sequence.n_accepted,
            }

    def _send_soon(self, front: _Front) -> None:
        """Sends a front its news, at least 10 ms after the last."""
        if front.timer is not None:
            return
        wait_s = front.sent_s + _JOIN_S - perf_counter()
        if wait_s <= 0:
            self._send(front)
        else:
            front.timer = asyncio.get_running_loop().call_later(wait_s, self._send, front)

    def _send(self, front: _Front) -> None:
        front.timer, front.sent_s = None, perf_counter()
        news, front.unsent = front.unsent, {}
        front.channel.send({"kind": "news", "news": [{"ticket": t, **one} for t, one in news.items()]})
