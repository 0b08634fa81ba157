"""GTE (Zhang et al. 2024), of gte-multilingual and its reranker: BERT with RoPE and a gated MLP.

Its repositories of the first publication say `new` as their model_type and run code of their own.
"""

from __future__ import annotations

from dataclasses import replace

from kukri.kernels.op_set import Ops, Tensor
from kukri.models.bert import BERT, Bert, BertBlock
from kukri.models.layers import Attention, GatedMLP, Linear


class UpAndGate(Linear):
    """A matrix that has the rows of `up` before the rows of `gate`."""

    def parts(self, ops: Ops, x: Tensor) -> tuple[Tensor, ...]:
        """x [R, in] -> gate and up, each [R, out]."""
        up, gate = super().parts(ops, x)
        return gate, up


GTE = replace(
    BERT,
    name="gte",
    model=Bert.of(
        block_type=BertBlock.of(
            attention_type=Attention,
            attention_norm_name="attn_ln",
            mlp_type=GatedMLP.of(linear_type=UpAndGate, in_names=("up_gate_proj",)),
            mlp_name="mlp",
            mlp_norm_name="mlp_ln",
        )
    ),
    hf_class="GteModel",
    hf_prefix="new.",
    gguf="",
    in_gguf=False,  # the gguf package has no names for it
    has_rope=True,
    tensor_names={
        **{name: stored for name, stored in BERT.tensor_names.items() if "." in name and name[:5] == "model"},
        "classifier": "cls.output",
        "attention.qkv_proj": "attn_qkv",
        "attention.o_proj": "attn_output",
        "attn_ln": "attn_output_norm",
        "mlp.up_gate_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "mlp_ln": "layer_output_norm",
    },
    unused=rf"{BERT.unused}|lm_head\..+",
    ignores=BERT.ignores | {"classifier_dropout"},
    defaults={**BERT.defaults, "type_vocab_size": 1, "rope_theta": 160000.0},
    fixed={},
    biases={"attention": True, "mlp.down_proj": True},
)
