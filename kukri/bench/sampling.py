"""What choosing tokens costs beside computing their logits: `python -m kukri.bench.sampling`.

Requests with mixed settings decode together in one engine. Each step is timed whole, and so is the part of it
that chooses the tokens: by the share of the second in the first, at the median step.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from kukri.bench.command import model_path, parser, positive, print_table, run, say

_MIXED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "presence_penalty": 1.5, "frequency_penalty": 0.2},
    {"temperature": 1.2, "min_p": 0.1, "dry_multiplier": 0.8, "dry_sequence_breakers": [[198]]},
    {"temperature": 1.0, "xtc_probability": 0.5, "min_p": 0.02},
    {"temperature": 0.9, "typical_p": 0.95, "logit_bias": {11: -2.0, 13: 1.0}},
    {"mirostat": 2, "mirostat_tau": 4.0},
    {"temperature": 0.8, "dynatemp_range": 0.4, "top_k": 50, "logprobs": 5},
    {"temperature": 1.5, "top_n_sigma": 1.0, "min_tokens": 4},
    {"temperature": 0.0, "logprobs": 3, "bad_words": [[100], [101, 102]]},
)


@dataclass(frozen=True)
class SamplingReport:
    """What `python -m kukri.bench.sampling` found. Times are medians of `n_steps` steps."""

    model: str
    n_requests: int
    n_steps: int
    step_ms: float
    sampling_ms: float
    share: float  # of sampling in the step, at the median


def measure(
    model: str | None, n_requests: int, n_steps: int, n_threads: int | None, *, silent: bool = False
) -> SamplingReport:
    """Decodes with `n_requests` requests of mixed settings. Raises ConfigError where they do not fit."""
    from kukri.llm import LLM
    from kukri.sampling import SamplingParams

    n_prompt, n_new = 32, n_steps + 8
    path = model_path(model, n_prompt + n_new)
    llm = LLM(path, n_threads=n_threads, max_requests=n_requests, max_context=n_prompt + n_new)
    engine = llm.engine
    for i in range(n_requests):
        fields = _MIXED[i % len(_MIXED)] | {"seed": i, "max_tokens": n_new, "ignore_eos": True}
        prompt = [(7 * i + 13 * j) % 1000 + 300 for j in range(n_prompt)]
        engine.add_request(engine.make_request(prompt, SamplingParams(**fields)))
    choose, sampling_s = engine._sample, [0.0]

    def timed(*arguments: Any) -> Any:
        started = time.perf_counter()
        result = choose(*arguments)
        sampling_s[0] = time.perf_counter() - started
        return result

    engine._sample = timed  # type: ignore[method-assign, assignment]
    say(f"{n_requests} requests decode for {n_steps} steps", silent=silent)
    while any(request.n_generated == 0 for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    steps: list[tuple[float, float]] = []
    while len(steps) < n_steps and len(engine.scheduler.running) == n_requests:
        started = time.perf_counter()
        engine.step()
        steps.append((time.perf_counter() - started, sampling_s[0]))
    return SamplingReport(
        str(path),
        n_requests,
        len(steps),
        1e3 * median(step for step, _ in steps),
        1e3 * median(sampling for _, sampling in steps),
        median(sampling / step for step, sampling in steps),
    )


def main() -> None:
    """The program."""
    options = parser("sampling", "the share of sampling in a step of requests with mixed settings")
    options.add_argument("-n", "--n-requests", type=positive, default=32, help="requests at once (32)")
    options.add_argument("-s", "--n-steps", type=positive, default=200, help="steps (200)")
    given = options.parse_args()
    report = measure(given.model, given.n_requests, given.n_steps, given.threads, silent=given.json)
    if not given.json:
        rows = [
            ["step", f"{report.step_ms:.3f}"],
            ["sampling", f"{report.sampling_ms:.3f}"],
            ["share", f"{100 * report.share:.1f}%"],
        ]
        print_table(f"{report.n_requests} requests with mixed settings", ["median", "ms"], rows)
    print(json.dumps(asdict(report)))


if __name__ == "__main__":
    run(main)
