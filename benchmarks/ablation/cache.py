"""Gains of the KV cache, of cached prefixes, and of key heads that several query heads share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.ablation.trial import Row, Trial, random_ids, request_of, row, run
from kukri.engine import Engine
from kukri.engine.pages import pages_for
from kukri.kernels.arrays import IntArray
from kukri.kernels.cache import KVLayer
from kukri.kernels.paged_kv import PAGE_TOKENS, page_bytes

_SMOLLM3_3B = (36, 16, 4, 128)  # layers, query heads, key heads, head size
_Generate = Callable[[Engine, IntArray, int], list[int]]


def kv_cache(trial: Trial) -> Iterator[Row]:
    """A text is continued with the cache, and with all of it computed again for each token.

    Without the cache the text so far is read as a new prompt, so the gain grows with the length of the text.
    """
    engine, random = trial.engine, np.random.default_rng(0)
    for n_prompt, n_new in trial.sizes.generations:
        prompt = random_ids(engine, n_prompt, random)

        def seconds(function: _Generate, prompt: IntArray = prompt, n_new: int = n_new) -> float:
            started = time.perf_counter()
            function(engine, prompt, n_new)
            return time.perf_counter() - started

        measure = f"{n_new} tokens after a prompt of {n_prompt}"
        rounds = trial.in_turns(measure, lambda: seconds(generate_without_cache), lambda: seconds(generate))
        yield row(measure, "s", rounds, (10, 20))


def generate(engine: Engine, prompt: IntArray, n_new: int) -> list[int]:
    """Greedy tokens, by the engine as it is."""
    return run(engine, request_of(engine, prompt, n_new)).output_ids


def generate_without_cache(engine: Engine, prompt: IntArray, n_new: int) -> list[int]:
    """Generates without a KV cache: each token recomputes the keys and values of all before it."""
    ids = prompt
    for _ in range(n_new):
        ids = np.append(ids, np.array(generate(engine, ids, 1), np.int32))
    tokens: list[int] = ids[len(prompt) :].tolist()
    return tokens


def prefix_cache(trial: Trial) -> Iterator[Row]:
    """The first token of the second of two requests with the same beginning, whose pages are found again."""
    engine, sizes, random = trial.engine, trial.sizes, np.random.default_rng(1)

    def second_request(caches_prefixes: bool) -> float:
        engine.allocator.caches_prefixes = caches_prefixes
        shared = random_ids(engine, sizes.shared_prompt, random)
        for _ in range(2):
            prompt = np.concatenate([shared, random_ids(engine, sizes.own_prompt, random)])
            request = run(engine, request_of(engine, prompt, 1))
        engine.allocator.caches_prefixes = False
        engine.pool.forget()
        return request.timings.first_token_s

    measure = f"first token of {sizes.shared_prompt + sizes.own_prompt}, {sizes.shared_prompt} of them known"
    yield row(
        measure,
        "s",
        trial.in_turns(measure, lambda: second_request(False), lambda: second_request(True)),
    )


def grouped_queries(trial: Trial) -> Iterator[Row]:
    """Bytes of the engine's cache for one context, with as many key as query heads and with fewer."""
    config, n_pages = trial.config, pages_for(trial.sizes.context, PAGE_TOKENS)
    own = (config.n_layers, config.n_heads, config.n_kv_heads, config.d_head)
    for name, (n_layers, n_heads, n_kv_heads, d_head), expected in (
        ("SmolLM3-3B", _SMOLLM3_3B, (4.0, 4.0)),
        ("this model", own, None),
    ):
        all_heads, grouped = (
            n_pages * page_bytes([KVLayer(n, d_head)] * n_layers, "f16") for n in (n_heads, n_kv_heads)
        )
        measure = f"{name}, {n_kv_heads} key heads for {n_heads} query heads"
        yield row(measure, "bytes", [(all_heads, grouped)], expected)
