"""An attribution graph on real weights with random TopK transcoders: `python -m benchmarks.circuits`.

Says how long the graph of a prompt takes, and what memory. The features mean nothing; their number is what
trained transcoders have (16,384 a layer, 32 of them active for each token).

With `--transcoders DIR` (of `benchmarks.train_transcoders`) it compares what graphs predict with what
interventions in the model do instead: the most influential features of each prompt are ablated one by one.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Experiment, Table, model_path, run
from kukri import LLM
from kukri.formats.huggingface.safetensors import safetensors_bytes
from kukri.interp.circuits import attribute
from kukri.interp.transcoders import Transcoders

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
        started_s = time.perf_counter()
        graph = attribute(llm, ids, transcoders, max_features=max_features)
        graph_s = time.perf_counter() - started_s
        nodes, edges = graph.prune()
        prune_s = time.perf_counter() - started_s - graph_s
    return CircuitReport(
        len(ids),
        graph.n_active,
        len(graph.features),
        graph_s,
        prune_s,
        int(nodes.sum()),
        int(edges.sum()),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def effects(path: Path, folder: Path, n_threads: int | None, n: int, max_features: int) -> EffectsReport:
    """What graphs predict of `n` interventions, and what these do."""
    predicted: list[float] = []
    measured: list[float] = []
    # in float32, by PyTorch: the rounding of packed inputs is as large as what most features do
    with LLM(path, backend="torch", n_threads=n_threads, transcoders={"mlps": folder}) as llm:
        transcoders = Transcoders.load(folder)
        for i, prompt in enumerate(_PROMPTS):
            graph = attribute(llm, prompt, transcoders, max_features=max_features, max_logits=1)
            before = _lead(llm, prompt, int(graph.logit_tokens[0]), [])
            n_features = len(graph.features)
            order = np.argsort(-graph.influence()[:n_features], kind="stable")
            for node in order[: n * (i + 1) // len(_PROMPTS) - len(predicted)].tolist():
                edits = graph.interventions({node: 0.0}, "mlps")
                predicted.append(float(graph.effects({node: 0.0})[-1]))
                measured.append(_lead(llm, prompt, int(graph.logit_tokens[0]), edits) - before)
    return EffectsReport(predicted, measured, float(np.corrcoef(predicted, measured)[0, 1]))


def _lead(llm: LLM, prompt: str, token: int, interventions: list[dict[str, Any]]) -> float:
    """The logit of a token after a prompt, less the mean of all."""
    logits = llm.run_with_hooks(prompt, interventions=interventions)
    assert logits is not None
    return float(logits[0, -1, token] - logits[0, -1].mean())


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
    experiment.options.add_argument("--transcoders", type=Path, help="trained ones", metavar="DIR")
    given = experiment.parse()
    path = model_path(given.model, _N_TOKENS)
    if given.transcoders is not None:
        compared = effects(path, given.transcoders, given.threads, given.interventions, given.max_features)
        pairs = sorted(zip(compared.predicted, compared.measured))
        shown = [["", f"{a:.3f}", f"{b:.3f}"] for a, b in pairs]
        title = f"effects of {len(pairs)} ablations, correlation {compared.correlation:.3f}"
        experiment.show(compared, Table(title, ("", "predicted", "measured"), shown))
        return
    report = measure(path, given.threads, given.max_features)
    rows = [
        [name, f"{value:,.1f}" if name.endswith("_s") else f"{value:,}"]
        for name, value in asdict(report).items()
    ]
    experiment.show(report, Table("an attribution graph", ("", "value"), rows))


if __name__ == "__main__":
    run(main)
