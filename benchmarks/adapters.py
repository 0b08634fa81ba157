"""The cost of LoRA adapters: `python -m benchmarks.adapters`.

Streams that generate with random adapters, one after another of several, against as many without one, in
turns on one engine; the same for one stream, and for a prompt. An adapter changes every linear layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np

from benchmarks.harness import Comparison, Experiment, Say, model_path, run, silent
from benchmarks.turns import in_turns
from kukri.engine import Engine
from kukri.engine.request import Request
from kukri.kernels.quantize import quantize
from kukri.kernels.weight_handles import LowRank, Weight
from kukri.llm import LLM
from kukri.models import Adapter, Model
from kukri.models.trace import Trace
from kukri.quant.types import QUANT_TYPES
from kukri.sampling import SamplingParams

_PROMPT, _NEW = 32, 64  # tokens of each stream
_LONG_PROMPT = 512


@dataclass(frozen=True)
class AdaptersReport:
    """The report of `python -m benchmarks.adapters`: tokens/s with adapters against without."""

    model: str
    n_threads: int
    n_adapters: int
    rank: int
    weight_type: str
    adapter_mib: float  # size of one adapter
    streams: Comparison
    one_stream: Comparison
    prompt: Comparison


def random_adapter(model: Model, rank: int, weight_type: str, seed: int) -> Adapter:
    """An adapter of every linear layer, of numbers too small to change much."""
    rng, kind = np.random.default_rng(seed), QUANT_TYPES[weight_type]

    def matrix(n_out: int, n_in: int) -> Weight:
        numbers = (rng.standard_normal((n_out, n_in)) * 0.01).astype(np.float32)
        return Weight(quantize(numbers, kind), kind, (n_out, n_in))

    matrices = Trace(model).multiplied.items()
    updates = {n: LowRank(matrix(rank, n_in), matrix(n_out, rank), 1.0) for n, (n_out, n_in) in matrices}
    return Adapter(Path("random"), updates)


def decode_tokens_per_s(engine: Engine, n_streams: int, adapters: tuple[str, ...]) -> float:
    """Tokens/s of streams side by side, once all generate; stream i has adapter i modulo their number."""
    rng = np.random.default_rng(1)
    params = SamplingParams(temperature=0, max_tokens=_NEW, ignore_eos=True, speculation="off")
    requests: list[Request] = []
    for i in range(n_streams):
        name = adapters[i % len(adapters)] if adapters else None
        prompt = rng.integers(0, engine.model.config.n_vocab, _PROMPT)
        requests += engine.maker.make_requests(prompt, params, adapter=name)
    for request in requests:
        engine.add_request(request)
    while not all(request.n_generated for request in requests):
        engine.step()
    n_before, started_s = sum(request.n_generated for request in requests), perf_counter()
    while engine.has_work:
        engine.step()
    return (sum(request.n_generated for request in requests) - n_before) / (perf_counter() - started_s)


def prefill_tokens_per_s(engine: Engine, adapter: str | None) -> float:
    """Tokens/s of a prompt that no other shares."""
    engine.pool.forget()
    params = SamplingParams(temperature=0, max_tokens=1, speculation="off")
    prompt = np.random.default_rng(2).integers(0, engine.model.config.n_vocab, _LONG_PROMPT)
    (request,) = engine.maker.make_requests(prompt, params, adapter=adapter)
    engine.add_request(request)
    started_s = perf_counter()
    while engine.has_work:
        engine.step()
    return _LONG_PROMPT / (perf_counter() - started_s)


def measure(
    model: str | None,
    n_threads: int,
    n_streams: int,
    n_adapters: int,
    rank: int,
    weight_type: str,
    rounds: int,
    say: Say = silent,
) -> AdaptersReport:
    """Measures all three, each in turns."""
    path = model_path(model, _LONG_PROMPT + 1)
    with LLM(path, n_threads=n_threads, max_context=_LONG_PROMPT + 1, max_requests=n_streams) as llm:
        engine, n_bytes = llm.engine, 0
        names = tuple(f"adapter{i}" for i in range(n_adapters))
        for i, name in enumerate(names):
            adapter = random_adapter(llm.model, rank, weight_type, i)
            engine.load_adapter(name, adapter)
            n_bytes = adapter.n_bytes
        found = []
        for measures in (
            [partial(decode_tokens_per_s, engine, n_streams, which) for which in (names, ())],
            [partial(decode_tokens_per_s, engine, 1, which) for which in (names, ())],
            [partial(prefill_tokens_per_s, engine, which) for which in (names[0], None)],
        ):
            found.append(Comparison.of(("with adapters", "without"), in_turns(measures, rounds, say)))
    return AdaptersReport(str(path), n_threads, n_adapters, rank, weight_type, n_bytes / 2**20, *found)


def main() -> None:
    """Runs the experiment with the options of the command line."""
    experiment = Experiment("adapters", "The cost of LoRA adapters.")
    experiment.count("-n", "--streams", 16, "streams side by side")
    experiment.count("-a", "--adapters", 4, "adapters among them")
    experiment.count("-k", "--rank", 16, "rank of the adapters")
    experiment.options.add_argument(
        "--type", choices=("F32", "F16", "BF16"), default="BF16", help="of their numbers (BF16)"
    )
    experiment.count("-r", "--rounds", 5, "rounds, all sides in each")
    given = experiment.parse()
    report = measure(
        given.model,
        given.threads,
        given.streams,
        given.adapters,
        given.rank,
        given.type,
        given.rounds,
        experiment.say,
    )
    experiment.show(
        report,
        f"{given.adapters} adapters of rank {given.rank} in {given.type}, {report.adapter_mib:.1f} MiB each",
        report.streams.table(f"{given.streams} streams, tokens/s"),
        report.one_stream.table("one stream, tokens/s"),
        report.prompt.table(f"a prompt of {_LONG_PROMPT} tokens, tokens/s"),
    )


if __name__ == "__main__":
    run(main)
