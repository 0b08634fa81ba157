"""The routes of Neuronpedia's inference and graph servers, which its front end and its Python client call."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from kukri.server.access import check_interp
from kukri.server.answers.reply import EVENTS, sse
from kukri.server.answers.rows import SILENCE, while_connected
from kukri.server.models.registry import ModelRegistry
from kukri.server.models.served_model import ServedModel
from kukri.server.neuronpedia import activations, graph_steering, steering
from kukri.server.neuronpedia.graphs import Graphs, salient_logits
from kukri.server.neuronpedia.schema import (
    AllBody,
    CosineBody,
    GraphBody,
    GraphSteerBody,
    SalientBody,
    SingleBody,
    SteerChatBody,
    SteerCompletionBody,
    TopkByTokenBody,
)
from kukri.server.openapi import EVENTS as STREAMS

_GZIP_LEVEL = 3
T = TypeVar("T")
U = TypeVar("U")


def add_neuronpedia_routes(app: FastAPI, registry: ModelRegistry) -> None:
    """Adds the routes. They need --interp, and keys the scope interp."""

    graphs = Graphs()

    async def found_by(
        work: Callable[[ServedModel, T, Request], Coroutine[Any, Any, U]], body: T, http: Request
    ) -> U | None:
        check_interp(registry.settings, http.scope)
        served = await registry.served(getattr(body, "model", None), http.scope)
        served.llm.engine.maker.check_generates()
        return await while_connected(http, work(served, body, http))

    async def answered(
        body: T, http: Request, work: Callable[[ServedModel, T, Request], Coroutine[Any, Any, dict[str, Any]]]
    ) -> Response:
        found = await found_by(work, body, http)
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

    @app.post("/generate-graph", response_class=JSONResponse)
    async def generate_graph(body: GraphBody, request: Request) -> Response:
        """The attribution graph of a prompt, as Neuronpedia's graph server makes it."""
        found = await found_by(graphs.make, body, request)
        if found is None:
            return SILENCE
        if body.compress and "gzip" in request.headers.get("accept-encoding", ""):
            small = await asyncio.to_thread(gzip.compress, found, _GZIP_LEVEL)
            return Response(small, headers={"content-encoding": "gzip"}, media_type="application/json")
        return Response(found, media_type="application/json")

    @app.post("/steer", response_class=JSONResponse)
    async def steered_features(body: GraphSteerBody, request: Request) -> Response:
        """A text continued with features of its graph set, as Neuronpedia's graph server does it."""
        return await answered(body, request, graph_steering.steer)

    @app.post("/forward-pass", response_class=JSONResponse)
    async def forward_pass(body: SalientBody, request: Request) -> Response:
        """A prompt's tokens and the likeliest next ones, as Neuronpedia's graph server gives them."""
        return await answered(body, request, salient_logits)

    @app.get("/check-busy", response_class=JSONResponse)
    async def check_busy(request: Request) -> Response:
        """Whether a graph is being made, as Neuronpedia's graph server says it, and how much of it is."""
        check_interp(registry.settings, request.scope)
        return JSONResponse(graphs.state())
