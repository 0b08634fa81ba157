"""Request fields: every one counts or is refused, and nothing that is sent breaks the server."""

from __future__ import annotations

import json
import re
from importlib import import_module

import pytest

from kukri.server.errors import NAMES_HERE
from kukri.server.openai.responses_schema import ResponseBody
from kukri.server.schema import ChatBody, CompletionBody
from tests.lazy_imports import lazy_imports
from tests.server.bodies import check_error
from tests.server.live_server import ASK, CHAT, MODEL, RESPONSE, TEXT

with lazy_imports():
    import openai


@pytest.mark.parametrize(
    ("module", "name", "body"),
    [
        ("chat.completion_create_params", "CompletionCreateParamsBase", ChatBody),
        ("completion_create_params", "CompletionCreateParamsBase", CompletionBody),
        ("responses.response_create_params", "ResponseCreateParamsBase", ResponseBody),
    ],
)
def test_every_field_of_openai_is_known(module, name, body):
    """Catches a field of the API that is unknown here, instead of honoured or refused for a reason."""
    params = getattr(import_module(f"openai.types.{module}"), name)
    unknown = set(params.__annotations__) - set(body.model_fields) - set(body.refused) - body.ignored
    assert not unknown
    assert not set(body.model_fields) & set(body.refused)
    assert not body.ignored & set(body.refused)


def test_refused_fields_are_named(served):
    """Catches fields that are ignored: the caller would believe in them."""
    wanted = {"a": 1}  # no field's neutral value
    with served.http() as http:
        for path, body in ((CHAT, ChatBody), (TEXT, CompletionBody), (RESPONSE, ResponseBody)):
            for name in body.refused:
                message = check_error(http.post(path, json=ASK[path] | {name: wanted}), 400, name)
                assert message.startswith(f"'{name}' is not supported: ")


def test_neutral_values_of_refused_fields_are_taken(served):
    """Catches clients refused for saying what is the case anyway."""
    with served.http() as http:
        for path, body in ((CHAT, ChatBody), (TEXT, CompletionBody), (RESPONSE, ResponseBody)):
            neutral = {name: (values or (None,))[0] for name, (values, _) in body.refused.items()}
            response = http.post(path, json=ASK[path] | neutral)
            assert response.status_code == 200, response.text


HINTS = {
    "prompt_cache_key": "a", "safety_identifier": "u", "service_tier": "priority", "store": True,
    "verbosity": "low", "metadata": {"a": "b"}, "user": "u", "temprature": None,
    "context_management": [{"type": "compaction"}],
}  # fmt: skip
HINTED = {
    CHAT: {
        **HINTS, "reasoning_effort": "low", "stream_options": {"include_usage": False}, "logit_bias": {},
        "tool_choice": "auto", "parallel_tool_calls": True, "tools": [], "n_probs": 0, "best_of": 1,
        "chat_template_kwargs": {"enable_thinking": False, "a b": 1},
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}],
                      "name": "Bob", "colour": "red"}],
    },
    TEXT: {**HINTS, "suffix": "", "best_of": 1, "echo": False, "add_special_tokens": True},
    RESPONSE: {
        **HINTS, "reasoning": {"effort": "low"},
        "text": {"verbosity": "low"}, "input": [{"role": "user", "content": "Hi", "colour": "red"}],
    },
    "/v1/messages": {
        "context_management": {"edits": []}, "metadata": {"user_name": "a"}, "service_tier": "fast",
        "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"},
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "colour": 1}], "id": "a"}],
    },
}  # fmt: skip


@pytest.mark.parametrize("path", list(HINTED))
def test_hints_that_change_no_answer_are_taken(served, path):
    """Catches clients refused for a hint, and one that changes what they get."""

    def answer(body):
        response = http.post(path, json=body | {"temperature": 0})
        assert response.status_code == 200, response.text
        found = response.json()
        parts = found.get("choices") or found.get("output") or found["content"]
        return [{**part, "id": None} for part in parts]

    with served.http() as http:
        plain = ASK.get(path, ASK[CHAT])
        assert answer(plain | HINTED[path]) == answer(plain)
        unnamed = {name: value for name, value in plain.items() if name != "model"}
        assert answer(unnamed) == answer(plain)


def test_a_history_without_content_is_taken(served, offline):
    """Catches an assistant's null content that becomes an error, or the text None in the prompt."""
    said = [{"role": "user", "content": "Hi"}, None, {"role": "user", "content": "So?"}]
    for silent, content in (
        ({"content": None}, ""),
        ({"content": None, "tool_calls": [], "refusal": None}, ""),
        ({"content": None, "refusal": "I cannot."}, "I cannot."),
    ):
        said[1] = {"role": "assistant", **silent}
        with served.http() as http:
            prompt = http.post("/apply-template", json={"messages": said}).json()["prompt"]
        said[1] = {"role": "assistant", "content": content}
        assert prompt == offline.chat_template.render(said)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_the_assistants_last_message_is_continued(served, offline, path):
    """Catches an answer that begins again, a space that is lost, and a turn that is ended before it."""
    turn = {"role": "assistant", "content": "The capital of France is "}
    messages = [{"role": "user", "content": "What is the capital of France?"}, turn]
    start = offline.chat_template.render(messages[:1]) + turn["content"]
    ids = offline.tokenizer.encode(start, parse_special=True)
    expected = offline.generate(ids, temperature=0, max_tokens=5).text
    body = {"model": MODEL, "messages": messages, "max_tokens": 5, "temperature": 0}
    more = {"continue_final_message": True, "add_generation_prompt": False} if path == CHAT else {}
    with served.http() as http:
        answer = http.post(path, json=body | more).json()
        text = answer["choices"][0]["message"]["content"] if path == CHAT else answer["content"][0]["text"]
        assert text == expected
        shown = http.post("/apply-template", json={"messages": messages, "continue_final_message": True})
        assert shown.json()["prompt"] == start
        tokens = http.post("/tokenize", json={"messages": messages, "continue_final_message": True}).json()
        assert tokens["tokens"] == ids


@pytest.mark.parametrize("path", ["/v1/completions", "/completion", "/api/generate"])
def test_a_rendered_chat_is_continued_as_the_chat(served, offline, path):
    """Catches an editor's control tokens read as letters in a text, and an option that changes nothing."""
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = offline.chat_template.render(chat)
    want = offline.chat(chat, temperature=0, max_tokens=4)
    body = {"model": MODEL, "prompt": prompt, "temperature": 0}
    more = {
        "/v1/completions": {"max_tokens": 4},
        "/completion": {"n_predict": 4},
        "/api/generate": {"raw": True, "stream": False, "options": {"temperature": 0, "num_predict": 4}},
    }[path]
    with served.http() as http:
        found = http.post(path, json=body | more).json()
        text = (
            found["choices"][0]["text"] if "choices" in found else found.get("content", found.get("response"))
        )
        assert text == want.text
        if path == "/v1/completions":
            letters = http.post(path, json=body | more | {"parse_special": False}).json()["usage"]
            assert found["usage"]["prompt_tokens"] == len(want.prompt_token_ids) < letters["prompt_tokens"]
        if path == "/completion":
            letters = http.post(path, json=body | more | {"parse_special": False}).json()
            assert found["tokens_evaluated"] == len(want.prompt_token_ids) < letters["tokens_evaluated"]
        counted = http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
        assert counted == want.prompt_token_ids


def test_tokenize_speaks_llama_cpps_form_too(served, offline):
    """Catches control tokens of a content that are text, tokens that are added, and pieces in halves."""
    text = "<|im_start|>é😀"
    with served.http() as http:
        ask = {"content": text, "with_pieces": True}
        plain = http.post("/tokenize", json={"content": text}).json()["tokens"]
        pieces = http.post("/tokenize", json=ask).json()["tokens"]
        as_text = http.post("/tokenize", json={"content": text, "parse_special": False}).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": plain}).json()["content"] == text
    assert plain == offline.tokenizer.encode(text, parse_special=True)
    assert as_text == offline.tokenizer.encode(text)
    assert [piece["id"] for piece in pieces] == plain
    spelled = b"".join(p.encode() if isinstance(p := piece["piece"], str) else bytes(p) for piece in pieces)
    assert spelled.decode() == text


def test_lm_evals_tokenizer_finds_what_it_asks_for(served, offline):
    """Catches an evaluation by tokenizer_backend=remote that ends before its first question."""
    tokenizer = offline.tokenizer
    with served.http() as http:
        info = http.get("/tokenizer_info").json()
        ask = {"prompt": info["eos_token"], "add_special_tokens": False}
        assert http.post("/tokenize", json=ask).json()["tokens"] == [tokenizer.vocabulary.eos_id]
    assert (info["bos_token"], info["eos_token"]) == (tokenizer.bos_token, tokenizer.eos_token)
    assert info["chat_template"] == tokenizer.chat_template
    assert info["model_max_length"] == 1024


@pytest.mark.parametrize("path", list(ASK))
def test_unknown_fields_are_named(served, path):
    """Catches a misspelt parameter that silently does nothing."""
    with served.http() as http:
        assert "'temprature'" in check_error(
            http.post(path, json=ASK[path] | {"temprature": 0}), 400, "temprature"
        )


def test_names_of_other_servers_are_translated(served):
    """Catches an error that leaves a client of another server to guess."""
    with served.http() as http:
        for path in (CHAT, TEXT):
            for name in ("json", "regex"):
                name, here = f"guided_{name}", f"structured_outputs.{name}"
                message = check_error(http.post(path, json=ASK[path] | {name: 1}), 400, name)
                assert message == f"{name!r} is not supported: use {here!r}"


def test_what_an_error_says_to_use_is_there(served):
    """Catches advice that is refused itself, such as 'max_tokens' for a response."""
    bodies = ASK | {"/v1/messages": ASK[CHAT], "/completion": {"prompt": "Hi"}}
    n_advised = 0
    with served.http() as http:
        for path, body in bodies.items():
            for name in NAMES_HERE.keys() - body.keys():
                said = http.post(path, json=body | {name: "x"}).json()["error"]["message"]
                found = re.search(r"use '([\w.]+)'$", said)
                if found is not None:
                    n_advised += 1
                    first = found[1].partition(".")[0]
                    again = http.post(path, json=body | {first: [[]] if first == found[1] else {}})
                    assert "is not supported" not in again.text, f"{path}: {said}, then {again.text}"
    assert n_advised > 10


WRONG = [
    (CHAT, {"temperature": 1e7}, "temperature"),
    (CHAT, {"temperature": -0.1}, "temperature"),
    (CHAT, {"temperature": "0"}, "temperature"),
    (CHAT, {"temperature": True}, "temperature"),
    (CHAT, {"top_p": 1.1}, "top_p"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"n": 129}, "n"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_tokens": 1.5}, "max_tokens"),
    (CHAT, {"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "Hi"}, "messages"),
    (CHAT, {"messages": [{"role": "king", "content": "Hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
    ),
    (CHAT, {"model": "gpt-9\n" * 50}, "model"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"logit_bias": {"a": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"99999999": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"1": 101}}, None),
    (CHAT, {"stop": ""}, "stop"),
    (CHAT, {"stop": ["a"] * 65}, "stop"),
    (CHAT, {"continue_final_message": True}, "messages"),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    (TEXT, {"suffix": "the end"}, "suffix"),
    (TEXT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 2000}]}, "messages"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": [1, "a"]}, "prompt[1]"),
    (TEXT, {"prompt": [99999999]}, "prompt"),
    (TEXT, {"prompt": [-1]}, "prompt"),
    (TEXT, {"prompt": [10**30]}, "prompt[0]"),
    (TEXT, {"prompt": [[]]}, "prompt[0]"),
    (TEXT, {"prompt": None}, "prompt"),
    (TEXT, {"prompt": "word " * 2000}, "prompt"),
    (TEXT, {"max_tokens": -3}, "max_tokens"),
    (TEXT, {"max_tokens": 10**30}, "max_tokens"),
    (TEXT, {"seed": 10**30}, "seed"),
    (TEXT, {"best_of": 1, "n": 2}, "best_of"),
    (TEXT, {"best_of": 2, "stream": True}, "best_of"),
    (TEXT, {"min_tokens": 5}, "min_tokens"),
    (TEXT, {"samplers": ["magic"]}, "samplers"),
    (RESPONSE, {"input": []}, "input"),
    (RESPONSE, {"input": [{"role": "king", "content": "Hi"}]}, "input[0].role"),
    (RESPONSE, {"input": [{"type": "sonnet", "id": "1"}]}, "input[0]"),
    (RESPONSE, {"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, "input"),
    (RESPONSE, {"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input[0].arguments"),
    (RESPONSE, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSE, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
    (RESPONSE, {"background": True}, "background"),
    (RESPONSE, {"text": {"format": {"type": "json_schema"}}}, "text.format"),
    (RESPONSE, {"input": "word " * 2000}, "input"),
]  # fmt: skip


def test_every_wrong_key_of_logit_bias_is_named(served):
    """Python's words about the first of them alone."""
    with served.http() as http:
        wrong = http.post(CHAT, json=ASK[CHAT] | {"logit_bias": {"a": 1, "5": 1, "1.5": 2}})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["message"] == "the keys of 'logit_bias' must be token ids, not 'a, 1.5'"


def test_no_error_names_a_class(served):
    """Catches documents[0].Document.id, which is in no client's body, and a dictionary or instance of one."""
    hi, inside = {"role": "user", "content": "Hi"}, {"role": "user", "content": {"text": "a"}}
    text = "must be a text or a list"
    wrong = [
        (CHAT, {"messages": [hi, hi, inside]}, "messages[2].content", text),
        (CHAT, {"thinking": {"type": "x"}}, "thinking.type", "must be 'enabled'"),
        (CHAT, {"response_format": 5}, "response_format", "must be an object"),
        (CHAT, {"metadata": 5}, "metadata", "must be an object"),
        (RESPONSE, {"input": [inside]}, "input[0].content", text),
        (RESPONSE, {"input": [{"type": "sonnet"}]}, "input[0]", "must be an item of type message"),
        ("/v1/messages", {"messages": [inside], "max_tokens": 1}, "messages[0].content", text),
        ("/completion", {"prompt": {"prompt_string": 5}}, "prompt.prompt_string", "must be"),
        ("/v1/rerank", {"query": "a", "documents": [{"id": 5}]}, "documents[0].text", "is required"),
    ]
    with served.http() as http:
        for path, changes, param, said in wrong:
            error = http.post(path, json={**ASK.get(path, {}), **changes}).json()["error"]
            assert error.get("param", param) == param, path
            assert error["message"].startswith(f"'{param}' {said}"), path


@pytest.mark.parametrize(("path", "wrong", "param"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_values_are_named(served, path, wrong, param):
    """Catches a caller's mistake that becomes a 500, an empty answer, or an error that names no field."""
    status = 404 if param == "model" else 400
    with served.http() as http:
        check_error(http.post(path, json=ASK[path] | wrong), status, param)


@pytest.mark.parametrize(
    ("path", "changes", "param", "text"),
    [
        (CHAT, {"min_tokens": 9}, "min_tokens", "at most 'max_tokens', 2"),
        (
            CHAT,
            {"min_tokens": 9, "max_tokens": None, "max_completion_tokens": 3},
            "min_tokens",
            "at most 'max_completion_tokens', 3",
        ),
        (RESPONSE, {"min_tokens": 9}, "min_tokens", "at most 'max_output_tokens', 2"),
        (RESPONSE, {"thinking_token_budget": 3}, "thinking_token_budget", "<think>"),
        (
            "/v1/messages",
            {"thinking": {"type": "enabled", "budget_tokens": 1}},
            None,
            "<think>",
        ),
    ],
)
def test_errors_name_the_fields_that_the_client_sent(tooled, path, changes, param, text):
    """Catches an error about a field of another API, to which the request was translated."""
    body = ASK.get(path, ASK[CHAT]) | changes
    with tooled.http() as http:
        response = http.post(path, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error.get("param") == param
    assert text in error["message"]


def test_too_long_a_prompt_carries_both_numbers(served):
    """Catches silent truncation, and an error that does not say how much too long."""
    with served.http() as http:
        response = http.post(TEXT, json=ASK[TEXT] | {"prompt": [5] * 1500})
    message = check_error(response, 400, "prompt")
    assert "1500" in message
    assert "1024" in message
    assert response.json()["error"]["code"] == "context_length_exceeded"


BROKEN = [
    b"", b"{", b"null", b"[]", b"1", b'"a"', b"{}", b"\xff\xfe", b"\x00" * 100, b'{"model": "smol"',
    b"[" * 100_000,
    b'{"a":' * 50_000, b'{"model": NaN}', b'{"model":"smol","prompt":"a","temperature":NaN}',
    b'{"model":"smol","prompt":"a","temperature":Infinity}',
    b'{"model":"smol","prompt":"a","max_tokens":1e400}', b'{"model":"smol","prompt":"a","model":1}',
    b'{"model":"smol","prompt":"a","logit_bias":{"\\ud800":1}}',
    b'{"model":"smol","prompt":"a","max_tokens":' + b"9" * 5000 + b"}",
]  # fmt: skip


@pytest.mark.parametrize("body", BROKEN, ids=lambda body: repr(body[:30]))
def test_broken_bodies_are_the_callers_fault(served, body):
    """Catches a parser's exception that becomes a 500, or a traceback in the answer."""
    with served.http() as http:
        for path in (*ASK, "/tokenize", "/detokenize", "/apply-template"):
            response = http.post(path, content=body, headers={"content-type": "application/json"})
            check_error(response, 400)
        assert http.post(TEXT, json=ASK[TEXT]).status_code == 200


@pytest.mark.full(only=["260"])
@pytest.mark.parametrize("depth", [260, 420, 480, 600, 900])
def test_deep_bodies_are_the_callers_fault(tooled, depth):
    """Catches a RecursionError, wherever it is raised, that becomes a 500."""
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    schema = b'{"type":"object","properties":{"a":' * depth + b"{}" + b"}}" * depth
    head, ask = b'{"model":"smol","max_tokens":1,"messages":[', b'{"role":"user","content":"a"}'
    use = b'{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":%s}]},' % deep
    tool = b'],"tool_choice":{"type":"any"},"tools":[{"name":"f","input_schema":%s}]}'
    function = b'],"tools":[{"type":"function","function":{"name":"f","parameters":%s}}]}'
    with tooled.http(headers={"content-type": "application/json"}) as http:
        for path, body in (
            ("/v1/messages", head + use + ask + b"]}"),
            ("/v1/messages", head + ask + tool % schema),
            ("/v1/messages/count_tokens", b'{"model":"smol","messages":[' + use + ask + b"]}"),
            (CHAT, head + ask + function % deep),
            (CHAT, head + ask + b'],"response_format":{"type":"json_schema","json_schema":%s}}' % deep),
        ):
            response = http.post(path, content=body)
            assert response.status_code in (200, 400), response.text


def test_half_a_character_is_text(served):
    """Catches a lone surrogate, which JSON can spell and UTF-8 cannot, that becomes a 500."""
    half = {"content-type": "application/json"}
    message = b'[{"role":"user","content":"\\ud800"}]'
    with served.http(headers=half) as http:
        answers = [
            http.post(CHAT, content=b'{"model":"smol","max_tokens":1,"messages":%s}' % message),
            http.post(TEXT, content=b'{"model":"smol","max_tokens":1,"prompt":"\\ud800","echo":true}'),
            http.post(
                RESPONSE, content=b'{"model":"smol","max_output_tokens":1,"input":"\\ud800","user":"\\udfff"}'
            ),
            http.post("/tokenize", content=b'{"prompt":"\\ud800"}'),
            http.post("/apply-template", content=b'{"messages":%s}' % message),
        ]
    assert [answer.status_code for answer in answers] == [200] * 5


def test_paths_and_methods_that_are_not_there(served):
    """Catches errors of the router in another form than all the others."""
    with served.http() as http:
        check_error(http.get("/v1/nothing"), 404)
        refused = http.get(TEXT)
        check_error(refused, 405)
        assert refused.headers["allow"] == "POST"
        assert f"GET {TEXT} is not supported: use POST" in refused.text
        refused = http.put("/v1/responses/resp_1")
        check_error(refused, 405)
        assert refused.headers["allow"] == "DELETE, GET"
        assert http.head(TEXT).status_code == 405
        check_error(http.post(TEXT, content=b"a=b", headers={"content-type": "text/plain"}), 400)


@pytest.mark.full
def test_the_document_describes_what_is_served(served):
    """Catches an OpenAPI document with 422s that never come, or without the fields of a request."""
    with served.http() as http:
        document = http.get("/openapi.json").json()
        assert http.head("/openapi.json").status_code == 200
    for path in ASK:
        operation = document["paths"][path]["post"]
        assert "422" not in operation["responses"]
        assert {"200", "400", "401", "413", "429", "503"} <= set(operation["responses"])
    fields = document["components"]["schemas"]["ChatBody"]
    assert fields["additionalProperties"] is False
    assert {"messages", "temperature", "min_p", "top_logprobs"} <= set(fields["properties"])
    assert re.fullmatch(r"3\.\d+\.\d+", document["openapi"])


def test_the_client_sees_errors_as_its_own(served):
    """Catches error bodies that the client cannot turn into its exceptions."""
    with pytest.raises(openai.BadRequestError) as caught:
        served.client.chat.completions.create(**ASK[CHAT] | {"temperature": 1e7})
    assert caught.value.param == "temperature"
    assert caught.value.code == "invalid_value"
    assert json.dumps(caught.value.body)


def test_every_route_is_in_the_docs(served, request):
    """Catches an endpoint that no page names."""
    docs = request.config.rootpath / "docs"
    pages = docs.rglob("*.md")
    named = set(re.findall(r"/[\w{}/.-]+", "\n".join(page.read_text() for page in pages)))
    named |= {re.sub(r"\{\w+\}|\b[A-Z]{2,}\b", "{}", path) for path in named}
    with served.http() as http:
        paths = http.get("/openapi.json").json()["paths"]
    missing = [path for path in paths if re.sub(r"\{\w+\}", "{}", path) not in named]
    assert not missing, f"no page names {', '.join(missing)}"


def test_every_get_answers_head(served):
    """Catches a health check of a compose file that marks a working server as unhealthy."""
    faults = []
    with served.http() as http:
        paths = http.get("/openapi.json").json()["paths"]
        gets = [re.sub(r"\{\w+\}", "nothing", path) for path, methods in paths.items() if "get" in methods]
        assert len(gets) > 10
        for path in [*gets, "/openapi.json", "/ping", "/"]:
            whole, head = http.get(path), http.head(path)
            if (head.status_code, head.content) != (whole.status_code, b""):
                faults.append(f"{path}: {head.status_code} {head.content!r}, and GET has {whole.status_code}")
        assert http.head("/health").headers["content-length"] == http.get("/health").headers["content-length"]
    assert not faults, "\n".join(faults)
