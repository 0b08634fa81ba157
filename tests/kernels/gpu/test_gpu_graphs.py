"""Capture and replay of decode steps, with a graph that runs its function again in place of a device's."""

from __future__ import annotations

import numpy as np
import pytest

from kukri.bench.device_checks import Sizes, check_backend
from kukri.engine.batch_builder import BatchBuilder, Chunk
from kukri.engine.spans.embedding_spans import NO_SPANS
from kukri.errors import ShapeError
from kukri.kernels.cache import KVLayer
from kukri.kernels.step import StepLimits
from kukri.kernels.weight_handles import RopeFrequencies
from tests.kernels.gpu.device import DEVICE, IS_INTERPRETED
from tests.kernels.gpu.test_gpu_backend import Sequence, model_of
from tests.lazy_imports import lazy_imports
from tests.models.tiny_llama import random_ids
from tests.models.tiny_models import V

with lazy_imports():
    import torch

    from kukri.kernels.gpu import attention
    from kukri.kernels.gpu.backend import GpuBackend
    from kukri.kernels.gpu.graphs import graph_sizes


class FakeGraphs:
    """A capture that computes nothing until replayed, into a tensor that stays where it is."""

    def __init__(self):
        self.n_captured, self.n_replayed = 0, 0

    def __call__(self, run):
        result = torch.full_like(run(), torch.nan)
        self.n_captured += 1

        def replay():
            self.n_replayed += 1
            result.copy_(run())

        return result, replay


def shows_its_inputs(ops, batch):
    """A program whose logits are what a graph reads from the device, by token."""
    ops.n_vocab = 50
    if not batch.is_decode:
        return batch.token_ids[batch.logit_rows, None].float()
    slots, page_table = batch.pools[0]
    columns = [batch.token_ids, slots, batch.context_len, page_table[:, 0], batch.rope_positions]
    starts = batch.query_start[1:] - batch.query_start[:-1]
    limit = torch.full_like(starts, batch.max_context)
    return torch.stack([*columns, starts, limit], 1).float()[batch.logit_rows]


class Row:
    spans = NO_SPANS

    def __init__(self, token, page, n):
        self.tokens, self.page_rows = np.full(n + 1, token, np.int32), [np.full(40, page, np.int32)]
        self.n = n

    @property
    def chunk(self):
        return Chunk(self, self.n, 1, 1)

    @property
    def wanted(self):
        page, n = self.page_rows[0][0], self.n
        return [self.tokens[n], page * 16 + n % 16, n + 1, page, n, 1]


@pytest.fixture
def setup():
    graphs = FakeGraphs()
    backend = GpuBackend(DEVICE, capture=graphs)
    cache = backend.new_cache([KVLayer(1, 16)], 30)
    program = backend.compile(shows_its_inputs, cache, StepLimits(32, 12, 32, 40))
    builder = BatchBuilder(program.inputs, 16)

    def run(*rows):
        return program(builder.build([row.chunk for row in rows])).numpy().copy()

    return graphs, backend, program, builder, run


def test_graph_sizes_are_powers_of_two_and_the_largest():
    assert graph_sizes(1) == [1]
    assert graph_sizes(16) == [1, 2, 4, 8, 16]
    assert graph_sizes(19) == [1, 2, 4, 8, 16, 19]


def test_a_graph_is_captured_once_for_each_size_and_length(setup):
    """A stale input, a padded row that is returned, a graph of too few chunks."""
    graphs, _, _, _, run = setup
    rng = np.random.default_rng(0)
    met = set()
    for step in range(60):
        rows = [Row(*(int(rng.integers(n)) for n in (50, 30, 600))) for _ in range(rng.integers(1, 13))]
        n_chunks = -(-max(row.n + 1 for row in rows) // attention.CHUNK)
        n_chunks = {1: 1, 2: 2, 3: 4}[n_chunks]
        met.add((next(s for s in (1, 2, 4, 8, 12) if s >= len(rows)), n_chunks))
        got = run(*rows)
        np.testing.assert_array_equal(got, [[*row.wanted, n_chunks * attention.CHUNK] for row in rows])
        assert (graphs.n_captured, graphs.n_replayed) == (len(met), step + 1 - len(met))


def test_padding_lies_on_the_spare_page(setup):
    """A padded sequence that writes over a page of another."""
    _, _, program, _, run = setup
    run(Row(1, 2, 3), Row(2, 3, 4), Row(3, 4, 5))
    inputs = program.inputs
    assert (inputs.page_table[3, 0], inputs.slots[3], inputs.context_len[3]) == (30, 30 * 16, 1)
    assert inputs.query_start[:5].tolist() == [0, 1, 2, 3, 4]


def test_other_steps_run_eagerly(setup):
    """A prompt, or tokens whose logits nobody wants, taken for a decode step."""
    graphs, backend, program, builder, run = setup
    row = Row(7, 1, 20)
    assert len(program(builder.build([Chunk(row, 0, 20, 0)])).numpy()) == 0
    assert len(program(builder.build([Chunk(row, 3, 1, 0), Chunk(row, 4, 1, 1)])).numpy()) == 1
    tapped = backend.compile(shows_its_inputs, program._ops.cache, StepLimits(8, 2, 8, 40), frozenset("x"))
    tapped(BatchBuilder(tapped.inputs, 16).build([row.chunk]))
    assert graphs.n_captured == 0
    run(row)
    assert graphs.n_captured == 1


def test_what_reads_the_device_is_not_captured():
    """A mixture of experts, whose host reads routes: a device would refuse the capture."""

    def program(ops, batch):
        ops.is_capturable = False
        return shows_its_inputs(ops, batch)

    graphs = FakeGraphs()
    backend = GpuBackend(DEVICE, capture=graphs)
    compiled = backend.compile(program, backend.new_cache([KVLayer(1, 16)], 30), StepLimits(8, 2, 8, 40))
    builder = BatchBuilder(compiled.inputs, 16)
    for row in (Row(7, 1, 20), Row(8, 2, 3)):
        got = compiled(builder.build([row.chunk])).numpy()
        np.testing.assert_array_equal(got[:, :6], [row.wanted])
    assert graphs.n_captured == 0


def test_a_replay_checks_what_eager_steps_check(setup):
    """A token, page or position that a graph would read with."""
    _, backend, _, _, run = setup
    run(Row(7, 1, 20))
    for bad, message in ((Row(50, 1, 20), "token id"), (Row(7, 30, 20), "outside the cache")):
        with pytest.raises(ShapeError, match=message):
            run(bad)
    table = backend.constants.rope_table(RopeFrequencies((1.0,), 24))
    run(Row(7, 1, 23))
    assert table.cos[23, 0] == np.cos(np.float32(23))
    with pytest.raises(ShapeError, match="beyond the RoPE"):
        run(Row(7, 1, 24))


@pytest.mark.slow
def test_a_model_decodes_the_same_bits_by_graphs():
    """An op that reads the host while it is captured, and so repeats its first step."""
    model = model_of("qwen3", 1)
    results = []
    for capture in (None, FakeGraphs()):
        backend = GpuBackend(DEVICE, capture=capture)
        program = backend.compile(model, backend.new_cache(model.cache_layout, 4), StepLimits(8, 3, 8, 1))
        builder, rows = BatchBuilder(program.inputs, 16), []
        sequences = [Sequence(random_ids(9, V, seed=i), i) for i in range(3)]
        for i in range(3):
            rows.append(program(builder.build([Chunk(s, i, 1, 1) for s in sequences])).numpy().copy())
        results.append(np.concatenate(rows))
    np.testing.assert_array_equal(*results)
    assert capture.n_replayed == 2


@pytest.mark.slow
@pytest.mark.skipif(not IS_INTERPRETED, reason="kukri doctor --gpu does it on a device")
def test_the_checks_of_a_device_pass_under_the_interpreter():
    """`kukri doctor --gpu` would call right kernels wrong, or a promise of bits broken."""
    sizes = Sizes(tokens=(1, 9), n_columns=256, n_rows=21, contexts=(40, 17, 3), n_layers=1)
    checks = list(check_backend(lambda: GpuBackend(capture=FakeGraphs()), GpuBackend, sizes))
    assert len(checks) > 30
    assert [check for check in checks if not check.passed] == []
