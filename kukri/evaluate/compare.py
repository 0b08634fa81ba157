"""Quality loss of one model's weights against another's: the same text through both, window by window.

Both are in memory at once and their logits are compared as they come, so nothing is written anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from kukri.dataclass import dataclass, fields
from kukri.errors import ConfigError
from kukri.evaluate.divergence import Divergence, divergence
from kukri.evaluate.perplexity import Perplexity, from_nll, standard_error
from kukri.evaluate.text import Window, check_language_model, step_logits, steps
from kukri.kernels.arrays import DoubleArray, FloatArray
from kukri.kernels.taps import Hook
from kukri.llm import LLM


@dataclass(frozen=True)
class Comparison:
    """B against A over the tokens that were scored. KL(A || B) in nats, probabilities and errors as shares.

    `delta_p` is B's probability of the token that came less A's. `perplexity_ratio` is B's over A's; its
    error, like `kl_error`, is one standard error of a mean over tokens. `layers` holds for each block the
    root mean square, over tokens, of |B - A| / |A| of the residual stream after it; None if shapes differ.
    """

    n_tokens: int
    kl_mean: float
    kl_error: float
    kl_median: float
    kl_p99: float
    kl_max: float
    same_top: float
    delta_p_mean: float
    delta_p_rms: float
    a: Perplexity
    b: Perplexity
    perplexity_ratio: float
    perplexity_ratio_error: float
    layers: tuple[float, ...] | None


def compare(
    a: LLM, b: LLM, windows: Sequence[Window], on_tokens: Callable[[int], None] = lambda n: None
) -> Comparison:
    """The Comparison of B with A. `on_tokens` is called with each step's number of tokens.

    Raises ConfigError for models with different tokens, UnsupportedError for one that predicts none.
    """
    for llm in (a, b):
        check_language_model(llm)
    check_same_tokens(a, b)
    size = max(len(window.ids) for window in windows)
    caches = a.model.new_cache(1, size), b.model.new_cache(1, size)
    found: list[Divergence] = []
    with ExitStack() as stack:
        residuals = _Residuals(a, b, stack)
        for window in windows:
            parts = []
            for cache in caches:
                cache.crop(0)
            for part in steps(len(window.ids)):
                ids = window.ids[part]
                of_a, of_b = step_logits(a, caches[0], ids), step_logits(b, caches[1], ids)
                parts.append(divergence(of_a, of_b, window.ids[part.start + 1 : part.stop + 1]))
                residuals.add()
                on_tokens(len(ids))
            found.append(_joined(parts, window.n_scored))
        return _summary(_joined(found), residuals.errors())


def check_same_tokens(a: LLM, b: LLM) -> None:
    """Raises ConfigError unless both models' tokens are the same."""
    probe = "The quick brown fox: naïve 1234, 日本\n\tif (x == 1) { return; }"
    if a.tokenizer.n_vocab != b.tokenizer.n_vocab or a.tokenizer.encode(probe) != b.tokenizer.encode(probe):
        raise ConfigError(f"{a.path} cannot be compared with {b.path}: their vocabularies differ")


def _joined(parts: Sequence[Divergence], n_last: int = 0) -> Divergence:
    """Rows one after the other, of which the last `n_last` stay, 0 for all."""
    columns = (
        np.concatenate([getattr(part, f.name) for part in parts])[-n_last:] for f in fields(Divergence)
    )
    return Divergence(*columns)


def _summary(found: Divergence, layers: tuple[float, ...] | None) -> Comparison:
    ratio = found.nll_b - found.nll_a
    return Comparison(
        n_tokens=len(found.kl),
        kl_mean=float(found.kl.mean()),
        kl_error=standard_error(found.kl),
        kl_median=float(np.median(found.kl)),
        kl_p99=float(np.quantile(found.kl, 0.99)),
        kl_max=float(found.kl.max()),
        same_top=float(found.same_top.mean()),
        delta_p_mean=float(found.delta_p.mean()),
        delta_p_rms=float(np.sqrt(np.mean(found.delta_p**2))),
        a=from_nll(found.nll_a),
        b=from_nll(found.nll_b),
        perplexity_ratio=math.exp(ratio.mean()),
        perplexity_ratio_error=math.exp(ratio.mean()) * standard_error(ratio),
        layers=layers,
    )


class _Residuals:
    """Listens to the residual stream after each block of two models while `stack` is open."""

    def __init__(self, a: LLM, b: LLM, stack: ExitStack) -> None:
        shape = (a.config.n_layers, a.config.d_model)
        self._is_comparable = shape == (b.config.n_layers, b.config.d_model)
        self._names = [f"blocks.{layer}.hook_resid_post" for layer in range(shape[0])]
        self._seen: tuple[dict[str, FloatArray], dict[str, FloatArray]] = ({}, {})
        self._squares: DoubleArray = np.zeros(shape[0])
        self._n_tokens = 0
        if self._is_comparable:
            for llm, seen in zip((a, b), self._seen):
                stack.enter_context(llm.hooks(dict.fromkeys(self._names, _keeper(seen))))

    def add(self) -> None:
        """Adds both models' outputs of a step."""
        if not self._is_comparable:
            return
        of_a, of_b = self._seen
        for layer, name in enumerate(self._names):
            error = np.square(of_b[name] - of_a[name], dtype=np.float64).sum(axis=1)
            self._squares[layer] += (error / np.square(of_a[name], dtype=np.float64).sum(axis=1)).sum()
        self._n_tokens += len(of_a[self._names[0]])

    def errors(self) -> tuple[float, ...] | None:
        """Relative errors of each block's output; None if the models have different blocks."""
        if not self._is_comparable:
            return None
        return tuple(np.sqrt(self._squares / self._n_tokens).tolist())


def _keeper(seen: dict[str, FloatArray]) -> Hook:
    def keep(name: str, x: FloatArray) -> None:
        seen[name] = x.copy()

    return keep
