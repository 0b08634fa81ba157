"""Kernels on a whole step: the check of its indices, and the division of its attention into work entries."""

from __future__ import annotations

from kukri.kernels.cpu.compile.intrinsics import device, load_i32, load_i64, store_i64
from kukri.kernels.cpu.compile.kernel_source import KernelSource
from kukri.kernels.cpu.run.abi import (
    CHUNK_PAGES,
    CHUNK_TOKENS,
    CONTEXT_LEN,
    LOGIT_ROWS,
    MAX_PAGES,
    N_LOGIT_ROWS,
    N_PARTS,
    N_POSITIONS,
    N_SEQUENCES,
    N_SHARED,
    N_TOKENS,
    N_WORK,
    PAGE_TABLE,
    PARTS_BYTES,
    PARTS_FIRST,
    PARTS_TOKEN,
    POSITIONS,
    QUERY_START,
    ROPE_POSITIONS,
    SHARED_FIRST,
    SHARED_STEP,
    SHARED_TOKEN,
    SLOTS,
    STATE_SAVES,
    STATE_SLOTS,
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
from kukri.kernels.paged_kv import PAGE_TOKENS


@device
def _outside(array, n, limit, least=0):
    """True if any of n int32 is below the least or not below the limit."""
    for i in range(n):
        value = load_i32(array + 4 * i)
        if value < least or value >= limit:
            return True
    return False


def check_batch(tile, batch, n_vocab, n_pages, max_pages, n_positions, n_types, n_states, free_contexts):
    """0 if no index of the batch leads outside its array, else which check failed (see BATCH_CHECKS).

    `n_states` is -1 for a model without recurrent layers. With `free_contexts` a context may end before its
    sequence, or after.
    """
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
        if stop <= start or stop > n_tokens:
            return 4
        end = load_i32(load_i64(batch + POSITIONS) + 4 * (stop - 1)) + 1
        if context <= 0 or end < stop - start or (context != end and free_contexts == 0):
            return 4
        n_used = (context + PAGE_TOKENS - 1) // PAGE_TOKENS
        if n_used > max_pages or end > n_positions:
            return 5
        if _outside(load_i64(batch + PAGE_TABLE) + 4 * s * load_i64(batch + MAX_PAGES), n_used, n_pages):
            return 6
        for t in range(start, stop):
            if load_i32(load_i64(batch + POSITIONS) + 4 * t) != end - (stop - t):
                return 7
    rotates_by = load_i64(batch + ROPE_POSITIONS)
    if rotates_by != load_i64(batch + POSITIONS) and _outside(rotates_by, n_tokens, n_positions):
        return 8
    if n_types > 0 and _outside(load_i64(batch + TOKEN_TYPES), n_tokens, n_types):
        return 9
    if n_states >= 0 and (
        _outside(load_i64(batch + STATE_SLOTS), n_sequences, n_states)
        or _outside(load_i64(batch + STATE_SAVES), n_tokens, n_states, -1)
    ):
        return 10
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


@device
def _context(batch, sequence, stop_key):
    return min(load_i32(load_i64(batch + CONTEXT_LEN) + 4 * sequence), stop_key)


@device
def _n_new(batch, sequence):
    starts = load_i64(batch + QUERY_START) + 4 * sequence
    return load_i32(starts + 4) - load_i32(starts)


@device
def _first_chunk(batch, token, window, first_key):
    """The chunk of the first key that a token sees."""
    position = load_i32(load_i64(batch + POSITIONS) + 4 * token)
    return max(position - window + 1, first_key) // CHUNK_TOKENS


@device
def _same_chunks(batch, a, b, begin, most, stop_key):
    """Chunks from `begin` on, at most `most`, that two sequences read from the same pages, and past which
    both see more.
    """
    row_bytes = 4 * load_i64(batch + MAX_PAGES)
    a_pages = load_i64(batch + PAGE_TABLE) + a * row_bytes
    b_pages = load_i64(batch + PAGE_TABLE) + b * row_bytes
    both = min(_context(batch, a, stop_key), _context(batch, b, stop_key))
    stop = min(begin + most, both // CHUNK_TOKENS)
    for page in range(begin * CHUNK_PAGES, stop * CHUNK_PAGES):
        if load_i32(a_pages + 4 * page) != load_i32(b_pages + 4 * page):
            return page // CHUNK_PAGES - begin
    return max(stop - begin, 0)


@device
def _sharing(batch, first, group_tokens, window, first_key, stop_key):
    """(sequences from `first` on that decode from a common prefix, its chunks): where it saves most reads.

    (1, 0) if no prefix is shared. Sequences are taken `group_tokens` at a time, the last time more than half.
    Sequences whose windows begin in another chunk do not share, because an entry reads one sequence's pages.
    """
    members = 1
    shared = 0
    starts = load_i64(batch + QUERY_START)
    if group_tokens > 1 and _n_new(batch, first) == 1:
        begin = _first_chunk(batch, load_i32(starts + 4 * first), window, first_key)
        most = _context(batch, first, stop_key)
        for sequence in range(first + 1, load_i64(batch + N_SEQUENCES)):
            if _n_new(batch, sequence) != 1:
                break
            if _first_chunk(batch, load_i32(starts + 4 * sequence), window, first_key) != begin:
                break
            same = _same_chunks(batch, first, sequence, begin, most, stop_key)
            if same * members <= shared * (members - 1):
                break
            shared = same
            most = same
            members += 1
    left = members % group_tokens
    if 2 * left <= group_tokens:
        members -= left
    return (members, shared) if members > 1 else (1, 0)


@device
def _add_shared_work(batch, n_work, n_partials, first, members, begin, shared, group_tokens):
    """Entries for the chunks that sequences share, from `begin` on -> the number of entries.

    Chunk by chunk, for the cache.
    """
    start = load_i32(load_i64(batch + QUERY_START) + 4 * first)
    step = (members + group_tokens - 1) // group_tokens
    for i in range(members):
        parts = load_i64(batch + TOKEN_PARTS) + PARTS_BYTES * (start + i)
        store_i64(parts + SHARED_FIRST, n_partials + i // group_tokens)
        store_i64(parts + N_SHARED, shared)
        store_i64(parts + SHARED_STEP, step)
        store_i64(parts + SHARED_TOKEN, i % group_tokens)
    for chunk in range(shared):
        for i in range(0, members, group_tokens):
            n_tokens = min(group_tokens, members - i)
            number = n_partials + chunk * step + i // group_tokens
            at = begin + chunk
            n_work = _add_work(batch, n_work, first + i, start + i, n_tokens, at, at + 1, number)
    return n_work


def attention_work(
    tile, batch, group_tokens, most_tokens, n_ahead, window, first_key, stop_key, least_entries
):
    """Cuts the step into work entries of `group_tokens` to `most_tokens` tokens, several for each sequence.

    A sequence has `least_entries` or more, about equal in size, if it has the tokens: threads share them. Up
    to `group_tokens` of a sequence with a long context are cut by chunk.

    A token sees `window` tokens up to itself, and `n_ahead` after it, of those from `first_key` to
    `stop_key` - 1: entries begin at the first chunk that holds one of them, as a partial result without
    scores would change no bit. Sequences that decode from the same prefix share its entries: its keys and
    values are read once for several. A chunk is cut at the same positions and summed in the same order either
    way, so no bit depends on it.
    """
    if tile < 0:
        return 1
    n_work = 0
    n_partials = 0
    members = 0  # sequences left of those that share
    shared = 0  # their chunks
    for sequence in range(load_i64(batch + N_SEQUENCES)):
        start = load_i32(load_i64(batch + QUERY_START) + 4 * sequence)
        stop = start + _n_new(batch, sequence)
        if members == 0:
            members, shared = _sharing(batch, sequence, group_tokens, window, first_key, stop_key)
            if shared > 0:
                begin = _first_chunk(batch, start, window, first_key)
                n_work = _add_shared_work(
                    batch, n_work, n_partials, sequence, members, begin, shared, group_tokens
                )
                n_partials += shared * ((members + group_tokens - 1) // group_tokens)
        members -= 1
        n_new = stop - start
        n_entries = max(least_entries, (n_new + most_tokens - 1) // most_tokens)
        entry_tokens = max(group_tokens, (n_new + n_entries - 1) // n_entries)
        for token in range(start, stop, entry_tokens):
            n_tokens = min(entry_tokens, stop - token)
            last = load_i32(load_i64(batch + POSITIONS) + 4 * (token + n_tokens - 1))
            visible = min(_context(batch, sequence, stop_key), last + 1 + n_ahead)
            first_chunk = _first_chunk(batch, token, window, first_key)
            chunk_stop = (visible + CHUNK_TOKENS - 1) // CHUNK_TOKENS
            is_split = stop - start <= group_tokens and chunk_stop - first_chunk > 1
            for t in range(token, token + n_tokens):
                parts = load_i64(batch + TOKEN_PARTS) + PARTS_BYTES * t
                store_i64(parts + PARTS_FIRST, n_partials if is_split or shared > 0 else -1)
                store_i64(parts + N_PARTS, chunk_stop - first_chunk - shared)
                store_i64(parts + PARTS_TOKEN, t - token)
                if shared == 0:
                    store_i64(parts + N_SHARED, 0)
            if is_split:
                for chunk in range(first_chunk + shared, chunk_stop):
                    n_work = _add_work(batch, n_work, sequence, token, n_tokens, chunk, chunk + 1, n_partials)
                    n_partials += 1
            elif shared == 0:
                n_work = _add_work(batch, n_work, sequence, token, n_tokens, first_chunk, chunk_stop, -1)
    store_i64(batch + N_WORK, n_work)
    return 0


KERNELS = {
    "check_batch": KernelSource("check_batch", check_batch),
    "attention_work": KernelSource("attention_work", attention_work),
}
