"""The routes of OpenAI's API, and those that other servers add: reranking, activations, LoRA adapters."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from starlette.responses import JSONResponse, Response

from kukri.server.access import check_interp
from kukri.server.answers.activations import ActivationsBody, activations
from kukri.server.answers.embeddings import EmbeddingBody, embed
from kukri.server.answers.loading_reply import answered
from kukri.server.models.adapters import ClientAdapters
from kukri.server.models.entry import ModelEntry
from kukri.server.models.registry import ModelRegistry
from kukri.server.openai.chat_completions import complete_chat, parse_chat
from kukri.server.openai.completions import complete
from kukri.server.openai.decide import DecideBody, decide
from kukri.server.openai.lists import listed
from kukri.server.openai.pooling import AnswersBody, ClassifyBody, PoolingBody, answer, classify, pool
from kukri.server.openai.rerank import RerankBody, ScoreBody, rerank, score
from kukri.server.openai.response_store import ResponseStore
from kukri.server.openai.responses import items_of, parse_response, respond
from kukri.server.openai.responses_schema import ResponseBody
from kukri.server.openapi import EVENTS, SAFETENSORS
from kukri.server.schema import ChatBody, CompletionBody, LoadAdapterBody, UnloadAdapterBody


def add_openai_routes(app: FastAPI, registry: ModelRegistry) -> None:
    """Adds the routes of texts and models."""

    @app.post("/v1/chat/completions", responses=EVENTS)
    @app.post("/chat/completions", responses=EVENTS, include_in_schema=False)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answers a conversation."""
        return await answered(registry, body, request, complete_chat)

    @app.post("/v1/completions", responses=EVENTS)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continues a text."""
        return await answered(registry, body, request, complete)

    @app.post("/v1/responses", responses=EVENTS)
    @app.post("/responses", responses=EVENTS, include_in_schema=False)
    async def responses(body: ResponseBody, request: Request) -> Response:
        """Answers a conversation, in the newer form."""
        return await answered(registry, body, request, respond)

    @app.get("/v1/responses/{response_id}")
    async def stored_response(response_id: str, request: Request) -> JSONResponse:
        """A response that is still stored."""
        store: ResponseStore = app.state.responses
        owner = await store.owner(request.scope["kukri.client"])
        return JSONResponse(store.find(owner, response_id).response)

    @app.get("/v1/responses/{response_id}/input_items")
    async def stored_input(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> JSONResponse:
        """Lists the items of a response's input, the newest first, by `limit` and `after`."""
        store: ResponseStore = app.state.responses
        stored = store.find(await store.owner(request.scope["kukri.client"]), response_id)
        items = stored.items[: stored.n_input]
        return listed(items if order == "asc" else items[::-1], limit, after)

    @app.delete("/v1/responses/{response_id}")
    async def forget_response(response_id: str, request: Request) -> JSONResponse:
        """Forgets a stored response."""
        store: ResponseStore = app.state.responses
        store.forget(await store.owner(request.scope["kukri.client"]), response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @app.post("/v1/chat/completions/input_tokens", response_class=JSONResponse)
    @app.post("/chat/completions/input_tokens", response_class=JSONResponse, include_in_schema=False)
    async def chat_tokens(body: ChatBody, request: Request) -> JSONResponse:
        """Counts the tokens of a conversation."""
        served = await registry.served(body.model, request.scope)
        n_tokens = await served.n_prompt_tokens(parse_chat(body))
        return JSONResponse({"object": "chat.completion.input_tokens", "input_tokens": n_tokens})

    @app.post("/v1/responses/input_tokens", response_class=JSONResponse)
    @app.post("/responses/input_tokens", response_class=JSONResponse, include_in_schema=False)
    async def response_tokens(body: ResponseBody, request: Request) -> JSONResponse:
        """Counts the tokens of a response's input."""
        served = await registry.served(body.model, request.scope)
        store: ResponseStore = app.state.responses
        items = items_of(body, store, await store.owner(request.scope["kukri.client"]))
        n_tokens = await served.n_prompt_tokens(parse_response(body, items))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": n_tokens})

    @app.post("/v1/decide", response_class=JSONResponse)
    async def decided(body: DecideBody, request: Request) -> Response:
        """The probabilities of choices as the answer."""
        served = await registry.served(body.model, request.scope)
        return await decide(served, body, request)

    @app.post("/v1/embeddings", response_class=JSONResponse)
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        """A vector for each text."""
        served = await registry.served(body.model, request.scope)
        return await embed(served, body, request)

    @app.post("/v1/rerank", response_class=JSONResponse)
    @app.post("/rerank", response_class=JSONResponse, include_in_schema=False)
    @app.post("/reranking", response_class=JSONResponse, include_in_schema=False)
    @app.post("/v1/reranking", response_class=JSONResponse, include_in_schema=False)
    async def reranked(body: RerankBody, request: Request) -> Response:
        """Ranks documents by how well they answer a query."""
        served = await registry.served(body.model, request.scope)
        return await rerank(served, body, request)

    @app.post("/v2/rerank", response_class=JSONResponse)
    async def reranked_v2(body: RerankBody, request: Request) -> Response:
        """Ranks documents by how well they answer a query, in the form of Cohere's second version."""
        served = await registry.served(body.model, request.scope)
        return await rerank(served, body, request, as_cohere_v2=True)

    @app.post("/v1/score", response_class=JSONResponse)
    @app.post("/score", response_class=JSONResponse, include_in_schema=False)
    async def scored(body: ScoreBody, request: Request) -> Response:
        """Scores pairs of texts."""
        served = await registry.served(body.model, request.scope)
        return await score(served, body, request)

    @app.post("/classify", response_class=JSONResponse)
    async def classified(body: ClassifyBody, request: Request) -> Response:
        """The probability of each label for each text."""
        served = await registry.served(body.model, request.scope)
        return await classify(served, body, request)

    @app.post("/pooling", response_class=JSONResponse)
    async def pooled(body: PoolingBody, request: Request) -> Response:
        """Vectors, or outputs of a head, of texts or of their tokens."""
        served = await registry.served(body.model, request.scope)
        return await pool(served, body, request)

    @app.post("/v1/answers", response_class=JSONResponse)
    async def answers(body: AnswersBody, request: Request) -> Response:
        """The spans of a context that most probably answer a question."""
        served = await registry.served(body.model, request.scope)
        return await answer(served, body, request)

    @app.post("/v1/activations", responses=SAFETENSORS, response_class=Response)
    async def activations_of(body: ActivationsBody, request: Request) -> Response:
        """The activations of texts."""
        check_interp(registry.settings, request.scope)
        served = await registry.served(body.model, request.scope)
        return await activations(served, body, request)

    @app.get("/v1/models")
    @app.get("/models", include_in_schema=False)
    async def models(request: Request) -> JSONResponse:
        """Lists the names of all models."""
        listed = await registry.catalog.listed(request.scope)
        found = [await _model(registry, entry, name) for entry in listed for name in entry.names]
        return JSONResponse({"object": "list", "data": found})

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> JSONResponse:
        """Describes a model."""
        entry = await registry.catalog.find(name, request.scope)
        return JSONResponse(await _model(registry, entry, name if name in entry.names else entry.name))


async def _model(registry: ModelRegistry, entry: ModelEntry, name: str) -> dict[str, Any]:
    """A model in OpenAI's form, and how it is: seconds until it is unloaded are None for never."""
    facts = {
        "id": name,
        "object": "model",
        "created": entry.created,
        "owned_by": "kukri",
        "root": entry.name,  # as vLLM has it: what an alias or an adapter stands for
        "capabilities": await asyncio.to_thread(entry.capabilities),  # as Ollama's /api/show has them
        "max_model_len": None,
        "state": entry.state,
    }
    if name in entry.adapters:
        facts["parent"] = entry.name  # as vLLM has it
    if entry.served is not None:
        status = entry.served.bridge.loop.status()
        facts |= {
            "max_model_len": entry.served.llm.engine.maker.max_context,
            "memory_bytes": entry.n_bytes,
            "running_requests": status.n_running + status.n_waiting,
            "expires_in_s": registry.expires_s(entry),
        }
    return facts


def add_adapter_routes(app: FastAPI, registry: ModelRegistry) -> None:
    """Adds the routes that load and unload LoRA adapters, as vLLM has them."""
    adapters = ClientAdapters(registry)

    @app.post("/v1/load_lora_adapter")
    async def load_adapter(body: LoadAdapterBody, request: Request) -> JSONResponse:
        """Loads a LoRA adapter of the adapter directory, which requests may then name as their model."""
        await adapters.load(body.model, body.lora_name, body.lora_path, request.scope)
        return JSONResponse({"message": f"the adapter {body.lora_name!r} is loaded"})

    @app.post("/v1/unload_lora_adapter")
    async def unload_adapter(body: UnloadAdapterBody, request: Request) -> JSONResponse:
        """Unloads a LoRA adapter; requests that run with it end with it."""
        await adapters.unload(body.lora_name, request.scope)
        return JSONResponse({"message": f"the adapter {body.lora_name!r} is unloaded"})
