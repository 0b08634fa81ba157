"""Requests made up from the served OpenAPI document: the server answers as it says, whatever is sent."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from kukri import LLM
from tests.lazy_imports import lazy_imports
from tests.server.live_server import MODEL, Served, serving

with lazy_imports():
    import schemathesis

HANG_S = 20.0  # nothing that fits into the little context takes as long
GENERATED = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages"),
    *(
        "/completion",
        "/infill",
        "/v1/rerank",
        "/v2/rerank",
        "/v1/score",
        "/classify",
        "/pooling",
        "/v1/answers",
        "/v1/decide",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
        "/embedding",
    ),
)
BODIES = (
    *("/v1/messages/count_tokens", "/v1/chat/completions/input_tokens", "/v1/responses/input_tokens"),
    *("/tokenize", "/detokenize", "/apply-template"),
    *("/api/show", "/api/pull", "/api/delete", "/api/create", "/api/copy"),
    *("/v1/batches", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/activations"),
    *("/v1/activation/single", "/v1/activation/all", "/v1/activation/topk-by-token"),
    *("/v1/util/sae-topk-by-decoder-cossim", "/v1/steer/completion", "/v1/steer/completion-chat"),
    *("/generate-graph", "/steer", "/forward-pass"),
)
GETS = (
    *("/v1/models", "/v1/models/{name}", "/health", "/ready", "/metrics"),
    *("/api/tags", "/api/ps", "/api/version", "/props", "/slots", "/version", "/check-busy"),
    "/tokenizer_info",
    *("/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content"),
    *("/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel"),
    *("/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items"),
)


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
# (path, mode): a request without fields has no wrong form, and any text is a name
CASES = [
    *((path, mode) for path in (*GENERATED, *BODIES) for mode in (POSITIVE, NEGATIVE)),
    *((path, POSITIVE) for path in GETS),
]


@pytest.mark.full
def test_every_route_is_fuzzed(little):
    """Catches a route that was added and that nobody sends nonsense to."""
    assert {path for path, _ in CASES} == described(little.url)[0]["paths"].keys()


@pytest.mark.representative(3)  # the first of a process prepares schemathesis
@pytest.mark.parametrize(("path", "mode"), CASES)
def test_made_up_requests_get_answers(little, path, mode):
    """Catches a 5xx, a hang, and an answer that the document does not announce."""
    fuzz(little, path, mode, 6 if path in GENERATED else 3)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "mode"), CASES)
def test_many_made_up_requests_get_answers(little, path, mode):
    """The same for longer."""
    fuzz(little, path, mode, 400)
