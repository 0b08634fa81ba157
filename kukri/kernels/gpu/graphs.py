"""CUDA graphs of decode steps: launches recorded once and replayed, by batch size and length of contexts.

A graph reads the inputs where they lie on the device, so that a replay needs a copy of them and one call. Its
batch size is fixed: smaller batches are padded by sequences of one token on the cache's spare page. Contexts
count in chunks of keys, a power of two of them, as split decode gives the same bits for any number that holds
the longest.

`CaptureOnCuda` alone needs a device; tests replace it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kukri.dataclass import dataclass
from kukri.errors import ShapeError
from kukri.kernels.gpu.attention import CHUNK
from kukri.kernels.gpu.ops import TritonOps
from kukri.kernels.op_set import Program
from kukri.kernels.paged_kv import PAGE_TOKENS
from kukri.kernels.pytorch.step import DeviceBatch, DeviceInputs
from kukri.kernels.step import ForwardBatch, StepLimits

Replay = Callable[[], None]
# records what a function launches, without running it: gives the tensor it returns, and a function to run it
Capture = Callable[[Callable[[], Tensor]], tuple[Tensor, Replay]]

_SMALL_SIZES = (1, 2, 4)
_SIZE_STEP = 8  # between batch sizes beyond


@dataclass(frozen=True, eq=False)
class Captured:
    """A recorded step, and its logits [size, V], at the same place after each replay."""

    logits: Tensor
    replay: Replay


class DecodeGraphs:
    """The graphs of one program, captured when a size is first met; that step itself runs eagerly."""

    def __init__(
        self, program: Program, ops: TritonOps, inputs: DeviceInputs, limits: StepLimits, capture: Capture
    ) -> None:
        self._program, self._ops, self._inputs, self._capture = program, ops, inputs, capture
        self._sizes = graph_sizes(min(limits.max_sequences, limits.max_tokens, limits.max_logit_rows))
        self._captured: dict[tuple[int, int], Captured] = {}

    def takes(self, batch: ForwardBatch) -> bool:
        """True for a step in which each sequence has one token and wants its logits, without masks, of a
        program that begins with the embedding.

        Never again if an op has read the device.
        """
        n = batch.n_sequences
        return (
            batch.n_tokens == batch.n_logit_rows == n
            and n <= max(self._sizes, default=0)
            and batch.mask is None
            and batch.activations is None
            and batch.rope_positions is None
            and bool((batch.logit_rows == np.arange(n)).all())
        )

    def run(self, batch: ForwardBatch) -> Tensor:
        """Logits [N, V] of a checked batch that lies in the inputs."""
        n, longest = batch.n_sequences, int(batch.context_len.max())
        size = next(size for size in self._sizes if size >= n)
        n_chunks = 1 << (-(-longest // CHUNK) - 1).bit_length()
        self._pad(n, size)
        self._inputs.upload()
        found = self._captured.get((size, n_chunks))
        if found is None:
            return self._first(size, n_chunks)[:n]
        self._check_tokens(batch)
        for table in self._ops.constants.rope_tables.values():
            table.ensure(longest)
        found.replay()
        return found.logits[:n]

    def _first(self, size: int, n_chunks: int) -> Tensor:
        """Runs a step eagerly, which compiles kernels and copies constants; then records it."""
        batch = DeviceBatch(
            self._inputs.host.batch(size, size, size), self._inputs, self._ops.constants.device
        )
        batch.max_context = n_chunks * CHUNK

        def run() -> Tensor:
            return self._ops.floats(self._program(self._ops, batch))

        logits = run()
        if not self._ops.is_capturable:
            self._sizes = []
            return logits
        self._captured[size, n_chunks] = Captured(*self._capture(run))
        return logits

    def _pad(self, n: int, size: int) -> None:
        """Adds sequences of one token on the spare page of each pool."""
        host, padding = self._inputs.host, slice(n, size)
        host.token_ids[padding] = host.positions[padding] = 0
        for (slots, page_table), spare in zip(host.pools, self._ops.cache.n_pages, strict=True):
            slots[padding] = spare * PAGE_TOKENS
            page_table[padding, 0] = spare
        host.query_start[: size + 1] = np.arange(size + 1)
        host.context_len[padding] = 1
        host.logit_rows[:size] = np.arange(size)
        host.state_slots[padding] = self._ops.cache.n_states
        host.state_saves[padding] = -1

    def _check_tokens(self, batch: ForwardBatch) -> None:
        """The check that the embedding makes in an eager step."""
        if batch.token_ids.min() < 0 or batch.token_ids.max() >= self._ops.n_vocab:
            raise ShapeError("bad step: a token id outside the vocabulary")


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes to capture, up to the largest batch."""
    steps = range(_SIZE_STEP, largest, _SIZE_STEP)
    return [*(size for size in _SMALL_SIZES if size < largest), *steps, largest]


class CaptureOnCuda:
    """Records CUDA graphs that share one pool of memory, as one is replayed at a time. Needs a device."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        """See Capture."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = run()
        return result, graph.replay
