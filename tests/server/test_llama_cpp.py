"""llama.cpp's own API: completions, filling in the middle, and what it tells of the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kukri import LLM
from kukri.server.llama_cpp.answers import IndentLimit
from tests.server.bodies import check_error, events
from tests.server.live_server import CHAT, MODEL, TEXT, Served, serving
from tests.tiny_gguf import CONTROL, tiny_config, write_tiny

PROMPT = "Once upon a time"
LIKELIEST = {"temperature": 0, "frequency_penalty": 0, "presence_penalty": 0}
MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")


@pytest.fixture(scope="module")
def filling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A tiny model that fills in the middle, after a fashion."""
    control = (*CONTROL[:1], *MARKS, *CONTROL[1:])
    config = replace(tiny_config(512), n_vocab=256 + len(control))
    path = write_tiny(tmp_path_factory.mktemp("fim") / "fim.gguf", config, control=control)
    with LLM(path, max_requests=4) as llm, serving(llm) as server:
        yield server


def post(server: Served, path: str, **body: Any) -> Any:
    with server.http() as http:
        response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: Served, path: str, **body: Any) -> list[Any]:
    """The events of llama.cpp's own streams, which have no end mark."""
    with server.http() as http:
        text = http.post(path, json={**body, "stream": True}).text
    blocks = text.removesuffix("\n\n").split("\n\n")
    return [json.loads(one.removeprefix("data: ")) for one in blocks if not one.startswith(":")]


def test_a_completion_is_that_of_the_library(served, offline):
    """Catches fields of llama.cpp's that never count, and wrong facts about an answer."""
    want = offline.generate(PROMPT, **LIKELIEST, max_tokens=12)
    n_prompt = len(offline.tokenizer.encode(PROMPT, add_special=True))
    answer = post(served, "/completion", prompt=PROMPT, n_predict=12, return_tokens=True, **LIKELIEST)
    assert (answer["content"], answer["tokens"]) == (want.text, want.token_ids)
    assert (answer["stop"], answer["stop_type"], answer["truncated"]) == (True, "limit", False)
    assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (12, n_prompt)
    assert answer["timings"]["predicted_n"] == 12
    assert answer["timings"]["prompt_n"] + answer["timings"]["cache_n"] == n_prompt
    assert answer["generation_settings"]["n_predict"] == 12
    assert post(served, "/completions", prompt=PROMPT, n_predict=4, **LIKELIEST)["tokens"] == []
    stop = want.text.split()[2]
    cut = post(served, "/completion", prompt=PROMPT, n_predict=12, stop=[stop], **LIKELIEST)
    assert (cut["stop_type"], cut["stopping_word"]) == ("word", stop)
    assert cut["content"] == want.text.partition(stop)[0]
    assert post(served, "/completion", prompt=PROMPT, n_predict=0)["content"] == ""
    penalized = post(served, "/completion", prompt=PROMPT, n_predict=12, repeat_penalty=2.0, **LIKELIEST)
    assert penalized["generation_settings"]["repeat_penalty"] == 2.0
    assert penalized["content"] != want.text


def test_a_stream_is_the_whole_in_pieces(served):
    """Catches a last event without facts, token ids left out, and progress that skips its ends."""
    body = {"prompt": PROMPT, "n_predict": 6, **LIKELIEST}
    whole = post(served, "/completion", **body, return_tokens=True)
    found = stream(served, "/completion", **body, return_progress=True, timings_per_token=True)
    progress = [one["prompt_progress"] for one in found if "prompt_progress" in one]
    parts = [one for one in found if not one["stop"] and "prompt_progress" not in one]
    assert "".join(one["content"] for one in parts) == whole["content"]
    assert [i for one in parts for i in one["tokens"]] == whole["tokens"]
    assert parts[-1]["timings"]["predicted_n"] == 6
    assert (progress[0]["processed"], progress[-1]["processed"]) == (
        progress[0]["cache"],
        progress[-1]["total"],
    )
    same = ("stop_type", "tokens_predicted", "tokens_evaluated", "generation_settings", "prompt")
    assert {name: found[-1][name] for name in same} == {name: whole[name] for name in same}
    assert sum(one["stop"] for one in found) == 1


def test_prompts_of_every_shape(served, offline):
    """Catches texts between token ids that are lost, control tokens read as text, and lists that stay one."""
    ids = offline.tokenizer.encode(PROMPT)
    body = {"n_predict": 4, **LIKELIEST}
    want = post(served, "/completion", prompt=PROMPT, **body)["content"]
    for prompt in (ids, [*ids[:2], offline.tokenizer.decode(ids[2:])], {"prompt_string": PROMPT}):
        assert post(served, "/completion", prompt=prompt, **body)["content"] == want
    found = post(served, "/completion", prompt=[PROMPT, ids, {"prompt_string": PROMPT}], **body)
    assert [(one["index"], one["content"]) for one in found] == [(i, want) for i in range(3)]
    assert len(post(served, "/completion", prompt=PROMPT, n_cmpl=2, n_predict=2)) == 2
    image = {"prompt_string": "a", "multimodal_data": ["x"]}
    with served.http() as http:
        assert "reads and writes only text" in check_error(
            http.post("/completion", json={"prompt": image}), 400
        )
    chat = [{"role": "user", "content": "Hi"}]
    rendered = post(served, "/apply-template", messages=chat)["prompt"]
    answer = post(served, "/completion", prompt=rendered, n_predict=8, **LIKELIEST)
    assert answer["content"] == offline.chat(chat, **LIKELIEST, max_tokens=8).text


def test_scores_biases_and_fields(served, offline):
    """Catches probabilities of other tokens, a bias of a text that reaches its first token alone."""
    body = {"prompt": PROMPT, "n_predict": 3, **LIKELIEST}
    answer = post(served, "/completion", **body, n_probs=2, return_tokens=True)
    scores = answer["completion_probabilities"]
    assert [one["id"] for one in scores] == answer["tokens"]
    assert all(one["top_logprobs"][0]["id"] == one["id"] for one in scores)
    word = offline.tokenizer.decode(answer["tokens"][:2])
    for bias in ([[word, False]], {word: -100}, [[i, -100.0] for i in answer["tokens"][:2]]):
        ids = post(served, "/completion", **body, logit_bias=bias, return_tokens=True)["tokens"]
        assert not set(ids) & set(answer["tokens"][:2])
    wanted = ["content", "timings/predicted_n", "nothing"]
    assert post(served, "/completion", **body, response_fields=wanted) == {
        "content": answer["content"],
        "timings/predicted_n": 3,
    }
    form = {"json_schema": {"enum": [17]}}
    assert post(served, "/completion", prompt=PROMPT, **form)["content"] == "17"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_probs", 21),
        ("min_keep", 3),
        ("image_data", [{"id": 1}]),
        ("lora", [{"id": 0, "scale": 1}]),
        ("logit_bias", [["a"]]),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", [["9" * 5000, 1]]),
        ("logit_bias", [[str(i) + "a", 1] for i in range(1001)]),
        ("samplers", [[]]),
        ("samplers", [{}]),
        ("prompt", [1, *["a"] * 1025]),
        ("prompt", ["a"] * 300),
        ("logit_bias", [["a", True]]),
        ("post_sampling_probs", True),
        ("warmth", 1),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(served, field, value):
    """Catches a field that changes the answer elsewhere and nothing here."""
    with served.http() as http:
        response = http.post("/completion", json={"prompt": "a", field: value})
    assert check_error(response, 400)
    assert response.json()["error"]["param"].startswith(field)


def test_the_middle_is_filled_in(filling):
    """Catches marks in the wrong order, files without names, and a suffix that reaches no prompt."""
    prompt = post(filling, "/infill", input_prefix="a(", input_suffix=")", prompt="x", n_predict=1)["prompt"]
    assert prompt == "<|fim_prefix|>a(<|fim_suffix|>)<|fim_middle|>x"
    files = [{"filename": "b.c", "text": "int b;"}]
    answer = post(filling, "/infill", input_prefix="a", input_suffix="z", input_extra=files, n_predict=1)
    assert answer["prompt"] == (
        "<|repo_name|>project\n<|file_sep|>b.c\nint b;\n<|file_sep|>"
        "<|fim_prefix|>a<|fim_suffix|>z<|fim_middle|>"
    )
    body = {"n_predict": 8, "temperature": 0}
    want = post(filling, "/infill", input_prefix="a(", input_suffix=")", **body)["content"]
    text = post(filling, TEXT, prompt="a(", suffix=")", max_tokens=8, temperature=0)["choices"][0]["text"]
    options = {"num_predict": 8, "temperature": 0}
    made = post(filling, "/api/generate", model=MODEL, prompt="a(", suffix=")", options=options, stream=False)
    assert text == made["response"] == want
    marked = post(filling, "/infill", input_prefix=MARKS[1], input_suffix="z", n_predict=1)
    assert marked["tokens_evaluated"] > 15, "what a text spells out stays text"


def test_an_answer_ends_where_the_indent_does(site, forced):
    """Catches lines of an outer block that an editor would insert, and tokens made for nobody."""
    forced("  a\n\n  b\nc\n  d" + " e" * 100)
    body = {"prompt": "x", "n_indent": 2, "n_predict": 100}
    whole = post(site, "/completion", **body)
    parts = list(stream(site, "/completion", **body))
    assert whole["content"] == "".join(one["content"] for one in parts) == "  a\n\n  b\n"
    for last in (whole, parts[-1]):
        assert (last["stop_type"], last["truncated"]) == ("limit", False)
        assert last["tokens_predicted"] < 30, "it ends there"


def cut_at_the_indent(text: str, n: int) -> str:
    """The definition: lines up to one, not the first, with words and fewer than `n` spaces before them."""
    shown = ""
    for i, line in enumerate(text.splitlines(keepends=True)):
        words = line.lstrip(" \t")
        if not words or (i and words.strip() and len(line) - len(words) < n):
            break
        shown += line
    return shown


@given(st.lists(st.text(" \tab\r\n\u2028", max_size=4)), st.integers(0, 3))
def test_an_indent_in_pieces_is_that_of_the_whole(pieces, n):
    """Catches a line that is judged by the piece it comes in."""
    limit = IndentLimit(n)
    wanted = cut_at_the_indent("".join(pieces), n) if n else "".join(pieces)
    assert "".join(map(limit.push, pieces)) == wanted


def test_models_without_the_tokens_say_so(served):
    """Catches a middle made up from the prefix alone."""
    with served.http() as http:
        for path, body, param in (
            ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
            (TEXT, {"prompt": "a", "suffix": "b"}, "suffix"),
        ):
            response = http.post(path, json=body)
            assert "does not fill in the middle" in check_error(response, 400, param)


def test_props_and_slots(served, offline):
    """Catches defaults other than those that hold, and a path of the server's disk."""
    with served.http() as http:
        props = http.get("/props").json()
        slots = http.get("/slots").json()
    settings = props["default_generation_settings"]
    assert settings["n_ctx"] == 1024
    assert settings["params"]["frequency_penalty"] == offline.default_params.frequency_penalty
    assert settings["params"]["n_predict"] == -1
    assert (props["total_slots"], len(slots)) == (8, 8)
    assert props["chat_template"] == offline.tokenizer.chat_template
    assert "/" not in props["model_path"]
    assert props["modalities"] == {"vision": False, "audio": False}
    assert not any(slot["is_processing"] for slot in slots)


def test_hints_and_timings_of_openais_form(served):
    """Catches hints that are errors, timings that nobody asked for, and progress that ends early."""
    body = {"messages": [{"role": "user", "content": "Hi " * 40}], "max_tokens": 3}
    hints = {"id_slot": 0, "cache_prompt": False, "n_keep": -1, "verbose": True, "sse_ping_interval": 2}
    assert "timings" not in post(served, CHAT, **body, **hints)
    assert post(served, CHAT, **body, timings_per_token=True)["timings"]["predicted_n"] == 3
    assert post(served, TEXT, prompt="a", max_tokens=2, timings_per_token=True)["timings"]["predicted_n"] == 2
    told = {"stream": True, "return_progress": True, "timings_per_token": True}
    with served.http() as http:
        found = list(events(http.post("/chat/completions", json={**body, **told})))
    progress = [one["prompt_progress"] for one in found if "prompt_progress" in one]
    assert progress[0]["cache"] == progress[0]["processed"] < progress[0]["total"]
    assert progress[-1]["processed"] == progress[-1]["total"]
    assert all("timings" in one for one in found if one["choices"])


def test_tokens_are_counted(served, offline):
    """Catches counts that leave out the template."""
    chat = [{"role": "user", "content": "Hi"}]
    n = len(offline.chat_template.encode(offline.tokenizer, chat, add_generation_prompt=True))
    for path in ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"):
        assert post(served, path, messages=chat)["input_tokens"] == n
    assert post(served, "/v1/responses/input_tokens", input="Hi")["input_tokens"] == n
    assert httpx.get(f"{served.url}/models").json() == httpx.get(f"{served.url}/v1/models").json()


def test_verbose_tells_the_prompt_and_the_settings(served):
    """Catches a field that is taken and not heard, and settings that are not those of the request."""
    chat = {"messages": [{"role": "user", "content": "Hi there"}], "max_tokens": 3, "verbose": True}
    chat |= {"logit_bias": {"7": -2}, "dry_multiplier": 0.5}
    told = post(served, CHAT, **chat)["__verbose"]
    assert "Hi there" in told["prompt"]
    assert "<|im_start|>" in told["prompt"]
    assert told["tokens_predicted"] == len(told["tokens"]) == 3
    assert told["generation_settings"]["max_tokens"] == 3
    assert told["generation_settings"]["logit_bias"] == [{"bias": -2.0, "token": 7}]
    assert (
        post(served, TEXT, prompt="Hi there", max_tokens=3, verbose=True)["__verbose"]["prompt"] == "Hi there"
    )
    assert "__verbose" not in post(served, CHAT, **{**chat, "verbose": False})
    with served.http() as http:
        last = list(events(http.post(CHAT, json={**chat, "stream": True})))
    assert [event["__verbose"]["prompt"] for event in last if "__verbose" in event] == [told["prompt"]]


def test_biases_of_ends_that_are_ignored_are_told(served, offline):
    """Catches settings without the tokens that cannot come."""
    for ignored in (True, False):
        answer = post(served, "/completion", prompt=PROMPT, n_predict=2, ignore_eos=ignored)
        biases = answer["generation_settings"]["logit_bias"]
        assert {one["token"] for one in biases} == (set(offline.engine.maker.eos_ids) if ignored else set())
        assert all(one["bias"] is None for one in biases)


def test_the_first_token_costs_no_step(served):
    """Catches a rate of n tokens in the time of n - 1."""
    one = post(served, "/completion", prompt=PROMPT, n_predict=1)["timings"]
    assert (one["predicted_n"], one["predicted_per_second"]) == (1, 0.0)
    many = post(served, "/completion", prompt=PROMPT, n_predict=5)["timings"]
    assert many["predicted_per_second"] == pytest.approx(4000 / many["predicted_ms"])


@pytest.mark.full
def test_progress_and_times_of_a_response(served):
    """Catches events of the newer form without what llama.cpp adds to them."""
    body = {"input": "Tell me of a day. " * 60, "max_output_tokens": 3, "stream": True, "ignore_eos": True}
    body |= {"timings_per_token": True, "return_progress": True}
    with served.http() as http:
        found = list(events(http.post("/v1/responses", json=body)))
    progress = [event for event in found if "prompt_progress" in event]
    assert {event["type"] for event in progress} == {"response.in_progress"}
    first = progress[0]["timings"]
    assert (first["prompt_n"], first["prompt_ms"], first["predicted_n"]) == (0, 0.0, 0)
    assert progress[-1]["prompt_progress"]["processed"] == progress[-1]["prompt_progress"]["total"]
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert deltas[-1]["timings"]["predicted_n"] == found[-1]["timings"]["predicted_n"] == 3


@pytest.mark.full
def test_a_context_error_tells_both_counts(served, offline):
    """Catches an error that a client cannot shorten its prompt by."""
    with served.http() as http:
        error = http.post("/completion", json={"prompt": [5] * 1100}).json()["error"]
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (1100, offline.engine.max_context)
