"""Recording, passes and placement: what a model becomes before any kernel runs."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kukri.config import LayerConfig, ModelConfig, RopeConfig
from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.cpu.plan import ops
from kukri.kernels.cpu.plan.ops import Buffer, Value
from kukri.kernels.cpu.plan.passes import (
    add_attention_work,
    drop_unread,
    fuse_add,
    fuse_rope_store,
    quantize_in_producer,
)
from kukri.kernels.cpu.plan.place import lifetimes, place
from kukri.kernels.cpu.plan.record import Recorder
from kukri.kernels.cpu.run.abi import prompt_tokens, query_tokens
from kukri.kernels.quantize import quantize
from kukri.kernels.reference import ReferenceBackend, ReferenceOps
from kukri.kernels.rope_rows import RopeRows
from kukri.kernels.specs import AttentionSpec
from kukri.kernels.step import ForwardBatch, StepLimits
from kukri.kernels.weight_handles import RopeFrequencies, Vector, Weight
from kukri.models import ARCHITECTURES, load_model
from kukri.quant.types import QUANT_TYPES
from tests.kernels.small_programs import check_ops, round_reference_queries

EARLIER = json.loads(Path(__file__).with_name("recorded_plans.json").read_text())


class Source:
    """Random weights, of the type whose part of a name comes first in `types`."""

    def __init__(self, types, biases=False, fused=False):
        self.types, self.biases, self.fused = types, biases, fused
        self.random = np.random.default_rng(0)

    def has(self, name):
        if name.endswith("qkv_proj.weight"):
            return self.fused
        return name.endswith(".bias") and self.biases

    def matrix(self, name, shape):
        kind = QUANT_TYPES[next(type for part, type in self.types.items() if part in name)]
        values = (self.random.standard_normal(shape) * 0.1).astype(np.float32)
        if kind.name in ("F32", "Q8_0", "Q4_0", "Q4_1"):
            data = quantize(values, kind)
        else:
            data = np.zeros((shape[0], kind.row_bytes(shape[1])), np.uint8)
        return Weight(data, kind, shape, name)

    def vector(self, name, size):
        return 1 + 0.1 * self.random.standard_normal(size).astype(np.float32)

    def done(self):
        pass


def model_of(architecture, layers, source, tied=True, n_heads=8):
    config = ModelConfig(
        architecture=architecture,
        n_layers=len(layers),
        d_model=256,
        n_heads=n_heads,
        n_kv_heads=2,
        d_head=32,
        d_ffn=512,
        n_vocab=300,
        norm_eps=1e-5,
        max_context=128,
        tie_embeddings=tied,
        rope=RopeConfig(1e4, 32),
        layers=tuple(layers),
        activation=ARCHITECTURES[architecture].activation_op,
    )
    return load_model(source, config)


FULL = LayerConfig()
MIXED = {"v_proj": "Q6_K", "embed": "Q5_0", "lm_head": "Q8_0", "down": "F16", "": "Q4_K"}
TAPS = (
    *("hook_embed", "blocks.0.attn.hook_v", "blocks.0.attn.hook_z", "blocks.1.hook_attn_out"),
    *("blocks.1.mlp.hook_post", "ln_final.hook_normalized"),
)
CASES = {
    "llama q4_1, tied": (
        lambda: model_of("llama", [FULL, LayerConfig(use_rope=False, window=5)], Source({"": "Q4_1"})), {}
    ),
    "llama q4_1, tied, tapped": (
        lambda: model_of("llama", [FULL, LayerConfig(use_rope=False, window=5)], Source({"": "Q4_1"})),
        {"taps": TAPS},
    ),
    "llama mixed types, q8_0 cache": (
        lambda: model_of("llama", [FULL] * 2, Source(MIXED), tied=False), {"kv_type": "q8_0"}
    ),
    "llama masked": (lambda: model_of("llama", [FULL], Source({"": "F32"})), {"mask_heads": 1}),
    "qwen3": (lambda: model_of("qwen3", [FULL], Source({"": "Q4_0"})), {}),
    "phi": (lambda: model_of("phi", [FULL] * 2, Source({"": "Q8_0"}, biases=True), tied=False), {}),
    "phi3": (
        lambda: model_of("phi3", [LayerConfig(window=9)], Source({"": "Q4_0"}, fused=True), tied=False), {}
    ),
    "starcoder2": (lambda: model_of("starcoder2", [FULL], Source({"": "IQ4_NL"}, biases=True)), {}),
}  # fmt: skip


def compiled(backend, model, kv_type="f16", mask_heads=0, taps=()):
    limits = StepLimits(32, 1 if mask_heads else 2, 8, 8, mask_heads)
    cache = backend.new_cache(model.cache_layout, 8, kv_type=kv_type)
    return backend.compile(model, cache, limits, frozenset(taps))


@pytest.mark.parametrize("ops", [ReferenceOps, Recorder])
def test_the_reference_and_the_cpu_have_every_op(ops):
    """An op that was added to the op set and to one of them alone, or under another signature."""
    check_ops(ops)


@pytest.mark.parametrize("name", CASES)
def test_models_become_the_kernels_that_they_became(name, backend):
    """A fusion lost, an op more, or a tap moved. The lists are of a recorder that fused as it went."""
    make, options = CASES[name]
    plan = compiled(backend, make(), **options).plan
    want = EARLIER[name]["kernels"]
    if not cpu_target().has_int8_dot:
        want = want.replace("q8x2", "q16")
    assert plan.kernel_names == want.split()
    assert [[segment.stop, segment.name] for segment in plan.segments] == EARLIER[name]["taps"]


def one_step(n_tokens):
    ids = np.arange(n_tokens, dtype=np.int32)
    pages = np.arange(-(-n_tokens // 16), dtype=np.int32)[None]
    return ForwardBatch(ids, ids, ids, np.array([0, n_tokens], np.int32), ids[-1:] + 1, pages, ids[-3:])


@pytest.mark.parametrize(
    ("kv_type", "shapes"),  # (key heads, their size): kernels that test_cpu_attention.py has too, but for one
    [("f16", [(3, 32), (1, 16), (12, 16), (4, 64)]), ("q8_0", [(4, 64), (12, 64), (3, 96)])],
)
def test_layers_may_differ_in_heads_and_groups(kv_type, shapes, backend, monkeypatch):
    """Work entries, partial results or a cache of one layer's shape used by another's."""
    bound = 0.02  # the cache rounds
    if kv_type == "q8_0":
        round_reference_queries(monkeypatch)
        bound = 0.05  # and so are weights of values; a query's number may be rounded to the next
    layers = [
        LayerConfig(window=20 if n == 12 else None, n_kv_heads=n, d_head=size, rope=RopeConfig(500.0, size))
        for n, size in shapes
    ]
    model = model_of("llama", layers, Source({"": "F32"}), n_heads=12)
    got = compiled(backend, model, kv_type)
    want = compiled(ReferenceBackend(), model, kv_type)
    kinds = {(query_tokens(12 // n), prompt_tokens(12 // n, size), n == 12) for n, size in shapes}
    assert got.plan.kernel_names.count("attention_work") == len(kinds)
    assert len({layer.d_head for layer in model.cache_layout}) >= 2
    for n_tokens in (30, 7):
        got.plan.memory.view(np.float32)[:] = np.nan
        rows = got(one_step(n_tokens)).numpy()
        assert np.abs(rows).max() > 1
        np.testing.assert_allclose(rows, want(one_step(n_tokens)).numpy(), atol=bound)


# --- passes ---


def value(width=32):
    return Value(Buffer(4 * width), "T", width, 4 * width)


SPEC = AttentionSpec(0, 2, 1, 16, 0.25)
ROPE = RopeRows(RopeFrequencies((1.0,) * 8, 16))


def rotation(q, k):
    return ops.RopeStore(q, k, None, SPEC, "f16", ROPE, stores=False)


def store(q, k, v):
    return ops.RopeStore(q, k, v, SPEC, "f16", None, stores=True)


def test_rope_and_store_become_one_op():
    """Keys stored before they are rotated, or a store lost."""
    q, k, v = value(), value(), value()
    (fused,) = fuse_rope_store([rotation(q, k), store(q, k, v)])
    assert (fused.q, fused.k, fused.v, fused.rope, fused.spec) == (q, k, v, ROPE, SPEC)
    assert fuse_rope_store([store(q, k, v)])[0].rope is None


def test_rope_and_store_stay_apart_around_a_tap_and_for_other_keys():
    """An edit of rotated keys that never reaches the cache, or another value's keys stored."""
    q, k, v = value(), value(), value()
    apart = [rotation(q, k), ops.Tap("hook_rot_k", k), store(q, k, v)]
    assert fuse_rope_store(apart) == apart
    other = [rotation(q, k), store(q, value(), v)]
    assert fuse_rope_store(other) == other
    twice = [rotation(q, k), rotation(q, k)]
    assert fuse_rope_store(twice) == twice


def norm(x, y):
    return ops.RMSNorm(y, x, Vector(np.ones(32, np.float32)), 1e-5)


def test_a_producer_writes_the_panels_of_its_result():
    """A result that is quantized by an op of its own, or panels that nothing writes."""
    x, y, panels = value(), value(), Buffer(99)
    (made,) = quantize_in_producer([norm(x, y), ops.Quantize(y, "q8", panels)])
    assert isinstance(made, ops.RMSNorm)
    assert (made.x, made.y, made.panels) == (x, y, panels)


def test_ops_are_left_as_recorded():
    """A pass that changes the list it was given."""
    x, y = value(), value()
    recorded = [norm(x, y), ops.Quantize(y, "q8", Buffer(99))]
    drop_unread(quantize_in_producer(recorded), x)
    assert recorded[0].panels is None
    assert recorded[0].y is y


def test_an_addition_joins_the_norm_or_factor_before_it():
    """A residual lost or added twice, a factor on the residual, or a pass over memory more."""
    x, y, z, residual = value(), value(), value(), value()
    (fused,) = fuse_add([norm(x, y), ops.Add(z, y, residual)])
    assert isinstance(fused, ops.RMSNorm)
    assert (fused.x, fused.y, fused.residual, fused.kernel) == (x, z, residual, "rms_norm_add")
    (fused,) = fuse_add([ops.Scale(y, x, 0.5), ops.Add(z, y, residual)])
    assert isinstance(fused, ops.Add)
    assert (fused.x, fused.y, fused.residual, fused.scale) == (x, z, residual, 0.5)


def test_an_addition_stays_apart_from_what_others_read():
    """A norm's result that a listener, another op or the residual itself needs, and that nothing writes."""
    x, y, z, residual = value(), value(), value(), value()
    for apart in (
        [norm(x, y), ops.Tap("hook_attn_out", y), ops.Add(z, y, residual)],
        [norm(x, y), ops.Add(z, y, residual), ops.Quantize(y, "q8", Buffer(99))],
        [norm(x, y), ops.Add(z, y, y)],
        [norm(x, y), ops.Add(z, residual, y)],
    ):
        assert fuse_add(apart) == apart


@pytest.mark.parametrize("kind", ["q8x2", "q16", "q8t", "f32"])
def test_only_int8_panels_are_written_by_producers(kind):
    """Panels of a form that producers cannot write."""
    x, y = value(), value()
    recorded = [norm(x, y), ops.Quantize(y, kind, Buffer(99))]
    assert quantize_in_producer(recorded) == recorded


def test_an_edited_result_is_quantized_after_the_edit():
    """Panels of what a hook saw, not of what it left."""
    x, y = value(), value()
    recorded = [norm(x, y), ops.Tap("hook_normalized", y), ops.Quantize(y, "q8", Buffer(99))]
    assert quantize_in_producer(recorded) == recorded
    elsewhere = [norm(x, y), ops.Tap("hook_resid", x), ops.Quantize(y, "q8", Buffer(99))]
    assert len(quantize_in_producer(elsewhere)) == 2


def test_results_that_nothing_reads_are_not_written():
    """A float result written for nobody; or not written, and read by an op, a tap or the caller."""
    x, y, panels = value(), value(), Buffer(99)
    made = ops.RMSNorm(y, x, Vector(np.ones(32, np.float32)), 1e-5, panels=panels)
    last = value()
    assert drop_unread([made], last)[0].y is None
    assert drop_unread([made], y)[0].y is y
    assert drop_unread([made, norm(y, value())], last)[0].y is y
    assert drop_unread([made, ops.Tap("hook_normalized", y)], last)[0].y is y
    without = norm(x, y)
    assert drop_unread([without], last)[0].y is y  # it has nowhere else to write
    z = value()
    finish = ops.AttendFinish(z, z, Buffer(1), SPEC, "f16", panels=panels)
    assert drop_unread([finish], last)[0].y is z  # it reads what attention left there


def attend(n_heads, window=None):
    spec = AttentionSpec(0, n_heads, 1, 16, 0.25, window)
    return ops.Attend(value(), value(), spec, "f16", Buffer(99), 64)


def test_work_is_cut_first_and_once_for_each_kind_of_layer():
    """Entries of one layer's tokens, or of its window, taken by another; or cut again for each layer."""
    layers = [attend(2), attend(2), attend(12), attend(2, 40), attend(2), attend(2, 40)]
    made = add_attention_work([norm(value(), value()), *layers])
    assert [op.kernel.split("[")[0] for op in made] == [
        *("attention_work",) * 3, "rms_norm", *("attend_f16",) * 6
    ]  # fmt: skip
    assert add_attention_work([]) == []


# --- recording and placement ---


def test_a_value_is_quantized_once_unless_it_is_edited(backend):
    """Panels made twice for q, k and v; or kept where a hook has edited the value since."""
    weight = Source({"": "Q8_0"}).matrix("w", (16, 64))
    recorder = Recorder(
        "f16",
        StepLimits(8, 1, 8, 1),
        frozenset({"hook"}),
        backend.head_panels,
        backend.packed,
        backend.packed_experts,
        backend.rope_rows,
        backend.packed_update,
    )
    x = recorder.embed(weight, None)
    recorder.linear(x, (weight,))
    recorder.linear(x, (weight,))
    assert sum(isinstance(op, ops.Quantize) for op in recorder.ops) == 1
    recorder.tap("hook", None, x)
    recorder.linear(x, (weight,))
    assert sum(isinstance(op, ops.Quantize) for op in recorder.ops) == 2


def test_buffers_in_use_together_never_share_memory():
    """A value overwritten while it is still wanted; or no memory shared at all."""
    random = np.random.default_rng(0)
    for _ in range(50):
        values = [value(16 * int(n)) for n in random.integers(1, 9, 12)]
        chain = [norm(values[i], values[i + 1]) for i in range(11)]
        late = [norm(values[int(i)], value(16)) for i in random.integers(0, 12, 3)]
        recorded = [*chain, *late]
        memory, starts = place(recorded, values[-1])
        spans = lifetimes(recorded)
        spans[values[-1].buffer] = (spans[values[-1].buffer][0], len(recorded))
        assert starts.keys() == spans.keys()
        for a, b in combinations(starts, 2):
            together = spans[a][0] <= spans[b][1] and spans[b][0] <= spans[a][1]
            apart = starts[a] + a.n_bytes <= starts[b] or starts[b] + b.n_bytes <= starts[a]
            assert apart or not together
        assert memory.nbytes < sum(buffer.n_bytes for buffer in starts)


def test_biases_by_distance_are_made_where_there_are_some(monkeypatch):
    """Catches an array of twice the context for every attention layer, of which none has biases."""
    spec = AttentionSpec(0, n_heads=1, n_kv_heads=1, d_head=32, scale=1.0)
    monkeypatch.setattr(ops, "_attention", lambda *_: {})
    attend = ops.Attend(None, None, spec, "f16", None, most_tokens=1 << 45)  # too many for any memory
    made = attend.record(SimpleNamespace(n_threads=1, of=lambda buffer: 0))
    assert (made["distances"], made["distance_stride"]) == (0, 0)
