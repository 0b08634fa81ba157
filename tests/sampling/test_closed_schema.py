"""Objects of a schema have the properties that it names, unless it says otherwise."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from kukri.sampling import Grammar
from kukri.sampling.closed_schema import closed
from kukri.sampling.grammar import compiled, json_rule
from kukri.tokenizer import Tokenizer
from tests.stopwatch import within

A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "null"}}}
NO = {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "want"),
    [
        (A, {**A, **NO}),
        ({"type": "object"}, {"type": "object"}),
        ({**A, "additionalProperties": True}, {**A, "additionalProperties": True}),
        ({**A, "additionalProperties": B}, {**A, "additionalProperties": {**B, **NO}}),
        ({**A, "patternProperties": {"x": B}}, {**A, "patternProperties": {"x": {**B, **NO}}}),
        ({"properties": {"x": A}}, {"properties": {"x": {**A, **NO}}, **NO}),
        ({"items": A, "prefixItems": [B]}, {"items": {**A, **NO}, "prefixItems": [{**B, **NO}]}),
        ({"anyOf": [A, B]}, {"anyOf": [{**A, **NO}, {**B, **NO}]}),
        ({"allOf": [A]}, {"allOf": [{**A, **NO}]}),
        (
            {**A, "anyOf": [{"required": ["a"]}, {"maxProperties": 0}]},
            {**A, "anyOf": [{"required": ["a"]}, {"maxProperties": 0}], **NO},
        ),
        ({"$ref": "#/$defs/x", "$defs": {"x": A}}, {"$ref": "#/$defs/x", "$defs": {"x": {**A, **NO}}}),
        ({"enum": [A]}, {"enum": [A]}),
        ({"not": A}, {"not": A}),
        ({"properties": {"properties": A}}, {"properties": {"properties": {**A, **NO}}, **NO}),
        ({"properties": 1}, {"properties": 1, **NO}),
    ],
)  # fmt: skip
def test_objects_are_closed(schema: Any, want: Any) -> None:
    """Catches objects that continue with properties of their own, and values that are taken for schemas."""
    before = json.dumps(schema)
    assert closed(schema) == want
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [A, B]},
        {**A, "allOf": [B]},
        {**A, "anyOf": [B]},
        {**A, "$ref": "#/$defs/b", "$defs": {"b": B}},
        {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": A, "b": B}},
        {"allOf": [{"anyOf": [A, {}]}, B]},
        {"if": {"required": ["a"]}, "then": A, "properties": {"b": {}}},
    ],
)
def test_parts_of_one_object_stay_open(schema: Any) -> None:
    """Catches parts of which each forbids what the others name: no text fits them all."""
    assert closed(schema) == schema


def test_a_schema_that_refers_to_itself_ends() -> None:
    """Catches a search that goes in a circle."""
    schema = {"allOf": [{"$ref": "#"}, {"$ref": "#/x"}, A], "properties": {"c": {"$ref": "#"}}}
    assert closed(schema) == schema


def test_a_web_of_references_takes_little_time() -> None:
    """Catches a search from each schema through all that it refers to: on the event loop, for tools."""
    links = {str(i): {**A, "$ref": f"#/$defs/{i + 1}"} for i in range(4000)}
    schema = {"$defs": links, "$ref": "#/$defs/0"}
    with within(1):
        assert closed(schema) == schema


def test_grammars_and_tools_are_closed(smollm2_path) -> None:
    """Catches a way to a grammar on which objects are open."""
    tokenizer = Tokenizer.from_gguf(smollm2_path)
    matcher = compiled(Grammar.json({**A, "required": ["a"]}), tokenizer).matcher()
    for token_id in tokenizer.encode('{"a":1'):
        matcher.take(token_id)
    assert matcher.update() == ""
    ids = np.flatnonzero(np.unpackbits(matcher.allowed.view(np.uint8), bitorder="little"))
    assert tokenizer.encode(",")[0] not in ids
    assert tokenizer.encode("}")[0] in ids
    assert '"additionalProperties": false' in json_rule(A)
