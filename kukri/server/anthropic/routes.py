"""The routes of Anthropic's API."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from kukri.server.answers.loading_reply import answered
from kukri.server.anthropic.messages import answer_message, count_tokens
from kukri.server.anthropic.schema import MessageErrorBody, MessagesBody, PromptBody
from kukri.server.models.registry import ModelRegistry
from kukri.server.openapi import EVENTS, errors_in

_ERRORS = errors_in(MessageErrorBody)


def add_anthropic_routes(app: FastAPI, registry: ModelRegistry) -> None:
    """Adds the routes of messages."""

    @app.post("/v1/messages", responses=EVENTS | _ERRORS)
    async def messages(body: MessagesBody, request: Request) -> Response:
        """Answers a conversation, in Anthropic's form."""
        body.check_known(request)
        return await answered(registry, body, request, answer_message)

    @app.post("/v1/messages/count_tokens", responses=_ERRORS, response_class=JSONResponse)
    async def message_tokens(body: PromptBody, request: Request) -> Response:
        """Counts the tokens of a conversation, in Anthropic's form."""
        body.check_known(request)
        served = await registry.served(body.model, request.scope)
        return await count_tokens(served, body)
