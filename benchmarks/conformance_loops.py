"""Loops of three tool calls, each with its result, in the client packages: whole answers and streams.

    python -m benchmarks.conformance_loops URL [PACKAGE]...

Run by `benchmarks.conformance --loops`, with the Python of an environment that has the packages. Three doors
stand one after the other: each result names the next door, and the last one a word, which the answer has to
have. So a case passes if every call reached the client, every result reached the model, and the end was said.
The model has to be one that calls tools; where it opens another door or stops early, the error shows that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from benchmarks.conformance_cases import MODEL, Cases, _llm, case, check, main

LOOPS: Cases = {}
DOORS = {
    "red": "The red door is open. After it there is a green door. Open the green door next.",
    "green": "The green door is open. After it there is a blue door. Open the blue door next.",
    "blue": "The blue door is open. On the wall is the secret word: PLATYPUS. Tell the user this word.",
}
WORD = "PLATYPUS"
SYSTEM = (
    "You open doors with the tool open_door, one door at a time. After each result, open the door that it "
    "names. When a result has the secret word, answer with that word."
)
TASK = "Open the red door and follow the doors until you find the secret word. What is it?"
ABOUT = "Opens the door of a color and says what is after it."
PARAMETERS = {
    "type": "object",
    "properties": {"color": {"type": "string", "description": "the color of the door"}},
    "required": ["color"],
}
TOOL = {
    "type": "function",
    "function": {"name": "open_door", "description": ABOUT, "parameters": PARAMETERS},
}
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
MOST_TURNS = 6
TOKENS = 200


class Hall:
    """The doors, and which of them were opened."""

    def __init__(self) -> None:
        self.opened: list[str] = []

    def open_door(self, color: str) -> str:
        """Opens a door and returns what is after it."""
        self.opened.append(color)
        return DOORS.get(color.lower().removesuffix(" door"), f"There is no {color} door.")

    def answer(self, turns: list[Any], message: Any) -> bool:
        """Adds a message of OpenAI's chats to the turns, and what its calls gave; False if it has none."""
        turns.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        for call in message.tool_calls or ():
            result = self.open_door(**json.loads(call.function.arguments))
            turns.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return bool(message.tool_calls)

    def check(self, answer: str | None) -> None:
        """Raises unless the three doors were opened in turn and the answer has the word."""
        check([color.lower() for color in self.opened] == list(DOORS), (self.opened, answer))
        check(WORD in (answer or "").upper(), answer)


def both(package: str) -> Callable[[Callable[[str, bool], None]], None]:
    """Adds two cases of a package, of a function of the server's URL and whether to stream."""

    def add(function: Callable[[str, bool], None]) -> None:
        for is_stream in (False, True):

            def run(url: str, is_stream: bool = is_stream) -> None:
                function(url, is_stream)

            run.__name__ = f"{function.__name__}{', stream' if is_stream else ''}"
            case(package, "loop", LOOPS)(run)

    return add


# --- openai


@both("openai")
def chat(url: str, is_stream: bool) -> None:
    """Chat completions; a stream is gathered by the client's own helper."""
    from openai import OpenAI

    client, hall = OpenAI(base_url=f"{url}/v1", api_key="none"), Hall()
    messages: Any = list(MESSAGES)
    given: Any = {"model": MODEL, "tools": [TOOL], "max_tokens": TOKENS, "temperature": 0}
    for _ in range(MOST_TURNS):
        if is_stream:
            with client.chat.completions.stream(messages=messages, **given) as stream:
                message: Any = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(messages=messages, **given).choices[0].message
        if not hall.answer(messages, message):
            break
    hall.check(message.content)


@both("openai")
def responses(url: str, is_stream: bool) -> None:
    """Responses, each of which continues the one before."""
    from openai import OpenAI

    client, hall, previous = OpenAI(base_url=f"{url}/v1", api_key="none"), Hall(), None
    tool = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    given: Any = {"model": MODEL, "tools": [tool], "max_output_tokens": TOKENS, "temperature": 0}
    items: Any = TASK
    for _ in range(MOST_TURNS):
        asked = {"input": items, "instructions": SYSTEM, "previous_response_id": previous, **given}
        if is_stream:
            with client.responses.stream(**asked) as stream:
                answer = stream.get_final_response()
        else:
            answer = client.responses.create(**asked)
        calls: Any = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            break
        previous = answer.id
        items = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": hall.open_door(**json.loads(call.arguments)),
            }
            for call in calls
        ]
    hall.check(answer.output_text)


# --- anthropic


@both("anthropic")
def messages(url: str, is_stream: bool) -> None:
    """Messages; a stream is gathered by the client."""
    from anthropic import Anthropic

    client, hall = Anthropic(base_url=url, api_key="none"), Hall()
    tool = {"name": "open_door", "description": ABOUT, "input_schema": PARAMETERS}
    given: Any = {"model": MODEL, "tools": [tool], "max_tokens": TOKENS, "system": SYSTEM}
    given["extra_body"] = {"temperature": 0}  # which newer versions of the package do not name
    turns: Any = [{"role": "user", "content": TASK}]
    for _ in range(MOST_TURNS):
        if is_stream:
            with client.messages.stream(messages=turns, **given) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(messages=turns, **given)
        turns.append({"role": "assistant", "content": [part.model_dump() for part in answer.content]})
        calls: Any = [part for part in answer.content if part.type == "tool_use"]
        if not calls:
            break
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": hall.open_door(**call.input)}
            for call in calls
        ]
        turns.append({"role": "user", "content": results})
    hall.check("".join(part.text for part in answer.content if part.type == "text"))


# --- langchain-openai


@both("langchain-openai")
def bound_tools(url: str, is_stream: bool) -> None:
    """A model with a tool; the chunks of a stream are added up."""
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    plain = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, max_tokens=TOKENS, temperature=0)  # type: ignore
    model, hall = plain.bind_tools([TOOL]), Hall()
    turns: Any = [SystemMessage(SYSTEM), HumanMessage(TASK)]
    for _ in range(MOST_TURNS):
        if is_stream:
            first, *rest = model.stream(turns)
            answer: Any = sum(rest, first)
        else:
            answer = model.invoke(turns)
        turns.append(answer)
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            turns.append(ToolMessage(hall.open_door(**call["args"]), tool_call_id=call["id"]))
    hall.check(answer.text)


# --- litellm


def _litellm_loop(url: str, is_stream: bool, **server: str) -> None:
    import litellm

    litellm.suppress_debug_info = True
    hall, turns = Hall(), list(MESSAGES)
    given: Any = {"api_key": "none", "max_tokens": TOKENS, "temperature": 0, "tools": [TOOL], **server}
    for _ in range(MOST_TURNS):
        answer: Any = litellm.completion(messages=turns, stream=is_stream, **given)
        if is_stream:
            answer = litellm.stream_chunk_builder(list(answer))
        message = answer.choices[0].message
        if not hall.answer(turns, message):
            break
    hall.check(message.content)


@both("litellm")
def litellm_openai(url: str, is_stream: bool) -> None:
    """OpenAI's API."""
    _litellm_loop(url, is_stream, model=f"openai/{MODEL}", api_base=f"{url}/v1")


@both("litellm")
def litellm_anthropic(url: str, is_stream: bool) -> None:
    """Anthropic's API."""
    _litellm_loop(url, is_stream, model=f"anthropic/{MODEL}", api_base=url)


@both("litellm")
def litellm_ollama(url: str, is_stream: bool) -> None:
    """Ollama's API."""
    _litellm_loop(url, is_stream, model=f"ollama_chat/{MODEL}", api_base=url)


# --- llm


@both("llm")
def chain(url: str, is_stream: bool) -> None:
    """A chain, in which the package calls the tool."""
    hall = Hall()

    def open_door(color: str) -> str:
        """Opens the door of a color and says what is after it."""
        return hall.open_door(color)

    options = {"max_tokens": TOKENS, "temperature": 0}
    model = _llm(url)
    model.can_stream = is_stream
    found = model.chain(TASK, system=SYSTEM, tools=[open_door], options=options)
    *_, last = [response.text() for response in found.responses()]
    hall.check(last)


# --- pydantic-ai


@both("pydantic-ai-slim")
def agent(url: str, is_stream: bool) -> None:
    """An agent, which calls the tool."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model, hall = (
        OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none")),
        Hall(),
    )
    settings: Any = {"max_tokens": TOKENS, "temperature": 0.0}
    made = Agent(model, model_settings=settings, system_prompt=SYSTEM)
    made.tool_plain(hall.open_door)

    async def streamed() -> str:
        text = ""
        async for event in _events(made):
            if event.__class__.__name__ == "AgentRunResultEvent":
                text = event.result.output
        return text

    hall.check(asyncio.run(streamed()) if is_stream else made.run_sync(TASK).output)


async def _events(made: Any) -> Any:
    """The events of a run, whichever form this version of the package has."""
    stream = made.run_stream_events(TASK)
    if hasattr(stream, "__aenter__"):
        async with stream as events:
            async for event in events:
                yield event
    else:
        async for event in stream:
            yield event


# --- instructor


def _instructor_loop(url: str, mode: str, is_stream: bool) -> None:
    """Three objects, each the answer to what came of the one before: the package's form of a tool."""
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel, Field

    class Door(BaseModel):
        """The door to open next."""

        color: str = Field(description="the color of the door to open next: one word, such as red")

    client = instructor.from_openai(
        OpenAI(base_url=f"{url}/v1", api_key="none"), mode=getattr(instructor.Mode, mode)
    )
    hall = Hall()
    turns = [
        {"role": "user", "content": "You open doors, one at a time. Which door do you open? The red one."}
    ]
    for _ in DOORS:
        given: Any = {"model": MODEL, "messages": turns, "response_model": Door, "max_retries": 1}
        given |= {"max_tokens": TOKENS, "temperature": 0}
        if is_stream:
            *_, door = client.chat.completions.create_partial(**given)
        else:
            door = client.chat.completions.create(**given)
        said = hall.open_door(door.color or "")
        turns += [{"role": "assistant", "content": door.model_dump_json()}, {"role": "user", "content": said}]
    hall.check(turns[-1]["content"])


for _mode in ("TOOLS", "JSON", "JSON_SCHEMA", "MD_JSON"):

    def _run(url: str, is_stream: bool, mode: str = _mode) -> None:
        _instructor_loop(url, mode, is_stream)

    _run.__name__ = _mode
    both("instructor")(_run)


# --- smolagents


def _smolagent(kind: str, url: str, is_stream: bool, task: str) -> None:
    import smolagents
    from smolagents import tool

    hall = Hall()

    @tool  # type: ignore[untyped-decorator]
    def open_door(color: str) -> str:
        """Opens the door of a color and says what is after it.

        Args:
            color: The color of the door.
        """
        return hall.open_door(color)

    options: Any = {"max_tokens": TOKENS, "temperature": 0}
    if kind == "ToolCallingAgent":
        options["parallel_tool_calls"] = False
    model = smolagents.OpenAIModel(MODEL, api_base=f"{url}/v1", api_key="none", **options)
    agent = getattr(smolagents, kind)
    made = agent([open_door], model, stream_outputs=is_stream, max_steps=MOST_TURNS, verbosity_level=0)
    hall.check(str(made.run(task)))


@both("smolagents")
def tool_calling_agent(url: str, is_stream: bool) -> None:
    """An agent that ends by a call of its own tool, final_answer."""
    task = "Call open_door with color red. Then do what each observation says, one call at a time, until an "
    task += "observation has the secret word. Then call final_answer with the secret word."
    _smolagent("ToolCallingAgent", url, is_stream, task)


@both("smolagents")
def code_agent(url: str, is_stream: bool) -> None:
    """An agent whose calls are Python code, which it runs."""
    task = (
        "Print what open_door('red') returns. Then do what each observation says, one call of open_door in "
    )
    task += (
        "each code block, until an observation has the secret word. Then call final_answer with that word."
    )
    _smolagent("CodeAgent", url, is_stream, task)


# --- openai-agents


def _runner(url: str, kind: str, is_stream: bool) -> None:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    hall = Hall()

    @agents.function_tool  # type: ignore[untyped-decorator]
    def open_door(color: str) -> str:
        """Opens the door of a color and says what is after it."""
        return hall.open_door(color)

    async def run() -> str:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        model = getattr(agents, kind)(model=MODEL, openai_client=client)
        settings = agents.ModelSettings(temperature=0, max_tokens=TOKENS)
        made: Any = agents.Agent(
            "doors", instructions=SYSTEM, tools=[open_door], model=model, model_settings=settings
        )
        if not is_stream:
            return str((await agents.Runner.run(made, TASK, max_turns=MOST_TURNS)).final_output)
        streamed = agents.Runner.run_streamed(made, TASK, max_turns=MOST_TURNS)
        async for _ in streamed.stream_events():
            pass
        return str(streamed.final_output)

    hall.check(asyncio.run(run()))


@both("openai-agents")
def runner_chat(url: str, is_stream: bool) -> None:
    """A runner by chat completions."""
    _runner(url, "OpenAIChatCompletionsModel", is_stream)


@both("openai-agents")
def runner_responses(url: str, is_stream: bool) -> None:
    """A runner by responses."""
    _runner(url, "OpenAIResponsesModel", is_stream)


if __name__ == "__main__":
    main(LOOPS)
