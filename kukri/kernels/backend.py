"""The interface of a backend: programs, logits and sampling.

Shape letters: T tokens in the step, S sequences, N rows with logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kukri.kernels.arrays import FloatArray
from kukri.kernels.cache import Cache, CacheLayout, KVType
from kukri.kernels.op_set import Program
from kukri.kernels.sampling_record import SamplingRecords
from kukri.kernels.step import ForwardBatch, StepInputs, StepLimits
from kukri.kernels.taps import Hook
from kukri.kernels.weight_handles import AdapterSlots


class Logits(Protocol):
    """Logits float32 [N, V] of a step, in their backend's memory; valid until its program's next step."""

    def __len__(self) -> int:
        """N."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, V)."""

    def take(self, rows: Sequence[int]) -> Logits:
        """Takes rows, in the order given."""

    def copy(self) -> Logits:
        """Return the same logits, valid for as long as the result is held."""

    def numpy(self) -> FloatArray:
        """An array on the host, which is not to be written to."""

    def has_nan(self, row: int) -> bool:
        """True if a row holds NaN."""

    def logit(self, row: int, token_id: int) -> float:
        """One number."""

    def argmax(self) -> list[int]:
        """The token of the largest logit in each row, of equals the lowest."""


class CompiledProgram(Protocol):
    """A model bound to a backend, a cache and inputs of its own. It runs one step at a time, so compile it
    again for a second step under way.
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
        """Runs one step and gives its logits. Writes the cache. A batch that is not one of `inputs` is
        copied.

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


EVEN_ROW_COSTS = tuple(1 + i / 50 for i in range(64))  # where reading the weights takes most of the time


class Backend(Protocol):
    """Runs programs. `kukri.kernels.make_backend(name)` makes one.

    No value after a context is read, and no value before the first key that a sequence's first token in the
    step sees. Other values in its pages, and other pages, may be anything, NaN included, and change no bit.
    """

    name: str
    exact_kv_type: KVType  # the widest numbers that its KV cache can hold
    page_tokens: int  # tokens of a page of its caches
    row_costs: tuple[float, ...]  # time of a step of 1, 2, ... tokens by that of 1, until steps are measured

    @property
    def begins_at_taps(self) -> bool:
        """True if its programs compute nothing before their `start`, so that a step may be run in parts."""

    @property
    def is_batch_invariant(self) -> bool:
        """True if a token's result has the same bits whatever else is in its step, and for any chunks."""

    @property
    def arithmetic(self) -> str:
        """A name of all that the bits of a result depend on besides the model: kernels, libraries, CPU."""

    @property
    def sampling(self) -> SamplingBackend:
        """The sampling of tokens from this backend's logits."""

    def new_cache(
        self,
        layout: CacheLayout,
        n_pages: int | Sequence[int],
        n_states: int = 0,
        kv_type: KVType = "f16",
    ) -> Cache:
        """Return a cache for a model of this layout, with `n_pages` pages in the pools. Raises MemoryError,
        and UnsupportedError for heads that `kv_type` cannot hold.
        """

    def page_bytes(self, layout: CacheLayout, kv_type: KVType) -> int:
        """Bytes that a page takes in the layers of a layout, of all pools. Raises UnsupportedError as
        `new_cache` does.
        """

    def free_bytes(self) -> int:
        """Memory that is left for weights and caches, where the backend keeps them."""

    def compile(
        self,
        program: Program,
        cache: Cache | None,
        limits: StepLimits,
        taps: frozenset[str] = frozenset(),
        adapters: AdapterSlots = (),
    ) -> CompiledProgram:
        """Bind a model to kernels and a cache of this backend. `taps` are the full names of the taps that a
        listener will see; other taps cost nothing. `adapters` are the adapters that its steps may name
        (`ForwardBatch.adapters`). A program without a cache has neither attention nor recurrent layers; its
        limits are `StepLimits.of_rows`, its steps are made by `rows_batch`.
        """
