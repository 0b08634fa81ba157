"""Runs whole texts through a model with taps, each text in one step, apart from the engine.

Its keys and values have pages of their own. A run may begin at a tap, with the stream that another run left
there, and may continue the cached beginning of another text: a sweep over patches computes only what differs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from kukri.dataclass import dataclass, replace
from kukri.errors import ContextLengthError, KukriError
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.backend import Backend, CompiledProgram
from kukri.kernels.cache import Cache, KVType, has_states
from kukri.kernels.step import StepLimits, plain_batch
from kukri.kernels.taps import Hook
from kukri.kernels.weight_handles import AdapterSlots
from kukri.models import Adapter, Model

_N_KEPT = 6  # compiled programs, each with buffers of its own
_FIRST_PAGES = 256


@dataclass(frozen=True, eq=False)
class Piece:
    """Tokens of one sequence from `start` on, whose earlier tokens are in `pages` already."""

    ids: IntArray  # [n]
    start: int
    pages: Sequence[int]  # all pages of the sequence, in order


class TextRunner:
    """A model on a backend, with a cache for texts that come and go. Not for several threads at a time."""

    def __init__(
        self, model: Model, backend: Backend, kv_type: KVType, adapter: Adapter | None = None
    ) -> None:
        self.model, self.backend, self.kv_type = model, backend, kv_type
        self._adapters: AdapterSlots = () if adapter is None else (adapter.updates,)
        self.page_tokens = backend.page_tokens
        self._cache: Cache | None = None
        self._programs: OrderedDict[tuple[frozenset[str], StepLimits], CompiledProgram] = OrderedDict()

    def pages_for(self, n_tokens: int) -> int:
        """Pages of a sequence."""
        return -(-n_tokens // self.page_tokens)

    def reserve(self, n_pages: int, n_texts: int = 0) -> None:
        """Make room for `n_pages` pages and the states of `n_texts` texts. Growing empties the cache."""
        n_states = _room(n_texts) if has_states(self.model.cache_layout) else 0
        if (
            self._cache is not None
            and min(self._cache.n_pages) >= n_pages
            and self._cache.n_states >= n_states
        ):
            return
        self._cache = None
        self._programs.clear()
        try:
            self._cache = self.backend.new_cache(
                self.model.cache_layout, max(_FIRST_PAGES, n_pages), n_states, self.kv_type
            )
        except MemoryError:
            raise KukriError(
                f"{n_pages * self.page_tokens} cached tokens do not fit into memory: run fewer at a time"
            ) from None

    @property
    def cache(self) -> Cache:
        """The pages, once some are reserved."""
        assert self._cache is not None, "call reserve() first"
        return self._cache

    def whole(self, texts: Sequence[IntArray]) -> list[Piece]:
        """The pieces of whole texts, each with pages of its own. Raises ContextLengthError."""
        limit = self.model.config.max_context
        pieces: list[Piece] = []
        page = 0
        for ids in texts:
            if len(ids) > limit:
                raise ContextLengthError(len(ids), limit)
            n_pages = self.pages_for(len(ids))
            pieces.append(Piece(ids, 0, range(page, page + n_pages)))
            page += n_pages
        self.reserve(page, len(texts))
        return pieces

    def run(
        self,
        pieces: Sequence[Piece],
        taps: frozenset[str] = frozenset(),
        on_tap: Hook | None = None,
        *,
        logit_rows: IntArray | None = None,
        start: str | None = None,
        stop: str | None = None,
    ) -> FloatArray:
        """Runs one step of the pieces' tokens, back to back; gives the logits of `logit_rows` [N, V], copied.

        `logit_rows` None is all rows. `start` and `stop` are as in CompiledProgram. Writes the pages.
        """
        n_pages = self.pages_for(max(piece.start + len(piece.ids) for piece in pieces))
        table = np.zeros((len(pieces), n_pages), np.int32)
        for row, piece in zip(table, pieces):
            row[: len(piece.pages)] = piece.pages
        batch = plain_batch(
            [len(piece.ids) for piece in pieces],
            self.page_tokens,
            [table],
            starts=[piece.start for piece in pieces],
            token_ids=np.concatenate([piece.ids for piece in pieces]).astype(np.int32),
            logit_rows=logit_rows,
        )
        if self._adapters:
            batch = replace(batch, adapters=np.zeros(len(pieces), np.int32))
        sizes = batch.n_tokens, batch.n_sequences, batch.n_logit_rows, n_pages
        limits = StepLimits(*map(_room, sizes))
        program = self._program(taps, limits)
        logits: FloatArray = program(batch, on_tap, start=start, stop=stop).numpy().copy()
        return logits

    def _program(self, taps: frozenset[str], limits: StepLimits) -> CompiledProgram:
        key = taps, limits
        program = self._programs.pop(key, None)
        if program is None:
            program = self.backend.compile(self.model, self.cache, limits, taps, self._adapters)
        self._programs[key] = program
        if len(self._programs) > _N_KEPT:
            self._programs.popitem(last=False)
        return program


def _room(n: int) -> int:
    """A size that is good for runs nearly as large as this."""
    return max(16, 1 << (n - 1).bit_length()) if n > 0 else 1
