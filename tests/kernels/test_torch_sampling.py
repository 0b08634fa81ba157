"""Sampling by PyTorch, as on a device, against its definition in NumPy: the same tokens, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kukri.errors import UnsupportedError
from kukri.kernels.host_step import HostLogits
from kukri.kernels.reference_sampling import ReferenceSampling
from kukri.kernels.sampling_record import CHOSEN, MAX_VOCAB, SamplingRecords
from kukri.kernels.sampling_stages import DRY, MIN_P, PENALTIES, TEMPERATURE, TOP_K, TOP_N_SIGMA, TOP_P
from tests.kernels.test_sampling_kernel import (
    FILTERS,
    copy_of,
    empty_records,
    make_records,
    outcome,
    outcomes,
    random_row,
)
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import torch

    from kukri.kernels.pytorch.sampling import TorchSampling
    from kukri.kernels.pytorch.step import TensorLogits

REFERENCE = ReferenceSampling()
COMMON = [PENALTIES, DRY, TOP_K, TOP_P, MIN_P, TEMPERATURE]


class Host:
    """Samples on the host, and counts the rows that were brought there."""

    def __init__(self) -> None:
        self.n_rows = 0

    def __call__(self) -> Host:
        return self

    def choose(self, records: SamplingRecords, logits: Any) -> None:
        self.n_rows += len(logits)
        REFERENCE.choose(records, logits)


def choose(records: SamplingRecords, logits: np.ndarray) -> int:
    """Chooses tokens by PyTorch; the number of rows that went to the host."""
    host = Host()
    TorchSampling(host).choose(records, TensorLogits(torch.from_numpy(logits)))
    return host.n_rows


def ordered(stages: list[int]) -> list[int]:
    """Edits before filters, temperature anywhere."""
    edits = [stage for stage in stages if stage in (PENALTIES, DRY)]
    at = stages.index(TEMPERATURE) if TEMPERATURE in stages else 0
    others = [stage for stage in stages if stage in (TOP_K, TOP_P, MIN_P)]
    warm = [TEMPERATURE] if TEMPERATURE in stages else []
    return [*warm, *edits, *others] if at % 2 else [*edits, *others[:1], *warm, *others[1:]]


@pytest.mark.full
@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n_vocab=st.sampled_from([1, 2, 15, 17, 63, 1000, 1025, 4999]),
    orders=st.lists(
        st.permutations(COMMON).map(lambda o: ordered(o[: len(o) // 2 + 1])), min_size=1, max_size=6
    ),
)
def test_tokens_are_those_of_the_definition(seed, n_vocab, orders):
    """Would catch a tie decided elsewhere, a rounding too few, a mask or table of another row."""
    rng = np.random.default_rng(seed)
    logits = np.array([random_row(rng, n_vocab) for _ in orders])
    before = logits.copy()
    found = make_records(orders, n_vocab, rng, temperature_range=0.0)
    found.fields["is_given"] = rng.random(len(orders)) < 0.1
    want = copy_of(found)
    assert choose(found, logits) == 0
    REFERENCE.choose(want, HostLogits(logits))
    np.testing.assert_array_equal(logits, before)
    for i, (a, b) in enumerate(zip(found.fields, want.fields, strict=True)):
        assert outcome(found, i) == outcome(want, i), (list(a["stages"]), a["status"])
        np.testing.assert_equal(a["peak"], b["peak"])
        if a["has_logprobs"] and a["status"] == CHOSEN:
            assert a["sum_exp"] == pytest.approx(b["sum_exp"], rel=1e-7)


@pytest.mark.parametrize("stages", [[], [TOP_K], [TOP_P], [MIN_P], [TEMPERATURE]])
def test_large_vocabularies(stages):
    """Would catch what only many tokens show: a flat row's ties, counts and sums in float32."""
    rng = np.random.default_rng(len(stages))
    logits = rng.normal(0, 2.5, (3, 151_936)).astype(np.float32)
    logits[1] = 0.5
    logits[2, :40] += np.linspace(4, 14, 40).astype(np.float32)
    found = make_records([stages] * 3, logits.shape[1], rng, is_greedy=0, temperature_range=0.0)
    want = copy_of(found)
    choose(found, logits)
    REFERENCE.choose(want, HostLogits(logits))
    assert outcomes(found) == outcomes(want)


@pytest.mark.full
def test_rows_alone_and_together():
    """Would catch a bit that depends on batch mates: their number, their k, their tables."""
    rng = np.random.default_rng(8)
    logits = np.array([random_row(rng, 3000) for _ in range(40)])
    orders = [ordered(list(rng.permutation(COMMON)[:4])) for _ in logits]
    together = make_records(orders, 3000, rng, temperature_range=0.0)
    alone = [copy_of(together, [i]) for i in range(len(logits))]
    choose(together, logits)
    for i, record in enumerate(alone):
        choose(record, logits[i : i + 1])
        assert outcome(together, i) == outcome(record, 0)
        if record.fields["has_logprobs"][0]:
            assert together.fields["sum_exp"][i] == record.fields["sum_exp"][0]


def test_other_stages_go_to_the_host():
    """Would catch a stage left out, results lost on the way back, and common rows that are copied too."""
    rng = np.random.default_rng(3)
    orders: list[list[int]] = [list(rng.permutation(FILTERS)) for _ in range(8)]
    orders += [[TOP_P], [TOP_N_SIGMA], [TOP_K]]
    orders.append([TOP_K, PENALTIES])  # not in the usual order
    rows = rng.permutation(30)[: len(orders)]
    logits = rng.normal(0, 3, (30, 1001)).astype(np.float32)
    found = make_records(orders, 1001, rng, is_greedy=0, temperature_range=0.5)
    want = copy_of(found)
    found.fields["row"] = rows
    assert choose(found, logits) == 8 + 2
    REFERENCE.choose(want, HostLogits(logits[rows]))
    assert outcomes(found) == outcomes(want)
    assert (found.fields["row"] == rows).all()


def test_rows_on_the_host_stay_there():
    """Would catch rows of a caller's logits processor that are taken for tensors."""
    found, want = empty_records(1), empty_records(1)
    logits = HostLogits(np.random.default_rng(1).normal(0, 1, (1, 50)).astype(np.float32))
    host = Host()
    TorchSampling(host).choose(found, logits)
    REFERENCE.choose(want, logits)
    assert (host.n_rows, outcomes(found)) == (1, outcomes(want))


def test_a_vocabulary_too_large_is_refused():
    """Would catch sums of weights that are no longer exact."""
    with pytest.raises(UnsupportedError, match="more than 1048576 tokens is not supported: 1048577"):
        choose(empty_records(1), np.zeros((1, MAX_VOCAB + 1), np.float32))
