"""Mixtures of experts: the choice of experts, their matrix products, and the sum of their results.

`dispatch` orders a step's rows, one for each expert that a token uses, by experts. The rows of an expert
begin with a new panel, so its weights are read once a step, and weights of unused experts are not read.
Products are computed as in `linear`, and results are summed in the order of experts, so that no token's
result depends on other tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kukri.kernels.cpu.codegen.blocks import BLOCK_FUNCTIONS
from kukri.kernels.cpu.codegen.elementwise import PART_COLUMNS, activation_parts
from kukri.kernels.cpu.codegen.linear import CLAIM_BYTES, ROW_TILES_PER_CLAIM, make_panel_tile, steps
from kukri.kernels.cpu.codegen.panels import panel_f32, panel_q8, panel_q8t, panel_width, row_kernel
from kukri.kernels.cpu.compile.intrinsics import (
    device,
    f32_of_bits,
    load_f32,
    load_i32,
    load_i64,
    stack_bytes,
    store_f32,
    store_i32,
    store_i64,
)
from kukri.kernels.cpu.compile.kernel_source import KernelSource
from kukri.kernels.cpu.compile.simd import (
    exponential,
    fma,
    load_f32x16,
    mask_outside,
    max_lanes,
    splat,
    store_f32x16,
    sum_lanes,
)
from kukri.kernels.cpu.pack.layouts import LAYOUTS, PER_TOKEN_TYPE, ROWS, TOKENS, PanelKind, expert_kernel
from kukri.kernels.cpu.run.abi import (
    ENTRY_EXPERT,
    ENTRY_N_ROWS,
    ENTRY_SLOT,
    EXPERT_ENTRY_BYTES,
    MAX_BEST,
    MAX_ENTRY_ROWS,
    MAX_GROUPS,
    N_ENTRIES,
    N_EXPERT_ROWS,
    N_TOKENS,
)

_KEPT_BYTES, _SUMS_BYTES = 8 * MAX_BEST, 4 * MAX_GROUPS
_FEW_ROWS = 64  # rows of a step that decodes: as many as 8 tokens with 8 experts have


@device
def _largest(numbers, n):
    """The index of the largest of n numbers, the first of equals; -1 if all are NaN or -inf."""
    best = -1
    most = np.float32(-np.inf)
    for i in range(n):
        number = load_f32(numbers + 4 * i)
        if number > most:
            best = i
            most = number
    return best


@device
def _share(logit, top):
    """exp(logit - top) of the float32 at an address."""
    return max_lanes(exponential(splat(load_f32(logit)) - top))


@device
def _can_choose(logits, n):
    """True if there is a logit above -inf, and none is NaN or inf."""
    for i in range(0, 4 * n, 4):
        if not load_f32(logits + i) < np.inf:
            return False
    return _largest(logits, n) >= 0


@device
def _score(logit, top, by_sigmoid):
    """The sigmoid of the float32 at an address, or its share."""
    if by_sigmoid == 0:
        return _share(logit, top)
    return np.float32(1.0) / (np.float32(1.0) + max_lanes(exponential(splat(0.0) - splat(load_f32(logit)))))


@device
def _best_sum(numbers, n, n_best):
    """The sum of the n_best largest of n numbers."""
    kept = stack_bytes(_KEPT_BYTES)
    total = np.float32(0.0)
    n_found = 0
    for _ in range(min(n_best, MAX_BEST)):
        best = _largest(numbers, n)
        if best >= 0:
            number = load_f32(numbers + 4 * best)
            total += number
            store_i32(kept + 8 * n_found, best)
            store_f32(kept + 8 * n_found + 4, number)
            store_f32(numbers + 4 * best, np.float32(np.nan))
            n_found += 1
    for i in range(n_found):
        store_f32(numbers + 4 * load_i32(kept + 8 * i), load_f32(kept + 8 * i + 4))
    return total


@device
def _keep_groups(numbers, n, n_groups, n_kept, n_best):
    """Set the numbers, of n, that are not in the best groups to -inf."""
    sums = stack_bytes(_SUMS_BYTES)
    size = n // n_groups
    for group in range(n_groups):
        store_f32(sums + 4 * group, _best_sum(numbers + 4 * group * size, size, n_best))
    for _ in range(n_kept):
        best = _largest(sums, n_groups)
        if best >= 0:
            store_f32(sums + 4 * best, np.float32(np.nan))
    for i in range(n):
        total = load_f32(sums + 4 * (i // size))
        if total == total:
            store_f32(numbers + 4 * i, np.float32(-np.inf))


@device
def _nearest_share(logits, n, own, tolerance):
    """Return the share of the logit `own` among logits about as good that were not chosen before it."""
    best = load_f32(logits + 4 * own)
    total = np.float32(0.0)
    for i in range(n):
        logit = load_f32(logits + 4 * i)
        is_left = logit < best or (logit == best and i >= own)
        if is_left and not (best - logit) / max(abs(logit), best) > tolerance:
            total += _share(logits + 4 * i, splat(best))
    return np.float32(1.0) / total


def route(
    row,
    x,
    x_stride,
    n,
    n_used,
    normalized,
    by_sigmoid,
    bias,
    n_groups,
    n_groups_used,
    n_best,
    tolerance,
    y,
    y_stride,
):
    """y = the scores of the n_used best of n logits, divided by their sum or by the sum of all; 0 for the
    rest.

    With a tolerance the scores are `_nearest_share`'s. If the logits have NaN or cannot be ordered, the
    weights of the first n_used experts are NaN.
    """
    logits = x + row * x_stride
    weights = y + row * y_stride
    if not _can_choose(logits, n):
        for i in range(n):
            store_f32(weights + 4 * i, np.float32(np.nan) if i < n_used else np.float32(0.0))
        return
    top = splat(load_f32(logits + 4 * _largest(logits, n)))
    whole = np.float32(1.0)
    if by_sigmoid == 0 and (normalized == 0 or bias != 0 or n_groups > 1):
        whole = np.float32(0.0)
        for i in range(0, n, 16):
            shares = exponential(mask_outside(load_f32x16(logits + 4 * i), i, 0, n - 1) - top)
            whole += sum_lanes(shares)
    if bias == 0 and n_groups == 1:  # scores have the order of the logits
        for i in range(0, 4 * n, 4):
            store_f32(weights + i, load_f32(logits + i))
    else:
        for i in range(0, 4 * n, 4):
            score = _score(logits + i, top, by_sigmoid) / whole
            store_f32(weights + i, score + load_f32(bias + i) if bias != 0 else score)
    if n_groups > 1:
        _keep_groups(weights, n, n_groups, n_groups_used, n_best)
    total = np.float32(0.0)
    for _ in range(n_used):
        best = _largest(weights, n)
        if best >= 0:
            store_f32(weights + 4 * best, np.float32(np.nan))  # chosen
            total += _score(logits + 4 * best, top, by_sigmoid)
    if normalized == 0:
        total = whole
    for i in range(0, 4 * n, 4):
        weight = load_f32(weights + i)
        is_chosen = weight != weight
        if is_chosen and tolerance != 0:
            store_f32(weights + i, _nearest_share(logits, n, i // 4, f32_of_bits(tolerance)))
        else:
            score = _score(logits + i, top, by_sigmoid)
            store_f32(weights + i, score / total if is_chosen else np.float32(0.0))


def dispatch(
    tile, batch, weights, stride, n_experts, n_used, table, entries, next_slots, experts, slots, rows_of_slots
):
    """Fills the table of a step's rows (abi.py) by the weights [T, E] that are not 0, NaN among them.

    Without weights (0) every expert gets a row of each token.
    """
    if tile < 0:
        return 1
    n_tokens = load_i64(batch + N_TOKENS)
    for expert in range(n_experts):
        store_i64(next_slots + 8 * expert, 0)  # its rows so far
    for t in range(n_tokens):
        row = t * n_used
        stop = row + n_used
        for expert in range(n_experts):
            is_used = weights == 0 or load_f32(weights + t * stride + 4 * expert) != 0.0
            if is_used and row < stop:
                store_i32(experts + 4 * row, expert)
                store_i64(next_slots + 8 * expert, load_i64(next_slots + 8 * expert) + 1)
                row += 1
        for unused in range(row, stop):
            store_i32(experts + 4 * unused, -1)
    slot = 0
    n_entries = 0
    for expert in range(n_experts):
        n_rows = load_i64(next_slots + 8 * expert)
        store_i64(next_slots + 8 * expert, slot)
        for first in range(0, n_rows, MAX_ENTRY_ROWS):
            entry = entries + n_entries * EXPERT_ENTRY_BYTES
            store_i64(entry + ENTRY_EXPERT, expert)
            store_i64(entry + ENTRY_SLOT, slot + first)
            store_i64(entry + ENTRY_N_ROWS, min(n_rows - first, MAX_ENTRY_ROWS))
            n_entries += 1
        slot += (n_rows + TOKENS - 1) // TOKENS * TOKENS
    for row in range(n_tokens * n_used):
        expert = load_i32(experts + 4 * row)
        slot = -1
        if expert >= 0:
            slot = load_i64(next_slots + 8 * expert)
            store_i64(next_slots + 8 * expert, slot + 1)
            store_i32(rows_of_slots + 4 * slot, row)
        store_i32(slots + 4 * row, slot)
    store_i64(table + N_EXPERT_ROWS, n_tokens * n_used)
    store_i64(table + N_ENTRIES, n_entries)
    return 0


def _make_expert_panel(kind: PanelKind, panel: Callable[..., None]) -> KernelSource:
    """Make the kernel that writes rows as `panel` does, at their slots; `repeats` rows share a row of x.

    `next_slots` has the slot after each expert's last, as `dispatch` leaves it.
    """
    write = device(panel)

    def expert_panel(row, slots, experts, next_slots, repeats, x, x_stride, n, panels):
        slot = load_i32(slots + 4 * row)
        if slot >= 0:
            width = panel_width(slot, load_i64(next_slots + 8 * load_i32(experts + 4 * row)))
            write(slot, width, x + (row // repeats - slot) * x_stride, x_stride, n, panels)

    expert_panel.__name__ = f"expert_panel_{kind}"
    return row_kernel(expert_panel)


def _make_expert_linear(weight_type: str, kind: PanelKind) -> KernelSource:
    """The kernel of a weight type, for panels of a kind."""
    w_step, w_tail, x_step, x_tail, _ = steps(weight_type, kind)
    panel_tile = make_panel_tile(weight_type, kind)
    out_stride = 4 * ROWS
    out_bytes = TOKENS * out_stride

    def expert_linear(
        tile, table, entries, rows_of_slots, w, expert_bytes, x, n_row_tiles, n_blocks, y, y_stride, bias,
        bias_stride,
    ):  # fmt: skip
        """Strides are bytes, `bias` is 0 for none. A tile is some rows of the weights of one entry."""
        w_tile_bytes = n_blocks * w_step + w_tail
        per_claim = ROW_TILES_PER_CLAIM
        if load_i64(table + N_EXPERT_ROWS) <= _FEW_ROWS:
            per_claim = max(CLAIM_BYTES // w_tile_bytes, 1)
        n_claims = (n_row_tiles + per_claim - 1) // per_claim
        if tile < 0:
            return load_i64(table + N_ENTRIES) * n_claims
        entry = entries + tile // n_claims * EXPERT_ENTRY_BYTES
        first_row_tile = tile % n_claims * per_claim
        stop_row_tile = min(first_row_tile + per_claim, n_row_tiles)
        expert = load_i64(entry + ENTRY_EXPERT)
        first_slot = load_i64(entry + ENTRY_SLOT)
        stop_slot = first_slot + load_i64(entry + ENTRY_N_ROWS)
        panel_step = TOKENS * (n_blocks * x_step + x_tail)
        out = stack_bytes(out_bytes)
        for slot in range(first_slot, stop_slot, TOKENS):
            count = min(stop_slot - slot, TOKENS)
            xp = x + (slot // TOKENS) * panel_step
            for row_tile in range(first_row_tile, stop_row_tile):
                wp = w + expert * expert_bytes + row_tile * w_tile_bytes
                column = 4 * ROWS * row_tile
                bp = bias + expert * bias_stride + column if bias != 0 else 0
                panel_tile(wp, xp, n_blocks, out, out_stride, bp, 0, 0, count)
                for i in range(count):
                    row = load_i32(rows_of_slots + 4 * (slot + i))
                    store_f32x16(y + row * y_stride + column, load_f32x16(out + i * out_stride))
        return 0

    return KernelSource(expert_kernel(weight_type, kind), expert_linear)


def combine(
    row,
    part,
    x,
    x_stride,
    n,
    weights,
    weights_stride,
    n_used,
    experts,
    residual,
    residual_stride,
    y,
    y_stride,
):
    """y = the sum over a token's experts of weight * x, in their order, + residual."""
    start = 4 * PART_COLUMNS * part
    stop = min(start + 4 * PART_COLUMNS, 4 * n)
    for i in range(start, stop, 64):
        total = splat(0.0)
        for j in range(row * n_used, row * n_used + n_used):
            expert = load_i32(experts + 4 * j)
            if expert >= 0:
                weight = splat(load_f32(weights + row * weights_stride + 4 * expert))
                total = fma(weight, load_f32x16(x + j * x_stride + i), total)
        if residual != 0:
            total = total + load_f32x16(residual + row * residual_stride + i)
        store_f32x16(y + row * y_stride + i, total)


def _panel_kinds(weight_type: str) -> list[PanelKind]:
    panel = LAYOUTS[weight_type].panel
    if panel == "i16":
        return []  # no experts ask for it
    return [panel, "q8t"] if weight_type == PER_TOKEN_TYPE else [panel]


_PANELS: dict[PanelKind, Callable[..., None]] = {"q8": panel_q8, "q8t": panel_q8t, "f32": panel_f32}
_SOURCES = [
    row_kernel(route),
    KernelSource("dispatch", dispatch),
    *(_make_expert_panel(kind, panel) for kind, panel in _PANELS.items()),
    *(_make_expert_linear(name, kind) for name in BLOCK_FUNCTIONS for kind in _panel_kinds(name)),
    row_kernel(combine, activation_parts),
]
KERNELS = {source.name: source for source in _SOURCES}
