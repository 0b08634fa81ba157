"""A tiny random model of each architecture: transformers', and the config and GGUF file of the same here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from kukri.config import (
    LatentConfig,
    LayerConfig,
    MixtureConfig,
    ModelConfig,
    MultiplierConfig,
    RecurrentConfig,
    RopeConfig,
    RopeScaling,
)
from kukri.formats.gguf.writer import write_gguf
from kukri.formats.huggingface.weights import is_convolution
from kukri.kernels.quantize import quantize
from kukri.models import ARCHITECTURES
from kukri.quant.types import QUANT_TYPES
from tests.models import bailing_class, minicpm_class, smallthinker_class, token_by_token  # noqa: F401
from tests.models.tiny_llama import TorchSource
from tests.tiny_gguf import _interleaved

N_LAYERS, D, F, V, HEADS, KV_HEADS, D_HEAD, CONTEXT = 4, 64, 96, 80, 4, 2, 16, 256
N_TOKENS = 40  # a prompt longer than every window and every original context
ORIGINAL = 32
FULL = LayerConfig()
NOPE = LayerConfig(use_rope=False)
RECURRENT = LayerConfig(is_recurrent=True)


@dataclass(frozen=True)
class Tiny:
    """Differences between architectures: transformers' config, ours, and GGUF's keys and tensors."""

    hf_type: str  # transformers.<hf_type>Config and ...ForCausalLM
    gguf_arch: str  # "": none
    hf: Mapping[str, Any]
    layers: Sequence[LayerConfig] = (FULL,) * N_LAYERS
    rotary_dim: int = D_HEAD
    scaling: RopeScaling | None = None
    n_kv_heads: int = KV_HEADS
    keys: Mapping[str, Any] | None = None
    tensors: Mapping[str, Sequence[float]] | None = None
    tied: bool = False
    mixture: MixtureConfig | None = None
    recurrent: RecurrentConfig | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)  # more of our configuration
    norm_offset: float = 0.0  # what transformers' norms add to their weights
    is_paired: bool = False  # transformers' rows of q and k are in pairs


def _windows(*windows: int | None) -> tuple[LayerConfig, ...]:
    return tuple(LayerConfig(window=window) for window in windows)


def _local(window: int, theta: float) -> tuple[LayerConfig, ...]:
    """A layer with a window and an unscaled RoPE of its own."""
    return (LayerConfig(window=window, rope=RopeConfig(theta, D_HEAD)),)


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **parameters}


_YARN = _rope("yarn", factor=8.0, original_max_position_embeddings=ORIGINAL)
_YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": ORIGINAL,
}
_LLAMA3 = _rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=ORIGINAL,
)
_SHORT = (1.0, 1.125, 1.25, 1.625, 2.0, 2.5)
_LONG = (1.0, 1.5, 2.5, 4.0, 6.0, 9.0)
_PHI3_ROPE = _rope(
    "longrope",
    short_factor=list(_SHORT),
    long_factor=list(_LONG),
    original_max_position_embeddings=ORIGINAL,
    partial_rotary_factor=0.75,
)

_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3}
_EXPERT_KEYS = {"expert_count": 8, "expert_used_count": 3}
# experts in groups, chosen by sigmoids and a bias, and what GGUF says of that
_GROUPED = MixtureConfig(8, 3, 32, True, by_sigmoid=True, has_bias=True, n_groups=4, n_groups_used=2,
                         scale=2.5, d_shared=64)  # fmt: skip
_GROUPED_KEYS = {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5,
                 "expert_group_count": 4, "expert_group_used_count": 2}  # fmt: skip


def _qwen3_5(n_heads: int) -> Tiny:
    """Two key heads for so many value heads."""
    return Tiny(
        "Qwen3_5Text", "qwen35",
        {"linear_num_key_heads": 2, "linear_num_value_heads": n_heads, "linear_key_head_dim": 16,
         "linear_value_head_dim": 16, "rope_parameters": _rope("default", partial_rotary_factor=0.5)},
        layers=(RECURRENT, RECURRENT, RECURRENT, FULL), rotary_dim=8, norm_offset=1.0,
        recurrent=RecurrentConfig(4, n_heads, 2, 16, 16),
        facts={"has_gates": True},
        keys={"ssm.conv_kernel": 4, "ssm.time_step_rank": n_heads, "ssm.group_count": 2, "ssm.state_size": 16,
              "ssm.inner_size": 16 * n_heads, "attention.key_length": D_HEAD,
              "rope.dimension_sections": np.array([11, 11, 10, 0], np.int32)},
    )  # fmt: skip


def _qwen3_5_moe() -> Tiny:
    """The same with a mixture."""
    tiny = _qwen3_5(4)
    mixture = {**_EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
    lengths = {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 48}
    return replace(
        tiny,
        hf_type="Qwen3_5MoeText",
        gguf_arch="qwen35moe",
        hf={**tiny.hf, **mixture, "initializer_range": 0.1},  # float32 itself is 2e-4 off at 0.15
        mixture=MixtureConfig(8, 3, 32, normalized=True, d_shared=48),
        keys={**(tiny.keys or {}), **_EXPERT_KEYS, **lengths, "feed_forward_length": 32},
        facts={**tiny.facts, "d_ffn": 32},
    )


def _granitemoe(d_shared: int) -> Tiny:
    """Granite 3's mixture with an MLP for all tokens of this width, or without."""
    shared = {"shared_intermediate_size": d_shared} if d_shared else {}
    return Tiny(
        "GraniteMoeShared" if d_shared else "GraniteMoe", "granitemoe",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.375, "residual_multiplier": 0.625,
         "logits_scaling": 1.75, "num_local_experts": 8, "num_experts_per_tok": 3, **shared},
        facts={"embedding_scale": 3.0, "attention_scale": 0.375, "residual_scale": 0.625,
               "logits_divisor": 1.75},
        mixture=MixtureConfig(8, 3, F, normalized=True, d_shared=d_shared),
        keys={"embedding_scale": 3.0, "attention.scale": 0.375, "residual_scale": 0.625, "logit_scale": 1.75,
              **_EXPERT_KEYS, **({"expert_shared_feed_forward_length": d_shared} if d_shared else {})},
    )  # fmt: skip


def _dense(layer: LayerConfig) -> LayerConfig:
    """The same with an MLP in place of a mixture."""
    return replace(layer, is_dense=True)


# a layer with a window, next to others with heads of twice the size
_NARROW: dict[str, Any] = {"window": 7, "rope": RopeConfig(500.0, D_HEAD), "d_head": D_HEAD}


def _gemma4(
    hf: Mapping[str, Any],
    layers: Sequence[LayerConfig],
    facts: Mapping[str, Any],
    keys: Mapping[str, Any],
    types: Sequence[str],
) -> Tiny:
    """A quarter of the wide heads' frequencies rotates."""
    none = float(np.float32(1e30))
    return Tiny(
        "Gemma4Text", "gemma4",
        {"sliding_window": 7, "layer_types": list(types), "global_head_dim": 2 * D_HEAD,
         "vocab_size_per_layer_input": V,
         "rope_parameters": {
             "full_attention": _rope("proportional", partial_rotary_factor=0.25),
             "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}, **hf},
        layers=layers, rotary_dim=2 * D_HEAD, tied=True,
        scaling=RopeScaling("llama3", factors=(*[1.0] * 4, *[none] * 12)),
        facts={"d_head": 2 * D_HEAD, "attention_scale": 1.0, **facts},
        keys={"attention.sliding_window": 7, "attention.key_length": 2 * D_HEAD,
              "attention.value_length": 2 * D_HEAD, "attention.key_length_swa": D_HEAD,
              "attention.value_length_swa": D_HEAD, "rope.dimension_count_swa": D_HEAD,
              "rope.freq_base_swa": 500.0, "attention.sliding_window_pattern": [1, 1, 1, 0], **keys},
    )  # fmt: skip


def _granite_hybrid(n_experts: int, position: str) -> Tiny:
    """Granite 4 with so many experts, its attention with RoPE or without."""
    of_experts = {**_EXPERT_KEYS, "expert_shared_feed_forward_length": F, "feed_forward_length": 32}
    return Tiny(
        "GraniteMoeHybrid", "granitehybrid",
        {"layer_types": ["mamba", "attention", "mamba", "mamba"], "position_embedding_type": position,
         "num_local_experts": n_experts, "num_experts_per_tok": 3, "intermediate_size": 32,
         "shared_intermediate_size": F, "mamba_n_heads": 8, "mamba_d_state": 24, "mamba_d_conv": 4,
         "embedding_multiplier": 3.0, "attention_multiplier": 0.375, "residual_multiplier": 0.625,
         "logits_scaling": 1.75, "attention_bias": position == "rope"},
        layers=tuple(replace(layer, use_rope=position == "rope")
                     for layer in (RECURRENT, FULL, RECURRENT, RECURRENT)),
        recurrent=RecurrentConfig(4, 8, 1, 24, 16), tied=True,
        mixture=MixtureConfig(8, 3, 32, normalized=True) if n_experts else None,
        facts={"embedding_scale": 3.0, "attention_scale": 0.375, "residual_scale": 0.625,
               "logits_divisor": 1.75},
        keys={"attention.head_count_kv": np.array([0, KV_HEADS, 0, 0], np.int32), "ssm.conv_kernel": 4,
              "ssm.time_step_rank": 8, "ssm.group_count": 1, "ssm.state_size": 24, "ssm.inner_size": 128,
              "rope.scaling.finetuned": position == "rope", "embedding_scale": 3.0, "attention.scale": 0.375,
              "residual_scale": 0.625, "logit_scale": 1.75, **(of_experts if n_experts else {})},
    )  # fmt: skip


_MSCALE = 0.1 * 0.707 * np.log(8.0) + 1  # YaRN's factor and DeepSeek's mscale make it
_LATENT_KEYS = {
    **{"attention.key_length": 48, "attention.value_length": 32, "attention.key_length_mla": 48},
    **{"attention.value_length_mla": 16, "attention.kv_lora_rank": 32},
}


def _latent(hf_type: str, q_rank: int, **own: Any) -> Tiny:
    """Latents of 32 numbers, heads whose keys are 32 and 16 that rotate, values of 16."""
    tiny = Tiny(
        hf_type, "deepseek2",
        {"num_key_value_heads": HEADS, "q_lora_rank": q_rank or None, "kv_lora_rank": 32,
         "qk_nope_head_dim": 32, "qk_rope_head_dim": D_HEAD, "v_head_dim": 16,
         "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2,
         "first_k_dense_replace": 1},
        layers=(_dense(FULL), FULL, FULL, FULL), n_kv_heads=1, is_paired=True,
        mixture=MixtureConfig(8, 3, 32, False, d_shared=64),
        facts={"d_head": 48, "latent": LatentConfig(32, 32, 16, q_rank), "attention_scale": 48**-0.5},
        keys={**_LATENT_KEYS, **_EXPERT_KEYS, "expert_feed_forward_length": 32, "expert_shared_count": 2,
              "leading_dense_block_count": 1, **({"attention.q_lora_rank": q_rank} if q_rank else {})},
    )  # fmt: skip
    parts = {
        field: {**getattr(tiny, field), **own.pop(field)} for field in ("hf", "facts", "keys") if field in own
    }
    return replace(tiny, **parts, **own)


def _latent_by_sigmoid(hf_type: str, **hf: Any) -> Tiny:
    """The same with experts in groups, chosen by sigmoids and a bias."""
    return _latent(
        hf_type, 64,
        hf={"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
            "initializer_range": 0.1, **hf},  # float32 itself is 1e-4 off at 0.15
        mixture=_GROUPED,
        keys=_GROUPED_KEYS,
    )  # fmt: skip


def _nemotron_h(mlp: str, **own: Any) -> Tiny:
    """Two groups of states; an MLP or a mixture as a layer of its own."""
    letters = {"linear_attention": RECURRENT, "full_attention": FULL, mlp: LayerConfig(is_mlp=True)}
    types = ("linear_attention", mlp, "full_attention", mlp)
    width = F if mlp == "mlp" else 32
    return Tiny(
        "NemotronH", "nemotron_h" if mlp == "mlp" else "nemotron_h_moe",
        {"layers_block_type": list(types), "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
         "ssm_state_size": 24, "conv_kernel": 4, "use_bias": mlp == "mlp", **own.pop("hf", {})},
        layers=tuple(replace(letters[kind], use_rope=False) for kind in types),
        recurrent=RecurrentConfig(4, 8, 2, 24, 16),
        keys={"attention.head_count_kv": [0, 0, KV_HEADS, 0], "feed_forward_length": [0, width, 0, width],
              "attention.key_length": D_HEAD, "attention.layer_norm_epsilon": 1e-5, "ssm.conv_kernel": 4,
              "ssm.time_step_rank": 8, "ssm.group_count": 2, "ssm.state_size": 24,
              "ssm.inner_size": 128, **own.pop("keys", {})},
        **own,
    )  # fmt: skip


_FALCON_INPUTS = (0.5, 1.25, 0.75, 1.5, 0.875)


def _falcon_h1(has_norm: bool) -> Tiny:
    """Two groups of states in every layer, and no multiplier that is 1."""
    return Tiny(
        "FalconH1", "falcon-h1",
        {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 24,
         "initializer_range": 0.1,  # float32 itself is 2e-4 off at 0.15
         "mamba_rms_norm": has_norm, "mamba_norm_before_gate": False, "embedding_multiplier": 3.0,
         "lm_head_multiplier": 0.5, "key_multiplier": 0.75, "attention_in_multiplier": 1.25,
         "attention_out_multiplier": 0.875, "ssm_in_multiplier": 1.5, "ssm_out_multiplier": 0.625,
         "mlp_multipliers": [1.125, 0.75], "ssm_multipliers": list(_FALCON_INPUTS)},
        layers=(LayerConfig(has_state=True),) * N_LAYERS,
        recurrent=RecurrentConfig(4, 8, 2, 24, 16, has_norm=has_norm),
        facts={"embedding_scale": 3.0, "logits_divisor": 2.0, "attention_scale": 0.75 * D_HEAD**-0.5,
               "multipliers": MultiplierConfig(1.25, 0.875, tuple(1.5 * m for m in _FALCON_INPUTS),
                                               0.625, 1.125, 0.75)},
        keys={"ssm.conv_kernel": 4, "ssm.time_step_rank": 8, "ssm.group_count": 2, "ssm.state_size": 24,
              "ssm.inner_size": 128, "attention.key_length": D_HEAD},
    )  # fmt: skip


def _smallthinker(by_softmax: bool) -> Tiny:
    """The first layer sees all and does not rotate."""
    return Tiny(
        "SmallThinker", "smallthinker",
        {"rope_layout": [0, 1, 1, 1], "sliding_window_layout": [0, 1, 1, 1], "sliding_window_size": 7,
         "moe_num_primary_experts": 8, "moe_num_active_primary_experts": 3, "moe_ffn_hidden_size": 32,
         "moe_primary_router_apply_softmax": by_softmax},
        layers=(NOPE, *_windows(7, 7, 7)), facts={"d_ffn": 32},
        mixture=MixtureConfig(8, 3, 32, normalized=True, by_sigmoid=not by_softmax),
        keys={**_EXPERT_KEYS, "feed_forward_length": 32, "expert_feed_forward_length": 32,
              "expert_gating_func": 1 if by_softmax else 2, "attention.sliding_window": 7},
    )  # fmt: skip


TINY: dict[str, Tiny] = {
    "smallthinker": _smallthinker(False),
    "smallthinker_softmax": _smallthinker(True),
    "mamba2": Tiny(
        "Mamba2", "mamba2",
        {"num_heads": 8, "n_groups": 2, "state_size": 24, "conv_kernel": 4, "use_bias": True},
        layers=(replace(RECURRENT, use_rope=False),) * N_LAYERS, n_kv_heads=8,
        recurrent=RecurrentConfig(4, 8, 2, 24, 16), facts={"n_heads": 8, "d_ffn": 128},
        keys={"attention.head_count": 0, "attention.head_count_kv": [0] * N_LAYERS, "feed_forward_length": 0,
              "ssm.conv_kernel": 4, "ssm.time_step_rank": 8, "ssm.group_count": 2, "ssm.state_size": 24,
              "ssm.inner_size": 128, "rope.dimension_count": 8},
    ),
    "falcon_h1": _falcon_h1(False),
    "falcon_h1-normed": _falcon_h1(True),
    "nemotron_h": _nemotron_h("mlp"),
    "nemotron_h_moe": _nemotron_h(
        "moe",
        hf={"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_group": 4,
            "topk_group": 2, "moe_shared_expert_intermediate_size": 64, "routed_scaling_factor": 2.5},
        mixture=_GROUPED,
        facts={"d_ffn": 32},
        keys={**_EXPERT_KEYS, "expert_feed_forward_length": 32, "expert_shared_count": 1,
              "expert_shared_feed_forward_length": 64, **_GROUPED_KEYS},
    ),
    "gpt_neox": Tiny(
        "GPTNeoX", "gptneox", {"rope_parameters": _rope("default", partial_rotary_factor=0.5)},
        rotary_dim=8, n_kv_heads=HEADS,
        keys={"use_parallel_residual": True, "attention.layer_norm_epsilon": 1e-5},
    ),
    "deepseek_v2": _latent(
        "DeepseekV2", 0,
        hf={"rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
        scaling=RopeScaling("yarn", 8.0, ORIGINAL, mscale=0.707, mscale_all_dim=0.707),
        facts={"attention_scale": 48**-0.5 * _MSCALE**2},
        keys={**_YARN_KEYS, "rope.scaling.yarn_log_multiplier": 0.0707, "expert_gating_func": 1},
    ),
    "deepseek_v3": _latent_by_sigmoid("DeepseekV3"),
    "glm4_moe_lite": _latent_by_sigmoid("Glm4MoeLite"),
    "minicpm3": replace(
        _latent("MiniCPM3", 64,
                facts={"embedding_scale": 12.0, "residual_scale": 0.7, "logits_divisor": 0.25}),
        gguf_arch="minicpm3", layers=(FULL,) * N_LAYERS, mixture=None, is_paired=False, tied=True,
        hf={"num_key_value_heads": HEADS, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
            "qk_rope_head_dim": D_HEAD, "v_head_dim": 16},
        keys={"attention.head_count_kv": HEADS, "attention.key_length": 48, "attention.value_length": 16,
              "attention.kv_lora_rank": 32, "attention.q_lora_rank": 64},
    ),
    "llama": Tiny(
        "Llama", "llama", {"rope_parameters": _LLAMA3},
        scaling=RopeScaling("llama3", 8.0, ORIGINAL),
    ),
    "smollm3": Tiny(
        "SmolLM3", "smollm3", {"rope_parameters": _YARN}, layers=(FULL, FULL, FULL, NOPE), tied=True,
        scaling=RopeScaling("yarn", 8.0, ORIGINAL),
        keys=_YARN_KEYS,
    ),
    "smollm3-listed": Tiny(
        "SmolLM3", "smollm3", {"no_rope_layers": [1, 0, 0, 1]}, layers=(FULL, NOPE, NOPE, FULL), tied=True,
        keys={"attention.nope_layers": [1, 2]},
    ),
    "mistral": Tiny(
        "Mistral", "llama", {"sliding_window": 5}, layers=_windows(5, 5, 5, 5),
        keys={"attention.sliding_window": 5},
    ),
    "qwen2": Tiny(
        "Qwen2", "qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
        layers=_windows(None, None, 7, 7), tied=True,
        keys={"attention.sliding_window": 7, "attention.sliding_window_pattern": [0, 0, 1, 1]},
    ),
    "ministral3": Tiny(
        "Ministral3", "mistral3",
        {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.375,
                             "original_max_position_embeddings": 16}},
        scaling=RopeScaling("yarn", 8.0, 16, mscale=1.0, mscale_all_dim=0.5), facts={"query_growth": 0.375},
        keys={**_YARN_KEYS, "rope.scaling.original_context_length": 16, "attention.temperature_scale": 0.375,
              "rope.scaling.yarn_log_multiplier": 0.5},
    ),
    "qwen3": Tiny("Qwen3", "qwen3", {}, tied=True),
    "phi3": Tiny(
        "Phi3", "phi3",
        {"rope_parameters": _PHI3_ROPE, "sliding_window": 9, "original_max_position_embeddings": ORIGINAL},
        layers=_windows(9, 9, 9, 9), rotary_dim=12,
        scaling=RopeScaling("longrope", CONTEXT / ORIGINAL, ORIGINAL,
                            short_factors=_SHORT, long_factors=_LONG),
        keys={"attention.sliding_window": 9, "rope.scaling.original_context_length": ORIGINAL},
        tensors={"rope_factors_short.weight": _SHORT, "rope_factors_long.weight": _LONG},
    ),
    "phi": Tiny(
        "Phi", "phi2", {"rope_parameters": _rope("default", partial_rotary_factor=0.5)},
        rotary_dim=8, n_kv_heads=HEADS,
    ),
    "phi-grouped": Tiny(
        "Phi", "phi2", {"rope_parameters": _rope("default", partial_rotary_factor=0.5)}, rotary_dim=8,
    ),
    "starcoder2": Tiny(
        "Starcoder2", "starcoder2", {"sliding_window": 11}, layers=_windows(11, 11, 11, 11), tied=True,
        keys={"attention.sliding_window": 11},
    ),
    "gpt_oss": Tiny(
        "GptOss", "gpt-oss",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 7,
         "rope_parameters": {**_YARN, "truncate": False}},
        layers=_windows(7, None, 7, None), scaling=RopeScaling("yarn", 8.0, ORIGINAL, truncate=False),
        mixture=MixtureConfig(8, 3, F, normalized=True),
        keys={**_EXPERT_KEYS, "attention.sliding_window": 7, "rope.scaling.type": "yarn",
              "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": ORIGINAL},
    ),
    "olmoe": Tiny(
        "Olmoe", "olmoe", _EXPERTS, mixture=MixtureConfig(8, 3, F, normalized=False), keys=_EXPERT_KEYS,
    ),
    "qwen3_moe": Tiny(
        "Qwen3Moe", "qwen3moe", {**_EXPERTS, "moe_intermediate_size": 32, "norm_topk_prob": True},
        mixture=MixtureConfig(8, 3, 32, normalized=True),
        keys={**_EXPERT_KEYS, "expert_feed_forward_length": 32},
    ),
    "granite": Tiny(
        "Granite", "granite",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.375, "residual_multiplier": 0.625,
         "logits_scaling": 1.75, "attention_bias": True},
        facts={"embedding_scale": 3.0, "attention_scale": 0.375, "residual_scale": 0.625,
               "logits_divisor": 1.75},
        keys={"embedding_scale": 3.0, "attention.scale": 0.375, "residual_scale": 0.625, "logit_scale": 1.75},
    ),
    "minicpm": Tiny(
        "MiniCPM", "minicpm", {"scale_emb": 3, "scale_depth": 1.25, "dim_model_base": 16}, tied=True,
        facts={"embedding_scale": 3.0, "residual_scale": 0.625, "logits_divisor": 4.0},
        keys={"embedding_scale": 3.0, "residual_scale": 0.625, "logit_scale": 4.0},
    ),
    "phimoe": Tiny(
        "Phimoe", "phimoe",
        {"num_local_experts": 8, "attention_bias": True, "lm_head_bias": True,
         "sliding_window": 11},
        layers=_windows(11, 11, 11, 11),
        mixture=MixtureConfig(8, 2, F, normalized=False, tolerance=0.02),
        keys={"expert_count": 8, "expert_used_count": 2, "attention.sliding_window": 11,
              "attention.layer_norm_rms_epsilon": 1e-5},
    ),
    "apertus": Tiny(
        "Apertus", "apertus", {"rope_parameters": _LLAMA3, "attention_bias": True},
        scaling=RopeScaling("llama3", 8.0, ORIGINAL),
    ),
    "lfm2": Tiny(
        "Lfm2", "lfm2",
        {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
        layers=(RECURRENT, RECURRENT, FULL, RECURRENT), tied=True, recurrent=RecurrentConfig(3),
        keys={"attention.head_count_kv": np.array([0, 0, KV_HEADS, 0], np.int32), "shortconv.l_cache": 3},
    ),
    "qwen3_5_text": _qwen3_5(2),
    "qwen3_5_text-grouped": _qwen3_5(4),
    "granitemoehybrid": _granite_hybrid(8, "nope"),
    "granitemoehybrid_dense": _granite_hybrid(0, "rope"),
    "ernie4_5": Tiny("Ernie4_5", "ernie4_5", {"use_bias": True}, tied=True, is_paired=True),
    "gemma": Tiny("Gemma", "gemma", {}, tied=True, norm_offset=1.0),
    "gemma2": Tiny(
        "Gemma2", "gemma2",
        {"sliding_window": 7, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 2.0,
         "final_logit_softcapping": 5.0},
        layers=_windows(7, None, 7, None), tied=True, norm_offset=1.0,
        facts={"attention_scale": 0.5, "attention_softcap": 2.0, "logit_softcap": 5.0},
        keys={"attention.sliding_window": 7, "attention.scale": 0.5, "attn_logit_softcapping": 2.0,
              "final_logit_softcapping": 5.0},
    ),
    "gemma3_text": Tiny(
        "Gemma3Text", "gemma3",
        {"sliding_window": 7, "sliding_window_pattern": 3, "query_pre_attn_scalar": 16,
         "rope_parameters": {
             "full_attention": _rope("linear", factor=4.0),
             "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}},
        layers=(*_local(7, 500.0) * 2, FULL, *_local(7, 500.0)), tied=True, norm_offset=1.0,
        scaling=RopeScaling("linear", 4.0),
        keys={"attention.sliding_window": 7, "attention.sliding_window_pattern": 3,
              "rope.freq_base_swa": 500.0, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "gemma4_text": _gemma4(
        {"hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        (LayerConfig(**_NARROW, d_ffn=F), LayerConfig(d_ffn=F), LayerConfig(**_NARROW, kv_from=0),
         LayerConfig(kv_from=1)),
        {"d_per_layer": 32, "d_ffn": 2 * F},
        {"attention.shared_kv_layers": 2, "embedding_length_per_layer_input": 32,
         "feed_forward_length": [F, F, 2 * F, 2 * F], "attention.sliding_window_pattern": [1, 0, 1, 0]},
        ("sliding_attention", "full_attention") * 2,
    ),
    "gemma4_text-keys": _gemma4(  # which are values too
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
         "final_logit_softcapping": 5.0},
        (*(LayerConfig(**_NARROW),) * 3, LayerConfig(n_kv_heads=1, keys_are_values=True)),
        {"logit_softcap": 5.0},
        {"attention.head_count_kv": [2, 2, 2, 1], "final_logit_softcapping": 5.0},
        ("sliding_attention",) * 3 + ("full_attention",),
    ),
    "gemma4_moe_text": replace(
        _gemma4(
            {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32,
             "hidden_size_per_layer_input": 0},
            (*(LayerConfig(**_NARROW),) * 3, FULL), {}, {"expert_feed_forward_length": 32, **_EXPERT_KEYS},
            ("sliding_attention",) * 3 + ("full_attention",),
        ),
        mixture=MixtureConfig(8, 3, 32, normalized=True),
    ),
    "olmo2": Tiny("Olmo2", "olmo2", {}),
    "olmo": Tiny("Olmo", "olmo", {}, keys={"attention.layer_norm_epsilon": 1e-5}),
    "stablelm": Tiny(
        "StableLm", "stablelm",
        {"use_qkv_bias": True, "rope_parameters": _rope("default", partial_rotary_factor=0.5)}, rotary_dim=8,
    ),
    "internlm3": Tiny("InternLM3", "llama", {"attention_bias": True, "mlp_bias": True}),
    "seed_oss": Tiny("SeedOss", "seed_oss", {"attention_out_bias": False}),
    "hunyuan_v1_dense": Tiny("HunYuanDenseV1", "hunyuan-dense", {"attention_bias": True}, tied=True),
    "exaone4": Tiny("Exaone4", "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "exaone4-windows": Tiny(
        "Exaone4", "exaone4", {"sliding_window": 7},
        layers=(*_windows(7, 7, 7), NOPE),
        keys={"attention.sliding_window": 7, "attention.sliding_window_pattern": [1, 1, 1, 0]},
    ),
    "glm4": Tiny(
        "Glm4", "glm4", {"rope_parameters": _rope("default", partial_rotary_factor=1.0)}, is_paired=True,
    ),
    "cohere2": Tiny(
        "Cohere2", "cohere2", {"sliding_window": 7, "logit_scale": 0.25}, layers=(*_windows(7, 7, 7), NOPE),
        tied=True, is_paired=True, facts={"logits_divisor": 4.0},
        keys={"attention.sliding_window": 7, "logit_scale": 0.25, "attention.layer_norm_epsilon": 1e-5},
    ),
    "granitemoe": _granitemoe(0),
    "granitemoeshared": _granitemoe(48),
    "arcee": Tiny("Arcee", "arcee", {"mlp_bias": True}),
    "nemotron": Tiny(
        "Nemotron", "nemotron", {"rope_parameters": _rope("default", partial_rotary_factor=0.5)},
        rotary_dim=8, norm_offset=1.0,
    ),
    "qwen2_moe": Tiny(
        "Qwen2Moe", "qwen2moe",
        {**_EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
        mixture=MixtureConfig(8, 3, 32, normalized=False, d_shared=48),
        keys={**_EXPERT_KEYS, "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 48},
    ),
    "qwen3_5_moe_text": _qwen3_5_moe(),
    "lfm2_moe": Tiny(
        "Lfm2Moe", "lfm2moe",
        {**_EXPERTS, "layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 2,
         "moe_intermediate_size": 32, "routed_scaling_factor": 1.5},
        layers=(_dense(RECURRENT), _dense(RECURRENT), FULL, RECURRENT), tied=True,
        recurrent=RecurrentConfig(3),
        mixture=MixtureConfig(8, 3, 32, normalized=True, by_sigmoid=True, has_bias=True, scale=1.5),
        keys={"attention.head_count_kv": np.array([0, 0, KV_HEADS, 0], np.int32), "shortconv.l_cache": 3,
              **_EXPERT_KEYS, "expert_feed_forward_length": 32, "leading_dense_block_count": 2,
              "expert_gating_func": 2, "expert_weights_scale": 1.5},
    ),
    "ernie4_5_moe": Tiny(
        "Ernie4_5_Moe", "ernie4_5-moe",
        {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32, "moe_num_shared_experts": 2},
        layers=(_dense(FULL), FULL, FULL, FULL), tied=True, is_paired=True,
        mixture=MixtureConfig(8, 3, 32, normalized=True, has_bias=True, d_shared=64),
        keys={**_EXPERT_KEYS, "expert_feed_forward_length": 32, "expert_shared_count": 2,
              "expert_shared_feed_forward_length": 64, "leading_dense_block_count": 1,
              "interleave_moe_layer_step": 1, "expert_gating_func": 1},
    ),
    "glm4_moe": Tiny(
        "Glm4Moe", "glm4moe",
        {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2,
         "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "use_qk_norm": True,
         "rope_parameters": _rope("default", partial_rotary_factor=0.5)},
        layers=(_dense(FULL), FULL, FULL, FULL), rotary_dim=8,
        mixture=_GROUPED,
        keys={**_EXPERT_KEYS, "expert_feed_forward_length": 32, "expert_shared_count": 2,
              "leading_dense_block_count": 1, **_GROUPED_KEYS},
    ),
    "bailing_moe": Tiny(
        "BailingMoeV2", "bailingmoe2",
        {**_EXPERTS, "moe_intermediate_size": 32, "num_shared_experts": 1, "n_group": 4, "topk_group": 2,
         "routed_scaling_factor": 2.5, "rope_parameters": _rope("default", partial_rotary_factor=0.5)},
        layers=(_dense(FULL), FULL, FULL, FULL), rotary_dim=8,
        mixture=replace(_GROUPED, d_shared=32),
        keys={**_EXPERT_KEYS, "expert_feed_forward_length": 32, "expert_shared_count": 1,
              "leading_dense_block_count": 1, **_GROUPED_KEYS},
    ),
    "afmoe": Tiny(
        "Afmoe", "afmoe",
        {**_EXPERTS, "moe_intermediate_size": 32, "num_shared_experts": 2, "route_scale": 1.5,
         "sliding_window": 7, "mup_enabled": True},
        layers=(_dense(*_windows(7)), *_windows(7, 7), NOPE),
        mixture=MixtureConfig(8, 3, 32, True, by_sigmoid=True, has_bias=True, scale=1.5, d_shared=64),
        facts={"embedding_scale": 8.0},
        keys={**_EXPERT_KEYS, "expert_feed_forward_length": 32, "expert_shared_count": 2,
              "leading_dense_block_count": 1, "expert_gating_func": 2, "expert_weights_norm": True,
              "expert_weights_scale": 1.5, "attention.sliding_window": 7},
    ),
    "hunyuan_v1_moe": Tiny(
        "HunYuanMoEV1", "hunyuan-moe", {"num_experts": 8, "moe_topk": 3},
        mixture=MixtureConfig(8, 3, F, normalized=True, d_shared=F),
        keys={**_EXPERT_KEYS, "expert_feed_forward_length": F, "expert_shared_feed_forward_length": F},
    ),
    "bitnet": Tiny("BitNet", "", {}),
    "olmo_hybrid": Tiny(
        "OlmoHybrid", "",
        {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
         "initializer_range": 0.1},
        layers=(RECURRENT, RECURRENT, RECURRENT, FULL),
        recurrent=RecurrentConfig(4, 4, 2, 16, 32),
    ),
    "olmo3": Tiny(
        "Olmo3", "olmo2",
        {"sliding_window": 7,
         "rope_parameters": {"full_attention": _YARN, "sliding_attention": _rope("default")}},
        layers=(*_local(7, 10000.0) * 3, FULL), scaling=RopeScaling("yarn", 8.0, ORIGINAL),
        keys={"attention.sliding_window": 7, **_YARN_KEYS},
    ),
}  # fmt: skip


IN_GGUF = [name for name, tiny in TINY.items() if tiny.gguf_arch]


def make(
    name: str, seed: int = 0, weight_type: str = "F32", context: int = CONTEXT
) -> tuple[Any, ModelConfig, TorchSource]:
    """transformers' model, our config and the same weights, each matrix rounded to `weight_type`.

    `context` other than CONTEXT is for models whose scaling does not follow from it, or is longrope.
    """
    tiny = TINY[name]
    scaling = tiny.scaling
    if scaling is not None and scaling.kind == "longrope":
        scaling = replace(scaling, factor=context / ORIGINAL)
    torch.manual_seed(seed)
    common = {
        "hidden_size": D, "intermediate_size": F, "num_attention_heads": HEADS, "head_dim": D_HEAD,
        "num_key_value_heads": tiny.n_kv_heads, "num_hidden_layers": N_LAYERS, "vocab_size": V,
        "max_position_embeddings": context, "tie_word_embeddings": tiny.tied,
        "initializer_range": 0.15,  # attention is far from uniform; steeper, float32 itself nears 1e-4
        "pad_token_id": 0, "attn_implementation": "eager",
        "rope_parameters": _rope("default"),
    }  # fmt: skip
    config_class = _hf_class(f"{tiny.hf_type}Config")
    epsilons = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
    epsilon = {key: 1e-5 for key in epsilons if hasattr(config_class(), key)}
    hf_config = config_class(**{**common, **epsilon, **tiny.hf})
    class_name = f"{tiny.hf_type.removesuffix('Text')}ForCausalLM"  # InternLM3 is Llama's
    make_hf = _hf_class(class_name)
    hf = make_hf(hf_config).eval()
    kind = QUANT_TYPES[weight_type]
    with torch.no_grad():
        for key, parameter in hf.named_parameters():
            if "sinks" in key:
                parameter.copy_(torch.randn_like(parameter))
            elif (
                "norm" in key or "bias" in key or key.endswith("scale")
            ):  # else all ones or zeros, and a mistake would not show
                middle = 0.0 if "bias" in key else 1.0 - tiny.norm_offset * ("linear_attn" not in key)
                parameter.copy_(middle + 0.3 * torch.randn_like(parameter))
            elif "act_fn.alpha" in key:
                parameter.copy_(torch.randn_like(parameter))
            elif is_convolution(key) or key.endswith(".D"):
                parameter.copy_(0.5 * torch.randn_like(parameter))
            elif kind.name == "BF16":
                parameter.copy_(parameter.bfloat16().float())
        for key, buffer in hf.named_buffers():
            if key.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(1))
            elif key.endswith("bias"):  # routers' biases
                buffer.copy_(0.3 * torch.randn_like(buffer))
    sizes = {"d_head": D_HEAD, "d_ffn": F, "n_heads": HEADS, **tiny.facts}
    config = ModelConfig(
        architecture=name.split("-")[0],
        n_layers=N_LAYERS,
        d_model=D,
        n_kv_heads=tiny.n_kv_heads,
        n_vocab=V,
        norm_eps=1e-5,
        max_context=context,
        tie_embeddings=tiny.tied,
        rope=RopeConfig(10000.0, tiny.rotary_dim, scaling),
        layers=tuple(tiny.layers),
        mixture=tiny.mixture,
        recurrent=tiny.recurrent,
        **sizes,
    )
    state = {key: t for key, t in hf.state_dict().items() if not (tiny.tied and key == "lm_head.weight")}
    state = _stacked(dict(_named(key, tensor) for key, tensor in state.items()))
    state = {_canonical(key, name.split("-")[0], tiny.layers): tensor for key, tensor in state.items()}
    if name == "olmo_hybrid":
        state = _of_olmo_hybrid(state, config)
    if name.startswith("granitemoe"):
        shared = "mlp.shared_experts" if tiny.mixture and tiny.mixture.d_shared else "shared_mlp"
        state = _of_granite(state, shared if tiny.mixture else "mlp")
    if name == "gemma4_moe_text":
        state = {key.replace(".router.proj", ".mlp.gate").replace(".experts", ".mlp.experts"): tensor
                 for key, tensor in state.items()}  # fmt: skip
    made = TorchSource(_with_experts_apart(state))
    for key in made.arrays:
        is_norm = key.endswith("norm.weight") and "linear_attn" not in key
        made.arrays[key] = made.arrays[key] + np.float32(tiny.norm_offset if is_norm else 0.0)
    if config.has_gates:  # rows of a head's query and gate apart
        for key in [key for key in made.arrays if "q_proj" in key]:
            made.arrays[key] = np.concatenate([part.reshape(-1, D) for part in _gates(made.arrays[key])])
    if name == "gpt_neox":  # a head's query, key and value next to each other
        for key in [key for key in made.arrays if "qkv_proj" in key]:
            rows = made.arrays[key].reshape(HEADS, 3, D_HEAD, -1).swapaxes(0, 1)
            made.arrays[key] = rows.reshape(made.arrays[key].shape)
    if config.latent is not None:
        made.arrays = _with_heads_apart(made.arrays, config, tiny.is_paired)
    elif tiny.is_paired:
        rotated = [key for key in made.arrays if "q_proj" in key or "k_proj" in key]
        made.arrays |= {key: _half_split(made.arrays[key]) for key in rotated}
    return hf, config, made


def _hf_class(name: str) -> Any:
    """A class of transformers, or one of those that stand for classes on the hub."""
    own = vars(minicpm_class) | vars(smallthinker_class) | vars(bailing_class)
    return own.get(name) or getattr(transformers, name, transformers.LlamaForCausalLM)


def _stacked(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Matrices of single experts as a stack of all."""
    stacks: dict[str, list[torch.Tensor]] = {}
    for key, tensor in state.items():
        stacks.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.", key), []).append(tensor)
    return {
        key: torch.stack(each) if ".experts." in key and len(each) > 1 else each[0]
        for key, each in stacks.items()
    }


def _with_heads_apart(
    arrays: Mapping[str, np.ndarray], config: ModelConfig, is_paired: bool
) -> dict[str, np.ndarray]:
    """Tensors of latent attention as models have them: of each head a matrix of keys, transposed, and one of
    values; rows that rotate in halves.
    """
    latent, apart = config.latent, dict[str, np.ndarray]()
    assert latent is not None
    for key, array in arrays.items():
        if "kv_b_proj" in key:
            rows = array.reshape(HEADS, -1, latent.rank)
            apart[key.replace("kv_b", "k_b")] = rows[:, : latent.d_nope].swapaxes(1, 2)
            apart[key.replace("kv_b", "v_b")] = rows[:, latent.d_nope :]
        else:
            apart[key] = _turned_tail(key, array, latent, _half_split) if is_paired else array
    return apart


def _turned_tail(key: str, array: np.ndarray, latent: LatentConfig, turn: Any) -> np.ndarray:
    """An array whose rows that rotate, the last of each query's head or of all keys, are turned."""
    if re.search(r"\.(?:q_proj|q_b_proj|kv_a_proj_with_mqa)\.", key) is None:
        return array
    n_before = latent.rank if "kv_a" in key else latent.d_nope
    heads = array.reshape(-1, n_before + D_HEAD, *array.shape[1:]).copy()
    for head in heads:
        head[n_before:] = turn(head[n_before:])
    return heads.reshape(array.shape)


def _gates(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of queries and gates, head by head, both [heads, D_HEAD, D]."""
    heads = rows.reshape(HEADS, 2, D_HEAD, -1)
    return heads[:, 0], heads[:, 1]


def _named(key: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """A parameter of transformers' as kukri names it and has it."""
    if key.endswith(".A_log"):
        return f"{key}.weight", -torch.exp(tensor)
    if key.endswith(("shared_expert_gate.weight", "e_score_correction_bias", "expert_bias")):
        return key.replace("_bias", ".bias"), tensor.reshape(-1)
    key = (
        f"{key}.weight"
        if key.endswith((".D", ".layer_scalar", "_scale", ".scale")) or ".act_fn." in key
        else key.replace(".dt_bias", ".dt_proj.bias")
    )
    return key, tensor[:, 0] if is_convolution(key) else tensor.reshape(-1) if ".act_fn." in key else tensor


def _of_nemotron_h(key: str, layers: Sequence[LayerConfig]) -> str:
    """A tensor of a layer's only part, by what the part is."""
    key = key.replace("backbone.", "model.")
    match = re.fullmatch(r"(model\.layers\.(\d+))\.(.+)", key)
    if match is None:
        return key
    layer = layers[int(match[2])]
    part = "mamba" if layer.is_recurrent else "mlp" if layer.is_mlp else "self_attn"
    name = match[3].replace("mixer.", f"{part}.")
    return f"{match[1]}.{'input_layernorm.weight' if name == 'norm.weight' else name}"


def _canonical(key: str, architecture: str, layers: Sequence[LayerConfig]) -> str:
    """A tensor's name as kukri has it, if it is the only one of its row in `Architecture.joined`."""
    if architecture == "gpt_neox":  # as files have it
        key = key.replace("gpt_neox.", "model.").replace("lm_head", "embed_out")
    key = key.replace("feed_forward.experts.", "mlp.experts.")  # which are one tensor in transformers
    key = key.replace(".gate.moe_statics.", ".moe_statics.")  # as files have it
    key = key.replace("mlp.router.", "mlp.gate.") if architecture == "phimoe" else key
    if architecture in ("nemotron_h", "nemotron_h_moe", "mamba2"):  # several of its modules have one name
        return _of_nemotron_h(key, layers)
    for stored, modules in ARCHITECTURES[architecture].joined.items():
        if len(modules) == 1:
            key = re.sub(rf"(\.\d+\.){re.escape(stored)}(?=\.\w+$)", rf"\1{modules[0]}", key)
    return key


def _of_olmo_hybrid(state: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """OLMo Hybrid's tensors as files have them: the rule's layers with norms under other names."""
    own, made = config.recurrent, dict[str, torch.Tensor]()
    assert own is not None
    n_keys = own.n_groups * own.d_state
    for key, tensor in state.items():
        if "conv1d" in key:
            for part, rows in zip("qkv", tensor.split([n_keys, n_keys, own.n_heads * own.d_head])):
                made[key.replace("conv1d", f"{part}_conv1d")] = rows
        elif "layers.3" in key or "layers" not in key:
            made[key] = tensor
        else:
            key = key.replace("input_layernorm", "attention_layer_norm")
            made[key.replace("post_attention_layernorm", "feedforward_layer_norm")] = tensor
    return made


def _of_granite(state: Mapping[str, torch.Tensor], mlp: str) -> dict[str, torch.Tensor]:
    """Granite 4's tensors as kukri names them, the gate and up of the MLP for all tokens apart."""
    made: dict[str, torch.Tensor] = {}
    for key, tensor in state.items():
        key = key.replace("block_sparse_moe.router", "mlp.gate").replace("block_sparse_moe", "mlp")
        if "shared_mlp.input_linear" in key:
            for part, rows in zip(("gate_proj", "up_proj"), tensor.chunk(2)):
                made[key.replace("shared_mlp.input_linear", f"{mlp}.{part}")] = rows
        else:
            made[key.replace("shared_mlp.output_linear", f"{mlp}.down_proj")] = tensor
    return made


def _tiled(key: str, array: np.ndarray, recurrent: RecurrentConfig) -> np.ndarray:
    """An array as llama.cpp's converter has it: value head j of key head k at place j * n_groups + k."""
    if "linear_attn." not in key or "linear_attn.norm" in key:
        return array
    n, g, n_keys = recurrent.n_heads, recurrent.n_groups, 2 * recurrent.n_groups * recurrent.d_state
    order = np.arange(n).reshape(g, n // g).T.reshape(-1)
    wide = (order[:, None] * recurrent.d_head + np.arange(recurrent.d_head)).reshape(-1)
    if "out_proj" in key:
        return array[:, wide]
    if "in_proj_qkv" in key or "conv1d" in key:
        return np.concatenate([array[:n_keys], array[n_keys:][wide]])
    return array[wide if "in_proj_z" in key else order]


def _half_split(rows: np.ndarray) -> np.ndarray:
    """Rows of q or k in pairs as kukri has them: the inverse of `_interleaved`."""
    return rows.reshape(-1, D_HEAD // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _with_experts_apart(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gate and up of experts, which transformers holds as one, as a stack of matrices each."""
    apart: dict[str, torch.Tensor] = {}
    is_interleaved = any(key.endswith("gate_up_proj_bias") for key in state)  # gpt-oss, and (in, out)
    for key, tensor in state.items():
        stem, _, part = key.rpartition(".")
        if part == "sinks":
            apart[f"{key}.weight"] = tensor
        elif not stem.endswith(".experts"):
            apart[key] = tensor
        else:
            kind = "bias" if part.endswith("_bias") else "weight"
            if is_interleaved and kind == "weight":
                tensor = tensor.transpose(1, 2)
            if not part.startswith("gate_up"):
                apart[f"{stem}.{part.partition('_bias')[0]}.{kind}"] = tensor
                continue
            gate_up = (tensor[:, ::2], tensor[:, 1::2]) if is_interleaved else tensor.chunk(2, dim=1)
            apart |= zip((f"{stem}.gate_proj.{kind}", f"{stem}.up_proj.{kind}"), gate_up)
    return apart


# whose converter puts rows of q and k in pairs
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
            array = _turned_tail(key, array, config.latent, lambda rows: _interleaved(rows, D_HEAD))
        if in_pairs and ("q_proj" in key or "k_proj" in key):
            array = _interleaved(array, D_HEAD)
        if config.has_gates and "q_proj" in key:
            array = np.stack(np.split(array.reshape(-1, D_HEAD, D), 2), axis=1).reshape(array.shape)
        if config.recurrent is not None and config.recurrent.n_heads:
            array = _tiled(key, array, config.recurrent)
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
            for name in (key, key.replace("model.", "gpt_neox."))
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
