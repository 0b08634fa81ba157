"""RequestSampler: every parameter, the order, exactness against sorting, and chance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kukri.errors import KukriError, RequestError, ShapeError
from kukri.kernels.host_step import HostLogits
from kukri.kernels.reference_sampling import Candidates, Record, ReferenceSampling, draw, edit_row, run_stages
from kukri.kernels.sampling_record import SamplingRecords
from kukri.sampling import RequestSampler, SampledToken, SamplingError, SamplingParams, sample_rows


def sampler(n_vocab: int, prompt: Any = (), **params: Any) -> RequestSampler:
    return RequestSampler(SamplingParams(**params), prompt, n_vocab, ReferenceSampling())


def record_of(sampler: RequestSampler) -> Record:
    """The record of the sampler's next row."""
    records = SamplingRecords([sampler.settings], [0])
    sampler.prepare(records, 0)
    return Record(records, 0)


def logits_of(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities)).astype(np.float32)


def kept(row: np.ndarray, **params: Any) -> list[int]:
    """The ids that the stages of a request leave."""
    candidates = Candidates(row)
    record = record_of(sampler(len(row), **params))
    edit_row(candidates, record)
    run_stages(candidates, record)
    ids: list[int] = candidates.ids.tolist()
    return ids


def naive_filters(row: np.ndarray, top_k: int, top_p: float, min_p: float) -> tuple[list[int], float]:
    """The ids left by sorting everything in float64, and how near the nucleus came to its limit."""
    x = row.astype(np.float64)
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    order = order[:top_k] if top_k else order
    margin = 1.0
    if top_p < 1:
        odds = np.exp(x[order] - x[order[0]])
        running = np.cumsum(odds) / odds.sum()
        margin = float(np.abs(running - top_p).min())
        order = order[: int(np.argmax(running >= top_p)) + 1]
    odds = np.exp(x[order] - x[order[0]])
    if min_p:
        margin = min(margin, float(np.abs(odds - min_p).min()))
    return sorted(i for i, o in zip(order, odds, strict=True) if o >= min_p), margin


# ---- filters, on distributions made by hand


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    """Would catch an argmax that depends on the order of a reduction."""
    row = np.array([0, 3, 1, 3, 3], np.float32)
    assert sampler(5, temperature=0)(row).id == 1


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.69}, [1, 3]),
        ({"top_p": 0.71}, [0, 1, 3]),
        ({"top_p": 0.0}, [1]),
        ({"top_p": 0.0, "top_k": 3}, [1]),
        ({"min_p": 0.74}, [1, 3]),
        ({"min_p": 0.76}, [1]),
        ({"min_p": 1.0}, [1]),
        ({"temperature": 0.5}, [0, 1, 2, 3]),
    ],
)
def test_each_filter_alone(params: dict[str, Any], expected: list[int]) -> None:
    """Would catch a filter that is off by one token or compares with the wrong quantity."""
    assert kept(logits_of(0.2, 0.4, 0.1, 0.3), **params) == expected


@pytest.mark.parametrize(
    ("probabilities", "params", "expected", "swapped"),
    [
        ((0.4, 0.3, 0.2, 0.1), {"top_k": 2, "top_p": 0.5}, [0], "top_p first: [0, 1]"),
        ((0.4, 0.35, 0.25), {"top_p": 0.5, "min_p": 0.7}, [0, 1], "min_p first: [0]"),
        ((0.5, 0.3, 0.2), {"top_p": 0.75, "temperature": 10}, [0, 1], "temperature first: [0, 1, 2]"),
        ((0.5, 0.3, 0.2), {"min_p": 0.5, "temperature": 0.5}, [0, 1], "temperature first: [0]"),
    ],
)
def test_order_of_filters(
    probabilities: tuple[float, ...], params: dict[str, Any], expected: list[int], swapped: str
) -> None:
    """Would catch two filters being swapped: each case has another answer then."""
    assert kept(logits_of(*probabilities), **params) == expected, swapped


def test_penalties_come_before_top_k() -> None:
    """Would catch penalties applied to what top_k left: the penalized token would still be the only one."""
    row = np.array([5.0, 4.9, 0.0], np.float32)
    assert sampler(3, prompt=[0], repetition_penalty=1.5, top_k=1)(row).id == 1


def test_bias_comes_before_the_repetition_penalty() -> None:
    """Would catch the two swapped: 1 - 2 doubled is -2 and loses; 1 halved - 2 is -1.5 and wins."""
    row = np.array([1.0, -1.75], np.float32)
    assert sampler(2, prompt=[0], temperature=0, logit_bias={0: -2.0}, repetition_penalty=2.0)(row).id == 1


def test_repetition_penalty_divides_and_multiplies() -> None:
    """Would catch dividing a negative logit, which would reward the repetition."""
    row = np.array([-1.0, -1.5, -9], np.float32)
    assert sampler(3, prompt=[0, 0, 0], temperature=0, repetition_penalty=2.0)(row).id == 1
    row = np.array([3.0, 2.0, -9], np.float32)
    assert sampler(3, prompt=[0, 0, 0], temperature=0, repetition_penalty=2.0)(row).id == 1
    assert (
        sampler(3, prompt=[0, 0, 0], temperature=0, repetition_penalty=1.4)(row).id == 0
    )  # once, not three times


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    """Would catch counting the prompt, or presence growing with each repetition."""
    row = np.array([3.0, 2.0, 0.9, -9], np.float32)
    presence = sampler(4, prompt=[0, 0, 0], temperature=0, presence_penalty=1.5)
    assert [presence(row).id for _ in range(4)] == [0, 1, 0, 0]
    frequency = sampler(4, prompt=[0, 0, 0], temperature=0, frequency_penalty=0.75)
    # after n draws of a token its logit has lost 0.75 n
    assert [frequency(row).id for _ in range(6)] == [0, 0, 1, 0, 1, 2]


def test_counts_survive_many_distinct_tokens() -> None:
    """Would catch the table of seen tokens losing entries when it grows."""
    n_vocab = 400
    row = np.linspace(0, 0.9, n_vocab).astype(np.float32)
    chosen = sampler(n_vocab, prompt=[3], temperature=0, presence_penalty=2.0, repetition_penalty=1.01)
    assert [chosen(row).id for _ in range(n_vocab)] == sorted(range(n_vocab), key=lambda i: (-row[i], i))


def test_logit_bias_forces_and_bans() -> None:
    """Would catch a bias added to the wrong id, or before a copy is made."""
    row = np.array([1.0, 2.0, 3.0], np.float32)
    assert sampler(3, temperature=0, logit_bias={0: 100})(row).id == 0
    assert sampler(3, temperature=0, logit_bias={2: -100})(row).id == 1
    assert {sampler(3, seed=i, logit_bias={2: -100, 1: -100})(row).id for i in range(20)} == {0}


def test_min_tokens_keeps_end_and_stop_ids_back() -> None:
    """Would catch an answer that ends before min_tokens, by the end-of-text id or a stop id."""
    row = np.array([1.0, 9.0, 8.0, 2.0], np.float32)
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[2])
    chosen = RequestSampler(params, [], 4, ReferenceSampling(), forbidden_until_min=[1])
    assert [chosen(row).id for _ in range(3)] == [3, 3, 1]
    assert chosen(row, allow_end=False).id == 3


def test_logprobs_are_of_the_raw_distribution() -> None:
    """Would catch log-probabilities taken after bias, penalties, filters or temperature."""
    rng = np.random.default_rng(5)
    row = rng.normal(0, 3, 3001).astype(np.float32)
    exact = row - np.log(np.exp(row.astype(np.float64)).sum())
    token = sampler(3001, prompt=[1, 2], seed=1, temperature=0.3, top_k=50, logit_bias={7: 3.0}, logprobs=5)(
        row
    )
    assert token.logprob == pytest.approx(exact[token.id], abs=1e-5)
    assert token.top_logprobs is not None
    best = np.argsort(-row, kind="stable")[:5]
    assert [i for i, _ in token.top_logprobs] == best.tolist()
    np.testing.assert_allclose([x for _, x in token.top_logprobs], exact[best], atol=1e-5)
    assert sampler(3001, temperature=0, logprobs=0)(row).top_logprobs == ()
    assert sampler(3001, temperature=0)(row).logprob is None


def test_equal_logits_are_reported_lowest_id_first() -> None:
    """Would catch top_logprobs that change with the sort used."""
    row = np.zeros(2000, np.float32)
    row[[1500, 7, 900]] = 2.0
    token = sampler(2000, temperature=0, logprobs=4)(row)
    assert token.id == 7
    assert [i for i, _ in token.top_logprobs or ()] == [7, 900, 1500, 0]


def test_of_equal_tokens_filters_keep_the_lowest_ids() -> None:
    """Would catch a flat row leaving no candidate at all, or ties cut at random."""
    flat = np.zeros(5000, np.float32)
    assert kept(flat, top_p=0.0) == kept(flat, top_k=1) == [0]
    assert kept(flat, top_p=0.00099) == kept(flat, top_k=5) == [0, 1, 2, 3, 4]
    lowest = np.full(5000, np.finfo(np.float32).min)
    assert kept(lowest, top_k=2) == [0, 1]
    assert len(kept(lowest, min_p=0.5)) == 5000


# ---- exactness


@st.composite
def rows(draw_: st.DrawFn) -> np.ndarray:
    """Rows of every shape: long and short, peaked and flat, full of ties, with -inf and huge values."""
    n = draw_(st.sampled_from([1, 2, 3, 63, 767, 768, 769, 1023, 1024, 1025, 2500, 5000]))
    rng = np.random.default_rng(draw_(st.integers(0, 2**32)))
    row = rng.normal(0, draw_(st.sampled_from([0.0, 0.5, 2.0, 6.0, 30.0])), n)
    if draw_(st.booleans()):
        row = np.round(row, draw_(st.integers(0, 1)))
    if draw_(st.booleans()):
        row[rng.random(n) < 0.3] = -np.inf
    row[rng.integers(n)] = draw_(st.sampled_from([0.0, 5.0, -1e6, 1e6]))
    return (row + draw_(st.sampled_from([0.0, -1000.0, 1e5]))).astype(np.float32)


MANY = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])


@MANY
@given(
    row=rows(),
    top_k=st.sampled_from([0, 1, 2, 40, 768, 769, 4000]),
    top_p=st.sampled_from([1.0, 0.0, 0.013, 0.31, 0.77, 0.951, 0.9997]),
    min_p=st.sampled_from([0.0, 0.0513, 0.37, 1e-9]),
)
def test_filters_keep_what_sorting_everything_keeps(
    row: np.ndarray, top_k: int, top_p: float, min_p: float
) -> None:
    """Would catch a preselection that loses a token, or a tie cut elsewhere than at the lowest ids."""
    expected, margin = naive_filters(row, top_k, top_p, min_p)
    assume(margin > 1e-5)  # nearer, float32 sums may decide either way
    found = kept(row, top_k=top_k, top_p=top_p, min_p=min_p)
    assert [i for i in found if row[i] > -np.inf] == [i for i in expected if row[i] > -np.inf]


@pytest.mark.full
@MANY
@given(row=rows(), heat=st.sampled_from([0.05, 0.7, 1.0, 3.0, 50.0]), u=st.floats(0, 1, exclude_max=True))
def test_a_draw_is_the_inverse_of_the_summed_probabilities(row: np.ndarray, heat: float, u: float) -> None:
    """Would catch a block of the vocabulary being weighed wrongly or drawn from at its edges."""
    candidates = Candidates(row)
    run_stages(candidates, record_of(sampler(len(row), temperature=heat)))
    token_id, _ = draw(candidates, u)
    x = (row.astype(np.float64) - row.max()) / heat
    running = np.cumsum(np.exp(x)) / np.exp(x).sum()
    below = running[token_id - 1] if token_id else 0.0
    assert below - 1e-5 <= u <= running[token_id] + 1e-5
    assert row[token_id] > -np.inf


# ---- chance


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    likely = probabilities > 0
    return float(((counts - expected)[likely] ** 2 / expected[likely]).sum())


@pytest.mark.full(but=["params0-expected0"])
@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.8, "temperature": 0.5}, [0, 16 / 29, 4 / 29, 9 / 29]),
        ({"min_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"logit_bias": {0: float(np.log(6))}}, [0.4, 0.8 / 3, 0.4 / 3, 0.2]),
    ],
)
def test_draws_follow_the_distribution(params: dict[str, Any], expected: list[float]) -> None:
    """Would catch draws that are biased, or that ignore a filter or the temperature."""
    chosen = sampler(4, seed=11, max_tokens=None, **params)
    row = logits_of(0.1, 0.4, 0.2, 0.3)
    counts = np.bincount([chosen(row).id for _ in range(8000)], minlength=4)
    probabilities = np.array(expected)
    assert counts[probabilities == 0].sum() == 0
    assert chi_square(counts, probabilities) < 16.3  # p = 0.001 with 3 degrees of freedom


@pytest.mark.full
def test_draws_over_many_blocks_follow_the_distribution() -> None:
    """Would catch a whole-row draw that favours a block of ids."""
    rng = np.random.default_rng(3)
    row = rng.normal(0, 1, 5000).astype(np.float32)
    chosen = sampler(5000, seed=12, max_tokens=None)
    ids = np.array([chosen(row).id for _ in range(20_000)])
    odds = np.exp(row.astype(np.float64))
    groups = np.arange(5000) // 250
    probabilities = np.bincount(groups, odds) / odds.sum()
    assert chi_square(np.bincount(groups[ids], minlength=20), probabilities) < 43.8  # p = 0.001, 19 degrees


def test_a_seed_repeats_and_other_requests_do_not_matter() -> None:
    """Would catch random numbers shared between requests, or a seed that is ignored."""
    rng = np.random.default_rng(1)
    steps = rng.normal(0, 1, (30, 777)).astype(np.float32)
    alone = [sampler(777, seed=5)(row).id for row in steps[:1]]
    first, mate, again = sampler(777, seed=5), sampler(777, seed=6), sampler(777, seed=5)
    mixed = [(first(row).id, mate(row).id) for row in steps]
    repeated = [again(row).id for row in steps]
    assert [a for a, _ in mixed] == repeated
    assert alone == repeated[:1]
    assert [b for _, b in mixed] != repeated
    fresh = [sampler(777), sampler(777)]
    assert [fresh[0](r).id for r in steps] != [fresh[1](r).id for r in steps]


def test_each_token_takes_one_random_number() -> None:
    """Would catch a filter that shifts the random numbers of later tokens."""
    rng = np.random.default_rng(1)
    steps = rng.normal(0, 1, (20, 500)).astype(np.float32)
    plain, filtered = sampler(500, seed=3), sampler(500, seed=3, top_p=0.99999, min_p=1e-9, top_k=500)
    assert [plain(r).id for r in steps] == [filtered(r).id for r in steps]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_that_are_put_back_are_drawn_again_with_the_same_numbers(temperature: float) -> None:
    """Would catch a rejected draft after which a request's tokens are others than without drafts."""
    rows = np.random.default_rng(3).standard_normal((12, 50)).astype(np.float32)
    alone = sampler(50, temperature=temperature, seed=7)
    expected = [alone(row).id for row in rows]
    drafted = sampler(50, temperature=temperature, seed=7)
    records, ids = SamplingRecords(), []
    for n_drawn, n_taken in ((4, 1), (4, 2), (3, 3), (4, 1), (1, 1), (4, 4)):
        given = HostLogits(rows[len(ids) : len(ids) + n_drawn])
        tokens = sample_rows([drafted] * len(given), given, ReferenceSampling(), records)
        drafted.put_back(records, range(n_taken, len(given)))
        ids += [token.id for token in tokens[:n_taken] if isinstance(token, SampledToken)]
    assert ids == expected
    assert drafted.n_generated == len(rows)


def test_rows_are_not_written() -> None:
    """Would catch an edit in place: rows belong to the engine and may be read-only."""
    row = np.random.default_rng(2).normal(0, 1, 2000).astype(np.float32)
    before = row.copy()
    row.flags.writeable = False
    params = {
        "logit_bias": {1: 1.0},
        "repetition_penalty": 1.2,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
    }
    for more in ({"temperature": 0}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 2.0}):
        chosen = sampler(2000, prompt=[1, 5], min_tokens=1, stop=[3], logprobs=3, **params, **more)
        chosen(row), chosen(row)
    np.testing.assert_array_equal(row, before)


# ---- failures


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}]
)
@pytest.mark.parametrize("n_vocab", [5, 3000])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_fail_the_request(params: dict[str, Any], n_vocab: int, bad: float) -> None:
    """Would catch a token drawn from NaN, which every comparison lets through."""
    for place in (0, n_vocab // 2, n_vocab - 1):
        row = np.zeros(n_vocab, np.float32)
        row[place] = bad
        with pytest.raises(SamplingError, match="logits hold"):
            sampler(n_vocab, **params)(row)
    with pytest.raises(KukriError, match="no token is allowed"):
        sampler(n_vocab, **params)(np.full(n_vocab, -np.inf, np.float32))


def test_masked_tokens_are_never_drawn() -> None:
    """Would catch -inf, a grammar's mask, being drawn from or counted as an error."""
    row = np.full(3000, -np.inf, np.float32)
    row[[17, 2990]] = 0.0
    for params in ({}, {"top_k": 10}, {"top_p": 0.9}, {"min_p": 0.01}, {"temperature": 5.0}):
        chosen = sampler(3000, seed=1, max_tokens=None, **params)
        assert {chosen(row).id for _ in range(30)} == {17, 2990}


@pytest.mark.parametrize("params", [{"logit_bias": {10: 1.0}}, {"stop_token_ids": [10]}, {"stop": [10]}])
def test_ids_outside_the_vocabulary_are_refused(params: dict[str, Any]) -> None:
    """Would catch an index error, or a neighbour's memory, in the middle of a batch."""
    with pytest.raises(RequestError, match="must name tokens below 10, not 10"):
        sampler(10, **params)


def test_a_row_of_another_shape_is_our_bug() -> None:
    """Would catch a padded vocabulary being sampled from."""
    with pytest.raises(ShapeError):
        sampler(10)(np.zeros(11, np.float32))
    with pytest.raises(ShapeError):
        sampler(10)(np.zeros(10, np.float64))  # type: ignore[arg-type]
    for row in (-1, 2):  # would read what lies before the logits, or after them
        with pytest.raises(ShapeError):
            sample_rows(
                [sampler(10)], HostLogits(np.zeros((2, 10), np.float32)), ReferenceSampling(), rows=[row]
            )
