"""Which tokens of which requests the next step computes.

First come, first served. Every running request gets its next token, or the next chunk of its prompt, within
a budget of tokens a step; what is left admits waiting requests. Where pages run out, the request that came
last gives its own back and computes them again later: that changes no token, as no result depends on chunks.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kukri.engine.pages import PagePool, pages_for
from kukri.engine.request import Request, RequestState
from kukri.errors import CapacityError, KukriError
from kukri.sampling import SampledToken


class ScheduledChunk(NamedTuple):
    """Tokens `start` to `start + n_tokens - 1` of a request; the last `n_logits` of them want logits."""

    request: Request
    start: int
    n_tokens: int
    n_logits: int


class StepOutput(NamedTuple):
    """What a step did for a request: a token, or None where the request failed (`request.error`)."""

    request: Request
    token: SampledToken | None


class Scheduler:
    """The queue, the running requests in order of arrival, and their pages."""

    def __init__(self, pool: PagePool, max_requests: int, max_step_tokens: int) -> None:
        self.pool, self.max_requests, self.max_step_tokens = pool, max_requests, max_step_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.n_preemptions = 0

    def add(self, request: Request) -> None:
        """Queues a new request. Raises CapacityError where it could outgrow the whole pool."""
        n_pages = pages_for(request.max_cached)
        if n_pages > self.pool.n_pages:
            raise CapacityError(
                f"a request of up to {request.max_cached} tokens needs {n_pages} KV pages and there are "
                f"{self.pool.n_pages}: shorten it or lower max_tokens"
            )
        request.state = RequestState.WAITING
        self.waiting.append(request)

    def schedule(self) -> list[ScheduledChunk]:
        """The chunks of the next step, with pages to write to; empty only when nothing waits or runs."""
        chunks: list[ScheduledChunk] = []
        budget, n_preemptions = self.max_step_tokens, self.n_preemptions
        i = 0
        while i < len(self.running) and budget:  # preemption shortens the list from its end
            chunk = self._chunk(self.running[i], budget)
            if chunk is not None:
                chunks.append(chunk)
                budget -= chunk.n_tokens
            i += 1
        if self.n_preemptions == n_preemptions:  # who just lost its pages must not take them back at once
            while self.waiting and budget and self._admit(self.waiting[0]):
                chunk = self._chunk(self.running[-1], budget)
                assert chunk is not None, "an admitted request finds its pages"
                chunks.append(chunk)
                budget -= chunk.n_tokens
        return chunks

    def postprocess(
        self, chunks: list[ScheduledChunk], results: list[SampledToken | KukriError], now_s: float
    ) -> list[StepOutput]:
        """Books a finished step: `results` has a token, or why there is none, for each chunk with logits.

        Ends the requests that are done, whose pages are free at once.
        """
        outputs: list[StepOutput] = []
        for request, start, n_tokens, n_logits in chunks:
            request.n_cached = start + n_tokens
            if not n_logits:
                continue
            result = results[len(outputs)]
            if isinstance(result, KukriError):
                request.error = result
                self.finish(request, "error")
                outputs.append(StepOutput(request, None))
            else:
                self._append(request, result, now_s)
                outputs.append(StepOutput(request, result))
        return outputs

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a request that waits or runs, and frees its pages."""
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        elif request.state is RequestState.WAITING:
            self.waiting.remove(request)
        self._release(request)
        request.state, request.finish_reason, request.stop_reason = RequestState.FINISHED, reason, stop_reason

    def check_integrity(self) -> None:
        """Asserts that queue, running requests and pages agree with one another."""
        assert len(self.running) <= self.max_requests, "more requests run than may"
        self.pool.check_integrity(request.pages for request in self.running)
        for request in self.waiting:
            assert request.state is RequestState.WAITING, f"request {request.id} waits and is {request.state}"
            assert request.n_pages == request.n_cached == 0, f"request {request.id} waits and holds pages"
        for request in self.running:
            assert request.state is RequestState.RUNNING, f"request {request.id} runs and is {request.state}"
            assert request.n_cached <= request.n_tokens <= request.max_tokens, (
                f"request {request.id} ran over"
            )
            assert request.n_pages == pages_for(request.n_cached), (
                f"request {request.id} holds too many pages"
            )
            assert not request.page_row[request.n_pages :].any(), f"request {request.id} lists pages it lost"

    def _chunk(self, request: Request, budget: int) -> ScheduledChunk | None:
        """The request's next tokens, at most `budget`; None where it had to give its pages up itself."""
        start = request.n_cached
        n_tokens = min(request.n_tokens - start, budget)
        n_new = pages_for(start + n_tokens) - request.n_pages
        if n_new:
            while self.pool.n_free < n_new:
                youngest = self.running[-1]
                self._preempt(youngest)
                if youngest is request:
                    return None
            stop = request.n_pages + n_new
            request.page_row[request.n_pages : stop] = self.pool.allocate(n_new)
            request.n_pages = stop
        return ScheduledChunk(request, start, n_tokens, int(start + n_tokens == request.n_tokens))

    def _admit(self, request: Request) -> bool:
        """Moves the first waiting request to the running, if all its tokens so far find pages."""
        if len(self.running) >= self.max_requests or pages_for(request.n_tokens) > self.pool.n_free:
            return False
        self.waiting.popleft()
        self.running.append(request)
        request.state = RequestState.RUNNING
        return True

    def _preempt(self, request: Request) -> None:
        """Sends a running request back to the head of the queue, without its pages."""
        self.running.remove(request)
        self._release(request)
        self.waiting.appendleft(request)
        request.state = RequestState.WAITING
        self.n_preemptions += 1

    def _release(self, request: Request) -> None:
        self.pool.free(request.pages)
        request.page_row[: request.n_pages] = 0
        request.n_pages = request.n_cached = 0

    def _append(self, request: Request, token: SampledToken, now_s: float) -> None:
        if not request.n_generated:
            request.first_token_s = now_s
        request.last_token_s = now_s
        request.tokens[request.n_tokens] = token.id
        request.n_tokens += 1
        if request.params.logprobs is not None:
            request.sampled.append(token)
        if token.id in request.stop_ids:
            named = token.id in request.params.stop_token_ids
            self.finish(request, "stop", token.id if named else None)
        elif request.n_tokens >= request.max_tokens:
            self.finish(request, "length")
