"""Responses that `previous_response_id` continues: kept in memory, the oldest forgotten first."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from kukri.errors import RequestError
from kukri.server.errors import NotFoundError

MAX_BYTES = 64 << 20  # all responses together, as JSON
_MAX_CONVERSATION = 8 << 20  # bytes of the responses that one continues


@dataclass(frozen=True)
class StoredResponse:
    """A response. `items` are its own input and output; those before it are its `previous`'."""

    owner: str
    previous: str | None
    items: list[dict[str, Any]]
    n_input: int  # items of the input
    response: dict[str, Any]
    n_bytes: int


class ResponseStore:
    """The responses of all clients, each seen only by its owner. Belongs to the event loop."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes, self._n_bytes = max_bytes, 0
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()  # those used last at the end

    def add(
        self,
        owner: str,
        previous: str | None,
        given: list[dict[str, Any]],
        response: dict[str, Any],
    ) -> None:
        """Keeps a response with its own input `given`; forgets others, or none of it if it is too large."""
        items = [*given, *response["output"]]
        n_bytes = len(json.dumps(items)) + len(json.dumps(response))
        if n_bytes > self._max_bytes // 4:
            return
        stored = StoredResponse(owner, previous, items, len(given), response, n_bytes)
        self._stored[response["id"]] = stored
        self._n_bytes += n_bytes
        while self._n_bytes > self._max_bytes:
            self._n_bytes -= self._stored.popitem(last=False)[1].n_bytes

    def find(self, owner: str, response_id: str) -> StoredResponse:
        """A response. Raises NotFoundError if the owner has none of that id."""
        stored = self._stored.get(response_id)
        if stored is None or stored.owner != owner:
            raise NotFoundError(f"there is no response {response_id[:100]!r} here", code="response_not_found")
        return stored

    def forget(self, owner: str, response_id: str) -> None:
        """Removes a response. Raises NotFoundError."""
        self._n_bytes -= self.find(owner, response_id).n_bytes
        del self._stored[response_id]

    def items_before(self, owner: str, previous: str | None) -> list[dict[str, Any]]:
        """The items of a conversation up to a response, which counts as used. Raises RequestError."""
        chain: list[StoredResponse] = []
        one, n_bytes = previous, 0
        while one is not None:
            try:
                chain.append(self.find(owner, one))
            except NotFoundError:
                raise RequestError(
                    f"there is no response {one[:100]!r} here any more: send its items as input",
                    param="previous_response_id",
                    code="previous_response_not_found",
                ) from None
            self._stored.move_to_end(one)
            one, n_bytes = chain[-1].previous, n_bytes + chain[-1].n_bytes
            if n_bytes > _MAX_CONVERSATION:
                raise RequestError(
                    f"the conversation is larger than {_MAX_CONVERSATION} bytes: begin another",
                    param="previous_response_id",
                )
        return [item for stored in reversed(chain) for item in stored.items]

    def items_by_id(self, owner: str, wanted: set[str]) -> dict[str, dict[str, Any]]:
        """The items of an owner's responses that have these ids."""
        return {
            item["id"]: item
            for stored in self._stored.values()
            if stored.owner == owner
            for item in stored.items
            if item.get("id") in wanted
        }
