"""The torch backend's ops, cache and logits against the reference, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from kukri.errors import CapacityError, MissingKernelError, ShapeError, UnsupportedError
from kukri.interp.tapes.tape import Matrices, Tape, Variable
from kukri.kernels import make_backend
from kukri.kernels.cache import KVLayer, StateLayer
from kukri.kernels.expert_choice import NO_EXPERT
from kukri.kernels.paged_kv import PAGE_TOKENS, PagedKV
from kukri.kernels.reference import ReferenceBackend, ReferenceOps
from kukri.kernels.specs import AttentionSpec, Routing
from kukri.kernels.step import ForwardBatch, StepLimits
from kukri.kernels.weight_handles import RopeFrequencies, Vector, Weight
from kukri.quant.blocks import BLOCKS, dequantize
from kukri.quant.types import QUANT_TYPES
from tests.kernels.small_programs import ATTENTION_ERROR, TYPES, check_ops, weight
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import torch

    from kukri.interp.tapes.torch_tape import TorchTape
    from kukri.kernels.pytorch import TorchBackend
    from kukri.kernels.pytorch import ops as torch_ops
    from kukri.kernels.pytorch.cache import TensorCache
    from kukri.kernels.pytorch.step import TensorLogits
    from kukri.kernels.pytorch.weights import to_device


def cpu() -> torch.device:
    return torch.device("cpu")


LIMITS = StepLimits(300, 8, 300, 24)


def test_the_torch_backend_has_every_op():
    """An op that was added to the op set and to other backends alone, or under another signature."""
    check_ops(torch_ops.TorchOps)


@pytest.mark.parametrize(
    "routing",
    [Routing(6, 3, True), Routing(6, 3, False, by_sigmoid=True)],
    ids=["softmax", "sigmoid"],
)
def test_every_backend_gives_the_same_numbers_of_experts(routing):
    """Another number for an expert that a token does not use, or before those that it uses."""
    logits = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32).round(1)
    logits[1, [0, 2, 3, 5]] = logits[2, 1:] = -np.inf  # two experts with a weight, and one
    layout = [KVLayer(1, 16)]
    constants = TorchBackend("cpu").constants
    found = {
        "reference": ReferenceOps(PagedKV(layout, 1)).route(logits, routing).experts,
        "tape": Tape(Matrices(), {}).route(Variable(logits), routing).experts,
        "torch": torch_ops.TorchOps(constants, TensorCache(layout, 0, 0, "f32", cpu()))
        .route(torch.tensor(logits), routing)
        .experts.numpy(),
        "torch tape": TorchTape(constants, layout).route(torch.tensor(logits), routing).experts.numpy(),
    }
    for row, experts in enumerate(found["reference"]):
        n_unused = {1: 1, 2: 2}.get(row, 0)
        assert (experts == NO_EXPERT).tolist() == [False] * (3 - n_unused) + [True] * n_unused
        assert (np.diff(experts[: 3 - n_unused]) > 0).all()
    for name, experts in found.items():
        np.testing.assert_array_equal(experts, found["reference"], name)


@pytest.mark.parametrize("name", BLOCKS)
def test_weights_are_those_of_the_definition_to_the_bit(name):
    """A scale, a high bit or a minimum read from elsewhere; rounding in another place."""
    matrix = weight(np.random.default_rng(3), name, 7, 512)
    packed = to_device(matrix, cpu(), torch.float32)
    want = dequantize(matrix.data, matrix.type)
    np.testing.assert_array_equal(packed.rows(slice(None)).numpy(), want)
    np.testing.assert_array_equal(packed.rows(torch.tensor([5, 0, 5])).numpy(), want[[5, 0, 5]])
    np.testing.assert_array_equal(packed.unpacked().data.numpy(), want)
    halves = to_device(matrix, cpu(), torch.bfloat16).unpacked().data
    assert torch.equal(halves, torch.from_numpy(want).to(torch.bfloat16))


def test_floats_at_odd_addresses():
    """A view of bytes as floats, which PyTorch refuses unless they are aligned."""
    data = np.zeros(4 * 12 + 1, np.uint8)[1:].reshape(4, 12)
    data[:] = np.random.default_rng(0).integers(0, 60, data.shape)
    matrix = Weight(data, QUANT_TYPES["F32"], (4, 3))
    got = to_device(matrix, cpu(), torch.float32).rows(slice(None))
    np.testing.assert_array_equal(got.numpy(), np.ascontiguousarray(data).view(np.float32))


def test_a_type_without_a_kernel_is_named():
    with pytest.raises(
        MissingKernelError, match="Q8_K weights are not supported by backend torch: use F32, F16"
    ):
        to_device(Weight(np.zeros((1, 292), np.uint8), QUANT_TYPES["Q8_K"], (1, 256)), cpu(), torch.float32)


@pytest.mark.parametrize("unpacked_bytes", [0, 1 << 30])
@pytest.mark.parametrize("name", TYPES)
def test_linear_and_embedding(name, unpacked_bytes, monkeypatch):
    """A piece of a packed matrix that is left out or out of order; a bias or residual not added."""
    monkeypatch.setattr("kukri.kernels.pytorch.weights._CHUNK_WEIGHTS", 3000)
    rng = np.random.default_rng(1)
    weights = [weight(rng, name, n, 512) for n in (37, 16)]
    bias, tokens = Vector(rng.standard_normal(53, dtype=np.float32)), np.array([3, 0, 36, 3], np.int32)

    def program(ops, batch):
        x = ops.embed(weights[0], batch)
        y = ops.linear(x, weights, bias)
        left, _ = ops.split(y, (37, 16))
        return ops.linear(x, weights[:1], residual=left, tap=("hook_attn_out", 0))

    batch = one_sequence(tokens)
    got, want = run_both(program, [KVLayer(1, 16)], batch, unpacked_bytes=unpacked_bytes)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_norms_activations_and_rope():
    """Another epsilon, weight or pairing of dimensions."""
    rng = np.random.default_rng(2)
    table = Weight(
        rng.standard_normal((40, 96), dtype=np.float32).view(np.uint8), QUANT_TYPES["F32"], (40, 96)
    )
    norm, bias, head = (Vector(rng.standard_normal(n, dtype=np.float32)) for n in (96, 96, 24))
    rope = RopeFrequencies((1.0, 0.3, 0.01, 0.002, 1e-4), 64, 1.2)
    spec = AttentionSpec(0, 4, 4, 24, 0.2)

    def program(ops, batch):
        x = ops.embed(table, batch)
        y = ops.layer_norm(ops.rms_norm(x, norm, 1e-5), norm, bias, 1e-3)
        q, k = ops.rope(ops.head_norm(y, head, 1e-6), ops.map("gelu", x), rope, spec, batch)
        gated = ops.add(ops.scale(ops.map("gated_silu", k, q), 0.3), ops.map("gated_gelu", q, k))
        return ops.logit_rows(ops.map("softcap", ops.map("clamp", gated, None, -0.9, 1.1), a=0.7), batch)

    batch = one_sequence(np.arange(40, dtype=np.int32), rows=np.array([39, 2, 2], np.int32))
    got, want = run_both(program, [KVLayer(1, 16)], batch)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kv_type", ATTENTION_ERROR)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (40, 0.8)])
@pytest.mark.parametrize(("sinks", "reach"), [(None, 0), ((-3, 0, 2, 9, 1, -1), 30)], ids=str)
def test_attention_with_holes_and_poison(kv_type, window, softcap, sinks, reach):
    """NaN from unused cache, a page of another sequence, a window off by one, heads in another order."""
    rng = np.random.default_rng(4)
    layout = [KVLayer(1, 32), KVLayer(3, 32)]
    vector = None if sinks is None else Vector(np.array(sinks, np.float32))
    distances = Vector(rng.standard_normal(12 * reach).astype(np.float32)) if reach else None
    spec = AttentionSpec(1, 6, 3, 32, 0.3, window, softcap, sinks=vector, distances=distances)
    sequences = [(0, 150), (33, 1), (16, 1), (7, 3), (90, 1), (0, 1)]
    reference, tensors = ReferenceBackend(), TorchBackend()
    caches = [b.new_cache(layout, 60, kv_type=kv_type) for b in (reference, tensors)]
    for cache in caches:
        cache._keys[0][:] = cache._values[0][:] = 0xFF  # float16 NaN, int8 -1 with a scale of NaN
    table = rng.permutation(60)[: 6 * 10].astype(np.int32).reshape(6, 10)
    got = want = None
    for which in ("past", "now"):
        lengths = [past or 1 if which == "past" else new for past, new in sequences]
        before = [0 if which == "past" else past for past, _ in sequences]
        batch = batch_of(before, lengths, table)
        qkv = rng.standard_normal((batch.n_tokens, 12 * 32), dtype=np.float32)
        qkv[0, -1] = 1e6  # beyond float16, unless the cache is float32
        results = []
        for backend, cache in zip((reference, tensors), caches, strict=True):

            def program(ops, step, values=qkv):
                x = values if isinstance(ops, ReferenceOps) else torch.from_numpy(values)
                q, k, v = ops.split(x, (6 * 32, 3 * 32, 3 * 32))
                return ops.attention(q, k, v, spec, step)

            results.append(backend.compile(program, cache, LIMITS)(batch).numpy())
        got, want = results
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, rtol=3e-5, atol=3e-5 * np.abs(want).max())
    for layer in (0, 1):  # the same numbers are stored, but for the order of a key's dimensions
        keys, stored = caches[0].keys[layer], caches[1].kv[layer].keys.numpy()
        if keys.dtype.names:
            keys = keys["quants"].reshape(61 - 1, 3 if layer else 1, -1, PAGE_TOKENS)
        np.testing.assert_array_equal(stored[:60], keys.swapaxes(-1, -2))


@pytest.mark.parametrize("n_mask_heads", [1, 4])
def test_attention_takes_a_mask_of_each_head_or_of_all(n_mask_heads):
    """A mask on the wrong head, added to padding, or a token that sees nothing and gets NaN."""
    rng = np.random.default_rng(5)
    spec = AttentionSpec(0, 4, 2, 16, 0.25, window=3, softcap=0.8)
    mask = rng.standard_normal((n_mask_heads, 7, 7), dtype=np.float32)
    mask[rng.random(mask.shape) < 0.4] = -np.inf
    mask[:, 3] = -np.inf
    qkv = rng.standard_normal((7, 8 * 16), dtype=np.float32)
    batch = batch_of([0], [7], np.array([[5]], np.int32), mask=mask)

    def program(ops, step):
        q, k, v = ops.split(qkv if isinstance(ops, ReferenceOps) else torch.from_numpy(qkv), (64, 32, 32))
        return ops.attention(q, k, v, spec, step)

    got, want = run_both(program, [KVLayer(2, 16)], batch, StepLimits(8, 1, 8, 1, n_mask_heads))
    assert not want[3].any()
    np.testing.assert_allclose(got, want, rtol=3e-5, atol=3e-6)


def test_an_fp8_cache():
    """Numbers that are rounded or limited otherwise than by PyTorch's own type, or are kept in more bytes."""
    rng = np.random.default_rng(6)
    spec, layer = AttentionSpec(0, 4, 2, 16, 0.25), KVLayer(2, 16)
    q, k, v = (torch.from_numpy(rng.normal(0, 9, (20, n * 16)).astype(np.float32)) for n in (4, 2, 2))
    v[3, 5] = -1000
    rounded = [x.clamp(-448, 448).to(torch.float8_e4m3fn).float() for x in (k, v)]
    batch = batch_of([0], [20], np.array([[3, 1]], np.int32))
    backend, results = TorchBackend(), []
    for kv_type, (key, value) in (("fp8", (k, v)), ("f32", rounded)):
        cache = backend.new_cache([layer], 4, kv_type=kv_type)
        assert cache.n_bytes == 5 * 16 * 64 * (1 if kv_type == "fp8" else 4)
        program = backend.compile(lambda ops, b, x=(q, key, value): ops.attention(*x, spec, b), cache, LIMITS)
        results.append(program(batch).numpy())
    np.testing.assert_array_equal(*results)
    for backend in (ReferenceBackend(), make_backend("cpu", 1)):
        with pytest.raises(UnsupportedError, match="a KV cache of fp8 is not supported on CPUs"):
            backend.new_cache([layer], 4, kv_type="fp8")


def test_nan_reaches_its_own_sequence_alone():
    """A batch whose padded pages carry one request's NaN to another."""
    spec = AttentionSpec(0, 1, 1, 16, 0.25)
    x = torch.ones(2, 16)
    x[0] = torch.nan
    backend = TorchBackend()
    cache = backend.new_cache([KVLayer(1, 16)], 4)
    table = np.array([[0, 1], [2, 0]], np.int32)  # page 0 is the first's, and unused by the second
    program = backend.compile(lambda ops, b: ops.attention(x, x, x, spec, b), cache, LIMITS)
    got = program(batch_of([18, 0], [1, 1], table)).numpy()
    got = program(batch_of([18, 1], [1, 1], table)).numpy()
    assert np.isnan(got[0]).all()
    assert np.isfinite(got[1]).all()


def test_cache_pages_and_states():
    """A copy that misses a layer, a scale, or half of a page."""
    layout = [KVLayer(2, 32), StateLayer((("s", (3, 2)),)), KVLayer(1, 64)]
    for kv_type in ("f16", "q8_0", "q4", "f32"):
        cache = TensorCache(layout, 4, 3, kv_type, cpu())
        assert cache.n_bytes - 4 * 24 == PagedKV(layout, 5, 0, kv_type).n_bytes
        tensors = [t for kv in cache.kv.values() for t in kv.tensors]
        for i, tensor in enumerate(tensors):
            tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) % 100 + i + 1)
        cache.copy_page(2, 0)
        assert all(torch.equal(t[0], t[2]) and not torch.equal(t[1], t[2]) for t in tensors)
        cache.states[1]["s"][2] = 7
        cache.copy_state(2, 0)
        assert cache.states[1]["s"].sum(dim=(1, 2)).tolist() == [42, 0, 42, 0]


def test_tensor_logits_are_taken_copied_and_compared():
    """Rows in another order; a copy that is not one; of equal logits not the first."""
    tensor = torch.tensor([[0.0, 2, 2], [5, 1, 5], [float("nan"), 0, 0]])
    logits = TensorLogits(tensor)
    assert (len(logits), logits.argmax()[:2]) == (3, [1, 0])
    assert [logits.has_nan(i) for i in range(3)] == [False, False, True]
    np.testing.assert_array_equal(logits.take([1, 0]).numpy(), tensor[[1, 0]].numpy())
    np.testing.assert_array_equal(logits.take([]).numpy(), np.zeros((0, 3)))
    kept, view = logits.copy(), logits.take([0, 1])
    tensor[0, 0] = 9
    assert (kept.numpy()[0, 0], view.numpy()[0, 0]) == (0, 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [0, 9]}, "token id"),
        ({"token_ids": [-1, 0]}, "token id"),
        ({"slots": [0, 64]}, "slot"),
        ({"logit_rows": [2]}, "logit row"),
        ({"query_start": [0, 3]}, "cover"),
        ({"context_len": [1]}, "cover"),
        ({"context_len": [33]}, "longer than the page table"),
        ({"page_table": [[4, 0]]}, "page outside"),
        ({"page_table": [[-1, 0]]}, "page outside"),
        ({"rope_positions": [0, 32]}, "beyond the RoPE"),
    ],
)
def test_indices_are_checked(change, message):
    """An index that would read past an array on a device, whose error ends the process."""
    table = Weight(np.zeros((9, 64), np.uint8), QUANT_TYPES["F32"], (9, 16))
    backend, spec = TorchBackend(), AttentionSpec(0, 1, 1, 16, 0.25)
    rope = RopeFrequencies((1.0,), 32)

    def program(ops, batch):
        x = ops.embed(table, batch)
        q, k = ops.rope(x, x, rope, spec, batch)
        return ops.logit_rows(ops.attention(q, k, x, spec, batch), batch)

    compiled = backend.compile(program, backend.new_cache([KVLayer(1, 16)], 4), StepLimits(8, 1, 8, 2))
    good = batch_of([0], [2], np.array([[3, 0]], np.int32))
    compiled(good)
    arrays = {name: np.array(value, np.int32) for name, value in change.items()}
    fields = {
        **{name: getattr(good, name) for name in good.__dataclass_fields__ if name != "inputs"},
        **arrays,
    }
    with pytest.raises(ShapeError, match=message):
        compiled(ForwardBatch(**fields))


def test_limits_are_checked():
    backend = TorchBackend()
    program = backend.compile(
        lambda ops, batch: None, backend.new_cache([KVLayer(1, 16)], 4), StepLimits(1, 1, 1, 2)
    )
    with pytest.raises(CapacityError, match="2 tokens"):
        program(batch_of([0], [2], np.zeros((1, 2), np.int32)))


def one_sequence(token_ids: np.ndarray, rows: np.ndarray | None = None) -> ForwardBatch:
    n_pages = -(-len(token_ids) // PAGE_TOKENS)
    batch = batch_of([0], [len(token_ids)], np.arange(n_pages, dtype=np.int32)[None])
    fields = {name: getattr(batch, name) for name in batch.__dataclass_fields__ if name != "inputs"}
    rows = batch.logit_rows if rows is None else rows
    return ForwardBatch(**{**fields, "token_ids": token_ids, "logit_rows": rows})


def batch_of(
    past: list[int], lengths: list[int], page_table: np.ndarray, mask: np.ndarray | None = None
) -> ForwardBatch:
    """Sequences of `past` cached tokens and so many new ones; token ids are 0, 1, 2 …"""
    positions = np.concatenate([np.arange(p, p + n) for p, n in zip(past, lengths)]).astype(np.int32)
    owner = np.repeat(np.arange(len(past)), lengths)
    slots = page_table[owner, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
    return ForwardBatch(
        np.arange(len(positions), dtype=np.int32) % 9,
        positions,
        slots.astype(np.int32),
        np.cumsum([0, *lengths], dtype=np.int32),
        np.array([p + n for p, n in zip(past, lengths)], np.int32),
        page_table,
        np.arange(len(positions), dtype=np.int32),
        mask=mask,
    )


def run_both(program, layout, batch, limits=LIMITS, unpacked_bytes=None):
    """(torch's result, the reference's) of a program."""
    results = []
    for backend in (TorchBackend(unpacked_bytes=unpacked_bytes), ReferenceBackend()):
        cache = backend.new_cache(layout, 24, kv_type="f32")
        results.append(backend.compile(program, cache, limits)(batch).numpy())
    return results
