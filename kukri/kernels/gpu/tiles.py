"""Sizes of the tiles that the Triton kernels are launched with, chosen by measurement, or by reading their
machine code.

They follow from the matrix or the layer, and from the number of tokens only if no bit of a result depends
on it. `python -m benchmarks.gpu_compile` shows what each choice costs, `benchmarks.gpu_tiles` what products
take on a device.
"""

from __future__ import annotations

from kukri.dataclass import dataclass
from kukri.kernels.gpu.pack import Form

LANES = 8  # sums of a row in a product: see linear_kernels.py
MAX_GEMV_TOKENS = 4  # beyond, a GEMM with one program for each sum is faster
MAX_EXPERT_GEMV_TOKENS = 8
ROW_COLUMNS = 1024  # columns of a program that quantizes or gates
FLOAT_COLUMNS = 64  # columns of a step of gemm_float
MERGE_HEADS = 4
LANE_ROWS = 256  # rows of a program that adds the sums of a product
# A product of fewer programs, about a device's processors, is split by its sums. For more tokens, parts of
# prompts, which no graph records, the further launch would cost more than it saves.
SPLIT_PROGRAMS, MAX_SPLIT_TOKENS = 128, 256
F32_ROWS, F32_COLUMNS = 8, 256  # tile of a step of gemv_f32
CONV_TOKENS, CONV_COLUMNS = 16, 64  # tile of a program of a convolution
STATE_COLUMNS = 16  # columns of a recurrent state per program, with all rows
# A GEMV quantizes its own input if no program has more numbers to quantize than this, and the product,
# rows x columns x tokens, is no larger: beyond, a launch for it costs less. See docs/gpu.
MAX_FUSED_INPUT = 3 << 12
MAX_FUSED_PRODUCT = 1 << 24
_FUSED_NUMBERS = 1 << 13  # that a program quantizes at a time, 32 a thread


@dataclass(frozen=True)
class Tile:
    """Rows of weights (or of queries) and tokens (or keys) of a program."""

    rows: int
    tokens: int
    n_warps: int
    n_stages: int = 3
    unroll: int = 1  # steps of a row that are under way at once


def gemv_tile(form: Form, n_tokens: int) -> Tile:
    """A product for a few tokens. The first two were measured: small programs, or several steps at once, as
    the latency of loads bounds them. The others were chosen by their machine code.
    """
    if form.low == 4 and not (form.high or form.n_levels):
        return Tile(16, n_tokens, 4, unroll=4) if n_tokens == 1 else Tile(8, n_tokens, 2)
    if form.high == 2:
        return Tile(8, n_tokens, 2)
    if form.low == 4 and (form.n_levels or form.has_steps):
        return Tile(64 if n_tokens == 1 else 16, n_tokens, 8)
    return Tile(32 if n_tokens <= 2 else 16, n_tokens, 4)


def fused_tile(n_tokens: int) -> Tile:
    """The same for a product that quantizes its input. One token's was measured, the others share their
    input among more rows and threads.
    """
    if n_tokens == 1:
        return Tile(16, 1, 4)
    return Tile(64 if n_tokens == 2 else 32, n_tokens, 8)


def fused_columns(n_columns: int, n_tokens: int, is_norm: bool) -> int:
    """Columns that such a product quantizes at a time, a power of two; a norm needs the whole row."""
    width = 1 << (n_columns - 1).bit_length()
    return width if is_norm else min(width, ROW_COLUMNS, _FUSED_NUMBERS // n_tokens)


def quantizes_input(n_rows: int, n_columns: int, n_tokens: int) -> bool:
    """True for a product that is to quantize its input in the same launch."""
    n_numbers = n_columns * n_tokens
    is_small = n_numbers <= MAX_FUSED_INPUT and n_rows * n_numbers <= MAX_FUSED_PRODUCT
    return n_tokens <= MAX_GEMV_TOKENS and is_small


def gemm_tile(form: Form, n_tokens: int) -> Tile:
    """A product for more."""
    if n_tokens <= 32:
        return Tile(64, 16, 4)
    needs_registers = form.group == 16 or (form.has_minimum and not (form.has_steps or form.high))
    return Tile(64, 32 if needs_registers else 64, 4)


def splits_sums(n_programs: int, n_tokens: int) -> bool:
    """Return True if a product of `n_programs` programs should have a program for each of its LANES sums."""
    return n_programs < SPLIT_PROGRAMS and n_tokens <= MAX_SPLIT_TOKENS


def expert_tile(n_rows: int) -> Tile:
    """The same for rows that have an expert each; n_rows are an expert's rows, on average."""
    return Tile(64, 16 if n_rows <= 16 else 32, 4)


def float_tile(n_tokens: int) -> Tile:
    """A product with float16 or bfloat16 weights; rows stay the same, so that bits do."""
    return Tile(64, 16, 4) if n_tokens <= 64 else Tile(64, 128, 4)


def attention_tile(group: int, d_head: int, is_prefill: bool) -> Tile:
    """Attention for groups of query heads; keys depend on the head size alone, so that bits do."""
    rows = max(16, 1 << (group - 1).bit_length())
    n_keys = 64 if d_head <= 64 else 32 if d_head <= 256 else 16
    if is_prefill and d_head <= 256:
        rows = max(rows, 32)
    return Tile(rows, n_keys, 4 if d_head <= 128 else 8, 2 if is_prefill or d_head > 128 else 3)


def row_warps(width: int) -> int:
    """Warps of a program with a whole row."""
    return max(1, min(8, width // 256))
