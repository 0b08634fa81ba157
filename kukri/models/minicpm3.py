"""MiniCPM3 (OpenBMB 2024): latent attention, an MLP, and Granite's multipliers under other names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kukri.config import ModelConfig
from kukri.models import latent, minicpm
from kukri.models.architecture import Architecture
from kukri.models.granite import Granite, GraniteBlock
from kukri.models.lenses import Format


class _Latent(latent.Latent):
    """The latent of GGUF files whose heads are the checkpoint's, not those that attend."""

    def write(self, config: ModelConfig, form: Format, keys: dict[str, Any]) -> None:
        super().write(config, form, keys)
        if form == "gguf":
            keys |= {
                "attention.key_length": keys.pop(latent.GGUF_KEY),
                "attention.value_length": keys.pop(latent.GGUF_VALUE),
                "attention.head_count_kv": config.n_heads,
            }


MINICPM3 = Architecture(
    "minicpm3",
    Granite.of(block_type=GraniteBlock.of(attention_type=latent.LatentAttention)),
    "MiniCPM3ForCausalLM",
    keys={"d_head": ("attention.key_length", latent.ROTARY)},
    tensor_names={
        module: stored
        for module, stored in latent.TENSOR_NAMES.items()
        if module not in ("self_attn.k_b_proj", "self_attn.v_b_proj")  # files hold them as one
    },
    ignores={"head_dim", "qk_head_dim"},
    defaults={
        **{"kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64},
        **{"qk_rope_head_dim": 32, "v_head_dim": 64, "scale_emb": 12, "scale_depth": 1.4},
        **{"dim_model_base": 256, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    },
    biases=latent.BIASES,
    lenses=(_Latent(), *(replace(number, gguf="") for number in minicpm.MULTIPLIERS)),
)
