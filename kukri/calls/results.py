"""The results of offline generation: whole, as one of several answers, and as the chunks of a stream.

Answers to conversations have parts: reasoning, text and tool calls. A plain prompt's answer is text alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kukri.dataclass import dataclass, field
from kukri.engine import Timings
from kukri.kernels.arrays import FloatArray
from kukri.sampling import SampledToken

if TYPE_CHECKING:
    from kukri.interp.interventions.request_taps import Readout

FinishReason = Literal["stop", "length", "tool_calls"]


class ToolCall(NamedTuple):
    """A call that a model asks for. `arguments` are JSON, broken off if the answer ended within them."""

    id: str
    name: str
    arguments: str

    @property
    def message(self) -> dict[str, Any]:
        """The call as an entry of a message's `tool_calls`, in OpenAI's form."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class Usage(NamedTuple):
    """Tokens that a prompt and its answers took.

    `cached_tokens` of the prompt were found in the cache; `reasoning_tokens` of the answers are reasoning.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int


_NOTHING_USED = Usage(0, 0, 0, 0)


@dataclass(frozen=True)
class Output:
    """One of the answers to a prompt.

    `token_ids` are all tokens generated, one that ended the answer included, and `raw_text` is their text.
    `text` leaves control tokens and a stop string out and, in the answer to a conversation, the `reasoning`
    and the `tool_calls`. `finish_reason` is "length", "tool_calls" for an answer that ended with calls, or
    "stop" for an end of text, a stop id or a stop string, and `stop_reason` is the id or the string.
    `logprobs` has an entry for each token, if requested, and
    `cumulative_logprob` (nats) their sum; it is there for `best_of` too.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: list[SampledToken] | None
    cumulative_logprob: float | None
    timings: Timings
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    raw_text: str = ""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Output({self.index}, {_summary(self)})"


@dataclass(frozen=True)
class Result:
    """The finished answer to a prompt; with `n` or `best_of` the first of several, all of them in `outputs`.

    The fields that `Output` has too come from `outputs[0]`. `outputs` are in the order of
    their seeds, or with `best_of` the most probable first. `prompt_logprobs`, if requested, has an entry for
    each token of the prompt, of which the first has no log-probability. `activations` and `readouts` are
    those that interventions capture and read. `messages` are the messages that a chat has added: the answer,
    and before it calls of tools and their results. `image_tokens` are the tokens of the prompt that each
    image took.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: list[SampledToken] | None
    prompt_token_ids: list[int]
    timings: Timings
    prompt_logprobs: list[SampledToken] | None = None
    outputs: tuple[Output, ...] = ()
    activations: dict[str, FloatArray] | None = None
    readouts: list[Readout] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    image_tokens: list[int] = field(default_factory=list)
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    raw_text: str = ""
    usage: Usage = _NOTHING_USED

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        others = f", {len(self.outputs)} outputs" if len(self.outputs) > 1 else ""
        return f"Result({_summary(self)}{others})"


def _summary(answer: Output | Result) -> str:
    """The text, number of tokens and finish reason, for a repr."""
    return f"{answer.text!r}, {len(answer.token_ids)} tokens, finish_reason={answer.finish_reason!r}"


@dataclass(frozen=True)
class Chunk:
    """The next piece of an answer, and the tokens since the last; the last chunk carries the `result`.

    `text` and `reasoning` have grown by this much; `tool_calls` are the calls that have ended. While a call
    grows, its chunks have `token_ids` alone. With `n` answers the pieces of all come in turn: `index` says
    whose this is, and each has a last chunk with its `finish_reason`. `readouts` are of tokens that were
    computed since the last chunk.
    """

    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    result: Result | None = None
    index: int = 0
    readouts: list[Readout] = field(default_factory=list)
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def usage(self) -> Usage | None:
        """The tokens of the prompt and its answers, once the `result` is there."""
        return None if self.result is None else self.result.usage

    def __str__(self) -> str:
        return self.text
