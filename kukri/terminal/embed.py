"""`kukri embed` and `kukri rerank`: texts to vectors, documents to a ranking."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kukri.errors import RequestError
from kukri.llm import LLM
from kukri.terminal.options import EmbedOptions, RerankOptions
from kukri.terminal.output import allow_any_text, write_text
from kukri.terminal.progress import loading_bar
from kukri.terminal.run import is_known_model, piped_text

DEFAULT_ENCODER = "minilm"


def show_vectors(
    texts: Sequence[str], model: str | None, options: EmbedOptions, loading: dict[str, Any], *, as_json: bool
) -> None:
    """Prints the vector of each text, or of each line of piped text, as a line of JSON."""
    given = _texts(texts, "text")
    with _open(model, loading) as llm:
        vectors = llm.embed(given, **vars(options))
        if as_json:
            print(json.dumps({"model": llm.config.name, "embeddings": vectors.tolist()}, ensure_ascii=False))
            return
    for vector in vectors:
        print(json.dumps(vector.tolist()))


def show_ranking(
    texts: Sequence[str], model: str | None, options: RerankOptions, loading: dict[str, Any], *, as_json: bool
) -> None:
    """Prints the documents after the query, or lines of piped text, by their score, the best first."""
    if not texts:
        raise RequestError("a query is required: give one as an argument", param="query")
    query, given = texts[0], _texts(texts[1:], "document")
    with _open(model, loading) as llm:
        found = llm.rerank(query, given, **vars(options))
        name = llm.config.name
    if as_json:
        ranking = {"model": name, "query": query, "results": [vars(one) for one in found]}
        print(json.dumps(ranking, ensure_ascii=False))
        return
    allow_any_text()
    for one in found:
        write_text(f"{one.score:.4f}  {one.document}\n")


def model_and_texts(option: str | None, arguments: Sequence[str | None]) -> tuple[str | None, list[str]]:
    """The model, and the texts: the first argument is the model if it names one and -m does not."""
    texts = [text for text in arguments if text is not None]
    if option is None and texts and is_known_model(texts[0]):
        return texts[0], texts[1:]
    return option, texts


def _open(model: str | None, loading: dict[str, Any]) -> LLM:
    with loading_bar() as progress:
        return LLM(DEFAULT_ENCODER if model is None else model, progress=progress, **loading)


def _texts(given: Sequence[str], what: str) -> list[str]:
    """The arguments, or the lines of piped text that are not empty. Raises RequestError without any."""
    if given:
        return list(given)
    lines = [line for line in (piped_text() or "").splitlines() if line.strip()]
    if not lines:
        raise RequestError(f"a {what} is required: give one as an argument, or pipe lines in", param="texts")
    return lines
