"""The results of offline generation: whole, as one of several answers, and as the chunks of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from kukri.engine import Timings
from kukri.kernels.arrays import FloatArray
from kukri.sampling import SampledToken

if TYPE_CHECKING:
    from kukri.interp.interventions.request_taps import Readout

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Output:
    """One of the answers to a prompt.

    `token_ids` are all tokens generated, one that ended the answer included; `text` leaves control tokens and
    a stop string out. `finish_reason` is "length", or "stop" for an end of text, a stop id or a stop string,
    and `stop_reason` is the id or the string. `logprobs` has an entry for each token, if requested, and
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

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Output({self.index}, {_summary(self)})"


@dataclass(frozen=True)
class Result:
    """The finished answer to a prompt; with `n` or `best_of` the first of several, all of them in `outputs`.

    The fields up to `logprobs` are those of `outputs[0]`, as `Output` has them. `outputs` are in the order of
    their seeds, or with `best_of` the most probable first. `prompt_logprobs`, if requested, has an entry for
    each token of the prompt, of which the first has no log-probability. `activations` and `readouts` are
    those that interventions capture and read. `messages` are those that a chat with tools has added: calls,
    their results and the answer. `image_tokens` are the tokens of the prompt that each image took.
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

    With `n` answers the pieces of all come in turn: `index` says whose this is, and each has a last chunk
    with its `finish_reason`. `readouts` are of tokens that were computed since the last chunk.
    """

    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    result: Result | None = None
    index: int = 0
    readouts: list[Readout] = field(default_factory=list)

    def __str__(self) -> str:
        return self.text
