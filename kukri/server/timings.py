"""Times of an answer, as llama.cpp's server writes them."""

from __future__ import annotations

from typing import Any

from kukri.engine import Request


def timings_of(request: Request) -> dict[str, Any]:
    """The `timings` of a request so far: counts of tokens, milliseconds, tokens per second."""
    times = request.timings
    n_read = times.n_prompt_tokens - request.n_prefix_hit
    drafts = {"draft_n": times.n_drafted, "draft_n_accepted": times.n_accepted} if times.n_drafted else {}
    return {
        "cache_n": request.n_prefix_hit,
        **_rates("prompt", n_read, times.prompt_s),
        **_rates("predicted", times.n_generated, times.decode_s),
        **drafts,
    }


def _rates(name: str, n: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": n,
        f"{name}_ms": round(seconds * 1000, 3),
        f"{name}_per_token_ms": round(seconds * 1000 / n, 3) if n else 0.0,
        f"{name}_per_second": round(n / seconds, 2) if seconds else 0.0,
    }
