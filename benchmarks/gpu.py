"""Correctness and speed on a GPU in one command: `python -m benchmarks.gpu`.

First all checks of `kukri doctor --gpu`; no speed is shown if one fails. Then prefill and decode for 1, 16
and 256 streams, of the default model and with --with-3b of a random one of SmolLM3-3B's shape, as shares of
the bandwidth and of the dense products that the device is measured to have. llama.cpp is measured next to it
on the same files if llama-cpp-python was built for the GPU, and vLLM on the model that --vllm names.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Protocol

from benchmarks.harness import Experiment, Say, Table, run
from benchmarks.llama_cpp import LlamaCpp
from benchmarks.make_model import SHAPES, make_model
from benchmarks.vllm import Vllm
from kukri.bench.card import model_card
from kukri.bench.device_checks import Check, check_device
from kukri.bench.offline import Kukri
from kukri.errors import KukriError, UnsupportedError
from kukri.formats import hub
from kukri.kernels import choose_backend
from kukri.kernels.cpu.compile.features import usable_cores

N_PREFILL, N_PROMPT, N_DECODE = 512, 16, 128  # tokens


@dataclass(frozen=True)
class Speed:
    """One measurement; shares are of what the device was measured to do, None for other engines."""

    engine: str
    model: str
    n_streams: int
    prefill_tokens_per_s: float  # one prompt at a time
    decode_tokens_per_s: float  # all streams together
    bandwidth_share: float | None = None  # as weights are read in decoding
    flops_share: float | None = None  # by the products in prefill


@dataclass(frozen=True)
class GpuReport:
    """The report of `python -m benchmarks.gpu`."""

    device: str
    torch: str
    read_gb_per_s: float
    dense_tflops: float
    n_checks: int
    speeds: list[Speed]


def measure(
    path: Path, device: str, n_streams: int, n_rounds: int, read_gb_per_s: float, tflops: float
) -> Speed:
    """Prefill and decode of one model at one number of streams, medians of the rounds."""
    card = model_card(path)
    context = max(N_PREFILL, N_PROMPT + N_DECODE) + 1
    with closing(Kukri(path, None, context, device=device, max_requests=n_streams)) as kukri:
        speed = speed_of(kukri, card.name, n_streams, n_rounds)
    n_steps_per_s = speed.decode_tokens_per_s / n_streams
    return replace(
        speed,
        bandwidth_share=n_steps_per_s * card.bytes_per_token / (read_gb_per_s * 1e9),
        flops_share=2 * card.n_parameters * speed.prefill_tokens_per_s / (tflops * 1e12),
    )


class Timed(Protocol):
    """An engine with a model: seconds of a prompt, and of decoding several streams."""

    name: str

    def prefill_s(self, n_tokens: int) -> float:
        """Seconds from a prompt of random ids to its first token."""

    def batch_decode_s(self, n_streams: int, n_prompt: int, n_tokens: int) -> float:
        """Seconds in which all streams generate all but their first of `n_tokens`."""

    def close(self) -> None:
        """Gives the model back."""


def speed_of(engine: Timed, model: str, n_streams: int, n_rounds: int) -> Speed:
    """Medians of the rounds, after one that warms up: it compiles, and captures graphs."""
    engine.prefill_s(N_PREFILL)
    engine.batch_decode_s(n_streams, N_PROMPT, N_DECODE)
    prefill_s = median(engine.prefill_s(N_PREFILL) for _ in range(n_rounds))
    decode_s = median(engine.batch_decode_s(n_streams, N_PROMPT, N_DECODE) for _ in range(n_rounds))
    return Speed(engine.name, model, n_streams, N_PREFILL / prefill_s, (N_DECODE - 1) * n_streams / decode_s)


def peers(path: Path, vllm_model: str | None, n_streams: int, n_rounds: int, say: Say) -> list[Speed]:
    """The speeds of llama.cpp with the file, and of vLLM with its model; says why one is left out."""
    context = max(N_PREFILL, N_PROMPT + N_DECODE) + 1
    makers: list[tuple[str, Callable[[], Timed]]] = [
        (path.stem, lambda: LlamaCpp(path, usable_cores(), context, n_streams=n_streams, on_gpu=True))
    ]
    if vllm_model is not None:
        makers.append((vllm_model, lambda: Vllm(vllm_model, context, n_streams)))
    speeds = []
    for model, make in makers:
        try:
            with closing(make()) as engine:
                speeds.append(speed_of(engine, model, n_streams, n_rounds))
        except UnsupportedError as error:
            say(f"left out: {error}")
    return speeds


def dense_tflops(device_name: str, size: int = 8192) -> float:
    """10^12 operations per second of square products in the device's half type: the best of ten."""
    import torch

    from kukri.kernels.pytorch import devices

    device = devices.find_device(device_name)
    size = size if device.type != "cpu" else 1024
    a = torch.randn(size, size, device=device).to(devices.matrix_dtype(device))
    best_s = float("inf")
    for _ in range(11):
        devices.synchronize(device)
        started = perf_counter()
        torch.mm(a, a)
        devices.synchronize(device)
        best_s = min(best_s, perf_counter() - started)
    return 2 * size**3 / best_s / 1e12


def check(device: str, say: Say) -> int:
    """Runs all checks and gives their number. Raises KukriError if one fails."""
    found: list[Check] = []

    def show(one: Check) -> None:
        found.append(one)
        say(f"{'ok' if one.passed else 'FAILED'} {one.name} ({one.error:.2g})")

    if not check_device(device, show):
        raise KukriError("a check failed: no speed is shown of kernels that are wrong")
    return len(found)


def main() -> None:
    """Parses options, checks, measures, reports."""
    from kukri.kernels.pytorch import devices

    experiment = Experiment("gpu", "Correctness and speed of kukri on a GPU.")
    experiment.options.add_argument(
        "--device", default="auto", help="cuda, cuda:1, mps … (the first there is)"
    )
    experiment.options.add_argument("--with-3b", action="store_true", help="a random model of 3B, 2 GB, too")
    experiment.options.add_argument("--vllm", metavar="MODEL", help="measure vLLM with this model, too")
    experiment.options.add_argument("--streams", default="1,16,256", help="numbers of streams (1,16,256)")
    experiment.count("-r", "--rounds", 3, "rounds of each measurement")
    given = experiment.parse()
    _, name = choose_backend("gpu", given.device)
    device = str(name)
    n_checks = check(device, experiment.say)
    found = devices.find_device(device)
    read, tflops = devices.read_gb_per_s(found), dense_tflops(device)
    experiment.say(
        f"{devices.device_name(found)}: reads {read:.0f} GB/s, {tflops:.0f} dense TFLOP/s, measured"
    )
    speeds = []
    with tempfile.TemporaryDirectory() as folder:
        paths = [hub.resolve(given.model)]
        if given.with_3b:
            paths.append(Path(folder) / "3b.gguf")
            experiment.say("writing a random model of SmolLM3-3B's shape")
            make_model(paths[-1], SHAPES["smollm3-3b"], "Q4_K_M", "random 3B")
        for path in paths:
            for n_streams in map(int, given.streams.split(",")):
                experiment.say(f"measuring {path.name}, {n_streams} streams")
                speeds.append(measure(path, device, n_streams, given.rounds, read, tflops))
                vllm_model = given.vllm if path == paths[0] else None
                speeds += peers(path, vllm_model, n_streams, given.rounds, experiment.say)
    report = GpuReport(devices.device_name(found), devices.version(), read, tflops, n_checks, speeds)
    header = [
        "engine",
        "model",
        "streams",
        "prefill, tokens/s",
        "decode, tokens/s",
        "of bandwidth",
        "of dense FLOPs",
    ]
    rows = [
        [s.engine, s.model, str(s.n_streams), f"{s.prefill_tokens_per_s:,.0f}",
         f"{s.decode_tokens_per_s:,.0f}", _percent(s.bandwidth_share), _percent(s.flops_share)]
        for s in speeds
    ]  # fmt: skip
    experiment.show(asdict(report), Table(report.device, header, rows))


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


if __name__ == "__main__":
    run(main)
