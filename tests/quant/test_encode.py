"""Quantizers that search for scales, against llama.cpp's; threads, importance, and hostile weights."""

from __future__ import annotations

import ctypes
from pathlib import Path

import gguf
import numpy as np
import pytest

from kukri.errors import FormatError, ShapeError
from kukri.kernels.quantize import quantize, requantize
from kukri.quant.blocks import BLOCKS, WRITTEN, dequantize
from kukri.quant.types import QUANT_TYPES, fitting_type

SHAPE = (64, 1024)
ENCODED = [name for name in WRITTEN if QUANT_TYPES[name].block_size > 1]
SEARCHED = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
# Error of llama.cpp's own quantizer (ggml_quantize_chunk of llama-cpp-python 0.3.36) on `weights(kind)`, root
# mean square over that of the weights; `test_errors_are_no_worse_than_those_of_llama_cpp` measures it again.
THEIRS = {
    "normal": {"Q2_K": 0.297601, "Q3_K": 0.151408, "Q4_K": 0.0714921, "Q5_K": 0.0361879, "Q6_K": 0.0177605,
               "IQ4_NL": 0.0760464, "IQ4_XS": 0.0766356},
    "tails": {"Q2_K": 0.343707, "Q3_K": 0.182147, "Q4_K": 0.0865497, "Q5_K": 0.0439576, "Q6_K": 0.0229337,
              "IQ4_NL": 0.0926471, "IQ4_XS": 0.0936347},
}  # fmt: skip


def weights(kind: str) -> np.ndarray:
    rng = np.random.default_rng(23)
    drawn = {"normal": rng.standard_normal, "tails": lambda shape: rng.standard_t(4, shape)}[kind](SHAPE)
    return (0.02 * drawn).astype(np.float32)


def error(data: np.ndarray, name: str, exact: np.ndarray, importance: float | np.ndarray = 1.0) -> float:
    """Root mean square error over root mean square, as the `gguf` package reads the blocks."""
    read = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name]).astype(np.float64)
    return float(np.sqrt((importance * (read - exact) ** 2).sum() / (importance * exact**2).sum()))


def by_llama_cpp(exact: np.ndarray, name: str, importance: np.ndarray | None = None) -> np.ndarray:
    llama_cpp = pytest.importorskip("llama_cpp")
    library = next(Path(llama_cpp.__file__).parent.glob("lib/libggml-base.*"))
    ggml, type = ctypes.CDLL(str(library)), QUANT_TYPES[name]
    made = np.zeros((exact.shape[0], type.row_bytes(exact.shape[1])), np.uint8)
    if name == "Q8_K":  # no type of files, so the chunks leave it out
        ggml.quantize_row_q8_K_ref.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        ggml.quantize_row_q8_K_ref(exact.ctypes.data, made.ctypes.data, exact.size)
        return made
    quantize_chunk = ggml.ggml_quantize_chunk
    pointer, whole = ctypes.c_void_p, ctypes.c_int64
    quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, whole, whole, whole, pointer]
    quantize_chunk.restype = ctypes.c_size_t
    ggml.ggml_quantize_init(type.ggml_id)
    column_weights = None if importance is None else importance.ctypes.data
    quantize_chunk(type.ggml_id, exact.ctypes.data, made.ctypes.data, 0, *exact.shape, column_weights)
    return made


@pytest.mark.parametrize("kind", THEIRS)
@pytest.mark.parametrize("name", SEARCHED)
def test_errors_are_no_worse_than_those_recorded_of_llama_cpp(name, kind):
    """A search that settles for less, a scale lost to rounding, a field of the block in the wrong place."""
    exact = weights(kind)
    assert error(quantize(exact, QUANT_TYPES[name]), name, exact) <= THEIRS[kind][name]


@pytest.mark.slow
@pytest.mark.parametrize("kind", THEIRS)
@pytest.mark.parametrize("name", ENCODED)
def test_errors_are_no_worse_than_those_of_llama_cpp(name, kind):
    """The recorded errors out of date; bits that differ where rounding is all there is."""
    exact = weights(kind)
    theirs, ours = by_llama_cpp(exact, name), quantize(exact, QUANT_TYPES[name])
    if name not in SEARCHED:
        np.testing.assert_array_equal(ours, theirs)
        return
    assert error(theirs, name, exact) == pytest.approx(THEIRS[kind][name], rel=1e-4)
    assert error(ours, name, exact) <= error(theirs, name, exact)


@pytest.mark.parametrize("name", SEARCHED)
def test_importance_moves_the_error_to_columns_that_count_less(name):
    """Importance that is ignored, or applied to the wrong columns."""
    exact = weights("normal")
    importance = np.where(np.arange(SHAPE[1]) % 5 == 3, 100.0, 0.01).astype(np.float32)
    plain = error(quantize(exact, QUANT_TYPES[name]), name, exact, importance)
    heeding = error(quantize(exact, QUANT_TYPES[name], importance), name, exact, importance)
    assert heeding < 0.9 * plain
    with pytest.raises(ShapeError, match=r"importances must be of 1024 columns, not of shape \(7,\)"):
        quantize(exact, QUANT_TYPES[name], np.ones(7, np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCHED)
def test_errors_with_importance_are_about_those_of_llama_cpp(name):
    """An importance that is weighed otherwise than it should be."""
    exact = weights("normal")
    importance = (np.random.default_rng(4).random(SHAPE[1]) ** 2 * 3 + 0.01).astype(np.float32)
    theirs = error(by_llama_cpp(exact, name, importance), name, exact, importance)
    assert error(quantize(exact, QUANT_TYPES[name], importance), name, exact, importance) <= 1.02 * theirs


@pytest.mark.parametrize("name", ENCODED)
def test_odd_weights_give_finite_blocks(name):
    """Division by a scale of zero, or a float16 that overflows, written as NaN."""
    rng = np.random.default_rng(1)
    rows = np.zeros((8, 256), np.float32)
    rows[1] = 1.0
    rows[2] = -3e-42
    rows[3] = rng.standard_normal(256) * 1e-30
    rows[4] = rng.standard_normal(256) * 1e3
    rows[5, 17] = 5.0
    rows[6] = np.where(np.arange(256) < 128, 0, rng.standard_normal(256))
    rows[7] = -np.abs(rng.standard_normal(256))
    data = quantize(rows, QUANT_TYPES[name])
    if name not in BLOCKS:
        return
    read = dequantize(data, QUANT_TYPES[name])
    assert np.isfinite(read).all()
    assert not read[0].any()
    # MXFP4 clamps 8 to 6; weights of few bits are a whole step apart
    worst = {"Q2_K": 0.5, "Q3_K": 0.3, "MXFP4": 0.25, "Q1_0": 1.0}.get(name, 0.2)
    worst = 0.51 if name in ("TQ1_0", "TQ2_0", "Q2_0") else worst
    for i in (1, 4, 5, 6, 7):
        assert np.abs(read[i] - rows[i]).max() <= worst * np.abs(rows[i]).max()


def test_q8_k_is_llama_cpps_block():
    """Sums that miss a weight, or a scale in the wrong place."""
    exact = weights("normal")
    blocks = quantize(exact, QUANT_TYPES["Q8_K"]).reshape(-1, 292)
    scales = np.ascontiguousarray(blocks[:, :4]).view(np.float32)
    quants = blocks[:, 4:260].view(np.int8).astype(np.int64)
    sums = np.ascontiguousarray(blocks[:, 260:]).view(np.int16)
    np.testing.assert_array_equal(sums, quants.reshape(-1, 16, 16).sum(-1))
    assert np.abs(scales * quants - exact.reshape(-1, 256)).max() <= np.abs(scales).max() * 0.5001


@pytest.mark.parametrize("source", ["F32", "F16", "BF16", "Q8_0"])
def test_requantize_takes_rows_in_parts_and_gives_the_same(source):
    """A part left out or put elsewhere by a thread; read-only rows of a mapped file refused."""
    exact = np.random.default_rng(2).standard_normal((3000, 256)).astype(np.float32)
    data = quantize(exact, QUANT_TYPES[source])
    data.setflags(write=False)
    at_once = np.vstack(
        [quantize(dequantize(part, QUANT_TYPES[source]), QUANT_TYPES["Q4_1"]) for part in np.split(data, 3)]
    )
    np.testing.assert_array_equal(requantize(data, QUANT_TYPES[source], QUANT_TYPES["Q4_1"]), at_once)
    assert requantize(data, QUANT_TYPES[source], QUANT_TYPES[source]) is data


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_refused(value):
    """NaN turned into some finite weight, which hides that a checkpoint is broken."""
    rows = np.ones((2000, 256), np.float32)
    rows[1999, 3] = value
    with pytest.raises(FormatError, match=r"tensor 'blk\.0\.x' must not hold NaN or infinite weights"):
        requantize(rows.view(np.uint8), QUANT_TYPES["F32"], QUANT_TYPES["Q4_K"], tensor="blk.0.x")
    with pytest.raises(FormatError, match="NaN or infinite weights for Q8_0"):
        quantize(rows, QUANT_TYPES["Q8_0"])
    assert quantize(rows, QUANT_TYPES["F16"]).shape == (2000, 512)


def test_stand_ins_are_those_of_llama_cpp():
    """Rows of 576 packed to another type than llama.cpp packs them to."""
    pairs = {
        "Q2_K": "Q4_0",
        "Q3_K": "Q4_0",
        "Q4_K": "Q5_0",
        "Q5_K": "Q5_1",
        "Q6_K": "Q8_0",
        "IQ4_XS": "IQ4_NL",
    }
    for name, stand_in in pairs.items():
        assert fitting_type(QUANT_TYPES[name], 512) is QUANT_TYPES[name]
        assert fitting_type(QUANT_TYPES[name], 576) is QUANT_TYPES[stand_in]
        assert fitting_type(QUANT_TYPES[name], 80) is None
    assert fitting_type(QUANT_TYPES["F16"], 80) is QUANT_TYPES["F16"]
