"""A client that openapi-python-client makes from the document, as users of other languages make theirs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kukri import LLM
from kukri.server.app import APIS
from tests.server.live_server import MODEL, Served, serving
from tests.tiny_gguf import write_tiny

pytestmark = pytest.mark.slow
MAKE = "from openapi_python_client.cli import app; app()"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with LLM(write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf")) as llm, serving(llm) as made:
        yield made


@pytest.fixture(scope="module")
def made(server: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The generated package `made_client`."""
    pytest.importorskip("openapi_python_client")
    folder: Path = tmp_path_factory.mktemp("client")
    with server.http() as http:
        (folder / "document.json").write_bytes(http.get("/openapi.json").content)
    (folder / "options.yml").write_text("post_hooks: []")
    given = ["--path=document.json", "--meta=none", "--output-path=made_client", "--config=options.yml"]
    command = [sys.executable, "-c", MAKE, "generate", *given]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    left_out = [line for line in said.splitlines() if line.startswith(("WARNING", "ERROR"))]
    assert left_out == ["WARNING parsing POST /v1/activations within open_ai."]  # whose answer is no JSON
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield import_module("made_client")


def part(name: str) -> Any:
    return import_module(f"made_client.{name}")


def test_a_generated_client_has_every_operation(made: Any) -> None:
    """Catches an endpoint that a generator leaves out, as it cannot read its body or its answer."""
    rows = [row for api in APIS for row in api.endpoints if row.summary]
    folder = Path(made.__file__).parent / "api"
    found = [path for path in folder.rglob("*.py") if path.stem.split("_")[0] in ("get", "post", "delete")]
    assert len(found) == len(rows)


def test_a_generated_client_chats_streams_embeds_and_fails(server: Served, made: Any) -> None:
    """Catches a form of the document that answers do not have, or that a generator understands otherwise."""
    client, models = made.Client(base_url=server.url), part("models")
    chats = part("api.open_ai.post_v1_chat_completions")
    answer = chats.sync(client=client, body=models.ChatBody.from_dict(CHAT))
    assert isinstance(answer, models.ChatCompletion)
    text, usage = answer.choices[0].message.content, answer.usage
    assert (usage.completion_tokens, answer.choices[0].finish_reason) == (4, "length")

    asked = chats._get_kwargs(body=models.ChatBody.from_dict({**CHAT, "stream": True}))
    with client.get_httpx_client().stream(**asked) as response:
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    chunks = [models.ChatCompletionChunk.from_dict(json.loads(one)) for one in data]
    pieces = [choice.delta.content for chunk in chunks for choice in chunk.choices]
    assert "".join(piece for piece in pieces if isinstance(piece, str)) == text

    body = models.EmbeddingBody.from_dict({"model": MODEL, "input": ["a", "b"]})
    vectors = part("api.open_ai.post_v1_embeddings").sync(client=client, body=body)
    assert [len(one.embedding) for one in vectors.data] == [server.served.llm.config.d_model] * 2

    wrong = chats.sync(client=client, body=models.ChatBody.from_dict({**CHAT, "temperature": -1}))
    assert isinstance(wrong, models.ErrorBody)
    assert wrong.error.param == "temperature"
