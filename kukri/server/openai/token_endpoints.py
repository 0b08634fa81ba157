"""The endpoints of tokens and chat templates, as vLLM and llama.cpp have them."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from fastapi import Request
from pydantic import Field, model_validator
from starlette.responses import JSONResponse, Response

from kukri.calls.image_prompts import ids_of
from kukri.errors import RequestError
from kukri.server.body import Body
from kukri.server.models.registry import registry_of
from kukri.server.models.served_model import ServedModel
from kukri.server.schema import MAX_IDS, ChatMessage, Tool, conversation


class PromptText(Body):
    """The conversation of /tokenize and /apply-template."""

    model: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def options(self) -> dict[str, Any]:
        """The options of `ChatPrompts.encode` and `render`."""
        return {
            "variables": self.chat_template_kwargs,
            "add_generation_prompt": self.add_generation_prompt is not False,
            "continue_final_message": bool(self.continue_final_message),
            "tools": [tool.model_dump(exclude_none=True) for tool in self.tools] if self.tools else None,
        }


class TokenizeBody(PromptText):
    """A request to /tokenize: `prompt` or `messages` as vLLM has them, or `content` as llama.cpp has it."""

    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool = True  # to a prompt
    add_special: bool = False  # to a content
    parse_special: bool = True  # control tokens written in either count
    return_token_strs: bool = False
    with_pieces: bool = False  # each token with its text

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeBody:
        if sum(given is not None for given in (self.prompt, self.content, self.messages)) != 1:
            raise RequestError("one of 'prompt', 'content' and 'messages' is required", param="prompt")
        return self


class DetokenizeBody(Body):
    """A request to /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=MAX_IDS)]


class TemplateBody(PromptText):
    """A request to /apply-template."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]


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
