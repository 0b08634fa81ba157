"""Tensor names: kukri's own are Hugging Face's, and the table of `tensor_forms` has GGUF's."""

from __future__ import annotations

import re
from functools import cache

from kukri.errors import UnsupportedError
from kukri.formats.tensor_forms import table
from kukri.models import ARCHITECTURES

_OUTSIDE = re.compile(r"model\..+|lm_head|embed_out|score|classifier(?:\..+)?|qa_outputs|head\..+")


def gguf_name(name: str, architecture: str = "llama") -> str:
    """`model.norm.weight` -> `output_norm.weight`. Raises UnsupportedError for a name it does not know."""
    layers = ARCHITECTURES[architecture].layers
    match = _pattern(layers).fullmatch(name)
    row = table(architecture).get(match["module"]) if match else None
    if match and row and row.gguf:
        in_layer = _OUTSIDE.fullmatch(match["module"]) is None
        if match["prefix"] == (layers if in_layer else None):
            prefix = f"blk.{match['layer']}." if in_layer else ""
            return f"{prefix}{row.gguf}" + ("" if row.is_bare else f".{match['kind']}")
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


def module_name(stored: str, architecture: str) -> str | None:
    """`attn_q` -> `self_attn.q_proj`, in a layer; None for a name it does not know."""
    return _reverse_table(architecture).get(stored)


@cache
def _pattern(layers: str) -> re.Pattern[str]:
    """A tensor's name: `layers` and a number if it is in a layer, module, and weight or bias."""
    return re.compile(
        rf"(?:(?P<prefix>{re.escape(layers)})\.(?P<layer>0|[1-9]\d*)\.)?(?P<module>.+)\.(?P<kind>weight|bias)"
    )


@cache
def _bare(architecture: str) -> tuple[str, ...]:
    """The ends of names that have no kind."""
    return tuple(f".{row.gguf}" for row in table(architecture).values() if row.is_bare)


@cache
def _reverse_table(architecture: str) -> dict[str, str]:
    # an architecture's own names come last, and win
    return {row.gguf: module for module, row in table(architecture).items() if row.gguf}


def _unknown(name: str) -> UnsupportedError:
    return UnsupportedError(f"the tensor name {name!r} is not supported")
