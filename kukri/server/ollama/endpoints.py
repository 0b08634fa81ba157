"""The endpoints of Ollama's API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kukri import __version__
from kukri.server.access import MODELS, check_scope, may
from kukri.server.answers.loading_reply import Work, answered, by_model
from kukri.server.endpoint import LINES, Api, Endpoint
from kukri.server.models.registry import registry_of
from kukri.server.models.served_model import ServedModel
from kukri.server.ollama import answers as ollama
from kukri.server.ollama import models
from kukri.server.ollama.schema import (
    GenerationBody,
    KeepAlive,
    OllamaBody,
    OllamaChatBody,
    OllamaCopyBody,
    OllamaCreateBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaPullBody,
    ollama_error_body,
)

_OLLAMA_VERSION = "0.13.4"  # whose API this is: clients ask for a least one, as codex --oss does
_Kept = TypeVar("_Kept", bound=KeepAlive)
_Generation = TypeVar("_Generation", bound=GenerationBody)


def _keeping(work: Work[_Kept]) -> Work[_Kept]:
    """Return the work that also keeps the model as the body says, if the key may say it."""

    async def made(served: ServedModel, body: _Kept, request: Request) -> Response:
        if may(request.scope, "manage"):  # others use the model too
            registry = registry_of(request)
            registry.keep(await registry.catalog.find(body.model, request.scope), body.keep_alive_s)
        return await work(served, body, request)

    return made


def _check(body: KeepAlive, request: Request) -> None:
    """Raises ForbiddenError if the body would unload or pin the model, and the key may not."""
    if body.keep_alive_s is not None and body.keep_alive_s <= 0:
        check_scope(request.scope, "manage", "keep_alive")


async def _loaded(served: ServedModel, body: GenerationBody, request: Request) -> Response:
    entry = await registry_of(request).catalog.find(body.model, request.scope)
    return ollama.loaded_answer(body, entry.name, "load")


async def _load(body: GenerationBody, request: Request) -> Response:
    """Loads the model, which a body without a prompt asks for, or unloads it with keep_alive 0."""
    registry = registry_of(request)
    entry = await registry.catalog.find(body.model, request.scope)
    if body.keep_alive_s == 0 and not entry.spec.is_pinned:
        await registry.unload(entry, "request")
        return ollama.loaded_answer(body, entry.name, "unload")
    return await by_model(_keeping(_loaded))(body, request)


def _generating(field: str, work: Work[_Generation]) -> Callable[[_Generation, Request], Awaitable[Response]]:
    async def handle(body: _Generation, request: Request) -> Response:
        _check(body, request)
        if not getattr(body, field):
            return await _load(body, request)
        return await answered(body, request, _keeping(work), ollama.NDJSON)

    return handle


def _embedding(work: Work[_Kept]) -> Callable[[_Kept, Request], Awaitable[Response]]:
    async def handle(body: _Kept, request: Request) -> Response:
        _check(body, request)
        return await by_model(_keeping(work))(body, request)

    return handle


async def _version(request: Request) -> Response:
    return JSONResponse({"version": _OLLAMA_VERSION, "kukri": __version__})


async def _is_there(request: Request) -> Response:
    """Says that a server is there, as Ollama's clients ask first."""
    return Response()


async def _no_page(request: Request) -> Response:
    """There is no page, though HEAD answers."""
    raise HTTPException(404)


_CHAT = {"model": "smol", "messages": [{"role": "user", "content": "Name a colour."}], "stream": False}
_NAMED = {"model": "smol"}
ENDPOINTS = (
    Endpoint(
        "POST", "/api/chat", _generating("messages", ollama.chat), "Answer a conversation, in Ollama's form",
        "OllamaChat", "OllamaChat", OllamaChatBody, _CHAT, has_images=True,
    ),
    Endpoint(
        "POST", "/api/generate", _generating("prompt", ollama.generate), "Answer a prompt, in Ollama's form",
        "OllamaGeneration", "OllamaGeneration", OllamaGenerateBody,
        {"model": "smol", "prompt": "Name a colour.", "stream": False}, has_images=True,
    ),
    Endpoint(
        "POST", "/api/embed", _embedding(ollama.embed), "Return a vector for each text, in Ollama's form",
        "OllamaVectors", "", OllamaEmbedBody, {"model": "smol", "input": ["A text"]},
    ),
    Endpoint(
        "POST", "/api/embeddings", _embedding(ollama.embed_one),
        "Return a vector for one text, in Ollama's older form",
        "OllamaVector", "", OllamaEmbeddingsBody, {"model": "smol", "prompt": "A text"},
    ),
    Endpoint("GET", "/api/tags", models.ollama_tags, "List the models on this machine", "OllamaModels"),
    Endpoint("GET", "/api/ps", models.ollama_ps, "List the loaded models", "OllamaLoadedModels"),
    Endpoint(
        "POST", "/api/show", models.ollama_show, "Describe a model, in Ollama's form",
        "OllamaModelFacts", "", OllamaBody, _NAMED,
    ),
    Endpoint(
        "POST", "/api/pull", models.ollama_pull, "Fetch a model, if clients may",
        "OllamaStatus", "OllamaStatus", OllamaPullBody, _NAMED, permission=MODELS,
    ),
    Endpoint(
        "POST", "/api/create", models.ollama_create,
        "Create or replace a preset of a model that is served, if clients may",
        "OllamaStatus", "OllamaStatus", OllamaCreateBody,
        {"model": "poet", "from": "smol", "system": "Rhyme."}, permission=MODELS,
    ),
    Endpoint("HEAD", "/api/blobs/{digest}", models.no_blob, is_unread=True),
    Endpoint("POST", "/api/blobs/{digest}", models.refuse_blob, permission=MODELS, is_unread=True),
    Endpoint(
        "POST", "/api/copy", models.ollama_copy, "Give a model or a preset another name, if clients may",
        "", "", OllamaCopyBody, {"source": "smol", "destination": "poet"}, permission=MODELS,
    ),
    Endpoint(
        "DELETE", "/api/delete", models.ollama_delete, "Remove a model, if clients may",
        "", "", OllamaBody, _NAMED, permission=MODELS,
    ),
    Endpoint(
        "GET", "/api/version", _version, "Return the version of Ollama whose API this is", "OllamaVersion"
    ),
    Endpoint("HEAD", "/", _is_there, is_open=True),
)  # fmt: skip
NO_PAGE = Api("no page", (Endpoint("GET", "/", _no_page, is_open=True),))
OLLAMA = Api(
    "Ollama",
    ENDPOINTS,
    "kukri.server.ollama.forms",
    prefix="/api/",
    error=ollama_error_body,
    error_form="OllamaErrorBody",
    stream=LINES,
    is_all_json=True,
)
