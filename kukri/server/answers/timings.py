"""Times of an answer, as llama.cpp's server writes them."""

from __future__ import annotations

from typing import Any

from kukri.engine import Request


def timings_of(request: Request) -> dict[str, Any]:
    """The `timings` of a request so far: counts of tokens, milliseconds, tokens per second."""
    times = request.timings
    n_read = times.n_prompt_tokens - request.sequence.n_prefix_hit
    drafts = {"draft_n": times.n_drafted, "draft_n_accepted": times.n_accepted} if times.n_drafted else {}
    return {
        "cache_n": request.sequence.n_prefix_hit,
        **_rates("prompt", n_read, times.prompt_s),
        **_rates("predicted", times.n_generated, times.decode_s, times.n_generated - 1),
        **drafts,
    }


def timings_of_progress(news: dict[str, int]) -> dict[str, Any]:
    """The `timings` of a prompt that is being read, of which `PromptProgress` has told this."""
    n_read = news["processed"] - news["cache"]
    return {
        "cache_n": news["cache"],
        **_rates("prompt", n_read, news["time_ms"] / 1000 if n_read else 0.0),
        **_rates("predicted", 0, 0.0),
    }


def _rates(name: str, n: int, seconds: float, n_timed: int | None = None) -> dict[str, Any]:
    """`n_timed` of the tokens came within this time: an answer's first comes with the end of its prompt."""
    timed = max(n if n_timed is None else n_timed, 0)
    return {
        f"{name}_n": n,
        f"{name}_ms": seconds * 1000,
        f"{name}_per_token_ms": seconds * 1000 / timed if timed else 0.0,
        f"{name}_per_second": timed / seconds if seconds else 0.0,
    }
