"""What makes a tiny model of each architecture: transformers' configuration, ours, and GGUF's keys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kukri.config import (
    LatentConfig,
    LayerConfig,
    MixtureConfig,
    MultiplierConfig,
    RecurrentConfig,
    RopeConfig,
    RopeScaling,
)

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


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **parameters}


_YARN = rope("yarn", factor=8.0, original_max_position_embeddings=ORIGINAL)
_YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": ORIGINAL,
}
_LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=ORIGINAL,
)
_SHORT = (1.0, 1.125, 1.25, 1.625, 2.0, 2.5)
_LONG = (1.0, 1.5, 2.5, 4.0, 6.0, 9.0)
_PHI3_ROPE = rope(
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
         "linear_value_head_dim": 16, "rope_parameters": rope("default", partial_rotary_factor=0.5)},
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


def _granite_swa(n_experts: int) -> Tiny:
    """Granite with windows, sinks and RoPE bases by layer, one of them 0, and a mixture or none."""
    mixture = {"num_local_experts": n_experts, "num_experts_per_tok": 3, "shared_intermediate_size": 48}
    bases = {"sliding_window": 7, "layer_rope_theta": [0, 500.0, 10000.0, 500.0]}
    local = _local(7, 500.0)
    return Tiny(
        "GraniteMoeSWA" if n_experts else "GraniteSWA", "",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.375, "residual_multiplier": 0.625,
         "logits_scaling": 1.75, **bases, **(mixture if n_experts else {})},
        layers=(LayerConfig(use_rope=False), *local, *_windows(7), *local),
        tied=True,
        facts={"embedding_scale": 3.0, "attention_scale": 0.375, "residual_scale": 0.625,
               "logits_divisor": 1.75},
        mixture=MixtureConfig(n_experts, 3, F, normalized=True, d_shared=48) if n_experts else None,
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
             "full_attention": rope("proportional", partial_rotary_factor=0.25),
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
        recurrent=RecurrentConfig(4, 8, 2, 24, 16, steps=(0.001, math.inf)),
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
    "nemotron_h_moe-latent": _nemotron_h(
        "moe",
        hf={"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_group": 4,
            "topk_group": 2, "moe_shared_expert_intermediate_size": 64, "routed_scaling_factor": 2.5,
            "moe_latent_size": 32, "mlp_bias": True},
        mixture=replace(_GROUPED, d_latent=32),
        facts={"d_ffn": 32},
        keys={**_EXPERT_KEYS, "expert_feed_forward_length": 32, "expert_shared_count": 1,
              "expert_shared_feed_forward_length": 64, "moe_latent_size": 32, **_GROUPED_KEYS},
    ),
    "gpt_neox": Tiny(
        "GPTNeoX", "gptneox", {"rope_parameters": rope("default", partial_rotary_factor=0.5)},
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
        "Phi", "phi2", {"rope_parameters": rope("default", partial_rotary_factor=0.5)},
        rotary_dim=8, n_kv_heads=HEADS,
    ),
    "phi-grouped": Tiny(
        "Phi", "phi2", {"rope_parameters": rope("default", partial_rotary_factor=0.5)}, rotary_dim=8,
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
    "granite_swa": _granite_swa(0),
    "granitemoe_swa": _granite_swa(8),
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
    "lfm3": Tiny(
        "Lfm3", "",
        {"layer_types": ["conv", "sliding_attention", "full_attention", "conv"], "sliding_window": 7,
         "rope_parameters": {
             "full_attention": rope("proportional", partial_rotary_factor=0.5),
             "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}},
        layers=(RECURRENT, *_local(7, 500.0), FULL, RECURRENT), tied=True, recurrent=RecurrentConfig(7),
        scaling=RopeScaling("llama3", factors=(*[1.0] * 4, *[float(np.float32(1e30))] * 4)),
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
             "full_attention": rope("linear", factor=4.0),
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
        {"use_qkv_bias": True, "rope_parameters": rope("default", partial_rotary_factor=0.5)}, rotary_dim=8,
    ),
    "internlm3": Tiny("InternLM3", "llama", {"attention_bias": True, "mlp_bias": True}),
    "seed_oss": Tiny("SeedOss", "seed_oss", {"attention_out_bias": False}),
    "hunyuan_v1_dense": Tiny("HunYuanDenseV1", "hunyuan-dense", {"attention_bias": True}, tied=True),
    "exaone": Tiny(
        "Exaone", "exaone", {"rope_parameters": _LLAMA3}, scaling=RopeScaling("llama3", 8.0, ORIGINAL),
    ),
    "exaone4": Tiny("Exaone4", "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "exaone4-windows": Tiny(
        "Exaone4", "exaone4", {"sliding_window": 7},
        layers=(*_windows(7, 7, 7), NOPE),
        keys={"attention.sliding_window": 7, "attention.sliding_window_pattern": [1, 1, 1, 0]},
    ),
    "glm4": Tiny(
        "Glm4", "glm4", {"rope_parameters": rope("default", partial_rotary_factor=1.0)}, is_paired=True,
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
        "Nemotron", "nemotron", {"rope_parameters": rope("default", partial_rotary_factor=0.5)},
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
         "rope_parameters": rope("default", partial_rotary_factor=0.5)},
        layers=(_dense(FULL), FULL, FULL, FULL), rotary_dim=8,
        mixture=_GROUPED,
        keys={**_EXPERT_KEYS, "expert_feed_forward_length": 32, "expert_shared_count": 2,
              "leading_dense_block_count": 1, **_GROUPED_KEYS},
    ),
    "bailing_moe": Tiny(
        "BailingMoeV2", "bailingmoe2",
        {**_EXPERTS, "moe_intermediate_size": 32, "num_shared_experts": 1, "n_group": 4, "topk_group": 2,
         "routed_scaling_factor": 2.5, "rope_parameters": rope("default", partial_rotary_factor=0.5)},
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
    "flint": Tiny(
        "Flint", "",
        {**_EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
         "mlp_only_layers": [0], "sliding_window": 7, "norm_topk_prob": True,
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
        layers=(_dense(NOPE), *_windows(7, 7), NOPE),
        mixture=MixtureConfig(8, 3, 32, True, by_sigmoid=True, d_shared=48),
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
         "rope_parameters": {"full_attention": _YARN, "sliding_attention": rope("default")}},
        layers=(*_local(7, 10000.0) * 3, FULL), scaling=RopeScaling("yarn", 8.0, ORIGINAL),
        keys={"attention.sliding_window": 7, **_YARN_KEYS},
    ),
}  # fmt: skip


IN_GGUF = [name for name, tiny in TINY.items() if tiny.gguf_arch]
