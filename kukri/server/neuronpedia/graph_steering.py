"""A prompt continued with features of its graph set to other values, as in Neuronpedia's graph server."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from starlette.requests import Request

from kukri.errors import RequestError
from kukri.sampling import SampledToken
from kukri.server.models.bridge import LiveCall
from kukri.server.models.served_model import ServedModel
from kukri.server.neuronpedia.activations import index_of, see
from kukri.server.neuronpedia.graphs import prompt_of, transcoder_name
from kukri.server.neuronpedia.schema import GraphSteerBody
from kukri.server.neuronpedia.steering import ended_calls


async def steer(served: ServedModel, body: GraphSteerBody, http: Request) -> dict[str, Any]:
    """/steer: the prompt continued as it is and steered, with the likeliest tokens at each place."""
    ids = await prompt_of(served, body)
    edits = await _edits(served, body, ids, http)
    params = served.params_of(
        body.model_id,
        {
            "temperature": body.temperature,
            "frequency_penalty": body.freq_penalty,
            "max_tokens": body.n_tokens + 1,  # whose choice shows the likeliest tokens after the last
            "seed": body.seed,
            "logprobs": body.top_k,
        },
    )
    calls = await ended_calls(served, body.model_id, ids, params, [[], edits], http)
    found: dict[str, Any] = {}
    for kind, call in zip(("DEFAULT", "STEERED"), calls, strict=True):
        rows = _rows(served, body, ids, call)
        found[f"{kind}_GENERATION"] = "".join(row["token"] for row in rows)
        found[f"{kind}_LOGITS_BY_TOKEN"] = rows
    return found


async def _edits(
    served: ServedModel, body: GraphSteerBody, ids: list[int], http: Request
) -> list[dict[str, Any]]:
    """The interventions that a body's features stand for. Raises RequestError."""
    name = transcoder_name(served, body.transcoder)
    readers = [served.session.catalog.feature_reader(None, name, one.layer) for one in body.features]
    for one, reader in zip(body.features, readers):
        index_of(reader, one.index)
        for field in ("token_active_position", "steer_position"):
            if (getattr(one, field) or 0) >= len(ids):
                raise RequestError.of(field, f"must be below the number of prompt tokens, {len(ids)}")
    hooks = [reader.name for one, reader in zip(body.features, readers) if not one.ablate]
    seen = await see(served, body.model_id, ids, hooks, http) if hooks else None

    def made() -> list[dict[str, Any]]:
        edits: list[dict[str, Any]] = []
        for one, reader in zip(body.features, readers):
            strength = 0.0
            if seen is not None and one.delta is not None:
                x = seen.values[reader.name][one.token_active_position, None]
                strength = float(reader.chooser([one.index])(x)[0, 0]) + one.delta
            edit = {"op": "clamp", "transcoder": name, "layer": one.layer, "features": [one.index]}
            positions = "generated" if one.steer_position is None else [one.steer_position]
            edits.append({**edit, "strength": strength, "positions": positions})
        return edits

    return await asyncio.to_thread(made)


def _rows(served: ServedModel, body: GraphSteerBody, ids: list[int], call: LiveCall) -> list[dict[str, Any]]:
    """Each token of the prompt and the answer; from the prompt's last on with the likeliest ones after it."""

    def text_of(token: int) -> str:
        return served.tokenizer.decode([token], skip_special=False, continues=True)

    def likeliest(token: SampledToken) -> list[dict[str, Any]]:
        return [{"token": text_of(i), "prob": math.exp(logprob)} for i, logprob in token.top_logprobs or ()]

    chosen = [token for _, token in call.answers[0].take_tokens()]
    tokens = [*ids, *(token.id for token in chosen[: body.n_tokens])]
    after = [*([] for _ in ids[1:]), *map(likeliest, chosen)]
    after += [[]] * (len(tokens) - len(after))  # nothing follows a token that ends the answer
    return [{"token": text_of(token), "top_logits": top} for token, top in zip(tokens, after)]
