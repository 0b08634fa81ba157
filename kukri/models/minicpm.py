"""MiniCPM 1, 2 and 4 (OpenBMB 2024): Granite, its multipliers under other names and made of other numbers."""

from __future__ import annotations

from typing import Any

from kukri.config import ModelConfig
from kukri.models.architecture import Architecture
from kukri.models.granite import Granite
from kukri.models.keys import Keys

KEYS = {"scale_emb", "scale_depth", "dim_model_base"}
EMBEDDING, DEPTH, BASE = 12.0, 1.4, 256  # what GGUF files mean that do not say it
_GGUF = {
    "embedding_scale": "embedding_scale",
    "residual_scale": "residual_scale",
    "logits_divisor": "logit_scale",
}


def multipliers(facts: dict[str, Any], embedding: float, depth: float, base: float) -> dict[str, float]:
    """Granite's multipliers of a model of these sizes."""
    return {
        "embedding_scale": embedding,
        "residual_scale": depth / facts["n_layers"] ** 0.5,
        "logits_divisor": facts["d_model"] / base,
    }


def read_hf(keys: Keys, facts: dict[str, Any]) -> None:
    """See Architecture.read_hf."""
    embedding, depth = (keys.positive(key, most=1e4) for key in ("scale_emb", "scale_depth"))
    facts |= multipliers(facts, embedding, depth, keys.whole("dim_model_base"))


def write_hf(config: ModelConfig, keys: dict[str, Any]) -> None:
    """See Architecture.write_hf."""
    keys |= {
        "scale_emb": config.embedding_scale,
        "scale_depth": config.residual_scale * config.n_layers**0.5,
        "dim_model_base": round(config.d_model / config.logits_divisor),
    }


def _read_gguf(keys: Keys, facts: dict[str, Any]) -> None:
    usual = multipliers(facts, EMBEDDING, DEPTH, BASE)
    facts |= {field: keys.positive(key, usual[field], most=1e4) for field, key in _GGUF.items()}


def _write_gguf(config: ModelConfig, keys: dict[str, Any]) -> None:
    keys |= {key: float(getattr(config, field)) for field, key in _GGUF.items()}


MINICPM = Architecture(
    "minicpm",
    Granite,
    "MiniCPMForCausalLM",
    interleaved_rope=True,
    gguf_reads=frozenset(_GGUF.values()),
    reads=KEYS,
    ignores={"mlp_bias", "mup_denominator"},
    fixed={"num_experts": 0, "sparse_config": None},
    defaults={
        **{"scale_emb": 1, "scale_depth": 1, "dim_model_base": 1},
        "tie_word_embeddings": True,
    },
    biases={"self_attn": "attention_bias"},
    read_hf=read_hf,
    write_hf=write_hf,
    read_gguf=_read_gguf,
    write_gguf=_write_gguf,
)
