"""The drafts of an engine's requests: by look-ups in texts, and by a draft model if there is one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from kukri.config import EngineConfig
from kukri.engine.draft_model import Drafter, EitherDrafts, make_drafts
from kukri.engine.drafts import Drafts
from kukri.engine.lookup_drafts import EarlierAnswers, LookupDrafts, TextIndex
from kukri.engine.request import Request
from kukri.engine.row_drafts import StepRows, has_row_drafts
from kukri.engine.scheduled_step import ScheduledChunk, ScheduledStep
from kukri.engine.scheduler import Scheduler
from kukri.errors import ConfigError, RequestError
from kukri.kernels.arrays import IntArray
from kukri.sampling import SamplingParams

logger = logging.getLogger("kukri.engine")


class Drafting:
    """Gives requests their sources of drafts, and a step its drafts.

    Attributes: drafter, of a draft model; earlier_answers.
    """

    def __init__(self, config: EngineConfig, n_vocab: int, max_context: int, drafter: Drafter | None) -> None:
        """Raises ConfigError if the configuration asks for a draft model and there is none."""
        if drafter is None and config.speculation == "draft":
            raise ConfigError("'draft_model' (--draft-model) is required for this speculation")
        self.drafter, self.earlier_answers = drafter, EarlierAnswers()
        self._speculation = config.speculation
        self._n_vocab, self._max_context = n_vocab, max_context

    def drafts_for(
        self, params: SamplingParams, prompt: IntArray, client: str
    ) -> Callable[[], Drafts | None]:
        """A function that makes the source of an answer's drafts. For any thread.

        Raises RequestError as `checked_prediction` does.
        """
        predicted = checked_prediction(params, self._n_vocab, has_draft_model=self.drafter is not None)
        kind = params.speculation or self._speculation
        if kind == "off" and not predicted:
            return no_drafts
        earlier = self.earlier_answers.of(client)
        predictions = [predicted[: self._max_context]] if predicted else []
        index = TextIndex([*earlier, *predictions, prompt])
        first = sum(len(answer) + 1 for answer in earlier) if predicted else None

        def looked_up() -> LookupDrafts:
            return LookupDrafts(index, first, lambda answer: self.earlier_answers.add(client, answer))

        if kind != "draft" or self.drafter is None:
            return looked_up
        of_model = self.drafter.drafts_for(prompt)
        return lambda: EitherDrafts(looked_up(), of_model())

    def add_to(self, step: ScheduledStep, scheduler: Scheduler, clock: Callable[[], float]) -> float:
        """Extends a step's chunks by drafts; returns the seconds in which a model made them."""
        if self.drafter is not None:
            self.drafter.read_ahead(step.chunks)
        planned = scheduler.plan_drafts(step.chunks)
        if not planned:
            return 0.0
        made_s = 0.0
        if self.drafter is not None:
            unit_s = scheduler.row_costs.unit_s(len(step.chunks))
            wanted = [(drafts, n) for _, drafts, n in planned]
            made_s = make_drafts(self.drafter, wanted, clock, unit_s)
        step.can_repeat = step.is_repeat = False
        step.chunks = chunks = step.chunks.copy()  # the same list would be taken for a repeat
        for i, drafts, n in planned:
            try:
                proposed = drafts.propose(n)
            except Exception:  # drafts only save time, so a failing source is switched off
                logger.exception("the drafts of a request failed")
                chunks[i].sequence.next_draft, proposed = chunks[i].request.max_length, []
            chunks[i] = scheduler.with_drafts(chunks[i], proposed)
        return made_s

    def taps(self, chunks: Sequence[ScheduledChunk]) -> list[StepRows]:
        """What notes the rows of a step that later drafts are made of."""
        layer = None if self.drafter is None else self.drafter.layer
        return [StepRows(chunks, layer)] if layer is not None and has_row_drafts(chunks) else []

    def check_integrity(self, holding: Iterable[Request]) -> None:
        """Asserts that the draft model's pages are held by requests that run or end."""
        if self.drafter is not None:
            self.drafter.check_integrity(request.drafts for request in holding)


def no_drafts() -> None:
    """Makes no source of drafts, for requests that have none."""


def checked_prediction(params: SamplingParams, n_vocab: int, *, has_draft_model: bool) -> list[int]:
    """The token ids of a prediction. Raises RequestError for a prediction in text, and for a draft model that
    is missing.
    """
    if params.speculation == "draft" and not has_draft_model:
        raise RequestError.of("speculation", "must be ngram or off without a draft model")
    ids = [i for i in params.prediction if isinstance(i, int) and 0 <= i < n_vocab]
    if len(ids) < len(params.prediction):
        raise RequestError.of("prediction", "must be token ids of the vocabulary here")
    return ids
