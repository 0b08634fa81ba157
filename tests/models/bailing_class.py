"""Ling 2.0 for transformers, whose class is on the hub alone: GLM-4.5's mixture under other names."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import transformers as tr
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import conversion_mapping
from transformers.models.glm4_moe import modeling_glm4_moe as glm


@strict
class BailingMoeV2Config(tr.PreTrainedConfig):
    """Ling's keys and their defaults, as GLM's layers read them."""

    model_type = "bailing_moe"
    default_theta = 6e5
    attribute_map: ClassVar[dict[str, str]] = {
        "num_local_experts": "num_experts",
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "attention_bias": "use_qkv_bias",
    }
    vocab_size: int = 157184
    hidden_size: int = 2048
    intermediate_size: int = 5120
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int = 128
    hidden_act: str = "silu"
    use_qkv_bias: bool = False
    use_bias: bool = False
    use_qk_norm: bool = True
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    max_position_embeddings: int = 32768
    rope_parameters: dict[str, Any] | None = None
    use_cache: bool = True
    num_experts: int = 256
    num_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    moe_intermediate_size: int = 512
    first_k_dense_replace: int = 1
    norm_topk_prob: bool = True
    num_nextn_predict_layers: int = 0
    moe_router_enable_expert_bias: bool = True
    score_function: str = "sigmoid"
    routed_scaling_factor: float = 1.0

    def __post_init__(self, **more: Any) -> None:
        """Half of a head rotates."""
        super().__post_init__(**{"partial_rotary_factor": 0.5, **more})


class _Attention(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.config, self.layer_idx, d_head = config, layer, config.head_dim
        self.n_q, self.n_kv = config.num_attention_heads, config.num_key_value_heads
        self.num_key_value_groups = self.n_q // self.n_kv
        n_rows = (self.n_q + 2 * self.n_kv) * d_head
        self.query_key_value = nn.Linear(config.hidden_size, n_rows, bias=False)
        self.dense = nn.Linear(self.n_q * d_head, config.hidden_size, bias=False)
        self.query_layernorm = glm.Glm4MoeRMSNorm(d_head, eps=config.rms_norm_eps)
        self.key_layernorm = glm.Glm4MoeRMSNorm(d_head, eps=config.rms_norm_eps)

    def forward(self, hidden_states: Any, position_embeddings: Any, attention_mask: Any, **more: Any) -> Any:
        """All heads of a fused matrix: those of queries, of keys, of values."""
        shape, d_head = hidden_states.shape[:-1], self.config.head_dim
        heads = self.query_key_value(hidden_states).view(*shape, -1, d_head).transpose(1, 2)
        q, k, v = heads.split([self.n_q, self.n_kv, self.n_kv], dim=1)
        q, k = self.query_layernorm(q), self.key_layernorm(k)
        q, k = glm.apply_rotary_pos_emb(q, k, *position_embeddings)
        if (cache := more.get("cache")) is not None:
            k, v = cache.update(k, v, self.layer_idx)
        scale = d_head**-0.5
        z, _ = glm.eager_attention_forward(self, q, k, v, attention_mask, scaling=scale)
        return self.dense(z.reshape(*shape, -1)), None


class _Router(glm.Glm4MoeTopkRouter):
    e_score_correction_bias = property(lambda self: self.expert_bias)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self._buffers["e_score_correction_bias"]
        self.expert_bias = nn.Buffer(torch.zeros(config.num_experts))


class _Layer(glm.Glm4MoeDecoderLayer):
    self_attn = property(lambda self: self.attention)

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        del self._modules["self_attn"]
        self.attention = _Attention(config, layer)
        if layer >= config.first_k_dense_replace:
            self.mlp.gate = _Router(config)


class BailingMoeV2Model(tr.Glm4MoeModel):
    """GLM-4.5 with these layers."""

    config_class = BailingMoeV2Config
    _can_set_experts_implementation_cached_value = True  # as GLM's, whose experts these are
    embed_tokens = property(lambda self: self.word_embeddings)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.word_embeddings = self._modules.pop("embed_tokens")
        self.layers = nn.ModuleList(_Layer(config, i) for i in range(config.num_hidden_layers))
        self.post_init()


class BailingMoeV2ForCausalLM(tr.Glm4MoeForCausalLM):
    """The same with its head."""

    config_class = BailingMoeV2Config
    _can_set_experts_implementation_cached_value = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = BailingMoeV2Model(config)
        self.post_init()


_EXPERTS = conversion_mapping.get_checkpoint_conversion_mapping("glm4_moe")
conversion_mapping.register_checkpoint_conversion_mapping("bailing_moe", _EXPERTS)
tr.AutoConfig.register("bailing_moe", BailingMoeV2Config)
tr.AutoModel.register(BailingMoeV2Config, BailingMoeV2Model)
tr.AutoModelForCausalLM.register(BailingMoeV2Config, BailingMoeV2ForCausalLM)
