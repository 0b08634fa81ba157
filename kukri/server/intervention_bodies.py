"""Interventions as requests of every API state them."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from kukri.errors import RequestError
from kukri.interp.interventions.edits import Op
from kukri.interp.interventions.intervention import MAX_INTERVENTIONS, MAX_VECTORS
from kukri.interp.interventions.positions import MAX_PLACES, MAX_TEXT
from kukri.kernels.arrays import FloatArray
from kukri.server.body import Body

Float32 = Annotated[str, Field(min_length=4, max_length=1 << 20)]  # base64 of little-endian numbers


Span = Annotated[list[int | None], Field(min_length=2, max_length=2)]


class TextPlace(Body):
    """The tokens of a text wherever the prompt has it."""

    text: Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
    tokens: Literal["all", "first", "last"] | None = None
    occurrence: int | None = None


class StepsPlace(Body):
    """The steps that choose some tokens of the answer."""

    steps: int | Span


Place = (
    Literal["all", "prompt", "last", "generated"]
    | int
    | Annotated[list[int | Span], Field(min_length=1, max_length=MAX_PLACES)]
    | TextPlace
    | StepsPlace
)


_Vector = Annotated[list[float], Field(max_length=1 << 17)] | Float32


class When(Body):
    """A condition of an edit."""

    probe: Annotated[str, Field(max_length=64)] | None = None
    label: Annotated[str, Field(max_length=200)] | None = None
    sae: Annotated[str, Field(max_length=64)] | None = None
    transcoder: Annotated[str, Field(max_length=64)] | None = None
    layer: int | None = None
    feature: int | None = None
    above: float | None = None
    below: float | None = None


class InterventionBody(Body):
    """An operation on the activations of a request: see `kukri.interp.Intervention`."""

    op: Op
    name: Annotated[str, Field(max_length=200)] | None = None
    vector: _Vector | Annotated[list[_Vector], Field(min_length=1, max_length=MAX_VECTORS)] | None = None
    strength: Annotated[float, Field(ge=-1e6, le=1e6)] | None = None
    heads: Annotated[list[int], Field(max_length=1024)] | None = None
    positions: Place | None = None
    control_vector: Annotated[str, Field(max_length=64)] | None = None
    layers: Annotated[list[int], Field(max_length=2)] | None = None
    probe: Annotated[str, Field(max_length=64)] | None = None
    sae: Annotated[str, Field(max_length=64)] | None = None
    transcoder: Annotated[str, Field(max_length=64)] | None = None
    layer: int | None = None
    top_k: int | None = None
    features: Annotated[list[int], Field(max_length=1024)] | None = None
    match_norm: bool | None = None
    when: When | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields that are set, the vector as numbers. Raises RequestError."""
        found = self.model_dump(exclude_none=True)
        if isinstance(self.vector, str):
            found["vector"] = _decoded(self.vector)
        elif self.vector and isinstance(self.vector[0], (str, list)):
            found["vector"] = [_decoded(one) if isinstance(one, str) else one for one in self.vector]
        return found


def _decoded(vector: str) -> FloatArray:
    try:
        return np.frombuffer(base64.b64decode(vector, validate=True), "<f4")
    except ValueError:
        raise RequestError("'vector' must be float32 numbers in base64", param="interventions") from None


Interventions = Annotated[list[InterventionBody], Field(max_length=MAX_INTERVENTIONS)]


def steering(given: Interventions | None) -> list[dict[str, Any]]:
    """The interventions of a body. Raises RequestError."""
    return [one.as_dict() for one in given or ()]
