"""/v1/rerank: documents by how well they answer a query, in Cohere's and Jina's form; /score, vLLM's."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kukri.errors import ContextLengthError, RequestError, UnsupportedError
from kukri.server.answers.embeddings import token_vectors_of
from kukri.server.answers.rows import listed_answer, request_options, rows_of
from kukri.server.body import Body
from kukri.server.models.served_model import ServedModel
from kukri.tasks.embedding import normalized, ranked
from kukri.tasks.late_interaction import max_sim

_MAX_DOCUMENTS = 2048
_Text = Annotated[str, Field(min_length=1)]
_Texts = _Text | Annotated[list[_Text], Field(min_length=1, max_length=_MAX_DOCUMENTS)]


class RerankBody(Body):
    """A request to /v1/rerank. A document that is too long is an error, or cut with `truncate`."""

    ignored: ClassVar[frozenset[str]] = frozenset(["max_chunks_per_doc", "max_tokens_per_doc", "priority"])

    model: str | None = None
    query: Annotated[str, Field(min_length=1)]
    # objects have a text, and other keys, which are given back
    documents: Annotated[list[str | dict[str, Any]], Field(min_length=1, max_length=_MAX_DOCUMENTS)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None  # None is true, as Jina has it
    instruction: Annotated[str, Field(min_length=1)] | None = None
    truncate: bool | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _has_texts(self) -> RerankBody:
        for i, one in enumerate(self.documents):
            if isinstance(one, dict) and not isinstance(one.get("text"), str):
                raise RequestError(f"'documents[{i}].text' is required", param=f"documents[{i}].text")
        return self


class ScoreBody(Body):
    """A request to /score: `text_1` is one text, or a list as long as `text_2`."""

    model: str | None = None
    text_1: _Texts
    text_2: _Texts
    instruction: Annotated[str, Field(min_length=1)] | None = None
    truncate: bool | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _newer_names(cls, data: Any) -> Any:
        """Takes `queries` and `documents`, vLLM's newer names."""
        names = {"queries": "text_1", "documents": "text_2"}
        return (
            {names.get(name, name): value for name, value in data.items()} if isinstance(data, dict) else data
        )

    @model_validator(mode="after")
    def _agrees(self) -> ScoreBody:
        if len(self.queries) not in (1, len(self.documents)):
            raise RequestError.of("text_1", "must be a single text, or a list as long as 'text_2'")
        return self

    @property
    def queries(self) -> list[str]:
        """The first texts."""
        return [self.text_1] if isinstance(self.text_1, str) else self.text_1

    @property
    def documents(self) -> list[str]:
        """The second texts."""
        return [self.text_2] if isinstance(self.text_2, str) else self.text_2


async def rerank(
    served: ServedModel, body: RerankBody, http: Request, *, as_cohere_v2: bool = False
) -> Response:
    """The response to a request for a ranking."""
    documents = [one if isinstance(one, str) else one["text"] for one in body.documents]
    gives_back = not as_cohere_v2 if body.return_documents is None else body.return_documents
    scores, n_tokens, truncated = await _scored(served, body, body.query, documents, http)
    http.scope["kukri.log"].update(n_prompt_tokens=n_tokens)
    results = []
    for one in ranked(documents, scores, body.top_n):
        given = body.documents[one.index]
        document = {"document": {"text": given} if isinstance(given, str) else given} if gives_back else {}
        results.append({"index": one.index, "relevance_score": one.score, **document})
    answer: dict[str, Any] = {
        "id": http.scope["kukri.id"],
        "model": served.check_model(body.model),
        "results": results,
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        "meta": {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": n_tokens}},
    }
    if as_cohere_v2:
        answer["meta"]["api_version"] = {"version": "2"}
    return JSONResponse(answer | ({"truncated": truncated} if truncated else {}))


async def score(served: ServedModel, body: ScoreBody, http: Request) -> Response:
    """The response to a request for scores: of one query all documents at once, else pair by pair."""
    queries, documents = body.queries, body.documents
    groups = (
        [(queries[0], documents)]
        if len(queries) == 1
        else [(query, [document]) for query, document in zip(queries, documents, strict=True)]
    )
    scores: list[float] = []
    n_tokens = 0
    for query, some in groups:
        found, n, _ = await _scored(served, body, query, some, http)
        scores, n_tokens = [*scores, *found], n_tokens + n
    data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores)]
    return JSONResponse(listed_answer(served, body.model, http.scope, data, n_tokens))


async def _scored(
    served: ServedModel, body: RerankBody | ScoreBody, query: str, documents: list[str], http: Request
) -> tuple[list[float], int, list[int]]:
    """Each document's score, the tokens read, and the places of texts that were cut."""
    llm, encoder, cuts = served.llm, served.llm.text_encoder, bool(body.truncate)
    options = request_options(served, http.scope, body.model, body.user)
    try:
        encoder.check_ranks(body.instruction)
        if encoder.is_cross_encoder:
            pairs = await asyncio.to_thread(
                encoder.encode_pairs, query, documents, truncate=cuts, instruction=body.instruction
            )
            requests = encoder.pair_requests(llm.engine.maker, pairs.ids, **options)
            rows = await rows_of(served, requests, http.scope)
            return encoder.scores(rows), sum(map(len, pairs.ids)), pairs.truncated
        if encoder.late is not None:
            asked = await asyncio.to_thread(
                encoder.encode_tokens, [query], prompt_name="query", truncate=cuts
            )
            texts = await asyncio.to_thread(encoder.encode_tokens, documents, truncate=cuts)
            (wanted,) = await token_vectors_of(served, asked, http, options)
            found = await token_vectors_of(served, texts, http, options)
            scores = await asyncio.to_thread(lambda: [max_sim(wanted, vectors) for vectors in found])
            return scores, sum(map(len, [*asked.ids, *texts.ids])), texts.truncated
        for_query, for_document = encoder.rank_prompts()
        asked = await asyncio.to_thread(encoder.encode, [query], prompt_name=for_query, truncate=cuts)
        texts = await asyncio.to_thread(encoder.encode, documents, prompt_name=for_document, truncate=cuts)
        ids = [*asked.ids, *texts.ids]
        requests = encoder.requests(llm.engine.maker, ids, **options)
        rows = await rows_of(served, requests, http.scope)
    except ContextLengthError as error:
        error.param = "documents"
        raise
    except (RequestError, UnsupportedError) as error:
        is_named = isinstance(error, RequestError) and error.param == "instruction"
        param = "instruction" if is_named else "documents"
        raise RequestError(str(error), param=param) from None
    vectors = normalized(encoder.vectors(rows, normalize=True))
    return (vectors[1:] @ vectors[0]).astype(np.float64).tolist(), sum(map(len, ids)), texts.truncated
