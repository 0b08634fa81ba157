"""The size of the KV pool and of the context, chosen by the memory that is free."""

from __future__ import annotations

from dataclasses import dataclass

from kukri.engine.pages import pages_for
from kukri.errors import ConfigError

_SHARE = 0.7  # of the memory left beside the weights: the rest is for activations and other programs
_MIN_CONTEXT = 256  # tokens; a model with less is of no use


@dataclass(frozen=True)
class KVSize:
    """A pool of `n_bytes` and a context of `max_context` tokens, which the pool can hold."""

    n_bytes: int
    max_context: int
    note: str = ""  # one line for the user if the context is smaller than the model's


def choose_kv_size(
    *,
    page_bytes: int,
    page_tokens: int,
    model_context: int,
    max_context: int | None,
    max_requests: int,
    kv_bytes: int | None,
    free_bytes: int,
) -> KVSize:
    """Fits the pool, and without `max_context` the context too, into memory.

    `page_bytes` are those of a page, `page_tokens` long, in all caches; `kv_bytes` is the user's own size,
    which is taken as it is; `free_bytes` are left beside the weights. The pool has room for `max_requests`
    whole contexts, if these fit. Raises ConfigError if the `max_context` that the user chose does not fit, or
    if little does.
    """
    context = model_context if max_context is None else max_context
    n_bytes = kv_bytes
    if n_bytes is None:
        n_wanted = max_requests * pages_for(context, page_tokens) * page_bytes
        n_bytes = min(n_wanted, max(int(free_bytes * _SHARE), 0))
    n_tokens = n_bytes // page_bytes * page_tokens
    if n_tokens >= context or (kv_bytes is not None and max_context is not None):
        return KVSize(n_bytes, context)
    room = f"{_gib(n_bytes)} of KV cache hold {n_tokens:,} tokens"
    ways_out = "--kv-memory (kv_bytes) sets the size, --kv-type q8_0 halves it, q4 quarters it"
    if max_context is not None or (n_tokens < min(_MIN_CONTEXT, context) and kv_bytes is None):
        least = max_context or min(_MIN_CONTEXT, context)
        raise ConfigError(
            f"{_gib(free_bytes)} of memory are free, and {room}, fewer than {least:,}: lower --max-context "
            f"(max_context), if set; {ways_out}; --max-requests (max_requests) cannot help"
        )
    if n_tokens == 0:
        raise ConfigError(
            f"a KV cache of {n_bytes} bytes holds no page of {page_bytes}: raise --kv-memory (kv_bytes)"
        )
    return KVSize(n_bytes, n_tokens, f"the context is {n_tokens:,} of {context:,} tokens: {room}; {ways_out}")


def _gib(n_bytes: int) -> str:
    return f"{max(n_bytes, 0) / 2**30:.2f} GiB"
