"""Answers of one load, and the figures that they come to. Definitions: docs/howto/load-testing.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from kukri.bench.endpoint import Answer
from kukri.dataclass import dataclass
from kukri.errors import ConfigError

MEASURES = ("ttft", "tpot", "itl", "e2e")
OBJECTIVES = ("ttft", "tpot", "e2e")  # measured once for each answer


@dataclass(frozen=True)
class Spread:
    """Milliseconds."""

    mean: float
    median: float
    p99: float


@dataclass(frozen=True)
class LoadPoint:
    """The results of one load. Tokens are the server's count; rates are over the load's `seconds`."""

    load: float  # planned requests a second, or requests at a time
    seconds: float
    n_requests: int
    n_answered: int
    errors: dict[str, int]  # by kind
    error_details: dict[str, str]  # the text of the first error of each kind
    requests_per_s: float  # answered
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    goodput_per_s: float | None  # answers within the objective; None without one
    n_prompt_tokens: int
    n_cached_tokens: int  # prompt tokens found in the server's prefix cache
    n_generated_tokens: int
    has_usage: bool  # else prompts were not counted, and chunks were for tokens
    max_in_flight: int
    ttft_ms: Spread | None  # None if no answer has this time
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    late_p99_ms: float | None  # how late requests were sent; None at a fixed concurrency
    client_cpu: float  # processor time of this process, a share of `seconds`


def spread(values_s: Sequence[float]) -> Spread | None:
    """Return mean, median and 99th percentile (interpolated linearly) of seconds, in ms; None without any."""
    if not values_s:
        return None
    median, p99 = np.percentile(values_s, (50, 99))
    return Spread(1e3 * float(np.mean(values_s)), 1e3 * float(median), 1e3 * float(p99))


def read_objective(text: str) -> dict[str, float]:
    """The limits, in ms, of a text such as ttft:500,tpot:50. Raises ConfigError for any other."""
    limits = {}
    for item in text.split(","):
        name, _, value = item.strip().partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = 0.0
        if name not in OBJECTIVES or not 0 < limits[name] < float("inf"):
            raise ConfigError(
                f"--slo must be limits in ms of {', '.join(OBJECTIVES)}, such as ttft:500,tpot:50, not "
                f"{text!r}"
            )
    return limits


def is_good(answer: Answer, objective: Mapping[str, float]) -> bool:
    """Return True if an answer came within all limits; a limit of a time that the answer lacks is ignored."""
    seconds = {"ttft": answer.ttft_s, "tpot": answer.tpot_s, "e2e": answer.e2e_s}
    return all(1e3 * (seconds[name] or 0.0) <= limit for name, limit in objective.items())


def load_point(
    load: float,
    seconds: float,
    answers: Sequence[Answer],
    objective: Mapping[str, float],
    *,
    max_in_flight: int,
    late_s: Sequence[float],
    client_cpu_s: float,
) -> LoadPoint:
    """The figures of a load's answers, failed ones included."""
    good = [answer for answer in answers if answer.error is None]
    n_prompt, n_generated = sum(a.n_prompt or 0 for a in good), sum(a.n_tokens for a in good)
    late = spread(late_s)
    return LoadPoint(
        load=load,
        seconds=seconds,
        n_requests=len(answers),
        n_answered=len(good),
        errors=dict(Counter(a.error for a in answers if a.error is not None).most_common()),
        error_details={a.error: a.detail for a in reversed(answers) if a.error is not None},
        requests_per_s=len(good) / seconds,
        prompt_tokens_per_s=n_prompt / seconds,
        generated_tokens_per_s=n_generated / seconds,
        goodput_per_s=sum(is_good(a, objective) for a in good) / seconds if objective else None,
        n_prompt_tokens=n_prompt,
        n_cached_tokens=sum(a.n_cached for a in good),
        n_generated_tokens=n_generated,
        has_usage=all(a.n_generated is not None for a in good),
        max_in_flight=max_in_flight,
        ttft_ms=spread([a.ttft_s for a in good if a.ttft_s is not None]),
        tpot_ms=spread([a.tpot_s for a in good if a.tpot_s is not None]),
        itl_ms=spread([gap for a in good for gap in a.gaps_s]),
        e2e_ms=spread([a.e2e_s for a in good]),
        late_p99_ms=late.p99 if late else None,
        client_cpu=client_cpu_s / seconds,
    )
