"""Edges between heads and MLPs: what each adds to the input of each later one, and what that changes.

Edge attribution patching (Syed et al. 2023) estimates the effect of all edges from two runs and one backward
pass; with gradients averaged on the way from one run's embeddings to the other's (EAP-IG, Hanna et al. 2024)
from a few more. `patch_edge` measures one edge exactly.

A source is "embed" (the stream before layer 0), a head "a3.h1" or an MLP "m3"; a target is the input of a
head's query, key or value, "a5.h0<q>", of an MLP, or "logits". Keys and values belong to key-value heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.dataclass import dataclass
from kukri.errors import RequestError, UnsupportedError, brief
from kukri.interp.gradients.attribution import Metric
from kukri.interp.hooks.head_inputs import gradient, head_steps
from kukri.interp.hooks.hook_names import Point, apply_norm
from kukri.interp.hooks.hook_values import Rows
from kukri.interp.hooks.weights import rows as weight_rows
from kukri.interp.memory_batches import graded_runs, text_groups
from kukri.interp.patching import HasInterp
from kukri.interp.session import Session
from kukri.interp.tapes.tape import TextRows
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.models.trace import Norm

_ENDS = ("q", "k", "v")
_NO_TARGET = "the target"
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
    lengths; as many as memory has room for are run together. Raises RequestError, and UnsupportedError for
    models whose heads and MLPs do not add to the stream what they write, one after the other.
    """
    if n_steps < 1:
        raise RequestError.of("n_steps", f"must be at least 1, not {n_steps}")
    session = llm.interp
    corrupted, clean = _checked(session, corrupted_tokens, clean_tokens)
    of_sources = sum(heads.spec.n_heads + 1 for heads in session.trace.heads.values()) + 1
    groups = text_groups(session, corrupted, 4 * of_sources * session.config.d_model)

    @lru_cache(maxsize=1)
    def pair_of(start: int, stop: int) -> _Pair:
        return _Pair(session, corrupted[start:stop], clean[start:stop])

    names: tuple[str, ...] = ()
    ends: list[str] = []
    found: list[FloatArray] = []
    for step in range(n_steps):
        share = np.float32((step + 0.5) / n_steps)

        def given(group: slice, share: np.float32 = share) -> dict[str, FloatArray]:
            return pair_of(group.start, group.stop).embedded(share) if n_steps > 1 else {}

        for run in graded_runs(session, corrupted, metric, groups, session.tape, given):
            run.tape.backward(run.result, run.grad)
            sources = pair_of(run.texts.start, run.texts.stop).sources()
            names = tuple(name for name, _ in sources)
            outputs = np.stack([output.reshape(-1) for _, output in sources])
            for row, (targets, n_before, grads) in enumerate(_targets(session, run.tape)):
                score = grads.reshape(len(grads), -1) @ outputs[:n_before].T / np.float32(n_steps)
                if row == len(found):
                    ends += targets
                    found.append(score)
                else:
                    found[row] += score
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
    corrupted, clean = _checked(session, corrupted_tokens, clean_tokens)
    outputs = dict(_Pair(session, corrupted, clean).sources())
    rows = Rows(np.array([len(ids) for ids in corrupted], np.int32))
    texts = [ids.tolist() for ids in corrupted]
    before = metric(llm.run_with_hooks(texts))[0]
    for source, target in edges:
        if source not in outputs:
            raise RequestError(f"the source {brief(source)} was not found: sources are embed, a0.h0, m0, ...")
        change = rows.padded(outputs[source])
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
            raise RequestError(f"{_NO_TARGET} {brief(target)} was not found: the model has no such head")

        def add_to_head(value: FloatArray, hook: Any) -> None:
            value[:, :, head] += change

        return [(f"blocks.{layer}.attn.hook_{end}_input", add_to_head)]
    match = re.fullmatch(r"m(\d+)", target)
    if match is None or int(match[1]) >= session.config.n_layers:
        raise RequestError(
            f"{_NO_TARGET} {brief(target)} was not found: targets are a0.h0<q>, m0, ..., logits"
        )
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


def _checked(
    session: Session, corrupted_tokens: Any, clean_tokens: Any
) -> tuple[list[IntArray], list[IntArray]]:
    """The corrupted and the clean texts. Raises RequestError and UnsupportedError."""
    corrupted, clean = session.tokens(corrupted_tokens), session.tokens(clean_tokens)
    if [len(ids) for ids in clean] != [len(ids) for ids in corrupted]:
        raise RequestError.of("clean_tokens", "must be as long as the corrupted texts")
    for i in range(session.config.n_layers):
        needed = {f"blocks.{i}.{name}" for name in ("hook_resid_mid", "attn.hook_k", "attn.hook_z")}
        if not needed <= session.points.keys():
            raise UnsupportedError("edges require layers of attention, keys from the stream, and an MLP")
    return corrupted, clean


class _Pair:
    """The differences between a clean and a corrupted run of some texts."""

    def __init__(self, session: Session, corrupted: list[IntArray], clean: list[IntArray]) -> None:
        self.session = session
        blocks = [f"blocks.{i}." for i in range(session.config.n_layers)]
        names = ("hook_resid_pre", "attn.hook_z", "hook_mlp_out", "hook_resid_post")
        taps = [block + name for block in blocks for name in names]
        runs = []
        for texts in (clean, corrupted):
            tape = session.tape()
            tape.run(session.model, TextRows.of(texts))
            runs.append({tap: tape.value(tap) for tap in ("hook_embed", *taps)})
        self._changes = {tap: runs[0][tap] - runs[1][tap] for tap in taps}
        self._ends = runs[1]["hook_embed"], runs[0]["hook_embed"]

    def embedded(self, share: np.float32) -> dict[str, FloatArray]:
        """Return embeddings between the corrupted run's and the clean run's."""
        start, end = self._ends
        return {"hook_embed": start + share * (end - start)}

    def sources(self) -> list[tuple[str, FloatArray]]:
        """Return each source's output in the clean run less its output in the corrupted run, [rows, D]."""
        session = self.session
        found = [("embed", self._changes["blocks.0.hook_resid_pre"])]
        total = found[0][1].copy()
        for i in range(session.config.n_layers):
            matrix = session.trace.matrices[f"blocks.{i}.hook_attn_out"]
            d_head = session.trace.heads[i].spec.d_head
            z = self._changes[f"blocks.{i}.attn.hook_z"].reshape(len(total), -1, d_head)
            weights = weight_rows(matrix).T.reshape(z.shape[1], d_head, -1)
            heads = [z[:, h] @ weights[h] for h in range(z.shape[1])]
            found += [(f"a{i}.h{h}", output) for h, output in enumerate(heads)]
            found.append((f"m{i}", self._changes[f"blocks.{i}.hook_mlp_out"]))
            total += sum(heads) + found[-1][1]
            end = self._changes[f"blocks.{i}.hook_resid_post"]
            if not np.allclose(total, end, atol=1e-3 * max(float(np.abs(end).max()), 1e-6)):
                raise UnsupportedError(
                    f"edges require heads and MLPs that add their output to the stream, which layer {i} "
                    "does not"
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
    """Yield each head's gradient by the stream, [rows, D], given the gradient by its query, key or value."""
    shared, of_heads = head_steps(point.steps, grad.shape[2], grad.shape[1])
    for h, steps in enumerate(of_heads):
        yield gradient([*shared, *steps], stream, grad[:, h])
