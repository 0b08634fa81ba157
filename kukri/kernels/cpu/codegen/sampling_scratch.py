"""The memory that a thread needs to sample a row: plain numbers, readable without a compiler.

A scratch begins with a *context*: the numbers that stages share, int64 if not noted otherwise. Arrays of
fixed size follow, then six arrays with an entry for each token of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

from kukri.kernels.sampling_record import MAX_VOCAB

N_DIGITS = 256
SUM_BLOCK = 1024  # tokens whose weights are summed on their own in a draw
GROUP = 16  # vectors of logits that share a vector of maxima


class ContextOffsets(NamedTuple):
    """Byte offsets of a context's fields."""

    record: int = 0  # address of the row's record
    pool: int = 8  # address of the tables
    n: int = 16  # the vocabulary
    row: int = 24  # address of the logits of all tokens, padded with -inf to whole vectors
    maxima: int = 32  # address of the maxima of each GROUP vectors of the row
    # the candidates, if there are any: ids ascending, and their logits, padded like the row
    n_candidates: int = 40  # negative while every token of the row is in play
    ids: int = 48
    logits: int = 56
    # for the candidates, or for a part of the row: filled in by `weigh`
    depths: int = 64
    weights: int = 72
    peak: int = 80  # float64: the largest logit in play
    scale: int = 88  # float64: 1 after all temperatures so far
    is_edited: int = 96  # 1: `peak` and `maxima` may be wrong


CONTEXT = ContextOffsets()
HISTOGRAM = 128  # float64 [N_DIGITS]
BLOCK_SUMS = HISTOGRAM + 8 * N_DIGITS  # float64 [MAX_VOCAB / SUM_BLOCK]
ARRAYS = BLOCK_SUMS + 8 * (MAX_VOCAB // SUM_BLOCK)


def padded_size(n: int) -> int:
    """Entries of an array with one for each of `n` tokens: whole vectors, and one more."""
    return (n + 31) & -16


def scratch_bytes(n: int) -> int:
    """Bytes of a scratch for a vocabulary of `n`: maxima, the row, and candidates' arrays come last."""
    return ARRAYS + 6 * 4 * padded_size(n)
