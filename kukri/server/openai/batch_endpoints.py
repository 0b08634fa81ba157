"""The endpoints of /v1/files and /v1/batches, in OpenAI's form."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Query, Request
from pydantic import Field
from starlette.responses import FileResponse, JSONResponse, Response

from kukri.server.access import client_of
from kukri.server.body import Body
from kukri.server.endpoint import Endpoint
from kukri.server.errors import NotFoundError
from kukri.server.openai.batches import Batches
from kukri.server.openai.lists import listed


class ExpiresAfter(Body):
    """When a file expires: seconds after it was made."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]


class BatchBody(Body):
    """A request to /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


async def _owned(request: Request) -> tuple[Batches, str]:
    """What is kept here, and the client as an owner. Raises NotFoundError if nothing is."""
    here: Batches | None = request.app.state.batches
    if here is None:
        raise NotFoundError("files and batches are disabled: start the server with --batch-dir DIR")
    return here, await here.owners.of(client_of(request.scope))


async def _upload(request: Request) -> Response:
    here, owner = await _owned(request)
    stored = await here.upload(owner, request.headers.get("content-type", ""), request.stream())
    return JSONResponse(stored.described())


async def _files(
    request: Request,
    purpose: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    after: str | None = None,
) -> Response:
    here, owner = await _owned(request)
    return listed([one.described() for one in here.files(owner, purpose)], limit, after)


async def _file(request: Request, file_id: str) -> Response:
    here, owner = await _owned(request)
    return JSONResponse(here.file(owner, file_id).described())


async def _file_content(request: Request, file_id: str) -> Response:
    here, owner = await _owned(request)
    return FileResponse(here.path(owner, file_id), media_type="application/octet-stream")


async def _delete_file(request: Request, file_id: str) -> Response:
    here, owner = await _owned(request)
    here.delete_file(owner, file_id)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


async def _create_batch(body: BatchBody, request: Request) -> Response:
    here, owner = await _owned(request)
    expires_s = None if body.output_expires_after is None else body.output_expires_after.seconds
    made = await here.add_batch(
        owner, body.input_file_id, body.endpoint, body.completion_window, body.metadata, expires_s
    )
    return JSONResponse(made.described())


async def _list_batches(
    request: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
) -> Response:
    here, owner = await _owned(request)
    return listed([one.described() for one in here.batches(owner)], limit, after)


async def _batch(request: Request, batch_id: str) -> Response:
    here, owner = await _owned(request)
    return JSONResponse(here.batch(owner, batch_id).described())


async def _delete_batch(request: Request, batch_id: str) -> Response:
    here, owner = await _owned(request)
    here.delete_batch(owner, batch_id)
    return JSONResponse({"id": batch_id, "object": "batch", "deleted": True})


async def _cancel_batch(request: Request, batch_id: str) -> Response:
    here, owner = await _owned(request)
    return JSONResponse((await here.cancel(owner, batch_id)).described())


_BATCH = {"input_file_id": "file-0", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
_ONE_FILE, _ONE_BATCH = "/v1/files/{file_id}", "/v1/batches/{batch_id}"
_BY_PAGES = "the newest first, by `limit` and `after`"
BATCHES = (
    Endpoint(
        "POST", "/v1/files", _upload, "Keep a file of requests: a form with the fields `file` and `purpose`",
        "File", is_upload=True,
    ),
    Endpoint("GET", "/v1/files", _files, f"List the client's files, {_BY_PAGES}", "FileList"),
    Endpoint("GET", _ONE_FILE, _file, "Describe a file", "File"),
    Endpoint(
        "GET", f"{_ONE_FILE}/content", _file_content, "Return a file's contents", "application/octet-stream"
    ),
    Endpoint("DELETE", _ONE_FILE, _delete_file, "Remove a file", "Deleted"),
    Endpoint("POST", "/v1/batches", _create_batch, "Queue a batch", "Batch", "", BatchBody, _BATCH),
    Endpoint("GET", "/v1/batches", _list_batches, f"List the client's batches, {_BY_PAGES}", "BatchList"),
    Endpoint("GET", _ONE_BATCH, _batch, "Describe a batch", "Batch"),
    Endpoint("DELETE", _ONE_BATCH, _delete_batch, "Forget a batch that has ended", "Deleted"),
    Endpoint(
        "POST", f"{_ONE_BATCH}/cancel", _cancel_batch, "Cancel a batch, but finish its running requests",
        "Batch",
    ),
)  # fmt: skip
