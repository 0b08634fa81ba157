"""When a request ran (`Timestamps`), and the durations and rates that follow (`Timings`)."""

from __future__ import annotations

from time import perf_counter

from kukri.dataclass import dataclass, field
from kukri.engine.traces import Span


@dataclass(frozen=True)
class Timings:
    """Durations of a request, in seconds of wall time, and its rates; 0 if there was nothing to time."""

    n_prompt_tokens: int
    n_generated: int
    queue_s: float  # from arrival to the first step
    prompt_s: float  # from there to the first token
    first_token_s: float  # from arrival to the first token: the sum of the two
    decode_s: float  # from the first token to the last
    n_drafted: int = 0  # draft tokens computed
    n_accepted: int = 0  # how many of those were accepted

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prefilled prompt tokens per second."""
        return self.n_prompt_tokens / self.prompt_s if self.prompt_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens generated per second, the first left out: it belongs to the prompt."""
        return (self.n_generated - 1) / self.decode_s if self.decode_s else 0.0


@dataclass(eq=False, slots=True)
class Timestamps:
    """The times of a request by `perf_counter`, 0 for what has not happened: written as its steps run."""

    arrived_s: float = field(default_factory=perf_counter)
    started_s: float = 0.0  # the first step
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    trace: Span | None = None  # the trace that it belongs to
    stage_s: dict[str, tuple[float, float]] = field(default_factory=dict)  # see `note_stages`

    def note_stages(self, elapsed_s: float, computed_s: float) -> None:
        """Adds the seconds that a step spent in other stages, and those in which these computed."""
        if self.trace is not None:
            part = "decode" if self.first_token_s else "prefill"
            before = self.stage_s.get(part, (0.0, 0.0))
            self.stage_s[part] = before[0] + elapsed_s, before[1] + computed_s
