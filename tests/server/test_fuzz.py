"""Requests made up from the served OpenAPI document: the server answers as it says, whatever is sent."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from kukri import LLM
from kukri.server.app import APIS
from tests.lazy_imports import lazy_imports
from tests.server.live_server import MODEL, Served, serving

with lazy_imports():
    import schemathesis

HANG_S = 20.0  # nothing that fits into the little context takes as long
ROWS = [row for api in APIS for row in api.endpoints if row.summary]
STREAMED = {row.shown_path for row in ROWS if row.chunk}  # which get more requests


@pytest.fixture(scope="module")
def little(tiny_path, tmp_path_factory) -> Iterator[Served]:
    """A server of a tiny model, with a context so short that every answer ends soon."""
    kept = tmp_path_factory.mktemp("batches")
    with (
        LLM(tiny_path, max_context=96, max_requests=8) as llm,
        serving(llm, max_waiting=32, batch_dir=kept, has_interp=True) as server,
    ):
        yield server


@cache
def described(url: str) -> tuple[Any, Any]:
    """The OpenAPI document of a server, and what schemathesis makes of it."""
    document = httpx.get(f"{url}/openapi.json", timeout=60).json()
    return document, schemathesis.openapi.from_dict(document)


def fuzz(server: Served, path: str, mode: str, n_examples: int) -> None:
    """Sends what schemathesis makes of a path; where a model is named, it is the one that is served."""
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    is_announced = [status_code_conformance, content_type_conformance, response_schema_conformance]
    document, schema = described(server.url)
    for method, operation in document["paths"][path].items():
        if mode == NEGATIVE and "requestBody" not in operation:
            continue  # nothing about it can be wrong
        strategy = schema[path][method].as_strategy(generation_mode=schemathesis.GenerationMode(mode))

        @settings(
            max_examples=n_examples,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=strategy)
        def send(case) -> None:
            for name in ("model", "model_id"):
                if isinstance(case.body, dict) and isinstance(case.body.get(name), str):
                    case.body[name] = MODEL
            response = case.call(base_url=server.url, timeout=HANG_S)
            case.validate_response(response, checks=[not_a_server_error, *is_announced])

        send()
    with server.http() as http:
        assert http.get("/health").json() == {"status": "ok"}
    server.wait_until(lambda: server.pages_used() == 0)


POSITIVE, NEGATIVE = (
    "positive",
    "negative",
)  # modes of schemathesis: requests of the right form, and wrong ones
# (path, mode): a request without a body has no wrong form, and any text is a name
CASES = [
    *dict.fromkeys((row.shown_path, POSITIVE) for row in ROWS),
    *((row.shown_path, NEGATIVE) for row in ROWS if row.body or row.form),
]


@pytest.mark.representative(3)  # the first of a process prepares schemathesis
@pytest.mark.parametrize(("path", "mode"), CASES)
def test_made_up_requests_get_answers(little, path, mode):
    """Catches a 5xx, a hang, and an answer that the document does not announce."""
    fuzz(little, path, mode, 6 if path in STREAMED else 3)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "mode"), CASES)
def test_many_made_up_requests_get_answers(little, path, mode):
    """The same for longer."""
    fuzz(little, path, mode, 400)
