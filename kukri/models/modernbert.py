"""ModernBERT (Warner et al. 2024): an encoder with RoPE, GeGLU, norms before attention and MLP, no biases.

Two of three layers see a window on both sides of a token, and have a RoPE base of their own.
"""

from __future__ import annotations

from kukri.config import ModelConfig
from kukri.models.architecture import Architecture
from kukri.models.heads import PredictionHead
from kukri.models.layers import Attention, Embedding, GatedMLP, NoNorm, NormedEmbedding, PlainLayerNorm
from kukri.models.llama import Block, Llama
from kukri.models.weights import WeightSource

_ATTENTION = Attention.of(fused_name="Wqkv", out_name="Wo")


class ModernBertMLP(GatedMLP):
    """The gated MLP under ModernBERT's names."""

    in_names: tuple[str, ...] = ("Wi",)
    out_name = "Wo"


class ModernBertBlock(Block):
    """One layer: Llama's order, the first without a norm before attention."""

    def __init__(self, source: WeightSource, config: ModelConfig, layer: int) -> None:
        name, size = f"model.layers.{layer}", (config.d_model, config.norm_eps)
        self.layer = layer
        self.attention_norm = PlainLayerNorm(source, f"{name}.attn_norm", *size) if layer else NoNorm()
        self.attention = _ATTENTION(source, f"{name}.attn", config, layer)
        self.mlp_norm = PlainLayerNorm(source, f"{name}.mlp_norm", *size)
        self.mlp = ModernBertMLP(source, f"{name}.mlp", config, layer)


class ModernBert(Llama):
    """The whole model."""

    def __init__(self, config: ModelConfig, source: WeightSource) -> None:
        size = config.d_model, config.norm_eps
        self.config = config
        tokens = Embedding(source, "model.embeddings.tok_embeddings", config.n_vocab, config.d_model)
        self.embedding = NormedEmbedding(tokens, {}, PlainLayerNorm(source, "model.embeddings.norm", *size))
        self.blocks = [ModernBertBlock(source, config, layer) for layer in range(config.n_layers)]
        self.norm = PlainLayerNorm(source, "model.final_norm", *size)
        self.head = PredictionHead(source, config) if config.head.labels else None


MODERNBERT = Architecture(
    "modernbert",
    ModernBert,
    "ModernBertModel",
    is_causal=False,
    embedding="model.embeddings.tok_embeddings",
    unused=r"(?:head|decoder)\..+",
    gguf="modern-bert",
    gguf_epsilon="attention.layer_norm_epsilon",
    full_interval=3,
    is_full_first=True,
    local_rope=True,
    local_theta=1e4,
    tensor_names={
        **{"model.embeddings.tok_embeddings": "token_embd", "model.embeddings.norm": "token_embd_norm"},
        **{"model.final_norm": "output_norm", "attn_norm": "attn_norm", "attn.Wqkv": "attn_qkv"},
        **{"attn.Wo": "attn_output", "mlp_norm": "ffn_norm", "mlp.Wi": "ffn_up", "mlp.Wo": "ffn_down"},
        **{"head.dense": "cls", "head.norm": "cls.norm", "classifier": "cls.output"},
    },
    hf_epsilon="norm_eps",
    hf_activation="hidden_activation",
    activation="gelu",
    aliases={
        **{"global_rope_theta": "rope_theta", "local_rope_theta": "rope_local_base_freq"},
        **{"local_attention": "sliding_window", "global_attn_every_n_layers": "sliding_window_pattern"},
    },
    reads={
        *("sliding_window", "sliding_window_pattern", "layer_types", "rope_local_base_freq"),
        "classifier_pooling",
    },
    ignores={
        *("initializer_cutoff_factor", "cls_token_id", "embedding_dropout"),
        *("mlp_dropout", "decoder_bias", "deterministic_flash_attn", "sparse_prediction"),
        *("sparse_pred_ignore_index", "reference_compile", "layer_norm_eps", "repad_logits_with_grad"),
        "position_embedding_type",
    },
    fixed={"norm_bias": False, "classifier_bias": False, "classifier_activation": "gelu"},
    defaults={
        "norm_eps": 1e-5,
        **{"rope_theta": 160000.0, "sliding_window": 128, "tie_word_embeddings": True},
    },
    biases={"attn": "attention_bias", "mlp": "mlp_bias"},
)
