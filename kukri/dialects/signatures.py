"""`Signatures`: what parsers know of the tools that an answer may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MAX_REFERENCES = 8  # references in a chain, and alternatives within alternatives
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}


class Signatures:
    """The names of tools, their parameters, and the types of these."""

    def __init__(self, functions: Sequence[Mapping[str, Any]] = ()) -> None:
        """`functions` have a name, and perhaps `parameters`, a JSON schema."""
        self._schemas = {function["name"]: function.get("parameters") or {} for function in functions}

    def __contains__(self, name: str) -> bool:
        return name in self._schemas

    def parameters(self, name: str) -> list[str]:
        """The names of a tool's parameters, in order; none for a tool that is not known."""
        properties = self._schemas.get(name, {}).get("properties")
        return list(properties) if isinstance(properties, Mapping) else []

    def types(self, name: str, parameter: str) -> set[str]:
        """The types that a tool's schema allows for a parameter; none if it does not say."""
        root = self._schemas.get(name, {})
        properties = root.get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return types_of(schema, root)


def types_of(schema: Any, root: Mapping[str, Any], n_within: int = 0) -> set[str]:
    """The types that a schema names, through references within `root` and alternatives; none if unknown."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or n_within > _MAX_REFERENCES:
        return set()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else {t for t in named or () if isinstance(t, str)}
    choices = [*(schema.get("enum") or ()), *([schema["const"]] if "const" in schema else ())]
    if not types and choices:
        types = {_TYPES.get(type(choice), "object") for choice in choices}
    for key in ("anyOf", "oneOf", "allOf"):
        alternatives = schema.get(key)
        for alternative in alternatives if isinstance(alternatives, list) else ():
            if resolved(alternative, root) is not schema:
                types |= types_of(alternative, root, n_within + 1)
    return types


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a reference within `root` leads to; the schema itself if it is not one."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for key in reference[2:].split("/"):
            schema = (
                schema.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
            )
    return schema
