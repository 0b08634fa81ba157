"""/v1/decide: how probable each of several texts is as the answer, computed and not sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import numpy.typing as npt
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kukri.calls.decide import MAX_CHOICES, Normalization, Question, checked_choices, decision
from kukri.errors import ContextLengthError, RequestError
from kukri.server.answers.rows import request_options, rows_of
from kukri.server.body import Body
from kukri.server.models.served_model import ServedModel
from kukri.server.schema import ChatMessage, TokenIds, conversation

_Messages = Annotated[list[ChatMessage], Field(min_length=1)]
_Prompt = Annotated[str, Field(min_length=1)] | TokenIds


class Scores(Body):
    """The integers from `min` to `max`, as choices."""

    min: int
    max: int


class DecideBody(Body):
    """A request to /v1/decide. `content_free` has the prompt's form: messages, a text or token ids."""

    model: str | None = None
    messages: _Messages | None = None
    prompt: _Prompt | None = None
    choices: Annotated[list[str], Field(min_length=2, max_length=MAX_CHOICES)] | None = None
    scores: Scores | None = None
    normalization: Normalization | None = None
    content_free: _Prompt | _Messages | None = None
    adapter: str | None = None
    user: str | None = None  # whose request it is: clients and their users take turns
    priority: int | None = None

    @model_validator(mode="after")
    def _agrees(self) -> DecideBody:
        if (self.messages is None) == (self.prompt is None):
            raise RequestError("either 'messages' or 'prompt' is required, not both", param="prompt")
        if self.content_free is not None and _is_chat(self.content_free) != (self.prompt is None):
            raise RequestError.of("content_free", "must be a text for 'prompt', and messages for 'messages'")
        return self


async def decide(served: ServedModel, body: DecideBody, http: Request) -> Response:
    """The response to a request for a decision."""
    served.llm.engine.maker.check_generates()
    texts = checked_choices(body.choices, None if body.scores is None else (body.scores.min, body.scores.max))
    asked = await _logprobs(served, body, texts, body.messages or body.prompt, "prompt", http)
    content_free = None
    if body.content_free is not None:
        content_free = await _logprobs(served, body, texts, body.content_free, "content_free", http)
    n_tokens = asked[0].n_prompt + (0 if content_free is None else content_free[0].n_prompt)
    http.scope["kukri.log"].update(n_prompt_tokens=n_tokens)
    found = decision(asked[0], texts, asked[1], body.normalization or "sequence", content_free)
    return JSONResponse(
        {
            "id": http.scope["kukri.id"],
            "object": "decision",
            "model": served.check_model(body.model),
            "choice": found.choice,
            "choices": [
                {"text": text, "probability": probability, "logprob": found.logprobs[text]}
                for text, probability in found.probabilities.items()
            ],
            "expected": found.expected,
            "mass": found.mass,
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }
    )


async def _logprobs(
    served: ServedModel, body: DecideBody, choices: Sequence[str], prompt: Any, param: str, http: Request
) -> tuple[Question, npt.NDArray[Any]]:
    """The question that a prompt makes, and log P of each choice."""
    options = request_options(served, http.scope, body.model, body.user, body.adapter, body.priority)
    try:
        if _is_chat(prompt):
            messages = conversation(prompt)
            limit = served.prompts.max_context
            ids = await served.prompts.before_answer(messages, max_tokens=limit)
        else:
            ids = await served.encode(prompt) if isinstance(prompt, str) else prompt
        question = await asyncio.to_thread(Question, served.tokenizer, ids, choices)
        found: dict[tuple[int, ...], float] = {}
        for part in question.batches(served.tokenizer.n_vocab):
            requests = [
                served.llm.engine.maker.make_output_request(
                    text, "logits", first_row=question.first_row, **options
                )
                for text in question.texts[part]
            ]
            rows = await rows_of(served, requests, http.scope)
            found |= await asyncio.to_thread(question.token_logprobs, part, rows)
    except ContextLengthError as error:
        error.param = param
        raise
    except RequestError as error:
        if error.param == "prompt":
            error.param = param
        raise
    return question, question.logprobs(found)


def _is_chat(prompt: Any) -> bool:
    return not isinstance(prompt, str) and isinstance(prompt[0], ChatMessage)
