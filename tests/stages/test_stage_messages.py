"""The messages between stages, and the cut of a model, without processes."""

from __future__ import annotations

import struct
from importlib.util import find_spec

import numpy as np
import pytest

from kukri.errors import ConfigError, StageError
from kukri.kernels import make_backend
from kukri.kernels.cache import KVLayer, KVType, StateLayer, pool_windows
from kukri.kernels.step import StepInputs, StepLimits
from kukri.models import load_model
from kukri.stages.cut import ModelBytes, StageRoom, cut_layers, model_bytes
from kukri.stages.messages import (
    Kind,
    rows_from_bytes,
    rows_to_bytes,
    step_bounds,
    step_from_bytes,
    step_to_bytes,
)
from kukri.stages.program import StageProgram, stage_layout
from kukri.stages.stage import Stage
from tests.models.made_models import make
from tests.models.tiny_models import TINY

LIMITS = StepLimits(max_tokens=8, max_sequences=3, max_logit_rows=4, max_pages=5)


def step() -> StepInputs:
    inputs = StepInputs.zeros(LIMITS)
    random = np.random.default_rng(1)
    for name in ("token_ids", "positions", "slots", "page_table", "logit_rows", "token_types"):
        array = getattr(inputs, name)
        array[...] = random.integers(0, 1 << 20, array.shape)
    inputs.query_start[:3], inputs.context_len[:2] = (0, 5, 6), (40, 17)
    inputs.state_saves[2], inputs.state_slots[:2] = 7, (2, 0)
    return inputs


def test_a_step_comes_as_it_was_sent() -> None:
    """Catches an array left out or taken for another, pages beyond the longest context, and activations that
    stay for the next step of the same size.
    """
    batch = step().batch(6, 2, 3)
    sent = step_to_bytes(batch, 16)
    assert len(sent) <= step_bounds(LIMITS, 64, 1)[Kind.STEP]
    activations = np.ones((6, 64), np.float32)
    inputs = StepInputs.zeros(LIMITS)
    inputs.adapters[:] = 1  # the adapters of the step before
    got = step_from_bytes(sent, LIMITS, inputs, activations)
    for name in ("token_ids", "positions", "slots", "query_start", "context_len", "logit_rows"):
        assert (getattr(got, name) == getattr(batch, name)).all(), name
    for name in ("token_types", "state_slots", "state_saves"):
        assert (getattr(got, name) == getattr(batch, name)).all(), name
    assert (got.page_table[:, :3] == batch.page_table[:, :3]).all()
    assert got.page_table[:, 3:].max() == 0
    assert got.adapters is not None
    assert (got.adapters == -1).all()
    assert got.inputs is inputs
    assert inputs.batch(6, 2, 3).activations is None
    assert step_from_bytes(sent, LIMITS, inputs, None).activations is None
    assert got.activations is activations


def test_broken_steps_are_refused() -> None:
    """Catches sizes that are believed: of a message cut off, longer, or beyond the limits."""
    sent = step_to_bytes(step().batch(6, 2, 3), 16)
    too_many = struct.pack("<4I", 9, 2, 3, 3) + sent[16:] + bytes(4 * 15)
    huge = struct.pack("<4I", 1 << 31, 1 << 31, 0, 1 << 31) + sent[16:]
    for broken in (sent[:-4], sent + bytes(4), sent[:7], too_many, huge):
        with pytest.raises(StageError):
            step_from_bytes(broken, LIMITS, StepInputs.zeros(LIMITS), None)


def test_broken_activations_are_refused() -> None:
    """The same for activations."""
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    sent = b"".join(map(bytes, rows_to_bytes(rows, 0.5)))
    got, computed_s = rows_from_bytes(memoryview(sent))
    assert (got == rows).all()
    assert computed_s == 0.5
    for broken in (sent[:-1], sent + b"x", sent[:3], struct.pack("<2I", 1 << 31, 1 << 31) + sent[8:]):
        with pytest.raises(StageError):
            rows_from_bytes(memoryview(broken))


def test_the_slowest_stage_is_as_fast_as_it_can_be() -> None:
    """Catches a head that weighs nothing, speeds turned round, memory that is not looked at."""
    weights = ModelBytes((10,) * 8, first=20, last=20)
    cache = [5] * 8
    same = [StageRoom(1000), StageRoom(1000)]
    assert cut_layers(weights, cache, same) == [range(5), range(5, 8)]  # the head is as two layers
    assert cut_layers(weights, cache, [StageRoom(1000, 1.0), StageRoom(1000, 4.0)]) == [range(2), range(2, 8)]
    small = [StageRoom(66), StageRoom(1000)]  # three layers, their cache, the embedding
    assert cut_layers(weights, cache, small) == [range(3), range(3, 8)]
    with pytest.raises(ConfigError, match="GiB"):
        cut_layers(weights, cache, [StageRoom(66), StageRoom(66)])


def test_changes_outside_of_the_cache_are_refused() -> None:
    """Catches pages that are believed: negative ones would be others, and too large ones a crash."""
    _, config, source = make("llama")
    model = load_model(source, config)
    stage = Stage(model, make_backend("reference"), range(1), (4,), 0, "f32")
    stage.change(Kind.COPY_PAGE, memoryview(np.array([0, 3, 0], "<i4").tobytes()))
    for kind, numbers in (
        (Kind.COPY_PAGE, (0, 4, 0)),
        (Kind.COPY_PAGE, (0, 3, 1)),
        (Kind.COPY_PAGE, (0, -1, 0)),
        (Kind.COPY_PAGE, (0,)),
        (Kind.COPY_STATE, (0, 0)),
        (Kind.STEP, (0,)),
    ):
        with pytest.raises(StageError):
            stage.change(kind, memoryview(np.array(numbers, "<i4").tobytes()))


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4", "f32"])
def test_layers_of_other_stages_take_no_memory(kv_type: KVType) -> None:
    """Catches a type of cache that cannot hold a layer without heads."""
    layout = (StateLayer((("conv", (2, 64)),)), KVLayer(2, 64), KVLayer(2, 64))
    own = stage_layout(layout, range(1, 2), 3)
    for name in ("cpu", "torch") if find_spec("torch") else ("cpu",):
        backend = make_backend(name, 1)
        cache = backend.new_cache(own, 3, 0, kv_type)
        assert backend.page_bytes(own, kv_type) == backend.page_bytes(layout[1:2], kv_type)
        cache.copy_page(0, 2)


@pytest.mark.parametrize("name", [name for name in TINY if name != "gemma4_text"])  # which no stage can have
def test_the_parts_of_a_model_are_the_model(name: str) -> None:
    """Catches an architecture that cannot be cut: no tap before a layer, an op of two results."""
    _, config, source = make(name)
    model = load_model(source, config)
    assert sum(model_bytes(model).layers) > 0
    limits = StepLimits(16, 2, 16, 4)
    backend = make_backend("reference")
    inputs = StepInputs.zeros(limits, len(pool_windows(model.cache_layout)))
    inputs.token_ids[:7], inputs.positions[:7] = range(3, 10), range(7)
    inputs.query_start[1], inputs.context_len[0], inputs.logit_rows[:2] = 7, 7, (3, 6)
    for i, (slots, page_table) in enumerate(inputs.pools):
        slots[:7], page_table[0, 0] = range(16 + 16 * i, 23 + 16 * i), 1 + i
    batch = inputs.batch(7, 1, 2)
    whole = backend.compile(model, backend.new_cache(model.cache_layout, 3, 2, "f32"), limits)(batch).numpy()
    x = None
    for layers in (range(1), range(1, config.n_layers)):
        program = StageProgram(model, layers, config.n_layers, config.d_model)
        layout = stage_layout(model.cache_layout, layers, config.n_layers)
        cache = backend.new_cache(layout, 3, 2, "f32")
        assert backend.page_bytes(layout, "f32") <= backend.page_bytes(model.cache_layout, "f32")
        compiled = backend.compile(program, cache, limits)
        part = step_from_bytes(step_to_bytes(batch, 16), limits, compiled.inputs, x)
        x = compiled(part).numpy()
    assert (x == whole).all()
