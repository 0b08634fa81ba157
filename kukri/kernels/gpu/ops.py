"""The op set on Triton kernels, and plain PyTorch ops for the rest.

A norm, an element-wise op and a rotation are put off until their reader is known: a matrix reads them
quantized, attention rotates as it stores. A tap reads floats. So a step has no launch whose result is not
read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from kukri.kernels.activations import ACTIVATIONS
from kukri.kernels.expert_choice import Routes
from kukri.kernels.gpu import attention, products, recurrent, rows, tiles
from kukri.kernels.gpu import experts as route_experts
from kukri.kernels.gpu.attention import NewTokens, PagedTensors
from kukri.kernels.gpu.pack import Matrix
from kukri.kernels.gpu.products import Output
from kukri.kernels.gpu.rows import Q8Rows, Recipe
from kukri.kernels.pytorch.cache import LayerKV, TensorCache
from kukri.kernels.pytorch.constants import DeviceConstants
from kukri.kernels.pytorch.ops import TorchOps
from kukri.kernels.pytorch.step import DeviceBatch
from kukri.kernels.pytorch.weights import to_device
from kukri.kernels.specs import AttentionSpec, ConvSpec, DeltaSpec, Routing, ScanSpec
from kukri.kernels.taps import tap_name
from kukri.kernels.weight_handles import AdapterSlots, Experts, RopeFrequencies, Vector, Weight

_HALVES = {"F16": torch.float16, "BF16": torch.bfloat16}


class Deferred:
    """Rows computed when they are read, and kept: as float32, or as int8 for a matrix."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @cached_property
    def floats(self) -> Tensor:
        """float32 [rows, width]."""
        return rows.floats(self.recipe)

    @cached_property
    def q8(self) -> Q8Rows:
        """The rows as int8."""
        return rows.quantized(self.recipe)

    def product(self, matrix: Matrix, out: Output) -> None:
        """Writes the rows times a matrix. Quantizes them in the same launch where that is faster."""
        if "q8" not in vars(self) and tiles.quantizes_input(matrix.n_rows, matrix.n_columns, len(out.y)):
            self.q8 = products.linear_of(self.recipe, matrix, out)
        else:
            products.linear(self.q8, matrix, out)


class Rotated:
    """Queries or keys that attention is to rotate; `rotate` does it for another reader, such as a norm."""

    def __init__(self, x: Tensor, frequencies: RopeFrequencies, rotate: Callable[[], Tensor]) -> None:
        self.x, self.frequencies, self._rotate = x, frequencies, rotate

    @cached_property
    def floats(self) -> Tensor:
        """float32, of the shape of x."""
        return self._rotate()


class PackedConstants(DeviceConstants):
    """Constants with the kernels' packed matrices. Plain ops dequantize the file's blocks at each use."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype, unpacked_bytes=0)
        self._packed: dict[tuple[Weight, ...], Matrix] = {}
        self._packed_experts: dict[tuple[Experts, ...], Matrix] = {}
        self._float_experts: dict[tuple[Experts, ...], Tensor] = {}
        self.is_batch_invariant = True  # until a plain op takes part whose sums may depend on shapes

    def packed(self, weights: tuple[Weight, ...]) -> Matrix:
        """Matrices of one type, one above the other, packed on first use."""
        if weights not in self._packed:
            self._packed[weights] = products.to_device(weights, self.device)
        return self._packed[weights]

    def packed_experts(self, experts: tuple[Experts, ...]) -> Matrix:
        """Matrices of experts that are read side by side: the matrices of expert 0, then of expert 1 …"""
        if experts not in self._packed_experts:
            self._packed_experts[experts] = products.to_device(_by_number(experts), self.device)
        return self._packed_experts[experts]

    def float_experts(self, experts: tuple[Experts, ...]) -> Tensor:
        """The same of F32, F16 or BF16 as floats [rows, columns], the last two in the dtype of products."""
        if experts not in self._float_experts:
            weights = _by_number(experts)
            dtype = torch.float32 if weights[0].type.name == "F32" else self.dtype
            shape = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
            self._float_experts[experts] = room = torch.empty(shape, dtype=dtype, device=self.device)
            start = 0
            for weight in weights:
                stop = start + weight.shape[0]
                room[start:stop] = to_device(weight, self.device, dtype).data
                start = stop
        return self._float_experts[experts]


class TritonOps(TorchOps):
    """The op set on a device, for one program."""

    constants: PackedConstants

    def __init__(
        self,
        constants: PackedConstants,
        cache: TensorCache,
        taps: frozenset[str] = frozenset(),
        adapters: AdapterSlots = (),
    ) -> None:
        super().__init__(constants, cache, taps, adapters)
        self.is_capturable = True  # False once an op has read the device: a graph cannot
        self._pages = {layer: _paged(kv) for layer, kv in cache.kv.items()}

    def rms_norm(self, x: Any, weight: Vector, eps: float) -> Any:
        x, w = self.floats(x), self.constants.vector(weight)
        if not len(x):  # no logits are wanted, and no launch is without programs
            return x
        return Deferred(Recipe("rms_norm", x, w, eps))

    def head_norm(self, x: Any, weight: Vector, eps: float) -> Tensor:
        x = self.floats(x)
        heads = x.reshape(-1, len(weight))
        return rows.rms_norm(heads, self.constants.vector(weight), eps).view(x.shape)

    def layer_norm(self, x: Any, weight: Vector, bias: Vector, eps: float) -> Tensor:
        """The mean is PyTorch's."""
        self.constants.is_batch_invariant = False
        values = self.floats(x)
        if not len(values):
            return values
        centred = (values - values.mean(-1, keepdim=True)).contiguous()
        return rows.rms_norm(centred, self.constants.vector(weight), eps) + self.constants.vector(bias)

    def linear(
        self,
        x: Any,
        weights: Sequence[Weight],
        bias: Vector | None = None,
        residual: Tensor | None = None,
        tap: tuple[str, int | None] | None = None,
    ) -> Tensor:
        """Neighbours of one type are one launch, which adds bias and residual too.

        Adapters' updates are plain ops after it.
        """
        is_tapped = tap is not None and tap_name(*tap) in self.taps
        source = x if isinstance(x, Deferred) else Deferred(Recipe("plain", x, x))
        n_rows = len(source.recipe.x)
        n_out = sum(weight.shape[0] for weight in weights)
        y = torch.empty((n_rows, n_out), dtype=torch.float32, device=self.constants.device)
        if not n_rows:
            return y
        residual = None if residual is None else self.floats(residual).contiguous()
        added = None if bias is None else self.constants.vector(bias)
        out, start = Output(y, added, None if is_tapped else residual), 0
        for run in _runs(weights):
            stop = start + sum(weight.shape[0] for weight in run)
            self._product(source, run, out.columns(start, stop))
            start = stop
        if self._adapter_rows:
            self.constants.is_batch_invariant = False
            self.update(y, self.floats(x), weights)
        if tap is None or not is_tapped:
            return y
        y = self.floats(self.tap(*tap, y))
        return y if residual is None else y + residual

    def rope(
        self, q: Any, k: Any, rope: RopeFrequencies, spec: AttentionSpec, batch: DeviceBatch
    ) -> tuple[Any, Any]:
        """Attention rotates, unless a tap wants to see it, PyTorch attends, tokens have several
        positions, or keys are kept by their range.
        """
        taps = (tap_name(name, spec.layer) for name in ("attn.hook_rot_q", "attn.hook_rot_k"))
        is_plain = not self._by_pytorch(spec, batch) and batch.rope_positions.ndim == 1
        is_plain &= self._key_range(spec) is None
        if not is_plain or not self.taps.isdisjoint(taps):
            return super().rope(q, k, rope, spec, batch)

        def rotated(x: Any) -> Rotated:
            return Rotated(x, rope, lambda: self.rotate(x, rope, spec, batch))

        return rotated(q), None if k is None else rotated(k)

    def _by_pytorch(self, spec: AttentionSpec, batch: DeviceBatch) -> bool:
        """True for attention that has no kernel."""
        is_bounded = spec.first_key > 0 or spec.stop_key is not None
        return batch.mask is not None or not spec.is_causal or batch.has_unseen or is_bounded

    def attention(self, q: Any, k: Any, v: Any, spec: AttentionSpec, batch: DeviceBatch) -> Tensor:
        """A launch if all decode, two if a context is long, else another that stores."""
        if self._by_pytorch(spec, batch):
            self.is_capturable = self.constants.is_batch_invariant = False
            return super().attention(q, k, v, spec, batch)
        q, k = self._within_range(q, k, spec)
        table = None
        if isinstance(q, Rotated):
            rope = self.constants.rope_table(q.frequencies)
            rope.ensure(batch.max_position + 1)
            table, q, k = (rope.cos, rope.sin), q.x, k and k.x
        slots, page_table = batch.pools[self.cache.pool_of[spec.kv_layer]]
        new = NewTokens(q, k, v, table, batch.rope_positions, slots)
        cache = self._pages[spec.kv_layer]
        sequences = (batch.query_start, batch.context_len, page_table)
        sinks = None if spec.sinks is None else self.constants.vector(spec.sinks)
        if batch.is_decode:
            n_chunks = -(-batch.max_context // attention.CHUNK)
            out = attention.decode(new, cache, *sequences, spec, sinks, n_chunks)
        else:
            queries = attention.rope_and_store(new, cache, spec)
            work = self._work(spec, batch)
            out = attention.attention(queries, cache, *sequences, work, spec, sinks, is_prefill=True)
        return out.view(len(out), -1)

    def conv(self, x: Any, spec: ConvSpec, batch: DeviceBatch) -> Any:
        """PyTorch does it both ways."""
        if spec.n_after is not None:
            return super().conv(self.floats(x), spec, batch)
        states = self.cache.states[spec.layer]["conv"]
        return recurrent.conv(self.floats(x), states, spec, self.constants.vector, batch)

    def scan(self, x: Any, b: Any, c: Any, dt: Any, spec: ScanSpec, batch: DeviceBatch) -> Tensor:
        x, b, c, dt = map(self.floats, (x, b, c, dt))
        states = self.cache.states[spec.layer]["scan"]
        return recurrent.scan(x, b, c, dt, states, spec, self.constants.vector, batch)

    def delta_rule(
        self, q: Any, k: Any, v: Any, decay: Any, beta: Any, spec: DeltaSpec, batch: DeviceBatch
    ) -> Tensor:
        q, k, v, decay, beta = map(self.floats, (q, k, v, decay, beta))
        states = self.cache.states[spec.layer]["delta"]
        return recurrent.delta_rule(q, k, v, decay, beta, states, spec, self.constants.vector, batch)

    def map(self, name: str, x: Any, other: Any = None, a: float = 0.0, b: float = 0.0) -> Any:
        """The kernel takes rows of one stride, such as columns of one matrix."""
        x, other = self.floats(x), self.floats(other)
        second = x if other is None else other
        is_alike = (x.shape, x.stride()) == (second.shape, second.stride())
        if name in ACTIVATIONS and x.numel() and x.ndim == 2 and x.stride(1) == 1 and is_alike:
            return Deferred(Recipe(name, x, second, a, b))
        return super().map(name, x, other, a, b)

    def route(self, logits: Any, routing: Routing, tap: tuple[str, int | None] | None = None) -> Routes:
        """PyTorch does it for a tap, which reads the device, and for what the kernel lacks."""
        logits = self.floats(logits)
        is_plain = routing.chooses_by_logits and not (routing.by_sigmoid or routing.tolerance)
        if is_plain and (tap is None or tap_name(*tap) not in self.taps):
            routes = route_experts.route(logits, routing)
            if routing.scales is not None:
                routes.weights.mul_(self.constants.vector(routing.scales))
            return routes
        if not is_plain:
            self.constants.is_batch_invariant = False  # its sums depend on the number of rows
        routes = super().route(logits, routing, tap)
        return Routes(routes.weights.contiguous(), routes.experts.to(torch.int32))

    def expert_linear(
        self, x: Any, routes: Routes, experts: Sequence[Experts], bias: Vector | None = None
    ) -> Tensor:
        """Adapters, and matrices of several types side by side, have a product for
        each expert in use, whose numbers the host reads.
        """
        if self._adapter_rows or len({each.type.name for each in experts}) > 1:
            self.is_capturable = self.constants.is_batch_invariant = False
            return super().expert_linear(self.floats(x), routes, experts, bias)
        source = x if isinstance(x, Deferred) else Deferred(Recipe("plain", x, x))
        return self._expert_product(source, routes, experts, bias)

    def _expert_product(
        self, source: Deferred, routes: Routes, experts: Sequence[Experts], bias: Vector | None = None
    ) -> Tensor:
        """`expert_linear` by the kernel of the experts' type."""
        added = None if bias is None else self.constants.vector(bias)
        name = experts[0].type.name
        if name != "F32" and name not in _HALVES:
            matrix = self.constants.packed_experts(tuple(experts))
            return route_experts.linear(source.q8, routes, matrix, added)
        w = self.constants.float_experts(tuple(experts))
        if name == "F32":
            return route_experts.linear_f32(source.floats, routes, w, added)
        return route_experts.linear_float(source.floats.to(w.dtype).contiguous(), routes, w, added)

    def head_linear(self, x: Any, heads: Experts) -> Tensor:
        """A product of experts, each of which gets a row of every token."""
        x, n_heads = self.floats(x), heads.shape[0]
        rows = x.reshape(len(x) * n_heads, -1)
        numbers = torch.arange(n_heads, dtype=torch.int32, device=x.device).expand(len(x), -1)
        routes = Routes(torch.empty_like(numbers, dtype=torch.float32), numbers.contiguous())
        return self._expert_product(Deferred(Recipe("plain", rows, rows)), routes, [heads]).view(len(x), -1)

    def combine(
        self,
        x: Tensor,
        routes: Routes,
        residual: Tensor | None = None,
        tap: tuple[str, int | None] | None = None,
    ) -> Tensor:
        is_tapped = tap is not None and tap_name(*tap) in self.taps
        residual = None if residual is None else self.floats(residual).contiguous()
        y = route_experts.combine(self.floats(x), routes, None if is_tapped else residual)
        if tap is None or not is_tapped:
            return y
        y = self.floats(self.tap(*tap, y))
        return y if residual is None else y + residual

    def tap(self, name: str, layer: int | None, x: Any) -> Any:
        """Only a value that is shown is computed for it."""
        if self.on_tap is None or tap_name(name, layer) not in self.taps:
            return x
        return super().tap(name, layer, self.floats(x))

    def floats(self, x: Any) -> Tensor:
        floats: Tensor = x.floats if isinstance(x, Deferred | Rotated) else x
        return floats

    def _product(self, x: Deferred, weights: tuple[Weight, ...], out: Output) -> None:
        """Writes x times matrices of one type."""
        name = weights[0].type.name
        if name == "F32" or name in _HALVES:
            self._float_product(x.floats, weights, out)
        else:
            x.product(self.constants.packed(weights), out)

    def _float_product(self, x: Tensor, weights: tuple[Weight, ...], out: Output) -> None:
        is_f32 = weights[0].type.name == "F32"
        x, start = x if is_f32 else x.to(self.constants.dtype), 0
        for weight in weights:
            stop = start + weight.shape[0]
            part = out.columns(start, stop)
            if is_f32:
                products.linear_f32(x, self.constants.table(weight).data, part)
            else:
                products.linear_float(x, self.constants.matrix(weight).data, part)
            start = stop

    def _work(self, spec: AttentionSpec, batch: DeviceBatch) -> Tensor:
        """(sequence, first token) of each tile of queries, int32 [tiles, 2]; kept for other layers."""
        rows = tiles.attention_tile(spec.group, spec.d_head, is_prefill=True).rows
        key = (rows, spec.group)
        if key not in batch.kept:
            work = attention.prefill_tiles(batch.host.query_start.tolist(), spec, rows)
            batch.kept[key] = torch.tensor(work, dtype=torch.int32, device=self.constants.device)
        return batch.kept[key]


def _by_number(experts: tuple[Experts, ...]) -> list[Weight]:
    """The matrices of expert 0, then of expert 1 …"""
    return [weight for of_one in zip(*(each.weights for each in experts)) for weight in of_one]


def _runs(weights: Sequence[Weight]) -> Iterator[tuple[Weight, ...]]:
    """Neighbouring weights of one type."""
    return (tuple(run) for _, run in groupby(weights, key=lambda weight: weight.type.name))


def _paged(kv: LayerKV) -> PagedTensors:
    """A layer's cache as the kernels take it: without scales, the numbers stand in for them."""
    keys, values = kv.keys, kv.values
    if keys.dtype == torch.float8_e4m3fn:  # not every card that runs the kernels has this type
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    scales = (
        (keys, values)
        if kv.key_scales is None or kv.value_scales is None
        else (kv.key_scales, kv.value_scales)
    )
    return PagedTensors(keys, values, *scales)
