"""SmallThinker (PowerInfer 2025): a router that reads a layer's input, and experts that gate by ReLU.

So a token's experts are known before its attention is computed. In 21B-A3B layers with a window rotate, and
no others; 4B-A0.6B has no windows, and all layers rotate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kukri.config import ModelConfig
from kukri.errors import ConfigError, brief
from kukri.kernels.op_set import Ops, Tensor
from kukri.models.architecture import Architecture, ExpertKeys
from kukri.models.keys import Keys
from kukri.models.lenses import ROTATING_WINDOWS, Stated, set_rotating
from kukri.models.llama import Block, Llama
from kukri.models.mixture import Mixture


class SmallThinkerBlock(Block):
    """A layer whose experts are chosen before attention."""

    mlp_type = Mixture

    def __call__(self, ops: Ops, x: Tensor, batch: Any) -> Tensor:
        x = ops.tap("hook_resid_pre", self.layer, x)
        logits = self.mlp.router(ops, x)
        normed = ops.tap("ln1.hook_normalized", self.layer, self.attention_norm(ops, x))
        x = ops.tap("hook_resid_mid", self.layer, self.attention(ops, normed, x, batch))
        normed = ops.tap("ln2.hook_normalized", self.layer, self.mlp_norm(ops, x))
        return ops.tap("hook_resid_post", self.layer, self.mlp.chosen(ops, normed, logits, x, "hook_mlp_out"))


_ROPE, _LAYOUT, _SIZE = "rope_layout", "sliding_window_layout", "sliding_window_size"
_TYPES = ("full_attention", "sliding_attention")
_SOFTMAX = "moe_primary_router_apply_softmax"


def _respelled(config: dict[str, Any]) -> dict[str, Any]:
    """config.json with its layers' windows by the usual keys."""
    layout = config.get(_LAYOUT) or []
    if not isinstance(layout, list):
        raise ConfigError(f"key '{_LAYOUT}' must be a list of whole numbers, not {brief(layout)}")
    made = {
        key: value for key, value in config.items() if key not in (_LAYOUT, _SIZE, "sliding_window_pattern")
    }
    size = config.get(_SIZE, 4096) if any(layout) else None
    types = [_TYPES[bool(is_on)] for is_on in layout]
    return {**made, **({"layer_types": types} if types else {}), "sliding_window": size}


def _read_hf(keys: Keys, facts: dict[str, Any]) -> None:
    if keys.value(_ROPE) is not None:
        set_rotating(facts, map(bool, keys.each(_ROPE, facts["n_layers"], least=0, most=1)))
    if keys.value("moe_layer_layout") is not None and 0 in keys.items("moe_layer_layout", int):
        raise keys.unsupported("moe_layer_layout", "must be 1: layers without experts are not supported")


def _write_hf(config: ModelConfig, keys: dict[str, Any]) -> None:
    keys.pop("layer_types")
    size = keys.pop("sliding_window", None)
    keys |= {
        _ROPE: [int(layer.use_rope) for layer in config.layers],
        _LAYOUT: [int(layer.window is not None) for layer in config.layers],
        **({} if size is None else {_SIZE: size}),
        _SOFTMAX: config.architecture == "smallthinker_softmax",
    }


_EXPERTS = ExpertKeys(
    *("moe_num_primary_experts", "moe_ffn_hidden_size", True),
    gguf_normalized=True,
    by_sigmoid=True,
    n_used="moe_num_active_primary_experts",
)

SMALLTHINKER = Architecture(
    "smallthinker",
    Llama.of(block_type=SmallThinkerBlock),
    "SmallThinkerForCausalLM",
    full_interval=4,
    is_full_first=True,
    keys={"d_ffn": ("feed_forward_length", "moe_ffn_hidden_size")},
    joined={
        "block_sparse_moe.primary_router": ("mlp.gate",),
        **{
            f"block_sparse_moe.experts.{part}": (f"mlp.experts.{part}_proj",)
            for part in ("gate", "up", "down")
        },
    },
    respelled=_respelled,
    activation="relu",
    reads={_ROPE, "sliding_window", "layer_types", "moe_layer_layout", _SOFTMAX},
    ignores={
        *(
            "model_name",
            "mlp_bias",
            "intermediate_size",
            "dense_ffn_hidden_size",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "attention_bias",
            "hidden_act",
        ),
        *("norm_topk_prob", "moe_num_secondary_experts", "moe_secondary_expert_size"),
    },
    fixed={
        **{"use_qk_norm": False, "moe_enable_early_router": True, "moe_enable_secondary_experts": False},
        "moe_shared_primary_experts": 0,
    },
    defaults={
        **{
            "head_dim": 128,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
        },
        **{"moe_num_primary_experts": 32, "moe_num_active_primary_experts": 4, "moe_ffn_hidden_size": 768},
    },
    experts=_EXPERTS,
    read_hf=_read_hf,
    write_hf=_write_hf,
    lenses=(
        replace(ROTATING_WINDOWS, needs_window=True, forms=("gguf",)),
        Stated("gguf", "expert_gating_func", 1),  # a softmax, which readers do not suppose
    ),
)

SMALLTHINKER_SOFTMAX = replace(
    SMALLTHINKER,
    name="smallthinker_softmax",
    gguf="smallthinker",
    hf_type="smallthinker",
    hf_mark=(_SOFTMAX, True),
    experts=replace(_EXPERTS, by_sigmoid=False),
)
