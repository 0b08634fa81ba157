"""Nomic BERT (Nussbaum et al. 2024), of nomic-embed-text: BERT with RoPE, SwiGLU and no biases."""

from __future__ import annotations

from dataclasses import replace

from kukri.config import ModelConfig
from kukri.models.bert import BERT, Bert, BertBlock
from kukri.models.heads import encoder_head
from kukri.models.layers import Attention, Embedding, GatedMLP, LayerNorm, NoNorm, NormedEmbedding
from kukri.models.weights import WeightSource


class NomicBertAttention(Attention):
    """Attention under the names of its files."""

    fused_name = "Wqkv"
    out_name = "out_proj"


class NomicBertMLP(GatedMLP):
    """The gated MLP under the names of its files."""

    in_names = ("fc12", "fc11")
    out_name = "fc2"


class NomicBertBlock(BertBlock):
    """One layer: BERT's order, with this attention and MLP."""

    def __init__(self, source: WeightSource, config: ModelConfig, layer: int) -> None:
        name, d_model, eps = f"model.encoder.layers.{layer}", config.d_model, config.norm_eps
        self.layer = layer
        self.attention = NomicBertAttention(source, f"{name}.attn", config, layer)
        self.attention_norm = LayerNorm(source, f"{name}.norm1", d_model, eps)
        self.mlp = NomicBertMLP(source, f"{name}.mlp", config, layer)
        self.mlp_norm = LayerNorm(source, f"{name}.norm2", d_model, eps)


class NomicBert(Bert):
    """The whole model."""

    def __init__(self, config: ModelConfig, source: WeightSource) -> None:
        name, d_model = "model.embeddings", config.d_model
        tokens = Embedding(source, f"{name}.word_embeddings", config.n_vocab, d_model)
        types = Embedding(source, f"{name}.token_type_embeddings", config.n_token_types, d_model)
        norm = LayerNorm(source, "model.emb_ln", d_model, config.norm_eps)
        self.config = config
        self.embedding = NormedEmbedding(tokens, {"token_types": types}, norm)
        self.blocks = [NomicBertBlock(source, config, layer) for layer in range(config.n_layers)]
        self.norm = NoNorm()
        self.head = encoder_head(source, config, self.pooler_name, self.classifier_name)


NOMIC_BERT = replace(
    BERT,
    name="nomic_bert",
    model=NomicBert,
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
