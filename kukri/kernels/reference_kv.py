"""Cache reads and writes of the reference backend: the definition for kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.cache import KVLayer
from kukri.kernels.paged_kv import KV_BLOCK, PAGE_TOKENS, PagedKV
from kukri.kernels.q4_cache import quantize_heads, unpack_heads


def store_tokens(cache: PagedKV, layer: int, slots: IntArray, k: FloatArray, v: FloatArray) -> None:
    """Writes k and v [T, G, K] to the slots [T], clamped to the range of the cache's numbers.

    Those for a q4 cache are clamped and rotated already.
    """
    keys, values = cache.keys[layer], cache.values[layer]
    page, offset = np.divmod(slots, PAGE_TOKENS)
    if cache.kv_type == "q4":
        keys["quants"][page, ..., offset], keys["scales"][page, ..., offset] = quantize_heads(k)
        values["quants"][page, :, offset], values["scales"][page, ..., offset] = quantize_heads(v)
        return
    limit = np.finfo(np.float32 if cache.kv_type == "f32" else np.float16).max
    k, v = k.clip(-limit, limit), v.clip(-limit, limit)
    if cache.kv_type == "q8_0":
        key_quants, key_scales = _quantize(k)
        value_quants, value_scales = _quantize(v)
        keys["quants"][page, ..., offset], keys["scales"][page, ..., offset] = key_quants, key_scales
        values["quants"][page, :, offset] = value_quants.reshape(v.shape)
        values["scales"][page, ..., offset] = value_scales
    else:
        keys[page, :, :, offset], values[page, :, offset] = k, v


def read_pages(
    cache: PagedKV, layer: int, page_table: IntArray, n_context: int
) -> tuple[FloatArray, FloatArray]:
    """A sequence's pages side by side: keys float32 [G, K, n], values [G, n, K], n >= n_context."""
    pages = page_table[: -(-n_context // PAGE_TOKENS)]
    keys, values = cache.keys[layer][pages], cache.values[layer][pages]
    if cache.kv_type == "q8_0":
        keys = keys["quants"] * keys["scales"].astype(np.float32)[..., None, :]
        keys = keys.reshape(*keys.shape[:2], -1, PAGE_TOKENS)
        scales = values["scales"].astype(np.float32).swapaxes(-1, -2)
        values = values["quants"] * np.repeat(scales, KV_BLOCK, axis=-1)
    elif cache.kv_type == "q4":
        of_layer = cache.layout[layer]
        assert isinstance(of_layer, KVLayer)
        d_head = of_layer.d_head
        keys, values = (
            unpack_heads(packed, d_head) * x["scales"].astype(np.float32)[..., None]
            for x, packed in ((keys, keys["quants"].swapaxes(-1, -2)), (values, values["quants"]))
        )
        keys = keys.swapaxes(-1, -2)
    keys = keys.astype(np.float32).transpose(1, 2, 0, 3)
    values = values.astype(np.float32).transpose(1, 0, 2, 3)
    n_groups, d_head = keys.shape[:2]
    return keys.reshape(n_groups, d_head, -1), values.reshape(n_groups, -1, d_head)


def _quantize(x: FloatArray) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """(int8 [T, G, K/32, 32], float16 scales [T, G, K/32]) of x [T, G, K]; NaN stays in the scale."""
    blocks = x.reshape(*x.shape[:-1], -1, KV_BLOCK)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
        quants = np.nan_to_num(np.rint(blocks * inverse)).astype(np.int8)
    return quants, (largest[..., 0] / np.float32(127)).astype(np.float16)
