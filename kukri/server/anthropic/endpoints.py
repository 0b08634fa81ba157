"""The endpoints of Anthropic's API."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from kukri.server.answers.loading_reply import answered, by_model
from kukri.server.anthropic.messages import answer_message, count_tokens
from kukri.server.anthropic.schema import MessagesBody, PromptBody, message_error_body
from kukri.server.endpoint import Api, Endpoint


async def _messages(body: MessagesBody, request: Request) -> Response:
    body.check_known(request)
    return await answered(body, request, answer_message)


async def _message_tokens(body: PromptBody, request: Request) -> Response:
    body.check_known(request)
    return await by_model(count_tokens)(body, request)


_MESSAGES = {"messages": [{"role": "user", "content": "Name a colour."}]}
ENDPOINTS = (
    Endpoint(
        "POST", "/v1/messages", _messages, "Answer a conversation, in Anthropic's form",
        "MessageAnswer", "MessageEvent", MessagesBody, _MESSAGES | {"max_tokens": 16}, has_images=True,
    ),
    Endpoint(
        "POST", "/v1/messages/count_tokens", _message_tokens,
        "Count the tokens of a conversation, in Anthropic's form",
        "MessageTokens", "", PromptBody, _MESSAGES, has_images=True,
    ),
)  # fmt: skip
ANTHROPIC = Api(
    "Anthropic",
    ENDPOINTS,
    "kukri.server.anthropic.forms",
    prefix="/v1/messages",
    error=message_error_body,
    error_form="MessageErrorBody",
)
