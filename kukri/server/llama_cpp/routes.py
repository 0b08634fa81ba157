"""The routes of llama.cpp's own API, which editors speak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from kukri import __version__
from kukri.server.answers.answer_facts import settings_of
from kukri.server.answers.embeddings import EmbeddingBody, embed
from kukri.server.answers.loading_reply import answered
from kukri.server.llama_cpp import answers as llama_cpp
from kukri.server.llama_cpp.schema import LlamaCompletionBody, LlamaInfillBody
from kukri.server.models.registry import ModelRegistry
from kukri.server.models.served_model import ServedModel
from kukri.server.openapi import EVENTS


def add_llama_cpp_routes(app: FastAPI, registry: ModelRegistry) -> None:
    """Adds the routes."""

    @app.post("/completion", responses=EVENTS)
    @app.post("/completions", responses=EVENTS, include_in_schema=False)
    async def completion(body: LlamaCompletionBody, request: Request) -> Response:
        """Continues a text, in llama.cpp's form."""
        return await answered(registry, body, request, llama_cpp.complete, llama_cpp.LLAMA_EVENTS)

    @app.post("/infill", responses=EVENTS)
    async def infill(body: LlamaInfillBody, request: Request) -> Response:
        """Fills in the text between two others, in llama.cpp's form."""
        return await answered(registry, body, request, llama_cpp.infill, llama_cpp.LLAMA_EVENTS)

    @app.post("/embedding", response_class=JSONResponse)
    @app.post("/embeddings", response_class=JSONResponse, include_in_schema=False)
    async def embedding(body: EmbeddingBody, request: Request) -> Response:
        """A vector for each text, in llama.cpp's form."""
        served = await registry.served(body.model, request.scope)
        return await embed(served, body, request, as_llama_cpp=True)

    @app.get("/props", response_class=JSONResponse)
    async def props(request: Request, model: str | None = None) -> JSONResponse:
        """The model and its defaults, in llama.cpp's form."""
        served = await registry.served(model, request.scope)
        return JSONResponse(_props(served))

    @app.get("/slots", response_class=JSONResponse)
    async def slots(request: Request, model: str | None = None, fail_on_no_slot: int = 0) -> JSONResponse:
        """The places of requests that run at a time, in llama.cpp's form; 503 on demand if none is free."""
        served = await registry.served(model, request.scope)
        found = _slots(served)
        is_full = bool(fail_on_no_slot) and all(slot["is_processing"] for slot in found)
        return JSONResponse(found, 503 if is_full else 200)


def _props(served: ServedModel) -> dict[str, Any]:
    llm, tokenizer = served.llm, served.tokenizer
    settings = {
        "n_ctx": llm.engine.maker.max_context,
        "params": settings_of(replace(llm.default_params, max_tokens=None)),
    }
    return {
        "default_generation_settings": settings,
        "total_slots": llm.engine_config.max_requests,
        "model_alias": served.names[0],
        "model_path": llm.path.name,
        "modalities": {"vision": served.prompts.sees, "audio": False},
        "chat_template": tokenizer.chat_template or "",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "build_info": f"kukri {__version__}",
        "is_sleeping": False,
    }


def _slots(served: ServedModel) -> list[dict[str, Any]]:
    """A place for each request that may run at a time: what runs there is nobody else's business."""
    n_running = served.bridge.loop.status().n_running
    return [
        {
            "id": i,
            "n_ctx": served.llm.engine.maker.max_context,
            "speculative": served.llm.engine_config.speculation != "off",
            "is_processing": i < n_running,
        }
        for i in range(served.llm.engine_config.max_requests)
    ]
