"""The OpenAPI document: FastAPI's reading of bodies, with what the rows of endpoints say of all else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, partial
from importlib import import_module
from threading import Lock
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from kukri.server.answers.forms import schema_of
from kukri.server.body import Body
from kukri.server.endpoint import Api, Endpoint

_REASONS = {
    400: "The request is wrong",
    401: "No valid API key",
    403: "The host is unknown, the server does not allow it, or the API key lacks a scope",
    404: "No such model",
    408: "The body came too slowly",
    413: "The body is too large",
    429: "Too many requests",
    503: "No room now, or the server is shutting down",
}
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def add_document(app: FastAPI, apis: Sequence[Api]) -> None:
    """Serves the OpenAPI document of the APIs, whose routes the application has.

    It is made when somebody first asks: that takes as long as the rest of the application's start. A thread
    makes it, so that streams continue meanwhile.
    """
    lock, made = Lock(), cache(partial(document_of, app, apis))

    @app.get("/openapi.json", include_in_schema=False)
    def document(request: Request) -> JSONResponse:
        with lock:
            described = made()
        prefix = request.scope.get("root_path", "")
        return JSONResponse(described | ({"servers": [{"url": prefix}]} if prefix else {}))


def document_of(app: FastAPI, apis: Sequence[Api]) -> dict[str, Any]:
    """Return FastAPI's document with what the rows say: answers, errors, tags, keys and examples.

    A wrong body is a 400 here, and no 422.
    """
    document = app.openapi()
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for name in ("kukri.server.answers.forms", *sorted({api.forms for api in apis} - {""})):
        schemas |= {form: schema_of(fields) for form, fields in import_module(name).FORMS.items()}
    settings = app.state.registry.settings
    keys = _KEYS if settings.api_keys or settings.api_key_file else {}
    for api in apis:
        for row in api.endpoints:
            if row.summary:
                operation = document["paths"][row.shown_path][row.method.lower()]
                operation |= _described(row, api)
                if row.form is not None:
                    schemas[row.form.__name__] = _form_schema(row.form)
                    content = {"multipart/form-data": {"schema": schema_of(row.form.__name__)}}
                    operation["requestBody"] = {"required": True, "content": content}
                if keys and not row.is_open:
                    scopes = [] if row.permission is None else [row.permission.scope]
                    operation["security"] = [{name: scopes} for name in keys]
                if row.example is not None:
                    operation["requestBody"]["content"]["application/json"]["example"] = row.example
    document = dict(_any_of(document))
    document["tags"] = [{"name": api.name} for api in apis if api.forms]
    return document | {"components": document["components"] | {"securitySchemes": keys}}


def _any_of(part: Any) -> Any:
    """A part of the document with `anyOf` for `oneOf`, because a value may have two forms of a union."""
    if isinstance(part, list):
        return [_any_of(one) for one in part]
    if not isinstance(part, dict):
        return part
    return {"anyOf" if name == "oneOf" else name: _any_of(one) for name, one in part.items()}


def _form_schema(fields: type[Body]) -> dict[str, Any]:
    """The schema of a form of a file and these fields; clients write `[]` after the names of lists."""
    schema = fields.model_json_schema()
    names = {
        f"{name}[]" if "array" in str(field) else name: field for name, field in schema["properties"].items()
    }
    file = {"type": "string", "format": "binary"}
    return {**schema, "properties": {"file": file, **names}, "required": ["file"]}


def _described(row: Endpoint, api: Api) -> dict[str, Any]:
    """The parts of an operation that its row describes."""
    types: dict[str, Any] = {} if "/" not in row.answer else {row.answer: {}}
    if row.answer and not types:
        types["application/json"] = {"schema": schema_of(row.answer)}
    if row.chunk:
        types[api.stream] = {"schema": schema_of(row.chunk)}
    errors = {"application/json": {"schema": schema_of(api.error_form)}}
    responses = {status: {"description": why, "content": errors} for status, why in _REASONS.items()}
    answer = {"description": "The answer", **({"content": types} if types else {})}
    responses[200] = answer
    if row.tells_state:
        either = schema_of((row.answer, api.error_form))
        responses[503] = {"description": _REASONS[503], "content": {"application/json": {"schema": either}}}
    return {
        "tags": [api.name],
        "summary": row.summary,
        "operationId": "_".join(re.findall(r"[a-z0-9]+", f"{row.method} {row.shown_path}".lower())),
        "responses": {str(status): responses[status] for status in sorted(responses)},
    }
