"""The routes of Neuronpedia's inference API, which its front end and its Python client call."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from kukri.server.access import check_interp
from kukri.server.models.registry import ModelRegistry
from kukri.server.models.served_model import ServedModel
from kukri.server.neuronpedia import activations, steering
from kukri.server.neuronpedia.schema import (
    AllBody,
    CosineBody,
    SingleBody,
    SteerChatBody,
    SteerCompletionBody,
    TopkByTokenBody,
)
from kukri.server.openai.embeddings import SILENCE, while_connected
from kukri.server.openapi import EVENTS as STREAMS
from kukri.server.reply import EVENTS, sse

T = TypeVar("T")


def add_neuronpedia_routes(app: FastAPI, registry: ModelRegistry) -> None:
    """Adds the routes. They need --interp, and keys the scope interp."""

    async def answered(
        body: T, http: Request, work: Callable[[ServedModel, T, Request], Coroutine[Any, Any, dict[str, Any]]]
    ) -> Response:
        check_interp(registry.settings, http.scope)
        served = await registry.served(getattr(body, "model", None), http.scope)
        served.llm.engine.check_generates()
        found = await while_connected(http, work(served, body, http))
        if found is None:
            return SILENCE
        if getattr(body, "stream", False):  # each event is the whole so far, and so is the only one
            return Response(sse(found), media_type=EVENTS.content_type.decode())
        return JSONResponse(found)

    @app.post("/v1/activation/single", response_class=JSONResponse)
    async def single(body: SingleBody, request: Request) -> Response:
        """The activations of a feature, or along a vector, in Neuronpedia's form."""
        return await answered(body, request, activations.single)

    @app.post("/v1/activation/all", response_class=JSONResponse)
    async def all_features(body: AllBody, request: Request) -> Response:
        """The most active features of a prompt, in Neuronpedia's form."""
        return await answered(body, request, activations.all_features)

    @app.post("/v1/activation/topk-by-token", response_class=JSONResponse)
    async def topk_by_token(body: TopkByTokenBody, request: Request) -> Response:
        """The most active features of each token, in Neuronpedia's form."""
        return await answered(body, request, activations.topk_by_token)

    @app.post("/v1/util/sae-topk-by-decoder-cossim", response_class=JSONResponse)
    async def most_alike(body: CosineBody, request: Request) -> Response:
        """The features whose directions are most alike, in Neuronpedia's form."""
        return await answered(body, request, activations.most_alike)

    @app.post("/v1/steer/completion", responses=STREAMS)
    async def steered(body: SteerCompletionBody, request: Request) -> Response:
        """A text continued, steered and not, in Neuronpedia's form."""
        return await answered(body, request, steering.complete)

    @app.post("/v1/steer/completion-chat", responses=STREAMS)
    async def steered_chat(body: SteerChatBody, request: Request) -> Response:
        """A chat answered, steered and not, in Neuronpedia's form."""
        return await answered(body, request, steering.chat)
