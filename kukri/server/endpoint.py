"""`Endpoint`, a row for each path, from which routes, checks of the middleware and the document follow."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from kukri.dataclass import dataclass
from kukri.server.access import Permission
from kukri.server.body import Body
from kukri.server.errors import ErrorForm

EVENTS, LINES = "text/event-stream", "application/x-ndjson"  # types of streams


@dataclass(frozen=True)
class Endpoint:
    """A method and a path: what may be sent there, what comes back, and who may ask.

    `handle` is called with a body and a request, or with a request and the fields of its path and query;
    it may be the files of a folder too. `answer` is the name of a form (`answers/forms.py`), a media type, or
    empty for an answer without a body. `chunk` is the form of a stream's events or lines.
    """

    method: str
    path: str
    handle: Callable[..., Awaitable[Response]] | StaticFiles
    summary: str = ""  # empty: a part of the page, which no document describes
    answer: str = ""
    chunk: str = ""
    body: type[Body] | None = None
    example: Mapping[str, Any] | None = None  # a body that gets an answer from a model that can answer it
    also: tuple[str, ...] = ()  # other paths
    permission: Permission | None = None
    has_images: bool = False  # images may be sent, which --max-images bounds
    is_open: bool = False  # needs no key
    is_quiet: bool = False  # logged as `debug`
    is_upload: bool = False  # a form with a file, which --max-upload bounds
    form: type[Body] | None = None  # the other fields of such a form
    is_unread: bool = False  # refuses a body of any size and reads none
    tells_state: bool = False  # a 503 may have the form of an answer

    @property
    def paths(self) -> tuple[str, ...]:
        """The path and the others."""
        return self.path, *self.also

    @property
    def shown_path(self) -> str:
        """The path as the document has it."""
        return self.path.replace(":path}", "}")

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        if isinstance(self.handle, StaticFiles):
            app.mount(self.path.partition("/{")[0], self.handle)
            return
        function = self._function()
        for path in self.paths:
            is_shown = bool(self.summary) and path == self.path
            app.add_api_route(
                path, function, methods=[self.method], response_model=None, include_in_schema=is_shown
            )

    def _function(self) -> Callable[..., Awaitable[Response]]:
        """Return what FastAPI calls, and by whose annotations it reads a request."""
        handle, permission = self.handle, self.permission
        assert not isinstance(handle, StaticFiles)
        if self.body is None and permission is None:
            return handle

        async def read(body: Any, request: Any) -> Response:
            if permission is not None:
                permission.check(request.app.state.registry.settings, request.scope)
            return await handle(body, request)

        async def unread(request: Any) -> Response:
            assert permission is not None
            permission.check(request.app.state.registry.settings, request.scope)
            return await handle(request)

        function = unread if self.body is None else read
        function.__annotations__ = {"body": self.body, "request": Request}
        return function


@dataclass(frozen=True)
class Api:
    """The endpoints of an API. `forms` is the module of its answers' forms, which only the document imports.

    Paths that begin with `prefix`, known or not, have errors in the form `error`, described by `error_form`.
    """

    name: str
    endpoints: tuple[Endpoint, ...]
    forms: str = ""
    prefix: str = ""
    error: ErrorForm | None = None  # None: OpenAI's
    error_form: str = "ErrorBody"
    stream: str = EVENTS
    is_all_json: bool = False  # a body counts as JSON whatever its client says


class Paths:
    """The paths of endpoints, as they are known before the router has looked."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        paths = [path for endpoint in endpoints for path in endpoint.paths]
        self._exact = frozenset(path for path in paths if "{" not in path)
        self._folders = tuple(path.partition("{")[0] for path in paths if "{" in path)

    def __contains__(self, path: str) -> bool:
        return path in self._exact or path.startswith(self._folders)
