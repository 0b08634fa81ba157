"""RoPE tables, plain and scaled, against transformers' own functions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kukri.config import RopeConfig, RopeScaling
from kukri.errors import ConfigError
from kukri.kernels.rope_rows import RopeRows
from kukri.models.rope import attention_factor, inverse_frequencies, rope_frequencies, with_scaling
from tests.lazy_imports import lazy_imports
from tests.models.tiny_llama import make_pair

with lazy_imports():
    import torch
    from transformers import LlamaConfig, modeling_rope_utils

HALF = 32
SHORT = tuple(1 + 0.01 * i for i in range(HALF))
LONG = tuple(1 + 0.7 * i for i in range(HALF))
Case = tuple[str, dict[str, Any], dict[str, Any]]
# kind, transformers' parameters, ours
CASES: dict[str, Case] = {
    "linear": ("linear", {"factor": 3.0}, {"factor": 3.0}),
    "dynamic": ("dynamic", {"factor": 4.0}, {"factor": 4.0}),
    "yarn": ("yarn", {"factor": 4.0}, {"factor": 4.0}),
    "yarn-betas": (
        "yarn",
        {"factor": 8.0, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False},
        {"factor": 8.0, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False},
    ),
    "yarn-mscale": (
        "yarn",
        {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
        {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    "yarn-given-attention": (
        "yarn",
        {"factor": 2.0, "attention_factor": 1.25},
        {"factor": 2.0, "attention_factor": 1.25},
    ),
    "llama3": (
        "llama3",
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "longrope": (
        "longrope",
        {"factor": 16.0, "short_factor": list(SHORT), "long_factor": list(LONG)},
        {"factor": 16.0, "short_factors": SHORT, "long_factors": LONG},
    ),
}
ORIGINAL = 2048


def theirs(kind: str, parameters: dict[str, Any], theta: float, n_tokens: int) -> tuple[np.ndarray, float]:
    """transformers' inverse frequencies and attention factor for a sequence of n_tokens."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": theta, **parameters}
    if kind not in ("linear", "dynamic"):
        rope["original_max_position_embeddings"] = ORIGINAL
    config = LlamaConfig(
        head_dim=2 * HALF, num_attention_heads=2, hidden_size=128, max_position_embeddings=ORIGINAL,
        rope_parameters=rope,
    )  # fmt: skip
    init = modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind]
    frequencies, factor = init(config, torch.device("cpu"), seq_len=n_tokens)
    return frequencies.numpy(), factor


def ours(kind: str, parameters: dict[str, Any], theta: float = 10000.0) -> RopeConfig:
    original = 0 if kind == "linear" else ORIGINAL
    return RopeConfig(theta, 2 * HALF, RopeScaling(kind, original_context=original, **parameters))


@pytest.mark.parametrize("max_context", [ORIGINAL, 4 * ORIGINAL])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_transformers_own(name: str, theta: float, max_context: int) -> None:
    """A formula that is nearly right (YaRN taken for theta / factor), or rounded elsewhere: 1 ulp is all."""
    kind, parameters, fields = CASES[name]
    want, want_factor = theirs(kind, parameters, theta, max_context)
    rope = ours(kind, fields, theta)
    got = inverse_frequencies(rope, max_context)
    assert got.dtype == np.float32
    np.testing.assert_array_max_ulp(got, want, maxulp=1)
    assert attention_factor(rope.scaling) == pytest.approx(want_factor, rel=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_every_case_scales_something(name: str) -> None:
    """A scaling that changes nothing here, so that its parity would prove nothing."""
    kind, _, fields = CASES[name]
    rope = ours(kind, fields)
    plain = inverse_frequencies(RopeConfig(10000.0, 2 * HALF), 4 * ORIGINAL)
    changed = inverse_frequencies(rope, 4 * ORIGINAL) != plain
    assert changed.any()
    if kind in ("yarn", "llama3"):
        assert not changed.all()  # the fastest dimensions stay


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_tables_of_short_contexts_differ(name: str) -> None:
    """A table that ignores max_context, or is longrope's long one for everybody."""
    kind, _, fields = CASES[name]
    rope = ours(kind, fields)
    short, long = inverse_frequencies(rope, ORIGINAL), inverse_frequencies(rope, ORIGINAL + 1)
    assert (short != long).any()


def test_the_attention_factor_reaches_the_table() -> None:
    """cos and sin without YaRN's attention factor."""
    table = RopeRows(rope_frequencies(ours("yarn", {"factor": 4.0}), 64))
    table.ensure(64)
    np.testing.assert_allclose(table.cos[0], 1 + 0.1 * math.log(4), rtol=1e-6)
    np.testing.assert_allclose(np.hypot(table.cos, table.sin), 1 + 0.1 * math.log(4), rtol=1e-6)


def test_given_llama3_factors_equal_the_formula() -> None:
    """Divisors of a GGUF file (`rope_freqs.weight`) multiplied, or applied on top of the formula."""
    rope = ours("llama3", CASES["llama3"][2], 500000.0)
    plain = inverse_frequencies(RopeConfig(500000.0, 2 * HALF), ORIGINAL)
    want = inverse_frequencies(rope, ORIGINAL)
    given = RopeScaling("llama3", factors=tuple((plain / want).tolist()))
    got = inverse_frequencies(RopeConfig(500000.0, 2 * HALF, given), ORIGINAL)
    np.testing.assert_array_max_ulp(got, want, maxulp=2)  # the divisor itself is rounded


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "ntk"}, r"'ntk' is not supported: use linear, .*longrope"),
        ({"kind": "linear", "factor": 0.0}, "above 0"),
        ({"kind": "linear", "factor": math.nan}, "above 0"),
        ({"kind": "yarn", "factor": 2.0}, "requires the context"),
        ({"kind": "longrope", "original_context": 64}, "short and long factors"),
        ({"kind": "yarn", "original_context": 64, "attention_factor": -1.0}, "attention factor"),
        ({"kind": "yarn", "original_context": 64, "beta_slow": 40.0}, "beta_slow"),
        ({"kind": "llama3", "original_context": 64, "low_freq_factor": 4.0}, "low_freq_factor"),
        ({"kind": "llama3", "factors": (1.0, -2.0)}, "above 0"),
    ],
)
def test_scaling_without_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    """A model that runs with NaN angles, or without the scaling it was trained for."""
    with pytest.raises(ConfigError, match=message):
        RopeScaling(**fields)


def test_factors_must_be_one_for_each_frequency() -> None:
    """Factors of another head size, broadcast or cut."""
    with pytest.raises(ConfigError, match="RoPE must have 32 factors, not 2"):
        RopeConfig(10000.0, 2 * HALF, RopeScaling("llama3", factors=(1.0, 2.0)))


def test_a_user_may_stretch_a_model() -> None:
    """A factor on top of the checkpoint's own stretch, a context that stays, or a kind without parameters."""
    config = make_pair(d_head=64, max_context=256)[1]
    yarn = with_scaling(config, "yarn", 4.0)
    assert yarn.max_context == 1024
    assert yarn.rope == RopeConfig(10000.0, 64, RopeScaling("yarn", 4.0, 256))
    assert with_scaling(yarn, "dynamic", 2.0).rope.scaling == RopeScaling("dynamic", 2.0, 256)
    assert with_scaling(yarn, "dynamic", 2.0).max_context == 512
    assert with_scaling(config, "linear", 2.0).rope.scaling == RopeScaling("linear", 2.0)
    for kind in ("longrope", "llama3", "ntk", ""):
        with pytest.raises(ConfigError, match="must be one of linear, dynamic, yarn"):
            with_scaling(config, kind, 2.0)
    for factor in (0.5, math.nan, math.inf):
        with pytest.raises(ConfigError, match="from 1 to"):
            with_scaling(config, "yarn", factor)
    with pytest.raises(ConfigError, match="256 tokens times 100000"):
        with_scaling(config, "yarn", 1e5)
