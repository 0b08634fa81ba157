"""The cases of `benchmarks.conformance`: run by the Python of an environment that has the client packages.

    python -m benchmarks.conformance_cases URL [PACKAGE]...

Prints a line of JSON for each case. Nothing of kukri is imported. A package that is not installed is a
failure of all its cases.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "get_time", "description": "The time in a city", "parameters": PARAMETERS},
}
Case = Callable[[str], None]
Cases = dict[
    str, list[tuple[str, Case]]
]  # by package: what a case is about (a column of the table), the case
CASES: Cases = {}


def case(package: str, about: str = "more", cases: Cases = CASES) -> Callable[[Case], Case]:
    """Adds a case of a package: a function of the server's URL that fails by an exception."""

    def add(function: Case) -> Case:
        cases.setdefault(package, []).append((about, function))
        return function

    return add


def check(truth: Any, shown: Any = "") -> None:
    """Raises AssertionError, showing what was found, unless `truth`."""
    if not truth:
        raise AssertionError(repr(shown)[:300])


def check_person(text: str) -> None:
    """Raises unless a text follows SCHEMA."""
    person = json.loads(text)
    check(set(person) == {"name", "age"} and isinstance(person["age"], int), text)


# --- ollama


def _ollama(url: str, kind: str = "Client") -> Any:
    import ollama

    return getattr(ollama, kind)(url)


@case("ollama", "chat")
def chat(url: str) -> None:
    """A whole answer."""
    answer = _ollama(url).chat(MODEL, QUESTION, options={"num_predict": 16, "temperature": 0})
    check(answer.message.content and answer.eval_count, answer)


@case("ollama", "stream")
def stream(url: str) -> None:
    """An answer in parts."""
    parts = list(_ollama(url).chat(MODEL, QUESTION, stream=True, options={"num_predict": 16}))
    check(len(parts) > 1 and parts[-1].done, parts)


@case("ollama")
def async_stream(url: str) -> None:
    """The same from asyncio."""

    async def run() -> int:
        parts = await _ollama(url, "AsyncClient").chat(
            MODEL, QUESTION, stream=True, options={"num_predict": 16}
        )
        return len([part async for part in parts])

    check(asyncio.run(run()) > 1)


@case("ollama")
def generate(url: str) -> None:
    """A prompt."""
    check(_ollama(url).generate(MODEL, "Name a fruit.", options={"num_predict": 8}).response)


@case("ollama", "tools")
def tools(url: str) -> None:
    """A tool that may be called: its call is read or there is none."""
    answer = _ollama(url).chat(MODEL, QUESTION, tools=[TOOL], options={"num_predict": 64})
    check(answer.message.tool_calls or answer.message.content, answer)


@case("ollama", "structured")
def structured(url: str) -> None:
    """A schema."""
    check_person(_ollama(url).chat(MODEL, QUESTION, format=SCHEMA).message.content or "")


@case("ollama", "embeddings")
def embed(url: str) -> None:
    """Vectors of two texts."""
    check(len(_ollama(url).embed(MODEL, ["a", "b"]).embeddings) == 2)


@case("ollama")
def models(url: str) -> None:
    """Lists and descriptions."""
    client = _ollama(url)
    check(client.list().models and client.ps().models and client.show(MODEL).modelinfo)


# --- openai


def _openai(url: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{url}/v1", api_key="none", _strict_response_validation=True)


@case("openai", "chat")
def chat_completion(url: str) -> None:
    """A chat, strictly validated."""
    answer = _openai(url).chat.completions.create(
        model=MODEL, messages=QUESTION, max_completion_tokens=16, temperature=0
    )
    check(answer.choices[0].message.content, answer)


@case("openai", "stream")
def chat_stream(url: str) -> None:
    """Chunks with usage."""
    chunks = _openai(url).chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=16, stream=True, stream_options={"include_usage": True}
    )
    check(list(chunks)[-1].usage.completion_tokens)


@case("openai", "structured")
def parse(url: str) -> None:
    """A pydantic class as the form of an answer."""
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    create = _openai(url).chat.completions.parse
    answer = create(model=MODEL, messages=QUESTION, response_format=Person, max_tokens=200)
    check(answer.choices[0].message.parsed is not None, answer)


@case("openai", "tools")
def required_tool(url: str) -> None:
    """A call that is required."""
    answer = _openai(url).chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[TOOL], tool_choice="required", max_tokens=100
    )
    (call, *_) = answer.choices[0].message.tool_calls
    check(json.loads(call.function.arguments)["city"] in ("Paris", "Rome"), call)


@case("openai")
def completion(url: str) -> None:
    """A text that is continued."""
    check(_openai(url).completions.create(model=MODEL, prompt="One, two,", max_tokens=4).choices[0].text)


@case("openai")
def responses(url: str) -> None:
    """The newer form."""
    check(_openai(url).responses.create(model=MODEL, input="Hi!", max_output_tokens=8).output_text)


@case("openai")
def responses_stream(url: str) -> None:
    """Streams the events of a response."""
    events = _openai(url).responses.create(model=MODEL, input="Hi!", max_output_tokens=8, stream=True)
    check(list(events)[-1].type in ("response.completed", "response.incomplete"))


@case("openai", "embeddings")
def embeddings(url: str) -> None:
    """Vectors; as base64, its default, they fail the client's own strict validation from any server."""
    create = _openai(url).embeddings.create
    check(len(create(model=MODEL, input=["a", "b"], encoding_format="float").data) == 2)


@case("openai")
def model_list(url: str) -> None:
    """The list of models."""
    check(MODEL in [model.id for model in _openai(url).models.list()])


# --- anthropic


def _anthropic(url: str) -> Any:
    from anthropic import Anthropic

    return Anthropic(base_url=url, api_key="none", _strict_response_validation=True)


@case("anthropic", "chat")
def message(url: str) -> None:
    """A message, strictly validated."""
    answer = _anthropic(url).messages.create(model=MODEL, messages=QUESTION, max_tokens=16)
    check(answer.content[0].text, answer)


@case("anthropic", "stream")
def message_stream(url: str) -> None:
    """Events, gathered by the client."""
    with _anthropic(url).messages.stream(model=MODEL, messages=QUESTION, max_tokens=16) as events:
        check("".join(events.text_stream))


@case("anthropic", "tools")
def tool_use(url: str) -> None:
    """A call that is required."""
    tool = {"name": "get_time", "description": "The time in a city", "input_schema": PARAMETERS}
    answer = _anthropic(url).messages.create(
        model=MODEL, messages=QUESTION, max_tokens=100, tools=[tool], tool_choice={"type": "any"}
    )
    check(answer.stop_reason == "tool_use" and answer.content[-1].input["city"], answer)


@case("anthropic", "structured")
def parse_message(url: str) -> None:
    """A schema as the form of a message."""
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = _anthropic(url).messages.create(
        model=MODEL, messages=QUESTION, max_tokens=200, extra_body={"output_config": form}
    )
    check_person(answer.content[0].text)


@case("anthropic", "tools")
def tool_runner(url: str) -> None:
    """A runner, which calls the function and sends back what it returns."""
    from anthropic import beta_tool

    called = []

    @beta_tool  # type: ignore[untyped-decorator]
    def get_time(city: str) -> str:
        """The time in a city."""
        called.append(city)
        return "12:30"

    runner = _anthropic(url).beta.messages.tool_runner(
        model=MODEL,
        messages=QUESTION,
        max_tokens=100,
        tools=[get_time],
        tool_choice={"type": "any"},
        max_iterations=2,
    )
    check(len(list(runner)) == 2 and called, called)


@case("anthropic")
def count_tokens(url: str) -> None:
    """The length of a prompt."""
    check(_anthropic(url).messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens > 5)


# --- litellm


def _litellm(url: str, **options: Any) -> Any:
    import litellm

    litellm.suppress_debug_info = True
    given = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 100}
    return litellm.completion(messages=QUESTION, **{**given, **options})


@case("litellm", "chat")
def litellm_chat(url: str) -> None:
    """A chat by OpenAI's API."""
    check(_litellm(url).choices[0].message.content)


@case("litellm", "stream")
def litellm_stream(url: str) -> None:
    """A stream."""
    check("".join(chunk.choices[0].delta.content or "" for chunk in _litellm(url, stream=True)))


@case("litellm", "tools")
def litellm_tools(url: str) -> None:
    """A call that is required."""
    check(_litellm(url, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls)


@case("litellm", "structured")
def litellm_schema(url: str) -> None:
    """A schema."""
    format = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    check_person(_litellm(url, response_format=format).choices[0].message.content)


@case("litellm")
def litellm_ollama(url: str) -> None:
    """A chat by Ollama's API."""
    check(_litellm(url, model=f"ollama_chat/{MODEL}", api_base=url).choices[0].message.content)


@case("litellm")
def litellm_ollama_stream(url: str) -> None:
    """A stream by Ollama's API."""
    chunks = _litellm(url, model=f"ollama_chat/{MODEL}", api_base=url, stream=True)
    check("".join(chunk.choices[0].delta.content or "" for chunk in chunks))


@case("litellm", "embeddings")
def litellm_embedding(url: str) -> None:
    """Vectors."""
    import litellm

    given = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
    check(len(litellm.embedding(input=["a", "b"], encoding_format="float", **given).data) == 2)


# --- llm


def _llm(url: str) -> Any:
    """The server as a model in extra-openai-models.yaml."""
    import llm

    folder = Path(tempfile.mkdtemp())
    entry: dict[str, Any] = {"model_id": "served", "model_name": MODEL, "api_base": f"{url}/v1"}
    entry |= {"supports_schema": True, "supports_tools": True}
    (folder / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    os.environ["LLM_USER_PATH"] = str(folder)
    return llm.get_model("served")


@case("llm", "chat")
def llm_prompt(url: str) -> None:
    """An answer."""
    check(_llm(url).prompt("Name a fruit.", max_tokens=16, stream=False).text())


@case("llm", "stream")
def llm_stream(url: str) -> None:
    """A stream, within a conversation."""
    conversation = _llm(url).conversation()
    check(conversation.prompt("Name a fruit.", max_tokens=16).text())
    check("".join(conversation.prompt("Another.", max_tokens=16)))


@case("llm", "structured")
def llm_schema(url: str) -> None:
    """A schema."""
    check_person(_llm(url).prompt("Invent a person.", schema=SCHEMA, max_tokens=100, stream=False).text())


@case("llm", "tools")
def llm_tools(url: str) -> None:
    """A tool that may be called: its call is read or there is a text."""
    import llm

    tool = llm.Tool(name="get_time", description="The time in a city", input_schema=PARAMETERS)
    answer = _llm(url).prompt("Time in Rome?", tools=[tool], max_tokens=64, stream=False)
    check(answer.tool_calls() or answer.text())


# --- langchain-openai


def _langchain(url: str) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, max_tokens=100)  # type: ignore


@case("langchain-openai", "chat")
def invoke(url: str) -> None:
    """A chat, with a name in a message."""
    check(_langchain(url).invoke([("system", "Be brief."), ("user", "Hi!")]).content)


@case("langchain-openai", "stream")
def langchain_stream(url: str) -> None:
    """A stream."""
    check("".join(chunk.content for chunk in _langchain(url).stream("Hi!")))


@case("langchain-openai", "tools")
def bind_tools(url: str) -> None:
    """A call that is required."""
    check(_langchain(url).bind_tools([TOOL], tool_choice="required").invoke("Time?").tool_calls)


@case("langchain-openai", "structured")
def structured_output(url: str) -> None:
    """A schema as a response format, and as a call."""
    for method in ("json_schema", "function_calling"):
        schema = {**SCHEMA, "title": "person", "description": "A person"}
        model = _langchain(url).with_structured_output(schema, method=method)
        check(set(model.invoke("Invent a person.")) == {"name", "age"}, method)


@case("langchain-openai")
def json_mode(url: str) -> None:
    """JSON whose keys are in the question alone, as in LangChain's documentation."""
    model = _langchain(url).with_structured_output(None, method="json_mode")
    question = "Answer the following question. Make sure to return a JSON blob with keys 'answer' and "
    question += "'justification'.\n\nWhat's heavier a pound of bricks or a pound of feathers?"
    answer = model.invoke(question)
    check(set(answer) == {"answer", "justification"}, answer)


@case("langchain-openai", "embeddings")
def langchain_embeddings(url: str) -> None:
    """Vectors of texts: without check_embedding_ctx_length=False it sends ids of OpenAI's tokenizer."""
    from langchain_openai import OpenAIEmbeddings

    client = OpenAIEmbeddings(
        base_url=f"{url}/v1",
        api_key="none",  # type: ignore[arg-type]
        model=MODEL,
        check_embedding_ctx_length=False,
    )
    check(len(client.embed_documents(["a", "b"])) == 2)


@case("langchain-openai")
def batch(url: str) -> None:
    """Several at a time."""
    check(len(_langchain(url).batch(["a", "b", "c"])) == 3)


# --- instructor


def _instructor(url: str, mode: str) -> None:
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(max_length=20)
        age: int = Field(le=99)

    client = instructor.from_openai(
        OpenAI(base_url=f"{url}/v1", api_key="none"), mode=getattr(instructor.Mode, mode)
    )
    person = client.chat.completions.create(
        model=MODEL, response_model=Person, messages=QUESTION, max_tokens=200, max_retries=1, temperature=0
    )
    check(isinstance(person.name, str), person)


@case("instructor", "tools")
def mode_tools(url: str) -> None:
    """A call that fills the class."""
    _instructor(url, "TOOLS")


@case("instructor", "structured")
def mode_json_schema(url: str) -> None:
    """A schema that is enforced."""
    _instructor(url, "JSON_SCHEMA")


@case("instructor", "chat")
def instructor_chat(url: str) -> None:
    """A text, without a class."""
    import instructor
    from openai import OpenAI

    client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none"))
    answer = client.chat.completions.create(
        model=MODEL, response_model=None, messages=QUESTION, max_tokens=16, temperature=0
    )
    check(answer.choices[0].message.content, answer)


@case("instructor", "stream")
def instructor_partial(url: str) -> None:
    """Objects that grow while the answer is written."""
    import instructor
    from openai import OpenAI

    client = instructor.from_openai(
        OpenAI(base_url=f"{url}/v1", api_key="none"), mode=instructor.Mode.JSON_SCHEMA
    )
    *_, person = client.chat.completions.create_partial(
        model=MODEL, response_model=_person_class(), messages=QUESTION, max_tokens=200, temperature=0
    )
    check(isinstance(person.name, str), person)


# --- pydantic-ai


def _agent(url: str, **options: Any) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    settings = {"max_tokens": 200, "temperature": 0.0}
    return Agent(model, model_settings=settings, retries=1, **options)  # type: ignore


def _person_class() -> Any:
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(max_length=20)
        age: int = Field(le=99)

    return Person


@case("pydantic-ai-slim", "chat")
def text(url: str) -> None:
    """A text."""
    check(_agent(url).run_sync("Hi!").output)


@case("pydantic-ai-slim", "stream")
def text_stream(url: str) -> None:
    """A stream."""

    async def run() -> str:
        async with _agent(url).run_stream("Hi!") as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    check(asyncio.run(run()))


@case("pydantic-ai-slim", "structured")
def native_output(url: str) -> None:
    """A class as a response format."""
    from pydantic_ai import NativeOutput

    check(_agent(url, output_type=NativeOutput(_person_class())).run_sync("Invent a person.").output.name)


@case("pydantic-ai-slim", "tools")
def tool_output(url: str) -> None:
    """A class as a call that is required."""
    from pydantic_ai import ToolOutput

    check(_agent(url, output_type=ToolOutput(_person_class())).run_sync("Invent a person.").output.name)


# --- lm-eval

_DOCUMENTS: dict[str, list[dict[str, Any]]] = {
    "choices": [
        {"q": "The capital of France is", "choices": [" Paris.", " a banana.", " seven."], "gold": 0},
        {"q": "Two plus two is", "choices": [" purple.", " four.", " a river."], "gold": 1},
        {"q": "Fish live in the", "choices": [" water.", " moon.", " books."], "gold": 0},
        {"q": "At night the sky is", "choices": [" edible.", " dark.", " a spoon."], "gold": 1},
    ],
    "texts": [
        {"page": "It was a bright cold day in April, and the clocks were striking thirteen."},
        {"page": "The sea was calm and the ship sailed slowly to the north."},
    ],
}


def _evaluated(url: str, data: str, **task: Any) -> dict[str, Any]:
    """The results of a task of lm-eval on one of _DOCUMENTS, by its model local-completions."""
    import lm_eval
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "data.jsonl")
        lines = [json.dumps(document) + "\n" for document in _DOCUMENTS[data]]
        file.write_text("".join(lines), encoding="utf-8")
        config = {"task": data, "dataset_path": "json", "test_split": "train", "metadata": {"version": 1.0}}
        config |= {"dataset_kwargs": {"data_files": str(file), "cache_dir": folder}, **task}
        model = LocalCompletionsAPI(
            base_url=f"{url}/v1/completions",
            model=MODEL,
            tokenizer_backend="huggingface",
            tokenizer=os.environ["KUKRI_TOKENIZER_DIR"],
            max_length=512,
        )
        found = lm_eval.simple_evaluate(model, tasks=[config], bootstrap_iters=0)
    results: dict[str, Any] = found["results"][data]
    return results


@case("lm_eval")
def multiple_choice(url: str) -> None:
    """Log-likelihoods of answers, of which the right one is the likeliest."""
    found = _evaluated(
        url,
        "choices",
        output_type="multiple_choice",
        doc_to_text="{{q}}",
        doc_to_choice="{{choices}}",
        doc_to_target="gold",
        target_delimiter="",
        metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    )
    check(found["acc,none"] == 1.0, found)


@case("lm_eval")
def perplexity(url: str) -> None:
    """Log-likelihoods of whole texts."""
    found = _evaluated(
        url,
        "texts",
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{page}}",
        metric_list=[{"metric": "word_perplexity"}],
    )
    check(100 < found["word_perplexity,none"] < 200, found)  # offline: 137.8


def main(by_package: Cases = CASES) -> None:
    """Runs the cases of the packages that the command line names, or all."""
    url, *only = sys.argv[1:]
    for package, cases in by_package.items():
        if only and package not in only:
            continue
        try:
            installed = version(package)
        except PackageNotFoundError:
            installed = "not installed"
        for about, function in cases:
            error = None
            try:
                function(url)
            except Exception as raised:
                text = re.sub(r"headers: \{.*?\}, ", "", " ".join(str(raised).split()))  # as Cohere's has
                error = f"{type(raised).__name__}: {text[:300]}"
            outcome = {"package": package, "version": installed, "about": about, "case": function.__name__}
            print(
                f"\n{json.dumps({**outcome, 'error': error})}", flush=True
            )  # some packages print, and leave a line open


if __name__ == "__main__":
    main()
