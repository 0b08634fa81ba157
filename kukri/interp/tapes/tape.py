"""A tape over the op set in NumPy: runs a model's code on float32 weights and gives gradients of every tap.

Reverse-mode differentiation: each op keeps what its derivative needs, and `backward` goes through them from
the last to the first. Tapes share matrices in float32, which are freed with the last tape: see `Shared`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar
from weakref import proxy, ref

import numpy as np
import numpy.typing as npt

from kukri.dataclass import dataclass
from kukri.errors import UnsupportedError
from kukri.interp.hooks.attention import keys_ahead, seen_keys
from kukri.interp.tapes.delta_rule import DeltaRule
from kukri.kernels.activations import NUMPY
from kukri.kernels.array_ops import DERIVATIVES, ArrayOps, convolve, rotated
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.expert_choice import NO_EXPERT, Routes, choose, used_experts
from kukri.kernels.host_step import check_routes
from kukri.kernels.op_set import EmbedBy, Program
from kukri.kernels.rope_rows import RopeRows
from kukri.kernels.specs import AttentionSpec, ConvSpec, DeltaSpec, Routing
from kukri.kernels.taps import tap_name
from kukri.kernels.weight_handles import Experts, RopeFrequencies, Vector, Weight
from kukri.quant.blocks import dequantize

KEPT_BYTES = 1 << 30  # matrices of a model that take no more stay for the next tape
_T = TypeVar("_T")


class Matrices(dict[Weight, FloatArray]):
    """A model's matrices in float32, added as tapes read them."""


class Shared(Generic[_T]):
    """A model's constants in float32 for tapes: the same for all that live at one time, and freed with the
    last of them if all `n_parameters` take more than KEPT_BYTES.
    """

    def __init__(self, make: Callable[[], _T], n_parameters: int) -> None:
        self._make, self._n_bytes = make, 4 * n_parameters
        self._made: Callable[[], _T | None] = lambda: None
        self._kept: _T | None = None

    def __call__(self) -> _T:
        """The constants, new ones if no tape has any."""
        made = self._made()
        if made is None:
            made = self._make()
            self._made = ref(made)
            self._kept = made if self._n_bytes <= KEPT_BYTES else None
        return made


@dataclass(frozen=True)
class TextRows:
    """The tokens of whole texts, back to back: the batch that a tape runs. All int32, [rows] but `starts`.

    `rope_positions` are those by which heads rotate, if others.
    """

    token_ids: IntArray
    positions: IntArray
    starts: IntArray  # [texts + 1]
    token_types: IntArray
    rope_positions: IntArray | None = None  # [axes, rows]

    @classmethod
    def of(cls, texts: Sequence[IntArray], rope_positions: IntArray | None = None) -> TextRows:
        """All rows of texts."""
        ids = np.concatenate(texts).astype(np.int32)
        starts = np.cumsum([0, *map(len, texts)], dtype=np.int32)
        positions = np.concatenate([np.arange(len(text), dtype=np.int32) for text in texts])
        return cls(ids, positions, starts, np.zeros_like(ids), rope_positions)

    @property
    def texts(self) -> list[slice]:
        """The rows of each text."""
        starts = self.starts.tolist()
        return [slice(start, stop) for start, stop in pairwise(starts)]


class Variable:
    """A value of a run, and its gradient once `backward` has come there: float32 of one shape."""

    __slots__ = ("grad", "x")

    def __init__(self, x: FloatArray) -> None:
        self.x = x
        self.grad: FloatArray | None = None

    def add(self, grad: FloatArray) -> None:
        """Adds to its gradient."""
        self.grad = grad if self.grad is None else self.grad + grad


Pull = Callable[[FloatArray], None]  # takes the gradient of an op's result to those of its inputs


def shared_op(name: str) -> Callable[..., Variable]:
    """The op of `ArrayOps` on the numbers of Variables, whose gradients DERIVATIVES gives."""
    op, derivative = getattr(ArrayOps, name), DERIVATIVES[name]

    def numbers(argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return [numbers(each) for each in argument]
        return argument.x if isinstance(argument, Variable) else argument

    @wraps(op)
    def run(tape: Tape, *arguments: Any, **options: Any) -> Variable:
        inputs = [each for one in arguments for each in (one if isinstance(one, list | tuple) else (one,))]
        values = numbers(arguments)

        def pull(g: FloatArray) -> None:
            variables = (each for each in inputs if isinstance(each, Variable))
            for variable, grad in zip(variables, derivative(g, *values, **options)):
                variable.add(grad)

        return tape._new(op(tape, *values, **options), pull)

    return run


class Tape:
    """The op set (`kukri.kernels.op_set.Ops`) on Variables; ops of DERIVATIVES are added after the class.

    `given` are values to take in place of those at taps; no gradient goes beyond them. Raises
    UnsupportedError on an op without a derivative here.
    """

    xp = NUMPY
    keeps_patterns = True  # False: attention's patterns are computed again by `backward`

    def __init__(
        self,
        matrices: Matrices,
        ropes: dict[RopeFrequencies, RopeRows],
        given: Mapping[str, FloatArray] | None = None,
    ) -> None:
        """`matrices` and `ropes` are filled, for other tapes too."""
        self._tapped: dict[str, Variable] = {}
        self._kv: dict[int, tuple[Variable, Variable]] = {}  # by layer: others may read them
        self._nodes: list[tuple[Variable, Pull]] = []
        self.matrices, self._ropes, self._given = matrices, ropes, given or {}
        # for ops' derivatives: a tape that they held would wait, with all its values, for Python's collector
        self._weak: Any = proxy(self)

    def run(self, program: Program, batch: TextRows) -> Variable:
        """The program's result, [rows, width]."""
        result: Variable = program(self, batch)  # type: ignore[arg-type]
        return result

    def backward(self, result: Variable, grad: FloatArray, dropped: Iterable[str] = ()) -> None:
        """Fills in the gradients, of sum(result * grad), from zero. None goes through the taps `dropped`."""
        ends = {id(self._tapped[tap]) for tap in dropped}
        for variable, _ in self._nodes:
            variable.grad = None
        result.add(grad.astype(np.float32))
        for variable, pull in reversed(self._nodes):
            if variable.grad is not None and id(variable) not in ends:
                pull(variable.grad)

    def values(self, result: Variable) -> FloatArray:
        """The numbers of a result."""
        return result.x

    def value(self, tap: str) -> FloatArray:
        """The value at a tap, [rows, width]."""
        return self._tapped[tap].x

    def gradient(self, tap: str) -> FloatArray:
        """The gradient there, of the same shape: zeros if the result does not depend on it."""
        variable = self._tapped[tap]
        return np.zeros_like(variable.x) if variable.grad is None else variable.grad

    def __getattr__(self, op: str) -> Any:
        """Raises UnsupportedError: the op is not below."""
        if op.startswith("_"):
            raise AttributeError(op)
        raise UnsupportedError(f"gradients of the op {op} are not supported")

    def floats(self, x: FloatArray) -> FloatArray:
        """The numbers of an op of `ArrayOps`, as they are."""
        return x

    def embed(
        self, weight: Weight, batch: TextRows, by: EmbedBy = "token_ids", residual: Variable | None = None
    ) -> Variable:
        """Rows of a matrix, which have no gradient, plus `residual`."""
        rows = dequantize(weight.data[getattr(batch, by)], weight.type)
        if residual is None:
            return self._new(rows, lambda g: None)
        return self._new(rows + residual.x, residual.add)

    def rms_norm(self, x: Variable, weight: Vector, eps: float) -> Variable:
        """The derivative is r (g w - n mean(g w n)), of n = x r."""
        return self._normed(x, x.x, weight, None, eps, x.x.shape)

    def head_norm(self, x: Variable, weight: Vector, eps: float) -> Variable:
        """rms_norm of each head."""
        return self._normed(x, x.x.reshape(len(x.x), -1, len(weight)), weight, None, eps, x.x.shape)

    def layer_norm(self, x: Variable, weight: Vector, bias: Vector, eps: float) -> Variable:
        """The derivative loses its mean as well."""
        return self._normed(x, x.x, weight, bias, eps, x.x.shape)

    def linear(
        self,
        x: Variable,
        weights: Sequence[Weight],
        bias: Vector | None = None,
        residual: Variable | None = None,
        tap: tuple[str, int | None] | None = None,
    ) -> Variable:
        """The derivative is g W."""
        y = np.concatenate([x.x @ self._matrix(weight).T for weight in weights], axis=1)
        if bias is not None:
            y += bias.data

        tape = self._weak

        def pull(g: FloatArray) -> None:
            flat, start = g.reshape(-1, g.shape[-1]), 0  # NumPy multiplies more dimensions without BLAS
            for weight in weights:
                part = flat[:, start : start + weight.shape[0]]
                if part.any():  # queries and keys of a frozen pattern have no gradient
                    x.add((part @ tape._matrix(weight)).reshape(*g.shape[:-1], -1))
                start += weight.shape[0]

        found = self._new(y, pull)
        if tap is not None:
            found = self.tap(*tap, found)
        return found if residual is None else self.add(found, residual)

    def split(self, x: Variable, widths: Sequence[int]) -> tuple[Variable, ...]:
        """Return columns of x, which counts as a single head."""
        stops = accumulate(widths)
        return tuple(self.head_columns(x, 1, stop - width, stop) for width, stop in zip(widths, stops))

    def head_linear(self, x: Variable, heads: Experts) -> Variable:
        """The derivative is g W, of each head's matrix."""
        matrices = np.stack([self._matrix(weight) for weight in heads.weights])  # [H, out, in]

        def pull(g: FloatArray) -> None:
            own = g.reshape(-1, len(matrices), matrices.shape[1]).swapaxes(0, 1)
            x.add((own @ matrices).swapaxes(0, 1).reshape(*g.shape[:-1], -1))

        own = x.x.reshape(len(x.x), len(matrices), -1).swapaxes(0, 1)
        return self._new((own @ matrices.swapaxes(1, 2)).swapaxes(0, 1).reshape(len(x.x), -1), pull)

    def rope(
        self, q: Variable, k: Variable | None, rope: RopeFrequencies, spec: AttentionSpec, batch: TextRows
    ) -> tuple[Variable, Variable | None]:
        """The derivative is the rotation back."""
        rows = self._ropes.setdefault(rope, RopeRows(rope))
        positions = batch.positions if batch.rope_positions is None else batch.rope_positions
        rows.ensure(int(positions.max()) + 1)
        cos, sin = rows.at(positions)

        def turned(x: Variable) -> Variable:
            y = rotated(NUMPY, x.x, cos, sin, spec.d_head)
            return self._new(y, lambda g: x.add(rotated(NUMPY, g, cos, -sin, spec.d_head)))

        return turned(q), None if k is None else turned(k)

    def rotate(self, x: Variable, rope: RopeFrequencies, spec: AttentionSpec, batch: TextRows) -> Variable:
        """The rotation of one value."""
        return self.rope(x, None, rope, spec, batch)[0]

    def attention(
        self,
        q: Variable,
        k: Variable | None,
        v: Variable | None,
        spec: AttentionSpec,
        batch: TextRows,
    ) -> Variable:
        """Softmax attention within each text: the derivative of a score is p (gp - sum(gp p))."""
        if k is None or v is None:
            k, v = self._kv[spec.kv_layer]
        self._kv[spec.layer] = k, v
        out = np.empty_like(q.x)
        kept: dict[int, tuple[FloatArray, FloatArray]] = {}  # by a text's first row

        tape = self._weak

        def within(rows: slice) -> tuple[FloatArray, FloatArray]:
            return _shares(q.x[rows], k.x[rows], spec, tape.seen(spec, rows.stop - rows.start))

        for rows in batch.texts:
            scores, shares = within(rows)
            out[rows] = _by_token(shares @ _by_head(v.x[rows], spec.n_kv_heads))
            if self.keeps_patterns:
                kept[rows.start] = scores, shares

        def pull(g: FloatArray) -> None:
            grads = [np.empty_like(each.x) for each in (q, k, v)]
            for rows in batch.texts:
                scores, shares = kept.get(rows.start) or within(rows)
                keys, values = (_by_head(each.x[rows], spec.n_kv_heads) for each in (k, v))
                queries, own = (_by_head(each, spec.n_kv_heads, spec.group) for each in (q.x[rows], g[rows]))
                to_shares = own @ values.swapaxes(-1, -2)
                to_scores = shares * (to_shares - (to_shares * shares).sum(-1, keepdims=True))
                if spec.softcap is not None:  # the shares of keys that are not seen are 0
                    capped = np.where(np.isfinite(scores), scores / np.float32(spec.softcap), 0)
                    to_scores *= 1 - capped * capped
                to_scores *= np.float32(spec.scale)
                grads[0][rows] = _by_token(to_scores @ keys)
                grads[1][rows] = _by_token((to_scores.swapaxes(-1, -2) @ queries).sum(1, keepdims=True))
                grads[2][rows] = _by_token((shares.swapaxes(-1, -2) @ own).sum(1, keepdims=True))
            for variable, grad in zip((q, k, v), grads):
                variable.add(grad)

        return self._new(out, pull)

    def seen(self, spec: AttentionSpec, n_tokens: int) -> npt.NDArray[np.bool_]:
        """Which keys of a text each query sees, [query, key]."""
        return seen_keys(spec, n_tokens)

    def conv(self, x: Variable, spec: ConvSpec, batch: TextRows) -> Variable:
        """The derivative is the convolution backwards, with the taps in the other order."""
        taps = spec.taps.data.reshape(spec.n_lines * spec.n_taps, -1)
        n_before = spec.n_taps - 1 - (spec.n_after or 0)
        y = np.zeros_like(x.x) if spec.bias is None else np.tile(spec.bias.data, (len(x.x), 1))
        convolve(y, x.x, batch.texts, taps, n_before, spec.n_lines)

        def pull(g: FloatArray) -> None:
            back = np.zeros_like(x.x)
            convolve(back, g, batch.texts, taps[::-1], spec.n_taps - 1 - n_before, spec.n_lines)
            x.add(back)

        found = self._new(y, pull)
        return self.map("gated_sigmoid", found, found) if spec.is_activated else found

    def delta_rule(
        self,
        q: Variable,
        k: Variable,
        v: Variable,
        decay: Variable,
        beta: Variable,
        spec: DeltaSpec,
        batch: TextRows,
    ) -> Variable:
        """Back through time in each text: see DeltaRule."""
        inputs = (q, k, v, decay, beta)
        rules = [DeltaRule(spec, *(each.x[rows] for each in inputs)) for rows in batch.texts]

        def pull(g: FloatArray) -> None:
            grads = [rule.backward(g[rows]) for rule, rows in zip(rules, batch.texts)]
            for variable, parts in zip(inputs, zip(*grads)):
                variable.add(np.concatenate(parts))

        return self._new(np.concatenate([rule.result for rule in rules]), pull)

    def route(self, logits: Variable, routing: Routing, tap: tuple[str, int | None] | None = None) -> Routes:
        """Choose experts. Gradients pass through the scores and their divisor, not through the choice."""
        choice = choose(logits.x, routing)

        def at_numbers(shares: FloatArray) -> FloatArray:
            whole = np.zeros(logits.x.shape, np.float32)
            np.put_along_axis(whole, choice.numbers, shares, axis=1)
            return whole

        def pull(g: FloatArray) -> None:
            own = np.take_along_axis(g, choice.numbers, 1) * choice.shares
            pulled = at_numbers(own) - (own[..., None] * choice.parts).sum(1)
            logits.add(pulled * (1 - choice.scores) if routing.by_sigmoid else pulled)

        weights = self._new(at_numbers(choice.shares), pull)
        if routing.scales is not None:
            weights = self._scaled_columns(weights, routing.scales.data)
        if tap is not None:
            weights = self.tap(*tap, weights)
            check_routes(weights.x, routing.n_used)
        return Routes(weights, used_experts(weights.x, routing.n_used))

    def _scaled_columns(self, x: Variable, factors: FloatArray) -> Variable:
        return self._new(x.x * factors, lambda g: x.add(g * factors))

    def expert_linear(
        self, x: Variable, routes: Routes, experts: Sequence[Experts], bias: Vector | None = None
    ) -> Variable:
        """The derivative is g W, of each row's expert; a token's rows add up."""
        numbers = routes.experts.reshape(-1)
        n_copies = len(numbers) // len(x.x)
        rows = np.repeat(x.x, n_copies, axis=0)
        y = np.zeros((len(rows), sum(each.shape[1] for each in experts)), np.float32)
        used = [(numbers == expert, expert) for expert in np.unique(numbers[numbers != NO_EXPERT])]

        tape = self._weak

        def matrix(expert: int) -> FloatArray:
            return np.concatenate([tape._matrix(each.weights[expert]) for each in experts])

        for mine, expert in used:
            y[mine] = rows[mine] @ matrix(expert).T
            if bias is not None:
                y[mine] += bias.data.reshape(-1, y.shape[1])[expert]

        def pull(g: FloatArray) -> None:
            back = np.zeros_like(rows)
            for mine, expert in used:
                back[mine] = g[mine] @ matrix(expert)
            x.add(back.reshape(len(x.x), n_copies, -1).sum(axis=1))

        return self._new(y, pull)

    def combine(
        self,
        x: Variable,
        routes: Routes,
        residual: Variable | None = None,
        tap: tuple[str, int | None] | None = None,
    ) -> Variable:
        """The derivative by a row is g times its weight, by a weight the product of g and its row."""
        experts, weights = routes.experts, routes.weights
        is_used = experts != NO_EXPERT
        each = np.where(is_used, np.take_along_axis(weights.x, experts, axis=1), np.float32(0))[..., None]
        rows = x.x.reshape(*experts.shape, -1)  # [T, n_used, D]

        def pull(g: FloatArray) -> None:
            x.add((each * g[:, None]).reshape(x.x.shape))
            back = np.zeros_like(weights.x)
            token, place = np.nonzero(is_used)
            back[token, experts[token, place]] = (rows * g[:, None]).sum(-1)[token, place]
            weights.add(back)

        found = self._new((each * rows).sum(axis=1), pull)
        if tap is not None:
            found = self.tap(*tap, found)
        return found if residual is None else self.add(found, residual)

    def logit_rows(self, x: Variable, batch: TextRows) -> Variable:
        """All rows: the metric sees all."""
        return x

    def tap(self, name: str, layer: int | None, x: Variable) -> Variable:
        """x under its name, or the value given in its place."""
        full_name = tap_name(name, layer)
        given = self._given.get(full_name)
        found = self._new(x.x, x.add) if given is None else self._new(given, lambda g: None)
        self._tapped[full_name] = found
        return found

    def _new(self, x: FloatArray, pull: Pull) -> Variable:
        variable = Variable(x.astype(np.float32, copy=False))
        self._nodes.append((variable, pull))
        return variable

    def _matrix(self, weight: Weight) -> FloatArray:
        if weight not in self.matrices:
            self.matrices[weight] = dequantize(weight.data, weight.type)
        return self.matrices[weight]

    def _normed(
        self, x: Variable, parts: FloatArray, weight: Vector, bias: Vector | None, eps: float, shape: Any
    ) -> Variable:
        """A norm along the last axis of x seen as `parts`; with a bias, centred first."""
        centred = parts if bias is None else parts - parts.mean(-1, keepdims=True)
        inverse = 1 / np.sqrt((centred * centred).mean(-1, keepdims=True) + np.float32(eps))
        divided = centred * inverse

        def pull(g: FloatArray) -> None:
            scaled = g.reshape(parts.shape) * weight.data
            back = inverse * (scaled - divided * (scaled * divided).mean(-1, keepdims=True))
            if bias is not None:
                back -= back.mean(-1, keepdims=True)
            x.add(back.reshape(shape))

        y = divided * weight.data
        return self._new((y if bias is None else y + bias.data).reshape(shape), pull)


def _by_head(x: FloatArray, n_groups: int, group: int = 1) -> FloatArray:
    """x [T, G*R*K] as [G, R, T, K]."""
    return x.reshape(len(x), n_groups, group, -1).transpose(1, 2, 0, 3)


def _by_token(x: FloatArray) -> FloatArray:
    """x [G, R, T, K] as [T, G*R*K]."""
    return x.transpose(2, 0, 1, 3).reshape(x.shape[2], -1)


def _shares(
    q: FloatArray, k: FloatArray, spec: AttentionSpec, seen: npt.NDArray[np.bool_]
) -> tuple[FloatArray, FloatArray]:
    """(scores, after their cap, and the softmax of them) of a text, [G, H/G, T, T]."""
    keys = _by_head(k, spec.n_kv_heads)
    scores = _by_head(q, spec.n_kv_heads, spec.group) @ keys.swapaxes(-1, -2) * np.float32(spec.scale)
    if spec.softcap is not None:
        scores = np.float32(spec.softcap) * np.tanh(scores / np.float32(spec.softcap))
    if (biases := spec.biases(keys_ahead(len(q)))) is not None:
        scores = scores + biases.reshape(scores.shape)
    scores = np.where(seen, scores, np.float32(-np.inf))
    top = scores.max(-1, keepdims=True)
    sink: FloatArray | None = None
    if spec.sinks is not None:
        sink = spec.sinks.data.reshape(spec.n_kv_heads, spec.group, 1, 1)
        top = np.maximum(top, sink)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - top)
    return scores, weights / total


for _op in DERIVATIVES:
    setattr(Tape, _op, shared_op(_op))
