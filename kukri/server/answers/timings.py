"""Times of an answer, and the progress of its prompt while it is read, as llama.cpp's server writes them."""

from __future__ import annotations

from time import perf_counter
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


def n_read(request: Request) -> int:
    """Tokens of a request's prompt that have been read, or were found in the cache."""
    n_cached = request.n_prompt if request.times.first_token_s else request.sequence.n_cached
    return min(n_cached, request.n_prompt)


class PromptProgress:
    """How much of a request's prompt has been read. The first news is what the cache had of it."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._n_told = -1

    def news(self) -> list[dict[str, int]]:
        """The progress since the last time; nothing while the request waits."""
        request = self._request
        if not request.times.started_s:
            return []
        n = n_read(request)
        found = [request.sequence.n_prefix_hit] if self._n_told < 0 else []
        if n > max([*found, self._n_told]):
            found.append(n)
        self._n_told = max([*found, self._n_told])
        elapsed_s = (request.times.first_token_s or perf_counter()) - request.times.started_s
        return [
            {
                "total": request.n_prompt,
                "cache": request.sequence.n_prefix_hit,
                "processed": n,
                "time_ms": round(elapsed_s * 1000),
            }
            for n in found
        ]
