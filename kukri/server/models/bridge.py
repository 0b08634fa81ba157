"""Connects the event loop, to which HTTP and text belong, with the engine's thread, which makes tokens.

The engine hands over what a step did by one wake-up of the event loop; there each token is put to the text of
its `Answer`, and the `LiveCall` that waits for it hands it on or is woken. Nothing here waits for the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Protocol

from kukri.calls.answer import Answer
from kukri.calls.image_prompts import image_tokens
from kukri.dataclass import dataclass
from kukri.engine import EngineStatus, Request, StepOutput
from kukri.engine.loop import Deliver
from kukri.errors import CapacityError, KukriError, failure_of
from kukri.interp.interventions.request_taps import InterventionTaps, Readout
from kukri.kernels.arrays import FloatArray
from kukri.server.errors import DeadlineError
from kukri.server.keys import Meter
from kukri.server.metrics import ModelMetrics

log = logging.getLogger("kukri.server")


class RequestLoop(Protocol):
    """Runs requests and delivers their outputs: an `EngineLoop`, or many of them elsewhere."""

    max_waiting: int

    def start(self) -> None:
        """Starts it."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests, all or none. Raises CapacityError if there is no room for them."""

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a request. Nothing is delivered."""

    def abort(self, request: Request) -> None:
        """Aborts a request."""

    def keep(self, request: Request) -> None:
        """Keeps the pages of a request that has ended longer than others, if it can."""

    def drain(self, timeout_s: float | None) -> bool:
        """Refuses new requests and waits for those there are; False if some were left at the end."""

    def stop(self) -> None:
        """Aborts the remaining requests, delivers that, and ends."""

    @property
    def is_stepping(self) -> bool:
        """True if requests are being run, or could be."""

    def status(self) -> EngineStatus:
        """Counts of all engines."""

    def statuses(self) -> Mapping[str, EngineStatus]:
        """Counts of each engine, by its name; a lone one has none, which is ""."""


# make_loop(engine, deliver, max_waiting=n): runs the requests that the engine makes
LoopMaker = Callable[..., RequestLoop]


class LiveCall:
    """The answers that one HTTP request waits for."""

    def __init__(
        self,
        bridge: Bridge,
        answers: Sequence[Answer],
        n_prompts: int,
        log_id: str,
        taps: Sequence[InterventionTaps] = (),
        meter: Meter | None = None,
    ) -> None:
        """`taps` are the interventions of each answer, which may be none; `meter` counts its tokens."""
        self.answers, self.log_id = answers, log_id
        self.meter, self.n_metered = meter or Meter(), 0
        self._taps = taps
        self.readouts: list[list[Readout]] = [[] for _ in answers]  # not yet written
        self.activations: list[dict[str, FloatArray] | None] = [None] * len(answers)  # for answers that ended
        self._n_each = len(answers) // n_prompts
        firsts = [answer.request for answer in answers[:: self._n_each]]  # those of each prompt
        self.n_prompt_tokens = sum(request.n_prompt for request in firsts)
        self.image_tokens = [n for request in firsts for n in image_tokens(request)]
        self.arrived_s = perf_counter()
        self.first_token_s = 0.0
        self.is_gone = False  # its client has left
        self.error: KukriError | None = None
        self.push: Callable[[], bool] | None = None  # hands on the new output; False if it cannot at once
        self.deadline: asyncio.TimerHandle | None = None  # fails the call, unless it ends earlier
        self._bridge = bridge
        self._waiter: asyncio.Future[None] | None = None
        self._is_changed = False

    @property
    def is_done(self) -> bool:
        """True if every answer has ended."""
        return all(answer.finish_reason is not None for answer in self.answers)

    @property
    def n_generated(self) -> int:
        """Tokens generated so far."""
        return sum(answer.n_tokens for answer in self.answers)

    @property
    def n_drafted(self) -> int:
        """Draft tokens computed."""
        return sum(answer.request.sequence.n_drafted for answer in self.answers)

    @property
    def n_accepted(self) -> int:
        """Draft tokens accepted."""
        return sum(answer.request.sequence.n_accepted for answer in self.answers)

    @property
    def n_cached_tokens(self) -> int:
        """Prompt tokens that the first answer to each prompt found in the cache."""
        return sum(answer.request.sequence.n_prefix_hit for answer in self.answers[:: self._n_each])

    @property
    def outcome(self) -> tuple[float, list[str]]:
        """Seconds since the arrival, and why each answer ended, for the metrics."""
        reasons = [answer.finish_reason or "abort" for answer in self.answers]
        return perf_counter() - self.arrived_s, reasons

    async def changed(self) -> None:
        """Waits until something has come since the last wait."""
        if not self._is_changed:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_changed = False

    async def read_out(self) -> None:
        """Takes what interventions have read and captured so far, computed off the event loop.

        Raises ActivationLimitError.
        """
        reasons: list[str | None] = []
        while self._taps and reasons != (now := [answer.finish_reason for answer in self.answers]):
            reasons = now  # an answer may end meanwhile
            await asyncio.to_thread(self._read_out, reasons)

    def _read_out(self, reasons: list[str | None]) -> None:
        for i, (answer, taps, reason) in enumerate(zip(self.answers, self._taps, reasons, strict=True)):
            if taps.has_unread:
                self.readouts[i] += taps.readouts(answer.request, is_done=reason is not None)
            if taps.captures and reason in ("stop", "length") and self.activations[i] is None:
                self.activations[i] = taps.activations(answer.request)

    def wake(self) -> None:
        """Ends the wait of `changed`."""
        self._is_changed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def advance(self) -> None:
        """Hands on the new output, by `push` or else by `wake`; an error of `push` ends the call."""
        waiter = self._waiter
        if waiter is None or waiter.done() or self.push is None or self._taps:
            self.wake()
            return
        try:
            is_pushed = self.push()
        except BaseException as error:
            self.break_off("writing the answer", error)
        else:
            if not is_pushed:
                self.wake()

    def finish(self, answer: Answer, reason: str) -> None:
        """Ends an answer here: its writer shows no more of it."""
        self._bridge.finish(answer, reason)

    def leave(self) -> None:
        """Ends the call of a client that has left: its pages are free by the next step."""
        self.is_gone = True
        self.close()
        self.wake()

    def fail(self, error: KukriError) -> None:
        """Ends the call with an error."""
        self.error = self.error or error
        self.close()
        self.wake()

    def break_off(self, what: str, error: BaseException) -> None:
        """Ends the call with an error by what an exception was raised, and logs its traceback."""
        failure = failure_of(what, error)
        log.error("request failed: %s", failure, extra={"request_id": self.log_id}, exc_info=error)
        self.fail(failure)

    def close(self) -> None:
        """Aborts all unfinished requests."""
        self._bridge.drop(self)

    def cancel_deadline(self) -> None:
        """Lets go of the timer, which would keep the call and its tokens in memory until it is due."""
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


@dataclass
class _Waiting:
    """An answer that has not ended."""

    answer: Answer
    call: LiveCall
    last_token_s: float | None = None
    n_held: int = 0  # tokens since its call was woken


class Bridge:
    """The engine's loop as the event loop sees it. All methods but `_deliver` belong to the event loop.

    `make_loop(deliver)` makes the loop, which calls `deliver` with each step's outputs. A call is woken for
    an answer's first token, for every `stream_interval` more, and for its end.
    """

    def __init__(
        self, make_loop: Callable[[Deliver], RequestLoop], metrics: ModelMetrics, stream_interval: int = 1
    ) -> None:
        self._metrics, self._stream_interval = metrics, stream_interval
        self.loop = make_loop(self._deliver)
        self._waiting: dict[int, _Waiting] = {}  # answers that have not ended, by request id
        self._computing: dict[int, Callable[[Request, str], None]] = {}  # called when a request ends
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self.is_draining = False

    @property
    def is_busy(self) -> bool:
        """True if an answer or a request for rows has not ended."""
        return bool(self._waiting or self._computing)

    def start(self) -> None:
        """Starts the engine's thread; it delivers to the event loop that runs now."""
        self._event_loop = asyncio.get_running_loop()
        self.loop.start()

    def drain(self, timeout_s: float) -> None:
        """Refuses new requests, and ends those that still run after the timeout with an error.

        Safe to call from a signal handler.
        """
        self.is_draining = True
        loop = self._event_loop
        if loop is not None:
            loop.call_soon_threadsafe(self._begin_drain, timeout_s)

    async def stop(self, timeout_s: float | None) -> None:
        """Takes no new requests, waits for the running ones and ends the engine's thread."""
        self.is_draining = True
        await asyncio.to_thread(self.loop.drain, timeout_s)
        await asyncio.to_thread(self.loop.stop)

    def submit(self, call: LiveCall, deadline_s: float | None) -> None:
        """Queues a call's requests, all or none. Raises CapacityError if there is no room for them."""
        event_loop = self._running_loop()
        for answer in call.answers:
            self._waiting[answer.request.id] = _Waiting(answer, call)
        try:
            self.loop.submit([answer.request for answer in call.answers])
        except BaseException:
            for answer in call.answers:
                del self._waiting[answer.request.id]
            raise
        self._metrics.on_prompt(call.n_prompt_tokens)
        call.meter.add(call.n_prompt_tokens, 0)
        if deadline_s is not None:
            call.deadline = event_loop.call_later(deadline_s, self._expire, call, deadline_s)

    async def compute(self, requests: Sequence[Request]) -> None:
        """Runs requests whose output is read at their end; a caller that stops waiting ends them.

        Raises CapacityError as `submit` does, and the error that ended a request.
        """
        ended: asyncio.Future[None] = self._running_loop().create_future()
        n_left = len(requests)

        def on_end(request: Request, finish_reason: str) -> None:
            nonlocal n_left
            n_left -= 1
            if ended.done():
                return
            if finish_reason not in ("stop", "length"):
                ended.set_exception(request.answer.error or KukriError("the request was aborted"))
            elif n_left == 0:
                ended.set_result(None)

        self._computing.update((request.id, on_end) for request in requests)
        try:
            self.loop.submit(requests)
            await ended
        finally:
            for request in requests:
                if self._computing.pop(request.id, None) is not None:
                    self.loop.abort(request)

    def finish(self, answer: Answer, reason: str) -> None:
        """Ends an answer; its call is woken if that was the last."""
        waiting = self._waiting.pop(answer.request.id, None)
        if waiting is not None:
            answer.finish_reason = reason
            self.loop.finish(answer.request, reason)
            waiting.call.wake()

    def drop(self, call: LiveCall) -> None:
        """Aborts the answers of a call that have not ended."""
        for answer in call.answers:
            if self._waiting.pop(answer.request.id, None) is not None:
                answer.finish_reason = "abort"
                self.loop.abort(answer.request)
        call.cancel_deadline()
        call.meter.add(0, call.n_generated - call.n_metered)
        call.n_metered = call.n_generated

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop. Raises CapacityError if no new requests are taken."""
        assert self._event_loop is not None, "the bridge has been started"
        if self.is_draining:
            raise CapacityError("the server is shutting down: try again later")
        if not self.loop.is_stepping:
            raise CapacityError("the engine is not running: try again later")
        return self._event_loop

    def _expire(self, call: LiveCall, deadline_s: float) -> None:
        if not call.is_done:
            call.fail(DeadlineError(f"the answer was not finished within {deadline_s:g} s"))

    def _begin_drain(self, timeout_s: float) -> None:
        log.info("draining", extra={"n_running": len(self._waiting), "timeout_s": timeout_s})
        asyncio.get_running_loop().call_later(timeout_s, self._end_all)

    def _end_all(self) -> None:
        for call in {id(waiting.call): waiting.call for waiting in self._waiting.values()}.values():
            call.fail(CapacityError("the server is shutting down: try again later"))

    def _deliver(self, outputs: list[StepOutput]) -> None:
        """On the engine's thread: hands a step's outputs to the event loop."""
        assert self._event_loop is not None
        with suppress(RuntimeError):  # the event loop has been closed
            self._event_loop.call_soon_threadsafe(self._receive, outputs)

    def _receive(self, outputs: list[StepOutput]) -> None:
        now_s = perf_counter()
        advanced: dict[LiveCall, None] = {}  # once for all its answers
        n_since: dict[float, int] = {}  # tokens, by the time of the one before each
        for request, token, finish_reason in outputs:
            if finish_reason is not None and request.id in self._computing:
                self._computing.pop(request.id)(request, finish_reason)
                continue
            waiting = self._waiting.get(request.id)
            if waiting is None:  # dropped meanwhile
                continue
            last_s = waiting.last_token_s
            if token is not None:
                waiting.last_token_s = now_s
                if last_s is None:
                    self._count_first(waiting, now_s)
                else:
                    n_since[last_s] = n_since.get(last_s, 0) + 1
            try:
                stop = waiting.answer.push(token, finish_reason)
            except BaseException as error:
                waiting.call.break_off("the text of the answer", error)
                continue
            if stop is not None and finish_reason is None:
                self.loop.finish(request, "stop", stop)
            if waiting.answer.finish_reason is not None:
                self._end(waiting)
            waiting.n_held += 1
            if last_s is None or waiting.n_held >= self._stream_interval:
                waiting.n_held = 0
                advanced[waiting.call] = None
        for last_s, n in n_since.items():
            self._metrics.on_tokens(now_s - last_s, n)
        for call in advanced:
            call.advance()

    def _end(self, waiting: _Waiting) -> None:
        """Lets go of an answer that has ended, and wakes its call."""
        answer, call = waiting.answer, waiting.call
        del self._waiting[answer.request.id]
        if answer.finish_reason in ("error", "abort"):
            self._on_failure(answer, call)
        if call.is_done:
            call.cancel_deadline()
        call.wake()

    def _count_first(self, waiting: _Waiting, now_s: float) -> None:
        call, request = waiting.call, waiting.answer.request
        call.first_token_s = call.first_token_s or now_s
        queue_s = max(request.times.started_s - request.times.arrived_s, 0.0)
        self._metrics.on_first_token(now_s - call.arrived_s, queue_s)

    def _on_failure(self, answer: Answer, call: LiveCall) -> None:
        error = answer.request.answer.error or KukriError("the request was aborted")
        cause = error.__cause__  # what a request's own code raised
        log.error("request failed: %s", error, extra={"request_id": call.log_id}, exc_info=cause)
        call.fail(error)
