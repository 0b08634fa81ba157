"""The routes of /v1/files and /v1/batches, in OpenAI's form."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import FastAPI, Query, Request
from pydantic import Field
from starlette.responses import FileResponse, JSONResponse, Response

from kukri.server.access import client_of
from kukri.server.body import Body
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


def add_batch_routes(app: FastAPI, batches: Batches | None) -> None:
    """Adds the routes; without `batches` each says that nothing is kept here."""

    def kept() -> Batches:
        if batches is None:
            raise NotFoundError("this server keeps no files and batches: kukri serve --batch-dir DIR does")
        return batches

    async def owner(here: Batches, request: Request) -> str:
        return await here.owners.of(client_of(request.scope))

    @app.post("/v1/files", response_class=JSONResponse)
    async def upload(request: Request) -> Response:
        """Keeps a file of requests: a form with the fields file and purpose."""
        here = kept()
        content_type = request.headers.get("content-type", "")
        stored = await here.upload(await owner(here, request), content_type, request.stream())
        return JSONResponse(stored.described())

    @app.get("/v1/files")
    async def files(
        request: Request,
        purpose: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        after: str | None = None,
    ) -> JSONResponse:
        """Lists the client's files, the newest first, by `limit` and `after`."""
        found = (here := kept()).files(await owner(here, request), purpose)
        return listed([one.described() for one in found], limit, after)

    @app.get("/v1/files/{file_id}")
    async def file(request: Request, file_id: str) -> JSONResponse:
        """Describes a file."""
        return JSONResponse((here := kept()).file(await owner(here, request), file_id).described())

    @app.get("/v1/files/{file_id}/content", response_class=Response)
    async def file_content(request: Request, file_id: str) -> Response:
        """The contents of a file."""
        path = (here := kept()).path(await owner(here, request), file_id)
        return FileResponse(path, media_type="application/octet-stream")

    @app.delete("/v1/files/{file_id}")
    async def delete_file(request: Request, file_id: str) -> JSONResponse:
        """Removes a file."""
        (here := kept()).delete_file(await owner(here, request), file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    @app.post("/v1/batches")
    async def create_batch(body: BatchBody, request: Request) -> JSONResponse:
        """Queues a batch."""
        here = kept()
        made = await here.add_batch(
            await owner(here, request),
            body.input_file_id,
            body.endpoint,
            body.completion_window,
            body.metadata,
            None if body.output_expires_after is None else body.output_expires_after.seconds,
        )
        return JSONResponse(made.described())

    @app.get("/v1/batches")
    async def list_batches(
        request: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
    ) -> JSONResponse:
        """Lists the client's batches, the newest first, by `limit` and `after`."""
        found = (here := kept()).batches(await owner(here, request))
        return listed([one.described() for one in found], limit, after)

    @app.get("/v1/batches/{batch_id}")
    async def batch(request: Request, batch_id: str) -> JSONResponse:
        """Describes a batch."""
        return JSONResponse((here := kept()).batch(await owner(here, request), batch_id).described())

    @app.delete("/v1/batches/{batch_id}")
    async def delete_batch(request: Request, batch_id: str) -> JSONResponse:
        """Forgets a batch that has ended."""
        (here := kept()).delete_batch(await owner(here, request), batch_id)
        return JSONResponse({"id": batch_id, "object": "batch", "deleted": True})

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(request: Request, batch_id: str) -> JSONResponse:
        """Cancels a batch: requests that run are finished."""
        return JSONResponse((await (here := kept()).cancel(await owner(here, request), batch_id)).described())
