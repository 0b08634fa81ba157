"""The gpu backend: the torch backend with Triton kernels in place of plain ops, where there are any."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from kukri.errors import UnsupportedError
from kukri.kernels.backend import CompiledProgram
from kukri.kernels.cache import Cache, CacheLayout, KVType
from kukri.kernels.gpu.graphs import Capture, CaptureOnCuda, DecodeGraphs
from kukri.kernels.gpu.kv_types import GPU_TYPES
from kukri.kernels.gpu.ops import PackedConstants, TritonOps
from kukri.kernels.host_step import check_sizes
from kukri.kernels.op_set import Program
from kukri.kernels.pytorch import TorchBackend, TorchProgram
from kukri.kernels.pytorch.cache import TensorCache
from kukri.kernels.pytorch.devices import matrix_dtype
from kukri.kernels.pytorch.step import TensorLogits, check_indices
from kukri.kernels.step import ForwardBatch, StepLimits
from kukri.kernels.taps import Hook
from kukri.kernels.weight_handles import AdapterSlots


class GpuBackend(TorchBackend):
    """Runs models on CUDA and ROCm devices, and under Triton's interpreter on the CPU, for tests."""

    name = "gpu"

    def __init__(
        self,
        device: str = "cpu",
        n_threads: int | None = None,
        capture: Capture | None = None,
        with_graphs: bool = True,
    ) -> None:
        """`capture` records graphs in place of the device. Raises ConfigError if there is no such device."""
        super().__init__(device, n_threads)
        self.exact_kv_type: KVType = "f16"
        self._capture = capture
        if capture is None and with_graphs and self.device.type == "cuda":
            self._capture = CaptureOnCuda()

    @property
    def is_batch_invariant(self) -> bool:
        """True while no plain op took part whose sums may depend on the step: see docs/gpu."""
        return self.constants.is_batch_invariant

    @cached_property
    def constants(self) -> PackedConstants:
        """The model's constants, packed for the kernels."""
        return PackedConstants(self.device, matrix_dtype(self.device))

    def new_cache(
        self,
        layout: CacheLayout,
        n_pages: int | Sequence[int],
        n_states: int = 0,
        kv_type: KVType = "f16",
    ) -> TensorCache:
        if kv_type not in GPU_TYPES:
            raise UnsupportedError(
                f"a KV cache of {kv_type} is not supported by the gpu backend: use {', '.join(GPU_TYPES)}, "
                "or --backend torch"
            )
        return super().new_cache(layout, n_pages, n_states, kv_type)

    def compile(
        self,
        program: Program,
        cache: Cache | None,
        limits: StepLimits,
        taps: frozenset[str] = frozenset(),
        adapters: AdapterSlots = (),
    ) -> CompiledProgram:
        """Decode steps are captured as graphs, unless something is tapped or there are adapters."""
        cache = self.new_cache((), 1) if cache is None else cache
        assert isinstance(cache, TensorCache), "a cache belongs to the backend that made it"
        ops = TritonOps(self.constants, cache, taps, adapters)
        return GpuProgram(program, ops, limits, None if taps or adapters else self._capture)


class GpuProgram(TorchProgram):
    """A model bound to a cache: see CompiledProgram. Decode steps replay graphs."""

    def __init__(self, program: Program, ops: TritonOps, limits: StepLimits, capture: Capture | None) -> None:
        super().__init__(program, ops, limits)
        self._graphs: DecodeGraphs | None = None
        if capture is not None:
            self._graphs = DecodeGraphs(program, ops, self._inputs, limits, capture)

    def __call__(
        self,
        batch: ForwardBatch,
        on_tap: Hook | None = None,
        *,
        start: str | None = None,
        stop: str | None = None,
    ) -> TensorLogits:
        if self._graphs is None or not self._graphs.takes(batch):
            return super().__call__(batch, on_tap, start=start, stop=stop)
        check_sizes(batch, self._limits)
        cache = self._ops.cache
        check_indices(batch, cache.n_pages, cache.n_slots, self._limits.free_contexts)
        if batch.inputs is not self.inputs:
            self.inputs.copy(batch)
        with torch.no_grad():
            return TensorLogits(self._graphs.run(batch))
