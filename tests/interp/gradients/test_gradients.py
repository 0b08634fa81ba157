"""Gradients by every activation next to torch's autograd on transformers' models, and finite differences."""

from __future__ import annotations

import weakref
from copy import deepcopy
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest

from kukri import LLM
from kukri.errors import RequestError, UnsupportedError
from kukri.interp import gradients
from kukri.interp.gradients import attribution
from kukri.interp.tapes import tape
from kukri.interp.tapes.tape import Matrices, Tape, TextRows
from tests.interp import tl_models
from tests.lazy_imports import lazy_imports
from tests.models import made_models, tiny_models
from tests.tiny_gguf import write_tiny

with lazy_imports():
    import torch

IDS = tl_models.IDS[0]
OTHER = np.random.default_rng(1).integers(3, tiny_models.V, len(IDS))
RIGHT, WRONG = 5, 9
QUICK = ["smollm3", "phi", "starcoder2", "gemma2", "olmo2", "olmoe", "gpt_oss", "qwen3_5_text-grouped"]
QUICK += ["gemma4_text", "gemma4_moe_text", "deepseek_v2"]
NAMES = [*tl_models.NAMES, "ernie4_5", "olmo3", "gpt_oss", "lfm2", "qwen3_5_text", "qwen3_5_text-grouped"]
GEMMA4 = ["gemma4_text", "gemma4_text-keys", "gemma4_moe_text"]
NAMES += [*GEMMA4, "deepseek_v2", "glm4_moe_lite", "phimoe", "apertus"]


def some(quick):
    """Every architecture, those that are not `quick` in the slow tests."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


def holder(name, backend="reference"):
    return SimpleNamespace(interp=tl_models.session(name, backend))


def torch_gradients(name):
    """The gradient of a logit difference by the stream before each block, and by what the o and down
    matrices read; and the difference itself.
    """
    hf = deepcopy(made_models.make(name)[0])
    kept = {}

    def keep(key):
        def hook(module, args, kwargs):
            x = args[0] if args else kwargs["hidden_states"]
            x.retain_grad()
            kept[key] = x

        return hook

    for i, layer in enumerate(hf.model.layers):
        layer.register_forward_pre_hook(keep(f"blocks.{i}.hook_resid_pre"), with_kwargs=True)
        parts = dict(layer.named_modules())
        for module, key in (
            ("self_attn.o_proj", "attn.hook_z"),
            ("self_attn.dense", "attn.hook_z"),
            ("mlp.down_proj", "mlp.hook_post"),
            ("mlp.fc2", "mlp.hook_post"),
            ("mlp.c_proj", "mlp.hook_post"),
        ):
            if module in parts:
                parts[module].register_forward_pre_hook(keep(f"blocks.{i}.{key}"), with_kwargs=True)
    embeddings = hf.get_input_embeddings()(torch.from_numpy(IDS.astype(np.int64))[None])
    logits = hf(inputs_embeds=embeddings.detach().requires_grad_()).logits
    value = logits[0, -1, RIGHT] - logits[0, -1, WRONG]
    value.backward()
    grads = {key: x.grad[0].numpy() for key, x in kept.items()}
    if name == "gemma4_text":  # there the embeddings themselves, which make those of layers too
        grads["hook_embed"] = grads.pop("blocks.0.hook_resid_pre")
    if name == "gemma4_moe_text":  # an MLP next to experts
        grads = {key.replace("mlp.hook_post", "mlp.hook_shared_post"): grad for key, grad in grads.items()}
    return float(value.detach()), grads


@pytest.mark.parametrize("name", some(QUICK))
def test_gradients_are_torchs(name):
    """A derivative that is wrong in one op: norms with their parts, caps, windows, rotations, activations,
    routes, experts, convolutions, recurrent states.
    """
    value, expected = torch_gradients(name)
    metric = gradients.logit_difference(RIGHT, WRONG)
    found, activations, grads = gradients.run_with_gradients(holder(name), IDS, metric)
    assert found == pytest.approx(value, abs=1e-4)
    assert len(expected) >= tiny_models.N_LAYERS
    for key, grad in expected.items():
        mine = grads[key][0].reshape(grad.shape)
        np.testing.assert_allclose(mine, grad, atol=2e-4 * np.abs(grad).max(), err_msg=key)
        assert activations[key].shape == grads[key].shape


@pytest.mark.parametrize(
    "name", [*some(["gpt_oss", "qwen3_5_text-grouped", "gemma4_text", "deepseek_v2"]), *tl_models.ENCODERS]
)
def test_gradients_on_pytorch_are_those_of_numpy(name):
    """A derivative of a value that transformers does not show: keys, routes, states, gates."""
    metric = gradients.log_probability(RIGHT)
    value, _, expected = gradients.run_with_gradients(holder(name), IDS, metric)
    found, activations, grads = gradients.run_with_gradients(holder(name, "torch"), IDS, metric)
    assert found == pytest.approx(value, abs=1e-4)
    assert list(grads) == list(activations) == list(expected)
    for key in expected:
        scale = np.abs(expected[key]).max()
        np.testing.assert_allclose(grads[key], expected[key], atol=1e-4 * scale, err_msg=key)


def test_heads_rotate_by_the_positions_of_images():
    """Catches a tape that rotates by the places of tokens, where a text with images has other positions."""
    session, ids = tl_models.session("qwen2", "torch"), IDS[:4].astype(np.int32)
    found = {}
    for name, positions in (("places", [0, 1, 2, 3]), ("none", None), ("an image", [0, 7, 7, 8])):
        rows = TextRows.of([ids], None if positions is None else np.array(positions, np.int32))
        tape = session.tape()
        found[name] = tape.values(tape.run(session.model, rows))
    np.testing.assert_array_equal(found["none"], found["places"])
    assert np.abs(found["an image"] - found["none"]).max() > 1e-3
    tape = session.array_tape()
    rows = TextRows.of([ids], np.array([0, 7, 7, 8], np.int32))
    np.testing.assert_allclose(found["an image"], tape.run(session.model, rows).x, atol=1e-4)


FINITE = {
    "smollm3": [
        *(f"blocks.1.{tap}" for tap in ("attn.hook_q", "attn.hook_rot_k", "attn.hook_v", "mlp.hook_pre")),
        *("blocks.0.attn.hook_k", "blocks.2.ln2.hook_out", "hook_embed", "blocks.2.hook_attn_out"),
    ],
    "olmoe": [
        f"blocks.1.mlp.{what}"
        for what in (
            "hook_router_logits",
            "hook_expert_weights",
            "experts.hook_pre_linear",
            "experts.hook_post",
        )
    ],
    "lfm2": ["blocks.1.conv.hook_conv_in", "blocks.0.conv.hook_conv_out"],
    "qwen3_5_text": [
        *("blocks.1.linear_attn.hook_qkv", "blocks.3.attn.hook_gate", "blocks.3.attn.hook_ungated_z"),
    ],
}


def value_of(session, ids, metric, given):
    """The metric of a text with other values at some taps."""
    tape = session.tape(given)
    return metric(tape.values(tape.run(session.model, TextRows.of([ids])))[None])[0]


@pytest.mark.parametrize("model", FINITE)
def test_gradients_are_finite_differences(model):
    """A gradient of queries, keys or values by another rotation or group, of a token's other expert."""
    llm = holder(model)
    session = llm.interp
    metric = gradients.log_probability(RIGHT)
    names = FINITE[model]
    _, activations, grads = gradients.run_with_gradients(llm, IDS, metric, names)
    rng = np.random.default_rng(2)
    for name in names:
        x = activations[name]
        direction = rng.standard_normal(x.shape).astype(np.float32) * x.std(axis=-1, keepdims=True)
        direction[:, : len(IDS) // 2] = 0
        direction[x == 0] = 0  # experts that are not used
        tap = session.point(name).tap
        values = []
        for step in (-3e-3, 3e-3):
            given = {tap: (x + np.float32(step) * direction).reshape(-1, session.trace.widths[tap])}
            values.append(value_of(session, IDS, metric, given))
        slope = (values[1] - values[0]) / 6e-3
        assert float((grads[name] * direction).sum()) == pytest.approx(slope, rel=1e-2, abs=1e-3), name


def test_attribution_patching_estimates_patching():
    """Axes that are swapped, a sign, the gradient of the wrong run."""
    llm = holder("llama")
    session = llm.interp
    metric = gradients.logit_difference(RIGHT, WRONG)
    near = IDS.copy()
    near[-3] = OTHER[-3]
    found = gradients.attribution_patch(llm, near, IDS, metric)
    assert found.shape == (tiny_models.N_LAYERS, len(IDS))
    assert np.abs(found[0, :-3]).max() == 0  # tokens before the one that differs
    _, clean, _ = gradients.run_with_gradients(llm, IDS, metric)
    value, corrupted, _ = gradients.run_with_gradients(llm, near, metric)
    for layer in (1, 3):
        stream, other = corrupted["resid_pre", layer][0], clean["resid_pre", layer][0]
        for pos in (-3, -1):
            part = stream.copy()
            part[pos] += np.float32(1e-2) * (other[pos] - stream[pos])
            given = {f"blocks.{layer}.hook_resid_pre": part}
            moved = (value_of(session, near, metric, given) - value) / 1e-2
            assert found[layer, pos] == pytest.approx(moved, rel=0.05, abs=2e-3)
    by_head = gradients.attribution_patch(llm, near, IDS, metric, "z", "layer pos head")
    assert by_head.shape == (tiny_models.N_LAYERS, len(IDS), tiny_models.HEADS)
    whole = gradients.attribution_patch(llm, near, IDS, metric, "z", "layer head")
    np.testing.assert_allclose(by_head.sum(1), whole, atol=1e-5)
    with pytest.raises(RequestError, match="cannot be patched by"):
        gradients.attribution_patch(llm, near, IDS, metric, "z")
    with pytest.raises(RequestError, match="must be as long as the corrupted text"):
        gradients.attribution_patch(llm, near[1:], IDS, metric)


def test_integrated_gradients_sum_to_the_difference():
    """A path that ends elsewhere, or weights of steps that do not sum to 1."""
    llm = holder("qwen3")
    metric = gradients.logit_difference(RIGHT, WRONG)
    ends = [gradients.run_with_gradients(llm, ids, metric, ())[0] for ids in (IDS, OTHER)]
    found = gradients.integrated_gradients(llm, IDS, metric, baseline=OTHER, n_steps=64)
    assert found.shape == (1, len(IDS))
    assert float(found.sum()) == pytest.approx(ends[0] - ends[1], rel=0.05, abs=0.05)
    assert gradients.integrated_gradients(llm, IDS, metric, n_steps=2).shape == (1, len(IDS))
    for options, words in [({"n_steps": 0}, "at least 1"), ({"baseline": OTHER[1:]}, "as many tokens")]:
        with pytest.raises(RequestError, match=words):
            gradients.integrated_gradients(llm, IDS, metric, **options)


def test_batches_and_metrics(tmp_path):
    """Texts of a batch that see each other, a metric of torch that gives another gradient."""
    path = write_tiny(tmp_path / "tiny.gguf")
    with LLM(path, backend="reference") as llm:
        texts = [[5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]
        metric = gradients.log_probability([3, 4, 5])
        value, _, grads = gradients.run_with_gradients(llm, texts, metric, "resid_pre1")
        each = [
            gradients.run_with_gradients(llm, ids, gradients.log_probability(i), "resid_pre1")
            for ids, i in zip(texts, (3, 4, 5))
        ]
        assert value == pytest.approx(np.mean([one[0] for one in each]), abs=1e-5)
        alone = np.concatenate([one[2]["resid_pre1"] for one in each])
        np.testing.assert_allclose(grads["resid_pre1"], alone / 3, atol=1e-6)
        by_torch = gradients.by_torch(
            lambda logits: logits[:, -1].log_softmax(-1)[torch.arange(3), torch.tensor([3, 4, 5])].mean()
        )
        again, _, theirs = gradients.run_with_gradients(llm, texts, by_torch, "resid_pre1")
        assert again == pytest.approx(value, abs=1e-5)
        np.testing.assert_allclose(theirs["resid_pre1"], grads["resid_pre1"], atol=1e-6)
        logits, _ = llm.run_with_cache(texts)
        np.testing.assert_allclose(value, metric(logits)[0], atol=1e-3)
        with pytest.raises(RequestError, match="are not supported: name its inputs"):
            gradients.run_with_gradients(llm, texts, metric, "pattern0")


@pytest.mark.parametrize("name", QUICK)
def test_a_tape_is_freed_with_its_last_user(name):
    """Catches an op whose derivative holds the tape: a run's values would then stay until Python collects."""
    session = holder(name).interp
    tape = session.tape()
    result = tape.run(session.model, TextRows.of([IDS]))
    tape.backward(result, np.ones_like(result.x))
    freed = weakref.ref(tape)
    del tape, result
    assert freed() is None


@pytest.mark.full(only=["torch-*"])
@pytest.mark.parametrize("kept_bytes", [0, 1 << 30])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_matrices_in_float32_are_freed_with_the_call(monkeypatch, backend, kept_bytes):
    """Catches a session that keeps 4 bytes for each parameter of a large model until the LLM is closed, one
    that dequantizes a small model again for each call, and groups of texts that share nothing.
    """
    llm = holder("smollm3", backend)
    session = llm.interp
    monkeypatch.setattr(tape, "KEPT_BYTES", kept_bytes)
    monkeypatch.setattr(attribution, "text_groups", lambda *_: [slice(0, 1), slice(1, 2)])
    constants = session._matrices if backend == "reference" else session._constants
    make, made, used = constants._make, [], []
    monkeypatch.setattr(constants, "_make", lambda: made.append(1) or make())

    def metric(logits):
        shared = session.tape().matrices
        arrays = shared.values() if backend == "reference" else [m.data for m in shared._matrices.values()]
        used.append((sum(4 * prod(x.shape) for x in arrays), [weakref.ref(x) for x in (shared, *arrays)]))
        return gradients.log_probability([RIGHT, WRONG])(logits)

    texts = [IDS, OTHER]
    values = [
        gradients.run_with_gradients(llm, texts, metric, "resid_pre1")[2]["resid_pre1"] for _ in range(2)
    ]
    np.testing.assert_array_equal(*values)
    n_parameters = sum(prod(p.shape) for p in session.model.parameters if len(p.shape) == 2)
    assert used[0][0] == used[1][0] == 4 * n_parameters
    alive = [one() for one in used[0][1]]
    assert len(made) == (1 if kept_bytes else 2)
    if kept_bytes:
        assert [one() for one in used[1][1]] == alive
    else:
        assert alive == [None] * len(alive)


def test_an_op_without_a_derivative():
    """A gradient that passes an op by."""
    with pytest.raises(UnsupportedError, match="gradients of the op scan are not supported"):
        Tape(Matrices(), {}).scan()
