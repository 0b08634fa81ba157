"""Texts that are steered, by features or by nodes of a graph, and the same without, in Neuronpedia's form."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request

from kukri.errors import RequestError
from kukri.sampling import SampledToken, SamplingParams
from kukri.server.models.bridge import LiveCall
from kukri.server.models.served_model import ServedModel
from kukri.server.neuronpedia.activations import index_of, reader_of, see
from kukri.server.neuronpedia.graphs import prompt_of, transcoder_name
from kukri.server.neuronpedia.schema import GraphSteerBody, SteerBody, SteerChatBody, SteerCompletionBody
from kukri.tokenizer import Tokenizer


async def complete(served: ServedModel, body: SteerCompletionBody, http: Request) -> dict[str, Any]:
    """/v1/steer/completion: the prompt continued, by each of the types."""
    limit = served.llm.engine.maker.max_context
    ids = await asyncio.to_thread(served.tokenizer.encode, body.prompt, True, True, limit)
    calls = await _answers(served, body, ids, http)
    outputs = [
        {"type": kind, "output": body.prompt + _text(call), **_logprobs(served.tokenizer, body, call)}
        for kind, call in zip(body.types, calls, strict=True)
    ]
    return {"outputs": outputs}


async def chat(served: ServedModel, body: SteerChatBody, http: Request) -> dict[str, Any]:
    """/v1/steer/completion-chat: the chat answered, by each of the types."""
    messages = [{"role": one.role, "content": one.content} for one in body.prompt]
    prompt = await served.prompts.before_answer(messages, max_tokens=served.prompts.max_context)
    assert isinstance(prompt, list), "messages of text alone"
    ids: list[int] = prompt
    raw = await asyncio.to_thread(served.tokenizer.decode, ids, skip_special=False)
    calls = await _answers(served, body, ids, http, not body.steer_special_tokens)
    outputs = []
    for kind, call in zip(body.types, calls, strict=True):
        answer = _text(call)
        said = [*messages, {"role": "assistant", "content": answer}]
        logprobs = _logprobs(served.tokenizer, body, call)
        outputs.append({"type": kind, "raw": raw + answer, "chat_template": said, **logprobs})
    return {"outputs": outputs, "input": {"raw": raw, "chat_template": messages}}


async def _answers(
    served: ServedModel, body: SteerBody, ids: Sequence[int], http: Request, spares_special: bool = False
) -> list[LiveCall]:
    """An ended call for each type, all in the engine's batch. Raises KukriError if one failed."""
    params = served.params_of(
        body.model,
        {
            "temperature": body.temperature,
            "frequency_penalty": body.freq_penalty,
            "max_tokens": body.n_completion_tokens,
            "seed": None if body.seed is None else int(body.seed),
            "logprobs": body.n_logprobs or None,
        },
    )
    special = served.tokenizer.special_ids
    spared = [i for i, token in enumerate(ids) if token in special] if spares_special else []
    steered = await asyncio.to_thread(_interventions, served, body, others(spared, len(ids)))
    edits = [steered if kind == "STEERED" else [] for kind in body.types]
    return await ended_calls(served, body.model, ids, params, edits, http)


async def ended_calls(
    served: ServedModel,
    model: str | None,
    ids: Sequence[int],
    params: SamplingParams,
    edits: Sequence[list[dict[str, Any]]],
    http: Request,
) -> list[LiveCall]:
    """An ended call for each list of interventions. Raises KukriError if one failed."""
    calls: list[LiveCall] = []
    try:
        for interventions in edits:
            adapter = served.adapter_of(model)
            calls.append(
                await served.submit([ids], params, http.scope, adapter=adapter, interventions=interventions)
            )
        await asyncio.gather(*map(_ended, calls))
    finally:
        for call in calls:
            call.close()
            served.metrics.on_end(*call.outcome)
    n_prompt, n_generated = (
        sum(getattr(c, name) for c in calls) for name in ("n_prompt_tokens", "n_generated")
    )
    http.scope["kukri.log"].update(n_prompt_tokens=n_prompt, n_generated=n_generated)
    return calls


async def _ended(call: LiveCall) -> None:
    """Waits for the end of a call. Raises its error."""
    while not call.is_done and call.error is None:
        await call.changed()
    if call.error is not None:
        raise call.error


def others(spared: list[int], n: int) -> Any:
    """The positions of a prompt of n tokens, and its answer, without some."""
    if not spared:
        return "all"
    starts = [0, *(i + 1 for i in spared)]
    stops: list[int | None] = [*spared, None]
    return [[start, stop] for start, stop in zip(starts, stops) if stop is None or start < stop]


def _interventions(served: ServedModel, body: SteerBody, positions: Any) -> list[dict[str, Any]]:
    """The edits that a body's features or vectors stand for. Raises RequestError."""
    made: list[dict[str, Any]] = []
    wanted: list[tuple[str, Any, float]] = [
        (v.hook, v.steering_vector, v.strength) for v in body.vectors or ()
    ]
    for one in body.features or ():
        reader = reader_of(served.session.catalog, one.source)
        vector = one.steering_vector or reader.decoders([index_of(reader, one.index)])[0, 0]
        wanted.append((reader.writes[0], vector, one.strength))
    for hook, vector, strength in wanted:
        vector = np.asarray(vector, np.float32)
        by = strength * body.strength_multiplier
        if body.normalize_steering:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-30)
        op = "add" if body.steer_method == "SIMPLE_ADDITIVE" else "scale"
        made.append({"op": op, "name": hook, "vector": vector, "strength": by, "positions": positions})
    return made


def _text(call: LiveCall) -> str:
    return call.answers[0].take_text()


def _logprobs(tokenizer: Tokenizer, body: SteerBody, call: LiveCall) -> dict[str, Any]:
    """The field `logprobs` of an answer, if it is wanted."""
    if not body.n_logprobs:
        return {}

    def named(token_id: int, logprob: float | None) -> dict[str, Any]:
        return {"token": tokenizer.decode([token_id], continues=True), "logprob": logprob}

    def told(token: SampledToken) -> dict[str, Any]:
        top = [named(*one) for one in token.top_logprobs or ()]
        return {**named(token.id, token.logprob), "top_logprobs": top}

    return {"logprobs": [told(token) for _, token in call.answers[0].take_tokens()]}


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
