"""A model that is a hash of its context, on a backend that checks every array of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kukri.config import EngineConfig, LayerConfig, ModelConfig, RopeConfig
from kukri.engine import Engine
from kukri.kernels.arrays import IntArray
from kukri.kernels.cache import CacheLayout, KVLayer, StateLayer
from kukri.kernels.host_step import HostLogits, state_steps
from kukri.kernels.paged_kv import PAGE_TOKENS, PagedKV, page_bytes
from kukri.kernels.reference import ReferenceSampling
from kukri.kernels.step import ForwardBatch, StepInputs, StepLimits
from kukri.kernels.taps import Hook
from kukri.kernels.weight_handles import AdapterSlots

N_VOCAB = 50
N_HIDDEN = 4  # the width of its hidden states
EOS = 7
POISON = 13  # a prompt with this token gets NaN for logits


def next_token(context: Sequence[int]) -> int:
    """The fake model's next token after a context."""
    state = 17
    for token in context:
        state = (state * 31 + token + 1) % 1_000_003
    token = state % N_VOCAB
    return token if token != POISON else 14


def hidden_state(context: Sequence[int]) -> np.ndarray:
    """The fake model's hidden state after a context: float32 [N_HIDDEN]."""
    return np.array([next_token(context), len(context), context[0], context[-1]], np.float32) / 7


def expected_output(
    prompt: Sequence[int], n_tokens: int, stop_ids: frozenset[int] = frozenset()
) -> list[int]:
    """The tokens that a request must get, whatever happens around it."""
    context, output = list(prompt), []
    while len(output) < n_tokens:
        output.append(next_token(context))
        context.append(output[-1])
        if output[-1] in stop_ids:
            break
    return output


STATE = StateLayer((("hash", (2,)),))  # tokens so far, and what they come to
STATE_BYTES = 8
_START = 17


def state_after(context: Sequence[int]) -> int:
    """The fake model's recurrent state after a context."""
    state = _START
    for token in context:
        state = (state * 31 + token + 1) % 1_000_003
    return state


class FakeModel:
    """Only its config is looked at."""

    parameters = ()
    n_parameters = 0

    def __init__(self, max_context: int, has_states: bool = False, windows: Sequence[int] = ()) -> None:
        layers = (KVLayer(1, 16, window) for window in windows)
        self.cache_layout = (KVLayer(1, 16), *((STATE,) if has_states else ()), *layers)
        self.config = ModelConfig(
            architecture="fake",
            n_layers=1,
            d_model=16,
            n_heads=1,
            n_kv_heads=1,
            d_head=16,
            d_ffn=16,
            n_vocab=N_VOCAB,
            norm_eps=1e-5,
            max_context=max_context,
            tie_embeddings=True,
            rope=RopeConfig(10000.0, 16),
            layers=(LayerConfig(),),
        )

    def __call__(self, ops: object, batch: object) -> None:
        raise AssertionError("the fake backend runs no program")

    def hidden(self, ops: object, batch: object) -> None:
        raise AssertionError("the fake backend runs no program")


class SeerDrafts:
    """Drafts what the fake model says, each draft wrong with a probability of `1 - skill`."""

    relative_cost = 0.0

    def __init__(self, skill: float, seed: int = 0) -> None:
        self._skill, self._random, self._text = skill, np.random.default_rng(seed), []

    def follow(self, tokens: IntArray, n_tokens: int) -> None:
        self._text = tokens[:n_tokens].tolist()

    def chances(self, n: int) -> list[float]:
        return [1.0] * n

    def learn(self, answer: IntArray) -> None:
        pass

    def release(self) -> None:
        pass

    def propose(self, n: int) -> list[int]:
        text = list(self._text)
        for _ in range(n):
            is_right = self._random.random() < self._skill
            text.append(next_token(text) if is_right else int(self._random.integers(N_VOCAB)))
        return text[len(self._text) :]


class FakeBackend:
    """Keeps tokens where keys would be, and finds each context through the page table."""

    name = arithmetic = "fake"
    page_tokens = PAGE_TOKENS
    row_costs = tuple(1 + i / 5 for i in range(16))
    exact_kv_type = "f16"

    def __init__(self) -> None:
        self.batches: list[tuple[int, int, int]] = []  # (T, S, N) of every step
        self.n_compiled = 0
        self.sampling = ReferenceSampling()
        self.error: BaseException | None = None  # raised by the next step
        self.is_writable: Callable[[int, int], bool] = lambda page, pool: True

    def new_cache(
        self, layout: CacheLayout, n_pages: Any, n_states: int = 0, kv_type: Any = "f16"
    ) -> PagedKV:
        return PagedKV(layout, n_pages, n_states, kv_type)

    def page_bytes(self, layout: CacheLayout, kv_type: Any) -> int:
        return page_bytes(layout, kv_type)

    def compile(
        self,
        program: FakeModel,
        cache: PagedKV,
        limits: StepLimits,
        taps: frozenset[str] = frozenset(),
        adapters: AdapterSlots = (),
    ) -> FakeProgram:
        self.n_compiled += 1
        return FakeProgram(self, program, cache, limits)


class FakeProgram:
    def __init__(self, backend: FakeBackend, model: FakeModel, cache: PagedKV, limits: StepLimits) -> None:
        self.backend, self.program, self.cache, self.limits = backend, model, cache, limits
        self._last = np.zeros((0, N_VOCAB), np.float32)  # overwritten by the next call, as a plan's buffer is
        self.inputs = StepInputs.zeros(limits, len(cache.n_pages))

    def __call__(self, batch: ForwardBatch, on_tap: Hook | None = None) -> HostLogits:
        if self.backend.error is not None:
            error, self.backend.error = self.backend.error, None
            raise error
        assert batch.inputs is self.inputs, "a batch in arrays of its own: the backend would have to copy it"
        self._check(batch)
        for layer, pool in self.cache.pool_of.items():
            pages, offsets = np.divmod(batch.pages(pool).slots, PAGE_TOKENS)
            assert all(self.backend.is_writable(page, pool) for page in set(pages.tolist())), (
                "a write to a page that others read"
            )
            self.cache.keys[layer][pages, 0, 0, offsets] = batch.token_ids + 1  # 0: never written
        self._check_windows(batch)
        if self.cache.states:
            self._compute_states(batch)
        self._last.fill(np.nan)
        width = N_VOCAB if isinstance(self.program, FakeModel) else N_HIDDEN
        logits = self._last = np.zeros((batch.n_logit_rows, width), np.float32)
        for i, row in enumerate(batch.logit_rows):
            s = int(np.searchsorted(batch.query_start, row, side="right")) - 1
            n_visible = batch.context_len[s] - (batch.query_start[s + 1] - 1 - row)
            positions = np.arange(n_visible)
            slots = batch.page_table[s, positions // PAGE_TOKENS], positions % PAGE_TOKENS
            context = (self.cache.keys[0][slots[0], 0, 0, slots[1]].astype(int) - 1).tolist()
            assert min(context) >= 0, "a token of the context was never stored, or was overwritten"
            if width == N_HIDDEN:
                logits[i] = hidden_state(context)
            else:
                logits[i, next_token(context)] = 5.0
            if POISON in context:
                logits[i, 3] = np.nan
        return HostLogits(logits)

    def _check_windows(self, batch: ForwardBatch) -> None:
        """What each layer with a window holds of what the tokens see is what the first layer holds there."""
        for layer, pool in self.cache.pool_of.items():
            window = self.cache.layout[layer].window
            if window is None:
                continue
            for s, n_context in enumerate(batch.context_len.tolist()):
                first = n_context - int(batch.query_start[s + 1] - batch.query_start[s])
                positions = np.arange(max(first - window + 1, 0), n_context)
                pages, offsets = np.divmod(positions, PAGE_TOKENS)
                tokens, seen = (
                    self.cache.keys[i][batch.pages(self.cache.pool_of[i]).page_table[s, pages], 0, 0, offsets]
                    for i in (0, layer)
                )
                assert (tokens == seen).all(), "a window lost a token, or holds that of another text"
                n_passed = max(first - window - PAGE_TOKENS, 0) // PAGE_TOKENS  # freed a page at a time
                passed = batch.pages(pool).page_table[s, :n_passed]
                assert not passed.any(), "a page is held that the window has passed"

    def _compute_states(self, batch: ForwardBatch) -> None:
        """Each state from where its sequence stood, which must be where the sequence continues."""
        states = self.cache.states[1]["hash"]
        assert batch.state_slots is not None
        used = [*batch.state_slots.tolist(), *(s for step in state_steps(batch) for _, s in step.saves)]
        assert len(set(used)) == len(used), "two states in one slot"
        for s, step in enumerate(state_steps(batch)):
            n, state = (0, _START) if step.begins else states[step.slot].astype(int).tolist()
            positions = np.arange(batch.context_len[s])
            slots = batch.page_table[s, positions // PAGE_TOKENS], positions % PAGE_TOKENS
            context = (self.cache.keys[0][slots[0], 0, 0, slots[1]].astype(int) - 1).tolist()
            assert n == batch.positions[step.start], "a state of another place"
            assert state == state_after(context[:n]), "a state of another text"
            saves = dict(step.saves)
            for t in range(step.start, step.stop):
                state, n = (state * 31 + int(batch.token_ids[t]) + 1) % 1_000_003, n + 1
                if t in saves:
                    states[saves[t]] = n, state
            states[step.slot] = n, state

    def _check(self, batch: ForwardBatch) -> None:
        t, s, n = batch.n_tokens, batch.n_sequences, batch.n_logit_rows
        self.backend.batches.append((t, s, n))
        assert 0 < t <= self.limits.max_tokens
        assert 0 < s <= self.limits.max_sequences
        assert n <= self.limits.max_logit_rows
        arrays = [array for array in vars(batch).values() if isinstance(array, np.ndarray)]
        assert all(a.dtype == np.int32 and a.flags.c_contiguous for a in arrays)
        assert len(batch.positions) == len(batch.slots) == t
        assert len(batch.other_pools) == len(self.cache.n_pages) - 1
        assert batch.page_table.shape == (s, self.limits.max_pages)
        assert batch.query_start[0] == 0
        assert batch.query_start[-1] == t
        assert len(set(batch.slots.tolist())) == t, "two tokens in one slot"
        for i in range(s):
            start, stop = batch.query_start[i], batch.query_start[i + 1]
            assert stop > start
            first = batch.context_len[i] - (stop - start)
            assert batch.positions[start:stop].tolist() == list(range(first, batch.context_len[i]))
            positions = batch.positions[start:stop]
            pages = batch.page_table[i, positions // PAGE_TOKENS]
            assert (batch.slots[start:stop] == pages * PAGE_TOKENS + positions % PAGE_TOKENS).all()
            n_pages = -(-batch.context_len[i] // PAGE_TOKENS)
            used = batch.page_table[i, :n_pages].tolist()
            assert len(set(used)) == n_pages
            assert max(used) < self.cache.n_pages[0]


def make_engine(
    max_context: int = 128,
    max_requests: int = 1,
    max_step_tokens: int = 32,
    n_pages: int | Sequence[int] | None = None,
    identity: bytes = b"",
    has_states: bool = False,
    windows: Sequence[int] = (),
    **options: Any,
) -> tuple[Engine, FakeBackend]:
    backend = FakeBackend()
    options = {"speculation": "off", "max_step_ms": 0, **options}  # 0: nothing depends on the clock
    config = EngineConfig(max_requests=max_requests, max_step_tokens=max_step_tokens, **options)
    model: Any = FakeModel(max_context, has_states, windows)
    engine = Engine(model, backend, config, eos_ids=[EOS], n_pages=n_pages, identity=identity)  # type: ignore[arg-type]
    backend.is_writable = lambda page, pool: engine.allocator.pools[pool].is_writable(page)
    return engine, backend
