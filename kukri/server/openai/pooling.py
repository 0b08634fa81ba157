"""/classify and /pooling, in vLLM's form, and /v1/answers: what heads for tasks say about texts."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy.typing as npt
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kukri.errors import ContextLengthError, RequestError, UnsupportedError
from kukri.server.answers.embeddings import Input, encoded, named, token_vectors_of
from kukri.server.answers.rows import listed_answer, request_options, rows_of
from kukri.server.body import Body
from kukri.server.models.served_model import ServedModel
from kukri.tasks import heads

Task = Literal["embed", "token_embed", "classify", "token_classify"]
_DEFAULTS: dict[str, Task] = {
    "sequence_classification": "classify",
    "token_classification": "token_classify",
}
_Array = npt.NDArray[Any]
_HEADS: dict[Task, str] = {task: kind for kind, task in _DEFAULTS.items()}


class ClassifyBody(Body):
    """A request to /classify. Without `use_activation` the answer has the head's outputs as they are."""

    model: str | None = None
    input: Input
    use_activation: bool | None = None
    truncate: bool | None = None
    user: str | None = None


class PoolingBody(ClassifyBody):
    """A request to /pooling. Without `use_activation` vectors keep their length, and outputs of heads are not
    made probabilities.
    """

    task: Task | None = None  # None: what the model has a head for, else "token_embed"
    encoding_format: Literal["float", "base64"] | None = None
    prompt_name: str | None = None


class AnswersBody(Body):
    """A request to /v1/answers."""

    model: str | None = None
    question: Annotated[str, Field(min_length=1)]
    context: Annotated[str, Field(min_length=1)]
    top_k: Annotated[int, Field(ge=1, le=100)] = 1
    max_answer_tokens: Annotated[int, Field(ge=1, le=100)] = 15
    user: str | None = None


async def classify(served: ServedModel, body: ClassifyBody, http: Request) -> Response:
    """The response to a request for the labels of texts."""
    labels = served.llm.text_encoder.model.config.head.labels
    rows, n_tokens = await _pooled(served, body, "classify", None, http)
    data = [
        {"index": i, "label": labels[row.argmax()], "probs": row.tolist(), "num_classes": len(labels)}
        for i, row in enumerate(rows)
    ]
    return JSONResponse(listed_answer(served, body.model, http.scope, data, n_tokens))


async def pool(served: ServedModel, body: PoolingBody, http: Request) -> Response:
    """The response to a request for vectors or outputs, of texts or their tokens."""
    task = body.task or _DEFAULTS.get(served.llm.text_encoder.model.config.head.kind, "token_embed")
    rows, n_tokens = await _pooled(served, body, task, body.prompt_name, http)
    data = [{"index": i, "object": "pooling", "data": None} for i in range(len(rows))]
    head = listed_answer(served, body.model, http.scope, data, n_tokens)
    content = await asyncio.to_thread(_with_rows, head, rows, body.encoding_format == "base64")
    return Response(content, media_type="application/json")


async def answer(served: ServedModel, body: AnswersBody, http: Request) -> Response:
    """The response to a question about a context."""
    llm = served.llm
    try:
        passage = await asyncio.to_thread(
            heads.read_question, llm.text_encoder.model.config, llm.tokenizer, body.question, body.context
        )
    except ContextLengthError as error:
        error.param = "context"
        raise
    except UnsupportedError as error:
        raise RequestError(str(error), param="model") from None
    (outputs,) = await _outputs(served, body, [passage.ids], http)
    spans = await asyncio.to_thread(
        heads.answers, passage, outputs, top_k=body.top_k, max_answer_tokens=body.max_answer_tokens
    )
    data = [{"index": i, "object": "answer", **vars(span)} for i, span in enumerate(spans)]
    return JSONResponse(listed_answer(served, body.model, http.scope, data, len(passage.ids)))


async def _pooled(
    served: ServedModel, body: ClassifyBody, task: Task, prompt_name: str | None, http: Request
) -> tuple[list[_Array], int]:
    """The vector or outputs [width] of each text, or [T, width] of its tokens, and the tokens read."""
    llm, encoder = served.llm, served.llm.text_encoder
    head = encoder.model.config.head
    is_active = body.use_activation is not False
    if task in _HEADS and head.kind != _HEADS[task]:
        has, wants = map(heads.purpose_of, (head.kind, _HEADS[task]))
        raise RequestError(f"{task!r} requires a model for {wants}; this is a model for {has}", param="model")
    try:
        of_tokens, cuts = task == "token_embed", bool(body.truncate)
        texts = await encoded(served, body.input, prompt_name, truncate=cuts, of_tokens=of_tokens)
        encoder.check(texts.ids)
    except RequestError as error:
        raise named(error) from None
    n_tokens = sum(map(len, texts.ids))
    options = request_options(served, http.scope, body.model, body.user)
    if task == "embed":
        requests = encoder.requests(llm.engine.maker, texts.ids, **options)
        vectors = encoder.vectors(await rows_of(served, requests, http.scope), normalize=is_active)
        return list(vectors), n_tokens
    if task == "token_embed":
        rows = await token_vectors_of(served, texts, http, options, normalize=is_active)
        return list(rows), n_tokens
    outputs = await _outputs(served, body, texts.ids, http, of_text=task == "classify")
    if task == "classify":
        rows = [row[0] for row in outputs]
        return [heads.label_scores(head, row) for row in rows] if is_active else rows, n_tokens
    return [heads.probabilities(row) for row in outputs] if is_active else outputs, n_tokens


async def _outputs(
    served: ServedModel,
    body: ClassifyBody | AnswersBody,
    texts: Sequence[list[int]],
    http: Request,
    *,
    of_text: bool = False,
) -> list[_Array]:
    """The outputs of the model's head [T, width] of each text; of its label's token alone [1, width]."""
    llm, encoder = served.llm, served.llm.text_encoder
    options = request_options(served, http.scope, body.model, body.user)
    requests = []
    for ids in texts:
        row = heads.classified_row(encoder.model.config, ids) if of_text else None
        first_row, stop_row = (0, None) if row is None else (row, row + 1)
        types = encoder.token_types(ids)
        requests.append(
            llm.engine.maker.make_output_request(
                ids, "logits", first_row=first_row, stop_row=stop_row, token_types=types, **options
            )
        )
    return await rows_of(served, requests, http.scope)


def _with_rows(answer: dict[str, Any], rows: list[_Array], as_base64: bool) -> bytes:
    """The JSON of an answer, with rows as the `data` of its items."""
    for item, row in zip(answer["data"], rows, strict=True):
        raw = row.astype("<f4")
        item["data"] = base64.b64encode(raw.tobytes()).decode() if as_base64 else raw.tolist()
    return json.dumps(answer).encode()
