"""The progress of a prompt while it is read, as llama.cpp's server tells it."""

from __future__ import annotations

from time import perf_counter

from kukri.engine import Request


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
