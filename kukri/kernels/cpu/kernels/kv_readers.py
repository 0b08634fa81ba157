"""The numbers of a KV cache as the attention kernels read them: a reader for each type of cache."""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from kukri.kernels.cache import KVType
from kukri.kernels.cpu.kernels.intrinsics import broadcast, constant, device, operation, pointer
from kukri.kernels.cpu.kernels.simd import F32x16, I32x16, load_f16x16, load_f32x16, load_i8x16
from kukri.kernels.cpu.run.abi import KEY_BLOCK_BYTES
from kukri.kernels.paged_kv import KV_BLOCK, PAGE_TOKENS, head_bytes
from kukri.kernels.q4_cache import Q4_BLOCK

_I8, _I32 = ir.IntType(8), ir.IntType(32)
_Q4_BYTES = Q4_BLOCK // 2  # of a block of 32 dimensions


@device
def _key_f16(keys, v, d):
    return load_f16x16(keys + (16 * v + d) * (2 * PAGE_TOKENS))


@device
def _value_f16(page, key, v, d_head):
    return load_f16x16(page + (key * d_head + 16 * v) * 2)


@device
def _key_f32(keys, v, d):
    return load_f32x16(keys + (16 * v + d) * (4 * PAGE_TOKENS))


@device
def _value_f32(page, key, v, d_head):
    return load_f32x16(page + (key * d_head + 16 * v) * 4)


@device
def _key_q8_0(keys, v, d):
    return load_i8x16(keys + (v >> 1) * KEY_BLOCK_BYTES + ((v & 1) * 16 + d) * PAGE_TOKENS)


@device
def _key_scale_q8_0(keys, v, d_head):
    return load_f16x16(keys + (v >> 1) * KEY_BLOCK_BYTES + KV_BLOCK * PAGE_TOKENS)


@device
def _value_q8_0(page, key, v, d_head):
    return load_i8x16(page + key * d_head + 16 * v)


@device
def _value_scale_q8_0(page, v, d_head):
    return load_f16x16(page + PAGE_TOKENS * d_head + (v >> 1) * (2 * PAGE_TOKENS))


@operation(F32x16, types.int64, types.int64)
def _load_i4x16(builder: Any, address: Any, half: Any) -> Any:
    """The low (half = 0) or high (1) 4 bits of 16 bytes, signed, as float32."""
    packed = builder.load(pointer(builder, address, ir.VectorType(_I8, 16)), align=1)
    left = builder.sub(_I32(28), builder.shl(builder.trunc(half, _I32), _I32(2)))
    upper = builder.shl(builder.zext(packed, I32x16.llvm), broadcast(builder, left))
    return builder.sitofp(builder.ashr(upper, constant(I32x16.llvm, 28)), F32x16.llvm)


@device
def _key_q4(keys, v, d):
    return _load_i4x16(keys + ((v >> 1) * _Q4_BYTES + d) * PAGE_TOKENS, v & 1)


@device
def _value_q4(page, key, v, d_head):
    n_bytes = (d_head + Q4_BLOCK - 1) // Q4_BLOCK * _Q4_BYTES
    return _load_i4x16(page + key * n_bytes + (v >> 1) * _Q4_BYTES, v & 1)


@device
def _scale_q4(page, v, d_head):
    n_bytes = (d_head + Q4_BLOCK - 1) // Q4_BLOCK * _Q4_BYTES
    return load_f16x16(page + PAGE_TOKENS * n_bytes)


class Reader(NamedTuple):
    """Functions that read one type of cache. They get the address of a head in a page, and v for dimensions
    16 v to 16 v + 15 of it.
    """

    kv_type: KVType
    key: Any  # (keys, v, d): dimension 16 v + d of a page's 16 keys, without their scales
    value: Any  # (values, key, v, d_head): 16 dimensions of one key's value, without its scale
    key_scale: Any = None  # (keys, v, d_head): scales of a page's 16 keys; None: there are none
    value_scale: Any = None  # (values, v, d_head): scales of their values
    dims_per_scale: int = 0  # 0: a scale is of a whole head
    is_rotated: bool = False  # heads are stored rotated (`q4_cache`)

    def head_bytes(self, d_head: int) -> int:
        """Bytes of one head's keys, or values, in a page."""
        return head_bytes(d_head, self.kv_type)

    def vectors_per_scale(self, d_head: int) -> int:
        """Vectors of 16 dimensions that share a scale; all of them if there is none."""
        return (self.dims_per_scale or d_head) // 16


READERS = (
    Reader("f16", _key_f16, _value_f16),
    Reader("f32", _key_f32, _value_f32),
    Reader("q8_0", _key_q8_0, _value_q8_0, _key_scale_q8_0, _value_scale_q8_0, KV_BLOCK),
    Reader("q4", _key_q4, _value_q4, _scale_q4, _scale_q4, is_rotated=True),
)
