"""EmbeddingGemma 2's text model (Google 2026): Gemma 4 as an encoder, with windows on both sides of a token.

Each layer's embeddings are a projection of the token's usual embedding, without a table. The vectors of
tokens are projected once more, to another width than the model's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kukri.config import ModelConfig
from kukri.kernels.op_set import Ops, Tensor
from kukri.models.gemma4_text import GEMMA4_TEXT, Gemma4, Gemma4Block, ProjectedEmbeddings
from kukri.models.layers import Linear
from kukri.models.lenses import Number
from kukri.models.weights import WeightSource


class EmbeddingGemma2(Gemma4):
    """The whole model."""

    block_type = Gemma4Block.of(input_name=".ple_block")
    inputs_type = ProjectedEmbeddings.of(module="model.ple")

    def __init__(self, config: ModelConfig, source: WeightSource) -> None:
        super().__init__(config, source)
        assert config.d_vector is not None, "the configuration's readers see to that"
        self.projection = Linear(source, ["model.embedding_projection"], (config.d_vector,), config.d_model)

    def hidden(self, ops: Ops, batch: Any) -> Tensor:
        """The vectors [N, `config.d_vector`] of the rows that the batch lists."""
        return self.projection(ops, super().hidden(ops, batch))


def _respelled(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json in the spelling of Gemma 4, whose window counts both sides of a token."""
    radius, full = config.get("sliding_window", 512), "full_attention"
    made = {**config, "attention_k_eq_v": False}
    if config.get("per_layer_config") is None:
        heads = {
            "head_dim": config.get("global_head_dim", 512),
            "num_key_value_heads": config.get(_FULL_KV, 1),
        }
        made["per_layer_config"] = {full: heads}
    if config.get("rope_parameters") is None:
        bases = {full: 1e6, "sliding_attention": 1e4}
        made["rope_parameters"] = {
            kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()
        }
    made["sliding_window"] = 2 * radius if type(radius) is int else radius
    made["vocab_size_per_layer_input"] = config.get("vocab_size", 262144)
    return GEMMA4_TEXT.respelled(made)


_FULL_KV = "num_global_key_value_heads"

EMBEDDING_GEMMA2 = replace(
    GEMMA4_TEXT,
    name="embedding_gemma2_text",
    model=EmbeddingGemma2,
    hf_class="EmbeddingGemma2TextModel",
    hf_prefix="language_model.",
    gguf="",
    in_gguf=False,  # the gguf package has no names for it yet
    is_causal=False,
    numbers=frozenset(),
    lenses=(Number("d_vector", "embedding_dim", kind=int),),
    respelled=_respelled,
    defaults={
        **GEMMA4_TEXT.defaults,
        **{"num_key_value_heads": 2, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24},
        **{"num_attention_heads": 4, "max_position_embeddings": 262144, "embedding_dim": 768},
        "hidden_size_per_layer_input": 512,
    },
)
