"""Interpretability beside TransformerLens: `python -m benchmarks.interp`.

A sweep of patches of resid_pre by layer and position, and captures of one layer, on the same weights,
dequantized for TransformerLens in float32, with as many threads, by turns. Cells are compared, too.
TransformerLens is no dependency: `pip install transformer-lens`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fidelity import judge_model
from benchmarks.harness import Experiment, Say, Table, model_path, run
from kukri import LLM
from kukri.errors import UnsupportedError
from kukri.interp import patching

CLEAN = "When Mary and John went to the new store, John gave a drink to"
CORRUPT = "When Mary and John went to the new store, Mary gave a drink to"
_PREFILL, _BATCH = 128, 8  # tokens of a text that is captured, and texts


@dataclass(frozen=True)
class InterpReport:
    """Medians of the rounds. Seconds are of wall time; `cpu` of the process."""

    model: str
    n_threads: int
    n_cells: int
    sweep_s: float
    sweep_cpu_s: float
    transformer_lens_sweep_s: float
    transformer_lens_sweep_cpu_s: float
    sweep_ratio: float
    sweep_cpu_ratio: float
    max_difference: float  # of cells, of a logit difference
    capture_tokens_per_s: float
    capture_with_logits_tokens_per_s: float
    prefill_tokens_per_s: float
    transformer_lens_capture_tokens_per_s: float


def _timed(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """(wall seconds, processor seconds, result)."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def transformer_lens_bridge(path: Path, n_threads: int) -> Any:
    """TransformerLens' TransformerBridge of a file's weights in float32."""
    try:
        bridges = import_module("transformer_lens.model_bridge")
    except ImportError as error:
        raise UnsupportedError(f"{error.name} is not installed: pip install transformer-lens") from None
    transformers, torch = import_module("transformers"), import_module("torch")
    tokenizers = import_module("tokenizers")
    hf = judge_model(transformers, torch, path)
    torch.set_num_threads(n_threads)
    with tempfile.TemporaryDirectory() as folder:
        hf.save_pretrained(folder)
        words = tokenizers.models.WordLevel({"<s>": 0}, unk_token="<s>")  # only ids are given
        special = {"bos_token": "<s>", "eos_token": "<s>", "pad_token": "<s>"}
        tokenizer = tokenizers.Tokenizer(words)
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
        return bridges.TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32)


def measure(path: Path, n_threads: int, n_layers: int, rounds: int, say: Say) -> InterpReport:
    """Measures both. `n_layers` limits the layers that are patched, from the first to the last evenly."""
    torch = import_module("torch")
    bridge = transformer_lens_bridge(path, n_threads)
    with LLM(path, n_threads=n_threads, max_context=1024) as llm, torch.no_grad():
        clean, corrupt = llm.tokenizer.encode(CLEAN), llm.tokenizer.encode(CORRUPT)
        answers = [llm.tokenizer.encode(" Mary")[0], llm.tokenizer.encode(" John")[0]]
        layers = (
            np.linspace(0, llm.config.n_layers - 1, min(n_layers, llm.config.n_layers)).round().astype(int)
        )
        n_cells = len(layers) * len(clean)
        theirs = torch.tensor([corrupt])
        _, their_clean = bridge.run_with_cache(torch.tensor([clean]))

        def metric(logits: Any) -> float:
            return float(logits[0, -1, answers[0]] - logits[0, -1, answers[1]])

        def sweep() -> Any:
            _, cache = llm.run_with_cache(
                clean, names=lambda n: n.endswith("hook_resid_pre"), return_type=None
            )
            return patching.get_act_patch_resid_pre(
                llm, corrupt, cache, metric, logits="last", layers=layers.tolist()
            )

        def their_sweep() -> Any:
            found = np.empty((len(layers), len(clean)), np.float32)
            for i, layer in enumerate(layers):
                name = f"blocks.{layer}.hook_resid_pre"
                for pos in range(len(clean)):

                    def patch(value: Any, hook: Any, pos: int = pos, name: str = name) -> Any:
                        value[:, pos] = their_clean[name][:, pos]
                        return value

                    found[i, pos] = metric(bridge.run_with_hooks(theirs, fwd_hooks=[(name, patch)]))
            return found

        texts = np.random.default_rng(0).integers(0, llm.config.n_vocab, (_BATCH, _PREFILL))
        name = f"blocks.{llm.config.n_layers // 2}.hook_resid_post"

        def capture(return_type: Any) -> Any:
            return llm.run_with_cache(texts, names=name, return_type=return_type)[1][name]

        def their_capture() -> Any:
            return bridge.run_with_cache(torch.from_numpy(texts), names_filter=name)[1][name]

        def prefill() -> Any:
            return llm.generate([[*map(int, text)] for text in texts], max_tokens=1, temperature=0)

        sweep(), capture(None), capture("logits"), prefill()  # programs are compiled, weights packed
        rows: list[list[float]] = []
        difference = 0.0
        for i in range(rounds):
            say(f"round {i + 1} of {rounds}")
            wall, cpu, ours = _timed(sweep)
            their_wall, their_cpu, expected = _timed(their_sweep)
            texts = np.random.default_rng(i + 1).integers(0, llm.config.n_vocab, (_BATCH, _PREFILL))
            speeds = [
                texts.size / _timed(call)[0]
                for call in (lambda: capture(None), lambda: capture("logits"), prefill, their_capture)
            ]
            difference = max(difference, float(np.abs(ours - expected).max()))
            rows.append([wall, cpu, their_wall, their_cpu, their_wall / wall, their_cpu / cpu, *speeds])
        wall, cpu, their_wall, their_cpu, ratio, cpu_ratio, *speeds = np.median(
            np.array(rows), axis=0
        ).tolist()
    return InterpReport(
        path.name, n_threads, n_cells, wall, cpu, their_wall, their_cpu, ratio, cpu_ratio, difference,
        speeds[0], speeds[1], speeds[2], speeds[3],
    )  # fmt: skip


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment("interp", "Compare patching sweeps and captures with TransformerLens.")
    experiment.count("-l", "--layers", 1000, "layers that are patched, all at most")
    experiment.count("-r", "--rounds", 3, "rounds")
    given = experiment.parse()
    path = model_path(given.model, 1024)
    report = measure(path, given.threads, given.layers, given.rounds, experiment.say)
    rows = [
        [
            "sweep, s", f"{report.sweep_s:.2f}", f"{report.transformer_lens_sweep_s:.2f}",
            f"{report.sweep_ratio:.1f}",
        ],
        [
            "sweep, processor s", f"{report.sweep_cpu_s:.2f}", f"{report.transformer_lens_sweep_cpu_s:.2f}",
            f"{report.sweep_cpu_ratio:.1f}",
        ],
        [
            "capture of one layer, tokens/s", f"{report.capture_tokens_per_s:.0f}",
            f"{report.transformer_lens_capture_tokens_per_s:.0f}",
            f"{report.capture_tokens_per_s / report.transformer_lens_capture_tokens_per_s:.1f}",
        ],
        ["capture and all logits, tokens/s", f"{report.capture_with_logits_tokens_per_s:.0f}", "", ""],
        ["prefill without a hook, tokens/s", f"{report.prefill_tokens_per_s:.0f}", "", ""],
    ]  # fmt: skip
    title = f"{report.model}, {report.n_cells} cells, largest difference {report.max_difference:.3f}"
    experiment.show(report, Table(title, ["", "kukri", "TransformerLens", "ratio"], rows))


if __name__ == "__main__":
    run(main)
