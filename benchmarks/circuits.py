"""An attribution graph on real weights with random TopK transcoders: `python -m benchmarks.circuits`.

Says how long the graph of a prompt takes, and what memory. The features mean nothing; their number is what
trained transcoders have (16,384 a layer, 32 of them active for each token).
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness import Experiment, Table, model_path, run
from kukri import LLM
from kukri.formats.huggingface.safetensors import safetensors_bytes
from kukri.interp.circuits import attribute
from kukri.interp.transcoders import Transcoders

_TEXT = "The history of the city begins long before the first bridge was built across the river, where "
_N_TOKENS, _N_FEATURES, _N_ACTIVE = 64, 16_384, 32


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
    given = experiment.parse()
    path = model_path(given.model, _N_TOKENS)
    report = measure(path, given.threads, given.max_features)
    rows = [
        [name, f"{value:,.1f}" if name.endswith("_s") else f"{value:,}"]
        for name, value in asdict(report).items()
    ]
    experiment.show(report, Table("an attribution graph", ("", "value"), rows))


if __name__ == "__main__":
    run(main)
