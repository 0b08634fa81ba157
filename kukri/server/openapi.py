"""The OpenAPI document, and its descriptions of answers and errors."""

from __future__ import annotations

from functools import cache, partial
from threading import Lock
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

Responses = dict[int | str, dict[str, Any]]  # as FastAPI takes them


class ErrorDetail(BaseModel):
    """The description of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """An error, as OpenAI's API writes it."""

    error: ErrorDetail


_REASONS = {
    400: "The request is wrong",
    401: "No valid API key",
    403: "The host is unknown, or the API key lacks a scope",
    404: "No such model",
    408: "The body came too slowly",
    413: "The body is too large",
    429: "Too many requests",
    503: "No room now, or the server is shutting down",
}


_SCHEMAS = "#/components/schemas/"
_error_forms: dict[str, type[BaseModel]] = {}  # by the names of their schemas


def errors_in(form: type[BaseModel]) -> Responses:
    """All errors, with bodies of an API's form.

    FastAPI would make a validator for each form, status and route: 600 of them, half of a server's start.
    """
    _error_forms[form.__name__] = form
    content = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}{form.__name__}"}}}
    return {status: {"content": content, "description": reason} for status, reason in _REASONS.items()}


def _answer(what: str, *types: str) -> Responses:
    return {200: {"content": {name: {} for name in types}, "description": what}}


ERRORS = errors_in(ErrorBody)
EVENTS = _answer("The answer", "application/json", "text/event-stream")
LINES = _answer("The answer", "application/json", "application/x-ndjson")
SAFETENSORS = _answer("The tensors", "application/vnd.safetensors")


def add_document(app: FastAPI) -> None:
    """Serves the OpenAPI document of the routes that the application has so far.

    It is made when somebody first asks: that takes as long as the rest of the application's start. A thread
    makes it, so that streams continue meanwhile.
    """
    lock, made = Lock(), cache(partial(_document, app))

    @app.get("/openapi.json", include_in_schema=False)
    def document(request: Request) -> JSONResponse:
        with lock:
            described = made()
        prefix = request.scope.get("root_path", "")
        return JSONResponse(described | ({"servers": [{"url": prefix}]} if prefix else {}))


def _document(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document without its 422: a wrong body is a 400 here."""
    document = app.openapi()
    mode: JsonSchemaMode = "serialization"
    forms = [(form, mode) for form in _error_forms.values()]
    _, schemas = models_json_schema(forms, ref_template=_SCHEMAS + "{model}")
    document["components"]["schemas"] |= schemas["$defs"]
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    return document
