"""A client of the application in this process, without a network: same routes, same middleware."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from fastapi import FastAPI
from starlette.types import Message

from kukri.calls.batch_files import BatchLine, Results
from kukri.server.keys import Client


class AppResponse(NamedTuple):
    """A whole response."""

    status: int
    request_id: str
    body: Any  # parsed JSON


async def post(app: FastAPI, path: str, body: Mapping[str, Any], client: Client | None = None) -> AppResponse:
    """The response of a running application to a JSON body. Cancelling it ends the request.

    With a `client` the request is this one's, without its key and rate.
    """
    data = json.dumps(body).encode()
    headers = {"content-type": "application/json", "content-length": str(len(data))}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("local", 0),
        "server": ("local", 0),
        "kukri.known_client": client,
    }
    is_sent = False
    status, request_id, parts = 0, "", []

    async def receive() -> Message:
        nonlocal is_sent
        if is_sent:
            await asyncio.Event().wait()  # nobody hangs up
        is_sent = True
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, request_id
        if message["type"] == "http.response.start":
            status = message["status"]
            request_id = dict(message["headers"])[b"x-request-id"].decode()
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return AppResponse(status, request_id, json.loads(b"".join(parts)))


async def answer_lines(
    lines: Iterable[BatchLine],
    results: Results,
    n_at_once: int,
    ask: Callable[[BatchLine], Awaitable[AppResponse]],
    on_result: Callable[[Any], Awaitable[None]],
) -> None:
    """Answer the lines of a batch by `ask`, `n_at_once` at a time; `on_result` gets each response's body.

    An error of the system, such as a full disk, ends all. A line with an error of its own is not asked.
    """
    left = iter(lines)

    async def answer() -> None:
        for line in left:
            response: dict[str, Any] | None = None
            body: Any = {}
            try:
                if line.error is None:
                    status, request_id, body = await ask(line)
                    response = {"status_code": status, "request_id": request_id, "body": body}
            except RecursionError:  # it could just be read, and cannot be written again
                line = replace(line, error=("invalid_line", "the body is nested too deeply"))
            results.add(line.result(response))
            await on_result(body)

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(n_at_once):
                tasks.create_task(answer())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
