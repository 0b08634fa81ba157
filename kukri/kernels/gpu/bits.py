"""Triton functions that several kernels use: packed integers, float16 in words, sums in a fixed order.

Every sum of floats is written down as a binary tree over powers of two. `tl.sum` over more than two numbers
would add them in an order that follows from tile shapes and the compiler's layouts, so that a result could
depend on the batch. Sums of integers are exact and may use `tl.sum`.

`ASM` selects inline PTX. Triton's interpreter and AMD GPUs take the plain branch, which has the same result.
"""

import triton
import triton.language as tl


@triton.jit
def dp4a(a, b, c, ASM: tl.constexpr):
    """c plus the dot product of the 4 signed bytes of a with the bytes of b, all int32."""
    if ASM:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        for i in tl.static_range(4):
            c += ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
        return c


@triton.jit
def low_half(word):
    """float32 of the float16 in the low 16 bits."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def high_half(word):
    """float32 of the float16 in the high 16 bits."""
    return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def tree_sum(x, ROWS: tl.constexpr, N: tl.constexpr):
    """x [ROWS, N] -> [ROWS]: neighbours first, ((0 + 1) + (2 + 3)) + …; N is a power of two."""
    if N == 1:
        return tl.reshape(x, [ROWS])
    else:
        return tree_sum(tl.sum(tl.reshape(x, [ROWS, N // 2, 2]), axis=2), ROWS, N // 2)


@triton.jit
def round_even(x):
    """x rounded to a whole number, ties to even; |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def e4m3_values(byte):
    """float16 of e4m3 numbers as uint8: their digits in float16's fields, times 2^8. Exact; NaN stays."""
    word = byte.to(tl.int16)
    x = (((word & 0x80) << 8) | ((word & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((word & 0x7F) == 0x7F, float("nan"), x)


@triton.jit
def e4m3_bytes(x):
    """float32 rounded to e4m3 as uint8, ties to even; numbers beyond 448 become 448, NaN stays."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    code = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(size < 0.015625, round_even(size * 512.0).to(tl.int32), code)  # below the least normal
    code = tl.where(x != x, 0x7F, code)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def _prmt(a, b, selector):
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, selector], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def iq4_selectors(word):
    """The index in its half of the IQ4 table, and which half, for each of 8 nibbles."""
    return word & 0x77777777, ((word >> 1) & 0x44444444) | 0x32103210


@triton.jit
def iq4_values(within, half, t0, t1, t2, t3, C: tl.constexpr, ASM: tl.constexpr):
    """The 4 signed bytes that the low (C = 0) or high 4 nibbles stand for; t0 … t3 hold the 16 values.

    The table comes from memory: of constants, ptxas makes new copies for each use.
    """
    within, half = within >> (16 * C), half >> (16 * C)
    if ASM:
        zero = within * 0
        return _prmt(_prmt(zero + t0, zero + t1, within), _prmt(zero + t2, zero + t3, within), half)
    else:
        result = within * 0
        for i in tl.static_range(4):
            index = (within >> (4 * i)) & 7
            is_high = ((half >> (4 * i)) & 4) != 0
            word = tl.where(is_high, tl.where(index < 4, t2, t3), tl.where(index < 4, t0, t1))
            result |= ((word >> (8 * (index & 3))) & 255) << (8 * i)
        return result


@triton.jit
def levels_of_bytes(q, t0, t1, ASM: tl.constexpr):
    """The signed bytes that the bytes of q, 0 to 7, stand for; t0 and t1 hold the 8 values."""
    if ASM:
        pairs = (q | (q >> 4)) & 0x00FF00FF
        return _prmt(q * 0 + t0, q * 0 + t1, pairs | (pairs >> 8))
    else:
        result = q * 0
        for i in tl.static_range(4):
            index = (q >> (8 * i)) & 7
            result |= ((tl.where(index < 4, t0, t1) >> (8 * (index & 3))) & 255) << (8 * i)
        return result
