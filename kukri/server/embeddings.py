"""/v1/embeddings: vectors of texts, by requests that the engine batches like any other."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from kukri.errors import CapacityError, ContextLengthError, KukriError, RequestError
from kukri.kernels.types import FloatArray
from kukri.server.loading_reply import disconnected
from kukri.server.schema import Body, TokenIds
from kukri.server.service import Service
from kukri.tasks import embedding_requests, normalized

_MAX_TEXTS = 2048  # as in OpenAI's API
_Text = Annotated[str, Field(min_length=1)]


class EmbeddingBody(Body):
    """A request to /v1/embeddings."""

    model: str
    input: (
        _Text
        | TokenIds
        | Annotated[list[_Text], Field(min_length=1, max_length=_MAX_TEXTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=_MAX_TEXTS)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None  # whose request it is: clients and their users take turns

    pooling: Literal["mean", "last", "cls"] | None = None  # as in `LLM.embed`
    normalize: bool | None = None


async def embed(service: Service, body: EmbeddingBody, http: Request) -> Response:
    """The response to an embedding request. A client that leaves ends the work."""
    texts = await _token_ids(service, body.input)
    vectors = await vectors_of(service, body, texts, http)
    if vectors is None:
        return _Silence()
    model, n_tokens = service.check_model(body.model), sum(map(len, texts))
    http.scope["kukri.log"].update(n_prompt_tokens=n_tokens)
    head = {"object": "list", "model": model, "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens}}
    content = await asyncio.to_thread(_body, head, vectors, body.encoding_format == "base64")
    return Response(content, media_type="application/json")


async def vectors_of(
    service: Service, body: EmbeddingBody, texts: Sequence[Sequence[int]], http: Request
) -> FloatArray | None:
    """The vectors [n, D] of texts, by the options of a body; None if the client has left meanwhile."""
    width = service.llm.config.d_model
    if body.dimensions not in (None, width):
        raise RequestError(
            f"dimensions can only be {width}: the model's vectors are not made to be cut",
            param="dimensions",
            code="unsupported_parameter",
        )
    work = asyncio.create_task(_vectors(service, body, texts, http))
    watcher = asyncio.create_task(disconnected(http.receive))
    try:
        await asyncio.wait({work, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    except ContextLengthError as error:
        error.param = "input"
        raise
    except RequestError as error:
        raise RequestError(str(error), param="input") from None
    finally:
        work.cancel()
        watcher.cancel()


async def _token_ids(service: Service, given: Any) -> list[list[int]]:
    """The token ids of each text."""
    if isinstance(given, str) or isinstance(given[0], int):
        given = [given]
    return [await service.encode(one) if isinstance(one, str) else one for one in given]


async def _vectors(
    service: Service, body: EmbeddingBody, texts: Sequence[Sequence[int]], http: Request
) -> FloatArray:
    """The vectors [n, D] of all texts, a batch of them after another."""
    llm, client = service.llm, f"{http.scope['kukri.client']}/{body.user or ''}"
    requests = embedding_requests(llm.engine, texts, body.pooling or "mean", client)
    service.metrics.on_prompt(sum(map(len, texts)))
    n = min(llm.engine_config.max_requests, service.bridge.loop.max_waiting)  # so that others find room
    try:
        async with asyncio.timeout(service.settings.deadline_s):
            for start in range(0, len(requests), n):
                await service.bridge.compute(requests[start : start + n])
    except TimeoutError:
        raise CapacityError(f"the answer was not done within {service.settings.deadline_s:g} s") from None
    vectors = np.array([request.rows for request in requests], np.float32)
    if not np.isfinite(vectors).all():  # JSON has no such numbers
        raise KukriError("the model's vectors are not finite: its weights may be damaged")
    return vectors if body.normalize is False else normalized(vectors)


def _body(head: dict[str, Any], vectors: FloatArray, as_base64: bool) -> bytes:
    """The JSON of the response; a vector at a time, so that other threads get their turn."""
    items = []
    for i, vector in enumerate(vectors):
        shown: Any = (
            base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_base64 else vector.tolist()
        )
        items.append(json.dumps({"object": "embedding", "index": i, "embedding": shown}))
    return f'{json.dumps(head)[:-1]}, "data": [{", ".join(items)}]}}'.encode()


class _Silence(Response):
    """The response to a client that has disconnected."""

    async def __call__(self, *_: Any) -> None:
        """Sends nothing."""
