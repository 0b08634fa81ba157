"""llama.cpp's mixes: which type each tensor of a "Q4_K_M" file gets.

The rules and their names are taken from src/llama-quant.cpp, as in llama-cpp-python 0.3.36: a "Q4_K_M" file
holds Q4_K, and Q6_K where it pays most. A rule counts only the layers that have the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

from kukri.quant.types import FLOATS, QUANT_TYPES, WRITTEN, QuantType, fitting_type

# mix -> its main type and GGUF's number for it (general.file_type, llama.h's llama_ftype)
MIXES: dict[str, tuple[str, int]] = {
    **{type.name: (type.name, type.file_type) for type in (*FLOATS, *WRITTEN) if type.file_type is not None},
    "Q2_K_S": ("Q2_K", 21),
    "Q3_K_S": ("Q3_K", 11),
    "Q3_K_M": ("Q3_K", 12),
    "Q3_K_L": ("Q3_K", 13),
    "Q4_K_S": ("Q4_K", 14),
    "Q4_K_M": ("Q4_K", 15),
    "Q5_K_S": ("Q5_K", 16),
    "Q5_K_M": ("Q5_K", 17),
}

# the name of a file's mix by general.file_type, also for mixes that are only read
FILE_TYPES = {number: name for name, (_, number) in MIXES.items()} | {
    19: "IQ2_XXS", 20: "IQ2_XS", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 26: "IQ3_S", 27: "IQ3_M",
    28: "IQ2_S", 29: "IQ2_M", 31: "IQ1_M", 38: "MXFP4_MOE", 39: "NVFP4",
}  # fmt: skip

ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}  # llama.cpp's short names

Shapes = Mapping[str, tuple[int, ...]]

_LAYER = re.compile(r"blk\.(\d+)\.(attn_v|attn_qkv|ffn_down|attn_output)(?:_exps)?\.weight")


# embeddings that each layer has: at 4 bits they cost more than the bits are worth
_PER_LAYER = re.compile(r"per_layer_(?:token_embd|model_proj)\.weight|blk\.\d+\.(?:inp_gate|proj)\.weight")

# heads for tasks, and the embeddings of positions and types: a few rows, which llama.cpp reads as floats
_KEPT = ("cls.weight", "cls.output.weight", "qa_output.weight", "position_embd.weight", "token_types.weight")


def is_quantized(name: str, shape: tuple[int, ...]) -> bool:
    """Return True for the tensors that a mix quantizes: matrices other than norms. `name` is GGUF's.

    Heads for tasks and routers of experts are not quantized, because much depends on their few rows.
    """
    if name in _KEPT or name.endswith(".ffn_gate_inp.weight"):
        return False
    return len(shape) > 1 and name.endswith(".weight") and not name.endswith("_norm.weight")


def file_type(types: Mapping[str, QuantType], shapes: Shapes) -> int | None:
    """Return GGUF's number (general.file_type) of the most frequent type of weights; None if it has none."""
    n_weights: dict[str, int] = {}
    for name, type in types.items():
        if len(shapes[name]) > 1:
            n_weights[type.name] = n_weights.get(type.name, 0) + prod(shapes[name])
    if not n_weights:
        return None
    most = max(n_weights, key=n_weights.__getitem__)
    mix = ALIASES.get(most, most)
    return MIXES[mix][1] if mix in MIXES else None


def mix_types(mix: str, shapes: Shapes, queries_per_key: int) -> dict[str, QuantType]:
    """The type of each tensor that a mix of MIXES touches, by GGUF name.

    `shapes` are all tensors of the file, (out, in); `queries_per_key` is query heads per key head. Where rows
    are not whole blocks, a type's stand-in takes its place, or F16.
    """
    main = QUANT_TYPES[MIXES[mix][0]]
    head = "output.weight" if "output.weight" in shapes else "token_embd.weight"
    places = _places(shapes)
    types: dict[str, QuantType] = {}
    for name, shape in shapes.items():
        if not is_quantized(name, shape):
            continue
        chosen = main
        if main.block_size > 1 and name == head:
            chosen = _head_type(main, shape[-1])
        elif name == "token_embd.weight" and main.embedding:
            chosen = QUANT_TYPES[main.embedding]
        elif _PER_LAYER.fullmatch(name) and main.block_size > 1:
            chosen = QUANT_TYPES["Q8_0"]
        elif name in places:
            chosen = QUANT_TYPES[_layer_type(mix, *places[name], queries_per_key) or main.name]
        types[name] = fitting_type(chosen, shape[-1]) or QUANT_TYPES["F16"]
    return types


def _head_type(main: QuantType, n_columns: int) -> QuantType:
    if n_columns % main.block_size or main.name == "Q8_0":
        return QUANT_TYPES["Q8_0"]
    return QUANT_TYPES["Q6_K"]


def _places(shapes: Shapes) -> dict[str, tuple[str, int, int]]:
    """Return (kind, place among the tensors of that kind, number of them) of each tensor with rules."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name in shapes:
        if match := _LAYER.fullmatch(name):
            kind = "attn_v" if match[2] == "attn_qkv" else match[2]
            found.setdefault(kind, []).append((int(match[1]), name))
    return {
        name: (kind, place, len(layers))
        for kind, layers in found.items()
        for place, (_, name) in enumerate(sorted(layers))
    }


def _layer_type(mix: str, kind: str, i: int, n: int, queries_per_key: int) -> str | None:
    """The type of tensor `i` of the `n` of a kind; None for the mix's main type."""
    if kind == "attn_output":
        return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(mix)
    more = i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2
    if mix in ("Q4_K_M", "Q5_K_M") and more:
        return "Q6_K"
    if kind == "ffn_down":
        first = i < n // 8
        return {
            "Q2_K": "Q3_K",
            "Q2_K_S": "Q4_K" if first else None,
            "Q3_K_M": "Q5_K" if i < n // 16 else "Q4_K",
            "Q3_K_L": "Q5_K",
            "Q4_K_S": "Q5_K" if first else None,
            "IQ4_NL": "Q5_K" if first else None,
            "IQ4_XS": "Q5_K" if first else None,
        }.get(mix)
    shared = queries_per_key >= 4  # so few values that bits are cheap
    chosen = {
        "Q2_K": "Q4_K" if shared else "Q3_K",
        "Q2_K_S": "Q4_K" if shared else None,
        "Q3_K_M": "Q5_K" if i < 2 else "Q4_K",
        "Q3_K_L": "Q5_K",
        "Q4_K_S": "Q5_K" if i < 4 else None,
        "IQ4_NL": "Q5_K" if shared else None,
        "IQ4_XS": "Q5_K" if shared else None,
    }.get(mix)
    is_70b = n == 80 and queries_per_key > 1
    return "Q5_K" if is_70b and (chosen or MIXES[mix][0]) in ("Q3_K", "Q4_K") else chosen
