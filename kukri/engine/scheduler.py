"""The scheduler: chooses the tokens of each request that the next step computes, and allocates their pages.

Every running request gets its next token, or the next chunk of its prompt, within a budget of tokens a step;
what is left admits waiting requests (waiting.py orders them). A prompt that runs beside decodes has a
budget of its own, so that long prompts do not delay the others' tokens. If pages run out, the request last in
order is preempted: it frees its pages and is recomputed later. That changes no token, as no result depends on
chunks. A request begins after the longest prefix whose pages are cached, or saved on disk, which changes none
either.

If room is left, decoding requests have draft tokens computed beside their newest one (drafts.py). No request
is preempted for a draft, and a rejected one is forgotten: its slot in the cache is overwritten.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import replace
from itertools import islice

from kukri.engine.drafts import DraftBudget, Drafts
from kukri.engine.pages import PagePool, check_fits, page_keys
from kukri.engine.request import ProgramKind, Request, RequestState
from kukri.engine.saved_prefixes import SavedPrefixes
from kukri.engine.scheduled_step import ScheduledChunk, ScheduledStep, StepOutput
from kukri.engine.states import StatePool, snapshot_places
from kukri.engine.waiting import WaitingQueue
from kukri.errors import KukriError
from kukri.sampling import SampledToken


class Scheduler:
    """The queue, the running requests in order of their turn, and their pages.

    `max_step_tokens` bounds a step; `max_prompt_tokens` what prompts get of it beside requests that generate,
    `max_logit_rows` the rows of logits. With `caches_prefixes` the pages of requests outlive them; `saved`
    keeps them on disk too. With `takes_whole` a prompt is computed in one step, of its own if it is longer
    than a step should be. `states` has the slots of a model with recurrent layers, None for any other.
    A step takes one of `n_parts` parts of the requests, so that as many steps can be under way.
    """

    def __init__(
        self,
        pool: PagePool,
        max_requests: int,
        max_step_tokens: int,
        max_prompt_tokens: int | None = None,
        max_logit_rows: int | None = None,
        *,
        caches_prefixes: bool = True,
        takes_whole: bool = False,
        saved: SavedPrefixes | None = None,
        states: StatePool | None = None,
        n_parts: int = 1,
    ) -> None:
        self.takes_whole, self.saved, self.states, self.n_parts = takes_whole, saved, states, n_parts
        self.pool, self.max_requests, self.max_step_tokens = pool, max_requests, max_step_tokens
        self.max_prompt_tokens = max_prompt_tokens or max_step_tokens
        self.max_logit_rows = max_logit_rows or max_step_tokens
        self.caches_prefixes = caches_prefixes
        self._step = ScheduledStep([], [], [], "hidden")  # the last one
        self.takes_drafts = True  # False while somebody must see each token once, and no others
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.ending: list[Request] = []  # finished while in flight: their step may still write their pages
        self.n_preemptions = 0
        self.n_prefix_hit = 0  # tokens that were found and not computed
        self.n_restored = 0  # of those, read from disk
        self.n_computed = 0  # tokens that were, rejected drafts left out
        self.n_drafted = 0  # drafts computed
        self.n_accepted = 0  # drafts accepted

    def add(self, request: Request) -> None:
        """Queues a new request. Raises CapacityError if it could outgrow the whole pool."""
        self.check_fits(request)
        request.state = RequestState.WAITING
        self.waiting.arrive(request)

    def check_fits(self, request: Request) -> None:
        """Raises CapacityError if a request could outgrow the whole pool."""
        check_fits(request.max_cached, self.pool.n_pages, self.pool.page_tokens)

    def schedule(self) -> ScheduledStep:
        """The next step, with pages to write to. Requests in flight are left out.

        A step runs one program: if requests of both can run, they take turns. Without any in flight it has no
        chunks only when nothing waits or runs, or when all that was done is to read saved pages.
        """
        if self._step.may_go_on and self._move_on():
            return self._step
        if self.waiting:
            self._preempt_for_urgent()
        other: ProgramKind = "hidden" if self._step.program == "logits" else "logits"
        if self.waiting or any(request.program == other for request in self.running):
            step = self._schedule_program(other)
            if step.chunks:
                self._step = step
                return step
        self._step = step = self._schedule_program(self._step.program)
        step.may_go_on = self._may_go_on(step)
        return step

    def start_anew(self) -> None:
        """Makes the next step no continuation of the last."""
        self._step.may_go_on = False

    def _may_go_on(self, step: ScheduledStep) -> bool:
        """True if a step gives each request that runs a token, and has nothing to do beside."""
        if self.states is not None or self.n_parts > 1 or len(step.chunks) < len(self.running):
            return False
        known = [r for r in self.running if _generates(r) and r.taps is None and not r.may_restore]
        return len(known) == len(step.chunks) and not step.copies

    def _move_on(self) -> bool:
        """Moves the last step on by a token of each request; False if others run now, or pages run out."""
        chunks, size = self._step.chunks, self.pool.page_tokens
        if self.waiting or len(chunks) != len(self.running):
            return False
        for chunk in chunks:
            request = chunk.sequence
            if request.is_in_flight:
                return False
            chunk.start = start = request.n_cached
            if start % size == 0:
                if not self.pool.n_free:
                    return False
                self._grow(request, 1)
        self._step.goes_on = True
        return True

    def _schedule_program(self, program: ProgramKind) -> ScheduledStep:
        """A step of the requests that a program computes."""
        step = ScheduledStep([], [], [], program)
        budget = _Budget(self, program)
        n_preemptions = self.n_preemptions
        i = 0
        n_most = self._step_requests()
        while (
            i < len(self.running) and budget.n_tokens and len(step.chunks) < n_most
        ):  # preemption shortens the list from its end
            if self.running[i].program == program and not self.running[i].is_in_flight:
                self._schedule(self.running[i], budget, step)
            i += 1
        if self.n_preemptions == n_preemptions:  # a request just preempted must not be admitted at once
            while self.waiting and budget.n_tokens and budget.n_prompt_tokens and len(step.chunks) < n_most:
                request = self.waiting.first(_may_run, program)
                if request is None or not budget.has_room(request) or not self._admit(request, step):
                    break
                self._schedule(request, budget, step)
        return step

    def _step_requests(self) -> int:
        """The most requests of a step."""
        n_requests = min(len(self.running) + len(self.waiting), self.max_requests)
        return -(-n_requests // self.n_parts)

    def plan_drafts(self, chunks: list[ScheduledChunk]) -> list[tuple[int, Drafts, int]]:
        """(index of a chunk, its request's drafts, how many to compute) for each that is to have some."""
        if not self.takes_drafts or not [chunk for chunk in chunks if chunk.sequence.drafts is not None]:
            return []
        n_tokens = sum(chunk.n_tokens for chunk in chunks)
        n_rows = sum(chunk.n_logits for chunk in chunks)
        room = min(self.max_step_tokens - n_tokens, self.max_logit_rows - n_rows)
        budget = DraftBudget(n_tokens, sum(_generates(chunk.request) for chunk in chunks))
        planned: list[tuple[int, Drafts, int]] = []
        for i, chunk in enumerate(chunks):
            request = chunk.request
            if request.drafts is None or not _generates(request):
                continue
            request.drafts.follow(request.tokens, request.n_tokens)
            # the last token that it may come to needs no draft: it follows from the row before
            n = min(room, request.max_drafts, request.max_length - request.n_tokens - 1)
            n = budget.take(request.drafts.chances(n), request.drafts.price)
            if n:
                planned.append((i, request.drafts, n))
                room -= n
        return planned

    def with_drafts(self, chunk: ScheduledChunk, drafts: list[int]) -> ScheduledChunk:
        """A decoding request's chunk with drafts behind its newest token, those that free pages hold."""
        request = chunk.request
        n_fit = (request.n_pages + self.pool.n_free) * self.pool.page_tokens - request.n_tokens
        n = max(min(len(drafts), n_fit), 0)
        stop = request.n_tokens + n
        request.tokens[request.n_tokens : stop] = drafts[:n]
        self._grow(request, self.pool.pages_for(stop) - request.n_pages)
        return replace(chunk, n_tokens=1 + n, n_logits=1 + n, n_drafts=n)

    def postprocess(
        self, chunks: list[ScheduledChunk], results: list[list[SampledToken | KukriError]], now_s: float
    ) -> list[StepOutput]:
        """Records a finished step: `results` has for each chunk its new tokens, or the error in place of one.

        Requests for rows end when they have been given all.

        A chunk with drafts gives a token for each accepted one, and one more. Ends the requests that are
        done, whose pages are free at once. Requests that ended while in flight are passed over.
        """
        outputs: list[StepOutput] = []
        for chunk, tokens in zip(chunks, results, strict=True):
            request = chunk.request
            if request.state is not RequestState.RUNNING:
                continue
            if not tokens:
                self._count(chunk, chunk.n_tokens)
                if request.output != "tokens" and request.n_cached == request.n_prompt:
                    self._cache_pages(request)
                    self.finish(request, "stop")
                    outputs.append(StepOutput(request, None, "stop"))
                continue
            self._count(chunk, chunk.n_tokens - chunk.n_drafts + len(tokens) - 1)
            if chunk.n_drafts:
                self._forget_drafts(chunk, len(tokens) - 1)
            if not isinstance(tokens[-1], KukriError):
                self._cache_pages(request)
            for token in tokens:
                outputs.append(self._take(request, token, now_s))
        return outputs

    def postprocess_each(
        self, chunks: list[ScheduledChunk], tokens: list[SampledToken | KukriError], now_s: float
    ) -> list[StepOutput]:
        """Records a finished step that went on, of requests that all run: a token of each, or its error."""
        outputs: list[StepOutput] = []
        size = self.pool.page_tokens
        self.n_computed += len(chunks)
        for chunk, token in zip(chunks, tokens, strict=True):
            request = chunk.sequence
            request.n_cached = request.next_row = n_cached = chunk.start + 1
            self.waiting.count_served(request, 1)
            if isinstance(token, KukriError):
                outputs.append(self._take(request, token, now_s))
            else:
                if n_cached % size == 0:
                    self._cache_pages(request)
                self._append(request, token, now_s)
                outputs.append(StepOutput(request, token, request.finish_reason))
        return outputs

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a request that waits or runs, and frees its pages; of one in flight, when it has landed."""
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        if request.state is not RequestState.NEW:
            self.waiting.leave(request)
        if request.is_in_flight:
            self.ending.append(request)
        else:
            self._release(request)
        request.state, request.finish_reason, request.stop_reason = RequestState.FINISHED, reason, stop_reason

    def release_ended(self, request: Request) -> None:
        """Frees the pages of a request that finished while in flight, and has landed."""
        self.ending.remove(request)
        self._release(request)

    def check_integrity(self) -> None:
        """Asserts that queue, running requests and pages agree with one another."""
        assert len(self.running) <= self.max_requests, "more requests run than may"
        assert self.running == sorted(self.running, key=_turn), "requests run out of turn"
        holding = (*self.running, *self.ending)
        self.pool.check_integrity([request.pages for request in holding])
        if self.states is not None:
            saved = [slot for request in holding for _, slot in request.snapshots]
            self.states.check_integrity([*saved, *(request.state_slot for request in holding)])
        assert all(request.is_in_flight for request in self.ending), "a request has landed and not been freed"
        for request in self.waiting:
            assert request.state is RequestState.WAITING, f"request {request.id} waits and is {request.state}"
            assert request.n_pages == request.n_cached == 0, f"request {request.id} waits and holds pages"
            assert request.state_slot < 0, f"request {request.id} waits and has a state"
            assert not request.snapshots, f"request {request.id} waits and holds snapshots"
        for request in self.running:
            assert request.state is RequestState.RUNNING, f"request {request.id} runs and is {request.state}"
            assert request not in self.waiting, f"request {request.id} runs and waits"
            assert request.n_cached <= request.n_tokens <= request.max_length, (
                f"request {request.id} ran over"
            )
            assert request.is_in_flight or request.n_pages == self.pool.pages_for(request.n_cached), (
                f"request {request.id} holds too many pages"
            )
            assert request.n_cached_pages <= request.n_cached // self.pool.page_tokens, (
                "a page is cached and not full"
            )
            assert not request.page_row[request.n_pages :].any(), f"request {request.id} lists pages it lost"

    def _preempt_for_urgent(self) -> None:
        """Preempts running requests for one of a better priority that waits and finds no room."""
        urgent = self.waiting.first(_may_run)
        while (
            urgent is not None
            and self.running
            and not self.running[-1].is_in_flight
            and urgent.priority < self.running[-1].priority
            and self._room(urgent) is None
        ):
            self.preempt(self.running[-1])

    def _schedule(self, request: Request, budget: _Budget, step: ScheduledStep) -> None:
        """Adds the request's next tokens to the step, within the budget."""
        if request.may_restore and not self._restore(request, budget):
            return
        start = request.n_cached
        n_tokens, n_logits = budget.take(request)
        if n_tokens == 0 or not self._make_writable(request, start, start + n_tokens, step.copies):
            return
        n_after = max(start + n_tokens - request.stop_row, 0)
        saves = self._saves(request, start, start + n_tokens)
        step.chunks.append(ScheduledChunk(request, start, n_tokens, n_logits, n_after=n_after, saves=saves))
        budget.spend(request, n_tokens, n_logits)

    def _restore(self, request: Request, budget: _Budget) -> bool:
        """Reads the request's next pages that are saved on disk; False if a later step may read more."""
        size = self.pool.page_tokens
        depth, n_wanted = request.n_pages, (request.next_row - request.n_cached) // size
        n_most = min(n_wanted, self.pool.n_free)
        if self.saved is None or not self._uses_cache(request) or not n_most:
            request.may_restore = False
            return True
        before = self.pool.key(int(request.page_row[depth - 1])) if depth else request.prefix_root
        keys = list(islice(page_keys(request.tokens[depth * size : request.next_row], size, before), n_most))[
            : budget.n_saved_pages
        ]
        for key, contents in zip(keys, self.saved.read(keys, depth)):
            (page,) = self.pool.allocate(1)
            self.saved.write(page, contents)
            request.page_row[request.n_pages] = self.pool.cache(page, key)
            request.n_pages += 1
        n_found = request.n_pages - depth
        budget.n_saved_pages -= n_found
        self._count_known(request, n_found * size)
        self.n_restored += n_found * size
        request.may_restore = n_found == len(keys) and n_found < n_wanted
        return not request.may_restore

    def _count_known(self, request: Request, n_tokens: int) -> None:
        """Counts further tokens whose keys and values were found."""
        request.n_cached += n_tokens
        request.next_row = max(request.next_row, request.n_cached)  # those before are the leader's to give
        if not request.n_generated and not request.n_preemptions:
            request.n_prefix_hit += n_tokens
        self.n_prefix_hit += n_tokens

    def _saves(self, request: Request, start: int, stop: int) -> list[tuple[int, int]]:
        """(tokens, slot) of the snapshots to take while tokens `start` to `stop` - 1 are computed.

        Of a prompt where `snapshot_places` says, of an answer behind each page.
        """
        size = self.pool.page_tokens
        if self.states is None or not self._uses_cache(request):
            return []
        places = [stop] if stop > request.n_prompt and stop % size == 0 else []
        if start < request.n_prompt:
            wanted = snapshot_places(request.n_prompt, request.n_known, size)
            places += [place for place in wanted if start < place <= stop]
        n_spare = max(self.states.n_free - (self.max_requests - len(self.running)), 0)
        saves = [(place, self.states.allocate()) for place in places[:n_spare]]
        request.snapshots += saves
        return saves

    def _forget_drafts(self, chunk: ScheduledChunk, n_accepted: int) -> None:
        """Counts drafts, and frees the pages of rejected ones."""
        request = chunk.request
        for counts in (self, request):
            counts.n_drafted += chunk.n_drafts
            counts.n_accepted += n_accepted
        n_pages = self.pool.pages_for(request.n_cached)
        self.pool.free(request.page_row[n_pages : request.n_pages].tolist())
        request.page_row[n_pages : request.n_pages] = 0
        request.n_pages = n_pages

    def _count(self, chunk: ScheduledChunk, n_kept: int) -> None:
        """Counts the tokens of a chunk whose keys and values stay in the cache."""
        chunk.request.n_cached = chunk.start + n_kept
        chunk.request.next_row = max(chunk.request.next_row, chunk.request.n_cached)
        self.n_computed += n_kept
        self.waiting.count_served(chunk.request, n_kept)

    def _take(self, request: Request, token: SampledToken | KukriError, now_s: float) -> StepOutput:
        """Appends a request's token, or ends it by an error."""
        if isinstance(token, KukriError):
            request.error = token
            self.finish(request, "error")
            return StepOutput(request, None, "error")
        self._append(request, token, now_s)
        return StepOutput(request, token, request.finish_reason)

    def _make_writable(self, request: Request, start: int, stop: int, copies: list[tuple[int, int]]) -> bool:
        """Allocates pages to write tokens `start` to `stop` - 1 to, preempting the requests last in turn.

        False if it was preempted itself, or has to wait until a later request has landed.
        """
        first = start // self.pool.page_tokens  # a page that others read too is copied before the first write
        is_partial = start % self.pool.page_tokens != 0
        is_shared = is_partial and not self.pool.is_writable(int(request.page_row[first]))
        n_new = self.pool.pages_for(stop) - request.n_pages
        while self.pool.n_free < n_new + is_shared:
            last = self.running[-1]
            if last.is_in_flight:
                return False
            self.preempt(last)
            if last is request:
                return False
        if is_shared:
            old, (new,) = int(request.page_row[first]), self.pool.allocate(1)
            copies.append((old, new))
            request.page_row[first] = new
            self.pool.free([old])
        self._grow(request, n_new)
        return True

    def _grow(self, request: Request, n_new: int) -> None:
        if n_new:
            n_pages = request.n_pages + n_new
            request.page_row[request.n_pages : n_pages] = self.pool.allocate(n_new)
            request.n_pages = n_pages

    def _room(self, request: Request) -> list[int] | None:
        """The cached pages a waiting request can begin with; None if the rest of it finds no room."""
        if len(self.running) >= self.max_requests:
            return None
        if self.states is not None and not self.states.n_free:
            return None
        known = self._known_pages(request)
        n_new = self.pool.pages_for(request.n_tokens) - len(known)
        n_left = self.pool.n_free - sum(self.pool.is_idle(page) for page in known)
        return known if n_new <= n_left else None

    def _admit(self, request: Request, step: ScheduledStep) -> bool:
        """Moves a waiting request to the running, with the pages it can share, if it has room."""
        pages = self._room(request)
        if pages is None:
            return False
        n_known = len(pages) * self.pool.page_tokens
        leader, is_shared = request.leader, False
        if self.states is not None:
            self._admit_state(request, pages, step)
        elif leader is not None and leader.n_cached >= request.n_prompt and not request.n_generated:
            n_known = request.n_prompt - 1  # its last token is computed anew, for logits
            pages = leader.pages[: self.pool.pages_for(n_known)]
            is_shared = True
        self.pool.share(pages)
        request.page_row[: len(pages)] = pages
        request.n_pages = len(pages)
        request.n_cached_pages = 0  # counted when its next token shows that all is well
        self._count_known(request, n_known)
        request.may_restore = self.saved is not None and not is_shared and request.taps is None
        self.waiting.remove(request)
        insort(self.running, request, key=_turn)
        request.state = RequestState.RUNNING
        return True

    def _admit_state(self, request: Request, pages: list[int], step: ScheduledStep) -> None:
        """Gives a request a slot, with the state behind the cached pages that it begins with."""
        assert self.states is not None, "the model has recurrent layers"
        source = self.states.find(self.pool.key(pages[-1])) if pages else None
        request.state_slot = self.states.allocate()
        if source is not None and source != request.state_slot:  # which may be the only one left
            step.state_copies.append((source, request.state_slot))

    def _known_pages(self, request: Request) -> list[int]:
        """Cached pages with the request's tokens, up to the first token whose row of output is wanted.

        Of a model with recurrent layers, those up to the last with a snapshot.
        """
        if not self._uses_cache(request) or request.taps is not None:
            return []
        pages = self.pool.find(request.tokens[: request.next_row], request.prefix_root)
        request.n_known = len(pages) * self.pool.page_tokens
        if self.states is not None:
            while pages and self.states.find(self.pool.key(pages[-1])) is None:
                pages.pop()
        return pages

    def _uses_cache(self, request: Request) -> bool:
        return self.caches_prefixes and request.is_cacheable

    def _cache_pages(self, request: Request) -> None:
        """Caches the request's full pages for others: its logits were numbers, so all that is in them is."""
        n_full = request.n_cached // self.pool.page_tokens
        if n_full == request.n_cached_pages or not self._uses_cache(request):
            return
        first, size = request.n_cached_pages, self.pool.page_tokens
        before = self.pool.key(int(request.page_row[first - 1])) if first else request.prefix_root
        keys = page_keys(request.tokens[first * size : n_full * size], size, before)
        for i, key in enumerate(keys, first):
            page = self.pool.cache(int(request.page_row[i]), key)
            request.page_row[i] = page
            if self.saved is not None:
                self.saved.save(page, key, i)
        request.n_cached_pages = n_full
        if self.states is not None:
            self._keep_snapshots(request, self.states)

    def _keep_snapshots(self, request: Request, states: StatePool) -> None:
        """Keeps the states behind the request's cached pages for others; of its answer the newest alone."""
        for place, slot in request.snapshots:
            key = self.pool.key(int(request.page_row[place // self.pool.page_tokens - 1]))
            states.keep(key, slot)
            if place > request.n_prompt:
                if request.snapshot is not None:
                    states.drop(request.snapshot)
                request.snapshot = key
        request.snapshots = []

    def preempt(self, request: Request) -> None:
        """Sends a running request back to the queue, without its pages."""
        self.running.remove(request)
        self._release(request)
        request.state = RequestState.WAITING
        request.n_preemptions += 1
        self.waiting.put(request)
        self.n_preemptions += 1

    def _release(self, request: Request) -> None:
        if request.drafts is not None:
            request.drafts.release()
        if self.states is not None:
            for slot in (request.state_slot, *(slot for _, slot in request.snapshots)):
                if slot >= 0:  # one that waits has none
                    self.states.free(slot)
            request.state_slot, request.snapshots, request.snapshot = -1, [], None
        self.pool.free(request.pages)
        request.page_row[: request.n_pages] = 0
        request.n_pages = request.n_cached = request.n_cached_pages = 0

    def _append(self, request: Request, token: SampledToken, now_s: float) -> None:
        request.append(token, now_s)
        if token.id in request.stop_ids:
            named = token.id in request.params.stop_token_ids
            self.finish(request, "stop", token.id if named else None)
        elif request.n_tokens >= request.max_length:
            self.finish(request, "length")


class _Budget:
    """Remaining budgets of a step: tokens, prefill tokens, and rows of logits."""

    def __init__(self, scheduler: Scheduler, program: ProgramKind) -> None:
        self.takes_whole, self.is_unspent = scheduler.takes_whole, True
        self.n_saved_pages = 0 if scheduler.saved is None else scheduler.saved.pages_per_step
        self.n_tokens = self.n_prompt_tokens = scheduler.max_step_tokens
        for request in scheduler.running:
            if _generates(request):
                self.n_prompt_tokens = scheduler.max_prompt_tokens
                break
        # beyond the one that each may want; a row of hidden states is small, and there is room for all
        self.n_rows = scheduler.max_step_tokens
        if program == "logits":
            self.n_rows = scheduler.max_logit_rows - scheduler.max_requests

    def has_room(self, request: Request) -> bool:
        """False if all of the request must be in a step and this one is too full."""
        return not self.takes_whole or self.is_unspent or request.n_tokens <= self.n_tokens

    def take(self, request: Request) -> tuple[int, int]:
        """(tokens, logit rows) that the request may have."""
        n_left = request.n_tokens - request.n_cached
        if self.takes_whole:
            n_rows = request.stop_row - request.first_row
            return (n_left, n_rows) if self.has_room(request) else (0, 0)
        if _generates(request):
            return min(n_left, self.n_tokens), 1
        n_without = request.next_row - request.n_cached  # tokens that come before the first row
        n_tokens = min(n_left, self.n_tokens, self.n_prompt_tokens, n_without + 1 + self.n_rows)
        n_after = max(request.n_cached + n_tokens - request.stop_row, 0)
        return n_tokens, max(n_tokens - n_without - n_after, 0)

    def spend(self, request: Request, n_tokens: int, n_logits: int) -> None:
        """Subtracts a request's share."""
        self.is_unspent = False
        self.n_tokens = max(self.n_tokens - n_tokens, 0)
        if not _generates(request):
            self.n_prompt_tokens -= n_tokens
            self.n_rows -= max(n_logits - 1, 0)


def _generates(request: Request) -> bool:
    """True if the request is decoding: only its newest token is left to compute."""
    return request.n_cached == request.n_tokens - 1 and request.n_generated > 0


def _may_run(request: Request) -> bool:
    """False until the request whose prompt it shares has prefilled it, and while that one is in flight."""
    leader = request.leader
    if leader is None:
        return True
    return not leader.is_in_flight and (leader.state is RequestState.FINISHED or leader.n_generated > 0)


def _turn(request: Request) -> tuple[int, int]:
    """The order in which running requests get pages; the last loses its own first."""
    return request.priority, request.id
