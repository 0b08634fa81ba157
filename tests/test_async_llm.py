"""`AsyncLLM`: the tokens of `LLM`, many calls at a time, nothing left behind by cancelled ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri import LLM, AsyncLLM, SamplingParams
from kukri.errors import HookError, KukriError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
TIMEOUT_S = 30


@pytest.fixture(params=["reference", "cpu"])
def llm(request: pytest.FixtureRequest, tiny_path: Path) -> Iterator[LLM]:
    with LLM(tiny_path, backend=request.param) as made:
        yield made


def run(main: Any) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(main, TIMEOUT_S)

    return asyncio.run(limited())


def assert_idle(llm: LLM) -> None:
    with llm.calls.turns.alone():
        assert not llm.engine.has_work
        llm.engine.check_integrity()
        assert llm.engine.pool.n_free == llm.engine.pool.n_pages
        assert not llm.calls._running


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        await asyncio.sleep(0.001)


async def tokens_of(stream: AsyncIterator[Any]) -> list[int]:
    return [i async for chunk in stream for i in chunk.token_ids]


@pytest.mark.full(only=["reference"])
def test_streams_at_once_give_the_tokens_of_llm(llm: LLM) -> None:
    """Tokens told to the wrong stream, a thread for each, or answers that depend on one another."""
    prompts = [f"prompt {i}" * (i % 5 + 1) for i in range(8)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=9 + i) for i in range(len(prompts))]
    want = [llm.generate(prompt, own).token_ids for prompt, own in zip(prompts, params, strict=True)]
    messages = [{"role": "user", "content": "hi"}]
    want_chat = llm.chat(messages, GREEDY).token_ids
    n_threads = 0

    async def main() -> None:
        nonlocal n_threads
        wrapped = AsyncLLM(llm)
        for _ in range(3):
            streams = [tokens_of(wrapped.stream(p, own)) for p, own in zip(prompts, params, strict=True)]
            assert await asyncio.gather(*streams) == want
            n_threads = sum(thread.name == "kukri-async" for thread in threading.enumerate())
        assert (await wrapped.chat(messages, GREEDY)).token_ids == want_chat
        assert await tokens_of(wrapped.stream(messages, GREEDY)) == want_chat
        assert (await wrapped.generate(prompts[1], params[1])).token_ids == want[1]
        many = await wrapped.generate(prompts, GREEDY, max_tokens=5)
        assert [r.token_ids for r in many] == [
            r.token_ids for r in llm.generate(prompts, GREEDY, max_tokens=5)
        ]

    run(main())
    assert n_threads <= 1
    assert_idle(llm)
    run(main())  # another event loop


def test_calls_join_one_batch(slow: LLM) -> None:
    """Calls served one after another, or an event loop that stands still during a step."""
    n_rows: list[int] = []
    compute = slow.engine.runner.run

    def counted(chunks: Any) -> Any:
        n_rows.append(sum(chunk.n_logits for chunk in chunks))
        assert threading.current_thread() is not threading.main_thread()
        return compute(chunks)

    slow.engine.runner.run = counted  # type: ignore[method-assign]

    async def main() -> None:
        wrapped = AsyncLLM(slow)
        await asyncio.gather(*(wrapped.generate([i + 1] * 3, GREEDY, max_tokens=60) for i in range(8)))

    run(main())
    assert max(n_rows) >= 4
    assert_idle(slow)


def test_a_slow_reader_delays_nobody(slow: LLM) -> None:
    """A stream between two chunks that holds up the others, or loses what came meanwhile."""
    want = slow.generate("a stream", GREEDY).token_ids

    async def main() -> None:
        wrapped = AsyncLLM(slow)
        async with aclosing(wrapped.stream("a stream", GREEDY)) as stream:
            first = await anext(stream)
            await wrapped.generate(["one", "two"], GREEDY)
            assert first.token_ids + await tokens_of(stream) == want

    run(main())
    assert_idle(slow)


def test_cancelled_and_closed_calls_free_their_pages(slow: LLM) -> None:
    """Requests that run on for a task that is gone."""
    want = slow.generate("other", GREEDY).token_ids

    async def main() -> None:
        wrapped = AsyncLLM(slow)
        other = asyncio.create_task(wrapped.generate("other", GREEDY, max_tokens=100))
        for i in range(6):
            task = asyncio.create_task(wrapped.generate([i + 1] * 3, GREEDY, max_tokens=None))
            reader = asyncio.create_task(tokens_of(wrapped.stream([i + 9], GREEDY, max_tokens=None)))
            stream = wrapped.stream([i + 1] * 5, GREEDY, max_tokens=None)
            await anext(stream)
            await until(lambda: len(wrapped._live) >= 3)
            await stream.aclose()
            for cancelled in (task, reader):
                cancelled.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await cancelled
            with slow.calls.turns.alone():  # before the next step
                assert len(slow.calls._running) <= 1
                assert len(slow.engine.scheduler.running) <= 1
            async for _ in wrapped.stream("left", GREEDY, max_tokens=None):
                break  # closed by the collector of garbage
        assert (await other).token_ids[: len(want)] == want
        await until(lambda: not wrapped._live)
        await until(lambda: not wrapped._is_stepping)

    run(main())
    assert_idle(slow)


def test_errors_reach_the_task_that_waits(slow: LLM) -> None:
    """A task that waits forever because a step failed, or an error lost in a thread."""

    async def main() -> None:
        wrapped = AsyncLLM(slow)
        with pytest.raises(RequestError, match="'temprature' is not supported: did you mean temperature"):
            await wrapped.generate("a", **{"temprature": 1})  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="best_of"):
            await tokens_of(wrapped.stream("a", best_of=2))
        with slow.hooks({"hook_embed": lambda name, x: 1 / 0}):
            tasks = [asyncio.create_task(wrapped.generate([i + 1], GREEDY)) for i in range(3)]
            tasks.append(asyncio.create_task(tokens_of(wrapped.stream("a", GREEDY))))  # type: ignore[arg-type]
            for task in tasks:
                with pytest.raises(HookError, match="ZeroDivisionError"):
                    await task
        await wrapped.generate("b", GREEDY)

        def fail() -> None:
            raise ValueError("no step")

        step, slow.engine.step = slow.engine.step, fail  # type: ignore[method-assign, assignment]
        with pytest.raises(ValueError, match="no step"):
            await wrapped.generate("b", GREEDY)
        slow.engine.step = step  # type: ignore[method-assign]
        assert len((await wrapped.generate("b", GREEDY)).token_ids) == 24

    run(main())
    assert_idle(slow)


def test_closing_ends_calls_and_what_was_opened(tiny_path: Path, slow: LLM) -> None:
    """A task that waits for a model that is gone, or a wrapped LLM that is closed by its wrapper."""

    async def main() -> None:
        async with AsyncLLM(tiny_path, backend="reference") as opened:
            task = asyncio.create_task(opened.generate("a", GREEDY, max_tokens=100))
            await until(lambda: bool(opened._live))
        with pytest.raises(KukriError, match="closed"):
            await task
        with pytest.raises(KukriError, match="closed"):
            await opened.chat([])
        with pytest.raises(KukriError, match="closed"):
            opened.llm.generate("a")
        assert repr(opened).endswith("closed)")

        wrapped = AsyncLLM(slow)
        task = asyncio.create_task(wrapped.generate("a", GREEDY, max_tokens=100))
        await until(lambda: bool(wrapped._live))
        await wrapped.aclose()
        with pytest.raises(KukriError, match="closed"):
            await task
        await wrapped.aclose()
        with pytest.raises(KukriError, match="'max_context' must be given when the LLM is opened"):
            AsyncLLM(slow, max_context=4)

    run(main())
    assert_idle(slow)
    assert slow.generate("a", GREEDY).text


def test_every_method_that_computes_is_there(llm: LLM) -> None:
    """Catches a method of LLM that asyncio's users have to run in a thread of their own."""

    async def main() -> None:
        async with AsyncLLM(llm) as made:
            ids = llm.tokenizer.encode("Hello")
            assert np.array_equal(await made.logits(ids), llm.logits(ids))
            assert np.array_equal(await made.embed("Hello"), llm.embed("Hello"))
            assert (await made.decide("Hello", ["a", "b"])).choice == llm.decide("Hello", ["a", "b"]).choice
            assert np.array_equal((await made.run_with_cache(ids))[0], llm.run_with_cache(ids)[0])

    asyncio.run(main())
    here = {"hooks", "add_hook", "reset_hooks", "intervene", "close", "answer"}  # at once, or old
    methods = {name for name in vars(LLM) if callable(getattr(LLM, name)) and not name.startswith("_")}
    assert methods - here <= set(vars(AsyncLLM))
