"""What requests hold in the caches: pages of keys and values, slots of recurrent states, and their prefixes.

A request begins after the longest prefix whose pages are cached, or saved on disk; computed pages are cached
in turn for requests to come. Neither changes a token: a page's contents depend on its tokens and those before
it alone. Who runs, waits and is preempted is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from kukri.engine.pages import PageKey, PagePool, check_fits, page_keys
from kukri.engine.request import Request
from kukri.engine.saved_prefixes import SavedPrefixes
from kukri.engine.states import StatePool, snapshot_places


class Residence:
    """Gives requests their pages and states, and takes them back.

    With `caches_prefixes` full pages outlive their requests; `saved` keeps them on disk too. `states` has the
    slots of a model with recurrent layers, None for any other.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        caches_prefixes: bool = True,
        saved: SavedPrefixes | None = None,
        states: StatePool | None = None,
    ) -> None:
        self.pool, self.page_tokens = pool, pool.page_tokens
        self.caches_prefixes, self.saved, self.states = caches_prefixes, saved, states
        self.n_prefix_hit = 0  # tokens that were found and not computed
        self.n_restored = 0  # of those, read from disk

    @property
    def saved_per_step(self) -> int:
        """Saved pages that may be read between two steps."""
        return 0 if self.saved is None else self.saved.pages_per_step

    def check_fits(self, request: Request) -> None:
        """Raises CapacityError if a request could outgrow the whole pool."""
        check_fits(request.max_cached, self.pool.n_pages, self.page_tokens)

    def find_room(
        self, request: Request, leaving: Sequence[Request] = (), n_promised: int = 0
    ) -> list[int] | None:
        """The cached pages that a waiting request can begin with; None if the rest of it finds no room.

        What `leaving` hold alone counts as free, and `n_promised` of the free pages do not.
        """
        if self.states is not None and not self.states.n_free and not leaving:
            return None
        known = self._cached_pages(request)
        n_new = self.pool.pages_for(request.n_tokens) - len(known)
        freed = self.pool.only_held_by([other.pages for other in leaving]) if leaving else ()
        n_left = self.pool.n_free - n_promised - sum(self.pool.is_idle(page) for page in known)
        n_left += len(freed) - sum(page in freed for page in known)
        return known if n_new <= n_left else None

    def note_cached(self, request: Request) -> None:
        """Notes how much of a new request's prompt is cached, in its `n_found`."""
        self._cached_pages(request)

    def n_to_come(self, request: Request) -> int:
        """The pages that a running request does not hold yet and needs for the tokens it has."""
        return self.pool.pages_for(request.n_tokens) - request.n_pages

    def n_common(self, request: Request, other: Request) -> int:
        """Tokens at the beginning of both requests that the first would find cached once the other is."""
        if not (self._uses_cache(request) and self._uses_cache(other)) or request.taps is not None:
            return 0
        n_pages = min(request.next_row, other.n_tokens) // self.page_tokens
        keys = zip(self._keys(request, 0, n_pages), self._keys(other, 0, n_pages), strict=True)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], keys)) * self.page_tokens

    def admit(self, request: Request, pages: list[int], state_copies: list[tuple[int, int]]) -> None:
        """Gives a request the pages that `find_room` found, or those of a leader that has its prompt.

        `state_copies` gets the state (from, to) to copy before the request's first step.
        """
        n_found = len(pages) * self.page_tokens
        leader, is_shared = request.leader, False
        if self.states is not None:
            self._admit_state(request, pages, self.states, state_copies)
        elif leader is not None and leader.n_cached >= request.n_prompt and not request.n_generated:
            n_found = request.n_prompt - 1  # its last token is computed again, for logits
            pages = leader.pages[: self.pool.pages_for(n_found)]
            is_shared = True
        self.pool.share(pages)
        request.page_row[: len(pages)] = pages
        request.n_pages = len(pages)
        request.n_cached_pages = 0  # counted when its next token shows that all is well
        self._count_found(request, n_found)
        request.may_restore = self.saved is not None and not is_shared and request.taps is None

    def restore(self, request: Request, n_most: int) -> int:
        """Reads up to `n_most` of the request's next pages that are saved on disk; returns how many.

        Clears `may_restore` unless a later step may read more.
        """
        size, depth = self.page_tokens, request.n_pages
        n_wanted = (request.next_row - request.n_cached) // size
        n_room = min(n_wanted, self.pool.n_free)
        if self.saved is None or not self._uses_cache(request) or not n_room:
            request.may_restore = False
            return 0
        keys = list(self._keys(request, depth, depth + min(n_room, n_most)))
        for key, contents in zip(keys, self.saved.read(keys, depth)):
            (page,) = self.pool.allocate(1)
            self.saved.write(page, contents)
            request.page_row[request.n_pages] = self.pool.cache(page, key)
            request.n_pages += 1
        n_found = request.n_pages - depth
        self._count_found(request, n_found * size)
        self.n_restored += n_found * size
        request.may_restore = n_found == len(keys) and n_found < n_wanted
        return n_found

    def make_writable(self, request: Request, start: int, stop: int, copies: list[tuple[int, int]]) -> bool:
        """Allocates pages to write tokens `start` to `stop` - 1 to; False if too few are free.

        A page that others read too is replaced: `copies` gets (from, to), to be copied before the step.
        """
        first, place = divmod(start, self.page_tokens)
        is_shared = place != 0 and not self.pool.is_writable(int(request.page_row[first]))
        if self.pool.n_free < self.pool.pages_for(stop) - request.n_pages + is_shared:
            return False
        if is_shared:
            old, (new,) = int(request.page_row[first]), self.pool.allocate(1)
            copies.append((old, new))
            request.page_row[first] = new
            self.pool.free([old])
        self.grow(request, stop)
        return True

    def n_fitting(self, request: Request) -> int:
        """Tokens that the request's pages hold, and those that are free."""
        return (request.n_pages + self.pool.n_free) * self.page_tokens

    def grow(self, request: Request, n_tokens: int) -> None:
        """Allocates pages up to this many tokens of the request; they must be free."""
        n_pages = self.pool.pages_for(n_tokens)
        if n_pages > request.n_pages:
            request.page_row[request.n_pages : n_pages] = self.pool.allocate(n_pages - request.n_pages)
            request.n_pages = n_pages

    def trim(self, request: Request) -> None:
        """Frees the pages after the request's cached tokens."""
        n_pages = self.pool.pages_for(request.n_cached)
        self.pool.free(request.page_row[n_pages : request.n_pages].tolist())
        request.page_row[n_pages : request.n_pages] = 0
        request.n_pages = n_pages

    def snapshots(self, request: Request, start: int, stop: int, n_reserved: int) -> list[tuple[int, int]]:
        """(tokens, slot) of the snapshots to take while tokens `start` to `stop` - 1 are computed.

        Prompts have theirs where `snapshot_places` says, answers after every page. `n_reserved` slots stay
        free.
        """
        if self.states is None or not self._uses_cache(request):
            return []
        size = self.page_tokens
        places = [stop] if stop > request.n_prompt and stop % size == 0 else []
        if start < request.n_prompt:
            wanted = snapshot_places(request.n_prompt, request.n_found, size)
            places += [place for place in wanted if start < place <= stop]
        n_spare = max(self.states.n_free - n_reserved, 0)
        saves = [(place, self.states.allocate()) for place in places[:n_spare]]
        request.snapshots += saves
        return saves

    def cache_pages(self, request: Request) -> None:
        """Caches the request's full pages for others: its logits were numbers, so all that is in them is."""
        n_full = request.n_cached // self.page_tokens
        if n_full == request.n_cached_pages or not self._uses_cache(request):
            return
        first = request.n_cached_pages
        for i, key in enumerate(self._keys(request, first, n_full), first):
            page = self.pool.cache(int(request.page_row[i]), key)
            request.page_row[i] = page
            if self.saved is not None:
                self.saved.save(page, key, i)
        request.n_cached_pages = n_full
        if self.states is not None:
            self._keep_snapshots(request, self.states)

    def release(self, request: Request) -> None:
        """Takes back all that a request holds."""
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

    def forget(self) -> None:
        """Forgets every cached prefix and snapshot."""
        self.pool.forget()
        if self.states is not None:
            self.states.forget()

    def check_integrity(self, holding: Iterable[Request]) -> None:
        """Asserts that `holding` hold all pages and states that are not free, and in good order."""
        holding = list(holding)
        self.pool.check_integrity([request.pages for request in holding])
        if self.states is not None:
            saved = [slot for request in holding for _, slot in request.snapshots]
            self.states.check_integrity([*saved, *(request.state_slot for request in holding)])
        for request in holding:
            assert request.is_in_flight or request.n_pages == self.pool.pages_for(request.n_cached), (
                f"request {request.id} holds too many pages"
            )
            assert request.n_cached_pages <= request.n_cached // self.page_tokens, (
                "a page is cached and not full"
            )
            assert not request.page_row[request.n_pages :].any(), f"request {request.id} lists pages it lost"

    def check_absent(self, request: Request) -> None:
        """Asserts that a request holds nothing."""
        assert request.n_pages == request.n_cached == 0, f"request {request.id} waits and holds pages"
        assert request.state_slot < 0, f"request {request.id} waits and has a state"
        assert not request.snapshots, f"request {request.id} waits and holds snapshots"

    def _uses_cache(self, request: Request) -> bool:
        return self.caches_prefixes and request.is_cacheable

    def _cached_pages(self, request: Request) -> list[int]:
        """Cached pages with the request's tokens, up to the first token whose row of output is wanted.

        With recurrent layers, up to the last page that has a snapshot.
        """
        if not self._uses_cache(request) or request.taps is not None:
            return []
        pages = self.pool.find(self._keys(request, 0, request.next_row // self.page_tokens))
        request.n_found = len(pages) * self.page_tokens
        if self.states is not None:
            while pages and self.states.find(self.pool.key(pages[-1])) is None:
                pages.pop()
        return pages

    def _keys(self, request: Request, first: int, stop: int) -> Iterator[PageKey]:
        """The keys of the request's pages `first` to `stop` - 1, each computed once in its life."""
        keys, size = request.page_keys, self.page_tokens
        for i in range(first, stop):
            while len(keys) <= i:
                n = len(keys) * size
                before = keys[-1] if keys else request.prefix_root
                keys += page_keys(request.tokens[n : n + size], size, before)
            yield keys[i]

    def _count_found(self, request: Request, n_tokens: int) -> None:
        """Counts further tokens whose keys and values were found."""
        request.n_cached += n_tokens
        request.next_row = max(request.next_row, request.n_cached)  # those before are the leader's to give
        if not request.n_generated and not request.n_preemptions:
            request.n_prefix_hit += n_tokens
        self.n_prefix_hit += n_tokens

    def _admit_state(
        self, request: Request, pages: list[int], states: StatePool, copies: list[tuple[int, int]]
    ) -> None:
        """Gives a request a slot, with the state after the cached pages that it begins with."""
        source = states.find(self.pool.key(pages[-1])) if pages else None
        request.state_slot = states.allocate()
        if source is not None and source != request.state_slot:  # which may be the only one left
            copies.append((source, request.state_slot))

    def _keep_snapshots(self, request: Request, states: StatePool) -> None:
        """Keeps the states after the request's cached pages for others; of its answer the newest alone."""
        for place, slot in request.snapshots:
            key = self.pool.key(int(request.page_row[place // self.page_tokens - 1]))
            states.keep(key, slot)
            if place > request.n_prompt:
                if request.snapshot is not None:
                    states.drop(request.snapshot)
                request.snapshot = key
        request.snapshots = []
