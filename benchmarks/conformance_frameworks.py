"""More cases of `benchmarks.conformance`: frameworks of agents, and the clients of Cohere and Mistral.

    python -m benchmarks.conformance_frameworks URL [PACKAGE]...

Runs these cases and those of `conformance_cases.py`, and prints as it does.
"""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.conformance_cases import (
    MODEL,
    PARAMETERS,
    QUESTION,
    SCHEMA,
    TOOL,
    _person_class,
    case,
    check,
    check_person,
    main,
)

TEXT = "What is the capital of France?"
TEXTS = ["Paris is the capital of France.", "Bananas are yellow."]

# --- cohere


def _cohere(url: str) -> Any:
    import cohere

    return cohere.ClientV2(api_key="none", base_url=url)


@case("cohere", "rerank")
def cohere_rerank(url: str) -> None:
    """Documents by their fit, the best first."""
    found = _cohere(url).rerank(model=MODEL, query=TEXT, documents=TEXTS, top_n=2).results
    check(len(found) == 2 and found[0].relevance_score >= found[1].relevance_score, found)


@case("cohere", "embeddings")
def cohere_embed(url: str) -> None:
    """Vectors by Cohere's own API."""
    found = _cohere(url).embed(
        model=MODEL, texts=TEXTS, input_type="search_document", embedding_types=["float"]
    )
    check(len(found.embeddings.float_) == 2, found)


@case("cohere", "chat")
def cohere_chat(url: str) -> None:
    """A chat by Cohere's own API."""
    check(_cohere(url).chat(model=MODEL, messages=QUESTION).message.content)


# --- mistralai


def _mistral(url: str) -> Any:
    try:
        from mistralai.client import Mistral
    except ImportError:
        from mistralai import Mistral

    return Mistral(api_key="none", server_url=url)


@case("mistralai", "chat")
def mistral_chat(url: str) -> None:
    """A chat."""
    answer = _mistral(url).chat.complete(model=MODEL, messages=QUESTION, max_tokens=16)
    check(answer.choices[0].message.content, answer)


@case("mistralai", "stream")
def mistral_stream(url: str) -> None:
    """A stream."""
    events = _mistral(url).chat.stream(model=MODEL, messages=QUESTION, max_tokens=16)
    check("".join(event.data.choices[0].delta.content or "" for event in events if event.data.choices))


@case("mistralai", "tools")
def mistral_tools(url: str) -> None:
    """A call that is required; Mistral's word for it is any."""
    answer = _mistral(url).chat.complete(
        model=MODEL, messages=QUESTION, tools=[TOOL], tool_choice="any", max_tokens=100
    )
    check(answer.choices[0].message.tool_calls, answer)


@case("mistralai", "structured")
def mistral_schema(url: str) -> None:
    """A schema."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    answer = _mistral(url).chat.complete(model=MODEL, messages=QUESTION, response_format=form, max_tokens=200)
    check_person(answer.choices[0].message.content)


@case("mistralai", "embeddings")
def mistral_embeddings(url: str) -> None:
    """Vectors."""
    check(len(_mistral(url).embeddings.create(model=MODEL, inputs=TEXTS).data) == 2)


# --- llama-index

_LLAMA_INDEX = "llama-index-llms-openai-like"


def _llama_index(url: str) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model=MODEL,
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=2048,
        max_tokens=200,
        temperature=0,
        should_use_structured_outputs=True,
    )


def _llama_index_question() -> Any:
    from llama_index.core.llms import ChatMessage

    return [ChatMessage(role="user", content=TEXT)]


@case(_LLAMA_INDEX, "chat")
def llama_index_chat(url: str) -> None:
    """A chat."""
    check(_llama_index(url).chat(_llama_index_question()).message.content)


@case(_LLAMA_INDEX, "stream")
def llama_index_stream(url: str) -> None:
    """A stream."""
    check("".join(part.delta or "" for part in _llama_index(url).stream_chat(_llama_index_question())))


@case(_LLAMA_INDEX, "tools")
def llama_index_tools(url: str) -> None:
    """A call that is required."""
    from llama_index.core.tools import FunctionTool

    def get_time(city: str) -> str:
        """The time in a city."""
        return f"12:30 in {city}"

    model, tool = _llama_index(url), FunctionTool.from_defaults(get_time)
    answer = model.chat_with_tools([tool], user_msg=TEXT, tool_required=True)
    check(model.get_tool_calls_from_response(answer), answer)


@case(_LLAMA_INDEX, "structured")
def llama_index_structured(url: str) -> None:
    """A class as the form of an answer."""
    model = _llama_index(url).as_structured_llm(_person_class())
    check(model.chat(_llama_index_question()).raw.name)


@case(_LLAMA_INDEX, "embeddings")
def llama_index_embeddings(url: str) -> None:
    """Vectors."""
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    client = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{url}/v1", api_key="none")
    check(len(client.get_text_embedding_batch(TEXTS)) == 2)


# --- openai-agents


def _run_agent(url: str, kind: str, *, is_stream: bool = False, **options: Any) -> Any:
    """The result of an agent of a class of models, with a settings' `tool_choice` if there are tools."""
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)

    async def run() -> Any:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        model = getattr(agents, kind)(model=MODEL, openai_client=client)
        settings = agents.ModelSettings(
            max_tokens=200, temperature=0, tool_choice="required" if "tools" in options else None
        )
        agent: Any = agents.Agent("one", model=model, model_settings=settings, **options)
        if not is_stream:
            return (await agents.Runner.run(agent, TEXT, max_turns=4)).final_output
        streamed = agents.Runner.run_streamed(agent, TEXT, max_turns=4)
        return [event async for event in streamed.stream_events()]

    return asyncio.run(run())


@case("openai-agents", "chat")
def agents_chat(url: str) -> None:
    """An agent by chat completions, and by responses."""
    check(_run_agent(url, "OpenAIChatCompletionsModel"))
    check(_run_agent(url, "OpenAIResponsesModel"))


@case("openai-agents", "stream")
def agents_stream(url: str) -> None:
    """Both as streams."""
    check(len(_run_agent(url, "OpenAIChatCompletionsModel", is_stream=True)) > 2)
    check(len(_run_agent(url, "OpenAIResponsesModel", is_stream=True)) > 2)


@case("openai-agents", "tools")
def agents_tools(url: str) -> None:
    """A tool that has to be called, whose result is the answer."""
    import agents

    @agents.function_tool  # type: ignore[untyped-decorator]
    def get_time(city: str) -> str:
        """The time in a city."""
        return f"12:30 in {city}"

    for kind in ("OpenAIChatCompletionsModel", "OpenAIResponsesModel"):
        said = _run_agent(url, kind, tools=[get_time], tool_use_behavior="stop_on_first_tool")
        check("12:30" in said, said)


@case("openai-agents", "structured")
def agents_structured(url: str) -> None:
    """A class as the form of the answer."""
    for kind in ("OpenAIChatCompletionsModel", "OpenAIResponsesModel"):
        check(_run_agent(url, kind, output_type=_person_class()).name)


# --- haystack-ai


def _haystack(url: str, **options: Any) -> Any:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    given = {"max_completion_tokens": 200, "temperature": 0, **options.pop("generation_kwargs", {})}
    made = OpenAIChatGenerator(
        api_key=Secret.from_token("none"),
        model=MODEL,
        api_base_url=f"{url}/v1",
        generation_kwargs=given,
        **options,
    )
    return made.run([ChatMessage.from_user(TEXT)])["replies"][0]


@case("haystack-ai", "chat")
def haystack_chat(url: str) -> None:
    """A chat."""
    check(_haystack(url).text)


@case("haystack-ai", "stream")
def haystack_stream(url: str) -> None:
    """A stream, whose chunks go to a function."""
    chunks: list[Any] = []
    reply = _haystack(url, streaming_callback=chunks.append)
    check(reply.text and len(chunks) > 2, reply)


@case("haystack-ai", "tools")
def haystack_tools(url: str) -> None:
    """A call that is required."""
    from haystack.tools import Tool

    tool = Tool("get_time", "The time in a city", PARAMETERS, lambda city: "12:30")
    reply = _haystack(url, tools=[tool], generation_kwargs={"tool_choice": "required"})
    check(reply.tool_calls, reply)


@case("haystack-ai", "structured")
def haystack_structured(url: str) -> None:
    """A class as the form of the answer."""
    check_person(_haystack(url, generation_kwargs={"response_format": _person_class()}).text)


@case("haystack-ai", "embeddings")
def haystack_embeddings(url: str) -> None:
    """The vector of a text."""
    from haystack.components.embedders import OpenAITextEmbedder
    from haystack.utils import Secret

    made = OpenAITextEmbedder(api_key=Secret.from_token("none"), model=MODEL, api_base_url=f"{url}/v1")
    check(made.run(TEXTS[0])["embedding"])


# --- dspy


def _dspy(url: str) -> Any:
    import dspy

    model = dspy.LM(
        f"openai/{MODEL}", api_base=f"{url}/v1", api_key="none", max_tokens=200, temperature=0, cache=False
    )
    dspy.configure(lm=model, adapter=dspy.JSONAdapter())
    return dspy


@case("dspy", "chat")
def dspy_chat(url: str) -> None:
    """The model, asked directly."""
    check(_dspy(url).settings.lm(TEXT)[0])


@case("dspy", "structured")
def dspy_structured(url: str) -> None:
    """A signature whose fields JSONAdapter asks for by a schema."""
    answer = _dspy(url).Predict("question -> name: str, is_known: bool")(question=TEXT)
    check(isinstance(answer.name, str) and isinstance(answer.is_known, bool), answer)


@case("dspy", "stream")
def dspy_stream(url: str) -> None:
    """A signature as a stream."""
    dspy = _dspy(url)
    program = dspy.streamify(dspy.Predict("question -> answer"))

    async def run() -> list[Any]:
        return [part async for part in program(question=TEXT)]

    check(len(asyncio.run(run())) > 1)


@case("dspy", "embeddings")
def dspy_embeddings(url: str) -> None:
    """Vectors."""
    client = _dspy(url).Embedder(f"openai/{MODEL}", api_base=f"{url}/v1", api_key="none", caching=False)
    check(len(client(TEXTS)) == 2)


# --- smolagents


def _smolagents(url: str, **options: Any) -> Any:
    import smolagents

    given = {"max_tokens": 200, "temperature": 0, **options}
    return smolagents.OpenAIModel(MODEL, api_base=f"{url}/v1", api_key="none", **given)


@case("smolagents", "chat")
def smolagents_chat(url: str) -> None:
    """The model, asked directly."""
    check(_smolagents(url).generate(QUESTION).content)


@case("smolagents", "stream")
def smolagents_stream(url: str) -> None:
    """A stream."""
    check("".join(part.content or "" for part in _smolagents(url).generate_stream(QUESTION)))


@case("smolagents", "tools")
def smolagents_tools(url: str) -> None:
    """A call, which the package requires."""
    from smolagents import FinalAnswerTool

    reply = _smolagents(url).generate(QUESTION, tools_to_call_from=[FinalAnswerTool()])
    check(reply.tool_calls, reply)


@case("smolagents", "structured")
def smolagents_structured(url: str) -> None:
    """A schema."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    check_person(_smolagents(url).generate(QUESTION, response_format=form).content)


if __name__ == "__main__":
    main()
