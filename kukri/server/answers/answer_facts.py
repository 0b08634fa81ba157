"""Facts of a finished answer and of its settings, in the form of llama.cpp's server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kukri.calls.answer import Answer
from kukri.sampling import SamplingParams
from kukri.server.answers.timings import timings_of
from kukri.server.sampling_fields import FACTS


def answer_facts(
    index: int,
    answer: Answer,
    text: str,
    *,
    prompt: str,
    model: str,
    params: SamplingParams,
    eos_ids: Iterable[int],
) -> dict[str, Any]:
    """The answer `text` to `prompt`; `eos_ids` are those of the model."""
    request = answer.request
    is_length = answer.finish_reason == "length"
    return {
        "index": index,
        "content": text,
        "tokens": request.sequence.tokens[request.n_prompt : request.n_prompt + answer.n_tokens].tolist(),
        "id_slot": -1,
        "stop": True,
        "model": model,
        "tokens_predicted": answer.n_tokens,
        "tokens_evaluated": request.n_prompt,
        "generation_settings": settings_of(params, eos_ids),
        "prompt": prompt,
        "has_new_line": "\n" in text,
        "truncated": is_length and (params.max_tokens is None or answer.n_tokens < params.max_tokens),
        "stop_type": "word" if answer.stop_string is not None else "limit" if is_length else "eos",
        "stopping_word": answer.stop_string or "",
        "tokens_cached": request.sequence.n_prefix_hit,
        "timings": timings_of(request),
    }


def settings_of(params: SamplingParams, eos_ids: Iterable[int] = ()) -> dict[str, Any]:
    """Sampling parameters by llama.cpp's names; a seed of -1 is another one each time.

    The biases are those of tokens; None is minus infinity, as the `eos_ids` have where they are ignored.
    """
    settings = {
        facts.llama_cpp: getattr(params, name) for name, facts in FACTS.items() if facts.llama_cpp is not None
    }
    limit = -1 if params.max_tokens is None else params.max_tokens
    breakers = [one for one in params.dry_sequence_breakers if isinstance(one, str)]  # others are ids by now
    biases: dict[int, float | None] = dict(params.logit_bias or {})
    if params.ignore_eos:
        biases |= dict.fromkeys(eos_ids)
    return settings | {
        "n_predict": limit,
        "max_tokens": limit,
        "seed": -1 if params.seed is None else params.seed,
        "stop": list(params.stop_strings),
        "n_probs": params.logprobs or 0,
        "samplers": ["typ_p" if name == "typical_p" else name for name in params.samplers],
        "dry_sequence_breakers": breakers,
        "logit_bias": [{"bias": bias, "token": token_id} for token_id, bias in biases.items()],
    }
