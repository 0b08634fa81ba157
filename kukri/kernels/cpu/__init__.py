"""The CPU backend: models recorded once into plans of compiled kernels.

Follow a step: `record.py` writes down the model's ops (`ops.py`), `passes.py` fuses them and `place.py` gives
them memory; `pool.py` runs this plan on its threads through the executor (`threads.py`). Kernels live in
`linear`, `experts`, `adapters`, `attention`, `recurrent`, `panels`, `elementwise`, `rope_store`,
`step_kernels` and `sampling_kernel`, made of the operations of `intrinsics`, `simd` and `tiles`, and compiled
by `jit.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from kukri.errors import ShapeError
from kukri.host.hardware import available_bytes
from kukri.kernels.backend import Backend
from kukri.kernels.cache import Cache, CacheLayout, KVType
from kukri.kernels.cpu.codegen.sampling_backend import CpuSampling
from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.cpu.compile.jit import KernelLibrary, entry_point, pack_record
from kukri.kernels.cpu.compile.kernel_cache import sources_hash
from kukri.kernels.cpu.pack.layouts import PanelKind
from kukri.kernels.cpu.pack.weights import PackedWeight, pack, pack_experts
from kukri.kernels.cpu.plan.adapter_ops import PackedLowRank
from kukri.kernels.cpu.plan.batch_memory import BatchMemory
from kukri.kernels.cpu.plan.ops import ACTIVATIONS, RouteTable, Value
from kukri.kernels.cpu.plan.passes import run_passes
from kukri.kernels.cpu.plan.place import Plan, Segment
from kukri.kernels.cpu.plan.record import Recorder
from kukri.kernels.cpu.run import abi
from kukri.kernels.cpu.run.memory import address_of
from kukri.kernels.cpu.run.pool import shared_pool
from kukri.kernels.host_step import HostLogits, batch_activations, check_adapters, check_routes
from kukri.kernels.op_set import Program
from kukri.kernels.paged_kv import PAGE_TOKENS, PagedKV, page_bytes
from kukri.kernels.rope_rows import RopeRows
from kukri.kernels.step import ForwardBatch, StepLimits
from kukri.kernels.taps import Hook
from kukri.kernels.vectors import in_vectors
from kukri.kernels.weight_handles import AdapterSlots, Experts, LowRank, RopeFrequencies, Weight

# measured on Zen 5 by processor time, with AVX-512 and with AVX2 (docs/decisions)
_WIDE_ROW_COSTS = (1, 1.1, 1.2, 1.22, 1.67, 1.72, 1.78, 1.82, 2.1, 2.3, 2.6, 2.65, 3.25, 3.3, 3.3, 3.35)
_ROW_COSTS = (1, 1.13, 1.6, 1.65, 2.75, 2.8, 2.95, 3.05, 3.45, 3.7, 4.2, 4.3, 5.5, 5.6, 5.7, 5.8)


class CpuBackend(Backend):
    """Runs models on the CPU. Holds the kernels and the packed weights; backends share their thread pool.

    If it `is_portable`, results have equal bits on all processors. Otherwise only processors with an int8 dot
    product agree, because others compute rows that become logits in int16, in half as many instructions.
    """

    name = "cpu"
    exact_kv_type: KVType = "f16"
    page_tokens = PAGE_TOKENS
    begins_at_taps = True
    is_batch_invariant = True

    def __init__(self, n_threads: int | None = None, *, is_portable: bool = False) -> None:
        self.head_panels: PanelKind = "q8x2" if is_portable or cpu_target().has_int8_dot else "q16"
        self.row_costs: tuple[float, ...] = _WIDE_ROW_COSTS if cpu_target().has_wide_registers else _ROW_COSTS
        self.kernels = KernelLibrary()
        self.pool = shared_pool(n_threads)
        self._sampling: CpuSampling | None = None
        self._packed: dict[tuple[Weight, ...], PackedWeight] = {}
        self._packed_experts: dict[tuple[Experts, ...], PackedWeight] = {}
        self._packed_updates: WeakKeyDictionary[LowRank, PackedLowRank] = WeakKeyDictionary()
        self.on_packed: Callable[[int], None] | None = None  # told the bytes of weights just packed
        self._rope_rows: dict[RopeFrequencies, RopeRows] = {}

    def new_cache(
        self,
        layout: CacheLayout,
        n_pages: int | Sequence[int],
        n_states: int = 0,
        kv_type: KVType = "f16",
    ) -> PagedKV:
        return PagedKV(in_vectors(layout), n_pages, n_states, kv_type)

    def page_bytes(self, layout: CacheLayout, kv_type: KVType) -> int:
        return page_bytes(in_vectors(layout), kv_type)

    def free_bytes(self) -> int:
        return available_bytes()

    def compile(
        self,
        program: Program,
        cache: Cache | None,
        limits: StepLimits,
        taps: frozenset[str] = frozenset(),
        adapters: AdapterSlots = (),
    ) -> CpuProgram:
        """Weights are packed on first use and shared by all programs."""
        cache = self.new_cache((), 1) if cache is None else cache
        assert isinstance(cache, PagedKV), "a cache belongs to the backend that made it"
        return CpuProgram(self, program, cache, limits, taps, adapters)

    @property
    def arithmetic(self) -> str:
        """Kernels say where products are fused: no compiler or processor matters."""
        return f"cpu {sources_hash()[:24]} {self.head_panels}"

    @property
    def sampling(self) -> CpuSampling:
        if self._sampling is None:
            self._sampling = CpuSampling(self.kernels, self.pool)
        return self._sampling

    def close(self) -> None:
        """Releases the worker threads, which end with the last backend that uses them."""
        self._sampling = None
        self.__dict__.pop("pool", None)

    def packed(self, weights: tuple[Weight, ...]) -> PackedWeight:
        """The tiles of weights of one type, packed once."""
        if weights not in self._packed:
            self._packed[weights] = pack(weights, self.pool)
            if self.on_packed is not None:
                self.on_packed(sum(weight.stored.nbytes for weight in weights))
        return self._packed[weights]

    def packed_experts(self, experts: tuple[Experts, ...]) -> PackedWeight:
        """The tiles of experts of one type, packed once."""
        if experts not in self._packed_experts:
            self._packed_experts[experts] = pack_experts(experts, self.pool)
            if self.on_packed is not None:
                self.on_packed(sum(w.stored.nbytes for each in experts for w in each.weights))
        return self._packed_experts[experts]

    def packed_update(self, update: LowRank) -> PackedLowRank:
        """The tiles of an adapter's update, packed once and kept as long as the adapter."""
        if update not in self._packed_updates:
            down, up = (pack((weight,), self.pool) for weight in (update.down, update.up))
            self._packed_updates[update] = PackedLowRank(update.rank, update.scale, down, up)
        return self._packed_updates[update]

    def rope_rows(self, frequencies: RopeFrequencies) -> RopeRows:
        """cos and sin by position, shared by all layers and programs of these frequencies."""
        if frequencies not in self._rope_rows:
            self._rope_rows[frequencies] = RopeRows(frequencies)
        return self._rope_rows[frequencies]


class CpuProgram:
    """A model as a plan bound to a cache: see CompiledProgram."""

    def __init__(
        self,
        backend: CpuBackend,
        program: Program,
        cache: PagedKV,
        limits: StepLimits,
        taps: frozenset[str],
        adapters: AdapterSlots,
    ) -> None:
        self._backend, self._limits, self._cache = backend, limits, cache  # the plan points into all
        self._adapters = adapters
        self._batch = BatchMemory(limits, len(cache.n_pages))
        self.inputs = self._batch.inputs
        recorder = Recorder(
            cache.kv_type,
            limits,
            taps,
            backend.head_panels,
            backend.packed,
            backend.packed_experts,
            backend.rope_rows,
            backend.packed_update,
            adapters,
        )
        result: Value = program(recorder, None)
        ops = run_passes(recorder.ops, result)
        self.plan = Plan(ops, result, self._batch, cache, backend.kernels, backend.pool.n_threads)
        check = backend.kernels["check_batch"]
        ropes = (rows.frequencies.max_context for rows in self.plan.ropes)
        sizes = {
            "n_vocab": recorder.n_vocab,
            "max_pages": limits.max_pages,
            "n_positions": min(recorder.n_positions, *ropes, 1 << 31),
            "n_types": recorder.n_types,
            "n_states": cache.n_states if cache.states else -1,
            "free_contexts": int(limits.free_contexts),
        }
        self._check_records = [
            pack_record(check, {**sizes, "batch": self._batch.view(pool), "n_pages": n_pages})
            for pool, n_pages in enumerate(cache.n_pages)
        ]
        self._failed_check = ctypes.c_int64()
        failed, records = ctypes.byref(self._failed_check), [*map(ctypes.addressof, self._check_records)]
        run_check = entry_point(check.address)

        def check_batch() -> None:
            for record in records:
                run_check(failed, None, record, 0)
                if self._failed_check.value:
                    raise ShapeError(f"bad step: {abi.BATCH_CHECKS[self._failed_check.value]}")

        self._check = check_batch
        self._ops_address = address_of(self.plan.ops)
        self._n_rope_rows = 0  # rows made for every RoPE in the plan
        self._has_rows = result.rows == "N"  # else a part of a model ends here, with a row for each token
        n_rows = limits.max_logit_rows if self._has_rows else limits.max_tokens
        self._result = self.plan.view(result, n_rows)
        self._rows: dict[int, HostLogits] = {}  # the first rows of the result, by their number

    def __call__(
        self,
        batch: ForwardBatch,
        on_tap: Hook | None = None,
        *,
        start: str | None = None,
        stop: str | None = None,
    ) -> HostLogits:
        """See CompiledProgram."""
        self._batch.fill(batch, self._limits)
        check_adapters(batch, self._adapters)
        self._check()
        n_positions = self._batch.n_positions
        if n_positions > self._n_rope_rows:
            for rows in self.plan.ropes:
                rows.ensure(n_positions)
            self._n_rope_rows = n_positions
        positions = batch.rope_positions
        if positions is not None and positions.ndim == 2 and self.plan.ropes:
            # all of a model's have the same context, so that their rows are in the same places
            first = {rows.mix(positions) for rows in self.plan.ropes}.pop()
            self._batch.rotate_by_rows(first, batch.n_tokens)
        segments, first = self.plan.segments, 0
        if start is not None:
            segments, first = self._after(start)
        for segment in segments:
            if first < segment.stop:
                self._run(first, segment.stop)
            _show(self.plan, segment, batch, on_tap)
            first = max(first, segment.stop)
            if segment.name == stop:
                return HostLogits(self._result[:0])
        self._run(first, len(self.plan.ops))
        n_rows = batch.n_logit_rows if self._has_rows else batch.n_tokens
        if n_rows not in self._rows:
            self._rows[n_rows] = HostLogits(self._result[:n_rows])
        return self._rows[n_rows]

    def _after(self, tap: str) -> tuple[list[Segment], int]:
        """The segments from a tap on, and its op; all, and the first, if more is alive there than its value.

        The ops before it that cut a step's attention into work are run.
        """
        i = next(i for i, segment in enumerate(self.plan.segments) if segment.name == tap)
        if not self.plan.is_cut(self.plan.segments[i]):
            return self.plan.segments, 0
        first = self.plan.segments[i].stop
        for k in range(first):
            if self.plan.kernel_names[k].startswith("attention_work"):
                self._run(k, k + 1)
        return self.plan.segments[i:], first

    def _run(self, start: int, stop: int) -> None:
        if stop > start:
            self._backend.pool.run(self._ops_address + start * abi.OP_BYTES, stop - start)


def _show(plan: Plan, segment: Segment, batch: ForwardBatch, on_tap: Hook | None) -> None:
    """Shows a tapped value to the listener and keeps the value it returns; then adds the residual.

    Activations are copied in.
    """
    rows = segment.value.rows
    n_rows = batch.n_logit_rows if rows == "N" else batch.n_tokens
    if isinstance(rows, RouteTable):
        n_rows *= rows.routing.n_used
    view = plan.view(segment.value, n_rows)
    if segment.name == ACTIVATIONS:
        view[...] = batch_activations(batch, segment.value.width)
        return
    returned = None if on_tap is None else on_tap(segment.name, view)
    if returned is not None and returned is not view:
        view[...] = returned
    if segment.n_used is not None:
        check_routes(view, segment.n_used)
    if segment.residual is not None:
        view += plan.view(segment.residual, n_rows)
