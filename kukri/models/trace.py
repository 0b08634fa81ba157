"""The structure of a model, found by running its code on ops that compute nothing.

A trace says which taps there are, which matrices are multiplied and what with, which weights make a tapped
value and which norm stands between two taps: nothing else lists these, for any architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kukri.dataclass import dataclass, replace
from kukri.kernels.op_set import Program
from kukri.kernels.specs import AttentionSpec, Routing
from kukri.kernels.taps import tap_name
from kukri.kernels.weight_handles import Experts, LowRank, RopeFrequencies, Vector, Weight


@dataclass(frozen=True)
class Norm:
    """A norm over rows, or over the heads of each: `bias` is None for an RMSNorm. `source` is the tap of its
    input, None if no tap shows that.
    """

    weight: Vector
    bias: Vector | None
    eps: float
    source: str | None
    centers: bool  # True for a LayerNorm, which subtracts the mean


@dataclass(frozen=True)
class Matrix:
    """Rows `start` to `stop` - 1 of weights side by side: what makes a value. `source` as in `Norm`.

    `updates` are an adapter's of each weight; None leaves it as it is.
    """

    weights: tuple[Weight, ...]
    updates: tuple[LowRank | None, ...]
    bias: Vector | None
    start: int
    stop: int
    source: str | None


Step = Norm | Matrix | float  # a norm's weight is as wide as a row, or as a head; a float is a factor


class Path(NamedTuple):
    """How a value is made of what a tap shows."""

    tap: str
    steps: tuple[Step, ...] = ()

    def then(self, step: Step) -> Path:
        """With another step."""
        return Path(self.tap, (*self.steps, step))


@dataclass(frozen=True)
class Heads:
    """A layer's attention, the frequencies of its rotation, None on a NoPE layer, and the tap of its values,
    None if it reads another's or no tap shows them.
    """

    spec: AttentionSpec
    rope: RopeFrequencies | None
    values_tap: str | None


@dataclass(eq=False)
class _Value:
    """A value inside a step: its columns, the tap that shows it, and the op and the values that made it."""

    width: int
    tap: str | None = None
    made_by: Norm | Matrix | None = None
    rope: RopeFrequencies | None = None
    product: Matrix | None = None  # the matrix whose result a norm was applied to
    path: Path | None = None  # None if other ops, or several values, made it

    def then(self, step: Step) -> Path | None:
        """The path of what a step makes of it."""
        return None if self.path is None else self.path.then(step)


class Trace:
    """The parts of a model.

    `taps`: full names, in the order of a step. `norms` and `matrices`: what made a tapped value, by the tap's
    name; `products`: matrices, of values that were normalized too; `paths`: how a value is made of an earlier
    tap's, if norms, matrices and factors alone do that. `head_norms`: the norms of heads, by the tap of what
    they read. `heads` and `routings`: by layer. `embedding`: the matrix of the tokens; `unembedding`: the
    last product. `row_taps`: taps that see only rows with logits. `widths`: columns of each tap. `inputs`:
    the tap that sees a matrix's input, by the name of the weight, for those whose input is seen.
    `multiplied`: the shape (out, in) of each matrix that is multiplied, by its name: of experts each, and no
    embedding.
    """

    def __init__(self, program: Program, updates: Mapping[str, LowRank] | None = None) -> None:
        """`updates` are an adapter's updates, by the names of weights."""
        self._updates = updates or {}
        self.taps: list[str] = []
        self.norms: dict[str, Norm] = {}
        self.matrices: dict[str, Matrix] = {}
        self.products: dict[str, Matrix] = {}
        self.paths: dict[str, Path] = {}
        self.head_norms: dict[str, Norm] = {}
        self.heads: dict[int, Heads] = {}
        self.routings: dict[int, Routing] = {}
        self.embedding: Weight | None = None
        self.unembedding: Matrix | None = None
        self.row_taps: set[str] = set()
        self.widths: dict[str, int] = {}
        self.inputs: dict[str, str] = {}
        self.multiplied: dict[str, tuple[int, int]] = {}
        self._embeddings: set[str] = set()
        self._has_rows = False  # True once only the rows with logits are left
        program(self, None)  # type: ignore[arg-type]
        for name in self._embeddings & self.multiplied.keys():
            del self.multiplied[name]

    def head_width(self, tap: str) -> int:
        """Columns of one head of a tap of attention: keys and values may have fewer heads than queries."""
        spec = self.heads[int(tap.split(".")[1])].spec
        is_kv = tap.endswith(("hook_k", "hook_v", "hook_rot_k"))
        return self.widths[tap] // (spec.n_kv_heads if is_kv else spec.n_heads)

    def __getattr__(self, op: str) -> Callable[..., _Value]:
        """An op of which only its tap and its width, that of its input, matter: any that is not below."""
        if op.startswith("_"):
            raise AttributeError(op)

        def run(x: _Value, *values: Any, **options: Any) -> _Value:
            for value in (*values, *options.values()):
                if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
                    self.tap(*value, _Value(x.width))
            return _Value(x.width)

        return run

    def embed(self, weight: Weight, batch: Any, *rest: Any, **options: Any) -> _Value:
        """Note the first embedding, which embeds the tokens."""
        self._embeddings.add(weight.name)
        self.embedding = self.embedding or weight
        return _Value(weight.shape[1])

    def activations(self, batch: Any, width: int) -> _Value:
        """What an encoder of images reads."""
        return _Value(width)

    def rms_norm(self, x: _Value, weight: Vector, eps: float) -> _Value:
        """A value that knows its norm."""
        return _normed(x, Norm(weight, None, eps, x.tap, False))

    def layer_norm(self, x: _Value, weight: Vector, bias: Vector, eps: float) -> _Value:
        """A value that knows its norm."""
        return _normed(x, Norm(weight, bias, eps, x.tap, True))

    def head_norm(self, x: _Value, weight: Vector, eps: float) -> _Value:
        """Notes the norm under the tap of its input."""
        norm = Norm(weight, None, eps, x.tap, False)
        if x.tap is not None:
            self.head_norms[x.tap] = norm
        return _Value(x.width, product=_product(x), path=x.then(norm))

    def linear(
        self,
        x: _Value,
        weights: Sequence[Weight],
        bias: Vector | None = None,
        residual: _Value | None = None,
        tap: tuple[str, int | None] | None = None,
    ) -> _Value:
        """A value that knows its weights."""
        width = sum(w.shape[0] for w in weights)
        updates = tuple(self._updates.get(weight.name) for weight in weights)
        matrix = Matrix(tuple(weights), updates, bias, 0, width, x.tap)
        self.unembedding = matrix  # until another comes
        self._multiply(x, weights, weights)
        if tap is not None:
            self.tap(*tap, _Value(width, made_by=matrix))
        if residual is not None:
            return _Value(width)
        return _Value(width, made_by=matrix, path=x.then(matrix))

    def route(self, logits: _Value, routing: Routing, tap: tuple[str, int | None] | None = None) -> _Value:
        """Notes the layer's routing."""
        if tap is not None and tap[1] is not None:
            self.routings[tap[1]] = routing
            self.tap(*tap, _Value(logits.width))
        return _Value(logits.width)

    def expert_linear(
        self, x: _Value, routes: Any, experts: Sequence[Experts], bias: Vector | None = None
    ) -> _Value:
        """A value of the experts' width."""
        self._multiply(x, experts, [weight for each in experts for weight in each.weights])
        return _Value(sum(each.shape[1] for each in experts))

    def scale(self, x: _Value, factor: float) -> _Value:
        """Return a value that knows the scaled value."""
        return _Value(x.width, product=_product(x), path=x.then(factor))

    def split(self, x: _Value, widths: Sequence[int]) -> tuple[_Value, ...]:
        """Parts that know their rows of the weights."""
        parts, start = [], 0
        for width in widths:
            made_by, path = x.made_by, None
            if isinstance(made_by, Matrix):
                made_by = replace(made_by, start=start, stop=start + width)
                if x.path is not None and x.path.steps:
                    path = Path(x.path.tap, (*x.path.steps[:-1], made_by))
            parts.append(_Value(width, made_by=made_by, path=path))
            start += width
        return tuple(parts)

    def map(self, name: str, x: _Value, *rest: Any, **numbers: float) -> _Value:
        """A value of the same width."""
        return _Value(x.width)

    def head_columns(self, x: _Value, n_heads: int, start: int, stop: int) -> _Value:
        """A value of the columns' width."""
        return _Value(n_heads * (stop - start))

    def join_heads(self, parts: Sequence[_Value], n_heads: int) -> _Value:
        """A value that knows the rotation of a part."""
        rope = next((part.rope for part in parts if part.rope is not None), None)
        return _Value(sum(part.width for part in parts), rope=rope)

    def repeat(self, x: _Value, times: int) -> _Value:
        """A value of the repeated columns' width."""
        return _Value(times * x.width)

    def head_linear(self, x: _Value, heads: Experts) -> _Value:
        """A value of the heads' width; no adapter changes such matrices."""
        return _Value(heads.shape[0] * heads.shape[1])

    def rope(
        self, q: _Value, k: _Value | None, rope: RopeFrequencies, spec: AttentionSpec, batch: Any
    ) -> tuple[_Value, _Value | None]:
        """Values that know their rotation."""
        return _Value(q.width, rope=rope), k and _Value(k.width, rope=rope)

    def rotate(self, x: _Value, rope: RopeFrequencies, spec: AttentionSpec, batch: Any) -> _Value:
        """A value that knows its rotation."""
        return _Value(x.width, rope=rope)

    def attention(self, q: _Value, k: Any, v: Any, spec: AttentionSpec, batch: Any) -> _Value:
        """Notes the layer's heads: those of encoders share one layer of a cache."""
        layer = spec.layer if q.tap is None else int(q.tap.split(".")[1])
        self.heads[layer] = Heads(spec, q.rope, None if v is None else v.tap)
        return _Value(q.width)

    def logit_rows(self, x: _Value, batch: Any) -> _Value:
        """The same tap shows the rows that are left."""
        self._has_rows = True
        return _Value(x.width, tap=x.tap, path=x.path)

    def tap(self, name: str, layer: int | None, x: _Value) -> _Value:
        """Notes the tap, and what made its value."""
        full_name = tap_name(name, layer)
        self.taps.append(full_name)
        self.widths[full_name] = x.width
        if isinstance(x.made_by, Norm):
            self.norms[full_name] = x.made_by
        elif isinstance(x.made_by, Matrix):
            self.matrices[full_name] = x.made_by
        product = _product(x)
        if product is not None:
            self.products[full_name] = product
        if self._has_rows:
            self.row_taps.add(full_name)
        if x.path is not None and x.path.steps:
            self.paths[full_name] = x.path
        return _Value(x.width, full_name, x.made_by, x.rope, x.product, Path(full_name))

    def _multiply(self, x: _Value, parts: Sequence[Weight | Experts], weights: Sequence[Weight]) -> None:
        if x.tap is not None:
            self.inputs |= {part.name: x.tap for part in parts}
        self.multiplied |= {weight.name: weight.shape for weight in weights}


def _normed(x: _Value, norm: Norm) -> _Value:
    """A value that knows its norm."""
    return _Value(x.width, made_by=norm, product=_product(x), path=x.then(norm))


def _product(x: _Value) -> Matrix | None:
    """The matrix that made a value, or one that was normalized or scaled since."""
    return x.made_by if isinstance(x.made_by, Matrix) else x.product
