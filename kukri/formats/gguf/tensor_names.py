"""Tensor names: kukri's own are Hugging Face's, and this table gives GGUF's (gguf-py, constants.py)."""

from __future__ import annotations

import re
from functools import cache

from kukri.errors import UnsupportedError
from kukri.models import ARCHITECTURES

# Llama's modules without `.weight` or `.bias`; those of a layer without its prefix. An architecture's
# `tensor_names` replace or add some.
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "score": "cls.output",
    "qa_outputs": "qa_output",  # kukri's own: GGUF has no name for it
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction": "exp_probs_b",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    # the layer for multi-token prediction has these besides
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
    "embed_tokens": "nextn.embed_tokens",
}
_BARE = (
    ".ssm_a",
    ".ssm_d",
    ".ffn_gate_inp.scale",
    ".ffn_down_exps.scale",
)  # parameters whose names have no ending
_OUTSIDE = re.compile(r"model\..+|lm_head|embed_out|score|classifier(?:\..+)?|qa_outputs|head\..+")


def gguf_name(name: str, architecture: str = "llama") -> str:
    """`model.norm.weight` -> `output_norm.weight`. Raises UnsupportedError for a name it does not know."""
    layers = ARCHITECTURES[architecture].layers
    match = _pattern(layers).fullmatch(name)
    if match and match["module"] in (table := _table(architecture)):
        in_layer = _OUTSIDE.fullmatch(match["module"]) is None
        if match["prefix"] == (layers if in_layer else None):
            prefix = f"blk.{match['layer']}." if in_layer else ""
            stored = f"{prefix}{table[match['module']]}"
            return stored if stored.endswith(_bare(architecture)) else f"{stored}.{match['kind']}"
    raise _unknown(name)


def hf_name(name: str, architecture: str = "llama") -> str:
    """`output_norm.weight` -> `model.norm.weight`. Raises UnsupportedError for a name it does not know."""
    match = _pattern("blk").fullmatch(f"{name}.weight" if name.endswith(_bare(architecture)) else name)
    if match and match["module"] in (table := _reverse_table(architecture)):
        module = table[match["module"]]
        in_layer = _OUTSIDE.fullmatch(module) is None
        if match["prefix"] == ("blk" if in_layer else None):
            prefix = f"{ARCHITECTURES[architecture].layers}.{match['layer']}." if in_layer else ""
            return f"{prefix}{module}.{match['kind']}"
    raise _unknown(name)


def in_layer(name: str) -> tuple[str, int]:
    """`model.layers.3.mlp.up_proj.weight` -> ("mlp.up_proj", 3); ("", -1) for a name outside of layers."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(?:weight|bias)", name)
    return ("", -1) if match is None else (match[2], int(match[1]))


def module_name(stored: str, architecture: str) -> str | None:
    """`attn_q` -> `self_attn.q_proj`, in a layer; None for a name it does not know."""
    return _reverse_table(architecture).get(stored)


@cache
def _pattern(layers: str) -> re.Pattern[str]:
    """A tensor's name: `layers` and a number if it is in a layer, module, and weight or bias."""
    return re.compile(
        rf"(?:(?P<prefix>{re.escape(layers)})\.(?P<layer>0|[1-9]\d*)\.)?(?P<module>.+)\.(?P<kind>weight|bias)"
    )


def _bare(architecture: str) -> tuple[str, ...]:
    """The ends of names that have no kind."""
    return _BARE + ARCHITECTURES[architecture].gguf_bare


@cache
def _table(architecture: str) -> dict[str, str]:
    return {**_NAMES, **ARCHITECTURES[architecture].tensor_names}


@cache
def _reverse_table(architecture: str) -> dict[str, str]:
    # an architecture's own names come last, and win
    return {stored: module for module, stored in _table(architecture).items()}


def _unknown(name: str) -> UnsupportedError:
    return UnsupportedError(f"tensor name {name!r} is not one kukri knows")
