"""The bodies of Ollama's API, and the one place where its options become kukri's.

Options that concern only speed or a device are ignored, as are unknown ones: Ollama takes them too. One that
would change the answer and cannot be honoured is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from kukri.errors import ConfigError, RequestError
from kukri.opening.option_fields import duration_s
from kukri.sampling import Grammar
from kukri.sampling.fields import MAX_COUNT
from kukri.server.body import Body, Refused
from kukri.server.intervention_bodies import Interventions
from kukri.server.preset import Preset
from kukri.server.sampling_fields import FACTS, with_sampling
from kukri.server.schema import Tool

_FOREVER_S = -1.0
MAX_NAME = 200  # characters of a preset's name
NO_FILES = "put the file into the directory of --model-dir"
Streams = Annotated[bool, BeforeValidator(lambda value: True if value is None else value)]

OPTIONS = {name: facts.ollama for name, facts in FACTS.items() if facts.ollama is not None}
# names of kukri's fields in errors, and Ollama's
NAMES = {name: f"options.{option}" for name, option in OPTIONS.items()}
NAMES |= {"reasoning_effort": "think", "prompt": "messages"}


class Lenient(Body):
    """An object whose unknown fields are ignored, as Ollama ignores them."""

    model_config = ConfigDict(extra="ignore", strict=False)


@with_sampling(OPTIONS, "ollama")
class Options(Lenient):
    """Sampling options, and the context that a client counts on; those of loading a model are ignored."""

    place = "options."
    refused: ClassVar[Refused] = {
        "tfs_z": ((1, 1.0), "use 'top_p'"),
        "penalize_newline": ((True,), "penalties apply to all tokens"),
    }
    num_ctx: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_kukri(cls, data: Any) -> Any:
        """Leaves out what asks for nothing: a seed below 0, a limit below 1, empty stop strings."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        for name, least in (("num_predict", 1), ("seed", 0)):
            if isinstance(data.get(name), int | float) and data[name] < least:
                del data[name]
        if isinstance(data.get("stop"), str | list):
            stop = [data["stop"]] if isinstance(data["stop"], str) else data["stop"]
            data["stop"] = [text for text in stop if text != ""] or None
        return data

    def sampling(self) -> dict[str, Any]:
        """The fields of SamplingParams that are set."""
        given = {name: getattr(self, option) for name, option in OPTIONS.items()}
        return {"max_tokens": None, **{name: value for name, value in given.items() if value is not None}}


class OllamaBody(Lenient):
    """A request about a model."""

    model: Annotated[str, Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _old_name(cls, data: Any) -> Any:
        """Takes `name`, which was the field before `model`."""
        if isinstance(data, dict) and "model" not in data and isinstance(data.get("name"), str):
            return {**data, "model": data["name"]}
        return data


class KeepAlive(OllamaBody):
    """A body that says how long its model stays in memory: seconds, or a text such as "5m"."""

    keep_alive: float | str | None = None

    @property
    def keep_alive_s(self) -> float | None:
        """Seconds; negative means forever, None if the body does not say. Raises RequestError."""
        if self.keep_alive is None or self.keep_alive == "":
            return None
        try:
            seconds = duration_s(self.keep_alive, "'keep_alive'")
        except ConfigError as error:
            raise RequestError(str(error), param="keep_alive") from None
        return seconds if seconds >= 0 else _FOREVER_S


class GenerationBody(KeepAlive):
    """The fields that chat and generate share."""

    stream: Streams = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    interventions: Interventions | None = None

    def sampling(self) -> dict[str, Any]:
        """The fields of SamplingParams that are set."""
        logprobs = {"logprobs": self.top_logprobs or 0} if self.logprobs else {}
        return {**(self.options or Options()).sampling(), **logprobs}

    @property
    def max_context(self) -> int | None:
        """Tokens of prompt and answer; None for what the model has."""
        return self.options.num_ctx if self.options is not None else None

    @property
    def grammar(self) -> Grammar | None:
        """The form of the answer."""
        if not self.format:
            return None
        return Grammar.json(self.format if isinstance(self.format, dict) else None, param="format")

    @property
    def effort(self) -> str | None:
        """The reasoning effort; None if the body does not say."""
        if isinstance(self.think, bool):
            return "medium" if self.think else "none"
        return self.think


class CalledFunction(Lenient):
    """A function that was called; its arguments are an object."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaCall(Lenient):
    """A call of an earlier turn."""

    function: CalledFunction


class OllamaMessage(Lenient):
    """A message of a conversation."""

    role: str
    images: list[Any] | None = None
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None  # whose result it is
    name: str | None = None
    tool_call_id: str | None = None


class OllamaChatBody(GenerationBody):
    """A request to /api/chat; without messages it loads the model, or unloads it."""

    messages: list[OllamaMessage] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None


class OllamaGenerateBody(GenerationBody):
    """A request to /api/generate; without a prompt it loads the model, or unloads it."""

    refused: ClassVar[Refused] = {
        "template": (("",), "the model's own template is used"),
        "context": (([],), "send the conversation to /api/chat"),
    }
    prompt: str | None = None
    suffix: str | None = None  # the text after the answer, for models that fill in the middle
    system: str | None = None
    raw: bool | None = None  # the prompt is not a message
    images: list[Any] | None = None


class OllamaEmbedBody(KeepAlive):
    """A request to /api/embed."""

    input: str | Annotated[list[str], Field(max_length=2048)]
    truncate: bool | None = None  # texts that are too long, unless false
    dimensions: Annotated[int, Field(ge=1)] | None = None


class OllamaEmbeddingsBody(KeepAlive):
    """A request to /api/embeddings, the older form."""

    prompt: str | None = None


class OllamaPullBody(OllamaBody):
    """A request to /api/pull."""

    stream: Streams = True


class OllamaCopyBody(Lenient):
    """A request to /api/copy."""

    source: Annotated[str, Field(min_length=1)]
    destination: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


class OllamaCreateBody(OllamaBody):
    """A request to /api/create: a preset of a model that is served."""

    refused: ClassVar[Refused] = {
        "template": (
            ("",),
            "the model's own template is used: `kukri serve --preset FILE` has another",
        ),
        "adapters": (({},), "start `kukri serve --adapter-dir DIR` and use POST /v1/load_lora_adapter"),
        "files": (({},), NO_FILES),
        "quantize": (("",), "run `kukri quantize MODEL FILE.gguf TYPE`, and serve the file with --model-dir"),
    }
    model: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    from_: Annotated[str, Field(min_length=1)] = Field(alias="from")
    system: str | None = None
    parameters: Options | None = None
    messages: Annotated[list[OllamaMessage], Field(max_length=1000)] | None = None
    stream: Streams = True

    def preset(self) -> Preset:
        """The preset. Raises RequestError for a message that is not a plain text."""
        messages = []
        for i, one in enumerate(self.messages or []):
            if one.role not in ("system", "user", "assistant") or one.content is None or one.images:
                raise RequestError(
                    f"'messages[{i}]' must be a text by the system, the user or the assistant",
                    param="messages",
                )
            messages.append({"role": one.role, "content": one.content})
        options = self.parameters or Options()
        sampling = {name: value for name, value in options.sampling().items() if value is not None}
        name = self.model.removesuffix(":latest")
        return Preset(name, self.system or None, sampling, tuple(messages), max_context=options.num_ctx)


def ollama_error_body(
    message: str, status: int, request_id: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the JSON of an error of Ollama's API."""
    return {"error": message}
