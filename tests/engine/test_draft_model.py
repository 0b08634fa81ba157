"""A small model that drafts for a larger one: read, followed, forgotten, and never heard in the answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kukri import LLM
from kukri.config import EngineConfig, ModelConfig
from kukri.engine import Engine, Request
from kukri.engine.draft_kinds.language_model import TextDraftModel
from kukri.engine.draft_model import DraftModel, DraftSource, ModelDrafts, model_drafts
from kukri.engine.lookup_drafts import LookupDrafts
from kukri.errors import ConfigError, RequestError
from kukri.kernels.host_step import HostLogits
from kukri.kernels.paged_kv import PagedKV
from kukri.kernels.step import ForwardBatch, StepLimits
from kukri.kernels.taps import Hook
from kukri.kernels.weight_handles import AdapterSlots
from kukri.sampling import SamplingParams
from tests.engine.driving import add, any_events, finish, greedy, play, prompt_of
from tests.engine.fake_model import EOS, POISON, FakeBackend, FakeModel, expected_output
from tests.engine.test_speculation import alone
from tests.tiny_gguf import CONTROL, N_VOCAB, random_arrays, tiny_config, write_tiny


class WorseBackend(FakeBackend):
    """Runs the second model that it compiles, the one that drafts, so that some of its tokens are wrong."""

    def __init__(self, n_wrong: int) -> None:
        super().__init__()
        self._n_wrong = n_wrong  # contexts out of 8

    def compile(
        self,
        program: FakeModel,
        cache: PagedKV,
        limits: StepLimits,
        taps: frozenset[str] = frozenset(),
        adapters: AdapterSlots = (),
    ) -> Any:
        compiled = super().compile(program, cache, limits, taps)
        if self.n_compiled == 1:
            return compiled

        def draft(batch: ForwardBatch, on_tap: Hook | None = None) -> HostLogits:
            said, self.is_writable = self.is_writable, lambda page, pool: True  # its pages are others
            try:
                logits = compiled(batch).numpy()
            finally:
                self.is_writable = said
            wrong = (batch.context_len.sum() + np.arange(len(logits))) % 8 < self._n_wrong
            logits[wrong] = np.roll(logits[wrong], 1, axis=1)
            return HostLogits(logits)

        draft.inputs = compiled.inputs  # type: ignore[attr-defined]
        return draft


def make(
    n_wrong: int, max_context: int = 128, n_pages: int | None = None, small_context: int = 0, **options: Any
) -> Engine:
    backend = WorseBackend(n_wrong)
    config = EngineConfig(speculation="draft", **{"max_step_tokens": 32, **options})
    model, small = FakeModel(max_context), FakeModel(small_context or max_context)
    model.n_parameters, small.n_parameters = 100, 5
    engine = Engine(
        model, backend, config, eos_ids=[EOS], n_pages=n_pages, draft=DraftSource(small, DraftModel)
    )  # type: ignore[arg-type]
    backend.is_writable = lambda page, pool: engine.pool.is_writable(page)
    return engine


@pytest.mark.full
@settings(max_examples=60)
@given(
    n_wrong=st.integers(0, 8),
    max_requests=st.integers(1, 4),
    max_step_tokens=st.sampled_from([1, 5, 33, 100]),
    n_pages=st.integers(6, 14),
    n_in_flight=st.integers(1, 3),
    events=any_events(
        st.integers(1, 60),  # tokens of the prompt
        st.integers(1, 40),  # to generate
        st.booleans(),  # whether it ignores the end of text
        st.integers(1, 3),  # answers
        st.sampled_from([0.0, 1.0]),  # temperature
        st.sampled_from([None, "ngram", "off"]),
        max_size=20,
    ),
)
def test_a_draft_model_changes_no_token(
    n_wrong: int, max_requests: int, max_step_tokens: int, n_pages: int, n_in_flight: int, events: list
) -> None:
    """A cache out of step with the text, pages that are lost, a rejected draft kept: under
    arrivals, aborts, preemption, other kinds of drafts next to it."""
    engine = make(n_wrong, 96, n_pages, max_requests=max_requests, max_step_tokens=max_step_tokens)
    live: list[tuple[Request, list[int]]] = []

    def make_requests(
        i: int, n_prompt: int, n: int, ignores: bool, n_answers: int, temperature: float, kind: Any
    ) -> list[Request]:
        prompt = prompt_of(n_prompt, i)
        params = SamplingParams(
            temperature=temperature, seed=i, max_tokens=n, ignore_eos=ignores, n=n_answers,
            logit_bias={POISON: -100}, speculation=kind,
        )  # fmt: skip
        requests = engine.maker.make_requests(prompt, params)
        live.extend((request, prompt) for request in requests)
        return requests

    play(engine, events, make_requests, n_in_flight)
    for request, prompt in live:
        want = alone(prompt, request.params, max_context=96).output_ids
        done = request.output_ids
        assert done == (want[: len(done)] if request.answer.finish_reason == "abort" else want)
    assert engine.drafting.drafter is not None
    assert engine.drafting.drafter.pool.n_free == engine.drafting.drafter.pool.n_pages


def test_a_model_that_knows_saves_steps() -> None:
    """A cache out of step, which shows as drafts that are wrong: the fake model is a hash of its context."""
    for n_prompt in (1, 15, 16, 17, 60):
        engine = make(0, max_requests=2)
        requests = [add(engine, prompt_of(n_prompt, seed), greedy(40)) for seed in range(2)]
        finish(engine)
        for seed, request in enumerate(requests):
            assert request.output_ids == expected_output(prompt_of(n_prompt, seed), 40)
            assert request.sequence.n_accepted == request.sequence.n_drafted > 20


def test_a_model_that_drafts_badly_is_asked_less() -> None:
    """Time spent on drafts that are never accepted, or one that is never asked again."""
    engine = make(8, max_context=512)
    request = add(engine, prompt_of(10), greedy(400))
    finish(engine)
    assert request.output_ids == expected_output(prompt_of(10), 400)
    assert 4 < request.sequence.n_drafted < 40


def test_a_text_beyond_the_small_models_context_is_not_drafted() -> None:
    """A position outside the small model's table."""
    engine = make(0, small_context=40)
    request = add(engine, prompt_of(20), greedy(60))
    finish(engine)
    assert request.output_ids == expected_output(prompt_of(20), 60)
    assert 0 < request.sequence.n_accepted < 25


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    other = random_arrays(tiny_config(), seed=1)
    return write_tiny(folder / "large.gguf"), write_tiny(folder / "small.gguf", arrays=other)


@pytest.fixture
def no_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """All drafts are the draft model's."""
    monkeypatch.setattr(LookupDrafts, "chances", lambda drafts, n: iter(()))


def cheap(llm: LLM) -> None:
    """Makes drafts of a model that is not small worth their time."""
    assert llm.engine.drafting.drafter is not None
    llm.engine.drafting.drafter.cost.of_one = 0.0


@pytest.mark.usefixtures("no_look_up")
def test_a_model_as_large_as_the_other_is_not_asked(tiny: tuple[Path, Path]) -> None:
    """Drafts that take the time that they save."""
    with LLM(tiny[0], draft_model=tiny[0]) as llm:
        result = llm.generate("Hello", temperature=0, max_tokens=100, ignore_eos=True)
        assert result.timings.n_drafted == 0


@pytest.mark.full
@pytest.mark.usefixtures("no_look_up")
def test_the_real_model_as_its_own_draft(smollm2_path: Path) -> None:
    """A cache or a program shared by the two, or pages of one used for the other."""
    prompts = ["Once upon a time", "The capital of France is", "1 2 3 4"]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(smollm2_path, max_context=256, max_requests=2, speculation="off") as llm:
        want = [result.token_ids for result in llm.generate(prompts, params)]
    with LLM(smollm2_path, max_context=256, max_requests=2, draft_model=smollm2_path) as llm:
        cheap(llm)
        results = llm.generate(prompts, params)
        assert [result.token_ids for result in results] == want
        assert all(result.timings.n_accepted == result.timings.n_drafted > 20 for result in results)


@pytest.mark.usefixtures("no_look_up")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_models_answer_as_one(tiny: tuple[Path, Path], temperature: float) -> None:
    """A program that runs on the other's cache or weights."""
    prompts = ["Hello there", "a", "The quick brown fox"]
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=60, ignore_eos=True)
    with LLM(tiny[0], max_requests=3, speculation="off") as llm:
        want = [result.token_ids for result in llm.generate(prompts, params)]
    for draft in tiny:
        with LLM(tiny[0], max_requests=3, draft_model=draft) as llm:
            cheap(llm)
            results = llm.generate(prompts, params)
            assert [result.token_ids for result in results] == want
            n_drafted = sum(result.timings.n_drafted for result in results)
            n_accepted = sum(result.timings.n_accepted for result in results)
            if draft == tiny[0] and temperature == 0:
                assert n_accepted == n_drafted > 60  # itself, to the bit
            looked_up = llm.generate(prompts, params, speculation="ngram")
            assert [result.token_ids for result in looked_up] == want


@pytest.mark.usefixtures("no_look_up")
def test_vocabularies_may_be_padded_differently(tmp_path: Path) -> None:
    """A pair refused, as are 0.5B for 7B of most families, for rows of the embedding that are no tokens; a
    row of padding read or drafted by a model that has none.
    """
    config = tiny_config()
    names = [f"[PAD{i}]" for i in range(config.n_vocab, config.n_vocab + 5)]
    padded = replace(config, n_vocab=config.n_vocab + 5)
    likely = random_arrays(padded)
    likely["model.embed_tokens.weight"][config.n_vocab :] *= 9  # its padding is the likeliest token
    small = write_tiny(tmp_path / "small.gguf")
    large = write_tiny(tmp_path / "large.gguf", padded, arrays=likely, plain=names)
    params = SamplingParams(temperature=1, seed=3, max_tokens=60, ignore_eos=True)
    for model, draft in ((small, large), (large, small)):
        with LLM(model, speculation="off") as llm:
            want = llm.generate("Hello there", params).token_ids
        with LLM(model, draft_model=draft) as llm:
            cheap(llm)
            result = llm.generate("Hello there", params)
            assert result.token_ids == want
            beyond = [config.n_vocab + 2, 5, 6] if model == large else [5, 6]
            token_ids = llm.generate(beyond, params).token_ids
        with LLM(model, speculation="off") as llm:
            assert llm.generate(beyond, params).token_ids == token_ids
    with LLM(small, speculation="off") as llm:
        want = llm.generate("Hello there", temperature=0, max_tokens=60, ignore_eos=True).token_ids
    same = dict(random_arrays(config))
    more = np.zeros((5, config.d_model), np.float32)
    same["model.embed_tokens.weight"] = np.concatenate([same["model.embed_tokens.weight"], more])
    alike = write_tiny(tmp_path / "alike.gguf", padded, arrays=same, plain=names)
    with LLM(small, draft_model=alike) as llm:
        cheap(llm)
        result = llm.generate("Hello there", temperature=0, max_tokens=60, ignore_eos=True)
        assert result.token_ids == want
        assert result.timings.n_accepted == result.timings.n_drafted > 20


def legible(config: ModelConfig) -> dict[str, np.ndarray]:
    """Weights of a model that writes letters of ASCII, each of which is one token."""
    arrays = random_arrays(config)
    arrays["model.embed_tokens.weight"][:94] *= 4
    return arrays


@pytest.mark.usefixtures("no_look_up")
def test_a_model_with_other_tokens_drafts_text(tmp_path: Path) -> None:
    """Ids of one vocabulary read as the other's, text that is not the request's, positions a token off; a
    model that no longer follows after what it cannot read.
    """
    config = tiny_config()
    arrays = legible(config)
    large = write_tiny(tmp_path / "large.gguf", arrays=arrays)
    control = [*CONTROL[1:], CONTROL[0]]  # at other ids
    rows = [*range(256), 257, 258, 256]
    arrays = {**arrays, "model.embed_tokens.weight": arrays["model.embed_tokens.weight"][rows]}
    small = write_tiny(tmp_path / "small.gguf", arrays=arrays, control=control)
    prompts: list[Any] = ["Hello there", [257, 72, 105, 258], "é€😀", [*"😀".encode()][:2], "<|im_start|>"]
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=60, ignore_eos=True)
        with LLM(large, max_requests=3, speculation="off") as llm:
            want = [result.token_ids for result in llm.generate(prompts, params)]
        with LLM(large, max_requests=3, draft_model=small) as llm:
            cheap(llm)
            results = llm.generate(prompts, params)
            assert [result.token_ids for result in results] == want
            llm.engine.check_integrity()
            n_drafted = sum(result.timings.n_drafted for result in results)
            n_accepted = sum(result.timings.n_accepted for result in results)
            if temperature == 0:
                assert n_accepted > 0.9 * n_drafted > 150


@pytest.mark.full
@pytest.mark.usefixtures("no_look_up")
def test_other_tokens_change_no_answer(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    """A text longer than the small model reads, halves of characters, special tokens of one model alone, a
    request that is preempted.
    """
    control = ["<|other|>", *CONTROL[1:]]
    small = write_tiny(
        tmp_path / "small.gguf", tiny_config(64), random_arrays(tiny_config()), control=control
    )
    random = np.random.default_rng(2)
    prompts = [random.integers(0, N_VOCAB, n).tolist() for n in (5, 40, 16, 33, 1, 60, 70)]
    params = SamplingParams(temperature=1, max_tokens=40, ignore_eos=True, seed=1, n=2)
    with LLM(tiny[0], max_requests=4) as llm:
        want = [[o.token_ids for o in llm.generate(prompt, params).outputs] for prompt in prompts]
        page_bytes = llm.engine.runner.backend.page_bytes(llm.engine.model.cache_layout, "f16")
    options: dict[str, Any] = {"max_requests": 4, "max_step_tokens": 24, "kv_bytes": 14 * page_bytes}
    with LLM(tiny[0], draft_model=small, **options) as llm:
        cheap(llm)
        got = llm.generate(prompts, params)
        assert [[o.token_ids for o in each.outputs] for each in got] == want
        llm.engine.check_integrity()
        assert llm.engine.scheduler.n_preemptions > 0
        assert llm.engine.scheduler.n_drafted > 20
        drafting = llm.engine.drafting.drafter
        assert isinstance(drafting, TextDraftModel)
        assert drafting.pool.n_free == drafting.pool.n_pages


def test_what_cannot_draft_is_refused(tiny: tuple[Path, Path]) -> None:
    """A kind of drafts that silently is not one."""
    with pytest.raises(ConfigError, match="draft"):
        LLM(tiny[0], speculation="draft")
    with LLM(tiny[0]) as llm, pytest.raises(RequestError, match="without a draft model"):
        llm.generate("a", speculation="draft")


def test_a_request_tells_its_drafts_apart() -> None:
    """Drafts of a model asked of a table, or the other way round."""
    engine = make(0)
    assert isinstance(model_drafts(engine.maker.make_request([1], greedy(2)).drafts), ModelDrafts)
    for kind in ("ngram", "off"):
        assert model_drafts(engine.maker.make_request([1], greedy(2, speculation=kind)).drafts) is None


def test_a_text_that_repeats_itself_is_looked_up() -> None:
    """A model that drafts what is in the text, or a look-up that drafts what is not."""
    engine = make(8, max_context=512)  # every draft of the model is wrong
    prompt = prompt_of(10)
    answer = expected_output(prompt, 100)
    params = greedy(100)
    request = engine.maker.make_request(
        prompt, replace(params, prediction=tuple(answer), speculation="draft")
    )
    engine.add_request(request)
    finish(engine)
    assert request.output_ids == answer
    assert request.sequence.n_accepted > 80
    asked = add(engine := make(0, max_context=512), prompt, params)
    finish(engine)
    assert asked.sequence.n_accepted > 50
