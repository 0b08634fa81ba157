"""Cache reads and writes of the reference backend: the definition for kernels."""

from __future__ import annotations

import numpy as np

from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.cache import KVLayer
from kukri.kernels.kv_types import KV_TYPES
from kukri.kernels.paged_kv import PAGE_TOKENS, PagedKV


def store_tokens(cache: PagedKV, layer: int, slots: IntArray, k: FloatArray, v: FloatArray) -> None:
    """Writes k and v [T, G, K] to the slots [T]: see `KVNumbers.encode`."""
    keys, values = cache.keys[layer], cache.values[layer]
    page, offset = np.divmod(slots, PAGE_TOKENS)
    encode = KV_TYPES[cache.kv_type].encode
    assert encode is not None
    (k_numbers, k_scales), (v_numbers, v_scales) = encode(k), encode(v)
    if k_scales is None:
        keys[page, :, :, offset], values[page, :, offset] = k_numbers, v_numbers
        return
    keys["quants"][page, ..., offset] = k_numbers.reshape(*k_scales.shape, -1)
    values["quants"][page, :, offset] = v_numbers
    keys["scales"][page, ..., offset], values["scales"][page, ..., offset] = k_scales, v_scales


def read_pages(
    cache: PagedKV, layer: int, page_table: IntArray, n_context: int
) -> tuple[FloatArray, FloatArray]:
    """A sequence's pages side by side: keys float32 [G, K, n], values [G, n, K], n >= n_context."""
    pages = page_table[: -(-n_context // PAGE_TOKENS)]
    keys, values = cache.keys[layer][pages], cache.values[layer][pages]
    k_scales = v_scales = None
    if keys.dtype.names:
        n_pages, n_heads = len(pages), keys.shape[1]
        k_scales, v_scales = keys["scales"].swapaxes(-1, -2), values["scales"].swapaxes(-1, -2)
        keys, values = keys["quants"].reshape(n_pages, n_heads, -1, PAGE_TOKENS), values["quants"]
    decode, of_layer = KV_TYPES[cache.kv_type].decode, cache.layout[layer]
    assert decode is not None
    assert isinstance(of_layer, KVLayer)
    keys = decode(keys.swapaxes(-1, -2), k_scales, of_layer.d_head).transpose(1, 3, 0, 2)  # [G, K, p, B]
    values = decode(values, v_scales, of_layer.d_head).transpose(1, 0, 2, 3)  # [G, p, B, K]
    n_heads, d_head = keys.shape[:2]
    return keys.reshape(n_heads, d_head, -1), values.reshape(n_heads, -1, d_head)
