"""EmbeddingGemma (Gemma team 2025): Gemma 3 as an encoder, with windows on both sides of a token."""

from __future__ import annotations

from dataclasses import replace

from kukri.models.gemma3_text import GEMMA3_TEXT

GEMMA_EMBEDDING = replace(
    GEMMA3_TEXT,
    name="gemma_embedding",
    hf_type="gemma3_text",
    hf_mark=("use_bidirectional_attention", True),
    hf_class="Gemma3TextModel",
    gguf="gemma-embedding",
    is_causal=False,
    n_dense=2,
    fixed={"use_bidirectional_attention": True},
)
