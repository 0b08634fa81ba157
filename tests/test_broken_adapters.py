"""Adapters' files that are broken, hostile or for another model: one error with the file's name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kukri import LLM
from kukri.errors import FormatError, UnsupportedError
from kukri.terminal.convert import convert_model
from tests.lazy_imports import lazy_imports
from tests.models.lora_files import Updates, random_updates, write_gguf_adapter, write_peft
from tests.test_llm_safetensors import make

with lazy_imports():
    import torch
    from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return make(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def llm(llama: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """With one adapter that is right."""
    right = write_peft(tmp_path_factory.mktemp("adapters") / "right", random_updates(llama[1], ("q_proj",)))
    with LLM(llama[0], adapters={"right": right}, n_threads=2) as made:
        yield made


def broken(path: Path, case: str, updates: Updates) -> Path:
    """An adapter with one thing wrong."""
    first = next(iter(updates))
    a, b = updates[first]
    configs: dict[str, dict[str, Any]] = {
        "dora": {"use_dora": True},
        "saved": {"modules_to_save": ["lm_head"]},
        "bias": {"bias": "all"},
        "kind": {"peft_type": "IA3"},
        "fan": {"fan_in_fan_out": True},
        "pissa": {"init_lora_weights": "pissa_niter_16"},
        "pattern": {"alpha_pattern": {"(q|k_proj": 3}},
        "pattern-slow": {"rank_pattern": {"(m|.)(m|.)*((m|.)+)+((.|o)+)+x": 3}},
        "rank": {"r": 5},
        "rank-text": {"r": "4"},
        "rank-huge": {"r": 10**9},
        "alpha": {"lora_alpha": "8"},
        "alpha-nan": {"lora_alpha": float("nan")},
        "tokens": {"trainable_token_indices": [1, 2]},
    }
    directory = write_peft(path, updates, **configs.get(case, {}))
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    name = f"base_model.model.{first}.lora_{{}}.weight"
    edits: dict[str, dict[str, torch.Tensor | None]] = {
        "no-b": {name.format("B"): None},
        "no-a": {name.format("A"): None},
        "shape-a": {name.format("A"): torch.zeros(4, 65)},
        "shape-b": {name.format("B"): torch.zeros(63, 4)},
        "rank-0": {name.format("A"): torch.zeros(0, 64), name.format("B"): torch.zeros(64, 0)},
        "vector": {name.format("A"): torch.zeros(64)},
        "nan": {name.format("A"): a.clone().index_fill_(0, torch.tensor(1), float("nan"))},
        "inf": {name.format("B"): b.clone().index_fill_(0, torch.tensor(1), float("inf"))},
        "type": {name.format("A"): a.to(torch.float64)},
        "layer": {"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": a},
        "embedding": {"base_model.model.model.embed_tokens.lora_embedding_A": a},
        "more-tokens": {"base_model.model.lm_head.base_layer.weight": torch.zeros(300, 64)},
        "embedding-as-linear": {"base_model.model.model.embed_tokens.lora_A.weight": a},
        "magnitude": {f"base_model.model.{first}.lora_magnitude_vector": torch.zeros(64)},
        "experts": {"base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight": a},
        "unknown": {"base_model.model.model.layers.0.mlp.bias": torch.zeros(4)},
    }
    for key, tensor in edits.get(case, {}).items():
        tensors.pop(key, None)
        if tensor is not None:
            tensors[key] = tensor
    save_file({} if case == "empty" else tensors, file)
    if case == "no-config":
        (directory / "adapter_config.json").unlink()
    if case in ("no-file", "pickle"):
        file.unlink()
    if case == "pickle":
        (directory / "adapter_model.bin").write_bytes(b"")
    if case == "cut":
        os.truncate(file, 3000)
    if case == "list":
        (directory / "adapter_config.json").write_text(json.dumps([1]))
    return directory / "nothing" if case == "absent" else directory


@pytest.mark.parametrize(
    ("case", "message"),
    {
        "absent": "was not found",
        "no-config": "was not found",
        "no-file": "must hold adapter_model.safetensors",
        "pickle": "pickles are not supported",
        "cut": "cut short",
        "list": "must hold a JSON object",
        "empty": "updates no matrix",
        "dora": "'use_dora' is True, but DoRA cannot be applied",
        "saved": "'modules_to_save' is .*, but whole modules .* cannot be applied",
        "bias": "'bias' is 'all'",
        "kind": "'peft_type' is 'IA3'",
        "fan": "fan_in_fan_out",
        "pissa": "changed the model's own weights",
        "pattern": "'alpha_pattern' must hold regular expressions: .*unterminated subpattern",
        "pattern-slow": "'rank_pattern' takes too long to match",
        "rank": "has rank 4 where adapter_config.json says 5",
        "rank-text": "the rank must be from 1 to .*, not '4'",
        "rank-huge": "the rank must be from 1 to .*, not 1000000000",
        "alpha": "'lora_alpha' must be a number, not '8'",
        "alpha-nan": "'lora_alpha' must be a number, not nan",
        "tokens": "trainable_token_indices",
        "no-b": "requires its B",
        "no-a": "requires its A",
        "shape-a": r"shape \(4, 65\) where the model needs .*64\): the adapter is for another model",
        "shape-b": r"shape \(63, 4\) where the model needs \(64, 4\)",
        "rank-0": r"shape \(0, 64\)",
        "vector": r"shape \(64,\)",
        "nan": "lora_A.*must hold finite",
        "inf": "lora_B.*must hold finite",
        "type": "must be of type F32, F16 or BF16, not F64",
        "layer": "no linear layer 'model.layers.9.mlp.up_proj': its layers have q_proj, k_proj",
        "embedding": "updates of embeddings cannot be applied",
        "more-tokens": "must be lora_A or lora_B of a linear layer",
        "embedding-as-linear": ": updates of embeddings are not supported",
        "magnitude": "DoRA cannot be applied",
        "experts": r"no linear layer .model\.layers\.0\.mlp\.experts\.0\.up_proj",
        "unknown": "must be lora_A or lora_B of a linear layer",
    }.items(),
)
def test_broken_directories(
    llm: LLM,
    llama: tuple[Path, Any],
    case: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file that is believed, or an error of several lines or without the file's name."""
    if case == "pattern-slow":  # a busy machine needs longer for the others
        monkeypatch.setattr("kukri.formats.adapters._MATCH_SECONDS", 0.5)
    path = broken(tmp_path / "adapter", case, random_updates(llama[1], ("q_proj", "down_proj")))
    with pytest.raises((FormatError, UnsupportedError), match=message) as caught:
        llm.load_adapter("broken", path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert llm.adapters == ("right",)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general__type": None}, "must be an adapter: its general.type is not 'adapter'"),
        ({"adapter__type": "control_vector"}, "'adapter.type' is 'control_vector'"),
        ({"general__architecture": "qwen2"}, "for the architecture 'qwen2', not 'llama'"),
        ({"adapter__lora__alpha": None}, "'adapter.lora.alpha' must be a number, not None"),
        ({"adapter__lora__alpha": float("inf")}, "'adapter.lora.alpha' must be a number, not inf"),
        ({"adapter__alora__invocation_tokens": [1, 2]}, "invocation tokens"),
    ],
)
def test_broken_gguf_files(
    llm: LLM, llama: tuple[Path, Any], keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A control vector, or an adapter of another architecture, taken for one of this model."""
    path = write_gguf_adapter(tmp_path / "a.gguf", random_updates(llama[1], ("q_proj",)), 16, **keys)
    with pytest.raises((FormatError, UnsupportedError), match=message):
        llm.load_adapter("broken", path)


def test_gguf_tensors_that_are_no_updates(llm: LLM, llama: tuple[Path, Any], tmp_path: Path) -> None:
    """A model's file given for an adapter; embeddings; a name of no layer."""
    model = tmp_path / "llama.gguf"
    convert_model(llama[0], model, "F32", dry_run=False, as_json=True)
    with pytest.raises(FormatError, match=r"must be an adapter: its general\.type is not 'adapter'"):
        llm.load_adapter("broken", model)
    updates = random_updates(llama[1], ("q_proj",))
    one = next(iter(updates.values()))
    embedding = write_gguf_adapter(tmp_path / "e.gguf", {"model.embed_tokens": one}, 16)
    with pytest.raises(UnsupportedError, match=": updates of embeddings are not supported"):
        llm.load_adapter("broken", embedding)
    layer = write_gguf_adapter(tmp_path / "l.gguf", {"model.layers.9.mlp.up_proj": one}, 16)
    with pytest.raises(FormatError, match=r"no linear layer 'model\.layers\.9"):
        llm.load_adapter("broken", layer)
