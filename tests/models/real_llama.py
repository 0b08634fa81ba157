"""The real SmolLM2 in transformers, read and dequantized by the `gguf` package and not by kukri."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests.lazy_imports import lazy_imports

with lazy_imports():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}


def _hf_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.weight"
    return f"{_NAMES[parts[0]]}.weight"


def load(path: Path) -> LlamaForCausalLM:
    """float32, eager attention."""
    reader = gguf.GGUFReader(path)
    value = lambda key: reader.fields[f"llama.{key}"].contents()  # noqa: E731
    n_heads = {"attn_q": value("attention.head_count"), "attn_k": value("attention.head_count_kv")}
    state = {}
    for tensor in reader.tensors:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in n_heads:  # llama.cpp keeps the rows of q and k in pairs
            array = array.reshape(n_heads[kind], -1, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        state[_hf_name(tensor.name)] = torch.from_numpy(np.array(array, np.float32))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    config = LlamaConfig(
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        num_hidden_layers=value("block_count"),
        vocab_size=len(state["model.embed_tokens.weight"]),
        tie_word_embeddings=True,
        max_position_embeddings=value("context_length"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    missing = model.load_state_dict(state, strict=True, assign=True)
    assert not missing.missing_keys
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are no part of the state
    model.tie_weights()
    return model.eval()
