"""The real SmolLM2-135M against transformers, on prose (A Tale of Two Cities, Dickens 1859)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri import LLM
from kukri.formats.gguf.config import model_config
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.weights import GGUFWeights
from kukri.kernels import make_backend
from kukri.models import Model, load_model
from kukri.tokenizer import Tokenizer
from tests.models import real_llama
from tests.models.tiny_llama import Driver, hf_forward

PROSE = """It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of
foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was
the season of Darkness, it was the spring of hope, it was the winter of despair, we had everything before us,
we had nothing before us, we were all going direct to Heaven, we were all going direct the other way – in
short, the period was so far like the present period, that some of its noisiest authorities insisted on its
being received, for good or for evil, in the superlative degree of comparison only."""


@pytest.fixture(scope="module")
def real(smollm2_path: Path) -> tuple[Model, list[int]]:
    gguf = GGUFFile(smollm2_path)
    config = model_config(gguf)
    ids = Tokenizer.from_gguf(gguf).encode(PROSE.replace("\n", " "))
    return load_model(GGUFWeights(gguf, config), config), ids


@pytest.fixture(scope="module")
def exact(real: tuple[Model, list[int]]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits [T, V] of the reference with float32 keys and values, and the stream before each block."""
    model, ids = real
    residuals: list[np.ndarray] = []
    hooks = {
        f"blocks.{i}.hook_resid_pre": [lambda name, x: residuals.append(x.copy())]
        for i in range(model.config.n_layers)
    }
    return Driver(model, make_backend("reference"), hooks).run(ids, [len(ids)]), residuals


@pytest.mark.full
def test_the_reference_is_within_a_thousandth_of_transformers(
    real: tuple[Model, list[int]], exact: tuple[np.ndarray, list[np.ndarray]], smollm2_path: Path
) -> None:
    """Any difference in arithmetic, in tensor names, in the order of rows or in dequantization.

    float32 sums in two orders through 30 layers: logits of size 20 differ by some 1e-4.
    """
    model, ids = real
    assert 100 <= len(ids) <= 200
    assert model.config.n_heads // model.config.n_kv_heads == 3
    assert model.n_parameters == 134_515_008
    want_logits, want_residuals = hf_forward(real_llama.load(smollm2_path), ids)
    logits, residuals = exact
    assert np.abs(logits - want_logits).max() < 1e-3
    assert (logits.argmax(axis=1) == want_logits.argmax(axis=1)).all()
    for i, (got, want) in enumerate(zip(residuals, want_residuals, strict=True)):
        assert np.abs(got - want).max() < 1e-5 * np.abs(want).max(), f"before block {i}"


@pytest.fixture(scope="module")
def default_logprobs(real: tuple[Model, list[int]], smollm2_path: Path) -> Any:
    """Log-probabilities of the tokens after the prose, with steps and threads as they are by default."""
    with LLM(smollm2_path, max_context=256) as one:
        return one.generate(real[1], temperature=0, max_tokens=8, logprobs=5).logprobs


@pytest.mark.full(but=["64-2"])
@pytest.mark.representative(2)
@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("max_step_tokens", [1, 7, 64, 512])
def test_chunks_and_threads_change_no_bit(
    real: tuple[Model, list[int]],
    default_logprobs: Any,
    smollm2_path: Path,
    n_threads: int,
    max_step_tokens: int,
) -> None:
    """Sums whose order depends on how a prompt was cut or on who computed a tile."""
    ids = real[1]
    with LLM(smollm2_path, max_context=256, n_threads=n_threads, max_step_tokens=max_step_tokens) as other:
        got = other.generate(ids, temperature=0, max_tokens=8, logprobs=5)
    assert got.logprobs == default_logprobs


@pytest.mark.full
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_float16_keys_and_values_cost_little(
    real: tuple[Model, list[int]],
    exact: tuple[np.ndarray, list[np.ndarray]],
    smollm2_path: Path,
    backend: Any,
) -> None:
    """A cache or a kernel that loses more than its rounding: mean KL in nats against float32."""
    ids = real[1][:64]
    want = exact[0][:64].astype(np.float64)  # no token sees the tokens after it
    with LLM(smollm2_path, backend=backend, max_context=64) as llm:
        got = llm.logits(ids).astype(np.float64)
    p, q = (x - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)) - x.max(1, keepdims=True)
            for x in (want, got))  # fmt: skip
    kl = float((np.exp(p) * (p - q)).sum(axis=1).mean())
    assert kl < {"reference": 1e-5, "cpu": 0.01}[backend]
