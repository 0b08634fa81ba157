"""Tensor names: kukri's own are Hugging Face's, and this table gives GGUF's (gguf-py, constants.py)."""

from __future__ import annotations

import re

from kukri.errors import UnsupportedError

# Module names without `.weight` or `.bias`, outside the layers and inside one.
_OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "score": "cls.output",
    "qa_outputs": "qa_output",  # kukri's own: GGUF has no name for it
}
# Names of single architectures for modules that GGUF names like others'.
_OUTSIDE_ALSO = {"model.final_layernorm": "output_norm"}
_INSIDE_ALSO = {
    "self_attn.dense": "attn_output",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_INSIDE = {
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
}
_OUTSIDE_HF = {gguf: hf for hf, gguf in _OUTSIDE.items()}
_INSIDE_HF = {gguf: hf for hf, gguf in _INSIDE.items()}

_NAME = re.compile(
    r"(?:(?P<prefix>model\.layers|blk)\.(?P<layer>0|[1-9]\d*)\.)?(?P<module>.+)\.(?P<kind>weight|bias)"
)


def gguf_name(name: str) -> str:
    """`model.norm.weight` -> `output_norm.weight`. Raises UnsupportedError for a name it does not know."""
    return _translate(name, "model.layers", "blk", _OUTSIDE | _OUTSIDE_ALSO, _INSIDE | _INSIDE_ALSO)


def canonical_name(name: str) -> str:
    """`output_norm.weight` -> `model.norm.weight`, as a llama calls it.

    Raises UnsupportedError for a name it does not know.
    """
    return _translate(name, "blk", "model.layers", _OUTSIDE_HF, _INSIDE_HF)


def _translate(
    name: str, prefix: str, to_prefix: str, outside: dict[str, str], inside: dict[str, str]
) -> str:
    match = _NAME.fullmatch(name)
    if match and match["layer"] is None and match["module"] in outside:
        return f"{outside[match['module']]}.{match['kind']}"
    if match and match["prefix"] == prefix and match["module"] in inside:
        return f"{to_prefix}.{match['layer']}.{inside[match['module']]}.{match['kind']}"
    raise UnsupportedError(f"tensor name {name!r} is not one kukri knows")
