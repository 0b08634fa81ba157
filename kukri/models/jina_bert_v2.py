"""Jina Embeddings v2 (Günther et al. 2023): BERT without positions, by ALiBi, with a gated MLP.

ALiBi (Press et al. 2021) takes from a score a head's slope times the distance of the key, on either side.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from kukri.config import ModelConfig
from kukri.kernels.weight_handles import Vector
from kukri.models.bert import BERT, Bert, BertAttention, BertBlock
from kukri.models.lenses import Fixed, Given
from kukri.models.modernbert import ModernBertMLP
from kukri.models.weights import WeightSource

_MOST_BIAS = 8.0


class JinaV2Attention(BertAttention):
    """BERT's attention, scores less by distance."""

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        super().__init__(source, name, config, layer)
        self.spec = replace(self.spec, distances=alibi(config.n_heads, config.max_context))


@cache
def alibi(n_heads: int, reach: int) -> Vector:
    """What each head adds to scores, for `AttentionSpec.distances`.

    Slopes fall by the same factor from head to head, those of a number of heads that is no power of 2 after
    the largest such number by the root of it.
    """
    n = 1 << (n_heads.bit_length() - 1)
    powers = [*range(1, n + 1), *(0.5 + i for i in range(n_heads - n))]
    slopes = 2.0 ** (-_MOST_BIAS / n * np.array(powers))
    table = -slopes[:, None] * np.abs(np.arange(-reach, reach))
    return Vector(table.astype(np.float32).reshape(-1))


class JinaV2MLP(ModernBertMLP):
    """The gated MLP by the exact GELU; older GGUF files hold gate and up apart."""

    in_names: tuple[str, ...] = ("gated_layers",)
    out_name = "wo"

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        if source.has(f"{name}.gated_layers_w.weight"):
            self.in_names = ("gated_layers_w", "gated_layers")
        super().__init__(source, name, config, layer)


_MLP = {"intermediate.dense", "output.dense", "output.LayerNorm"}

JINA_BERT_V2 = replace(
    BERT,
    name="jina_bert_v2",
    model=Bert.of(
        block_type=BertBlock.of(
            attention_type=JinaV2Attention, mlp_type=JinaV2MLP, mlp_name="mlp", mlp_norm_name="mlp.layernorm"
        )
    ),
    hf_class="JinaBertModel",
    hf_type="bert",
    hf_mark=("position_embedding_type", "alibi"),
    gguf="jina-bert-v2",
    tensor_names={
        **{module: name for module, name in BERT.tensor_names.items() if module not in _MLP},
        **{"mlp.gated_layers": "ffn_up", "mlp.gated_layers_w": "ffn_gate", "mlp.wo": "ffn_down"},
        "mlp.layernorm": "layer_output_norm",
    },
    ignores=BERT.ignores | {"emb_pooler", "model_max_length"},
    fixed={"position_embedding_type": "alibi", "feed_forward_type": "geglu"},
    biases={"attention": True, "mlp.wo": True, "mlp.layernorm": True},
    lenses=(Given("n_positions", 0), Fixed("gguf", "attention.max_alibi_bias", _MOST_BIAS)),
)
