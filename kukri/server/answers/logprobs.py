"""Log-probabilities as OpenAI's API writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kukri.calls.choice import PlacedToken
from kukri.sampling import SampledToken
from kukri.tokenizer import Tokenizer


def token_string(tokenizer: Tokenizer, token_id: int, *, as_id: bool = False) -> str:
    r"""A token's text; a control token by name, a piece of a character as `bytes:\\xf0\\x9f`.

    With `as_id` it is `token_id:17`, which no two tokens share.
    """
    if as_id:
        return f"token_id:{token_id}"
    if token_id in tokenizer.special_ids:
        return tokenizer.token_text(token_id)
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Iterable[PlacedToken], *, as_ids: bool = False
) -> list[dict[str, Any]]:
    """The entries of `logprobs.content`."""
    entries = []
    for _, (token_id, logprob, top) in tokens:
        entry = token_entry(tokenizer, token_id, logprob, as_ids)
        entry["top_logprobs"] = [token_entry(tokenizer, i, value, as_ids) for i, value in top or ()]
        entries.append(entry)
    return entries


def token_entry(
    tokenizer: Tokenizer, token_id: int, logprob: float | None, as_ids: bool = False
) -> dict[str, Any]:
    """A token and its log-probability."""
    text = token_string(tokenizer, token_id, as_id=as_ids)
    return {"token": text, "logprob": logprob, "bytes": list(tokenizer.token_bytes(token_id))}


def legacy_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[PlacedToken],
    n_top: int,
    *,
    as_ids: bool = False,
) -> dict[str, Any]:
    """The `logprobs` of /v1/completions for tokens, each with the start of its text.

    A first token of a prompt has no log-probability: null, as OpenAI writes it.
    """
    return {
        "text_offset": [start for start, _ in tokens],
        "token_logprobs": [token.logprob for _, token in tokens],
        "tokens": [token_string(tokenizer, token.id, as_id=as_ids) for _, token in tokens],
        "top_logprobs": [_legacy_top(tokenizer, token, n_top, as_ids) for _, token in tokens],
    }


def _legacy_top(
    tokenizer: Tokenizer, token: SampledToken, n_top: int, as_ids: bool
) -> dict[str, float] | None:
    """The most likely tokens and the chosen one, by text; of tokens with one text the likeliest counts."""
    if token.logprob is None:
        return None
    top: dict[str, float] = {}
    for token_id, logprob in (*(token.top_logprobs or ())[:n_top], (token.id, token.logprob)):
        top.setdefault(token_string(tokenizer, token_id, as_id=as_ids), logprob)
    return top


def vllm_logprobs(
    tokenizer: Tokenizer, tokens: Iterable[SampledToken], n_top: int
) -> list[dict[str, dict[str, Any]]]:
    """The `prompt_logprobs` of vLLM: for each token, it and the most likely ones, by id.

    A token that is not among the most likely has no rank.
    """
    entries = []
    for token_id, logprob, top in tokens:
        ranked: list[tuple[int, float | None, int | None]] = [
            (i, value, rank) for rank, (i, value) in enumerate((top or ())[:n_top], 1)
        ]
        if token_id not in (i for i, _, _ in ranked):
            ranked.append((token_id, logprob, None))
        entries.append(
            {
                str(i): {"logprob": value, "rank": rank, "decoded_token": token_string(tokenizer, i)}
                for i, value, rank in ranked
            }
        )
    return entries
