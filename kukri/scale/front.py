"""A front: runs the requests of a server on replicas.

`RemoteModel` is the model as a server sees it: tokenizer, template and limits, without weights in memory.
`ReplicaLoop` stands where a server on its own has an `EngineLoop`. It holds requests in a queue that is fair
among clients, sends each to a replica that has room, and delivers the tokens as they come. When a replica
dies, its requests go to another with the tokens they have so far. As results are the same bits everywhere,
their answers continue as if nothing had happened.

A request may itself be what kills a replica. So one whose replica died counts as a suspect until its next
token comes, and a replica runs one suspect at a time. If that replica dies too, the request ends with an
error.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from time import monotonic, perf_counter
from typing import Any, cast

from kukri.config import EngineConfig
from kukri.engine import EngineStatus, Request, RequestMaker, RequestState, StepOutput
from kukri.engine.adapters import LoadedAdapter
from kukri.engine.drafts import Drafts
from kukri.engine.loop import Deliver
from kukri.engine.model_identity import weights_identity
from kukri.engine.request_maker import no_drafts
from kukri.engine.traces import Facts, Span
from kukri.engine.waiting import WaitingQueue
from kukri.errors import CapacityError, KukriError, RequestError
from kukri.kernels.arrays import IntArray
from kukri.kernels.backend import Logits
from kukri.kernels.sampling_record import SamplingRecords
from kukri.opening.loading import ReadModel, read_model
from kukri.opening.model_options import ModelOptions
from kukri.sampling import SamplingParams
from kukri.scale import wire
from kukri.scale.channel import BEAT_S, Channel
from kukri.scale.facts import ReplicaFacts
from kukri.scale.routing import PrefixRouter
from kukri.tokenizer import ChatTemplate

log = logging.getLogger("kukri.scale")
# has replicas connect to (host, port, secret); called every second. `n_waiting` requests wait for one
Invite = Callable[[str, int, str, int], Awaitable[None]]
_ABSENT_S = 120.0  # without any replica, after which new requests are refused
_MAX_DEATHS = 2  # deaths of replicas, without a token in between, until a request counts as their cause
_MAX_RUNS = 20  # times that a request is tried
_SPARE = 1.25  # requests sent to a replica for each that it runs, so that the next are there at once


class _ElsewhereSampling:
    """Sampling of requests whose tokens replicas choose."""

    def choose(self, records: SamplingRecords, logits: Logits) -> None:
        """See SamplingBackend.choose."""
        raise AssertionError("replicas choose tokens")


class RemoteRequestMaker(RequestMaker):
    """Makes requests by the limits of replicas, which make their own drafts."""

    def __init__(self, model: ReadModel, facts: ReplicaFacts, adapters: tuple[str, ...] = ()) -> None:
        super().__init__(
            model.model.config,
            _ElsewhereSampling(),
            max_context=facts.max_context,
            n_pages=facts.n_pages,
            page_tokens=facts.page_tokens,
            eos_ids=model.tokenizer.eos_ids,
        )
        self._has_draft_model, self._adapters = facts.has_draft_model, adapters

    @property
    def why_no_images(self) -> str:
        """See RequestMaker.why_no_images. The encoder's rows stay in one process."""
        return "images are not supported with replicas: leave them out, or serve the model by kukri serve"

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """See RequestMaker.adapter_names."""
        return self._adapters

    def _use_adapter(self, name: str, request: Request) -> None:
        if name not in self._adapters:
            known = ", ".join(self._adapters) or "none is loaded"
            raise RequestError(f"there is no adapter {name!r}: {known}", param="adapter")
        request.adapter = LoadedAdapter(name, cast(Any, None), -1)  # the replicas have it
        request.prefix_root = sha256(request.prefix_root + name.encode()).digest()

    def _drafts(self, params: SamplingParams, prompt: IntArray, client: str) -> Callable[[], Drafts | None]:
        if params.speculation == "draft" and not self._has_draft_model:
            raise RequestError("there is no draft model here: choose ngram or off", param="speculation")
        if params.prediction:
            self._lookup_drafts(params, prompt, client)  # checks it
        return no_drafts


class RemoteModel:
    """A model whose engines are elsewhere. Attributes: those of `models.served_model.OpenModel`, identity."""

    memory_bytes = 0  # here

    def __init__(self, options: ModelOptions, facts: ReplicaFacts) -> None:
        """`facts` are those of one of the replicas. Raises KukriError if the files differ from theirs."""
        read = read_model(options)
        self.options, self.path, self.tokenizer = options, read.path, read.tokenizer
        self.default_params, self.text_encoder = read.default_params, read.text_encoder
        self.engine = RemoteRequestMaker(read, facts, tuple(options.adapters))
        self.engine_config = EngineConfig(max_requests=facts.max_requests)
        self.identity = weights_identity(read.path, read.config, options.quantize)
        if self.identity != facts.model:
            raise KukriError(
                f"{read.path} or the version of kukri differs from that on {facts.host}: "
                "use the same on all machines"
            )
        tokenizer = self.tokenizer
        self.chat_template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)

    def close(self) -> None:
        """Does nothing: a model without weights holds nothing that needs an end."""


@dataclass(eq=False)
class _Live:
    """A request that has not ended."""

    request: Request
    keys: list[bytes]  # keys of its prompt's pages
    replica: _Replica | None = None
    ticket: int = 0
    sent_s: float = 0.0
    n_at_start: int = 0  # tokens generated when it was sent
    n_deaths: int = 0  # replicas that died running it, since its last token
    n_runs: int = 0
    numerics: str | None = None  # those of the replica that made its tokens
    mirostat_mu: float | None = None
    queued_s: float = 0.0  # since when it waits
    span: Span | None = None  # its time on the replica

    @property
    def is_suspect(self) -> bool:
        """True if its last replica died and no token has come since."""
        return self.n_deaths > 0


@dataclass(eq=False)
class _Replica:
    """A replica that is connected."""

    facts: ReplicaFacts
    channel: Channel
    live: dict[int, _Live] = field(default_factory=dict)  # by ticket
    status: EngineStatus | None = None
    is_draining: bool = False

    @property
    def has_room(self) -> bool:
        """True if it may get another request."""
        return not self.is_draining and len(self.live) < int(self.facts.max_requests * _SPARE) + 1

    @property
    def has_suspect(self) -> bool:
        """True if it runs a request that may have killed another."""
        return any(live.is_suspect for live in self.live.values())


class ReplicaLoop:
    """Runs requests on replicas, as `EngineLoop` runs them here; see that for its methods.

    Listens on `host` for the replicas that `invite` brings. Belongs to the event loop, but for `drain` and
    `stop`, which wait.

    Attributes: n_generated, tokens delivered; n_retries, requests that ran again because a replica went.
    """

    def __init__(
        self,
        engine: RequestMaker,
        deliver: Deliver,
        *,
        max_waiting: int,
        model_identity: str,
        invite: Invite,
        host: str = "127.0.0.1",
    ) -> None:
        self.engine, self.max_waiting = engine, max_waiting
        self._deliver, self._invite, self._host, self._identity = deliver, invite, host, model_identity
        self._secret = secrets.token_hex(32)
        self._router = PrefixRouter()
        self._queue = WaitingQueue()
        self._live: dict[int, _Live] = {}  # by request id
        self._replicas: dict[str, _Replica] = {}  # by name
        self._n_tickets = self.n_generated = self.n_retries = 0
        self._seen_s = {"": monotonic()}  # when replicas were there last, by their numerics
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
            self.engine.check_fits(request)
        if self._is_draining:
            raise CapacityError("the server is shutting down: try again later")
        if len(self._queue) + len(requests) > self.max_waiting:
            raise CapacityError(f"{len(self._queue)} requests are waiting already: try again later")
        for request in requests:
            if request.output == "tokens" and not request.params.is_greedy and request.params.seed is None:
                # else another replica could not draw the same tokens
                request.params = replace(request.params, seed=secrets.randbits(63))
            request.state = RequestState.WAITING
            # its last token is always computed
            keys = request.page_keys[: (request.n_prompt - 1) // self.engine.page_tokens]
            self._live[request.id] = _Live(request, keys, queued_s=request.arrived_s)
            self._queue.arrive(request)
        self._dispatch()

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a request. Nothing is delivered."""
        live = self._live.get(request.id)
        if live is None:
            return
        request.finish_reason, request.stop_reason = reason, stop_reason
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
        """Refuses new requests and waits for those there are; False if some were left at the end."""
        with self._changed:
            self._is_draining = True
            return self._changed.wait_for(lambda: not self._live, timeout_s)

    def stop(self) -> None:
        """Aborts the remaining requests, delivers that, and ends all connections."""
        if self._event_loop is not None and not self._event_loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._close(), self._event_loop).result()

    @property
    def is_stepping(self) -> bool:
        """True if there are replicas, or were not long ago: others may be on their way."""
        return bool(self._replicas) or monotonic() - max(self._seen_s.values()) < _ABSENT_S

    def status(self) -> EngineStatus:
        """Counts of all replicas, and the requests that wait here."""
        found = list(self.statuses().values())
        sums = {one.name: sum(getattr(status, one.name) for status in found) for one in fields(EngineStatus)}
        sums["n_waiting"] += len(self._queue)
        return EngineStatus(**sums)

    def statuses(self) -> Mapping[str, EngineStatus]:
        """Counts of each replica, as it told them last, by its name."""
        return {name: one.status for name, one in self._replicas.items() if one.status is not None}

    @property
    def n_suspects(self) -> int:
        """Requests whose replica died and that have had no token since."""
        return sum(live.is_suspect for live in self._live.values())

    @property
    def replicas(self) -> Mapping[str, ReplicaFacts]:
        """The replicas that are connected, by name."""
        return {name: replica.facts for name, replica in self._replicas.items()}

    # Connections

    def _run(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self) -> None:
        """Listens, invites replicas and sends those there are a sign of life, every second."""
        self._server = await asyncio.start_server(self._meet, self._host, 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        while True:
            self._fail_stranded()
            n_waiting = len(self._queue)
            for replica in self._replicas.values():
                replica.channel.send({"kind": "beat", "n_waiting": n_waiting})
            try:
                await self._invite(host, port, self._secret, 0 if self._replicas else n_waiting)
            except Exception as error:  # the cluster is not well; it may be later
                log.warning("replicas cannot be invited: %s", error)
            await asyncio.sleep(BEAT_S if self._replicas else BEAT_S / 5)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Takes in a replica, and what it sends until it goes."""
        channel = Channel(reader, writer)
        if not await channel.admits(self._secret):
            log.warning("a connection without the secret was closed")
            channel.close()
            return
        facts = self._checked(await channel.receive())
        if facts is None:
            channel.close()
            return
        replica = _Replica(facts, channel)
        self._replicas[facts.name] = replica
        self._router.add(facts.name, facts.n_pages)
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

    def _checked(self, hello: Mapping[str, Any] | None) -> ReplicaFacts | None:
        """The facts of a replica that may join; None for others."""
        if hello is None:
            return None
        facts = ReplicaFacts(**hello["facts"])
        if facts.model != self._identity:
            log.warning("replica %s on %s has a different model: it is not used", facts.name, facts.host)
            return None
        if facts.name in self._replicas:
            return None
        numerics = {replica.facts.numerics for replica in self._replicas.values()}
        if numerics and facts.numerics not in numerics:
            log.warning(
                "replica %s computes different bits (%s) from the others (%s): it cannot continue answers "
                "that they began", facts.name, facts.numerics, ", ".join(numerics),
            )  # fmt: skip
        return facts

    async def _close(self) -> None:
        self._is_draining = True
        left = list(self._live.values())
        for live in left:
            live.request.finish_reason = "abort"
            self._forget(live)
        if left:
            self._deliver([StepOutput(live.request, None, "abort") for live in left])
        for task in [*self._tasks]:
            task.cancel()
        for replica in self._replicas.values():
            replica.channel.close()
        if self._server is not None:
            self._server.close()

    # Requests to replicas

    def _dispatch(self) -> None:
        """Sends waiting requests to replicas that have room, in the order of the queue."""
        sending: dict[str, list[_Live]] = {}
        while self._queue and any(replica.has_room for replica in self._replicas.values()):
            request = self._queue.first(lambda request: bool(self._candidates(self._live[request.id])))
            if request is None:
                break
            live = self._live[request.id]
            loads = {name: len(replica.live) for name, replica in self._replicas.items()}
            name = self._router.choose(live.keys, loads, self._candidates(live))
            self._assign(live, self._replicas[name])
            sending.setdefault(name, []).append(live)
        for name, lives in sending.items():
            messages = [self._message(live) for live in lives]
            self._replicas[name].channel.send({"kind": "run", "requests": messages})

    def _candidates(self, live: _Live) -> list[str]:
        """The replicas that a request may go to now."""
        leader = live.request.leader
        if leader is not None and (led := self._live.get(leader.id)) is not None and led.replica is None:
            return []  # the answers to one prompt go together, the first one first
        return [
            name
            for name, replica in self._replicas.items()
            if replica.has_room
            and not (live.is_suspect and replica.has_suspect)
            and (not live.request.n_generated or live.numerics == replica.facts.numerics)
        ]

    def _assign(self, live: _Live, replica: _Replica) -> None:
        request = live.request
        self._queue.remove(request)
        self._n_tickets += 1
        live.ticket, live.replica, live.sent_s = self._n_tickets, replica, perf_counter()
        live.n_at_start, live.n_runs = request.n_generated, live.n_runs + 1
        live.numerics = replica.facts.numerics
        replica.live[live.ticket] = live
        request.state = RequestState.RUNNING
        if request.trace is not None:
            request.trace.record("queue", live.queued_s, live.sent_s, {})
            live.span = request.trace.begin("replica")
        self._router.note(replica.facts.name, live.keys)

    def _message(self, live: _Live) -> dict[str, Any]:
        leader = live.request.leader
        led = None if leader is None else self._live.get(leader.id)
        return {
            **wire.request_to_json(live.request),
            "ticket": live.ticket,
            "leader": led.ticket if led is not None and led.replica is live.replica else None,
            "mirostat_mu": live.mirostat_mu,
            "traceparent": None if live.span is None else live.span.traceparent,
        }

    # News from replicas

    def _take(self, replica: _Replica, news: Sequence[Mapping[str, Any]]) -> None:
        """Delivers what a replica tells of its requests."""
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

    def _note_start(self, live: _Live, news: Mapping[str, Any]) -> None:
        request = live.request
        if "queue_s" not in news or request.started_s:
            return
        request.started_s = live.sent_s + news["queue_s"]
        request.n_prefix_hit = news["n_prefix_hit"]
        request.prompt_logprobs = [wire.token_from_json(token) for token in news.get("prompt_logprobs", ())]
        self._queue.count_served(request, request.n_prompt)

    def _note_end(self, live: _Live, end: Mapping[str, Any]) -> None:
        request = live.request
        request.finish_reason, request.stop_reason = end["reason"], end.get("stop_reason")
        request.n_drafted += end.get("n_drafted", 0)
        request.n_accepted += end.get("n_accepted", 0)
        if end.get("error") is not None:
            request.error = wire.error_from_json(end["error"])
        if end.get("rows") is not None:
            request.rows = wire.rows_from_json(end["rows"])
        self._forget(live)

    def _forget(self, live: _Live) -> None:
        """Drops a request that has ended."""
        if live.replica is not None:
            live.replica.live.pop(live.ticket, None)
            self._end_run(live, live.replica)
        live.request.state = RequestState.FINISHED
        self._queue.leave(live.request)
        with self._changed:
            del self._live[live.request.id]
            if not self._live:
                self._changed.notify_all()

    @staticmethod
    def _end_run(live: _Live, replica: _Replica, *, error: str | None = None) -> None:
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

    def _lose(self, replica: _Replica) -> None:
        """Has the requests of a replica that has gone run again, on others."""
        if self._replicas.get(replica.facts.name) is not replica:
            return
        del self._replicas[replica.facts.name]
        self._router.remove(replica.facts.name)
        self._seen_s[replica.facts.numerics] = monotonic()
        extra = {"replica": replica.facts.name, "host": replica.facts.host, "n_requests": len(replica.live)}
        log.warning("replica gone", extra=extra)
        failed: list[StepOutput] = []
        for live in list(replica.live.values()):
            self._end_run(live, replica, error="the replica is gone")
            live.n_deaths = 1 if live.request.n_generated > live.n_at_start else live.n_deaths + 1
            if live.n_deaths >= _MAX_DEATHS or live.n_runs >= _MAX_RUNS:
                failed.append(self._given_up(live))
                continue
            live.request.n_preemptions += 1  # so that it goes before those that never ran
            live.request.state = RequestState.WAITING
            self._queue.put(live.request)
            self.n_retries += 1
        if failed:
            self._deliver(failed)
        self._dispatch()

    def _given_up(self, live: _Live) -> StepOutput:
        return self._failed(
            live,
            KukriError(
                f"{live.n_deaths} of the {live.n_runs} replicas that ran the request died while they ran it: "
                "it is not tried again"
            ),
        )

    def _failed(self, live: _Live, error: KukriError) -> StepOutput:
        live.request.error, live.request.finish_reason = error, "error"
        self._forget(live)
        return StepOutput(live.request, None, "error")

    def _fail_stranded(self) -> None:
        """Ends waiting requests that have had no replica to run on for long."""
        now_s = monotonic()
        for replica in self._replicas.values():
            self._seen_s[replica.facts.numerics] = now_s
        last_s = max(self._seen_s.values())
        failed: list[StepOutput] = []
        for request in list(self._queue):
            live = self._live[request.id]
            has_tokens = request.n_generated > 0 and live.numerics is not None
            seen_s = self._seen_s.get(str(live.numerics), last_s) if has_tokens else last_s
            if now_s - seen_s > _ABSENT_S:
                other = " that computes the same bits as the one that began the answer" if has_tokens else ""
                failed.append(self._failed(live, CapacityError(f"there is no replica of the model{other}")))
        if failed:
            self._deliver(failed)
