"""LoRA adapters for tests: random updates, the files that hold them, and the model with them merged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kukri.formats.gguf.tensor_names import gguf_name
from kukri.formats.gguf.writer import write_gguf
from kukri.quant.types import QUANT_TYPES
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import torch
    from safetensors.torch import save_file

Updates: TypeAlias = "dict[str, tuple[torch.Tensor, torch.Tensor]]"  # (A, B) by the module's name
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")


def random_updates(
    model: Any, targets: Sequence[str] = (*ATTENTION, *MLP), rank: int = 4, seed: int = 0
) -> Updates:
    """Updates of every linear layer of a transformers model whose name ends with a target."""
    made, generator = {}, torch.Generator().manual_seed(seed)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in targets:
            a = torch.randn(rank, module.in_features, generator=generator) * 0.1
            b = torch.randn(module.out_features, rank, generator=generator) * 0.1
            made[name] = a, b
    assert made, "the premise: there are such layers"
    return made


def write_peft(
    directory: Path, updates: Updates, alpha: float = 8.0, dtype: torch.dtype | None = None, **config: Any
) -> Path:
    """A directory as PEFT saves it; `config` replaces keys."""
    directory.mkdir(parents=True, exist_ok=True)
    dtype, tensors = dtype or torch.float32, {}
    for name, (a, b) in updates.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(dtype).contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(dtype).contiguous()
    save_file(tensors, directory / "adapter_model.safetensors")
    rank = next(iter(updates.values()))[0].shape[0] if updates else 4
    stated = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none"},
        **{"use_rslora": False, "use_dora": False, "fan_in_fan_out": False, "modules_to_save": None},
        **{"rank_pattern": {}, "alpha_pattern": {}, "init_lora_weights": True, "lora_dropout": 0.05},
        **{"target_modules": sorted({name.rpartition(".")[2] for name in updates})},
    }
    (directory / "adapter_config.json").write_text(json.dumps({**stated, **config}))
    return directory


def write_gguf_adapter(
    path: Path, updates: Updates, d_head: int, alpha: float = 8.0, weight_type: str = "F32", **keys: Any
) -> Path:
    """A file as llama.cpp's convert_lora_to_gguf.py writes it for Llama: rows of q and k interleaved."""
    kind = QUANT_TYPES[weight_type]
    dtype = {"F32": np.float32, "F16": np.float16}[weight_type]
    tensors: dict[str, Any] = {}
    for name, (a, b) in updates.items():
        up = b.numpy()
        if name.endswith(("q_proj", "k_proj")):
            up = up.reshape(-1, 2, d_head // 2, up.shape[1]).swapaxes(1, 2).reshape(up.shape)
        stored = gguf_name(f"{name}.weight")
        for part, array in (("lora_a", a.numpy()), ("lora_b", up)):
            tensors[f"{stored}.{part}"] = (kind, np.ascontiguousarray(array.astype(dtype)), array.shape)
    stated = {
        **{"general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora"},
        "adapter.lora.alpha": np.float32(alpha),
    } | {key.replace("__", "."): value for key, value in keys.items()}
    write_gguf(path, {key: value for key, value in stated.items() if value is not None}, tensors)
    return path


def merged(model: Any, updates: Updates, scales: float | Mapping[str, float]) -> Any:
    """A copy of the model with scale * B A added to its matrices."""
    made = deepcopy(model)
    modules = dict(made.named_modules())
    with torch.no_grad():
        for name, (a, b) in updates.items():
            scale = scales if isinstance(scales, float) else scales[name]
            modules[name].weight.add_(scale * (b.double() @ a.double()).float())
    return made
