"""MPNet (Song et al. 2020), of all-mpnet-base-v2: BERT whose scores have T5's bias by distance.

Distances up to 7 have a bias each, on either side, and longer ones up to 128 share eight by their logarithm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.config import ModelConfig
from kukri.kernels.weight_handles import Vector
from kukri.models.bert import BertBlock
from kukri.models.layers import Attention
from kukri.models.weights import WeightSource
from kukri.models.xlm_roberta import XLM_ROBERTA, XLMRoberta
from kukri.quant.blocks import dequantize

REACH, _N_BUCKETS = 128, 32  # half of the buckets are for earlier keys
_BIAS = "model.encoder.relative_attention_bias.weight"


class MPNetAttention(Attention):
    """Attention with one bias for all layers, under MPNet's names."""

    in_names, out_name = ("q", "k", "v"), "o"

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        super().__init__(source, name, config, layer)
        weight = source.matrix(_BIAS, (_N_BUCKETS, config.n_heads))
        table = dequantize(weight.data, weight.type)[buckets(np.arange(-REACH, REACH))]
        distances = Vector(np.ascontiguousarray(table.T).reshape(-1), _BIAS)
        self.spec = replace(self.spec, distances=distances)


def buckets(ahead: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the row of the bias for keys that are `ahead` tokens after a query."""
    n, half = np.abs(ahead).astype(np.float32), _N_BUCKETS // 2
    exact = half // 2
    far = np.log(np.maximum(n, 1) / np.float32(exact)) / np.float32(np.log(REACH / exact)) * np.float32(exact)
    found = np.where(n < exact, n, np.minimum(exact + np.trunc(far), half - 1))
    rows: npt.NDArray[np.int64] = (found + half * (ahead > 0)).astype(np.int64)
    return rows


MPNET = replace(
    XLM_ROBERTA,
    name="mpnet",
    model=XLMRoberta.of(
        block_type=BertBlock.of(
            attention_type=MPNetAttention,
            attention_name="attention.attn",
            attention_norm_name="attention.LayerNorm",
        )
    ),
    hf_class="MPNetModel",
    hf_type="",
    gguf="",
    in_gguf=False,
    tensor_names={},
    reads=frozenset(),
    fixed={"relative_attention_num_buckets": _N_BUCKETS},
)
