"""ERNIE 4.5, dense (Baidu 2025): Llama whose safetensors have rows of q and k in pairs, as GGUF files do."""

from __future__ import annotations

from kukri.models.architecture import Architecture
from kukri.models.llama import Llama

ERNIE4_5 = Architecture(
    "ernie4_5",
    Llama,
    "Ernie4_5ForCausalLM",
    interleaved_rope=True,
    hf_interleaved_rope=True,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
    },
    biases={"self_attn": "use_bias", "mlp": "use_bias"},
)
