"""Blocks as the blocks that tiles are made of, for types that the CPU packs in another form; nothing is lost.

`recode_TYPE` reads blocks one number at a time and writes the same quants and scales where the other form has
them: quants that were chosen from a table need no table any more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from kukri.kernels.cpu.compile.kernel_cache import KernelSource
from kukri.kernels.cpu.kernels.block_numbers import make_number, make_put, make_quant, n_groups
from kukri.kernels.cpu.kernels.intrinsics import array_at, device, stack_bytes
from kukri.quant.types import PACKED
from kukri.quant.types.schema import Block, QuantType, n_numbers

BLOCKS_PER_CLAIM = 256
_bytes = array_at(types.uint8, 1)
_numbers = array_at(types.int64, 1)


def _make_halves(block: Block) -> Any:
    """A function (address of a block, i): the bits of its scale i as a float16."""
    number = make_number(block, block.scale)
    if block.scale_values is None:
        return number
    halves = block.scale_values.astype(np.float16).view(np.uint16)

    @device
    def half(source, i):
        return np.int64(halves[number(source, i)])

    return half


def _make_recode(type: QuantType) -> KernelSource:
    block, form = type.layout, type.tiles.layout
    size, n_bytes, form_bytes = type.block_size, type.block_bytes, type.tiles.block_bytes
    quant, half = make_quant(block), _make_halves(block)
    put_quants, put_halves = make_put(form, form.quant_numbers), make_put(form, form.scale)
    n_halves, has_scales = n_numbers(form.cuts(form.scale)), bool(form.scales)
    scale = make_number(block, block.scales) if has_scales else half
    put_scales = make_put(form, form.scales) if has_scales else put_halves
    n_scales = n_groups(form)
    repeats = max(n_scales // n_groups(block), 1)
    times, plus = block.times, block.plus - form.plus

    def recode(tile, source, n_blocks, into):
        """Blocks from the address `source` on, written to `into`."""
        if tile < 0:
            return (n_blocks + BLOCKS_PER_CLAIM - 1) // BLOCKS_PER_CLAIM
        numbers = _numbers(stack_bytes(2048), (256,))
        for b in range(tile * BLOCKS_PER_CLAIM, min((tile + 1) * BLOCKS_PER_CLAIM, n_blocks)):
            at = source + b * n_bytes
            made = _bytes(into + b * form_bytes, (form_bytes,))
            made[:] = 0
            for i in range(size):
                numbers[i] = quant(at, i)
            put_quants(made, numbers)
            for i in range(n_halves):
                numbers[i] = half(at, i)
            put_halves(made, numbers)
            if has_scales:
                for g in range(n_scales):
                    numbers[g] = times * scale(at, g // repeats) + plus
                put_scales(made, numbers)
        return 0

    return KernelSource(f"recode_{type.name}", recode)


_SOURCES = [_make_recode(type) for type in PACKED if type.tiles is not type]
KERNELS = {source.name: source for source in _SOURCES}
