"""The definition of right: every op in NumPy, float32, eager, one obvious way.

A token's result never depends on how many others share its step: an output of a matrix is one dot product,
and each token attends over exactly the context it sees. So chunking a prompt changes no bit, here as in every
backend.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.host.hardware import available_bytes, cpu_model
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.backend import EVEN_ROW_COSTS, CompiledProgram
from kukri.kernels.cache import Cache, CacheLayout, KVType
from kukri.kernels.expert_choice import NO_EXPERT, Routes, choose, used_experts
from kukri.kernels.host_step import (
    HostLogits,
    StateStep,
    StoppedError,
    batch_activations,
    check_adapters,
    check_routes,
    check_sizes,
    row_adapters,
    state_steps,
)
from kukri.kernels.kv_types import KV_TYPES, rotate_heads, within_range
from kukri.kernels.op_set import EmbedBy, GateBy, Program
from kukri.kernels.paged_kv import PAGE_TOKENS, PagedKV, page_bytes
from kukri.kernels.reference_kv import read_pages, store_tokens
from kukri.kernels.reference_sampling import ReferenceSampling
from kukri.kernels.rope_rows import RopeRows
from kukri.kernels.specs import AttentionSpec, ConvSpec, DeltaSpec, Routing, ScanSpec
from kukri.kernels.step import ForwardBatch, StepInputs, StepLimits
from kukri.kernels.step_arrays import PoolPages
from kukri.kernels.taps import Hook, tap_name
from kukri.kernels.weight_handles import AdapterSlots, Experts, RopeFrequencies, Vector, Weight
from kukri.quant.blocks import dequantize

Array = npt.NDArray[Any]
_ERF = np.vectorize(math.erf, otypes=[np.float64])  # NumPy has none


class ReferenceBackend:
    """Runs programs with `ReferenceOps`. Keeps each weight's float32 matrix once it was used."""

    name = "reference"
    exact_kv_type: KVType = "f32"
    page_tokens = PAGE_TOKENS
    begins_at_taps = False
    is_batch_invariant = True
    row_costs = EVEN_ROW_COSTS

    def __init__(self) -> None:
        self.sampling = ReferenceSampling()
        self._matrices: dict[Weight, FloatArray] = {}
        self._rope_rows: dict[RopeFrequencies, RopeRows] = {}

    @property
    def arithmetic(self) -> str:
        """See Backend.arithmetic."""
        return f"reference, NumPy {np.__version__}, {cpu_model()}"

    def new_cache(
        self,
        layout: CacheLayout,
        n_pages: int | Sequence[int],
        n_states: int = 0,
        kv_type: KVType = "f16",
    ) -> PagedKV:
        """See Backend.new_cache."""
        return PagedKV(layout, n_pages, n_states, kv_type)

    def page_bytes(self, layout: CacheLayout, kv_type: KVType) -> int:
        """See Backend.page_bytes."""
        return page_bytes(layout, kv_type)

    def free_bytes(self) -> int:
        """See Backend.free_bytes."""
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
        self.ops.row_adapters = row_adapters(batch) if self.ops.adapters else None
        with np.errstate(over="ignore", invalid="ignore"):  # NaN and inf go through, and the caller sees them
            try:
                logits: FloatArray = self.program(self.ops, batch)
            except StoppedError:
                logits = np.empty((0, 0), np.float32)
        return HostLogits(logits)


class ReferenceOps:
    """The op set (`kukri.kernels.op_set.Ops`) on arrays: each op returns a new one, and `split` views."""

    def __init__(
        self,
        cache: PagedKV,
        taps: frozenset[str] = frozenset(),
        matrices: dict[Weight, FloatArray] | None = None,
        rope_rows: dict[RopeFrequencies, RopeRows] | None = None,
        adapters: AdapterSlots = (),
    ) -> None:
        self.cache, self.taps, self.adapters = cache, taps, adapters
        self.row_adapters: IntArray | None = None  # the slot of each row; None: no row has one
        self.on_tap: Hook | None = None  # the step's
        self.stop: str | None = None  # the tap that ends the step
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

    def activations(self, batch: ForwardBatch, width: int) -> FloatArray:
        """A copy of the batch's activations [T, width]."""
        return batch_activations(batch, width).copy()

    def rms_norm(self, x: FloatArray, weight: Vector, eps: float) -> FloatArray:
        """x / sqrt(mean(x^2) + eps) * weight, along each row."""
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        y: FloatArray = x / np.sqrt(mean_square + np.float32(eps)) * weight.data
        return y

    def head_norm(self, x: FloatArray, weight: Vector, eps: float) -> FloatArray:
        """rms_norm of each head of x [T, heads*K]."""
        return self.rms_norm(x.reshape(len(x), -1, len(weight)), weight, eps).reshape(x.shape)

    def layer_norm(self, x: FloatArray, weight: Vector, bias: Vector, eps: float) -> FloatArray:
        """(x - mean) / sqrt(var + eps) * weight + bias, along each row."""
        centred = x - np.mean(x, axis=-1, keepdims=True)
        return self.rms_norm(centred, weight, eps) + bias.data

    def linear(
        self,
        x: FloatArray,
        weights: Sequence[Weight],
        bias: Vector | None = None,
        residual: FloatArray | None = None,
        tap: tuple[str, int | None] | None = None,
    ) -> FloatArray:
        """x [R, in] times each weight [out_i, in] transposed, side by side; bias, updates, tap, residual."""
        y = self._product(x, weights)
        if bias is not None:
            y += bias.data
        if self.row_adapters is not None:
            self._update(y, x, weights, self.row_adapters)
        if tap is not None:
            y = self.tap(*tap, y)
        return y if residual is None else y + residual

    def _product(self, x: FloatArray, weights: Sequence[Weight]) -> FloatArray:
        """x [R, in] times each weight [out_i, in] transposed, side by side."""
        y = np.empty((len(x), sum(weight.shape[0] for weight in weights)), np.float32)
        start = 0
        for weight in weights:
            stop = start + weight.shape[0]
            # one dot product an output: a matrix product sums in an order that depends on the number of rows
            np.vecdot(x[:, None], self._matrix(weight), out=y[:, start:stop])
            start = stop
        return y

    def _update(self, y: FloatArray, x: FloatArray, weights: Sequence[Weight], slots: IntArray) -> None:
        """Adds to each row of y what its adapter makes of the row of x."""
        for slot in np.unique(slots[slots >= 0]):
            rows, start = slots == slot, 0
            for weight in weights:
                stop = start + weight.shape[0]
                update = (self.adapters[slot] or {}).get(weight.name)
                if update is not None:
                    down, up = (dequantize(w.data, w.type) for w in (update.down, update.up))
                    inner = np.vecdot(x[rows, None], down) * np.float32(update.scale)
                    y[rows, start:stop] += np.vecdot(inner[:, None], up)
                start = stop

    def add(self, x: FloatArray, residual: FloatArray) -> FloatArray:
        """x + residual."""
        return x + residual

    def scale(self, x: FloatArray, factor: float) -> FloatArray:
        """x * factor."""
        return x * np.float32(factor)

    def split(self, x: FloatArray, widths: Sequence[int]) -> tuple[FloatArray, ...]:
        """Column views of x."""
        return tuple(np.split(x, np.cumsum(widths)[:-1], axis=1))

    def head_columns(self, x: FloatArray, n_heads: int, start: int, stop: int) -> FloatArray:
        """The columns of each head, side by side."""
        return x.reshape(len(x), n_heads, -1)[..., start:stop].reshape(len(x), -1)

    def join_heads(self, parts: Sequence[FloatArray], n_heads: int) -> FloatArray:
        """Each head's parts, one after another."""
        heads = [part.reshape(len(part), n_heads, -1) for part in parts]
        return np.concatenate(heads, axis=-1).reshape(len(parts[0]), -1)

    def head_linear(self, x: FloatArray, heads: Experts) -> FloatArray:
        """Each head's product."""
        n_heads, n_out, _ = heads.shape
        y = np.empty((len(x), n_heads * n_out), np.float32)
        for weight, own, out in zip(heads.weights, np.split(x, n_heads, 1), np.split(y, n_heads, 1)):
            out[:] = self._product(own, [weight])
        return y

    def rope(
        self,
        q: FloatArray,
        k: FloatArray | None,
        rope: RopeFrequencies,
        spec: AttentionSpec,
        batch: ForwardBatch,
    ) -> tuple[FloatArray, FloatArray | None]:
        """Rotates dimension i of each head with i + rotary_dim / 2 by the position (Su et al. 2021)."""
        positions = batch.positions if batch.rope_positions is None else batch.rope_positions
        rows = self._rope_rows.get(rope)
        if rows is None:
            rows = self._rope_rows[rope] = RopeRows(rope)
        rows.ensure(int(positions.max(initial=-1)) + 1)
        cos, sin = (x[:, None] for x in rows.at(positions))  # [T, 1, rotary_dim / 2]
        return _rotate(q, cos, sin, spec.d_head), None if k is None else _rotate(k, cos, sin, spec.d_head)

    def rotate(
        self, x: FloatArray, rope: RopeFrequencies, spec: AttentionSpec, batch: ForwardBatch
    ) -> FloatArray:
        """See Ops.rotate."""
        return self.rope(x, None, rope, spec, batch)[0]

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
                first = 0 if spec.window is None else max(0, position + 1 - spec.window)
                n_ahead = n_context if spec.n_ahead is None else spec.n_ahead
                n_visible = min(n_context, position + 1 + n_ahead)
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
        scores = scores if spec.softcap is None else self.softcap(scores, spec.softcap)
        biases = spec.biases(np.arange(keys.shape[2]) - place)
        return scores if biases is None else scores + biases.reshape(scores.shape)

    def conv(self, x: FloatArray, spec: ConvSpec, batch: ForwardBatch) -> FloatArray:
        """Each column of x [T, C] times the taps of it and the inputs before it."""
        n, n_taps = x.shape[1], spec.n_taps
        taps = spec.taps.data.reshape(n_taps, n)
        y = np.zeros(x.shape, np.float32) if spec.bias is None else np.tile(spec.bias.data, (len(x), 1))
        if spec.n_after is not None:
            return self._conv_both_ways(x, y, taps, spec.n_after, batch)
        for step, states, past in self._states("conv", spec.layer, batch):
            seen = np.concatenate(
                [past, x[step.start : step.stop]]
            )  # row i is of the token n_taps - 1 before
            for i, weights in enumerate(taps):
                y[step.start : step.stop] += weights * seen[i : i + step.stop - step.start]
            for t, slot in (*step.saves, (step.stop - 1, step.slot)):
                last = t - step.start + 1
                states[slot] = seen[last : last + n_taps - 1]
        return y / (1 + np.exp(-y)) if spec.is_activated else y

    def _conv_both_ways(
        self, x: FloatArray, y: FloatArray, taps: FloatArray, n_after: int, batch: ForwardBatch
    ) -> FloatArray:
        """y + each column of x times the taps of the inputs around it; 0 for tokens that nobody sees."""
        around = ((len(taps) - 1 - n_after, n_after), (0, 0))
        for start, stop, n_seen in zip(batch.query_start, batch.query_start[1:], batch.context_len):
            n_seen = min(n_seen, stop - start)
            seen = np.pad(x[start : start + n_seen], around)
            for i, weights in enumerate(taps):
                y[start : start + n_seen] += weights * seen[i : i + n_seen]
            y[start + n_seen : stop] = 0
        return y

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

    def _states(
        self, name: str, layer: int, batch: ForwardBatch
    ) -> Iterator[tuple[StateStep, FloatArray, FloatArray]]:
        """Each sequence of a step, a layer's states by slot, and the sequence's own."""
        states = self.cache.states[layer][name]
        for step in state_steps(batch):
            yield step, states, np.zeros_like(states[0]) if step.begins else states[step.slot]

    def gated(self, x: FloatArray, gate: FloatArray, by: GateBy) -> FloatArray:
        """x times the gate, or a function of it."""
        if by == "itself":
            return x * gate
        if by == "gelu":
            return self.gelu(gate) * x
        inverse = 1 + np.exp(-gate)  # the sigmoid's inverse
        y: FloatArray = gate / inverse * x if by == "silu" else x / inverse
        return y

    def softcap(self, x: FloatArray, cap: float) -> FloatArray:
        """cap * tanh(x / cap)."""
        y: FloatArray = np.tanh(x / np.float32(cap)) * np.float32(cap)
        return y

    def clamp(self, x: FloatArray, low: float, high: float) -> FloatArray:
        """Within both bounds."""
        return np.clip(x, np.float32(low), np.float32(high))

    def clamped_swiglu(self, gate: FloatArray, up: FloatArray, alpha: float, limit: float) -> FloatArray:
        """(up + 1) * gate * sigmoid(alpha * gate), clamped."""
        gate, up = np.minimum(gate, np.float32(limit)), np.clip(up, np.float32(-limit), np.float32(limit))
        y: FloatArray = (up + 1) * gate / (1 + np.exp(np.float32(-alpha) * gate))
        return y

    def gelu(self, x: FloatArray, is_exact: bool = False) -> FloatArray:
        """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))); with `is_exact` by the error function."""
        if is_exact:
            u: Array = _ERF(x / np.sqrt(2)).astype(np.float32)
        else:
            u = np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3))
        y: FloatArray = x / 2 * (1 + u)
        return y

    def tanh(self, x: FloatArray) -> FloatArray:
        """The hyperbolic tangent."""
        y: FloatArray = np.tanh(x)
        return y

    def relu_squared(self, x: FloatArray) -> FloatArray:
        """max(x, 0)^2."""
        y: FloatArray = np.square(np.maximum(x, np.float32(0)))
        return y

    def xielu(self, x: FloatArray, high: float, low: float) -> FloatArray:
        """high * x^2 above 0, low * (exp(x) - 1 - x) below."""
        negative: FloatArray = np.minimum(x, np.float32(0))
        curved: FloatArray = (np.expm1(negative) - negative) * np.float32(low)
        return self.relu_squared(x) * np.float32(high) + curved

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
        width = sum(each.shape[1] for each in experts)
        y = np.zeros((len(rows), width), np.float32)
        for expert in np.unique(numbers[numbers != NO_EXPERT]):
            mine = numbers == expert
            weights = [each.weights[expert] for each in experts]
            made = self._product(rows[mine], weights)
            if bias is not None:
                made += bias.data.reshape(-1, width)[expert]
            if self.row_adapters is not None:
                self._update(made, rows[mine], weights, np.repeat(self.row_adapters, n_used)[mine])
            y[mine] = made
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

    def logit_rows(self, x: FloatArray, batch: ForwardBatch) -> FloatArray:
        """The rows of x that the batch wants logits for -> [N, D]."""
        if self.row_adapters is not None:  # only for the rows from here on
            self.row_adapters = self.row_adapters[batch.logit_rows]
        return x[batch.logit_rows]

    def tap(self, name: str, layer: int | None, x: FloatArray) -> FloatArray:
        """x, after its listener."""
        full_name = tap_name(name, layer)
        if self.on_tap is None or full_name not in self.taps:
            return x
        replacement = self.on_tap(full_name, x)
        if full_name == self.stop:
            raise StoppedError
        return x if replacement is None else replacement

    def _matrix(self, weight: Weight) -> FloatArray:
        """The weight as float32 [out, in]."""
        matrix = self._matrices.get(weight)
        if matrix is None:
            matrix = self._matrices[weight] = dequantize(weight.data, weight.type)
        return matrix


def _rotate(x: FloatArray, cos: FloatArray, sin: FloatArray, d_head: int) -> FloatArray:
    """x [T, heads*K] with the first rotary_dim dimensions of each head rotated."""
    half = cos.shape[-1]
    heads = x.reshape(len(x), -1, d_head)
    first, second = heads[..., :half], heads[..., half : 2 * half]
    rotated = heads.copy()
    rotated[..., :half] = first * cos - second * sin
    rotated[..., half : 2 * half] = second * cos + first * sin
    return rotated.reshape(x.shape)


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
