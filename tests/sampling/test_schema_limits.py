"""Formats that are annotations, numbers beyond doubles, and errors without options that nobody can set."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from kukri.errors import RequestError
from kukri.sampling import Grammar
from kukri.sampling.grammar import compiled, json_rule
from kukri.sampling.schema_limits import FORMATS, in_our_words

llguidance = pytest.importorskip("llguidance")
BEYOND = 2**53 + 1  # the first whole number that no double is equal to


class Bytes:
    """A tokenizer whose tokens are the bytes, and one that ends a text."""

    n_vocab, eos_ids, special_ids = 257, frozenset({256}), frozenset({256})

    def encode_inside(self, text: str) -> list[int]:
        return [*text.encode()]

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<end>"


BYTES = Bytes()


def accepts(grammar: Grammar, text: str) -> bool:
    """True if a model may write the text and end there."""
    matcher = compiled(grammar, BYTES).matcher()
    for token in (*text.encode(), 256):
        assert matcher.update() == ""
        if not np.unpackbits(matcher.allowed.view(np.uint8), bitorder="little")[token]:
            return False
        matcher.take(token)
    return True


@pytest.mark.parametrize("name", ["path", "binary", "password", "int32", "int64", "double", "byte", "regex"])
def test_a_format_that_nobody_knows_is_an_annotation(name: str) -> None:
    """A 400 for what Pydantic and OpenAPI write; a format that vanishes without a note."""
    kind = {"type": ["string", "integer"], "format": name}
    schema = {"type": "object", "properties": {"a": kind, "format": {"type": "null"}}, "required": ["a"]}
    grammar = Grammar.json(schema)
    for text in ('{"a": "x y"}', '{"a": 5, "format": null}'):
        jsonschema.validate(json.loads(text), schema)
        assert accepts(grammar, text)
    assert not accepts(grammar, '{"a": true}')
    assert compiled(grammar, BYTES).notes == (f"the format '{name}' is not enforced",)
    rule = f"start: {json_rule(schema, lenient=True)}"
    assert any(name in note for note in compiled(Grammar.text(rule), BYTES).notes)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_that_are_enforced_stay(name: str) -> None:
    """A format that is left out although it can be enforced, or named although it cannot."""
    grammar = Grammar.json({"type": "string", "format": name})
    assert compiled(grammar, BYTES).notes == ()
    assert not accepts(grammar, '"no such \\t thing"')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": BEYOND},
        {"type": "integer", "maximum": BEYOND},
        {"type": "integer", "maximum": 2**63 - 2},
        {"type": "integer", "exclusiveMinimum": -BEYOND},
        {"type": "number", "exclusiveMaximum": BEYOND},
        {"type": "integer", "multipleOf": BEYOND},
        {"const": BEYOND},
        {"const": {"x": [BEYOND]}},
        {"enum": [1, BEYOND]},
        {"type": "integer", "minimum": 10**400},
    ],
)
def test_numbers_that_would_be_rounded_are_refused(schema: dict[str, Any], caplog: Any) -> None:
    """An answer that the schema forbids: 2**53 for a minimum of 2**53 + 1."""
    whole = {"type": "object", "properties": {"a": {"items": schema}}}
    with pytest.raises(RequestError, match=r"at /properties/a/items: \w+ is not supported with an integer"):
        compiled(Grammar.json(whole), BYTES)
    name = next(key for key in schema if key != "type")
    assert f'"{name}"' not in json_rule(whole, lenient=True), "arguments of tools are free where it cannot be"
    assert f"enforced only in part: {name}" in caplog.text


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer", "minimum": 2**53}, [2**53, 2**53 + 1], [2**53 - 1]),
        ({"type": "integer", "maximum": 2**60}, [2**60, -(2**70)], [2**60 + 1]),
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, [0, 2**63 - 1], [-1, 2**63]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, [0, 2**62], [-1, 2**64]),
        ({"const": 2**53}, [2**53], [2**53 + 1]),
        ({"enum": [-(2**53), 7]}, [-(2**53), 7], [8]),
    ],
)
def test_large_numbers_that_are_exact(schema: dict[str, Any], right: list[int], wrong: list[int]) -> None:
    """A bound that is one off, or refused although it is exact."""
    for value in right:
        jsonschema.validate(value, schema)
        assert accepts(Grammar.json(schema), str(value)), value
    for value in wrong:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(value, schema)
        assert not accepts(Grammar.json(schema), str(value)), value


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, "oneOf is not supported .* use anyOf"),
        ({"not": {}}, '"not" is not supported: leave it out'),
        ({"if": {}, "then": {}}, '"if", "then" is not supported: leave it out'),
        ({"$ref": "http://a/b"}, "'http://a/b' is not supported: refer to a part of the schema itself"),
        ({"type": "integer", "minimum": -(2**63)}, "numbers this large is not supported: use bounds up to"),
        ({"type": "integer", "multipleOf": 2**40}, "multipleOf 1099511627776 is not supported"),
        ({"properties": {"a": {}}, "minProperties": 2}, "list all in required"),
    ],
)
def test_errors_are_in_our_words(schema: dict[str, Any], words: str) -> None:
    """Advice about an option of a package that no field sets."""
    with pytest.raises(RequestError, match=words) as caught:
        compiled(Grammar.json({"items": schema, "type": "array"}), BYTES)
    assert "at /items: " in str(caught.value)
    assert "coerce" not in str(caught.value)
    assert "Some(" not in str(caught.value)


def test_what_is_clear_stays_as_it_is() -> None:
    assert in_our_words("Invalid type: foo") == "Invalid type: foo"
    with pytest.raises(RequestError, match="must itself be JSON"):
        Grammar.json({"const": float("inf")})
