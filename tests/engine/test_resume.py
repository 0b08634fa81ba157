"""Requests that continue after tokens that another engine generated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kukri import LLM
from kukri.engine import Request
from kukri.errors import RequestError
from kukri.sampling import Grammar, ReasoningLimit, SampledToken, SamplingParams, resolve_texts
from tests.tiny_gguf import tiny_config, write_tiny

N = 40
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 7},
    "filters": {"seed": 1, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 1.5},
    "xtc": {"seed": 2, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    "mirostat": {"seed": 3, "mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.3},
    "penalties": {"seed": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "repeat_last_n": 16},
    "dry": {"seed": 5, "dry_multiplier": 0.8, "temperature": 0.3},
    "bad words": {"seed": 6, "bad_words": ["ab", "c"], "logit_bias": {65: 5.0}},
    "grammar": {"seed": 8, "grammar": Grammar.regex("[a-z ]{10,60}!")},
    "reasoning": {"seed": 9, "reasoning_limit": ReasoningLimit(12, 256, 257, is_open=True)},
    "logprobs": {"seed": 10, "logprobs": 2},
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", tiny_config(max_context=256))
    with LLM(path, n_threads=1) as made:
        yield made


def params_of(llm: LLM, kind: str) -> SamplingParams:
    options = {"max_tokens": N, "ignore_eos": kind != "grammar", **KINDS[kind]}
    return resolve_texts(SamplingParams(**options), llm.tokenizer)


def run(llm: LLM, request: Request) -> list[float | None]:
    """Runs a request to its end; the state of mirostat after each token."""
    engine, states = llm.engine, []
    engine.add_request(request)
    while engine.has_work:
        states += [request.sampler.mirostat_mu for _ in engine.step()]
        engine.check_integrity()
    return states


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_request_continues_as_if_nothing_had_happened(llm: LLM, kind: str) -> None:
    """Catches random numbers, penalties, grammars or mirostat that begin again."""
    params, prompt = params_of(llm, kind), llm.tokenizer.encode("Once upon a time, far away")
    whole = llm.engine.maker.make_request(prompt, params)
    states = run(llm, whole)
    tokens = whole.answer.sampled or [SampledToken(token) for token in whole.output_ids]
    for n in (1, 2, len(tokens) // 2, len(tokens) - 1):
        resumed = llm.engine.maker.make_request(prompt, params)
        resumed.resume(tokens[:n], states[n - 1])
        run(llm, resumed)
        assert resumed.output_ids == whole.output_ids
        assert resumed.answer.finish_reason == whole.answer.finish_reason
        assert resumed.answer.sampled == whole.answer.sampled
        assert resumed.answer.cumulative_logprob == pytest.approx(whole.answer.cumulative_logprob)


def test_the_kinds_do_what_they_are_for(llm: LLM) -> None:
    """Catches kinds of sampling that all give the same tokens, whose state nothing depends on."""
    prompt = llm.tokenizer.encode("Once upon a time, far away")
    requests = {kind: llm.engine.maker.make_request(prompt, params_of(llm, kind)) for kind in KINDS}
    for request in requests.values():
        run(llm, request)
    assert len({tuple(request.output_ids) for request in requests.values()}) == len(KINDS)
    assert 257 in requests["reasoning"].output_ids[:13]


def test_only_what_is_left_is_generated(llm: LLM) -> None:
    """Catches a resumed request that generates max_tokens once more."""
    params, prompt = params_of(llm, "greedy"), llm.tokenizer.encode("Hi")
    request = llm.engine.maker.make_request(prompt, params)
    with pytest.raises(RequestError, match="cannot be resumed: 40 tokens are too many"):
        request.resume([SampledToken(1)] * N)
    request.resume([])
    assert request.n_generated == 0
