"""Turns the logits of a step into tokens, kept rows and scores of prompts."""

from __future__ import annotations

import numpy as np

from kukri.engine.scheduled_step import ScheduledChunk
from kukri.engine.sequence import RequestState
from kukri.errors import KukriError, StageError, failure_of
from kukri.kernels.arrays import FloatArray
from kukri.kernels.backend import Logits, SamplingBackend
from kukri.kernels.sampling_record import SamplingRecords
from kukri.sampling import RequestSampler, SampledToken, sample_rows, token_logprobs

# Rows of a request's drafts to choose from in one call, which takes as long as two rows: those after a token
# that was not drafted are lost.
_ROWS_AT_ONCE = 4


class StepSampler:
    """Chooses the tokens of steps by a backend, one step at a time."""

    def __init__(self, backend: SamplingBackend) -> None:
        self._backend, self._records = backend, SamplingRecords()

    def sample(self, chunks: list[ScheduledChunk], logits: Logits) -> list[list[SampledToken | KukriError]]:
        """Each chunk's new tokens, up to the first that was not drafted; an error ends its request.

        Each is chosen as if it were alone in its step, after those before it are chosen.
        """
        results: list[list[SampledToken | KukriError]] = [[] for _ in chunks]
        rows: dict[int, list[int]] = {}  # rows of the chunks that give tokens, by index
        row, draft_row = 0, len(logits) - sum(chunk.n_drafts for chunk in chunks)
        for i, chunk in enumerate(chunks):
            n_own = chunk.n_logits - chunk.n_drafts
            row += n_own
            first_draft_row, draft_row = draft_row, draft_row + chunk.n_drafts
            request = chunk.request
            if chunk.sequence.state is not RequestState.RUNNING:  # it ended while in flight
                continue
            if request.listeners and request.answer.error is not None:
                results[i].append(request.answer.error)
                continue
            try:
                if request.output != "tokens":
                    _keep_rows(chunk, logits.take(range(row - n_own, row)).numpy())
                elif request.params.prompt_logprobs is not None:
                    self._score_prompt(chunk, logits.take(range(row - n_own, row)))
            except StageError:
                raise
            except BaseException as error:
                results[i].append(failure_of("keeping the request's rows", error))
                continue
            if chunk.gives_token:
                rows[i] = [row - 1, *range(first_draft_row, draft_row)]
        left, depth = list(rows), 0
        while left:
            n = _ROWS_AT_ONCE if all(_sampler_of(chunks[i]).is_plain for i in left) else 1
            self._sample_next([(chunks[i], rows[i][depth : depth + n], results[i]) for i in left], logits)
            left = [i for i in left if _was_accepted(chunks[i], results[i])]
            depth += n
        return results

    def sample_each(self, chunks: list[ScheduledChunk], logits: Logits) -> list[SampledToken | KukriError]:
        """`sample` of a repeated step, of requests that all run: one token each, or its error."""
        samplers = [chunk.request.sampler for chunk in chunks if chunk.request.sampler is not None]
        tokens = sample_rows(samplers, logits, self._backend, self._records)
        return [chunk.request.answer.error or token for chunk, token in zip(chunks, tokens, strict=True)]

    def _sample_next(
        self,
        turns: list[tuple[ScheduledChunk, list[int], list[SampledToken | KukriError]]],
        logits: Logits,
    ) -> None:
        """Adds tokens to the results of each chunk by its next rows of logits, up to one not drafted.

        Only rows of a plain sampler may be several.
        """
        rows_of_all = [row for _, rows, _ in turns for row in rows]
        samplers = [_sampler_of(chunk) for chunk, rows, _ in turns for _ in rows]
        tokens = sample_rows(samplers, logits, self._backend, self._records, rows=rows_of_all)
        stop = 0
        for chunk, rows, results in turns:
            first, stop = stop, stop + len(rows)
            for i in range(first, stop):
                results.append(chunk.request.answer.error or tokens[i])
                if i + 1 < stop and not _was_accepted(chunk, results):
                    _sampler_of(chunk).put_back(self._records, range(i + 1, stop))
                    break

    def _score_prompt(self, chunk: ScheduledChunk, logits: Logits) -> None:
        """Keeps the log-probabilities of the prompt's tokens that the rows of a chunk are about."""
        request, answer = chunk.request, chunk.request.answer
        n_top = request.params.prompt_logprobs
        assert n_top is not None
        first = chunk.start + chunk.n_tokens - chunk.n_drafts - len(logits)
        for i in range(first + 1, first + 1 + len(logits)):  # the row of token i - 1
            if i < request.n_prompt and i == len(answer.prompt_logprobs) + 1:
                try:
                    row = logits.take([i - first - 1])
                    token = token_logprobs(int(request.prompt[i]), row, n_top, self._backend)
                except KukriError as error:  # the request fails when it would get its token
                    answer.error = error
                    return
                answer.prompt_logprobs.append(token)


def _keep_rows(chunk: ScheduledChunk, rows: FloatArray) -> None:
    """Copies a chunk's rows to its request. NaN is a result too, which no other request may read."""
    request, answer, stop = chunk.request, chunk.request.answer, chunk.start + chunk.n_tokens
    if len(rows):
        n_wanted = request.stop_row - request.first_row
        last = min(stop, request.stop_row) - request.first_row
        if request.output == "pooled":
            before = rows[:0] if answer.rows is None else answer.rows[None]
            # row after row, so that the sum does not depend on chunks: NumPy states no order for `sum`
            total: FloatArray = np.add.accumulate(np.concatenate([before, rows]), axis=0)[-1]
            answer.rows = total / np.float32(n_wanted) if last == n_wanted else total
        else:
            if answer.rows is None:
                answer.rows = np.empty((n_wanted, rows.shape[1]), np.float32)
            answer.rows[last - len(rows) : last] = rows
        if np.isnan(rows[-1].max()):
            chunk.sequence.is_cacheable = False


def _sampler_of(chunk: ScheduledChunk) -> RequestSampler:
    """The sampler of a chunk that gives a token."""
    sampler = chunk.request.sampler
    assert sampler is not None
    return sampler


def _was_accepted(chunk: ScheduledChunk, tokens: list[SampledToken | KukriError]) -> bool:
    """True if the last token chosen was drafted, so that the row after it predicts the next token."""
    request, token, n = chunk.request, tokens[-1], len(tokens)
    if n > chunk.n_drafts or isinstance(token, KukriError) or token.id in request.stop_ids:
        return False
    return token.id == int(chunk.sequence.tokens[chunk.sequence.n_tokens + n - 1])
