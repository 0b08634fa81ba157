"""Models whose sizes are no multiple of a vector, such as the tiny ones of other projects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri import LLM
from kukri.config import RopeConfig
from tests.test_llm_safetensors import CHECKPOINTS, exact_logits, make, theirs
from tests.tiny_gguf import tiny_config, write_tiny

_SIZES: list[dict[str, Any]] = [
    {"d_model": 100},
    {"d_head": 24, "rope": RopeConfig(10000.0, 24)},
    {"d_head": 8, "rope": RopeConfig(10000.0, 8)},
    {"d_ffn": 50},
    {"n_heads": 40, "n_kv_heads": 1, "d_head": 10, "rope": RopeConfig(10000.0, 10)},
    {"d_model": 100, "d_head": 10, "d_ffn": 75, "rope": RopeConfig(10000.0, 10)},
]


@pytest.mark.parametrize("sizes", _SIZES, ids=str)
@pytest.mark.parametrize("weight_type", ["F32", "BF16"])
def test_odd_sizes_run_on_the_cpu_backend(tmp_path: Path, sizes: dict[str, Any], weight_type: str) -> None:
    """Catches a refusal, and a sum over columns that lie after a row's own."""
    path = write_tiny(tmp_path / "odd.gguf", replace(tiny_config(), **sizes), weight_type=weight_type)
    with LLM(path) as llm, LLM(path, backend="reference") as reference:
        assert llm.engine_config.backend == "cpu"
        ids = list(range(40))
        want = reference.logits(ids)
        np.testing.assert_allclose(llm.logits(ids), want, atol=2e-3 * np.abs(want).max())
        answers = [one.generate(ids, max_tokens=8, temperature=0).token_ids for one in (llm, reference)]
        assert answers[0] == answers[1]


@pytest.mark.parametrize("sizes", _SIZES, ids=str)
def test_results_do_not_depend_on_the_batch(tmp_path: Path, sizes: dict[str, Any]) -> None:
    """Catches a token that reads what another left after its columns."""
    path = write_tiny(tmp_path / "odd.gguf", replace(tiny_config(), **sizes))
    texts = [[7, 8, 9], list(range(40)), [200] * 17]
    with LLM(path) as llm:
        together = llm.generate(texts, max_tokens=12, temperature=0)
        alone = [llm.generate(text, max_tokens=12, temperature=0) for text in texts]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]


@pytest.mark.parametrize("sizes", _SIZES[1:3], ids=str)
def test_a_callers_cache_holds_odd_heads(tmp_path: Path, sizes: dict[str, Any]) -> None:
    """A cache refused as another model's, because the backend's heads are larger than the model's."""
    path = write_tiny(tmp_path / "odd.gguf", replace(tiny_config(), **sizes))
    with LLM(path) as llm:
        ids = np.arange(20)[None]
        whole = llm.model.forward(ids)
        cache = llm.model.new_cache(1, 32)
        parts = [llm.model.forward(ids[:, start:stop], cache=cache) for start, stop in ((0, 7), (7, 20))]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=2e-3 * np.abs(whole).max())


def test_a_model_without_attention_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A division by the bytes of a page, which are 0 where no layer has keys and values."""
    kind, facts = CHECKPOINTS["lfm2-biases"]
    monkeypatch.setitem(CHECKPOINTS, "convolutions", (kind, {**facts, "layer_types": ["conv"] * 4}))
    directory, _ = make(tmp_path, "convolutions")
    with LLM(directory) as llm, LLM(directory, backend="reference") as reference:
        assert llm.engine_config.backend == "cpu"
        prompt = list(range(40))
        want = reference.logits(prompt)
        np.testing.assert_allclose(llm.logits(prompt), want, atol=1e-3 * np.abs(want).max())
        once = llm.generate(prompt, max_tokens=8, temperature=0).token_ids
        assert llm.generate(prompt, max_tokens=8, temperature=0).token_ids == once


ODD_STATES: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"mamba_d_state": 20, "mamba_n_heads": 16},
    "nemotron_h": {"ssm_state_size": 9, "mamba_head_dim": 5},
    "qwen3_5_text": {"linear_key_head_dim": 12, "linear_value_head_dim": 21},
    "lfm2": {"hidden_size": 72},
    "deepseek_v2": {"v_head_dim": 10, "kv_lora_rank": 24, "qk_nope_head_dim": 6},
}


@pytest.mark.full(but=["nemotron_h"])
@pytest.mark.parametrize("kind", ODD_STATES)
def test_odd_states_and_heads_with_matrices_run_on_the_cpu_backend(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a kernel that reads a state's rows past their end, or writes a head over the next one."""
    name, facts = CHECKPOINTS[kind]
    monkeypatch.setitem(CHECKPOINTS, kind, (name, {**facts, **ODD_STATES[kind]}))
    directory, model = make(tmp_path, kind)
    ids = list(range(40))
    want = theirs(model, ids)
    np.testing.assert_allclose(exact_logits(directory, ids), want, atol=1e-4 * max(1, np.abs(want).max() / 7))
    cpu, reference = (exact_logits(directory, ids, None, name, "f16") for name in ("cpu", "reference"))
    np.testing.assert_allclose(cpu, reference, atol=2e-3 * max(1, np.abs(want).max() / 7))
    with LLM(directory, backend="cpu") as llm:
        together = llm.generate([ids, ids[:9]], max_tokens=8, temperature=0)
        assert together[1].token_ids == llm.generate(ids[:9], max_tokens=8, temperature=0).token_ids


def test_taps_of_odd_heads_have_their_size(tmp_path: Path) -> None:
    """Catches a head's filling that a listener sees."""
    path = write_tiny(tmp_path / "odd.gguf", replace(tiny_config(), **_SIZES[1]))
    with LLM(path) as llm, LLM(path, backend="reference") as reference:
        seen = []
        for one in (llm, reference):
            _, cache = one.run_with_cache(list(range(20)))
            seen.append([cache["blocks.0.attn.hook_rot_q"], cache["blocks.1.attn.hook_z"]])
    for got, want in zip(*seen, strict=True):
        assert (got.shape, got.shape[-1]) == (want.shape, 24)
        np.testing.assert_allclose(got, want, atol=2e-3 * np.abs(want).max())
