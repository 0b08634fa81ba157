"""The types of the KV cache side by side: `python -m benchmarks.kv_types --depth 4096`.

kukri with each type, in processes of their own, alternating: prefill of a prompt of that depth, and decoding
after it. Ratios are to f16.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from benchmarks.harness import Comparison, Experiment, Say, Table, Worker, model_path, run, silent
from benchmarks.turns import in_turns
from kukri.formats.gguf.config import model_config
from kukri.formats.gguf.reader import GGUFFile
from kukri.kernels.cache import KVLayer, KVType
from kukri.kernels.paged_kv import PAGE_TOKENS, page_bytes

KV_TYPES: tuple[KVType, ...] = ("f16", "q8_0", "q4", "f32")


@dataclass(frozen=True)
class KVTypesReport:
    """The report of `python -m benchmarks.kv_types`: by type, bytes of a token of context and speeds."""

    model: str
    n_threads: int
    rounds: int
    depth: int
    token_bytes: dict[KVType, float]
    prefill: dict[KVType, Comparison]
    decode: dict[KVType, Comparison]


def compare(
    model: str | None, n_threads: int, rounds: int, depth: int, n_generate: int, say: Say = silent
) -> KVTypesReport:
    """Measures each type next to f16."""
    context = depth + n_generate + 1
    path = model_path(model, context)
    with GGUFFile(path) as file:
        config = model_config(file)
    layout = [KVLayer(config.n_kv_heads, config.d_head)] * config.n_layers
    with ExitStack() as stack:
        workers = []
        for kv_type in KV_TYPES:
            workers.append(stack.enter_context(Worker("kukri", path, n_threads, context, kv_type=kv_type)))
            workers[-1].ready()
        say("prefill")
        prefill = in_turns([partial(worker.prefill_tokens_per_s, depth) for worker in workers], rounds, say)
        say("decode")
        decode = in_turns(
            [partial(worker.decode_tokens_per_s, n_generate, depth) for worker in workers], rounds, say
        )
    found = [
        {
            kv_type: Comparison.of((kv_type, "f16"), [(values[i], values[0]) for values in rounds_of])
            for i, kv_type in enumerate(KV_TYPES)
        }
        for rounds_of in (prefill, decode)
    ]
    sizes = {kv_type: page_bytes(layout, kv_type) / PAGE_TOKENS for kv_type in KV_TYPES}
    return KVTypesReport(str(path), n_threads, rounds, depth, sizes, *found)


def _table(report: KVTypesReport) -> Table:
    rows = []
    for kv_type, size in report.token_bytes.items():
        row = [kv_type, f"{size:,.0f}", f"{report.token_bytes['f16'] / size:.2f}"]
        for found in (report.prefill[kv_type], report.decode[kv_type]):
            row += [f"{found.median(kv_type):.1f}", f"{found.median_ratio:.2f}"]
        rows.append(row)
    header = ["cache", "bytes/token", "context", "prefill", "ratio", "decode", "ratio"]
    return Table(f"tokens/s at {report.depth:,} tokens, {report.n_threads} threads", header, rows)


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment("kv_types", "Compare the types of kukri's KV cache at depth, in turns.")
    experiment.count("-r", "--rounds", 5, "rounds of measurements")
    experiment.count("-n", "--n-generate", 64, "tokens generated")
    experiment.count("-d", "--depth", 4096, "tokens of context before them")
    given = experiment.parse()
    report = compare(given.model, given.threads, given.rounds, given.depth, given.n_generate, experiment.say)
    experiment.show(report, _table(report))


if __name__ == "__main__":
    run(main)
