"""EXAONE 4 (LG AI Research 2025): OLMo 2's blocks with heads normed as in Qwen3.

The larger model has windows in three of four layers; there the fourth does not rotate.
"""

from __future__ import annotations

from dataclasses import replace

from kukri.models.architecture import Architecture
from kukri.models.lenses import ROTATING_WINDOWS, Stated
from kukri.models.llama import Llama
from kukri.models.olmo2 import Olmo2Block
from kukri.models.qwen3 import Qwen3Attention

EXAONE4 = Architecture(
    "exaone4",
    Llama.of(block_type=Olmo2Block.of(attention_type=Qwen3Attention)),
    "Exaone4ForCausalLM",
    full_interval=4,
    tensor_names={
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    reads={"sliding_window", "sliding_window_pattern", "layer_types"},
    defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096},
    # a missing size would mean a window
    lenses=(replace(ROTATING_WINDOWS, needs_window=True), Stated("hf", "sliding_window", None)),
)
