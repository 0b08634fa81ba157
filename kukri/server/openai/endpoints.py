"""The endpoints of OpenAI's API, and of others that share its forms: rankings, tokens, adapters."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from starlette.responses import JSONResponse, Response

from kukri.server.access import ADAPTERS, INTERP
from kukri.server.answers.activations import ActivationsBody, activations
from kukri.server.answers.embeddings import EmbeddingBody, embed
from kukri.server.answers.loading_reply import by_model, streamed
from kukri.server.endpoint import Api, Endpoint
from kukri.server.models.entry import ModelEntry
from kukri.server.models.registry import ModelRegistry, registry_of
from kukri.server.models.served_model import ServedModel
from kukri.server.openai import audio
from kukri.server.openai import token_endpoints as tokens
from kukri.server.openai.adapters import load_adapter, unload_adapter
from kukri.server.openai.batch_endpoints import BATCHES
from kukri.server.openai.chat_completions import complete_chat, parse_chat
from kukri.server.openai.completions import complete
from kukri.server.openai.decide import DecideBody, decide
from kukri.server.openai.lists import listed
from kukri.server.openai.pooling import AnswersBody, ClassifyBody, PoolingBody, answer, classify, pool
from kukri.server.openai.rerank import RerankBody, ScoreBody, rerank, score
from kukri.server.openai.response_store import ResponseStore
from kukri.server.openai.responses import items_of, parse_response, respond
from kukri.server.openai.responses_schema import ResponseBody
from kukri.server.openai.token_endpoints import DetokenizeBody, TemplateBody, TokenizeBody
from kukri.server.schema import ChatBody, CompletionBody, LoadAdapterBody, UnloadAdapterBody


async def _stored(request: Request) -> tuple[ResponseStore, str]:
    """The responses that are kept, and the client as their owner."""
    store: ResponseStore = request.app.state.responses
    return store, await store.owner(request.scope["kukri.client"])


async def _stored_response(response_id: str, request: Request) -> Response:
    store, owner = await _stored(request)
    return JSONResponse(store.find(owner, response_id).response)


async def _stored_input(
    response_id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    store, owner = await _stored(request)
    stored = store.find(owner, response_id)
    items = stored.items[: stored.n_input]
    return listed(items if order == "asc" else items[::-1], limit, after)


async def _forget_response(response_id: str, request: Request) -> Response:
    store, owner = await _stored(request)
    await store.forget(owner, response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def _chat_tokens(served: ServedModel, body: ChatBody, request: Request) -> Response:
    n_tokens = await served.n_prompt_tokens(parse_chat(body))
    return JSONResponse({"object": "chat.completion.input_tokens", "input_tokens": n_tokens})


async def _response_tokens(served: ServedModel, body: ResponseBody, request: Request) -> Response:
    items = items_of(body, *await _stored(request))
    n_tokens = await served.n_prompt_tokens(parse_response(body, items))
    return JSONResponse({"object": "response.input_tokens", "input_tokens": n_tokens})


async def _models(request: Request) -> Response:
    registry = registry_of(request)
    entries = await registry.catalog.listed(request.scope)
    found = [await _model(registry, entry, name) for entry in entries for name in entry.names]
    return JSONResponse({"object": "list", "data": found})


async def _named_model(name: str, request: Request) -> Response:
    registry = registry_of(request)
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


_MESSAGES = {"messages": [{"role": "user", "content": "Name a colour."}]}
_CHAT = _MESSAGES | {"max_tokens": 16}
_RESPONSE = {"input": "Name a colour.", "max_output_tokens": 16}
_DOCUMENTS = {"query": "Which city is in France?", "documents": ["Paris", "Rome"]}
_ONE_RESPONSE = "/v1/responses/{response_id}"

ENDPOINTS = (
    Endpoint(
        "POST", "/v1/chat/completions", streamed(complete_chat), "Answer a conversation",
        "ChatCompletion", "ChatCompletionChunk", ChatBody, _CHAT, ("/chat/completions",), has_images=True,
    ),
    Endpoint(
        "POST", "/v1/completions", streamed(complete), "Continue a text",
        "Completion", "Completion", CompletionBody, {"prompt": "The sky is", "max_tokens": 16},
    ),
    Endpoint(
        "POST", "/v1/responses", streamed(respond), "Answer a conversation, in OpenAI's newer form",
        "Response", "ResponseEvent", ResponseBody, _RESPONSE, ("/responses",), has_images=True,
    ),
    Endpoint("GET", _ONE_RESPONSE, _stored_response, "Return a response that is still stored", "Response"),
    Endpoint(
        "GET", f"{_ONE_RESPONSE}/input_items", _stored_input,
        "List the items of a response's input, the newest first, by `limit` and `after`", "ItemList",
    ),
    Endpoint("DELETE", _ONE_RESPONSE, _forget_response, "Forget a stored response", "Deleted"),
    Endpoint(
        "POST", "/v1/chat/completions/input_tokens", by_model(_chat_tokens),
        "Count the tokens of a conversation", "InputTokens", "", ChatBody, _MESSAGES,
        ("/chat/completions/input_tokens",),
    ),
    Endpoint(
        "POST", "/v1/responses/input_tokens", by_model(_response_tokens),
        "Count the tokens of a response's input", "InputTokens", "", ResponseBody,
        {"input": "Name a colour."}, ("/responses/input_tokens",),
    ),
    Endpoint(
        "POST", "/v1/decide", by_model(decide), "Return the probability of each of some answers",
        "Decision", "", DecideBody, {"prompt": "The sky is", "choices": [" blue", " red"]}, has_images=True,
    ),
    Endpoint(
        "POST", "/v1/embeddings", by_model(embed), "Return a vector for each text",
        "EmbeddingAnswer", "", EmbeddingBody, {"input": ["A text", "Another"]},
    ),
    Endpoint(
        "POST", "/v1/rerank", by_model(rerank), "Rank documents by how well they answer a query",
        "Ranking", "", RerankBody, _DOCUMENTS, ("/rerank", "/reranking", "/v1/reranking"),
    ),
    Endpoint(
        "POST", "/v2/rerank", by_model(partial(rerank, as_cohere_v2=True)),
        "Rank documents by how well they answer a query, in the form of Cohere's second version",
        "Ranking", "", RerankBody, _DOCUMENTS,
    ),
    Endpoint(
        "POST", "/v1/score", by_model(score), "Score pairs of texts",
        "ScoreList", "", ScoreBody, {"text_1": "A city", "text_2": ["Paris", "Rome"]}, ("/score",),
    ),
    Endpoint(
        "POST", "/classify", by_model(classify), "Return the probability of each label for each text",
        "ClassificationList", "", ClassifyBody, {"input": ["How good this is!"]},
    ),
    Endpoint(
        "POST", "/pooling", by_model(pool),
        "Return vectors, or outputs of a head, of texts or of their tokens",
        "PoolingList", "", PoolingBody, {"input": ["A text"]},
    ),
    Endpoint(
        "POST", "/v1/answers", by_model(answer),
        "Find the spans of a context that most probably answer a question",
        "AnswerList", "", AnswersBody, {"question": "Who?", "context": "Ada wrote it."},
    ),
    Endpoint(
        "POST", "/v1/activations", by_model(activations), "Return the activations of texts",
        "application/vnd.safetensors", "", ActivationsBody,
        {"input": "A text", "names": ["blocks.0.hook_resid_post"]}, permission=INTERP,
    ),
    Endpoint(
        "POST", "/v1/audio/transcriptions", audio.transcribe,
        "Write what is said in a sound: a form with a `file`", "Transcription", "TranscriptEvent",
        also=("/inference",), is_upload=True, form=audio.AudioBody,
    ),
    Endpoint(
        "POST", "/v1/audio/translations", audio.translate,
        "Write what is said in a sound in English: a form with a `file`", "Transcription", "TranscriptEvent",
        is_upload=True, form=audio.AudioBody,
    ),
    Endpoint("GET", "/v1/models", _models, "List the names of all models", "ModelList", also=("/models",)),
    Endpoint("GET", "/v1/models/{name:path}", _named_model, "Describe a model", "Model"),
    *BATCHES,
    Endpoint(
        "POST", "/v1/load_lora_adapter", load_adapter,
        "Load a LoRA adapter of the adapter directory, which requests may then name as their model",
        "Message", "", LoadAdapterBody, {"lora_name": "poems", "lora_path": "poems"}, permission=ADAPTERS,
    ),
    Endpoint(
        "POST", "/v1/unload_lora_adapter", unload_adapter,
        "Unload a LoRA adapter, and end the requests that run with it",
        "Message", "", UnloadAdapterBody, {"lora_name": "poems"}, permission=ADAPTERS,
    ),
    Endpoint(
        "POST", "/tokenize", by_model(tokens.tokenize), "Return the token ids of a text or a conversation",
        "TokenList", "", TokenizeBody, {"prompt": "A text"}, has_images=True,
    ),
    Endpoint(
        "GET", "/tokenizer_info", tokens.tokenizer_info,
        "Return the tokenizer's control tokens and chat template, as vLLM has them for lm-evaluation-harness",
        "TokenizerInfo",
    ),
    Endpoint(
        "POST", "/detokenize", by_model(tokens.detokenize), "Return the text of token ids",
        "Detokenized", "", DetokenizeBody, {"tokens": [1, 2, 3]},
    ),
    Endpoint(
        "POST", "/apply-template", by_model(tokens.apply_template),
        "Return the prompt that a conversation becomes",
        "Prompt", "", TemplateBody, _MESSAGES,
    ),
)  # fmt: skip
OPENAI = Api("OpenAI", ENDPOINTS, "kukri.server.openai.forms")
