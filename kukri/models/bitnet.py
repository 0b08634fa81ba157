"""BitNet b1.58 (Ma et al. 2025): Llama whose matrices are ternary, normed once more before each last matrix.

The MLP's gate is squared after ReLU. Published files hold four rows of -1, 0 and 1 in one of bytes, with a
scale for each matrix, or the weights that training rounds so, which are rounded as they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kukri.config import ModelConfig
from kukri.kernels.op_set import Ops, Tensor
from kukri.models.architecture import Architecture
from kukri.models.keys import Keys
from kukri.models.layers import Attention, GatedMLP, RMSNorm
from kukri.models.llama import Block, Llama
from kukri.models.weights import WeightSource


class SubNormed:
    """The last matrix of an attention or MLP, whose input is normed."""

    def __init__(self, linear: Callable[..., Tensor], norm: RMSNorm) -> None:
        self.linear, self.norm = linear, norm

    def __call__(self, ops: Ops, x: Tensor, residual: Tensor, tap: tuple[str, int | None]) -> Tensor:
        """residual + norm(x) Wᵀ."""
        return self.linear(ops, self.norm(ops, x), residual, tap)


class BitNetAttention(Attention):
    """Attention whose result is normed before its last matrix."""

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        super().__init__(source, name, config, layer)
        width = self.spec.n_heads * self.spec.d_head
        self.out = SubNormed(self.out, RMSNorm(source, f"{name}.attn_sub_norm", width, config.norm_eps))


class BitNetMLP(GatedMLP):
    """down(norm(f(gate(x)) * up(x)))."""

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        super().__init__(source, name, config, layer)
        norm = RMSNorm(source, f"{name}.ffn_sub_norm", self.width(config, layer), config.norm_eps)
        self.down = SubNormed(self.down, norm)


_QUANTIZED = "quantization_config"


def _read_hf(keys: Keys, facts: dict[str, Any]) -> None:
    """Refuses linear layers that compute something else, and says whether weights are to be rounded."""
    stated = keys.value(_QUANTIZED) or {}
    own = Keys(stated, keys.path, defaults={"linear_class": "bitlinear", "quantization_mode": "offline"})
    if stated:
        own.expect("linear_class", "autobitlinear")
        own.expect("use_rms_norm", False)
    facts["is_rounded"] = bool(stated) and own.text("quantization_mode") == "online"


BITNET = Architecture(
    "bitnet",
    Llama.of(block_type=Block.of(attention_type=BitNetAttention, mlp_type=BitNetMLP)),
    "BitNetForCausalLM",
    in_gguf=False,  # the gguf package's bitnet is another model, and published files are for a fork
    hf_quantized="bitnet",
    activation="relu2",
    reads={_QUANTIZED},
    defaults={"num_key_value_heads": 5, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
    biases={"self_attn": "attention_bias"},
    read_hf=_read_hf,
)
