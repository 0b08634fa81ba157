"""Nomic BERT (Nussbaum et al. 2024), of nomic-embed-text: BERT with RoPE, SwiGLU and no biases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kukri.models.bert import BERT, Bert, BertBlock
from kukri.models.layers import Attention, GatedMLP


class NomicBertBlock(BertBlock):
    """One layer: BERT's order, with this attention and MLP."""

    list_name = "model.encoder.layers"
    attention_type: Any = Attention.of(fused_name="Wqkv", out_name="out_proj")
    attention_norm_name, mlp_norm_name = "norm1", "norm2"
    mlp_type: Any = GatedMLP.of(in_names=("fc12", "fc11"), out_name="fc2")
    attention_name, mlp_name = "attn", "mlp"


NOMIC_BERT = replace(
    BERT,
    name="nomic_bert",
    model=Bert.of(block_type=NomicBertBlock, norm_name="model.emb_ln"),
    hf_class="NomicBertModel",
    gguf="nomic-bert",
    has_rope=True,
    layers="model.encoder.layers",
    tensor_names={
        "model.embeddings.word_embeddings": "token_embd",
        "model.embeddings.token_type_embeddings": "token_types",
        "model.emb_ln": "token_embd_norm",
        "model.pooler.dense": "cls",
        "classifier": "cls.output",
        "attn.Wqkv": "attn_qkv",
        "attn.out_proj": "attn_output",
        "norm1": "attn_output_norm",
        "mlp.fc11": "ffn_up",
        "mlp.fc12": "ffn_gate",
        "mlp.fc2": "ffn_down",
        "norm2": "layer_output_norm",
    },
    activation="silu",
    ignores=BERT.ignores | {"classifier_dropout"},
    defaults={**BERT.defaults, "hidden_act": "silu", "rope_theta": 1000.0},
    fixed={},
    biases={},
)
