"""Command R7B (Cohere 2024): attention and MLP side by side after one norm, windows, multiplied logits.

Three of four layers have a window; the fourth does not rotate. Rows of q and k are in pairs in both formats.
"""

from __future__ import annotations

import sys

from kukri.kernels.op_set import Ops, Tensor
from kukri.models.architecture import Architecture
from kukri.models.layers import Attention, GatedMLP, PlainLayerNorm
from kukri.models.lenses import ROTATING_WINDOWS, Number
from kukri.models.llama import Llama
from kukri.models.phi import PhiBlock


class Cohere2(Llama):
    """The whole model."""

    block_type = PhiBlock.of(norm_type=PlainLayerNorm, attention_type=Attention, mlp_type=GatedMLP)

    def adjust_logits(self, ops: Ops, logits: Tensor) -> Tensor:
        """The logits, multiplied [N, V]."""
        return ops.scale(logits, 1 / self.config.logits_divisor)


_SCALE = "logit_scale"  # the key in both formats, a factor


COHERE2 = Architecture(
    "cohere2",
    Cohere2,
    "Cohere2ForCausalLM",
    gguf_epsilon="attention.layer_norm_epsilon",
    interleaved_rope=True,
    hf_interleaved_rope=True,
    full_interval=4,
    hf_epsilon="layer_norm_eps",
    reads={"sliding_window", "sliding_window_pattern", "layer_types"},
    ignores={
        *("_sliding_window_pattern", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct"),
        *("use_embedding_sharing", "use_gated_activation"),
    },
    fixed={"use_qk_norm": False, "use_parallel_block": True, "use_parallel_embedding": False},
    defaults={
        **{"layer_norm_eps": 1e-5, "tie_word_embeddings": True, _SCALE: 0.0625},
        "sliding_window": 4096,
    },
    biases={"self_attn": "attention_bias"},
    lenses=(
        Number(
            *("logits_divisor", _SCALE, _SCALE),
            most=sys.float_info.max,
            load=lambda factor, facts: 1 / factor,
            store=lambda divisor, config: 1 / divisor,
            alike=True,
        ),
        ROTATING_WINDOWS,
    ),
)
