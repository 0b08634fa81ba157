"""Gemma 3's text models (Gemma team 2025): Gemma 2 with normed heads, two RoPEs and more windows.

Five of six layers have a window and a RoPE base of their own; the sixth may scale its RoPE. Scores
have no softcap.
"""

from __future__ import annotations

from dataclasses import replace

from kukri.models.gemma2 import GEMMA2, Gemma2, Gemma2Block, QueryScalar
from kukri.models.qwen3 import Qwen3Attention

GEMMA3_TEXT = replace(
    GEMMA2,
    name="gemma3_text",
    model=Gemma2.of(block_type=Gemma2Block.of(attention_type=Qwen3Attention)),
    hf_class="Gemma3ForCausalLM",
    numbers={"logit_softcap"},
    gguf="gemma3",
    gguf_defaults={},
    lenses=(QueryScalar(62),),
    full_interval=6,
    local_rope=True,
    local_theta=1e4,
    reads=GEMMA2.reads | {"sliding_window_pattern", "rope_local_base_freq"},
    ignores=GEMMA2.ignores | {"attn_logit_softcapping", "_sliding_window_pattern"},
    defaults={
        **{**GEMMA2.defaults, "rope_theta": 1e6, "final_logit_softcapping": None},
        # the text of a model of images may leave them out
        **{"vocab_size": 262208, "num_attention_heads": 8, "max_position_embeddings": 131072},
    },
)
