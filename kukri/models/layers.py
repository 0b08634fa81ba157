"""The layers that models are made of. Each pulls its weights by name and runs on the op set.

Names are Hugging Face's. Layers keep no state between steps; shapes are as in `kukri.kernels.op_set`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Self

import numpy as np

from kukri.config import ModelConfig
from kukri.kernels.cache import KVLayer
from kukri.kernels.op_set import EmbedBy, Ops, Tensor
from kukri.kernels.specs import AttentionSpec, KeyRange
from kukri.kernels.weight_handles import Vector, Weight
from kukri.models.key_range import key_range
from kukri.models.rope import rope_frequencies
from kukri.models.weights import WeightSource


class Linear:
    """y = x Wᵀ + b, for one matrix or for several side by side in one op (`names`, `n_outs`).

    One name for several `n_outs` is a matrix that holds them all. A bias is taken if the checkpoint has
    one; a matrix without one that is stacked with others gets zeros.
    """

    def __init__(self, source: WeightSource, names: Sequence[str], n_outs: Sequence[int], n_in: int) -> None:
        self.n_outs = tuple(n_outs)
        n_outs = [sum(n_outs)] if len(names) == 1 else n_outs
        self.weights = tuple(source.matrix(f"{name}.weight", (n, n_in)) for name, n in zip(names, n_outs))
        biases = [optional_bias(source, name, n) for name, n in zip(names, n_outs)]
        self.bias: Vector | None = None
        if any(bias is not None for bias in biases):
            parts = [np.zeros(n, np.float32) if b is None else b.data for b, n in zip(biases, n_outs)]
            self.bias = Vector(np.concatenate(parts), f"{names[0]}.bias")

    def __call__(
        self, ops: Ops, x: Tensor, residual: Tensor | None = None, tap: tuple[str, int | None] | None = None
    ) -> Tensor:
        """x [R, in] -> [R, sum of n_outs], shown to `tap`, with `residual` of that shape added."""
        return ops.linear(x, self.weights, self.bias, residual, tap)

    def parts(self, ops: Ops, x: Tensor) -> tuple[Tensor, ...]:
        """x [R, in] -> one [R, out] for each of n_outs."""
        return ops.split(self(ops, x), self.n_outs)


_Bounds = tuple[float, float]
_UNBOUNDED = (-np.inf, np.inf)


class ClampedLinear:
    """Matrices side by side, each of which clamps its input and output to the bounds in the file, if any."""

    def __init__(self, source: WeightSource, names: Sequence[str], n_outs: Sequence[int], n_in: int) -> None:
        self._groups: list[tuple[_Bounds, Linear, list[_Bounds]]] = []  # neighbours read the same
        for bounds, group in groupby(zip(names, n_outs), lambda each: _bounds(source, each[0], "input")):
            own, widths = zip(*group)
            linear = Linear(source, [f"{name}.linear" for name in own], widths, n_in)
            self._groups.append((bounds, linear, [_bounds(source, name, "output") for name in own]))

    @property
    def linears(self) -> list[Linear]:
        """The matrices, those together that read the same numbers."""
        return [linear for _, linear, _ in self._groups]

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """x [R, in] -> [R, out], by the only matrix."""
        (y,) = self.parts(ops, x)
        return y

    def parts(self, ops: Ops, x: Tensor) -> tuple[Tensor, ...]:
        """x [R, in] -> one [R, out] for each matrix."""
        found: list[Tensor] = []
        for bounds, linear, ends in self._groups:
            made = linear.parts(ops, _clamped(ops, x, bounds))
            found += [_clamped(ops, y, end) for y, end in zip(made, ends)]
        return tuple(found)


def _bounds(source: WeightSource, name: str, end: str) -> _Bounds:
    if not source.has(f"{name}.{end}_min"):
        return _UNBOUNDED
    low, high = (float(source.vector(f"{name}.{end}_{which}", 1)[0]) for which in ("min", "max"))
    return low, high


def _clamped(ops: Ops, x: Tensor, bounds: _Bounds) -> Tensor:
    return x if bounds == _UNBOUNDED else ops.map("clamp", x, None, *bounds)


class Embedding:
    """A row of the matrix for each token."""

    def __init__(self, source: WeightSource, name: str, n_vocab: int, d_model: int) -> None:
        self.weight = source.matrix(f"{name}.weight", (n_vocab, d_model))

    @property
    def tables(self) -> tuple[Weight, ...]:
        """The matrices that are read row by row."""
        return (self.weight,)

    def __call__(self, ops: Ops, batch: Any) -> Tensor:
        """-> [T, D]."""
        return ops.embed(self.weight, batch)

    def logits(self, ops: Ops, x: Tensor, bias: Vector | None = None) -> Tensor:
        """x [N, D] -> [N, V] by the same matrix, and a bias if there is one: tied embeddings."""
        return ops.linear(x, (self.weight,), bias)


class RMSNorm:
    """x / rms(x) * weight."""

    def __init__(self, source: WeightSource, name: str, size: int, eps: float) -> None:
        self.weight, self.eps = stored_vector(source, f"{name}.weight", size), eps

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """x [R, size] -> the same shape."""
        return ops.rms_norm(x, self.weight, self.eps)


class HeadNorm(RMSNorm):
    """An RMSNorm of each head on its own: x [T, heads*size] -> the same shape."""

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """May write x in place."""
        return ops.head_norm(x, self.weight, self.eps)


class LayerNorm:
    """(x - mean) / sqrt(var + eps) * weight + bias."""

    has_bias = True

    def __init__(self, source: WeightSource, name: str, size: int, eps: float) -> None:
        self.weight, self.eps = stored_vector(source, f"{name}.weight", size), eps
        zeros = Vector(np.zeros(size, np.float32))
        self.bias = stored_vector(source, f"{name}.bias", size) if self.has_bias else zeros

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """x [R, size] -> the same shape."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


class PlainLayerNorm(LayerNorm):
    """A LayerNorm without a bias."""

    has_bias = False


class HeadLayerNorms:
    """A LayerNorm of each head on its own: x [T, heads*size] -> the same shape."""

    def __init__(self, norms: Sequence[LayerNorm]) -> None:
        self.norms = norms

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """The heads, each after its norm."""
        heads = ops.split(x, [len(norm.weight.data) for norm in self.norms])
        return ops.join_heads([norm(ops, head) for norm, head in zip(self.norms, heads)], 1)


class NormedEmbedding:
    """The sum of a token's embedding and others, as its position's, normed. Attribute: weight, of tokens."""

    def __init__(self, tokens: Embedding, others: Mapping[EmbedBy, Embedding], norm: LayerNorm) -> None:
        self.weight, self.others, self.norm = tokens.weight, others, norm

    @property
    def tables(self) -> tuple[Weight, ...]:
        """The matrices that are read row by row."""
        return (self.weight, *(embedding.weight for embedding in self.others.values()))

    def __call__(self, ops: Ops, batch: Any) -> Tensor:
        """-> [T, D]."""
        x = ops.embed(self.weight, batch)
        for by, embedding in self.others.items():
            x = ops.embed(embedding.weight, batch, by, x)
        return self.norm(ops, x)


class NoNorm:
    """The place of a norm that a layer does not have, whatever it would be made of."""

    def __init__(self, *what: Any) -> None:
        pass

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """Return x unchanged."""
        return x


class PostNormed:
    """The last matrix of an attention or MLP whose result is normed before it joins the stream."""

    def __init__(self, linear: Callable[..., Tensor], norm: RMSNorm, norm_tap: str) -> None:
        self.linear, self.norm, self.norm_tap = linear, norm, norm_tap

    def __call__(self, ops: Ops, x: Tensor, residual: Tensor, tap: tuple[str, int | None]) -> Tensor:
        """residual + norm(x Wᵀ), the norm's result shown to `norm_tap` and `tap`."""
        name, layer = tap
        y = ops.tap(self.norm_tap, layer, self.norm(ops, self.linear(ops, x)))
        return ops.add(ops.tap(name, layer, y), residual)


class Scaled:
    """The last matrix of an attention or MLP whose result is multiplied before it joins the stream."""

    def __init__(self, linear: Callable[..., Tensor], factor: float) -> None:
        self.linear, self.factor = linear, factor

    def __call__(self, ops: Ops, x: Tensor, residual: Tensor, tap: tuple[str, int | None]) -> Tensor:
        """residual + factor * x Wᵀ; `tap` shows what is added."""
        return ops.add(ops.tap(*tap, ops.scale(self.linear(ops, x), self.factor)), residual)


class Composite:
    """A layer or a model whose parts, and their names, are attributes of its class."""

    @classmethod
    def of(cls, **parts: Any) -> type[Self]:
        """Return this class with other parts. Raises AttributeError for a part that it lacks."""
        for name in parts:
            getattr(cls, name)
        return type(cls.__name__, (cls,), parts)


class Attention(Composite):
    """Grouped-query attention, with or without rotary positions, over the whole context or a window of it.

    The checkpoint may hold q, k and v apart or as one `qkv_proj`.
    """

    linear_type: Callable[..., Any] = Linear
    in_names = ("q_proj", "k_proj", "v_proj")
    fused_name = "qkv_proj"
    out_name = "o_proj"
    result_tap = "attn.hook_z"  # the tap of the heads' results
    q_parts = 1  # rows of q's matrix for each of a head's dimensions
    n_inputs = 1  # vectors of the model's width, side by side, that queries, keys and values are made of

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        this = config.attention(layer)
        n_q, n_kv = config.n_heads * this.d_head, this.n_kv_heads * this.d_head
        self.layer = layer
        self.rope = None if this.rope is None else rope_frequencies(this.rope, config.max_context)
        self.spec = AttentionSpec(
            layer,
            config.n_heads,
            this.n_kv_heads,
            this.d_head,
            this.scale,
            this.window,
            this.softcap,
            config.is_causal or not config.sees_later,
            reads=this.kv_from,
        )
        # texts that see all of themselves are computed in one step: no page is passed by a window
        window = this.window if config.is_causal else None
        self.cache_layer = KVLayer(this.n_kv_heads if this.kv_from is None else 0, this.d_head, window)
        is_fused = source.has(f"{name}.{self.fused_name}.weight")
        query, key, value = self.in_names
        parts = [query, key, key if this.keys_are_values else value] if this.kv_from is None else [query]
        names = [f"{name}.{part}" for part in ([self.fused_name] if is_fused else parts)]
        widths = (self.q_parts * n_q, n_kv, n_kv)[: len(parts)]
        self.qkv = self.linear_type(source, names, widths, self.n_inputs * config.d_model)
        self.limit = config.qkv_clip
        self.out: Callable[..., Tensor]
        self.out = self.linear_type(source, [f"{name}.{self.out_name}"], (config.d_model,), n_q)
        self.q_norm, self.k_norm = self.norms(source, name, config)
        self.spec = replace(self.spec, key_range=self._key_range(config))

    def _key_range(self, config: ModelConfig) -> KeyRange | None:
        """The range of keys that are a product with a bias, and nothing more but rotated; no other layer
        reads them.
        """
        spec, bias = self.spec, getattr(self.qkv, "bias", None)
        is_shared = any(one.kv_from is not None for one in config.layers)
        is_changed = self.k_norm is not None or self.limit is not None
        if bias is None or is_changed or is_shared or spec.softcap is not None or spec.d_head % 32:
            return None
        n_q, n_kv = self.qkv.n_outs[:2]
        return key_range(bias.data[n_q : n_q + n_kv].reshape(spec.n_kv_heads, -1), self.rope)

    def __call__(self, ops: Ops, x: Tensor, residual: Tensor, batch: Any) -> Tensor:
        """residual + attention(x): [T, D], of x [T, n_inputs * D]. Writes the layer's keys and values to the
        cache.
        """
        q, *kv = self.qkv.parts(ops, x)
        k, v = kv or (None, None)  # True: this layer reads the keys and values of another
        z = self.attend(ops, q, k, v, batch)
        return self.out(ops, z, residual, ("hook_attn_out", self.layer))

    def attend(self, ops: Ops, q: Tensor, k: Tensor | None, v: Tensor | None, batch: Any) -> Tensor:
        """The heads' results [T, H*K], from q [T, H*K] and k and v [T, G*K]; writes the cache.

        Without k and v the layer reads another's, and writes nothing.
        """
        stores = self.spec.reads is None
        q = ops.tap("attn.hook_q", self.layer, q)
        if stores:
            k = ops.tap("attn.hook_k", self.layer, k)
            v = ops.tap("attn.hook_v", self.layer, self.clipped(ops, self.normalize_values(ops, v)))
        q, k = self.rotate(ops, q, k, batch)
        q = ops.tap("attn.hook_rot_q", self.layer, q)  # NoPE layers have them too
        if stores:
            k = ops.tap("attn.hook_rot_k", self.layer, k)
        return ops.tap(self.result_tap, self.layer, ops.attention(q, k, v, self.spec, batch))

    def rotate(self, ops: Ops, q: Tensor, k: Tensor | None, batch: Any) -> tuple[Tensor, Tensor | None]:
        """q and k, normed and then rotated, unless the layer does not."""
        q, k = (x if x is None else self.clipped(ops, x) for x in self.normalize(ops, q, k))
        return (q, k) if self.rope is None else ops.rope(q, k, self.rope, self.spec, batch)

    def clipped(self, ops: Ops, x: Tensor) -> Tensor:
        """x, bounded by the model's `qkv_clip`, if it has one."""
        return x if self.limit is None else ops.map("clamp", x, None, -self.limit, self.limit)

    def norms(self, source: WeightSource, name: str, config: ModelConfig) -> tuple[Any, Any]:
        """The norms of queries and of keys before their rotation, if the layer has any."""
        return None, None

    def normalize(self, ops: Ops, q: Tensor, k: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """q [T, H*K] and k [T, G*K] after the layer's norms."""
        q = q if self.q_norm is None else self.q_norm(ops, q)
        return q, k if k is None or self.k_norm is None else self.k_norm(ops, k)

    def normalize_values(self, ops: Ops, v: Tensor) -> Tensor:
        """Return v unchanged. Architectures that norm it override it."""
        return v


class GatedMLP(Composite):
    """down(f(gate(x)) * up(x)), f being the model's activation: SwiGLU or GeGLU (Shazeer 2020)."""

    linear_type: Callable[..., Any] = Linear
    in_names: tuple[str, ...] = ("gate_proj", "up_proj")
    out_name = "down_proj"
    is_gated = True  # False: down(f(up(x)))
    post_tap, out_tap = "mlp.hook_post", "hook_mlp_out"

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        self.layer, self.activation = layer, config.activation
        names = [f"{name}.{part}" for part in self.in_names]
        d_ffn = self.width(config, layer)
        widths: tuple[int, ...] = (d_ffn,)
        if self.is_gated:
            self.activation, widths = f"gated_{config.activation}", (d_ffn, d_ffn)
        self.gate_up = self.linear_type(source, names, widths, config.d_model)
        self.down: Callable[..., Tensor]
        self.down = self.linear_type(source, [f"{name}.{self.out_name}"], (config.d_model,), d_ffn)

    def __call__(self, ops: Ops, x: Tensor, residual: Tensor) -> Tensor:
        """residual + mlp(x), both [T, D]."""
        gate, *rest = self.gate_up.parts(ops, x)
        gate = ops.tap("mlp.hook_pre", self.layer, gate)
        up = ops.tap("mlp.hook_pre_linear", self.layer, rest[0]) if rest else None
        hidden = ops.tap(self.post_tap, self.layer, self.activate(ops, gate, up))
        return self.down(ops, hidden, residual, (self.out_tap, self.layer))

    def width(self, config: ModelConfig, layer: int) -> int:
        """The width of what the activation makes."""
        return config.mlp_width(layer)

    def activate(self, ops: Ops, gate: Tensor, up: Tensor | None) -> Tensor:
        """The row `activation` of both, or of the only one."""
        return activated(ops, self.activation, gate, up)


def activated(ops: Ops, name: str, gate: Tensor, up: Tensor | None) -> Tensor:
    """The activation of an MLP's gate and up, or of the only value if it has no gate."""
    return ops.map(name, gate) if up is None else ops.map(name, up, gate)


MLP = GatedMLP.of(in_names=("fc1",), out_name="fc2", is_gated=False)


class UngatedMLP(GatedMLP):
    """An MLP without a gate under the names that one with a gate has."""

    in_names, is_gated = ("up_proj",), False


def stored_vector(source: WeightSource, name: str, size: int) -> Vector:
    """Return a vector [size] of the checkpoint."""
    return Vector(source.vector(name, size), name)


def optional_bias(source: WeightSource, name: str, n_out: int) -> Vector | None:
    """Return a module's bias [out], None if the checkpoint has none."""
    return stored_vector(source, f"{name}.bias", n_out) if source.has(f"{name}.bias") else None
