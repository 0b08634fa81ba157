"""Arcee's AFM models (2025): Llama whose MLP has no gate and squares positive values."""

from __future__ import annotations

from kukri.models.architecture import Architecture
from kukri.models.layers import UngatedMLP
from kukri.models.llama import Block, Llama

ARCEE = Architecture(
    "arcee",
    Llama.of(block_type=Block.of(mlp_type=UngatedMLP)),
    "ArceeForCausalLM",
    interleaved_rope=True,
    activation="relu2",
    defaults={"rms_norm_eps": 1e-5},
    biases={"self_attn": "attention_bias", "mlp": "mlp_bias"},
)
