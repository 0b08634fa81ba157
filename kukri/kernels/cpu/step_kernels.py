"""Kernels on a whole step: the check of its indices, and the division of its attention into work entries."""

from __future__ import annotations

from kukri.kernels.cpu.abi import (
    CHUNK_TOKENS,
    CONTEXT_LEN,
    LOGIT_ROWS,
    MAX_PAGES,
    N_LOGIT_ROWS,
    N_POSITIONS,
    N_SEQUENCES,
    N_TOKENS,
    N_WORK,
    PAGE_TABLE,
    POSITIONS,
    QUERY_START,
    ROPE_POSITIONS,
    SLOTS,
    TOKEN_IDS,
    TOKEN_PARTS,
    TOKEN_TYPES,
    WORK,
    WORK_BYTES,
    WORK_CHUNK,
    WORK_CHUNK_STOP,
    WORK_N_TOKENS,
    WORK_PARTIAL,
    WORK_SEQUENCE,
    WORK_TOKEN,
)
from kukri.kernels.cpu.intrinsics import device, load_i32, load_i64, store_i64
from kukri.kernels.cpu.kernel_cache import KernelSource
from kukri.kernels.paged_kv import PAGE_TOKENS


@device
def _outside(array, n, limit):
    """True if any of n int32 is below 0 or not below the limit."""
    for i in range(n):
        value = load_i32(array + 4 * i)
        if value < 0 or value >= limit:
            return True
    return False


def check_batch(tile, batch, n_vocab, n_pages, max_pages, n_positions, n_types):
    """0 if no index of the batch leads outside its array, else which check failed (see BATCH_CHECKS)."""
    n_tokens = load_i64(batch + N_TOKENS)
    n_sequences = load_i64(batch + N_SEQUENCES)
    starts = load_i64(batch + QUERY_START)
    if _outside(load_i64(batch + TOKEN_IDS), n_tokens, n_vocab):
        return 1
    if _outside(load_i64(batch + SLOTS), n_tokens, n_pages * PAGE_TOKENS):
        return 2
    if _outside(load_i64(batch + LOGIT_ROWS), load_i64(batch + N_LOGIT_ROWS), n_tokens):
        return 3
    if load_i32(starts) != 0 or load_i32(starts + 4 * n_sequences) != n_tokens:
        return 4
    for s in range(n_sequences):
        start = load_i32(starts + 4 * s)
        stop = load_i32(starts + 4 * s + 4)
        context = load_i32(load_i64(batch + CONTEXT_LEN) + 4 * s)
        if stop <= start or context < stop - start:
            return 4
        n_used = (context + PAGE_TOKENS - 1) // PAGE_TOKENS
        if n_used > max_pages or context > n_positions:
            return 5
        if _outside(load_i64(batch + PAGE_TABLE) + 4 * s * load_i64(batch + MAX_PAGES), n_used, n_pages):
            return 6
        for t in range(start, stop):
            if load_i32(load_i64(batch + POSITIONS) + 4 * t) != context - (stop - t):
                return 7
    rotates_by = load_i64(batch + ROPE_POSITIONS)
    if rotates_by != load_i64(batch + POSITIONS) and _outside(rotates_by, n_tokens, n_positions):
        return 8
    if n_types > 0 and _outside(load_i64(batch + TOKEN_TYPES), n_tokens, n_types):
        return 9
    highest = 0
    for t in range(n_tokens):
        highest = max(highest, load_i32(rotates_by + 4 * t))
    store_i64(batch + N_POSITIONS, highest + 1)
    return 0


@device
def _add_work(batch, n_work, sequence, token, n_tokens, chunk, chunk_stop, partial):
    entry = load_i64(batch + WORK) + n_work * WORK_BYTES
    store_i64(entry + WORK_SEQUENCE, sequence)
    store_i64(entry + WORK_TOKEN, token)
    store_i64(entry + WORK_N_TOKENS, n_tokens)
    store_i64(entry + WORK_CHUNK, chunk)
    store_i64(entry + WORK_CHUNK_STOP, chunk_stop)
    store_i64(entry + WORK_PARTIAL, partial)
    return n_work + 1


def attention_work(tile, batch, group_tokens, n_ahead):
    """Cuts the step into work entries of `group_tokens` tokens; few tokens with a long context by chunk.

    A token sees `n_ahead` tokens after it.
    """
    if tile < 0:
        return 1
    parts = load_i64(batch + TOKEN_PARTS)
    n_work = 0
    n_partials = 0
    for sequence in range(load_i64(batch + N_SEQUENCES)):
        start = load_i32(load_i64(batch + QUERY_START) + 4 * sequence)
        stop = load_i32(load_i64(batch + QUERY_START) + 4 * sequence + 4)
        context = load_i32(load_i64(batch + CONTEXT_LEN) + 4 * sequence)
        for token in range(start, stop, group_tokens):
            n_tokens = min(group_tokens, stop - token)
            visible = context - max(stop - token - n_tokens - n_ahead, 0)
            n_chunks = (visible + CHUNK_TOKENS - 1) // CHUNK_TOKENS
            is_split = stop - start <= group_tokens and n_chunks > 1
            for t in range(token, token + n_tokens):
                store_i64(parts + 16 * t, n_partials if is_split else -1)
                store_i64(parts + 16 * t + 8, n_chunks)
            if is_split:
                for chunk in range(n_chunks):
                    n_work = _add_work(batch, n_work, sequence, token, n_tokens, chunk, chunk + 1, n_partials)
                    n_partials += 1
            else:
                n_work = _add_work(batch, n_work, sequence, token, n_tokens, 0, n_chunks, -1)
    store_i64(batch + N_WORK, n_work)
    return 0


KERNELS = {
    "check_batch": KernelSource("check_batch", check_batch),
    "attention_work": KernelSource("attention_work", attention_work),
}
