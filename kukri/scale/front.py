"""A front: runs the requests of a server on replicas.

`ReplicaLoop` stands where a server on its own has an `EngineLoop`. It holds requests in a queue that is fair
among clients, sends each to a replica that has room, and delivers the tokens as they come. When a replica
dies, its requests go to another with the tokens they have so far. As results are the same bits everywhere,
their answers continue as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields, replace
from random import Random
from time import perf_counter
from typing import Any

from kukri.engine import EngineStatus, Request, RequestState, StepOutput
from kukri.engine.loop import Deliver
from kukri.engine.traces import Facts
from kukri.engine.waiting import WaitingQueue
from kukri.errors import CapacityError, KukriError
from kukri.scale import wire
from kukri.scale.channel import BEAT_S, Channel
from kukri.scale.facts import ReplicaFacts
from kukri.scale.front_model import RemoteEngine
from kukri.scale.replica_set import LiveRequest, Replica, ReplicaSet

log = logging.getLogger("kukri.scale")
# has replicas connect to (host, port, secret); called every second. `n_waiting` requests wait for one
Invite = Callable[[str, int, str, int], Awaitable[None]]
_ABSENT_S = 120.0  # without any replica, after which new requests are refused
_MAX_DEATHS = 2  # deaths of replicas, without a token in between, until a request counts as their cause
_MAX_RUNS = 20  # times that a request is tried


class ReplicaLoop:
    """Runs requests on replicas, as `EngineLoop` runs them here; see that for its methods.

    Listens on `host` for the replicas that `invite` brings. Belongs to the event loop, but for `drain` and
    `stop`, which wait.

    Attributes: n_generated, tokens delivered; n_retries, requests that ran again because a replica went.
    """

    def __init__(
        self,
        engine: RemoteEngine,
        deliver: Deliver,
        *,
        max_waiting: int,
        model_identity: str,
        invite: Invite,
        host: str = "127.0.0.1",
    ) -> None:
        self.engine, self.max_waiting = engine, max_waiting
        self._deliver, self._invite, self._host = deliver, invite, host
        self._secret = secrets.token_hex(32)
        self._queue = WaitingQueue()
        self._live: dict[int, LiveRequest] = {}  # by request id
        self._replicas = ReplicaSet(model_identity)
        self._n_tickets = self.n_generated = self.n_retries = 0
        self._changed = threading.Condition()  # tells that `_live` is empty
        self._is_draining = False
        self._server: asyncio.Server | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begins to listen for replicas."""
        self._event_loop = asyncio.get_running_loop()
        self._run(self._listen())

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests, all or none. Raises CapacityError as `EngineLoop.submit` does."""
        for request in requests:
            self.engine.maker.check_fits(request)
        if self._is_draining:
            raise CapacityError("the server is shutting down: try again later")
        if len(self._queue) + len(requests) > self.max_waiting:
            raise CapacityError(f"{len(self._queue)} requests are already waiting: try again later")
        for request in requests:
            if request.output == "tokens" and not request.params.is_greedy and request.params.seed is None:
                # else another replica could not draw the same tokens
                request.params = replace(request.params, seed=Random().getrandbits(63))
            request.sequence.state = RequestState.WAITING
            # its last token is always computed
            keys = request.sequence.page_keys[: (request.n_prompt - 1) // self.engine.maker.page_tokens]
            self._live[request.id] = LiveRequest(request, keys, queued_s=request.times.arrived_s)
            self._queue.arrive(request)
        self._dispatch()

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a request. Nothing is delivered."""
        live = self._live.get(request.id)
        if live is None:
            return
        request.answer.finish_reason, request.answer.stop_reason = reason, stop_reason
        if live.replica is not None:
            live.replica.channel.send({"kind": "end", "ticket": live.ticket})
        self._forget(live)
        self._dispatch()

    def abort(self, request: Request) -> None:
        """Aborts a request."""
        self.finish(request, "abort")

    def keep(self, request: Request) -> None:
        """Does nothing: a replica forgets a request when it ends."""

    def drain(self, timeout_s: float | None) -> bool:
        """Refuse new requests and wait for the running ones; return False if some were left at the end."""
        with self._changed:
            self._is_draining = True
            return self._changed.wait_for(lambda: not self._live, timeout_s)

    def stop(self) -> None:
        """Aborts the remaining requests, delivers that, and ends all connections."""
        if self._event_loop is not None and not self._event_loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._close(), self._event_loop).result()

    @property
    def is_stepping(self) -> bool:
        """True if there are replicas, or there were not long ago, because others may be starting."""
        return bool(self._replicas) or self._replicas.absent_s() < _ABSENT_S

    def status(self) -> EngineStatus:
        """Counts of all replicas, and the requests that wait here."""
        found = list(self.statuses().values())
        sums = {one.name: sum(getattr(status, one.name) for status in found) for one in fields(EngineStatus)}
        sums["n_waiting"] += len(self._queue)
        return EngineStatus(**sums)

    def statuses(self) -> Mapping[str, EngineStatus]:
        """Counts of each replica, as it told them last, by its name."""
        return {one.facts.name: one.status for one in self._replicas if one.status is not None}

    @property
    def replicas(self) -> Mapping[str, ReplicaFacts]:
        """The replicas that are connected, by name."""
        return {replica.facts.name: replica.facts for replica in self._replicas}

    # Connections

    def _run(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self) -> None:
        """Listen, and every second invite replicas and send the connected replicas a sign of life."""
        self._server = await asyncio.start_server(self._meet, self._host, 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        while True:
            self._fail_stranded()
            n_waiting = len(self._queue)
            for replica in self._replicas:
                replica.channel.send({"kind": "beat", "n_waiting": n_waiting})
            try:
                await self._invite(host, port, self._secret, 0 if self._replicas else n_waiting)
            except Exception as error:  # the cluster is not well; it may be later
                log.warning("replicas cannot be invited: %s", error)
            await asyncio.sleep(BEAT_S if self._replicas else BEAT_S / 5)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take in a replica, and read its messages until it goes."""
        channel = Channel(reader, writer)
        if not await channel.admits(self._secret):
            log.warning("a connection without the secret was closed")
            channel.close()
            return
        facts = self._replicas.accepted(await channel.receive())
        if facts is None:
            channel.close()
            return
        replica = Replica(facts, channel)
        self._replicas.add(replica)
        log.info("replica joined", extra={"replica": facts.name, "host": facts.host})
        self._dispatch()
        try:
            while (message := await channel.receive()) is not None:
                if message["kind"] == "news":
                    self._take(replica, message["news"])
                elif message["kind"] == "status":
                    replica.status = EngineStatus(**message["status"])
                elif message["kind"] == "draining":
                    replica.is_draining = True
                    channel.send({"kind": "parted"})
        finally:
            channel.close()
            self._lose(replica)

    async def _close(self) -> None:
        self._is_draining = True
        left = list(self._live.values())
        for live in left:
            live.request.answer.finish_reason = "abort"
            self._forget(live)
        if left:
            self._deliver([StepOutput(live.request, None, "abort") for live in left])
        for task in [*self._tasks]:
            task.cancel()
        for replica in self._replicas:
            replica.channel.close()
        if self._server is not None:
            self._server.close()

    # Requests to replicas

    def _dispatch(self) -> None:
        """Sends waiting requests to replicas that have room, in the order of the queue."""
        sending: dict[Replica, list[LiveRequest]] = {}
        while self._queue and self._replicas.has_room:
            request = self._queue.first(lambda request: self._may_go(self._live[request.id]))
            if request is None:
                break
            live = self._live[request.id]
            replica = self._replicas.choose(live)
            self._assign(live, replica)
            sending.setdefault(replica, []).append(live)
        for replica, lives in sending.items():
            messages = [self._message(live) for live in lives]
            replica.channel.send({"kind": "run", "requests": messages})

    def _may_go(self, live: LiveRequest) -> bool:
        """Return True if a request may go now. The first answer to a prompt goes before the others."""
        leader = live.request.sequence.leader
        led = None if leader is None else self._live.get(leader.id)
        return (led is None or led.replica is not None) and bool(self._replicas.candidates(live))

    def _assign(self, live: LiveRequest, replica: Replica) -> None:
        request = live.request
        self._queue.remove(request)
        self._n_tickets += 1
        live.ticket, live.replica, live.sent_s = self._n_tickets, replica, perf_counter()
        live.n_at_start, live.n_runs = request.n_generated, live.n_runs + 1
        live.numerics = replica.facts.numerics
        replica.live[live.ticket] = live
        request.sequence.state = RequestState.RUNNING
        if request.times.trace is not None:
            request.times.trace.record("queue", live.queued_s, live.sent_s, {})
            live.span = request.times.trace.begin("replica")

    def _message(self, live: LiveRequest) -> dict[str, Any]:
        leader = live.request.sequence.leader
        led = None if leader is None else self._live.get(leader.id)
        return {
            **wire.request_to_json(live.request),
            "ticket": live.ticket,
            "leader": led.ticket if led is not None and led.replica is live.replica else None,
            "mirostat_mu": live.mirostat_mu,
            "traceparent": None if live.span is None else live.span.traceparent,
        }

    # News from replicas

    def _take(self, replica: Replica, news: Sequence[Mapping[str, Any]]) -> None:
        """Deliver a replica's news about its requests."""
        now_s = perf_counter()
        outputs: list[StepOutput] = []
        has_room = False
        for one in news:
            live = replica.live.get(one["ticket"])
            if live is None:  # ended meanwhile
                continue
            self._note_start(live, one)
            tokens, end = [wire.token_from_json(token) for token in one.get("tokens", ())], one.get("end")
            request = live.request
            for token in tokens:
                request.append(token, now_s)
                outputs.append(StepOutput(request, token, None))
            if tokens:
                has_room |= live.is_suspect
                live.n_deaths, live.mirostat_mu = 0, one.get("mirostat_mu")
                self._queue.count_served(request, len(tokens))
                self.n_generated += len(tokens)
            if end is not None:
                self._note_end(live, end)
                if tokens:
                    outputs[-1] = outputs[-1]._replace(finish_reason=end["reason"])
                else:
                    outputs.append(StepOutput(request, None, end["reason"]))
                has_room = True
        if outputs:
            self._deliver(outputs)
        if has_room:
            self._dispatch()

    def _note_start(self, live: LiveRequest, news: Mapping[str, Any]) -> None:
        request = live.request
        if "queue_s" not in news or request.times.started_s:
            return
        request.times.started_s = live.sent_s + news["queue_s"]
        request.sequence.n_prefix_hit = news["n_prefix_hit"]
        scores = map(wire.token_from_json, news.get("prompt_logprobs", ()))
        request.answer.prompt_logprobs = list(scores)
        self._queue.count_served(request, request.n_prompt)

    def _note_end(self, live: LiveRequest, end: Mapping[str, Any]) -> None:
        request = live.request
        request.answer.finish_reason, request.answer.stop_reason = end["reason"], end.get("stop_reason")
        request.sequence.n_drafted += end.get("n_drafted", 0)
        request.sequence.n_accepted += end.get("n_accepted", 0)
        if end.get("error") is not None:
            request.answer.error = wire.error_from_json(end["error"])
        if end.get("rows") is not None:
            request.answer.rows = wire.rows_from_json(end["rows"])
        self._forget(live)

    def _forget(self, live: LiveRequest) -> None:
        """Drops a request that has ended."""
        if live.replica is not None:
            live.replica.live.pop(live.ticket, None)
            self._end_run(live, live.replica)
        live.request.sequence.state = RequestState.FINISHED
        self._queue.leave(live.request)
        with self._changed:
            del self._live[live.request.id]
            if not self._live:
                self._changed.notify_all()

    @staticmethod
    def _end_run(live: LiveRequest, replica: Replica, *, error: str | None = None) -> None:
        """Notes that a request has left its replica."""
        live.replica, live.queued_s = None, perf_counter()
        if live.span is not None:
            facts: Facts = {
                "kukri.replica": replica.facts.name,
                "server.address": replica.facts.host,
                "gen_ai.usage.output_tokens": live.request.n_generated - live.n_at_start,
            }
            live.span.end(facts, error=error)
            live.span = None

    def _lose(self, replica: Replica) -> None:
        """Run the requests of a lost replica again, on other replicas."""
        if not self._replicas.remove(replica):
            return
        extra = {"replica": replica.facts.name, "host": replica.facts.host, "n_requests": len(replica.live)}
        log.warning("replica gone", extra=extra)
        failed: list[StepOutput] = []
        for live in list(replica.live.values()):
            self._end_run(live, replica, error="the replica is gone")
            live.n_deaths = 1 if live.request.n_generated > live.n_at_start else live.n_deaths + 1
            if live.n_deaths >= _MAX_DEATHS or live.n_runs >= _MAX_RUNS:
                failed.append(self._given_up(live))
                continue
            live.request.sequence.n_preemptions += 1  # so that it goes before requests that never ran
            live.request.sequence.state = RequestState.WAITING
            self._queue.put(live.request)
            self.n_retries += 1
        if failed:
            self._deliver(failed)
        self._dispatch()

    def _given_up(self, live: LiveRequest) -> StepOutput:
        return self._failed(
            live,
            KukriError(
                f"{live.n_deaths} of the {live.n_runs} replicas that ran the request died while they ran "
                "it, so it is not tried again"
            ),
        )

    def _failed(self, live: LiveRequest, error: KukriError) -> StepOutput:
        live.request.answer.error, live.request.answer.finish_reason = error, "error"
        self._forget(live)
        return StepOutput(live.request, None, "error")

    def _fail_stranded(self) -> None:
        """Ends waiting requests that have had no replica to run on for long."""
        self._replicas.note_present()
        failed: list[StepOutput] = []
        for request in list(self._queue):
            live = self._live[request.id]
            has_tokens = request.n_generated > 0 and live.numerics is not None
            if self._replicas.absent_s(live.numerics if has_tokens else None) > _ABSENT_S:
                other = " that computes the same bits as the one that began the answer" if has_tokens else ""
                failed.append(
                    self._failed(live, CapacityError(f"a replica of the model was not found{other}"))
                )
        if failed:
            self._deliver(failed)
