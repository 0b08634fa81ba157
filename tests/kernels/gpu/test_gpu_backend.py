"""Whole models on Triton kernels under the interpreter: against the reference, and to the bit by batch."""

from __future__ import annotations

import collections
from dataclasses import fields

import numpy as np
import pytest

from kukri.engine.batch_builder import BatchBuilder, Chunk
from kukri.engine.spans.embedding_spans import NO_SPANS
from kukri.errors import UnsupportedError
from kukri.kernels.quantize import quantize
from kukri.kernels.reference import ReferenceBackend
from kukri.kernels.specs import AttentionSpec
from kukri.kernels.step import StepLimits
from kukri.kernels.weight_handles import Weight
from kukri.models import load_model
from kukri.quant.types import QUANT_TYPES
from tests.kernels.gpu.device import DEVICE, IS_INTERPRETED
from tests.lazy_imports import lazy_imports
from tests.models.biased_keys import biased_model, error
from tests.models.made_models import make
from tests.models.tiny_llama import Driver, random_ids
from tests.models.tiny_models import TINY, V
from tests.quick import quick

with lazy_imports():
    import torch
    from triton.runtime import interpreter

    from kukri.kernels.gpu import tiles
    from kukri.kernels.gpu.backend import GpuBackend
    from kukri.kernels.pytorch import ops as torch_ops
    from tests.kernels.gpu.launch_counter import LaunchCounter

IDS = random_ids(4, V)
SLOW = pytest.mark.slow  # the interpreter takes seconds for a step


def model_of(name, n_layers=4, type_name="Q8_0"):
    """A tiny model with packed matrices."""
    _, config, source = make(name)
    plain, type = source.matrix, QUANT_TYPES[type_name]

    def packed(key, shape):
        if shape[1] % type.block_size:  # the taps of a convolution
            return plain(key, shape)
        return Weight(quantize(plain(key, shape).data.view(np.float32), type), type, shape, key)

    source.matrix = packed
    model = load_model(source, config)
    if len(model.cache_layout) == len(
        model.blocks
    ):  # else layers' states are numbered after all layers' keys
        model.blocks = model.blocks[:n_layers]
    return model


class Int8Inputs:
    """A model whose matrices read inputs that are rounded as the kernels round them."""

    def __init__(self, model):
        self.model, self.cache_layout = model, model.cache_layout

    def __call__(self, ops, batch):
        plain = ops.linear

        def linear(x, weights, *rest):
            blocks = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)
            scale = np.maximum(np.abs(blocks).max(-1, keepdims=True), 1e-30) / 127
            rounded = (np.rint(blocks / scale) * scale).reshape(len(x), -1)[:, : x.shape[1]]
            return plain(np.ascontiguousarray(rounded), weights, *rest)

        ops.linear = linear
        try:
            return self.model(ops, batch)
        finally:
            del ops.linear


class Sequence:
    """A token sequence on one page."""

    spans = NO_SPANS

    def __init__(self, tokens, page):
        self.tokens, self.page_rows = np.array(tokens, np.int32), [np.array([page], np.int32)]


def assert_near(got, want, n_layers=1):
    """The last bit of a float may tip an int8 by one step in each layer, as on the CPU backend."""
    assert got.shape == want.shape
    assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) < 0.015 * n_layers**0.5


class Recorder:
    """A capture that refuses what a device's does: a read of a tensor by the host, but for those of kernels'
    interpreter.
    """

    def __init__(self, monkeypatch):
        self._monkeypatch, self._is_recording = monkeypatch, False
        launch = interpreter.InterpretedFunction.run

        def launched(kernel, *args, **kwargs):
            before, self._is_recording = self._is_recording, False
            try:
                return launch(kernel, *args, **kwargs)
            finally:
                self._is_recording = before

        monkeypatch.setattr(interpreter.InterpretedFunction, "run", launched)
        for name in ("numpy", "tolist", "item", "__bool__", "__int__", "__float__"):
            monkeypatch.setattr(torch.Tensor, name, self._watched(getattr(torch.Tensor, name)))

    def _watched(self, read):
        def watched(*args, **kwargs):
            assert not self._is_recording, "the host reads a step that is captured"
            return read(*args, **kwargs)

        return watched

    def __call__(self, run):
        self._is_recording = True
        try:
            return run(), lambda: None
        finally:
            self._is_recording = False


@pytest.mark.full
@pytest.mark.parametrize("name", quick(TINY, kept=["qwen2_moe"]))
def test_logits_are_those_of_the_reference(name, monkeypatch):
    """An op under another name, a bias or residual that no launch adds, a rotation or softcap left out; a
    decode step that cannot be captured; a product of PyTorch's amid a promise of bits.
    """
    capture = Recorder(monkeypatch) if IS_INTERPRETED else None
    model, backend = model_of(name, 1), GpuBackend(DEVICE, capture=capture)
    want = Driver(Int8Inputs(model), ReferenceBackend(), kv_type="f16").run(IDS, [4])
    product, shapes = torch_ops.TorchOps.product, []

    def counted(ops, x, weights):
        shapes.append(x.shape)
        return product(ops, x, weights)

    monkeypatch.setattr(torch_ops.TorchOps, "product", counted)
    assert_near(Driver(model, backend, kv_type="f16").run(IDS, [3, 1]), want, len(model.blocks))
    assert not (shapes and backend.is_batch_invariant)


def test_attention_has_the_fields_that_its_kernels_know():
    """A kind of attention that plain ops compute and kernels leave out without a word."""
    known = {"layer", "n_heads", "n_kv_heads", "d_head", "scale", "window", "softcap", "sinks", "reads"}
    left_to_plain_ops = {"is_causal", "sees_all_ahead", "distances", "key_range", "first_key", "stop_key"}
    assert {field.name for field in fields(AttentionSpec)} == known | left_to_plain_ops


@SLOW
def test_keys_are_kept_by_their_range():
    """Keys with a large bias that a kernel rotates and stores before they are brought into their range."""
    model, ids = biased_model(), random_ids(31, V)
    want = Driver(model, ReferenceBackend()).run(ids, [len(ids)])
    assert error(model, GpuBackend(DEVICE), "q8_0", ids, want) < 0.04  # 0.4 without


def test_a_cache_of_float32_is_refused():
    """Kernels of float16 that read float32."""
    with pytest.raises(UnsupportedError, match="a KV cache of f32 is not supported"):
        GpuBackend(DEVICE).new_cache([], 1, kv_type="f32")


@pytest.mark.full
def test_a_layer_norm_is_not_batch_invariant():
    """A promise of bits that a mean of PyTorch's may break."""
    for name, promised in (("phi", False), ("qwen3", True)):
        model, backend = model_of(name, 1), GpuBackend(DEVICE)
        assert backend.is_batch_invariant
        Driver(model, backend, kv_type="f16").step(IDS[:1])
        assert backend.is_batch_invariant == promised


@pytest.mark.full
def test_a_crowd_changes_no_bit():
    """A launch whose tiles, or order of sums, follow the batch."""
    model, backend = model_of("qwen3", 1), GpuBackend(DEVICE)
    program = backend.compile(model, backend.new_cache(model.cache_layout, 4), StepLimits(8, 3, 8, 1))
    builder = BatchBuilder(program.inputs, 16)
    other = Sequence(random_ids(4, V, seed=1), 1)
    alone, beside = Sequence(IDS, 3), Sequence(IDS, 0)

    def logits(*chunks):
        return program(builder.build([Chunk(*chunk) for chunk in chunks])).numpy()

    assert logits((alone, 0, 1, 0)).shape == (0, V)  # amid a prompt no logits are wanted
    # token by token, as the interpreter's matrix products round by the shape of a prompt's tiles
    for i in range(2):
        got = logits((other, i, 1, 0), (beside, i, 1, 1))
        np.testing.assert_array_equal(got, logits((alone, i, 1, 1)))


@pytest.mark.representative(2)
def test_hooks_see_floats_and_edits_are_computed():
    """A norm that is put off and never shown, or quantized before its hook has edited it."""
    model = model_of("llama", 1)
    taps = ["blocks.0.ln1.hook_normalized", "blocks.0.mlp.hook_post", "blocks.0.attn.hook_rot_q"]
    taps += ["blocks.0.hook_attn_out", "ln_final.hook_normalized"]
    seen = {}
    for backend in (ReferenceBackend(), GpuBackend(DEVICE)):
        kept = seen[backend.name] = {}

        def listen(name, x, kept=kept):
            kept[name] = x.copy()
            x *= 0.5 if name == taps[0] else 1

        rounded = Int8Inputs(model) if backend.name == "reference" else model
        hooks = {name: [listen] for name in taps}
        kept["logits"] = Driver(rounded, backend, hooks, kv_type="f16").run(IDS[:2], [2])
    for name in (*taps, "logits"):
        assert_near(seen["gpu"][name], seen["reference"][name])


@pytest.mark.full
@pytest.mark.parametrize(
    ("n_sequences", "context", "launches"),
    [(1, 2, ["decode"]), pytest.param(3, 33, ["decode", "merge"], marks=SLOW)],
)
def test_launches_of_a_decode_step(monkeypatch, n_sequences, context, launches):
    """A launch more than needed: a value that nobody reads, matrices of one type one by one, a copy."""
    monkeypatch.setattr("kukri.kernels.gpu.attention.CHUNK", 32)  # what the ops take for a long context
    model, backend = model_of("llama", 2), GpuBackend(DEVICE, with_graphs=False)
    limits = StepLimits(8, 3, 8, 20)
    program = backend.compile(model, backend.new_cache(model.cache_layout, 60), limits)
    builder = BatchBuilder(program.inputs, 16)
    sequences = [Sequence(random_ids(context, V), 20 * i) for i in range(n_sequences)]
    for i, sequence in enumerate(sequences):
        sequence.page_rows = [np.arange(20 * i, 20 * i + 20, dtype=np.int32)]
    batch = builder.build([Chunk(s, context - 1, 1, 1) for s in sequences])
    program(batch)  # copies constants
    with LaunchCounter(monkeypatch) as counter:
        program(batch)
    layers = {"gemv": 2 * 4, **dict.fromkeys(launches, 2)}
    # the table's rows are decoded by their type's schema: numbers minus their offset, times the scale
    embedding = {"index": 1, "clone": 2, "_to_copy": 2, "sub": 1, "mul": 1}
    if not IS_INTERPRETED:
        embedding["copy_"] = 2  # the inputs, by page-locked memory
    logits = {"index": 1, "gemv": 1}
    assert counter.counts == sum(map(collections.Counter, (embedding, logits)), collections.Counter(layers))


def test_a_large_product_has_its_input_quantized_once():
    """The same input quantized in each of a thousand programs, or tokens that a GEMV does not take."""
    assert all(tiles.quantizes_input(*shape, 4) for shape in ((960, 576), (3072, 576), (576, 1536)))
    assert tiles.quantizes_input(3072, 2048, 1)  # q, k and v of a 3B model
    assert not tiles.quantizes_input(22016, 2048, 1)  # its gate and up
    assert not tiles.quantizes_input(64, 16384, 1)
    assert not tiles.quantizes_input(64, 64, 5)
