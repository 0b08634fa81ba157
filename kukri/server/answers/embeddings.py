"""/v1/embeddings: vectors of texts, by requests that the engine batches like any other."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import Discriminator, Field, Tag, model_validator
from starlette.requests import Request
from starlette.responses import Response

from kukri.errors import ContextLengthError, RequestError
from kukri.kernels.arrays import FloatArray
from kukri.server.answers.rows import request_options, rows_of
from kukri.server.body import Body
from kukri.server.mixed_prompt import MarkedText, Mixed, encode_mixed
from kukri.server.models.served_model import ServedModel
from kukri.server.schema import TextOr, TextPart
from kukri.tasks.embedding import Encoded, TextEncoder

_MAX_TEXTS = 2048  # as in OpenAI's API
_OWN_FIELDS = ("prompt_name", "adapter")  # that errors may be about
T = TypeVar("T")


class Content(Body):
    """A text in parts."""

    content: TextOr[Annotated[list[TextPart], Field(min_length=1)]]


def _kind_of(value: Any) -> str:
    """A list with an id in it is one text, others are many. Errors leave this out."""
    if isinstance(value, list):
        return "list[int]" if int in set(map(type, value)) else "list[str]"
    return "str" if not isinstance(value, dict) else "list" if "content" in value else "union"


_One = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[Mixed, Tag("list[int]")]
    | Annotated[MarkedText, Tag("union")]
    | Annotated[Content, Tag("list")],
    Discriminator(lambda value: "list[int]" if isinstance(value, list) else _kind_of(value)),
]
Input = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[Mixed, Tag("list[int]")]
    | Annotated[MarkedText, Tag("union")]
    | Annotated[Content, Tag("list")]
    | Annotated[list[_One], Field(min_length=1, max_length=_MAX_TEXTS), Tag("list[str]")],
    Discriminator(_kind_of),
]


class EmbeddingBody(Body):
    """A request to /v1/embeddings, and to llama.cpp's /embedding."""

    model: str | None = None
    input: Input | None = None
    content: Input | None = None  # as llama.cpp has it, whose form the answer has then
    embd_normalize: Annotated[int, Field(ge=-1, le=2)] | None = (
        None  # llama.cpp's: -1 for none, 2 for length 1
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None  # whose request it is: clients and their users take turns

    pooling: Literal["mean", "last", "cls"] | None = None  # as in `LLM.embed`
    normalize: bool | None = None
    prompt_name: str | None = None
    truncate: bool | None = None
    adapter: str | None = None
    allow_token_ids: bool | None = None  # the input's ids are those of this model's tokenizer

    @model_validator(mode="after")
    def _has_one_input(self) -> EmbeddingBody:
        if self.input is None and self.content is None:
            raise RequestError.of("input", "is required", code="missing_required_parameter")
        if self.input is not None and self.content is not None:
            raise RequestError("'input' cannot be combined with 'content': give one", param="content")
        if self.embd_normalize in (0, 1):
            raise RequestError.of("embd_normalize", "must be -1 (none) or 2 (L2)")
        return self


async def embed(
    served: ServedModel, body: EmbeddingBody, http: Request, *, as_llama_cpp: bool = False
) -> Response:
    """The response to an embedding request."""
    may_be_ids = body.allow_token_ids or served.settings.allows_token_ids
    if not (as_llama_cpp or may_be_ids):
        _check_texts(body.input)
    try:
        given: Any = body.content if body.input is None else body.input
        of_tokens = _checked_late(served.llm.text_encoder, body)
        texts = await encoded(
            served, given, body.prompt_name, truncate=bool(body.truncate), of_tokens=of_tokens
        )
    except RequestError as error:
        raise named(error) from None
    empty = next((i for i, ids in enumerate(texts.ids) if not ids), None)
    if empty is not None:
        which = f"input[{empty}]" if len(texts.ids) > 1 else "input"
        raise RequestError.of(which, "must not be empty, because the model adds no tokens of its own")
    vectors: Sequence[FloatArray] | FloatArray
    if of_tokens:
        options = request_options(served, http.scope, body.model, body.user, body.adapter)
        normalize = body.normalize is not False and body.embd_normalize != -1
        vectors = await token_vectors_of(served, texts, http, options, normalize=normalize)
    else:
        vectors = await vectors_of(served, body, texts.ids, http)
    model = served.check_model(body.model)
    n_tokens = sum(map(len, texts.ids))
    http.scope["kukri.log"].update(n_prompt_tokens=n_tokens)
    head: dict[str, Any] = {"id": http.scope["kukri.id"], "object": "list", "model": model}
    head["usage"] = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    if texts.truncated:
        head["truncated"] = texts.truncated
    if as_llama_cpp or body.content is not None:
        content = await asyncio.to_thread(_llama_cpp_body, vectors)
    else:
        content = await asyncio.to_thread(_body, head, vectors, body.encoding_format == "base64")
    return Response(content, media_type="application/json")


def _check_texts(given: Any) -> None:
    """Raise RequestError for token ids alone, which clients of OpenAI make with OpenAI's tokenizer."""
    if any(isinstance(one, list) and set(map(type, one)) == {int} for one in _many(given)):
        raise RequestError.of(
            "input",
            "must be texts, because ids of another tokenizer give wrong vectors: set "
            "check_embedding_ctx_length=False in LangChain, or allow_token_ids=true for this model's own "
            "token ids",
        )


def _many(given: Any) -> list[Any]:
    """Return the texts of an `Input`."""
    return given if isinstance(given, list) and _kind_of(given) == "list[str]" else [given]


async def vectors_of(
    served: ServedModel, body: EmbeddingBody, texts: Sequence[Sequence[int]], http: Request
) -> FloatArray:
    """The vectors [n, width] of texts, by the options of a body."""
    llm, encoder = served.llm, served.llm.text_encoder
    encoder.check_dimensions(body.dimensions)
    try:
        options = request_options(served, http.scope, body.model, body.user, body.adapter)
        requests = encoder.requests(llm.engine.maker, texts, body.pooling, **options)
        rows = await rows_of(served, requests, http.scope)
        normalize = body.normalize if body.embd_normalize is None else body.embd_normalize == 2
        return encoder.vectors(rows, normalize, body.dimensions)
    except RequestError as error:
        raise named(error) from None


async def token_vectors_of(
    served: ServedModel, texts: Encoded, http: Request, options: dict[str, Any], *, normalize: bool = True
) -> list[FloatArray]:
    """The vectors [tokens, width] of the tokens of each text; `options` are those of `request_options`."""
    encoder = served.llm.text_encoder
    requests = encoder.token_requests(served.llm.engine.maker, texts, **options)
    rows = await rows_of(served, requests, http.scope)
    return await asyncio.to_thread(encoder.token_vectors, texts, rows, normalize=normalize)


def _checked_late(encoder: TextEncoder, body: EmbeddingBody) -> bool:
    """True for a model with a vector for each token. Raises RequestError for fields that it cannot honor."""
    if encoder.late is not None and (body.pooling or body.dimensions not in (None, encoder.width)):
        raise RequestError(
            "'pooling' and 'dimensions' are not supported: the model returns a vector for each token"
        )
    return encoder.late is not None


def named(error: RequestError) -> RequestError:
    """The error under the names of a body's fields."""
    if isinstance(error, ContextLengthError):
        error.param = "input"
        return error
    return RequestError(str(error), param=error.param if error.param in _OWN_FIELDS else "input")


async def encoded(
    served: ServedModel,
    given: Any,
    prompt_name: str | None = None,
    *,
    truncate: bool = False,
    of_tokens: bool = False,
) -> Encoded:
    """The token ids of each text of an `Input`, as `TextEncoder.encode` or `encode_tokens` makes them."""
    plain = [_plain(one) for one in _many(given)]
    return await asyncio.to_thread(_ids, served, plain, prompt_name, truncate, of_tokens)


def _plain(one: Any) -> str | list[int | str]:
    """A text, or ids with texts between them."""
    if isinstance(one, MarkedText):
        return one.prompt_string
    if isinstance(one, Content):
        return one.content if isinstance(one.content, str) else "".join(part.text for part in one.content)
    found: str | list[int | str] = one
    return found


def _ids(
    served: ServedModel,
    many: list[str | list[int | str]],
    prompt_name: str | None,
    truncate: bool,
    of_tokens: bool,
) -> Encoded:
    encoder = served.llm.text_encoder
    texts = [one for one in many if isinstance(one, str)]
    encode = encoder.encode_tokens if of_tokens else encoder.encode
    found = encode(texts, prompt_name=prompt_name, truncate=truncate)
    if len(texts) == len(many):
        return found
    if encoder.late is not None:
        raise RequestError("'input' must be texts, because the model marks queries and documents")
    places = [i for i, one in enumerate(many) if isinstance(one, str)]
    encoded = dict(zip(places, found.ids, strict=True))
    for i, one in enumerate(many):
        if i not in encoded:
            encoded[i] = encode_mixed(
                served.tokenizer, one, parse_special=False, max_tokens=encoder.max_tokens
            )
    return Encoded([encoded[i] for i in range(len(many))], [places[i] for i in found.truncated])


def _body(head: dict[str, Any], vectors: Iterable[FloatArray], as_base64: bool) -> bytes:
    """The JSON of the response; a vector at a time, so that other threads get their turn."""
    items = []
    for i, vector in enumerate(vectors):
        shown: Any = (
            base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_base64 else vector.tolist()
        )
        items.append(json.dumps({"object": "embedding", "index": i, "embedding": shown}))
    return f'{json.dumps(head)[:-1]}, "data": [{", ".join(items)}]}}'.encode()


def _llama_cpp_body(vectors: Iterable[FloatArray]) -> bytes:
    """The JSON of the response as llama.cpp's server has it: a list of vectors for each text."""
    lists = (np.atleast_2d(vector).tolist() for vector in vectors)
    items = [json.dumps({"index": i, "embedding": one}) for i, one in enumerate(lists)]
    return f"[{', '.join(items)}]".encode()
