"""The op set in plain PyTorch, on any device: one obvious way each, in float32 but for matrix products.

Attention gathers a sequence's pages and computes scores and softmax in float32; packed matrices are
dequantized in pieces. On the CPU all of it is float32: the reference's definition, in other sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kukri.errors import ShapeError
from kukri.kernels.array_ops import ArrayOps
from kukri.kernels.arrays import FloatArray
from kukri.kernels.expert_choice import NO_EXPERT, Routes
from kukri.kernels.host_step import check_routes
from kukri.kernels.kv_types import KV_TYPES, within_range
from kukri.kernels.op_set import EmbedBy
from kukri.kernels.paged_kv import PAGE_TOKENS
from kukri.kernels.pytorch.cache import TensorCache
from kukri.kernels.pytorch.constants import DeviceConstants
from kukri.kernels.pytorch.kv_types import TENSOR_TYPES, rotate_heads
from kukri.kernels.pytorch.step import AttentionGroup, DeviceBatch
from kukri.kernels.pytorch.weights import tensor_of
from kukri.kernels.specs import AttentionSpec, DeltaSpec, KeyRange, Routing, ScanSpec
from kukri.kernels.step import ForwardBatch
from kukri.kernels.taps import tap_name
from kukri.kernels.weight_handles import AdapterSlots, Experts, LowRank, RopeFrequencies, Vector, Weight
from kukri.quant import blocks


class TensorFunctions:
    """The functions of PyTorch, including torch.nn.functional."""

    def __getattr__(self, name: str) -> Any:
        """A function of `torch`, or else of `torch.nn.functional`."""
        return getattr(torch if hasattr(torch, name) else F, name)


class TorchOps(ArrayOps):
    """The op set on tensors."""

    xp = TensorFunctions()
    cache: TensorCache

    def __init__(
        self,
        constants: DeviceConstants,
        cache: TensorCache,
        taps: frozenset[str] = frozenset(),
        adapters: AdapterSlots = (),
    ) -> None:
        super().__init__(cache, taps, adapters)
        self.constants = constants
        self._low_rank: dict[LowRank, tuple[Tensor, Tensor]] = {}
        self.n_vocab = 0  # rows of the embedding, once it was used

    def vector(self, vector: Vector) -> Tensor:
        return self.constants.vector(vector)

    def on_host(self, x: Tensor) -> FloatArray:
        array: FloatArray = x.cpu().numpy()
        return array

    def from_host(self, array: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.constants.device)

    def host_batch(self, batch: DeviceBatch) -> ForwardBatch:
        return batch.host

    def embed(
        self, weight: Weight, batch: DeviceBatch, by: EmbedBy = "token_ids", residual: Tensor | None = None
    ) -> Tensor:
        """Rows of `weight` [n, D] for token ids, positions or token types, plus `residual` -> [T, D].

        Raises ShapeError on numbers beyond n.
        """
        if by == "token_ids":
            self.n_vocab = weight.shape[0]
        numbers = getattr(batch.host, by)
        if numbers.min() < 0 or numbers.max() >= weight.shape[0]:
            what = by.removesuffix("s").replace("_", " ")
            raise ShapeError(
                f"bad step: a {what} outside the {'vocabulary' if by == 'token_ids' else 'model'}"
            )
        rows = self.constants.table(weight).rows(getattr(batch, by)).float()
        return rows if residual is None else rows + residual

    def rms_norm(self, x: Tensor, weight: Vector, eps: float) -> Tensor:
        root = torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
        return x / root * self.vector(weight)

    def layer_norm(self, x: Tensor, weight: Vector, bias: Vector, eps: float) -> Tensor:
        return self.rms_norm(x - x.mean(-1, keepdim=True), weight, eps) + self.vector(bias)

    def product(self, x: Tensor, weights: Sequence[Weight]) -> Tensor:
        narrow = x.to(self.constants.dtype)
        pieces = [F.linear(narrow, rows) for w in weights for rows in self.constants.matrix(w).chunks()]
        return torch.cat(pieces, -1).float()

    def low_rank(self, x: Tensor, update: LowRank) -> Tensor:
        down, up = self._matrices_of(update)
        return F.linear(F.linear(x, down) * update.scale, up)

    def _matrices_of(self, update: LowRank) -> tuple[Tensor, Tensor]:
        """A and B, float32."""
        if update not in self._low_rank:
            down, up = (
                tensor_of(blocks.dequantize(w.data, w.type)).to(self.constants.device)
                for w in (update.down, update.up)
            )
            self._low_rank[update] = down, up
        return self._low_rank[update]

    def head_linear(self, x: Tensor, heads: Experts) -> Tensor:
        x = self.floats(x)
        own = x.reshape(len(x), heads.shape[0], -1).transpose(0, 1).contiguous()
        return torch.cat([self.product(part, [w]) for part, w in zip(own, heads.weights, strict=True)], -1)

    def cos_and_sin(self, rope: RopeFrequencies, batch: DeviceBatch) -> tuple[Tensor, Tensor]:
        table = self.constants.rope_table(rope)
        table.ensure(batch.max_position + 1)
        rows: Any = batch.rope_positions
        if rows.ndim == 2:  # a position for each axis
            rows = rows[list(rope.axes)].T, torch.arange(len(rope.axes), device=rows.device)
        return table.cos[rows], table.sin[rows]

    def attention(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, spec: AttentionSpec, batch: DeviceBatch
    ) -> Tensor:
        """Stores k and v at the batch's slots, then each token attends over its context -> [T, H*K]."""
        is_rotated = KV_TYPES[self.cache.kv_type].is_rotated
        q, k = self._within_range(q, k, spec)
        if is_rotated:
            q = rotate_heads(q, spec.d_head)
        if k is not None and v is not None:
            if is_rotated:
                limit = torch.finfo(torch.float16).max
                k, v = (rotate_heads(x.clamp(-limit, limit), spec.d_head) for x in (k, v))
            self._store(k, v, spec, batch)
        out = torch.empty((len(q), spec.n_heads * spec.d_head), dtype=torch.float32, device=q.device)
        for group in batch.attention_groups(spec, self.cache.pool_of[spec.kv_layer]):
            out[group.tokens] = self._attend(q[group.tokens], spec, group, batch.mask)
        return rotate_heads(out, spec.d_head) if is_rotated else out

    def _key_range(self, spec: AttentionSpec) -> KeyRange | None:
        """The range that the cache keeps a layer's keys by."""
        return spec.key_range if KV_TYPES[self.cache.kv_type].has_range else None

    def _within_range(self, q: Tensor, k: Tensor | None, spec: AttentionSpec) -> tuple[Tensor, Tensor | None]:
        """q [T, H*K] and k [T, G*K] as the cache keeps keys: see `within_range`."""
        key_range = self._key_range(spec)
        if k is None or key_range is None:
            return q, k
        groups = q.reshape(len(q), -1, spec.group, spec.d_head), k.reshape(len(k), -1, spec.d_head)
        sides = (self.vector(x).view(-1, spec.d_head) for x in (key_range.middle, key_range.reach))
        q, k = within_range(*groups, *sides)
        return q.flatten(1), k.flatten(1)

    def scan(self, x: Tensor, b: Tensor, c: Tensor, dt: Tensor, spec: ScanSpec, batch: DeviceBatch) -> Tensor:
        """Token by token: the state decays, takes b xT in, and c reads it."""
        vector, n_tokens, group = self.constants.vector, len(x), spec.n_heads // spec.n_groups
        steps = F.softplus(dt + vector(spec.dt_bias)).clamp(*spec.limits)
        kept = torch.exp(steps * vector(spec.a))[..., None, None]
        values = x.reshape(n_tokens, spec.n_heads, spec.d_head)
        b, c = (m.reshape(n_tokens, spec.n_groups, -1).repeat_interleave(group, 1) for m in (b, c))
        scaled, y = steps[..., None] * b, vector(spec.d)[:, None] * values
        for step, states, state in self._states("scan", spec.layer, batch):
            saves = dict(step.saves)
            for t in range(step.start, step.stop):
                state = state * kept[t] + scaled[t][..., None] * values[t][:, None]
                y[t] += (c[t][..., None] * state).sum(1)
                if t in saves:
                    states[saves[t]] = state
            states[step.slot] = state
        return y.view(x.shape)

    def delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
        spec: DeltaSpec,
        batch: DeviceBatch,
    ) -> Tensor:
        """Token by token: the state decays, what k finds in it moves to v, and q reads it."""
        n_tokens, n_heads, n_groups = len(v), spec.n_heads, spec.n_groups
        heads = torch.arange(n_heads, device=v.device)
        key_head = heads % n_groups if spec.are_tiled else heads // (n_heads // n_groups)
        q, k = (m.reshape(n_tokens, n_groups, -1)[:, key_head, :, None] for m in (q, k))  # [T, H, K, 1]
        values = v.reshape(n_tokens, n_heads, 1, spec.d_head)
        steps = F.softplus(decay + self.vector(spec.dt_bias))
        kept = torch.exp(steps * self.vector(spec.a))[..., None, None]
        rate = torch.sigmoid(beta)[..., None, None]
        y = torch.empty((n_tokens, n_heads, spec.d_head), device=v.device)
        for step, states, state in self._states("delta", spec.layer, batch):
            saves = dict(step.saves)
            for t in range(step.start, step.stop):
                state = state * kept[t]
                found = (k[t] * state).sum(1, keepdim=True)
                state = state + k[t] * (rate[t] * (values[t] - found))
                y[t] = (q[t] * state).sum(1)
                if t in saves:
                    states[saves[t]] = state
            states[step.slot] = state
        return y.view(v.shape)

    def route(self, logits: Tensor, routing: Routing, tap: tuple[str, int | None] | None = None) -> Routes:
        if routing.by_sigmoid:
            scores, total = torch.sigmoid(logits), torch.ones_like(logits[:, :1])
        else:
            scores = torch.exp(logits - logits.amax(-1, keepdim=True))
            total = scores.sum(-1, keepdim=True)
        by = logits if routing.chooses_by_logits else scores / total
        if routing.bias is not None:
            by = by + self.vector(routing.bias)
        if routing.n_groups > 1:
            by = _within_groups(by, routing)
        order = torch.sort(by, descending=True, stable=True).indices[:, : routing.n_used]
        shares = scores.gather(1, order)
        if routing.tolerance:
            shares = _nearest(logits, order, routing.tolerance)
        else:
            shares = shares / (shares.sum(-1, keepdim=True) if routing.normalized else total)
        weights = torch.zeros_like(logits).scatter(1, order, shares)
        if routing.scales is not None:
            weights = weights * self.vector(routing.scales)
        if tap is not None and self._shows(tap_name(*tap)):  # else a graph that is captured may not read them
            weights = self.tap(*tap, weights)
            check_routes(weights.detach().cpu().numpy(), routing.n_used)
        numbers = torch.arange(logits.shape[1], device=logits.device)
        experts = torch.sort(torch.where(weights != 0, numbers, len(numbers))).values[:, : routing.n_used]
        return Routes(weights, experts.masked_fill(experts == len(numbers), NO_EXPERT))

    def _shows(self, full_name: str) -> bool:
        """True if this tap is wanted."""
        return full_name in self.taps

    def expert_linear(
        self, x: Tensor, routes: Routes, experts: Sequence[Experts], bias: Vector | None = None
    ) -> Tensor:
        """Each row's expert, and its update, applied to it; zeros for a token without an expert."""
        numbers, n_used = routes.experts.flatten(), routes.experts.shape[1]
        rows = x if len(x) == len(numbers) else x.repeat_interleave(n_used, 0)
        of_tokens = self.row_adapters
        width, n_experts = sum(each.shape[1] for each in experts), experts[0].shape[0]
        y = torch.zeros((len(rows), width), device=x.device)
        for expert in sorted({*numbers.tolist()} - {NO_EXPERT}):
            mine = numbers == expert
            if of_tokens is not None:
                self.set_row_adapters(np.repeat(of_tokens, n_used)[mine.cpu().numpy()])
            part = self.linear(rows[mine], [each.weights[expert] for each in experts])
            if bias is not None:
                part = part + self.vector(bias).view(n_experts, width)[expert]
            y[mine] = part
        self.set_row_adapters(of_tokens)
        return y

    def combine(
        self,
        x: Tensor,
        routes: Routes,
        residual: Tensor | None = None,
        tap: tuple[str, int | None] | None = None,
    ) -> Tensor:
        """The weighted sum of each token's rows, in the order of experts."""
        padded = F.pad(routes.weights, (1, 0))  # a weight of 0 in front, for NO_EXPERT
        weights = padded.gather(1, routes.experts + 1)
        y = torch.zeros((len(weights), x.shape[1]), device=x.device)
        for j in range(weights.shape[1]):
            y = y + weights[:, j, None] * x[j :: weights.shape[1]]
        if tap is not None:
            y = self.tap(*tap, y)
        return y if residual is None else y + residual

    def _attend(self, q: Tensor, spec: AttentionSpec, group: AttentionGroup, mask: Tensor | None) -> Tensor:
        """Attention of q [S, n, H*K] over the sequences' pages -> [S, n, H*K]."""
        n_sequences, n = group.tokens.shape
        n_kv_heads, d_head = spec.n_kv_heads, spec.d_head
        keys, values = self._context(spec, group)  # [S, G, places, K]
        heads = q.reshape(n_sequences, n, n_kv_heads, -1, d_head).permute(0, 2, 3, 1, 4)  # [S, G, H/G, n, K]
        scores = heads.reshape(n_sequences, n_kv_heads, -1, d_head) @ keys.transpose(-1, -2)
        scores = scores.view(n_sequences, n_kv_heads, -1, n, keys.shape[2]) * spec.scale
        if spec.softcap is not None:
            scores = self.map("softcap", scores, a=spec.softcap)
        if spec.distances is not None:
            table = self.vector(spec.distances).view(spec.n_heads, -1)
            reach = table.shape[1] // 2
            biases = table[:, group.ahead.clamp(-reach, reach - 1) + reach]  # [H, S, n, places]
            scores += biases.view(n_kv_heads, -1, *group.ahead.shape).permute(2, 0, 1, 3, 4)
        is_visible = group.is_visible[:, None, None]
        if mask is not None:
            by_head = (n_kv_heads, -1) if len(mask) > 1 else (1, 1)
            scores[..., : mask.shape[-1]] += mask.view(*by_head, *mask.shape[1:])
            is_visible = group.is_key[:, None, None, None]
        sinks = None
        if spec.sinks is not None:
            sinks = self.vector(spec.sinks).view(n_kv_heads, -1, 1, 1)
        weights = softmax(scores.masked_fill(~is_visible, -torch.inf), sinks)
        out = weights.reshape(n_sequences, n_kv_heads, -1, keys.shape[2]) @ values
        return (
            out.view(n_sequences, n_kv_heads, -1, n, d_head)
            .permute(0, 3, 1, 2, 4)
            .reshape(n_sequences, n, -1)
        )

    def _context(self, spec: AttentionSpec, group: AttentionGroup) -> tuple[Tensor, Tensor]:
        """The sequences' pages side by side: keys and values float32 [S, G, places, K].

        Values that nobody sees are zeros: NaN of another sequence would get through a weight of 0.
        """
        kv, decode = self.cache.kv[spec.kv_layer], TENSOR_TYPES[self.cache.kv_type].decode
        keys, values = (
            decode(numbers[group.pages], None if scales is None else scales[group.pages], spec.d_head)
            .transpose(1, 2)
            .flatten(2, 3)
            for numbers, scales in ((kv.keys, kv.key_scales), (kv.values, kv.value_scales))
        )
        return keys, values.masked_fill(~group.is_key[:, None, :, None], 0)

    def _store(self, k: Tensor, v: Tensor, spec: AttentionSpec, batch: DeviceBatch) -> None:
        """Writes k and v [T, G*K] to the cache, clamped to the range of its numbers."""
        kv, encode = self.cache.kv[spec.layer], TENSOR_TYPES[self.cache.kv_type].encode
        slots, _ = batch.pools[self.cache.pool_of[spec.layer]]
        page, offset = (slots // PAGE_TOKENS).long(), (slots % PAGE_TOKENS).long()
        for x, numbers, scales in ((k, kv.keys, kv.key_scales), (v, kv.values, kv.value_scales)):
            stored, stored_scales = encode(x.reshape(len(x), spec.n_kv_heads, spec.d_head))
            numbers[page, :, offset] = stored
            if scales is not None and stored_scales is not None:
                scales[page, :, offset] = stored_scales


def _nearest(logits: Tensor, order: Tensor, tolerance: float) -> Tensor:
    """See `kukri.kernels.expert_choice`: the shares [T, n_used] alone."""
    left, found = logits, []
    for chosen in order.T.unsqueeze(-1):
        best = logits.gather(1, chosen)
        is_far = (best - logits) / torch.maximum(logits.abs(), best) > tolerance
        near = torch.exp(left.masked_fill(is_far, -torch.inf) - best)
        found.append(near.gather(1, chosen) / near.sum(1, keepdim=True))
        left = left.scatter(1, chosen, -torch.inf)
    return torch.cat(found, 1)


def _within_groups(by: Tensor, routing: Routing) -> Tensor:
    """Scores [T, E], -inf outside of the best groups."""
    groups = by.reshape(len(by), routing.n_groups, -1)
    of_groups = torch.sort(groups, descending=True).values[..., : routing.n_best].sum(-1)
    best = torch.sort(of_groups, descending=True, stable=True).indices[:, : routing.n_groups_used]
    kept = torch.zeros_like(of_groups, dtype=torch.bool).scatter(1, best, True)
    within: Tensor = groups.masked_fill(~kept[..., None], float("-inf")).reshape(by.shape)
    return within


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax along the last axis, with a sink for each row; zeros if all are -inf."""
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    weights = torch.exp(scores - top.masked_fill(top == -torch.inf, 0))
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    return weights / total.masked_fill(total == 0, 1)
