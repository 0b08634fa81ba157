"""Phi-3 and Phi-3.5, Phi-4-mini (Abdin et al. 2024): Llama with fused matrices.

The checkpoint holds q, k and v in one matrix, and gate and up in another. How many of a head's dimensions
rotate, longrope's factors and the window are configuration.
"""

from __future__ import annotations

from kukri.models.architecture import Architecture
from kukri.models.layers import GatedMLP
from kukri.models.llama import Block, Llama

Phi3MLP = GatedMLP.of(in_names=("gate_up_proj",))  # one matrix for both, gate first

PHI3 = Architecture(
    "phi3",
    Llama.of(block_type=Block.of(mlp_type=Phi3MLP)),
    "Phi3ForCausalLM",
    # old versions of llama.cpp would read a file without the key with a window
    gguf_defaults={"attention.sliding_window": 0},
    tensor_names={"mlp.gate_up_proj": "ffn_up"},
    reads={"sliding_window", "original_max_position_embeddings"},
    ignores={"attention_bias"},
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    partial_rotary=True,
)
