"""`Body`: what the bodies of requests of every API have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema

from kukri.errors import RequestError
from kukri.server.aliases import Aliases, renamed
from kukri.server.bounds import bounded

Refused = Mapping[str, tuple[tuple[Any, ...], str]]  # field -> (values that change nothing, reason)

TEXT_OR_LIST = "list"  # the branch of a content that is no text; errors leave it out

_bounded: dict[type[BaseModel], CoreSchema] = {}


def body_names() -> set[str]:
    """Return the names of all classes of bodies, which pydantic puts into the places of errors."""
    return {kind.__name__ for kind in _bounded}


def refusal_of(errors: Iterable[Mapping[str, Any]]) -> RequestError | None:
    """Return the RequestError among pydantic's errors: one that a validator raised, as it is a ValueError."""
    raised = (one.get("ctx", {}).get("error") for one in errors)
    return next((error for error in raised if isinstance(error, RequestError)), None)


class Body(BaseModel):
    """A JSON object of exactly these fields; others are errors unless they are null or in `ignored`.

    `refused` has fields that cannot be honoured, the values that ask for nothing, and the reason; `aliases`
    has other servers' names of fields. `place` is where errors find an object that is within a body.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    place: ClassVar[str] = ""
    refused: ClassVar[Refused] = {}
    aliases: ClassVar[Aliases] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()
    unused: ClassVar[frozenset[str]] = frozenset()  # inherited fields that change nothing at an endpoint

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = renamed(data, cls.aliases)
        for name, (neutral, reason) in cls.refused.items():
            if name in data and data[name] is not None and data[name] not in neutral:
                param = f"{cls.place}{name}"
                raise RequestError.of(param, f"is not supported: {reason}", code="unsupported_parameter")
        known = cls._names() - cls.refused.keys() - cls.unused
        first = next(cls._unknown(data), None)  # one error is enough
        return {name: value for name, value in data.items() if name in known or name == first}

    @classmethod
    def _unknown(cls, data: Mapping[str, Any]) -> Iterator[str]:
        """Return the names of fields that are errors."""
        left_out = cls._names() | cls.refused.keys() | cls.ignored | cls.unused | cls.aliases.keys()
        return (name for name, value in data.items() if name not in left_out and value is not None)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema, in which every list, object and number has bounds."""
        schema: CoreSchema = handler(source)
        if _bounded.get(cls) is not schema:  # pydantic hands out the same one for each route
            _bounded[cls] = schema = bounded(schema)
        return schema

    @classmethod
    def _names(cls) -> set[str]:
        """The fields as JSON spells them."""
        return {field.alias or name for name, field in cls.model_fields.items()}


class Piece(Body):
    """A part of a conversation: fields beyond its own are ignored, as no template would print them."""

    model_config = ConfigDict(extra="ignore")
