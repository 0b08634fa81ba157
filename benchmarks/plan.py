"""How many replicas a load needs, by a simulation with the step costs of this machine.

`python -m benchmarks.plan -m MODEL --users 500 --pause 30 --tokens 200`; --help lists the rest.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from statistics import median
from time import perf_counter
from typing import Any

import typer

from benchmarks.simulation import Engine, Load, Report, StepCosts, replicas_needed, simulate
from kukri.errors import ConfigError, KukriError
from kukri.llm import LLM
from kukri.sampling import SamplingParams
from kukri.terminal.command import expanded, given, option
from kukri.terminal.errors import ErrorReportingGroup
from kukri.terminal.options import ManyOptions
from kukri.terminal.tables import print_facts

_N_SEQUENCES = 8  # in the batch that is compared with a single sequence
_N_STEPS = 24
_N_PROMPT = 257  # tokens of the prompt that is measured


@dataclass(eq=False, repr=False)
class LoadOfUsers:
    """Options of the command line: what users send, and what they expect."""

    model: str | None = option("Model. [default: the default model]", "--model", "-m", metavar="MODEL")
    users: float = option("Concurrent users.", default=100.0, metavar="N")
    pause_s: float = option(
        "Seconds from a user's request to the next.", "--pause", default=30.0, metavar="SECONDS"
    )
    tokens: int = option("Tokens per answer.", "--tokens", "-n", default=200, metavar="N")
    prefixes: int = option("Different system prompts.", default=1, min=1, metavar="N")
    prefix_tokens: int = option("Tokens per system prompt.", default=256, min=0, metavar="N")
    own_tokens: int = option("Tokens of a prompt after the system prompt.", default=128, metavar="N")
    first_token_s: float = option(
        "Limit on the 99th percentile of time to first token.",
        "--first-token",
        default=1.0,
        metavar="SECONDS",
    )
    tokens_per_s: float = option("Minimum tokens/s of the median answer.", default=10.0, metavar="N")
    costs: str | None = option(
        "Milliseconds per step, sequence and prompt token. [default: measured here]", metavar="A,B,C"
    )
    n_requests: int = option("Requests to simulate.", "--requests", default=2000, min=1, metavar="N")


def plan(model: str | None, users: LoadOfUsers, loading: dict[str, Any], *, as_json: bool) -> None:
    """Prints the replicas that users need; `loading` are options of LLM."""
    for name in ("users", "pause_s", "tokens", "own_tokens", "first_token_s", "tokens_per_s"):
        if not getattr(users, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0")
    with LLM(model, **loading) as llm:
        costs = measured_costs(llm) if users.costs is None else _costs(users.costs)
        config = llm.engine.config
        engine = Engine(
            costs,
            config.max_requests,
            config.max_step_tokens,
            config.max_prompt_tokens,
            llm.engine.pool.n_pages,
            llm.engine.pool.page_tokens,
        )
        longest = users.prefix_tokens + users.own_tokens + users.tokens
        if longest > llm.engine.max_context:
            raise ConfigError(
                f"prompt and answer of {longest} tokens do not fit in the context of {llm.engine.max_context}"
            )
    load = Load(
        rate=users.users / users.pause_s,
        n_requests=users.n_requests,
        n_prefixes=users.prefixes,
        prefix_tokens=users.prefix_tokens,
        own_tokens=users.own_tokens,
        answer_tokens=users.tokens,
    )
    found = replicas_needed(engine, load, first_token_s=users.first_token_s, token_s=1 / users.tokens_per_s)
    if found is None:
        raise KukriError(
            "no number of replicas keeps these times: one alone is too slow. Allow more with --first-token "
            "or --tokens-per-s, or take a smaller model"
        )
    in_turn = simulate(engine, load, found.n_replicas, "round-robin")
    if as_json:
        print(json.dumps({"costs": asdict(costs), "plan": asdict(found), "round_robin": asdict(in_turn)}))
        return
    print_facts(
        [
            ("replicas", f"{found.n_replicas}, each as fast as this machine and options"),
            ("load", f"{load.rate:.2f} requests a second, {found.tokens_per_s:,.0f} tokens a second"),
            *_facts(found),
            ("step", ", ".join(f"{1e3 * value:.3f} ms {name}" for name, value in _named(costs))),
            ("in turn", f"first token {_ms(in_turn.first_token_p99_s)} (99%), "
                         f"{in_turn.hit_rate:.0%} of prompt tokens from the cache"),
        ]
    )  # fmt: skip


def _facts(report: Report) -> list[tuple[str, str]]:
    first = f"{_ms(report.first_token_p50_s)} (median), {_ms(report.first_token_p99_s)} (99%)"
    rates = [1 / one if one else inf for one in (report.token_p50_s, report.token_p99_s)]
    return [
        ("first token", first),
        ("then", f"{rates[0]:.1f} tokens a second (median), {rates[1]:.1f} (the slowest 1%)"),
        ("cache", f"{report.hit_rate:.0%} of prompt tokens"),
        ("busy", f"{report.busy:.0%} of the time; the busiest replica {report.imbalance:.2f} times the mean"),
    ]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"


def _named(costs: StepCosts) -> Sequence[tuple[str, float]]:
    return ("itself", costs.base_s), ("a sequence", costs.sequence_s), ("a prompt token", costs.token_s)


def _costs(text: str) -> StepCosts:
    """The costs in a text of three numbers of milliseconds. Raises ConfigError."""
    try:
        numbers = [float(number) / 1e3 for number in text.split(",")]
        if len(numbers) == 3 and all(0 <= number < inf for number in numbers) and numbers[0] > 0:
            return StepCosts(*numbers)
    except ValueError:
        pass
    raise ConfigError(f"--costs are three numbers of milliseconds, such as 2.1,0.4,0.25, not {text!r}")


def measured_costs(llm: LLM) -> StepCosts:
    """The step costs of an open model: medians of steps with 1 and 8 sequences, and of one with a prompt."""
    n = min(_N_SEQUENCES, llm.engine.config.max_requests)
    one_s, many_s, prompt_s = _decode_s(llm, 1), _decode_s(llm, n), _prompt_s(llm)
    sequence_s = max((many_s - one_s) / (n - 1), 0.0) if n > 1 else 0.0
    base_s = max(one_s - sequence_s, 1e-6)
    return StepCosts(base_s, sequence_s, max((prompt_s - base_s) / _N_PROMPT, 0.0))


def _decode_s(llm: LLM, n: int) -> float:
    """Seconds of a step in which `n` sequences decode."""
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=_N_STEPS + 8, ignore_eos=True, speculation="off")
    requests = [engine.maker.make_request(_ids(llm, 16, i), params) for i in range(n)]
    for request in requests:
        engine.add_request(request)
    times: list[float] = []
    while engine.has_work:
        decodes = all(request.n_generated for request in requests)
        started_s = perf_counter()
        engine.step()
        if decodes:
            times.append(perf_counter() - started_s)
    return median(times[4:_N_STEPS])


def _prompt_s(llm: LLM) -> float:
    """Seconds of a step that reads a prompt."""
    engine, times = llm.engine, []
    n_prompt = min(_N_PROMPT, engine.max_context - 1, engine.config.max_step_tokens)
    for i in range(4):
        request = engine.maker.make_request(
            _ids(llm, n_prompt, 100 + i), SamplingParams(temperature=0, max_tokens=1)
        )
        engine.add_request(request)
        started_s = perf_counter()
        while engine.has_work:
            engine.step()
        times.append((perf_counter() - started_s) * _N_PROMPT / n_prompt)
    return median(times[1:])


def _ids(llm: LLM, n: int, seed: int) -> list[int]:
    """Token ids that begin like no other prompt here, so that none is found in the cache."""
    n_vocab = llm.config.n_vocab
    return [(seed * 7919 + i * (2 * seed + 101)) % n_vocab for i in range(n)]


app = typer.Typer(cls=ErrorReportingGroup, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
@expanded
def main(*, load: LoadOfUsers, loading: ManyOptions, as_json: bool = typer.Option(False, "--json")) -> None:
    """Estimate how many replicas a load needs."""
    plan(load.model, load, given(loading), as_json=as_json)


if __name__ == "__main__":
    app()
