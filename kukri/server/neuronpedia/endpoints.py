"""The endpoints of Neuronpedia's inference and graph servers, for its front end and its Python client."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kukri.server.access import INTERP
from kukri.server.answers.reply import EVENTS, sse
from kukri.server.answers.rows import SILENCE, while_connected
from kukri.server.endpoint import Api, Endpoint
from kukri.server.models.registry import registry_of
from kukri.server.models.served_model import ServedModel
from kukri.server.neuronpedia import activations, steering
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

_GZIP_LEVEL = 3
T = TypeVar("T")
U = TypeVar("U")
_Work = Callable[[ServedModel, T, Request], Coroutine[Any, Any, U]]


async def _found_by(work: _Work[T, U], body: T, http: Request) -> U | None:
    served = await registry_of(http).served(getattr(body, "model", None), http.scope)
    served.llm.engine.maker.check_generates()
    return await while_connected(http, work(served, body, http))


def _answer(work: _Work[T, dict[str, Any]]) -> Callable[[T, Request], Awaitable[Response]]:
    async def handle(body: T, http: Request) -> Response:
        found = await _found_by(work, body, http)
        if found is None:
            return SILENCE
        if getattr(body, "stream", False):  # each event is the whole so far, and so is the only one
            return Response(sse(found), media_type=EVENTS.content_type.decode())
        return JSONResponse(found)

    return handle


async def _generate_graph(body: GraphBody, request: Request) -> Response:
    graphs: Graphs = request.app.state.graphs
    found = await _found_by(graphs.make, body, request)
    if found is None:
        return SILENCE
    if body.compress and "gzip" in request.headers.get("accept-encoding", ""):
        small = await asyncio.to_thread(gzip.compress, found, _GZIP_LEVEL)
        return Response(small, headers={"content-encoding": "gzip"}, media_type="application/json")
    return Response(found, media_type="application/json")


async def _check_busy(request: Request) -> Response:
    return JSONResponse(request.app.state.graphs.state())


_PROMPT = {"prompt": "The sky is"}
_FEATURE = {"source": "0-res", "index": 1}
_STEERED = {
    "types": ["DEFAULT", "STEERED"],
    "features": [_FEATURE | {"strength": 2.0}],
    "n_completion_tokens": 4,
}
ENDPOINTS = (
    Endpoint(
        "POST", "/v1/activation/single", _answer(activations.single),
        "Return the activations of a feature, or along a vector, in Neuronpedia's form",
        "FeatureActivations", "", SingleBody, _PROMPT | _FEATURE, permission=INTERP,
    ),
    Endpoint(
        "POST", "/v1/activation/all", _answer(activations.all_features),
        "Find the most active features of a prompt, in Neuronpedia's form",
        "ActiveFeatures", "", AllBody, _PROMPT | {"source_set": "res"}, permission=INTERP,
    ),
    Endpoint(
        "POST", "/v1/activation/topk-by-token", _answer(activations.topk_by_token),
        "Find the most active features of each token, in Neuronpedia's form",
        "FeaturesByToken", "", TopkByTokenBody, _PROMPT | {"source": "0-res"}, permission=INTERP,
    ),
    Endpoint(
        "POST", "/v1/util/sae-topk-by-decoder-cossim", _answer(activations.most_alike),
        "Find the features whose directions are most alike, in Neuronpedia's form",
        "AlikeFeatures", "", CosineBody,
        {"source": "0-res", "feature": _FEATURE, "num_results": 5}, permission=INTERP,
    ),
    Endpoint(
        "POST", "/v1/steer/completion", _answer(steering.complete),
        "Continue a text, steered and not, in Neuronpedia's form",
        "SteeredTexts", "SteeredTexts", SteerCompletionBody, _PROMPT | _STEERED, permission=INTERP,
    ),
    Endpoint(
        "POST", "/v1/steer/completion-chat", _answer(steering.chat),
        "Answer a chat, steered and not, in Neuronpedia's form",
        "SteeredChats", "SteeredChats", SteerChatBody,
        {"prompt": [{"role": "user", "content": "Hi"}]} | _STEERED, permission=INTERP,
    ),
    Endpoint(
        "POST", "/generate-graph", _generate_graph,
        "Trace the attribution graph of a prompt, as Neuronpedia's graph server does",
        "AttributionGraph", "", GraphBody, _PROMPT, permission=INTERP,
    ),
    Endpoint(
        "POST", "/steer", _answer(steering.steer),
        "Continue a text with features of its graph set, as Neuronpedia's graph server does",
        "GraphSteering", "", GraphSteerBody, _PROMPT | {"features": []}, permission=INTERP,
    ),
    Endpoint(
        "POST", "/forward-pass", _answer(salient_logits),
        "Return a prompt's tokens and the likeliest next ones, as Neuronpedia's graph server does",
        "SalientLogits", "", SalientBody, _PROMPT, permission=INTERP,
    ),
    Endpoint(
        "GET", "/check-busy", _check_busy,
        "Say whether a graph is being made, and how much of it is, as Neuronpedia's graph server does",
        "Busy", permission=INTERP,
    ),
)  # fmt: skip
NEURONPEDIA = Api("Neuronpedia", ENDPOINTS, "kukri.server.neuronpedia.forms")
