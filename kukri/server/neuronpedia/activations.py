"""Activations of features, in Neuronpedia's form: the features of prompts are computed off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request

from kukri.errors import RequestError, brief
from kukri.interp.features.readers import FeatureReader
from kukri.interp.interventions.catalog import Catalog
from kukri.interp.interventions.request_taps import joined_cache
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.server.answers.activations import ActivationsBody, capturing
from kukri.server.answers.rows import rows_of
from kukri.server.models.served_model import ServedModel
from kukri.server.neuronpedia.schema import AllBody, CosineBody, SingleBody, TopkByTokenBody

_ROWS = 64  # tokens whose features are computed at a time
_DECODERS = 1024  # directions that are compared at a time


def reader_of(catalog: Catalog, source: str) -> FeatureReader:
    """The features of a source: an autoencoder's name, or "8-mlps", layer 8 of the transcoder "mlps"."""
    if source in catalog.saes:
        return catalog.saes[source]
    layer, _, name = source.partition("-")
    if name in catalog.transcoders and layer.isdecimal() and len(layer) < 6:
        return catalog.feature_reader(None, name, int(layer))
    raise RequestError(f"the source {brief(source)} was not found: {_known(catalog)}", param="source")


def _known(catalog: Catalog) -> str:
    names = [*catalog.saes, *(f"{t.layers[0]}-{name}" for name, t in catalog.transcoders.items())]
    return f"use {', '.join(names[:8])}" if names else "start the server with --sae or --transcoder"


def sources_of(catalog: Catalog, source_set: str) -> list[str]:
    """The sources of a set. Raises RequestError if there are none."""
    if source_set in catalog.transcoders:
        return [f"{layer}-{source_set}" for layer in catalog.transcoders[source_set].layers]
    found = [name for name in catalog.saes if name == source_set or name.partition("-")[2] == source_set]
    if not found:
        raise RequestError(
            f"the source set {brief(source_set)} was not found: {_known(catalog)}", param="source_set"
        )
    return found


class Seen:
    """A prompt's tokens, and the activations at some hooks: by short or full name, [tokens, width]."""

    def __init__(self, served: ServedModel, ids: IntArray, values: dict[str, FloatArray]) -> None:
        self.ids, self.values, self._tokenizer = ids, values, served.tokenizer

    @property
    def tokens(self) -> list[str]:
        """The text of each token."""
        return [self._tokenizer.decode([i], skip_special=False) for i in self.ids.tolist()]

    @property
    def has_bos(self) -> bool:
        """True if the first token begins every text."""
        return len(self.ids) > 0 and int(self.ids[0]) == self._tokenizer.bos_id

    def features(self, reader: FeatureReader, start: int, *, ignore_bos: bool) -> FloatArray:
        """The features of some tokens from `start` on, [at most 64, n_features]; zeros for a BOS."""
        found = reader.features(self.values[reader.name][start : start + _ROWS])
        if ignore_bos and start == 0 and self.has_bos:
            found[0] = 0
        return found


async def see(
    served: ServedModel, model: str | None, prompt: str | list[int], hooks: Sequence[str], http: Request
) -> Seen:
    """Runs a prompt, a text or token ids. Raises RequestError."""
    names = list(dict.fromkeys(hooks))
    body = ActivationsBody(model=model, input=prompt, names=names)
    requests, taps = await asyncio.to_thread(capturing, served, body, http.scope)
    http.scope["kukri.log"].update(n_prompt_tokens=requests[0].n_prompt)
    await rows_of(served, requests, http.scope)

    def collect() -> Seen:
        cache = joined_cache(taps, requests)
        values = {name: cache[name][0].reshape(len(cache.tokens[0]), -1) for name in names}
        return Seen(served, cache.tokens[0], values)

    return await asyncio.to_thread(collect)


async def single(served: ServedModel, body: SingleBody, http: Request) -> dict[str, Any]:
    """/v1/activation/single: a feature's activations, or products with a vector."""
    catalog = served.session.catalog
    reader = None if body.source is None else reader_of(catalog, body.source)
    hook = str(body.hook) if reader is None else reader.name
    seen = await see(served, body.model, body.prompt, [hook], http)

    def values() -> FloatArray:
        x = seen.values[hook]
        if reader is not None:
            return reader.chooser([index_of(reader, body.index)])(x)[:, 0]
        return x @ _vector(body.vector, x.shape[1])

    found = await asyncio.to_thread(values)
    return {"activation": _activation(found), "tokens": seen.tokens}


def _vector(given: Sequence[float] | None, width: int) -> FloatArray:
    vector = np.asarray(given or (), np.float32)
    if len(vector) != width:
        raise RequestError.of("vector", f"must have {width} numbers, not {len(vector)}")
    return vector


def _activation(values: FloatArray) -> dict[str, Any]:
    most = int(values.argmax())
    return {"values": values.tolist(), "max_value": float(values[most]), "max_value_index": most}


def index_of(reader: FeatureReader, index: int | None) -> int:
    """A feature's number, checked. Raises RequestError."""
    if index is None or not index < reader.n_features:
        raise RequestError.of("index", f"must be from 0 to {reader.n_features - 1}, not {index}")
    return index


async def all_features(served: ServedModel, body: AllBody, http: Request) -> dict[str, Any]:
    """/v1/activation/all: the features with the largest activation, or sum at some tokens."""
    catalog = served.session.catalog
    names = body.selected_sources or sources_of(catalog, body.source_set)
    readers = {name: reader_of(catalog, name) for name in names}
    if body.feature_filter is not None and len(readers) != 1:
        raise RequestError.of("feature_filter", "requires exactly one of 'selected_sources'")
    seen = await see(served, body.model, body.prompt, [reader.name for reader in readers.values()], http)
    if any(i >= len(seen.ids) for i in body.sort_by_token_indexes or ()):
        raise RequestError.of("sort_by_token_indexes", f"must be below {len(seen.ids)}")
    found = await asyncio.to_thread(_largest, readers, seen, body)
    return {"activations": found, "tokens": seen.tokens}


def _largest(readers: dict[str, FeatureReader], seen: Seen, body: AllBody) -> list[dict[str, Any]]:
    n_most, candidates = body.num_results or 25, []
    for name, reader in readers.items():
        score = _scores(reader, seen, body)
        if body.feature_filter is not None:
            allowed = [index_of(reader, i) for i in body.feature_filter]
            score = np.where(np.isin(np.arange(len(score)), allowed), score, -np.inf)
        order = np.argsort(-score, kind="stable")[:n_most]
        candidates += [(float(score[i]), name, int(i)) for i in order if score[i] > -np.inf]
    candidates.sort(key=lambda one: -one[0])
    found = []
    for _, name, i in candidates[:n_most]:
        reader = readers[name]
        values = reader.chooser([i])(seen.values[reader.name])[:, 0].copy()
        if body.ignore_bos and seen.has_bos:
            values[0] = 0
        total = float(values[body.sort_by_token_indexes or []].sum())
        found.append({"source": name, "index": i, "sum_values": total, **_activation(values)})
    return found


def _scores(reader: FeatureReader, seen: Seen, body: AllBody) -> FloatArray:
    """By what features are sorted: their largest activation, or the sum at some tokens. [n_features]"""
    sums, indexes = bool(body.sort_by_token_indexes), np.array(body.sort_by_token_indexes or [], int)
    score = np.zeros(reader.n_features, np.float32)
    for start in range(0, len(seen.ids), _ROWS):
        part = seen.features(reader, start, ignore_bos=body.ignore_bos)
        if sums:
            score += part[indexes[(indexes >= start) & (indexes < start + _ROWS)] - start].sum(axis=0)
        else:
            np.maximum(score, part.max(axis=0), out=score)
    return score


async def topk_by_token(served: ServedModel, body: TopkByTokenBody, http: Request) -> dict[str, Any]:
    """/v1/activation/topk-by-token: the features with the largest activations at each token."""
    reader = reader_of(served.session.catalog, body.source)
    seen = await see(served, body.model, body.prompt, [reader.name], http)
    n_most = body.top_k or 5

    def results() -> list[dict[str, Any]]:
        found, tokens = [], seen.tokens
        for start in range(0, len(tokens), _ROWS):
            for i, row in enumerate(seen.features(reader, start, ignore_bos=body.ignore_bos), start):
                order = np.argsort(-row, kind="stable")[:n_most].tolist()
                top = [{"feature_index": j, "activation_value": float(row[j])} for j in order]
                found.append({"token_position": i, "token": tokens[i], "top_features": top})
        return found

    return {"results": await asyncio.to_thread(results), "tokens": seen.tokens}


async def most_alike(served: ServedModel, body: CosineBody, http: Request) -> dict[str, Any]:
    """/v1/util/sae-topk-by-decoder-cossim: the features whose directions have the largest cosines."""
    catalog = served.session.catalog
    reader = reader_of(catalog, body.source)

    def found() -> list[dict[str, Any]]:
        if body.feature is not None:
            own = reader_of(catalog, body.feature.source)
            vector = own.decoders([index_of(own, body.feature.index)])[0, 0]
        else:
            vector = _vector(body.vector, reader.width)
        cosines = np.empty(reader.n_features, np.float32)
        for start in range(0, reader.n_features, _DECODERS):
            numbers = range(start, min(start + _DECODERS, reader.n_features))
            directions = reader.decoders(numbers)[:, 0]
            lengths = np.linalg.norm(directions, axis=1) * np.linalg.norm(vector)
            cosines[start : numbers.stop] = directions @ vector / np.maximum(lengths, np.float32(1e-30))
        order = np.argsort(-cosines, kind="stable")[: body.num_results].tolist()
        model = served.check_model(body.model)
        return [
            {
                "feature": {"model": model, "source": body.source, "index": i},
                "cosine_similarity": float(cosines[i]),
            }
            for i in order
        ]

    asked = {} if body.feature is None else {"feature": body.feature.model_dump(exclude_none=True)}
    return {**asked, "topk_decoder_cossim_features": await asyncio.to_thread(found)}
