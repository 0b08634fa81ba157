"""One `LLM` shared by threads: the same answers as alone, in common steps, whatever one of them does."""

from __future__ import annotations

import _thread
import contextlib
import gc
import pkgutil
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri import LLM, SamplingParams
from kukri.engine.turns import DeferredInterrupt, EngineTurns
from kukri.errors import CapacityError, HookError, KukriError
from tests.tiny_gguf import tiny_config, write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
TIMEOUT_S = 60


@pytest.fixture(params=["reference", "cpu"])
def llm(request: pytest.FixtureRequest, tiny_path: Path) -> Iterator[LLM]:
    with LLM(tiny_path, backend=request.param) as made:
        yield made


def in_thread(function: Callable[..., Any], *args: Any, **named: Any) -> Future[Any]:
    """The function's outcome, from a thread that does not keep a hanging test's process alive."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **named))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def assert_idle(llm: LLM) -> None:
    assert not llm.engine.has_work
    llm.engine.check_integrity()
    assert llm.engine.pool.n_free == llm.engine.pool.n_pages
    assert not llm.calls._running


@pytest.mark.full(only=["reference-3", "reference-8", "reference-2"])
@pytest.mark.parametrize("n_threads", [2, 3, 8])
def test_threads_get_the_answers_of_one(llm: LLM, n_threads: int) -> None:
    """Two threads that hang forever, three that mix up a step's arrays, tokens told to the wrong call."""
    prompts = [f"prompt {i}" * (i % 5 + 1) for i in range(24)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=9 + i) for i in range(len(prompts))]
    want = [llm.generate(prompt, own) for prompt, own in zip(prompts, params, strict=True)]

    def answer(first: int) -> None:
        for i in range(first, len(prompts), n_threads):
            if i % 3:
                got = llm.generate(prompts[i], params[i])
            else:
                *_, last = llm.stream(prompts[i], params[i])
                assert last.result is not None
                got = last.result
            assert (got.text, got.token_ids) == (want[i].text, want[i].token_ids)

    futures = [in_thread(answer, first) for first in range(n_threads)]
    for future in futures:
        future.result(TIMEOUT_S)
    assert_idle(llm)


def test_calls_join_one_batch(slow: LLM) -> None:
    """Threads served one after another: as slow as a lock around everything."""
    n_rows: list[int] = []
    run = slow.engine.runner.run

    def counted(chunks: Any) -> Any:
        n_rows.append(sum(chunk.n_logits for chunk in chunks))
        time.sleep(0.002)
        return run(chunks)

    slow.engine.runner.run = counted  # type: ignore[method-assign]
    futures = [in_thread(slow.generate, [i + 1] * 3, GREEDY) for i in range(6)]
    for future in futures:
        future.result(TIMEOUT_S)
    assert max(n_rows) >= 4
    assert len(n_rows) < 6 * GREEDY.max_tokens / 2  # type: ignore[operator]


def test_a_list_is_answered_as_one_batch(slow: LLM) -> None:
    """A list of prompts that is computed one by one by default, or whose answers depend on one another."""
    prompts = [[i + 1] * (i + 2) for i in range(8)]
    alone = [slow.generate(prompt, GREEDY) for prompt in prompts]
    n_steps = 0
    run = slow.engine.runner.run

    def counted(batch: Any) -> Any:
        nonlocal n_steps
        n_steps += 1
        return run(batch)

    slow.engine.runner.run = counted  # type: ignore[method-assign]
    together = slow.generate(prompts, GREEDY)
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert n_steps < 2 * GREEDY.max_tokens  # type: ignore[operator]


def test_a_slow_reader_delays_nobody(slow: LLM) -> None:
    """A stream between two chunks that holds up the others, or loses what came meanwhile."""
    want = slow.generate("a stream", GREEDY)
    stream = slow.stream("a stream", GREEDY)
    first = next(stream)
    for i in range(3):
        in_thread(slow.generate, [i + 1] * 4, GREEDY).result(TIMEOUT_S)
    chunks = [first, *stream]
    assert "".join(chunk.text for chunk in chunks) == want.text
    assert [i for chunk in chunks for i in chunk.token_ids] == want.token_ids
    assert_idle(slow)


def test_all_entrances_may_be_used_at_once(llm: LLM) -> None:
    """An embedding, logits or a hook that runs in the middle of another thread's step."""
    ids = [*b"some tokens of a text"]
    messages = [{"role": "user", "content": "hi"}]
    entrances: list[Callable[[], Any]] = [
        lambda: llm.generate("one", GREEDY).token_ids,
        lambda: llm.chat(messages, GREEDY).token_ids,
        lambda: [i for chunk in llm.stream("two", GREEDY) for i in chunk.token_ids],
        lambda: llm.logits(ids).tolist(),
        lambda: llm.embed(["a text", "another"]).tolist(),
        lambda: hooked(),
    ]

    def hooked() -> list[int]:
        with llm.hooks({"hook_embed": lambda name, x: None}):
            return llm.generate("three", GREEDY).token_ids

    want = [entrance() for entrance in entrances]

    def repeat(entrance: Callable[[], Any]) -> list[Any]:
        return [entrance() for _ in range(4)]

    futures = [in_thread(repeat, entrance) for entrance in entrances]
    for future, expected in zip(futures, want, strict=True):
        assert future.result(TIMEOUT_S) == [expected] * 4
    assert_idle(llm)


def test_one_who_waits_takes_no_processor_time(slow: LLM) -> None:
    """A thread that polls or spins until its answer is there."""
    entered = threading.Event()
    # more tokens than the other asks for, which would generate the last ones itself
    leader = in_thread(slow.generate, "a", GREEDY, max_tokens=200)

    def wait() -> tuple[float, float]:
        started, spent = time.perf_counter(), time.thread_time()
        entered.set()
        slow.generate("b", GREEDY, max_tokens=100)
        return time.perf_counter() - started, time.thread_time() - spent

    while not slow.calls._running:
        time.sleep(0.001)
    wall_s, cpu_s = in_thread(wait).result(TIMEOUT_S)
    leader.result(TIMEOUT_S)
    assert cpu_s < wall_s / 4


def test_an_error_reaches_all_of_its_step_and_no_other(slow: LLM) -> None:
    """A thread that waits forever because another's step failed."""
    want = slow.generate("later", GREEDY).token_ids
    with slow.hooks({"hook_embed": lambda name, x: 1 / 0}):
        futures = [in_thread(slow.generate, [i + 1] * 3, GREEDY) for i in range(4)]
        for future in futures:
            with pytest.raises(HookError, match="ZeroDivisionError"):
                future.result(TIMEOUT_S)
    assert_idle(slow)
    assert slow.generate("later", GREEDY).token_ids == want


def test_a_hook_that_calls_its_llm_is_told(slow: LLM) -> None:
    """A deadlock, or a step inside a step."""

    def call(name: str, x: np.ndarray) -> None:
        slow.generate("a", GREEDY)

    with slow.hooks({"hook_embed": call}), pytest.raises(KukriError, match="hook or logits processor"):
        slow.generate("b", GREEDY)
    assert_idle(slow)

    def process(ids: Any, row: Any) -> None:
        slow.logits([1])

    with pytest.raises(KukriError, match="hook or logits processor"):
        slow.generate("b", GREEDY, logits_processors=[process])
    assert_idle(slow)


def test_closing_ends_everybody_s_wait(slow: LLM) -> None:
    """A thread that waits for a model that is gone."""
    futures = [in_thread(slow.generate, [i + 1], GREEDY, max_tokens=None) for i in range(3)]
    while len(slow.calls._running) < 3:
        time.sleep(0.001)
    slow.close()
    for future in futures:
        with pytest.raises(KukriError, match="closed"):
            future.result(TIMEOUT_S)
    for call in (lambda: slow.embed("a"), lambda: slow.generate("a"), lambda: slow.hooks({}).__enter__()):
        with pytest.raises(KukriError, match="closed"):
            call()


@pytest.mark.full
def test_streams_dropped_anywhere_free_their_pages(slow: LLM) -> None:
    """A finalizer that waits for a lock which its own thread holds, or an abort that is lost."""
    leader = in_thread(slow.generate, "a", GREEDY, max_tokens=100)
    for i in range(20):
        stream = slow.stream([i + 1] * 3, GREEDY, max_tokens=None)
        next(stream)
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del stream, cycle
        if i % 4 == 0:
            in_thread(gc.collect).result(TIMEOUT_S)
    gc.collect()
    leader.result(TIMEOUT_S)
    assert_idle(slow)


@pytest.mark.full
def test_ctrl_c_at_any_moment_leaves_all_as_it_was(slow: LLM) -> None:
    """An interrupt that tears a step: pages lost, a turn never given back, another's answer gone."""
    want = slow.generate("other", GREEDY).token_ids
    chance = random.Random(0)

    def await_signal(timer: threading.Timer) -> None:
        timer.join()
        time.sleep(0.001)  # a signal that is on its way arrives here

    n_interrupted = 0
    for _ in range(40):
        other = in_thread(slow.generate, "other", GREEDY)
        timer = threading.Timer(chance.uniform(0, 0.03), _thread.interrupt_main)
        try:
            timer.start()
            slow.generate(["mine", "and mine"], GREEDY)
            for _ in slow.stream("mine", GREEDY):
                pass
            await_signal(timer)
        except KeyboardInterrupt:
            n_interrupted += 1
        with contextlib.suppress(KeyboardInterrupt):
            await_signal(timer)
        assert other.result(TIMEOUT_S).token_ids == want
        assert_idle(slow)
    assert n_interrupted > 20


def test_an_interrupt_is_kept_for_the_end_of_a_step() -> None:
    """Ctrl-C in the middle of bookkeeping, one that is lost, or one that another handler should have had."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with DeferredInterrupt() as interrupt:
            signal.raise_signal(signal.SIGINT)
            assert interrupt.noted is not None
            assert seen == []
        assert seen == [signal.SIGINT]
        with DeferredInterrupt():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert len(seen) == 2, "the second acts at once"
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_turn_goes_round_in_order() -> None:
    """One thread that steps forever while others wait for the engine alone, or commands that nobody runs."""
    events: list[str] = []
    n_steps = 0

    def step() -> None:
        nonlocal n_steps
        n_steps += 1
        time.sleep(0.001)

    turns = EngineTurns(step)
    is_over = threading.Event()
    leader = in_thread(turns.wait, is_over.is_set)
    while not n_steps:
        time.sleep(0.001)

    def alone(name: str) -> None:
        with turns.alone():
            at = n_steps
            time.sleep(0.01)
            assert n_steps == at
            events.append(name)

    others = []
    for name in "abc":
        others.append(in_thread(alone, name))
        time.sleep(0.0003)
        turns.submit(lambda name=name: events.append(f"command {name}"))
    for other in others:
        other.result(TIMEOUT_S)
    turns.submit(is_over.set)
    leader.result(TIMEOUT_S)
    assert [event for event in events if len(event) == 1] == ["a", "b", "c"]
    assert [event for event in events if len(event) > 1] == ["command a", "command b", "command c"]
    turns.submit(lambda: events.append("last"))
    assert events[-1] == "last", "nobody has the turn: it runs at once"


def test_a_request_that_cannot_fit_is_refused_to_its_own_thread(tmp_path: Path) -> None:
    """Catches a pool of windows that refuses in the middle of a step: to the thread that runs the step."""
    path = write_tiny(tmp_path / "windows.gguf", tiny_config(4096), llama__attention__sliding_window=64)
    ids = list(range(33, 93)) * 20
    long, short = (SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (200, 4))
    with LLM(path, n_threads=1, max_context=4096, kv_bytes=80_000, max_requests=4) as llm:
        want = llm.generate(ids[:32], long).token_ids

        def refused() -> int:
            for _ in range(20):
                with pytest.raises(CapacityError, match=r"requires \d+ KV pages, but there are \d+"):
                    llm.generate(ids[:1000], short)
            return 20

        answers = in_thread(lambda: [llm.generate(ids[:32], long).token_ids for _ in range(3)])
        assert in_thread(refused).result(TIMEOUT_S) == 20
        assert answers.result(TIMEOUT_S) == [want] * 3
        assert_idle(llm)


@pytest.mark.parametrize("error", [CapacityError("no room: shorten it"), KeyError("no room")])
def test_a_request_refused_while_it_is_queued_ends_its_own_call(
    slow: LLM, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Catches a command that raises: whichever thread holds the turn would get another call's error."""
    add, params = slow.engine.add_request, SamplingParams(temperature=0, max_tokens=24, n=2)

    def full(request: Any) -> None:
        if request.n_prompt == 5:
            raise error
        add(request)

    monkeypatch.setattr(slow.engine, "add_request", full)
    answer = in_thread(lambda: slow.generate([40, 41, 42], params).text)
    refused = [in_thread(lambda: slow.generate([1, 2, 3, 4, 5], params)) for _ in range(3)]
    for one in refused:
        with pytest.raises(KukriError, match="no room"):
            one.result(TIMEOUT_S)
    with pytest.raises(KukriError, match="no room"):
        slow.calls.compute([slow.engine.maker.make_output_request([1, 2, 3, 4, 5], output="hidden")])
    assert isinstance(answer.result(TIMEOUT_S), str)
    assert_idle(slow)


@pytest.mark.parametrize("where", ["calls.answer.Answer.push", "calls.engine_calls.Call.advance"])
def test_a_text_that_raises_ends_its_own_call(slow: LLM, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Catches a fault in reading one answer that ends the calls of the step, or takes their tokens."""
    want = slow.generate([40, 41, 42], GREEDY).token_ids
    place, name = f"kukri.{where}".rsplit(".", 1)
    method = getattr(pkgutil.resolve_name(place), name)

    def broken(self: Any, *args: Any) -> Any:
        answer = args[0] if name == "advance" else self
        if answer.request.n_prompt == 5 and answer.n_tokens >= 2:
            raise KeyError("a part")
        return method(self, *args)

    monkeypatch.setattr(f"kukri.{where}", broken)
    answers = [in_thread(lambda: slow.generate([40, 41, 42], GREEDY).token_ids) for _ in range(2)]
    refused = [in_thread(lambda: slow.generate([1, 2, 3, 4, 5], GREEDY)) for _ in range(3)]
    for one in refused:
        with pytest.raises(KukriError, match="the text of the answer failed: KeyError"):
            one.result(TIMEOUT_S)
    assert [one.result(TIMEOUT_S) for one in answers] == [want] * 2
    assert_idle(slow)
