"""/v1/activations: the activations of texts as safetensors, by requests that the engine batches."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from kukri.engine import Request as EngineRequest
from kukri.errors import ActivationLimitError, ContextLengthError, RequestError
from kukri.formats.huggingface.safetensors import safetensors_bytes
from kukri.interp.hooks.hook_values import Rows
from kukri.interp.interventions.intervention import MAX_INTERVENTIONS, resolve
from kukri.interp.interventions.positions import NO_PROMPT
from kukri.interp.interventions.request_taps import RequestTaps, joined_cache
from kukri.server.answers.rows import request_options, rows_of
from kukri.server.body import Body
from kukri.server.models.served_model import ServedModel
from kukri.server.schema import TokenIds

_MAX_TEXTS = 256
_Text = Annotated[str, Field(min_length=1)]


class ActivationsBody(Body):
    """A request to /v1/activations."""

    model: str | None = None
    input: (
        _Text
        | TokenIds
        | Annotated[list[_Text], Field(min_length=1, max_length=_MAX_TEXTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=_MAX_TEXTS)]
    )
    names: Annotated[
        list[Annotated[str, Field(max_length=200)]], Field(min_length=1, max_length=MAX_INTERVENTIONS)
    ]
    dtype: Literal["float32", "float16"] | None = None
    user: str | None = None  # whose request it is: clients and their users take turns


async def activations(served: ServedModel, body: ActivationsBody, http: Request) -> Response:
    """The response: tensors under their full names, [text, position, ...] with zeros for padding, and
    `tokens` [text, position] and `lengths` [text].
    """
    requests, taps = await asyncio.to_thread(capturing, served, body, http.scope)
    http.scope["kukri.log"].update(n_prompt_tokens=sum(request.n_prompt for request in requests))
    await rows_of(served, requests, http.scope)
    content = await asyncio.to_thread(_content, served.check_model(body.model), body, requests, taps)
    return Response(content, media_type="application/vnd.safetensors")


def capturing(
    served: ServedModel, body: ActivationsBody, scope: Scope
) -> tuple[list[EngineRequest], list[RequestTaps]]:
    """A request for each text, and what captures its activations. Raises RequestError."""
    session, limit = served.session, served.settings.max_activation_bytes
    given: Any = body.input
    many = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    try:
        captures = [{"op": "capture", "name": name} for name in body.names]
        wanted = resolve(captures, session.values, session.catalog, NO_PROMPT)
    except RequestError as error:
        raise RequestError(str(error), param="names") from None
    points = [point for point, _ in wanted.captures]
    most = served.llm.engine.maker.max_context
    encode = served.tokenizer.encode
    texts = [
        encode(one, parse_special=True, max_tokens=most) if isinstance(one, str) else one for one in many
    ]
    lengths = np.array([len(ids) for ids in texts], np.int32)
    values = sum(session.values.n_bytes(point, Rows(lengths)) for point in points)
    kept = sum(session.trace.widths[tap] for tap in {tap for point in points for tap in point.needs})
    if max(values, 4 * kept * int(lengths.sum())) > limit:
        raise ActivationLimitError(limit)
    options = request_options(served, scope, body.model, body.user)
    try:
        requests = [
            served.llm.engine.maker.make_output_request(ids, "logits", first_row=len(ids) - 1, **options)
            for ids in texts
        ]
    except ContextLengthError as error:
        error.param = "input"
        raise
    except RequestError as error:
        raise RequestError(str(error), param="input") from None
    taps = [RequestTaps(session.values_of(request), points, max_bytes=limit) for request in requests]
    for request, own in zip(requests, taps):
        request.listen(own)
    return requests, taps


def _content(
    model: str, body: ActivationsBody, requests: list[EngineRequest], taps: list[RequestTaps]
) -> bytes:
    """The bytes of the response."""
    cache = joined_cache(taps, requests)
    arrays = {"tokens": cache.tokens, "lengths": cache.lengths}
    with np.errstate(over="ignore"):  # beyond float16 a number is infinite
        arrays |= {name: cache[name].astype(body.dtype or "float32") for name in cache}
    return safetensors_bytes(arrays, {"model": model, "names": json.dumps(list(cache))})
