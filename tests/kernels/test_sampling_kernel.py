"""The compiled sampling of a step against its definition in NumPy: the same tokens, to the bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kukri.errors import UnsupportedError
from kukri.kernels import sampling_record, sampling_stages
from kukri.kernels.cpu.codegen.sampling_backend import CpuSampling
from kukri.kernels.cpu.compile.jit import KernelLibrary
from kukri.kernels.cpu.run.pool import ThreadPool
from kukri.kernels.host_step import HostLogits
from kukri.kernels.reference_sampling import ReferenceSampling, weights_of
from kukri.kernels.sampling_record import RECORD, TABLES, SamplingRecords

REFERENCE = ReferenceSampling()
FILTERS = range(sampling_stages.PENALTIES, sampling_stages.MIROSTAT_1)


@pytest.fixture(scope="module")
def ops():
    kernels = KernelLibrary()
    pool = ThreadPool(kernels, 3)
    yield CpuSampling(kernels, pool)
    pool.close()


def add_record(
    records: SamplingRecords, i: int, stages: Any, n_vocab: int, rng: np.random.Generator, **fields: Any
) -> None:
    """Fills in a record with random settings and every table."""
    settings: dict[str, Any] = {
        "u": rng.random(),
        "top_k": int(rng.choice([1, 2, 40, 700, 5000])),
        "top_p": rng.choice([0.0, 0.3, 0.9, 0.999, 1.0]),
        "typical_p": rng.choice([0.0, 0.2, 0.9, 0.999]),
        "min_p_depth": math.log(rng.choice([1e-9, 0.05, 1.0])),
        "top_n_sigma": rng.choice([0.1, 1.0, 3.0]),
        "xtc_threshold": rng.choice([0.0, 0.01, 0.1, 0.5]),
        "xtc_applies": rng.random() < 0.8,
        "temperature": rng.choice([0.01, 0.7, 1.0, 30.0]),
        "temperature_range": rng.choice([0.0, 0.5]),
        "temperature_exponent": rng.choice([0.0, 1.0, 2.5]),
        "repetition_penalty": rng.choice([0.5, 1.0, 1.3]),
        "presence_penalty": rng.choice([-1.0, 0.0, 0.7]),
        "frequency_penalty": rng.choice([-0.3, 0.0, 0.4]),
        "surprise_power": 2.0 ** rng.choice([-3.0, 0.5, 4.0, 10.0]),
        "is_greedy": rng.random() < 0.1,
    }
    for name, value in (settings | fields).items():
        records.fields[name][i] = value
    records.fields["stages"][i, : len(stages)] = stages
    for name in ("bias", "seen", "dry", "forbidden"):
        n = int(rng.integers(0, min(n_vocab, 20)))
        ids = rng.permutation(n_vocab)[:n].astype(np.int32)
        if name == "seen":
            counts = rng.integers(0, 4, n).astype(np.int32)
            generated = np.minimum(counts, rng.integers(0, 3, n)).astype(np.int32)
            records.set_table(i, name, ids, counts, generated)
        elif name == "forbidden":
            records.set_table(i, name, ids)
        else:
            records.set_table(i, name, rng.normal(0, 3, n), ids)
    if rng.random() < 0.3:  # words without a bit, words of nothing else, and mixed ones
        words = rng.choice([0, -1, 0x0F0F, -(2**31), 0x7FFF0000], -(-n_vocab // 32)).astype(np.int32)
        records.set_table(i, "allowed", words)
    n_top = int(rng.choice([-1, 0, 3, 30]))
    if n_top >= 0:
        records.fields["has_logprobs"][i] = 1
        records.set_table(i, "top", np.zeros(n_top, np.int32), np.zeros(n_top, np.float32))


def empty_records(n: int) -> SamplingRecords:
    """Records of zeros for the first n rows."""
    return SamplingRecords([np.zeros(RECORD.itemsize, np.uint8)] * n, range(n))


def make_records(orders: Any, n_vocab: int, rng: np.random.Generator, **fields: Any) -> SamplingRecords:
    """Records with these stages."""
    records = empty_records(len(orders))
    for i, stages in enumerate(orders):
        add_record(records, i, stages, n_vocab, rng, **fields)
    return records


def random_row(rng: np.random.Generator, n: int) -> np.ndarray:
    """Peaked or flat, full of ties, with -inf, huge or unusable values."""
    row = rng.normal(0, rng.choice([0.0, 0.5, 3.0, 30.0]), n)
    if rng.random() < 0.4:
        row = np.round(row, rng.integers(0, 2))
    row[:: max(1, n // 20)] += rng.choice([0.0, 6.0, 15.0])
    if rng.random() < 0.3:
        row[rng.random(n) < rng.choice([0.3, 1.0])] = -np.inf
    if rng.random() < 0.1:
        row[rng.integers(n)] = rng.choice([np.nan, np.inf, 1e30, -1e30])
    return (row + rng.choice([0.0, -1000.0, 1e5])).astype(np.float32)


def outcome(records: SamplingRecords, i: int) -> Any:
    """Fields that are compared exactly."""
    record = records.fields[i]
    if record["status"] != sampling_record.CHOSEN:
        return record["status"]
    top = []
    if record["has_logprobs"]:
        top = [a[: record["n_top_found"]].tolist() for a in records.table(i, "top")]
    return record["token"], None if record["is_greedy"] else record["probability"], top


def outcomes(records: SamplingRecords) -> list[Any]:
    return [outcome(records, i) for i in range(len(records.fields))]


def copy_of(records: SamplingRecords, chosen: Any = None) -> SamplingRecords:
    """Records of the same settings, with tables of their own; all, or those chosen, in the order of rows."""
    chosen = range(len(records.fields)) if chosen is None else chosen
    copy = empty_records(len(chosen))
    for place, i in enumerate(chosen):
        copy.fields[place] = records.fields[i]
        copy.fields["row"][place] = place
        for name in TABLES:
            copy.set_table(place, name, *(a.copy() for a in records.table(i, name)))
    return copy


@pytest.mark.representative(3)
@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    n_vocab=st.sampled_from([1, 2, 15, 16, 17, 63, 1000, 1024, 1025, 2063, 4999]),
    orders=st.lists(st.permutations(FILTERS).map(lambda o: o[: len(o) // 2]), min_size=1, max_size=6),
)
def test_tokens_are_those_of_the_definition(ops, seed, n_vocab, orders):
    """Would catch a threshold above its cut, a tie decided elsewhere, a sum in another order, a bad tail."""
    rng = np.random.default_rng(seed)
    logits = np.array([random_row(rng, n_vocab) for _ in orders])
    before = logits.copy()
    found = make_records(orders, n_vocab, rng)
    want = copy_of(found)
    ops.choose(found, HostLogits(logits))
    REFERENCE.choose(want, HostLogits(logits))
    np.testing.assert_array_equal(logits, before)
    for i, (a, b) in enumerate(zip(found.fields, want.fields, strict=True)):
        assert outcome(found, i) == outcome(want, i), (list(a["stages"]), a["status"])
        if a["has_logprobs"] and a["status"] == sampling_record.CHOSEN:
            assert a["sum_exp"] == pytest.approx(b["sum_exp"], rel=1e-6)


@pytest.mark.parametrize("stage", [None, *range(sampling_stages.PENALTIES, sampling_stages.MIROSTAT_2 + 1)])
@pytest.mark.parametrize("n_vocab", [49152, 151_936, 32_001])
def test_each_stage_alone_on_large_vocabularies(ops, stage, n_vocab):
    """Would catch what only many tokens show: flat rows, blocks of the draw, counts in float32."""
    rng = np.random.default_rng(n_vocab + (stage or 0))
    logits = rng.normal(0, 2.5, (8, n_vocab)).astype(np.float32)
    logits[1] *= 0.1
    logits[2] = 0.5
    logits[3:, :40] += np.linspace(4, 14, 40).astype(np.float32)
    stages = [] if stage is None else [stage]
    found = make_records([stages] * len(logits), n_vocab, rng, is_greedy=0)
    want = copy_of(found)
    ops.choose(found, HostLogits(logits))
    REFERENCE.choose(want, HostLogits(logits))
    assert outcomes(found) == outcomes(want)


def test_rows_alone_and_together(ops):
    """Would catch a row that sees another's scratch, or that depends on the thread it runs on."""
    rng = np.random.default_rng(8)
    logits = np.array([random_row(rng, 3000) for _ in range(64)])
    together = make_records([rng.permutation(FILTERS)[:4] for _ in logits], 3000, rng)
    alone = [copy_of(together, [i]) for i in range(len(logits))]
    for _ in range(5):
        ops.choose(together, HostLogits(logits))
    for i, record in enumerate(alone):
        ops.choose(record, HostLogits(logits[i : i + 1]))
    assert outcomes(together) == [outcome(record, 0) for record in alone]


def test_records_name_their_rows(ops):
    """Would catch a record that gets the row of another: rows without a record are passed over."""
    rng = np.random.default_rng(10)
    logits = np.array([random_row(rng, 1001) for _ in range(9)])
    rows = [7, 2, 2, 0]
    found = make_records([[sampling_stages.TOP_P]] * 4, 1001, rng)
    want = copy_of(found)
    found.fields["row"] = rows
    ops.choose(found, HostLogits(logits))
    REFERENCE.choose(want, HostLogits(logits[rows]))
    assert outcomes(found) == outcomes(want)


def test_rows_at_a_distance(ops):
    """Would catch rows taken as if they lay side by side: the logits of a step are padded columns."""
    rng = np.random.default_rng(9)
    wide = rng.normal(0, 3, (5, 1016)).astype(np.float32)
    found = make_records([[sampling_stages.TOP_K]] * 5, 1001, rng)
    want = copy_of(found)
    ops.choose(found, HostLogits(wide[:, :1001]))
    REFERENCE.choose(want, HostLogits(np.ascontiguousarray(wide[:, :1001])))
    assert outcomes(found) == outcomes(want)


def test_a_vocabulary_too_large_is_refused(ops):
    """Would catch sums of weights that are no longer exact."""
    logits = HostLogits(np.zeros((1, sampling_record.MAX_VOCAB + 1), np.float32))
    with pytest.raises(UnsupportedError, match="more than 1048576 tokens is not supported: 1048577"):
        ops.choose(empty_records(1), logits)


def test_logarithm_and_power():
    """Would catch a series cut short, or a range reduced wrongly."""
    rng = np.random.default_rng(1)
    for x in [*np.exp(rng.uniform(-300, 300, 500)), 1.0, 0.5, 2.0, 1.4142135623730951]:
        assert sampling_record.log_of(x) == pytest.approx(math.log(x), rel=1e-14, abs=1e-15)
    for x in [*rng.uniform(-600, 600, 500), 0.0, 1.0, -1e-9]:
        assert sampling_record.exp_of(x) == pytest.approx(math.exp(x), rel=1e-13)
    for x in (-700.0, 700.0):  # beyond, it would double a number for as long as x is large, up to infinity
        assert (
            sampling_record.exp_of(20 * x)
            == sampling_record.exp_of(x)
            == pytest.approx(math.exp(x), rel=1e-12)
        )


def test_weights_are_whole_exponentials():
    """Would catch a polynomial that is off, and weights that are no whole numbers: sums would be inexact."""
    depths = np.linspace(-40, 0, 20_001, dtype=np.float32)
    weights = weights_of(depths)
    exact = np.exp2(depths.astype(np.float64)) * sampling_record.WEIGHT_ONE
    np.testing.assert_allclose(weights, exact, rtol=3e-7, atol=0.51)
    assert (weights == np.rint(weights)).all()
    assert weights[-1] == sampling_record.WEIGHT_ONE
    assert weights_of(np.array([-np.inf], np.float32)) == 0
