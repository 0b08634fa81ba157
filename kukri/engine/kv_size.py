"""The size of the KV pool and of the context, chosen by the memory that is free."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from kukri.config import KV_TYPE_SIZES
from kukri.dataclass import dataclass
from kukri.engine.pages import most_pages, pages_for
from kukri.errors import ConfigError
from kukri.kernels.backend import Backend
from kukri.kernels.cache import CacheLayout, KVType, pool_layouts, pool_windows
from kukri.kernels.paged_kv import PAGE_TOKENS, page_bytes
from kukri.kernels.vectors import in_vectors

_SHARE = 0.7  # share of the memory that the weights leave: the rest is for activations and other programs
_MOST_PAGES = 1 << 28  # more pages than a request can have: windows hold any
MIN_CONTEXT = 256  # tokens; a model with less is of no use


@dataclass(frozen=True)
class KVCost:
    """What a cache's pools of pages take: the window of each (None: its layers see all), and a page's bytes.

    Steps have up to `step_tokens` tokens.
    """

    pools: tuple[tuple[int | None, int], ...]
    page_tokens: int
    step_tokens: int

    @classmethod
    def of(cls, backend: Backend, layout: CacheLayout, kv_type: KVType, step_tokens: int) -> KVCost:
        """The cost of a cache on a backend. Raises UnsupportedError as `Backend.page_bytes` does."""
        n_bytes = [backend.page_bytes(layers, kv_type) for layers in pool_layouts(layout)]
        return cls._of(layout, n_bytes, backend.page_tokens, step_tokens)

    @classmethod
    def on_host(cls, layout: CacheLayout, kv_type: KVType, step_tokens: int) -> KVCost:
        """The cost of a cache on the CPU, before its model is open. Raises UnsupportedError as `of` does."""
        n_bytes = [page_bytes(layers, kv_type) for layers in pool_layouts(in_vectors(layout))]
        return cls._of(layout, n_bytes, PAGE_TOKENS, step_tokens)

    @classmethod
    def _of(cls, layout: CacheLayout, n_bytes: list[int], page_tokens: int, step_tokens: int) -> KVCost:
        # a model that never attends has pages of no bytes, which count its tokens all the same
        pools = zip(pool_windows(layout), (max(n, 1) for n in n_bytes))
        return cls(tuple(pools), page_tokens, step_tokens)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of every pool."""
        return sum(n_bytes for _, n_bytes in self.pools)

    def with_others(self, others: Sequence[int]) -> KVCost:
        """The cost together with caches of other models, of these bytes a page: they keep all pages.

        Its first pool is theirs too, if all pages are kept there.
        """
        pools, n_bytes = self.pools, sum(others)
        if n_bytes:
            own = pools[0][1] if pools[0][0] is None else 0
            pools = ((None, own + n_bytes), *pools[own > 0 :])
        return KVCost(pools, self.page_tokens, self.step_tokens)

    def n_bytes(self, sizes: Sequence[int]) -> int:
        """Return the bytes of pools of these numbers of pages."""
        return sum(n * n_bytes for n, (_, n_bytes) in zip(sizes, self.pools, strict=True))

    def most_held(self, n_tokens: int) -> list[int]:
        """Return the most pages of each pool that a request of `n_tokens` tokens holds at a time."""
        return [most_pages(n_tokens, self.page_tokens, window, self.step_tokens) for window, _ in self.pools]

    def longest(self, n_bytes: int) -> int:
        """Return the tokens of the longest request that fits into `n_bytes` bytes, in whole pages."""
        numbers, size = range(1, _MOST_PAGES), self.page_tokens
        return size * bisect_right(numbers, n_bytes, key=lambda n: self.n_bytes(self.most_held(n * size)))

    def wanted(self, max_requests: int, context: int) -> list[int]:
        """Return the pages of each pool for `max_requests` whole contexts, each with a second window: for
        other requests that share the beginning of a prompt whose window has passed it.
        """
        n_pages = pages_for(context, self.page_tokens)
        spare = [0 if window is None else pages_for(window, self.page_tokens) for window, _ in self.pools]
        return [
            max_requests * min(held + more, n_pages) for held, more in zip(self.most_held(context), spare)
        ]

    def pool_sizes(self, n_bytes: int | None, max_requests: int, context: int) -> tuple[int, ...]:
        """Return the pages of each pool: as many as are `wanted`, or `n_bytes` bytes in the same shares.

        If these are too few, pools of windows get at most half of what one request leaves.
        Raises ConfigError if they hold no page.
        """
        wanted = self.wanted(max_requests, context)
        if n_bytes is None:
            return tuple(wanted)
        if n_bytes < self.page_bytes:
            raise ConfigError(f"a KV pool of {n_bytes} bytes must hold a page of {self.page_bytes}")
        scale = n_bytes / max(self.n_bytes(wanted), 1)
        sizes = [int(n * scale) for n in wanted]
        if scale < 1 and self.pools[0][0] is None and len(self.pools) > 1:
            least = self.most_held(context)
            each = max(n_bytes - self.n_bytes(least), 0) // 2 // (len(self.pools) - 1)
            shares = [n + each // max(own, 1) for n, (_, own) in zip(least, self.pools)]
            sizes = [min(n, share) for n, share in zip(wanted, shares)]
        sizes[0] = (n_bytes - self.n_bytes([0, *sizes[1:]])) // max(self.pools[0][1], 1)
        return tuple(sizes) if min(sizes) > 0 else (n_bytes // self.page_bytes,) * len(sizes)


@dataclass(frozen=True)
class KVSize:
    """A pool of `n_bytes` and a context of `max_context` tokens, which the pool can hold."""

    n_bytes: int
    max_context: int
    note: str = ""  # one line for the user if the context is smaller than the model's


def most_kv_bytes(free_bytes: int) -> int:
    """Return the size of the largest pool where `free_bytes` are left besides the weights."""
    return max(int(free_bytes * _SHARE), 0)


def choose_kv_size(
    *,
    cost: KVCost,
    model_context: int,
    max_context: int | None,
    max_requests: int,
    kv_bytes: int | None,
    free_bytes: int,
) -> KVSize:
    """Fits the pool, and without `max_context` the context too, into memory.

    `cost` is the cost of all caches; `kv_bytes` is the user's own size, which is taken as it is; `free_bytes`
    are left besides the weights. The pool has room for `max_requests` whole contexts, if these fit. Raises
    ConfigError if the `max_context` that the user chose does not fit, or if little does.
    """
    context = model_context if max_context is None else max_context
    n_bytes = kv_bytes
    if n_bytes is None:
        n_wanted = cost.n_bytes(cost.wanted(max_requests, context))
        n_bytes = min(n_wanted, most_kv_bytes(free_bytes))
    n_tokens = cost.longest(n_bytes)
    if n_tokens >= context or (kv_bytes is not None and max_context is not None):
        return KVSize(n_bytes, context)
    room = f"{gib(n_bytes)} of KV cache hold {n_tokens:,} tokens"
    ways_out = f"--kv-memory (kv_bytes) sets the size; of --kv-type (kv_type) {KV_TYPE_SIZES}"
    if max_context is not None or (n_tokens < min(MIN_CONTEXT, context) and kv_bytes is None):
        least = max_context or min(MIN_CONTEXT, context)
        raise ConfigError(
            f"{gib(free_bytes)} of memory are free, and {room}, but {least:,} are required: lower "
            f"--max-context (max_context), if set; {ways_out}; lowering --max-requests (max_requests) does "
            "not help"
        )
    if n_tokens == 0:
        raise ConfigError(
            f"a KV cache of {n_bytes} bytes must hold a page of {cost.page_bytes}: raise --kv-memory "
            "(kv_bytes)"
        )
    return KVSize(n_bytes, n_tokens, f"the context is {n_tokens:,} of {context:,} tokens: {room}; {ways_out}")


def gib(n_bytes: int) -> str:
    """A size as errors and notes say it: 1.50 GiB."""
    return f"{max(n_bytes, 0) / 2**30:.2f} GiB"
