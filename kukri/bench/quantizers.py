"""`python -m kukri.bench.quantizers`: kukri's quantizers against llama.cpp's, loss and time in one run.

The model is written as F16 first; each then makes files of it by the same mix. The loss is the mean of
KL(F16 || file) over the tokens of a text, both computed by kukri. Times are medians of rounds in turns, the
reading of the source and the writing of the file included.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kukri import LLM
from kukri.bench.command import parser, positive, print_table, run, say
from kukri.bench.llama_cpp import import_llama_cpp
from kukri.errors import FormatError
from kukri.evaluate.compare import Comparison, compare
from kukri.evaluate.text import STEP_TOKENS, STRIDE_TOKENS, WINDOW_TOKENS, read_text, text_windows
from kukri.formats import hub
from kukri.formats.convert import open_gguf, with_recipe, write
from kukri.kernels.cpu.features import usable_cores
from kukri.quant.mixes import MIXES
from kukri.quant.recipes import Recipe, mix_named

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
    model: str | None, mixes: list[str], text: str, n_threads: int, rounds: int, report: Callable[[str], None]
) -> dict[str, Pair]:
    """A Pair for each mix. Raises UnsupportedError without llama-cpp-python."""
    theirs = _llama_cpp(n_threads)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        source = directory / "f16.gguf"
        report("writing F16")
        _kukri(hub.resolve(model), source, "F16")
        found = {}
        with _opened(source, n_threads) as original:
            windows = text_windows(original.tokenizer, text, WINDOW_TOKENS, STRIDE_TOKENS)
            for mix in mixes:
                report(mix)
                files = {engine: directory / f"{engine}.gguf" for engine in ("kukri", "llama_cpp")}
                makers = {"kukri": _kukri, "llama_cpp": theirs}
                _kukri(source, files["kukri"], mix)  # compiled before it is timed
                seconds: dict[str, list[float]] = {engine: [] for engine in makers}
                for _ in range(rounds):
                    for engine, maker in makers.items():
                        started = time.perf_counter()
                        maker(source, files[engine], mix)
                        seconds[engine].append(time.perf_counter() - started)
                losses = []
                for engine, path in files.items():
                    with _opened(path, n_threads) as llm:
                        distance = compare(original, llm, windows)
                    losses.append(_loss(distance, path, median(seconds[engine])))
                ours, other = losses
                ratio = ours.mean_kl / other.mean_kl
                found[mix] = Pair(ours, other, ratio, ours.seconds / other.seconds)
    return found


def _opened(path: Path, n_threads: int) -> LLM:
    return LLM(path, max_context=WINDOW_TOKENS, max_step_tokens=STEP_TOKENS, n_threads=n_threads)


def _loss(found: Comparison, path: Path, seconds: float) -> Loss:
    return Loss(
        found.kl_mean, found.kl_error, found.kl_p99, found.same_top, path.stat().st_size, round(seconds, 3)
    )


def write_as(source: Path, target: Path, recipe: Recipe) -> None:
    """Writes a GGUF file's weights in other types, by kukri."""
    with open_gguf(source) as conversion:
        write(with_recipe(conversion, recipe), target, lambda step: None)


def _kukri(source: Path, target: Path, mix: str) -> None:
    write_as(source, target, Recipe(mix))


def _llama_cpp(n_threads: int) -> Callable[[Path, Path, str], None]:
    """llama.cpp's quantizer. Its log is thrown away."""
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
    """The program."""
    options = parser("quantizers", "loss and time of kukri's quantizers and llama.cpp's, file by file")
    options.add_argument("--types", default=TYPES, help=f"mixes, with commas ({TYPES})")
    options.add_argument("--text", type=Path, help="a UTF-8 file to measure on (the opening of a novel)")
    options.add_argument("-r", "--rounds", type=positive, default=3, help="times that each is timed (3)")
    given = options.parse_args()
    mixes = [mix_named(name.strip()) for name in given.types.split(",")]
    threads = given.threads or usable_cores()
    found = measure(
        given.model, mixes, read_text(given.text), threads, given.rounds, lambda t: say(t, silent=given.json)
    )
    if not given.json:
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
        print_table(f"against F16, {threads} threads", header, rows)
    print(json.dumps({mix: asdict(pair) for mix, pair in found.items()}))


if __name__ == "__main__":
    run(main)
