"""Gradients of a metric by every activation, attribution patching and integrated gradients.

Gradients belong to the model in float32 on its dequantized weights, whatever the backend: see `tapes/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from kukri.errors import RequestError
from kukri.interp.cache import ActivationCache
from kukri.interp.hooks.hook_values import Rows
from kukri.interp.hooks.listening import NamesFilter, usable_points
from kukri.interp.memory_batches import graded_runs, text_groups
from kukri.interp.patching import Axes, HasInterp, check_axes
from kukri.interp.session import Session
from kukri.interp.tapes.tape import TextRows
from kukri.kernels.arrays import FloatArray
from kukri.vision.image import ImagePrompt


class Metric(Protocol):
    """A number of the logits [batch, pos, V], and its gradient by them, of the same shape."""

    def __call__(self, logits: FloatArray) -> tuple[float, FloatArray]:
        """(number, gradient)."""


def logit_difference(right: int | Sequence[int], wrong: int | Sequence[int], pos: int = -1) -> Metric:
    """The mean over texts of the logit of `right` less that of `wrong`, at a position."""

    def metric(logits: FloatArray) -> tuple[float, FloatArray]:
        n, grad = len(logits), np.zeros_like(logits)
        texts = np.arange(n)
        ups, downs = (np.broadcast_to(np.asarray(ids), n) for ids in (right, wrong))
        grad[texts, pos, ups] += np.float32(1 / n)
        grad[texts, pos, downs] -= np.float32(1 / n)
        return float((logits[texts, pos, ups] - logits[texts, pos, downs]).mean()), grad

    return metric


def log_probability(tokens: int | Sequence[int], pos: int = -1) -> Metric:
    """The mean over texts of the log-probability (nats) of a token at a position."""

    def metric(logits: FloatArray) -> tuple[float, FloatArray]:
        n, grad = len(logits), np.zeros_like(logits)
        texts, ids = np.arange(n), np.broadcast_to(np.asarray(tokens), len(logits))
        rows = logits[:, pos] - logits[:, pos].max(axis=-1, keepdims=True)
        shares = np.exp(rows)
        total = shares.sum(axis=-1, keepdims=True)
        grad[:, pos] = -shares / total / n
        grad[texts, pos, ids] += np.float32(1 / n)
        return float((rows[texts, ids] - np.log(total[:, 0])).mean()), grad

    return metric


def by_torch(metric: Callable[[Any], Any]) -> Metric:
    """A metric of torch's tensors, as for TransformerLens, whose gradient torch computes."""

    def found(logits: FloatArray) -> tuple[float, FloatArray]:
        import torch

        tensor = torch.from_numpy(logits.copy()).requires_grad_()
        value = metric(tensor)
        (grad,) = torch.autograd.grad(value, tensor)
        return float(value.detach()), grad.numpy()

    return found


def run_with_gradients(
    llm: HasInterp, prompt: Any, metric: Metric, names: NamesFilter = None
) -> tuple[float, ActivationCache, ActivationCache]:
    """(the metric, the activations, the gradient of the metric by each) of whole texts.

    Both caches have TransformerLens' names and shapes; `names` as in `LLM.run_with_cache`. Names without a
    gradient (scores, patterns, scales and what only they need) are left out; asking for one raises
    RequestError. A prompt with images (`ImagePrompt`) has the gradients of its text, given the encoder's rows
    of its images; `LLM.vision.run_with_gradients` has the encoder's gradients.
    """
    if isinstance(prompt, ImagePrompt):
        from kukri.interp.gradients.image_gradients import text_gradients

        return text_gradients(llm, prompt, metric, names)  # type: ignore[arg-type]
    session = llm.interp
    texts = session.tokens(prompt)
    points = usable_points(session, names)
    taps = {point.tap for point in points if point.tap}
    values: dict[str, list[FloatArray]] = {tap: [] for tap in taps}
    grads: dict[str, list[FloatArray]] = {tap: [] for tap in taps}
    for run in graded_runs(session, texts, metric, text_groups(session, texts), session.tape):
        run.tape.backward(run.result, run.grad)
        for tap in taps:
            values[tap].append(run.tape.value(tap))
            grads[tap].append(run.tape.gradient(tap))
    rows, ids = Rows(np.array([len(ids) for ids in texts], np.int32)), np.concatenate(texts)
    wanted = [point.name for point in points]
    caches = [
        ActivationCache(session.values, {tap: np.concatenate(one[tap]) for tap in taps}, rows, ids, wanted)
        for one in (values, grads)
    ]
    return run.value, caches[0], caches[1]


def attribution_patch(
    llm: HasInterp,
    corrupted_tokens: Any,
    clean_tokens: Any,
    metric: Metric,
    name: str = "resid_pre",
    axes: Axes = "layer pos",
) -> FloatArray:
    """Estimate how the metric changes if each clean activation is patched into the corrupted run.

    (clean - corrupted) times the gradient of the corrupted run, summed: float32 [layer, pos], [layer, head]
    or [layer, pos, head], from two runs and one backward pass in all (Nanda 2023; Syed et al. 2023). `name`
    is short: resid_pre, resid_mid, resid_post, attn_out, mlp_out, z, q, k, v.
    """
    session = llm.interp
    names = [session.point((name, i)).name for i in range(session.config.n_layers)]
    check_axes(session, name, axes)
    _, corrupted, grads = run_with_gradients(llm, corrupted_tokens, metric, names)
    _, clean, _ = run_with_gradients(llm, clean_tokens, metric, names)
    if corrupted.tokens.shape != clean.tokens.shape:
        raise RequestError.of("clean_tokens", "must be as long as the corrupted text")
    found: list[FloatArray] = []
    for full_name in names:
        parts = (clean[full_name] - corrupted[full_name]) * grads[full_name]  # [batch, pos, (head,) width]
        kept = {"layer pos": (0, 2), "layer head": (0, 1, 3), "layer pos head": (0, 3)}[axes]
        found.append(parts.sum(axis=kept))
    return np.stack(found)


def integrated_gradients(
    llm: HasInterp, prompt: Any, metric: Metric, baseline: Any = None, n_steps: int = 32
) -> FloatArray:
    """Each token's share in the metric, float32 [batch, pos]: gradients by its embedding, averaged on the
    straight way from a baseline, times the difference (Sundararajan et al. 2017).

    `baseline` is a prompt of as many tokens, or None for embeddings of zero. The sum is the metric less the
    baseline's metric, up to the error of `n_steps` midpoints.
    """
    if n_steps < 1:
        raise RequestError.of("n_steps", f"must be at least 1, not {n_steps}")
    session = llm.interp
    texts = session.tokens(prompt)
    tap = "hook_embed"
    end = _embedded(session, texts)
    start = np.zeros_like(end)
    if baseline is not None:
        others = session.tokens(baseline)
        if [len(ids) for ids in others] != [len(ids) for ids in texts]:
            raise RequestError.of("baseline", "must have as many tokens as the prompt")
        start = _embedded(session, others)
    lengths = [len(ids) for ids in texts]
    starts = np.cumsum([0, *lengths])
    groups, total = text_groups(session, texts), np.zeros_like(end)
    for i in range(n_steps):
        at = start + (end - start) * np.float32((i + 0.5) / n_steps)

        def given(group: slice, at: FloatArray = at) -> dict[str, FloatArray]:
            return {tap: at[starts[group.start] : starts[group.stop]]}

        for run in graded_runs(session, texts, metric, groups, session.tape, given):
            run.tape.backward(run.result, run.grad)
            total[starts[run.texts.start] : starts[run.texts.stop]] += run.tape.gradient(tap)
    rows = Rows(np.array(lengths, np.int32))
    return rows.padded(((end - start) * total / np.float32(n_steps)).sum(axis=1))


def _embedded(session: Session, texts: list[Any]) -> FloatArray:
    """The embeddings of texts, [rows, D]."""
    parts: list[FloatArray] = []
    for group in text_groups(session, texts):
        tape = session.tape()
        tape.run(session.model, TextRows.of(texts[group]))
        parts.append(tape.value("hook_embed"))
    return np.concatenate(parts)
