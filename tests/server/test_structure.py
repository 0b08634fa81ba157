"""Answers of a given form through the openai client, alone and in a crowd."""

from __future__ import annotations

import asyncio
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from kukri import LLM, Grammar
from kukri.server.chat.grammar_check import GrammarCheck
from tests.lazy_imports import lazy_imports
from tests.server.bodies import check_error, check_response
from tests.server.live_server import MODEL, serving

with lazy_imports():
    import openai

QUESTION = [{"role": "user", "content": "Name a city and its country."}]
SAMPLED = {"model": MODEL, "temperature": 1, "max_tokens": 160}


class City(BaseModel):
    name: str
    country: str
    is_capital: bool


@pytest.mark.full
def test_a_schema_of_the_client_comes_back_as_its_type(served):
    """Catches a response_format that is read and not followed."""
    parsed = served.client.chat.completions.parse(
        messages=QUESTION, response_format=City, model=MODEL, temperature=0, max_tokens=160
    )
    assert isinstance(parsed.choices[0].message.parsed, City)
    assert parsed.choices[0].finish_reason == "stop"
    answer = served.client.responses.parse(
        input=QUESTION, text_format=City, model=MODEL, temperature=0, max_output_tokens=160
    )
    assert answer.output_parsed == parsed.choices[0].message.parsed


@pytest.mark.full(only=["json_object-"])
@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": "[a-z]{3} [0-9]{2}"}, "[a-z]{3} [0-9]{2}"),
        ({"choice": ["Paris", "Rome"]}, "Paris|Rome"),
        ({"grammar": 'root ::= "a"+ "b"'}, "a+b"),
        ({"json_object": True}, r"(?s)\{.*\}"),
        ({"json": {"enum": [1, 22]}}, "1|22"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_every_kind_is_followed(served, wanted, pattern):
    """Catches a kind that is mistaken for another, in either endpoint."""
    for seed in range(3):
        options = SAMPLED | {"seed": seed, "extra_body": {"structured_outputs": wanted}}
        chat = served.client.chat.completions.create(messages=QUESTION, **options).choices[0]
        text = served.client.completions.create(prompt="One:", **options).choices[0]
        for finish_reason, found in (
            (chat.finish_reason, chat.message.content),
            (text.finish_reason, text.text),
        ):
            if finish_reason == "stop":
                assert re.fullmatch(pattern, found)
            else:
                assert wanted.keys() & {"json_object", "grammar"}


def test_a_schema_beside_json_object_is_followed(served):
    """Catches llama.cpp's spelling of a schema, taken for any object."""
    format = {"type": "json_object", "schema": {"enum": [1, 22]}}
    with served.http() as http:
        body = {"model": MODEL, "messages": QUESTION, "max_tokens": 8, "response_format": format}
        (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["message"]["content"] in ("1", "22")


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"grammar": 'root ::= "yes" | "no"'}, {"yes", "no"}),
        ({"json_schema": {"enum": [1, 22]}}, {"1", "22"}),
    ],
    ids=["grammar", "json_schema"],
)
def test_llama_cpps_fields_are_followed(served, fields, texts):
    """Catches a field that is taken and ignored, in either endpoint."""
    with served.http() as http:
        body = {"model": MODEL, "max_tokens": 8, **fields}
        (chat,) = http.post("/v1/chat/completions", json=body | {"messages": QUESTION}).json()["choices"]
        (text,) = http.post("/v1/completions", json=body | {"prompt": "One:"}).json()["choices"]
        empty = http.post("/v1/completions", json={"prompt": "A", "max_tokens": 1, "grammar": ""})
    assert chat["message"]["content"] in texts
    assert text["text"] in texts
    assert empty.status_code == 200


def test_several_answers_each_follow_it(served):
    """Catches answers to one prompt that share where they are."""
    answer = served.client.completions.create(
        prompt="One:", n=4, seed=5, extra_body={"structured_outputs": {"regex": "[a-z]{8}"}}, **SAMPLED
    )
    texts = [choice.text for choice in answer.choices]
    assert all(re.fullmatch("[a-z]{8}", text) for text in texts)
    assert len(set(texts)) > 1


@pytest.mark.full
def test_a_crowd_that_runs_out_of_pages_gets_what_each_gets_alone(smollm2_path, offline):
    """Catches a grammar that forgets or repeats tokens when a request is computed again."""
    grammar = Grammar.json(City.model_json_schema() | {"additionalProperties": False})
    prompts = [f"{i}. A city of Europe, as JSON:\n" for i in range(8)]
    alone = [
        offline.generate(prompt, temperature=1, seed=i, max_tokens=64, grammar=grammar).token_ids
        for i, prompt in enumerate(prompts)
    ]
    page_bytes = 16 * 30 * 3 * 64 * 2 * 2
    with (
        LLM(smollm2_path, max_context=256, max_requests=8, kv_bytes=12 * page_bytes) as llm,
        serving(llm) as server,
    ):

        async def one(client: openai.AsyncOpenAI, i: int) -> str:
            answer = await client.completions.create(
                model=MODEL, prompt=prompts[i], temperature=1, seed=i, max_tokens=64,
                extra_body={"structured_outputs": {"json": json.loads(grammar.source)}},
            )  # fmt: skip
            return answer.choices[0].text

        async def all_of_them() -> list[str]:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
                return await asyncio.gather(*(one(client, i) for i in range(len(prompts))))

        texts = asyncio.run(all_of_them())
        assert llm.engine.scheduler.n_preemptions > 0, "nothing was computed again"
    assert texts == [offline.tokenizer.decode(ids, skip_special=True) for ids in alone]


def test_a_response_names_its_format(served):
    """Catches a response that claims to be plain text."""
    form = {"type": "json_schema", "name": "n", "schema": {"enum": [1, 22]}, "strict": True}
    body = {"model": MODEL, "input": "A number", "text": {"format": form}}
    with served.http() as http:
        response = http.post("/v1/responses", json=body).json()
    assert response["text"]["format"] == form
    assert check_response(response).output_text in ("1", "22")


@pytest.mark.parametrize(
    ("changes", "param", "reason"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}},
            "response_format",
            "not",
        ),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format", "json_object"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "cannot be used"),
        ({"grammar": "root ::= ("}, "grammar", "cannot be used"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "grammar", "give one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "one of"),
        ({"structured_outputs": {}}, "structured_outputs", "one of"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "give one",
        ),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "grammar"),
    ],
)
def test_what_cannot_be_served_is_a_400_that_says_why(served, changes, param, reason):
    """Catches a form that is dropped in silence, or an error that does not name it."""
    with served.http() as http:
        body = {"model": MODEL, "messages": QUESTION, "max_tokens": 1} | changes
        assert reason in check_error(http.post("/v1/chat/completions", json=body), 400, param)


def test_a_schema_needs_no_name(served):
    """Catches a name that is wanted though no answer shows it."""
    schema = {"type": "json_schema", "json_schema": {"schema": {"const": 17}}}
    body = {"model": MODEL, "messages": QUESTION, "response_format": schema, "max_tokens": 8}
    with served.http() as http:
        answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "17"


def test_the_event_loop_does_not_write_down_the_vocabulary():
    """Catches streams that stand still for the tenth of a second that 49,152 tokens take."""

    def token_bytes(token_id: int) -> bytes:
        with pytest.raises(RuntimeError):  # no event loop runs in this thread
            asyncio.get_running_loop()
        return bytes([token_id])

    tokenizer: Any = SimpleNamespace(token_bytes=token_bytes, n_vocab=256, eos_ids={0}, special_ids={0})

    async def starts() -> None:
        check = GrammarCheck(tokenizer)
        try:
            await check.check(Grammar.text('start: "a"'))
        finally:
            await check.close()

    asyncio.run(starts())
