"""The engine's own thread: requests come in from any thread, tokens go out once per step."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from time import monotonic, perf_counter

from kukri.dataclass import dataclass
from kukri.engine.engine import Engine
from kukri.engine.request import Request
from kukri.engine.scheduled_step import StepOutput
from kukri.engine.sequence import RequestState
from kukri.engine.timings import Timestamps
from kukri.engine.traces import Facts
from kukri.errors import CapacityError, KukriError, failure_of

logger = logging.getLogger("kukri.engine")

Deliver = Callable[[list[StepOutput]], None]
_STALL_S = 30.0  # a step that takes longer counts as stuck
_IDLE_S = 1.0  # without work, before the engine looks itself over


@dataclass(frozen=True)
class EngineStatus:
    """The engine at one moment, and its counts since the start. Pages and tokens, not bytes."""

    n_running: int
    n_waiting: int
    n_pages: int
    n_pages_held: int  # by running requests
    n_pages_cached: int  # pages with a known prefix, held by a request or not
    n_preemptions: int
    n_prefix_hit: int  # prompt tokens found in the cache
    n_restored: int  # how many of those were read from disk
    n_computed: int  # tokens computed, rejected drafts left out
    n_drafted: int  # draft tokens computed
    n_accepted: int  # how many of those were accepted
    n_generated: int  # tokens generated
    n_steps: int
    busy_s: float  # wall time of all steps


class EngineLoop:
    """Runs an engine on a thread of its own.

    `deliver` is called on that thread, once after each step, with the requests' outputs; it must be quick and
    must not raise. At most `max_waiting` requests wait for their first step. The engine belongs to
    the thread from `start` on: only its makers of requests may be called from other threads.

    Attributes: has_failed, True once the thread has ended by an error, which then ends every request;
    n_faults, the times that the idle engine's pages did not add up.
    """

    def __init__(self, engine: Engine, deliver: Deliver, *, max_waiting: int = 256) -> None:
        self.engine, self.max_waiting = engine, max_waiting
        self._deliver = deliver
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()  # run between steps, in order
        self._calls: set[Future[None]] = set()  # the futures of commands that have not run
        self._live: dict[int, Request] = {}  # submitted and not ended; changed under _wake
        self._is_draining = self._is_stopping = self.has_failed = False
        self._busy_since: float | None = None
        self._n_steps = self._n_generated = self.n_faults = 0
        self._busy_s = 0.0
        self._thread = threading.Thread(target=self._run, name="kukri-engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests, all or none.

        Raises CapacityError if too many wait already, if one could never fit, or while draining.
        """
        for request in requests:
            self.engine.maker.check_fits(request)
        with self._wake:
            self._check_room(len(requests))
            for request in requests:
                self._live[request.id] = request
            self._commands.append(lambda: self._add(requests))
            self._wake.notify()

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a request before the next step, for example at a stop string. Nothing is delivered."""
        with self._wake:
            has_ended = self._live.pop(request.id, None) is None
            self._commands.append(lambda: self.engine.finish(request, reason, stop_reason))
            self._wake.notify()
        if not has_ended:
            _trace(request, reason)

    def abort(self, request: Request) -> None:
        """Aborts a request before the next step; its pages are free then."""
        self.finish(request, "abort")

    def keep(self, request: Request) -> None:
        """Keeps the pages of a request that has ended longer than others: its conversation will continue."""
        with self._wake:
            self._commands.append(lambda: self.engine.keep(request))
            self._wake.notify()

    def call(self, command: Callable[[], None]) -> Future[None]:
        """Run a command of the engine between two steps; the future has its exception.

        Raises CapacityError if the engine stops.
        """
        done: Future[None] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():  # the waiting caller has left
                return
            try:
                command()
            except BaseException as error:
                done.set_exception(error)
                if not isinstance(error, Exception):  # such an exception ends the thread
                    raise
            else:
                done.set_result(None)

        with self._wake:
            if self._is_stopping:
                raise CapacityError("the server is shutting down: try again later")
            self._commands.append(run)
            self._calls.add(done)
            done.add_done_callback(self._calls.discard)
            self._wake.notify()
        return done

    def drain(self, timeout_s: float | None) -> bool:
        """Refuses new requests and waits for those there are; False if some were left at the end.

        Without a timeout it waits as long as they take.
        """
        with self._wake:
            self._is_draining = True
            return self._wake.wait_for(lambda: not self._live, timeout_s)

    def stop(self) -> None:
        """Aborts the remaining requests, delivers that, and ends the thread."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_stepping(self) -> bool:
        """True if the thread is alive and its current step, if any, has not taken too long."""
        since = self._busy_since
        return self._thread.is_alive() and (since is None or monotonic() - since < _STALL_S)

    def statuses(self) -> dict[str, EngineStatus]:
        """The counts of each replica by its name: this engine is the only one, and has none."""
        return {"": self.status()}

    def status(self) -> EngineStatus:
        """Counts, read without waiting for the running step."""
        engine = self.engine
        scheduler, pool = engine.scheduler, engine.pool
        n_running = len(scheduler.running)
        return EngineStatus(
            n_running=n_running,
            n_waiting=max(len(self._live) - n_running, 0),
            n_pages=pool.n_pages,
            n_pages_held=pool.n_pages - pool.n_free,
            n_pages_cached=pool.n_cached,
            n_preemptions=scheduler.n_preemptions,
            n_prefix_hit=engine.allocator.n_prefix_hit,
            n_restored=engine.allocator.n_restored,
            n_computed=scheduler.n_computed,
            n_drafted=scheduler.n_drafted,
            n_accepted=scheduler.n_accepted,
            n_generated=self._n_generated,
            n_steps=self._n_steps,
            busy_s=self._busy_s,
        )

    def _check_room(self, n_more: int) -> None:
        if self._is_draining or self._is_stopping:
            raise CapacityError("the server is shutting down: try again later")
        n_waiting = len(self._live) - len(self.engine.scheduler.running)
        if n_waiting + n_more > self.max_waiting:
            raise CapacityError(f"{n_waiting} requests are already waiting: try again later")

    def _add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.sequence.state is not RequestState.NEW:  # it was ended before it got here
                continue
            try:
                self.engine.add_request(request)
            except Exception as error:
                request.answer.error = failure_of("queueing the request", error)
                self.engine.finish(request, "error")
                self._deliver_ended()

    def _run(self) -> None:
        try:
            while self._next_commands():
                if self.engine.has_work:
                    self._step()
            for request in list(self._live.values()):
                self.engine.abort(request)
            self._deliver_ended()
            self._fail_calls(CapacityError("the server is shutting down: try again later"))
        except BaseException:
            logger.critical("the engine stopped", exc_info=True)
            self._fail_all()
            raise

    def _next_commands(self) -> bool:
        """Waits for work and runs the queued commands; False if the loop is to stop."""
        if not self.engine.has_work and not self._wait_for_news(_IDLE_S):
            self._inspect()  # takes long: no thread that submits may wait for it
            self._wait_for_news(None)
        with self._wake:
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command()
        return not self._is_stopping

    def _inspect(self) -> None:
        """Check the books of the idle engine. An error is logged, and ends no answer."""
        try:
            self.engine.check_integrity()
        except Exception:
            self.n_faults += 1
            logger.exception("the idle engine's pages do not add up: report this as a bug")

    def _wait_for_news(self, timeout_s: float | None) -> bool:
        """Waits until there is something to do; False if nothing has come within `timeout_s`."""
        with self._wake:
            return self._wake.wait_for(self._has_news, timeout_s)

    def _has_news(self) -> bool:
        return bool(self._commands) or self._is_stopping

    def _step(self) -> None:
        started_s = perf_counter()
        self._busy_since = monotonic()
        try:
            outputs = self.engine.step()
        except Exception as error:  # it failed the requests of the step, delivered below
            level = logging.WARNING if isinstance(error, KukriError) else logging.ERROR
            logger.log(level, "a step failed: %s", error, exc_info=not isinstance(error, KukriError))
            self._deliver_ended()
            return
        finally:
            self._busy_since = None
            self._busy_s += perf_counter() - started_s
        self._n_steps += 1
        self._n_generated += sum(output.token is not None for output in outputs)
        outputs = [output for output in outputs if output.request.id in self._live]  # else ended meanwhile
        self._forget([output.request for output in outputs if output.finish_reason is not None])
        if outputs:
            self._deliver(outputs)

    def _deliver_ended(self) -> None:
        """Tells the requests that ended without a token."""
        ended = [request for request in self._live.values() if request.has_ended]
        self._forget(ended)
        if ended:
            self._deliver([StepOutput(request, None, request.answer.finish_reason) for request in ended])

    def _fail_all(self) -> None:
        """Fails every request with the engine's error, and refuses new ones."""
        with self._wake:
            self._is_stopping = self.has_failed = True
            left = list(self._live.values())
        error = KukriError("the engine stopped: see the log")
        for request in left:
            request.answer.error = request.answer.error or error
        self._fail_calls(error)
        self._forget(left)
        self._deliver([StepOutput(request, None, "error") for request in left])

    def _fail_calls(self, error: KukriError) -> None:
        """Ends the calls whose commands will not run any more."""
        with self._wake:
            self._is_stopping = True  # no more come
            left = list(self._calls)
        for call in left:
            if call.set_running_or_notify_cancel():
                call.set_exception(error)

    def _forget(self, requests: list[Request]) -> None:
        if not requests:
            return
        with self._wake:
            ended = [request for request in requests if self._live.pop(request.id, None) is not None]
            if not self._live:
                self._wake.notify_all()
        for request in ended:
            try:
                _trace(request, request.answer.finish_reason or "error")
            except Exception:
                logger.exception("the trace of a request failed")


def _trace(request: Request, reason: str) -> None:
    """Writes the times of a request that has ended to the trace that it belongs to, if there is one."""
    times, sequence, trace = request.times, request.sequence, request.times.trace
    if trace is None:
        return
    now_s = perf_counter()
    started_s, first_s = times.started_s or now_s, times.first_token_s or now_s
    trace.record("queue", times.arrived_s, started_s, {})
    if times.started_s:
        prompt: Facts = {
            "gen_ai.usage.input_tokens": request.n_prompt,
            "kukri.cached_tokens": sequence.n_prefix_hit,
        }
        trace.record("prefill", started_s, first_s, {**prompt, **_stages(times, "prefill")})
    if times.first_token_s:
        answer: Facts = {
            "gen_ai.usage.output_tokens": request.n_generated,
            "gen_ai.response.finish_reasons": [reason],
            "kukri.drafted_tokens": sequence.n_drafted,
            "kukri.accepted_tokens": sequence.n_accepted,
            "kukri.preemptions": sequence.n_preemptions,
        }
        trace.record("decode", first_s, times.last_token_s, {**answer, **_stages(times, "decode")})


def _stages(times: Timestamps, part: str) -> Facts:
    """Seconds that a part's steps were in other stages, and that these computed; empty without stages."""
    names, found = ("kukri.stages.elapsed_s", "kukri.stages.compute_s"), times.stage_s.get(part, ())
    return dict(zip(names, found, strict=bool(found)))
