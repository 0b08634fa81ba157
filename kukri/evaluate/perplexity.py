"""Perplexity: e to the mean of -log of the probability that a model gives the tokens of a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from kukri.dataclass import dataclass
from kukri.evaluate.divergence import token_nll
from kukri.evaluate.text import Window, check_language_model, step_logits, steps
from kukri.kernels.arrays import DoubleArray
from kukri.llm import LLM


@dataclass(frozen=True)
class Perplexity:
    """`error` is one standard error of `perplexity`, as if tokens were independent; `mean_nll` is in nats."""

    n_tokens: int
    mean_nll: float
    perplexity: float
    error: float


def perplexity(
    llm: LLM, windows: Sequence[Window], on_tokens: Callable[[int], None] = lambda n: None
) -> Perplexity:
    """The Perplexity over the tokens that the windows score. `on_tokens` gets each step's number.

    Raises UnsupportedError for a model that predicts no tokens.
    """
    check_language_model(llm)
    cache = llm.model.new_cache(1, max(len(window.ids) for window in windows))
    found: list[DoubleArray] = []
    for window in windows:
        cache.crop(0)
        nll = []
        for part in steps(len(window.ids)):
            logits = step_logits(llm, cache, window.ids[part])
            nll.append(token_nll(logits, window.ids[part.start + 1 : part.stop + 1]))
            on_tokens(part.stop - part.start)
        found.append(np.concatenate(nll)[-window.n_scored :])
    return from_nll(np.concatenate(found))


def from_nll(nll: DoubleArray) -> Perplexity:
    """The Perplexity of tokens with these -log probabilities."""
    mean = float(nll.mean())
    return Perplexity(len(nll), mean, math.exp(mean), math.exp(mean) * standard_error(nll))


def standard_error(values: DoubleArray) -> float:
    """Standard error of the mean of independent values; 0 for a single one."""
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
