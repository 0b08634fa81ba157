"""Attention of a whole prompt: over KV pages in chunks, and by way of the matrix of all scores.

Each kind runs in a process of its own, `python -m benchmarks.ablation.attention`, with the same random q, k
and v and the same threads, so that the most memory it came to hold can be told.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.ablation.trial import Row, Trial, row
from benchmarks.child import Child, serve
from kukri.engine.pages import pages_for
from kukri.host.hardware import peak_rss_bytes
from kukri.kernels.arrays import FloatArray
from kukri.kernels.cache import KVLayer
from kukri.kernels.cpu import CpuBackend
from kukri.kernels.paged_kv import PAGE_TOKENS, PagedKV
from kukri.kernels.specs import AttentionSpec
from kukri.kernels.step import ForwardBatch, StepLimits
from kukri.kernels.weight_handles import Weight
from kukri.quant.types import QUANT_TYPES

_SOFTMAX_ROWS = 64  # that a thread takes at a time: what it goes over three times stays in its cache
_SYSTEM_PAGE = 4096  # bytes: less cannot be told
_BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


@dataclass(frozen=True)
class Heads:
    """The shape of a layer's attention."""

    n_heads: int
    n_kv_heads: int
    d_head: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """Columns of q, k and v."""
        kv = self.n_kv_heads * self.d_head
        return self.n_heads * self.d_head, kv, kv


def attention(trial: Trial) -> Iterator[Row]:
    """One layer's attention of a whole prompt, with the model's heads and each side in a process of its own.

    NumPy computes the matrix of scores for one query head after another, with BLAS in all threads. The
    engine's kernel keeps running sums; its cache is in float16. Memory is what came to be resident next to q,
    k, v and the result.
    """
    config = trial.config
    numbers = [config.n_heads, config.n_kv_heads, config.d_head, trial.n_threads]
    variables = dict.fromkeys(_BLAS_THREADS, str(trial.n_threads))
    for n_tokens in trial.sizes.attention:
        arguments = [str(number) for number in (n_tokens, *numbers)]
        with (
            Child("attention", ["benchmarks.ablation.attention", "matrix", *arguments], variables) as matrix,
            Child("attention", ["benchmarks.ablation.attention", "paged", *arguments], variables) as paged,
        ):
            children = (matrix, paged)
            for child in children:
                child.ready()
            held = [child.ask("held_bytes") for child in children]
            measure = f"{n_tokens} tokens"
            seconds = trial.in_turns(
                f"attention of {measure}",
                *(partial(child.ask, "seconds") for child in children),
            )
        yield row(f"{measure}: time", "s", seconds)
        yield row(f"{measure}: memory", "bytes", [held])


class Matrix:
    """Attention by the whole matrix of scores; call it for the result, float32 [T, H*K].

    `rows` are q, k and v side by side, float32 [T, (H + 2G)*K].
    """

    copies_rows = False

    def __init__(self, rows: FloatArray, heads: Heads, n_threads: int) -> None:
        self._heads, self._threads = heads, ThreadPoolExecutor(n_threads)
        q, k, v = np.split(rows, np.cumsum(heads.widths)[:2], axis=1)
        self._q, self._k, self._v = (np.split(x, x.shape[1] // heads.d_head, axis=1) for x in (q, k, v))
        self._scores = np.empty((len(rows), len(rows)), np.float32)
        self._sums = np.empty((len(rows), 1), np.float32)
        self._y = np.empty((len(rows), heads.widths[0]), np.float32)

    def __call__(self) -> FloatArray:
        """Computes it."""
        heads, group = self._heads, self._heads.n_heads // self._heads.n_kv_heads
        scale = np.float32(heads.d_head**-0.5)
        for head, y in enumerate(np.split(self._y, heads.n_heads, axis=1)):
            np.matmul(self._q[head] * scale, self._k[head // group].T, out=self._scores)
            list(self._threads.map(self._softmax, range(0, len(self._y), _SOFTMAX_ROWS)))
            y[:] = self._scores @ self._v[head // group]
            y /= self._sums
        return self._y

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()

    def _softmax(self, start: int) -> None:
        """Turns visible scores of rows into exponentials, masked ones into zeros; stores their sums."""
        stop = min(start + _SOFTMAX_ROWS, len(self._scores))
        self._scores[start:stop, stop:] = 0
        seen = self._scores[start:stop, :stop]
        seen[:, start:][np.triu_indices(stop - start, 1)] = -np.inf
        seen -= seen.max(axis=1, keepdims=True)
        np.exp(seen, out=seen)
        seen.sum(axis=1, keepdims=True, out=self._sums[start:stop])


class Paged:
    """Attention by the engine's kernel: one step of one layer and nothing else."""

    copies_rows = True

    def __init__(self, rows: FloatArray, heads: Heads, n_threads: int, n_results: int = 1) -> None:
        """`n_results`: how many rows of the result, the last ones, a call gives."""
        n_tokens, n_pages = len(rows), pages_for(len(rows), PAGE_TOKENS)
        weight = Weight(rows.view(np.uint8), QUANT_TYPES["F32"], rows.shape)
        spec = AttentionSpec(0, heads.n_heads, heads.n_kv_heads, heads.d_head, heads.d_head**-0.5)

        def program(ops: Any, batch: Any) -> Any:
            q, k, v = ops.split(ops.embed(weight, batch), heads.widths)
            return ops.logit_rows(ops.attention(q, k, v, spec, batch), batch)

        ids = np.arange(n_tokens, dtype=np.int32)
        pages = np.arange(n_pages, dtype=np.int32)[None]
        ends = np.array([0, n_tokens], np.int32)
        self._batch = ForwardBatch(ids, ids, ids, ends, ends[1:], pages, ids[n_tokens - n_results :])
        self._backend = CpuBackend(n_threads)
        cache = PagedKV([KVLayer(heads.n_kv_heads, heads.d_head)], n_pages)
        limits = StepLimits(n_tokens, 1, n_results, n_pages)
        self._compiled = self._backend.compile(program, cache, limits)

    def __call__(self) -> FloatArray:
        """Computes it: the last rows, valid until the next call."""
        return self._compiled(self._batch).numpy()

    def close(self) -> None:
        """Ends the threads."""
        self._backend.close()


KINDS: dict[str, type[Matrix] | type[Paged]] = {"matrix": Matrix, "paged": Paged}


class Bench:
    """One kind on random rows, in a process that does nothing else."""

    def __init__(self, kind: str, n_tokens: int, heads: Heads, n_threads: int) -> None:
        make = KINDS[kind]
        random = np.random.default_rng(0)
        warm = make(random.standard_normal((_SOFTMAX_ROWS, sum(heads.widths)), np.float32), heads, n_threads)
        warm()  # kernels and BLAS are there
        warm.close()
        rows = random.standard_normal((n_tokens, sum(heads.widths)), np.float32)
        before = peak_rss_bytes()
        self._attend = make(rows, heads, n_threads)
        self._attend()
        # a program's rows come from a matrix of weights, from which they are copied
        known = rows.nbytes * self._attend.copies_rows + 4 * n_tokens * heads.widths[0]
        self._held_bytes = max(peak_rss_bytes() - before - known, _SYSTEM_PAGE)

    def held_bytes(self) -> int:
        """Bytes that came to be resident, without those of q, k, v and the result."""
        return self._held_bytes

    def seconds(self) -> float:
        """Seconds of one run."""
        started = time.perf_counter()
        self._attend()
        return time.perf_counter() - started

    def close(self) -> None:
        """Ends the threads."""
        self._attend.close()


if __name__ == "__main__":
    _, _kind, *_numbers = sys.argv
    _n_tokens, *_heads, _n_threads = map(int, _numbers)
    serve(lambda: Bench(_kind, _n_tokens, Heads(*_heads), _n_threads), ("held_bytes", "seconds"))
