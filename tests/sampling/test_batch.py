"""Requests that share a step: each gets the tokens that it would get alone, and by the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kukri.errors import KukriError, ShapeError
from kukri.kernels.cpu import CpuBackend
from kukri.kernels.host_step import HostLogits
from kukri.kernels.reference_sampling import ReferenceSampling
from kukri.kernels.sampling_record import SamplingRecords
from kukri.sampling import RequestSampler, SamplingError, SamplingParams, sample_rows, token_logprobs
from kukri.sampling.params import SAMPLERS
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import torch

    from kukri.kernels.pytorch.sampling import TorchSampling
    from kukri.kernels.pytorch.step import TensorLogits

REFERENCE = ReferenceSampling()
N_VOCAB = 1003
PHRASES = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=4)
PARAMS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 99),
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.7]),
        "logprobs": st.sampled_from([None, 0, 3]),
        "samplers": st.permutations(SAMPLERS),
        "bad_words": PHRASES,
    },
    optional={
        "top_k": st.sampled_from([1, 30]),
        "top_p": st.sampled_from([0.3, 0.95]),
        "min_p": st.sampled_from([0.02, 0.5]),
        "typical_p": st.sampled_from([0.4, 0.95]),
        "top_n_sigma": st.sampled_from([0.7, 2.0]),
        "xtc_probability": st.sampled_from([0.5, 1.0]),
        "dynatemp_range": st.sampled_from([0.4]),
        "repetition_penalty": st.sampled_from([0.8, 1.2]),
        "presence_penalty": st.sampled_from([-1.0, 1.0]),
        "frequency_penalty": st.sampled_from([0.5]),
        "repeat_last_n": st.sampled_from([0, 3, -1]),
        "dry_multiplier": st.sampled_from([0.8]),
        "dry_sequence_breakers": PHRASES,
        "logit_bias": st.dictionaries(st.integers(0, N_VOCAB - 1), st.floats(-5, 5), max_size=5),
        "min_tokens": st.sampled_from([2]),
    },
).map(lambda fields: {"dry_sequence_breakers": ()} | fields)
MIROSTAT = st.fixed_dictionaries(
    {"mirostat": st.sampled_from([1, 2]), "seed": st.integers(0, 99), "mirostat_tau": st.floats(0.1, 8)}
)


class OnTensors:
    """Sampling by PyTorch, as on a device."""

    def __init__(self, host: Any) -> None:
        self._sampling = TorchSampling(lambda: host)

    def choose(self, records: Any, logits: Any) -> None:
        self._sampling.choose(records, TensorLogits(torch.from_numpy(logits.numpy())))


@pytest.fixture(scope="module", params=["cpu", "torch"])
def sampling(request: Any) -> Any:
    backend = CpuBackend(2)
    yield backend.sampling if request.param == "cpu" else OnTensors(backend.sampling)
    backend.close()


def steps_of(seed: int, n_requests: int, n_steps: int) -> np.ndarray:
    """Logits [steps, requests, V], where a few tokens come again and again."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (n_steps, n_requests, N_VOCAB))
    logits[:, :, :10] += 7
    return logits.astype(np.float32)


@pytest.mark.full(but=["cpu"])
@pytest.mark.representative(2)
@settings(max_examples=25)
@given(asked=st.lists(PARAMS | MIROSTAT, min_size=1, max_size=31), seed=st.integers(0, 2**32))
def test_batch_mates_do_not_matter(sampling: Any, asked: list[dict[str, Any]], seed: int) -> None:
    """Would catch a token that depends on who shares the step, or on how it was computed."""
    params = [SamplingParams(**fields) for fields in asked]
    prompt = [1, 2, 3, 4, 1, 2]
    logits = steps_of(seed, len(params), 6)
    together = [RequestSampler(p, prompt, N_VOCAB, sampling, [0]) for p in params]
    alone = [RequestSampler(p, prompt, N_VOCAB, REFERENCE, [0]) for p in params]
    for step in logits:
        for i, result in enumerate(sample_rows(together, HostLogits(step), sampling)):
            if isinstance(result, KukriError):
                with pytest.raises(type(result), match=str(result)):
                    alone[i](step[i])
                continue
            want = alone[i](step[i])
            assert result.id == want.id, asked[i]
            assert result.logprob == pytest.approx(want.logprob, abs=1e-6)
            assert [j for j, _ in result.top_logprobs or ()] == [j for j, _ in want.top_logprobs or ()]


def test_plain_records_are_kept_only_for_the_same_requests(sampling: Any) -> None:
    """Would catch the settings, or the random number, of a request that had the record before."""
    records = SamplingRecords()
    asked = [SamplingParams(seed=1), SamplingParams(temperature=0), SamplingParams(seed=2, top_k=3)]
    steps = [(0, 1), (0, 1), (1, 0), (0, 2), (1,), (1,), (2,), (0, 1, 2), (0, 1)]
    together = [RequestSampler(p, [1], N_VOCAB, sampling) for p in asked]
    alone = [RequestSampler(p, [1], N_VOCAB, REFERENCE) for p in asked]
    biased = RequestSampler(SamplingParams(seed=3, logit_bias={4: 9.0}), [1], N_VOCAB, sampling)
    for n, chosen in enumerate(steps):
        if n % 3 == 2:  # another kind of record in between
            sample_rows([biased], HostLogits(steps_of(n + 50, 1, 1)[0]), sampling, records)
        rows = steps_of(n, len(chosen), 1)[0]
        got = sample_rows([together[i] for i in chosen], HostLogits(rows), sampling, records)
        assert got == [alone[i](row) for i, row in zip(chosen, rows, strict=True)], n


@pytest.mark.parametrize("n_vocab", [16, 100, 256, 1003, 4096])
def test_of_equal_logits_the_first_is_greedy(n_vocab: int) -> None:
    """Would catch a token of the wrong lane, vector or group of maxima."""
    backend = CpuBackend(1)
    sampler = RequestSampler(SamplingParams(temperature=0), [1], n_vocab, backend.sampling)
    rng = np.random.default_rng(n_vocab)
    for first in {0, 1, 15, n_vocab - 1, *rng.integers(0, n_vocab, 50).tolist()}:
        row = rng.normal(0, 1, n_vocab).astype(np.float32)
        row[[first, *rng.integers(first, n_vocab, 3)]] = 9.0
        assert sampler(row).id == first
    backend.close()


@pytest.mark.parametrize("fault", ["nan", "inf", "nothing", "processor"])
def test_a_row_that_fails_fails_alone(sampling: Any, fault: str) -> None:
    """Would catch a bad row that takes its neighbours, or the step, with it."""
    logits = steps_of(1, 5, 1)[0]
    before = logits.copy()
    params = [SamplingParams(seed=i) for i in range(5)]
    if fault == "processor":
        params[2] = SamplingParams(seed=2, logits_processors=[lambda ids, row: row[0]])
    else:
        logits[2, 700 if fault != "nothing" else slice(None)] = {"nan": np.nan, "inf": np.inf}.get(
            fault, -np.inf
        )
    samplers = [RequestSampler(p, [1], N_VOCAB, sampling) for p in params]
    results = sample_rows(samplers, HostLogits(logits), sampling)
    assert isinstance(results[2], SamplingError)
    for i in (0, 1, 3, 4):
        assert results[i] == RequestSampler(params[i], [1], N_VOCAB, REFERENCE)(before[i])


def test_given_tokens_are_scored(sampling: Any) -> None:
    """Would catch prompt log-probabilities other than those of the softmax."""
    row = steps_of(3, 1, 1)[0, 0]
    row[[5, 90]] = row.max() + 1
    exact = row - np.log(np.exp(row.astype(np.float64)).sum())
    for ops in (sampling, REFERENCE):
        token = token_logprobs(7, HostLogits(row[None]), 4, ops)
        assert token.id == 7
        assert token.logprob == pytest.approx(exact[7], abs=1e-6)
        best = np.argsort(-row, kind="stable")[:4]
        assert [i for i, _ in token.top_logprobs or ()] == best.tolist()
        np.testing.assert_allclose([x for _, x in token.top_logprobs or ()], exact[best], atol=1e-6)
        assert token_logprobs(3, HostLogits(row[None]), 0, ops).top_logprobs == ()
        assert len(token_logprobs(3, HostLogits(row[None, :20]), 50, ops).top_logprobs or ()) == 20
        with pytest.raises(SamplingError):
            token_logprobs(0, HostLogits(np.full((1, 30), np.nan, np.float32)), 1, ops)


def test_rows_must_be_those_of_the_requests(sampling: Any) -> None:
    """Would catch memory read beyond the logits."""
    samplers = [RequestSampler(SamplingParams(), [1], N_VOCAB, REFERENCE) for _ in range(3)]
    for shape in ((2, N_VOCAB), (3, N_VOCAB - 1)):
        with pytest.raises(ShapeError):
            sample_rows(samplers, HostLogits(np.zeros(shape, np.float32)), sampling)
    assert sample_rows([], HostLogits(np.zeros((0, N_VOCAB), np.float32)), sampling) == []
