"""Gives bodies the fields of `SamplingParams`, with their ranges, from where these are declared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, Field, create_model

from kukri.errors import RequestError
from kukri.sampling import SamplingParams
from kukri.sampling.fields import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_COUNT,
    MAX_TEXT,
    FieldFacts,
    are_within,
    facts_of,
    is_number,
)

FACTS = dict(facts_of(SamplingParams))
Model = TypeVar("Model", bound=type[BaseModel])


def with_sampling(
    names: Iterable[str], api: Literal["ollama", "llama_cpp"] | None = None
) -> Callable[[Model], Model]:
    """A decorator that adds fields of SamplingParams to a body, under their names in an API."""

    def add(body: Model) -> Model:
        found = {
            getattr(FACTS[name], api) if api else name: (annotation(FACTS[name]) | None, None)
            for name in names
        }
        made: Any = cast(Any, create_model)(
            body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **found
        )
        return made  # type: ignore[no-any-return]

    return add


def annotation(facts: FieldFacts) -> Any:
    """The type of a field in a body."""
    text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
    match facts.kind:
        case "number":
            return Annotated[float, Field(ge=facts.low, le=facts.high)]
        case "integer":
            return Annotated[int, Field(ge=facts.low, le=facts.high)]
        case "switch":
            return bool
        case "choice":
            return Literal[facts.choices]
        case "names":
            return Annotated[
                list[Annotated[str, Field(max_length=MAX_TEXT)]], Field(max_length=2 * len(facts.choices))
            ]
        case "texts":
            return text | Annotated[list[text], Field(max_length=facts.most)]  # type: ignore[valid-type]
        case "phrases":
            return Annotated[list[text], Field(max_length=facts.most)]  # type: ignore[valid-type]
        case "ids":
            return Annotated[list[Annotated[int, Field(ge=0, le=MAX_COUNT)]], Field(max_length=facts.most)]
        case "bias":
            return Annotated[
                dict[str, Annotated[float, Field(ge=facts.low, le=facts.high)]],
                Field(max_length=facts.most),
                BeforeValidator(_check_bias),
            ]
    raise TypeError(f"fields of the kind {facts.kind} have no form in JSON")


def _check_bias(bias: Any) -> Any:
    """The bias as it is given; stops at the first thing that is wrong. Raises RequestError."""
    if isinstance(bias, dict):
        if len(bias) > MAX_BIASES:
            raise _wrong_bias(f"at most {MAX_BIASES} tokens, not {len(bias)}")
        is_short = max(map(len, bias), default=0) <= MAX_TEXT
        if is_short and are_within(bias.values(), -MAX_BIAS, MAX_BIAS, int, float):
            return bias
        for token, value in bias.items():
            if len(token) > MAX_TEXT:
                raise _wrong_bias(f"tokens of at most {MAX_TEXT} characters")
            if not is_number(value) or abs(value) > MAX_BIAS:
                raise _wrong_bias(
                    f"numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}, not {value!r:.60} for {token[:60]!r}"
                )
    return bias


def _wrong_bias(allowed: str) -> RequestError:
    return RequestError.of("logit_bias", f"must have {allowed}", code="invalid_value")
