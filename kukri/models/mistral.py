"""Mistral 7B (Jiang et al. 2023): Llama with a window. Its GGUF files say llama."""

from __future__ import annotations

from kukri.models.architecture import Architecture
from kukri.models.llama import Llama

MISTRAL = Architecture(
    "mistral",
    Llama,
    "MistralForCausalLM",
    gguf="llama",
    interleaved_rope=True,
    reads={"sliding_window"},
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)
