"""StableLM 3B and 2 1.6B (Stability AI 2023): Llama with LayerNorm, partial rotation, and biases."""

from __future__ import annotations

from typing import Any

from kukri.models.architecture import Architecture
from kukri.models.keys import Keys
from kukri.models.layers import GatedMLP, LayerNorm, PlainLayerNorm
from kukri.models.lenses import Number
from kukri.models.llama import Block, Llama
from kukri.models.phi import PhiAttention, PhiBlock

_ATTENTION = PhiAttention.of(out_name="o_proj", head_norm_type=PlainLayerNorm, has_norm_per_head=True)
_PARALLEL = "use_parallel_residual"


def _read_gguf(keys: Keys, facts: dict[str, Any]) -> None:
    """Readers go by the norm of the MLP, which is missing if it reads the same as attention."""
    facts["is_reordered"] = "blk.0.ffn_norm.weight" not in keys.tensors


STABLELM = Architecture(
    "stablelm",
    Llama.of(
        block_type=Block.of(norm_type=LayerNorm, attention_type=_ATTENTION),
        reordered_type=PhiBlock.of(attention_type=_ATTENTION, mlp_type=GatedMLP),
    ),
    "StableLmForCausalLM",
    gguf_epsilon="attention.layer_norm_epsilon",
    gguf_reads={_PARALLEL},
    partial_rotary=True,
    hf_epsilon="layer_norm_eps",
    reads={"qk_layernorm"},
    lenses=(Number("is_reordered", _PARALLEL, kind=bool),),
    read_gguf=_read_gguf,
    defaults={"num_key_value_heads": 32, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
    biases={f"self_attn.{part}_proj": "use_qkv_bias" for part in "qkv"},
)
