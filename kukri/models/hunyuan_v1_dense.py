"""Hunyuan's dense models (Tencent 2025): Llama whose query and key heads are normed after their rotation.

Its files stretch RoPE's base by an `alpha`, whatever the length of a text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kukri.kernels.op_set import Ops, Tensor
from kukri.models.architecture import Architecture
from kukri.models.keys import Keys
from kukri.models.llama import Block, Llama
from kukri.models.qwen3 import Qwen3Attention


class HunyuanAttention(Qwen3Attention):
    """Attention with norms of heads that are rotated already."""

    q_norm_name, k_norm_name = "query_layernorm", "key_layernorm"

    def rotate(self, ops: Ops, q: Tensor, k: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """q and k, rotated and then normed."""
        if self.rope is not None:
            q, k = ops.rope(q, k, self.rope, self.spec, batch)
        return self.normalize(ops, q, k)


def _read_alpha(keys: Keys, facts: dict[str, Any]) -> None:
    """Folds alpha into theta; the scaling is called dynamic, and its factor counts for nothing then."""
    stated = keys.value("rope_parameters") or keys.value("rope_scaling") or {}
    if stated.get("alpha") and stated.get("rope_type", stated.get("type")) == "dynamic":
        alpha, rope = keys.as_positive("rope_scaling.alpha", stated["alpha"]), facts["rope"]
        theta = rope.theta * alpha ** (rope.rotary_dim / (rope.rotary_dim - 2))
        facts |= {
            "rope": replace(rope, theta=theta, scaling=None),
            "max_context": keys.whole("max_position_embeddings"),
        }


HUNYUAN_V1_DENSE = Architecture(
    "hunyuan_v1_dense",
    Llama.of(block_type=Block.of(attention_type=HunyuanAttention)),
    "HunYuanDenseV1ForCausalLM",
    gguf="hunyuan-dense",
    tensor_names={"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"},
    ignores={
        *("eod_token_id", "alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        *("attention_head_dim", "im_end_id", "im_newline_id", "im_start_id", "mask_init_id", "norm_type"),
        *("org_vocab_size", "sep_token_id", "text_start_id", "text_end_id", "use_rotary_pos_emb"),
        *("add_classification_head", "class_num", "pool_type", "cla_share_factor"),
    },
    fixed={"use_cla": False, "use_qk_norm": True},
    defaults={"rms_norm_eps": 1e-5},
    biases={"self_attn": "attention_bias"},
    read_hf=_read_alpha,
)
