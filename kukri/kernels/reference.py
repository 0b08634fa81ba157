"""The definition of right: every op in NumPy, float32, eager, one obvious way.

A token's result never depends on how many others share its step: an output of a matrix is one dot product,
and each token attends over exactly the context it sees. So chunking a prompt changes no bit, here as in every
backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.host.hardware import available_bytes, cpu_model
from kukri.kernels.activations import NUMPY
from kukri.kernels.array_ops import ArrayOps
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.backend import EVEN_ROW_COSTS, Backend, CompiledProgram
from kukri.kernels.cache import Cache, CacheLayout, KVType
from kukri.kernels.expert_choice import NO_EXPERT, Routes, choose, used_experts
from kukri.kernels.host_step import (
    HostLogits,
    StoppedError,
    check_adapters,
    check_routes,
    check_sizes,
    row_adapters,
)
from kukri.kernels.kv_types import KV_TYPES, rotate_heads, within_range
from kukri.kernels.op_set import EmbedBy, Program
from kukri.kernels.paged_kv import PAGE_TOKENS, PagedKV, page_bytes
from kukri.kernels.reference_kv import read_pages, store_tokens
from kukri.kernels.reference_sampling import ReferenceSampling
from kukri.kernels.rope_rows import RopeRows
from kukri.kernels.specs import AttentionSpec, DeltaSpec, Routing, ScanSpec
from kukri.kernels.step import ForwardBatch, StepInputs, StepLimits
from kukri.kernels.step_arrays import PoolPages
from kukri.kernels.taps import Hook
from kukri.kernels.weight_handles import AdapterSlots, Experts, LowRank, RopeFrequencies, Vector, Weight
from kukri.quant.blocks import dequantize

Array = npt.NDArray[Any]


class ReferenceBackend(Backend):
    """Runs programs with `ReferenceOps`. Keeps each weight's float32 matrix once it was used."""

    name = "reference"
    exact_kv_type: KVType = "f32"
    page_tokens = PAGE_TOKENS
    begins_at_taps = False
    is_batch_invariant = True
    row_costs = EVEN_ROW_COSTS
    sampling = ReferenceSampling()

    def __init__(self) -> None:
        self._matrices: dict[Weight, FloatArray] = {}
        self._rope_rows: dict[RopeFrequencies, RopeRows] = {}

    @property
    def arithmetic(self) -> str:
        return f"reference, NumPy {np.__version__}, {cpu_model()}"

    def new_cache(
        self,
        layout: CacheLayout,
        n_pages: int | Sequence[int],
        n_states: int = 0,
        kv_type: KVType = "f16",
    ) -> PagedKV:
        return PagedKV(layout, n_pages, n_states, kv_type)

    def page_bytes(self, layout: CacheLayout, kv_type: KVType) -> int:
        return page_bytes(layout, kv_type)

    def free_bytes(self) -> int:
        return available_bytes()

    def compile(
        self,
        program: Program,
        cache: Cache | None,
        limits: StepLimits,
        taps: frozenset[str] = frozenset(),
        adapters: AdapterSlots = (),
    ) -> CompiledProgram:
        """The program as it is, bound to the cache. `limits` are checked at each step."""
        cache = self.new_cache((), 1) if cache is None else cache
        assert isinstance(cache, PagedKV), "a cache belongs to the backend that made it"
        ops = ReferenceOps(cache, taps, self._matrices, self._rope_rows, adapters)
        return _BoundProgram(program, ops, limits)


class _BoundProgram:
    def __init__(self, program: Program, ops: ReferenceOps, limits: StepLimits) -> None:
        self.program, self.ops, self.limits = program, ops, limits
        self.inputs = StepInputs.zeros(limits, len(ops.cache.n_pages))

    def __call__(
        self,
        batch: ForwardBatch,
        on_tap: Hook | None = None,
        *,
        start: str | None = None,
        stop: str | None = None,
    ) -> HostLogits:
        """See CompiledProgram. Everything before `start` is computed, and replaced there."""
        check_sizes(batch, self.limits)
        check_adapters(batch, self.ops.adapters)
        self.ops.on_tap, self.ops.stop = on_tap, stop
        self.ops.set_row_adapters(row_adapters(batch) if self.ops.adapters else None)
        with np.errstate(over="ignore", invalid="ignore"):  # NaN and inf go through, and the caller sees them
            try:
                logits: FloatArray = self.program(self.ops, batch)
            except StoppedError:
                logits = np.empty((0, 0), np.float32)
        return HostLogits(logits)


class ReferenceOps(ArrayOps):
    """The op set on arrays of NumPy."""

    xp = NUMPY

    def __init__(
        self,
        cache: PagedKV,
        taps: frozenset[str] = frozenset(),
        matrices: dict[Weight, FloatArray] | None = None,
        rope_rows: dict[RopeFrequencies, RopeRows] | None = None,
        adapters: AdapterSlots = (),
    ) -> None:
        super().__init__(cache, taps, adapters)
        self._matrices = {} if matrices is None else matrices
        self._rope_rows = {} if rope_rows is None else rope_rows

    def embed(
        self,
        weight: Weight,
        batch: ForwardBatch,
        by: EmbedBy = "token_ids",
        residual: FloatArray | None = None,
    ) -> FloatArray:
        """Rows of `weight` [n, D] for the token ids, positions or token types, plus `residual` -> [T, D]."""
        rows: FloatArray = self._matrix(weight)[getattr(batch, by)]
        return rows if residual is None else rows + residual

    def rms_norm(self, x: FloatArray, weight: Vector, eps: float) -> FloatArray:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        y: FloatArray = x / np.sqrt(mean_square + np.float32(eps)) * weight.data
        return y

    def layer_norm(self, x: FloatArray, weight: Vector, bias: Vector, eps: float) -> FloatArray:
        centred = x - np.mean(x, axis=-1, keepdims=True)
        return self.rms_norm(centred, weight, eps) + bias.data

    def product(self, x: FloatArray, weights: Sequence[Weight]) -> FloatArray:
        y = np.empty((len(x), sum(weight.shape[0] for weight in weights)), np.float32)
        start = 0
        for weight in weights:
            stop = start + weight.shape[0]
            # one dot product an output: a matrix product sums in an order that depends on the number of rows
            np.vecdot(x[:, None], self._matrix(weight), out=y[:, start:stop])
            start = stop
        return y

    def low_rank(self, x: FloatArray, update: LowRank) -> FloatArray:
        down, up = (dequantize(w.data, w.type) for w in (update.down, update.up))
        inner = np.vecdot(x[:, None], down) * np.float32(update.scale)
        y: FloatArray = np.vecdot(inner[:, None], up)
        return y

    def head_linear(self, x: FloatArray, heads: Experts) -> FloatArray:
        n_heads, n_out, _ = heads.shape
        y = np.empty((len(x), n_heads * n_out), np.float32)
        for weight, own, out in zip(heads.weights, np.split(x, n_heads, 1), np.split(y, n_heads, 1)):
            out[:] = self.product(own, [weight])
        return y

    def cos_and_sin(self, rope: RopeFrequencies, batch: ForwardBatch) -> tuple[FloatArray, FloatArray]:
        positions = batch.positions if batch.rope_positions is None else batch.rope_positions
        rows = self._rope_rows.get(rope)
        if rows is None:
            rows = self._rope_rows[rope] = RopeRows(rope)
        rows.ensure(int(positions.max(initial=-1)) + 1)
        return rows.at(positions)

    def attention(
        self,
        q: FloatArray,
        k: FloatArray | None,
        v: FloatArray | None,
        spec: AttentionSpec,
        batch: ForwardBatch,
    ) -> FloatArray:
        """Stores k and v at the batch's slots, then each token attends over its context -> [T, H*K]."""
        kept = KV_TYPES[self.cache.kv_type]
        is_rotated = kept.is_rotated
        heads = [x.reshape(len(x), -1, spec.d_head) for x in (q, k, v) if x is not None]
        if kept.has_range and spec.key_range is not None:
            sides = (x.data.reshape(-1, spec.d_head) for x in (spec.key_range.middle, spec.key_range.reach))
            groups = q.reshape(len(q), -1, spec.group, spec.d_head)
            grouped, heads[1] = within_range(groups, heads[1], *sides)
            heads[0] = grouped.reshape(heads[0].shape)
        if is_rotated:
            limit = np.finfo(np.float16).max
            heads = [rotate_heads(x) for x in (heads[0], *(x.clip(-limit, limit) for x in heads[1:]))]
        if spec.reads is None:
            store_tokens(self.cache, spec.layer, self._pages(spec, batch).slots, *heads[1:])
        q = heads[0].reshape(q.shape)
        attend = self._attend_masked if batch.mask is not None else self._attend
        out = attend(q, spec, batch)
        return rotate_heads(out.reshape(heads[0].shape)).reshape(q.shape) if is_rotated else out

    def _pages(self, spec: AttentionSpec, batch: ForwardBatch) -> PoolPages[IntArray]:
        return batch.pages(self.cache.pool_of[spec.kv_layer])

    def _attend(self, q: FloatArray, spec: AttentionSpec, batch: ForwardBatch) -> FloatArray:
        """Each token over what it sees of its context -> [T, H*K]."""
        out = np.empty(q.shape, np.float32)
        for s in range(batch.n_sequences):
            start, stop, n_context = batch.query_start[s], batch.query_start[s + 1], batch.context_len[s]
            page_table = self._pages(spec, batch).page_table[s]
            keys, values = read_pages(self.cache, spec.kv_layer, page_table, n_context)
            for t in range(start, stop):
                position = int(batch.positions[t])
                first = 0 if spec.window is None else position + 1 - spec.window
                first = max(first, spec.first_key)
                n_ahead = n_context if spec.n_ahead is None else spec.n_ahead
                n_visible = min(n_context, position + 1 + n_ahead, spec.stop_key or n_context)
                heads = q[t].reshape(
                    spec.n_kv_heads, -1, spec.d_head
                )  # [G, H/G, K]: query heads by their KV head
                scores = self._scores(heads, keys[:, :, first:n_visible], spec, position - first)
                out[t] = (_softmax(scores, spec.sinks) @ values[:, first:n_visible]).reshape(-1)
        return out

    def _attend_masked(self, q: FloatArray, spec: AttentionSpec, batch: ForwardBatch) -> FloatArray:
        """Each token over the whole context, the batch's mask added to its scores -> [T, H*K]."""
        assert batch.mask is not None
        n_context = batch.context_len[0]
        page_table = self._pages(spec, batch).page_table[0]
        keys, values = read_pages(self.cache, spec.kv_layer, page_table, n_context)
        out = np.empty(q.shape, np.float32)
        for t in range(batch.n_tokens):
            heads = q[t].reshape(spec.n_kv_heads, -1, spec.d_head)
            scores = self._scores(heads, keys[:, :, :n_context], spec, int(batch.positions[t]))
            added = np.broadcast_to(batch.mask[:, t], (spec.n_heads, n_context)).reshape(scores.shape)
            out[t] = (_softmax(scores + added, spec.sinks) @ values[:, :n_context]).reshape(-1)
        return out

    def _scores(self, heads: FloatArray, keys: FloatArray, spec: AttentionSpec, place: int) -> FloatArray:
        """Scores [G, H/G, n] of query heads [G, H/G, K] and keys [G, K, n], a query at `place` among them."""
        scores = heads @ keys * np.float32(spec.scale)
        scores = scores if spec.softcap is None else self.map("softcap", scores, a=spec.softcap)
        biases = spec.biases(np.arange(keys.shape[2]) - place)
        return scores if biases is None else scores + biases.reshape(scores.shape)

    def scan(
        self, x: FloatArray, b: FloatArray, c: FloatArray, dt: FloatArray, spec: ScanSpec, batch: ForwardBatch
    ) -> FloatArray:
        """Token by token: the state decays, takes b xT in, and c reads it."""
        n_tokens, n_heads, n_groups = len(x), spec.n_heads, spec.n_groups
        steps = np.clip(np.logaddexp(dt + spec.dt_bias.data, np.float32(0)), *spec.limits)
        kept = np.exp(steps * spec.a.data)[..., None, None]
        values = x.reshape(n_tokens, n_heads, spec.d_head)
        b, c = (np.repeat(m.reshape(n_tokens, n_groups, -1), n_heads // n_groups, axis=1) for m in (b, c))
        added = (steps[..., None] * b)[..., None] * values[:, :, None]  # [T, H, N, P]
        y = spec.d.data[:, None] * values
        for step, states, state in self._states("scan", spec.layer, batch):
            saves = dict(step.saves)
            for t in range(step.start, step.stop):
                state = state * kept[t] + added[t]
                y[t] += (c[t][..., None] * state).sum(axis=1)
                if t in saves:
                    states[saves[t]] = state
            states[step.slot] = state
        return y.reshape(x.shape)

    def delta_rule(
        self,
        q: FloatArray,
        k: FloatArray,
        v: FloatArray,
        decay: FloatArray,
        beta: FloatArray,
        spec: DeltaSpec,
        batch: ForwardBatch,
    ) -> FloatArray:
        """Token by token: the state decays, what k finds in it moves to v, and q reads it."""
        n_tokens, n_heads, n_groups = len(v), spec.n_heads, spec.n_groups
        heads = np.arange(n_heads)
        key_head = heads % n_groups if spec.are_tiled else heads // (n_heads // n_groups)
        q, k = (m.reshape(n_tokens, n_groups, -1)[:, key_head, :, None] for m in (q, k))  # [T, H, K, 1]
        values = v.reshape(n_tokens, n_heads, 1, spec.d_head)
        kept = np.exp(np.logaddexp(decay + spec.dt_bias.data, np.float32(0)) * spec.a.data)[..., None, None]
        rate = (1 / (1 + np.exp(-beta)))[..., None, None]
        y = np.empty((n_tokens, n_heads, spec.d_head), np.float32)
        for step, states, state in self._states("delta", spec.layer, batch):
            saves = dict(step.saves)
            for t in range(step.start, step.stop):
                state = state * kept[t]
                found = (k[t] * state).sum(axis=1, keepdims=True)
                state = state + k[t] * (rate[t] * (values[t] - found))
                y[t] = (q[t] * state).sum(axis=1)
                if t in saves:
                    states[saves[t]] = state
            states[step.slot] = state
        return y.reshape(v.shape)

    def route(
        self, logits: FloatArray, routing: Routing, tap: tuple[str, int | None] | None = None
    ) -> Routes:
        """The shares of the chosen experts."""
        choice = choose(logits, routing)
        weights = np.zeros(logits.shape, np.float32)
        np.put_along_axis(weights, choice.numbers, choice.shares, axis=1)
        if routing.scales is not None:
            weights *= routing.scales.data
        if tap is not None:
            weights = self.tap(*tap, weights)
            check_routes(weights, routing.n_used)
        return Routes(weights, used_experts(weights, routing.n_used))

    def expert_linear(
        self, x: FloatArray, routes: Routes, experts: Sequence[Experts], bias: Vector | None = None
    ) -> FloatArray:
        """Each row's expert, and its update, applied to it; zeros for a token without an expert."""
        numbers, n_used = routes.experts.reshape(-1), routes.experts.shape[1]
        rows = x if len(x) == len(numbers) else np.repeat(x, n_used, axis=0)
        of_tokens, width = self.row_adapters, sum(each.shape[1] for each in experts)
        y = np.zeros((len(rows), width), np.float32)
        for expert in np.unique(numbers[numbers != NO_EXPERT]):
            mine = numbers == expert
            weights = [each.weights[expert] for each in experts]
            made = self.product(rows[mine], weights)
            if bias is not None:
                made += bias.data.reshape(-1, width)[expert]
            if of_tokens is not None:
                self.set_row_adapters(np.repeat(of_tokens, n_used)[mine])
            self.update(made, rows[mine], weights)
            y[mine] = made
        self.set_row_adapters(of_tokens)
        return y

    def combine(
        self,
        x: FloatArray,
        routes: Routes,
        residual: FloatArray | None = None,
        tap: tuple[str, int | None] | None = None,
    ) -> FloatArray:
        """weight * row, expert by expert."""
        n_used = routes.experts.shape[1]
        y = np.zeros((len(routes.experts), x.shape[1]), np.float32)
        for j in range(n_used):
            tokens = np.flatnonzero(routes.experts[:, j] != NO_EXPERT)
            weights = routes.weights[tokens, routes.experts[tokens, j], None]
            y[tokens] += weights * x[j::n_used][tokens]
        if tap is not None:
            y = self.tap(*tap, y)
        return y if residual is None else y + residual

    def _matrix(self, weight: Weight) -> FloatArray:
        """The weight as float32 [out, in]."""
        matrix = self._matrices.get(weight)
        if matrix is None:
            matrix = self._matrices[weight] = dequantize(weight.data, weight.type)
        return matrix


def _softmax(scores: FloatArray, sinks: Vector | None) -> FloatArray:
    """Softmax along the last axis of [G, H/G, n], with a sink for each head; zeros if all are -inf."""
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.data.reshape(top.shape)
        top = np.maximum(top, sink)
    weights: FloatArray = np.exp(scores - np.where(top == -np.inf, np.float32(0), top))
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sink - top)
    weights /= np.where(total == 0, np.float32(1), total)
    return weights
