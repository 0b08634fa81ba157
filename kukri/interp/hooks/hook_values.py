"""Computes the values of points from the values of taps, and turns edits of a point into edits of its tap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.config import ModelConfig
from kukri.engine.spans.embedding_spans import EmbeddingSpans
from kukri.interp.hooks.attention import as_cached, mixed, pattern, scores
from kukri.interp.hooks.head_inputs import head_steps, through
from kukri.interp.hooks.hook_names import LOGITS, Point, norm_scale, normalized, points, scaled
from kukri.interp.hooks.weights import Weights
from kukri.interp.hooks.weights import bias as weight_bias
from kukri.interp.hooks.weights import rows as weight_rows
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.cache import KVType
from kukri.kernels.rope_rows import RopeRows
from kukri.kernels.weight_handles import RopeFrequencies
from kukri.models.trace import Trace

Taps = Mapping[str, FloatArray]
Encode = Callable[..., list[int]]


class Rows:
    """Token sequences back to back as rows, and as a batch [B, T] padded on the right.

    Attributes: lengths [B], n_batch, n_tokens (T, the longest), n_rows; spans, of each sequence, none for
    texts.
    """

    def __init__(self, lengths: IntArray, spans: Sequence[EmbeddingSpans] = ()) -> None:
        self.lengths, self.spans = lengths, spans
        self.n_batch, self.n_tokens = len(lengths), int(lengths.max(initial=0))
        self.n_rows = int(lengths.sum())
        self._is_full = self.n_rows == self.n_batch * self.n_tokens
        self._is_token = np.arange(self.n_tokens) < lengths[:, None]

    def padded(self, x: FloatArray) -> FloatArray:
        """x [rows, ...] as [B, T, ...], zeros for padding; a view if nothing is padded."""
        shape = (self.n_batch, self.n_tokens, *x.shape[1:])
        if self._is_full:
            return x.reshape(shape)
        found = np.zeros(shape, x.dtype)
        found[self._is_token] = x
        return found

    def rows(self, x: FloatArray) -> FloatArray:
        """The tokens of x [B, T, ...] as rows."""
        return x.reshape(self.n_rows, *x.shape[2:]) if self._is_full else x[self._is_token]

    def seen_ahead(self, window: int | None) -> npt.NDArray[np.bool_] | bool:
        """Return which later keys a query sees, in a layer with this window: bool [B, T, T]."""
        if not any(spans.inputs for spans in self.spans):
            return False
        found = np.zeros((self.n_batch, self.n_tokens, self.n_tokens), np.bool_)
        for seen, spans in zip(found, self.spans, strict=True):
            spans.mark_seen_ahead(seen, window)
        return found


class Model:
    """The sources of values besides taps.

    Attributes: config; trace; weights; points, every name; kv_type, which rounds keys and values;
    encode(text, add_special), which gives token ids; adjust_logits, which caps or divides the logits of the
    head as the model does.
    """

    def __init__(
        self,
        config: ModelConfig,
        trace: Trace,
        kv_type: KVType,
        encode: Encode,
        adjust_logits: Callable[[FloatArray], FloatArray],
    ) -> None:
        self.config, self.trace, self.kv_type, self.encode = config, trace, kv_type, encode
        self.adjust_logits = adjust_logits
        self.weights = Weights(trace, config)
        self.points = points(trace, config.n_layers)
        self._rope_rows: dict[RopeFrequencies, RopeRows] = {}

    def has(self, point: Point, taps: Taps) -> bool:
        """True if its value can be computed from these taps."""
        return LOGITS in taps if point.form == "logits" else all(tap in taps for tap in point.needs)

    def value(self, point: Point, taps: Taps, rows: Rows, ids: IntArray) -> FloatArray | IntArray:
        """The value of a point in TransformerLens' shape, of taps [rows, width] and tokens `ids` [rows]."""
        form = point.form
        if form == "tokens":
            return rows.padded(ids)  # type: ignore[arg-type]
        if form in ("cos", "sin"):
            return self._rotation(point, rows.n_tokens)
        if form in ("scores", "pattern"):
            found = self.scores(point, taps, rows)
            return found if form == "scores" else self.pattern(point, found)
        if form == "logits":
            return rows.padded(taps[LOGITS])
        return self._token_value(point, taps[point.tap], rows)

    def n_bytes(self, point: Point, rows: Rows) -> int:
        """Bytes of a point's value, at least: experts give several rows a token."""
        n = rows.n_batch * rows.n_tokens
        if point.form in ("scores", "pattern"):
            assert point.layer is not None
            return 4 * n * self.trace.heads[point.layer].spec.n_heads * rows.n_tokens
        if point.form == "result":
            return 4 * n * self.trace.widths[point.tap] // self._d_head(point) * self.config.d_model
        if point.form == "head_inputs":
            return 4 * n * self.trace.widths[point.edit_tap] // self._d_head(point) * self.config.d_model
        if point.form == "logits":
            return 4 * n * self.config.n_vocab
        return 4 * n * self.trace.widths.get(point.tap, 1)

    def scores(self, point: Point, taps: Taps, rows: Rows) -> FloatArray:
        """The scores [B, H, T, T] of a point's layer."""
        assert point.layer is not None
        spec = self.trace.heads[point.layer].spec
        q_tap, k_tap = point.needs
        q = rows.padded(self.heads(taps[q_tap], spec.d_head))
        k = rows.padded(as_cached(self.heads(taps[k_tap], spec.d_head), self.kv_type))
        return scores(q, k, spec, rows.lengths, rows.seen_ahead(spec.window))

    def pattern(self, point: Point, found: FloatArray) -> FloatArray:
        """The pattern [B, H, T, T] of the scores of a point's layer."""
        assert point.layer is not None
        return pattern(found, self.trace.heads[point.layer].spec)

    def mixed(self, layer: int, weights: FloatArray, v: FloatArray, rows: Rows) -> FloatArray:
        """z [rows, H*K] of a pattern [B, H, T, T] and the tap of values [rows, G*K]."""
        spec = self.trace.heads[layer].spec
        values = rows.padded(as_cached(self.heads(v, spec.d_head), self.kv_type))
        return rows.rows(mixed(weights, values, spec)).reshape(rows.n_rows, -1)

    def of_inputs(self, point: Point, x: FloatArray, wanted: Any) -> FloatArray:
        """Queries, keys or values [n, K] of heads by their inputs x [rows, H, D], if `wanted` [rows, H]."""
        shared, of_heads = head_steps(point.steps, self._d_head(point), wanted.shape[1])
        of_head = np.nonzero(wanted)[1]
        given = through(shared, x[wanted])
        found = np.empty((len(given), self._d_head(point)), np.float32)
        for head in np.unique(of_head):
            found[of_head == head] = through(of_heads[head], given[of_head == head])
        return found

    @staticmethod
    def heads(x: FloatArray, d_head: int) -> FloatArray:
        """x [rows, heads*K] as [rows, heads, K]."""
        return x.reshape(len(x), -1, d_head)

    def edited(self, point: Point, value: FloatArray, rows: Rows) -> FloatArray:
        """The tap [rows, width] that gives a point this value."""
        x = rows.rows(value)
        if point.form == "heads":
            return x.reshape(len(x), -1)
        if point.form == "normalized":
            assert point.norm is not None
            return scaled(point.norm, x)
        return x.reshape(-1, x.shape[-1])

    def _token_value(self, point: Point, x: FloatArray, rows: Rows) -> FloatArray:
        norm, form = point.norm, point.form
        if form in ("expert_indices", "expert_scores"):
            return rows.padded(self._chosen(point, x))
        if form == "head_inputs":
            n_heads = self.trace.widths[point.edit_tap] // self._d_head(point)
            return rows.padded(np.repeat(x[:, None], n_heads, axis=1))
        if point.matrix is not None:
            x = x @ weight_rows(point.matrix).T + weight_bias(point.matrix)
        if form == "plain":
            if len(x) != rows.n_rows:  # a row for each expert that a token uses
                x = x.reshape(rows.n_rows, -1, x.shape[1])
            return rows.padded(x)
        if form == "heads":
            return rows.padded(self.heads(x, self._d_head(point)))
        if form == "result":
            return rows.padded(self._result(point, x))
        assert norm is not None
        if form == "scale":
            return rows.padded(norm_scale(norm, x))
        if form == "normalized":
            return rows.padded(normalized(norm, x))
        if form == "norm_out":
            return rows.padded(scaled(norm, normalized(norm, x)))
        heads = rows.padded(self.heads(x, len(norm.weight))).swapaxes(1, 2)  # [B, head, T, K]
        if form == "head_in":
            return heads
        if form == "head_scale":
            return norm_scale(norm, heads)
        divided = normalized(norm, heads)
        return divided if form == "head_normalized" else scaled(norm, divided)

    def _chosen(self, point: Point, weights: FloatArray) -> Any:
        """The experts that each token uses by their weights [rows, E], or these, the largest first."""
        assert point.layer is not None
        order = np.argsort(-weights, axis=-1, kind="stable")[:, : self.trace.routings[point.layer].n_used]
        if point.form == "expert_indices":
            return order.astype(np.int32)
        return np.take_along_axis(weights, order, axis=-1)

    def _d_head(self, point: Point) -> int:
        return self.trace.head_width(point.edit_tap if point.form == "head_inputs" else point.tap)

    def _result(self, point: Point, z: FloatArray) -> FloatArray:
        """Each head's part of the attention's output, without its bias: [rows, H, D]."""
        matrix = self.trace.matrices[f"blocks.{point.layer}.hook_attn_out"]
        heads = self.heads(z, self._d_head(point))
        w_o = weight_rows(matrix).T.reshape(heads.shape[1], heads.shape[2], -1)  # [H, K, D]
        result: FloatArray = np.einsum("rhk,hkd->rhd", heads, w_o, optimize=True)
        return result

    def _rotation(self, point: Point, n_tokens: int) -> FloatArray:
        """cos or sin of the first positions, [1, T, rotary_dim]: each frequency twice."""
        heads = self.trace.heads
        rotary = [i for i in heads if heads[i].rope is not None]
        # outside the layers the frequencies of full attention, if windows have others
        layer = min(rotary, key=lambda i: heads[i].spec.window is not None)
        if point.layer is not None:
            layer = point.layer
        frequencies = heads[layer].rope
        assert frequencies is not None
        found = self._rope_rows.setdefault(frequencies, RopeRows(frequencies))
        found.ensure(n_tokens)
        half = (found.cos if point.form == "cos" else found.sin)[:n_tokens]
        return np.concatenate([half, half], axis=1)[None]
