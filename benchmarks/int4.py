"""Error and speed of int4 weights with int8 activations, three ways: `python -m benchmarks.int4`.

The same Q4_0 quants (symmetric, 32 to a scale) are multiplied by kukri with activations of a scale for each
32, by kukri with one scale and zero point a token (`kukri.quant.per_token`), and by PyTorch's dynamic 4-bit
matmul, if it is installed. Errors are root mean squares over that of the product in float64: against the
float32 weights that were quantized ("error"), and against the quantized ones ("rounding"), for normal
activations and ("outliers") when one column in a hundred is 20 times as large, as language models have them.
Rounds take all ways in turn; medians are shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Experiment, Table, run, silent
from benchmarks.turns import in_turns
from kukri.errors import ConfigError
from kukri.kernels.arrays import FloatArray
from kukri.kernels.cache import KVLayer
from kukri.kernels.cpu import CpuBackend
from kukri.kernels.paged_kv import PagedKV
from kukri.kernels.quantize import quantize
from kukri.kernels.step import ForwardBatch, StepLimits
from kukri.kernels.weight_handles import Weight
from kukri.quant.blocks import ByteArray, dequantize
from kukri.quant.types import QUANT_TYPES

# (out, in) of SmolLM2-135M's and SmolLM3-3B's matrices
SHAPES = ((576, 576), (1536, 576), (576, 1536), (2048, 2048), (11008, 2048), (2048, 11008))
N_TOKENS = (1, 128)
Product = Callable[[], FloatArray]


@dataclass(frozen=True)
class Measured:
    """One way to multiply at one shape. Errors are shares of the product's root mean square."""

    way: str
    n_out: int
    n_in: int
    n_tokens: int
    error: float  # against float32 weights
    activation_error: float  # against the quantized weights
    outlier_error: float  # the same if some columns are large
    ms: float


def kukri_product(backend: CpuBackend, weight: Weight, x: FloatArray) -> Product:
    """A function that returns x times the weight transposed, [T, out], on the CPU backend."""
    rows = Weight(x.view(np.uint8), QUANT_TYPES["F32"], (x.shape[0], x.shape[1]))

    def program(ops: Any, batch: Any) -> Any:
        return ops.logit_rows(ops.linear(ops.embed(rows, batch), (weight,)), batch)

    n = len(x)
    compiled = backend.compile(program, PagedKV([KVLayer(1, 16)], 32), StepLimits(n, 1, n, 32))
    ids = np.arange(n, dtype=np.int32)
    pages = np.arange(-(-n // 16), dtype=np.int32)[None]
    step = ForwardBatch(ids, ids, ids, np.array([0, n], np.int32), ids[-1:] + 1, pages, ids)
    return lambda: compiled(step).numpy()


def torch_product(weight: Weight, x: FloatArray, n_threads: int) -> Product:
    """The same by PyTorch's dynamic 4-bit matmul. Raises PyTorch's own errors if it has none."""
    import torch

    torch.set_num_threads(n_threads)
    n_out, n_in = weight.shape
    quants, scales = q4_0_quants(weight.data)
    packed = torch.ops.aten._dyn_quant_pack_4bit_weight(
        torch.from_numpy(quants[:, 1::2] << 4 | quants[:, ::2]),
        torch.from_numpy(scales.reshape(-1)),
        None,
        32,
        n_in,
        n_out,
    )
    inputs = torch.from_numpy(x)

    def product() -> FloatArray:
        made: FloatArray = torch.ops.aten._dyn_quant_matmul_4bit(inputs, packed, 32, n_in, n_out).numpy()
        return made

    product()
    return product


def q4_0_quants(rows: ByteArray) -> tuple[ByteArray, FloatArray]:
    """Q4_0 uint8 [out, row_bytes] -> quants from 0 to 15 [out, in], scales float32 [out, in / 32]."""
    blocks = rows.reshape(len(rows), -1, 18)
    quants = np.concatenate([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], axis=-1)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)
    return quants.reshape(len(rows), -1), scales


def relative_error(got: FloatArray, want: npt.NDArray[np.float64]) -> float:
    """Root mean square of the difference over that of `want`."""
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


def measure_shape(
    backend: CpuBackend, n_out: int, n_in: int, n_tokens: int, rounds: int, *, with_torch: bool
) -> list[Measured]:
    """Every way at one shape."""
    rng = np.random.default_rng(0)
    exact = (rng.standard_normal((n_out, n_in)) * 0.02).astype(np.float32)
    plain = rng.standard_normal((n_tokens, n_in)).astype(np.float32)
    outliers = plain * np.where(np.arange(n_in) % 100 == 7, np.float32(20), np.float32(1))
    data = quantize(exact, QUANT_TYPES["Q4_0"])
    stored = dequantize(data, QUANT_TYPES["Q4_0"]).astype(np.float64)
    block, token = (
        Weight(data, QUANT_TYPES["Q4_0"], (n_out, n_in), "int4", per_token) for per_token in (False, True)
    )
    makers: dict[str, Callable[[FloatArray], Product]] = {
        "kukri/32": lambda x: kukri_product(backend, block, x),
        "kukri/token": lambda x: kukri_product(backend, token, x),
    }
    if with_torch:
        makers["PyTorch/token"] = lambda x: torch_product(block, x, backend.pool.n_threads)
    products = {way: make(plain) for way, make in makers.items()}
    rough = {way: make(outliers) for way, make in makers.items()}
    rounds_s = in_turns([partial(_seconds, product) for product in products.values()], rounds, silent)
    seconds = dict(zip(makers, zip(*rounds_s, strict=True), strict=True))
    return [
        Measured(
            way, n_out, n_in, n_tokens,
            error=relative_error(products[way](), plain.astype(np.float64) @ exact.T),
            activation_error=relative_error(products[way](), plain @ stored.T),
            outlier_error=relative_error(rough[way](), outliers @ stored.T),
            ms=1e3 * median(seconds[way]),
        )
        for way in makers
    ]  # fmt: skip


def _seconds(product: Product) -> float:
    started = time.perf_counter()
    product()
    return time.perf_counter() - started


def torch_refusal(n_threads: int) -> str:
    """The reason why PyTorch's op does not run here, "" if it does."""
    weight = Weight(np.zeros((32, 18), np.uint8), QUANT_TYPES["Q4_0"], (32, 32))
    try:
        torch_product(weight, np.zeros((1, 32), np.float32), n_threads)
    except (ImportError, AttributeError, RuntimeError) as error:  # no torch, an old one, no kernel
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def _shapes(text: str) -> list[tuple[int, int]]:
    try:
        shapes = [tuple(map(int, shape.split("x"))) for shape in text.split(",")]
    except ValueError:
        shapes = []
    if not shapes or any(len(shape) != 2 or min(shape) < 1 or shape[1] % 32 for shape in shapes):
        raise ConfigError(
            f"shapes are written like 576x1536,2048x2048, inputs a multiple of 32, not {text!r}"
        )
    return [(shape[0], shape[1]) for shape in shapes]


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment("int4", "Compare int4 products of kukri and PyTorch, in turns.", with_model=False)
    experiment.count("-r", "--rounds", 15, "rounds over all ways")
    experiment.options.add_argument("-s", "--shapes", help="out x in, such as 576x1536,2048x2048")
    given = experiment.parse()
    shapes = SHAPES if given.shapes is None else _shapes(given.shapes)
    backend = CpuBackend(given.threads)
    refusal = torch_refusal(backend.pool.n_threads)
    if refusal:
        experiment.say(f"without PyTorch: {refusal}")
    found: list[Measured] = []
    for n_out, n_in in shapes:
        experiment.say(f"{n_out} x {n_in}")
        for n_tokens in N_TOKENS:
            found += measure_shape(backend, n_out, n_in, n_tokens, given.rounds, with_torch=not refusal)
    backend.close()
    rows = [
        [
            f"{one.n_out}x{one.n_in}, {one.n_tokens}: {one.way}",
            f"{one.error:.4f}",
            f"{one.activation_error:.4f}",
            f"{one.outlier_error:.4f}",
            f"{one.ms:.3f}",
            f"{2e-6 * one.n_out * one.n_in * one.n_tokens / one.ms:.0f}",
        ]
        for one in found
    ]
    header = ["out x in, tokens", "error", "rounding", "outliers", "ms", "Gop/s"]
    report = {"torch_refusal": refusal, "products": [asdict(one) for one in found]}
    experiment.show(report, Table("int4 weights, int8 activations", header, rows))


if __name__ == "__main__":
    run(main)
