"""The query rows of an attention work entry: how they are loaded, which keys they see, and how they end.

Rows are (token, head) pairs that share a key head, token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple

from kukri.kernels.cpu.codegen.head_rotation import rotate_head
from kukri.kernels.cpu.compile.intrinsics import device, load_f32, load_i32, load_i64, part, store_i64
from kukri.kernels.cpu.compile.simd import (
    exponential,
    hyperbolic_tangent,
    load_f32x16,
    splat,
    store_f32x16,
)
from kukri.kernels.cpu.run.abi import (
    CHUNK_PAGES,
    CONTEXT_LEN,
    MAX_PAGES,
    PAGE_TABLE,
    POSITIONS,
    WORK_N_TOKENS,
    WORK_SEQUENCE,
    WORK_TOKEN,
)
from kukri.kernels.paged_kv import PAGE_TOKENS

NO_SCORE = -1.0e30  # the maximum of no scores: finite, so that differences stay defined
PAGES_BYTES = 8 * (CHUNK_PAGES + 1)  # page offsets of a chunk
# a row: the first and the last key that it sees, and the address of its bias for the key at 0
RANGE_BYTES = 24


class Work(NamedTuple):
    """The arguments of a work entry and one key head: addresses, byte strides, vectors and counts."""

    batch: Any
    entry: Any
    head: Any
    q: Any
    q_stride: Any
    scale: Any  # 16 lanes, as the cap
    cap: Any
    keys: Any  # this head's, as the values
    values: Any
    next_keys: Any  # the next head's of the thread; this head's if it is the last
    page_stride: Any
    window: Any
    n_ahead: Any
    first_key: Any
    stop_key: Any
    distances: Any  # the first head's for a distance of 0; then a head's bytes
    distance_stride: Any
    sinks: Any
    partials: Any
    y: Any
    y_stride: Any


def make_load_rows(group: int, d_head: int) -> Any:
    """A function for `rows` query rows of a work entry, scaled, and RANGE_BYTES of each."""
    row_bytes = 4 * d_head

    @device
    def load_rows(work, rows, rows_q, ranges):
        """Gives the first position that any row sees."""
        token = load_i64(work.entry + WORK_TOKEN)
        n_tokens = load_i64(work.entry + WORK_N_TOKENS)
        positions = load_i64(work.batch + POSITIONS)
        last = load_i32(load_i64(work.batch + CONTEXT_LEN) + 4 * load_i64(work.entry + WORK_SEQUENCE)) - 1
        last = min(last, work.stop_key - 1)
        first_visible = load_i32(positions + 4 * token)
        for row in range(rows):
            t = token + min(row // group, n_tokens - 1)  # rows past the end repeat the last token
            source = work.q + t * work.q_stride + (work.head * group + row % group) * row_bytes
            for i in range(0, row_bytes, 64):
                store_f32x16(rows_q + row * row_bytes + i, load_f32x16(source + i) * work.scale)
            position = load_i32(positions + 4 * t)
            first = max(position - work.window + 1, work.first_key)
            first_visible = min(first_visible, first)
            place = ranges + RANGE_BYTES * row
            store_i64(place, first)
            store_i64(place + 8, min(position + work.n_ahead, last))
            of_head = work.distances + (work.head * group + row % group) * work.distance_stride
            store_i64(place + 16, of_head - 4 * position)
        return first_visible

    return load_rows


@device
def load_pages(work, base, n_context, pages):
    """Stores the byte offsets of a chunk's 4 pages and of the next; of the first for those past the end."""
    sequence = load_i64(work.entry + WORK_SEQUENCE)
    table = load_i64(work.batch + PAGE_TABLE) + 4 * sequence * load_i64(work.batch + MAX_PAGES)
    for page in range(CHUNK_PAGES + 1):
        index = base // PAGE_TOKENS + (page if base + page * PAGE_TOKENS < n_context else 0)
        store_i64(pages + 8 * page, load_i32(table + 4 * index) * work.page_stride)


@device
def finish(top, total, values, y, d_head, sink):
    """y = a finished row: its values over its sum, to which the score at `sink` adds; -inf adds nothing.

    Arguments are addresses: of the row's largest score, its sum of exponentials, and its values.
    """
    score = splat(load_f32(sink)) - splat(load_f32(top))
    sums = splat(load_f32(total)) + exponential(score)
    for i in range(0, d_head * 4, 64):
        store_f32x16(y + i, load_f32x16(values + i) / sums)


@device
def finish_rotated(top, total, values, y, d_head, sink):
    """The same from values that are rotated, rotated back."""
    finish(top, total, values, y, d_head, sink)
    rotate_head(y, d_head)


def each(n: int, make: Callable[[int], Callable[..., Any]]) -> Any:
    """A function that gives the tuple of make(0)(…), …, make(n - 1)(…)."""
    functions = [make(i) for i in range(n)]
    namespace = {f"part_{i}": part(function) for i, function in enumerate(functions)}
    arguments = ", ".join(signature(functions[0]).parameters)
    calls = "".join(f"{name}({arguments}), " for name in namespace)
    exec(f"def each_part({arguments}):\n    return ({calls})", namespace)
    return device(namespace["each_part"])


@device
def _plain(scores, cap, biases):
    return scores


@device
def _capped(scores, cap, biases):
    return hyperbolic_tangent(scores / cap) * cap


@device
def _biased(scores, cap, biases):
    return scores + load_f32x16(biases)


# what becomes of 16 scores, by the ending of a kernel's name; `biases` is an address
ADJUSTED = {"": _plain, "_softcap": _capped, "_biased": _biased}
