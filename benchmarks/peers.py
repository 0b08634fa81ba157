"""kukri and C++ engines side by side: `python -m benchmarks.peers`.

All load the same file, with the same threads, in processes of their own, and take turns: the measurements
of a round lie within seconds. Noise of the machine then hits all alike, so the ratios of a round say more
than any speed.

For kukri a whole `LLM.generate` on random ids is timed, greedy sampling and text included; for llama.cpp
`llama_decode` on random ids and nothing else (`benchmarks.llama_cpp`). `--engine NAME PATH` adds a
`llama-bench` program, such as ik_llama.cpp's (`benchmarks.llama_bench`).

`-p 4096 8191 -n 64 --depth 4096` is the table of long contexts: the last shows all tests in one.
`--kv-type q4` compares with the q4_0 caches of others. `--shape gemma4-e2b` makes a file of random weights
of that shape (`benchmarks.make_model`) and compares on it.

Decoding from an empty context is also given as a share of what memory allows: the bandwidth that is measured
within each round, over the bytes that a token reads, of a mixture those of the experts it uses.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.harness import (
    ENGINES,
    Comparison,
    Experiment,
    Say,
    Table,
    Worker,
    installed_engines,
    model_path,
    positive,
    run,
    silent,
)
from benchmarks.llama_bench import LlamaBench
from benchmarks.llama_cpp import import_llama_cpp
from benchmarks.make_model import SHAPES, make_model
from benchmarks.turns import in_turns
from kukri.bench.card import model_card, read_bandwidth_of_a_fresh_process

_WARM_UP_TOKENS = 512  # of a longer prompt: weights are read and kernels compiled after so many


@dataclass(frozen=True)
class PeersReport:
    """The report of `python -m benchmarks.peers`: by test and peer, tokens/s of kukri and the peer.

    Tests are named as llama-bench names them: pp512, tg128, tg128@d4096. Ratios are kukri / peer.
    `bandwidth_share` is that of kukri's decoding from an empty context, None if it was not measured.
    `resident_bytes` are those of kukri's process after all tests, None if the system does not tell.
    """

    model: str
    n_threads: int
    rounds: int
    kv_type: str
    versions: dict[str, str]
    tests: dict[str, dict[str, Comparison]]
    bytes_per_token: int
    bandwidth_share: float | None
    file_bytes: int
    resident_bytes: int | None


def compare(
    model: str | None,
    n_threads: int,
    rounds: int,
    prompts: Sequence[int],
    n_generate: int,
    say: Say = silent,
    *,
    depths: Sequence[int] = (0,),
    programs: Sequence[tuple[str, str]] = (),
    kv_type: str = "f16",
) -> PeersReport:
    """Measures all engines in turns: prompts of each length, and generations at each depth.

    `programs` are names and paths of llama-bench programs. Without any, llama-cpp-python is needed: raises
    UnsupportedError if it is not installed.
    """
    if not programs:
        import_llama_cpp()
    context = max(*prompts, n_generate + max(depths)) + 1
    path = model_path(model, context)
    benches = [LlamaBench(name, program, path, n_threads, kv_type) for name, program in programs]
    tests: dict[str, dict[str, Comparison]] = {}
    card = model_card(path)
    moved_bytes, share = card.bytes_per_token + 2 * card.state_bytes, None
    with ExitStack() as stack:
        workers: list[Worker | LlamaBench] = []
        for engine in installed_engines() if programs else ENGINES:
            say(f"loading {engine}")
            worker = stack.enter_context(Worker(engine, path, n_threads, context, kv_type=kv_type))
            worker.ready()
            workers.append(worker)
        workers += benches

        def add(
            test: str, measures: Sequence[Callable[[], float]], warm_ups: Sequence[Callable[[], float]] = ()
        ) -> list[tuple[float, ...]]:
            found = in_turns(measures, rounds, lambda text: say(f"{test}: {text}"), warm_ups)
            tests[test] = _by_peer([worker.engine for worker in workers], found)
            return found

        for n in prompts:
            lengths = (n, min(n, _WARM_UP_TOKENS))
            measures, warm_ups = ([partial(w.prefill_tokens_per_s, one) for w in workers] for one in lengths)
            add(f"pp{n}", measures, warm_ups)
        for depth in depths:
            name = f"tg{n_generate}" + (f"@d{depth}" if depth else "")
            measures = [partial(worker.decode_tokens_per_s, n_generate, depth) for worker in workers]
            if depth:
                add(name, measures)
            else:
                found = add(name, [*measures, partial(read_bandwidth_of_a_fresh_process, n_threads)])
                share = median(values[0] * moved_bytes / (values[-1] * 1e9) for values in found)
        held = _resident_bytes(workers[0].process_id) if isinstance(workers[0], Worker) else None
        versions = {name: number for worker in workers for name, number in worker.versions().items()}
    sizes = (card.bytes_per_token, share, card.file_bytes, held)
    return PeersReport(str(path), n_threads, rounds, kv_type, versions, tests, *sizes)


def _resident_bytes(process_id: int) -> int | None:
    """The memory that a process holds, pages of mapped files included; None if the system does not tell."""
    try:
        status = Path(f"/proc/{process_id}/status").read_text(encoding="utf-8")
    except OSError:
        return None
    return 1024 * int(status.partition("VmRSS:")[2].split(maxsplit=1)[0])


def _by_peer(engines: Sequence[str], rounds: Sequence[Sequence[float]]) -> dict[str, Comparison]:
    """The first engine compared with each of the others."""
    return {
        peer: Comparison.of((engines[0], peer), [(values[0], values[i]) for values in rounds])
        for i, peer in enumerate(engines[1:], 1)
    }


def _table(test: str, report: PeersReport) -> Table:
    """The rounds of one test, and the medians below them."""
    compared = report.tests[test]
    ours = next(iter(compared.values())).sides[ENGINES[0]]
    columns = [ours]
    for peer, found in compared.items():
        columns += [found.sides[peer], found.ratios]
    forms = ["{:.1f}", *["{:.1f}", "{:.2f}"] * len(compared)]

    def row(name: str, values: Sequence[float]) -> list[str]:
        return [name, *(form.format(value) for form, value in zip(forms, values, strict=True))]

    header = ["round", ENGINES[0], *(title for peer in compared for title in (peer, "ratio"))]
    rows = [row(str(i), values) for i, values in enumerate(zip(*columns, strict=True), 1)]
    rows.append(row("median", [median(column) for column in columns]))
    return Table(f"{test}, tokens/s, {report.n_threads} threads", header, rows)


def _medians(report: PeersReport) -> Table:
    """All tests in one table: the medians of speeds and ratios."""
    rows, header = [], ["test"]
    for test, compared in report.tests.items():
        ours = next(iter(compared.values())).median(ENGINES[0])
        header, row = ["test", ENGINES[0]], [test, f"{ours:.1f}"]
        for peer, found in compared.items():
            header += [peer, "ratio"]
            row += [f"{found.median(peer):.1f}", f"{found.median_ratio:.2f}"]
        rows.append(row)
    title = f"medians, tokens/s, {report.n_threads} threads, {report.kv_type} cache"
    return Table(title, header, rows)


def _of_memory(report: PeersReport) -> str:
    """The lines on bandwidth and memory."""
    found = [
        f"A token reads {report.bytes_per_token / 1e9:.3f} GB of a file of {report.file_bytes / 1e9:.2f}."
    ]
    if report.bandwidth_share is not None:
        found.append(f"Decoding reaches {report.bandwidth_share:.0%} of the bandwidth that is measured.")
    if report.resident_bytes is not None:
        found.append(f"kukri's process holds {report.resident_bytes / 1e9:.2f} GB.")
    return " ".join(found)


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment("peers", "Compare kukri and C++ engines on one file, in turns.")
    experiment.count("-r", "--rounds", 5, "rounds of measurements")
    add = experiment.options.add_argument
    add(
        "-p",
        "--n-prompt",
        type=positive,
        nargs="+",
        default=[512],
        metavar="N",
        help="tokens of prompts (512)",
    )
    experiment.count("-n", "--n-generate", 128, "tokens generated")
    add(
        "--depth",
        type=_depth,
        nargs="+",
        default=[0],
        metavar="N",
        help="tokens of context before those generated (0)",
    )
    add("--kv-type", choices=("f16", "q8_0", "q4"), default="f16", help="numbers of the KV cache (f16)")
    add(
        "--engine",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "PATH"),
        help="a llama-bench program to compare with, such as ik_llama.cpp's; may be given several times",
    )
    add("--shape", choices=SHAPES, help="make a file of random weights of this shape, in Q4_K_M, and take it")
    given = experiment.parse()
    with TemporaryDirectory() as folder:
        if given.shape:
            given.model = str(Path(folder) / f"{given.shape}.gguf")
            experiment.say(f"making {given.model}")
            make_model(Path(given.model), SHAPES[given.shape], "Q4_K_M", f"random-{given.shape}")
        report = _compared(given, experiment.say)
    tables = [_table(test, report) for test in report.tests]
    medians = [_medians(report)] if len(tables) > 1 else []
    experiment.show(report, *tables, *medians, _of_memory(report))


def _compared(given: Namespace, say: Say) -> PeersReport:
    """The report that the options ask for."""
    return compare(
        given.model,
        given.threads,
        given.rounds,
        given.n_prompt,
        given.n_generate,
        say,
        depths=given.depth,
        programs=[(name, program) for name, program in given.engine],
        kv_type=given.kv_type,
    )


def _depth(text: str) -> int:
    return 0 if text == "0" else positive(text)


if __name__ == "__main__":
    run(main)
