"""Nemotron-H and Nemotron 3 (NVIDIA 2025): layers of one part each, Mamba-2, attention, or an MLP or mixture.

MLPs and experts have no gate: down(max(up(x), 0)^2). Nothing rotates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np

from kukri.config import ModelConfig
from kukri.errors import brief
from kukri.kernels.cache import KVLayer, StateLayer
from kukri.kernels.op_set import Ops, Tensor
from kukri.models.architecture import Architecture, RecurrentKeys
from kukri.models.deepseek_v3 import EXPERTS
from kukri.models.granitemoehybrid import MAMBA_NAMES, Mamba2, Steps
from kukri.models.keys import Keys
from kukri.models.layers import Attention, Composite, RMSNorm, UngatedMLP
from kukri.models.lenses import Format, Lens, Rotating, Stated
from kukri.models.llama import Llama
from kukri.models.mixture import Mixture
from kukri.models.recurrent import STATE_KEYS
from kukri.models.weights import WeightSource


class SharedUngatedMLP(UngatedMLP):
    """An MLP that each token passes in addition to its experts."""

    post_tap, out_tap = "mlp.hook_shared_post", "mlp.hook_shared_out"

    def width(self, config: ModelConfig, layer: int) -> int:
        """The mixture's."""
        assert config.mixture is not None, "it stands next to one"
        return config.mixture.d_shared


_UNGATED = Mixture.of(in_names=("up_proj",), shared_type=SharedUngatedMLP)


class NemotronBlock(Composite):
    """A layer: one part after its norm, added to the stream."""

    mlp_type: Any = UngatedMLP
    recurrent_type: Any = Mamba2

    def __init__(self, source: WeightSource, config: ModelConfig, layer: int) -> None:
        name, this = f"model.layers.{layer}", config.layers[layer]
        self.layer, self.is_mlp = layer, this.is_mlp
        self.norm = RMSNorm(source, f"{name}.input_layernorm", config.d_model, config.norm_eps)
        self.cache_layer: KVLayer | StateLayer = KVLayer(0, config.d_head)  # an MLP keeps nothing
        self.part: Any
        if this.is_mlp:
            self.part = self.mlp_type(source, f"{name}.mlp", config, layer)
            return
        own, where = (self.recurrent_type, "mamba") if this.is_recurrent else (Attention, "self_attn")
        self.part = own(source, f"{name}.{where}", config, layer)
        self.cache_layer = self.part.cache_layer

    def __call__(self, ops: Ops, x: Tensor, batch: Any) -> Tensor:
        """x [T, D] -> [T, D]."""
        x = ops.tap("hook_resid_pre", self.layer, x)
        tap = "ln2.hook_normalized" if self.is_mlp else "ln1.hook_normalized"
        normed = ops.tap(tap, self.layer, self.norm(ops, x))
        x = self.part(ops, normed, x) if self.is_mlp else self.part(ops, normed, x, batch)
        return ops.tap("hook_resid_post", self.layer, x)


class NemotronH(Llama):
    """The whole model."""

    block_type = NemotronBlock
    embedding_name, norm_name = "model.embeddings", "model.norm_f"

    @property
    def cache_layout(self) -> tuple[KVLayer | StateLayer, ...]:
        return tuple(block.cache_layer for block in self.blocks)


_TYPES, _PATTERN, _MAMBA, _ATTENTION = (
    "layers_block_type", "hybrid_override_pattern", "linear_attention", "full_attention",
)  # fmt: skip
_LETTERS = {"M": _MAMBA, "*": _ATTENTION, "-": "mlp", "E": "moe"}
_OLDER = {"mamba": _MAMBA, "attention": _ATTENTION}
_KV, _FFN = "attention.head_count_kv", "feed_forward_length"


def _types(config: Mapping[str, Any]) -> list[Any] | None:
    """The parts that layers are, in any of the spellings; None if no key says."""
    stated = config.get(_TYPES) or config.get("layer_types")
    if stated is None and isinstance(config.get(_PATTERN), str):
        stated = [_LETTERS.get(letter, letter) for letter in config[_PATTERN]]
    return [_OLDER.get(str(kind), kind) for kind in stated] if isinstance(stated, list) else None


def _respelled(config: dict[str, Any]) -> dict[str, Any]:
    types = _types(config)
    made = {key: value for key, value in config.items() if key not in (_PATTERN, "layer_types")}
    return made if types is None else {**made, _TYPES: types, "num_hidden_layers": len(types)}


def _has_mixture(config: Mapping[str, Any]) -> bool:
    return "moe" in (_types(config) or ())


NO_ROTATION = Rotating(lambda layer: False)


class _Parts(Lens):
    """What each layer is, in GGUF by its numbers of key heads and of an MLP's width, of which one is 0."""

    def read(self, keys: Keys, form: Format, facts: dict[str, Any]) -> None:
        n = facts["n_layers"]
        if form == "hf":
            types, mlp = keys.first(_TYPES, str, n), "mlp" if facts["mixture"] is None else "moe"
            if unknown := set(types) - {_MAMBA, _ATTENTION, mlp}:
                message = f"names {brief(min(unknown))} next to {mlp}: several kinds of MLP are not supported"
                raise keys.unsupported(_TYPES, message)
            attends, mlps = ([kind == one for kind in types] for one in (_ATTENTION, mlp))
        else:
            attends, mlps = ([number > 0 for number in keys.each(key, n, least=0)] for key in (_KV, _FFN))
            if both := [i for i in range(n) if attends[i] and mlps[i]]:
                raise keys.error(_FFN, f"must be 0 in layer {both[0]}, which attends")
        facts["layers"] = tuple(
            replace(layer, is_recurrent=not (attends[i] or mlps[i]), is_mlp=mlps[i])
            for i, layer in enumerate(facts["layers"])
        )

    def write(self, config: ModelConfig, form: Format, keys: dict[str, Any]) -> None:
        mlp = "mlp" if config.mixture is None else "moe"
        types = [
            _MAMBA if layer.is_recurrent else mlp if layer.is_mlp else _ATTENTION for layer in config.layers
        ]
        if form == "hf":
            keys.pop("layer_types")
            keys[_TYPES] = types
            return
        width = config.d_ffn if config.mixture is None else config.mixture.d_ffn
        keys[_KV] = np.array([config.n_kv_heads * (kind == _ATTENTION) for kind in types], np.int32)
        keys[_FFN] = np.array([width * (kind == mlp) for kind in types], np.int32)
        keys["attention.layer_norm_rms_epsilon"] = config.norm_eps  # readers want both


def _joined(*modules: str) -> dict[str, tuple[str, ...]]:
    """Modules of a layer's only part, which safetensors have under one name whatever it is."""
    return {f"mixer.{module.partition('.')[2]}": (module,) for module in modules}


_MAMBA_MODULES = ("in_proj", "conv1d", "A_log", "D", "dt_proj", "norm", "out_proj")
_PARTS = {
    "norm": ("input_layernorm",),
    **_joined(*(f"mamba.{module}" for module in _MAMBA_MODULES)),
    **_joined(*(f"self_attn.{x}_proj" for x in "qkvo")),
}
_BIASES = {"use_conv_bias": ("conv1d",), "use_bias": ("in_proj", "out_proj")}

_MIXTURE = {
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group"),
    *("moe_shared_expert_intermediate_size", "routed_scaling_factor", "norm_topk_prob"),
    "moe_latent_size",
}

NEMOTRON_H = Architecture(
    "nemotron_h",
    NemotronH,
    "NemotronHForCausalLM",
    embedding="model.embeddings",
    gguf_epsilon="attention.layer_norm_epsilon",
    unused=r"mtp\..+",
    tensor_names={
        **MAMBA_NAMES,
        "model.embeddings": "token_embd",
        "model.norm_f": "output_norm",
        "mlp.fc1_latent_proj": "ffn_latent_down",
        "mlp.fc2_latent_proj": "ffn_latent_up",
    },
    joined={**_PARTS, **_joined("mlp.up_proj", "mlp.down_proj")},
    hf_epsilon="layer_norm_epsilon",
    hf_activation="mlp_hidden_act",
    activation="relu2",
    respelled=_respelled,
    reads={_TYPES, "attention_bias"},
    ignores={
        *("chunk_size", "expand", "num_logits_to_keep", "use_mamba_kernels", "mamba_ssm_cache_dtype"),
        *("time_step_max", "time_step_limit", "time_step_floor", "residual_in_fp32", "mamba_proj_bias"),
        *("rescale_prenorm_residual", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
        *("num_nextn_predict_layers", "moe_shared_expert_overlap", "output_router_logits"),
        *("n_shared_experts", *_MIXTURE),
    },
    defaults={
        **{"num_key_value_heads": 8, "head_dim": 128, "layer_norm_epsilon": 1e-5, "n_groups": 8},
        **{"ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "conv_kernel": 4},
        "use_conv_bias": True,
    },
    biases={
        **{f"{part}.{module}": key for key, found in _BIASES.items() for module in found
           for part in ("mixer", "mamba")},
        **{f"{part}.{module}_proj": "mlp_bias" for module in ("up", "down", "fc1_latent", "fc2_latent")
           for part in ("mixer", "mlp")},
    },
    recurrent=RecurrentKeys(
        (_MAMBA,),
        STATE_KEYS,
        {
            **{"n_taps": "conv_kernel", "n_heads": "mamba_num_heads", "n_groups": "n_groups"},
            **{"d_state": "ssm_state_size", "d_head": "mamba_head_dim"},
        },
        activation="mamba_hidden_act",
    ),
    lenses=(NO_ROTATION, _Parts(), Steps("time_step_min", (0.001, inf))),
)  # fmt: skip

NEMOTRON_H_MOE = replace(
    NEMOTRON_H,
    name="nemotron_h_moe",
    model=NemotronH.of(block_type=NemotronBlock.of(mlp_type=_UNGATED)),
    hf_type="nemotron_h",
    hf_when=_has_mixture,
    gguf="nemotron_h_moe",
    lenses=(*NEMOTRON_H.lenses, Stated("gguf", "expert_shared_count", 1)),
    gguf_reads={"expert_shared_count"},
    joined={
        **_PARTS,
        **_joined("mlp.gate", "mlp.gate.e_score_correction", "mlp.experts.up_proj", "mlp.experts.down_proj"),
        **_joined("mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
        **_joined("mlp.fc1_latent_proj", "mlp.fc2_latent_proj"),
    },
    ignores=NEMOTRON_H.ignores - _MIXTURE,
    defaults={
        **NEMOTRON_H.defaults,
        **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688, "n_group": 1},
        **{"moe_shared_expert_intermediate_size": 7688, "routed_scaling_factor": 1.0, "topk_group": 1},
        "norm_topk_prob": True,
    },
    experts=replace(
        EXPERTS,
        n_shared="",
        n_dense="",
        d_shared="moe_shared_expert_intermediate_size",
        d_latent="moe_latent_size",
    ),
)
