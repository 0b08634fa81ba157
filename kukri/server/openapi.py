"""Descriptions of answers and errors in the OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

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


def errors_in(form: type[BaseModel]) -> Responses:
    """All errors, with bodies of an API's form."""
    return {status: {"model": form, "description": reason} for status, reason in _REASONS.items()}


def _answer(what: str, *types: str) -> Responses:
    return {200: {"content": {name: {} for name in types}, "description": what}}


ERRORS = errors_in(ErrorBody)
EVENTS = _answer("The answer", "application/json", "text/event-stream")
LINES = _answer("The answer", "application/json", "application/x-ndjson")
SAFETENSORS = _answer("The tensors", "application/vnd.safetensors")


def drop_validation_errors(app: FastAPI) -> None:
    """Takes FastAPI's 422 out of the OpenAPI document: a wrong body is a 400 here."""
    document = app.openapi()
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
