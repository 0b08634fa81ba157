"""Qwen3 as a mixture of experts (Yang et al. 2025): Qwen3 with a mixture in place of each MLP."""

from __future__ import annotations

from kukri.models.architecture import Architecture, ExpertKeys
from kukri.models.llama import Block, Llama
from kukri.models.mixture import Mixture
from kukri.models.qwen3 import QWEN3, Qwen3Attention

QWEN3_MOE = Architecture(
    "qwen3_moe",
    Llama.of(block_type=Block.of(attention_type=Qwen3Attention, mlp_type=Mixture)),
    "Qwen3MoeForCausalLM",
    gguf="qwen3moe",
    gguf_seeing="qwen3vlmoe",
    gguf_reads=QWEN3.gguf_reads,
    reads=QWEN3.reads - {"max_window_layers", "layer_types"},
    ignores={"max_window_layers"},
    defaults={"num_key_value_heads": 4, "sliding_window": 4096, "num_experts": 128, "num_experts_per_tok": 8}
    | {"moe_intermediate_size": 768, "mrope_interleaved": True},
    biases=QWEN3.biases,
    experts=ExpertKeys(
        *("num_experts", "moe_intermediate_size", "norm_topk_prob"),
        gguf_normalized=True,
        interval="decoder_sparse_step",
        dense="mlp_only_layers",
    ),
)
