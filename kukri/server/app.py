"""The ASGI application: the routes and their handlers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from kukri import __version__
from kukri.engine import EngineLoop
from kukri.errors import KukriError, RequestError
from kukri.server import ollama, ollama_models, ollama_schema
from kukri.server.access import check_interp
from kukri.server.activations import ActivationsBody, activations
from kukri.server.batch_routes import add_batch_routes
from kukri.server.batches import Batches
from kukri.server.bridge import LoopMaker
from kukri.server.chat_completions import complete_chat
from kukri.server.completions import complete
from kukri.server.embeddings import EmbeddingBody, embed
from kukri.server.errors import on_deep_body, on_http_error, on_invalid_body, on_kukri_error
from kukri.server.loading_reply import answered
from kukri.server.messages import answer_message, count_tokens
from kukri.server.messages_schema import MessageErrorBody, MessagesBody, PromptBody
from kukri.server.middleware import Middleware
from kukri.server.ollama_schema import (
    KeepAlive,
    OllamaBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaErrorBody,
    OllamaGenerateBody,
    OllamaPullBody,
)
from kukri.server.page import add_page
from kukri.server.registry import ModelEntry, ModelRegistry
from kukri.server.rerank import RerankBody, rerank
from kukri.server.responses import respond
from kukri.server.responses_schema import ResponseBody
from kukri.server.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ErrorBody,
    LoadAdapterBody,
    TemplateBody,
    TokenizeBody,
    UnloadAdapterBody,
)
from kukri.server.service import OpenModel, Service
from kukri.server.settings import ServedModel, ServerSettings
from kukri.traces import open_traces

log = logging.getLogger("kukri.server")
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request is wrong"},
    401: {"model": ErrorBody, "description": "No valid API key"},
    403: {"model": ErrorBody, "description": "The host is unknown, or the API key lacks a scope"},
    404: {"model": ErrorBody, "description": "No such model"},
    408: {"model": ErrorBody, "description": "The body came too slowly"},
    413: {"model": ErrorBody, "description": "The body is too large"},
    429: {"model": ErrorBody, "description": "Too many requests"},
    503: {"model": ErrorBody, "description": "No room now, or the server is shutting down"},
}
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}, "description": "The answer"}
}
_LINES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "application/x-ndjson": {}}, "description": "The answer"}
}
_SAFETENSORS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/vnd.safetensors": {}}, "description": "The tensors"}
}
_OLLAMA_VERSION = "0.12.0"  # whose API this is: clients ask for a least one
_MESSAGE_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {**described, "model": MessageErrorBody} for status, described in _ERRORS.items()
}
_OLLAMA_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {**described, "model": OllamaErrorBody} for status, described in _ERRORS.items()
}
_MANAGING_ERRORS: dict[int | str, dict[str, Any]] = _OLLAMA_ERRORS | {
    403: {"model": OllamaErrorBody, "description": "Clients may not change the server's models"}
}


def create_app(
    llm: OpenModel | None,
    settings: ServerSettings,
    models: Sequence[ServedModel] = (),
    make_loop: LoopMaker = EngineLoop,
) -> FastAPI:
    """The ASGI application that serves an open model under `settings.model_names`, and `models` on demand.

    `app.state.registry` is the state of its routes. Engines run from the application's start, or a model's
    loading, to its shutdown; a pinned model that cannot be loaded ends the start with a KukriError, which
    `app.state.failure` keeps. `make_loop` makes the loop that runs the open model's requests.
    """
    registry = ModelRegistry(settings, models, llm, make_loop)
    batches: Batches | None = None
    traces = open_traces(settings.traces)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await registry.start()
            if batches is not None:
                batches.start()
            names = ", ".join(entry.name for entry in registry.entries)
            log.info("started", extra={"version": __version__, "models": names})
            yield
        except KukriError as error:
            app.state.failure = error
            raise
        finally:
            if batches is not None:
                await batches.stop()
            await registry.stop()
            if traces is not None:
                await asyncio.to_thread(traces.close)
            log.info("stopped")

    app = FastAPI(
        title="kukri",
        version=__version__,
        lifespan=lifespan,
        responses=_ERRORS,
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
    )
    app.state.registry, app.state.failure = registry, None
    app.add_exception_handler(KukriError, on_kukri_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid_body)
    app.add_exception_handler(RecursionError, on_deep_body)
    app.add_middleware(Middleware, settings=settings, metrics=registry.metrics, traces=traces)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # clients have many of their own
            expose_headers=["request-id", "retry-after", "x-request-id"],
        )
    if settings.batch_dir is not None:
        batches = Batches(app, settings.batch_dir)
    _add_openai_routes(app, registry)
    add_batch_routes(app, batches)
    _add_adapter_routes(app, registry)
    _add_anthropic_routes(app, registry)
    _add_ollama_routes(app, registry)
    _add_token_routes(app, registry)
    _add_state_routes(app, registry)
    if settings.has_page:
        add_page(app, registry)
    _describe(app)
    return app


def _add_openai_routes(app: FastAPI, registry: ModelRegistry) -> None:
    @app.post("/v1/chat/completions", responses=_EVENTS)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answers a conversation."""
        return await answered(
            registry,
            body.model,
            request,
            lambda service: complete_chat(service, body, request),
            stream=body.stream,
        )

    @app.post("/v1/completions", responses=_EVENTS)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continues a text."""
        return await answered(
            registry,
            body.model,
            request,
            lambda service: complete(service, body, request),
            stream=body.stream,
        )

    @app.post("/v1/responses", responses=_EVENTS)
    async def responses(body: ResponseBody, request: Request) -> Response:
        """Answers a conversation, in the newer form; nothing is stored."""
        return await answered(
            registry, body.model, request, lambda service: respond(service, body, request), stream=body.stream
        )

    @app.post("/v1/embeddings", response_class=JSONResponse)
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        """A vector for each text."""
        service = await registry.acquire(registry.find(body.model), request.scope)
        return await embed(service, body, request)

    @app.post("/v1/rerank", response_class=JSONResponse)
    @app.post("/rerank", response_class=JSONResponse, include_in_schema=False)
    async def reranked(body: RerankBody, request: Request) -> Response:
        """Ranks documents by how well they answer a query."""
        service = await registry.acquire(registry.find(body.model), request.scope)
        return await rerank(service, body, request)

    @app.post("/v1/activations", responses=_SAFETENSORS, response_class=Response)
    async def activations_of(body: ActivationsBody, request: Request) -> Response:
        """The activations of texts."""
        check_interp(registry.settings, request.scope)
        service = await registry.acquire(registry.find(body.model), request.scope)
        return await activations(service, body, request)

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        """Lists the names of all models."""
        found = [_model(registry, entry, name) for entry in registry.listed() for name in entry.names]
        return JSONResponse({"object": "list", "data": found})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        """Describes one of them."""
        entry = registry.find(name)
        return JSONResponse(_model(registry, entry, name if name in entry.names else entry.name))


def _add_adapter_routes(app: FastAPI, registry: ModelRegistry) -> None:
    @app.post("/v1/load_lora_adapter")
    async def load_adapter(body: LoadAdapterBody, request: Request) -> JSONResponse:
        """Loads a LoRA adapter of the adapter directory, which requests may then name as their model."""
        await registry.load_adapter(body.model, body.lora_name, body.lora_path, request.scope)
        return JSONResponse({"message": f"the adapter {body.lora_name!r} is loaded"})

    @app.post("/v1/unload_lora_adapter")
    async def unload_adapter(body: UnloadAdapterBody) -> JSONResponse:
        """Unloads a LoRA adapter; requests that run with it end with it."""
        await registry.unload_adapter(body.lora_name)
        return JSONResponse({"message": f"the adapter {body.lora_name!r} is unloaded"})


def _add_anthropic_routes(app: FastAPI, registry: ModelRegistry) -> None:
    @app.post("/v1/messages", responses=_EVENTS | _MESSAGE_ERRORS)
    async def messages(body: MessagesBody, request: Request) -> Response:
        """Answers a conversation, in Anthropic's form."""
        return await answered(
            registry,
            body.model,
            request,
            lambda service: answer_message(service, body, request),
            stream=body.stream,
        )

    @app.post("/v1/messages/count_tokens", responses=_MESSAGE_ERRORS, response_class=JSONResponse)
    async def message_tokens(body: PromptBody, request: Request) -> Response:
        """Counts the tokens of its prompt."""
        service = await registry.acquire(registry.find(body.model), request.scope)
        return await count_tokens(service, body)


def _add_ollama_routes(app: FastAPI, registry: ModelRegistry) -> None:
    async def with_model(
        body: KeepAlive, request: Request, make: Callable[[Service], Awaitable[Response]], *, stream: bool
    ) -> Response:
        def kept(service: Service) -> Awaitable[Response]:
            registry.keep(registry.find(body.model), body.keep_alive_s)
            return make(service)

        return await answered(registry, body.model, request, kept, stream=stream, form=ollama.NDJSON)

    async def with_prompt(
        body: ollama_schema.GenerationBody,
        request: Request,
        make: Callable[[Service], Awaitable[Response]],
        *,
        is_empty: bool,
    ) -> Response:
        """Answers; a body without a prompt loads the model, or unloads it with keep_alive 0."""
        if not is_empty:
            return await with_model(body, request, make, stream=body.stream)
        entry, seconds = registry.find(body.model), body.keep_alive_s
        if seconds == 0 and not entry.spec.is_pinned:
            await registry.unload(entry, "request")
            return ollama.loaded_answer(body, entry.name, "unload")

        async def loaded(service: Service) -> Response:
            return ollama.loaded_answer(body, entry.name, "load")

        return await with_model(body, request, loaded, stream=False)

    @app.post("/api/chat", responses=_LINES | _OLLAMA_ERRORS)
    async def ollama_chat(body: OllamaChatBody, request: Request) -> Response:
        """Answers a conversation, in Ollama's form."""
        return await with_prompt(
            body, request, lambda service: ollama.chat(service, body, request), is_empty=not body.messages
        )

    @app.post("/api/generate", responses=_LINES | _OLLAMA_ERRORS)
    async def ollama_generate(body: OllamaGenerateBody, request: Request) -> Response:
        """Answers a prompt, in Ollama's form."""
        return await with_prompt(
            body, request, lambda service: ollama.generate(service, body, request), is_empty=not body.prompt
        )

    @app.post("/api/embed", response_class=JSONResponse, responses=_OLLAMA_ERRORS)
    async def ollama_embed(body: OllamaEmbedBody, request: Request) -> Response:
        """A vector for each text, in Ollama's form."""
        return await with_model(
            body, request, lambda service: ollama.embed(service, body, request), stream=False
        )

    @app.post("/api/embeddings", response_class=JSONResponse, responses=_OLLAMA_ERRORS)
    async def ollama_embeddings(body: OllamaEmbeddingsBody, request: Request) -> Response:
        """A vector for one text, in Ollama's older form."""
        return await with_model(
            body, request, lambda service: ollama.embed_one(service, body, request), stream=False
        )

    @app.get("/api/tags", response_class=JSONResponse, responses=_OLLAMA_ERRORS)
    async def ollama_tags() -> Response:
        """Lists the models on this machine."""
        return await ollama_models.tags(registry)

    @app.get("/api/ps", response_class=JSONResponse, responses=_OLLAMA_ERRORS)
    async def ollama_ps() -> Response:
        """Lists the loaded models."""
        return await ollama_models.running(registry)

    @app.post("/api/show", response_class=JSONResponse, responses=_OLLAMA_ERRORS)
    async def ollama_show(body: OllamaBody) -> Response:
        """Describes a model."""
        return await ollama_models.show(registry, body.model)

    @app.post("/api/pull", responses=_LINES | _MANAGING_ERRORS)
    async def ollama_pull(body: OllamaPullBody) -> Response:
        """Fetches a model, if clients may."""
        return await ollama_models.pull(registry, body.model, stream=body.stream)

    @app.delete("/api/delete", response_class=Response, responses=_MANAGING_ERRORS)
    async def ollama_delete(body: OllamaBody) -> Response:
        """Removes a model, if clients may."""
        return await ollama_models.delete(registry, body.model)

    @app.get("/api/version", responses=_OLLAMA_ERRORS)
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


def _model(registry: ModelRegistry, entry: ModelEntry, name: str) -> dict[str, Any]:
    """A model in OpenAI's form, and how it is: seconds until it is unloaded are None for never."""
    facts = {
        "id": name,
        "object": "model",
        "created": entry.created,
        "owned_by": "kukri",
        "max_model_len": None,
        "state": entry.state,
    }
    if name in entry.adapters:
        facts["parent"] = entry.name  # as vLLM has it
    if entry.service is not None:
        status = entry.service.bridge.loop.status()
        facts |= {
            "max_model_len": entry.service.llm.engine.max_context,
            "memory_bytes": entry.n_bytes,
            "running_requests": status.n_running + status.n_waiting,
            "expires_in_s": registry.expires_s(entry),
        }
    return facts


def _add_token_routes(app: FastAPI, registry: ModelRegistry) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody, request: Request) -> JSONResponse:
        """The token ids of a text or a conversation."""
        service = await registry.acquire(registry.find(body.model), request.scope)
        if body.messages is not None:
            messages = [message.as_dict() for message in body.messages]
            ids = await service.prompts.encode(messages, **body.options())
        elif body.content is not None:
            ids = await service.encode(
                body.content, add_special=body.add_special, parse_special=body.parse_special
            )
        else:
            assert body.prompt is not None, "the schema wants one of them"
            ids = await service.encode(body.prompt, add_special=body.add_special_tokens)
        texts = [service.tokenizer.token_text(i) for i in ids] if body.return_token_strs else None
        tokens: list[Any] = ids
        if body.with_pieces:
            tokens = [{"id": i, "piece": _piece(service.tokenizer.token_bytes(i))} for i in ids]
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": service.llm.engine.max_context,
                "tokens": tokens,
                "token_strs": texts,
            }
        )

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody, request: Request) -> JSONResponse:
        """The text of token ids."""
        service = await registry.acquire(registry.find(body.model), request.scope)
        try:
            text = service.tokenizer.decode(body.tokens)
        except RequestError as error:
            error.param = "tokens"
            raise
        return JSONResponse({"prompt": text, "content": text})  # vLLM's name for it, and llama.cpp's

    @app.post("/apply-template", response_class=JSONResponse)
    async def apply_template(body: TemplateBody, request: Request) -> Response:
        """The prompt that a conversation becomes."""
        service = await registry.acquire(registry.find(body.model), request.scope)
        messages = [message.as_dict() for message in body.messages]
        text = await service.prompts.render(messages, **body.options())
        return Response(json.dumps({"prompt": text}), media_type="application/json")  # lone surrogates too


def _piece(data: bytes) -> str | list[int]:
    """A token's text as llama.cpp writes it: bytes that are no text as numbers."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _add_state_routes(app: FastAPI, registry: ModelRegistry) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        """Health of the engines: `ok`, or 503 and `degraded`."""
        is_well = registry.is_stepping
        return JSONResponse({"status": "ok" if is_well else "degraded"}, 200 if is_well else 503)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Readiness for new requests: 503 before the start, while draining and while an engine fails."""
        if registry.is_draining:
            return JSONResponse({"status": "draining"}, 503)
        is_well = registry.is_stepping
        return JSONResponse({"status": "ready" if is_well else "degraded"}, 200 if is_well else 503)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """All counts, for Prometheus."""
        return Response(registry.metrics.text(), media_type=registry.metrics.content_type)


def _describe(app: FastAPI) -> None:
    """Takes FastAPI's 422 out of the OpenAPI document: a wrong body is a 400 here."""
    document = app.openapi()
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
