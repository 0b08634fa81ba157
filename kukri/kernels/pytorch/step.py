"""A step's inputs on the device, and its logits, which stay there until rows are taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kukri.errors import ShapeError
from kukri.kernels.arrays import FloatArray
from kukri.kernels.paged_kv import PAGE_TOKENS
from kukri.kernels.step import ForwardBatch, StepInputs, StepLimits

_QUERY_TOKENS = 128  # of a prompt that attend at a time, which bounds the memory of their scores
_NAMES = (
    *("token_ids", "positions", "slots", "query_start", "context_len", "page_table", "logit_rows"),
    *("token_types", "adapters", "state_slots", "state_saves"),
)


class DeviceInputs:
    """The arrays that steps are written to, and their copies on the device. On the CPU both are one.

    All lie in one block of memory, so that a step is one copy. Attributes: host, and device by name.
    """

    def __init__(self, limits: StepLimits, device: torch.device) -> None:
        sizes = StepInputs.zeros(limits)
        shapes = {name: getattr(sizes, name).shape for name in _NAMES}
        flat = np.zeros(sum(map(prod, shapes.values())), np.int32)
        self._source = torch.from_numpy(flat)
        self._target = self._source if device.type == "cpu" else torch.zeros_like(self._source, device=device)
        self._staging = _PinnedStaging(len(flat)) if device.type == "cuda" else None
        arrays: dict[str, Any] = {}
        self.device: dict[str, Tensor] = {}
        start = 0
        for name, shape in shapes.items():
            stop = start + prod(shape)
            arrays[name] = flat[start:stop].reshape(shape)
            arrays[name][...] = getattr(sizes, name)
            self.device[name] = self._target[start:stop].view(shape)
            start = stop
        self.host = StepInputs(**arrays)

    def upload(self) -> None:
        """Copies the host's arrays to the device, behind the work that is under way there."""
        if self._staging is not None:
            self._staging.upload(self._source, self._target)
        elif self._target is not self._source:
            self._target.copy_(self._source)


class _PinnedStaging:
    """Page-locked memory between host and device: a copy from there does not wait for the steps before it.

    For CUDA and ROCm only, and so not covered by tests on the CPU.
    """

    def __init__(self, size: int) -> None:
        self._buffers = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._turn = 0

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Copies host memory, which may be written again at once, to the device."""
        self._turn = 1 - self._turn
        self._copied[self._turn].synchronize()  # the copy before last has left this buffer
        self._buffers[self._turn].copy_(source)
        target.copy_(self._buffers[self._turn], non_blocking=True)
        self._copied[self._turn].record()


class DeviceBatch:
    """A ForwardBatch, `host`, on the device: int32 tensors under the same names."""

    def __init__(self, batch: ForwardBatch, inputs: DeviceInputs, device: torch.device) -> None:
        """`batch` lies in `inputs`, which are uploaded, but for its mask and RoPE positions."""
        self.host, on_device = batch, inputs.device
        n_tokens, n_sequences = batch.n_tokens, batch.n_sequences
        self.token_ids = on_device["token_ids"][:n_tokens]
        self.token_types = on_device["token_types"][:n_tokens]
        self.positions = on_device["positions"][:n_tokens]
        self.slots = on_device["slots"][:n_tokens]
        self.query_start = on_device["query_start"][: n_sequences + 1]
        self.context_len = on_device["context_len"][:n_sequences]
        self.page_table = on_device["page_table"][:n_sequences]
        self.logit_rows = on_device["logit_rows"][: batch.n_logit_rows]
        self.state_slots = on_device["state_slots"][:n_sequences]
        self.state_saves = on_device["state_saves"][:n_tokens]
        rotated_by = batch.positions if batch.rope_positions is None else batch.rope_positions
        self.max_position = int(rotated_by.max())
        self.rope_positions = self.positions
        if batch.rope_positions is not None:
            self.rope_positions = torch.from_numpy(np.ascontiguousarray(rotated_by)).to(device)
        self.max_context = int(batch.context_len.max())
        self.is_decode = n_tokens == n_sequences  # one token for each
        self.kept: dict[object, Tensor] = {}  # of what layers have in common
        self.mask = None if batch.mask is None else torch.from_numpy(batch.mask).to(device)
        self._device = device
        self._groups: dict[bool, list[AttentionGroup]] = {}

    def attention_groups(self, is_causal: bool) -> list[AttentionGroup]:
        """The step's tokens in groups: all sequences that decode, and each piece of a prompt."""
        if is_causal not in self._groups:
            self._groups[is_causal] = self._attention_groups(is_causal)
        return self._groups[is_causal]

    def _attention_groups(self, is_causal: bool) -> list[AttentionGroup]:
        batch = self.host
        starts, contexts = batch.query_start.tolist(), batch.context_len.tolist()
        groups = []
        decoding = [s for s in range(batch.n_sequences) if starts[s + 1] - starts[s] == 1]
        if decoding and self.mask is None:
            groups.append(
                self._group(decoding, [starts[s] for s in decoding], 1, [contexts[s] for s in decoding])
            )
        for s in range(batch.n_sequences):
            start, stop = starts[s], starts[s + 1]
            if self.mask is not None:
                groups.append(self._group([s], [start], stop - start, [contexts[s]]))
            elif stop - start > 1:
                for first in range(start, stop, _QUERY_TOKENS):
                    last = min(stop, first + _QUERY_TOKENS)
                    seen = contexts[s] - (stop - last)
                    n_keys = [seen if is_causal else contexts[s]]
                    groups.append(self._group([s], [first], last - first, [seen], n_keys))
        return groups

    def _group(
        self,
        sequences: list[int],
        starts: list[int],
        n: int,
        contexts: list[int],
        n_keys: list[int] | None = None,
    ) -> AttentionGroup:
        """`contexts` end with the last of the n tokens; `n_keys` are to be seen, None for as many."""
        n_keys = n_keys or contexts
        n_pages = -(-max(n_keys) // PAGE_TOKENS)
        rows = torch.tensor(sequences, device=self._device)
        return AttentionGroup(
            tokens=torch.tensor([list(range(start, start + n)) for start in starts], device=self._device),
            context_len=torch.tensor(contexts, device=self._device),
            n_keys=torch.tensor(n_keys, device=self._device),
            pages=self.page_table[rows, :n_pages].long(),
        )


@dataclass(frozen=True, eq=False)
class AttentionGroup:
    """n tokens of each of S sequences, the last of their contexts."""

    tokens: Tensor  # [S, n] indices into the step
    context_len: Tensor  # [S] tokens up to the last of the n
    n_keys: Tensor  # [S] tokens that may be seen
    pages: Tensor  # [S, pages]
    _visible: dict[tuple[int | None, bool], Tensor] = field(default_factory=dict)

    @cached_property
    def is_key(self) -> Tensor:
        """Which places of the pages hold keys of the sequence: bool [S, places]."""
        return self._places < self.n_keys[:, None]

    def is_visible(self, window: int | None, is_causal: bool) -> Tensor:
        """Which places each token sees, causally or not, within a window: bool [S, n, places]; kept."""
        if (window, is_causal) not in self._visible:
            self._visible[window, is_causal] = self._seen(window, is_causal)
        return self._visible[window, is_causal]

    def _seen(self, window: int | None, is_causal: bool) -> Tensor:
        n = self.tokens.shape[1]
        back = torch.arange(n - 1, -1, -1, device=self.tokens.device)
        positions = self.context_len[:, None] - 1 - back  # [S, n]
        ahead = self._places - positions[..., None]  # [S, n, places]
        seen = ahead <= 0 if is_causal else self.is_key[:, None].expand(ahead.shape)
        return seen if window is None else seen & (ahead > -window) & (ahead < window)

    @cached_property
    def _places(self) -> Tensor:
        return torch.arange(self.pages.shape[1] * PAGE_TOKENS, device=self.tokens.device)


class TensorLogits:
    """See `backend.Logits`: a float32 tensor [N, V]."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._on_host: FloatArray | None = None

    def __len__(self) -> int:
        """N."""
        return len(self.tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, V)."""
        return tuple(self.tensor.shape)

    def take(self, rows: Sequence[int]) -> TensorLogits:
        """See Logits.take. Rows that follow one another are not copied."""
        wanted = list(rows)
        first = wanted[0] if wanted else 0
        if wanted == list(range(first, first + len(wanted))):
            return TensorLogits(self.tensor[first : first + len(wanted)])
        return TensorLogits(self.tensor[torch.tensor(wanted, device=self.tensor.device)])

    def copy(self) -> TensorLogits:
        """See Logits.copy."""
        return TensorLogits(self.tensor.clone())

    def numpy(self) -> FloatArray:
        """See Logits.numpy. Waits for the step, and copies the rows to the host once."""
        if self._on_host is None:
            self._on_host = self.tensor.cpu().numpy()
        return self._on_host

    def has_nan(self, row: int) -> bool:
        """See Logits.has_nan."""
        return bool(self.tensor[row].isnan().any())

    def logit(self, row: int, token_id: int) -> float:
        """See Logits.logit."""
        return float(self.tensor[row, token_id])

    def argmax(self) -> list[int]:
        """See Logits.argmax."""
        ids: list[int] = self.tensor.argmax(dim=1).tolist()
        return ids


def check_indices(batch: ForwardBatch, n_pages: int, n_states: int | None) -> None:
    """Raises ShapeError if an index of the batch leads outside its array; a device would not say so.

    `n_states` is None for a model without recurrent layers.
    """
    starts, contexts, n_tokens = batch.query_start, batch.context_len, batch.n_tokens
    lengths = np.diff(starts)
    if starts[0] != 0 or starts[-1] != n_tokens or (lengths < 1).any() or (contexts < lengths).any():
        raise ShapeError("bad step: sequences that do not cover the step's tokens")
    places = batch.page_table.shape[1]
    n_used = -(-contexts // PAGE_TOKENS)
    if (n_used > places).any():
        raise ShapeError("bad step: a context longer than the page table")
    used = batch.page_table[np.arange(places) < n_used[:, None]]
    for what, indices, size in (
        ("slot outside the cache", batch.slots, n_pages * PAGE_TOKENS),
        ("logit row outside the step", batch.logit_rows, n_tokens),
        ("page outside the cache", used, n_pages),
    ):
        if len(indices) and (indices.min() < 0 or indices.max() >= size):
            raise ShapeError(f"bad step: a {what}")
    if n_states is not None:
        slots = np.arange(len(contexts)) if batch.state_slots is None else batch.state_slots
        saves = slots if batch.state_saves is None else batch.state_saves
        if slots.min() < 0 or saves.min() < -1 or max(slots.max(), saves.max()) >= n_states:
            raise ShapeError("bad step: a state outside the cache")
