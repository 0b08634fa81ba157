"""Requests and tokens as JSON, for the channel between a front and a replica."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

import numpy as np

from kukri.engine import Request, RequestMaker
from kukri.errors import CapacityError, KukriError, RequestError
from kukri.kernels.arrays import FloatArray
from kukri.sampling import CompiledGrammar, Grammar, ReasoningLimit, SampledToken, SamplingParams
from kukri.sampling.params import TokenSet

_DEFAULTS = {one.name: one.default for one in fields(SamplingParams) if one.default is not MISSING}
# by their names in messages; the first that an error is
_ERRORS: dict[str, type[KukriError]] = {
    "request": RequestError,
    "capacity": CapacityError,
    "other": KukriError,
}


def params_to_json(params: SamplingParams) -> dict[str, Any]:
    """The fields of sampling parameters that are not defaults. Raises RequestError for logits processors."""
    if params.logits_processors:
        raise RequestError.of("logits_processors", "cannot be sent to another process")
    given = {
        name: value for name, default in _DEFAULTS.items() if (value := getattr(params, name)) != default
    }
    for name in ("logits_processors", "n", "best_of"):  # each answer is a request of its own
        given.pop(name, None)
    grammar = given.get("grammar")
    if grammar is not None:
        given["grammar"] = asdict(grammar.grammar if isinstance(grammar, CompiledGrammar) else grammar)
    if "dry_sequence_breakers" in given:
        given["dry_sequence_breakers"] = [
            phrase
            for one in given["dry_sequence_breakers"]
            for phrase in ([[i] for i in sorted(one)] if isinstance(one, TokenSet) else [one])
        ]
    if params.logit_bias is not None:
        given["logit_bias"] = list(params.logit_bias.items())
    if params.reasoning_limit is not None:
        given["reasoning_limit"] = asdict(params.reasoning_limit)
    return given


def params_from_json(given: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters of `params_to_json`, with their grammar not yet compiled."""
    values = dict(given)
    if "grammar" in values:
        values["grammar"] = Grammar(**values["grammar"])
    if "logit_bias" in values:
        values["logit_bias"] = dict(values["logit_bias"])
    if "reasoning_limit" in values:
        values["reasoning_limit"] = ReasoningLimit(**values["reasoning_limit"])
    return SamplingParams(**values)


def request_to_json(request: Request) -> dict[str, Any]:
    """A request, with the tokens that it has so far."""
    found: dict[str, Any] = {
        "prompt": request.prompt.tolist(),
        "priority": request.priority,
        "client": request.client,
        "prefix_scope": request.sequence.prefix_root.hex(),
        "adapter": None if request.adapter is None else request.adapter.name,
    }
    if request.output != "tokens":
        types = None if request.sequence.token_types is None else request.sequence.token_types.tolist()
        rows = {"first_row": request.first_row, "stop_row": request.stop_row, "token_types": types}
        return {**found, "output": request.output, **rows, "n_unseen": request.n_unseen}
    return {**found, "params": params_to_json(request.params), "generated": request.output_ids}


def request_from_json(given: Mapping[str, Any], maker: RequestMaker, params: SamplingParams) -> Request:
    """Invert `request_to_json`. `params` are the request's, with texts resolved. Raises KukriError."""
    sender = {name: given[name] for name in ("priority", "client", "prefix_scope", "adapter")}
    if "output" in given:
        types = given["token_types"]
        return maker.make_output_request(
            given["prompt"],
            given["output"],
            first_row=given["first_row"],
            stop_row=given["stop_row"],
            token_types=None if types is None else np.array(types, np.int32),
            n_unseen=given["n_unseen"],
            **sender,
        )
    (request,) = maker.make_requests(given["prompt"], params, **sender)
    request.resume([SampledToken(token) for token in given["generated"]], given.get("mirostat_mu"))
    return request


def token_to_json(token: SampledToken) -> Any:
    """A token: its id alone, or [id, log-probability, [[id, log-probability], ...]]."""
    return token.id if token.logprob is None else [token.id, token.logprob, token.top_logprobs]


def token_from_json(given: Any) -> SampledToken:
    """The token of `token_to_json`."""
    if isinstance(given, int):
        return SampledToken(given)
    token_id, logprob, top = given
    return SampledToken(token_id, logprob, None if top is None else tuple((i, x) for i, x in top))


def rows_to_json(rows: FloatArray) -> dict[str, Any]:
    """An array of float32: its shape and bytes."""
    return {"shape": rows.shape, "data": base64.b64encode(rows.astype("<f4").tobytes()).decode()}


def rows_from_json(given: Mapping[str, Any]) -> FloatArray:
    """The array of `rows_to_json`."""
    rows: FloatArray = np.frombuffer(base64.b64decode(given["data"]), "<f4").reshape(given["shape"])
    return rows


def error_to_json(error: KukriError) -> dict[str, Any]:
    """An error: its kind and message, and of a client's mistake the field and code."""
    kind = next(name for name, kind in _ERRORS.items() if isinstance(error, kind))
    facts = {"param": error.param, "code": error.code} if isinstance(error, RequestError) else {}
    return {"kind": kind, "message": str(error), **facts}


def error_from_json(given: Mapping[str, Any]) -> KukriError:
    """The error of `error_to_json`."""
    facts = {name: given[name] for name in ("param", "code") if name in given}
    return _ERRORS[given["kind"]](given["message"], **facts)
