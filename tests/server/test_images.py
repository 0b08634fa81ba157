"""Images by every API, to a tiny model that sees: transformers' own answer, one answer, clear refusals."""

from __future__ import annotations

import asyncio
import base64
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from benchmarks.pictures import HOSTILE, encoded, picture
from kukri import LLM, AsyncLLM
from kukri.errors import RequestError
from kukri.server.chat import image_urls
from kukri.server.chat.image_urls import fetched, is_public
from kukri.server.image_bytes import ImageBytes
from tests.lazy_imports import lazy_imports
from tests.server.bodies import check_error
from tests.server.live_server import serving
from tests.vision.seeing import N_TILE, save_seeing, their_answer

with lazy_imports():
    import anthropic
    import ollama

RED, TALL = picture(40, 50, 1), picture(90, 30, 2)
N = 12  # tokens of an answer
LIKELIEST = {"temperature": 0, "max_tokens": N}
GREEDY = {"temperature": 0}


def b64(image) -> str:
    return base64.b64encode(encoded(image)).decode()


def url(image) -> str:
    return f"data:image/png;base64,{b64(image)}"


def shown(*parts):
    """A content for Python's face."""
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
        for part in parts
    ]


def sent(*parts):
    """The same for OpenAI's chat."""
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url(part)}}
        for part in parts
    ]


def user(content):
    return {"role": "user", "content": content}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("seeing")
    return directory, *save_seeing(directory)


@pytest.fixture(scope="module")
def llm(theirs):
    with LLM(theirs[0], backend="reference", kv_type="f32") as opened:
        yield opened


@pytest.fixture(scope="module")
def served(theirs):
    with (
        LLM(theirs[0], backend="reference", kv_type="f32") as opened,
        serving(opened, any_model=True) as running,
    ):
        yield running


@pytest.mark.parametrize("content", [shown(RED, "What?"), shown("What?", TALL), shown(RED, "and", TALL, "?")])
def test_answers_are_those_of_transformers(content, theirs, llm):
    """Catches an image in a wrong place, cut, scaled or encoded in another way."""
    _, model, processor = theirs
    expected = their_answer(model, processor, [user(content)], N)
    assert llm.chat([user(content)], **LIKELIEST, ignore_eos=True).token_ids == expected


def test_streams_and_asyncio_see_too(theirs, llm):
    """Catches a face of Python that reads texts alone."""
    messages = [user(shown(RED, "What?"))]
    result = llm.chat(messages, **LIKELIEST)
    assert "".join(chunk.text for chunk in llm.stream(messages, **LIKELIEST)) == result.text
    assert result.image_tokens == [5 * N_TILE]
    assert llm.chat([user("What?")], **LIKELIEST).image_tokens == []

    async def ask() -> str:
        async with AsyncLLM(theirs[0], backend="reference", kv_type="f32") as opened:
            return (await opened.chat(messages, **LIKELIEST)).text

    assert asyncio.run(ask()) == result.text


def test_an_earlier_image_stays_in_the_conversation(llm):
    """Catches an image that is seen in the first turn alone."""
    messages = [
        user(shown(RED, "What?")), {"role": "assistant", "content": "A."}, user("Sure?"),
    ]  # fmt: skip
    with_image = llm.chat(messages, **LIKELIEST)
    messages[0] = user(shown(TALL, "What?"))
    assert llm.chat(messages, **LIKELIEST).token_ids != with_image.token_ids
    assert llm.chat(messages, **LIKELIEST, logprobs=0).image_tokens == [3 * N_TILE]


def test_openai_s_clients_send_images(served, llm):
    """Catches a part that OpenAI's package sends and this server reads otherwise."""
    want = llm.chat([user(shown("Is it ", RED, "?"))], **LIKELIEST)
    client = served.client
    answer = client.chat.completions.create(model="m", messages=[user(sent("Is it ", RED, "?"))], **LIKELIEST)
    assert answer.choices[0].message.content == want.text
    details = answer.usage.prompt_tokens_details
    assert details.image_tokens == 5 * N_TILE
    assert details.tokens_per_image == [5 * N_TILE]
    assert answer.usage.prompt_tokens == len(want.prompt_token_ids)
    content = [
        {"type": "input_text", "text": "Is it "},
        {"type": "input_image", "image_url": url(RED), "detail": "auto"},
        {"type": "input_text", "text": "?"},
    ]  # fmt: skip
    response = client.responses.create(model="m", input=[user(content)], temperature=0, max_output_tokens=N)
    assert response.output_text == want.text
    more = client.responses.create(
        model="m", input="Why?", previous_response_id=response.id, temperature=0, max_output_tokens=N
    )
    assert more.usage.input_tokens > len(want.prompt_token_ids)
    few = sent(RED)
    few[0]["image_url"] |= {"detail": "low"}
    answer = client.chat.completions.create(model="m", messages=[user(few)], **LIKELIEST)
    assert answer.usage.prompt_tokens_details.image_tokens == N_TILE


def test_langchain_sends_images(served, llm):
    """Catches a content that LangChain writes in a form of its own."""
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    want = llm.chat([user(shown("Is it ", RED, "?"))], **LIKELIEST)
    model = ChatOpenAI(base_url=f"{served.url}/v1", api_key="none", model="m", temperature=0, max_tokens=N)
    assert model.invoke([HumanMessage(sent("Is it ", RED, "?"))]).content == want.text
    block = {"type": "image", "base64": b64(RED), "mime_type": "image/png"}
    content = [{"type": "text", "text": "Is it "}, block, {"type": "text", "text": "?"}]
    assert model.invoke([HumanMessage(content)]).content == want.text


def test_anthropic_s_client_sends_images(served, llm):
    """Catches an image block, in a message or in a tool's result, that is not seen."""
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64(RED)}}
    content = [{"type": "text", "text": "Is it "}, block, {"type": "text", "text": "?"}]
    want = llm.chat([user(shown("Is it ", RED, "?"))], **LIKELIEST)
    message = client.messages.create(model="m", max_tokens=N, messages=[user(content)], extra_body=GREEDY)
    assert message.content[0].text == want.text
    assert message.usage.image_tokens == 5 * N_TILE
    count = client.messages.count_tokens(model="m", messages=[user(content)])
    assert count.input_tokens == len(want.prompt_token_ids)
    turns = [
        user("Draw"),
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "draw", "input": {}}]},
        user([{"type": "tool_result", "tool_use_id": "t", "content": [block]}]),
    ]
    message = client.messages.create(model="m", max_tokens=N, messages=turns)
    assert message.usage.image_tokens == 5 * N_TILE


def test_ollama_s_client_sends_images(served, llm):
    """Catches images that come next to the text, as Ollama has them, in another place than before it."""
    client = ollama.Client(served.url)
    want = llm.chat([user(shown(RED, TALL, "Well?"))], **LIKELIEST)
    options = {"temperature": 0, "num_predict": N}
    images = [encoded(RED), encoded(TALL)]
    answer = client.chat("m", [{"role": "user", "content": "Well?", "images": images}], options=options)
    assert answer.message.content == want.text
    assert client.generate("m", "Well?", images=images, options=options).response == want.text


def test_llama_cpp_s_clients_send_images(served, llm):
    """Catches an image in another place than its mark, and marks without images."""
    messages = [user(shown("Is it ", RED, "?"))]
    text = llm.chat_template.render([user("Is it MARK?")])
    want = llm.chat(messages, **LIKELIEST)
    body = {"n_predict": N, "temperature": 0}
    marked = {"prompt_string": text.replace("MARK", "<__media__>"), "multimodal_data": [b64(RED)]}
    older = {"prompt": text.replace("MARK", "[img-7]"), "image_data": [{"data": b64(RED), "id": 7}]}
    with served.http() as http:
        for given in ({"prompt": marked}, older):
            answer = http.post("/completion", json={**given, **body}).json()
            assert answer["content"] == want.text
            assert answer["tokens_evaluated"] == len(want.prompt_token_ids)
        assert http.get("/props").json()["modalities"]["vision"], "editors ask before they send one"
        assert "vision" in http.get("/v1/models").json()["data"][0]["capabilities"]
        for given, words in (
            ({"prompt": {**marked, "prompt_string": "x"}}, "per image, not 0 for 1 images"),
            ({"prompt": {**marked, "multimodal_data": ["!"]}}, "must be base64"),
            ({**older, "prompt": "x"}, "[img-ID]"),
        ):
            assert words in check_error(http.post("/completion", json={**given, **body}), 400)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_images_are_a_400(name, served):
    """Catches an error of the server's for a client's broken file."""
    data = "data:image/png;base64," + base64.b64encode(HOSTILE[name]()).decode()
    part = {"type": "image_url", "image_url": {"url": data}}
    with served.http() as http:
        response = http.post("/v1/chat/completions", json={"messages": [user(["x", part][1:])], **LIKELIEST})
        error = check_error(response, 400)
    assert error.startswith("messages[0].content[0]: the image")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"url": "http://example.com/a.png"}, "--image-urls"),
        ({"url": "file:///etc/passwd"}, "must have a data:, http:// or https:// URL"),
        ({"url": "/etc/passwd"}, "must have a data:, http:// or https:// URL"),
        ({"url": "data:image/png;base64,!!!"}, "must be base64"),
        ({"url": "data:image/png,abc"}, "data URL must begin"),
        ({"url": 5}, "must be base64"),
        ({}, "must be base64"),
        ({"url": url(RED), "detail": "huge"}, ".detail' must be"),
        ({"url": url(RED), "image_tokens": 3}, "'image_tokens' must be at least"),
        ({"url": url(RED), "image_tokens": "x"}, ".image_tokens' must be a number"),
    ],
)
def test_what_is_no_image_is_named(part, words, served):
    """Catches a file of the server's that is read, a fetch that nobody allowed, an error without a place."""
    with served.http() as http:
        body = {"messages": [user([{"type": "image_url", "image_url": part}])], **LIKELIEST}
        error = check_error(http.post("/v1/chat/completions", json=body), 400)
    assert words in error
    assert "messages[0].content[0]" in error


def test_fifty_images_in_a_request(served):
    """Catches a request of many images that fails, or images beyond the bound."""
    tiny = sent(picture(2, 2))
    with served.http() as http:
        ask = lambda n: {"messages": [user([*tiny * n, {"type": "text", "text": "?"}])], "max_tokens": 1}  # noqa: E731
        answer = http.post("/v1/chat/completions", json=ask(50)).json()
        assert "50" not in str(answer.get("error"))
        assert "at most 64" in check_error(http.post("/v1/chat/completions", json=ask(65)), 400)


def test_photos_have_a_bound_of_their_own(theirs):
    """Catches a phone's photo that --max-body keeps out, and a body that grows by what is no image."""
    noise = np.random.default_rng(0).integers(0, 256, (500, 500, 3), dtype=np.uint8)
    assert len(url(noise)) > 900_000
    with (
        LLM(theirs[0], backend="reference") as opened,
        serving(opened, any_model=True, max_body_bytes=100_000, max_image_bytes=1_100_000) as running,
        running.http() as http,
    ):
        body = {"messages": [user(sent(noise))], "max_tokens": 1}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        body["messages"] = [user(sent(noise, noise))]
        assert "--max-" in check_error(http.post("/v1/chat/completions", json=body), 413)
        body["messages"] = [user("word " * 30_000)]
        assert "--max-body" in check_error(http.post("/v1/chat/completions", json=body), 413)


@pytest.mark.parametrize("size", [1, 3, 7, 64, 100_000])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
def test_images_are_counted_while_they_arrive(kind, size):
    """Catches an image that counts as text because a body comes in pieces, and text that counts as one."""
    data = base64.b64encode(encoded(RED, kind)).decode()
    for image in (data, "data:image/x;base64," + data, data.replace("/", "\\/")):
        text = ' {"role": "user", "text": "' + "word iVBO 9j/ UklG " * 50
        body = (text + '", "image": "' + image + '"}' + text).encode()
        counter = ImageBytes()
        found = sum(counter.count(body[i : i + size]) for i in range(0, len(body), size))
        n_image = len(image) - (20 if image.startswith("data:") else 0)
        assert abs(found - n_image) <= 30 if size > 8 else found >= n_image - 30


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1",
        "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "::ffff:127.0.0.1", "ff02::1",
        "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::", "x", "fe80::1%eth0",
    ],
)  # fmt: skip
def test_addresses_of_a_network_inside_are_not_public(address):
    """Catches a request that makes the server ask its own network."""
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8"])
def test_addresses_of_the_internet_are_public(address):
    """Catches a check that refuses all."""
    assert is_public(address)


class _Pictures(BaseHTTPRequestHandler):
    def do_GET(self):
        path = self.path
        if path == "/slow":
            threading.Event().wait(1)
        if path.startswith("/to"):
            self.send_response(302)
            self.send_header("Location", {"/to": "/a.png", "/to-file": "file:///etc/passwd"}.get(path, path))
            self.end_headers()
            return
        self.send_response(404 if path == "/none" else 200)
        self.end_headers()
        self.wfile.write(bytes(3000) if path == "/large" else encoded(RED))

    def log_message(self, *_):
        pass


@pytest.fixture
def pictures():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Pictures)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://localhost:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_urls_are_fetched_within_bounds(pictures, monkeypatch):
    """Catches a fetch without end, beyond its size, after its redirects, or of what is no web page."""
    with pytest.raises(RequestError, match="not public"):
        fetched(f"{pictures}/a.png", "p")
    monkeypatch.setattr(image_urls, "is_public", lambda address: True)
    assert fetched(f"{pictures}/a.png", "p") == fetched(f"{pictures}/to", "p") == encoded(RED)
    for path, words in (
        ("/to-again", "redirects more than"), ("/to-file", "does not begin"), ("/none", "status 404"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=words):
            fetched(pictures + path, "p")
    monkeypatch.setattr(image_urls, "MAX_BYTES", 2000)
    with pytest.raises(RequestError, match="larger"):
        fetched(f"{pictures}/large", "p")
    monkeypatch.setattr(image_urls, "MAX_S", 0.2)
    with pytest.raises(RequestError, match="took more than"):
        fetched(f"{pictures}/slow", "p")
    for wrong in ("ftp://a/b", "http://", "http://u:p@a/", "http://a/\r\nHost: b", "https://" + "a" * 9000):
        with pytest.raises(RequestError):
            fetched(wrong, "p")


def test_a_name_that_changes_its_address_leads_nowhere_else(pictures, monkeypatch):
    """Catches DNS rebinding: an address that is checked, and another one that is asked."""
    port, asked = int(pictures.rpartition(":")[2]), []
    resolve, connect = socket.getaddrinfo, socket.create_connection

    def rebinding(host, *arguments, **options):
        asked.append(host)
        return resolve("8.8.8.8" if len(asked) == 1 else "127.0.0.1", *arguments, **options)

    def connected(address, *arguments, **options):
        reached.append(address)
        return connect(("127.0.0.1", port), *arguments, **options)

    reached = []
    monkeypatch.setattr(image_urls.socket, "getaddrinfo", rebinding)
    monkeypatch.setattr(image_urls.socket, "create_connection", connected)
    assert fetched("http://rebinding.example/a.png", "p") == encoded(RED)
    assert asked[0] == "rebinding.example"
    assert reached == [("8.8.8.8", 80)], "the address that was checked"


def test_a_redirect_to_the_inside_is_refused(pictures, monkeypatch):
    """Catches a public page that leads the server to its own network."""
    seen = []
    monkeypatch.setattr(image_urls, "is_public", lambda address: not seen and not seen.append(address))
    with pytest.raises(RequestError, match="not public"):
        fetched(f"{pictures}/to", "p")
