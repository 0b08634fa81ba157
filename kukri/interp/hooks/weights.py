"""Weights under TransformerLens' names and in its shapes, dequantized when they are asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.config import ModelConfig
from kukri.errors import KukriError
from kukri.kernels.arrays import FloatArray
from kukri.kernels.weight_handles import LowRank, Weight
from kukri.models.trace import Matrix, Trace
from kukri.quant.blocks import dequantize


class Weights:
    """The matrices and biases of a model: float32, new arrays at each access, [layer, ...] for all layers.

    `W_Q` [L, H, D, K]; `W_K`, `W_V` [L, G, D, K] by key heads; `W_O` [L, H, K, D]; `W_in`, `W_gate` [L, D,
    F]; `W_out` [L, F, D]; `W_E` [V, D]; `W_U` [D, V]. The biases are `b_` with the same letters; one that the
    model lacks is zeros. A layer alone: `layer("W_Q", 3)`. Raises KukriError if a model has no such matrix.
    """

    def __init__(self, trace: Trace, config: ModelConfig) -> None:
        self._trace, self._config = trace, config

    def layer(self, name: str, layer: int) -> FloatArray:
        """The entry of one layer, without the first dimension."""
        letter = name[2:]
        matrix = self._matrix(letter, layer)
        return self._weight(letter, layer, matrix) if name[:2] == "W_" else self._bias(letter, layer, matrix)

    @property
    def W_E(self) -> FloatArray:
        """The embedding [V, D]."""
        assert self._trace.embedding is not None
        return _dequantized(self._trace.embedding)

    @property
    def W_U(self) -> FloatArray:
        """The unembedding [D, V]."""
        return np.ascontiguousarray(rows(self._unembedding).T)

    @property
    def b_U(self) -> FloatArray:
        """The bias of the unembedding [V]."""
        return bias(self._unembedding)

    def unembedding_rows(self, tokens: npt.NDArray[Any]) -> FloatArray:
        """The columns of W_U for these tokens [...]: their directions [..., D]."""
        ids = np.asarray(tokens)
        found = rows(self._unembedding, ids.reshape(-1))
        return found.reshape(*ids.shape, -1)

    def __getattr__(self, name: str) -> FloatArray:
        """All layers of a weight or bias."""
        if name[:2] not in ("W_", "b_") or name[2:] not in _TAPS:
            raise AttributeError(
                f"the weights {name!r} were not found: see kukri.interp.Weights for the names"
            )
        return np.stack([self.layer(name, i) for i in range(self._config.n_layers)])

    def __dir__(self) -> list[str]:
        """The names, for completion."""
        names = [f"{kind}_{letter}" for kind in "Wb" for letter in _TAPS]
        return [*super().__dir__(), *names]

    @property
    def _unembedding(self) -> Matrix:
        matrix = self._trace.unembedding
        if matrix is None or self._config.head.kind == "none":
            raise KukriError("W_U was not found, because the model has no head")
        return matrix

    def _matrix(self, letter: str, layer: int) -> Matrix:
        if letter not in _TAPS:
            raise KukriError(f"the weights {letter!r} were not found: choose from {', '.join(_TAPS)}")
        prefix = f"blocks.{layer}."
        tap = _TAPS[letter]
        if letter == "in" and f"{prefix}mlp.hook_pre_linear" not in self._trace.products:
            tap = "mlp.hook_pre"
        elif letter == "gate" and f"{prefix}mlp.hook_pre_linear" not in self._trace.products:
            raise KukriError(f"W_gate was not found, because the MLP of layer {layer} has no gate")
        matrix = self._trace.products.get(prefix + tap)
        if matrix is None:
            raise KukriError(f"a single matrix W_{letter} was not found in layer {layer}")
        return matrix

    def _weight(self, letter: str, layer: int, matrix: Matrix) -> FloatArray:
        found = rows(matrix)  # [out, in]
        if letter in ("Q", "K", "V"):
            d_head = self._trace.head_width(f"blocks.{layer}.{_TAPS[letter]}")
            found = found.reshape(-1, d_head, found.shape[1]).transpose(0, 2, 1)
        elif letter == "O":
            d_head = self._trace.head_width(f"blocks.{layer}.attn.hook_z")
            found = found.T.reshape(-1, d_head, len(found))
        else:
            found = found.T
        return np.ascontiguousarray(found)

    def _bias(self, letter: str, layer: int, matrix: Matrix) -> FloatArray:
        found = bias(matrix)
        if letter in ("Q", "K", "V"):
            return found.reshape(-1, self._trace.head_width(f"blocks.{layer}.{_TAPS[letter]}"))
        return found


_TAPS = {
    "Q": "attn.hook_q", "K": "attn.hook_k", "V": "attn.hook_v", "O": "hook_attn_out",
    "gate": "mlp.hook_pre", "in": "mlp.hook_pre_linear", "out": "hook_mlp_out",
}  # fmt: skip


def rows(matrix: Matrix, wanted: np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None = None) -> FloatArray:
    """The rows of a matrix as float32 [out, in]: all of it, or those `wanted`, counted from its first."""
    parts: list[FloatArray] = []
    start = 0
    if wanted is not None:
        assert len(matrix.weights) == 1, "single rows are taken from one weight"
        return _rows(matrix.weights[0], matrix.updates[0], np.asarray(wanted) + matrix.start)
    for weight, update in zip(matrix.weights, matrix.updates):
        first, stop = max(matrix.start - start, 0), min(matrix.stop - start, weight.shape[0])
        if first < stop:
            parts.append(_rows(weight, update, slice(first, stop)))
        start += weight.shape[0]
    return parts[0].copy() if len(parts) == 1 else np.concatenate(parts)


def bias(matrix: Matrix) -> FloatArray:
    """The bias of a matrix, [out]; zeros if it has none."""
    if matrix.bias is None:
        return np.zeros(matrix.stop - matrix.start, np.float32)
    return matrix.bias.data[matrix.start : matrix.stop].copy()


def _rows(weight: Weight, update: LowRank | None, wanted: slice | npt.NDArray[Any]) -> FloatArray:
    """Some rows of a weight with its update, float32 [n, in]."""
    found = dequantize(weight.data[wanted], weight.type)
    if update is None:
        return found
    up = dequantize(update.up.data[wanted], update.up.type)
    made = found.copy()
    made += update.scale * up @ dequantize(update.down.data, update.down.type)
    return made


def _dequantized(weight: Weight) -> FloatArray:
    return dequantize(weight.data, weight.type).copy()
