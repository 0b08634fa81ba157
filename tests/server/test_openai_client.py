"""The real `openai` client against the real model on a real server."""

from __future__ import annotations

import asyncio
import os

import pytest

from tests.lazy_imports import lazy_imports
from tests.server.bodies import (
    check_chat,
    check_chunk,
    check_completion,
    check_event,
    check_model,
    check_response,
    events,
)
from tests.server.live_server import MODEL, OTHER_NAME, SERVER

with lazy_imports():
    import openai

QUESTION = [
    {"role": "system", "content": "You are a helpful AI assistant."},
    {"role": "user", "content": "What is the capital of France?"},
]
GREEDY = {"model": MODEL, "temperature": 0}
COUNT = "1, 2, 3, 4, 5,"


def test_a_chat_answers_as_the_model_does(served, offline):
    """Catches a template, a parameter or a token lost between HTTP and the engine."""
    expected = offline.chat(QUESTION, temperature=0, max_tokens=40)
    answer = served.client.chat.completions.create(messages=QUESTION, max_tokens=40, **GREEDY)
    assert answer.choices[0].message.content == expected.text
    assert "Paris" in expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason == "stop"
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.model == MODEL


def test_a_stream_adds_up_to_the_answer(served, offline):
    """Catches chunks lost at either end, a role that comes twice, and a missing finish reason or usage."""
    expected = offline.chat(QUESTION, temperature=0, max_tokens=24)
    stream = served.client.chat.completions.create(
        messages=QUESTION, max_tokens=24, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == expected.text
    assert [delta.role for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons == [*[None] * (len(reasons) - 1), expected.finish_reason]
    assert [chunk.usage is None for chunk in chunks] == [*[True] * (len(chunks) - 1), False]
    assert chunks[-1].usage.completion_tokens == len(expected.token_ids)
    assert len({chunk.id for chunk in chunks}) == 1
    n_tokens = len(expected.token_ids)
    # replicas join steps for 10 ms, three or four tokens of a fast machine
    least = max(2, n_tokens / 4) if SERVER in os.environ else n_tokens * 0.7
    assert len(deltas) > least, "tokens come one by one"


@pytest.mark.full
def test_streams_side_by_side_do_not_mix(served, offline):
    """Catches text that reaches another client, and state that two requests share."""
    prompts = [f"{n}, {n + 1}, {n + 2}," for n in range(1, 25, 2)]
    expected = [r.text for r in offline.generate(prompts, temperature=0, max_tokens=20)]

    async def one(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(prompt=prompt, max_tokens=20, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    assert asyncio.run(all_of_them()) == expected


def test_the_async_client_gets_the_same(served, offline):
    """Catches a response that only the synchronous client can read."""
    expected = offline.chat(QUESTION, temperature=0, max_tokens=12).text

    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            answer = await client.chat.completions.create(messages=QUESTION, max_tokens=12, **GREEDY)
            return answer.choices[0].message.content

    assert asyncio.run(ask()) == expected


def test_every_chat_body_fits_the_schema(served):
    """Catches nulls that are missing, fields of a wrong type, and fields that OpenAI does not have."""
    options = {"messages": QUESTION, "max_tokens": 6, **GREEDY}
    logprobs = {"logprobs": True, "top_logprobs": 2}
    with served.http() as http:
        for more in ({}, logprobs, {"metadata": {"a": "b"}}):
            check_chat(http.post("/v1/chat/completions", json=options | more).json())
            stream = {"stream": True, "stream_options": {"include_usage": True}}
            for chunk in events(http.post("/v1/chat/completions", json=options | more | stream)):
                check_chunk(chunk)


def test_chat_logprobs_are_the_models(served, offline):
    """Catches log-probabilities of another token, of edited logits, or without the chosen token's bytes."""
    expected = offline.chat(QUESTION, temperature=0, max_tokens=5, logprobs=2)
    options = {"messages": QUESTION, "max_tokens": 5, "logprobs": True, "top_logprobs": 2, **GREEDY}
    whole = served.client.chat.completions.create(**options).choices[0].logprobs.content
    chunks = list(served.client.chat.completions.create(stream=True, **options))
    streamed = [
        entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.model_dump() for entry in streamed] == [entry.model_dump() for entry in whole]
    assert [entry.logprob for entry in whole] == pytest.approx([t.logprob for t in expected.logprobs])
    assert b"".join(bytes(entry.bytes) for entry in whole).decode() == expected.text
    for entry, token in zip(whole, expected.logprobs, strict=True):
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(
            [p for _, p in token.top_logprobs]
        )
        assert entry.top_logprobs[0].token == entry.token  # greedy


def test_stop_strings_end_the_text_before_them(served, offline):
    """Catches a stop string that is shown, and tokens that are billed or reported after it."""
    options = {"prompt": COUNT, "max_tokens": 40, "stop": [" 9", "nine"], "logprobs": 1, **GREEDY}
    expected = offline.generate(COUNT, temperature=0, max_tokens=40, stop=[" 9", "nine"])
    whole = served.client.completions.create(**options).choices[0]
    assert whole.text == expected.text == " 6, 7, 8,"
    assert whole.finish_reason == "stop"
    assert "".join(whole.logprobs.tokens) == whole.text
    chunks = list(served.client.completions.create(stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.full
def test_completions_take_every_form_of_prompt(served, offline):
    """Catches token ids read as texts, a list of prompts that loses its order, and a wrong default length."""
    ids = offline.tokenizer.encode(COUNT)
    expected = [r.text for r in offline.generate([COUNT, "a b c"], temperature=0, max_tokens=16)]
    create = served.client.completions.create
    assert create(prompt=COUNT, **GREEDY).choices[0].text == expected[0]
    assert create(prompt=ids, **GREEDY).choices[0].text == expected[0]
    many = create(prompt=[COUNT, "a b c"], **GREEDY)
    assert [choice.text for choice in many.choices] == expected
    assert [choice.index for choice in many.choices] == [0, 1]
    many = create(prompt=[ids, offline.tokenizer.encode("a b c")], **GREEDY)
    assert [choice.text for choice in many.choices] == expected


def test_every_completion_body_fits_the_schema(served):
    """Catches nulls that are missing, and chunks of another form."""
    options = {"prompt": [COUNT, "é😀"], "max_tokens": 6, **GREEDY}
    with served.http() as http:
        for more in ({}, {"logprobs": 2}):
            check_completion(http.post("/v1/completions", json=options | more).json())
            stream = {"stream": True, "stream_options": {"include_usage": True}}
            *chunks, last = events(http.post("/v1/completions", json=options | more | stream))
            for chunk in chunks:
                assert check_completion(chunk, is_chunk=True).usage is None
            assert check_completion(last).usage.completion_tokens == 12


def test_a_response_answers_as_the_model_does(served, offline):
    """Catches instructions or items that never reach the template."""
    expected = offline.chat(QUESTION, temperature=0, max_tokens=40)
    create = served.client.responses.create
    answer = create(
        instructions=QUESTION[0]["content"], input=QUESTION[1]["content"], max_output_tokens=40, **GREEDY
    )
    assert answer.output_text == expected.text
    assert answer.status == "completed"
    assert answer.usage.output_tokens == len(expected.token_ids)
    parts = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION[1]["content"]}]}]
    answer = create(input=[QUESTION[0], *parts], max_output_tokens=4, **GREEDY)
    assert expected.text.startswith(answer.output_text)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_response_events_tell_the_story_in_order(served, offline):
    """Catches an event that the client's own accumulator does not expect."""
    expected = offline.chat(QUESTION, temperature=0, max_tokens=6)
    with served.client.responses.stream(input=QUESTION, max_output_tokens=6, **GREEDY) as stream:
        seen = list(stream)
    names = [event.type for event in seen]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(names[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert "".join(event.delta for event in seen[4:-4]) == expected.text
    assert seen[-1].response.output_text == expected.text


@pytest.mark.representative(2)
def test_every_response_body_fits_the_schema(served):
    """Catches nulls that are missing, in the response and in each event."""
    options = {"input": QUESTION, "max_output_tokens": 6, **GREEDY}
    with served.http() as http:
        for more in ({}, {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}):
            check_response(http.post("/v1/responses", json=options | more).json())
            for event in events(http.post("/v1/responses", json=options | more | {"stream": True})):
                check_event(event)


def test_the_models_are_listed(served):
    """Catches an alias that is not served, and a body that the client cannot read."""
    assert [model.id for model in served.client.models.list()] == [MODEL, OTHER_NAME]
    assert served.client.models.retrieve(OTHER_NAME).owned_by == "kukri"
    with served.http() as http:
        check_model(http.get(f"/v1/models/{MODEL}").json())
    with pytest.raises(openai.NotFoundError) as caught:
        served.client.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"


def test_an_alias_answers_under_its_own_name(served):
    """Catches answers that name another model than was asked."""
    answer = served.client.completions.create(model=OTHER_NAME, prompt="a", max_tokens=1)
    assert answer.model == OTHER_NAME
    with pytest.raises(openai.NotFoundError) as caught:
        served.client.completions.create(model="gpt-9", prompt="a")
    assert caught.value.code == "model_not_found"
    assert "gpt-9" in caught.value.message


def test_tokens_there_and_back(served, offline):
    """Catches endpoints that tokenize in another way than requests are."""
    with served.http() as http:
        ids = http.post("/tokenize", json={"prompt": "Hello, wörld 😀"}).json()
        assert ids["tokens"] == offline.tokenizer.encode("Hello, wörld 😀", add_special=True)
        assert ids["count"] == len(ids["tokens"])
        text = http.post("/detokenize", json={"tokens": ids["tokens"]}).json()["prompt"]
        assert text == "Hello, wörld 😀"
        rendered = http.post("/apply-template", json={"messages": QUESTION}).json()["prompt"]
        assert rendered == offline.chat_template.render(QUESTION)
        chat = http.post("/tokenize", json={"messages": QUESTION, "return_token_strs": True}).json()
        assert chat["tokens"] == offline.chat_template.encode(offline.tokenizer, QUESTION)
        assert chat["token_strs"][0] == "<|im_start|>"


def test_a_seed_repeats_an_answer(served):
    """Catches a seed or temperature that the next request inherits."""
    create = served.client.completions.create
    options = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.5}
    texts = [create(seed=seed, **options).choices[0].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
