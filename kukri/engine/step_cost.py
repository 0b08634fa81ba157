"""What a step's prompt tokens cost, and how many of them a step has time for.

The unit is the cost of a token that sees no others. Attention makes a token dearer with each key that it
sees: at a depth of `even_depth` keys it costs as much as all else. Reading the weights costs a step a few
units too, so a step is not cut below what makes that a small part of it: the less so while nobody else is
served, who could wait for it. How long a unit takes is measured.
"""

from __future__ import annotations

from math import inf, sqrt

from kukri.config import ModelConfig

_MANY = 1 << 30
_WEIGHT = 0.3  # weight of the newest measurement
# most that one measurement may exceed those before: a machine that was asleep says nothing
_MOST_GROWTH = 2.0
# a step this much faster than earlier steps counts at once, because first steps wait for weights to be read
# and kernels to be compiled, but nothing makes a step too fast
_LEAST_FALL = 2.0
_WEIGHTS = 16.0  # units that reading the weights costs a step: 4 to 20 were measured
_MIN_UNITS = 16.0  # smallest step that is measured: smaller ones mostly read the weights
_LEAST_UNITS = 128.0  # least units of a step: in smaller ones reading the weights would be too much of it
_SHARED_S = 10.0  # seconds of steps for which another request is expected after one came among others
_ATTENTION_OPS = 4.0  # ops of a matrix product in the time of one op of attention, which is float32


class StepCost:
    """Measures steps, and bounds what the next one computes of prompts to `max_step_s` seconds.

    Results do not depend on it, as none depends on how prompts are cut into steps.
    """

    def __init__(self, even_depth: float = inf, max_step_s: float = inf) -> None:
        """`even_depth` is in tokens."""
        self._even_depth, self._max_step_s = even_depth, max_step_s
        self._unit_s: float | None = None
        self._shared_s = 0.0  # the time of steps to come before which nobody else is expected

    def share(self) -> None:
        """Notes that a request came while others were served."""
        self._shared_s = _SHARED_S

    def limit(self, n_most: int, rest: float, *, has_decodes: bool) -> float:
        """The units of prompts that a step of up to `n_most` of their tokens has time for.

        `rest` are the units of all that is left of them.
        """
        if self._unit_s is None:
            return inf
        if has_decodes or self._shared_s > 0.0:
            least = min(_LEAST_UNITS, float(n_most))
        else:  # a rest no longer than a first step is not cut in two
            least = rest if rest <= self.of(0, n_most) else self.of(0, n_most // 2)
        return max(self._max_step_s / self._unit_s - _WEIGHTS, least)

    def of(self, start: int, n_tokens: int) -> float:
        """The units of a prompt's tokens `start` to `start + n_tokens - 1`."""
        return n_tokens * (1.0 + (start + n_tokens / 2) / self._even_depth)

    def n_within(self, start: int, units: float) -> int:
        """How many of a prompt's tokens from `start` on cost no more: whole panels of 8, if many."""
        if units == inf or self._even_depth == inf:
            return int(min(units, _MANY))
        first = 1.0 + start / self._even_depth
        root = sqrt(first**2 + 2 * max(units, 0.0) / self._even_depth)
        n = int(self._even_depth * (root - first) + 1e-6)  # the result of `of` for n is enough for n
        return n - n % 8 if n > 16 else n

    def observe(self, units: float, elapsed_s: float) -> None:
        """Notes how long a step took whose prompt tokens cost this much."""
        self._shared_s = max(self._shared_s - elapsed_s, 0.0)
        if units < _MIN_UNITS:
            return
        unit_s = max(elapsed_s, 1e-9) / (units + _WEIGHTS)
        self._unit_s = smoothed(self._unit_s, unit_s, _WEIGHT)


def smoothed(before: float | None, measured: float, weight: float, least_fall: float = _LEAST_FALL) -> float:
    """A time with its newest measurement, which has this weight: see the bounds of growth and fall."""
    if before is None or measured < before / least_fall:
        return measured
    return before + weight * (min(measured, _MOST_GROWTH * before) - before)


def even_depth(config: ModelConfig, n_parameters: int) -> float:
    """The keys at which attention takes a token about as long as the rest of the model; inf without any."""
    keys = 0  # numbers of each key and query that whole contexts are attended with
    for layer in config.layers:
        if not (layer.is_recurrent or layer.is_mlp) and layer.window is None:
            keys += config.n_heads * (layer.d_head or config.d_head)
    n_tables = 1 if config.tie_embeddings else 2  # a prompt looks up its tokens, and has one row of logits
    n_products = max(n_parameters - n_tables * config.n_vocab * config.d_model, n_parameters // 4)
    if config.mixture is not None:
        n_products = n_products * config.mixture.n_used // config.mixture.n_experts
    return max(n_products / (2 * keys * _ATTENTION_OPS), 1.0) if keys else inf
