"""Granite 3's mixtures (IBM 2024): Granite with experts in place of MLPs, some with one for all tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kukri.config import ModelConfig
from kukri.kernels.op_set import Ops, Tensor
from kukri.models.architecture import ExpertKeys
from kukri.models.granite import GRANITE, Granite
from kukri.models.layers import Scaled
from kukri.models.llama import Block
from kukri.models.mixture import Mixture
from kukri.models.weights import WeightSource


class ScaledMixture(Mixture):
    """A mixture that is multiplied before it joins the stream."""

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        super().__init__(source, name, config, layer)
        self.scale = config.residual_scale
        self.finish = self.scaled

    def scaled(self, ops: Ops, x: Tensor) -> Tensor:
        """x, multiplied [T, D]."""
        return ops.scale(x, self.scale)


class GraniteMoeBlock(Block):
    """A layer whose attention and mixture add their results multiplied."""

    mlp_type = ScaledMixture

    def __init__(self, source: WeightSource, config: ModelConfig, layer: int) -> None:
        super().__init__(source, config, layer)
        self.attention.out = Scaled(self.attention.out, config.residual_scale)


_EXPERTS = {
    "block_sparse_moe.router.layer": ("mlp.gate",),
    "block_sparse_moe.input_linear": ("mlp.experts.gate_proj", "mlp.experts.up_proj"),
    "block_sparse_moe.output_linear": ("mlp.experts.down_proj",),
    "shared_mlp.input_linear": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "shared_mlp.output_linear": ("mlp.shared_experts.down_proj",),
}


def _write_hf(config: ModelConfig, keys: dict[str, Any]) -> None:
    """GGUF has one name for models with an MLP for all tokens and without."""
    if config.mixture is not None and config.mixture.d_shared:
        keys |= {"model_type": "granitemoeshared", "architectures": ["GraniteMoeSharedForCausalLM"]}
    else:
        keys.pop("shared_intermediate_size")


GRANITEMOE = replace(
    GRANITE,
    name="granitemoe",
    model=Granite.of(block_type=GraniteMoeBlock),
    hf_class="GraniteMoeForCausalLM",
    gguf="granitemoe",
    joined=_EXPERTS,
    defaults={**GRANITE.defaults, "num_local_experts": 8, "num_experts_per_tok": 2},
    biases={"self_attn": "attention_bias"},
    experts=ExpertKeys(
        *("num_local_experts", "intermediate_size", True),
        gguf_normalized=True,
        d_shared="shared_intermediate_size",
    ),
    write_hf=_write_hf,
)

GRANITEMOESHARED = replace(GRANITEMOE, name="granitemoeshared", hf_class="GraniteMoeSharedForCausalLM")
