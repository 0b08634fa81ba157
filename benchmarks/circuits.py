"""An attribution graph on real weights with random TopK transcoders: `python -m benchmarks.circuits`.

Says how long the graph of a prompt takes, and what memory. The features mean nothing; their number is what
trained transcoders have (16,384 a layer, 32 of them active for each token).

With `--streams N` a server makes graphs while it streams, alternating with nothing: reported are the times
between tokens. With `--transcoders DIR` (of `benchmarks.train_transcoders`) it compares what graphs predict
with what interventions do: the most influential features of each prompt are ablated (or multiplied by
`--factor`) one by one: with all other features held, with attention and norms held, and in the whole model.
"""

from __future__ import annotations

import asyncio
import json
import resource
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import get_args

import httpx
import numpy as np

from benchmarks.bombs import Gaps, Streams
from benchmarks.harness import Experiment, Table, model_path, positive, run, served
from benchmarks.streams import place_of
from kukri import LLM
from kukri.formats.huggingface.safetensors import safetensors_bytes
from kukri.interp.features.transcoders import Transcoders
from kukri.interp.gradients.circuits import Held, attribute
from kukri.interp.gradients.graph_effects import GraphMeasure

_TEXT = "The history of the city begins long before the first bridge was built across the river, where "
_N_TOKENS, _N_FEATURES, _N_ACTIVE = 64, 16_384, 32


_PROMPTS = (
    "The capital of France is the city of", "When Mary and John went to the store, John gave a drink to",
    "The opposite of hot is", "Water freezes at a temperature of zero degrees", "One, two, three, four,",
    "In the winter it is cold, and in the summer it is", "The sun rises in the east and sets in the",
    "He opened the door with his",
)  # fmt: skip


@dataclass(frozen=True)
class EffectsReport:
    """What interventions change of the likeliest next token's logit less the mean, and the correlation."""

    predicted: list[float]
    measured: list[float]
    correlation: float


@dataclass(frozen=True)
class CircuitReport:
    """Seconds of wall time; bytes at most while it ran."""

    n_tokens: int
    n_active: int
    n_traced: int
    graph_s: float
    processor_s: float  # of the graph, on all cores together
    prune_s: float
    n_nodes: int
    n_links: int
    peak_bytes: int


def measure(path: Path, n_threads: int | None, max_features: int) -> CircuitReport:
    """Makes transcoders in a temporary directory, and the graph."""
    with LLM(path, n_threads=n_threads) as llm, tempfile.TemporaryDirectory() as folder:
        layers = range(llm.config.n_layers)
        transcoders = random_transcoders(Path(folder), layers, llm.config.d_model, _N_FEATURES, _N_ACTIVE)
        ids = llm.tokenizer.encode(_TEXT * 8)[:_N_TOKENS]
        started_s, used_s = time.perf_counter(), time.process_time()
        graph = attribute(llm, ids, transcoders, max_features=max_features)
        graph_s, processor_s = time.perf_counter() - started_s, time.process_time() - used_s
        nodes, edges = graph.prune()
        prune_s = time.perf_counter() - started_s - graph_s
    return CircuitReport(
        len(ids),
        graph.n_active,
        len(graph.features),
        graph_s,
        processor_s,
        prune_s,
        int(nodes.sum()),
        int(edges.sum()),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


@dataclass(frozen=True)
class StreamsReport:
    """Milliseconds between tokens, of each round alone and next to a graph; seconds of whole graphs."""

    n_streams: int
    alone: list[Gaps]
    next_to_graphs: list[Gaps]
    graphs_s: list[float]


def next_to_streams(path: Path, n_threads: int, n: int, rounds: int, seconds: float) -> StreamsReport:
    """Streams alone and next to a graph, alternating; a graph that outlasts its round is cancelled."""
    with tempfile.TemporaryDirectory() as folder:
        with LLM(path, max_context=64) as llm:
            layers, width = range(llm.config.n_layers), llm.config.d_model
            prompt = llm.tokenizer.decode(llm.tokenizer.encode(_TEXT * 8)[:_N_TOKENS])
        random_transcoders(Path(folder), layers, width, _N_FEATURES, _N_ACTIVE)
        options = ("--transcoder", f"mlps={folder}", "--max-context", "4096", "--log-level", "error")
        with served(path, *options, "--threads", str(n_threads)) as (_, url):
            return asyncio.run(_next_to_streams(url, prompt, n, rounds, seconds))


async def _next_to_streams(url: str, prompt: str, n: int, rounds: int, seconds: float) -> StreamsReport:
    report = StreamsReport(n, [], [], [])
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:

        async def make() -> None:
            started_s = time.perf_counter()
            (await http.post("/generate-graph", json={"prompt": prompt})).raise_for_status()
            report.graphs_s.append(time.perf_counter() - started_s)

        await make()  # with nothing else to do
        streams = Streams(place_of(url), n)
        try:
            await asyncio.sleep(3)
            for _ in range(rounds):
                report.alone.append(await streams.gaps(seconds))
                making = asyncio.create_task(make())
                await asyncio.sleep(1)
                report.next_to_graphs.append(await streams.gaps(seconds))
                if making.done():
                    making.result()
                making.cancel()
                await asyncio.sleep(1)
        finally:
            streams.stop()
    return report


def effects(
    path: Path, folder: Path, n_threads: int | None, n: int, max_features: int, factor: float
) -> dict[Held, EffectsReport]:
    """What graphs predict of `n` interventions, and what these do, with this held."""
    found: dict[Held, EffectsReport] = {held: EffectsReport([], [], 0.0) for held in get_args(Held)}
    # in float32, by PyTorch: the rounding of packed inputs is as large as what most features do
    with LLM(path, backend="torch", n_threads=n_threads, transcoders={"mlps": folder}) as llm:
        transcoders = Transcoders.load(folder)
        done = 0
        for i, prompt in enumerate(_PROMPTS):
            graph = attribute(llm, prompt, transcoders, max_features=max_features, max_logits=1)
            measure = GraphMeasure(llm, graph, "mlps")
            order = np.argsort(-graph.influence()[: len(graph.features)], kind="stable")
            nodes = order[: n * (i + 1) // len(_PROMPTS) - done].tolist()
            done += len(nodes)
            for node in nodes:
                for held, report in found.items():
                    report.predicted.append(float(graph.effects({node: factor}, held)[-1]))
                    report.measured.append(float(measure.effects({node: factor}, held)[-1]))
    return {
        held: replace(one, correlation=float(np.corrcoef(one.predicted, one.measured)[0, 1]))
        for held, one in found.items()
    }


def random_transcoders(
    folder: Path, layers: Iterable[int], width: int, n_features: int, n_active: int
) -> Transcoders:
    """TopK transcoders of these layers, in SAELens' form in the folder."""
    rng = np.random.default_rng(0)
    for layer in layers:
        own = folder / f"layer_{layer}"
        own.mkdir()
        encoder = (rng.standard_normal((width, n_features), np.float32) / width**0.5).astype(np.float16)
        arrays = {
            "W_enc": encoder,
            "W_dec": np.ascontiguousarray(encoder.T) / np.float16(4),
            "b_enc": np.zeros(n_features, np.float16),
            "b_dec": np.zeros(width, np.float16),
        }
        (own / "sae_weights.safetensors").write_bytes(safetensors_bytes(arrays, {}))
        facts = {"architecture": "transcoder", "activation_fn_kwargs": {"k": n_active}}
        (own / "cfg.json").write_text(json.dumps(facts))
    return Transcoders.load(folder)


def main() -> None:
    """Measures and reports."""
    experiment = Experiment("circuits", "Seconds and memory of an attribution graph.")
    experiment.count("-n", "--max-features", 2048, "features that are traced")
    experiment.count("-i", "--interventions", 50, "interventions to compare")
    experiment.options.add_argument("--streams", type=positive, help="streams next to graphs", metavar="N")
    experiment.count("-s", "--seconds", 8, "seconds of a phase of the streams")
    experiment.count("-r", "--rounds", 4, "rounds of both phases")
    experiment.options.add_argument("--transcoders", type=Path, help="trained ones", metavar="DIR")
    experiment.options.add_argument(
        "--factor", type=float, default=0.0, help="what activations are multiplied by"
    )
    given = experiment.parse()
    path = model_path(given.model, 4096 if given.streams else _N_TOKENS)
    if given.transcoders is not None:
        compared = effects(
            path,
            given.transcoders,
            given.threads,
            given.interventions,
            given.max_features,
            given.factor,
        )
        shown = [
            [held, f"{one.correlation:.3f}", f"{np.abs(np.subtract(one.predicted, one.measured)).max():.4f}"]
            for held, one in compared.items()
        ]
        title = (
            f"effects of {given.interventions} interventions on the likeliest token's logit, less the mean"
        )
        columns = ("held", "correlation", "largest difference")
        experiment.show({held: asdict(one) for held, one in compared.items()}, Table(title, columns, shown))
        return
    if given.streams:
        gaps = next_to_streams(path, given.threads, given.streams, given.rounds, given.seconds)
        phases = (("alone", gaps.alone), ("next to a graph", gaps.next_to_graphs))
        shown = [
            [name, *(f"{median(getattr(one, of) for one in phase):.1f}" for of in Gaps._fields)]
            for name, phase in phases
        ]
        experiment.show(gaps, Table("milliseconds between tokens", ("", "median", "p99"), shown))
        return
    report = measure(path, given.threads, given.max_features)
    rows = [
        [name, f"{value:,.1f}" if name.endswith("_s") else f"{value:,}"]
        for name, value in asdict(report).items()
    ]
    experiment.show(report, Table("an attribution graph", ("", "value"), rows))


if __name__ == "__main__":
    run(main)
