"""The embedding: rows of a matrix, read from the file as they are and widened to float32."""

from __future__ import annotations

from typing import Any

from kukri.kernels.cpu.codegen.panels import first_row, row_tiles, stop_row
from kukri.kernels.cpu.compile.intrinsics import device, load_f32, load_i32, load_i64, store_f32
from kukri.kernels.cpu.compile.kernel_source import KernelSource
from kukri.kernels.cpu.compile.simd import load_bf16, load_f16, load_f32x16, store_f32x16
from kukri.kernels.cpu.pack.block_numbers import make_reader
from kukri.kernels.cpu.run.abi import N_TOKENS
from kukri.quant.types import PACKED, QUANT_TYPES, QuantType


@device
def _f32(source, target):
    store_f32(target, load_f32(source))


@device
def _f16(source, target):
    store_f32(target, load_f16(source))


@device
def _bf16(source, target):
    store_f32(target, load_bf16(source))


def _make_embed(block: Any, weight_type: QuantType) -> KernelSource:
    block_bytes, target_step = weight_type.block_bytes, 4 * weight_type.block_size

    def embed(tile, batch, indices, w, n_blocks, residual, residual_stride, y, y_stride):
        """y[t] = the row of `w` (as in the file) for token t's number, plus residual[t] unless that is 0.

        `indices` is the address of the int32 array's address. With a residual, rows have room for
        whole vectors.
        """
        n_rows = load_i64(batch + N_TOKENS)
        if tile < 0:
            return row_tiles(n_rows)
        numbers = load_i64(indices)
        for row in range(first_row(tile, n_rows), stop_row(tile, n_rows)):
            source = w + load_i32(numbers + 4 * row) * (n_blocks * block_bytes)
            target = y + row * y_stride
            for b in range(n_blocks):
                block(source + b * block_bytes, target + b * target_step)
            if residual != 0:
                for i in range(0, n_blocks * target_step, 64):
                    added = load_f32x16(residual + row * residual_stride + i)
                    store_f32x16(target + i, load_f32x16(target + i) + added)
        return 0

    return KernelSource(f"embed_{weight_type.name}", embed)


_FLOATS = {"F32": _f32, "F16": _f16, "BF16": _bf16}
_ROWS = _FLOATS | {type.name: make_reader(type.layout, type.block_size) for type in PACKED}

KERNELS = {f"embed_{name}": _make_embed(block, QUANT_TYPES[name]) for name, block in _ROWS.items()}
