"""The endpoints that tell how the server is."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kukri import __version__
from kukri.server.access import may
from kukri.server.endpoint import Api, Endpoint
from kukri.server.models.registry import registry_of


async def _version(request: Request) -> Response:
    return JSONResponse({"version": __version__})


async def _health(request: Request) -> Response:
    is_well = registry_of(request).is_stepping
    return JSONResponse({"status": "ok" if is_well else "degraded"}, 200 if is_well else 503)


async def _ready(request: Request) -> Response:
    registry = registry_of(request)
    if registry.is_draining:
        return JSONResponse({"status": "draining"}, 503)
    is_well = registry.is_stepping
    return JSONResponse({"status": "ready" if is_well else "degraded"}, 200 if is_well else 503)


async def _metrics(request: Request) -> Response:
    metrics = registry_of(request).metrics
    text = metrics.text(with_keys=may(request.scope, "manage"))
    return Response(text, media_type=metrics.content_type)


ENDPOINTS = (
    Endpoint("GET", "/version", _version, "Return the version of kukri", "Version"),
    Endpoint(
        "GET", "/health", _health, "Return the health of the engines: `ok`, or 503 and `degraded`",
        "State", also=("/ping",), is_open=True, is_quiet=True, tells_state=True,
    ),
    Endpoint(
        "GET", "/ready", _ready,
        "Say whether new requests are taken: 503 before the start, while draining and while an engine fails",
        "State", is_open=True, is_quiet=True, tells_state=True,
    ),
    Endpoint(
        "GET", "/metrics", _metrics,
        "Return all counts, for Prometheus; the counts of single keys for keys with the scope `manage`",
        "text/plain",
    ),
)  # fmt: skip
STATE = Api("server", ENDPOINTS, "kukri.server.answers.forms")
