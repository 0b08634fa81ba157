"""Text to measure on, cut into windows of tokens, and the logits of a window piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from kukri.dataclass import dataclass
from kukri.errors import ConfigError, UnsupportedError
from kukri.kernels.arrays import FloatArray
from kukri.llm import LLM
from kukri.models import KVCache
from kukri.tokenizer import Tokenizer

STEP_TOKENS = 128  # tokens whose logits are in memory at a time
WINDOW_TOKENS, STRIDE_TOKENS = 512, 256


@dataclass(frozen=True)
class Window:
    """The token ids of one window, and the number of its last tokens that are scored."""

    ids: tuple[int, ...]
    n_scored: int


def prose() -> str:
    """The opening of Jane Austen's Pride and Prejudice (1813), some 1,200 tokens."""
    return (files("kukri.evaluate") / "prose.txt").read_text("utf-8")


def read_text(path: Path | None) -> str:
    """A file's text, or `prose()` for None. Raises ConfigError if it cannot be read as UTF-8."""
    if path is None:
        return prose()
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}") from None


def windows(ids: Sequence[int], bos: Sequence[int], size: int, stride: int) -> list[Window]:
    """Windows of at most `size` tokens, each after `bos`: every token of `ids` but the first is scored once.

    A window begins `stride` tokens after the one before and scores its last `stride` tokens, the first window
    all of its own: so each token has the whole text before it as context, or at least size - stride tokens.
    A stride of `size` scores as much as a window can, all but its first token.
    Raises ConfigError for other strides, and for fewer than 2 tokens.
    """
    room = size - len(bos)
    if not 1 <= stride <= size or size < 2:
        raise ConfigError(f"a stride of {stride} tokens must be at least 1 and at most the window's {size}")
    stride = min(stride, size - 1)
    if len(ids) < 2:
        raise ConfigError(f"the text must have more than {len(ids)} tokens: use a longer one")
    end = min(room, len(ids))
    made = [Window((*bos, *ids[:end]), end - 1)]
    while end < len(ids):
        before, end = end, min(end + stride, len(ids))
        made.append(Window((*bos, *ids[end - room : end]), end - before))
    return made


def text_windows(tokenizer: Tokenizer, text: str, size: int, stride: int) -> list[Window]:
    """The `windows` of a text, after BOS if the model wants it."""
    return windows(tokenizer.encode(text), bos_ids(tokenizer), size, stride)


def bos_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids before a text: BOS, or none if the model uses none."""
    return [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []


def check_language_model(llm: LLM) -> None:
    """Raises UnsupportedError for a model that predicts no tokens."""
    if llm.config.head.kind != "language_model":
        raise UnsupportedError(f"{llm.path} is not supported here: use a language model")


def steps(n_tokens: int) -> Iterator[slice]:
    """Pieces of at most STEP_TOKENS of the tokens whose next one is in the window."""
    return (
        slice(start, min(start + STEP_TOKENS, n_tokens - 1)) for start in range(0, n_tokens - 1, STEP_TOKENS)
    )


def step_logits(llm: LLM, cache: KVCache, ids: Sequence[int]) -> FloatArray:
    """Logits float32 [T, V] of the tokens that follow those in the cache."""
    logits: FloatArray = llm.model.forward(list(ids), cache=cache)[0]
    return logits
