"""LFM2.5-Embedding and LFM2.5-ColBERT (Liquid AI 2026): LFM2 as an encoder, which sees both ways.

A short convolution looks at as many inputs after a token as before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kukri.models.keys import Keys
from kukri.models.lfm2 import LFM2


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
    hf_class="Lfm2BidirectionalModel",
    hf_type="lfm2",
    hf_when=_is_bidirectional,
    is_causal=False,
    read_hf=_read_hf,
    read_gguf=_check("shortconv.l_cache"),
)
