"""The rotation of a head's dimensions, for caches of 4 bits: bit-identical to `kv_types.rotate_heads`."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from kukri.kernels.cpu.compile.intrinsics import device, operation
from kukri.kernels.cpu.compile.simd import F32x16, I32x16, load_f32x16, splat, store_f32x16


def _make_butterfly(distance: int) -> Any:
    """An operation on lanes `distance` apart: the lower of two gets their sum, the upper their difference."""
    partners = [lane ^ distance for lane in range(16)]
    signs = [-1.0 if lane & distance else 1.0 for lane in range(16)]

    @operation(F32x16, F32x16)
    def butterfly(builder: Any, a: Any) -> Any:
        """Lower + upper, lower - upper."""
        others = builder.shuffle_vector(a, a, ir.Constant(I32x16.llvm, partners))
        return builder.fadd(others, builder.fmul(a, ir.Constant(F32x16.llvm, signs)))

    return butterfly


_by_1, _by_2, _by_4, _by_8 = (_make_butterfly(distance) for distance in (1, 2, 4, 8))


@device
def rotate_head(x, d_head):
    """Rotates d_head float32 at x in place. d_head % 16 == 0."""
    size = d_head & -d_head
    for i in range(0, 4 * d_head, 64):
        store_f32x16(x + i, _by_8(_by_4(_by_2(_by_1(load_f32x16(x + i))))))
    distance = 64  # bytes from now on
    while distance < 4 * size:
        for i in range(0, 4 * d_head, 64):
            if i & distance == 0:
                a = load_f32x16(x + i)
                b = load_f32x16(x + i + distance)
                store_f32x16(x + i, a + b)
                store_f32x16(x + i + distance, a - b)
        distance *= 2
    factor = splat(np.float32(1.0 / size**0.5))
    for i in range(0, 4 * d_head, 64):
        store_f32x16(x + i, load_f32x16(x + i) * factor)
    n_runs = d_head // size
    if n_runs > 1:
        share = splat(np.float32(2.0 / n_runs))
        for i in range(0, 4 * size, 64):
            total = load_f32x16(x + i)
            for at in range(i + 4 * size, 4 * d_head, 4 * size):
                total = total + load_f32x16(x + at)
            total = total * share
            for at in range(i, 4 * d_head, 4 * size):
                store_f32x16(x + at, load_f32x16(x + at) - total)
