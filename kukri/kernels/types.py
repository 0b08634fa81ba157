"""The types every backend shares: weights, one step's batch, the paged KV cache, and the op set.

Shape letters: T tokens in the step, S sequences, N rows with logits, D model width, V vocabulary,
H query heads, G key/value heads, K head size, P pages, B page size, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    """A matrix of `shape` (out, in) as stored: `data` is uint8 [out, bytes per row], a view of the file.

    `per_token` asks for activations of one scale a token where it is Q4_0 (`kukri.quant.per_token`).
    """

    data: ByteArray
    type: QuantType
    shape: tuple[int, int]
    name: str = ""
    per_token: bool = False

    def __post_init__(self) -> None:
        """Raises ShapeError unless `data` holds exactly the rows that `shape` and `type` imply."""
        expected = (self.shape[0], self.type.row_bytes(self.shape[1]))
        if self.data.dtype != np.uint8 or self.data.shape != expected or self.shape[1] % self.type.block_size:
            raise ShapeError(
                f"weight {self.name!r}: {self.type.name} {self.shape} does not fit bytes {self.data.shape}"
            )


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

    `positions` count a sequence's tokens; where RoPE rotates by other numbers, `rope_positions` has them.
    `mask` is for a step of one sequence and a program compiled for it (StepLimits.mask_heads): float32
    [1 or H, T, context_len[0]], added to scores in place of causality and windows; a token that sees nothing
    gets zeros.
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


KVType = Literal["f16", "q8_0", "f32"]


@dataclass(frozen=True)
class KVLayer:
    """A layer that caches keys and values of each token; a query sees `window` of them, or all."""

    n_kv_heads: int
    d_head: int
    window: int | None = None


@dataclass(frozen=True)
class StateLayer:
    """A layer that keeps a recurrent state of fixed size for each sequence: float32 arrays, (name, shape)."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]


CacheLayout = Sequence[KVLayer | StateLayer]  # an entry for each layer of a model


class Cache(Protocol):
    """What a model remembers of its sequences: keys and values in pages, recurrent states in slots.

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
        """Copies what a page holds."""

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zeroes pages before others get them: they may hold NaN."""

    def clear_from(self, page: int, offset: int) -> None:
        """Zeroes the tokens of a page from `offset` on."""

    def copy_state(self, source: int, target: int) -> None:
        """Copies the recurrent state of a sequence from one slot to another."""

    def clear_state(self, slot: int) -> None:
        """Zeroes a slot, for a sequence that begins."""


@dataclass(frozen=True)
class AttentionSpec:
    """The shape of one layer's attention. `scale` multiplies scores; `window` in tokens, None sees all."""

    layer: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    scale: float
    window: int | None = None


# A value inside a step: an ndarray on the reference backend, a buffer handle while a plan is recorded.
Tensor = Any
# A hook sees (its full name, the array) and may edit the array in place or return a replacement.
Hook = Callable[[str, FloatArray], FloatArray | None]


class Ops(Protocol):
    """The op set that models are written against. Values are float32, row-major [rows, width]."""

    def embed(self, weight: Weight, batch: Any) -> Tensor:
        """Rows of `weight` [V, D] for the batch's token ids -> [T, D]."""

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

        `bias` [sum of out_i] and `residual` (same shape as the result) are added. `tap` (name, layer) sees
        the sum before the residual; a backend may fuse that addition where nobody listens.
        """

    def split(self, x: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
        """Column views of x, of the given widths."""

    def rope(
        self, q: Tensor, k: Tensor, rope: RopeFrequencies, spec: AttentionSpec, batch: Any
    ) -> tuple[Tensor, Tensor]:
        """Rotates each head of q [T, H*K] and k [T, G*K] by its token's position (half-split); in place."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, batch: Any) -> Tensor:
        """Stores k and v [T, G*K] at the batch's slots, then attends causally or by the mask -> [T, H*K]."""

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, the gated activation of SwiGLU (Shazeer 2020)."""

    def gelu(self, x: Tensor) -> Tensor:
        """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))): GELU by tanh (Hendrycks and Gimpel 2016)."""

    def logit_rows(self, x: Tensor, batch: Any) -> Tensor:
        """The rows of x [T, D] that the batch wants logits for -> [N, D]."""

    def tap(self, name: str, layer: int | None, x: Tensor) -> Tensor:
        """x, after the hooks that listen on `name` (TransformerLens spelling) have seen or edited it."""


# A model as the backends see it: program(ops, batch) -> logits [N, V]
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


class CompiledProgram(Protocol):
    """A model bound to a backend and a cache."""

    def __call__(self, batch: ForwardBatch) -> FloatArray:
        """Runs one step -> logits float32 [N, V], valid until the next call. Writes the cache."""


class SamplingBackend(Protocol):
    """Sampling; `sampling_record` has the records and the arithmetic, `reference_sampling` the definition."""

    def choose(self, records: SamplingRecords, logits: FloatArray) -> None:
        """Chooses a token for each record by its row of logits [N, V], and fills in the record's results.

        Rows are contiguous and not written, and no row's result depends on another row. V is at most
        `sampling_record.MAX_VOCAB`. A row that holds NaN or +inf, or nothing but -inf, gets another status
        than CHOSEN.
        """


class Backend(Protocol):
    """Runs programs. `kukri.kernels.make_backend(name)` makes one."""

    name: str
    exact_kv_type: KVType  # the widest numbers that its KV cache can hold
    page_tokens: int  # tokens of a page of its caches

    @property
    def sampling(self) -> SamplingBackend:
        """What sampling uses on this backend's logits."""

    def new_cache(
        self, layout: CacheLayout, n_pages: int, n_states: int = 0, kv_type: KVType = "f16"
    ) -> Cache:
        """A cache for a model of this layout. Raises MemoryError, and UnsupportedError on heads that
        `kv_type` cannot hold.
        """

    def page_bytes(self, layout: CacheLayout, kv_type: KVType) -> int:
        """Bytes that a page of such a cache takes. Raises UnsupportedError as `new_cache` does."""

    def compile(
        self, program: Program, cache: Cache, limits: StepLimits, hooks: dict[str, list[Hook]]
    ) -> CompiledProgram:
        """Binds a model to kernels. `hooks` maps full hook names to listeners; others cost nothing."""
