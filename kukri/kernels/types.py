"""The types that all backends share: constants, a step's batch, caches, logits, and the op set.

Shape letters: T tokens in the step, S sequences, N rows with logits, D model width, V vocabulary,
H query heads, G key/value heads, K head size, P pages, B page size, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from kukri.errors import ShapeError
from kukri.kernels.sampling_record import SamplingRecords
from kukri.quant.types import QuantType

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]
ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Weight:
    """A matrix of `shape` (out, in): `stored` is uint8 [out, bytes per row], a view of the file.

    Row i is row `row_order[i]` of `stored`, if there is an order. `per_token` requests activations of one
    scale a token, if it is Q4_0 (`kukri.quant.per_token`).
    """

    stored: ByteArray
    type: QuantType
    shape: tuple[int, int]
    name: str = ""
    per_token: bool = False
    row_order: npt.NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        """Raises ShapeError unless `stored` and `row_order` hold exactly what `shape` and `type` imply."""
        expected, stored = (self.shape[0], self.type.row_bytes(self.shape[1])), self.stored
        if stored.dtype != np.uint8 or stored.shape != expected or self.shape[1] % self.type.block_size:
            raise ShapeError(
                f"weight {self.name!r}: {self.type.name} {self.shape} does not fit bytes {stored.shape}"
            )
        order = self.row_order
        if order is not None and not np.array_equal(np.sort(order), np.arange(self.shape[0])):
            raise ShapeError(f"weight {self.name!r}: its row order is not one of its {self.shape[0]} rows")

    @property
    def data(self) -> ByteArray:
        """The rows in order, uint8 [out, bytes per row]: a view, or a copy if they are stored in another."""
        return self.stored if self.row_order is None else self.stored[self.row_order]


@dataclass(frozen=True, eq=False)
class Vector:
    """A float32 vector [n] of a model's constants: the weight of a norm, a bias. Hashed by identity."""

    data: FloatArray
    name: str = ""

    def __post_init__(self) -> None:
        """Raises ShapeError unless `data` is float32 with one dimension."""
        if self.data.ndim != 1 or self.data.dtype != np.float32:
            raise ShapeError(f"vector {self.name!r}: {self.data.dtype} {self.data.shape} is not float32 [n]")

    def __len__(self) -> int:
        """n."""
        return len(self.data)


@dataclass(frozen=True, eq=False)
class LowRank:
    """An adapter's update of a matrix (out, in): x Wᵀ becomes x Wᵀ + scale * (x Aᵀ) Bᵀ (Hu et al. 2021).

    `down` is A (rank, in) and `up` is B (out, rank), of types without blocks. Hashed by identity.
    """

    down: Weight
    up: Weight
    scale: float

    def __post_init__(self) -> None:
        """Raises ShapeError unless the ranks of both agree and their numbers are not in blocks."""
        if self.down.shape[0] != self.up.shape[1] or max(w.type.block_size for w in (self.down, self.up)) > 1:
            raise ShapeError(
                f"update {self.up.name!r}: {self.down.type.name} {self.down.shape} and {self.up.type.name} "
                f"{self.up.shape} do not belong together"
            )

    @property
    def rank(self) -> int:
        """Rows of A."""
        return self.down.shape[0]


# The adapters of a program by slot: updates by the names of the matrices they change; None: no adapter.
AdapterSlots = Sequence[Mapping[str, LowRank] | None]


@dataclass(frozen=True, eq=False)
class Experts:
    """A matrix (out, in) for each expert of a mixture, all of one type: `weights`, views of the file.

    A file may hold them as one tensor or one by one. Hashed by identity.
    """

    weights: tuple[Weight, ...]
    name: str = ""

    def __post_init__(self) -> None:
        """Raises ShapeError unless there are matrices, of one shape and type."""
        if len({(w.shape, w.type, w.per_token) for w in self.weights}) != 1:
            raise ShapeError(f"experts {self.name!r} are not of one shape and type")

    @property
    def type(self) -> QuantType:
        """The weight type."""
        return self.weights[0].type

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, out, in)."""
        return (len(self.weights), *self.weights[0].shape)


@dataclass(frozen=True)
class Routing:
    """The choice of experts for a token: the `n_used` of `n_experts` that have the largest logits.

    An expert's weight is its share in the softmax of all logits, or, if `normalized`, of the chosen ones: the
    weights of a token then have the sum 1.
    """

    n_experts: int
    n_used: int
    normalized: bool


@dataclass(frozen=True)
class RopeFrequencies:
    """The angles of a rotary embedding: position times frequency, for positions below `max_context`.

    `inverse`: radians per token of each pair of dimensions, rotary_dim / 2 of them. `scale` multiplies cos
    and sin (the attention factor of YaRN). Equal ones may share what a backend makes of them.
    """

    inverse: tuple[float, ...]
    max_context: int
    scale: float = 1.0

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that rotate."""
        return 2 * len(self.inverse)


@dataclass(frozen=True)
class ForwardBatch:
    """One step: T new tokens of S sequences, back to back, no padding. All arrays int32.

    `slots[t]` = page * B + offset says where token t's key and value go. Sequence s owns tokens
    query_start[s] to query_start[s + 1]; its context_len[s] counts visible tokens, the new ones included.
    `page_table[s]` lists its pages in order (unused entries are 0). `logit_rows` are the tokens (indices
    into T) whose logits are wanted.

    `positions` count a sequence's tokens; if RoPE is to rotate by other numbers, `rope_positions` has them.
    `mask` is for a step of one sequence and a program compiled for it (StepLimits.mask_heads): float32
    [1 or H, T, context_len[0]], added to scores in place of causality and windows; a token that sees nothing
    gets zeros. `token_types` say to which of a pair of texts a token belongs; None: all to the first.
    `adapters[s]` is the slot of sequence s's adapter, -1 for none; None: no sequence has one.

    Recurrent layers read and write the state in slot `state_slots[s]` of sequence s (None: slot s); it counts
    as zeros for a sequence that begins, whose first token in the step has position 0. Behind token t they
    also copy it to slot `state_saves[t]`, -1 for no copy (None: none).

    `activations` [T, D] are what the layers before have made of the tokens, for a program that begins behind
    them (`StageOps`).
    """

    token_ids: IntArray  # [T]
    positions: IntArray  # [T]
    slots: IntArray  # [T]
    query_start: IntArray  # [S + 1]
    context_len: IntArray  # [S]
    page_table: IntArray  # [S, max_pages]
    logit_rows: IntArray  # [N]
    rope_positions: IntArray | None = None  # [T]
    mask: FloatArray | None = None
    token_types: IntArray | None = None  # [T]
    adapters: IntArray | None = None  # [S]
    state_slots: IntArray | None = None  # [S]
    state_saves: IntArray | None = None  # [T]
    activations: FloatArray | None = None  # [T, D]
    inputs: StepInputs | None = field(default=None, init=False)  # whose arrays these are; None: others

    @property
    def n_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def n_sequences(self) -> int:
        """S."""
        return len(self.context_len)

    @property
    def n_logit_rows(self) -> int:
        """N."""
        return len(self.logit_rows)


EmbedBy = Literal["token_ids", "positions", "token_types"]
KVType = Literal["f16", "q8_0", "q4", "fp8", "f32"]
GateBy = Literal["itself", "sigmoid", "silu"]


@dataclass(frozen=True)
class KVLayer:
    """A layer that caches keys and values of each token; a query sees `window` of them, or all.

    Without heads it takes no memory: a layer whose cache is elsewhere.
    """

    n_kv_heads: int
    d_head: int
    window: int | None = None


@dataclass(frozen=True)
class StateLayer:
    """A layer that keeps a recurrent state of fixed size for each sequence: float32 arrays, (name, shape).

    The order of an array's numbers is the backend's own.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]


CacheLayout = Sequence[KVLayer | StateLayer]  # an entry for each layer of a model


def has_states(layout: CacheLayout) -> bool:
    """True if a layer keeps a recurrent state."""
    return any(isinstance(layer, StateLayer) for layer in layout)


class Cache(Protocol):
    """The memory of a model's sequences: keys and values in pages, recurrent states in slots.

    It belongs to the backend that made it, which alone knows how it lies in memory. A page has room for
    `page_tokens` tokens, in all layers; page p has the slots p * page_tokens and on. All is zero at first.
    """

    layout: tuple[KVLayer | StateLayer, ...]
    n_pages: int
    n_states: int
    kv_type: KVType
    page_tokens: int

    @property
    def n_bytes(self) -> int:
        """Bytes reserved."""

    def copy_page(self, source: int, target: int) -> None:
        """Copies a page's contents."""

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zeroes pages before others get them: they may hold NaN."""

    def clear_from(self, page: int, offset: int) -> None:
        """Zeroes the tokens of a page from `offset` on."""

    def page_data(self, page: int) -> bytes:
        """A copy of a page's bytes, for `set_page_data` of a cache of the same layout, type and backend."""

    def set_page_data(self, page: int, data: bytes | memoryview) -> None:
        """Fills a page with the bytes of another."""

    def copy_state(self, source: int, target: int) -> None:
        """Copies the recurrent state of a sequence from one slot to another."""


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention. `scale` multiplies scores.

    A token sees itself and earlier ones, `window` of them (None: all); if attention is not causal, as many
    later ones too. `sinks` [H], if there are any, are scores that take their share of each head's softmax and
    add nothing.
    """

    layer: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    scale: float
    window: int | None = None
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    is_causal: bool = True
    sinks: Vector | None = None

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.n_heads // self.n_kv_heads


@dataclass(frozen=True, eq=False)
class ConvSpec:
    """A layer's causal convolution of each of C channels, over its last K inputs, the current included.

    `taps` [K * C] has the weights of the oldest input first. Its state is the array "conv" [K - 1, C].
    """

    layer: int
    n_taps: int  # K
    taps: Vector
    bias: Vector | None = None  # [C]
    is_activated: bool = False  # by SiLU


@dataclass(frozen=True, eq=False)
class ScanSpec:
    """A layer's state space of H heads (Mamba-2: Dao and Gu 2024), whose state is the array "scan" [H, N, P].

    Of each token a step dt = softplus(dt + dt_bias), within `limits`, scales what is added and, times the
    head's negative number in `a`, is the exponent of what is left of the state.
    """

    layer: int
    n_heads: int  # H
    n_groups: int  # of heads that share b and c
    d_state: int  # N
    d_head: int  # P
    a: Vector  # [H]
    d: Vector  # [H]: what is added of x itself
    dt_bias: Vector  # [H]
    limits: tuple[float, float] = (0.0, float("inf"))


@dataclass(frozen=True, eq=False)
class DeltaSpec:
    """A layer's gated delta rule of H heads (Yang et al. 2024), whose state is the array "delta" [H, K, P].

    Value head h reads key head h // (H / G), or, if the heads `are_tiled`, h % G.
    """

    layer: int
    n_heads: int  # H, of values
    n_groups: int  # G, heads of keys and queries
    d_state: int  # K
    d_head: int  # P
    a: Vector  # [H], negative
    dt_bias: Vector  # [H]
    are_tiled: bool = False


# A value inside a step: an ndarray on the reference backend, a buffer handle while a plan is recorded.
Tensor = Any
# A hook sees (its full name, the array) and may edit the array in place or return a replacement.
Hook = Callable[[str, FloatArray], FloatArray | None]


class Ops(Protocol):
    """The op set that models are written against. Values are float32, row-major [rows, width]."""

    def embed(
        self, weight: Weight, batch: Any, by: EmbedBy = "token_ids", residual: Tensor | None = None
    ) -> Tensor:
        """Rows of `weight` [n, D] for the batch's token ids, positions or token types -> [T, D].

        `residual` [T, D] is added.
        """

    def rms_norm(self, x: Tensor, weight: Vector, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight, along each row (Zhang & Sennrich 2019)."""

    def head_norm(self, x: Tensor, weight: Vector, eps: float) -> Tensor:
        """rms_norm of each head of x [T, heads*K] on its own, by one `weight` [K]; in place."""

    def layer_norm(self, x: Tensor, weight: Vector, bias: Vector, eps: float) -> Tensor:
        """(x - mean) / sqrt(var + eps) * weight + bias, along each row (Ba et al. 2016)."""

    def linear(
        self,
        x: Tensor,
        weights: Sequence[Weight],
        bias: Vector | None = None,
        residual: Tensor | None = None,
        tap: tuple[str, int | None] | None = None,
    ) -> Tensor:
        """x [R, in] times the transpose of each weight [out_i, in], side by side -> [R, sum of out_i].

        `bias` [sum of out_i], the updates of each row's adapter, if the program has adapters, and `residual`
        (same shape as the result) are added, in this order. `tap` (name, layer) sees the sum before the
        residual; a backend may fuse that addition if the tap is not compiled.
        """

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """x + residual, both of one shape; fused with what makes x, if the backend can and x is not read."""

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x * factor."""

    def split(self, x: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
        """Column views of x, of the given widths."""

    def rope(
        self, q: Tensor, k: Tensor, rope: RopeFrequencies, spec: AttentionSpec, batch: Any
    ) -> tuple[Tensor, Tensor]:
        """Rotates each head of q [T, H*K] and k [T, G*K] by its token's position (half-split); in place."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, batch: Any) -> Tensor:
        """Stores k and v [T, G*K] at the batch's slots, then attends causally or by the mask -> [T, H*K]."""

    def conv(self, x: Tensor, spec: ConvSpec, batch: Any) -> Tensor:
        """A causal convolution of each column of x [T, C] along its sequence -> [T, C]."""

    def scan(self, x: Tensor, b: Tensor, c: Tensor, dt: Tensor, spec: ScanSpec, batch: Any) -> Tensor:
        """x [T, H*P] through the state space -> [T, H*P]: S = exp(a dt) S + dt b xT, y = cT S + d x.

        b and c are [T, G*N], dt [T, H].
        """

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, spec: DeltaSpec, batch: Any
    ) -> Tensor:
        """v [T, H*P] written under keys k [T, G*K], and what queries q read -> [T, H*P].

        S = exp(a softplus(decay + dt_bias)) S; S += k (sigmoid(beta) (v - kT S)); y = qT S. `decay` and
        `beta` are [T, H].
        """

    def gated(self, x: Tensor, gate: Tensor, by: GateBy) -> Tensor:
        """x * gate, sigmoid(gate) or silu(gate), both of one shape."""

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, the gated activation of SwiGLU (Shazeer 2020)."""

    def gelu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """gelu(gate) * up, the gated activation of GeGLU (Shazeer 2020)."""

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap)."""

    def clamped_swiglu(self, gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
        """(up + 1) * gate * sigmoid(alpha * gate), of gate clamped to at most, and up to within, `limit`:
        the activation of gpt-oss (OpenAI 2025).
        """

    def gelu(self, x: Tensor, is_exact: bool = False) -> Tensor:
        """GELU (Hendrycks and Gimpel 2016): x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).

        With `is_exact` x / 2 * (1 + erf(x / sqrt(2))).
        """

    def tanh(self, x: Tensor) -> Tensor:
        """The hyperbolic tangent of each number."""

    def route(self, logits: Tensor, routing: Routing, tap: tuple[str, int | None] | None = None) -> Tensor:
        """Chooses experts by the logits [T, E] of a router; of equal logits, the first -> routes.

        `tap` (name, layer) sees the weights [T, E], 0 for experts that are not used, and may change them: an
        expert is used unless its weight is 0. Raises HookError if that leaves more than `n_used`.
        """

    def expert_linear(
        self, x: Tensor, routes: Tensor, experts: Sequence[Experts], bias: Vector | None = None
    ) -> Tensor:
        """x times the transposed matrices of the experts that each token uses, side by side -> [T * n_used,
        sum of out_i]. Row t * n_used + j is that of token t and the j-th expert it uses, by their numbers.

        x is [T, in], or such rows of another expert_linear. `bias` [E * sum of out_i] is added, an expert's
        after another's. Rows that a token has no expert for are undefined; experts that no token uses are not
        read.
        """

    def combine(
        self,
        x: Tensor,
        routes: Tensor,
        residual: Tensor | None = None,
        tap: tuple[str, int | None] | None = None,
    ) -> Tensor:
        """The sum over its experts of each token's rows of x [T * n_used, D], times their weights -> [T, D].

        Experts are summed in the order of their numbers. `tap` and `residual` as in `linear`.
        """

    def logit_rows(self, x: Tensor, batch: Any) -> Tensor:
        """The rows of x [T, D] that the batch wants logits for -> [N, D]."""

    def tap(self, name: str, layer: int | None, x: Tensor) -> Tensor:
        """x, after the hooks that listen on `name` (TransformerLens spelling) have seen or edited it."""


class StageOps(Ops, Protocol):
    """The op set of a backend that can run a part of a model: `kukri.stages.program` makes such programs."""

    def activations(self, batch: Any, width: int) -> Tensor:
        """The batch's activations -> [T, width]."""


# A model as the backends see it: program(ops, batch) -> logits [N, V], or, of a part without the head, the
# activations [T, D]
Program = Callable[[Ops, Any], Tensor]


def tap_name(name: str, layer: int | None) -> str:
    """The full hook name: `blocks.3.hook_resid_pre`, or `name` itself outside the blocks."""
    return name if layer is None else f"blocks.{layer}.{name}"


@dataclass(frozen=True)
class StepLimits:
    """The largest step a compiled program must take: T, S, N and pages per sequence.

    `mask_heads` is the first size of the mask that every step brings, 1 or H; 0 for steps without one.
    """

    max_tokens: int
    max_sequences: int
    max_logit_rows: int
    max_pages: int
    mask_heads: int = 0


@dataclass(eq=False)
class StepInputs:
    """The arrays that a program reads its steps from, int32 at their largest sizes (see `ForwardBatch`).

    Fill the beginning of each, and give the program a `batch` of that many: nothing is copied then.
    """

    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    query_start: IntArray
    context_len: IntArray
    page_table: IntArray
    logit_rows: IntArray
    token_types: IntArray
    adapters: IntArray
    state_slots: IntArray
    state_saves: IntArray
    _batch: ForwardBatch | None = None

    @classmethod
    def zeros(cls, limits: StepLimits) -> StepInputs:
        """Arrays for steps within `limits`."""
        t, s, n = limits.max_tokens, limits.max_sequences, limits.max_logit_rows
        token_ids, positions, slots, logit_rows, types = (np.zeros(n, np.int32) for n in (t, t, t, n, t))
        page_table = np.zeros((s, limits.max_pages), np.int32)
        starts, lengths, adapters = (np.zeros(n, np.int32) for n in (s + 1, s, s))
        states, saves = np.arange(s, dtype=np.int32), np.full(t, -1, np.int32)
        more = (types, adapters, states, saves)
        return cls(token_ids, positions, slots, starts, lengths, page_table, logit_rows, *more)

    def batch(self, n_tokens: int, n_sequences: int, n_logit_rows: int) -> ForwardBatch:
        """The arrays' contents as a step: views of them, valid until they are filled again."""
        last, sizes = self._batch, (n_tokens, n_sequences, n_logit_rows)
        if last is not None and (len(last.token_ids), len(last.context_len), len(last.logit_rows)) == sizes:
            return last
        self._batch = batch = ForwardBatch(
            self.token_ids[:n_tokens],
            self.positions[:n_tokens],
            self.slots[:n_tokens],
            self.query_start[: n_sequences + 1],
            self.context_len[:n_sequences],
            self.page_table[:n_sequences],
            self.logit_rows[:n_logit_rows],
            token_types=self.token_types[:n_tokens],
            adapters=self.adapters[:n_sequences],
            state_slots=self.state_slots[:n_sequences],
            state_saves=self.state_saves[:n_tokens],
        )
        object.__setattr__(batch, "inputs", self)
        return batch

    def copy(self, batch: ForwardBatch) -> None:
        """Copies a batch of other arrays in, but for its mask and RoPE positions."""
        n_tokens, n_sequences, n_pages = batch.n_tokens, batch.n_sequences, batch.page_table.shape[1]
        self.token_ids[:n_tokens] = batch.token_ids
        self.positions[:n_tokens] = batch.positions
        self.slots[:n_tokens] = batch.slots
        self.query_start[: n_sequences + 1] = batch.query_start
        self.context_len[:n_sequences] = batch.context_len
        self.page_table[:n_sequences, :n_pages] = batch.page_table
        self.logit_rows[: batch.n_logit_rows] = batch.logit_rows
        self.token_types[:n_tokens] = 0 if batch.token_types is None else batch.token_types
        self.adapters[:n_sequences] = -1 if batch.adapters is None else batch.adapters
        own = np.arange(n_sequences, dtype=np.int32)
        self.state_slots[:n_sequences] = own if batch.state_slots is None else batch.state_slots
        self.state_saves[:n_tokens] = -1 if batch.state_saves is None else batch.state_saves


class Logits(Protocol):
    """Logits float32 [N, V] of a step, in their backend's memory; valid until its program's next step."""

    def __len__(self) -> int:
        """N."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, V)."""

    def take(self, rows: Sequence[int]) -> Logits:
        """These rows, in this order."""

    def copy(self) -> Logits:
        """The same, valid for as long as it is held."""

    def numpy(self) -> FloatArray:
        """An array on the host, which is not to be written to."""

    def has_nan(self, row: int) -> bool:
        """True if a row holds NaN."""

    def logit(self, row: int, token_id: int) -> float:
        """One number."""

    def argmax(self) -> list[int]:
        """The token of the largest logit in each row, of equals the lowest."""


class CompiledProgram(Protocol):
    """A model bound to a backend, a cache and inputs of its own. It runs one step at a time: for a second
    one under way, compile it a second time.
    """

    inputs: StepInputs

    def __call__(
        self,
        batch: ForwardBatch,
        on_tap: Hook | None = None,
        *,
        start: str | None = None,
        stop: str | None = None,
    ) -> Logits:
        """Runs one step and gives its logits. Writes the cache. A batch that is none of `inputs` is copied.

        Raises CapacityError on a step beyond the limits, ShapeError on indices outside their arrays.

        `on_tap` is called at each tap that the program is compiled for; it edits the array, or returns one
        of the same shape that takes its place.

        `start` and `stop` are taps of a part to run. At `start` the listener gives the whole array, and
        nothing before it needs to be computed; a backend that cannot begin there runs it all. After `stop`
        nothing is computed: there are no rows of logits.
        """


class SamplingBackend(Protocol):
    """Sampling; `sampling_record` has the records and the arithmetic, `reference_sampling` the definition."""

    def choose(self, records: SamplingRecords, logits: Logits) -> None:
        """Chooses a token for each record by its row of logits [N, V], and fills in the record's results.

        They may be another backend's, and are not written; no row's result depends on another. V is at most
        `sampling_record.MAX_VOCAB`. A row that holds NaN or +inf, or nothing but -inf, gets another status
        than CHOSEN.
        """


class Backend(Protocol):
    """Runs programs. `kukri.kernels.make_backend(name)` makes one."""

    name: str
    exact_kv_type: KVType  # the widest numbers that its KV cache can hold
    page_tokens: int  # tokens of a page of its caches

    @property
    def is_batch_invariant(self) -> bool:
        """True if a token's result has the same bits whatever else is in its step, and for any chunks."""

    @property
    def arithmetic(self) -> str:
        """A name of what the bits of a result depend on beside the model: kernels, libraries, processor."""

    @property
    def sampling(self) -> SamplingBackend:
        """The sampling of tokens from this backend's logits."""

    def new_cache(
        self, layout: CacheLayout, n_pages: int, n_states: int = 0, kv_type: KVType = "f16"
    ) -> Cache:
        """A cache for a model of this layout. Raises MemoryError, and UnsupportedError on heads that
        `kv_type` cannot hold.
        """

    def page_bytes(self, layout: CacheLayout, kv_type: KVType) -> int:
        """Bytes that a page of such a cache takes. Raises UnsupportedError as `new_cache` does."""

    def free_bytes(self) -> int:
        """Memory that is left for weights and caches, where the backend keeps them."""

    def compile(
        self,
        program: Program,
        cache: Cache,
        limits: StepLimits,
        taps: frozenset[str] = frozenset(),
        adapters: AdapterSlots = (),
    ) -> CompiledProgram:
        """Binds a model to kernels and a cache of this backend. `taps` are the full names of those that its
        calls will show to a listener; the others cost nothing. `adapters` are those that its steps may name
        (`ForwardBatch.adapters`).
        """
