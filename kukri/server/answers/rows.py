"""Rows that a model outputs for requests, answers of them, and work that ends when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from time import time
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from kukri.engine import Request as EngineRequest
from kukri.errors import KukriError
from kukri.kernels.arrays import FloatArray
from kukri.server.access import client_of
from kukri.server.answers.reply import disconnected
from kukri.server.errors import DeadlineError
from kukri.server.models.served_model import ServedModel

T = TypeVar("T")


class _Silence(Response):
    """The response to a client that has disconnected."""

    async def __call__(self, *_: Any) -> None:
        """Sends nothing."""


SILENCE = _Silence()


async def while_connected(http: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of the work; None, and the work is cancelled, if the client disconnects before."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(disconnected(http.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watcher.cancel()


async def rows_of(served: ServedModel, requests: Sequence[EngineRequest], scope: Scope) -> list[FloatArray]:
    """The rows of requests, a batch of them after another, so that others find room."""
    for request in requests:
        request.times.trace = scope["kukri.trace"]
    n_tokens = sum(request.n_prompt for request in requests)
    served.metrics.on_prompt(n_tokens)
    client_of(scope).meter.add(n_tokens, 0)
    n = min(served.llm.engine_config.max_requests, served.bridge.loop.max_waiting)
    try:
        async with asyncio.timeout(served.settings.deadline_s):
            for start in range(0, len(requests), n):
                await served.bridge.compute(requests[start : start + n])
    except TimeoutError:
        raise DeadlineError(f"the answer was not finished within {served.settings.deadline_s:g} s") from None
    rows = [request.answer.rows for request in requests if request.answer.rows is not None]
    if not all(np.isfinite(row).all() for row in rows):  # JSON has no such numbers
        raise KukriError("the model's vectors have NaN or infinity: its weights may be damaged")
    return rows


def request_options(
    served: ServedModel,
    scope: Scope,
    model: str | None,
    user: str | None = None,
    adapter: str | None = None,
    priority: int | None = None,
) -> dict[str, Any]:
    """Whose a request is, its priority and its adapter, for `Engine.make_output_request`."""
    client = scope["kukri.client"]
    return {
        "priority": client.priority(priority),
        "client": client.queue(user),
        "prefix_scope": client.prefix_scope,
        "adapter": served.adapter_of(model, adapter),
    }


def listed_answer(
    served: ServedModel, model: str | None, scope: Scope, data: list[dict[str, Any]], n_tokens: int
) -> dict[str, Any]:
    """The answer of `data` about texts of `n_tokens` tokens, which the log states too."""
    scope["kukri.log"].update(n_prompt_tokens=n_tokens)
    return {
        "id": scope["kukri.id"],
        "object": "list",
        "created": int(time()),
        "model": served.check_model(model),
        "data": data,
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens, "completion_tokens": 0},
    }
