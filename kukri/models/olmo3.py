"""OLMo 3 (Ai2 2025): OLMo 2 with a window in three of four layers; scaled RoPE is only for the fourth.

Its GGUF files say olmo2.
"""

from __future__ import annotations

from dataclasses import replace

from kukri.models.olmo2 import OLMO2

OLMO3 = replace(
    OLMO2,
    name="olmo3",
    hf_class="Olmo3ForCausalLM",
    gguf="olmo2",
    reads=OLMO2.reads | {"sliding_window", "layer_types"},
    defaults={**OLMO2.defaults, "rope_theta": 5e5, "sliding_window": 4096},
)
