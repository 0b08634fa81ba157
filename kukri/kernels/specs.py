"""The facts of one layer's attention, convolution, state space, delta rule and routing, as ops take them.

Shape letters: T tokens, H query heads, G key/value heads, K head size.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from kukri.dataclass import dataclass
from kukri.kernels.arrays import FloatArray
from kukri.kernels.weight_handles import Vector


@dataclass(frozen=True)
class Routing:
    """The choice of experts for a token: the `n_used` of `n_experts` that have the largest scores.

    A score is a logit's share in the softmax of all, or its sigmoid (`by_sigmoid`). It is the expert's
    weight; if `normalized` a token's weights are divided by their sum. `scales` [E] multiply them after that.

    `bias` [E] is added to scores for the choice alone. Of `n_groups` groups of neighbours only the experts of
    `n_groups_used` are chosen from: those whose `n_best` largest scores, bias included, have the largest sum.

    With a `tolerance` an expert's weight is its share among those not chosen before it, and of these only
    those whose logits are less by at most that fraction of the larger of the two (sparsemixer, Liu et al.
    2024).
    """

    n_experts: int
    n_used: int
    normalized: bool
    scales: Vector | None = None
    by_sigmoid: bool = False
    bias: Vector | None = None
    n_groups: int = 1
    n_groups_used: int = 1
    n_best: int = 2
    tolerance: float = 0.0

    @property
    def chooses_by_logits(self) -> bool:
        """True if scores have the order of logits, and nothing else decides."""
        return self.bias is None and self.n_groups == 1


@dataclass(frozen=True, eq=False)
class KeyRange:
    """Where a layer's keys lie: around `middle`, as far off as `reach`, [G * K] each.

    A cache of few bits keeps (key - middle) / reach, and queries are multiplied by reach. So a score lacks
    the query's product with middle, which is the same for all keys: softmax does not see it.
    """

    middle: Vector
    reach: Vector


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention. `scale` multiplies scores.

    A token sees itself and earlier ones, `window` of them (None: all); if attention is not causal, as many
    later ones too, or with `sees_all_ahead` all later ones. `sinks` [H], if there are any, are scores that
    take their share of each head's softmax and add nothing.

    A layer that `reads` another's keys and values has none of its own, and stores nothing. Of a context whose
    beginning is of another kind, such as sound before its text, keys before `first_key` are not seen, nor
    those from `stop_key` on.

    `distances` [H * 2R], if there are any, are added to scores: of each head the numbers of keys that are R
    tokens before a query to R - 1 after it. Keys further away have the bias at the end of the table.
    """

    layer: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    scale: float
    window: int | None = None
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    is_causal: bool = True
    sinks: Vector | None = None
    reads: int | None = None  # the layer whose keys and values it reads; None: its own
    distances: Vector | None = None
    sees_all_ahead: bool = False
    key_range: KeyRange | None = None  # never with a softcap or sinks, which see all of a score
    first_key: int = 0
    stop_key: int | None = None  # None: no bound

    def __post_init__(self) -> None:
        """Raises ValueError on a range of keys with a softcap or sinks."""
        if self.key_range is not None and not (self.softcap is None and self.sinks is None):
            raise ValueError("a range of keys leaves out a part of scores that softcaps and sinks see")

    def biases(self, ahead: npt.NDArray[Any]) -> FloatArray | None:
        """Return the biases of scores for keys `ahead` tokens after a query, [H, *ahead.shape], or None."""
        if self.distances is None:
            return None
        table = self.distances.data.reshape(self.n_heads, -1)
        reach = table.shape[1] // 2
        found: FloatArray = table[:, ahead.clip(-reach, reach - 1) + reach]
        return found

    @property
    def n_ahead(self) -> int | None:
        """Later tokens that a token sees; None: all."""
        if self.is_causal:
            return 0
        return None if self.window is None or self.sees_all_ahead else self.window - 1

    @property
    def kv_layer(self) -> int:
        """The layer whose keys and values it reads."""
        return self.layer if self.reads is None else self.reads

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.n_heads // self.n_kv_heads


@dataclass(frozen=True, eq=False)
class ConvSpec:
    """A layer's causal convolution of each of C channels, over its last K inputs, the current included.

    `taps` [K * C] has the weights of the oldest input first. Its state is the array "conv" [K - 1, C].

    With `n_after`, texts are whole in a step, and that many of the K inputs come after the current one.
    There is no state then, tokens that nobody sees count as 0, and what is made of them is 0. With `n_lines`,
    the step's sequences are the rows of a grid: `taps` [n_lines * K * C] are lines of taps, the middle one of
    which is for a token's own row, and the others for as many rows before it as after it.
    """

    layer: int
    n_taps: int  # K
    taps: Vector
    bias: Vector | None = None  # [C]
    is_activated: bool = False  # by SiLU
    n_after: int | None = None
    n_lines: int = 1


@dataclass(frozen=True, eq=False)
class ScanSpec:
    """A layer's state space of H heads (Mamba-2: Dao and Gu 2024), whose state is the array "scan" [H, N, P].

    Of each token a step dt = softplus(dt + dt_bias), within `limits`, scales what is added and, times the
    head's negative number in `a`, is the exponent of what is left of the state.
    """

    layer: int
    n_heads: int  # H
    n_groups: int  # groups of heads that share b and c
    d_state: int  # N
    d_head: int  # P
    a: Vector  # [H]
    d: Vector  # [H]: what is added of x itself
    dt_bias: Vector  # [H]
    limits: tuple[float, float] = (0.0, float("inf"))


@dataclass(frozen=True, eq=False)
class DeltaSpec:
    """A layer's gated delta rule of H heads (Yang et al. 2024), whose state is the array "delta" [H, K, P].

    Value head h reads key head h // (H / G), or, if the heads `are_tiled`, h % G.
    """

    layer: int
    n_heads: int  # H, of values
    n_groups: int  # G, heads of keys and queries
    d_state: int  # K
    d_head: int  # P
    a: Vector  # [H], negative
    dt_bias: Vector  # [H]
    are_tiled: bool = False
