"""BERT (Devlin et al. 2019) and the sentence encoders built on it: MiniLM, BGE, E5, cross-encoders.

An encoder: every token sees the whole text. Positions and the number of the text in a pair are added as
embeddings, and each norm follows the addition: the stream between blocks is normalized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kukri.config import ModelConfig
from kukri.kernels.op_set import EmbedBy, Ops, Tensor
from kukri.models.architecture import Architecture
from kukri.models.heads import encoder_head
from kukri.models.layers import MLP, Attention, Embedding, LayerNorm, NoNorm, NormedEmbedding
from kukri.models.llama import Block, Llama
from kukri.models.weights import WeightSource


class BertAttention(Attention):
    """Attention under BERT's names."""

    in_names = ("self.query", "self.key", "self.value")
    fused_name = "self.qkv"
    out_name = "output.dense"


class BertBlock(Block):
    """One layer: attention and MLP, each added to its input, and each sum normalized."""

    list_name = "model.encoder.layer"
    attention_type: Callable[..., Any] = BertAttention
    mlp_type: Callable[..., Any] = MLP.of(in_names=("intermediate.dense",), out_name="output.dense")
    attention_name, mlp_name = "attention", ""
    attention_norm_name, mlp_norm_name = "attention.output.LayerNorm", "output.LayerNorm"

    def __init__(self, source: WeightSource, config: ModelConfig, layer: int) -> None:
        name, size = f"{self.list_name}.{layer}", (config.d_model, config.norm_eps)
        self.layer = layer
        self.attention = self.attention_type(source, f"{name}.{self.attention_name}", config, layer)
        self.attention_norm = LayerNorm(source, f"{name}.{self.attention_norm_name}", *size)
        mlp_name = f"{name}.{self.mlp_name}" if self.mlp_name else name
        self.mlp: Any = self.mlp_type(source, mlp_name, config, layer)
        self.mlp_norm = LayerNorm(source, f"{name}.{self.mlp_norm_name}", *size)

    def __call__(self, ops: Ops, x: Tensor, batch: Any) -> Tensor:
        x = ops.tap("hook_resid_pre", self.layer, x)
        x = ops.tap("ln1.hook_in", self.layer, self.attention(ops, x, x, batch))
        x = ops.tap("ln1.hook_normalized", self.layer, self.attention_norm(ops, x))
        x = ops.tap("ln2.hook_in", self.layer, self.mlp(ops, x, x))
        return ops.tap("hook_resid_post", self.layer, self.mlp_norm(ops, x))


class Bert(Llama):
    """The whole model."""

    block_type = BertBlock
    norm_name = "model.embeddings.LayerNorm"
    pooler_name, classifier_name = "model.pooler.dense", "classifier"

    def __init__(self, config: ModelConfig, source: WeightSource) -> None:
        def embedding(name: str, n: int) -> Embedding:
            return Embedding(source, f"model.embeddings.{name}_embeddings", n, config.d_model)

        added: dict[EmbedBy, tuple[str, int]]
        added = {
            "token_types": ("token_type", config.n_token_types),
            "positions": ("position", config.n_positions),
        }
        others = {by: embedding(name, n) for by, (name, n) in added.items() if n}
        norm = LayerNorm(source, self.norm_name, config.d_model, config.norm_eps)
        self.config = config
        self.embedding = NormedEmbedding(embedding("word", config.n_vocab), others, norm)
        self.blocks = [self.block_type(source, config, layer) for layer in range(config.n_layers)]
        self.norm: Any = NoNorm()
        self.head = encoder_head(source, config, self.pooler_name, self.classifier_name)


BERT = Architecture(
    "bert",
    Bert,
    "BertModel",
    is_causal=False,
    has_rope=False,
    layers="model.encoder.layer",
    embedding="model.embeddings.word_embeddings",
    unused=r"model\.pooler\.dense\..+|cls\..+|linear\.weight",  # the last is ColBERT's dense layer
    gguf_epsilon="attention.layer_norm_epsilon",
    tensor_names={
        "model.embeddings.word_embeddings": "token_embd",
        "model.embeddings.token_type_embeddings": "token_types",
        "model.embeddings.position_embeddings": "position_embd",
        "model.embeddings.LayerNorm": "token_embd_norm",
        "model.pooler.dense": "cls",
        "classifier": "cls.output",
        "attention.self.query": "attn_q",
        "attention.self.key": "attn_k",
        "attention.self.value": "attn_v",
        "attention.self.qkv": "attn_qkv",
        "attention.output.dense": "attn_output",
        "attention.output.LayerNorm": "attn_output_norm",
        "intermediate.dense": "ffn_up",
        "output.dense": "ffn_down",
        "output.LayerNorm": "layer_output_norm",
    },
    hf_epsilon="layer_norm_eps",
    activation="gelu",
    reads={"type_vocab_size"},
    ignores={"attention_probs_dropout_prob", "hidden_dropout_prob"},
    defaults={
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
        "type_vocab_size": 2,
        "tie_word_embeddings": True,
    },
    fixed={"position_embedding_type": "absolute"},
    biases={"attention": True, "intermediate": True, "output": True},
)
