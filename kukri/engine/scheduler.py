"""The scheduler: chooses the tokens of each request that the next step computes.

Every decoding request gets its next token; the rest of a step is shared among prompts, within a budget of
tokens and of time, so that long prompts do not delay the others' tokens. Up to half goes to the shortest
prompts, so that a short one begins at once alongside a long one, and the rest in turn (waiting.py has the
order), so that a long one never stands still. A waiting request is admitted when it is to compute something.
If pages run out, the request last in order is preempted: it frees its pages and is recomputed later. That
changes no token, as no result depends on chunks. What a request holds in the caches, and which prefixes it
finds there is the business of kv_allocator.py.

If room is left, decoding requests have draft tokens computed alongside their newest one (drafts.py). No
request is preempted for a draft, and a rejected one is forgotten: its slot in the cache is overwritten, and a
recurrent state is that before the drafts again.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from math import inf
from operator import le

from kukri.engine.drafts import DraftBudget, Drafts
from kukri.engine.kv_allocator import KVAllocator
from kukri.engine.pages import check_fits
from kukri.engine.request import ProgramKind, Request
from kukri.engine.row_costs import RowCosts
from kukri.engine.scheduled_step import ScheduledChunk, ScheduledStep, StepOutput
from kukri.engine.sequence import RequestState, TokenSequence
from kukri.engine.step_cost import StepCost
from kukri.engine.waiting import WaitingQueue
from kukri.errors import KukriError
from kukri.kernels.backend import EVEN_ROW_COSTS
from kukri.sampling import SampledToken

logger = logging.getLogger("kukri.engine")

_LOOK_AHEAD = 32  # waiting requests of a client among which the shortest may be taken first
# share of a step's time that others get in a step that also begins shorter prompts
_SHARE_WITH_SHORTER = 0.25
# least tokens per step of the prompt in turn, however long they take: a panel of matrix kernels
_LEAST_TOKENS = 8


class Scheduler:
    """The queue, and the running requests in order of their turn; `allocator` has what they hold.

    `max_step_tokens` bounds a step; `max_prompt_tokens` what prompts get of it while others generate, `cost`
    the time that their tokens take; `max_logit_rows` the rows of logits; `row_costs` are the backend's. With
    `needs_one_step` a prompt is computed in one step, which it has to itself if it is longer than a step
    should be. A step takes one of `n_in_flight` parts of the requests: as many steps can be under way.
    """

    def __init__(
        self,
        allocator: KVAllocator,
        max_requests: int,
        max_step_tokens: int,
        max_prompt_tokens: int | None = None,
        max_logit_rows: int | None = None,
        *,
        needs_one_step: bool = False,
        n_in_flight: int = 1,
        cost: StepCost | None = None,
        row_costs: tuple[float, ...] = EVEN_ROW_COSTS,
    ) -> None:
        self.allocator, self.needs_one_step, self.n_in_flight = allocator, needs_one_step, n_in_flight
        self.max_requests, self.max_step_tokens = max_requests, max_step_tokens
        self.max_prompt_tokens = max_prompt_tokens or max_step_tokens
        self.max_logit_rows = max_logit_rows or max_step_tokens
        self.cost, self.row_costs = cost or StepCost(), RowCosts(row_costs)
        self._step = ScheduledStep([], [], [], "hidden")  # the last one
        self._full: tuple[int, ...] | None = None  # when nobody could be admitted: see `_occupancy`
        self.takes_drafts = True  # False while somebody must see each token once, and no others
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.ending: list[Request] = []  # finished while in flight: their step may still write their pages
        self.n_preemptions = 0
        self.n_computed = 0  # tokens that were, rejected drafts left out
        self.n_drafted = 0  # drafts computed
        self.n_accepted = 0  # drafts accepted

    def add(self, request: Request) -> None:
        """Queues a new request. Raises CapacityError if it could outgrow a whole pool."""
        check_fits(request.max_cached, self.allocator.pools)
        self.allocator.note_cached(request.sequence)
        if self.running or self.waiting:
            self.cost.share()
        request.sequence.state = RequestState.WAITING
        self.waiting.arrive(request)

    def schedule(self) -> ScheduledStep:
        """The next step, with pages to write to. Requests in flight are left out.

        A step runs one program: if requests of both can run, they take turns. Without any in flight it has no
        chunks only when nothing waits or runs, or when all that was done is to read saved pages, or when all
        that is left comes after inputs that have not been encoded.
        """
        if self._step.can_repeat and self._repeat():
            return self._step
        n_preemptions = self.n_preemptions
        if self.waiting:
            self._preempt_for_urgent()
        other: ProgramKind = "hidden" if self._step.program == "logits" else "logits"
        if self.waiting.has(other) or any(request.program == other for request in self.running):
            step = self._schedule_program(other)
            if step.chunks:
                self._step = step
                return step
        self._step = step = self._schedule_program(self._step.program)
        step.can_repeat = self._can_repeat(step)
        # then nobody who waits found room, unless somebody was preempted, who is not admitted at once
        is_full = n_preemptions == self.n_preemptions and self._urgent() is None
        self._full = self._occupancy() if is_full else None
        return step

    @property
    def generates(self) -> bool:
        """True if a running request is decoding."""
        return any(request.sequence.generates for request in self.running)

    def _occupancy(self) -> tuple[int, ...]:
        """What admission depends on: who waits, how many run, and how many pages are free."""
        return self.waiting.n_changes, len(self.running), *(pool.n_free for pool in self.allocator.pools)

    def _is_full(self) -> bool:
        """True if nobody can be admitted, as nobody could and nothing has been freed since."""
        now, full = self._occupancy(), self._full
        return full is not None and now[:2] == full[:2] and all(map(le, now[2:], full[2:]))

    def start_over(self) -> None:
        """Makes the next step no continuation of the last."""
        self._step.can_repeat = False

    def _can_repeat(self, step: ScheduledStep) -> bool:
        """True if a step gives each running request one token and does nothing else."""
        if self.allocator.states is not None or self.n_in_flight > 1 or len(step.chunks) < len(self.running):
            return False
        known = [r for r in self.running if r.sequence.generates and not r.sequence.may_restore]
        return len(known) == len(step.chunks) and not step.copies

    def _repeat(self) -> bool:
        """Moves the last step on by a token of each request; False if others run now, or pages run out."""
        chunks, allocator = self._step.chunks, self.allocator
        if len(chunks) != len(self.running) or (self.waiting and not self._is_full()):
            return False
        growing: list[TokenSequence] = []
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.is_in_flight:
                return False
            if sequence.n_cached % allocator.page_tokens == 0:
                growing.append(sequence)
        for sequence in growing:
            allocator.pass_windows(sequence)
        if growing and len(growing) > allocator.n_free:
            return False
        for sequence in growing:
            allocator.grow(sequence, sequence.n_cached + 1)
        for chunk in chunks:
            chunk.start = chunk.sequence.n_cached
        self._step.is_repeat = True
        return True

    def _schedule_program(self, program: ProgramKind) -> ScheduledStep:
        """A step of the requests that a program computes."""
        step = ScheduledStep([], [], [], program)
        budget = _Budget(self, program)
        n_most = self._step_requests()
        prompts: list[Request] = []
        i = 0
        while i < len(self.running):  # preemption shortens the list from its end
            request = self.running[i]
            if request.program == program and not request.sequence.is_in_flight:
                if not request.sequence.generates:
                    prompts.append(request)
                elif budget.n_tokens and len(step.chunks) < n_most:
                    self._schedule(request, budget, step)
            i += 1
        if self.n_preemptions == budget.n_preemptions:
            prompts += self._admissible(program)
        if prompts:
            prompts.sort(key=self.waiting.rank)
            self._schedule_prompts(prompts, budget, step, n_most)
        return step

    def _schedule_prompts(
        self, prompts: list[Request], budget: _Budget, step: ScheduledStep, n_most: int
    ) -> None:
        """Shares what is left of a step among prompts, in order of their turn: see the module."""
        first = prompts[0]
        least = self.cost.of(first.sequence.n_cached, _LEAST_TOKENS)
        shorter = [r for r in prompts if r.priority == first.priority and _n_left(r) < _n_left(first)]
        n_tokens, rest = (
            budget.n_prompt_tokens,
            sum(self.cost.of(r.sequence.n_cached, _n_left(r)) for r in prompts),
        )
        limit = self.cost.limit(n_tokens, rest, has_decodes=bool(step.chunks))
        if shorter and not self.needs_one_step:
            half, n_chunks = n_tokens // 2, len(step.chunks)
            budget.n_prompt_tokens, budget.cost = half, max(limit / 2, least)
            self._begin(sorted(shorter, key=_n_left), budget, step, n_most)
            budget.n_prompt_tokens += n_tokens - half
            if any(chunk.gives_token for chunk in step.chunks[n_chunks:]):  # its prompt waits for the step
                limit = min(limit, step.prompt_cost + limit * _SHARE_WITH_SHORTER)
        budget.cost = max(limit - step.prompt_cost, least)
        self._begin(prompts, budget, step, n_most)

    def _begin(self, prompts: Iterable[Request], budget: _Budget, step: ScheduledStep, n_most: int) -> None:
        """Computes as much of prompts, one after another, as a budget allows, admitting waiting requests.

        Admission stops at the first request that does not fit. Prompts already in the step are skipped.
        """
        is_full = self.n_preemptions > budget.n_preemptions  # a request just preempted must not be admitted
        for request in prompts:
            if not budget.has_room(request) or len(step.chunks) >= n_most:
                return
            if request.sequence.state is RequestState.WAITING:
                if is_full or self._awaits_prefix(request):
                    continue
                if not self._admit(request, step):
                    is_full = True
                    continue
            if all(chunk.request is not request for chunk in step.chunks):
                self._schedule(request, budget, step)
                is_full = is_full or self.n_preemptions > budget.n_preemptions

    def _admissible(self, program: ProgramKind) -> list[Request]:
        """Waiting requests that may run now; none while the first in turn finds no room."""
        if not self.waiting or len(self.running) >= self.max_requests:
            return []
        first = self.waiting.first(_may_run, program)
        if first is None or not self._has_room(first):
            return []
        heads = self.waiting.heads(_may_run, program, _LOOK_AHEAD)
        return [request for request in heads if not self._awaits_prefix(request)]

    def _awaits_prefix(self, request: Request) -> bool:
        """True if a prompt under way begins alike and will soon be cached.

        That is, before the part that both have in common could be computed again by half of each step.
        """
        for other in self.running:
            if other.priority <= request.priority and not other.sequence.generates:
                n_common = self.allocator.n_common(request.sequence, other.sequence)
                n_left = other.sequence.n_tokens - other.sequence.n_cached
                if n_left <= 2 * (n_common - request.sequence.n_found):
                    return True
        return False

    def _step_requests(self) -> int:
        """The most requests of a step."""
        n_requests = min(len(self.running) + len(self.waiting), self.max_requests)
        return -(-n_requests // self.n_in_flight)

    def plan_drafts(self, chunks: list[ScheduledChunk]) -> list[tuple[int, Drafts, int]]:
        """(index of a chunk, its request's drafts, how many to compute) for each that is to have some."""
        if not self.takes_drafts or not [chunk for chunk in chunks if chunk.request.drafts is not None]:
            return []
        n_tokens = sum(chunk.n_tokens for chunk in chunks)
        n_rows = sum(chunk.n_logits for chunk in chunks)
        room = min(self.max_step_tokens - n_tokens, self.max_logit_rows - n_rows)
        n_decoding = sum(chunk.sequence.generates for chunk in chunks)
        has_prompt = n_decoding < len(chunks)
        if not has_prompt and self.row_costs.needs_plain(n_tokens):
            return []
        costs = self.row_costs.of(n_tokens)
        budget = DraftBudget(
            costs, n_tokens, n_decoding, has_prompt=has_prompt, others_wait=bool(self.waiting), room=room
        )
        offered: list[tuple[int, Drafts]] = []
        for i, chunk in enumerate(chunks):
            request, sequence = chunk.request, chunk.sequence
            if request.drafts is None or not request.max_drafts or not sequence.generates:
                continue
            if sequence.n_tokens < sequence.next_draft:
                continue
            try:
                request.drafts.follow(sequence.tokens, sequence.n_tokens)
                # the last token that it may come to needs no draft: it follows from the row before
                n = min(room, request.max_drafts, request.max_length - sequence.n_tokens - 1)
                n = min(n, self.allocator.draft_room(sequence))
                budget.offer(request.drafts.chances(n), request.drafts.relative_cost)
                offered.append((i, request.drafts))
            except Exception:  # drafts only save time, so a failing source is switched off
                logger.exception("the drafts of a request failed")
                sequence.next_draft = request.max_length
        planned: list[tuple[int, Drafts, int]] = []
        for (i, drafts), n in zip(offered, budget.share(), strict=True):
            if n:
                planned.append((i, drafts, n))
            else:  # asking a source costs about 0.1 % of a step, and every request has a source
                sequence = chunks[i].sequence
                sequence.next_draft = sequence.n_tokens + n_decoding
        return planned

    def with_drafts(self, chunk: ScheduledChunk, drafts: list[int]) -> ScheduledChunk:
        """A decoding request's chunk with drafts after its newest token, as many as free pages hold."""
        sequence = chunk.sequence
        n = max(min(len(drafts), self.allocator.n_fitting(sequence) - sequence.n_tokens), 0)
        n_to_come = self.max_requests - len(self.running)
        saves = self.allocator.save_before_drafts(sequence, n, n_to_come) if n else None
        if saves is None:
            return chunk
        stop = sequence.n_tokens + n
        sequence.tokens[sequence.n_tokens : stop] = drafts[:n]
        self.allocator.grow(sequence, stop)
        saves = [*chunk.saves, *saves]
        return replace(chunk, n_tokens=chunk.n_tokens + n, n_logits=1 + n, n_drafts=n, saves=saves)

    def postprocess(
        self, chunks: list[ScheduledChunk], results: list[list[SampledToken | KukriError]], now_s: float
    ) -> list[StepOutput]:
        """Records a finished step: `results` has each chunk's new tokens, or the error in place of a token.

        Requests for rows end when they have been given all.

        A chunk with drafts gives a token for each accepted one, and one more. Ends the requests that are
        done, whose pages are free at once. Requests that ended while in flight are passed over.
        """
        outputs: list[StepOutput] = []
        for chunk, tokens in zip(chunks, results, strict=True):
            request, sequence = chunk.request, chunk.sequence
            if sequence.state is not RequestState.RUNNING:
                continue
            if not tokens:
                self._count(chunk, chunk.n_tokens)
                if request.output != "tokens" and sequence.n_cached == sequence.n_prompt:
                    self.allocator.cache_pages(sequence)
                    self.finish(request, "stop")
                    outputs.append(StepOutput(request, None, "stop"))
                continue
            self._count(chunk, chunk.n_tokens - chunk.n_drafts + len(tokens) - 1)
            if chunk.n_drafts:
                self._forget_drafts(chunk, len(tokens) - 1)
            if not isinstance(tokens[-1], KukriError):
                self.allocator.cache_pages(sequence)
            for token in tokens:
                outputs.append(self._take(request, token, now_s))
        return outputs

    def postprocess_each(
        self, chunks: list[ScheduledChunk], tokens: list[SampledToken | KukriError], now_s: float
    ) -> list[StepOutput]:
        """Records a step that was continued, where all requests run: a token of each, or its error."""
        outputs: list[StepOutput] = []
        size = self.allocator.page_tokens
        self.n_computed += len(chunks)
        for chunk, token in zip(chunks, tokens, strict=True):
            sequence, request = chunk.sequence, chunk.request
            sequence.n_cached = sequence.next_row = n_cached = chunk.start + 1
            self.waiting.count_served(request, 1)
            if isinstance(token, KukriError):
                outputs.append(self._take(request, token, now_s))
            else:
                if n_cached % size == 0:
                    self.allocator.cache_pages(sequence)
                self._append(request, token, now_s)
                outputs.append(StepOutput(request, token, request.answer.finish_reason))
        return outputs

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a waiting or running request, and frees its pages, once it is collected if it is in flight."""
        sequence, answer = request.sequence, request.answer
        if sequence.state is RequestState.RUNNING:
            self.running.remove(request)
            if not self.running:  # the last step would keep requests that have ended while nothing runs
                self._step = ScheduledStep([], [], [], self._step.program)
        if sequence.state is not RequestState.NEW:
            self.waiting.leave(request)
        sequence.state, answer.finish_reason, answer.stop_reason = RequestState.FINISHED, reason, stop_reason
        if request.drafts is not None and reason in ("stop", "length"):
            request.drafts.learn(sequence.tokens[sequence.n_prompt : sequence.n_tokens])
        if sequence.is_in_flight:
            self.ending.append(request)
        else:
            self._release(request)

    def release_ended(self, request: Request) -> None:
        """Frees the pages of a request that finished while in flight, and has been collected."""
        self.ending.remove(request)
        self._release(request)

    def _release(self, request: Request) -> None:
        """Frees what a finished request holds; what an aborted one has computed stays cached."""
        self._free(request, is_cached=request.answer.finish_reason == "abort")

    def _free(self, request: Request, *, is_cached: bool) -> None:
        """Frees what a request holds, after its pages are cached for others if `is_cached`."""
        if is_cached:
            self.allocator.cache_unfinished(request.sequence)
        if request.drafts is not None:
            request.drafts.release()
        request.sequence.spans.rows.clear()
        self.allocator.release(request.sequence)

    def check_integrity(self) -> None:
        """Asserts that queue, running requests and pages agree with one another."""
        assert len(self.running) <= self.max_requests, "more requests run than max_requests allows"
        assert self.running == sorted(self.running, key=_turn), "the running requests are out of order"
        self.allocator.check_integrity(request.sequence for request in (*self.running, *self.ending))
        assert all(r.sequence.is_in_flight for r in self.ending), "a collected request has not been freed"
        for request in self.waiting:
            assert request.sequence.state is RequestState.WAITING, (
                f"request {request.id} is in the queue and {request.sequence.state}"
            )
            self.allocator.check_absent(request.sequence)
        for request in self.running:
            assert request.sequence.state is RequestState.RUNNING, (
                f"request {request.id} is among the running and {request.sequence.state}"
            )
            assert request not in self.waiting, f"request {request.id} runs and waits"
            assert request.sequence.n_cached <= request.sequence.n_tokens <= request.max_length, (
                f"request {request.id} is longer than it may be"
            )

    def _urgent(self) -> Request | None:
        """The request next in turn, if running requests with less priority may be preempted for it."""
        urgent = self.waiting.first(_may_run)
        if urgent is None:
            return None
        leaving = list(
            takewhile(
                lambda r: not r.sequence.is_in_flight and urgent.priority < r.priority,
                reversed(self.running),
            )
        )
        return urgent if leaving and self._has_room(urgent, leaving) else None

    def _preempt_for_urgent(self) -> None:
        """Preempts running requests for one of a better priority that waits and finds no room.

        As few as make room, the last in turn first; none if all of them would not.
        """
        urgent = self._urgent()
        if urgent is None:
            return
        while not self._has_room(urgent):
            self.preempt(self.running[-1])

    def _schedule(self, request: Request, budget: _Budget, step: ScheduledStep) -> None:
        """Adds the request's next tokens to the step, within the budget."""
        sequence = request.sequence
        if sequence.may_restore:
            budget.n_saved_pages -= self.allocator.restore(sequence, budget.n_saved_pages)
            if sequence.may_restore:
                return
        start, n_replayed = sequence.n_cached, sequence.n_replayed
        n_tokens, n_logits = budget.take(request)
        if n_tokens == 0 or not self._allocate(request, start, start + n_tokens, step):
            return
        n_after = max(start + n_tokens - request.stop_row, 0)
        n_to_come = self.max_requests - len(self.running)  # requests, each of which wants a state
        saves = self.allocator.snapshots(sequence, start, start + n_tokens, n_to_come)
        first, n_all, sequence.n_replayed = start - n_replayed, n_tokens + n_replayed, 0
        chunk = ScheduledChunk(
            *(sequence, first, n_all, n_logits),
            request=request,
            n_after=n_after,
            n_unseen=request.n_unseen,
            saves=saves,
        )
        step.chunks.append(chunk)
        if sequence.saved_state is not None:
            if sequence.saved_state.contents is not None:
                step.state_writes.append((sequence.state_slot, sequence.saved_state.contents))
            sequence.saved_state = None
        if not sequence.generates:
            step.prompt_cost += self.cost.of(start, n_tokens)
        budget.spend(request, n_all, n_logits)

    def _forget_drafts(self, chunk: ScheduledChunk, n_accepted: int) -> None:
        """Counts drafts, and forgets rejected ones."""
        for counts in (self, chunk.sequence):
            counts.n_drafted += chunk.n_drafts
            counts.n_accepted += n_accepted
        self.allocator.settle_drafts(chunk.sequence, chunk.n_drafts, n_accepted)

    def _count(self, chunk: ScheduledChunk, n_kept: int) -> None:
        """Counts the tokens of a chunk whose keys and values stay in the cache."""
        sequence, n_cached = chunk.sequence, chunk.start + n_kept
        n_new, sequence.n_cached = n_cached - sequence.n_cached, n_cached
        sequence.next_row = max(sequence.next_row, n_cached)
        self.n_computed += n_new
        self.waiting.count_served(chunk.request, n_new)

    def _take(self, request: Request, token: SampledToken | KukriError, now_s: float) -> StepOutput:
        """Appends a request's token, or ends it by an error."""
        if isinstance(token, KukriError):
            request.answer.error = token
            self.finish(request, "error")
            return StepOutput(request, None, "error")
        self._append(request, token, now_s)
        return StepOutput(request, token, request.answer.finish_reason)

    def _allocate(self, request: Request, start: int, stop: int, step: ScheduledStep) -> bool:
        """Allocates pages to write tokens `start` to `stop` - 1 to, preempting the requests last in turn.

        False if it was preempted itself, or has to wait until a later request has been collected.
        """
        while not self.allocator.copy_on_write(request.sequence, start, stop, step.copies):
            last = self.running[-1]
            if last.sequence.is_in_flight:
                return False
            step.chunks = [chunk for chunk in step.chunks if chunk.request is not last]
            self.preempt(last)
            if last is request:
                return False
        return True

    def _has_room(self, request: Request, leaving: Sequence[Request] = ()) -> bool:
        """False if a waiting request may not run, or finds no room.

        `leaving` are running requests that count as preempted.
        """
        if len(self.running) - len(leaving) >= self.max_requests:
            return False
        left = [other.sequence for other in leaving]
        return self.allocator.has_room(request.sequence, left, self._prompts(leaving))

    def _prompts(self, leaving: Sequence[Request] = ()) -> list[TokenSequence]:
        """The sequences of the running requests whose prompts are computed."""
        return [r.sequence for r in self.running if not r.sequence.generates and r not in leaving]

    def _admit(self, request: Request, step: ScheduledStep) -> bool:
        """Moves a waiting request to the running, with the pages it can share, if it has room."""
        if len(self.running) >= self.max_requests:
            return False
        prefix = self.allocator.find_room(request.sequence, promised=self._prompts())
        if prefix is None:
            return False
        self.allocator.admit(request.sequence, prefix, step.state_copies)
        self.waiting.remove(request)
        insort(self.running, request, key=_turn)
        request.sequence.state = RequestState.RUNNING
        return True

    def preempt(self, request: Request) -> None:
        """Sends a running request back to the queue, without its pages."""
        self.running.remove(request)
        self._free(request, is_cached=True)
        request.sequence.state = RequestState.WAITING
        request.sequence.n_preemptions += 1
        self.waiting.put(request)
        self.n_preemptions += 1

    def _append(self, request: Request, token: SampledToken, now_s: float) -> None:
        request.append(token, now_s)
        if token.id in request.stop_ids:
            named = token.id in request.params.stop_token_ids
            self.finish(request, "stop", token.id if named else None)
        elif request.sequence.n_tokens >= request.max_length:
            self.finish(request, "length")


class _Budget:
    """Remaining budgets of a step: tokens, prefill tokens, and rows of logits."""

    def __init__(self, scheduler: Scheduler, program: ProgramKind) -> None:
        self.needs_one_step, self.is_unspent = scheduler.needs_one_step, True
        self._step_cost, self.cost = scheduler.cost, inf  # the cost of prompts
        self.n_preemptions = scheduler.n_preemptions  # before the step
        self.n_saved_pages = scheduler.allocator.saved_per_step
        self.n_tokens = self.n_prompt_tokens = scheduler.max_step_tokens
        if scheduler.generates:
            self.n_prompt_tokens = scheduler.max_prompt_tokens
        # beyond the one that each may want; a row of hidden states is small, and there is room for all
        self.n_rows = scheduler.max_step_tokens
        if program == "logits":
            self.n_rows = scheduler.max_logit_rows - scheduler.max_requests

    def has_room(self, request: Request) -> bool:
        """False if the step is too full for a prompt, or for all of it if it must be in one step."""
        if self.needs_one_step:
            return self.is_unspent or request.sequence.n_tokens <= self.n_tokens
        return min(self.n_tokens, self.n_prompt_tokens) > 0 and self.cost > 0

    def take(self, request: Request) -> tuple[int, int]:
        """(tokens, logit rows) that the request may have."""
        sequence = request.sequence
        n_left = sequence.n_tokens - sequence.n_cached
        if self.needs_one_step:
            n_rows = request.stop_row - request.first_row
            return (n_left, n_rows) if self.has_room(request) else (0, 0)
        if sequence.generates:
            return int(sequence.n_replayed < self.n_tokens), 1
        if sequence.spans.inputs:
            n_left = sequence.spans.n_ready(sequence.n_cached, sequence.n_tokens) - sequence.n_cached
            if sequence.spans.attends_both_ways(sequence.n_cached):
                return self._take_whole(request, n_left)
        n_without = sequence.next_row - sequence.n_cached  # tokens that come before the first row
        n_timely = self._step_cost.n_within(sequence.n_cached, self.cost)
        n_tokens = min(n_left, self.n_tokens, self.n_prompt_tokens, n_without + 1 + self.n_rows, n_timely)
        n_after = max(sequence.n_cached + n_tokens - request.stop_row, 0)
        return n_tokens, max(n_tokens - n_without - n_after, 0)

    def _take_whole(self, request: Request, n_left: int) -> tuple[int, int]:
        """(tokens, logit rows) of a run of an input's rows, which is not cut: all or none."""
        n_cached, next_row = request.sequence.n_cached, request.sequence.next_row
        n_rows = n_cached + n_left - max(next_row, n_cached) - max(n_cached + n_left - request.stop_row, 0)
        return (n_left, max(n_rows, 0)) if n_left <= self.n_tokens and n_rows <= self.n_rows + 1 else (0, 0)

    def spend(self, request: Request, n_tokens: int, n_logits: int) -> None:
        """Subtracts a request's share."""
        self.is_unspent = False
        self.n_tokens = max(self.n_tokens - n_tokens, 0)
        if not request.sequence.generates:
            self.n_prompt_tokens -= n_tokens
            self.cost -= self._step_cost.of(request.sequence.n_cached, n_tokens)
            self.n_rows -= max(n_logits - 1, 0)


def _n_left(request: Request) -> int:
    """Tokens to compute before a request's next one, as far as is known while it waits."""
    sequence, leader = request.sequence, request.sequence.leader
    if leader is not None and not sequence.n_generated and leader.n_cached >= sequence.n_prompt:
        return 1
    return sequence.n_tokens - max(sequence.n_cached, sequence.n_found)


def _may_run(request: Request) -> bool:
    """False until the request whose prompt it shares has prefilled it, and while that one is in flight."""
    leader = request.sequence.leader
    if leader is None:
        return True
    return not leader.is_in_flight and (leader.state is RequestState.FINISHED or leader.n_generated > 0)


def _turn(request: Request) -> tuple[int, int]:
    """Return the sort key for page allocation. The request that sorts last is preempted first."""
    return request.priority, request.id
