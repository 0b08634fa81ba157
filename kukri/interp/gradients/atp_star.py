"""AtP*: attribution patching without its two blind spots (Kramár et al. 2024).

For queries and keys the new attention pattern is computed, because a gradient fails once the softmax is
saturated. Effects are averaged over backward passes, each of which drops one layer's heads and MLP
(GradDrop), so that effects that cancel each other are seen. Estimates are absolute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kukri.dataclass import dataclass
from kukri.errors import RequestError, UnsupportedError
from kukri.interp.gradients.attribution import Metric
from kukri.interp.hooks.hook_values import Rows
from kukri.interp.memory_batches import graded_runs, text_groups
from kukri.interp.patching import HasInterp
from kukri.interp.session import Session
from kukri.interp.tapes.tape import Tape, TextRows
from kukri.kernels.arrays import FloatArray


@dataclass(frozen=True, eq=False)
class NodeScores:
    """Estimated absolute changes of a metric by patches at one position: q and z [layer, pos, head], k and v
    [layer, pos, key-value head], mlp_out [layer, pos].
    """

    q: FloatArray
    k: FloatArray
    v: FloatArray
    z: FloatArray
    mlp_out: FloatArray


def atp_star(
    llm: HasInterp, corrupted_tokens: Any, clean_tokens: Any, metric: Metric, grad_drop: bool = True
) -> NodeScores:
    """Estimate how the metric changes if a head's queries, keys, values or outputs, or an MLP's output, of
    the clean run is patched into the corrupted run. It takes two runs and a backward pass for each layer;
    without `grad_drop` one backward pass in all. All texts must have one length. Raises RequestError,
    UnsupportedError.
    """
    session = llm.interp
    corrupted, clean = session.tokens(corrupted_tokens), session.tokens(clean_tokens)
    if len({len(ids) for ids in (*corrupted, *clean)}) != 1 or len(corrupted) != len(clean):
        raise RequestError.of("clean_tokens", "must be as long as the corrupted text")
    layers = range(session.config.n_layers)
    if any(f"blocks.{i}.attn.hook_v" not in session.points for i in layers):
        raise UnsupportedError("AtP* requires attention in every layer, with values from the stream")
    dropped: Sequence[int | None] = layers if grad_drop else [None]
    # signed effects of the layers' nodes with each layer dropped, summed over texts
    sums: dict[tuple[int | None, int], list[FloatArray]] = {}
    groups = text_groups(session, corrupted, 4 * sum(session.trace.widths.values()))
    for run in graded_runs(session, corrupted, metric, groups, session.array_tape):
        tape = session.array_tape()
        tape.run(session.model, TextRows.of(clean[run.texts]))
        rows = Rows(np.array([len(ids) for ids in corrupted[run.texts]], np.int32))
        parts = [_Layer(session, rows, tape, run.tape, i) for i in layers]
        for layer in dropped:
            ends = [] if layer is None else [f"blocks.{layer}.hook_{end}_out" for end in ("attn", "mlp")]
            run.tape.backward(run.result, run.grad, ends)
            for i, part in enumerate(parts):
                if i != layer:
                    effects, before = part.effects(), sums.get((layer, i))
                    sums[layer, i] = effects if before is None else [a + b for a, b in zip(before, effects)]
    n = np.float32(max(len(layers) - 1, 1) if grad_drop else 1)
    found = [
        [sum(map(np.abs, nodes)) / n for nodes in zip(*(sums[key] for key in sums if key[1] == i))]
        for i in layers
    ]
    q, k, v, z, mlp_out = (np.stack(each).astype(np.float32) for each in zip(*found))
    return NodeScores(q, k, v, z, mlp_out)


class _Layer:
    """A layer's nodes in both runs."""

    def __init__(self, session: Session, rows: Rows, clean: Tape, corrupted: Tape, layer: int) -> None:
        self._rows, self._tape, self._block = rows, corrupted, f"blocks.{layer}."
        self._spec = session.trace.heads[layer].spec
        point = session.point(("attn_scores", layer))
        q_tap, k_tap = point.needs
        new, old = ({tap: tape.value(tap) for tap in (q_tap, k_tap)} for tape in (clean, corrupted))
        scores = session.values.scores(point, old, rows)
        self._pattern = session.values.pattern(point, scores)  # [B, H, T, T]
        by_q = session.values.scores(point, {q_tap: new[q_tap], k_tap: old[k_tap]}, rows)
        by_k = session.values.scores(point, {q_tap: old[q_tap], k_tap: new[k_tap]}, rows)
        self._by_q = session.values.pattern(point, by_q) - self._pattern
        seen = np.isfinite(scores)
        rise = np.zeros_like(scores)
        rise[seen] = by_k[seen] - scores[seen]
        grown = self._pattern * np.exp(np.clip(rise, -80, 80))  # for one key; the others are unchanged
        self._left, self._grown = 1 - self._pattern + grown, grown
        self._changes = {
            name: clean.value(self._block + name) - corrupted.value(self._block + name)
            for name in ("attn.hook_v", "attn.hook_z", "hook_mlp_out")
        }

    def effects(self) -> list[FloatArray]:
        """The effects of q, k, v, z [pos, head] and the MLP [pos], by the gradients that the tape has now."""
        spec, rows = self._spec, self._rows
        z, v = (
            rows.padded(x.reshape(len(x), -1, spec.d_head)).swapaxes(1, 2)  # [B, head, T, K]
            for x in (
                self._tape.gradient(self._block + "attn.hook_z"),
                self._tape.value(self._block + "attn.hook_v"),
            )
        )
        slope = z @ np.repeat(v, spec.group, axis=1).swapaxes(
            -1, -2
        )  # the gradient of the metric by the pattern
        by_q = (self._by_q * slope).sum(axis=(0, 3)).T  # [T, H]
        whole = (self._pattern * slope).sum(axis=3, keepdims=True)
        by_key = (whole - self._pattern * slope + self._grown * slope) / self._left - whole
        by_k = by_key.sum(axis=(0, 2)).reshape(spec.n_kv_heads, spec.group, -1).sum(axis=1).T
        found = [by_q, by_k]
        for name, change in self._changes.items():
            product = rows.padded(change * self._tape.gradient(self._block + name)).sum(axis=0)  # [T, width]
            found.append(
                product.sum(axis=1)
                if name == "hook_mlp_out"
                else product.reshape(len(product), -1, spec.d_head).sum(axis=2)
            )
        return found
