"""Speed of each weight type's products, in decoding and prefill: `python -m benchmarks.weight_types`.

One matrix per type, larger than the caches: GB/s of weights read for one token, Gop/s for 512 (a
multiplication and an addition are two). Rounds take all types in turn; medians are shown, and each type's
share of Q4_1's.

With `--in-cache` the matrix fits the L2 cache, so that instructions are measured and not memory: one thread,
1 to 16 tokens, 10^9 weights a second, and shares of Q4_0's. Each time is the least of many, which neighbours
on the machine disturb little.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness import Experiment, Say, Table, run
from benchmarks.turns import in_turns
from kukri.kernels.cache import KVLayer
from kukri.kernels.cpu import CpuBackend
from kukri.kernels.cpu.compile.features import cpu_target
from kukri.kernels.cpu.compile.jit import pack_record
from kukri.kernels.cpu.pack.layouts import LAYOUTS, linear_kernel, panel_bytes
from kukri.kernels.cpu.pack.weights import pack
from kukri.kernels.cpu.run.memory import address_of, aligned_zeros
from kukri.kernels.paged_kv import PagedKV
from kukri.kernels.step import ForwardBatch, StepLimits
from kukri.kernels.weight_handles import Weight
from kukri.quant.types import FLOATS, PACKED, QUANT_TYPES, TILES

TYPES = {type.name: type for type in (*FLOATS, *PACKED, *TILES)}
MEASURED = tuple(name for name in LAYOUTS if name in TYPES)  # a file has them, and kernels their tiles
N_IN = 2048
MATRIX_BYTES = 128 << 20  # in every type: past any cache
N_PROMPT = 512
IN_CACHE_BYTES = 256 << 10  # in every type: half of the smallest common L2
IN_CACHE_TOKENS = (1, 2, 4, 8, 16)
REPEATS = 20  # products in one run of the executor


def random_weight(type_name: str, n_bytes: int = MATRIX_BYTES) -> Weight:
    """A matrix of n_bytes: random quants with scales of 0.01, or float zeros."""
    type, layout = TYPES[type_name], LAYOUTS[type_name]
    n_out = n_bytes // type.row_bytes(N_IN) // 16 * 16
    n_blocks = n_out * N_IN // type.block_size
    blocks = np.random.default_rng(0).integers(0, 256, (n_blocks, type.block_bytes), np.uint8)
    if type.block_size == 1:
        blocks[:] = 0
    else:
        scale = np.full(layout.n_halves, 0.01, np.float16).view(np.uint8)
        blocks[:, layout.half : layout.half + 2 * layout.n_halves] = scale
        if layout.exponent >= 0:
            blocks[:, layout.exponent] = 121  # 2^-7
    return Weight(blocks.reshape(n_out, -1), type, (n_out, N_IN), type_name)


def one_sequence(n_tokens: int) -> ForwardBatch:
    """A step of one sequence, with the logits of its first row alone."""
    ids = np.arange(n_tokens, dtype=np.int32)
    pages = np.arange(-(-n_tokens // 16), dtype=np.int32)[None]
    return ForwardBatch(ids, ids, ids, np.array([0, n_tokens], np.int32), ids[-1:] + 1, pages, ids[:1])


def product_timer(backend: CpuBackend, weight: Weight) -> Callable[[int], float]:
    """A function that returns the seconds of one product with `n` tokens."""
    inputs = np.random.default_rng(1).standard_normal((N_PROMPT, N_IN)).astype(np.float32)
    rows = Weight(inputs.view(np.uint8), QUANT_TYPES["F32"], inputs.shape)

    def program(ops: Any, batch: Any) -> Any:
        y = ops.linear(ops.embed(rows, batch), (weight,))
        return ops.logit_rows(ops.split(y, (16, weight.shape[0] - 16))[0], batch)

    compiled = backend.compile(program, PagedKV([KVLayer(1, 16)], 32), StepLimits(N_PROMPT, 1, 1, 32))
    steps = {n: one_sequence(n) for n in (1, N_PROMPT)}

    def seconds(n: int) -> float:
        started = time.perf_counter()
        compiled(steps[n])
        return time.perf_counter() - started

    return seconds


def measure(n_threads: int, rounds: int, say: Say) -> dict[str, dict[str, float]]:
    """GB/s in decoding and Gop/s in prefill of every weight type, and shares of Q4_1's."""
    backend = CpuBackend(n_threads)
    speeds: dict[str, Callable[[], tuple[float, float]]] = {}
    for name in MEASURED:
        say(f"preparing {name}")
        weight = random_weight(name)
        speeds[name] = partial(
            _speeds, product_timer(backend, weight), weight.shape[0] * N_IN, TYPES[name].bits_per_weight
        )
    found = in_turns(list(speeds.values()), rounds, say)
    backend.close()
    by_type = dict(zip(MEASURED, (np.array(one) for one in zip(*found, strict=True)), strict=True))
    return {
        name: {
            "decode_gb_per_s": median(rates[:, 0]),
            "decode_share": median(rates[:, 0] / by_type["Q4_1"][:, 0]),
            "prefill_gop_per_s": median(rates[:, 1]),
            "prefill_share": median(rates[:, 1] / by_type["Q4_1"][:, 1]),
        }
        for name, rates in by_type.items()
    }


def _speeds(seconds: Callable[[int], float], n_weights: int, bits: float) -> tuple[float, float]:
    """GB/s of one token, the median of five, and Gop/s of a prompt."""
    decode_s = median(seconds(1) for _ in range(5))
    return n_weights * bits / 8 / decode_s / 1e9, 2 * n_weights * N_PROMPT / seconds(N_PROMPT) / 1e9


def measure_in_cache(rounds: int, say: Say) -> dict[str, dict[str, float]]:
    """10^9 weights a second of every type, multiplied with each of IN_CACHE_TOKENS, on one thread."""
    backend = CpuBackend(1)
    measures: list[Callable[[], list[float]]] = []
    for name in MEASURED:
        say(f"preparing {name}")
        measures.append(partial(_in_cache_times, _in_cache_runs(backend, name)))
    found = in_turns(measures, rounds, say)
    rates = {}
    for name, times in zip(MEASURED, zip(*found, strict=True), strict=True):
        n_weights = random_weight(name, IN_CACHE_BYTES).shape[0] * N_IN
        least = np.min(times, axis=0)
        rates[name] = {
            str(n): n_weights / seconds / 1e9 for n, seconds in zip(IN_CACHE_TOKENS, least, strict=True)
        }
    backend.close()
    return rates


def _in_cache_times(runs: list[Callable[[], None]]) -> list[float]:
    """The seconds of one product in each of `runs`, the least of 20."""
    times = []
    for run_products in runs:
        each = []
        for _ in range(20):
            started = time.perf_counter()
            run_products()
            each.append(time.perf_counter() - started)
        times.append(min(each) / REPEATS)
    return times


def _in_cache_runs(backend: CpuBackend, type_name: str) -> list[Callable[[], None]]:
    """For each of IN_CACHE_TOKENS a function that multiplies REPEATS times."""
    packed = pack([random_weight(type_name, IN_CACHE_BYTES)], backend.pool)
    n_most = max(IN_CACHE_TOKENS)
    x = np.random.default_rng(1).standard_normal((n_most, N_IN)).astype(np.float32)
    y = aligned_zeros(4 * n_most * 16 * packed.n_row_tiles)
    kernel = backend.kernels[linear_kernel(type_name, packed.panel)]

    fill = "panel_f32" if packed.panel == "f32" else "panel_q8"

    def run_for(n_tokens: int) -> Callable[[], None]:
        rows = np.array([n_tokens], np.int64)
        panels = aligned_zeros(-(-n_tokens // 8) * panel_bytes(packed.panel, N_IN))
        backend.pool.run_kernel(
            fill, rows=address_of(rows), x=address_of(x), x_stride=4 * N_IN, n=N_IN, panels=address_of(panels)
        )
        product = pack_record(
            kernel,
            {
                "rows": address_of(rows),
                "w": address_of(packed.tiles),
                "x": address_of(panels),
                "n_row_tiles": packed.n_row_tiles,
                "n_blocks": packed.n_blocks,
                "y": address_of(y),
                "y_stride": 4 * 16 * packed.n_row_tiles,
                "bias": 0,
                "residual": 0,
                "residual_stride": 0,
            },
        )
        ops = np.array([[kernel.address, ctypes.addressof(product), 0, 0, 0]] * REPEATS, np.int64)
        keep = (rows, product, packed, y, panels)  # the addresses above are theirs

        def run_products(_keep: Any = keep) -> None:
            backend.pool.run(address_of(ops), REPEATS)

        return run_products

    return [run_for(n) for n in IN_CACHE_TOKENS]


def _show_in_cache(experiment: Experiment, rounds: int) -> None:
    found = measure_in_cache(rounds, experiment.say)
    rows = [
        [name, *(f"{rate:.1f} ({rate / found['Q4_0'][n]:.2f})" for n, rate in rates.items())]
        for name, rates in found.items()
    ]
    target = cpu_target()
    title = f"10^9 weights/s on one thread (of Q4_0's), in cache; {target.name}, {target.lowering}"
    experiment.show(found, Table(title, ["tokens", *map(str, IN_CACHE_TOKENS)], rows))


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment("weight_types", "Measure products of each weight type.", with_model=False)
    experiment.count("-r", "--rounds", 5, "rounds over all types")
    experiment.options.add_argument(
        "--in-cache", action="store_true", help="a matrix that fits the L2 cache, on one thread"
    )
    given = experiment.parse()
    if given.in_cache:
        _show_in_cache(experiment, given.rounds)
        return
    found = measure(given.threads, given.rounds, experiment.say)
    formats = ("{:.1f}", "{:.2f}", "{:.0f}", "{:.2f}")
    rows = [
        [name, *(form.format(value) for form, value in zip(formats, speed.values(), strict=True))]
        for name, speed in found.items()
    ]
    target = cpu_target()
    header = ["type", "decode GB/s", "of Q4_1", "prefill Gop/s", "of Q4_1"]
    experiment.show(found, Table(f"{target.name}, int8 dot by {target.lowering}", header, rows))


if __name__ == "__main__":
    run(main)
