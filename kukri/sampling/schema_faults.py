"""Where in a JSON schema it is that a grammar cannot be made of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAX_S = 0.2  # time limit of the search
_DEFINITIONS = ("$defs", "definitions")


def faulty_place(schema: Mapping[str, Any], is_good: Callable[[Mapping[str, Any]], bool]) -> str:
    """The JSON pointer of the innermost schema that is not good by itself; "" for the whole one."""
    until_s, place = time.monotonic() + _MAX_S, ""
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    found: Mapping[str, Any] | None = schema
    while found is not None:
        within, found = found, None
        for pointer, part in _parts(within):
            if time.monotonic() > until_s:
                return place
            if not is_good({**definitions, **part}):
                place, found = place + pointer, part
                break
    return place


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(JSON pointer, schema) of the schemas directly within a schema."""
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, Mapping):
            parts = [(f"/{key}/{_escaped(name)}", part) for name, part in value.items()]
        elif key in _LISTS and isinstance(value, list):
            parts = [(f"/{key}/{i}", part) for i, part in enumerate(value)]
        elif key in _SCHEMAS:
            parts = [(f"/{key}", value)]
        else:
            parts = []
        yield from ((pointer, part) for pointer, part in parts if isinstance(part, Mapping))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
