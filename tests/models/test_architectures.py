"""Every architecture against transformers on tiny random models, from a state dict and from a GGUF file."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri.errors import FormatError, UnsupportedError, UnusedTensorError
from kukri.formats.gguf.config import model_config
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.weights import GGUFWeights
from kukri.formats.gguf.writer import write_gguf
from kukri.kernels import make_backend
from kukri.kernels.backend import Backend
from kukri.models import ARCHITECTURES, Model, cache_layout, load_model
from kukri.models.trace import Trace
from tests.lazy_imports import lazy_imports
from tests.models.made_models import make
from tests.models.test_llama import TOLERANCE, residual_recorder
from tests.models.tiny_llama import Driver, TorchSource, hf_forward, random_ids, run_together
from tests.models.tiny_models import D_HEAD, IN_GGUF, N_TOKENS, ORIGINAL, TINY, V
from tests.models.written_models import as_read, write
from tests.quick import some

with lazy_imports():
    import torch

IDS = random_ids(N_TOKENS, V)
MIXTURES = ["qwen3_moe", "olmoe", "gpt_oss"]  # with int8 inputs, two tokens of the last choose other experts
LATENT = ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3"]
HYBRIDS = [
    "lfm2",
    "qwen3_5_text",
    "granitemoehybrid",
    "nemotron_h",
    "nemotron_h_moe",
]  # with layers that keep a state
GEMMA4 = ["gemma4_text", "gemma4_text-keys", "gemma4_moe_text"]
DECODERS = ["olmo2", "olmo3", "granite", "gemma2", "gemma3_text"]  # with ops that the others lack


def loaded(name: str, form: str, tmp_path: Path, weight_type: str = "F32") -> tuple[Any, Model]:
    """transformers' model and ours, the latter from transformers' tensors or through a GGUF file."""
    hf, config, source = make(name, weight_type=weight_type)
    if form == "state":
        return hf, load_model(source, config)
    file = GGUFFile(write(tmp_path / "tiny.gguf", name, config, source, weight_type))
    read = model_config(file)
    return hf, load_model(GGUFWeights(file, read), read)


@pytest.mark.full(only=["smallthinker-state", "smallthinker_softmax-state", "mamba2-state"])
@pytest.mark.parametrize(
    ("name", "form"), [*[(name, "state") for name in TINY], *[(name, "gguf") for name in IN_GGUF]]
)
def test_logits_and_residuals_match_transformers(
    name: str, form: str, tmp_path: Path, reference: Backend
) -> None:
    """Any mistake of an architecture: names, order of rows, norms, rotation, window, scaling."""
    hf, model = loaded(name, form, tmp_path)
    if model.config.mixture is None:  # transformers multiplies experts in float32 at most
        hf = deepcopy(hf).double()  # in float32 it may be 1e-4 from us, each of us half of that from float64
    want_logits, want_residuals = hf_forward(hf, IDS)
    hooks, residuals = residual_recorder(model.config.n_layers)
    got_logits = Driver(model, reference, hooks).run(IDS, [N_TOKENS])
    assert len(residuals) == len(want_residuals) == model.config.n_layers
    for got, want in zip(residuals, want_residuals):
        np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(got_logits, want_logits, atol=TOLERANCE, rtol=0)


# attention alone, windows, a mixture and a hybrid are enough for the kernels of BF16
_IN_BF16 = ("llama", "gemma3_text", "qwen3_moe", "qwen3_5_text")
_GREEDY = [
    *[(name, "F32") for name in TINY],
    *[pytest.param(name, "BF16", marks=() if name in _IN_BF16 else pytest.mark.slow) for name in TINY],
]


@pytest.mark.representative(2.5)  # a hybrid takes the most
@pytest.mark.full(but=some("{}-F32"))
@pytest.mark.parametrize(("name", "weight_type"), _GREEDY)
def test_greedy_ids_on_the_cpu_are_transformers_own(name: str, weight_type: str, tmp_path: Path) -> None:
    """A CPU kernel or plan that fits Llama alone; a cache that loses the window or the rotation."""
    hf, model = loaded(name, "gguf" if name in IN_GGUF else "state", tmp_path, weight_type)
    ids = [*IDS]
    for _ in range(8):
        ids.append(int(hf_forward(hf, ids)[0][-1].argmax()))
    backend = make_backend("cpu", 2)
    try:
        driver = Driver(model, backend, kv_type="f16")
        got = [*IDS, int(driver.run(IDS, [13])[-1].argmax())]
        while len(got) < len(ids):
            got.append(int(driver.step(got[-1:])[-1].argmax()))
    finally:
        backend.close()  # type: ignore[attr-defined]
    assert got == ids


class Int8Inputs:
    """The op set, with the input of each matrix but the head rounded as the CPU's packed kernels round it."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

    def linear(self, x: np.ndarray, weights: Any, *rest: Any) -> np.ndarray:
        is_rounded = weights[0].shape[0] != V and weights[0].type.block_size > 1
        return self.ops.linear(_rounded(x) if is_rounded else x, weights, *rest)

    def expert_linear(self, x: np.ndarray, *rest: Any) -> np.ndarray:
        return self.ops.expert_linear(_rounded(x), *rest)

    def head_linear(self, x: np.ndarray, heads: Any) -> np.ndarray:
        return self.ops.head_linear(_rounded(x), heads)


def _rounded(x: np.ndarray) -> np.ndarray:
    blocks = x.reshape(len(x), -1, 32)
    scale = np.abs(blocks).max(-1, keepdims=True) / 127
    return (np.rint(blocks / scale) * scale).reshape(x.shape)


class WithInt8Inputs:
    """A model on such ops."""

    def __init__(self, model: Model) -> None:
        self.model, self.cache_layout = model, model.cache_layout

    def __call__(self, ops: Any, batch: Any) -> Any:
        return self.model(Int8Inputs(ops), batch)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "phi3", "phi", "starcoder2", *DECODERS, *MIXTURES[:2]])
def test_packed_weights_run_on_the_cpu(name: str, tmp_path: Path, reference: Backend) -> None:
    """An op that leaves stale or no int8 input to the packed matrices after it."""
    _, model = loaded(name, "gguf", tmp_path, "Q8_0")
    rounded: Any = WithInt8Inputs(model)
    want = Driver(rounded, reference, kv_type="f16").run(IDS, [N_TOKENS])
    backend = make_backend("cpu", 2)
    try:
        got = Driver(model, backend, kv_type="f16").run(IDS, [N_TOKENS])
        taps = {f"blocks.{i}.ln1.hook_normalized": [lambda n, x: None] for i in range(2)}
        tapped = Driver(model, backend, taps, kv_type="f16").run(IDS, [N_TOKENS])
    finally:
        backend.close()  # type: ignore[attr-defined]
    np.testing.assert_array_equal(tapped, got)
    # the last bit of a float may tip an int8 by one step: under 1% in all; without rounding it is 1 to 6%
    assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) < 0.015


@pytest.mark.parametrize("name", [*HYBRIDS, "falcon_h1", *GEMMA4, *LATENT[::3]])
def test_packed_weights_of_other_layers_run_on_the_cpu(name: str, tmp_path: Path, reference: Backend) -> None:
    """The same of recurrent layers, and of those with shared keys and embeddings of their own."""
    test_packed_weights_run_on_the_cpu(name, tmp_path, reference)


@pytest.mark.full(but=some("*-{}"))
@pytest.mark.parametrize("name", TINY)
def test_chunking_a_prompt_changes_no_bit(name: str, backend: Backend) -> None:
    """An op that works on a row differently when others are next to it."""
    _, config, source = make(name)
    model = load_model(source, config)
    ids = random_ids(70, V)
    whole = Driver(model, backend, kv_type="f16").run(ids, [len(ids)])
    for chunks in ([1] * 9 + [52, 1], [7, 16, 3], [64]):  # single tokens at both ends, 18 of 70
        np.testing.assert_array_equal(Driver(model, backend, kv_type="f16").run(ids, chunks), whole)


@pytest.mark.full(but=some("*-{}"))
@pytest.mark.parametrize("name", TINY)
def test_a_neighbour_changes_no_bit(name: str, backend: Backend) -> None:
    """A sequence that sees another's keys, or sums in another order next to it."""
    _, config, source = make(name)
    model = load_model(source, config)
    first, second = random_ids(37, V, 3), random_ids(21, V, 4)
    alone = [Driver(model, backend, kv_type="f16").run(ids, [len(ids)]) for ids in (first, second)]
    together = run_together(model, backend, [first, second])
    np.testing.assert_array_equal(together, np.concatenate(alone))


@pytest.mark.parametrize("name", ["qwen3", *DECODERS])
def test_taps_see_what_is_added_to_the_residual_stream(name: str, backend: Backend) -> None:
    """hook_attn_out before its norm or factor, a tap that changes the result, or a norm without its tap."""
    _, config, source = make(name)
    model, seen = load_model(source, config), dict[str, np.ndarray]()

    def record(tap: str, x: np.ndarray) -> None:
        seen[tap.removeprefix("blocks.1.")] = x.copy()

    taps = {tap: [record] for tap in Trace(model).taps if tap.startswith("blocks.1.")}
    tapped = Driver(model, backend, taps, kv_type="f16").run(IDS, [N_TOKENS])
    np.testing.assert_array_equal(tapped, Driver(model, backend, kv_type="f16").run(IDS, [N_TOKENS]))
    np.testing.assert_array_equal(seen["hook_resid_mid"], seen["hook_resid_pre"] + seen["hook_attn_out"])
    np.testing.assert_array_equal(seen["hook_resid_post"], seen["hook_resid_mid"] + seen["hook_mlp_out"])
    if "gemma" in name:
        np.testing.assert_array_equal(seen["ln1_post.hook_normalized"], seen["hook_attn_out"])
        np.testing.assert_array_equal(seen["ln2_post.hook_normalized"], seen["hook_mlp_out"])
    if "olmo" in name:
        np.testing.assert_array_equal(seen["ln1.hook_normalized"], seen["hook_attn_out"])
        np.testing.assert_array_equal(seen["ln2.hook_normalized"], seen["hook_mlp_out"])


@pytest.mark.parametrize("name", IN_GGUF)
def test_a_file_says_what_the_model_is(name: str, tmp_path: Path) -> None:
    """A fact that the file holds and the configuration drops."""
    _, config, source = make(name)
    read = model_config(GGUFFile(write(tmp_path / "tiny.gguf", name, config, source)))
    assert replace(read, norm_eps=1e-5) == as_read(name, config)  # kept in float32


@pytest.mark.parametrize("name", TINY)
def test_the_cache_is_known_without_weights(name: str) -> None:
    """Sizes that are shown, or that a server counts with, of another cache than the model makes."""
    _, config, source = make(name)
    model = load_model(source, config)
    assert cache_layout(config, model.n_parameters) == model.cache_layout


def test_a_layer_larger_than_the_model_is_refused() -> None:
    """Memory taken for what a hostile file merely claims."""
    _, config, _ = make("lfm2")
    with pytest.raises(FormatError, match="parameters"):
        cache_layout(replace(config, n_vocab=1 << 30), 1 << 20)


@pytest.mark.parametrize("name", TINY)
def test_every_parameter_is_listed_once(name: str) -> None:
    """A bias or norm of one architecture missing from the listing."""
    hf, config, source = make(name)
    model = load_model(source, config)
    factors = [b for key, b in hf.named_buffers() if key.endswith(("layer_scalar", "bias", "beta", "eps"))]
    assert model.n_parameters == sum(p.numel() for p in (*hf.parameters(), *factors))
    listed = {p.name: p.shape for p in model.parameters}
    assert listed == {key: array.shape for key, array in source.arrays.items()}


def test_longrope_takes_its_short_factors_below_the_original_context(reference: Backend) -> None:
    """The long factors for every model that has them."""
    hf, config, source = make("phi3")
    model = load_model(source, replace(config, max_context=ORIGINAL))
    ids = IDS[:ORIGINAL]
    want, _ = hf_forward(hf, ids)  # transformers looks at the prompt's length
    np.testing.assert_allclose(Driver(model, reference).run(ids, [ORIGINAL]), want, atol=TOLERANCE, rtol=0)
    long = Driver(load_model(source, config), reference).run(ids, [ORIGINAL])
    assert np.abs(long - want).max() > 100 * TOLERANCE


@pytest.mark.representative(3)
def test_the_tiny_models_exercise_what_they_claim() -> None:
    """A config whose special trait is not there, so that its parity would prove nothing."""
    decoders = {name for name, architecture in ARCHITECTURES.items() if architecture.is_causal}
    assert {name.split("-")[0] for name in TINY} == decoders - {"whisper"}  # tests/sound
    configs = {name: make(name)[1] for name in TINY}
    for name in ("smollm3", "smollm3-listed"):
        assert {layer.use_rope for layer in configs[name].layers} == {True, False}
    assert make("smollm3-listed")[0].config.no_rope_layers == [1, 0, 0, 1]
    assert make("smollm3")[0].config.no_rope_layers == [1, 1, 1, 0]
    windows = {name: {layer.window for layer in config.layers} for name, config in configs.items()}
    assert windows["mistral"] == {5}
    assert windows["qwen2"] == {None, 7}
    assert windows["phi3"] == {9}
    assert windows["starcoder2"] == {11}
    assert windows["gpt_oss"] == {7, None}
    for name in (*HYBRIDS, "olmo_hybrid"):
        assert {layer.is_recurrent for layer in configs[name].layers} == {True, False}
    assert {layer.is_recurrent for layer in configs["mamba2"].layers} == {True}
    for name in ("falcon_h1", "falcon_h1-normed"):
        assert {layer.has_state for layer in configs[name].layers} == {True}
        assert 1 not in vars(configs[name].multipliers).values()
    assert windows["olmo3"] == windows["gemma2"] == windows["gemma3_text"] == {None, 7}
    assert all(window < N_TOKENS for found in windows.values() for window in found if window is not None)
    assert make("qwen2")[0].config.layer_types == ["full_attention"] * 2 + ["sliding_attention"] * 2
    assert {n: c.rope.rotary_dim for n, c in configs.items() if c.rope.rotary_dim != D_HEAD} == {
        "phi3": 12,
        "phi": 8,
        "qwen3_5_text": 8,
        "qwen3_5_text-grouped": 8,
        "qwen3_5_moe_text": 8,
        "glm4_moe": 8,
        "bailing_moe": 8,
        "nemotron": 8,
        "phi-grouped": 8,
        "gpt_neox": 8,
        "stablelm": 8,
        "gemma4_text": 2 * D_HEAD,
        "gemma4_text-keys": 2 * D_HEAD,
        "gemma4_moe_text": 2 * D_HEAD,
    }
    for name in ("exaone4-windows", "cohere2", "afmoe", "flint"):
        assert {(layer.use_rope, layer.window) for layer in configs[name].layers} == {
            (True, 7),
            (False, None),
        }
    for name in ("lfm2_moe", "ernie4_5_moe", "glm4_moe", "bailing_moe", "afmoe", "flint", *LATENT[:3]):
        assert {layer.is_dense for layer in configs[name].layers} == {True, False}
    for name in ("lfm2_moe", "ernie4_5_moe", "glm4_moe", "bailing_moe", "afmoe"):
        assert (bias := make(name)[2].arrays["model.layers.3.mlp.gate.e_score_correction.bias"]).std() > 0.1
        assert len(bias) == 8
    assert all((config.latent is None) == (name not in LATENT) for name, config in configs.items())
    kinds = {name: c.rope.scaling.kind for name, c in configs.items() if c.rope.scaling}
    assert kinds == {
        "deepseek_v2": "yarn",
        "ministral3": "yarn",
        "exaone": "llama3",
        "apertus": "llama3",
        "llama": "llama3",
        "smollm3": "yarn",
        "phi3": "longrope",
        "olmo3": "yarn",
        "gemma3_text": "linear",
        "gpt_oss": "yarn",
        "gemma4_text": "llama3",  # divisors
        "gemma4_text-keys": "llama3",
        "gemma4_moe_text": "llama3",
        "lfm3": "llama3",
    }
    assert ORIGINAL < N_TOKENS
    assert all(c.n_heads > c.n_kv_heads for n, c in configs.items() if n not in ("phi", "gpt_neox", "mamba2"))


@pytest.mark.parametrize(
    ("name", "has", "lacks"),
    [
        ("qwen2", "self_attn.q_proj.bias", "self_attn.o_proj.bias"),
        ("qwen3", "self_attn.q_norm.weight", "self_attn.q_proj.bias"),
        ("phi3", "mlp.gate_up_proj.weight", "self_attn.q_proj.weight"),
        ("phi3", "self_attn.qkv_proj.weight", "mlp.gate_proj.weight"),
        ("starcoder2", "mlp.c_proj.bias", "mlp.up_proj.weight"),
        ("gpt_oss", "self_attn.sinks.weight", "mlp.gate.weight"),
        ("gpt_oss", "mlp.experts.gate_proj.bias", "mlp.gate_proj.weight"),
        ("flint", "self_attn.sinks.weight", "mlp.gate.e_score_correction.bias"),
        ("olmoe", "mlp.gate.weight", "mlp.up_proj.weight"),
        ("qwen3_moe", "mlp.experts.gate_proj.weight", "mlp.gate_proj.weight"),
        ("lfm2", "conv.conv.weight", "self_attn.q_proj.weight"),
        ("olmo2", "self_attn.q_norm.weight", "input_layernorm.weight"),
        ("olmo3", "post_feedforward_layernorm.weight", "pre_feedforward_layernorm.weight"),
        ("gemma2", "pre_feedforward_layernorm.weight", "self_attn.q_norm.weight"),
        ("gemma3_text", "self_attn.q_norm.weight", "lm_head.weight"),
        ("seed_oss", "self_attn.q_proj.bias", "self_attn.o_proj.bias"),
        ("hunyuan_v1_dense", "self_attn.query_layernorm.weight", "self_attn.q_norm.weight"),
        ("exaone4", "self_attn.q_norm.weight", "input_layernorm.weight"),
        ("glm4", "post_mlp_layernorm.weight", "self_attn.o_proj.bias"),
        ("cohere2", "input_layernorm.weight", "post_attention_layernorm.weight"),
        ("granitemoe", "mlp.gate.weight", "mlp.up_proj.weight"),
        ("arcee", "mlp.up_proj.bias", "mlp.gate_proj.weight"),
        ("nemotron", "input_layernorm.bias", "mlp.gate_proj.weight"),
        ("granitemoeshared", "mlp.shared_experts.up_proj.weight", "mlp.up_proj.weight"),
        ("qwen2_moe", "mlp.shared_expert_gate.weight", "mlp.up_proj.weight"),
        ("qwen3_5_moe_text", "linear_attn.A_log.weight", "mlp.up_proj.weight"),
        ("afmoe", "self_attn.gate_proj.weight", "self_attn.q_proj.bias"),
        ("hunyuan_v1_moe", "mlp.shared_experts.up_proj.weight", "mlp.up_proj.weight"),
        ("olmo", "mlp.up_proj.weight", "input_layernorm.weight"),
        ("stablelm", "input_layernorm.bias", "self_attn.o_proj.bias"),
        ("apertus", "mlp.act_fn.alpha_p.weight", "mlp.gate_proj.weight"),
        ("phi", "input_layernorm.bias", "post_attention_layernorm.weight"),
        ("phi", "mlp.fc1.bias", "mlp.gate_proj.weight"),
        ("falcon_h1", "mamba.in_proj.weight", "mamba.norm.weight"),
        ("falcon_h1-normed", "mamba.norm.weight", "mlp.gate_proj.weight"),
    ],
)
def test_the_tensors_are_those_of_the_architecture(name: str, has: str, lacks: str) -> None:
    """A tiny model without the tensors that make its architecture special."""
    source = make(name)[2]
    assert source.has(f"model.layers.1.{has}")
    assert not source.has(f"model.layers.1.{lacks}")


def test_head_norms_belong_to_the_architecture() -> None:
    """Head norms dropped because the file says llama, or ones invented where it says qwen3."""
    _, config, source = make("qwen3")
    with pytest.raises(UnusedTensorError, match="norm"):
        load_model(source, replace(config, architecture="llama"))
    without = {k: torch.tensor(a) for k, a in make("qwen2")[2].arrays.items()}
    with pytest.raises(FormatError, match=r"q_norm"):
        load_model(TorchSource(without), config)


def test_an_activation_is_refused_for_a_number_that_would_change_it() -> None:
    """Catches an eps of Apertus that is thrown away, and one above 0 refused, which bounds nothing."""
    _, config, source = make("apertus")
    for eps, is_right in ((-1e-6, True), (0.5, True), (-0.1, False), (np.nan, False)):
        arrays = {
            key: np.full_like(array, eps) if key.endswith("act_fn.eps.weight") else array
            for key, array in source.arrays.items()
        }
        made = TorchSource({key: torch.tensor(array) for key, array in arrays.items()})
        if is_right:
            load_model(made, config)
            continue
        with pytest.raises(UnsupportedError, match=r"act_fn\.eps' must be at least -1e-05"):
            load_model(made, config)


def test_phi_files_may_hold_q_k_and_v_as_one_matrix(tmp_path: Path, reference: Backend) -> None:
    """Older Phi-2 files refused, or a fused bias cut in other places than its matrix."""
    _, config, source = make("phi")
    want = Driver(load_model(source, config), reference).run(IDS, [N_TOKENS])
    fused = dict(source.arrays)
    for layer in range(config.n_layers):
        for kind in ("weight", "bias"):
            name = f"model.layers.{layer}.self_attn.{{}}_proj.{kind}"
            fused[name.format("qkv")] = np.concatenate([fused.pop(name.format(part)) for part in "qkv"])
    together = TorchSource({name: torch.tensor(array) for name, array in fused.items()})
    file = GGUFFile(write(tmp_path / "tiny.gguf", "phi", config, together))
    assert "blk.0.attn_qkv.bias" in file.tensors
    read = model_config(file)
    got = Driver(load_model(GGUFWeights(file, read), read), reference).run(IDS, [N_TOKENS])
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, r"'xielu\.alpha_p' is missing"),
        ([0.5] * 3, r"'xielu\.alpha_p' must have 4 entries, not 3"),
        ([0.5, np.nan, 0.5, 0.5], r"'xielu\.alpha_p' must hold finite numbers"),
        (["a"] * 4, r"'xielu\.alpha_p' must be a list of numbers"),
    ],
    ids=str,
)
def test_wrong_lists_of_numbers_of_layers(values: Any, message: str, tmp_path: Path) -> None:
    """An activation made of another layer's number, or of none, that is found in a step."""
    _, config, source = make("apertus")
    with GGUFFile(write(tmp_path / "tiny.gguf", "apertus", config, source)) as file:
        tensors = {t.name: (t.type, file.data(t.name), t.shape) for t in file.tensors.values()}
        stated = {**file.metadata, "xielu.alpha_p": values}
    write_gguf(tmp_path / "x.gguf", {k: v for k, v in stated.items() if v is not None}, tensors)
    with GGUFFile(tmp_path / "x.gguf") as file, pytest.raises(FormatError, match=message):
        load_model(GGUFWeights(file, model_config(file)), model_config(file))
