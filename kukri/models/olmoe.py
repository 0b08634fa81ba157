"""OLMoE (Muennighoff et al. 2024): Llama with OLMo 2's normed q and k, and a mixture in place of each MLP."""

from __future__ import annotations

from typing import Any

from kukri.config import ModelConfig
from kukri.errors import UnsupportedError
from kukri.models.architecture import Architecture, ExpertKeys
from kukri.models.llama import Block, Llama
from kukri.models.mixture import Mixture
from kukri.models.olmo2 import Olmo2Attention


def _write_gguf(config: ModelConfig, keys: dict[str, Any]) -> None:
    if config.qkv_clip is not None:
        raise UnsupportedError("key 'clip_qkv' of OLMoE is not supported by GGUF")


OLMOE = Architecture(
    "olmoe",
    Llama.of(block_type=Block.of(attention_type=Olmo2Attention, mlp_type=Mixture)),
    "OlmoeForCausalLM",
    numbers={"qkv_clip"},
    defaults={"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
    biases={"self_attn": "attention_bias"},
    experts=ExpertKeys("num_experts", "intermediate_size", "norm_topk_prob", gguf_normalized=False),
    write_gguf=_write_gguf,
)
