"""The endpoints of llama.cpp's own API, which editors speak."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kukri import __version__
from kukri.server.answers.answer_facts import settings_of
from kukri.server.answers.embeddings import EmbeddingBody, embed
from kukri.server.answers.loading_reply import by_model, streamed
from kukri.server.endpoint import Api, Endpoint
from kukri.server.llama_cpp.answers import LLAMA_EVENTS, complete, infill
from kukri.server.llama_cpp.schema import LlamaCompletionBody, LlamaInfillBody
from kukri.server.models.registry import registry_of
from kukri.server.models.served_model import ServedModel


async def _find_props(request: Request, model: str | None = None) -> Response:
    return JSONResponse(_props(await registry_of(request).served(model, request.scope)))


async def _find_slots(request: Request, model: str | None = None, fail_on_no_slot: int = 0) -> Response:
    found = _slots(await registry_of(request).served(model, request.scope))
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


ENDPOINTS = (
    Endpoint(
        "POST", "/completion", streamed(complete, LLAMA_EVENTS), "Continue a text, in llama.cpp's form",
        "LlamaCompletion", "LlamaChunk", LlamaCompletionBody, {"prompt": "The sky is", "n_predict": 16},
        ("/completions",), has_images=True,
    ),
    Endpoint(
        "POST", "/infill", streamed(infill, LLAMA_EVENTS),
        "Fill in the text between two others, in llama.cpp's form",
        "LlamaCompletion", "LlamaChunk", LlamaInfillBody,
        {"input_prefix": "def one():", "input_suffix": "return 1", "n_predict": 16},
    ),
    Endpoint(
        "POST", "/embedding", by_model(partial(embed, as_llama_cpp=True)),
        "Return a vector for each text, in llama.cpp's form",
        "LlamaVectors", "", EmbeddingBody, {"content": "A text"}, ("/embeddings",),
    ),
    Endpoint("GET", "/props", _find_props, "Describe a model and its defaults, in llama.cpp's form", "Props"),
    Endpoint(
        "GET", "/slots", _find_slots,
        "List the places of requests that run at a time, in llama.cpp's form; 503 on demand if none is free",
        "Slots", tells_state=True,
    ),
)  # fmt: skip
LLAMA_CPP = Api("llama.cpp", ENDPOINTS, "kukri.server.llama_cpp.forms")
