"""Several answers to a request, their scores, the prompt's, and what is counted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.server.bodies import check_chat, check_completion, events
from tests.server.live_server import ASK, CHAT, MODEL, TEXT


def test_n_answers_are_n_choices(served):
    """Catches answers that share a seed, an index or their text."""
    create = served.client.chat.completions.create
    options = {"model": MODEL, "messages": ASK[CHAT]["messages"], "n": 3, "temperature": 1.2, "seed": 7}
    whole = create(max_tokens=12, **options)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    streamed = ["", "", ""]
    for chunk in create(max_tokens=12, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    assert whole.usage.completion_tokens <= 36


def test_best_of_gives_the_likeliest(served):
    """Catches answers in the order they were made instead of the best of them."""
    options = {
        "model": MODEL,
        "prompt": "The sea",
        "max_tokens": 8,
        "temperature": 1.5,
        "seed": 3,
        "logprobs": 0,
    }
    create = served.client.completions.create
    everything = create(n=5, **options)
    best = create(n=2, best_of=5, **options)

    def likelihood(choice):
        return sum(choice.logprobs.token_logprobs)

    ranked = sorted(everything.choices, key=likelihood, reverse=True)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.usage.completion_tokens == everything.usage.completion_tokens
    with served.http() as http:
        plain = http.post(TEXT, json=ASK[TEXT] | {"best_of": 2}).json()
    assert check_completion(plain).choices[0].logprobs is None


# --- echo, as evaluation programs use it


def log_softmax(row):
    row = row.astype(np.float64)
    return row - row.max() - math.log(np.exp(row - row.max()).sum())


@pytest.mark.full
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_scores_every_token_of_the_prompt(served, offline, max_tokens):
    """Catches log-probabilities one place off, cut by the prefix cache, or of another prompt of the batch."""
    texts = ["The capital of France is Paris.", "Grüße an alle 😀", "The capital of France is Rome. " * 8]
    prompts = [offline.tokenizer.encode(text) for text in texts]
    body = {
        "model": MODEL,
        "prompt": prompts,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 1,
        "echo": True,
    }
    with served.http() as http:
        for _ in range(2):  # the second time with what the first left in the cache
            answer = http.post(TEXT, json=body).json()
            check_completion(answer)
            for choice, prompt, text in zip(answer["choices"], prompts, texts, strict=True):
                check_scores(offline, choice, prompt, text, max_tokens)
    assert answer["usage"]["completion_tokens"] == max_tokens * len(prompts)


def check_scores(offline, choice, prompt, text, n_generated):
    expected = offline.logits(prompt)
    scores = choice["logprobs"]
    assert choice["text"].startswith(text)
    assert (choice["text"] == text) == (n_generated == 0)
    assert len(scores["tokens"]) == len(scores["token_logprobs"]) == len(prompt) + n_generated
    assert scores["token_logprobs"][0] is None
    assert scores["top_logprobs"][0] is None
    for i in range(1, len(prompt)):
        row = log_softmax(expected[i - 1])
        assert scores["token_logprobs"][i] == pytest.approx(row[prompt[i]], abs=1e-4)
        assert max(scores["top_logprobs"][i].values()) == pytest.approx(row.max(), abs=1e-4)
        assert scores["tokens"][i] in scores["top_logprobs"][i]
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][offset:].startswith(token)


def test_an_echo_is_scored_in_a_stream_too(served):
    """Catches a stream whose chunks leave out the prompt's log-probabilities, or count offsets from zero."""
    options = {"model": MODEL, "prompt": "One, two, three,", "max_tokens": 4, "temperature": 0}
    options |= {"echo": True, "logprobs": 2}
    whole = served.client.completions.create(**options).choices[0]
    chunks = [one.choices[0] for one in served.client.completions.create(stream=True, **options)]
    assert len(chunks) > 1
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        joined = [value for chunk in chunks for value in getattr(chunk.logprobs, name)]
        assert joined == getattr(whole.logprobs, name), name
    assert "".join(chunk.text for chunk in chunks) == whole.text


def test_echo_without_scores(served):
    """Catches a prompt that is echoed only where log-probabilities are asked for, or twice in a stream."""
    options = {"model": MODEL, "prompt": "One, two, three,", "max_tokens": 4, "temperature": 0}
    create = served.client.completions.create
    plain = create(**options).choices[0].text
    assert create(echo=True, **options).choices[0].text == options["prompt"] + plain
    chunks = list(create(echo=True, stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == options["prompt"] + plain


def test_parameters_beyond_openais_count(served):
    """Catches parameters that are taken and never reach the sampler, texts among them."""
    prompt = "one two three " * 6
    options = {"model": MODEL, "prompt": prompt.strip(), "max_tokens": 6, "temperature": 0}
    options |= {"frequency_penalty": 0, "presence_penalty": 0}  # not the model's own
    with served.http() as http:
        plain = http.post(TEXT, json=options).json()["choices"][0]["text"]
        for more in (
            {"bad_words": ["two"]},
            {"repetition_penalty": 2.0},
            {"dry_multiplier": 50.0, "dry_base": 4.0},
        ):
            assert http.post(TEXT, json=options | more).json()["choices"][0]["text"] != plain
        one_left = {"temperature": 1.9, "top_k": 1, "samplers": ["top_k", "temperature"]}
        assert http.post(TEXT, json=options | one_left).json()["choices"][0]["text"] == plain
        half = {"content-type": "application/json"}
        for field in (b'"bad_words"', b'"dry_multiplier":1,"dry_sequence_breakers"'):
            body = b'{"model":"smol","prompt":"a","max_tokens":1,%s:["\\ud800"]}' % field
            assert http.post(TEXT, content=body, headers=half).status_code in (200, 400)


# --- usage


def test_cached_tokens_are_counted(served):
    """Catches a prefix cache that nobody can see, or that is counted for strangers' prompts."""
    options = {"model": MODEL, "prompt": "It was a dark and stormy night. " * 12, "max_tokens": 1}
    first, second = (served.client.completions.create(**options).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens - 17 <= second.prompt_tokens_details.cached_tokens < second.prompt_tokens


def test_prompt_logprobs_and_token_ids_as_vllm_has_them(served, offline):
    """Catches scores of the wrong token, ids that miss the last one, and ids that are sent twice."""
    prompt = offline.tokenizer.encode("The capital of France is")
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    expected = offline.generate(prompt, max_tokens=4, temperature=0).token_ids
    with served.http() as http:
        (choice,) = http.post(TEXT, json=body | {"prompt_logprobs": 2}).json()["choices"]
        chunks = [chunk["choices"][0] for chunk in events(http.post(TEXT, json=body | {"stream": True}))]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, expected)
    assert [i for chunk in chunks for i in chunk["token_ids"]] == expected
    assert [chunk["prompt_token_ids"] for chunk in chunks] == [prompt] + [None] * (len(chunks) - 1)
    scores = choice["prompt_logprobs"]
    assert scores[0] is None
    logits = offline.logits(prompt)
    for i in range(1, len(prompt)):
        row = log_softmax(logits[i - 1])
        assert scores[i][str(prompt[i])]["logprob"] == pytest.approx(row[prompt[i]], abs=1e-4)
        ranks = {entry["rank"]: int(token) for token, entry in scores[i].items()}
        assert [ranks[1], ranks[2]] == np.argsort(-row)[:2].tolist()
        assert ranks.get(None, prompt[i]) == prompt[i]


def test_chats_have_vllm_fields_too(served, offline):
    """Catches ids of another prompt than the template's, ids sent twice or left out, a score too many."""
    messages = ASK[CHAT]["messages"]
    prompt = offline.tokenizer.encode(offline.chat_template.render(messages), parse_special=True)
    expected = offline.generate(prompt, max_tokens=6, temperature=0).token_ids
    body = {"model": MODEL, "messages": messages, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    with served.http() as http:
        whole = http.post(CHAT, json=body | {"prompt_logprobs": 1}).json()
        chunks = list(events(http.post(CHAT, json=body | {"stream": True})))
        plain = http.post(CHAT, json=body | {"return_token_ids": False}).json()
    assert whole["prompt_token_ids"] == prompt
    assert whole["choices"][0]["token_ids"] == expected
    assert len(whole["prompt_logprobs"]) == len(prompt)
    assert whole["prompt_logprobs"][0] is None
    assert all(str(i) in scores for i, scores in zip(prompt[1:], whole["prompt_logprobs"][1:], strict=True))
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == expected
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [prompt] + [None] * (len(chunks) - 1)
    check_chat(plain)


def test_usage_of_each_chunk(served):
    """Catches counts that begin at the end, or come unasked."""
    body = {"model": MODEL, "messages": ASK[CHAT]["messages"], "max_tokens": 6, "stream": True}
    for options, is_counted in (({}, False), ({"continuous_usage_stats": True}, True)):
        with served.http() as http:
            reply = http.post(CHAT, json=body | {"stream_options": {"include_usage": True, **options}})
        *chunks, last = events(reply)
        counts = [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert last["usage"]["completion_tokens"] == 6
        if is_counted:
            assert counts == sorted(counts)
            assert 1 <= counts[1] < counts[-1] == 6  # a chunk may hold several tokens
        else:
            assert counts == [None] * len(counts)


def test_tokens_are_named_by_their_ids(served):
    """Catches names that two tokens share where a client asked for ids."""
    options = {
        "max_tokens": 3,
        "temperature": 0,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
    }
    with served.http() as http:
        text = http.post(TEXT, json={"prompt": "One", "logprobs": 1, **options}).json()["choices"][0]
        messages = [{"role": "user", "content": "Hi"}]
        more = {"messages": messages, "logprobs": True, "top_logprobs": 1}
        chat = http.post(CHAT, json={**more, **options}).json()["choices"][0]
    assert text["logprobs"]["tokens"] == [f"token_id:{i}" for i in text["token_ids"]]
    assert all(name.startswith("token_id:") for one in text["logprobs"]["top_logprobs"] for name in one)
    named = [entry["token"] for entry in chat["logprobs"]["content"]]
    assert named == [f"token_id:{i}" for i in chat["token_ids"]][: len(named)]
