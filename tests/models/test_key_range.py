"""Keys with a large bias in caches of few bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kukri.kernels import make_backend
from kukri.kernels.backend import Backend
from kukri.kernels.specs import AttentionSpec
from kukri.kernels.weight_handles import RopeFrequencies, Vector
from kukri.models import load_model
from kukri.models.key_range import key_range
from kukri.models.trace import Trace
from kukri.models.weights import NoWeights
from tests.models.biased_keys import biased_model, error
from tests.models.made_models import make
from tests.models.tiny_llama import Driver, random_ids

IDS = random_ids(70, 80)
# Mean errors with the range and without; of keys without a large bias they are 0.010 and 0.19.
ERRORS = {"q8_0": (0.03, 0.3), "q4": (0.33, 0.9)}


@pytest.fixture(params=["reference", "torch", "cpu"])
def backend(request: pytest.FixtureRequest) -> Any:
    made = make_backend(request.param, 2)
    yield made
    if hasattr(made, "close"):
        made.close()


@pytest.mark.full(only=["torch-*"])
@pytest.mark.parametrize("kv_type", list(ERRORS))
def test_a_bias_takes_no_bits(kv_type: Any, backend: Backend) -> None:
    """A middle of other dimensions or of another head, queries that do not know how far keys reach, and an
    op of one backend that forgets the range."""
    model = biased_model()
    want = Driver(model, make_backend("reference", 1)).run(IDS, [len(IDS)])
    most, least = ERRORS[kv_type]
    assert error(model, backend, kv_type, IDS, want) < most
    assert error(biased_model(with_range=False), backend, kv_type, IDS, want) > least


@pytest.mark.parametrize("backend", ["reference", "cpu"], indirect=True)
@pytest.mark.parametrize("kv_type", list(ERRORS))
def test_one_token_and_many_have_the_same_bits(kv_type: Any, backend: Backend) -> None:
    """A range that depends on what else is in a step."""
    model = biased_model()
    whole = Driver(model, backend, kv_type=kv_type).run(IDS, [len(IDS)])
    np.testing.assert_array_equal(Driver(model, backend, kv_type=kv_type).run(IDS, [7, 16, 1]), whole)


def test_the_middle_is_the_mean_of_the_first_positions() -> None:
    """Sums of the wrong sign, dimensions that do not rotate, frequencies of 0, YaRN's factor left out."""
    rope = RopeFrequencies((1.0, 0.01, 1e-4, 0.0), 4096, scale=1.5)
    bias = np.random.default_rng(1).normal(0, 100, (3, 10)).astype(np.float32)
    angles = np.arange(8192)[:, None] * np.array(rope.inverse)
    low, high = bias[:, None, :4], bias[:, None, 4:8]
    turned = 1.5 * (low * np.cos(angles) - high * np.sin(angles))
    other = 1.5 * (high * np.cos(angles) + low * np.sin(angles))
    found = key_range(bias, rope)
    middle, reach = (side.data.reshape(3, 10) for side in (found.middle, found.reach))
    want = np.concatenate([turned.mean(1), other.mean(1), bias[:, 8:]], axis=1)
    np.testing.assert_allclose(middle, want, atol=1 / 32 + 1e-5)
    spread = np.sqrt(turned.var(1) + other.var(1) + 16)
    assert np.abs(np.log2(reach[:, :4] / spread)).max() < 0.51
    np.testing.assert_array_equal(reach[:, 4:8], reach[:, :4])
    assert (reach[:, 8:] == 4).all()
    assert (key_range(bias, None).middle.data == np.rint(16 * bias.reshape(-1)) / 16).all()


class Biased(NoWeights):
    """Zeros, for biases of keys too."""

    def has(self, name: str) -> bool:
        return name.endswith("k_proj.bias")


@pytest.mark.parametrize(
    ("name", "facts", "has_range"),
    [
        ("qwen2", {}, True),
        ("qwen2", {"attention_softcap": 30.0}, False),
        ("qwen2", {"d_head": 48}, False),  # no whole scales of q8_0
        ("gpt_oss", {}, False),
        ("qwen3", {}, False),  # norms follow the bias
    ],
)
def test_who_has_a_range(name: str, facts: dict[str, Any], has_range: bool) -> None:
    """Sinks and softcaps, which see what all scores have in common, and keys that are normed after it."""
    config = replace(make(name)[1], **{"d_head": 32, **facts})
    heads = Trace(load_model(Biased(1 << 30), config)).heads.values()
    assert [one.spec.key_range is not None for one in heads] == [has_range] * len(heads)


@pytest.mark.parametrize("fact", [{"softcap": 3.0}, {"sinks": Vector(np.zeros(2, np.float32))}])
def test_a_range_with_what_sees_a_constant_is_refused(fact: dict[str, Any]) -> None:
    """A subclass that adds sinks and keeps the range."""
    found = key_range(np.zeros((1, 32), np.float32), None)
    with pytest.raises(ValueError, match="range"):
        AttentionSpec(0, 2, 1, 32, 1.0, key_range=found, **fact)
