"""BERT (Devlin et al. 2019) and the sentence encoders built on it: MiniLM, BGE, E5, cross-encoders.

An encoder: every token sees the whole text. Positions and the number of the text in a pair are added as
embeddings, and each norm follows the addition: the stream between blocks is normalized.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kukri.config import ModelConfig
from kukri.kernels.op_set import Ops, Tensor
from kukri.models.architecture import Architecture
from kukri.models.heads import encoder_head
from kukri.models.layers import MLP, Attention, Embedding, LayerNorm, Parameter
from kukri.models.llama import Llama

if TYPE_CHECKING:
    from kukri.models.weights import WeightSource


class BertAttention(Attention):
    """Attention under BERT's names."""

    in_names = ("self.query", "self.key", "self.value")
    fused_name = "self.qkv"
    out_name = "output.dense"


class BertMLP(MLP):
    """The MLP under BERT's names, by the exact GELU."""

    up_name = "intermediate.dense"
    down_name = "output.dense"
    is_exact = True


class BertBlock:
    """One layer: attention and MLP, each added to what it reads, each sum normalized."""

    def __init__(self, source: WeightSource, config: ModelConfig, layer: int) -> None:
        name, d_model, eps = f"model.encoder.layer.{layer}", config.d_model, config.norm_eps
        self.layer = layer
        self.attention: Attention = BertAttention(source, f"{name}.attention", config, layer)
        self.attention_norm = LayerNorm(source, f"{name}.attention.output.LayerNorm", d_model, eps)
        self.mlp: Any = BertMLP(source, name, config, layer)
        self.mlp_norm = LayerNorm(source, f"{name}.output.LayerNorm", d_model, eps)

    def __call__(self, ops: Ops, x: Tensor, batch: Any) -> Tensor:
        """x [T, D] -> [T, D]."""
        x = ops.tap("hook_resid_pre", self.layer, x)
        x = ops.tap("ln1.hook_in", self.layer, self.attention(ops, x, x, batch))
        x = ops.tap("ln1.hook_normalized", self.layer, self.attention_norm(ops, x))
        x = ops.tap("ln2.hook_in", self.layer, self.mlp(ops, x, x))
        return ops.tap("hook_resid_post", self.layer, self.mlp_norm(ops, x))

    @property
    def parameters(self) -> list[Parameter]:
        """Every tensor of the layer."""
        parts = (self.attention, self.attention_norm, self.mlp, self.mlp_norm)
        return [parameter for part in parts for parameter in part.parameters]


class BertEmbeddings:
    """The sum of a token's, its position's and its type's embedding, normalized."""

    def __init__(self, source: WeightSource, name: str, config: ModelConfig) -> None:
        d_model = config.d_model
        self.tokens = Embedding(source, f"{name}.word_embeddings", config.n_vocab, d_model)
        self.types = Embedding(source, f"{name}.token_type_embeddings", config.n_token_types, d_model)
        self.positions = Embedding(source, f"{name}.position_embeddings", config.n_positions, d_model)
        self.norm = LayerNorm(source, f"{name}.LayerNorm", d_model, config.norm_eps)
        parts = (self.tokens, self.types, self.positions, self.norm)
        self.parameters = [parameter for part in parts for parameter in part.parameters]

    def __call__(self, ops: Ops, batch: Any) -> Tensor:
        """-> [T, D]."""
        x = ops.embed(self.tokens.weight, batch)
        x = ops.embed(self.types.weight, batch, "token_types", x)
        x = ops.embed(self.positions.weight, batch, "positions", x)
        return ops.tap("hook_embed", None, self.norm(ops, x))


class Bert(Llama):
    """The whole model."""

    def __init__(self, config: ModelConfig, source: WeightSource) -> None:
        self.config = config
        self.embeddings: Any = BertEmbeddings(source, "model.embeddings", config)
        self.embedding = self.embeddings.tokens
        self.blocks: list[BertBlock] = [BertBlock(source, config, layer) for layer in range(config.n_layers)]
        self.head = encoder_head(source, config, "model.pooler.dense")
        self._forward = None

    def hidden(self, ops: Ops, batch: Any) -> Tensor:
        """The rows of the last layer [N, D] that the batch lists."""
        x = self.embeddings(ops, batch)
        for block in self.blocks:
            x = block(ops, x, batch)
        return ops.tap("ln_final.hook_normalized", None, ops.logit_rows(x, batch))

    @property
    def parameters(self) -> list[Parameter]:
        """Every tensor of the model, in order."""
        parts = (self.embeddings, *self.blocks, *([self.head] if self.head else []))
        return [parameter for part in parts for parameter in part.parameters]


BERT = Architecture(
    "bert",
    Bert,
    "BertModel",
    is_causal=False,
    has_rope=False,
    layers="model.encoder.layer",
    embedding="model.embeddings.word_embeddings",
    unused=r"model\.pooler\.dense\..+|cls\..+",
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
    reads=frozenset(["type_vocab_size"]),
    ignores=frozenset(["attention_probs_dropout_prob", "hidden_dropout_prob"]),
    defaults={
        "num_key_value_heads": None,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
        "type_vocab_size": 2,
        "tie_word_embeddings": True,
    },
    fixed={"position_embedding_type": "absolute"},
    biases={"attention": True, "intermediate": True, "output": True},
)
