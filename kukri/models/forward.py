"""A model as a function of token ids, for research: batches, masks and caches as transformers takes them.

It runs apart from the engine: its keys and values have pages of their own. Pads take no part in a step and no
room in the cache, so a padded batch costs only its tokens and gives each row the same result as alone. Masks
of four dimensions run as a program of their own; ordinary steps know nothing of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kukri.config import ModelConfig
from kukri.errors import RequestError
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.backend import Backend, CompiledProgram
from kukri.kernels.cache import CacheLayout, has_states
from kukri.kernels.op_set import Ops, Program, Tensor
from kukri.kernels.step import ForwardBatch, StepLimits, plain_batch
from kukri.kernels.taps import Hook, Hooks

_STEP_TOKENS = 128  # most tokens of a step without a mask: room is made for this many rows of logits
_MASK_TOKENS = 64  # a program with a mask is compiled for a multiple of this many tokens
_BoolArray = npt.NDArray[np.bool_]


class ForwardModel(Protocol):
    """The side of a model that `Forward` sees."""

    config: ModelConfig

    def __call__(self, ops: Ops, batch: Any) -> Tensor:
        """Runs one step -> logits [N, V]."""

    @property
    def cache_layout(self) -> CacheLayout:
        """The cache entry of each layer."""


class _Key(NamedTuple):
    program: Program
    mask_heads: int
    taps: frozenset[str]


class KVCache:
    """Keys and values of a batch of sequences between calls of `forward`; `Model.new_cache` makes it.

    Attributes: batch_size; max_tokens of a row; n_tokens of a row so far, padding included.
    """

    def __init__(self, model: ForwardModel, backend: Backend, batch_size: int, max_tokens: int) -> None:
        config = model.config
        if not 1 <= max_tokens <= config.max_context:
            raise _error(f"'max_tokens' must be 1 to {config.max_context}, not {max_tokens}", "max_tokens")
        if batch_size < 1:
            raise _error(f"'batch_size' must be at least 1, not {batch_size}", "batch_size")
        self.batch_size, self.max_tokens, self.n_tokens = batch_size, max_tokens, 0
        self.layout = tuple(model.cache_layout)  # the backend's may have larger heads
        n_pages = -(-max_tokens // backend.page_tokens)
        try:
            self.kv = backend.new_cache(
                model.cache_layout, batch_size * n_pages, batch_size, backend.exact_kv_type
            )
        except MemoryError:
            raise _error(
                f"{batch_size} x {max_tokens} cached tokens do not fit into memory", "max_tokens"
            ) from None
        self.page_table = np.arange(batch_size * n_pages, dtype=np.int32).reshape(batch_size, n_pages)
        self.is_stored: _BoolArray = np.zeros((batch_size, max_tokens), np.bool_)  # False: padding
        self.programs: dict[_Key, tuple[StepLimits, CompiledProgram]] = {}

    def crop(self, n_tokens: int) -> None:
        """Forgets all but the first `n_tokens` of each row, padding included."""
        if not 0 <= n_tokens <= self.n_tokens:
            raise _error(f"the cache cannot be cut to {n_tokens} tokens, but has {self.n_tokens}", "n_tokens")
        if n_tokens and n_tokens < self.n_tokens and has_states(self.kv.layout):
            raise _error(
                "a recurrent state cannot be rolled back: crop to 0 tokens",
                "n_tokens",
            )
        self.n_tokens = n_tokens

    def stored(self) -> _BoolArray:
        """Which tokens so far have keys and values: bool [batch_size, n_tokens]."""
        return self.is_stored[:, : self.n_tokens]


class Forward:
    """A model on a backend. Holds the cache of calls that bring none."""

    def __init__(self, model: ForwardModel, backend: Backend) -> None:
        self.model, self.backend = model, backend
        self._scratch: KVCache | None = None
        self.hooks = Hooks()

    def new_cache(self, batch_size: int = 1, max_tokens: int | None = None) -> KVCache:
        """An empty cache; `max_tokens` None takes the model's whole context."""
        n_tokens = self.model.config.max_context if max_tokens is None else max_tokens
        return KVCache(self.model, self.backend, batch_size, n_tokens)

    def add_hooks(self, hooks: Mapping[str, Hook]) -> None:
        """Adds each hook to the tap of that full name."""
        self.hooks.add(hooks)

    def remove_hooks(self, hooks: Mapping[str, Hook]) -> None:
        """Undoes an `add_hooks` with the same argument."""
        self.hooks.remove(hooks)

    def __call__(
        self,
        token_ids: Any,
        attention_mask: Any = None,
        positions: Any = None,
        cache: KVCache | None = None,
        *,
        program: Program | None = None,
    ) -> FloatArray:
        """The outputs of `program` (None: the model): float32 [B, T, width], with zeros for padding."""
        config = self.model.config
        ids = _token_ids(token_ids, config.n_vocab)
        cache = self._empty_scratch(ids.shape) if cache is None else self._checked(cache, ids.shape)
        call = _Call(config, ids, cache, attention_mask, positions)
        program = self.model if program is None else program
        result: FloatArray | None = None
        for rows, columns, batch in call.batches():
            values = self._program(program, cache, batch)(batch, self.hooks).numpy()
            if result is None:
                result = np.zeros((*ids.shape, values.shape[1]), np.float32)
            result[rows, columns] = values
        assert result is not None, "a call has at least one token"
        call.finish()
        return result

    def _empty_scratch(self, shape: tuple[int, int]) -> KVCache:
        """The cache of calls without one, with room for a batch of this shape."""
        n_rows, n_tokens = shape
        limit = self.model.config.max_context
        if n_tokens > limit:
            raise _error(f"'token_ids' must be at most the context, {limit}, not {n_tokens}", "token_ids")
        scratch = self._scratch
        if scratch is None or scratch.batch_size != n_rows or scratch.max_tokens < n_tokens:
            self._scratch = None  # its memory is free before the next is taken
            size = min(limit, max(256, 1 << (n_tokens - 1).bit_length()))
            scratch = self._scratch = self.new_cache(n_rows, size)
        scratch.crop(0)
        return scratch

    def _checked(self, cache: KVCache, shape: tuple[int, int]) -> KVCache:
        """The caller's cache, which must fit the model and the batch."""
        if not isinstance(cache, KVCache):
            raise _error(f"'cache' must come from new_cache(), not be a {type(cache).__name__}", "cache")
        if cache.layout != tuple(self.model.cache_layout):
            raise _error("'cache' must be made by this model", "cache")
        if cache.batch_size != shape[0]:
            raise _error(
                f"'cache' must have the rows of 'token_ids', {shape[0]}, not {cache.batch_size}", "cache"
            )
        if cache.n_tokens + shape[1] > cache.max_tokens:
            raise _error(
                f"'cache' must have room for {shape[1]} more tokens: {cache.n_tokens} of "
                f"{cache.max_tokens} are used",
                "cache",
            )
        return cache

    def _program(self, program: Program, cache: KVCache, batch: ForwardBatch) -> CompiledProgram:
        """The program compiled for this cache and batch, kept with the cache."""
        mask_heads = 0 if batch.mask is None else len(batch.mask)
        key = _Key(program, mask_heads, self.hooks.names)
        found = cache.programs.get(key)
        if found is not None and batch.n_tokens <= found[0].max_tokens:
            return found[1]
        n_pages = cache.page_table.shape[1]
        if mask_heads:
            n = -(-batch.n_tokens // _MASK_TOKENS) * _MASK_TOKENS
            limits = StepLimits(n, 1, n, n_pages, mask_heads)
        else:
            n = max(_STEP_TOKENS, -(-batch.n_tokens // _MASK_TOKENS) * _MASK_TOKENS)
            limits = StepLimits(n, min(cache.batch_size, n), n, n_pages)
        compiled = self.backend.compile(program, cache.kv, limits, key.taps)
        kept = {k: p for k, p in cache.programs.items() if k.taps in (frozenset(), key.taps)}
        cache.programs = {**kept, key: (limits, compiled)}
        return compiled


class _Call:
    """One call's arguments, checked, and the batches that they come to."""

    def __init__(
        self, config: ModelConfig, ids: IntArray, cache: KVCache, attention_mask: Any, positions: Any
    ) -> None:
        self.ids, self.cache = ids, cache
        self.is_causal = config.is_causal
        if cache.n_tokens and not self.is_causal:
            raise _error("'cache' must be empty, because an encoder reads a text at once: crop it", "cache")
        self.n_past, self.n_total = cache.n_tokens, cache.n_tokens + ids.shape[1]
        self.positions = _positions(positions, ids.shape, self.n_past, config.max_context)
        self.is_token: _BoolArray = np.ones(ids.shape, np.bool_)
        self.mask: FloatArray | None = None
        mask = None if attention_mask is None else _array(attention_mask, "attention_mask")
        keeps_states = has_states(cache.kv.layout)
        if mask is not None and mask.ndim == 4:
            if keeps_states:
                message = "an attention_mask of 4 dimensions is not supported by recurrent layers"
                raise _error(message, "attention_mask")
            self.mask = _additive(mask, (len(ids), config.n_heads, ids.shape[1], self.n_total))
            return
        if mask is not None:
            self.is_token = self._row_mask(mask)
        windows = [layer.window for layer in config.layers if layer.window is not None]
        if keeps_states or (windows and min(windows) < self.n_total):
            self._refuse_holes()

    def batches(self) -> Iterator[tuple[IntArray, IntArray, ForwardBatch]]:
        """(rows, columns, batch): where in [B, T] each token of a batch belongs."""
        columns = [np.flatnonzero(is_token) for is_token in self.is_token]
        n_stored = self.cache.stored().sum(axis=1)
        size = _STEP_TOKENS if self.mask is None and self.is_causal else 0
        for step in _steps([len(found) for found in columns], size):
            rows, starts, stops = np.array(step, np.int32).T
            row_of = np.repeat(rows, stops - starts)
            column_of = np.concatenate([columns[row][start:stop] for row, start, stop in step])
            batch = plain_batch(
                stops - starts,
                self.cache.kv.page_tokens,
                [self.cache.page_table[rows]],
                starts=n_stored[rows] + starts,
                token_ids=self.ids[row_of, column_of],
            )
            yield (
                row_of,
                column_of,
                replace(
                    batch,
                    rope_positions=self.positions[row_of, column_of],
                    mask=None if self.mask is None else self._mask_of(step[0][0], self.mask),
                    state_slots=rows,
                ),
            )

    def finish(self) -> None:
        """Marks the tokens as cached."""
        self.cache.is_stored[:, self.n_past : self.n_total] = self.is_token
        self.cache.n_tokens = self.n_total

    def _mask_of(self, row: int, mask: FloatArray) -> FloatArray:
        """The mask of one row over its cached tokens: [1 or H, T, context]."""
        is_stored = np.concatenate([self.cache.stored()[row], self.is_token[row]])
        return np.ascontiguousarray(mask[row if len(mask) > 1 else 0][:, :, is_stored])

    def _row_mask(self, mask: npt.NDArray[Any]) -> _BoolArray:
        """Which new columns are tokens, by a mask of 0 and 1 over old and new ones."""
        wanted = (len(self.ids), self.n_total)
        if mask.shape != wanted:
            raise _error(
                f"'attention_mask' is {list(mask.shape)} and must be {list(wanted)}, {self.n_past} cached "
                "tokens and the new ones, or have 4 dimensions",
                "attention_mask",
            )
        if mask.dtype.kind not in "biuf" or not np.isin(mask, (0, 1)).all():
            raise _error(
                "'attention_mask' must be 1 for tokens and 0 for padding",
                "attention_mask",
            )
        seen: _BoolArray = mask.astype(np.bool_)
        if (seen[:, : self.n_past] != self.cache.stored()).any():
            raise _error(
                "'attention_mask' must hide the same cached tokens as before: use a mask of 4 dimensions "
                "to hide others",
                "attention_mask",
            )
        if not seen[:, self.n_past :].any():
            raise _error("'attention_mask' must leave a token that is not padding", "attention_mask")
        return seen[:, self.n_past :]

    def _refuse_holes(self) -> None:
        """Refuses padding between tokens: windows and convolutions count columns, which then differ from
        tokens.
        """
        seen = np.concatenate([self.cache.stored(), self.is_token], axis=1)
        n_starts = np.diff(seen.astype(np.int8), axis=1, prepend=0) == 1
        if (n_starts.sum(axis=1) > 1).any():
            raise _error(
                "layers with a window or a state do not support padding between tokens: pad on the left, "
                "or use a mask of 4 dimensions",
                "attention_mask",
            )


def _steps(n_tokens: list[int], size: int) -> Iterator[list[tuple[int, int, int]]]:
    """(row, start, stop) pieces of the rows, at most `size` tokens a step; 0 gives each row a step."""
    step: list[tuple[int, int, int]] = []
    room = size
    for row, n in enumerate(n_tokens):
        start = 0
        while start < n:
            stop = min(n, start + room) if size else n
            step.append((row, start, stop))
            room -= stop - start
            start = stop
            if room <= 0:
                yield step
                step, room = [], size
    if step:
        yield step


def _token_ids(token_ids: Any, n_vocab: int) -> IntArray:
    ids = _array(token_ids, "token_ids")
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or not ids.size:
        raise _error("'token_ids' must be integers [B, T] or [T], at least one", "token_ids")
    wrong = ids[(ids < 0) | (ids >= n_vocab)]
    if len(wrong):
        raise _error(f"the token id {wrong[0]} must be from 0 to {n_vocab - 1}", "token_ids")
    return ids.astype(np.int32)


def _positions(positions: Any, shape: tuple[int, int], n_past: int, max_context: int) -> IntArray:
    """RoPE positions of the tokens, int32 [B, T]; the columns of the cache if the caller gives none."""
    if positions is None:
        counted = np.arange(n_past, n_past + shape[1], dtype=np.int32)
        return np.broadcast_to(counted, shape)
    given = _array(positions, "positions")
    if given.shape not in (shape, (1, shape[1]), (shape[1],)) or given.dtype.kind not in "iu":
        raise _error(f"'positions' must be integers {list(shape)} or [{shape[1]}]", "positions")
    if given.min() < 0 or given.max() >= max_context:
        raise _error(
            f"'positions' must be 0 to {max_context - 1}, not {given.min()} to {given.max()}",
            "positions",
        )
    return np.broadcast_to(given.astype(np.int32), shape)


def _additive(mask: npt.NDArray[Any], shape: tuple[int, int, int, int]) -> FloatArray:
    """A 4-dimensional mask as the values added to scores: float32 [B or 1, H or 1, T, T_total]."""
    n_rows, n_heads, n_new, n_total = shape
    if (
        mask.shape[2:] != (n_new, n_total)
        or mask.shape[0] not in (1, n_rows)
        or mask.shape[1] not in (1, n_heads)
    ):
        raise _error(
            f"'attention_mask' is {list(mask.shape)} and must be [{n_rows} or 1, {n_heads} or 1, {n_new}, "
            f"{n_total}]",
            "attention_mask",
        )
    if mask.dtype == np.bool_:
        return np.where(mask, np.float32(0), np.float32(-np.inf))
    if mask.dtype.kind != "f":
        raise _error(
            "an 'attention_mask' of 4 dimensions must be boolean or hold numbers to add to the scores, "
            f"not {mask.dtype}",
            "attention_mask",
        )
    with np.errstate(over="ignore"):  # float64's lowest number is -inf
        added = mask.astype(np.float32)
    if np.isnan(added).any() or (added == np.inf).any():
        raise _error("'attention_mask' must not hold NaN or +inf", "attention_mask")
    return added


def _array(value: Any, param: str) -> npt.NDArray[Any]:
    """A NumPy array of anything array-like, torch tensors included."""
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:  # ragged lists; tensors that NumPy cannot read
        reason = " ".join(str(error).split())[:100]
        raise _error(f"{param!r} must be an array: {reason}", param) from None


def _error(message: str, param: str) -> RequestError:
    return RequestError(message, param=param)
