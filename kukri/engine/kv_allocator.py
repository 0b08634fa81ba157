"""Allocates what requests hold in the caches: pages of keys and values, slots of recurrent states, prefixes.

A request begins after the longest prefix whose pages are cached, or saved on disk; computed pages are cached
for later requests. Neither changes a token, because a page's contents depend only on its tokens and the
tokens before it. The scheduler decides which requests run, wait and are preempted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kukri.engine.pages import PageKey, PagePool
from kukri.engine.saved_prefixes import SavedPrefixes
from kukri.engine.sequence import TokenSequence
from kukri.engine.states import StatePool, snapshot_places
from kukri.kernels.arrays import IntArray


class Prefix(NamedTuple):
    """The cached beginning of a text: the number of whole pages, and the needed pages of each pool."""

    n_pages: int
    pages: list[list[int]]


class KVAllocator:
    """Gives requests their pages and states, and takes them back.

    Layers without a window have a pool of pages, and so have the layers of each window
    (`cache.pool_windows`), whose pages are freed once the window has passed them. With `caches_prefixes` full
    pages outlive their requests; `saved` keeps pages and states on disk too, if there is one pool, without a
    window. `states` has the slots of a model with recurrent layers; None for any other.
    """

    def __init__(
        self,
        pools: Sequence[PagePool],
        *,
        caches_prefixes: bool = True,
        saved: SavedPrefixes | None = None,
        states: StatePool | None = None,
    ) -> None:
        assert saved is None or [pool.window for pool in pools] == [None], "saved pages have no windows"
        self.pools, self.page_tokens = list(pools), pools[0].page_tokens
        self.caches_prefixes, self.saved, self.states = caches_prefixes, saved, states
        self.n_prefix_hit = 0  # tokens that were found and not computed
        self.n_restored = 0  # how many of those were read from disk

    @property
    def n_free(self) -> int:
        """Pages that every pool has free."""
        return min(pool.n_free for pool in self.pools)

    @property
    def saved_per_step(self) -> int:
        """Saved pages that may be read between two steps."""
        return 0 if self.saved is None else self.saved.pages_per_step

    def find_room(
        self,
        sequence: TokenSequence,
        leaving: Sequence[TokenSequence] = (),
        promised: Sequence[TokenSequence] = (),
    ) -> Prefix | None:
        """Return the cached prefix that a waiting request can begin with; None if the rest of it finds no
        room.

        Pages that only `leaving` hold count as free; pages that the prompts of `promised` still need do not.
        """
        if self.states is not None and not self.states.n_free and not leaving:
            return None
        known = self._cached_prefix(sequence)
        for i, (pool, pages) in enumerate(zip(self.pools, known.pages)):
            freed = pool.only_held_by([other.pages(i) for other in leaving]) if leaving else ()
            n_left = pool.n_free - self._n_promised(i, promised) - sum(pool.is_idle(page) for page in pages)
            n_left += len(freed) - sum(page in freed for page in pages)
            if pool.most_held(sequence.n_tokens) - len(pages) > n_left:
                return None
        return known

    def has_room(
        self,
        sequence: TokenSequence,
        leaving: Sequence[TokenSequence] = (),
        promised: Sequence[TokenSequence] = (),
    ) -> bool:
        """Return True if `find_room` finds room. If that does not depend on cached pages, no prefix is looked
        up, so that a long waiting prompt costs a step no more than a short one.
        """
        if self.states is not None and not self.states.n_free and not leaving:
            return False
        n_shared, is_sure = self._n_first(sequence, self.pools[0].is_held), True
        if self.pools[0].window is None:
            sequence.n_found = self._n_first(sequence, self.pools[0].is_cached) * self.page_tokens
        for i, pool in enumerate(self.pools):
            n_left, n_needed = pool.n_free - self._n_promised(i, promised), pool.most_held(sequence.n_tokens)
            n_found = n_shared if pool.window is None else pool.pages_for(pool.window)  # at most
            if n_needed - n_found > n_left + sum(one.n_held(i) for one in leaving):
                return False
            is_sure = is_sure and n_needed <= n_left
        return is_sure or self.find_room(sequence, leaving, promised) is not None

    def note_cached(self, sequence: TokenSequence) -> None:
        """Notes how much of a new request's prompt is cached, in its `n_found`."""
        self._cached_prefix(sequence)

    def n_common(self, sequence: TokenSequence, other: TokenSequence) -> int:
        """Return how many tokens of `request` would be found cached once the other request is."""
        if not (self._finds_prefixes(sequence) and self._uses_cache(other)):
            return 0
        n_pages = min(sequence.next_row, other.n_tokens) // self.page_tokens
        keys, others = (one.hash_pages(n_pages, self.page_tokens) for one in (sequence, other))
        # a key stands for all before it too
        return bisect_left(range(n_pages), True, key=lambda i: keys[i] != others[i]) * self.page_tokens

    def admit(self, sequence: TokenSequence, prefix: Prefix, state_copies: list[tuple[int, int]]) -> None:
        """Gives a request the prefix that `find_room` found, or the pages of a leader that has its prompt.

        `state_copies` gets the state (from, to) to copy before the request's first step.
        """
        n_found, is_shared, pages = prefix.n_pages * self.page_tokens, False, prefix.pages
        if self.states is not None:
            self._admit_state(sequence, n_found, self.states, state_copies)
        elif (of_leader := self._pages_of_leader(sequence)) is not None:
            n_found, is_shared = sequence.n_prompt - 1, True  # the last token is computed again, for logits
            pages = of_leader
        sequence.n_pages = self.pools[0].pages_for(n_found)
        sequence.first_pages = [sequence.n_pages - len(own) for own in pages]
        while len(sequence.page_rows) < len(self.pools):
            sequence.page_rows.append(np.zeros_like(sequence.page_rows[0]))
        for pool, row, first, own in zip(self.pools, sequence.page_rows, sequence.first_pages, pages):
            pool.share(own)
            row[first : sequence.n_pages] = own
        # counted once the next token confirms that the pages are valid, or at an abort
        sequence.n_cached_pages = 0
        self._count_found(sequence, n_found)
        sequence.may_restore = self.saved is not None and not is_shared and sequence.finds_prefixes
        sequence.saved_state = None

    def restore(self, sequence: TokenSequence, n_most: int) -> int:
        """Reads up to `n_most` of the request's next pages that are saved on disk; returns how many.

        Clears `may_restore` unless a later step may read more.
        """
        size, depth, pool = self.page_tokens, sequence.n_pages, self.pools[0]
        if self.saved is None or not self._uses_cache(sequence):
            sequence.may_restore = False
            return 0
        n_wanted = (sequence.next_row - sequence.n_cached) // size
        if self.states is not None:
            n_wanted = self._find_state(sequence, n_wanted, self.saved) - depth
        n_room = min(n_wanted, pool.n_free)
        if not n_room:
            self._end_restoring(sequence, n_wanted)
            return 0
        keys = self._keys(sequence, depth, depth + min(n_room, n_most))
        for key, contents in zip(keys, self.saved.read(keys, depth)):
            (page,) = pool.allocate(1)
            self.saved.write(page, contents)
            sequence.page_rows[0][sequence.n_pages] = pool.cache(page, key)
            sequence.n_pages += 1
        n_found = sequence.n_pages - depth
        self._count_found(sequence, n_found * size)
        self.n_restored += n_found * size
        if n_found < len(keys) or n_found == n_wanted:
            self._end_restoring(sequence, n_wanted - n_found)
        return n_found

    def _find_state(self, sequence: TokenSequence, n_wanted: int, saved: SavedPrefixes) -> int:
        """Return the pages up to the last saved state among the request's next `n_wanted`, else the pages it
        has.

        The state is read first, and set when all of its pages are there and the request's first step begins.
        """
        if sequence.saved_state is None:
            first = sequence.n_pages
            keys = self._keys(sequence, first, first + min(n_wanted, self.pools[0].n_free))
            sequence.saved_state = saved.last_state(keys, first)
        return sequence.saved_state.n_pages

    def _end_restoring(self, sequence: TokenSequence, n_missing: int) -> None:
        """End reading saved pages. A state is of no use without all its pages, nor are they without it."""
        sequence.may_restore = False
        if sequence.saved_state is not None and n_missing:
            self.n_restored -= sequence.n_cached - sequence.saved_state.n_known * self.page_tokens
            sequence.saved_state = None
            self._count_found(sequence, -sequence.n_cached)
            self.trim(sequence)

    def copy_on_write(
        self, sequence: TokenSequence, start: int, stop: int, copies: list[tuple[int, int, int]]
    ) -> bool:
        """Allocates pages to write tokens `start` to `stop` - 1 to; False if too few are free.

        Those that windows have passed are freed. A page that others read too is replaced: `copies` gets
        (from, to, pool), to be copied before the step.
        """
        self.pass_windows(sequence)
        first, place = divmod(start, self.page_tokens)
        n_new = self.pools[0].pages_for(stop) - sequence.n_pages
        shared: list[tuple[int, PagePool, IntArray]] = []
        for i, (pool, row) in enumerate(zip(self.pools, sequence.page_rows)):
            is_shared = place != 0 and not pool.is_writable(int(row[first]))
            if pool.n_free < n_new + is_shared:
                return False
            if is_shared:
                shared.append((i, pool, row))
        for i, pool, row in shared:
            old, (new,) = int(row[first]), pool.allocate(1)
            copies.append((old, new, i))
            row[first] = new
            pool.free([old])
        self.grow(sequence, stop)
        return True

    def pass_windows(self, sequence: TokenSequence) -> None:
        """Free pages that no later token sees and that no state reads again.

        Pages that are not cached yet are set aside until the request's next token confirms that they are
        valid. The pages of interest to others, up to the prompt's end and up to where they share it, go last.
        """
        for i, pool in enumerate(self.pools):
            first, row = pool.first_needed(sequence.n_cached - sequence.n_replayed), sequence.page_rows[i]
            for place in range(sequence.first_pages[i], first):
                page, first_out = int(row[place]), not self._is_of_interest(sequence, pool, place)
                if self._uses_cache(sequence) and pool.is_writable(page):
                    pool.set_aside(page, (sequence.id, place), first_out=first_out)
                    sequence.passed.append((i, place, page))
                else:
                    pool.free([page], first_out=first_out)
            if first > sequence.first_pages[i]:
                row[sequence.first_pages[i] : first] = 0
                sequence.first_pages[i] = first

    def n_fitting(self, sequence: TokenSequence) -> int:
        """Return the number of tokens for which the request's pages and the free pages have room."""
        return (sequence.n_pages + self.n_free) * self.page_tokens

    def grow(self, sequence: TokenSequence, n_tokens: int) -> None:
        """Allocate pages for the request's first `n_tokens` tokens; enough must be free."""
        before, n_pages = sequence.n_pages, self.pools[0].pages_for(n_tokens)
        if n_pages > before:
            for pool, row in zip(self.pools, sequence.page_rows):
                row[before:n_pages] = pool.allocate(n_pages - before)
            sequence.n_pages = n_pages

    def trim(self, sequence: TokenSequence) -> None:
        """Frees the pages after the request's cached tokens."""
        n_pages = self.pools[0].pages_for(sequence.n_cached)
        for pool, row in zip(self.pools, sequence.page_rows):
            pool.free(row[n_pages : sequence.n_pages].tolist())
            row[n_pages : sequence.n_pages] = 0
        sequence.n_pages = n_pages

    def snapshots(
        self, sequence: TokenSequence, start: int, stop: int, n_reserved: int
    ) -> list[tuple[int, int]]:
        """(tokens, slot) of the snapshots to take while tokens `start` to `stop` - 1 are computed.

        Prompts have theirs where `snapshot_places` says, answers after every page. `n_reserved` slots stay
        free.
        """
        if self.states is None or not self._uses_cache(sequence):
            return []
        size = self.page_tokens
        places = [stop] if stop > sequence.n_prompt and stop % size == 0 else []
        if start < sequence.n_prompt:
            wanted = snapshot_places(sequence.n_prompt, sequence.n_found, size)
            places += [place for place in wanted if start < place <= stop]
        n_spare = max(self.states.n_free - n_reserved, 0)
        saves = [(place, self.states.allocate()) for place in places[:n_spare]]
        sequence.snapshots += saves
        return saves

    def draft_room(self, sequence: TokenSequence) -> int:
        """Return the most drafts of a decoding request in a step.

        A recurrent model's drafts stay on the page of its newest token, so that accepted drafts which its
        state reads again are on a page that no other request reads, and a state after a full page is kept.
        """
        if self.states is None:
            return len(sequence.tokens)
        return -(sequence.n_cached + 1) % self.page_tokens

    def save_before_drafts(
        self, sequence: TokenSequence, n_drafts: int, n_reserved: int
    ) -> list[tuple[int, int]] | None:
        """(tokens, slot) of the states to save in a step with drafts: the state before the drafts, to return
        to, and a snapshot after them, which leaves `n_reserved` slots free. None if there is no slot.
        """
        if self.states is None:
            return []
        if not self.states.n_free:
            return None
        sequence.state_before, start = self.states.allocate(), sequence.n_cached + 1
        snapshots = self.snapshots(sequence, start, start + n_drafts, n_reserved)
        return [(start, sequence.state_before), *snapshots]

    def settle_drafts(self, sequence: TokenSequence, n_drafts: int, n_accepted: int) -> None:
        """Keep the results of accepted drafts.

        A recurrent state has read all drafts or none, so the accepted ones are read again in the next step.
        """
        if self.states is not None:
            unneeded = sequence.state_before
            if n_accepted < n_drafts:
                unneeded, sequence.state_slot = sequence.state_slot, sequence.state_before
                sequence.n_replayed = n_accepted
                if sequence.snapshots and sequence.snapshots[-1][0] > sequence.n_cached:
                    self.states.free(sequence.snapshots.pop()[1])
            sequence.state_before = -1
            self.states.free(unneeded)
        self.trim(sequence)

    def cache_pages(self, sequence: TokenSequence) -> None:
        """Cache the request's full pages for others. Its logits are finite, so its pages' contents are."""
        n_full = sequence.n_cached // self.page_tokens
        if n_full == sequence.n_cached_pages or not self._uses_cache(sequence):
            return
        first = sequence.n_cached_pages
        for i, key in enumerate(self._keys(sequence, first, n_full), first):
            for pool, row, first_held in zip(self.pools, sequence.page_rows, sequence.first_pages):
                if i >= first_held:
                    row[i] = pool.cache(int(row[i]), key)
            if self.saved is not None:
                self.saved.save(int(sequence.page_rows[0][i]), key, i)
        for which, place, page in sequence.passed:
            self.pools[which].claim(page, (sequence.id, place), sequence.page_keys[place])
        sequence.passed.clear()
        sequence.n_cached_pages = n_full
        if self.states is not None:
            self._keep_snapshots(sequence, self.states)

    def cache_unfinished(self, sequence: TokenSequence) -> None:
        """Cache the pages of an aborted or preempted request, because its prompt may come again.

        No logits have shown that these are numbers. Others would compute the same of the same tokens.
        """
        while (
            sequence.snapshots and sequence.snapshots[-1][0] > sequence.n_cached
        ):  # made by a step in flight
            assert self.states is not None, "snapshots are states"
            self.states.free(sequence.snapshots.pop()[1])
        self.cache_pages(sequence)

    def release(self, sequence: TokenSequence) -> None:
        """Free everything that a request holds."""
        if self.states is not None:
            for slot in _slots(sequence):
                self.states.free(slot)
            sequence.state_slot = sequence.state_before = -1
            sequence.snapshots, sequence.snapshot, sequence.n_replayed = [], None, 0
        for which, place, page in sequence.passed:
            self.pools[which].claim(page, (sequence.id, place), None)
        sequence.passed.clear()
        if sequence.n_pages:
            for i, (pool, row) in enumerate(zip(self.pools, sequence.page_rows)):
                pool.free(sequence.pages(i))
                row[: sequence.n_pages] = 0
        sequence.first_pages = [0] * len(self.pools)
        sequence.n_pages = sequence.n_cached = sequence.n_cached_pages = 0

    def keep(self, sequence: TokenSequence) -> None:
        """Keep the cached pages of a request that has ended longer than others."""
        for pool in self.pools:
            pool.keep(sequence.page_keys)
        if self.states is not None:
            self.states.touch(sequence.page_keys)

    def forget(self) -> None:
        """Forgets every cached prefix and snapshot."""
        for pool in self.pools:
            pool.forget()
        if self.states is not None:
            self.states.forget()

    def check_integrity(self, holding: Iterable[TokenSequence]) -> None:
        """Assert that `holding` hold all pages and states that are not free, in good order."""
        holding = list(holding)
        for i, pool in enumerate(self.pools):
            pool.check_integrity([one.pages(i) for one in holding if one.n_pages])
        if self.states is not None:
            self.states.check_integrity(slot for one in holding for slot in _slots(one))
        for sequence in holding:
            assert sequence.is_in_flight or sequence.n_pages == self.pools[0].pages_for(sequence.n_cached), (
                f"request {sequence.id} holds too many pages"
            )
            assert sequence.n_cached_pages <= sequence.n_cached // self.page_tokens, (
                "a page is cached and not full"
            )
            for pool, row, first in zip(self.pools, sequence.page_rows, sequence.first_pages):
                assert first <= pool.first_needed(sequence.n_cached), (
                    f"request {sequence.id} has lost a page that its next token sees"
                )
                assert not row[:first].any(), f"request {sequence.id} lists pages that a window has passed"
                assert not row[sequence.n_pages :].any(), f"request {sequence.id} lists pages it lost"

    def check_absent(self, sequence: TokenSequence) -> None:
        """Asserts that a request holds nothing."""
        assert sequence.n_pages == sequence.n_cached == 0, f"request {sequence.id} waits and holds pages"
        assert not _slots(sequence), f"request {sequence.id} waits and holds states"

    def _uses_cache(self, sequence: TokenSequence) -> bool:
        return self.caches_prefixes and sequence.is_cacheable

    def _finds_prefixes(self, sequence: TokenSequence) -> bool:
        return self._uses_cache(sequence) and sequence.finds_prefixes

    def _cached_prefix(self, sequence: TokenSequence) -> Prefix:
        """Return the cached pages of the request's tokens, up to the first token whose output row is needed.

        With recurrent layers, up to the last page that has a snapshot.
        """
        if not self._finds_prefixes(sequence):
            return Prefix(0, [[] for _ in self.pools])
        sees_all = self.pools[0].window is None  # all pages of the first pool are needed
        keys = self._keys(sequence, 0, sequence.next_row // self.page_tokens)
        n_found = n_known = len(self.pools[0].find(keys) if sees_all else keys)
        known, n_before = sequence.page_keys, n_known + 1
        while n_known < n_before:
            n_before = n_known
            for pool in self.pools[sees_all:]:
                n_known = pool.reach(known, n_known)
            while n_known and self.states is not None and self.states.find(known[n_known - 1]) is None:
                n_known -= 1
        sequence.n_found = (n_found if sees_all else n_known) * self.page_tokens
        firsts = [pool.first_needed(n_known * self.page_tokens) for pool in self.pools]
        return Prefix(n_known, [p.find(known[first:n_known]) for p, first in zip(self.pools, firsts)])

    def _n_first(self, sequence: TokenSequence, is_known: Callable[[PageKey], bool]) -> int:
        """Return how many pages at the beginning of a waiting request the pool without a window knows.

        It bisects, because a request that holds a page holds the pages before it, and this is mostly true of
        cached pages too.
        """
        if not self._finds_prefixes(sequence) or self.pools[0].window is not None:
            return 0
        n_pages = sequence.next_row // self.page_tokens
        keys = sequence.hash_pages(n_pages, self.page_tokens)
        return bisect_left(range(n_pages), True, key=lambda i: not is_known(keys[i]))

    def _n_promised(self, i: int, promised: Iterable[TokenSequence]) -> int:
        """Return the number of pages of a pool that prompts still need."""
        return sum(max(self.pools[i].most_held(one.n_tokens) - one.n_held(i), 0) for one in promised)

    def _pages_of_leader(self, sequence: TokenSequence) -> list[list[int]] | None:
        """Return the pages of the leader, which has computed the same prompt; None without a leader, or if
        its windows have moved on.
        """
        leader, n_tokens = sequence.leader, sequence.n_prompt - 1
        if leader is None or leader.n_cached < sequence.n_prompt or sequence.n_generated:
            return None
        firsts, stop = [pool.first_needed(n_tokens) for pool in self.pools], self.pools[0].pages_for(n_tokens)
        if any(held > first for held, first in zip(leader.first_pages, firsts)):
            return None
        return [row[first:stop].tolist() for row, first in zip(leader.page_rows, firsts)]

    def _is_of_interest(self, sequence: TokenSequence, pool: PagePool, place: int) -> bool:
        """Return True if a window before the end of the prompt, or of its shared part, covers a page."""
        ends = (sequence.n_prompt - 1) // self.page_tokens, sequence.n_found // self.page_tokens
        return any(pool.first_needed(end * self.page_tokens) <= place < end for end in ends)

    def _keys(self, sequence: TokenSequence, first: int, stop: int) -> list[PageKey]:
        """Return the keys of the request's pages `first` to `stop` - 1."""
        return sequence.hash_pages(stop, self.page_tokens)[first:stop]

    def _count_found(self, sequence: TokenSequence, n_tokens: int) -> None:
        """Counts further tokens whose keys and values were found."""
        sequence.n_cached += n_tokens
        sequence.next_row = max(sequence.next_row, sequence.n_cached)  # the leader outputs the rows before
        if not sequence.n_generated and not sequence.n_preemptions:
            sequence.n_prefix_hit += n_tokens
        self.n_prefix_hit += n_tokens

    def _admit_state(
        self, sequence: TokenSequence, n_known: int, states: StatePool, copies: list[tuple[int, int]]
    ) -> None:
        """Give a request a slot, with the state after its cached tokens."""
        source = states.find(sequence.page_keys[n_known // self.page_tokens - 1]) if n_known else None
        sequence.state_slot = states.allocate()
        if (
            source is not None and source != sequence.state_slot
        ):  # else it got the source's slot, the only one left
            copies.append((source, sequence.state_slot))

    def _keep_snapshots(self, sequence: TokenSequence, states: StatePool) -> None:
        """Keep the states after the request's cached pages for others, of its answer only the newest."""
        for place, slot in sequence.snapshots:
            n_pages = place // self.page_tokens
            key = sequence.page_keys[n_pages - 1]
            if (
                self.saved is not None and place <= sequence.n_prompt
            ):  # an answer would have a state for each page
                self.saved.save_state(slot, key, n_pages - 1)
            states.keep(key, slot)
            if place > sequence.n_prompt:
                if sequence.snapshot is not None:
                    states.drop(sequence.snapshot)
                sequence.snapshot = key
        sequence.snapshots = []


def _slots(sequence: TokenSequence) -> list[int]:
    """Return the slots of states that a request holds."""
    held = (sequence.state_slot, sequence.state_before, *(slot for _, slot in sequence.snapshots))
    return [slot for slot in held if slot >= 0]
