"""A conversation that a model answers, after it has called any of the functions that it may call."""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kukri.calls import MAX_ROUNDS
from kukri.calls.functions import FunctionTool, is_awaited, result_text
from kukri.calls.results import Chunk, Result, ToolCall
from kukri.calls.turn import Turn
from kukri.dataclass import dataclass, replace
from kukri.dialects.toolbox import Toolbox
from kukri.errors import RequestError
from kukri.sampling import Grammar

if TYPE_CHECKING:
    from kukri.calls.engine_calls import Call, EngineCalls, Intervene, Message
    from kukri.sampling import SamplingParams

# A function that the model may call, or a schema whose calls are returned, in OpenAI's form or by itself
Tool = Callable[..., Any] | Mapping[str, Any]
# Allows a call (True), declines it (False), or declines it with the text that the model reads as its result
Approve = Callable[[ToolCall], "bool | str | Awaitable[bool | str]"]
DECLINED = "error: this call was declined"


@dataclass(frozen=True)
class AskedCall:
    """A call of a function that a model asks for. Both ways to run it give the text that the model reads.

    An error of the function is such a text; an error of `approve` is raised.
    """

    call: ToolCall
    tool: FunctionTool | str  # or why there is no such tool

    def run(self, approve: Approve | None = None) -> str:
        """Calls the function, if `approve` allows it."""
        if approve is not None and (text := _declined(approve(self.call))) is not None:
            return text
        try:
            return result_text(self._begun())
        except Exception as error:
            return _error_text(error)

    async def run_async(self, approve: Approve | None = None) -> str:
        """The same; a function that is not async runs in a thread, as `approve` does."""
        if approve is not None:
            verdict = await _awaited(approve, self.call, is_async=is_awaited(approve))
            if (text := _declined(verdict)) is not None:
                return text
        try:
            is_async = not isinstance(self.tool, str) and self.tool.is_async
            return result_text(await _awaited(self._begun, is_async=is_async))
        except Exception as error:
            return _error_text(error)

    def _begun(self) -> Any:
        if isinstance(self.tool, str):
            raise LookupError(self.tool)
        bound = self.tool.bound(self.call.arguments)
        return self.tool.function(*bound.args, **bound.kwargs)


class Conversation:
    """One conversation. `next_call` asks the model, `read` finds the calls, `answer_calls` makes them.

    It is over when `result` is set. Errors of the arguments are RequestErrors, raised by the constructor and
    the first `next_call`.
    """

    def __init__(
        self,
        calls: EngineCalls,
        messages: Sequence[Message],
        params: SamplingParams,
        tools: Sequence[Tool] = (),
        max_rounds: int = MAX_ROUNDS,
        approve: Approve | None = None,
        tool_choice: str = "auto",
        *,
        adapter: str | None = None,
        intervene: Intervene | None = None,
        is_async: bool = False,
        streams: bool = False,
    ) -> None:
        calls.check_messages(messages)
        if isinstance(max_rounds, bool) or not isinstance(max_rounds, int) or max_rounds < 1:
            raise RequestError.of("max_rounds", f"must be at least 1, not {max_rounds!r}")
        self._calls, self._params, self._adapter, self._intervene = calls, params, adapter, intervene
        self._functions: dict[str, FunctionTool] = {}
        self._schemas: set[str] = set()  # the tools whose calls are returned
        self._streams, self._approve = streams, approve
        self._tool_choice = tool_choice
        self._schemas_shown = self._read_tools(tools, is_async)
        self._is_raw = calls.keeps_raw and not self._schemas_shown
        self._messages, self._n_before = [dict(one) for one in messages], len(messages)
        self._n_rounds, self._max_rounds = 0, max_rounds
        self.result: Result | None = None

    def _read_tools(self, tools: Sequence[Tool], is_async: bool) -> list[Mapping[str, Any]]:
        """Returns the schemas of the tools that the model may call. Raises RequestError for wrong tools."""
        if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
            raise RequestError.of("tools", "must be a list of functions and schemas")
        if self._approve is not None and not callable(self._approve):
            raise RequestError.of("approve", "must be a function")
        if not tools and self._tool_choice not in ("auto", "none"):
            raise RequestError.of("tool_choice", "requires tools")
        if tools and self._tool_choice != "none" and self._params.grammar is not None:
            raise RequestError.of("grammar", "cannot be combined with tools: leave one out")
        schemas: list[Mapping[str, Any]] = []
        for tool in tools:
            if isinstance(tool, Mapping):
                schemas.append(_schema(tool))
                self._schemas.add(schemas[-1]["name"])
                continue
            function = FunctionTool.of(tool)
            if function.is_async and not is_async:
                raise RequestError("an async function requires AsyncLLM.chat", param="tools")
            self._functions[function.name] = function
            schemas.append(function.schema)
        names = sorted({schema["name"] for schema in schemas})
        if len(names) < len(schemas):
            raise RequestError.of("tools", "must have different names")
        if self._tool_choice not in ("auto", "none", "required", *names):
            raise RequestError.of(
                "tool_choice",
                f"must be 'auto', 'none', 'required' or the name of a tool, not {self._tool_choice!r}: the "
                f"tools are {', '.join(names)}",
            )
        if self._functions and self._params.n_generated_answers > 1:
            raise RequestError.of("n", "cannot be combined with functions as tools")
        if not is_async and is_awaited(self._approve):
            raise _no_async_approve()
        return [] if self._tool_choice == "none" else schemas

    def _toolbox(self) -> Toolbox | None:
        """Returns the tools of the model's next answer; only the first answer can be required to call one."""
        if not self._schemas_shown:
            return None
        choice = "auto" if self._n_rounds else self._tool_choice
        named = [schema for schema in self._schemas_shown if schema["name"] == choice]
        dialect = self._calls.dialect.dialect
        return Toolbox(
            dialect,
            named or self._schemas_shown,
            many=not named,
            required=choice != "auto",
            is_strict=dialect.is_generic or importlib.util.find_spec("llguidance") is not None,
        )

    def next_call(self) -> Call:
        """The call for the model's next answer."""
        dialect, toolbox, params = self._calls.dialect, self._toolbox(), self._params
        shown = [{"type": "function", "function": schema} for schema in self._schemas_shown] or None
        prompt = self._calls.image_prompts.prompt(
            self._messages, lambda told, images: dialect.prompt_ids(told, {}, shown, images=images)
        )
        turn = Turn(dialect, prompt, toolbox)
        if toolbox is not None:
            params = replace(params, grammar=turn.call_grammar())
        elif isinstance(params.grammar, Grammar) and not self._is_raw:
            params = replace(params, grammar=turn.with_reasoning(params.grammar))
        shown_by = None if self._is_raw else turn
        return self._calls.call(
            prompt, params, self._adapter, self._intervene, streams=self._streams, turn=shown_by
        )

    def read(self, result: Result) -> list[AskedCall]:
        """The functions that an answer calls, each of which wants a result. Without any, it is the `result`.

        Raises RequestError for calls after the last round.
        """
        message: dict[str, Any] = {"role": "assistant", "content": result.text}
        if result.reasoning:
            message["reasoning_content"] = result.reasoning
        calls = [call for call in result.tool_calls if _is_complete(call)]
        if calls:
            message["tool_calls"] = [call.message for call in calls]
        self._messages.append(message)
        is_over = not calls or len(calls) < len(result.tool_calls) or not self._functions
        if is_over or any(call.name in self._schemas for call in calls):
            self.result = replace(result, messages=self._messages[self._n_before :])
            return []
        if self._n_rounds == self._max_rounds:
            raise RequestError(
                f"the calls of the model must end after {self._max_rounds} rounds: raise 'max_rounds' "
                "(--max-rounds) to allow more",
                param="max_rounds",
            )
        self._n_rounds += 1
        missing = f"this tool was not found: use {', '.join(self._functions)}"
        return [AskedCall(call, self._functions.get(call.name, missing)) for call in calls]

    def answer_calls(self, asked: Sequence[AskedCall]) -> None:
        """Runs the functions that an answer calls, one after another."""
        for one in asked:
            self._messages.append(_result_message(one.call, one.run(self._approve)))

    async def answer_calls_async(self, asked: Sequence[AskedCall]) -> None:
        """The same, without holding up the event loop."""
        for one in asked:
            self._messages.append(_result_message(one.call, await one.run_async(self._approve)))

    def last_chunk(self, chunk: Chunk) -> tuple[Chunk, list[AskedCall]]:
        """Reads the result that a chunk carries; the chunk keeps it only if the conversation is over."""
        assert chunk.result is not None, "it is the last of an answer"
        asked = self.read(chunk.result)
        return replace(chunk, result=self.result), asked


def _schema(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function that a tool in OpenAI's form describes. Raises RequestError for another form."""
    function = tool.get("function") if tool.get("type") == "function" and "function" in tool else tool
    told: Mapping[str, Any] = function if isinstance(function, Mapping) else {}
    name, parameters = told.get("name"), told.get("parameters") or {}
    if not isinstance(name, str) or not name or not isinstance(parameters, Mapping):
        raise RequestError(
            "a tool must be a function, or a dictionary with the name and the parameters of one",
            param="tools",
        )
    return told


def _result_message(call: ToolCall, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}


def _is_complete(call: ToolCall) -> bool:
    """False if the answer ended within the arguments."""
    try:
        json.loads(call.arguments)
    except ValueError:
        return False
    return True


async def _awaited(function: Callable[..., Any], *given: Any, is_async: bool) -> Any:
    """The result of a function, which runs in a thread if it is not async."""
    if is_async:
        return await function(*given)
    import asyncio  # imported here, so that programs without asyncio do not load it

    found = await asyncio.to_thread(function, *given)
    return await found if inspect.isawaitable(found) else found


def _declined(verdict: Any) -> str | None:
    """The text that stands for the result of a declined call; None for a call that is allowed."""
    if inspect.iscoroutine(verdict):
        verdict.close()
        raise _no_async_approve()
    if verdict is True:  # nothing else allows it, not even a callback that returns nothing
        return None
    return verdict if isinstance(verdict, str) else DECLINED


def _no_async_approve() -> RequestError:
    return RequestError("an async 'approve' requires AsyncLLM.chat", param="approve")


def _error_text(error: Exception) -> str:
    return f"error: {type(error).__name__}: {error}"
