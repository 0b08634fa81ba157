"""The page at `/`: its files, and answers as events that it shows while they grow.

Conversations live in the browser; the server keeps an answer until its stream is opened, and nothing after.
"""

from __future__ import annotations

import asyncio
import math
from codecs import getincrementaldecoder
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from secrets import token_urlsafe
from typing import Annotated, Any, ClassVar

from fastapi import Request
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from kukri import __version__
from kukri.calls.choice import PartEvent
from kukri.calls.system_message import DEFAULT_SYSTEM, opening
from kukri.dataclass import dataclass
from kukri.errors import KukriError
from kukri.formats.repos import is_offline
from kukri.interp.plots.graph_page import VIEWER
from kukri.sampling import SampledToken
from kukri.sampling.fields import FieldFacts
from kukri.server.access import MODELS
from kukri.server.answers.loading_reply import by_model
from kukri.server.answers.logprobs import token_string
from kukri.server.answers.reply import AnswerWriter, Reply, grown, sse
from kukri.server.body import Refused
from kukri.server.bounds import MOST_FEATURES
from kukri.server.chat.request import ChatRequest
from kukri.server.endpoint import Api, Endpoint
from kukri.server.errors import ForbiddenError, NotFoundError
from kukri.server.models.bridge import LiveCall
from kukri.server.models.registry import ModelRegistry, registry_of
from kukri.server.models.served_model import Chat, ServedModel
from kukri.server.page.model_library import models_here, models_to_download
from kukri.server.sampling_fields import FACTS
from kukri.server.schema import ChatMessage, MaxTokens, Sampling, conversation
from kukri.tokenizer import Tokenizer

OPEN_S = 5.0  # until the stream of an answer has to be opened
_UI = Path(__file__).parent / "ui"
_MAX_NUMBER = 2**53 - 1  # the largest whole number of JavaScript
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class Control:
    """An input for a field of SamplingParams; `step` None takes any number. Empty: the model's."""

    name: str
    label: str
    hint: str
    low: float
    high: float
    step: int | None = None


def _control(name: str, facts: FieldFacts) -> Control:
    low, high = max(facts.low, -_MAX_NUMBER), min(facts.high, _MAX_NUMBER)
    step = 1 if facts.kind == "integer" else None
    return Control(name, name.replace("_", " ").capitalize(), facts.help, low, high, step)


_CONTROLS = [_control(name, facts) for name, facts in FACTS.items() if facts.on_page]


class PageBody(Sampling):
    """A request of the page."""

    refused: ClassVar[Refused] = {"stream": ((True,), "the page's answers are streams")}
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: MaxTokens | None = None
    top_logprobs: Annotated[int, Field(ge=1, le=20)] | None = None  # tokens come with their probabilities


class Files(StaticFiles):
    """Files that a browser asks about each time, so that it never mixes two versions of the page."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """The file, or 304."""
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response


@cache
def _templates() -> Environment:
    return Environment(loader=FileSystemLoader(_UI / "templates"), autoescape=True, undefined=StrictUndefined)


def _html(template: str, **values: Any) -> Response:
    return HTMLResponse(_templates().get_template(template).render(**values), headers=_HEADERS)


async def _page(request: Request) -> Response:
    """The page, with nothing in it that a key protects."""
    settings = registry_of(request).settings
    return _html(
        "page.html",
        needs_key=bool(settings.api_keys),
        has_interp=settings.has_interp,
        version=__version__,
        system=DEFAULT_SYSTEM,
    )


async def _graph_page(request: Request) -> Response:
    """The page of attribution graphs, with nothing in it that a key protects."""
    needs_key = bool(registry_of(request).settings.api_keys)
    return _html("graph.html", needs_key=needs_key, most_features=MOST_FEATURES)


async def _model(request: Request, name: str | None = None) -> Response:
    """The fragment that names a model and all others, and has a control for each setting."""
    registry = registry_of(request)
    entries = await registry.catalog.listed(request.scope)
    chats = await asyncio.to_thread(lambda: [entry for entry in entries if entry.can_chat()])
    chosen = chats[0] if name is None and chats else await registry.catalog.find(name, request.scope)
    if not await asyncio.to_thread(chosen.can_chat):
        use = " and ".join(chosen.capabilities() or ["tasks"])
        wanted = f"{chosen.name!r} is a model for {use} and cannot chat: choose a language model"
        raise NotFoundError(wanted, param="model")
    served = await registry.acquire(chosen, request.scope)
    preset = served.preset_of(name)
    models = [known for entry in chats for known in (entry.name, *(one.name for one in entry.spec.presets))]
    return _html(
        "model.html",
        model=served.names[0] if preset is None else preset.name,
        models=list(dict.fromkeys(models)),
        max_context=served.llm.engine.maker.max_context,
        sees=served.prompts.sees,
        controls=_CONTROLS,
        defaults=vars(served.llm.default_params) | {"max_tokens": None, "seed": None},
    )


async def _library(request: Request) -> Response:
    """The fragment of the models that are here, and of those that may be downloaded."""
    registry = registry_of(request)
    entries = await registry.catalog.listed(request.scope)
    return _html(
        "library.html",
        here=await asyncio.to_thread(models_here, entries),
        others=await asyncio.to_thread(models_to_download, entries),
        obstacle=_obstacle(registry, request.scope),
        is_offline=is_offline(),
    )


async def _ask(served: ServedModel, body: PageBody, request: Request) -> Response:
    """Starts an answer and returns the fragment that opens its stream."""
    messages = conversation(body.messages)
    preset = served.preset_of(body.model)
    if messages[0]["role"] != "system" and (preset is None or not preset.system):
        messages = [*await asyncio.to_thread(opening, served.llm.chat_template), *messages]
    asked = ChatRequest(
        messages=messages,
        model=body.model,
        sampling=body.sampling(max_tokens=body.max_tokens, logprobs=body.top_logprobs),
        names={"prompt": "messages"},
    )
    chat = await served.open(asked, request.scope)
    reply = Reply(served, chat.call, PageWriter(chat, served.tokenizer), stream=True, tells_progress=True)
    unopened: UnopenedAnswers = request.app.state.unopened
    return _html("answer.html", name=unopened.add(served, chat.call, reply))


async def _answer(request: Request, name: str) -> Response:
    """The events of an answer, once."""
    unopened: UnopenedAnswers = request.app.state.unopened
    reply = unopened.take(name)
    if reply is None:
        raise HTTPException(404)
    return reply


def _obstacle(registry: ModelRegistry, scope: Scope) -> str:
    """Why a client may download no model; empty if it may."""
    try:
        MODELS.check(registry.settings, scope)
    except ForbiddenError as error:
        return str(error)
    return ""


class UnopenedAnswers:
    """Answers under way whose stream has not been opened, by unguessable names.

    A browser's EventSource sends no API key: a client that knows the name has sent the key with the question.
    """

    def __init__(self) -> None:
        self._answers: dict[str, tuple[Reply, asyncio.TimerHandle]] = {}

    def add(self, served: ServedModel, call: LiveCall, reply: Reply) -> str:
        """Keeps an answer for OPEN_S and returns its name; then it is ended."""
        name = token_urlsafe(32)
        timer = asyncio.get_running_loop().call_later(OPEN_S, self._end, name, served, call)
        self._answers[name] = reply, timer
        return name

    def take(self, name: str) -> Reply | None:
        """Removes and returns the answer of that name; None if there is none."""
        reply, timer = self._answers.pop(name, (None, None))
        if timer is not None:
            timer.cancel()
        return reply

    def _end(self, name: str, served: ServedModel, call: LiveCall) -> None:
        del self._answers[name]
        call.leave()
        served.metrics.on_end(*call.outcome)


class PageWriter(AnswerWriter):
    """Writes an answer as events: `progress` while its prompt is read, `delta` while it grows, then `end` or
    `failed`. Their data is JSON. If the request asked for log-probabilities, `delta` has tokens.
    """

    def __init__(self, chat: Chat, tokenizer: Tokenizer) -> None:
        super().__init__(chat.call, chat.choices, stream=True, progress=True)
        self._answer = chat.choices[0].answer
        self._tokenizer = tokenizer
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")

    def end(self) -> bytes:
        """Why the answer ended."""
        return _event("end", finish_reason=self._answer.finish_reason, **self._counts())

    def fail(self, error: KukriError) -> bytes:
        """An event with the error."""
        return _event("failed", message=str(error))

    def body(self) -> dict[str, Any]:
        """The numbers of the answer alone: its text was streamed."""
        return self._counts()

    def _progressed(self, news: dict[str, int]) -> str:
        return sse({"n_read": news["processed"], "n_prompt": news["total"]}, "progress")

    def _news(self, i: int, events: Sequence[PartEvent]) -> str:
        """An event with the text that came; none while a character or a stop string is not whole."""
        (thoughts, _), (content, tokens) = grown(events, "reasoning"), grown(events)
        if not (thoughts or content or tokens):
            return ""
        told = {"tokens": [self._token(token) for _, token in tokens]} if tokens else {}
        return _event("delta", thoughts=thoughts, content=content, **told, **self._counts()).decode()

    def _token(self, token: SampledToken) -> list[Any]:
        """A token's text, its probability, and the same of the likeliest ones.

        Of a character's pieces the last has its text.
        """
        text = self._decoder.decode(self._tokenizer.token_bytes(token.id))
        likeliest = [
            [text if i == token.id else token_string(self._tokenizer, i), _probability(value)]
            for i, value in token.top_logprobs or ()
        ]
        return [text, _probability(token.logprob), likeliest]

    def _counts(self) -> dict[str, Any]:
        return {
            "n_prompt": self._call.n_prompt_tokens,
            "n_generated": self._answer.n_tokens,
            "tokens_per_s": round(self._answer.request.timings.decode_tokens_per_s, 1),
        }


def _probability(logprob: float | None) -> float:
    return round(math.exp(logprob or 0.0), 5)


def _event(kind: str, **data: Any) -> bytes:
    """A server-sent event whose data cannot be taken for HTML, whatever the model wrote."""
    text = sse(data, kind).replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")
    return text.encode()


ENDPOINTS = (
    Endpoint("GET", "/", _page, is_open=True),
    Endpoint("GET", "/ui/graph", _graph_page, is_open=True),
    Endpoint("GET", "/ui/model", _model),
    Endpoint("GET", "/ui/library", _library),
    Endpoint("POST", "/ui/answers", by_model(_ask), body=PageBody, has_images=True),
    Endpoint("GET", "/ui/answers/{name}", _answer, is_open=True),  # a secret name
    *(
        Endpoint("GET", f"/ui/{one.name}/{{path}}", Files(directory=one), is_open=True, is_quiet=True)
        for one in (_UI / "static", _UI / "vendor", VIEWER)
    ),
)
PAGE = Api("page", ENDPOINTS)
