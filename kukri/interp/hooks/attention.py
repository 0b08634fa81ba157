"""Attention scores and patterns, computed eagerly alongside a backend's own kernel.

A backend keeps neither. They are computed from rotated queries and keys, the latter rounded as the KV cache
rounds them, so reading them changes no bit of the stream.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.cache import KVType
from kukri.kernels.specs import AttentionSpec

MASKED = np.finfo(np.float32).min  # the score of a key that is not seen, as in transformers
_F16_MAX = np.float32(np.finfo(np.float16).max)


def as_cached(x: FloatArray, kv_type: KVType) -> FloatArray:
    """Return keys or values as the cache stores them: f16 rounds and clamps, f32 changes nothing."""
    return x if kv_type == "f32" else x.clip(-_F16_MAX, _F16_MAX).astype(np.float16).astype(np.float32)


def scores(
    q: FloatArray,
    k: FloatArray,
    spec: AttentionSpec,
    lengths: IntArray,
    seen_ahead: npt.NDArray[np.bool_] | bool = False,
) -> FloatArray:
    """Scores [B, H, T, T] of q [B, T, H, K] and k [B, T, G, K]; MASKED if a key is not seen.

    Keys of `seen_ahead` [B, T, T] are, whatever the layer says.
    """
    n_batch, n_tokens = q.shape[:2]
    queries = q.reshape(n_batch, n_tokens, spec.n_kv_heads, spec.group, spec.d_head).transpose(0, 2, 3, 1, 4)
    keys = k.transpose(0, 2, 3, 1)[:, :, None]  # [B, G, 1, K, T]
    found: FloatArray = (queries @ keys * np.float32(spec.scale)).reshape(n_batch, spec.n_heads, n_tokens, -1)
    if spec.softcap is not None:
        found = np.float32(spec.softcap) * np.tanh(found / np.float32(spec.softcap))
    if (biases := spec.biases(keys_ahead(n_tokens))) is not None:
        found = found + biases
    return np.where((_is_seen(spec, n_tokens, lengths) | seen_ahead)[:, None], found, MASKED)


def pattern(found: FloatArray, spec: AttentionSpec) -> FloatArray:
    """The softmax of scores [B, H, T, T] over keys and the heads' sinks, if there are any; zeros for
    padding, which sees nothing.
    """
    top = found.max(axis=-1, keepdims=True)
    is_padding = top == MASKED
    sinks = np.float32(-np.inf) if spec.sinks is None else spec.sinks.data.reshape(-1, 1, 1)
    top = np.maximum(top, sinks)
    weights: FloatArray = np.exp(found - top)
    weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sinks - top)
    return np.where(is_padding, np.float32(0), weights)


def mixed(weights: FloatArray, v: FloatArray, spec: AttentionSpec) -> FloatArray:
    """z [B, T, H, K] of a pattern [B, H, T, T] and values [B, T, G, K]."""
    n_batch, n_tokens = v.shape[:2]
    by_group = weights.reshape(n_batch, spec.n_kv_heads, spec.group, n_tokens, n_tokens)
    values = v.transpose(0, 2, 1, 3)[:, :, None]  # [B, G, 1, T, K]
    z: FloatArray = (by_group @ values).reshape(n_batch, spec.n_heads, n_tokens, -1)
    return z.transpose(0, 2, 1, 3)


def keys_ahead(n_tokens: int) -> IntArray:
    """Return by how many tokens each key of a text comes after a query, [query, key]."""
    steps = np.arange(n_tokens)
    ahead: IntArray = steps - steps[:, None]
    return ahead


def seen_keys(spec: AttentionSpec, n_tokens: int) -> npt.NDArray[np.bool_]:
    """Return which keys of a text of `n_tokens` tokens a query sees: bool [query, key]."""
    query, key = np.arange(n_tokens)[:, None], np.arange(n_tokens)
    seen = key <= query if spec.is_causal else np.ones((n_tokens, n_tokens), np.bool_)
    seen = seen & (key >= spec.first_key) & (key < (spec.stop_key or n_tokens))
    return seen if spec.window is None else seen & (abs(query - key) < spec.window)


def _is_seen(spec: AttentionSpec, n_tokens: int, lengths: IntArray) -> npt.NDArray[np.bool_]:
    """Return which keys each query sees: bool [B, T, T]."""
    is_token = np.arange(n_tokens) < lengths[:, None]  # [B, T]
    return seen_keys(spec, n_tokens) & is_token[:, None] & is_token[:, :, None]
