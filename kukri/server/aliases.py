"""Names that other servers have for fields of chats and texts, and what some of their values mean.

llama.cpp, LM Studio, Ollama and DashScope have them. Only a name whose meaning is certain is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kukri.errors import RequestError
from kukri.kernels.sampling_stages import STAGES
from kukri.sampling.fields import MAX_COUNT


class Alias(NamedTuple):
    """The field that a name stands for; `means` has special values and kukri's, None for an unset field."""

    field: str
    means: Mapping[Any, Any] = {}


Aliases = Mapping[str, Alias]
SAMPLING_ALIASES: Aliases = {"repeat_penalty": Alias("repetition_penalty"), "typ_p": Alias("typical_p")}
_LIMITS = ("n_predict", "num_predict", "max_new_tokens", "max_tokens")
_NO_LIMIT, _WHOLE_CONTEXT = {-1: None, -2: None}, {-1: MAX_COUNT, -2: MAX_COUNT}
CHAT_ALIASES: Aliases = {
    **SAMPLING_ALIASES,
    **dict.fromkeys(_LIMITS, Alias("max_tokens", _NO_LIMIT)),
    "max_completion_tokens": Alias("max_completion_tokens", _NO_LIMIT),
    "n_probs": Alias("top_logprobs", {0: None}),
    "reasoning_budget": Alias("thinking_token_budget", {-1: None}),
    "thinking_budget": Alias("thinking_token_budget"),
}
TEXT_ALIASES: Aliases = {
    **SAMPLING_ALIASES,
    **dict.fromkeys(_LIMITS, Alias("max_tokens", _WHOLE_CONTEXT)),
    "n_probs": Alias("logprobs", {0: None}),
}
# pairs of another server's name and kukri's
NAME_PAIRS = tuple(
    (name, alias.field)
    for table in (CHAT_ALIASES, TEXT_ALIASES)
    for name, alias in table.items()
    if name != alias.field
)

# llama.cpp's letters for samplers, and its own name for one of them
_SAMPLERS = {**{stage.letter: stage.name for stage in STAGES}, "typ_p": "typical_p"}
_NO_SAMPLERS = frozenset({"infill", "i"})  # editors name it; it only makes middles end earlier


def renamed(data: Mapping[str, Any], aliases: Aliases) -> dict[str, Any]:
    """Return a body's fields under kukri's names. Raises RequestError for a field that has two values."""
    found = {name: value for name, value in data.items() if name not in aliases}
    for name in sorted(aliases.keys() & data.keys(), key=lambda name: name != aliases[name].field):
        field, value = aliases[name].field, data[name]
        if isinstance(value, int):
            value = aliases[name].means.get(value, value)
        if value is None:
            continue
        if found.get(field) not in (None, value):
            raise RequestError.of(name, f"cannot be combined with {field!r}: give one")
        found[field] = value
    return found


def sampler_names(given: Any) -> Any:
    """Return the samplers that a list names, or a text by llama.cpp's letters, under kukri's names."""
    if not isinstance(given, str | list):
        return given
    return [
        _SAMPLERS.get(one, one) if isinstance(one, str) else one
        for one in given
        if not (isinstance(one, str) and one in _NO_SAMPLERS)
    ]
