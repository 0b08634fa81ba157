"""Edges between heads and MLPs: what each adds to the input of each later one, and what that changes.

Edge attribution patching (Syed et al. 2023) estimates the effect of all edges from two runs and one backward
pass; with gradients averaged on the way from one run's embeddings to the other's (EAP-IG, Hanna et al. 2024)
from a few more. `patch_edge` measures one edge exactly.

A source is "embed" (the stream before layer 0), a head "a3.h1" or an MLP "m3"; a target is the input of a
head's query, key or value, "a5.h0<q>", of an MLP, or "logits". Keys and values are those of key-value heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.errors import RequestError, UnsupportedError, brief
from kukri.interp.gradients import Metric
from kukri.interp.names import Point, apply_norm, norm_scale, normalized
from kukri.interp.patching import HasInterp
from kukri.interp.session import Session
from kukri.interp.tape import TextRows
from kukri.interp.values import Rows
from kukri.interp.weights import rows as weight_rows
from kukri.kernels.arrays import FloatArray
from kukri.models.trace import Norm

_ENDS = ("q", "k", "v")
_NO_TARGET = "there is no target"
_TARGET = re.compile(r"a(\d+)\.h(\d+)<([qkv])>")


@dataclass(frozen=True, eq=False)
class EdgeScores:
    """Estimated changes of a metric by edges, [targets, sources]; `exists` says which edges there are."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    scores: FloatArray
    exists: npt.NDArray[np.bool_]

    def largest(self, n: int) -> list[tuple[str, str, float]]:
        """(source, target, score) of the n edges with the largest absolute scores."""
        order = np.argsort(-np.abs(np.where(self.exists, self.scores, 0)), axis=None, kind="stable")[:n]
        rows, columns = np.unravel_index(order, self.scores.shape)
        return [
            (self.sources[j], self.targets[i], float(self.scores[i, j]))
            for i, j in zip(rows.tolist(), columns.tolist())
        ]


def edge_attribution_patch(
    llm: HasInterp, corrupted_tokens: Any, clean_tokens: Any, metric: Metric, n_steps: int = 1
) -> EdgeScores:
    """An estimate of what patching what a source writes in the clean run into a target's input in the
    corrupted run changes of the metric, for every edge.

    (clean - corrupted) output of the source times the gradient at the target's input. With `n_steps` over 1
    the gradient is averaged over midpoints between the two runs' embeddings. The texts must have the same
    lengths; the outputs of all sources are in memory. Raises RequestError, and UnsupportedError for models
    whose heads and MLPs do not add to the stream what they write, one after the other.
    """
    if n_steps < 1:
        raise RequestError(f"n_steps must be at least 1, not {n_steps}", param="n_steps")
    pair = _Pair(llm.interp, corrupted_tokens, clean_tokens)
    sources = pair.sources()
    names = tuple(name for name, _ in sources)
    outputs = np.stack([output.reshape(-1) for _, output in sources])
    ends: list[str] = []
    found: list[FloatArray] = []
    for step in range(n_steps):
        tape = pair.gradients(metric, None if n_steps == 1 else (step + 0.5) / n_steps)
        for row, (targets, n_before, grads) in enumerate(_targets(pair.session, tape)):
            score = grads.reshape(len(grads), -1) @ outputs[:n_before].T / np.float32(n_steps)
            if step:
                found[row] += score
            else:
                ends += targets
                found.append(score)
    scores = np.zeros((len(ends), len(names)), np.float32)
    exists = np.zeros(scores.shape, np.bool_)
    row = 0
    for score in found:
        own = slice(row, row + len(score)), slice(score.shape[1])
        scores[own], exists[own] = score, True
        row += len(score)
    return EdgeScores(names, tuple(ends), scores, exists)


def patch_edge(
    llm: Any, corrupted_tokens: Any, clean_tokens: Any, source: str, target: str, metric: Metric
) -> float:
    """The change of the metric by one edge, exactly: the target reads the corrupted run's stream with what
    the source writes in the clean run, and all after it is computed again. Raises RequestError.
    """
    return next(patch_edges(llm, corrupted_tokens, clean_tokens, [(source, target)], metric))


def patch_edges(
    llm: Any, corrupted_tokens: Any, clean_tokens: Any, edges: list[tuple[str, str]], metric: Metric
) -> Iterator[float]:
    """`patch_edge` of each edge, (source, target)."""
    session: Session = llm.interp
    pair = _Pair(session, corrupted_tokens, clean_tokens)
    outputs = dict(pair.sources())
    texts = [ids.tolist() for ids in pair.corrupted]
    before = metric(llm.run_with_hooks(texts))[0]
    for source, target in edges:
        if source not in outputs:
            raise RequestError(f"there is no source {brief(source)}: sources are embed, a0.h0, m0, ...")
        change = pair.rows.padded(outputs[source])
        hooks = _input_hooks(session, target, change)
        yield metric(llm.run_with_hooks(texts, fwd_hooks=hooks))[0] - before


def _input_hooks(session: Session, target: str, change: FloatArray) -> list[tuple[str, Callable[..., Any]]]:
    """Hooks that add a change [batch, pos, D] to what a target reads."""

    def add(value: FloatArray, hook: Any) -> None:
        value += change

    if target == "logits":
        return [(f"blocks.{session.config.n_layers - 1}.hook_resid_post", add)]
    if match := _TARGET.fullmatch(target):
        layer, head, end = int(match[1]), int(match[2]), match[3]
        spec = session.trace.heads[layer].spec if layer < session.config.n_layers else None
        if spec is None or head >= (spec.n_heads if end == "q" else spec.n_kv_heads):
            raise RequestError(f"{_NO_TARGET} {brief(target)}: the model has no such head")

        def add_to_head(value: FloatArray, hook: Any) -> None:
            value[:, :, head] += change

        return [(f"blocks.{layer}.attn.hook_{end}_input", add_to_head)]
    match = re.fullmatch(r"m(\d+)", target)
    if match is None or int(match[1]) >= session.config.n_layers:
        raise RequestError(f"{_NO_TARGET} {brief(target)}: targets are a0.h0<q>, m0, ..., logits")
    norm, kept = _mlp_norm(session, int(match[1])), {}

    def keep(value: FloatArray, hook: Any) -> None:
        kept["stream"] = value.copy()

    def reread(value: FloatArray, hook: Any) -> None:
        read = kept["stream"] + change
        value[...] = read if norm is None else apply_norm(norm, read)

    block = f"blocks.{int(match[1])}"
    return [(f"{block}.hook_resid_mid", keep), (f"{block}.mlp.hook_in", reread)]


def _mlp_norm(session: Session, layer: int) -> Norm | None:
    point = session.points.get(f"blocks.{layer}.ln2.hook_normalized")
    return None if point is None else point.norm


class _Pair:
    """A clean and a corrupted run."""

    def __init__(self, session: Session, corrupted_tokens: Any, clean_tokens: Any) -> None:
        self.session = session
        self.corrupted, clean = session.tokens(corrupted_tokens), session.tokens(clean_tokens)
        lengths = [len(ids) for ids in self.corrupted]
        if [len(ids) for ids in clean] != lengths:
            raise RequestError(
                "the clean and the corrupted texts must have the same lengths", param="clean_tokens"
            )
        for i in range(session.config.n_layers):
            needed = {f"blocks.{i}.{name}" for name in ("hook_resid_mid", "attn.hook_k", "attn.hook_z")}
            if not needed <= session.points.keys():
                raise UnsupportedError(
                    "edges need layers that have attention, its keys made of the stream, and then an MLP"
                )
        self.rows, self._batch = Rows(np.array(lengths, np.int32)), TextRows.of(self.corrupted)
        self._clean, self._before = (self._run(TextRows.of(texts)) for texts in (clean, self.corrupted))

    def _run(self, batch: TextRows, given: dict[str, FloatArray] | None = None) -> Any:
        tape = self.session.tape(given)
        tape.result = tape.run(self.session.model, batch)
        return tape

    def gradients(self, metric: Metric, at: float | None) -> Any:
        """A tape of the corrupted run, or of embeddings on the way to the clean one's, with gradients."""
        tape = self._before
        if at is not None:
            ends = [one.value("hook_embed") for one in (self._before, self._clean)]
            tape = self._run(self._batch, {"hook_embed": ends[0] + np.float32(at) * (ends[1] - ends[0])})
        _, grad = metric(self.rows.padded(tape.values(tape.result)))
        tape.backward(tape.result, self.rows.rows(np.asarray(grad, np.float32)))
        return tape

    def change(self, tap: str) -> FloatArray:
        """The clean value less the corrupted one, [rows, width]."""
        found: FloatArray = self._clean.value(tap) - self._before.value(tap)
        return found

    def sources(self) -> list[tuple[str, FloatArray]]:
        """What each source writes in the clean run less what it writes in the corrupted one, [rows, D]."""
        session = self.session
        found = [("embed", self.change("blocks.0.hook_resid_pre"))]
        total = found[0][1].copy()
        for i in range(session.config.n_layers):
            matrix = session.trace.matrices[f"blocks.{i}.hook_attn_out"]
            d_head = session.trace.heads[i].spec.d_head
            z = self.change(f"blocks.{i}.attn.hook_z").reshape(len(total), -1, d_head)
            weights = weight_rows(matrix).T.reshape(z.shape[1], d_head, -1)
            heads = [z[:, h] @ weights[h] for h in range(z.shape[1])]
            found += [(f"a{i}.h{h}", output) for h, output in enumerate(heads)]
            found.append((f"m{i}", self.change(f"blocks.{i}.hook_mlp_out")))
            total += sum(heads) + found[-1][1]
            end = self.change(f"blocks.{i}.hook_resid_post")
            if not np.allclose(total, end, atol=1e-3 * max(float(np.abs(end).max()), 1e-6)):
                raise UnsupportedError(
                    f"edges need heads and MLPs that add what they write to the stream: layer {i}'s do not"
                )
        return found


def _targets(session: Session, tape: Any) -> Iterator[tuple[list[str], int, FloatArray]]:
    """Targets with the same sources: names, the number of their sources, gradients there [n, rows, D]."""
    n_before = 1
    for i in range(session.config.n_layers):
        stream = tape.value(f"blocks.{i}.hook_resid_pre")
        d_head = session.trace.heads[i].spec.d_head
        for end in _ENDS:
            point = session.point((f"{end}_input", i))
            grad = tape.gradient(f"blocks.{i}.attn.hook_{end}").reshape(len(stream), -1, d_head)
            names = [f"a{i}.h{h}<{end}>" for h in range(grad.shape[1])]
            yield names, n_before, np.stack([*_head_gradients(point, grad, stream)])
        n_before += session.trace.heads[i].spec.n_heads
        after, before = (tape.gradient(f"blocks.{i}.hook_resid_{end}") for end in ("post", "mid"))
        yield [f"m{i}"], n_before, (before - after)[None]
        n_before += 1
    yield ["logits"], n_before, after[None]


def _head_gradients(point: Point, grad: FloatArray, stream: FloatArray) -> Iterator[FloatArray]:
    """The gradient at the stream that each head reads, [rows, D], from that at what it makes of it."""
    assert point.matrix is not None
    weights = weight_rows(point.matrix).reshape(grad.shape[1], grad.shape[2], -1)
    norm = point.norm
    for h, weight in enumerate(weights):
        back = grad[:, h] @ weight
        if norm is not None:
            back = back * norm.weight.data
            if norm.centers:
                back -= back.mean(axis=1, keepdims=True)
            unit = normalized(norm, stream)
            back = (back - unit * (back * unit).mean(axis=1, keepdims=True)) / norm_scale(norm, stream)
        yield back
