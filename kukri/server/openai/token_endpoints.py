"""The endpoints of tokens and chat templates, as vLLM and llama.cpp have them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from kukri.calls.image_prompts import ids_of
from kukri.errors import RequestError
from kukri.server.models.registry import registry_of
from kukri.server.models.served_model import ServedModel
from kukri.server.openai.token_schema import DetokenizeBody, TemplateBody, TokenizeBody
from kukri.server.schema import conversation


async def tokenize(served: ServedModel, body: TokenizeBody, request: Request) -> Response:
    """Return the token ids of a text or a conversation."""
    if body.messages is not None:
        messages = conversation(body.messages)
        ids = list(ids_of(await served.prompts.encode(messages, **body.options())))
    elif body.content is not None:
        ids = await served.encode(
            body.content, add_special=body.add_special, parse_special=body.parse_special
        )
    else:
        assert body.prompt is not None, "the schema wants one of them"
        ids = await served.encode(
            body.prompt, add_special=body.add_special_tokens, parse_special=body.parse_special
        )
    return await asyncio.to_thread(_tokenized, served, body, ids)


async def tokenizer_info(request: Request, model: str | None = None) -> Response:
    """Return the tokenizer's control tokens and chat template, as vLLM writes them."""
    served = await registry_of(request).served(model, request.scope)
    tokenizer = served.tokenizer
    return JSONResponse(
        {
            "tokenizer_class": "kukri",
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "pad_token": None,
            "add_bos_token": tokenizer.add_bos,
            "add_eos_token": tokenizer.add_eos,
            "chat_template": tokenizer.chat_template,
            "model_max_length": served.llm.engine.maker.max_context,
        }
    )


async def detokenize(served: ServedModel, body: DetokenizeBody, request: Request) -> Response:
    """Return the text of token ids."""
    try:
        text = await asyncio.to_thread(served.tokenizer.decode, body.tokens)
    except RequestError as error:
        error.param = "tokens"
        raise
    return JSONResponse({"prompt": text, "content": text})  # vLLM's name for it, and llama.cpp's


async def apply_template(served: ServedModel, body: TemplateBody, request: Request) -> Response:
    """Return the prompt that a conversation becomes."""
    text = await served.prompts.render(conversation(body.messages), **body.options())
    return Response(json.dumps({"prompt": text}), media_type="application/json")  # lone surrogates too


def _tokenized(served: ServedModel, body: TokenizeBody, ids: list[int]) -> JSONResponse:
    tokens: list[Any] = ids
    if body.with_pieces:
        tokens = [{"id": i, "piece": _piece(served.tokenizer.token_bytes(i))} for i in ids]
    return JSONResponse(
        {
            "count": len(ids),
            "max_model_len": served.llm.engine.maker.max_context,
            "tokens": tokens,
            "token_strs": [served.tokenizer.token_text(i) for i in ids] if body.return_token_strs else None,
        }
    )


def _piece(data: bytes) -> str | list[int]:
    """A token's text as llama.cpp writes it: bytes that are not text as numbers."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
