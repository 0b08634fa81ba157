"""The matrices of latent attention's heads, which safetensors and older GGUF files hold as one.

`kv_b_proj` has the rows of each head's keys, then of its values. Models take them apart, and the keys'
transposed: `k_b_proj` and `v_b_proj`, as llama.cpp's files have them.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.config import ModelConfig
from kukri.kernels.arrays import ByteArray
from kukri.kernels.quantize import requantize
from kukri.kernels.weight_handles import Experts
from kukri.quant.blocks import dequantize
from kukri.quant.types import QUANT_TYPES, QuantType

_PART = re.compile(r"\.(?P<part>[kv])_b_proj\.weight$")
JOINED = ".kv_b_proj.weight"


def parts_of_heads(name: str) -> list[str]:
    """The tensors of models that one of safetensors is for; none if it is no `kv_b_proj`."""
    return [name.replace(JOINED, f".{part}_b_proj.weight") for part in "kv"] if name.endswith(JOINED) else []


def joined_heads(name: str) -> str:
    """The tensor that holds both parts; "" for the name of any other tensor."""
    return "" if _PART.search(name) is None else _PART.sub(JOINED, name)


def joined_shape(config: ModelConfig) -> tuple[int, int]:
    """(out, in) of the tensor that holds both."""
    latent = config.latent
    assert latent is not None, "the model has one"
    return config.n_heads * (latent.d_nope + latent.d_value), latent.rank


def head_shape(name: str, config: ModelConfig) -> tuple[int, int, int]:
    """(heads, out, in) of a part."""
    latent, match = config.latent, _PART.search(name)
    assert latent is not None and match is not None, "it is a part"  # noqa: PT018
    is_keys = match["part"] == "k"
    return (config.n_heads, *((latent.rank, latent.d_nope) if is_keys else (latent.d_value, latent.rank)))


def take_part(
    rows: ByteArray, kind: QuantType, name: str, config: ModelConfig
) -> tuple[ByteArray, QuantType]:
    """A part, uint8 [heads, out, bytes per row], of the joined rows, and its type.

    Keys of a type with blocks, which cannot be transposed, become Q8_0: 8 bits lose little of them.
    """
    (n_heads, n_out, n_in), latent = head_shape(name, config), config.latent
    assert latent is not None, "the model has one"
    by_head = rows.reshape(n_heads, latent.d_nope + latent.d_value, -1)
    if ".v_b_proj." in name:
        return by_head[:, latent.d_nope :], kind
    keys = by_head[:, : latent.d_nope]
    if kind.block_size == 1:
        return _transposed(keys, kind, latent.rank), kind
    numbers = dequantize(keys.reshape(n_heads * n_in, -1), kind).reshape(n_heads, n_in, n_out)
    target = QUANT_TYPES["Q8_0"] if n_in % QUANT_TYPES["Q8_0"].block_size == 0 else QUANT_TYPES["F32"]
    turned = np.ascontiguousarray(numbers.swapaxes(1, 2)).reshape(-1, n_in).view(np.uint8)
    made = requantize(turned, QUANT_TYPES["F32"], target, tensor=name)
    return made.reshape(n_heads, n_out, -1), target


def join_parts(keys: Experts, values: Experts, target: QuantType) -> ByteArray:
    """The joined rows of both parts, in a type without blocks."""
    made = [
        np.stack([requantize(w.data, w.type, target, tensor=w.name) for w in part.weights])
        for part in (keys, values)
    ]
    turned = _transposed(made[0], target, keys.shape[2])
    return np.concatenate([turned, made[1]], axis=1).reshape(-1, made[1].shape[-1])


def _transposed(rows: ByteArray, kind: QuantType, n_in: int) -> ByteArray:
    """Matrices [n, out, in] of a type without blocks as [n, in, out]: a copy."""
    numbers: npt.NDArray[Any] = np.ascontiguousarray(rows).view(f"u{kind.block_bytes}")
    assert numbers.shape[-1] == n_in, "rows of whole numbers"
    return np.ascontiguousarray(numbers.swapaxes(1, 2)).view(np.uint8)
