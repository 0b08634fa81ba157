"""Odd but legal configurations: each is right or refused by name, and none is wrong in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.odd_configurations import Case, Outcome, cases, outcome
from tests.test_llm_safetensors import RUN

IN_CI = ("llama", "gemma2", "qwen3_moe", "falcon_h1")


def test_the_matrix_is_large() -> None:
    """Catches kinds or fields that leave the matrix without a line that says why."""
    assert sum(len(cases(kind)) for kind in RUN) >= 1500


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUN)
def test_no_odd_configuration_is_wrong_in_silence(kind: str, tmp_path: Path) -> None:
    """Catches a field of config.json that is read past, and a library's exception in place of a refusal."""
    check(kind, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("kind", [kind for kind in IN_CI if kind in RUN])
def test_some_families_have_no_wrong_odd_configuration(kind: str, tmp_path: Path) -> None:
    """Catches the same for a family of each sort: plain, with windows, with experts, with states."""
    check(kind, tmp_path)


# One case of each fact that once belonged to some families alone
FREED = (
    Case("llama", "hidden_act", "relu2"),
    Case("phi", "hidden_act", "gelu"),
    Case("gemma4_moe_text", "hidden_activation", "silu"),
    Case("qwen2_moe", "hidden_act", "tanh"),
    Case("nemotron_h_moe", "mlp_hidden_act", "sigmoid"),
    Case("apertus", "hidden_act", "silu"),
    Case("mamba2", "hidden_act", "tanh"),
    Case("nemotron_h", "mamba_hidden_act", "gelu"),
    Case("mamba2", "time_step_limit", [0.01, 0.1]),
    Case("nemotron_h", "time_step_min", 0.1),
    Case("nemotron_h_moe", "moe_latent_size", 23),
    Case("nemotron_h_moe", "n_shared_experts", 2),
    Case("gpt_oss", "swiglu_limit", 0.5),
    Case("qwen3_moe", "decoder_sparse_step", 2),
    Case("qwen2_moe", "mlp_only_layers", [2]),
    Case("ernie4_5_moe", "moe_layer_end_index", 2),
    Case("ernie4_5_moe", "use_bias", True),
    Case("stablelm", "use_parallel_residual", True),
    Case("stablelm", "qk_layernorm", True),
    Case("phi", "qk_layernorm", True),
    Case("phi", "tie_word_embeddings", True),
    Case("gpt_neox", "use_parallel_residual", False),
    Case("gpt_neox", "is_decoder", True),
    Case("falcon_h1", "attention_bias", True),
    Case("falcon_h1-normed", "mamba_norm_before_gate", True),
    Case("olmo", "clip_qkv", 0.5),
    Case("olmoe", "clip_qkv", 0.5),
    Case("llama", "rms_norm_eps", 0.0),
    Case("olmo2", "hidden_size", 65),
    Case("glm4", "head_dim", 31),
    Case("qwen3_5_text-grouped", "num_key_value_heads", 1),
)


@pytest.mark.full
@pytest.mark.parametrize("case", FREED, ids=str)
def test_a_fact_is_not_one_of_a_family(case: Case, tmp_path: Path) -> None:
    """Catches a family that refuses an op which another has, or runs without it."""
    assert outcome(case, tmp_path) == Outcome("right")


def check(kind: str, folder: Path) -> None:
    wrong: dict[str, Outcome] = {}
    for i, case in enumerate(cases(kind)):
        found = outcome(case, folder / str(i))
        if found.what in ("wrong", "crashed"):
            wrong[str(case)] = found
    assert wrong == {}
