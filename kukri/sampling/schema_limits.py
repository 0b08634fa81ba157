"""JSON schemas within what llguidance follows: formats that it knows, and numbers that are doubles."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kukri.sampling.closed_schema import changed, schemas_in

# Formats that are enforced. Others say what a text is for (path, password) or how a number is kept (int32).
FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum")
_LARGEST = 2**63 - 1  # integers end there, so this and larger maxima exclude nothing that could come
# What llguidance says, in the words of who wrote the schema
_WORDS = (
    (r"oneOf constraints are not supported.*", "oneOf is not supported where its schemas overlap: use anyOf"),
    (r"Unimplemented keys: \[(.*)\]", r"\1 is not supported: leave it out"),
    (
        r"Resource '(.*?)' is not present in a registry.*",
        r"$ref '\1' is not supported: refer to a part of the schema itself, such as #/$defs/name",
    ),
    (
        r"Failed to generate regex for (integer|float) range: .*",
        "a range of numbers this large is not supported: use bounds up to 2**53, or leave them out",
    ),
    (
        r"Value for 'multipleOf' has too many digits: (\d+)",
        r"multipleOf \1 is not supported: use fewer digits",
    ),
    (
        r"min/maxProperties only supported .*",
        "minProperties and maxProperties are not supported with optional properties: list all in required",
    ),
)


def limited(schema: Mapping[str, Any], *, lenient: bool = False) -> dict[str, Any]:
    """Return the schema without unknown formats; if `lenient`, without numbers that would be rounded.

    Unknown formats stay in a lenient one, where llguidance names them as not enforced.
    """

    def limit(part: dict[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
        if lenient:
            return {key: value for key, value in part.items() if not _is_rounded(key, value)}
        if isinstance(part.get("format"), str) and part["format"] not in FORMATS:
            del part["format"]
        return part

    made: dict[str, Any] = changed(schema, limit)
    return made


def unknown_formats(schema: Mapping[str, Any]) -> list[str]:
    """Return notes that say which formats of a schema are not enforced."""
    formats = (part.get("format") for part in schemas_in(schema))
    unknown = {name for name in formats if isinstance(name, str) and name not in FORMATS}
    return [f"the format {name!r} is not enforced" for name in sorted(unknown)]


def rounded_number(schema: Mapping[str, Any]) -> str:
    """Return what is wrong with the first number that no double is equal to; "" without one."""
    for part in schemas_in(schema):
        for key in filter(lambda key: _is_rounded(key, part[key]), part):
            return f"{key} is not supported with an integer that is not a double: use integers up to 2**53"
    return ""


def in_our_words(message: str) -> str:
    """Return llguidance's message without options that nobody can set."""
    for pattern, words in _WORDS:
        if (match := re.fullmatch(pattern, message, re.DOTALL)) is not None:
            return match.expand(words)
    return message


def _is_rounded(key: str, value: Any) -> bool:
    if key not in _NUMBERS or (key == "maximum" and type(value) is int and value >= _LARGEST):
        return False
    if isinstance(value, Mapping) and key in ("const", "enum"):
        return any(_is_rounded("const", item) for item in value.values())
    if isinstance(value, list):
        return any(_is_rounded("const", item) for item in value)
    if type(value) is not int:
        return False
    try:
        return float(value) != value
    except OverflowError:
        return True
