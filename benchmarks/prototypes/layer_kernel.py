"""A prototype of a persistent Triton kernel: a decode step of a whole Llama layer in one launch.

All programs stay for the five phases of the layer, take tiles of each by number, and wait for one another
between them, so all must be resident at once: a cooperative launch, a program an SM. Phases are the launches
of the gpu backend with their device functions: results are bit-identical. Triton's interpreter runs
programs one after another, where a second would wait forever: it takes a grid of one.

Nothing uses this yet: see docs/gpu/design.md.
"""

import triton
import triton.language as tl

from kukri.kernels.gpu.attention_kernels import decode_head
from kukri.kernels.gpu.linear_kernels import gemv_rows
from kukri.kernels.gpu.row_kernels import prepare_rows

MAX_REGISTERS = 255  # a thread's: a program has an SM for itself


@triton.jit
def _wait_for_all(arrived, n_arrivals):
    """Waits until programs have arrived n_arrivals times; what they wrote before is seen after it."""
    tl.debug_barrier()
    count = tl.atomic_add(arrived, 1, sem="acq_rel") + 1
    while count < n_arrivals:
        count = tl.atomic_add(arrived, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def _product(
    x, other, eps, quants, high, scales, xq, xd, xm, xs, y, residual, n_tokens, x_stride, n_rows, n_columns,
    TYPE: tl.constexpr, INPUT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, W: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A phase: the rows of a recipe quantized by each program for itself, then its tiles of the matrix."""
    n_pairs = (n_columns + 63) // 64
    x8 = xq.to(tl.pointer_type(tl.int8))
    prepare_rows(x, other, x8, xd, xm, xs, n_tokens, x_stride, n_columns, n_pairs * 64, eps, 0.0, INPUT, M, W)
    for block in range(tl.program_id(0), tl.cdiv(n_rows, BN), tl.num_programs(0)):
        gemv_rows(
            block, 0, 0, 0, quants, high, scales, xq, xd, xm, xs, y, y, residual, n_tokens, n_rows, n_pairs,
            n_rows, TYPE, M, BN, ASM, False, HAS_RESIDUAL, 1,
        )  # fmt: skip


@triton.jit
def layer(
    x, norm, mlp_norm, qkv_quants, qkv_high, qkv_scales, o_quants, o_high, o_scales, up_quants, up_high,
    up_scales, down_quants, down_high, down_scales, xq, xd, xm, xs, qkv, attended, between, gate_up, y,
    cos, sin, positions, slots, keys, values, key_scales, value_scales, query_start, context_len, page_table,
    arrived, eps, scale, window, page_stride, head_stride, scale_page_stride, scale_head_stride, table_stride,
    n_tokens, d_model, d_ffn, n_kv_heads,
    TYPE: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, KW: tl.constexpr, BM: tl.constexpr,
    TILE: tl.constexpr, ROTARY: tl.constexpr, KV: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    W: tl.constexpr, W_PART: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """x float32 [n_tokens, d_model], a new token of each sequence, through a layer -> y, of the same shape.

    Matrices are of one type, q, k and v one above the other, gate and up too. W is the power of two that
    holds a row of the norms, W_PART columns quantized at a time elsewhere. `xq` … `xs` have room for the
    widest input; `qkv`, `attended`, `between` and `gate_up` for the values between phases; `arrived` int32
    is 0.
    """
    n_programs = tl.num_programs(0)
    n_heads = n_kv_heads * GROUP
    width = (n_heads + 2 * n_kv_heads) * K
    _product(
        x, norm, eps, qkv_quants, qkv_high, qkv_scales, xq, xd, xm, xs, qkv, x, n_tokens, d_model, width,
        d_model, TYPE, "rms_norm", False, W, M, BN, ASM,
    )  # fmt: skip
    _wait_for_all(arrived, n_programs)
    for tile in range(tl.program_id(0), n_tokens * n_kv_heads, n_programs):
        decode_head(
            tile // n_kv_heads, tile % n_kv_heads, 0, qkv, qkv + n_heads * K,
            qkv + (n_heads + n_kv_heads) * K, cos, sin, positions, slots, keys, values, key_scales,
            value_scales, x, attended, attended, query_start, context_len, page_table, scale, 0.0, window,
            width, width, width, page_stride, head_stride, scale_page_stride, scale_head_stride, table_stride,
            n_heads, 1, GROUP, K, KW, BM, TILE, ROTARY, KV, False, False, False, True,
        )  # fmt: skip
    _wait_for_all(arrived, 2 * n_programs)
    _product(
        attended, attended, eps, o_quants, o_high, o_scales, xq, xd, xm, xs, between, x, n_tokens,
        n_heads * K, d_model, n_heads * K, TYPE, "plain", True, W_PART, M, BN, ASM,
    )  # fmt: skip
    _wait_for_all(arrived, 3 * n_programs)
    _product(
        between, mlp_norm, eps, up_quants, up_high, up_scales, xq, xd, xm, xs, gate_up, between, n_tokens,
        d_model, 2 * d_ffn, d_model, TYPE, "rms_norm", False, W, M, BN, ASM,
    )  # fmt: skip
    _wait_for_all(arrived, 4 * n_programs)
    _product(
        gate_up + d_ffn, gate_up, eps, down_quants, down_high, down_scales, xq, xd, xm, xs, y, between,
        n_tokens, 2 * d_ffn, d_model, d_ffn, TYPE, "gated_silu", True, W_PART, M, BN, ASM,
    )  # fmt: skip
