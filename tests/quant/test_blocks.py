"""Block formats against the `gguf` package, which is bit-exact with GGML's C code."""

from __future__ import annotations

import re

import gguf
import numpy as np
import pytest

from kukri.errors import ShapeError, UnsupportedError
from kukri.kernels.cpu import CpuBackend
from kukri.kernels.cpu.pack.weights import in_blocks_of_tiles
from kukri.kernels.quantize import quantize
from kukri.kernels.weight_handles import Weight
from kukri.quant.blocks import BLOCKS, WRITTEN, dequantize
from kukri.quant.types import PACKED, QUANT_TYPES
from tests.quant import newer_types
from tests.random_blocks import HALVES

NAMES = list(BLOCKS)
EXACT = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"]
TERNARY = ["Q1_0", "Q2_0", "TQ1_0", "TQ2_0"]
READ = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "NVFP4"]
SEARCHED = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
SHAPES = [(1, 32), (3, 96), (65, 576), (17, 32 * 700)]  # the last is more than is converted at a time
LONG_SHAPES = [(1, 256), (3, 768), (17, 256 * 70)]


@pytest.fixture(scope="module")
def backend():
    made = CpuBackend(2)
    yield made
    made.close()


def theirs(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name]


def make_weights(kind: str, shape: tuple[int, int]) -> np.ndarray:
    rng = np.random.default_rng(7)
    normal = rng.standard_normal(shape).astype(np.float32)
    if kind == "zero":
        return np.zeros(shape, np.float32)
    if kind == "constant":
        return np.repeat(normal[:, :1], shape[1], axis=1)
    if kind == "ties":  # halves, where rounding to even and away from zero differ
        return rng.integers(-15, 16, shape).astype(np.float32) / 2
    if kind == "half subnormal":  # scales below the smallest normal float16
        return normal * np.float32(1e-6)
    if kind == "large":  # within float16
        return normal.clip(-3, 3) * np.float32(20000)
    if kind == "overflow":  # beyond float16
        return normal * np.float32(1e9)
    if kind == "outliers":
        return np.where(rng.random(shape) < 0.02, normal * 1000, normal)
    return normal


KINDS = ["normal", "zero", "constant", "ties", "half subnormal", "large", "overflow", "outliers"]


def test_every_type_that_runs_is_tested():
    """A type added to the table that no test of this file knows."""
    from kukri.kernels.cpu.pack.encode import KERNELS

    assert NAMES == EXACT + SEARCHED + TERNARY + READ
    assert list(WRITTEN) == [*EXACT, *SEARCHED, *TERNARY, "Q8_K"]
    assert set(KERNELS) == {f"encode_{name}" for name in WRITTEN if QUANT_TYPES[name].block_size > 1}
    assert list(HALVES) == [name for name in NAMES if QUANT_TYPES[name].block_size > 1]


def shapes_of(name: str) -> list[tuple[int, int]]:
    return LONG_SHAPES if QUANT_TYPES[name].block_size > 32 else SHAPES


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EXACT + TERNARY)
@pytest.mark.filterwarnings("ignore::RuntimeWarning:gguf")
@pytest.mark.filterwarnings("ignore::RuntimeWarning:newer_types")
def test_quantize_writes_the_bytes_of_the_gguf_package(name, kind):
    """Wrong rounding, nibble order, scale sign or scale precision; a chunk boundary handled wrongly."""
    for shape in shapes_of(name):
        weights = make_weights(kind, shape)
        if name in newer_types.NEWER:
            expected = newer_types.quantized(weights[:3], name)
            np.testing.assert_array_equal(quantize(weights[:3], QUANT_TYPES[name]), expected)
            continue
        expected = gguf.quants.quantize(weights, theirs(name)).view(np.uint8)
        ours = quantize(weights, QUANT_TYPES[name])
        assert ours.dtype == np.uint8
        np.testing.assert_array_equal(ours, expected)


def assert_dequantized_like_the_gguf_package(data: np.ndarray, name: str) -> np.ndarray:
    """Every bit, the sign of zero included; a NaN only needs to be one. Gives our weights."""
    if name in newer_types.NEWER:
        data = data[:40]
        expected = newer_types.dequantized(data, name)
    else:
        expected = gguf.quants.dequantize(data, theirs(name)).astype(np.float32)
    ours = dequantize(data, QUANT_TYPES[name])
    assert ours.dtype == np.float32
    assert ours.shape == expected.shape
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(ours), nan)
    np.testing.assert_array_equal(ours.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])
    return ours


def random_bytes(name: str, shape: tuple[int, int]) -> np.ndarray:
    rng = np.random.default_rng(11)
    return rng.integers(0, 256, (shape[0], QUANT_TYPES[name].row_bytes(shape[1])), np.uint8)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_dequantize_any_bytes_like_the_gguf_package(name):
    """Any bit pattern a file may hold: subnormal, infinite and NaN scales, every quant."""
    for shape in shapes_of(name):
        assert assert_dequantized_like_the_gguf_package(random_bytes(name, shape), name).shape == shape


SCALES = {  # float16 bits
    "normal": (0x0400, 0x5000),
    "negative": (0x8400, 0xD000),
    "subnormal": (0x0001, 0x03FF),
    "negative subnormal": (0x8001, 0x83FF),
    "largest": (0x7BFF, 0x7BFF),
    "zero": (0x0000, 0x0000),
    "negative zero": (0x8000, 0x8000),
}


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("name", [name for name in HALVES if HALVES[name]])
def test_dequantize_every_finite_scale_like_the_gguf_package(name, scales):
    """Products in another order, which round otherwise; a lost sign; subnormal scales taken for zero."""
    blocks = random_bytes(name, (40, 256)).reshape(-1, QUANT_TYPES[name].block_bytes)[:40]
    rng = np.random.default_rng(3)
    low, high = SCALES[scales]
    for at in HALVES[name]:
        blocks[:, at : at + 2] = rng.integers(low, high + 1, (len(blocks), 1), np.uint16).view(np.uint8)
    weights = assert_dequantized_like_the_gguf_package(blocks, name)
    assert np.isfinite(weights).all()
    assert weights.any() == ("zero" not in scales)


@pytest.mark.parametrize("name", HALVES)
def test_dequantize_the_least_and_the_largest_quants_like_the_gguf_package(name):
    """Whole scales or quants that overflow their integers: all bits clear, all set, and only top bits set."""
    for byte in (0x00, 0xFF, 0x80, 0x7F, 0x55, 0xAA):
        blocks = np.full((2, QUANT_TYPES[name].block_bytes), byte, np.uint8)
        for at in HALVES[name]:
            blocks[0, at : at + 2] = np.float16([1]).view(np.uint8)
            blocks[1, at : at + 2] = np.float16([-65504]).view(np.uint8)
        assert_dequantized_like_the_gguf_package(blocks, name)


@pytest.mark.parametrize("name", HALVES)
def test_no_bytes_give_no_weights(name):
    """A tensor without rows divided by zero."""
    type = QUANT_TYPES[name]
    assert dequantize(np.zeros((0, type.block_bytes), np.uint8), type).shape == (0, type.block_size)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_floats_survive_special_values(name):
    """Infinity turned into NaN, NaN into infinity, the sign of zero lost, ties rounded the wrong way."""
    values = [[0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-45, 3.4e38, 1.00390625, 1.01171875]]
    weights = np.array(values, np.float32)
    weights = np.vstack([weights, np.array([0x7F800001, 0xFFFFFFFF] * 5, np.uint32).view(np.float32)[None]])
    with np.errstate(all="ignore"):
        expected = gguf.quants.quantize(weights, theirs(name)).view(np.uint8)
    data = quantize(weights, QUANT_TYPES[name])
    np.testing.assert_array_equal(data, expected)
    assert np.isnan(dequantize(data, QUANT_TYPES[name])).tolist() == np.isnan(weights).tolist()


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_float32_subnormals_become_zero_without_a_warning(name, recwarn):
    """A scale whose inverse overflows: GGML multiplies 0 by infinity there and casts NaN to an integer."""
    weights = np.linspace(-1e-39, 1e-39, 64, dtype=np.float32).reshape(2, 32)
    assert not dequantize(quantize(weights, QUANT_TYPES[name]), QUANT_TYPES[name]).any()
    assert not recwarn.list


@pytest.mark.parametrize(
    ("name", "bound"),
    [("Q4_0", 1 / 8), ("Q4_1", 1 / 15), ("Q5_0", 1 / 16), ("Q5_1", 1 / 31), ("Q8_0", 1 / 254)],
)
def test_error_of_a_round_trip_is_about_half_a_step(name, bound):
    """Both directions wrong in the same way, which would agree with each other but not with the weights."""
    weights = make_weights("normal", (64, 256))
    error = np.abs(dequantize(quantize(weights, QUANT_TYPES[name]), QUANT_TYPES[name]) - weights)
    largest = np.abs(weights).reshape(64, -1, 32).max(-1, keepdims=True)
    rounding = 2.0**-10  # that of a float16 scale and minimum, relative to the largest weight they make
    assert (error.reshape(64, -1, 32) <= (bound + rounding) * largest).all()


def test_f32_is_a_view_and_others_take_read_only_unaligned_bytes():
    """A copy of a large tensor for nothing; a failure on the odd, read-only bytes of a mapped file."""
    data = np.zeros((2, 64), np.uint8)
    assert np.shares_memory(dequantize(data, QUANT_TYPES["F32"]), data)
    raw = np.frombuffer(bytes(range(256)) * 2, np.uint8)
    for name in NAMES:
        n_bytes = QUANT_TYPES[name].block_bytes * 2
        assert dequantize(raw[1 : 1 + n_bytes].reshape(1, -1), QUANT_TYPES[name]).size


def test_wrong_shapes_and_types_are_named():
    """Rows cut inside a block read as if they were whole; a type without a format silently misread."""
    with pytest.raises(ShapeError, match="20-byte Q4_1"):
        dequantize(np.zeros((2, 30), np.uint8), QUANT_TYPES["Q4_1"])
    with pytest.raises(ShapeError, match="float32 "):
        dequantize(np.zeros((2, 34), np.float32), QUANT_TYPES["Q8_0"])
    with pytest.raises(ShapeError, match="33 columns must be a multiple of 32 for Q8_0"):
        quantize(np.zeros((2, 33), np.float32), QUANT_TYPES["Q8_0"])
    with pytest.raises(ShapeError, match="210-byte Q6_K"):
        dequantize(np.zeros((2, 209), np.uint8), QUANT_TYPES["Q6_K"])


@pytest.mark.parametrize("name", [name for name in QUANT_TYPES if name not in NAMES])
def test_types_that_do_not_run_are_named_with_those_that_do(name):
    """A known type without a format silently misread, or a refusal that leaves the reader at a loss."""
    type = QUANT_TYPES[name]
    refusal = re.escape(f"the weight type {name} is not supported: use {', '.join(NAMES)}")
    with pytest.raises(UnsupportedError, match=f"{refusal}$"):
        dequantize(np.zeros((1, type.block_bytes), np.uint8), type)


@pytest.mark.parametrize("name", [name for name in QUANT_TYPES if name not in WRITTEN])
def test_types_without_a_quantizer_are_named_with_those_that_have_one(name):
    """Bytes of some other type, or a KeyError, for a type that has no quantizer."""
    refusal = re.escape(f"quantizing to {name} is not supported: use one of {', '.join(WRITTEN)}")
    with pytest.raises(UnsupportedError, match=f"{refusal}$"):
        quantize(np.zeros((1, 256), np.float32), QUANT_TYPES[name])


def test_the_table_agrees_with_the_gguf_package():
    """A wrong block size or id in the table of types, which every reader trusts."""
    for name, type in QUANT_TYPES.items():
        if name == "Q8_1":  # never in a file; the package still has the 40 bytes of an early version
            continue
        if name == "Q2_0":  # newer than the package: ggml.h, as in llama-cpp-python 0.3.36
            assert (type.ggml_id, type.block_size, type.block_bytes) == (42, 64, 18)
            continue
        assert (type.block_size, type.block_bytes) == gguf.GGML_QUANT_SIZES[theirs(name)]
        assert type.ggml_id == theirs(name).value


@pytest.mark.parametrize("name", [type.name for type in PACKED if type.tiles is not type])
def test_blocks_that_tiles_are_made_of_hold_the_same_weights(backend, name):
    """A quant, sign or scale lost where blocks are recoded for tiles; blocks past the end of a claim."""
    type = QUANT_TYPES[name]
    for n_rows in (1, 300):
        weight = Weight(random_bytes(name, (n_rows, 512)), type, (n_rows, 512))
        with np.errstate(all="ignore"):
            expected = dequantize(weight.stored, type)
            ours = dequantize(in_blocks_of_tiles(weight, backend.pool), type.tiles)
        np.testing.assert_array_equal(ours, expected)


def test_tables_of_quants_are_those_of_the_gguf_package():
    """A table that was stored wrongly, of which blocks at random may miss an entry."""
    for name in READ[:-1]:
        package = gguf.quants._type_traits[theirs(name)]
        package.init_grid()
        ours = QUANT_TYPES[name].layout.quants.grid
        values = np.array(package.grid_map)
        np.testing.assert_array_equal(values[ours], package.grid.reshape(ours.shape))
