"""Bounds of what a body holds: every list, object and number has one, and a wrong body is one error, soon."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from kukri.errors import RequestError
from kukri.opening.model_options import ModelOptions
from kukri.server.app import create_app
from kukri.server.body import Body
from kukri.server.settings import ModelSpec, ServerSettings
from tests.stopwatch import within

N = 100_000


def bodies(made: type[BaseModel] = Body) -> Iterator[type[BaseModel]]:
    """All that clients can send: bodies and their parts."""
    for body in made.__subclasses__():
        yield body
        yield from bodies(body)


BODIES = sorted({body.__name__: body for body in bodies()}.items())


def unbounded(schema: Any, place: str = "") -> Iterator[str]:
    """Places of a JSON schema that hold any number of things, or any number."""
    if isinstance(schema, list):
        for part in schema:
            yield from unbounded(part, place)
    if isinstance(schema, dict):
        limit = {"array": "maxItems", "integer": "maximum", "number": "maximum"}.get(str(schema.get("type")))
        if isinstance(schema.get("additionalProperties"), dict):
            limit = "maxProperties"
        if limit and limit not in schema and "const" not in schema:
            yield place
        for name, part in schema.items():
            yield from unbounded(part, f"{place}/{name}")


@pytest.mark.representative(2)
def test_all_that_bodies_hold_has_bounds() -> None:
    """Catches a list, an object or a number of a body that is not made by `Body`."""
    assert len(BODIES) > 100
    found = [place for name, body in BODIES for place in unbounded(body.model_json_schema(), name)]
    assert not found, "\n".join(found)


@cache
def floods() -> tuple[Any, ...]:
    """Lists of many equal items, and last an object of many keys."""
    return [1.5] * N, [0] * N, ["a"] * N, [[]] * N, [{}] * N, {f"key{i}": [] for i in range(N)}


def n_errors_soon(body: type[BaseModel], data: dict[str, Any]) -> int:
    """The number of errors of a body, which are there within half a second."""
    n_errors = 0
    with within(0.5, next(iter(data))):
        try:
            body.model_validate(data)
        except ValidationError as error:
            n_errors = error.error_count()
        except RequestError as error:
            n_errors = len(str(error)) // 1000
    return n_errors


@pytest.mark.representative(8)
def test_a_flood_of_wrong_items_is_a_few_errors() -> None:
    """Catches errors for each of many items, which take gigabytes while the event loop stands still."""
    faults = []
    for name, body in BODIES:
        n_fields = len(body.model_fields)
        for field, schema in body.model_json_schema()["properties"].items():
            if re.search("array|object|ref", str(schema)):
                for flood in floods():
                    n_errors = n_errors_soon(body, {field: flood})
                    if n_errors >= n_fields + 10:  # one for each that is missing, and each branch
                        faults.append(f"{name}.{field}: {n_errors} errors")
        n_errors = n_errors_soon(body, floods()[-1])
        if n_errors > n_fields + 1:
            faults.append(f"{name}: {n_errors} errors of unknown fields")
    assert not faults, "\n".join(faults)


def depth(schema: Any) -> int:
    """How deep a schema is nested."""
    parts = list(schema.values()) if isinstance(schema, dict) else schema
    return 1 + max(map(depth, parts), default=0) if isinstance(parts, list | tuple) else 0


def test_bounds_are_added_once() -> None:
    """Catches schemas that grow with each application of a process, until the next one's recursion fails."""
    models = [ModelSpec(("m",), ModelOptions(model="nowhere.gguf"))]
    depths = []
    for _ in range(2):
        create_app(None, ServerSettings(("m",)), models)
        depths.append([depth(body.__dict__.get("__pydantic_core_schema__")) for _, body in BODIES])
    assert depths[0] == depths[1]
    assert max(depths[0]) > 10  # the premise
