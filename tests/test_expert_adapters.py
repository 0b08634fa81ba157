"""LoRA adapters of mixtures: updates of experts against transformers' merged model, alone and in a crowd."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kukri import LLM
from kukri.cli import app
from kukri.errors import FormatError, UnsupportedError
from kukri.formats.gguf.tensor_names import gguf_name
from kukri.formats.gguf.writer import write_gguf
from kukri.quant.types import QUANT_TYPES
from kukri.terminal.convert import convert_model
from tests.lazy_imports import lazy_imports
from tests.models.lora_files import Updates, merged, random_updates, write_peft
from tests.test_adapters import close, finish, requests
from tests.test_llm_safetensors import make, theirs

with lazy_imports():
    import torch

IDS = np.random.default_rng(2).integers(0, 250, 40).tolist()
N_EXPERTS = 8
PARTS = ("gate_proj", "up_proj", "down_proj")
KINDS = ["qwen3_moe", "olmoe", "gpt_oss"]


def expert_updates(model: Any, rank: int = 4, seed: int = 1, layers: tuple[int, ...] = (0, 2, 3)) -> Updates:
    """Updates of experts, but for some layers, an expert and a matrix of another one that are left alone."""
    made, generator = {}, torch.Generator().manual_seed(seed)
    for layer in layers:
        d_model, d_ffn = model.config.hidden_size, model.config.intermediate_size
        d_ffn = getattr(model.config, "moe_intermediate_size", d_ffn)
        for expert in range(1, N_EXPERTS):
            for part in PARTS[1:] if expert == 3 else PARTS:
                n_out, n_in = (d_model, d_ffn) if part == "down_proj" else (d_ffn, d_model)
                a, b = (0.15 * torch.randn(*s, generator=generator) for s in ((rank, n_in), (n_out, rank)))
                made[f"model.layers.{layer}.mlp.experts.{expert}.{part}"] = a, b
    return made


def merged_experts(model: Any, updates: Updates, scale: float) -> Any:
    """A copy of transformers' model, which has experts as one tensor, with scale * B A added."""
    made = deepcopy(model)
    with torch.no_grad():
        for name, (a, b) in updates.items():
            path, expert, part = name.rsplit(".", 2)
            module = made.get_submodule(path)
            tensor = (module.down_proj if part == "down_proj" else module.gate_up_proj)[int(expert)]
            if type(module).__name__.startswith("GptOss"):  # (in, out), gate and up in turns
                target = tensor.T if part == "down_proj" else tensor.T[PARTS.index(part) :: 2]
            else:
                target = tensor if part == "down_proj" else tensor.chunk(2)[PARTS.index(part)]
            target.add_(scale * (b.double() @ a.double()).float())
    return made


def write_gguf_experts(path: Path, architecture: str, stored: str, updates: Updates, alpha: float) -> Path:
    """A file as llama.cpp reads it: a layer's A and B in one tensor each; zeros for experts without."""
    stacks: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = {}
    for name, (a, b) in updates.items():
        prefix, expert, part = name.rsplit(".", 2)
        stacks.setdefault(f"{prefix}.{part}", {})[int(expert)] = a.numpy(), b.numpy()
    tensors: dict[str, Any] = {}
    for name, found in stacks.items():
        for i, kind in enumerate(("lora_a", "lora_b")):
            some = next(iter(found.values()))[i]
            whole = np.stack([found[e][i] if e in found else 0 * some for e in range(N_EXPERTS)])
            key = f"{gguf_name(f'{name}.weight', architecture)}.{kind}"
            tensors[key] = (QUANT_TYPES["F32"], np.ascontiguousarray(whole), whole.shape)
    keys = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": stored}
    write_gguf(path, {**keys, "adapter.lora.alpha": np.float32(alpha)}, tensors)
    return path


def gguf_arch(kind: str) -> str:
    return {"qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}.get(kind, kind)


@pytest.mark.parametrize("backend", ["reference", "cpu", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_merged_model(kind: str, backend: Any, tmp_path: Path) -> None:
    """An update of another expert or matrix, gate for up, a lost scale, a token's row for an expert's."""
    directory, model = make(tmp_path / "model", kind)
    updates = expert_updates(model)
    dense = random_updates(model, ("q_proj", "v_proj"), seed=3)
    peft = write_peft(tmp_path / "peft", {**updates, **dense}, alpha=6.0)
    gguf = write_gguf_experts(tmp_path / "a.gguf", kind, gguf_arch(kind), updates, 6.0)
    want = theirs(merged_experts(model, updates, 1.5), IDS)
    with_dense = theirs(merged(merged_experts(model, updates, 1.5), dense, 1.5), IDS)
    plain = theirs(model, IDS)
    assert np.abs(want - plain).max() > 0.05, "the premise: the adapter changes something"
    tolerance = 2e-2 if backend == "cpu" else 1e-4
    adapters = {"peft": peft, "gguf": gguf}
    with LLM(directory, backend=backend, adapters=adapters, kv_type="f32") as llm:  # f16 tips a router
        close(llm.logits(IDS, adapter="gguf"), want, tolerance)
        close(llm.logits(IDS, adapter="peft"), with_dense, tolerance)
        close(llm.logits(IDS), plain, tolerance)


@pytest.mark.full
def test_a_crowd_of_adapters_changes_no_bit(tmp_path: Path) -> None:
    """A row whose bits depend on the adapters, and the experts, of the rows next to it."""
    directory, model = make(tmp_path / "model", "qwen3_moe")
    paths = {
        "a": write_peft(tmp_path / "a", expert_updates(model, 4, 1)),
        "b": write_peft(tmp_path / "b", expert_updates(model, 20, 2, (1, 2)), dtype=torch.bfloat16),
        "c": write_peft(tmp_path / "c", random_updates(model, ("o_proj",), seed=3)),
    }
    names = ["a", None, "b", "c", "a", "b"]
    prompts = [IDS[i : 20 + 2 * i] for i in range(6)]
    with LLM(directory, quantize="Q8_0", adapters=paths, max_requests=6, n_threads=2) as llm:
        made = [llm.engine.maker.make_output_request(p, "logits", adapter=n) for p, n in zip(prompts, names)]
        rows = llm.calls.compute(made)
        crowd = requests(llm, prompts, names)
        finish(llm)
    for one in (None, "a", "b", "c"):
        only = {} if one is None else {one: paths[one]}
        with LLM(directory, quantize="Q8_0", adapters=only, n_threads=1) as alone:
            for prompt, name, logits, request in zip(prompts, names, rows, crowd):
                if name == one:
                    np.testing.assert_array_equal(alone.logits(prompt, adapter=name), logits)
                    (again,) = requests(alone, [prompt], [name])
                    finish(alone)
                    assert again.output_ids == request.output_ids


@pytest.mark.parametrize("is_gguf", [False, True], ids=["directory", "gguf"])
def test_merged_experts(is_gguf: bool, tmp_path: Path) -> None:
    """An expert's update in another's rows, or one that is left out."""
    directory, model = make(tmp_path / "model", "qwen3_moe")
    updates = expert_updates(model)
    adapter = write_peft(tmp_path / "a", updates, alpha=8.0)
    source = tmp_path / "m.gguf" if is_gguf else directory
    if is_gguf:
        convert_model(directory, source, "F32", dry_run=False, as_json=True)
    target = tmp_path / ("merged.gguf" if is_gguf else "merged")
    done = CliRunner().invoke(app, ["merge", str(source), str(adapter), "-o", str(target), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["tensors"] == len(updates)
    with LLM(target, backend="reference") as llm:
        close(llm.logits(IDS), theirs(merged_experts(model, updates, 2.0), IDS))


def test_a_merge_into_a_part_of_a_tensor_is_refused(tmp_path: Path) -> None:
    """A directory that looks merged and is not: gpt-oss has all experts in one tensor."""
    directory, model = make(tmp_path / "model", "gpt_oss")
    adapter = write_peft(tmp_path / "a", expert_updates(model))
    done = CliRunner().invoke(app, ["merge", str(directory), str(adapter), "-o", str(tmp_path / "merged")])
    assert done.exit_code == 2
    assert "within another tensor: merge into a .gguf file" in done.stderr
    assert not (tmp_path / "merged").exists()


def test_updates_of_no_expert(tmp_path: Path) -> None:
    """An expert that the model does not have, a stack for others, experts as one parameter."""
    directory, model = make(tmp_path / "model", "qwen3_moe")
    updates = expert_updates(model)
    one = next(iter(updates.values()))
    beyond = write_peft(tmp_path / "beyond", {"model.layers.0.mlp.experts.8.gate_proj": one})
    whole = write_peft(tmp_path / "whole", {"model.layers.0.mlp.experts.gate_up_proj": one})
    stated = write_peft(tmp_path / "stated", updates, target_parameters=["mlp.experts.gate_up_proj"])
    flat = tmp_path / "flat.gguf"
    rows = {f"blk.0.ffn_up_exps.weight.lora_{p}": t.numpy() for p, t in zip("ab", one)}
    keys = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": "qwen3moe"}
    tensors = {name: (QUANT_TYPES["F32"], array, array.shape) for name, array in rows.items()}
    write_gguf(flat, {**keys, "adapter.lora.alpha": np.float32(1)}, tensors)
    with LLM(directory, backend="reference") as llm:
        for path, words in (
            (beyond, r"no linear layer 'model\.layers\.0\.mlp\.experts\.8\.gate_proj'"),
            (whole, r"no linear layer 'model\.layers\.0\.mlp\.experts\.gate_up_proj'"),
            (stated, "parameters outside of linear layers"),
            (flat, r"shape \(4, 64\) where the model needs 8 two-dimensional experts"),
        ):
            with pytest.raises((FormatError, UnsupportedError), match=words):
                llm.load_adapter("broken", path)
