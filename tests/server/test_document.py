"""The OpenAPI document: it describes every answer, and answers are what it describes."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from kukri.server.app import APIS, create_app
from kukri.server.settings import ServerSettings
from kukri.server.state.openapi import document_of
from tests.server.answer_forms import all_forms, check, check_chunks, row_of
from tests.server.bodies import check_error

NO_BODY = {"/api/copy", "/api/delete"}  # whose answers are empty
ROWS = [(api, row) for api in APIS for row in api.endpoints if row.summary]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """The document of a server that has keys."""
    return document_of(create_app(None, ServerSettings(api_keys=("secret scope=manage",))), APIS)


@pytest.mark.representative(3)
def test_every_operation_is_described(document):
    """Catches an endpoint whose answer, errors, key or tag a generated client does not know."""
    names, faults = [], []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            names.append(operation["operationId"])
            content = operation["responses"]["200"].get("content", {})
            if not all(kind.get("schema") or "json" not in name for name, kind in content.items()):
                faults.append(f"{method} {path}: a form of an answer is missing")
            if bool(content) == (path in NO_BODY):
                faults.append(f"{method} {path}: content is {content}")
            if not (operation["tags"] and operation["summary"] and operation["responses"]["400"]["content"]):
                faults.append(f"{method} {path}: no tag, summary or error")
            if bool(operation.get("security")) == (path in ("/health", "/ready")):
                faults.append(f"{method} {path}: security is {operation.get('security')}")
    assert not faults, "\n".join(faults)
    assert len(set(names)) == len(names) > 60
    schemas = document["components"]["schemas"]
    missing = set(re.findall(r'"#/components/schemas/([\w-]+)"', json.dumps(document))) - schemas.keys()
    assert not missing
    assert not [name for name in schemas if "__" in name], "two classes of one name, which generators refuse"
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    scopes = document["paths"]["/v1/activations"]["post"]["security"]
    assert scopes == [{"bearer": ["interp"]}, {"x-api-key": ["interp"]}]
    assert document["paths"]["/v1/messages"]["post"]["responses"]["400"] == {
        "description": "The request is wrong",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/MessageErrorBody"}}},
    }


def test_every_body_has_an_example_of_its_form(document):
    """Catches an example that the server would refuse."""
    faults = []
    for _, row in ROWS:
        if row.body is None:
            continue
        operation = document["paths"][row.shown_path][row.method.lower()]
        content = operation["requestBody"]["content"]["application/json"]
        validator = jsonschema.Draft202012Validator(
            {**content["schema"], "components": document["components"]}
        )
        faults += [
            f"{row.path}: {error.message[:200]}" for error in validator.iter_errors(content.get("example"))
        ]
    assert not faults, "\n".join(faults)


def test_every_form_is_of_an_answer():
    """Catches a form that no endpoint has any more, and a name that two APIs give to two forms."""
    text = json.dumps(all_forms()) + " ".join(
        f'/{name}"' for api, row in ROWS for name in (row.answer, row.chunk, api.error_form)
    )
    unused = [name for name in all_forms() if f'/{name}"' not in text]
    assert not unused


def test_a_wrong_form_is_found():
    """Catches a check that lets every answer pass."""
    found = row_of("GET", "/v1/models/a/b")
    assert found is not None
    assert found[1].answer == "Model"
    check("InputTokens", {"object": "o", "input_tokens": 1})
    for wrong in (
        {"object": "o"},
        {"object": "o", "input_tokens": "1"},
        {"object": "", "input_tokens": 1, "x": 1},
    ):
        with pytest.raises(AssertionError, match="InputTokens"):
            check("InputTokens", wrong)


@pytest.mark.full(but=["/v1/chat/completions"])
@pytest.mark.parametrize(
    "path",
    [row.path for _, row in ROWS if row.chunk and row.body and not row.permission and row.path != "/infill"],
)
def test_streams_have_the_form_of_their_chunks(served, path):
    """Catches an event or a line that the document does not describe."""
    _, row = row_of("POST", path)
    more = {} if path in ("/v1/messages", "/api/chat", "/api/generate") else {"timings_per_token": True}
    more |= {
        "/v1/chat/completions": {"logprobs": True, "top_logprobs": 2, "return_token_ids": True},
        "/v1/completions": {"logprobs": 2, "stream_options": {"include_usage": True}},
        "/completion": {"n_probs": 2},
    }.get(path, {})
    with served.http() as http:
        body = {**row.example, "model": "smol", "stream": True, **more}
        with http.stream("POST", path, json=body) as response:
            text = response.read().decode()
    assert response.status_code == 200
    assert check_chunks("POST", path, text) > 2


ASKED = [
    row.path
    for api, row in ROWS
    if row.example
    and not row.permission
    and row.path not in ("/classify", "/v1/answers", "/v1/batches", "/api/show", "/pooling", "/infill")
]  # the others are for models of other kinds, and are tested with them


@pytest.mark.full(but=["/v1/chat/completions", "/v1/messages", "/tokenize"])
@pytest.mark.parametrize("path", ASKED)
def test_examples_get_answers(served, path):
    """Catches an example that is refused, or an answer of another form, which the client of tests checks."""
    _, row = row_of("POST", path)
    with served.http() as http:
        response = http.post(path, json={**row.example, "model": "smol"})
    assert response.status_code == 200, response.text


def test_an_error_has_the_form_of_its_api(served):
    """Catches an API whose errors the document describes as another's."""
    with served.http() as http:
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
            response = http.post(path, json={"model": "nothing", "messages": [], "max_tokens": 1})
            assert response.status_code in (400, 404)
        check_error(http.post("/v1/chat/completions", json={}), 400)
