"""SmolLM3 (Hugging Face 2025): Llama with layers that do not rotate, which are configuration."""

from __future__ import annotations

from kukri.models.architecture import Architecture
from kukri.models.llama import Llama

SMOLLM3 = Architecture(
    "smollm3",
    Llama,
    "SmolLM3ForCausalLM",
    interleaved_rope=True,
    nope_interval=4,
    reads={
        *("sliding_window", "use_sliding_window", "layer_types"),
        *("no_rope_layers", "no_rope_layer_interval", "attention_bias", "mlp_bias"),
    },
    ignores={"max_window_layers"},
    defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6},
    biases={"self_attn": "attention_bias", "mlp": "mlp_bias"},
)
