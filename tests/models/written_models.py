"""GGUF files of tiny models as llama.cpp's converter would write them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from kukri.config import (
    ModelConfig,
    MultiplierConfig,
    RopeScaling,
)
from kukri.formats.gguf.writer import write_gguf
from kukri.kernels.quantize import quantize
from kukri.models import ARCHITECTURES
from kukri.quant.types import QUANT_TYPES
from tests.models.made_models import tiled, turned_tail
from tests.models.tiny_llama import TorchSource
from tests.models.tiny_models import (
    CONTEXT,
    D_HEAD,
    HEADS,
    N_LAYERS,
    TINY,
    D,
    F,
)
from tests.tiny_gguf import _interleaved

_IN_PAIRS = ("llama", "smollm3", "granite", "granitehybrid", "granitemoe", "ernie4_5", "glm4", "olmo")
_IN_PAIRS += ("cohere2", "arcee", "ernie4_5-moe", "mistral3", "minicpm")
_SHARED = re.compile(r"shared_mlp\.(?:gate|up|down)_proj")  # which gguf has under other models' name


def write(path: Path, name: str, config: ModelConfig, source: TorchSource, weight_type: str = "F32") -> Path:
    """A GGUF file as llama.cpp's converter would write it: names by the `gguf` package, rows of q and k
    in pairs for the llama family alone."""
    tiny = TINY[name]
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == tiny.gguf_arch)
    names = gguf.get_tensor_name_map(arch, N_LAYERS)
    tensors: dict[str, Any] = {}
    lists: dict[str, list[float]] = {}
    for key, array in _multiplied(name, _fused(name, source.arrays)).items():
        if ".act_fn." in key:
            lists.setdefault(f"xielu.{key.split('.')[-2]}", []).append(float(array[0]))
            continue
        in_pairs = tiny.gguf_arch in _IN_PAIRS
        if config.latent is not None and tiny.gguf_arch == "deepseek2":
            array = turned_tail(key, array, config.latent, lambda rows: _interleaved(rows, D_HEAD))
        if in_pairs and ("q_proj" in key or "k_proj" in key):
            array = _interleaved(array, D_HEAD)
        if config.has_gates and "q_proj" in key:
            array = np.stack(np.split(array.reshape(-1, D_HEAD, D), 2), axis=1).reshape(array.shape)
        if config.recurrent is not None and config.recurrent.n_heads:
            array = tiled(key, array, config.recurrent)
        is_kept = array.ndim == 1 or key.endswith(
            (".bias", "mlp.gate.weight", "mlp.router.weight", "conv.weight", "conv1d.weight")
        )  # routers and convolutions, as llama.cpp keeps them
        kind = QUANT_TYPES["F32" if is_kept else weight_type]
        if "mamba." in key and array.ndim == 1:  # columns and groups, as llama.cpp has Mamba's
            is_column = key.endswith((".A_log.weight", ".D.weight"))
            groups = array.reshape(config.recurrent.n_groups if config.recurrent else 1, -1)
            array = array[:, None] if is_column else groups if "mamba.norm" in key else array
        key = _SHARED.sub(lambda match: match[0].replace("shared_mlp", "mlp.shared_experts"), key)
        usual = (
            names.get_name(name, try_suffixes=(".weight", ".bias"))
            for name in (
                key,
                key.replace("model.", "gpt_neox."),
                key.replace("model.", "backbone.").replace(".mlp.", ".mixer."),
            )
        )
        stored = _gemma4_name(key) or next(found for found in usual if found)
        stored = stored.removesuffix(".weight") if key.endswith((".A_log.weight", ".D.weight")) else stored
        assert stored is not None, key
        tensors[stored] = (kind, quantize(array.reshape(-1, array.shape[-1]), kind), array.shape)
    for key, factors in {**(tiny.tensors or {}), **_rope_freqs(config)}.items():
        values = np.array(factors, np.float32)
        tensors[key] = (QUANT_TYPES["F32"], values, values.shape)
    has_layer_norm = "model.layers.0.input_layernorm.bias" in source.arrays
    epsilon = "layer_norm_epsilon" if has_layer_norm else "layer_norm_rms_epsilon"
    keys = {
        "block_count": N_LAYERS,
        "context_length": CONTEXT,
        "embedding_length": D,
        "feed_forward_length": F,
        "attention.head_count": HEADS,
        "attention.head_count_kv": tiny.n_kv_heads,
        f"attention.{epsilon}": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": tiny.rotary_dim,
        **(tiny.keys or {}),
    }
    metadata = {f"{tiny.gguf_arch}.{key}": value for key, value in keys.items()}
    write_gguf(
        path, {"general.architecture": tiny.gguf_arch, "general.name": "tiny", **metadata, **lists}, tensors
    )
    return path


def _fused(name: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gemma 4's gates and ups of experts as one tensor, and MiniCPM3's matrices of keys and values."""
    if name == "minicpm3":
        made = {key: array for key, array in arrays.items() if "v_b_proj" not in key}
        for key in [key for key in made if "k_b_proj" in key]:
            both = (made.pop(key).swapaxes(1, 2), arrays[key.replace("k_b", "v_b")])
            made[key.replace("k_b", "kv_b")] = np.concatenate(both, axis=1).reshape(-1, both[1].shape[-1])
        return made
    if name != "gemma4_moe_text":
        return {**arrays}
    made = {}
    for key, array in arrays.items():
        if ".experts.gate_proj" in key:
            up = arrays[key.replace("gate_proj", "up_proj")]
            made[key.replace("mlp.experts.gate_proj", "experts.gate_up_proj")] = np.concatenate(
                [array, up], 1
            )
        elif ".experts.up_proj" not in key:
            made[key] = array
    return made


def _multiplied(name: str, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """Falcon-H1's matrices with the multipliers in them, as llama.cpp's converter has them."""
    if not name.startswith("falcon_h1"):
        return arrays
    hf = TINY[name].hf
    attention, (gate, down) = hf["attention_in_multiplier"], hf["mlp_multipliers"]
    rows = np.repeat(hf["ssm_multipliers"], (128, 128, 48, 48, 8)).astype(np.float32)[:, None]
    factors = {
        **{"q_proj": attention, "k_proj": attention * hf["key_multiplier"], "v_proj": attention},
        **{"o_proj": hf["attention_out_multiplier"], "gate_proj": gate, "down_proj": down},
        **{"mamba.in_proj": hf["ssm_in_multiplier"] * rows, "mamba.out_proj": hf["ssm_out_multiplier"]},
        **{"lm_head": hf["lm_head_multiplier"], "embed_tokens": hf["embedding_multiplier"]},
    }
    found = {key: next((f for part, f in factors.items() if f".{part}." in f".{key}"), 1) for key in arrays}
    return {key: (array * found[key]).astype(np.float32) for key, array in arrays.items()}


def _gemma4_name(key: str) -> str | None:
    """The names that the `gguf` package leaves to llama.cpp's converter."""
    scales = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
    for module, stored in scales.items():
        if key.endswith(f"{module}.weight"):
            return f"blk.{key.split('.')[2]}.{stored}"
    return None


def _rope_freqs(config: ModelConfig) -> dict[str, Sequence[float]]:
    """Llama 3's divisors, in float64 by the formula of llama.cpp's converter."""
    scaling = config.rope.scaling
    if scaling is None or scaling.kind != "llama3":
        return {}
    if scaling.factors:
        return {"rope_freqs.weight": scaling.factors}
    frequencies = 10000.0 ** -(np.arange(0, D_HEAD, 2) / D_HEAD)
    lengths = 2 * np.pi / frequencies
    low = scaling.original_context / scaling.low_freq_factor
    high = scaling.original_context / scaling.high_freq_factor
    smooth = (scaling.original_context / lengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    middle = 1 / ((1 - smooth) / scaling.factor + smooth)
    return {"rope_freqs.weight": np.where(lengths < high, 1, np.where(lengths > low, scaling.factor, middle))}


def as_read(name: str, config: ModelConfig) -> ModelConfig:
    """A config as its GGUF file states it: Mistral is a llama there, and llama3's formula is a tensor."""
    scaling = config.rope.scaling
    if scaling is not None and scaling.kind == "llama3":
        factors = tuple(np.array(_rope_freqs(config)["rope_freqs.weight"], np.float32).tolist())
        scaling = RopeScaling("llama3", factors=factors)
    of_kind = [a for a in ARCHITECTURES.values() if (a.experts is None) == (config.mixture is None)]
    by_sigmoid = config.mixture is not None and config.mixture.by_sigmoid
    of_kind = [a for a in of_kind if a.experts is None or a.experts.by_sigmoid == by_sigmoid]
    named = [a for a in of_kind if a.gguf == TINY[name].gguf_arch]
    architecture = max(named, key=lambda a: a.name == a.gguf).name
    rope = replace(config.rope, scaling=scaling)
    if architecture.startswith("qwen3_5") and config.recurrent is not None:
        are_tiled = config.recurrent.n_heads != config.recurrent.n_groups
        config = replace(config, recurrent=replace(config.recurrent, are_tiled=are_tiled))
    if architecture == "falcon_h1":  # whose matrices hold them
        none = {
            "multipliers": MultiplierConfig(),
            "embedding_scale": 1.0,
            "logits_divisor": 1.0,
            "attention_scale": None,
        }
        config = replace(config, **none)  # type: ignore[arg-type]
    return replace(config, architecture=architecture, rope=rope, name="tiny")
