"""LFM3 (Liquid AI 2026): LFM2 with wider convolutions, windows, a gate a head, and norms on both sides.

Layers with a window rotate by a base of their own; in the others half of each head rotates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kukri.config import ModelConfig
from kukri.kernels.op_set import Ops, Tensor
from kukri.models.afmoe import AfmoeAttention
from kukri.models.gemma2 import Gemma2Block
from kukri.models.layers import Linear
from kukri.models.lfm2 import LFM2, Lfm2, Lfm2MLP, ShortConv
from kukri.models.weights import WeightSource


class Lfm3Attention(AfmoeAttention):
    """Attention each of whose heads is multiplied by the sigmoid of one number."""

    def gates(self, source: WeightSource, name: str, config: ModelConfig) -> Linear:
        """A row for each head."""
        return Linear(source, [f"{name}.g_proj"], (self.spec.n_heads,), config.d_model)

    def gate_of(self, ops: Ops, x: Tensor) -> Tensor:
        """The heads' numbers, each repeated over its head [T, H * K]."""
        gate = ops.tap("attn.hook_gate", self.layer, self.gate(ops, x))
        return ops.repeat(gate, self.spec.d_head)


_BLOCK = Gemma2Block.of(
    attention_type=Lfm3Attention,
    recurrent_type=ShortConv,
    mlp_type=Lfm2MLP,
    attention_norm_name="operator_norm",
    mlp_norm_name="ffn_norm",
    post_norm_names=("post_operator_norm", "post_ffn_norm"),
    recurrent_name="conv",
    mlp_name="feed_forward",
)


def _respelled(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the layers and the rotations that its class takes where it names none.

    Published files call the rotation of half a head "default", under which transformers 5.24 rotates all of
    it. The weights are trained for "proportional", the class's own name for it.
    """
    kinds = ("conv", "conv", "full_attention", "conv", "sliding_attention", "conv", "full_attention", "conv")
    n_layers = config.get("num_hidden_layers")
    made = [kinds[i if i < 2 else 2 + (i - 2) % 4] for i in range(n_layers if type(n_layers) is int else 0)]
    full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    windowed = {"rope_type": "default", "rope_theta": 1e4}
    ropes = config.get("rope_parameters") or {"full_attention": full, "sliding_attention": windowed}
    own = ropes.get("full_attention") if isinstance(ropes, dict) else None
    if isinstance(own, dict) and own.get("rope_type") == "default" and "partial_rotary_factor" in own:
        ropes = {**ropes, "full_attention": {**own, "rope_type": "proportional"}}
    return {**config, "layer_types": config.get("layer_types") or made, "rope_parameters": ropes}


LFM3 = replace(
    LFM2,
    name="lfm3",
    model=Lfm2.of(block_type=_BLOCK),
    hf_class="Lfm3ForCausalLM",
    gguf="",
    in_gguf=False,  # the gguf package has no names for it yet
    local_rope=True,
    local_theta=1e4,
    joined={"self_attn.gate_proj": ("self_attn.g_proj",)},  # the name in files, and in the class
    respelled=_respelled,
    reads={"sliding_window", "layer_types"},
    ignores=frozenset(),
    aliases={},
    fixed={"use_sandwich_norm": True, "use_attention_gate": True},
    biases={
        "conv": "conv_bias",
        "self_attn": "attention_bias",
        "self_attn.gate_proj": False,
        "self_attn.g_proj": False,
    },
    defaults={
        **{"num_key_value_heads": 4, "head_dim": 128, "norm_eps": 1e-5, "tie_word_embeddings": True},
        **{"conv_L_cache": 7, "conv_bias": False, "attention_bias": False, "sliding_window": 256},
        **{"max_position_embeddings": 128000, "vocab_size": 128000, "num_attention_heads": 16},
    },
    lenses=(),
)
