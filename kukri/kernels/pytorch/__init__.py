"""The torch backend: the op set on PyTorch tensors, on any device that PyTorch has.

Follow a step: `step.py` brings its inputs to the device, the model's code runs eagerly on `ops.py`, with
matrices as `weights.py` keeps them and keys and values in `cache.py`; logits stay on the device until rows
are taken. `devices.py` finds devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from kukri.host.hardware import cpu_model
from kukri.kernels.backend import EVEN_ROW_COSTS, Backend, CompiledProgram, SamplingBackend
from kukri.kernels.cache import Cache, CacheLayout, KVType
from kukri.kernels.cpu.codegen.sampling_backend import CpuSampling
from kukri.kernels.cpu.compile.jit import KernelLibrary
from kukri.kernels.cpu.run.pool import ThreadPool
from kukri.kernels.host_step import StoppedError, check_adapters, check_sizes, row_adapters
from kukri.kernels.op_set import Program
from kukri.kernels.paged_kv import PAGE_TOKENS, page_bytes
from kukri.kernels.pytorch.cache import TensorCache
from kukri.kernels.pytorch.constants import DeviceConstants
from kukri.kernels.pytorch.devices import device_name, find_device, free_bytes, matrix_dtype
from kukri.kernels.pytorch.ops import TorchOps
from kukri.kernels.pytorch.sampling import TorchSampling
from kukri.kernels.pytorch.step import DeviceBatch, DeviceInputs, TensorLogits, check_indices
from kukri.kernels.step import ForwardBatch, StepLimits
from kukri.kernels.taps import Hook
from kukri.kernels.weight_handles import AdapterSlots


class TorchBackend(Backend):
    """Runs models with PyTorch. Keeps a model's constants on the device once they were used.

    Not batch-invariant: the libraries' matrix products sum in an order that depends on their shape.
    """

    name = "torch"
    page_tokens = PAGE_TOKENS
    begins_at_taps = False
    row_costs = EVEN_ROW_COSTS

    def __init__(
        self, device: str = "cpu", n_threads: int | None = None, unpacked_bytes: int | None = None
    ) -> None:
        """`unpacked_bytes` is memory for matrices dequantized once, None for half of what caches leave free.

        Raises ConfigError if there is no such device.
        """
        self.device = find_device(device)
        if n_threads is not None:
            torch.set_num_threads(n_threads)  # for this process
        # checks want no rounding of keys and values; a device has no memory to spare for that
        self.exact_kv_type: KVType = "f32" if self.device.type == "cpu" else "f16"
        self._unpacked_bytes = unpacked_bytes
        self._n_threads = n_threads
        self._sampling: CpuSampling | None = None
        self._pool: ThreadPool | None = None

    @cached_property
    def constants(self) -> DeviceConstants:
        """The model's constants. First used when a program is compiled, after its cache was allocated."""
        n_bytes = free_bytes(self.device) // 2 if self._unpacked_bytes is None else self._unpacked_bytes
        return DeviceConstants(self.device, matrix_dtype(self.device), n_bytes)

    @property
    def is_batch_invariant(self) -> bool:
        return False

    @property
    def arithmetic(self) -> str:
        processor = cpu_model() if self.device.type == "cpu" else self.device_name
        return f"{self.name}, PyTorch {torch.__version__}, {processor}"

    @property
    def device_name(self) -> str:
        """The device, for people."""
        return device_name(self.device)

    def new_cache(
        self,
        layout: CacheLayout,
        n_pages: int | Sequence[int],
        n_states: int = 0,
        kv_type: KVType = "f16",
    ) -> TensorCache:
        return TensorCache(layout, n_pages, n_states, kv_type, self.device)

    def page_bytes(self, layout: CacheLayout, kv_type: KVType) -> int:
        return page_bytes(layout, kv_type)

    def free_bytes(self) -> int:
        return free_bytes(self.device)

    def compile(
        self,
        program: Program,
        cache: Cache | None,
        limits: StepLimits,
        taps: frozenset[str] = frozenset(),
        adapters: AdapterSlots = (),
    ) -> CompiledProgram:
        """The program runs eagerly."""
        cache = self.new_cache((), 1) if cache is None else cache
        assert isinstance(cache, TensorCache), "a cache belongs to the backend that made it"
        return TorchProgram(program, TorchOps(self.constants, cache, taps, adapters), limits)

    @cached_property
    def sampling(self) -> SamplingBackend:
        """On the device, or by the CPU's kernel if it is the CPU or lacks float64."""
        if self.device.type in ("cpu", "mps"):
            return self._host_sampling()
        return TorchSampling(self._host_sampling)

    def _host_sampling(self) -> CpuSampling:
        if self._sampling is None:
            kernels = KernelLibrary()
            self._pool = ThreadPool(kernels, self._n_threads)
            self._sampling = CpuSampling(kernels, self._pool)
        return self._sampling

    def close(self) -> None:
        """Ends the threads that sample."""
        if self._pool is not None:
            self._pool.close()


class TorchProgram:
    """A model bound to a cache: see CompiledProgram. A call may return before its step is computed."""

    def __init__(self, program: Program, ops: TorchOps, limits: StepLimits) -> None:
        self._program, self._ops, self._limits = program, ops, limits
        self._inputs = DeviceInputs(limits, len(ops.cache.n_pages), ops.constants.device)
        self.inputs = self._inputs.host

    def __call__(
        self,
        batch: ForwardBatch,
        on_tap: Hook | None = None,
        *,
        start: str | None = None,
        stop: str | None = None,
    ) -> TensorLogits:
        """See CompiledProgram. Everything before `start` is computed, and replaced there."""
        check_sizes(batch, self._limits)
        cache = self._ops.cache
        check_indices(batch, cache.n_pages, cache.n_slots, self._limits.free_contexts)
        check_adapters(batch, self._ops.adapters)
        if batch.inputs is not self.inputs:
            self.inputs.copy(batch)
        self._inputs.upload()
        self._ops.on_tap, self._ops.stop = on_tap, stop
        self._ops.set_row_adapters(row_adapters(batch) if self._ops.adapters else None)
        with torch.no_grad():
            on_device = DeviceBatch(batch, self._inputs, self._ops.constants.device)
            try:
                return TensorLogits(self._ops.floats(self._program(self._ops, on_device)))
            except StoppedError:
                return TensorLogits(torch.empty(0, 0))
