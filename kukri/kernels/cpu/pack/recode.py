"""Blocks as the blocks that tiles are made of, for types that the CPU packs in another form; nothing is lost.

`recode_TYPE` reads a block's numbers and writes the same quants and scales where the other form has them:
quants that were chosen from a table need no table any more.
"""

from __future__ import annotations

import numpy as np
from numba import types

from kukri.kernels.cpu.compile.kernel_cache import KernelSource
from kukri.kernels.cpu.kernels.block_numbers import make_put, make_take, make_take_quants, n_groups
from kukri.kernels.cpu.kernels.intrinsics import array_at, stack_bytes
from kukri.quant.types import PACKED
from kukri.quant.types.schema import QuantType, n_numbers

BLOCKS_PER_CLAIM = 256
_bytes, _integers = array_at(types.uint8, 1), array_at(types.int32, 1)


def _make_recode(type: QuantType) -> KernelSource:
    block, form = type.layout, type.tiles.layout
    size, n_bytes, form_bytes = type.block_size, type.block_bytes, type.tiles.block_bytes
    take_quants, put_quants = make_take_quants(block, size), make_put(form, form.quant_numbers)
    take_d, put_d = make_take(block, block.scale), make_put(form, form.scale)
    take_s, put_s = make_take(block, block.scales), make_put(form, form.scales)
    n_d, n, repeats = n_numbers(form.cuts(form.scale)), n_groups(form), n_groups(form) // n_groups(block)
    has_table = block.scale_values is not None
    # the form has the bits of a table of scales as float16
    halves = np.zeros(1, np.uint16)
    if block.scale_values is not None:
        halves = block.scale_values.astype(np.float16).view(np.uint16)
    times, plus = block.times, block.plus - form.plus

    def recode(tile, source, n_blocks, into):
        """Blocks from the address `source` on, written to `into`."""
        if tile < 0:
            return (n_blocks + BLOCKS_PER_CLAIM - 1) // BLOCKS_PER_CLAIM
        quants = _integers(stack_bytes(1024), (size,))
        found = _integers(stack_bytes(64), (16,))
        scales = _integers(stack_bytes(64), (16,))
        for b in range(tile * BLOCKS_PER_CLAIM, min((tile + 1) * BLOCKS_PER_CLAIM, n_blocks)):
            at = source + b * n_bytes
            made = _bytes(into + b * form_bytes, (form_bytes,))
            made[:] = 0
            take_quants(at, quants)
            put_quants(made, quants)
            found[:] = 0
            take_d(at, found)
            if has_table:
                for i in range(n_d):
                    found[i] = halves[found[i]]
            put_d(made, found)
            found[:] = 0
            take_s(at, found)
            for g in range(n):
                scales[g] = times * found[g // repeats] + plus
            put_s(made, scales)
        return 0

    return KernelSource(f"recode_{type.name}", recode)


_SOURCES = [_make_recode(type) for type in PACKED if type.tiles is not type]
KERNELS = {source.name: source for source in _SOURCES}
