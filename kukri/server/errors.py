"""Errors as OpenAI writes them, {"error": {"message", "type", "param", "code"}}, or as another API does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from kukri.errors import ActivationLimitError, CapacityError, ContextLengthError, KukriError, RequestError
from kukri.server.aliases import NAME_PAIRS
from kukri.server.body import TEXT_OR_LIST, body_names, refusal_of

RETRY_AFTER_S = 1
LATE = "deadline_exceeded"  # the code of a DeadlineError
# the JSON of an error, by its message, status, request's id and code
ErrorForm = Callable[[str, int, str | None, str | None], dict[str, Any]]
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# other servers' names of fields, and their names here, of which a body has one or none
_LIMITS = ("max_tokens", "max_output_tokens", "n_predict")
NAMES_HERE: Mapping[str, tuple[str, ...]] = {
    "grammar": ("structured_outputs.grammar",), "guided_choice": ("structured_outputs.choice",),
    "guided_grammar": ("structured_outputs.grammar",), "guided_json": ("structured_outputs.json",),
    "guided_regex": ("structured_outputs.regex",), "json_schema": ("structured_outputs.json",),
    **dict.fromkeys((*_LIMITS, "num_predict", "max_new_tokens"), _LIMITS),
    "n_probs": ("top_logprobs",),
}  # fmt: skip
_BRANCH = re.compile(r"@|(list|nullable|tagged-union|union)(\[|$)|function(-\w+)?\[")  # branches of a union
# what a value must be or have, by pydantic's type of error
_PROBLEMS = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "be an object"),
    **dict.fromkeys(("int_type", "int_from_float", "int_parsing", "int_parsing_size"), "be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), "be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "be true or false"),
    "literal_error": "be {expected}",
    "union_tag_invalid": "have a type of {expected_tags}",
    "union_tag_not_found": "have a type",
    "string_type": "be a text",
    "list_type": "be a list",
    "greater_than_equal": "be at least {ge}",
    "greater_than": "be above {gt}",
    "less_than_equal": "be at most {le}",
    "less_than": "be below {lt}",
    "string_too_short": "have at least {min_length} characters",
    "string_too_long": "have at most {max_length} characters",
    "string_pattern_mismatch": "match the pattern {pattern}",
    "too_short": "have at least {min_length} entries",
    "too_long": "have at most {max_length} entries",
    "none_required": "be null",
}
_NOT_READ = "There was an error parsing the body"  # FastAPI on one not UTF-8 or too deep
_UNION_TAGS = {"str", "int", "float", "bool"}


def error_body(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The JSON of an error."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _ErrorResponse(Response):
    """An error in the form of the API that was asked."""

    def __init__(self, message: str, status: int, content: dict[str, Any], headers: dict[str, str]) -> None:
        super().__init__(json.dumps(content).encode(), status, headers, "application/json")
        self._message, self._code = message, content["error"]["code"]

    def add(self, **facts: int) -> None:
        """Adds fields to OpenAI's form of it."""
        said = json.loads(bytes(self.body))
        said["error"] |= facts
        self.body = json.dumps(said).encode()
        self.headers["content-length"] = str(len(self.body))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it."""
        form: ErrorForm | None = scope.get("kukri.error_form")
        if form is not None:
            content = form(self._message, self.status_code, scope.get("kukri.id"), self._code)
            self.body = json.dumps(content).encode()
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def error_response(
    message: str,
    status: int,
    *,
    param: str | None = None,
    code: str | None = None,
    retry_after_s: int | None = None,
) -> _ErrorResponse:
    """An error as a response; `retry_after_s` says when trying again may help."""
    content = error_body(message, status, param=param, code=code)
    headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}
    if status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    return _ErrorResponse(message, status, content, headers)


def response_of(error: KukriError) -> Response:
    """The response to an error: 4xx for a client's mistake, 503 if there is no room, else 500."""
    if isinstance(error, RequestError):
        kinds = ((NotFoundError, 404), (ForbiddenError, 403), (ActivationLimitError, 413))
        status = next((status for kind, status in kinds if isinstance(error, kind)), 400)
        response = error_response(str(error), status, param=error.param, code=error.code)
        if isinstance(error, ContextLengthError):  # as llama.cpp's server has it, beyond OpenAI's fields
            response.add(n_prompt_tokens=error.n_tokens, n_ctx=error.max_context)
        return response
    if isinstance(error, CapacityError):
        is_late = isinstance(error, DeadlineError)
        code, wait_s = (LATE, None) if is_late else ("overloaded", RETRY_AFTER_S)
        return error_response(str(error), 503, code=code, retry_after_s=wait_s)
    return error_response(str(error), 500)


class DeadlineError(CapacityError):
    """A request was not done within the server's deadline: again, it would take as long."""


class ForbiddenError(RequestError):
    """A client asks for what it may not do."""


class NotFoundError(RequestError):
    """A request names something that is not here."""


class ModelNotFoundError(NotFoundError):
    """A request names a model that is not served."""

    def __init__(self, name: str, served: Sequence[str]) -> None:
        known = f"; served here: {', '.join(served)}" if served else ""
        super().__init__(
            f"the model {name[:100]!r} was not found{known}",
            param="model",
            code="model_not_found",
        )


async def on_kukri_error(request: Request, error: Exception) -> Response:
    """Handler of every KukriError that a route raises."""
    assert isinstance(error, KukriError)
    return response_of(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Handler of the router's errors: no such path, a wrong method, a body too large or too slow."""
    assert isinstance(error, HTTPException)
    message = error.detail
    if message == _NOT_READ:
        if isinstance(error.__cause__, RecursionError):
            return await on_deep_body(request, error)
        return error_response("the body is not JSON", 400, code="invalid_json")
    if error.status_code == HTTPStatus.NOT_FOUND:
        path = request.scope.get("kukri.path", request.url.path)[:200]
        there = f"/v1{path}"
        known = any(getattr(route, "path", None) == there for route in request.app.routes)
        message = f"{request.method} {path} was not found" + (f"; it is at {there}" if known else "")
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        path = request.scope.get("kukri.path", request.url.path)[:200]
        allowed = ", ".join(sorted(_methods_of(request)))
        headers, message = {"allow": allowed}, f"{request.method} {path} is not supported: use {allowed}"
    response = error_response(message, error.status_code)
    for name, value in headers.items():
        response.headers[name] = value
    return response


def _methods_of(request: Request) -> set[str]:
    """The methods that a request's path takes, of all its routes; HEAD goes without saying."""
    found: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            found |= set(getattr(route, "methods", None) or ())
    return found - {"HEAD"}


async def on_deep_body(request: Request, error: Exception) -> Response:
    """Handles RecursionError: the request body is nested too deeply."""
    return error_response("the body is nested too deeply", 400, code="invalid_value")


async def on_invalid_body(request: Request, error: Exception) -> Response:
    """Handler of bodies that do not fit the schema: names the first thing that is wrong."""
    assert isinstance(error, RequestValidationError)
    if (refused := refusal_of(error.errors())) is not None:
        return response_of(refused)
    first = _nearest(error.errors())
    kind, param = first["type"], _param(first["loc"])
    body = error.body
    if isinstance(body, dict) and param and body.get(param) is None:  # it may be there under another name
        param = next((name for name, field in NAME_PAIRS if field == param and name in body), param)
    if kind == "json_invalid":
        return error_response("the body is not JSON", 400, code="invalid_json")
    if kind == "extra_forbidden" and param is not None:
        field = getattr(request.scope.get("route"), "body_field", None)
        return response_of(unknown_field(param, field and field.field_info.annotation))
    if kind == "missing" and param is not None:
        return error_response(f"{param!r} is required", 400, param=param, code="missing_required_parameter")
    problem = _problem(first)
    if param is None:
        problem = f"the body {problem}: send a JSON object with content-type application/json"
    else:
        problem = f"{param!r} {problem}"
    return error_response(problem, 400, param=param, code="invalid_value")


def _problem(error: Mapping[str, Any]) -> str:
    """What pydantic found wrong with a value, as kukri's own errors say it."""
    if error["type"] == "list_type" and error["loc"][-1] == TEXT_OR_LIST:
        return "must be a text or a list"
    said = _PROBLEMS.get(error["type"])
    if said is None and error["msg"].startswith("must "):
        return str(error["msg"])
    return f"is wrong: {error['msg']}" if said is None else f"must {said.format(**error.get('ctx', {}))}"


def unknown_field(param: str, body: Any) -> RequestError:
    """Return the error of a field that a class of bodies lacks, with the field that it has for the same."""
    fields = getattr(body, "model_fields", ())
    here = next((name for name in NAMES_HERE.get(param, ()) if name.partition(".")[0] in fields), None)
    remedy = "" if here is None else f": use {here!r}"
    return RequestError.of(param, f"is not supported{remedy}", code="unknown_parameter")


def _nearest(errors: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first error; among those of a union's branches, the one of the branch that went furthest.

    A value of the wrong type is an error at once, and one of the right type is one further inside, or of
    another kind.
    """
    param = _param(errors[0]["loc"]) or ""
    related = [one for one in errors if (_param(one["loc"]) or "").startswith(param)]
    return max(
        related,
        key=lambda one: (
            sum(part for part in one["loc"] if isinstance(part, int)),
            not one["type"].endswith("_type"),
            len(one["loc"]),
        ),
    )


def _param(location: Sequence[str | int]) -> str | None:
    """`messages[0].role` for a place in a body; the members of a union, which pydantic adds, are left out."""
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _BRANCH.match(part) or part in body_names():  # after which the place continues
            continue
        elif part in _UNION_TAGS or not part.isidentifier():
            break
        else:
            path += f".{part}" if path else part
    return path or None
