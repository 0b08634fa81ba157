"""/v1/embeddings by the real `openai` client: transformers' vectors, next to requests that generate."""

from __future__ import annotations

import base64
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest

from kukri import LLM
from tests.lazy_imports import lazy_imports
from tests.server.bodies import check_embeddings, check_error
from tests.server.live_server import MODEL, OTHER_NAME, serving
from tests.tasks.test_tasks import TEXT, TOLERANCES, make

with lazy_imports():
    import openai
    import torch
    import transformers as tr

TEXTS = [TEXT, "a", "The capital of France is Paris. " * 9]


def test_vectors_are_those_of_transformers(tmp_path: Path):
    """Catches pads or neighbours in a mean, bytes of base64 in another order, and vectors of other texts."""
    model = make(tmp_path, "llama", "ForCausalLM", max_position_embeddings=512)
    tokenizer = tr.AutoTokenizer.from_pretrained(tmp_path)
    wanted = []
    for text in TEXTS:
        with torch.no_grad():
            hidden = model.model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        wanted.append(torch.nn.functional.normalize(hidden.mean(0), dim=0).numpy())
    with LLM(tmp_path, n_threads=1) as llm, serving(llm) as server:
        create = server.client.embeddings.create
        for encoding in ("float", "base64"):
            found = create(model=MODEL, input=TEXTS, encoding_format=encoding)
            assert [one.index for one in found.data] == [0, 1, 2]
            rows = [one.embedding for one in found.data]
            if encoding == "base64":
                rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in rows]
            np.testing.assert_allclose(rows, wanted, atol=TOLERANCES["cpu"], rtol=0)
        assert found.usage.prompt_tokens == sum(len(tokenizer(text).input_ids) for text in TEXTS)


@pytest.mark.representative(2)
def test_every_form_of_input_gives_the_models_vectors(served, offline):
    """Catches token ids taken for texts, lists that lose their order, and a pooling that is not heard."""
    wanted = offline.embed(TEXTS)
    ids = [offline.tokenizer.encode(text, add_special=True) for text in TEXTS]
    create = served.client.embeddings.create
    for given, rows in ((TEXTS, wanted), (ids, wanted), (TEXT, wanted[:1]), (ids[0], wanted[:1])):
        own = {"allow_token_ids": given in (ids, ids[0])}
        found = create(model=MODEL, input=given, extra_body=own)  # in base64, which the client asks for
        np.testing.assert_array_equal(np.array([one.embedding for one in found.data], np.float32), rows)
    more = {"pooling": "last", "normalize": False}
    raw = create(model=OTHER_NAME, input=TEXT, dimensions=wanted.shape[1], user="u", extra_body=more)
    np.testing.assert_array_equal(
        np.array(raw.data[0].embedding, np.float32), offline.embed(TEXT, pooling="last", normalize=False)
    )
    assert raw.model == OTHER_NAME
    with served.http() as http:
        for encoding in ("float", "base64"):
            body = {"model": MODEL, "input": TEXTS, "encoding_format": encoding}
            check_embeddings(http.post("/v1/embeddings", json=body).json())


@pytest.mark.full
def test_streams_continue_beside_many_texts(served, offline):
    """Catches an answer that embeddings change, and one that stands still until they are done."""
    options = {"temperature": 0, "max_tokens": 100}
    expected = offline.generate("1, 2, 3,", ignore_eos=True, **options).text
    create = served.client.completions.create
    texts = [f"{i} {TEXT} " * 2 for i in range(16)]
    n_steps, found = [], []

    def embed() -> None:
        n_steps.append(served.served.bridge.loop.status().n_steps)
        found.append(served.client.embeddings.create(model=MODEL, input=texts))
        n_steps.append(served.served.bridge.loop.status().n_steps)

    thread = threading.Thread(target=embed)
    more = {"ignore_eos": True}
    stream = create(model=MODEL, prompt="1, 2, 3,", stream=True, extra_body=more, **options)
    text = next(iter(stream)).choices[0].text
    thread.start()
    text += "".join(chunk.choices[0].text for chunk in stream)
    thread.join()
    assert text == expected
    np.testing.assert_array_equal(
        np.array([one.embedding for one in found[0].data], np.float32), offline.embed(texts)
    )
    assert n_steps[1] - n_steps[0] > 8, "the stream waited for the texts"


def test_who_leaves_ends_the_work(served):
    """Catches texts that are embedded for nobody."""
    loop = served.served.bridge.loop
    with served.http() as http, pytest.raises(httpx.ReadTimeout):
        http.post(
            "/v1/embeddings", json={"model": MODEL, "input": [TEXT * 30 for _ in range(300)]}, timeout=0.3
        )
    served.wait_until(lambda: loop.status().n_waiting == 0, 5)


def test_llama_cpps_forms_of_input_give_the_same_vectors(served, offline):
    """Catches texts among ids, or objects, that are refused or encoded as something else."""
    first, second = offline.tokenizer.encode("a cat"), offline.tokenizer.encode(" sits")
    wanted = offline.embed(["a cat sits"])[0]
    parts = {"content": [{"type": "text", "text": "a cat"}, {"type": "text", "text": " sits"}]}
    forms = [[*first, " sits"], ["a cat", *second], {"prompt_string": "a cat sits"}, parts]
    with served.http() as http:
        for form in (*forms, [*forms, "a cat sits"]):
            rows = http.post("/v1/embeddings", json={"model": MODEL, "input": form}).json()["data"]
            assert len(rows) == (len(forms) + 1 if form not in forms else 1)
            for row in rows:
                np.testing.assert_array_equal(np.array(row["embedding"], np.float32), wanted)
        for path, field in (
            ("/embedding", "input"),
            ("/embeddings", "content"),
            ("/v1/embeddings", "content"),
        ):
            (row,) = http.post(path, json={field: "a cat sits"}).json()
            np.testing.assert_array_equal(np.array(row["embedding"][0], np.float32), wanted)
            assert row["index"] == 0
        raw = http.post("/embedding", json={"content": "a cat sits", "embd_normalize": -1}).json()
    plain = offline.embed(["a cat sits"], normalize=False)[0]
    np.testing.assert_array_equal(np.array(raw[0]["embedding"][0], np.float32), plain)


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"dimensions": 64}, "dimensions", "'dimensions' must be 576"),
        ({"input": ""}, "input", "'input' must not be empty"),
        ({"input": ["a", ""]}, "input[1]", "'input[1]' must not be empty"),
        ({"input": []}, "input", ""),
        ({"input": [[]]}, "input[0]", "at least 1 entries"),
        ({"input": ["a", 1.5]}, "input[1]", "must be a text"),
        ({"input": None}, "input", "'input' is required"),
        ({"content": "b"}, "content", "give one"),
        ({"input": {"content": [{"type": "image_url"}]}}, "input.content[0].type", ""),
        ({"input": ["a"] * 2049}, "input", ""),
        ({"input": [49152], "allow_token_ids": True}, "input", "must be from 0 to"),
        ({"input": [[1], [-1]], "allow_token_ids": True}, "input", "must be from 0 to"),
        ({"input": [2**70]}, "input[0]", "must be at most 2147483647"),
        ({"input": ["a", "a " * 1100]}, "input", "the context holds 1024"),
        ({"encoding_format": "int8"}, "encoding_format", ""),
        ({"pooling": "max"}, "pooling", ""),
        ({"truncated": True}, "truncated", "is not supported"),
    ],
)
def test_what_is_wrong_is_named(served, changes, param, message):
    """Catches a 500, and a field that is taken and not heard."""
    with served.http() as http:
        response = http.post("/v1/embeddings", json={"model": MODEL, "input": "a"} | changes)
        assert message in check_error(response, 400, param)
        assert http.post("/v1/embeddings", json={"model": "gpt-9", "input": "a"}).status_code == 404


@pytest.mark.full
def test_langchains_ids_of_another_tokenizer_are_refused(served, offline, monkeypatch):
    """Catches LangChain's OpenAIEmbeddings, whose ids are OpenAI's, and vectors of nonsense."""
    tiktoken = pytest.importorskip("tiktoken")
    from langchain_openai import OpenAIEmbeddings

    letters = {bytes([i]): i for i in range(256)}  # OpenAI's own vocabulary would be downloaded
    encoding = tiktoken.Encoding("bytes", pat_str=r"\S+|\s+", mergeable_ranks=letters, special_tokens={})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda _: encoding)
    options = {"model": MODEL, "base_url": f"{served.url}/v1", "api_key": "none", "max_retries": 0}
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False") as caught:
        OpenAIEmbeddings(**options).embed_query(TEXT)
    assert caught.value.param == "input"
    vector = OpenAIEmbeddings(**options, check_embedding_ctx_length=False).embed_query(TEXT)
    np.testing.assert_allclose(vector, offline.embed([TEXT])[0], atol=1e-6)


def test_token_ids_are_taken_where_they_are_allowed(served, offline):
    """Catches ids of a tokenizer that nobody vouches for, and an option that is not heard."""
    ids = offline.tokenizer.encode("a cat", add_special=True)
    with served.http() as http:
        for given in (ids, [ids], ["a", ids]):
            refused = http.post("/v1/embeddings", json={"model": MODEL, "input": given})
            assert "check_embedding_ctx_length" in check_error(refused, 400, "input")
        own = http.post("/v1/embeddings", json={"model": MODEL, "input": ids, "allow_token_ids": True}).json()
    with serving(offline, allows_token_ids=True) as other, other.http() as http:
        answer = http.post("/v1/embeddings", json={"model": MODEL, "input": ids}).json()
    assert answer["data"] == own["data"]
    np.testing.assert_array_equal(np.float32(own["data"][0]["embedding"]), offline.embed(["a cat"])[0])


def test_numbers_that_json_has_not_are_an_error(served, monkeypatch):
    """Catches a body with NaN in it, which clients cannot read."""

    async def compute(requests):
        for request in requests:
            request.answer.rows = np.full(576, np.nan, np.float32)

    monkeypatch.setattr(served.served.bridge, "compute", compute)
    with served.http() as http:
        response = http.post("/v1/embeddings", json={"model": MODEL, "input": "a"})
        assert "have NaN or infinity" in check_error(response, 500)


@pytest.mark.full
def test_a_deadline_ends_it(smollm2_path):
    """Catches an embedding that takes as long as it likes where answers may not."""
    with LLM(smollm2_path, max_context=512) as llm, serving(llm, deadline_s=0.2) as server:
        with server.http() as http:
            body = {"model": MODEL, "input": [TEXT * 10 for _ in range(400)]}
            message = check_error(http.post("/v1/embeddings", json=body), 503)
        assert message == "the answer was not finished within 0.2 s"
        server.wait_until(lambda: server.served.bridge.loop.status().n_waiting == 0, 5)
