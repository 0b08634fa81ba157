"""LFM2.5-Embedding and LFM2.5-ColBERT (Liquid AI 2026): LFM2 as an encoder, which sees both ways.

A short convolution looks at as many inputs after a token as before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kukri.models.keys import Keys
from kukri.models.lenses import Format, Lens
from kukri.models.lfm2 import LFM2


def _is_bidirectional(config: Mapping[str, Any]) -> bool:
    classes = config.get("architectures")
    return isinstance(classes, list) and any("Bidirectional" in str(name) for name in classes)


class _Middle(Lens):
    """Refuses convolutions without a middle."""

    def read(self, keys: Keys, form: Format, facts: dict[str, Any]) -> None:
        n_taps = facts["recurrent"].n_taps
        if n_taps % 2 == 0:
            message = f"must be odd, as convolutions both ways have a middle, not {n_taps}"
            raise keys.unsupported("conv_L_cache" if form == "hf" else "shortconv.l_cache", message)


LFM2_BIDIRECTIONAL = replace(
    LFM2,
    name="lfm2_bidirectional",
    hf_class="Lfm2BidirectionalModel",
    hf_type="lfm2",
    hf_when=_is_bidirectional,
    is_causal=False,
    lenses=(*LFM2.lenses, _Middle()),
)
