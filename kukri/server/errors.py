"""Errors as OpenAI writes them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kukri.errors import CapacityError, KukriError, RequestError

RETRY_AFTER_S = 1
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_UNION_TAGS = {"str", "int", "float", "bool", "NamedTool"}


def error_body(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The JSON of an error."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    message: str,
    status: int,
    *,
    param: str | None = None,
    code: str | None = None,
    retry_after_s: int | None = None,
) -> Response:
    """An error as a response; `retry_after_s` says when trying again may help."""
    body = json.dumps(error_body(message, status, param=param, code=code)).encode()
    headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}
    if status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    return Response(body, status, headers, "application/json")


def response_of(error: KukriError) -> Response:
    """What a client is told of an error: 400 for its own mistakes, 503 where there is no room, else 500."""
    if isinstance(error, ModelNotFoundError):
        return error_response(str(error), 404, param=error.param, code=error.code)
    if isinstance(error, RequestError):
        return error_response(str(error), 400, param=error.param, code=error.code)
    if isinstance(error, CapacityError):
        return error_response(str(error), 503, code="overloaded", retry_after_s=RETRY_AFTER_S)
    return error_response(str(error), 500)


class ModelNotFoundError(RequestError):
    """A request names a model that is not served."""

    def __init__(self, name: str, served: Sequence[str]) -> None:
        super().__init__(
            f"the model {name[:100]!r} does not exist; served here: {', '.join(served)}",
            param="model",
            code="model_not_found",
        )


async def on_kukri_error(request: Request, error: Exception) -> Response:
    """Handler of every KukriError that a route raises."""
    assert isinstance(error, KukriError)
    return response_of(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Handler of what the router raises: no such path, a wrong method, a body too large or too slow."""
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"there is nothing at {request.method} {request.url.path[:200]}"
    response = error_response(message, error.status_code)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def on_invalid_body(request: Request, error: Exception) -> Response:
    """Handler of bodies that do not fit the schema: names the first thing that is wrong."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    kind, where = first["type"], _param(first["loc"])
    if kind == "json_invalid":
        return error_response("the body is not JSON", 400, code="invalid_json")
    if kind == "extra_forbidden":
        return error_response(f"unknown field {where!r}", 400, param=where, code="unknown_parameter")
    if kind == "missing" and where is not None:
        return error_response(f"{where} is missing", 400, param=where, code="missing_required_parameter")
    what = "the body" if where is None else where
    hint = "" if where else "; send a JSON object with content-type application/json"
    message = f"{what}: {first['msg'][0].lower()}{first['msg'][1:]}{hint}"
    return error_response(message, 400, param=where, code="invalid_value")


def _param(location: Sequence[str | int]) -> str | None:
    """`messages[0].role` for a place in a body; the members of a union, which pydantic adds, are left out."""
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _UNION_TAGS or not part.isidentifier():
            break
        else:
            path += f".{part}" if path else part
    return path or None
