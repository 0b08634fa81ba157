"""Checks that an answer has the form that the OpenAPI document describes, and no field beside it."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import import_module
from typing import Any

import httpx
import jsonschema

from kukri.server.answers.forms import FORMS, schema_of
from kukri.server.app import APIS
from kukri.server.endpoint import Api, Endpoint

_MAX_BYTES = 1 << 16  # larger answers are longer lists of the same


class FormClient(httpx.Client):
    """A client that checks the form of each answer which is no stream."""

    def send(self, request: httpx.Request, *, stream: bool = False, **options: Any) -> httpx.Response:
        """Send a request. Raises AssertionError if the form of the answer is not the document's."""
        response = super().send(request, stream=stream, **options)
        if not stream:
            check_answer(response)
        return response


def check_answer(response: httpx.Response) -> None:
    """Raises AssertionError unless the answer to a described request has the described form."""
    request = response.request
    found = row_of(request.method, request.url.path)
    is_json = response.headers.get("content-type", "").startswith("application/json")
    if found is None or not is_json or not 0 < len(response.content) <= _MAX_BYTES:
        return
    api, row = found
    form: Any = api.error_form if response.status_code >= 400 else row.answer
    if response.status_code == 503 and row.tells_state:
        form = row.answer, api.error_form
    try:
        may_pick = b'"response_fields"' in request.content  # llama.cpp's answers have what the body names
    except httpx.RequestNotRead:  # a body that was sent by pieces
        may_pick = False
    check(form, response.json(), is_closed=not may_pick)


def check_chunks(method: str, path: str, text: str) -> int:
    """Return the number of a stream's events or lines. Raises AssertionError if one has another form."""
    found = row_of(method, path)
    assert found is not None
    lines = [line.removeprefix("data:").strip() for line in text.splitlines()]
    chunks = [json.loads(line) for line in lines if line.startswith("{")]
    for chunk in chunks:
        check(found[1].chunk, chunk)
    return len(chunks)


def check(form: Any, answer: Any, *, is_closed: bool = True) -> None:
    """Raises AssertionError unless an answer has a form; a closed one has no other fields."""
    error = jsonschema.exceptions.best_match(_validator(form, is_closed).iter_errors(answer))
    assert error is None, f"{form}: {error.message[:500]} at {error.json_path}"


def row_of(method: str, path: str) -> tuple[Api, Endpoint] | None:
    """The row that describes a request, and its API; None if none does."""
    return next(
        ((api, row) for pattern, shown, api, row in _rows() if shown == method and pattern.fullmatch(path)),
        None,
    )


@cache
def _rows() -> list[tuple[re.Pattern[str], str, Api, Endpoint]]:
    shown = [(api, row) for api in APIS for row in api.endpoints if row.summary]
    return [(_pattern(path), row.method, api, row) for api, row in shown for path in row.paths]


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{\w+\}", "[^/]+", re.sub(r"\{\w+:path\}", ".+", path)))


@cache
def all_forms() -> dict[str, Any]:
    """The schema of each form, by its name."""
    known = [FORMS, *(import_module(api.forms).FORMS for api in APIS)]
    return {name: schema_of(form) for forms in known for name, form in forms.items()}


@cache
def _validator(form: Any, is_closed: bool) -> jsonschema.Draft202012Validator:
    schemas = {name: _closed(schema) if is_closed else schema for name, schema in all_forms().items()}
    return jsonschema.Draft202012Validator({**schema_of(form), "components": {"schemas": schemas}})


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(one) for name, one in schema.items()}
    return closed | ({"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {})
