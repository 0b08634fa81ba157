"""Lists in pages, as OpenAI's endpoints give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse

from kukri.server.errors import NotFoundError


def listed(found: Sequence[dict[str, Any]], limit: int, after: str | None) -> JSONResponse:
    """A page of objects that have ids. Raises NotFoundError if none of them has the id `after`."""
    ids = [one["id"] for one in found]
    if after is not None and after not in ids:
        raise NotFoundError(f"{after[:100]!r} was not found in this list", param="after")
    start = 0 if after is None else ids.index(after) + 1
    data = found[start : start + limit]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return JSONResponse({"object": "list", "data": data, "has_more": start + limit < len(found), **ends})
