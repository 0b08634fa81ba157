"""Estimates of edges and nodes against exact patches, on indirect objects: `python -m benchmarks.edges`.

Twenty prompts after Wang et al. (2022), "When Mary and John went to the store, John gave a drink to", whose
corrupted twins repeat the other name. Edges and nodes are drawn at random, patched exactly, and ranked by
both. Estimates of nodes are absolute: so are the measurements they are ranked with.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Experiment, Say, Table, model_path, run
from kukri import LLM
from kukri.interp.gradients import logit_difference
from kukri.interp.gradients.atp_star import atp_star
from kukri.interp.gradients.edges import edge_attribution_patch, patch_edges

_NAMES = ("Mary", "John", "Tom", "James", "Anna", "Paul", "Sarah", "David", "Kate", "Mark")
_PLACES = ("store", "park", "school", "office", "garden")
_THINGS = ("drink", "book", "ring", "ball")
_STEPS = 5  # steps of EAP-IG


@dataclass(frozen=True)
class EdgesReport:
    """Spearman's rank correlations with exact patches, and seconds of the estimates of all edges or nodes."""

    model: str
    n_prompts: int
    n_edges: int
    n_sampled: int
    eap: float
    eap_ig: float
    atp_star_q: float
    atp_star_z: float
    eap_s: float
    eap_ig_s: float
    atp_star_s: float
    patch_s: float  # seconds for one edge


def ioi_prompts(llm: LLM, n: int) -> tuple[list[list[int]], list[list[int]], list[int], list[int]]:
    """(clean, corrupted, the tokens of the indirect objects, of the subjects) of prompts of one length."""
    rng = np.random.default_rng(0)
    encode = llm.tokenizer.encode
    names = [name for name in _NAMES if len(encode(f" {name}")) == 1]
    found: tuple[list[list[int]], list[list[int]], list[int], list[int]] = ([], [], [], [])
    while len(found[0]) < n:
        a, b = rng.choice(names, 2, replace=False).tolist()
        place, thing = rng.choice(_PLACES), rng.choice(_THINGS)
        clean, corrupted = (
            encode(f"When {a} and {b} went to the {place}, {who} gave a {thing} to") for who in (b, a)
        )
        if len(clean) == len(corrupted) == len(found[0][0] if found[0] else clean):
            found[0].append(clean)
            found[1].append(corrupted)
            found[2].append(encode(f" {a}")[0])
            found[3].append(encode(f" {b}")[0])
    return found


def rank_correlation(a: Any, b: Any) -> float:
    """Spearman's, without ties."""
    ranks = [np.argsort(np.argsort(one)) for one in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def measure(path: Path, n_threads: int, n_prompts: int, n_sampled: int, say: Say) -> EdgesReport:
    """Estimates all, and patches a sample: in float32, as roundings are larger than what most edges do."""
    with LLM(path, backend="torch", n_threads=n_threads) as llm:
        clean, corrupted, objects, subjects = ioi_prompts(llm, n_prompts)
        metric = logit_difference(objects, subjects)
        spent: list[float] = []

        def timed(call: Any) -> Any:
            started_s = time.perf_counter()
            result = call()
            spent.append(time.perf_counter() - started_s)
            return result

        llm.interp.tape().run(llm.model, _rows(clean[:1]))  # matrices are dequantized
        say("edges")
        eap = timed(lambda: edge_attribution_patch(llm, corrupted, clean, metric))
        say("edges, by steps")
        eap_ig = timed(lambda: edge_attribution_patch(llm, corrupted, clean, metric, n_steps=_STEPS))
        say("nodes")
        nodes = timed(lambda: atp_star(llm, corrupted, clean, metric))
        rng = np.random.default_rng(1)
        there = np.argwhere(eap.exists)
        chosen = there[rng.choice(len(there), n_sampled, replace=False)]
        edges = [(eap.sources[j], eap.targets[i]) for i, j in chosen.tolist()]
        say(f"{n_sampled} edges, exactly")
        exact = timed(lambda: list(patch_edges(llm, corrupted, clean, edges, metric)))
        at = tuple(chosen.T)
        found = [rank_correlation(one.scores[at], exact) for one in (eap, eap_ig)]
        for name in ("q", "z"):
            say(f"nodes {name}, exactly")
            found.append(_nodes(llm, clean, corrupted, metric, name, getattr(nodes, name), n_sampled // 2))
    eap_s, eap_ig_s, atp_star_s, patches_s = spent
    return EdgesReport(
        path.name, n_prompts, len(there), n_sampled, found[0], found[1], found[2], found[3],
        eap_s, eap_ig_s, atp_star_s, patches_s / n_sampled,
    )  # fmt: skip


def _nodes(
    llm: LLM, clean: Any, corrupted: Any, metric: Any, name: str, scores: Any, n_sampled: int
) -> float:
    """The rank correlation of a sample of nodes with exact patches."""
    rng = np.random.default_rng(2)
    before = metric(llm.run_with_hooks(corrupted))[0]
    is_moved = np.argwhere(scores > 0)
    chosen = is_moved[rng.choice(len(is_moved), min(n_sampled, len(is_moved)), replace=False)]
    cache = llm.run_with_cache(clean, names=lambda n: n.endswith(f"attn.hook_{name}"), return_type=None)[1]
    exact = []
    for layer, position, head in chosen.tolist():

        def patch(value: Any, hook: Any, at: Any = (layer, position, head)) -> None:
            value[:, at[1], at[2]] = cache[name, at[0]][:, at[1], at[2]]

        after = metric(llm.run_with_hooks(corrupted, fwd_hooks=[(f"{name}{layer}", patch)]))[0]
        exact.append(abs(after - before))
    return rank_correlation(scores[tuple(chosen.T)], exact)


def _rows(texts: list[list[int]]) -> Any:
    from kukri.interp.tapes.tape import TextRows

    return TextRows.of([np.array(ids, np.int32) for ids in texts])


def main() -> None:
    """Measures and reports."""
    experiment = Experiment("edges", "Rank correlation of estimated and exact patches of edges and nodes.")
    experiment.count("-p", "--prompts", 20, "prompts")
    experiment.count("-n", "--sampled", 120, "edges that are patched exactly")
    given = experiment.parse()
    path = model_path(given.model, 256)
    report = measure(path, given.threads, given.prompts, given.sampled, experiment.say)
    rows = [
        ["EAP", f"{report.eap:.3f}", f"{report.eap_s:.1f}"],
        [f"EAP-IG, {_STEPS} steps", f"{report.eap_ig:.3f}", f"{report.eap_ig_s:.1f}"],
        ["AtP* of queries", f"{report.atp_star_q:.3f}", f"{report.atp_star_s:.1f}"],
        ["AtP* of heads", f"{report.atp_star_z:.3f}", ""],
        ["an exact patch", "", f"{report.patch_s:.2f}"],
    ]
    title = f"{report.n_prompts} prompts, {report.n_sampled} of {report.n_edges} edges"
    experiment.show(report, Table(title, ("", "rank correlation", "seconds"), rows))


if __name__ == "__main__":
    run(main)
