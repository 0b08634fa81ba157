"""The cost of sampling next to that of logits: `python -m benchmarks.sampling`.

Requests with mixed settings decode together in one engine. Each step is timed whole, and so is its
sampling; the result is the share of the second in the first, at the median step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.harness import Experiment, Say, Table, model_path, run, silent

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

# an answer that does not end for long: records with each kind of value
_SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "role": {"enum": ["admin", "user", "guest"]},
            "scores": {"type": "array", "items": {"type": "number"}, "maxItems": 3},
            "active": {"type": "boolean"},
        },
        "required": ["name", "age", "role", "scores", "active"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True)
class SamplingReport:
    """The report of `python -m benchmarks.sampling`. Times are medians of `n_steps` steps."""

    model: str
    n_requests: int
    n_steps: int
    step_ms: float
    sampling_ms: float
    share: float  # the share of the step that sampling takes, at the median
    masks_ms: float  # what grammars take, within the sampling
    masks_share: float  # the share of the step that grammars take, at the median


def measure(
    model: str | None,
    n_requests: int,
    n_steps: int,
    n_threads: int | None,
    *,
    constrained: bool = False,
    say: Say = silent,
) -> SamplingReport:
    """Decodes with `n_requests` requests of mixed settings, or constrained to a JSON schema.

    Raises ConfigError if they do not fit.
    """
    from kukri.llm import LLM
    from kukri.sampling import Grammar, SamplingParams, resolve_texts
    from kukri.sampling.grammar import Matcher

    n_prompt, n_new = 32, n_steps + 8
    path = model_path(model, n_prompt + n_new)
    llm = LLM(
        path, n_threads=n_threads, max_requests=n_requests, max_context=n_prompt + n_new, speculation="off"
    )
    engine = llm.engine
    for i in range(n_requests):
        fields: dict[str, Any] = {"temperature": 1.0, "grammar": Grammar.json(_SCHEMA)}
        if not constrained:
            fields = _MIXED[i % len(_MIXED)] | {"ignore_eos": True}
        params = resolve_texts(SamplingParams(**fields, seed=i, max_tokens=n_new), llm.tokenizer)
        prompt = [(7 * i + 13 * j) % 1000 + 300 for j in range(n_prompt)]
        engine.add_request(engine.maker.make_request(prompt, params))
    sampling_s, masks_s = [0.0], [0.0]
    sampler = engine.sampler
    sampler.sample = _timed(sampler.sample, sampling_s)  # type: ignore[method-assign]
    sampler.sample_each = _timed(sampler.sample_each, sampling_s)  # type: ignore[method-assign]
    say(f"{n_requests} requests decode for {n_steps} steps")
    update, take = Matcher.update, Matcher.take
    Matcher.update = _timed(update, masks_s)  # type: ignore[method-assign]
    Matcher.take = _timed(take, masks_s)  # type: ignore[method-assign]
    try:
        steps = _steps(engine, n_requests, n_steps, sampling_s, masks_s)
    finally:
        Matcher.update, Matcher.take = update, take  # type: ignore[method-assign]
    return SamplingReport(
        str(path),
        n_requests,
        len(steps),
        1e3 * median(step for step, _, _ in steps),
        1e3 * median(sampling for _, sampling, _ in steps),
        median(sampling / step for step, sampling, _ in steps),
        1e3 * median(masks for _, _, masks in steps),
        median(masks / step for step, _, masks in steps),
    )


def _timed(function: Callable[..., Any], spent_s: list[float]) -> Callable[..., Any]:
    """Wraps a function to add its time to `spent_s`."""

    def timed(*arguments: Any) -> Any:
        started = time.perf_counter()
        result = function(*arguments)
        spent_s[0] += time.perf_counter() - started
        return result

    return timed


def _steps(
    engine: Any, n_requests: int, n_steps: int, sampling_s: list[float], masks_s: list[float]
) -> list[tuple[float, float, float]]:
    """Seconds of each step, of its sampling, and of the grammars in that."""
    while any(request.n_generated == 0 for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    steps: list[tuple[float, float, float]] = []
    while len(steps) < n_steps and len(engine.scheduler.running) == n_requests:
        sampling_s[0] = masks_s[0] = 0.0
        started = time.perf_counter()
        engine.step()
        steps.append((time.perf_counter() - started, sampling_s[0], masks_s[0]))
    return steps


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment("sampling", "Measure sampling's share of a step of requests with mixed settings.")
    experiment.count("-n", "--n-requests", 32, "requests at once")
    experiment.count("-s", "--n-steps", 200, "steps")
    experiment.options.add_argument(
        "--grammar", action="store_true", help="requests with a JSON schema, at temperature 1"
    )
    given = experiment.parse()
    report = measure(
        given.model,
        given.n_requests,
        given.n_steps,
        given.threads,
        constrained=given.grammar,
        say=experiment.say,
    )
    rows = [
        ["step", f"{report.step_ms:.3f}"],
        ["sampling", f"{report.sampling_ms:.3f}"],
        ["share", f"{100 * report.share:.1f}%"],
        ["grammars in that", f"{report.masks_ms:.3f}"],
        ["share of the step", f"{100 * report.masks_share:.1f}%"],
    ]
    kind = "a JSON schema" if given.grammar else "mixed settings"
    experiment.show(report, Table(f"{report.n_requests} requests with {kind}", ["median", "ms"], rows))


if __name__ == "__main__":
    run(main)
