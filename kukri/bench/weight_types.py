"""`python -m kukri.bench.weight_types`: how fast each weight type is multiplied, in decoding and in prefill.

One matrix per type, larger than the caches: GB/s of weights read for one token, Gop/s for 512 (a
multiplication and an addition are two). Rounds go over all types in turn, so that what the machine's other
users do meets every type alike; medians are shown, and each type's share of Q4_1's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from kukri.bench.command import parser, positive, print_table, run, say
from kukri.kernels.cpu import CpuBackend
from kukri.kernels.cpu.features import cpu_target
from kukri.kernels.cpu.layouts import LAYOUTS
from kukri.kernels.types import ForwardBatch, PagedKV, StepLimits, Weight
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


def step_of(n_tokens: int) -> ForwardBatch:
    """A step of one sequence that asks for no logits beyond its first row."""
    ids = np.arange(n_tokens, dtype=np.int32)
    pages = np.arange(-(-n_tokens // 16), dtype=np.int32)[None]
    return ForwardBatch(ids, ids, ids, np.array([0, n_tokens], np.int32), ids[-1:] + 1, pages, ids[:1])


def timer_of(backend: CpuBackend, weight: Weight) -> Callable[[int], float]:
    """A function that gives the seconds of one product with `n` tokens."""
    inputs = np.random.default_rng(1).standard_normal((N_PROMPT, N_IN)).astype(np.float32)
    rows = Weight(inputs.view(np.uint8), QUANT_TYPES["F32"], inputs.shape)

    def program(ops: Any, batch: Any) -> Any:
        y = ops.linear(ops.embed(rows, batch), (weight,))
        return ops.logit_rows(ops.split(y, (16, weight.shape[0] - 16))[0], batch)

    compiled = backend.compile(program, PagedKV(1, 32, 1, 16), StepLimits(N_PROMPT, 1, 1, 32), {})
    steps = {n: step_of(n) for n in (1, N_PROMPT)}

    def seconds(n: int) -> float:
        started = time.perf_counter()
        compiled(steps[n])
        return time.perf_counter() - started

    return seconds


def measure(n_threads: int | None, rounds: int, report: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """GB/s in decoding and Gop/s in prefill of every weight type, and shares of Q4_1's."""
    backend = CpuBackend(n_threads)
    timers, n_weights = {}, {}
    for name in LAYOUTS:
        report(f"preparing {name}")
        weight = random_weight(name)
        timers[name], n_weights[name] = timer_of(backend, weight), weight.shape[0] * N_IN
        timers[name](N_PROMPT)
    decode: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    prefill: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    for index in range(rounds):
        report(f"round {index + 1} of {rounds}")
        for name, timer in timers.items():
            n_bytes = n_weights[name] * QUANT_TYPES[name].bits_per_weight / 8
            decode[name].append(n_bytes / median(timer(1) for _ in range(5)) / 1e9)
            prefill[name].append(2 * n_weights[name] * N_PROMPT / timer(N_PROMPT) / 1e9)
    backend.close()
    return {
        name: {
            "decode_gb_per_s": median(decode[name]),
            "decode_share": _share(decode[name], decode["Q4_1"]),
            "prefill_gop_per_s": median(prefill[name]),
            "prefill_share": _share(prefill[name], prefill["Q4_1"]),
        }
        for name in LAYOUTS
    }


def _share(ours: list[float], baseline: list[float]) -> float:
    return median(a / b for a, b in zip(ours, baseline, strict=True))


def main() -> None:
    """The program."""
    options = parser("weight_types", __doc__.split(": ", 1)[1].split(".", 1)[0], with_model=False)
    options.add_argument("-r", "--rounds", type=positive, default=5, help="rounds over all types (5)")
    given = options.parse_args()
    found = measure(given.threads, given.rounds, lambda text: say(text, silent=given.json))
    if not given.json:
        rows = [
            [
                name,
                f"{speed['decode_gb_per_s']:.1f}",
                f"{speed['decode_share']:.2f}",
                f"{speed['prefill_gop_per_s']:.0f}",
                f"{speed['prefill_share']:.2f}",
            ]
            for name, speed in found.items()
        ]
        target = cpu_target()
        title = f"{target.name}, int8 dot by {target.lowering}"
        print_table(title, ["type", "decode GB/s", "of Q4_1", "prefill Gop/s", "of Q4_1"], rows)
    print(json.dumps(found))


if __name__ == "__main__":
    run(main)
