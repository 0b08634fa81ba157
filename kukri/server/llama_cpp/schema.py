"""The bodies of llama.cpp's own API, and the one place where its fields become kukri's."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from kukri.calls.image_prompts import MAX_IMAGES
from kukri.errors import RequestError
from kukri.sampling.fields import MAX_BIAS, MAX_COUNT, MAX_PHRASES
from kukri.server.aliases import Aliases
from kukri.server.body import Body, Refused
from kukri.server.mixed_prompt import Mixed
from kukri.server.sampling_fields import FACTS, with_sampling
from kukri.server.schema import ELSEWHERE, HINTS, MAX_PROMPTS, SAME_FORM, GenerationBody, Sampling
from kukri.tokenizer import Tokenizer

# names of kukri's fields in errors, and llama.cpp's
NAMES = {name: facts.llama_cpp for name, facts in FACTS.items() if facts.llama_cpp not in (None, name)}
_RENAMED = {name: theirs for name, theirs in NAMES.items() if name in SAME_FORM}
_ANY_SEED = 2**32 - 1  # -1 among its seeds of 32 bits: another answer each time


class ImagesText(Body):
    """A prompt as an object: a text, and the images in base64 that stand where it has `<__media__>`."""

    prompt_string: str
    multimodal_data: Annotated[list[str], Field(max_length=MAX_IMAGES)] | None = None


Prompt = str | Mixed | ImagesText


@with_sampling(_RENAMED, "llama_cpp")
class LlamaBody(GenerationBody):
    """The fields that /completion and /infill share."""

    aliases: ClassVar[Aliases] = {}
    refused: ClassVar[Refused] = {
        **{name: reason for name, reason in ELSEWHERE.items() if not name.startswith("t_max_")},
        "skip_special_tokens": ((True,), "special tokens are not shown"),
        "penalize_nl": ((True,), "penalties apply to all tokens"),
        "prompt_logprobs": ((), "use /v1/completions"),
        "return_token_ids": ((False,), "use return_tokens"),
        "return_tokens_as_token_ids": ((False,), "'n_probs' returns each token's id"),
    }
    # answers here have them anyway
    unused: ClassVar[frozenset[str]] = frozenset({"stream_options", "usage", "verbose"})
    ignored: ClassVar[frozenset[str]] = HINTS | {
        *("t_max_predict_ms", "t_max_prompt_ms", "n_discard", "n_prefix", "chat_format"),
        *("speculative.n_max", "speculative.n_min", "speculative.p_min"),
    }
    n_predict: Annotated[int, Field(ge=-2, le=MAX_COUNT)] | None = None  # below 0: to the end of the context
    n_probs: Annotated[int, Field(ge=0, le=20)] | None = None
    n_cmpl: Annotated[int, Field(ge=1, le=128)] | None = None
    n_indent: Annotated[int, Field(ge=0, le=1000)] | None = None  # spaces: a line with fewer ends the answer
    return_tokens: bool | None = None
    parse_special: bool | None = None  # control tokens written in a prompt count, unless false
    response_fields: Annotated[list[str], Field(max_length=64)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_kukri(cls, data: Any) -> Any:
        """Leaves out what asks for nothing in llama.cpp."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        for name in ("seed", "n_predict"):
            if isinstance(data.get(name), int) and data[name] < 0:
                del data[name]
        if data.get("seed") == _ANY_SEED:
            del data["seed"]
        if isinstance(data.get("temperature"), int | float) and data["temperature"] < 0:
            data["temperature"] = 0.0  # the likeliest token
        if isinstance(data.get("logit_bias"), list):
            data["logit_bias"] = _by_token(data["logit_bias"])
        return data

    @property
    def limit(self) -> int | None:
        """Most tokens of the answer; None for what the context holds."""
        return self.n_predict

    def sampling(self, **others: Any) -> dict[str, Any]:
        """The fields of SamplingParams that are set, but the bias, whose texts need a tokenizer."""
        return Sampling.sampling(
            self,
            max_tokens=None
            if self.limit is None
            else max(self.limit, 1),  # for none, one is computed and not shown
            logprobs=self.n_probs or None,
            **{name: getattr(self, theirs) for name, theirs in _RENAMED.items()},
            n=self.n_cmpl or self.n,
            **others,
        )

    def token_bias(self) -> None:
        """Nothing: see `bias`."""

    def bias(self, tokenizer: Tokenizer) -> dict[int, float] | None:
        """The bias by token id; a text gives it to all its tokens. Raises RequestError on too many texts."""
        found: dict[int, float] = {}
        n_texts = 0
        for token, strength in (self.logit_bias or {}).items():
            if token.isdecimal():
                ids = [int(token)]
            elif n_texts < MAX_PHRASES:
                ids, n_texts = tokenizer.encode_inside(token), n_texts + 1
            else:
                raise RequestError.of("logit_bias", f"must have at most {MAX_PHRASES} texts")
            found.update(dict.fromkeys(ids, strength))
        return found or None


def _by_token(pairs: list[Any]) -> dict[str, float]:
    """A bias by token id or text, of pairs; `false` forbids a token. Raises RequestError."""
    found = {}
    for pair in pairs:
        match pair:
            case [int() | str() as token, bool() | int() | float() as value] if value is not True:
                strength = -MAX_BIAS if value is False else value
                found[str(token)] = min(max(strength, -MAX_BIAS), MAX_BIAS)
            case _:
                message = "'logit_bias' must be pairs of a token id or a text, and a number or false"
                raise RequestError(message, param="logit_bias")
    return found


class ImageData(Body):
    """An image in base64, which stands where the prompt has `[img-ID]`."""

    data: str
    id: int


class LlamaCompletionBody(LlamaBody):
    """A request to /completion: `prompt` is a text, token ids with texts between them, or a list of these."""

    prompt: Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_PROMPTS)]
    image_data: Annotated[list[ImageData], Field(max_length=MAX_IMAGES)] | None = None  # older: see prompt

    @model_validator(mode="after")
    def _few_texts(self) -> LlamaCompletionBody:
        parts = (part for prompt in self.prompts if isinstance(prompt, list) for part in prompt)
        if sum(isinstance(part, str) for part in parts) > MAX_PROMPTS:
            message = f"'prompt' must have at most {MAX_PROMPTS} texts among token ids"
            raise RequestError(message, param="prompt")
        return self

    @property
    def prompts(self) -> list[Prompt]:
        """Each prompt; a list of texts is one for each, of texts and token ids a single one."""
        prompt: Any = self.prompt
        if not isinstance(prompt, list):
            return [prompt]
        if any(isinstance(part, int) for part in prompt):
            return [prompt]
        return list(prompt)

    @property
    def is_many(self) -> bool:
        """True if the answer is a list."""
        return len(self.prompts) > 1 or (self.n_cmpl or self.n or 1) > 1


class OtherFile(Body):
    """Another file of the project, as context for the one to be filled in."""

    filename: str
    text: str


class LlamaInfillBody(LlamaBody):
    """A request to /infill: the text between `input_prefix` and `input_suffix`; it begins with `prompt`."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[OtherFile], Field(max_length=256)] | None = None
    prompt: str | None = None
