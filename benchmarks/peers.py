"""kukri and llama.cpp side by side: `python -m benchmarks.peers`.

Both load the same file, with the same threads, in a process of their own, and take turns: each pair of
measurements lies within a second or two. Noise of the machine then hits both alike, so the ratio of a pair
says more than either speed.

For kukri a whole `LLM.generate` on random ids is timed, greedy sampling and text included; for llama.cpp
`llama_decode` on random ids and nothing else (`benchmarks.llama_cpp`).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from benchmarks.harness import ENGINES, Comparison, Experiment, Say, Worker, model_path, run, silent
from benchmarks.llama_cpp import import_llama_cpp
from kukri.bench.turns import in_turns


@dataclass(frozen=True)
class PeersReport:
    """The report of `python -m benchmarks.peers`: tokens/s of both engines, ratios kukri / llama.cpp."""

    model: str
    n_threads: int
    rounds: int
    n_prompt: int
    n_generate: int
    versions: dict[str, str]
    prefill: Comparison
    decode: Comparison


def compare(
    model: str | None, n_threads: int, rounds: int, n_prompt: int, n_generate: int, say: Say = silent
) -> PeersReport:
    """Measures both engines in turns. Raises UnsupportedError without llama-cpp-python."""
    import_llama_cpp()
    context = max(n_prompt, n_generate) + 1
    path = model_path(model, context)
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(engine, path, n_threads, context)) for engine in ENGINES]
        for worker in workers:
            say(f"loading {worker.engine}")
            worker.ready()
        prefill = in_turns(
            [partial(worker.prefill_tokens_per_s, n_prompt) for worker in workers],
            rounds,
            lambda text: say(f"pp{n_prompt}: {text}"),
        )
        decode = in_turns(
            [partial(worker.decode_tokens_per_s, n_generate) for worker in workers],
            rounds,
            lambda text: say(f"tg{n_generate}: {text}"),
        )
        versions = {name: number for worker in workers for name, number in worker.versions().items()}
    compared = Comparison.of(ENGINES, prefill), Comparison.of(ENGINES, decode)
    return PeersReport(str(path), n_threads, rounds, n_prompt, n_generate, versions, *compared)


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment("peers", "Compare kukri and llama-cpp-python on one file, in turns.")
    experiment.count("-r", "--rounds", 5, "pairs of measurements")
    experiment.count("-p", "--n-prompt", 512, "tokens of a prompt")
    experiment.count("-n", "--n-generate", 128, "tokens generated")
    given = experiment.parse()
    report = compare(
        given.model, given.threads, given.rounds, given.n_prompt, given.n_generate, experiment.say
    )
    unit = f"tokens/s, {report.n_threads} threads"
    experiment.show(
        report,
        report.prefill.table(f"pp{report.n_prompt}, {unit}"),
        report.decode.table(f"tg{report.n_generate}, {unit}"),
    )


if __name__ == "__main__":
    run(main)
