"""Loss and time of kukri's quantizers and llama.cpp's: `python -m benchmarks.quantizers`.

The model is written as F16 first; each then makes files of it by the same mix. The loss is the mean of
KL(F16 || file) over the tokens of a text, both computed by kukri. Times are medians of rounds in turns, the
reading of the source and the writing of the file included.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Experiment, Say, Table, run, silent
from benchmarks.llama_cpp import import_llama_cpp
from benchmarks.turns import in_turns
from kukri import LLM
from kukri.errors import FormatError
from kukri.evaluate.compare import Comparison, compare
from kukri.evaluate.text import STEP_TOKENS, STRIDE_TOKENS, WINDOW_TOKENS, read_text, text_windows
from kukri.formats import hub
from kukri.formats.convert import open_gguf, with_recipe, write
from kukri.quant.mixes import MIXES
from kukri.quant.recipes import Recipe, mix_named

Quantize = Callable[[Path, Path, str], None]  # source, target, mix
TYPES = "Q8_0,Q4_K_M,Q4_0"


@dataclass(frozen=True)
class Loss:
    """One quantizer's file by one mix. KL in nats, with its standard error."""

    mean_kl: float
    error: float
    p99: float
    same_top: float
    n_bytes: int
    seconds: float


@dataclass(frozen=True)
class Pair:
    """Both quantizers on one mix, and kukri's share of llama.cpp's loss and time."""

    kukri: Loss
    llama_cpp: Loss
    kl_ratio: float
    time_ratio: float


def measure(
    model: str | None, mixes: list[str], text: str, n_threads: int, rounds: int, say: Say
) -> dict[str, Pair]:
    """A Pair for each mix. Raises UnsupportedError without llama-cpp-python."""
    quantizers = {"kukri": _kukri, "llama_cpp": _llama_cpp(n_threads)}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        source = directory / "f16.gguf"
        say("writing F16")
        _kukri(hub.resolve(model), source, "F16")
        found = {}
        with _opened(source, n_threads) as original:
            windows = text_windows(original.tokenizer, text, WINDOW_TOKENS, STRIDE_TOKENS)
            for mix in mixes:
                files = {engine: directory / f"{engine}.gguf" for engine in quantizers}
                timed = [partial(_seconds, quantizers[name], source, files[name], mix) for name in files]
                say(f"{mix} in turns")
                rounds_s = in_turns(timed, rounds, silent)
                losses = []
                for path, seconds in zip(files.values(), zip(*rounds_s, strict=True), strict=True):
                    with _opened(path, n_threads) as llm:
                        distance = compare(original, llm, windows)
                    losses.append(_loss(distance, path, median(seconds)))
                ours, other = losses
                ratio = ours.mean_kl / other.mean_kl
                found[mix] = Pair(ours, other, ratio, ours.seconds / other.seconds)
    return found


def _seconds(quantize: Quantize, source: Path, target: Path, mix: str) -> float:
    started = time.perf_counter()
    quantize(source, target, mix)
    return time.perf_counter() - started


def _opened(path: Path, n_threads: int) -> LLM:
    return LLM(path, max_context=WINDOW_TOKENS, max_step_tokens=STEP_TOKENS, n_threads=n_threads)


def _loss(found: Comparison, path: Path, seconds: float) -> Loss:
    return Loss(
        found.kl_mean, found.kl_error, found.kl_p99, found.same_top, path.stat().st_size, round(seconds, 3)
    )


def _kukri(source: Path, target: Path, mix: str) -> None:
    with open_gguf(source) as conversion:
        write(with_recipe(conversion, Recipe(mix)), target, lambda step: None)


def _llama_cpp(n_threads: int) -> Quantize:
    """llama.cpp's quantizer, its log dropped."""
    api: Any = import_llama_cpp()
    silence = api.llama_log_callback(lambda level, text, data: None)  # must live as long as llama.cpp runs
    api.llama_backend_init()

    def quantize(source: Path, target: Path, mix: str) -> None:
        api.llama_log_set(silence, ctypes.c_void_p(0))
        params = api.llama_model_quantize_default_params()
        params.nthread, params.ftype = n_threads, MIXES[mix][1]
        if api.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params)):
            raise FormatError("llama.cpp cannot quantize this file", path=source)

    return quantize


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment("quantizers", "Compare loss and time of kukri's and llama.cpp's quantizers.")
    experiment.options.add_argument("--types", default=TYPES, help=f"mixes, comma-separated ({TYPES})")
    experiment.options.add_argument("--text", type=Path, help="a UTF-8 file (the opening of a novel)")
    experiment.count("-r", "--rounds", 3, "timings of each")
    given = experiment.parse()
    mixes = [mix_named(name.strip()) for name in given.types.split(",")]
    text = read_text(given.text)
    found = measure(given.model, mixes, text, given.threads, given.rounds, experiment.say)
    rows = [
        [
            mix,
            f"{pair.kukri.mean_kl:.6f}",
            f"{pair.llama_cpp.mean_kl:.6f} ± {pair.llama_cpp.error:.6f}",
            f"{pair.kl_ratio:.3f}",
            f"{pair.kukri.seconds:.2f}",
            f"{pair.llama_cpp.seconds:.2f}",
            f"{pair.time_ratio:.2f}",
        ]
        for mix, pair in found.items()
    ]
    header = ["type", "KL, kukri", "KL, llama.cpp", "ratio", "s, kukri", "s, llama.cpp", "ratio"]
    report = {mix: asdict(pair) for mix, pair in found.items()}
    experiment.show(report, Table(f"against F16, {given.threads} threads", header, rows))


if __name__ == "__main__":
    run(main)
