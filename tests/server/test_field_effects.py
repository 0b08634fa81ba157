"""Each field that the reference calls applied changes the tokens, the events or the answer's own fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from kukri import LLM
from tests.dialects.families import FAMILIES
from tests.server.live_server import MODEL, serving
from tests.server.test_fields import BODIES, PATHS, REFERENCE

COUNTING = "Write yes, yes, yes, yes, yes, yes. Write yes, yes, yes, yes, yes, yes. Write yes, yes,"
TURN = [{"role": "user", "content": COUNTING}]
OTHER_TURN = [{"role": "user", "content": "Why is the sky blue?"}]
TOOL = {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
STEER = [{"op": "add", "name": "blocks.3.hook_resid_post", "vector": [5.0] * 576}]
WARM = {"temperature": 1.5, "seed": 1}
EOS = {"logit_bias": {"2": 100.0}}
AGAIN = {"temperature": 0.0, "dry_multiplier": 0.3, "dry_allowed_length": 1}
PENALTY = {"temperature": 0.0, "repetition_penalty": 1.8}
# fields that change no token and no event, and why, or the test that has what they need
ELSEWHERE = {
    "speculation": "drafts change no bit",
    "max_draft_tokens": "drafts change no bit",
    "prediction": "drafts change no bit",
    "priority": "the order of requests",
    "user": "whose turn it is",
    "model": "the model's name",
    "keep_alive": "when the model is unloaded",
    "options": "its fields are listed",
    "adapter": "test_served_adapters.py",
    "images": "test_ollama.py",
    "suffix": "test_llama_cpp.py",
    "previous_response_id": "test_response_tools.py",
    "store": "test_response_tools.py",
    "include": "test_response_tools.py",
    "parallel_tool_calls": "test_tools.py",
    "parse_special": "test_llama_cpp.py",
    "n_indent": "test_llama_cpp.py",
    "thinking_token_budget": "test_thinking.py",
    "raw": "test_ollama.py",
}
# field -> (what both requests have besides, the value of the second)
EFFECTS: dict[str, tuple[dict[str, Any], Any]] = {
    "temperature": (WARM, 0.0),
    "seed": (WARM, 2),
    "top_k": (WARM, 1),
    "top_p": (WARM, 0.01),
    "min_p": (WARM, 0.9),
    "typical_p": (WARM, 0.02),
    "top_n_sigma": (WARM, 0.1),
    "dynatemp_range": (WARM, 1.4),
    "dynatemp_exponent": (WARM | {"dynatemp_range": 1.4}, 6.0),
    "xtc_probability": ({"temperature": 0.3, "seed": 1, "xtc_threshold": 0.001}, 1.0),
    "xtc_threshold": ({"temperature": 0.3, "seed": 1, "xtc_probability": 1.0}, 0.001),
    "mirostat": (WARM, 2),
    "mirostat_tau": (WARM | {"mirostat": 2}, 0.1),
    "mirostat_eta": ({"temperature": 1.5, "seed": 4, "mirostat": 2, "mirostat_tau": 6.0}, 1.0),
    "repetition_penalty": ({"temperature": 0.0}, 1.8),
    "presence_penalty": ({"temperature": 0.0}, 2.0),
    "repeat_penalty": ({"temperature": 0.0}, 1.8),
    "frequency_penalty": ({"temperature": 0.0}, 2.0),
    "repeat_last_n": (PENALTY, 1),
    "dry_multiplier": ({"temperature": 0.0, "dry_allowed_length": 1}, 5.0),
    "dry_base": (AGAIN, 60.0),
    "dry_allowed_length": (AGAIN, 60),
    "dry_penalty_last_n": (AGAIN, 1),
    "dry_sequence_breakers": (AGAIN, ["yes", ","]),
    "logit_bias": ({}, {"500": 100.0}),
    "bad_words": ({"temperature": 0.0}, ["yes", " yes", "Yes"]),
    "stop": ({}, [","]),
    "stop_sequences": ({}, [","]),
    "ignore_eos": (EOS, True),
    "min_tokens": (EOS, 3),
    "stop_token_ids": (EOS | {"ignore_eos": True, "logit_bias": {"500": 100.0}}, [500]),
    "samplers": (WARM | {"top_p": 0.6, "top_k": 4}, ["temperature", "top_p", "top_k"]),
    "grammar": ({}, 'root ::= "no" "!"'),
    "json_schema": ({}, SCHEMA),
    "format": ({}, SCHEMA),
    "structured_outputs": ({}, {"regex": "[xyz]{3}"}),
    "response_format": ({}, {"type": "json_object"}),
    "text": ({}, {"format": {"type": "json_object"}}),
    "n": (WARM, 2),
    "best_of": (WARM, 3),
    "n_cmpl": (WARM, 2),
    "logprobs": ({}, True),
    "top_logprobs": ({"logprobs": True}, 2),
    "n_probs": ({}, 2),
    "prompt_logprobs": ({}, 1),
    "stream": ({}, True),
    "stream_options": ({"stream": True}, {"include_usage": True}),
    "usage": ({"stream": True}, {"include": True}),
    "timings_per_token": ({"stream": True}, True),
    "return_progress": ({"stream": True}, True),
    "verbose": ({}, True),
    "return_token_ids": ({}, True),
    "return_tokens": ({}, True),
    "response_fields": ({}, ["content"]),
    "return_tokens_as_token_ids": ({"logprobs": True}, True),
    "skip_special_tokens": (EOS | {"ignore_eos": True}, False),
    "max_tokens": ({}, 2),
    "max_completion_tokens": ({}, 2),
    "max_output_tokens": ({}, 2),
    "n_predict": ({}, 2),
    "num_predict": ({}, 2),
    "num_ctx": ({}, 43),
    "interventions": ({}, STEER),
    "echo": ({}, True),
    "system": ({}, "Speak French."),
    "instructions": ({}, "Speak French."),
    "messages": ({}, OTHER_TURN),
    "prompt": ({}, "Why is the sky blue?"),
    "input": ({}, "Why is the sky blue?"),
    "tools": ({}, [{"type": "function", "function": TOOL}]),
    "metadata": ({}, {"a": "b"}),
    "tool_choice": ({"tools": [{"type": "function", "function": TOOL}]}, "required"),
}
EFFECTS |= {
    "reasoning": ({}, {"effort": "none"}),
    "think": ({}, False),
    "enable_thinking": ({}, False),
    "thinking": ({}, {"type": "disabled"}),
    "reasoning_effort": ({}, "none"),
    "output_config": ({}, {"format": {"type": "json_schema", "schema": SCHEMA}}),
    "chat_template_kwargs": ({}, {"enable_thinking": False}),
    "add_generation_prompt": ({}, False),
    "continue_final_message": (
        {"messages": [*TURN, {"role": "assistant", "content": "1, 2"}], "add_generation_prompt": False},
        True,
    ),
}
FUNCTION = {"type": "function", **TOOL}
# what an endpoint spells otherwise
OWN: dict[tuple[str, str], tuple[dict[str, Any], Any]] = {
    ("resp.", "tools"): ({}, [FUNCTION]),
    ("resp.", "tool_choice"): ({"tools": [FUNCTION]}, "required"),
    ("mess.", "tools"): ({}, [{"name": "now", "input_schema": TOOL["parameters"]}]),
    ("mess.", "tool_choice"): (
        {"tools": [{"name": "now", "input_schema": TOOL["parameters"]}]},
        {"type": "any"},
    ),
    ("mess.", "metadata"): ({}, None),
    ("compl.", "logprobs"): ({}, 1),
    ("compl.", "return_tokens_as_token_ids"): ({"logprobs": 1}, True),
    ("resp.", "top_logprobs"): ({"include": ["message.output_text.logprobs"]}, 2),
    ("Ollama chat", "stream"): ({}, True),
    ("generate", "stream"): ({}, True),
}
LEAST: dict[str, dict[str, Any]] = {
    "chat": {"messages": TURN, "max_tokens": 12},
    "compl.": {"prompt": COUNTING, "max_tokens": 12},
    "resp.": {"input": COUNTING, "max_output_tokens": 16},
    "mess.": {"messages": TURN, "max_tokens": 12},
    "Ollama chat": {"messages": TURN, "stream": False, "options": {"num_predict": 12}},
    "generate": {"prompt": COUNTING, "stream": False, "options": {"num_predict": 12}},
    "llama.cpp": {"prompt": COUNTING, "n_predict": 12},
}
# what differs between two answers to one request, and settings that are told again
TOLD = (
    "id",
    "created",
    "created_at",
    "completed_at",
    "timings",
    "total_duration",
    "load_duration",
    "eval_duration",
    "prompt_eval_duration",
    "generation_settings",
    "cached_tokens",
    "prompt_tokens_details",
    "input_tokens_details",
    "cache_read_input_tokens",
    "input_tokens",
    "item_id",
    "tokens_cached",
    "cache_n",
    "prompt_n",
    "time_ms",
)
TOLD_OF_RESPONSES = frozenset(EFFECTS) - {"text", "metadata", "logprobs", "top_logprobs"}


def effect(value: Any, told: frozenset[str]) -> Any:
    """What a request has made: a JSON value without what differs anyhow."""
    if isinstance(value, dict):
        return {key: None if key in told else effect(item, told) for key, item in value.items()}
    return [effect(item, told) for item in value] if isinstance(value, list) else value


def ask(http: httpx.Client, where: str, body: Mapping[str, Any]) -> Any:
    """What an endpoint makes of a body: its answer, or its events."""
    answer = http.post(PATHS[where], json={"model": MODEL, **body})
    if answer.status_code != 200:
        return f"{answer.status_code}: {answer.text[:150]}"
    lines = [
        line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith(("data: ", "{"))
    ]
    events = (
        [json.loads(line) for line in lines if line.startswith("{")] if len(lines) > 1 else [answer.json()]
    )
    return effect(events, frozenset(TOLD) | (TOLD_OF_RESPONSES if where == "resp." else frozenset()))


@pytest.fixture(scope="module")
def thinking(smollm2_path: Path) -> Iterator[httpx.Client]:
    """A server whose template has tools and thoughts."""
    with (
        LLM(smollm2_path, max_context=256, max_requests=4, chat_template=FAMILIES["qwen"].template) as llm,
        serving(llm, has_interp=True) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        yield http


@pytest.mark.full
@pytest.mark.parametrize("where", LEAST)
def test_each_applied_field_changes_the_answer(thinking: httpx.Client, where: str) -> None:
    """Catches a field that is taken and that nothing obeys, and one that nobody has looked at."""
    faults: list[str] = []
    without: dict[str, Any] = {}  # answers to requests that many fields share
    known = LEAST[where].keys() | {name for name, fate in REFERENCE["fates"](BODIES[where]).items()}
    for name, fate in REFERENCE["fates"](BODIES[where]).items():
        field = name.removeprefix("options.")
        if fate != "applied" or field in ELSEWHERE:
            continue
        if (found := OWN.get((where, field), EFFECTS.get(field))) is None:
            faults.append(f"{name}: no case")
            continue
        context, value = found
        if value is None:
            continue
        base = {key: dict(item) if isinstance(item, dict) else item for key, item in LEAST[where].items()}
        given = {"temperature": 0.0, **context}
        for one, item in given.items():
            if f"options.{one}" in known:
                base["options"][one] = item
            elif one in known:
                base[one] = item
        changed = {**base, field: value}
        if field == "max_completion_tokens":  # another name of one that is there
            del changed["max_tokens"]
        if name.startswith("options."):
            changed = {**base, "options": {**base["options"], field: value}}
        if (key := json.dumps(base)) not in without:
            without[key] = ask(thinking, where, base)
        before, after = without[key], ask(thinking, where, changed)
        if before == after or isinstance(before, str) or isinstance(after, str):
            faults.append(
                f"{name}: {str(before)[:200]} and {'the same' if before == after else str(after)[:200]}"
            )
    assert not faults, "\n".join(faults)
