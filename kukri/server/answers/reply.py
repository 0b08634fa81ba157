"""A call's answers on their way to the client: as events while they grow, or whole."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kukri.calls.choice import Choice, Kind, PartEvent, PlacedToken
from kukri.dataclass import dataclass
from kukri.errors import KukriError
from kukri.formats.huggingface.safetensors import safetensors_bytes
from kukri.interp.interventions.request_taps import Readout
from kukri.sampling import SamplingParams
from kukri.server.answers.answer_facts import answer_facts
from kukri.server.answers.logprobs import vllm_logprobs
from kukri.server.answers.timings import PromptProgress, n_read, timings_of, timings_of_progress
from kukri.server.connection import Connection, connection_of
from kukri.server.errors import error_body, response_of
from kukri.server.intervention_bodies import steering
from kukri.server.models.bridge import LiveCall
from kukri.server.models.served_model import Chat, ServedModel
from kukri.server.schema import GenerationBody
from kukri.vision.image import ImagePrompt

DONE = b"data: [DONE]\n\n"
_MANY_TOKENS = 4096  # a whole answer this long is written outside the event loop
_PROGRESS_S = 0.1  # from one look at a prompt's progress to the next


@dataclass(frozen=True)
class StreamForm:
    """The form of a stream: its content type, what fills a silence, and an error that ends it."""

    content_type: bytes
    keep_alive: bytes  # which clients skip
    failure: Callable[[dict[str, Any]], bytes]  # turns an error's JSON into an event

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that keep proxies from holding the stream back."""
        plain = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        return [(b"content-type", self.content_type), *plain]


compact = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make an encoder each time


def sse(data: dict[str, Any], name: str = "") -> str:
    """A server-sent event; its data is JSON."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {compact(data)}\n\n"


def _failure_event(error: dict[str, Any]) -> bytes:
    if error.get("type") == "error":  # Anthropic's, whose events have names and no end mark
        return sse(error, "error").encode()
    return sse(error).encode() + DONE


EVENTS = StreamForm(b"text/event-stream; charset=utf-8", b": keep-alive\n\n", _failure_event)


class AnswerWriter(ABC):
    """The form of one API's answers. A writer renders the events of their parts, or the finished parts.

    `advance` is called after every change, whatever is written.
    """

    form = EVENTS
    error_json: Callable[[str, int], dict[str, Any]] = staticmethod(error_body)

    def __init__(
        self, call: LiveCall, choices: Sequence[Choice], *, stream: bool, progress: bool | None = False
    ) -> None:
        """`progress`: a stream tells how far the first prompt has been read."""
        self._call, self._choices, self._is_stream = call, choices, stream
        self._progress = PromptProgress(call.answers[0].request) if progress and stream else None
        self._n_ids_sent = [0] * len(choices)
        self._is_begun = [False] * len(choices)  # the answer, in a stream
        self._has_begun = False

    def advance(self) -> bytes:
        """Takes the new output and returns its events, none if it is no stream."""
        written = ""
        if self._is_stream:
            written = "" if self._has_begun else self._begin()
            self._has_begun = True
            if self._progress is not None:
                written += "".join(map(self._progressed, self._progress.news()))
        for i, choice in enumerate(self._choices):
            if not choice.is_over and (choice.answer.n_tokens or choice.answer.finish_reason):
                events = choice.advance()
                written += self._news(i, events) if self._is_stream else ""
        return written.encode()

    async def settle(self) -> None:  # noqa: B027  # most writers have nothing to do
        """Does what must be done before the client hears that every answer has ended."""

    def end(self) -> bytes:
        """The last events, when every answer has ended."""
        return b""

    def silence(self) -> bytes:
        """What clients skip: it keeps the connection open, and tells who looks how far the prompt is read."""
        request = self._call.answers[0].request
        if request.times.first_token_s or self.form.content_type != EVENTS.content_type:
            return self.form.keep_alive
        return f": prompt: {n_read(request)} of {request.n_prompt} tokens\n".encode() + self.form.keep_alive

    def fail(self, error: KukriError) -> bytes:
        """The last events of a stream that an error ended."""
        return self.form.failure(self.error_json(str(error), 500))

    @abstractmethod
    def body(self) -> Any:
        """The whole response, when every answer has ended."""

    def _begin(self) -> str:
        """What a stream begins with."""
        return ""

    def _progressed(self, news: dict[str, int]) -> str:
        """The event with news of a prompt's progress."""
        raise NotImplementedError

    @abstractmethod
    def _news(self, i: int, events: Sequence[PartEvent]) -> str:
        """What an answer's new events are in this form."""

    def _new_token_ids(self, i: int) -> list[int]:
        """The ids of an answer's tokens since the last time."""
        answer, n_sent = self._call.answers[i], self._n_ids_sent[i]
        self._n_ids_sent[i] = answer.n_tokens
        first = answer.request.n_prompt
        ids: list[int] = answer.request.sequence.tokens[first + n_sent : first + answer.n_tokens].tolist()
        return ids


def grown(events: Sequence[PartEvent], kind: Kind = "text") -> tuple[str, Sequence[PlacedToken]]:
    """The text and tokens by which the parts of a kind have grown."""
    if len(events) == 1:  # as most have it
        event = events[0]
        return (event.text, event.tokens) if event.part.kind == kind else ("", ())
    found = [event for event in events if event.part.kind == kind]
    return "".join(event.text for event in found), [token for event in found for token in event.tokens]


class ChunkWriter(AnswerWriter):
    """Base of the writers of the two older endpoints: chunks of one head, then the usage and an end mark.

    `kind` is the `object` field, `id_kind` the beginning of its id.
    """

    def __init__(
        self,
        served: ServedModel,
        chat: Chat,
        body: GenerationBody,
        model: str,
        *,
        kind: str,
        id_kind: str,
    ) -> None:
        super().__init__(chat.call, chat.choices, stream=bool(body.stream), progress=body.return_progress)
        self._served = served
        self._head = {
            "id": f"{id_kind}-{uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": served.fingerprint,
        }
        self._prefix = f"data: {compact(self._head)[:-1]}"
        options = body.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._counts_each = bool(self._with_usage and options and options.continuous_usage_stats)
        self._has_timings = bool(body.timings_per_token)
        self.prompt_text: str | None = None  # kept if the answer is to have `__verbose`

    def end(self) -> bytes:
        """The usage, if requested, and the end mark."""
        if not self._with_usage:
            return DONE
        facts = json.dumps({"usage": self._usage(), **self._timings()})
        last = f'{self._prefix},"choices":[],{facts[1:-1]}}}\n\n'
        return last.encode() + DONE

    def _event(self, choice: str, more: str = "") -> str:
        """The chunk of one choice; it and the fields `more`, which begin with a comma, are JSON."""
        if self._with_usage:
            more += f',"usage":{json.dumps(self._usage()) if self._counts_each else "null"}'
        if self._has_timings:
            more += f",{json.dumps(self._timings())[1:-1]}"
        return f'{self._prefix},"choices":[{choice}]{more}}}\n\n'

    def _progressed(self, news: dict[str, int]) -> str:
        facts: dict[str, Any] = {"prompt_progress": news}
        if self._has_timings:
            facts["timings"] = timings_of_progress(news)
        return f'{self._prefix},"choices":[],{json.dumps(facts)[1:-1]}}}\n\n'

    def _timings(self) -> dict[str, Any]:
        """The first answer's `timings`, if they are requested."""
        return {"timings": timings_of(self._call.answers[0].request)} if self._has_timings else {}

    def _verbose(self, i: int) -> dict[str, Any]:
        """What llama.cpp's server tells of an answer that has ended, if it is requested."""
        if self.prompt_text is None:
            return {}
        answer = self._call.answers[i]
        facts = answer_facts(
            i,
            answer,
            self._choices[i].text(),
            prompt=self.prompt_text,
            model=str(self._head["model"]),
            params=answer.request.params,
            eos_ids=self._served.llm.engine.maker.eos_ids,
        )
        return {"__verbose": facts}

    def _prompt_scores(self, i: int, n_top: int) -> list[dict[str, dict[str, Any]] | None]:
        """The `prompt_logprobs` of an answer's prompt; nothing comes before the first token."""
        scores = self._call.answers[i].request.answer.prompt_logprobs
        return [None, *vllm_logprobs(self._served.tokenizer, scores, n_top)]

    @abstractmethod
    def _usage(self) -> dict[str, Any]:
        """The `usage` of the call."""


def interp_fields(call: LiveCall, i: int) -> dict[str, Any]:
    """Readings of interventions since the last time, and captures once the answer has ended."""
    fields: dict[str, Any] = {}
    if call.readouts[i]:
        fields["readouts"] = [_readout(one) for one in call.readouts[i]]
        call.readouts[i] = []
    found = call.activations[i]
    if found is not None:
        data = base64.b64encode(safetensors_bytes(found)).decode()
        fields["activations"] = {"format": "safetensors", "names": list(found), "data": data}
    return fields


def _readout(one: Readout) -> dict[str, Any]:
    """A token's readout; JSON has no numbers that are not finite."""
    values = {
        name: {label: x if math.isfinite(x) else None for label, x in found.items()}
        for name, found in one.values.items()
    }
    return {"position": one.position, "token_id": one.token_id, "values": values}


def usage(call: LiveCall, n_reasoning: int) -> dict[str, Any]:
    """The `usage` of the older endpoints."""
    return {
        "prompt_tokens": call.n_prompt_tokens,
        "completion_tokens": call.n_generated,
        "total_tokens": call.n_prompt_tokens + call.n_generated,
        "prompt_tokens_details": {
            "cached_tokens": call.n_cached_tokens,
            "audio_tokens": 0,
            **image_usage(call),
        },
        "completion_tokens_details": {
            "reasoning_tokens": n_reasoning,
            "audio_tokens": 0,
            "accepted_prediction_tokens": call.n_accepted,
            "rejected_prediction_tokens": call.n_drafted - call.n_accepted,
        },
    }


def image_usage(call: LiveCall) -> dict[str, Any]:
    """The tokens of the prompts' images, all and each; nothing if there are no images."""
    each = call.image_tokens
    return {"image_tokens": sum(each), "tokens_per_image": each} if each else {}


class Reply(Response):
    """Sends a call's answers. A client that leaves ends the call."""

    def __init__(
        self,
        served: ServedModel,
        call: LiveCall,
        writer: AnswerWriter,
        *,
        stream: bool,
        form: StreamForm = EVENTS,
        tells_progress: bool = False,
    ) -> None:
        super().__init__()
        self._form, self._tells_progress = form, tells_progress and stream
        self._served, self._call, self._writer, self._is_stream = served, call, writer, stream
        self._has_begun = self._was_active = False
        self._connection: Connection | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the response."""
        call = self._call
        if self._is_stream:
            self._connection = connection_of(scope)  # which takes chunks once the response has begun
        else:
            call.push = self._push
        watcher = asyncio.create_task(self._watch(receive))
        timers = [asyncio.create_task(self._keep_alive(send))] if self._is_stream else []
        if self._tells_progress:
            timers.append(asyncio.create_task(self._tell_progress(send)))
        try:
            while True:
                await call.changed()
                events = await self._advanced()
                if call.is_done or call.is_gone or call.error:
                    break
                if events:
                    await self._send(send, events)
            for timer in timers:
                timer.cancel()
            if not call.is_gone:
                await self._finish(scope, receive, send, events)
        finally:
            for task in (watcher, *timers):
                task.cancel()
            call.close()
            self._served.metrics.on_end(*call.outcome)
            scope["kukri.log"].update(
                n_prompt_tokens=call.n_prompt_tokens,
                n_generated=call.n_generated,
                first_token_s=round(call.first_token_s - call.arrived_s, 4) if call.first_token_s else None,
            )

    async def _advanced(self) -> bytes:
        """The events of what has come; an error that taking or writing it raises ends only that call."""
        try:
            await self._call.read_out()
            return b"" if self._call.error or self._call.is_gone else self._writer.advance()
        except KukriError as error:
            self._call.fail(error)
        except BaseException as error:
            self._call.break_off("writing the answer", error)
        return b""

    async def _last(self) -> bytes:
        """What a response ends with: a stream's last events, or all of one that is whole."""
        try:
            await self._writer.settle()
            if self._is_stream:
                return self._writer.end()
            if self._call.n_prompt_tokens + self._call.n_generated > _MANY_TOKENS:
                return await asyncio.to_thread(self._whole)  # each may have log-probabilities of twenty more
            return self._whole()
        except BaseException as error:
            self._call.break_off("writing the answer", error)
        return b""

    def _whole(self) -> bytes:
        return compact(self._writer.body()).encode()

    async def _finish(self, scope: Scope, receive: Receive, send: Send, events: bytes) -> None:
        """The end of the response, once nothing more comes; `events` are not yet sent."""
        last = b"" if self._call.error is not None else await self._last()
        error = self._call.error
        if error is not None and not self._has_begun:
            await response_of(error)(scope, receive, send)
        elif error is not None:
            await self._send(send, events + self._writer.fail(error), is_last=True)
        elif self._is_stream:
            await self._send(send, events + last, is_last=True)
        else:
            await Response(last, media_type="application/json")(scope, receive, send)

    def _push(self) -> bool:
        """Takes the new output and writes its events to the connection; False if that has to wait.

        Waking a coroutine for each token and passing its events through uvicorn costs more than the events.
        """
        connection = self._connection
        if connection is not None and not connection.takes_chunks:
            return False
        events = self._writer.advance()
        if events:
            assert connection is not None, "whole responses have no events"
            self._was_active = True
            connection.write_chunk(events)
        return True

    async def _watch(self, receive: Receive) -> None:
        await disconnected(receive)
        self._call.leave()

    async def _keep_alive(self, send: Send) -> None:
        """Sends a keep-alive comment after a silence, so that no proxy drops the connection."""
        while True:
            self._was_active = False
            await asyncio.sleep(self._served.settings.keep_alive_s)
            if not self._was_active:
                await self._send(send, self._writer.silence())

    async def _tell_progress(self, send: Send) -> None:
        """Sends prompt progress until the first token."""
        while not self._call.n_generated and not self._call.is_gone:
            await asyncio.sleep(_PROGRESS_S)
            if events := await self._advanced():
                await self._send(send, events)

    async def _send(self, send: Send, data: bytes, *, is_last: bool = False) -> None:
        self._was_active = True
        if not self._has_begun:
            self._has_begun = True
            await send({"type": "http.response.start", "status": 200, "headers": self._form.headers})
            if self._connection is not None:
                self._call.push = self._push
        await send({"type": "http.response.body", "body": data, "more_body": not is_last})


async def submit(
    served: ServedModel,
    body: GenerationBody,
    prompts: Sequence[Sequence[int] | ImagePrompt],
    params: SamplingParams,
    http: Request,
    *,
    shows_control: bool = False,
) -> LiveCall:
    """Submits prompts with what a body says besides its sampling: user, priority, adapter, interventions.

    `shows_control`: control tokens are part of the text.
    """
    return await served.submit(
        prompts,
        params,
        http.scope,
        user=body.user,
        priority=body.priority,
        adapter=served.adapter_of(body.model, body.adapter),
        interventions=steering(body.interventions),
        marks=None if shows_control else (),
    )


async def wait_for_work(
    work: asyncio.Future[Any],
    left: asyncio.Task[None],
    keep_alive_s: float,
    keep_alive: Callable[[], Awaitable[None]],
) -> None:
    """Wait until the work is done or the client has left; `keep_alive` is called after each silence."""
    while not (work.done() or left.done()):
        await asyncio.wait({work, left}, timeout=keep_alive_s, return_when=asyncio.FIRST_COMPLETED)
        if not (work.done() or left.done()):
            await keep_alive()


async def disconnected(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
