"""Which parameters hold where a request says nothing."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kukri import LLM, SamplingParams
from kukri.errors import RequestError
from kukri.formats import hub
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.writer import write_gguf
from kukri.formats.sampling_advice import (
    advice_keys,
    generation_keys,
    gguf_advice,
    huggingface_advice,
)
from kukri.sampling import default_params
from kukri.sampling.defaults import OWN_DEFAULTS
from tests.tiny_gguf import write_tiny


@pytest.mark.parametrize(
    ("stated", "advice"),
    [
        ({}, {}),
        ({"eos_token_id": 2, "transformers_version": "5"}, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05},
        ),
        (
            {"top_p": None, "min_p": 0.1, "typical_p": 0.9},
            {"min_p": 0.1, "typical_p": 0.9},
        ),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
    ],
)
def test_a_generation_config_advises(stated: dict[str, Any], advice: dict[str, Any]) -> None:
    """A checkpoint's advice that nobody reads, or greedy decoding where it is not wanted."""
    assert huggingface_advice(stated) == advice


def test_gguf_metadata_advises() -> None:
    """llama.cpp's keys missed, or 0.949999988 told for 0.95."""
    stated = {
        "general.sampling.temp": float(np.float32(0.6)),
        "general.sampling.top_p": np.float32(0.95),
        "general.sampling.top_k": 20,
        "general.sampling.penalty_repeat": float(np.float32(1.05)),
        "general.sampling.penalty_last_n": 64,
        "general.sampling.sequence": "kpt",
    }
    params = default_params(gguf_advice(stated))
    assert params == SamplingParams(
        temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05, repeat_last_n=64
    )


@pytest.mark.parametrize(
    "stated",
    [
        {"do_sample": True, "temperature": 1, "top_k": 20, "top_p": 0.95, "typical_p": 0.9},
        {"do_sample": False},
        {"min_p": 0.05, "repetition_penalty": 1.05, "top_k": 2**31 - 1},
        {"temperature": "hot", "top_k": 1.5},
        {},
    ],
)
def test_converted_files_advise_the_same(stated: dict[str, Any], tmp_path: Path) -> None:
    """Advice that `convert` drops, or writes in another type than llama.cpp reads, either way."""
    write_gguf(tmp_path / "m.gguf", advice_keys(huggingface_advice(stated)), {})
    with GGUFFile(tmp_path / "m.gguf") as file:
        advice = gguf_advice(file.metadata)
    usable = {key: value for key, value in stated.items() if not isinstance(value, str) and value != 1.5}
    assert default_params(advice) == default_params(huggingface_advice(usable))
    assert huggingface_advice(generation_keys(advice)) == advice
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields.values()
    assert advice_keys({"top_k": 2**40, "top_p": "high"}) == {"general.sampling.top_k": 2**31 - 1}
    for field in fields:
        if field.name.startswith("general.sampling"):
            assert field.types[0].name == ("INT32" if field.name.endswith("top_k") else "FLOAT32")


def test_advice_that_cannot_be_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """A model that does not open for a number nobody needs."""
    with caplog.at_level(logging.WARNING):
        params = default_params({"temperature": "hot", "top_p": 7, "top_k": 5})
    assert params == SamplingParams(top_k=5)
    assert "'temperature' must be" in caplog.text
    listed = gguf_advice({"general.sampling.top_k": np.array([1, 2])})
    assert default_params(listed) == SamplingParams(**OWN_DEFAULTS)
    assert default_params({"top_p": []}) == SamplingParams(**OWN_DEFAULTS)
    assert default_params({}) == SamplingParams(**OWN_DEFAULTS)
    mirostat = default_params({"top_k": 5, "mirostat": 2})
    assert (mirostat.mirostat, mirostat.top_k) == (2, 0)


def test_given_values_win() -> None:
    """A request refused because of a default, or a default that is kept against it."""
    defaults = SamplingParams(temperature=0.6, top_p=0.9, min_p=0.1, frequency_penalty=0.5)
    assert defaults.replace() is defaults
    assert defaults.replace(temperature=0) == SamplingParams(
        temperature=0, top_p=0.9, min_p=0.1, frequency_penalty=0.5
    )
    assert defaults.replace(mirostat=2) == SamplingParams(temperature=0.6, frequency_penalty=0.5, mirostat=2)
    assert defaults.replace(samplers=["top_p", "temperature"]) == SamplingParams(
        temperature=0.6, top_p=0.9, samplers=["top_p", "temperature"]
    )
    with pytest.raises(RequestError, match="'samplers' must be"):
        defaults.replace(samplers=["top_p", "temperature"], top_k=3)
    with pytest.raises(RequestError, match="'mirostat' must be 0"):
        defaults.replace(mirostat=2, top_k=3)


def test_a_model_brings_its_defaults(tmp_path: Path) -> None:
    """Advice that stays in the file."""
    own = {"general__sampling__temp": np.float32(0.3), "general__sampling__top_k": 7}
    path = write_tiny(tmp_path / "own.gguf", **own)
    with LLM(path, backend="reference") as llm:
        assert llm.default_params == SamplingParams(temperature=0.3, top_k=7)
        want = llm.generate("hi", llm.default_params, seed=1, max_tokens=20)
        assert llm.generate("hi", seed=1, max_tokens=20).token_ids == want.token_ids
        plain = llm.generate("hi", SamplingParams(seed=1, max_tokens=20))
        assert plain.token_ids != want.token_ids, "parameters that are given are whole"
    with LLM(write_tiny(tmp_path / "none.gguf"), backend="reference") as llm:
        assert llm.default_params == SamplingParams(**OWN_DEFAULTS)


@pytest.mark.full
def test_the_default_model_has_measured_ones(smollm2_path: Path) -> None:
    """The poem that says one line over and over, or five words twice."""
    with LLM(smollm2_path, max_context=1024) as llm:
        known = hub.known_sampling(smollm2_path)
        if known:  # else $KUKRI_TEST_MODEL is another file
            assert llm.default_params == SamplingParams(**known)
        request = [{"role": "user", "content": "Write a short poem about rain."}]
        params = llm.default_params.replace(**hub.MODELS[hub.DEFAULT_MODEL].sampling)
        for seed in range(3):
            ids = llm.chat(request, params, seed=seed, max_tokens=160).token_ids
            pieces = [tuple(ids[i : i + 6]) for i in range(len(ids) - 5)]
            assert max(map(pieces.count, pieces)) < 5, json.dumps(ids)
        for seed in range(8):
            text = llm.chat(request, params, seed=seed, max_tokens=160).text
            words = text.lower().split()
            phrases = [tuple(words[i : i + 5]) for i in range(len(words) - 4)]
            assert len(set(phrases)) == len(phrases), text
