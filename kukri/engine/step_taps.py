"""Hands each request of a step its rows of taps: those it listens on, and the rows of its spans."""

from __future__ import annotations

from collections.abc import Sequence

from kukri.engine.request import RequestAnswer
from kukri.engine.scheduled_step import ScheduledChunk
from kukri.errors import HookError, KukriError
from kukri.kernels.arrays import FloatArray
from kukri.kernels.taps import SequenceListener, sees_logit_rows
from kukri.models.both_ways import BothWaysLayers


class StepTaps:
    """The listener of a step with requests that listen. An error of a listener ends only its request."""

    def __init__(self, chunks: Sequence[ScheduledChunk]) -> None:
        # with the rows of tokens and of logits
        self._listening: list[tuple[SequenceListener, RequestAnswer, slice, slice]] = []
        names: set[str] = set()
        row = logit_row = 0
        for chunk in chunks:
            n_logits = chunk.n_logits - chunk.n_drafts
            rows, logit_rows = slice(row, row + chunk.n_tokens), slice(logit_row, logit_row + n_logits)
            for listener in chunk.request.listeners:
                listener.begin(chunk.start, chunk.n_tokens)
                self._listening.append((listener, chunk.request.answer, rows, logit_rows))
                names |= listener.names
            row, logit_row = row + chunk.n_tokens, logit_row + n_logits
        self.names, self._n_tokens = frozenset(names), row

    def __call__(self, name: str, x: FloatArray) -> None:
        """Show each listener its request's rows of x [rows, width], which keeps what listeners leave."""
        for listener, answer, rows, logit_rows in self._listening:
            if name not in listener.names or answer.error is not None:
                continue
            own = x[logit_rows]
            if not sees_logit_rows(name):
                n = len(x) // self._n_tokens  # rows of a token: a mixture has one for each expert it uses
                own = x[rows.start * n : rows.stop * n]
            if not len(own):
                continue
            try:
                replacement = listener(name, own)
                if replacement is not None:
                    own[...] = replacement
            except KukriError as error:
                answer.error = error
            except Exception as error:
                answer.error = HookError(f"a hook on {name} raised {type(error).__name__}: {error}")
                answer.error.__cause__ = error


class StepSpans:
    """Writes the rows of a step's spans over the embeddings of their placeholder tokens, and adds their rows
    for later layers to the results of these layers.

    A step without any runs a program that does not stop there.
    """

    def __init__(self, chunks: Sequence[ScheduledChunk]) -> None:
        self._chunks = chunks
        n_deep = max(chunk.sequence.spans.n_deep for chunk in chunks)
        self._depths = {"hook_embed": 0, **{f"blocks.{i}.hook_resid_post": i + 1 for i in range(n_deep)}}
        self.names = frozenset(self._depths)

    def __call__(self, name: str, x: FloatArray) -> None:
        """Writes to embeddings or hidden states x [T, D]."""
        depth = self._depths.get(name)
        if depth is None:
            return
        row = 0
        for chunk in self._chunks:
            chunk.sequence.spans.fill(x[row : row + chunk.n_tokens], chunk.start, depth)
            row += chunk.n_tokens


def has_spans(chunks: Sequence[ScheduledChunk]) -> bool:
    """True if a token of a step is a row of an input."""
    return any(chunk.sequence.spans.has_rows(chunk.start, chunk.start + chunk.n_tokens) for chunk in chunks)


def attends_both_ways(chunk: ScheduledChunk) -> BothWaysLayers:
    """The layers in which a chunk's tokens are rows of an input that see each other both ways."""
    return chunk.sequence.spans.attends_both_ways(chunk.start)
