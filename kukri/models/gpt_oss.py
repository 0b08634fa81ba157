"""gpt-oss (OpenAI 2025): Llama with attention sinks, a window in every other layer, biases, and a mixture.

A sink is a learned score of each head: it takes its share of the softmax and adds nothing, so that a head may
look at nothing. Experts clamp what their activation reads.
"""

from __future__ import annotations

from dataclasses import replace

from kukri.config import ModelConfig
from kukri.kernels.op_set import Ops, Tensor
from kukri.models.architecture import Architecture, ExpertKeys
from kukri.models.layers import Attention, stored_vector
from kukri.models.lenses import Number
from kukri.models.llama import Block, Llama
from kukri.models.mixture import Mixture
from kukri.models.stored import PARAMETER, Stored
from kukri.models.weights import WeightSource


class GptOssAttention(Attention):
    """Attention with a sink for each head."""

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        super().__init__(source, name, config, layer)
        sinks = stored_vector(source, f"{name}.sinks.weight", config.n_heads)
        self.spec = replace(self.spec, sinks=sinks, key_range=None)


class GptOssMixture(Mixture):
    """A mixture with biases and this activation."""

    router_name = "router"
    has_biases = True

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        super().__init__(source, name, config, layer)
        assert config.mixture is not None, "each layer has one"
        self.alpha, self.limit = config.mixture.alpha, config.mixture.limit

    def activate(self, ops: Ops, gate: Tensor, up: Tensor | None) -> Tensor:
        """(up + 1) * gate * sigmoid(alpha gate), clamped."""
        return ops.map("clamped_swiglu", up, gate, self.alpha, self.limit)


GPT_OSS = Architecture(
    "gpt_oss",
    Llama.of(block_type=Block.of(attention_type=GptOssAttention, mlp_type=GptOssMixture)),
    "GptOssForCausalLM",
    hf_quantized="mxfp4",
    gguf="gpt-oss",
    full_interval=2,
    gguf_defaults={"rope.scaling.yarn_truncate": False},
    tensor_names={
        "mlp.router": Stored("ffn_gate_inp", is_small=True),
        "self_attn.sinks": Stored("attn_sinks", PARAMETER),
        "post_attention_layernorm": "post_attention_norm",
    },
    reads={"sliding_window", "layer_types"},
    ignores={
        *("experts_per_token", "initial_context_length", "hidden_act"),
        "quantization_config",  # MXFP4, which the tensors show
    },
    lenses=(
        Number("mixture.alpha", "swiglu_alpha", "", usual=1.702),
        Number("mixture.limit", "swiglu_limit", "", usual=7.0),
    ),
    defaults={
        **{"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "attention_bias": True},
        **{
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        "rope_theta": 150000.0,
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
            "original_max_position_embeddings": 4096,
        },
    },
    biases={"self_attn": "attention_bias", "mlp": True},
    experts=ExpertKeys(
        "num_local_experts", "intermediate_size", True, gguf_normalized=True, is_interleaved=True
    ),
)
