"""Ministral 3 (Mistral AI 2025): Llama whose queries grow beyond the context that YaRN stretches."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any

from kukri.config import ModelConfig
from kukri.errors import UnsupportedError
from kukri.kernels.op_set import Ops, Tensor
from kukri.models.architecture import Architecture
from kukri.models.keys import Keys
from kukri.models.layers import Attention
from kukri.models.lenses import Format, Lens
from kukri.models.llama import Block, Llama
from kukri.models.weights import WeightSource

_BETA, _GGUF_BETA = "llama_4_scaling_beta", "attention.temperature_scale"
_MULTIPLIER = "rope.scaling.yarn_log_multiplier"


class GrowingAttention(Attention):
    """Attention whose queries are rotated by cos and sin that grow."""

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        super().__init__(source, name, config, layer)
        scaling = config.rope.scaling
        assert scaling is not None, "the configuration's readers see to that"
        assert self.rope is not None, "every layer rotates"
        grows = config.query_growth and config.max_context > scaling.original_context
        growth = (config.query_growth, scaling.original_context) if grows else None
        self.query_rope = replace(self.rope, growth=growth)

    def rotate(self, ops: Ops, q: Tensor, k: Tensor | None, batch: Any) -> tuple[Tensor, Tensor | None]:
        """q and k rotated, apart if a text may be so long that queries grow."""
        if self.query_rope == self.rope:
            return super().rotate(ops, q, k, batch)
        assert self.rope is not None, "every layer rotates"
        q = ops.rotate(q, self.query_rope, self.spec, batch)
        return q, ops.rotate(k, self.rope, self.spec, batch)


_YARN = {
    **{"type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, _BETA: 0.1},
}


def _respelled(config: dict[str, Any]) -> dict[str, Any]:
    """With the class's own YaRN if neither spelling says another."""
    stated = config.get("rope_parameters") or config.get("rope_scaling")
    return dict(config) if stated else {**config, "rope_parameters": _YARN}


class _Growth(Lens):
    """How queries grow, and YaRN's multiplier in GGUF."""

    def keys(self, form: Format) -> Set[str]:
        return {_GGUF_BETA, _MULTIPLIER} if form == "gguf" else frozenset()

    def read(self, keys: Keys, form: Format, facts: dict[str, Any]) -> None:
        where = "rope_parameters" if keys.value("rope_parameters") is not None else "rope_scaling"
        where = where if form == "hf" else "rope.scaling.type"
        scaling = facts["rope"].scaling
        if scaling is None or scaling.kind != "yarn":
            raise keys.unsupported(where, "must be yarn, as queries grow with its original context")
        if form == "hf":
            if (beta := keys.value(where).get(_BETA)) not in (None, 0):
                facts["query_growth"] = keys.as_positive(f"{where}.{_BETA}", beta, most=1e3)
            return
        if keys.value(_GGUF_BETA, 0.0):
            facts["query_growth"] = keys.positive(_GGUF_BETA, most=1e3)
        if keys.value(_MULTIPLIER, 0.0):
            mscale = keys.positive(_MULTIPLIER, most=1e3)
            scaling = replace(scaling, attention_factor=None, mscale=1.0, mscale_all_dim=mscale)
            facts["rope"] = replace(facts["rope"], scaling=scaling)

    def write(self, config: ModelConfig, form: Format, keys: dict[str, Any]) -> None:
        if form == "hf":
            keys["rope_scaling"] = {**(keys["rope_scaling"] or {}), _BETA: config.query_growth}
            return
        scaling = config.rope.scaling
        assert scaling is not None, "it has YaRN"
        keys[_GGUF_BETA] = config.query_growth
        if scaling.mscale_all_dim:
            if scaling.mscale != 1:
                message = f"YaRN's mscale of {scaling.mscale:g} is not supported in GGUF, where it is 1"
                raise UnsupportedError(message)
            keys.pop("rope.scaling.attn_factor", None)
            keys[_MULTIPLIER] = scaling.mscale_all_dim


MINISTRAL3 = Architecture(
    "ministral3",
    Llama.of(block_type=Block.of(attention_type=GrowingAttention)),
    "Ministral3ForCausalLM",
    gguf="mistral3",
    interleaved_rope=True,
    respelled=_respelled,
    reads={"sliding_window"},
    ignores={_BETA, "max_position_embeddings"},
    defaults={
        **{"num_key_value_heads": 8, "head_dim": 128, "sliding_window": None, "rms_norm_eps": 1e-5},
        **{"max_position_embeddings": 262144},
    },
    lenses=(_Growth(),),
)
