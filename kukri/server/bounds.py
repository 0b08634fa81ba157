"""Bounds for all that a body holds, by construction: lists, objects and numbers that state none get these.

A list is read up to its first wrong item. Otherwise two megabytes of wrong items become gigabytes of errors,
and the event loop stands still while they are made.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import no_info_before_validator_function

from kukri.sampling.fields import MAX_COUNT

MAX_ITEMS = 10_000  # longest list: messages, parts of a message, tool calls
MAX_ENTRIES = 1000  # largest object with values of one type, such as metadata
MOST_FEATURES = 10_000  # that an attribution graph traces
FORM_BYTES = 1 << 17  # in a form beyond its file, at most
MAX_NUMBER = 1e30  # which float32 holds

_NO_SCHEMAS = ("metadata", "expected", "serialization")  # parts of a schema that hold no schemas of values


def bounded(schema: Any) -> Any:
    """A core schema of pydantic with bounds wherever it has none; changed in place.

    pydantic hands out the same schema again for each model and each application that uses it: what has its
    bounds already stays as it is.
    """
    if isinstance(schema, list | tuple):
        return type(schema)(map(bounded, schema))
    if not isinstance(schema, dict):
        return schema
    if isinstance(schema.get("function"), dict) and _is_check(schema["function"].get("function")):
        return schema
    is_node = isinstance(schema.get("type"), str)  # else fields by name, or the choices of a union
    for name, part in schema.items():
        if isinstance(part, dict | list | tuple) and not (is_node and name in _NO_SCHEMAS):
            schema[name] = bounded(part)
    if not is_node:
        return schema
    match schema.get("type"):
        case "list":
            schema["fail_fast"] = True
            schema.setdefault("max_length", MAX_ITEMS)
        case "int":
            schema.setdefault("ge", -MAX_COUNT)
            schema.setdefault("le", MAX_COUNT)
        case "float":
            schema.setdefault("ge", -MAX_NUMBER)
            schema.setdefault("le", MAX_NUMBER)
        case "dict" if schema.get("values_schema", {}).get("type", "any") != "any":
            limit = schema.setdefault("max_length", MAX_ENTRIES)
            return no_info_before_validator_function(partial(_checked_size, limit), schema)
    return schema


def _is_check(function: Any) -> bool:
    return isinstance(function, partial) and function.func is _checked_size


def _checked_size(limit: int, value: Any) -> Any:
    """The value; an object of too many entries is one error, before its values are looked at."""
    if isinstance(value, dict) and len(value) > limit:
        raise PydanticCustomError("too_long", "too many entries", {"max_length": limit})
    return value
