"""StableLM 3B and 2 1.6B (Stability AI 2023): Llama with LayerNorm, partial rotation, and biases."""

from __future__ import annotations

from typing import Any

from kukri.config import ModelConfig
from kukri.models.architecture import Architecture
from kukri.models.keys import Keys
from kukri.models.layers import Attention, GatedMLP, HeadLayerNorms, LayerNorm, PlainLayerNorm
from kukri.models.llama import Block, Llama
from kukri.models.phi import PhiBlock
from kukri.models.weights import WeightSource


class StableLmAttention(Attention):
    """Attention with a norm for each head, if the checkpoint has them."""

    def norms(self, source: WeightSource, name: str, config: ModelConfig) -> tuple[Any, Any]:
        """LayerNorms of query heads and of key heads."""

        def norm(part: str, n_heads: int) -> Any:
            names = [f"{name}.{part}_layernorm.norms.{head}" for head in range(n_heads)]
            if not source.has(f"{names[0]}.weight"):
                return None
            return HeadLayerNorms(
                [PlainLayerNorm(source, own, self.spec.d_head, config.norm_eps) for own in names]
            )

        return norm("q", self.spec.n_heads), norm("k", self.spec.n_kv_heads)


_PARALLEL = "use_parallel_residual"


def _read_hf(keys: Keys, facts: dict[str, Any]) -> None:
    facts["is_reordered"] = keys.flag(_PARALLEL)


def _write_hf(config: ModelConfig, keys: dict[str, Any]) -> None:
    keys[_PARALLEL] = config.is_reordered


def _read_gguf(keys: Keys, facts: dict[str, Any]) -> None:
    """Readers go by the norm of the MLP, which is missing if it reads the same as attention."""
    facts["is_reordered"] = "blk.0.ffn_norm.weight" not in keys.tensors


STABLELM = Architecture(
    "stablelm",
    Llama.of(
        block_type=Block.of(norm_type=LayerNorm, attention_type=StableLmAttention),
        reordered_type=PhiBlock.of(attention_type=StableLmAttention, mlp_type=GatedMLP),
    ),
    "StableLmForCausalLM",
    gguf_epsilon="attention.layer_norm_epsilon",
    gguf_reads={_PARALLEL},
    partial_rotary=True,
    hf_epsilon="layer_norm_eps",
    reads={"qk_layernorm", _PARALLEL},
    read_hf=_read_hf,
    write_hf=_write_hf,
    read_gguf=_read_gguf,
    defaults={"num_key_value_heads": 32, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
    biases={f"self_attn.{part}_proj": "use_qkv_bias" for part in "qkv"},
)
