"""GPT-NeoX and Pythia (Black et al. 2022; Biderman et al. 2023): attention and MLP side by side, each after a
LayerNorm of its own.
"""

from __future__ import annotations

from typing import Any

from kukri.config import ModelConfig
from kukri.kernels.op_set import Ops, Tensor
from kukri.models.architecture import Architecture
from kukri.models.layers import MLP, LayerNorm
from kukri.models.lenses import Number
from kukri.models.llama import Block, Llama
from kukri.models.phi import PhiAttention, PhiBlock
from kukri.models.weights import WeightSource


class NeoXBlock(PhiBlock):
    """One layer: attention and MLP read the same stream, and both add to it."""

    attention_type, mlp_type = PhiAttention, MLP

    def __init__(self, source: WeightSource, config: ModelConfig, layer: int) -> None:
        super().__init__(source, config, layer)
        name = f"model.layers.{layer}.post_attention_layernorm"
        self.mlp_norm = LayerNorm(source, name, config.d_model, config.norm_eps)

    def __call__(self, ops: Ops, x: Tensor, batch: Any) -> Tensor:
        x = ops.tap("hook_resid_pre", self.layer, x)
        normed = ops.tap("ln1.hook_normalized", self.layer, self.norm(ops, x))
        for_mlp = ops.tap("ln2.hook_normalized", self.layer, self.mlp_norm(ops, x))
        x = self.attention(ops, normed, x, batch)
        return ops.tap("hook_resid_post", self.layer, self.mlp(ops, for_mlp, x))


_PARALLEL = "use_parallel_residual"


def _respelled(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of RoPE as other classes have them; the class does not read those."""
    names = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
    made = {key: value for key, value in config.items() if key not in (*names, *names.values())}
    return made | {usual: config[own] for own, usual in names.items() if own in config}


def _write_hf(config: ModelConfig, keys: dict[str, Any]) -> None:
    keys["rotary_pct"] = keys.pop("partial_rotary_factor")
    keys["rotary_emb_base"] = keys.pop("rope_theta")


_ORDER = Number(  # MLPs read the stream before attention adds to it, or after
    *("is_reordered", _PARALLEL, _PARALLEL),
    kind=bool,
    load=lambda stated, facts: not stated,
    store=lambda ours, config: not ours,
    alike=True,
)


GPT_NEOX = Architecture(
    "gpt_neox",
    Llama.of(
        block_type=NeoXBlock,
        reordered_type=Block.of(norm_type=LayerNorm, attention_type=PhiAttention, mlp_type=MLP),
        embedding_name="model.embed_in",
        norm_name="model.final_layer_norm",
        head_name="embed_out",
    ),
    "GPTNeoXForCausalLM",
    embedding="model.embed_in",
    gguf="gptneox",
    gguf_epsilon="attention.layer_norm_epsilon",
    hf_prefix="gpt_neox.",
    hf_interleaved_rope=True,  # rows of a head's query, key and value, head by head
    tensor_names={
        "model.embed_in": "token_embd",
        "model.final_layer_norm": "output_norm",
        "embed_out": "output",
        "self_attn.dense": "attn_output",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
    },
    joined={
        "attention.query_key_value": ("self_attn.qkv_proj",),
        "attention.dense": ("self_attn.dense",),
        "mlp.dense_h_to_4h": ("mlp.fc1",),
        "mlp.dense_4h_to_h": ("mlp.fc2",),
    },
    hf_epsilon="layer_norm_eps",
    activation="gelu",
    partial_rotary=True,
    respelled=_respelled,
    # the class has as many heads of keys, and as wide ones, whatever else a file says
    keys={
        "n_kv_heads": ("attention.head_count_kv", "num_attention_heads"),
        "d_head": ("attention.key_length", ""),
    },
    ignores={"head_dim", "num_key_value_heads"},
    defaults={
        **{"partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5},
        **{"attention_bias": True, _PARALLEL: True},
    },
    gguf_defaults={_PARALLEL: True},
    biases={"self_attn": "attention_bias", "attention": "attention_bias", "mlp": True},
    write_hf=_write_hf,
    lenses=(_ORDER,),
)
