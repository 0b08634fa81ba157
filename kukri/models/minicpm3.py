"""MiniCPM3 (OpenBMB 2024): latent attention, an MLP, and Granite's multipliers under other names."""

from __future__ import annotations

from typing import Any

from kukri.config import ModelConfig
from kukri.errors import UnsupportedError
from kukri.models import latent, minicpm
from kukri.models.architecture import Architecture
from kukri.models.granite import Granite, GraniteBlock
from kukri.models.keys import Keys


class MiniCPM3Block(GraniteBlock):
    """A layer whose attention and MLP add their results multiplied."""

    attention_type = latent.LatentAttention


class MiniCPM3(Granite):
    """The whole model."""

    block_type = MiniCPM3Block


def _read_hf(keys: Keys, facts: dict[str, Any]) -> None:
    latent.read_hf(keys, facts)
    minicpm.read_hf(keys, facts)


def _write_hf(config: ModelConfig, keys: dict[str, Any]) -> None:
    latent.write_hf(config, keys)
    minicpm.write_hf(config, keys)


def _read_gguf(keys: Keys, facts: dict[str, Any]) -> None:
    latent.read_gguf(keys, facts)
    facts |= minicpm.multipliers(facts, minicpm.EMBEDDING, minicpm.DEPTH, minicpm.BASE)


def _write_gguf(config: ModelConfig, keys: dict[str, Any]) -> None:
    """Raises UnsupportedError for numbers that no key says."""
    own = (config.embedding_scale, config.residual_scale * config.n_layers**0.5)
    if any(abs(a - b) > 1e-4 for a, b in zip(own, (minicpm.EMBEDDING, minicpm.DEPTH))):
        raise UnsupportedError("GGUF has no key for multipliers other than MiniCPM3-4B's")
    if round(config.d_model / config.logits_divisor) != minicpm.BASE:
        raise UnsupportedError(f"GGUF has no key for a dim_model_base other than {minicpm.BASE}")
    latent.write_gguf(config, keys)
    d_head, d_value = keys.pop(latent.GGUF_KEY), keys.pop(latent.GGUF_VALUE)
    keys |= {
        "attention.key_length": d_head,
        "attention.value_length": d_value,
        "attention.head_count_kv": config.n_heads,
    }


MINICPM3 = Architecture(
    "minicpm3",
    MiniCPM3,
    "MiniCPM3ForCausalLM",
    keys={"d_head": ("attention.key_length", latent.ROTARY)},
    gguf_reads=latent.GGUF_READS,
    tensor_names={
        module: stored
        for module, stored in latent.TENSOR_NAMES.items()
        if module not in ("self_attn.k_b_proj", "self_attn.v_b_proj")  # files hold them as one
    },
    reads={*latent.HF_READS, *minicpm.KEYS},
    ignores={"head_dim", "qk_head_dim"},
    defaults={
        **{"kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64},
        **{"qk_rope_head_dim": 32, "v_head_dim": 64, "scale_emb": 12, "scale_depth": 1.4},
        **{"dim_model_base": 256, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    },
    biases={
        **{"self_attn.q_proj": False, "self_attn.q_b_proj": False, "self_attn.kv_b_proj": False},
        **{"self_attn": "attention_bias", "mlp": "mlp_bias"},
    },
    read_hf=_read_hf,
    write_hf=_write_hf,
    read_gguf=_read_gguf,
    write_gguf=_write_gguf,
)
