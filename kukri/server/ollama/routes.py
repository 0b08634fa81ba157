"""The routes of Ollama's API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from kukri import __version__
from kukri.server.access import check_scope, may
from kukri.server.answers.loading_reply import answered
from kukri.server.models.registry import ModelRegistry
from kukri.server.models.served_model import ServedModel
from kukri.server.ollama import answers as ollama
from kukri.server.ollama import models as ollama_models
from kukri.server.ollama.schema import (
    GenerationBody,
    KeepAlive,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaErrorBody,
    OllamaGenerateBody,
)
from kukri.server.openapi import LINES, errors_in

_OLLAMA_VERSION = "0.13.4"  # whose API this is: clients ask for a least one, as codex --oss does
_ERRORS = errors_in(OllamaErrorBody)
_Generation = TypeVar("_Generation", bound=GenerationBody)


def add_ollama_routes(app: FastAPI, registry: ModelRegistry) -> None:
    """Adds the routes; those that change models need --manage-models."""
    _add_generation_routes(app, registry)
    errors = _ERRORS | {
        403: {"model": OllamaErrorBody, "description": "Clients may not change the server's models"}
    }
    app.get("/api/tags", response_class=JSONResponse, responses=_ERRORS)(ollama_models.ollama_tags)
    app.get("/api/ps", response_class=JSONResponse, responses=_ERRORS)(ollama_models.ollama_ps)
    app.post("/api/show", response_class=JSONResponse, responses=_ERRORS)(ollama_models.ollama_show)
    app.post("/api/pull", responses=LINES | errors)(ollama_models.ollama_pull)
    app.post("/api/create", responses=LINES | errors)(ollama_models.ollama_create)
    blob = app.api_route("/api/blobs/{digest}", methods=["HEAD", "POST"], include_in_schema=False)
    blob(ollama_models.ollama_blob)
    app.post("/api/copy", response_class=Response, responses=errors)(ollama_models.ollama_copy)
    app.delete("/api/delete", response_class=Response, responses=errors)(ollama_models.ollama_delete)

    @app.get("/api/version", responses=_ERRORS)
    async def ollama_version() -> JSONResponse:
        """The version of Ollama whose API this is."""
        return JSONResponse({"version": _OLLAMA_VERSION, "kukri": __version__})

    @app.head("/", include_in_schema=False)
    async def is_there() -> Response:
        """Says that a server is there, as Ollama's clients ask first."""
        return Response()

    if not registry.settings.has_page:

        @app.get("/", include_in_schema=False)
        async def nothing() -> Response:
            """There is no page, though HEAD answers."""
            raise HTTPException(404)


def _add_generation_routes(app: FastAPI, registry: ModelRegistry) -> None:
    async def keep(body: KeepAlive, request: Request) -> None:
        """Keeps the model as the body says: others use it too, so a key needs the scope for it."""
        if may(request.scope, "manage"):
            registry.keep(await registry.catalog.find(body.model, request.scope), body.keep_alive_s)

    def check(body: KeepAlive, request: Request) -> None:
        """Raises ForbiddenError if the body would unload or pin the model, and the key may not."""
        if body.keep_alive_s is not None and body.keep_alive_s <= 0:
            check_scope(request.scope, "manage", "keep_alive")

    async def kept(body: KeepAlive, request: Request) -> ServedModel:
        check(body, request)
        served = await registry.served(body.model, request.scope)
        await keep(body, request)
        return served

    async def answer(
        body: _Generation,
        request: Request,
        make: Callable[[ServedModel, _Generation, Request], Awaitable[Response]],
    ) -> Response:
        async def made(served: ServedModel, body: _Generation, request: Request) -> Response:
            await keep(body, request)
            return await make(served, body, request)

        check(body, request)
        return await answered(registry, body, request, made, ollama.NDJSON)

    async def load(body: GenerationBody, request: Request) -> Response:
        """Loads the model, which a body without a prompt asks for, or unloads it with keep_alive 0."""
        check(body, request)
        entry = await registry.catalog.find(body.model, request.scope)
        if body.keep_alive_s == 0 and not entry.spec.is_pinned:
            await registry.unload(entry, "request")
            return ollama.loaded_answer(body, entry.name, "unload")
        await kept(body, request)
        return ollama.loaded_answer(body, entry.name, "load")

    @app.post("/api/chat", responses=LINES | _ERRORS)
    async def ollama_chat(body: OllamaChatBody, request: Request) -> Response:
        """Answers a conversation, in Ollama's form."""
        return await (answer(body, request, ollama.chat) if body.messages else load(body, request))

    @app.post("/api/generate", responses=LINES | _ERRORS)
    async def ollama_generate(body: OllamaGenerateBody, request: Request) -> Response:
        """Answers a prompt, in Ollama's form."""
        return await (answer(body, request, ollama.generate) if body.prompt else load(body, request))

    @app.post("/api/embed", response_class=JSONResponse, responses=_ERRORS)
    async def ollama_embed(body: OllamaEmbedBody, request: Request) -> Response:
        """A vector for each text, in Ollama's form."""
        return await ollama.embed(await kept(body, request), body, request)

    @app.post("/api/embeddings", response_class=JSONResponse, responses=_ERRORS)
    async def ollama_embeddings(body: OllamaEmbeddingsBody, request: Request) -> Response:
        """A vector for one text, in Ollama's older form."""
        return await ollama.embed_one(await kept(body, request), body, request)
