"""A step's inputs on the device, and its logits, which stay there until rows are taken."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kukri.dataclass import dataclass
from kukri.errors import ShapeError
from kukri.kernels.arrays import FloatArray
from kukri.kernels.backend import Logits
from kukri.kernels.paged_kv import PAGE_TOKENS
from kukri.kernels.specs import AttentionSpec
from kukri.kernels.step import ForwardBatch, StepInputs, StepLimits
from kukri.kernels.step_arrays import StepArrays, arguments

_QUERY_TOKENS = 128  # tokens of a prompt that attend at a time, which bounds the memory of their scores


class DeviceInputs:
    """The arrays that steps are written to, and their copies on the device. On the CPU both are one.

    All lie in one block of memory, so that a step is one copy.
    """

    def __init__(self, limits: StepLimits, n_pools: int, device: torch.device) -> None:
        arrays = StepInputs.zeros(limits, n_pools).flat()
        flat = np.concatenate([array.reshape(-1) for array in arrays])
        self._source = torch.from_numpy(flat)
        self._target = self._source if device.type == "cpu" else torch.zeros_like(self._source, device=device)
        self._staging = _PinnedStaging(len(flat)) if device.type == "cuda" else None
        places = pairwise(accumulate((array.size for array in arrays), initial=0))
        spans = [(slice(*place), array.shape) for place, array in zip(places, arrays)]
        self.host = StepInputs(*arguments([flat[span].reshape(shape) for span, shape in spans]))
        on_device = [self._target[span].view(shape) for span, shape in spans]
        self.device = StepArrays[Tensor](*arguments(on_device))

    def upload(self) -> None:
        """Copies the host's arrays to the device, after the work that is under way there."""
        if self._staging is not None:
            self._staging.upload(self._source, self._target)
        elif self._target is not self._source:
            self._target.copy_(self._source)


class _PinnedStaging:
    """Page-locked memory between host and device: a copy from there does not wait for the steps before it.

    For CUDA and ROCm only, and so not covered by tests on the CPU.
    """

    def __init__(self, size: int) -> None:
        self._buffers = [
            torch.zeros(size, dtype=torch.int32, device="cpu", pin_memory=True) for _ in range(2)
        ]
        self._copied = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._turn = 0

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Copies host memory, which may be written again at once, to the device."""
        self._turn = 1 - self._turn
        self._copied[self._turn].synchronize()  # the copy before last has left this buffer
        self._buffers[self._turn].copy_(source)
        target.copy_(self._buffers[self._turn], non_blocking=True)
        self._copied[self._turn].record()


class DeviceBatch(StepArrays[Tensor]):
    """A ForwardBatch, `host`, on the device: int32 tensors under the same names."""

    def __init__(self, batch: ForwardBatch, inputs: DeviceInputs, device: torch.device) -> None:
        """`batch` lies in `inputs`, which are uploaded, but for its mask and RoPE positions."""
        super().__init__(*inputs.device.beginnings(batch.counts))
        self.host = batch
        rotated_by = batch.positions if batch.rope_positions is None else batch.rope_positions
        self.max_position = int(rotated_by.max())
        self.rope_positions = self.positions
        if batch.rope_positions is not None:
            self.rope_positions = torch.from_numpy(np.ascontiguousarray(rotated_by)).to(device)
        self.max_context = int(batch.context_len.max())
        self.is_decode = batch.n_tokens == batch.n_sequences  # one token for each
        self.kept: dict[object, Tensor] = {}  # values that several layers read
        self.mask = None if batch.mask is None else torch.from_numpy(batch.mask).to(device)
        self._device = device
        self._groups: dict[tuple[_Seen, int], list[AttentionGroup]] = {}

    @cached_property
    def has_unseen(self) -> bool:
        """True if a sequence ends with tokens that no token sees."""
        host = self.host
        ends = host.positions[host.query_start[1:] - 1] + 1
        return not self.is_decode and bool((ends > host.context_len).any())

    def attention_groups(self, spec: AttentionSpec, pool: int) -> list[AttentionGroup]:
        """The step's tokens in groups: all sequences that decode, and each piece of a prompt.

        Windows count unless the step has a mask in their place.
        """
        if self.mask is None:
            key = _Seen(spec.n_ahead, spec.window, spec.first_key, spec.stop_key), pool
        else:
            key = _Seen(0 if spec.is_causal else None, None), pool
        if key not in self._groups:
            self._groups[key] = self._attention_groups(*key)
        return self._groups[key]

    def _attention_groups(self, bounds: _Seen, pool: int) -> list[AttentionGroup]:
        batch, window = self.host, bounds.window
        starts, contexts = batch.query_start.tolist(), batch.context_len.tolist()
        ends = (batch.positions[batch.query_start[1:] - 1] + 1).tolist()  # tokens, seen or not

        def group(sequences: list[int], first: list[int], n: int, seen: list[int]) -> AttentionGroup:
            """n tokens of each sequence, from `first` on; `seen` are those up to the last of them."""
            ends_at = [contexts[s] for s in sequences]
            n_keys = [min(n, end) for n, end in zip(seen, ends_at)] if bounds.n_ahead == 0 else ends_at
            n_keys = [min(n, bounds.stop_key or n) for n in n_keys]
            first_keys = [max(context - n + 1 - (window or context), bounds.first_key) for context in seen]
            first_page = min(first_keys) // PAGE_TOKENS
            rows = torch.tensor(sequences, device=self._device)
            pages = self.pools[pool][1][rows, first_page : -(-max(n_keys) // PAGE_TOKENS)]
            tokens = [list(range(start, start + n)) for start in first]
            on_device = partial(torch.tensor, device=self._device)
            return AttentionGroup(
                *(on_device(tokens), on_device(seen), on_device(first_keys), on_device(n_keys)),
                *(pages.long(), first_page * PAGE_TOKENS, window, bounds.n_ahead),
            )

        groups = []
        decoding = [s for s in range(batch.n_sequences) if starts[s + 1] - starts[s] == 1]
        if decoding and self.mask is None:
            groups.append(group(decoding, [starts[s] for s in decoding], 1, [ends[s] for s in decoding]))
        for s in range(batch.n_sequences):
            start, stop = starts[s], starts[s + 1]
            if self.mask is not None:
                groups.append(group([s], [start], stop - start, [ends[s]]))
            elif stop - start > 1:
                for first in range(start, stop, _QUERY_TOKENS):
                    last = min(stop, first + _QUERY_TOKENS)
                    groups.append(group([s], [first], last - first, [ends[s] - (stop - last)]))
        return groups


class _Seen(NamedTuple):
    """The facts of an `AttentionSpec` that say which keys a token sees."""

    n_ahead: int | None
    window: int | None
    first_key: int = 0
    stop_key: int | None = None


@dataclass(frozen=True, eq=False)
class AttentionGroup:
    """n tokens of each of S sequences, and the pages of what they see."""

    tokens: Tensor  # [S, n] indices into the step
    context_len: Tensor  # [S] tokens up to the last of the n
    first_keys: Tensor  # [S]: the first token that any of the n sees
    n_keys: Tensor  # [S] tokens that may be seen
    pages: Tensor  # [S, pages]
    first_place: int  # the token that the pages begin with
    window: int | None
    n_ahead: int | None  # later tokens that a token sees; None: all

    @cached_property
    def is_key(self) -> Tensor:
        """Which places of the pages hold keys that a sequence's tokens may see: bool [S, places]."""
        return (self._places >= self.first_keys[:, None]) & (self._places < self.n_keys[:, None])

    @cached_property
    def ahead(self) -> Tensor:
        """By how many tokens each place comes after each token: int64 [S, n, places]."""
        n = self.tokens.shape[1]
        back = torch.arange(n - 1, -1, -1, device=self.tokens.device)
        positions = self.context_len[:, None] - 1 - back  # [S, n]
        return self._places - positions[..., None]

    @cached_property
    def is_visible(self) -> Tensor:
        """Which places each token sees, ahead and within the window: bool [S, n, places]."""
        ahead = self.ahead
        seen = self.is_key[:, None].expand(ahead.shape)
        seen = seen if self.n_ahead is None else seen & (ahead <= self.n_ahead)
        return seen if self.window is None else seen & (ahead > -self.window)

    @cached_property
    def _places(self) -> Tensor:
        n_places = self.pages.shape[1] * PAGE_TOKENS
        return torch.arange(self.first_place, self.first_place + n_places, device=self.tokens.device)


class TensorLogits(Logits):
    """A float32 tensor [N, V]."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._on_host: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def take(self, rows: Sequence[int]) -> TensorLogits:
        """Rows that follow one another are not copied."""
        wanted = list(rows)
        first = wanted[0] if wanted else 0
        if wanted == list(range(first, first + len(wanted))):
            return TensorLogits(self.tensor[first : first + len(wanted)])
        return TensorLogits(self.tensor[torch.tensor(wanted, device=self.tensor.device)])

    def copy(self) -> TensorLogits:
        return TensorLogits(self.tensor.clone())

    def numpy(self) -> FloatArray:
        """Waits for the step, and copies the rows to the host once."""
        if self._on_host is None:
            self._on_host = self.tensor.cpu().numpy()
        return self._on_host

    def has_nan(self, row: int) -> bool:
        return bool(self.tensor[row].isnan().any())

    def logit(self, row: int, token_id: int) -> float:
        return float(self.tensor[row, token_id])

    def argmax(self) -> list[int]:
        ids: list[int] = self.tensor.argmax(dim=1).tolist()
        return ids


def check_indices(
    batch: ForwardBatch, n_pages: Sequence[int], n_states: int | None, free_contexts: bool = False
) -> None:
    """Raises ShapeError if an index of the batch leads outside its array; a device would not say so.

    `n_pages` are the pages of each pool; `n_states` is None for a model without recurrent layers. With
    `free_contexts` a context may end before its sequence.
    """
    starts, contexts, n_tokens = batch.query_start, batch.context_len, batch.n_tokens
    lengths = np.diff(starts)
    covers = starts[0] == 0 and starts[-1] == n_tokens and (lengths > 0).all()
    ends = batch.positions[starts[1:] - 1] + 1 if covers else lengths
    least = 1 if free_contexts else ends
    if not covers or (ends < lengths).any() or (contexts < least).any():
        raise ShapeError("bad step: sequences that do not cover the step's tokens")
    places = batch.page_table.shape[1]
    n_used = -(-contexts // PAGE_TOKENS)
    if (n_used > places).any() or (contexts > ends).any():
        raise ShapeError("bad step: a context longer than the page table or the sequence")
    checks = [("logit row outside the step", batch.logit_rows, n_tokens)]
    for pool, n in enumerate(n_pages):
        used = batch.pages(pool).page_table[np.arange(places) < n_used[:, None]]
        checks.append(("slot outside the cache", batch.pages(pool).slots, n * PAGE_TOKENS))
        checks.append(("page outside the cache", used, n))
    for what, indices, size in checks:
        if len(indices) and (indices.min() < 0 or indices.max() >= size):
            raise ShapeError(f"bad step: a {what}")
    if n_states is not None:
        slots, saves = batch.state_slots, batch.state_saves
        if slots.min() < 0 or saves.min() < -1 or max(slots.max(), saves.max()) >= n_states:
            raise ShapeError("bad step: a state outside the cache")
