"""Drafts by an assistant (models/assistant.py), which reads the larger model's cache and has none itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from kukri.engine.draft_kinds.kind import DraftKind
from kukri.engine.draft_model import CountedDrafts, Drafter, DraftSetup, DraftSource
from kukri.engine.row_costs import MakingCost
from kukri.engine.row_drafts import RowDrafts
from kukri.engine.scheduled_step import ScheduledChunk
from kukri.engine.sequence import TokenSequence
from kukri.formats.huggingface.assistant import is_assistant, read_assistant
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.step import ForwardBatch, StepLimits, plain_batch
from kukri.models.assistant import Assistant
from kukri.models.next_token import RESULT


class AssistantDrafts(RowDrafts, CountedDrafts):
    """The drafts of one request, made from the row of the last token that the model computed."""

    sequence: TokenSequence | None = None  # the sequence whose pages are read, from its first row on

    def note(self, chunk: ScheduledChunk, rows: FloatArray) -> None:
        self.sequence, self._first_row, self._rows = chunk.sequence, chunk.start, rows

    def chances(self, n: int) -> Iterator[float]:
        has_row = self._first_row <= self.n_tokens - 2 < self._stop_row
        return super().chances(n if has_row else 0)

    def release(self) -> None:
        super().release()
        self.sequence, self._rows = None, None


class AssistantModel(Drafter):
    """Computes drafts by an assistant."""

    def __init__(self, assistant: Assistant, setup: DraftSetup) -> None:
        """The larger model's cache is read; a step has as many tokens as sequences."""
        self.layer, self.cost = assistant, MakingCost(setup.cost_of(assistant))
        runner, n = setup.runner, setup.config.max_requests
        limits = StepLimits(n, n, n, setup.max_pages)
        self._n_vocab = min(assistant.config.n_vocab, runner.model.config.n_vocab)
        self._max_context, self._page_tokens = runner.model.config.max_context, runner.cache.page_tokens
        self._program = runner.backend.compile(assistant, runner.cache, limits, frozenset([RESULT]))
        self._results: FloatArray | None = None  # the rows that the last run made

    def drafts_for(self, prompt: IntArray) -> Callable[[], AssistantDrafts]:
        return partial(AssistantDrafts, self._max_context, self._n_vocab, self.cost)

    def compute(self, wanted: Sequence[tuple[Any, int]]) -> None:
        rows = {drafts: drafts.rows(drafts.n_tokens - 2, 1) for drafts, _ in wanted}
        depth = 0
        while ready := [drafts for drafts, n in wanted if n > depth == len(drafts.drafts)]:
            batch = self._batch(ready, np.concatenate([rows[drafts] for drafts in ready]))
            chosen = self._program(batch, self._keep).argmax()
            assert self._results is not None, "the program stops at the tap"
            for drafts, token, row in zip(ready, chosen, self._results, strict=True):
                rows[drafts] = row[None]
                if token < self._n_vocab:
                    drafts.drafts.append(token)
            depth += 1

    def _batch(self, ready: Sequence[AssistantDrafts], rows: FloatArray) -> ForwardBatch:
        """A token of each: its last one or last draft, seeing what the model has computed."""
        sequences = [drafts.sequence for drafts in ready if drafts.sequence is not None]
        tokens = [(drafts.drafts or [int(drafts.tokens[drafts.n_tokens - 1])])[-1] for drafts in ready]
        lengths = np.array([drafts.n_tokens - 1 for drafts in ready], np.int32)
        tables = [np.stack(pages) for pages in zip(*(sequence.page_rows for sequence in sequences))]
        batch = plain_batch(
            [1] * len(ready),
            self._page_tokens,
            tables,
            starts=lengths - 1,
            token_ids=np.array(tokens, np.int32),
        )
        return replace(batch, rope_positions=lengths, activations=rows)

    def _keep(self, name: str, x: FloatArray) -> None:
        self._results = x.copy()


ASSISTANT = DraftKind(
    lambda path, larger: DraftSource(read_assistant(path, larger.model), AssistantModel), is_assistant
)
