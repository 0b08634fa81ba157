"""StarCoder2 (Lozhkov et al. 2024): Llama with LayerNorm, biases, and an MLP without a gate."""

from __future__ import annotations

from kukri.models.layers import MLP, LayerNorm
from kukri.models.llama import Block, Llama


class Starcoder2MLP(MLP):
    """The MLP under the names that GPT-2 gave its matrices."""

    up_name = "c_fc"
    down_name = "c_proj"


class Starcoder2Block(Block):
    """A layer with this norm and this MLP."""

    norm_type = LayerNorm
    mlp_type = Starcoder2MLP


class Starcoder2(Llama):
    """The whole model."""

    block_type = Starcoder2Block
    norm_type = LayerNorm
