"""MiniCPM 1, 2 and 4 (OpenBMB 2024): Granite, its multipliers under other names and made of other numbers."""

from __future__ import annotations

from kukri.models.architecture import Architecture
from kukri.models.granite import Granite
from kukri.models.lenses import Number

EMBEDDING, DEPTH, BASE = 12.0, 1.4, 256  # the values in GGUF files without these keys


# Granite's multipliers, and what GGUF files mean that do not say them
MULTIPLIERS = (
    Number("embedding_scale", "scale_emb", "embedding_scale", usual=12.0),
    Number(
        *("residual_scale", "scale_depth", "residual_scale"),
        usual=1.4,
        load=lambda depth, facts: depth / facts["n_layers"] ** 0.5,
        store=lambda scale, config: scale * config.n_layers**0.5,
    ),
    Number(
        *("logits_divisor", "dim_model_base", "logit_scale"),
        usual=256,
        kind=int,
        load=lambda base, facts: facts["d_model"] / base,
        store=lambda divisor, config: round(config.d_model / divisor),
    ),
)

MINICPM = Architecture(
    "minicpm",
    Granite,
    "MiniCPMForCausalLM",
    interleaved_rope=True,
    ignores={"mlp_bias", "mup_denominator"},
    fixed={"num_experts": 0, "sparse_config": None},
    defaults={
        **{"scale_emb": 1, "scale_depth": 1, "dim_model_base": 1},
        "tie_word_embeddings": True,
    },
    biases={"self_attn": "attention_bias"},
    lenses=MULTIPLIERS,
)
