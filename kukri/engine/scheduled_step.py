"""A step as the scheduler plans it, and what it gave each request."""

from __future__ import annotations

from typing import NamedTuple

from kukri.dataclass import dataclass, field
from kukri.engine.batch_builder import Chunk
from kukri.engine.request import ProgramKind, Request
from kukri.engine.sequence import TokenSequence
from kukri.sampling import SampledToken


@dataclass(eq=False, slots=True)
class ScheduledChunk(Chunk):
    """A chunk of a request's sequence."""

    sequence: TokenSequence
    request: Request = field(kw_only=True)

    @property
    def gives_token(self) -> bool:
        """True if the request's next token follows from a row of logits: the last before the drafts'."""
        return (
            self.request.output == "tokens"
            and self.n_logits > 0
            and self.start + self.n_tokens - self.n_drafts == self.sequence.n_tokens
        )


@dataclass(eq=False, slots=True)
class ScheduledStep:
    """The chunks of a step, and what to copy before it runs, in this order: pages (from, to, pool), states
    (from, to), and states that were read from disk (to, contents).

    If every running request gets exactly one token, the next step can reuse this object (`can_repeat`): its
    chunks are advanced by one token in place (`is_repeat`). Most steps are of this kind, and making new
    objects would take longer than all else that Python does in a step.
    """

    chunks: list[ScheduledChunk]
    copies: list[tuple[int, int, int]]
    state_copies: list[tuple[int, int]]
    program: ProgramKind = "logits"
    prompt_cost: float = 0.0  # cost of its prompts' tokens, in the units of StepCost
    can_repeat: bool = False
    is_repeat: bool = False
    has_listeners: bool = False  # requests of the step it repeats have taps, spans or drafts of rows
    state_writes: list[tuple[int, memoryview]] = field(default_factory=list)


class StepOutput(NamedTuple):
    """A step's result for a request: a token, or None if it ended without one.

    A step has one for each accepted draft and one more; the last of a request says whether it continues.
    `finish_reason` is None while the request continues: it may be "stop", "length", "abort" or "error"
    (its answer's `stop_reason` and `error` then say more).
    """

    request: Request
    token: SampledToken | None
    finish_reason: str | None
