"""Asynchronous generation: any number of streams and answers at a time on one engine.

While calls are under way one thread steps the engine for all of them. After a step it wakes the event loop of
each call that has something new; the event loop itself never waits for the engine.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack, cast

from kukri.calls.engine_calls import Call, Message, Prompt, is_chat, is_many
from kukri.calls.results import Chunk, Result
from kukri.errors import KukriError, RequestError
from kukri.llm import LLM
from kukri.opening.model_options import ModelKeywords
from kukri.sampling import SamplingParams

if TYPE_CHECKING:
    from kukri.calls.call_options import ChatOptions, GenerationOptions


P = ParamSpec("P")
R = TypeVar("R")


def _in_thread(
    method: Callable[Concatenate[LLM, P], R],
) -> Callable[Concatenate[AsyncLLM, P], Coroutine[Any, Any, R]]:
    """A method of `LLM` that runs in a thread; a task that is cancelled does not wait for its end."""

    @wraps(method)
    async def run(self: AsyncLLM, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._check_open()
        return await asyncio.to_thread(method, self.llm, *args, **kwargs)

    return run


def _typed_as(
    method: Callable[Concatenate[LLM, P], R],
) -> Callable[Concatenate[AsyncLLM, P], Coroutine[Any, Any, R]]:
    """A method that `_NAME` of AsyncLLM runs, with the types of a method of `LLM`, its overloads too."""

    @wraps(method)
    async def run(self: AsyncLLM, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._check_open()
        found: R = await getattr(self, f"_{method.__name__}")(*args, **kwargs)
        return found

    return run


class AsyncLLM:
    """An `LLM` for asyncio: `async for chunk in llm.stream(...)`, `await llm.generate(...)`.

    Concurrent calls, of one event loop or of several, share the engine's batches and give the tokens that
    `LLM` gives. Prompts are tokenized in the event loop's executor. A slow reader delays nobody. Cancelling a
    task that waits here, or closing a stream, ends its requests: their pages are free by the next step.
    Tools and `approve` may be async functions; others run in a thread.

    Args:
        model: As for `LLM`, which is opened here and closed by `aclose`; opening blocks, and may be done in
            `asyncio.to_thread`. Or an `LLM`, which may be used alongside this and stays open after `aclose`.
        options: The other arguments of `LLM`.

    Attributes:
        llm: The LLM, for what no method here does: `hooks`, `add_hook`, the weights; its methods block.
    """

    generate = _typed_as(LLM.generate)
    chat = _typed_as(LLM.chat)
    chat_prompt = _in_thread(LLM.chat_prompt)
    logits = _in_thread(LLM.logits)
    decide = _in_thread(LLM.decide)
    embed = _in_thread(LLM.embed)
    embed_tokens = _in_thread(LLM.embed_tokens)
    rerank = _in_thread(LLM.rerank)
    describe = _in_thread(LLM.describe)
    extract = _in_thread(LLM.extract)
    classify = _in_thread(LLM.classify)
    classify_tokens = _in_thread(LLM.classify_tokens)
    transcribe = _in_thread(LLM.transcribe)
    load_adapter = _in_thread(LLM.load_adapter)
    unload_adapter = _in_thread(LLM.unload_adapter)
    run_with_cache = _in_thread(LLM.run_with_cache)
    run_with_hooks = _in_thread(LLM.run_with_hooks)
    generate_with_hooks = _in_thread(LLM.generate_with_hooks)
    attribute = _in_thread(LLM.attribute)
    ask_about = _in_thread(LLM.ask_about)

    def __init__(
        self, model: LLM | str | os.PathLike[str] | None = None, **options: Unpack[ModelKeywords]
    ) -> None:
        if isinstance(model, LLM) and options:
            raise KukriError(f"{', '.join(map(repr, options))} must be given when the LLM is opened")
        self._owns_llm = not isinstance(model, LLM)
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._is_open = True
        # for the holder of the turn (`kukri.engine.turns`), but that any thread may look at `_live`
        self._live: set[Call] = set()
        self._is_stepping = False  # a thread runs `_step_all`

    async def _generate(
        self, prompt: Any, params: SamplingParams | None = None, **options: Unpack[GenerationOptions]
    ) -> Result | list[Result]:
        adapter, interventions = options.pop("adapter", None), options.pop("interventions", ())
        calls = await asyncio.to_thread(
            self.llm.calls.for_prompts, prompt, params, options, adapter, self.llm.intervene(interventions)
        )
        results = await self._run(calls)
        return results if is_many(prompt) else results[0]

    async def _chat(
        self, messages: Any, params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> Result | list[Result]:
        from kukri.calls.conversation import Conversation

        calls, many = self.llm.calls, is_many(messages)
        checked, given = self._checked(params, options)
        told = [Conversation(calls, one, checked, **given) for one in (messages if many else [messages])]
        while asked := [one for one in told if one.result is None]:
            made = [await asyncio.to_thread(one.next_call) for one in asked]
            for one, result in zip(asked, await self._run(made), strict=True):
                await one.answer_calls_async(one.read(result))
        answers = [one.result for one in told if one.result is not None]
        return answers if many else answers[0]

    async def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[Chunk, None]:
        """Streams the answer to a prompt or to messages as `LLM.stream` does; raises the same.

        The request is checked and starts when the first chunk is asked for.
        """
        self._check_open()
        calls, (checked, given) = self.llm.calls, self._checked(params, options)
        if not is_chat(prompt):
            if given.get("tools"):
                raise RequestError.of("tools", "requires messages: leave it out")
            plain = await asyncio.to_thread(
                calls.call, prompt, checked, given.get("adapter"), given["intervene"], streams=True
            )
            async with aclosing(self._chunks(plain)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        from kukri.calls.conversation import Conversation

        messages = cast("Sequence[Message]", prompt)
        conversation = Conversation(calls, messages, checked, streams=True, **given)
        while conversation.result is None:
            async with aclosing(self._chunks(await asyncio.to_thread(conversation.next_call))) as chunks:
                async for chunk in chunks:
                    if chunk.result is None:
                        yield chunk
                        continue
                    last, asked = conversation.last_chunk(chunk)
                    yield last
            await conversation.answer_calls_async(asked)

    async def _chunks(self, call: Call) -> AsyncGenerator[Chunk, None]:
        """The chunks of one answer."""
        changed = _wake_on_change([call])
        try:
            self._start([call])
            chunk: Chunk | None = None
            while chunk is None or chunk.result is None:
                while not call.chunks and not call.is_done:
                    await changed.wait()
                    changed.clear()
                if not call.chunks:
                    call.result_or_error()  # raises: a result comes with a chunk
                yield (chunk := call.chunks.popleft())
        finally:
            self._drop([call])

    async def aclose(self) -> None:
        """Ends all calls in progress with an error, and closes the LLM if it was opened here."""
        self._is_open = False
        self.llm.calls.turns.submit(self._end_live)
        if self._owns_llm:
            await asyncio.to_thread(self.llm.close)

    def __repr__(self) -> str:
        state = "" if self._is_open else ", closed"
        return f"AsyncLLM({self.llm!r}{state})"

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _checked(
        self, params: SamplingParams | None, options: ChatOptions
    ) -> tuple[SamplingParams, dict[str, Any]]:
        """The parameters of a call with these options, and the other arguments of its `Conversation`."""
        overrides: dict[str, Any] = {**options}
        names = overrides.keys() & {"tools", "tool_choice", "approve", "max_rounds", "adapter"}
        given = {name: overrides.pop(name) for name in names}
        intervene = self.llm.intervene(overrides.pop("interventions", ()))
        return self.llm.calls.params(params, overrides), {**given, "intervene": intervene, "is_async": True}

    def _check_open(self) -> None:
        if not self._is_open:
            raise _closed_error()

    async def _run(self, calls: list[Call]) -> list[Result]:
        changed = _wake_on_change(calls)
        try:
            self._start(calls)
            for call in calls:
                while not call.is_done:
                    await changed.wait()
                    changed.clear()
            return [call.result_or_error() for call in calls]
        finally:
            self._drop(calls)

    def _start(self, calls: list[Call]) -> None:
        """Queues the calls' requests before the next step."""
        self.llm.calls.turns.submit(lambda: self._add(calls))

    def _drop(self, calls: list[Call]) -> None:
        """Aborts, before the next step, the requests of calls that have not ended."""
        self.llm.calls.turns.submit(lambda: self._end(calls))

    # The methods below belong to the thread that holds the turn.

    def _add(self, calls: list[Call]) -> None:
        if not self._is_open:
            for call in calls:
                call.fail(_closed_error())
            return
        self.llm.calls.add(calls)
        self._live.update(calls)
        if not self._is_stepping and not self._is_idle():
            self._is_stepping = True
            try:
                threading.Thread(target=self._step_all, name="kukri-async", daemon=True).start()
            except RuntimeError as error:  # the process may have no more threads
                self._is_stepping = False
                self._end_live(KukriError(f"no thread could be started for the engine: {error}"))

    def _end(self, calls: list[Call]) -> None:
        self._live.difference_update(calls)
        self.llm.calls.end(calls)

    def _end_live(self, error: Exception | None = None) -> None:
        calls = [call for call in self._live if not call.is_done]
        for call in calls:
            call.fail(error or _closed_error())
        self._end(calls)

    # The methods below belong to the thread that steps.

    def _step_all(self) -> None:
        """Steps the engine, or sleeps while another thread does, until no call is left."""
        is_left = True
        while is_left:
            error: Exception | None = None
            try:
                self.llm.calls.turns.wait(self._is_idle)
            except BaseException as raised:  # by a step, and no request's own error
                error = raised if isinstance(raised, Exception) else KukriError(f"a step raised {raised!r}")
            with self.llm.calls.turns.alone():
                if error is not None:
                    self._end_live(error)
                is_left = self._is_stepping = not self._is_idle()

    def _is_idle(self) -> bool:
        return all(call.is_done for call in tuple(self._live))


def _wake_on_change(calls: Sequence[Call]) -> asyncio.Event:
    """An event of the running event loop that is set after every change of the calls."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # the event loop has been closed
            loop.call_soon_threadsafe(changed.set)

    for call in calls:
        call.on_change = wake
    return changed


def _closed_error() -> KukriError:
    return KukriError("this AsyncLLM is closed: open another")
