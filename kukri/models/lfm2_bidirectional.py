"""LFM2.5-Embedding and LFM2.5-ColBERT (Liquid AI 2026): LFM2 as an encoder, which sees both ways.

A short convolution looks at as many inputs after a token as before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kukri.config import ModelConfig
from kukri.kernels.cache import KVLayer
from kukri.models.keys import Keys
from kukri.models.lfm2 import LFM2, Lfm2, Lfm2Block, ShortConv
from kukri.models.weights import WeightSource


class CentredConv(ShortConv):
    """A short convolution whose middle tap is the token's own; it keeps nothing."""

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        super().__init__(source, name, config, layer)
        self.conv.spec = replace(self.conv.spec, n_after=self.conv.spec.n_taps // 2)
        self.cache_layer = KVLayer(0, config.d_head)


class Lfm2BidirectionalBlock(Lfm2Block):
    """A layer with this convolution, or with attention."""

    recurrent_type = CentredConv


class Lfm2Bidirectional(Lfm2):
    """The whole model."""

    block_type = Lfm2BidirectionalBlock


def _is_bidirectional(config: Mapping[str, Any]) -> bool:
    classes = config.get("architectures")
    return isinstance(classes, list) and any("Bidirectional" in str(name) for name in classes)


def _check(key: str) -> Any:
    def read(keys: Keys, facts: dict[str, Any]) -> None:
        n_taps = facts["recurrent"].n_taps
        if n_taps % 2 == 0:
            raise keys.unsupported(key, f"is {n_taps}: kukri runs convolutions both ways that have a middle")

    return read


def _read_hf(keys: Keys, facts: dict[str, Any]) -> None:
    LFM2.read_hf(keys, facts)
    _check("conv_L_cache")(keys, facts)


LFM2_BIDIRECTIONAL = replace(
    LFM2,
    name="lfm2_bidirectional",
    model=Lfm2Bidirectional,
    hf_class="Lfm2BidirectionalModel",
    hf_type="lfm2",
    hf_when=_is_bidirectional,
    is_causal=False,
    read_hf=_read_hf,
    read_gguf=_check("shortconv.l_cache"),
)
