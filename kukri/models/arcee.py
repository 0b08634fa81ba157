"""Arcee's AFM models (2025): Llama whose MLP has no gate and squares positive values."""

from __future__ import annotations

from kukri.models.architecture import Architecture
from kukri.models.layers import SquaredReluMLP
from kukri.models.llama import Block, Llama


class ArceeBlock(Block):
    """A layer with this MLP."""

    mlp_type = SquaredReluMLP


class Arcee(Llama):
    """The whole model."""

    block_type = ArceeBlock


ARCEE = Architecture(
    "arcee",
    Arcee,
    "ArceeForCausalLM",
    interleaved_rope=True,
    activation="relu2",
    defaults={"rms_norm_eps": 1e-5},
    biases={"self_attn": "attention_bias", "mlp": "mlp_bias"},
)
