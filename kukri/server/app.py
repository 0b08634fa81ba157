"""The ASGI application: its life, middleware and routes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from kukri import __version__
from kukri.engine import EngineLoop
from kukri.engine.traces import open_traces
from kukri.errors import KukriError
from kukri.server.anthropic.endpoints import ANTHROPIC
from kukri.server.body_check import BodyCheck, CheckedRoute
from kukri.server.errors import on_deep_body, on_http_error, on_invalid_body, on_kukri_error
from kukri.server.llama_cpp.endpoints import LLAMA_CPP
from kukri.server.middleware import Middleware
from kukri.server.models.bridge import LoopMaker
from kukri.server.models.registry import ModelRegistry
from kukri.server.models.served_model import OpenModel
from kukri.server.neuronpedia.endpoints import NEURONPEDIA
from kukri.server.neuronpedia.graphs import Graphs
from kukri.server.ollama.endpoints import NO_PAGE, OLLAMA
from kukri.server.openai.audio import SoundRoom
from kukri.server.openai.batches import Batches
from kukri.server.openai.endpoints import OPENAI
from kukri.server.openai.response_store import ResponseFiles, ResponseStore
from kukri.server.page.endpoints import PAGE, UnopenedAnswers
from kukri.server.schema import ChatBody
from kukri.server.settings import ModelSpec, ServerSettings
from kukri.server.state.endpoints import STATE
from kukri.server.state.openapi import add_document

log = logging.getLogger("kukri.server")

APIS = (OPENAI, ANTHROPIC, OLLAMA, LLAMA_CPP, NEURONPEDIA, STATE)  # and the page, or none


def create_app(
    llm: OpenModel | None,
    settings: ServerSettings,
    models: Sequence[ModelSpec] = (),
    make_loop: LoopMaker = EngineLoop,
) -> FastAPI:
    """The ASGI application that serves an open model under `settings.model_names`, and `models` on demand.

    `app.state.registry` is the state of its routes. Engines run from the application's start, or a model's
    loading, to its shutdown; a pinned model that cannot be loaded ends the start with a KukriError, which
    `app.state.failure` keeps. `make_loop` makes the loop that runs the open model's requests.
    """
    registry = ModelRegistry(settings, models, llm, make_loop)
    apis = (*APIS, PAGE if settings.has_page else NO_PAGE)
    batches: Batches | None = None
    bodies = BodyCheck()
    traces = open_traces(settings.traces)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await registry.start()
            if batches is not None:
                batches.start()
            bodies.start_soon(ChatBody)
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
            await bodies.close()
            await asyncio.to_thread(app.state.responses.close)
            if traces is not None:
                await asyncio.to_thread(traces.close)
            log.info("stopped")

    app = FastAPI(
        title="kukri",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,  # see add_document
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
    )
    app.state.registry, app.state.failure = registry, None
    files = None if settings.response_dir is None else ResponseFiles(settings.response_dir, registry.keys)
    app.state.responses, app.state.bodies = ResponseStore(files=files), bodies
    app.router.route_class = CheckedRoute
    app.add_exception_handler(KukriError, on_kukri_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid_body)
    app.add_exception_handler(RecursionError, on_deep_body)
    app.add_middleware(
        Middleware,
        settings=settings,
        keys=registry.keys,
        metrics=registry.metrics,
        apis=apis,
        traces=traces,
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # clients have many of their own
            allow_private_network=True,  # browsers ask for it when a public page calls this machine
            expose_headers=[
                "request-id",
                "retry-after",
                "x-request-id",
                "x-tools-left-out",
                "x-fields-left-out",
            ],
        )
    if settings.batch_dir is not None:
        batches = Batches(
            app, settings.batch_dir, registry.keys, settings.max_upload_bytes, settings.max_body_bytes
        )
    app.state.batches, app.state.graphs, app.state.unopened = batches, Graphs(), UnopenedAnswers()
    app.state.sounds = SoundRoom()
    for api in apis:
        for endpoint in api.endpoints:
            endpoint.add_to(app)
    add_document(app, apis)
    return app
