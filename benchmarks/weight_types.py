"""Speed of each weight type's products, in decoding and prefill: `python -m benchmarks.weight_types`.

One matrix per type, larger than the caches: GB/s of weights read for one token, Gop/s for 512 (a
multiplication and an addition are two). Rounds take all types in turn; medians are shown, and each type's
share of Q4_1's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness import Experiment, Say, Table, run
from kukri.bench.turns import in_turns
from kukri.kernels.cpu import CpuBackend
from kukri.kernels.cpu.features import cpu_target
from kukri.kernels.cpu.layouts import LAYOUTS
from kukri.kernels.paged_kv import PagedKV
from kukri.kernels.types import ForwardBatch, KVLayer, StepLimits, Weight
from kukri.quant.types import QUANT_TYPES

N_IN = 2048
MATRIX_BYTES = 128 << 20  # in every type: past any cache
N_PROMPT = 512


def random_weight(type_name: str) -> Weight:
    """A matrix of MATRIX_BYTES: random quants with scales of 0.01, or float zeros."""
    type, layout = QUANT_TYPES[type_name], LAYOUTS[type_name]
    n_out = MATRIX_BYTES // type.row_bytes(N_IN) // 16 * 16
    n_blocks = n_out * N_IN // type.block_size
    blocks = np.random.default_rng(0).integers(0, 256, (n_blocks, type.block_bytes), np.uint8)
    if type.block_size == 1:
        blocks[:] = 0
    else:
        scale = np.full(layout.n_halves, 0.01, np.float16).view(np.uint8)
        blocks[:, layout.half : layout.half + 2 * layout.n_halves] = scale
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
    for name in LAYOUTS:
        say(f"preparing {name}")
        weight = random_weight(name)
        speeds[name] = partial(
            _speeds, product_timer(backend, weight), weight.shape[0] * N_IN, QUANT_TYPES[name].bits_per_weight
        )
    found = in_turns(list(speeds.values()), rounds, say)
    backend.close()
    by_type = dict(zip(LAYOUTS, (np.array(one) for one in zip(*found, strict=True)), strict=True))
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


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment("weight_types", "Measure products of each weight type.", with_model=False)
    experiment.count("-r", "--rounds", 5, "rounds over all types")
    given = experiment.parse()
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
