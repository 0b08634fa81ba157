"""What models are for: /v1/models and /api/show say it, and other requests are refused in one sentence."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from kukri.opening.model_options import ModelOptions
from kukri.server.settings import ModelSpec
from tests.models.tiny_encoders import save
from tests.server.live_server import CHAT, RESPONSE, TEXT, serving
from tests.tiny_gguf import write_tiny

MESSAGES = [{"role": "user", "content": "Hi"}]
TEMPLATE = "{% for m in messages %}{{ m.role }}: <think>{{ m.content }}</think>{% endfor %}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[ModelSpec]:
    """An encoder, the same with a head that ranks, and a language model, by names of their own."""
    folder: Path = tmp_path_factory.mktemp("models")
    save(folder / "vectors", "bert")
    save(folder / "ranks", "bert", "ForSequenceClassification", num_labels=1)
    write_tiny(folder / "chat.gguf", tokenizer__chat_template=None)
    write_tiny(folder / "pooled.gguf", llama__pooling_type=np.uint32(3), general__file_type=np.uint32(15))
    options = {"n_threads": 1, "max_requests": 2}
    specs = [ModelSpec((path.stem,), ModelOptions(model=str(path), **options)) for path in folder.iterdir()]
    template = ModelOptions(model=str(folder / "chat.gguf"), chat_template=TEMPLATE, **options)
    return [*specs, ModelSpec(("thinks",), template)]


def test_models_say_what_they_are_for(models):
    """Catches embedding models that pickers offer for chats, lists that differ from /api/show."""
    wanted = {
        "vectors": ["embedding"],
        "ranks": ["rerank"],
        "pooled": ["embedding"],
        "chat": ["completion", "embedding"],
        "thinks": ["completion", "embedding", "tools", "thinking"],
    }
    with serving(None, models) as server, server.http() as http:
        listed = {one["id"]: one["capabilities"] for one in http.get("/v1/models").json()["data"]}
        assert listed == wanted
        for name, found in wanted.items():
            assert http.get(f"/v1/models/{name}").json()["capabilities"] == found
            assert http.post("/api/show", json={"model": name}).json()["capabilities"] == found


def test_quantization_is_the_files_mix(models):
    """Catches the type that most bytes have, which is Q6_K in small Q4_K_M files."""
    with serving(None, models) as server, server.http() as http:
        told = {
            one["name"]: one["details"]["quantization_level"]
            for one in http.get("/api/tags").json()["models"]
        }
    assert told == {
        "pooled:latest": "Q4_K_M", "chat:latest": "F32", "thinks:latest": "F32", "vectors:latest": "F32",
        "ranks:latest": "F32",
    }  # fmt: skip


def test_a_model_without_answers_refuses_chats_in_one_true_sentence(models):
    """Catches the advice to send a text, or a template, to a model that could do nothing with either."""
    bodies = {
        CHAT: {"messages": MESSAGES},
        f"{CHAT}/input_tokens": {"messages": MESSAGES},
        TEXT: {"prompt": "Hi"},
        RESPONSE: {"input": "Hi"},
        "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
        "/v1/messages/count_tokens": {"messages": MESSAGES},
        "/v1/decide": {"messages": MESSAGES, "choices": ["a", "b"]},
        "/completion": {"prompt": "Hi"},
        "/apply-template": {"messages": MESSAGES},
        "/tokenize": {"messages": MESSAGES},
        "/api/chat": {"messages": MESSAGES},
        "/api/generate": {"prompt": "Hi"},
    }
    with serving(None, models) as server, server.http() as http:
        for path, body in bodies.items():
            answer = http.post(path, json={"model": "vectors", **body})
            error = answer.json()["error"]
            said = error if isinstance(error, str) else error["message"]
            wanted = "the model makes embeddings and cannot generate: use a language model"
            assert (answer.status_code, said) == (400, wanted), path


def test_the_page_offers_models_that_chat(models):
    """Catches a picker, a library and a first choice with models that make vectors, and a false reason."""
    specs = sorted(models, key=lambda spec: spec.names[0] not in ("vectors", "ranks"))
    with serving(None, specs) as server, server.http() as http:
        shown = http.get("/ui/model").text
        offered = re.findall(r"<option [^>]*>(.*?)</option>", shown)
        assert sorted(offered) == ["chat", "thinks"]
        assert re.search(r'data-model="(.*?)"', shown)[1] == offered[0]
        library = http.get("/ui/library").text.split("To download")[0]
        rows = dict(re.findall(r'<li data-name="(.*?)">(.*?)</li>', library, re.S))
        assert {name for name, row in rows.items() if 'data-do="use"' in row} < {"chat", "thinks"}, "one path"
        marked = {name for name, row in rows.items() if "not for chats" in row}
        assert marked == {"vectors", "ranks", "pooled"}
        refused = http.get("/ui/model", params={"name": "ranks"})
        wanted = "'ranks' is a model for rerank and cannot chat: choose a language model"
        assert (refused.status_code, refused.json()["error"]["message"]) == (404, wanted)
    (alone,) = [spec for spec in specs if spec.names == ("vectors",)]
    with serving(None, [alone]) as server, server.http() as http:
        told = http.get("/ui/model").json()["error"]["message"]
        assert told == "'vectors' is a model for embedding and cannot chat: choose a language model"
