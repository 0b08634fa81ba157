"""Correctness and speed on a GPU in one command: `python -m benchmarks.gpu`.

First all checks of `kukri doctor --gpu`; no speed is shown if one fails. Then prefill and decode for 1, 16
and 256 streams, of the default model and with --with-3b of a random one of SmolLM3-3B's shape, as shares of
the bandwidth and of the dense products that the device is measured to have.
"""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks.harness import Experiment, Say, Table, run
from benchmarks.make_model import SHAPES, make_model
from kukri.bench.card import model_card
from kukri.bench.device_checks import Check, check_device
from kukri.bench.offline import Kukri
from kukri.errors import KukriError
from kukri.formats import hub
from kukri.kernels import choose_backend

N_PREFILL, N_PROMPT, N_DECODE = 512, 16, 128  # tokens


@dataclass(frozen=True)
class Speed:
    """One measurement; shares are of what the device was measured to do."""

    model: str
    n_streams: int
    prefill_tokens_per_s: float  # of one prompt at a time
    decode_tokens_per_s: float  # of all streams together
    bandwidth_share: float  # of weights read in decoding
    flops_share: float  # of products in prefill


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
        kukri.prefill_s(N_PREFILL)  # compiles, and captures graphs
        kukri.batch_decode_s(n_streams, N_PROMPT, N_DECODE)
        prefill_s = median(kukri.prefill_s(N_PREFILL) for _ in range(n_rounds))
        decode_s = median(kukri.batch_decode_s(n_streams, N_PROMPT, N_DECODE) for _ in range(n_rounds))
    n_steps_per_s = (N_DECODE - 1) / decode_s
    prefill = N_PREFILL / prefill_s
    return Speed(
        card.name,
        n_streams,
        prefill,
        n_steps_per_s * n_streams,
        n_steps_per_s * card.bytes_per_token / (read_gb_per_s * 1e9),
        2 * card.n_parameters * prefill / (tflops * 1e12),
    )


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
    report = GpuReport(devices.device_name(found), devices.version(), read, tflops, n_checks, speeds)
    header = ["model", "streams", "prefill, tokens/s", "decode, tokens/s", "of bandwidth", "of dense FLOPs"]
    rows = [
        [s.model, str(s.n_streams), f"{s.prefill_tokens_per_s:,.0f}", f"{s.decode_tokens_per_s:,.0f}",
         f"{s.bandwidth_share:.0%}", f"{s.flops_share:.0%}"]
        for s in speeds
    ]  # fmt: skip
    experiment.show(asdict(report), Table(report.device, header, rows))


if __name__ == "__main__":
    run(main)
