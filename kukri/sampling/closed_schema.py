"""Schemas whose objects have the properties that they name and no others, unless they say so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

_SUBSCHEMAS = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf", "then", "else")
_NAMED_SUBSCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "if")
_MOST_PARTS = 20_000  # looked at, of all objects
_OPEN = {"additionalProperties", "unevaluatedProperties", "patternProperties"}


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with `additionalProperties: false` in each object that names properties and does not say.

    A model would otherwise add properties that it makes up. Parts of an object that several schemas describe
    together stay open, as each would forbid what the others name; where these are very many, all do.
    """
    open_ids: set[int] = set()
    n_left = _MOST_PARTS
    for whole in schemas_in(schema):
        parts = _parts(whole, schema, n_left)
        n_left -= len(parts)
        if n_left <= 0:
            return dict(schema)
        if any("properties" in part for part in parts[1:]):
            open_ids.update(map(id, parts))

    def close(part: dict[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
        if "properties" in part and not _OPEN & part.keys() and id(stated) not in open_ids:
            part["additionalProperties"] = False
        return part

    made: dict[str, Any] = changed(schema, close)
    return made


def changed(schema: Any, change: Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]]) -> Any:
    """A copy in which `change(copy, original)` stands for each schema, after those within it."""
    if isinstance(schema, list):
        return [changed(item, change) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for name in schema.keys() & set(_SUBSCHEMAS):
        made[name] = changed(schema[name], change)
    for name, value in schema.items():
        if name in _NAMED_SUBSCHEMAS and isinstance(value, Mapping):
            made[name] = {key: changed(item, change) for key, item in value.items()}
    return change(made, schema)


def schemas_in(schema: Any) -> Iterator[Mapping[str, Any]]:
    """The schema and all within it."""
    if isinstance(schema, list):
        for item in schema:
            yield from schemas_in(item)
    if not isinstance(schema, Mapping):
        return
    yield schema
    for name, value in schema.items():
        if name in _SUBSCHEMAS:
            yield from schemas_in(value)
        elif name in _NAMED_SUBSCHEMAS and isinstance(value, Mapping):
            for item in value.values():
                yield from schemas_in(item)


def _parts(whole: Mapping[str, Any], root: Mapping[str, Any], n_most: int) -> list[Any]:
    """The schemas that describe one object with `whole`, if that combines some; `n_most` of them."""
    branches = [name for name in _COMBINING if name in whole]
    all_of = whole.get("allOf")
    is_several = isinstance(all_of, list) and len(all_of) > 1
    if not branches or not ("properties" in whole or len(branches) > 1 or is_several):
        return []
    parts, seen = [whole], {id(whole)}
    for part in parts:  # `parts` grows meanwhile
        if len(parts) >= n_most:
            break
        given = [part.get(name) for name in ("allOf", "anyOf", "oneOf", "then", "else")]
        found = [one for value in given for one in (value if isinstance(value, list) else [value])]
        found.append(_referred(part.get("$ref"), root))
        for one in found:
            if isinstance(one, Mapping) and id(one) not in seen:
                seen.add(id(one))
                parts.append(one)
    return parts


def _referred(pointer: Any, root: Mapping[str, Any]) -> Any:
    """The schema at a pointer within the root; None if there is none."""
    if not isinstance(pointer, str) or not pointer.startswith("#"):
        return None
    found: Any = root
    for name in filter(None, pointer[1:].split("/")):
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
