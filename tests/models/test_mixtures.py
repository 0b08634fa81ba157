"""Mixtures of experts from files: fused tensors, packing, neighbours, hooks, counts, wrong inputs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kukri import LLM, SamplingParams
from kukri.bench.card import model_card
from kukri.errors import FormatError, KukriError
from kukri.formats.gguf.config import model_config
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.weights import GGUFWeights
from kukri.formats.gguf.writer import write_gguf
from kukri.kernels.backend import Backend
from kukri.models import load_model
from kukri.quant.types import QUANT_TYPES
from kukri.terminal.convert import convert_model, convert_to_directory
from kukri.terminal.inspect import show_model
from tests.lazy_imports import lazy_imports
from tests.models.made_models import make as make_tiny
from tests.models.tiny_llama import Driver, hf_forward
from tests.models.tiny_models import TINY
from tests.models.written_models import write
from tests.test_llm_safetensors import N_VOCAB, exact_logits, make

with lazy_imports():
    import torch

IDS = np.random.default_rng(0).integers(0, N_VOCAB, 30).tolist()
LAYER = "model.layers.1.mlp"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A qwen3_moe as transformers saves it: a tensor for each matrix of each expert."""
    return make(tmp_path_factory.mktemp("moe"), "qwen3_moe")[0]


def test_sparsemixers_weights(monkeypatch: pytest.MonkeyPatch, reference: Backend) -> None:
    """A share among other experts than those about as good; in the tiny model nearly all weights are 1."""
    tiny = TINY["phimoe"]
    assert tiny.mixture is not None
    wide = replace(
        tiny, hf={**tiny.hf, "router_jitter_noise": 0.25}, mixture=replace(tiny.mixture, tolerance=0.5)
    )
    monkeypatch.setitem(TINY, "phimoe", wide)
    hf, config, source = make_tiny("phimoe")
    ids = list(range(30))
    got = Driver(load_model(source, config), reference).run(ids, [30])
    np.testing.assert_allclose(got, hf_forward(hf, ids)[0], atol=1e-4)
    narrow = load_model(source, replace(config, mixture=tiny.mixture))
    assert np.abs(Driver(narrow, reference).run(ids, [30]) - got).max() > 0.1


def fuse(tensors: dict[str, Any]) -> None:
    """The names that transformers 5 has in memory: gate and up of all experts as one tensor."""
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: np.stack([tensors.pop(f"{prefix}.{i}.{part}.weight") for i in range(8)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[f"{prefix}.gate_up_proj"] = np.concatenate([parts["gate_proj"], parts["up_proj"]], axis=1)
        tensors[f"{prefix}.down_proj"] = parts["down_proj"]


def test_fused_tensors_are_the_same_model(
    saved: Path, edited_copy: Callable[..., Path], tmp_path: Path
) -> None:
    """Gate taken for up, or an expert's rows for another's; a conversion that knows one form alone."""
    directory, want = edited_copy(saved, fuse, {}), exact_logits(saved, IDS)
    np.testing.assert_array_equal(exact_logits(directory, IDS), want)
    convert_model(directory, tmp_path / "m.gguf", None, dry_run=False, as_json=False)
    np.testing.assert_array_equal(exact_logits(tmp_path / "m.gguf", IDS), want)
    convert_to_directory(tmp_path / "m.gguf", tmp_path / "back", None, as_json=True)
    np.testing.assert_array_equal(exact_logits(tmp_path / "back", IDS), want)
    names = load_file(tmp_path / "back" / "model.safetensors").keys()
    assert names == load_file(saved / "model.safetensors").keys()


def test_packed_experts(saved: Path, tmp_path: Path) -> None:
    """Routers that are packed; experts packed otherwise while loading than in a file; a type that is lost."""
    with LLM(saved, quantize="Q8_0", backend="reference") as llm:
        types = {p.name.split("mlp.")[-1]: p.type for p in llm.model.parameters if f"{LAYER}." in p.name}
        want = llm.logits(IDS)
    assert types == {"gate.weight": "F32"} | {
        f"experts.{part}_proj.weight": "Q8_0" for part in ("gate", "up", "down")
    }
    convert_model(saved, tmp_path / "m.gguf", "Q8_0", dry_run=False, as_json=False)
    with GGUFFile(tmp_path / "m.gguf") as file:
        assert file.tensors["blk.1.ffn_gate_inp.weight"].type.name == "F32"
        assert file.tensors["blk.1.ffn_down_exps.weight"].type.name == "Q8_0"
        assert file.tensors["blk.1.ffn_down_exps.weight"].shape == (8, 64, 32)
    with LLM(tmp_path / "m.gguf", backend="reference") as llm:
        np.testing.assert_allclose(llm.logits(IDS), want, atol=0.05)


def test_neighbours_change_no_bit(saved: Path) -> None:
    """A request whose tokens, or their probabilities, depend on who shares its experts."""
    greedy = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=3)
    prompts = ["The first of them.", "Quite another text, and longer too.", "x"]
    with LLM(saved, quantize="Q8_0", max_requests=3) as llm:
        together = llm.generate(prompts, greedy)
        alone = [llm.generate(prompt, greedy) for prompt in prompts]
    for a, b in zip(together, alone, strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == b.logprobs


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_hooks_see_and_edit_routes(saved: Path, backend: Any) -> None:
    """Names or shapes that are not there; an edit of the router's logits that leaves the choice as it was."""
    shapes: dict[str, tuple[int, ...]] = {}
    weights: list[Any] = []

    def look(name: str, x: Any) -> None:
        shapes[name.partition("mlp.")[2]] = x.shape

    def only_5(name: str, x: Any) -> None:
        x[:] = -np.inf
        x[:, 5] = 0

    with LLM(saved, backend=backend) as llm:
        parts = ("hook_router_logits", "hook_expert_weights", "experts.hook_pre", "experts.hook_post")
        names = [f"blocks.1.mlp.{part}" for part in parts]
        with llm.hooks(dict.fromkeys(names, look)):
            plain = llm.logits(IDS)
        with llm.hooks({names[0]: only_5, names[1]: lambda name, x: weights.append(x.copy())}):
            edited = llm.logits(IDS)
    assert shapes == {
        "hook_router_logits": (30, 8),
        "hook_expert_weights": (30, 8),
        "experts.hook_pre": (90, 32),
        "experts.hook_post": (90, 32),
    }
    np.testing.assert_array_equal(weights[0], np.eye(8, dtype=np.float32)[[5] * 30])
    assert np.abs(edited - plain).max() > 0.1


def test_inspect_counts_active_parameters(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mixture listed as if each token used all of it, or a file counted otherwise than a directory."""
    convert_model(saved, tmp_path / "m.gguf", None, dry_run=False, as_json=True)
    capsys.readouterr()
    for path in (saved, tmp_path / "m.gguf"):
        show_model(str(path), as_json=True)
        report = json.loads(capsys.readouterr().out)
        unused = 4 * 5 * 3 * 32 * 64  # layers, experts, matrices
        assert report["n_parameters"] - report["n_active_parameters"] == unused
        show_model(str(path), as_json=False)
        text = capsys.readouterr().out
        assert f"{report['n_active_parameters']:,} of them active" in text
        facts = model_card(path)
        embedding = 4 * N_VOCAB * 64  # a row of it is read
        assert facts.bytes_per_token == 4 * report["n_active_parameters"] - embedding
        assert "8 experts of width 32, 3 used by a token" in text


@pytest.mark.parametrize(
    ("change", "keys", "error", "message"),
    [
        (
            lambda t: t.pop(f"{LAYER}.experts.5.up_proj.weight"), {}, FormatError,
            r"'model.layers.1.mlp.experts.5.up_proj.weight'.*is missing",
        ),
        (
            lambda t: [t.pop(n) for n in [*t] if ".experts." in n], {}, FormatError,
            r"'model.layers.0.mlp.experts.0.gate_proj.weight'.*is missing",
        ),
        (
            lambda t: t.update({f"{LAYER}.gate.weight": np.zeros((7, 64), np.float32)}), {}, FormatError,
            r"'model.layers.1.mlp.gate.weight'.*has shape \(7, 64\) where the configuration asks for \(8,",
        ),
        (lambda t: None, {"num_experts_per_tok": 9}, FormatError, "_per_tok.* must be at most 8, .* not 9"),
        (lambda t: None, {"num_local_experts": 7}, FormatError, r"0\.mlp\.gate.weight.*has shape \(8, 64\)"),
        (lambda t: None, {"mlp_only_layers": [1]}, FormatError, r"1\.mlp\.gate_proj.weight'.*is missing"),
    ],
    ids=["an expert", "all experts", "router", "used", "too few", "dense layer"],
)  # fmt: skip
def test_wrong_files(
    saved: Path, edited_copy: Callable[..., Path], change: Any, keys: Any, error: Any, message: str
) -> None:
    """A traceback from NumPy; a model that runs with experts left out."""
    with pytest.raises(error, match=message) as caught:
        LLM(edited_copy(saved, change, keys))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "change", "keys", "message"),
    [
        ("glm4_moe", lambda t: t.update(
            {f"{LAYER}.gate.e_score_correction_bias": np.zeros(7, np.float32)}), {},
         r"gate.e_score_correction_bias'.*has shape \(7,\) where the configuration asks for \(8,\)"),
        ("glm4_moe", lambda t: t.pop(f"{LAYER}.gate.e_score_correction_bias"), {},
         "gate.e_score_correction_bias'.*is missing"),
        ("ernie4_5_moe", lambda t: t.update(
            {f"{LAYER}.moe_statics.e_score_correction_bias": np.zeros((1, 9), np.float32)}), {},
         r"has shape \(1, 9\) where the configuration asks for \(1, 8\)"),
        ("qwen2_moe", lambda t: t.update(
            {f"{LAYER}.shared_expert_gate.weight": np.zeros((1, 63), np.float32)}), {},
         r"shared_expert_gate.weight'.*has shape \(1, 63\) where the configuration asks for \(1, 64\)"),
        ("glm4_moe", lambda t: None, {"n_group": 3}, "in groups of one size .1 used of 3 groups"),
        ("glm4_moe", lambda t: None, {"topk_group": 3}, "3 used of 2 groups"),
        ("glm4_moe", lambda t: None, {"n_group": 8, "topk_group": 1}, "per token .* must fit into 1 groups"),
        ("glm4_moe", lambda t: None, {"first_k_dense_replace": 5}, "dense_replace' must be from .*, not 5"),
        ("lfm2_moe", lambda t: None, {"layer_types": ["conv", "spiral", "conv", "conv"]}, "names 'spiral'"),
        ("afmoe", lambda t: None, {"layer_types": ["full_attention", "spiral"] * 2}, "names 'spiral'"),
        ("ernie4_5_moe", lambda t: None, {"moe_layer_interval": 2}, r"2\.mlp\.gate_proj.weight'.*missing"),
        ("ernie4_5_moe", lambda t: None, {"moe_layer_end_index": 2}, r"3\.mlp\.gate_proj.weight'.*missing"),
    ],
)  # fmt: skip
def test_wrong_routing(
    kind: str, change: Any, keys: Any, message: str, tmp_path: Path, edited_copy: Callable[..., Path]
) -> None:
    """A bias of another length that is read beyond its end; groups of several sizes; skipped layers."""
    directory, _ = make(tmp_path / "saved", kind)
    with pytest.raises(KukriError, match=message) as caught:
        LLM(edited_copy(directory, change, keys), backend="reference")
    assert "\n" not in str(caught.value)


def packed_in_blocks(tensors: dict[str, Any], packed: dict[str, Any]) -> None:
    """Random MXFP4 in place of the experts of `tensors`: as floats there, as blocks in `packed`."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    random = np.random.default_rng(0)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        n, n_in, n_out = tensors[name].shape
        blocks = random.integers(0, 256, (n, n_out, n_in // 32, 16), np.uint8)
        scales = random.integers(120, 125, (n, n_out, n_in // 32), np.uint8)
        floats = mxfp4.convert_moe_packed_tensors(
            torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
        )
        assert floats.shape == (n, n_in, n_out)
        tensors[name] = np.ascontiguousarray(floats.numpy())
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}


def test_mxfp4_of_safetensors_is_run_as_stored(tmp_path: Path) -> None:
    """Neighbours in a byte taken for weights 16 apart; gate's rows for up's; experts that are dequantized."""
    directory, _ = make(tmp_path / "floats", "gpt_oss")
    copy = Path(shutil.copytree(directory, tmp_path / "blocks"))
    tensors = load_file(directory / "model.safetensors")
    packed = dict(tensors)
    packed_in_blocks(tensors, packed)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    save_file(packed, copy / "model.safetensors", {"format": "pt"})
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (copy / "config.json").write_text(json.dumps(config))
    want = exact_logits(directory, IDS)
    np.testing.assert_array_equal(exact_logits(copy, IDS), want)
    convert_model(copy, tmp_path / "m.gguf", None, dry_run=False, as_json=True)
    with GGUFFile(tmp_path / "m.gguf") as file:
        matrices = {name: tensor for name, tensor in file.tensors.items() if name.endswith(".weight")}
        types = {name.split(".")[-2]: tensor.type.name for name, tensor in matrices.items()}
    assert {types[f"ffn_{part}_exps"] for part in ("gate", "up", "down")} == {"MXFP4"}
    assert types["attn_q"] == "F32"
    np.testing.assert_array_equal(exact_logits(tmp_path / "m.gguf", IDS), want)
    with LLM(copy) as llm:
        greedy = llm.generate(
            "The first of them", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        )
    assert len(greedy.token_ids) == 4


def test_gpt_oss_as_a_directory(tmp_path: Path) -> None:
    """Gate and up in other turns, or matrices not turned back, on the way from GGUF."""
    directory, _ = make(tmp_path / "hf", "gpt_oss")
    convert_model(directory, tmp_path / "m.gguf", None, dry_run=False, as_json=True)
    convert_to_directory(tmp_path / "m.gguf", tmp_path / "back", None, as_json=True)
    np.testing.assert_array_equal(exact_logits(tmp_path / "back", IDS), exact_logits(directory, IDS))
    before, after = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "back"))
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name])


@pytest.mark.parametrize(
    ("change", "keys", "message"),
    [
        (
            lambda t: t.pop("blk.1.ffn_up_exps.weight"),
            {},
            r"'blk.1.ffn_up_exps.weight'.*is missing",
        ),
        (
            lambda t: t.update({"blk.1.ffn_up_exps.weight": t["blk.1.ffn_up_exps.weight"][:7]}),
            {},
            r"'blk.1.ffn_up_exps.weight'.*has shape \(7, 32, 64\).*\(8, 32, 64\)",
        ),
        (
            lambda t: t.update({"blk.1.ffn_gate_inp.weight": t["blk.1.ffn_gate_inp.weight"][:, :32]}),
            {},
            r"'blk.1.ffn_gate_inp.weight'.*has shape \(8, 32\).*\(8, 64\)",
        ),
        (
            lambda t: None,
            {"expert_used_count": 9},
            "expert_used_count' must be at most 8, the experts, not 9",
        ),
        (lambda t: None, {"expert_count": 1 << 13}, "expert_count' must be from 1 to 4096, not 8192"),
    ],
    ids=["missing", "too few", "router", "used", "many"],
)
def test_wrong_gguf_files(saved: Path, tmp_path: Path, change: Any, keys: Any, message: str) -> None:
    """The same of GGUF, which has the experts of a layer in one tensor."""
    convert_model(saved, tmp_path / "m.gguf", "F32", dry_run=False, as_json=True)
    with GGUFFile(tmp_path / "m.gguf") as file:
        tensors = {name: file.array(name).copy() for name in file.tensors}
        metadata = {**file.metadata, **{f"qwen3moe.{key}": value for key, value in keys.items()}}
    change(tensors)
    stored = {name: (QUANT_TYPES["F32"], np.ascontiguousarray(a), a.shape) for name, a in tensors.items()}
    write_gguf(tmp_path / "wrong.gguf", metadata, stored)
    with pytest.raises(FormatError, match=message) as caught:
        LLM(tmp_path / "wrong.gguf", backend="reference")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("n", [7, 9])
def test_a_router_bias_of_another_length_in_gguf(n: int, tmp_path: Path) -> None:
    """Experts chosen by numbers that lie after the bias, or a bias of experts that there are not."""
    _, config, source = make_tiny("glm4_moe")
    bias = "model.layers.3.mlp.gate.e_score_correction.bias"
    source.arrays[bias] = np.resize(source.arrays[bias], n)
    file = GGUFFile(write(tmp_path / "m.gguf", "glm4_moe", config, source))
    read = model_config(file)
    message = rf"blk.3.exp_probs_b.bias'.*has shape \({n},\) where the configuration asks for \(8,\)"
    with pytest.raises(FormatError, match=message) as caught:
        load_model(GGUFWeights(file, read), read)
    assert "\n" not in str(caught.value)
