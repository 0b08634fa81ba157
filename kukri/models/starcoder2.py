"""StarCoder2 (Lozhkov et al. 2024): Llama with LayerNorm, biases, and an MLP without a gate."""

from __future__ import annotations

from kukri.models.architecture import Architecture
from kukri.models.layers import MLP, LayerNorm
from kukri.models.llama import Block, Llama

STARCODER2 = Architecture(
    "starcoder2",
    Llama.of(block_type=Block.of(norm_type=LayerNorm, mlp_type=MLP.of(in_names=["c_fc"], out_name="c_proj"))),
    "Starcoder2ForCausalLM",
    gguf_epsilon="attention.layer_norm_epsilon",
    tensor_names={"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    hf_epsilon="norm_epsilon",
    activation="gelu_pytorch_tanh",
    reads={"sliding_window"},
    ignores={
        *("residual_dropout", "embedding_dropout", "activation_function", "layer_norm_epsilon"),
        *("norm_type", "mlp_type", "attention_softmax_in_fp32", "scale_attn_weights"),
        "scale_attention_softmax_in_fp32",
    },
    defaults={
        "num_key_value_heads": 2,
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "use_bias": True,
    },
    biases={"self_attn": "use_bias", "mlp": "use_bias"},
)
