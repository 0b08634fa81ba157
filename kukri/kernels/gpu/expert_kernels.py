"""Triton kernels of mixtures of experts besides the products: the choice of experts, and the sum over them.

A program has one token, so no result depends on others. Products with experts are those of
`linear_kernels.py`, whose rows know their expert.
"""

import triton
import triton.language as tl

from kukri.kernels.gpu.bits import tree_sum
from kukri.kernels.gpu.overlap import await_inputs


@triton.jit
def route(logits, weights, experts, n_experts, stride, N_USED: tl.constexpr, E: tl.constexpr,
          NORMALIZED: tl.constexpr):  # fmt: skip
    """The softmax of the N_USED largest logits of a row, or their shares in the softmax of all.

    logits float32 [T, n_experts], rows `stride` apart; E is the power of two >= n_experts. weights float32
    [T, n_experts] are 0 but for the chosen, of equal logits the first; experts int32 [T, N_USED] have those
    with a weight, by their numbers, then -1 for none. A row that holds NaN gets NaN as weights.
    """
    await_inputs()
    row, number = tl.program_id(0).to(tl.int64), tl.arange(0, E)
    inside = number < n_experts
    logit = tl.load(logits + row * stride + number, mask=inside, other=float("-inf"))
    has_nan = tl.max((logit != logit).to(tl.int32), axis=0) > 0
    logit = tl.where(has_nan, 0.0, logit)
    left, chosen = inside, number < 0
    for _i in tl.static_range(N_USED):
        largest = tl.max(tl.where(left, logit, float("-inf")), axis=0)
        first = tl.min(tl.where(left & (logit == largest), number, E), axis=0)
        chosen = chosen | (number == first)
        left = left & (number != first)
    top = tl.max(tl.where(inside, logit, float("-inf")), axis=0)
    share = tl.where(inside, tl.exp(logit - top), 0.0)
    summed = tl.where(chosen, share, 0.0) if NORMALIZED else share
    total = tree_sum(tl.reshape(summed, [1, E]), 1, E)
    weight = tl.where(chosen, tl.reshape(tl.div_rn(share, total + share * 0), [E]), 0.0)
    weight = tl.where(has_nan & chosen, float("nan"), weight)
    tl.store(weights + row * n_experts + number, weight, mask=inside)
    is_used = weight != 0
    place = tl.cumsum(is_used.to(tl.int32), axis=0) - 1
    n_used = tl.sum(is_used.to(tl.int32), axis=0)
    tl.store(experts + row * N_USED + place, number, mask=is_used)
    tl.store(experts + row * N_USED + number, -1, mask=(number >= n_used) & (number < N_USED))


@triton.jit
def combine(x, weights, experts, residual, y, width, n_experts, N_USED: tl.constexpr, W: tl.constexpr,
            HAS_RESIDUAL: tl.constexpr):  # fmt: skip
    """W columns of a token's sum over its rows of x [T * N_USED, width], times their experts' weights.

    Experts are summed in the order of their numbers; rows without one are not read.
    """
    await_inputs()
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * W + tl.arange(0, W)
    total = tl.zeros([W], tl.float32)
    for j in tl.static_range(N_USED):
        expert = tl.load(experts + token * N_USED + j)
        weight = tl.load(weights + token * n_experts + tl.maximum(expert, 0))
        inside = at < tl.where(expert >= 0, width, 0)
        row = tl.load(x + (token * N_USED + j) * width + at, mask=inside, other=0)
        total += tl.where(expert >= 0, weight, 0.0) * row
    if HAS_RESIDUAL:
        total += tl.load(residual + token * width + at, mask=at < width, other=0)
    tl.store(y + token * width + at, total, mask=at < width)
