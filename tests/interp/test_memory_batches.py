"""Batches by the memory that is free: the same numbers from one text, cell or target at a time."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kukri.interp import gradients, memory_batches, patching
from kukri.interp.gradients.atp_star import atp_star
from kukri.interp.gradients.edges import edge_attribution_patch
from kukri.interp.text_runner import TextRunner
from tests.interp.tl_models import session

RNG = np.random.default_rng(3)
CLEAN = RNG.integers(3, 80, (3, 11), np.int32).tolist()
CORRUPTED = [[*text[:4], 60 + i, *text[5:]] for i, text in enumerate(CLEAN)]


@pytest.fixture
def llm():
    return SimpleNamespace(interp=session("llama"))


@pytest.fixture
def little(monkeypatch):
    """A function that leaves no memory for two things at a time."""

    def leave(llm):
        monkeypatch.setattr(llm.interp.texts.backend, "free_bytes", lambda: 1)

    return leave


def metric(logits):
    """Of all texts, so that no text's gradient is known without the others."""
    value = float(logits[:, -1, 7].prod())
    grad = np.zeros_like(logits)
    grad[:, -1, 7] = value / logits[:, -1, 7]
    return value, grad


ESTIMATES = {
    "edges": lambda llm: [edge_attribution_patch(llm, CORRUPTED, CLEAN, metric).scores],
    "steps": lambda llm: [edge_attribution_patch(llm, CORRUPTED, CLEAN, metric, n_steps=2).scores],
    "nodes": lambda llm: vars(atp_star(llm, CORRUPTED, CLEAN, metric)).values(),
    "patches": lambda llm: [gradients.attribution_patch(llm, CORRUPTED, CLEAN, metric, "z", "layer head")],
    "integrated": lambda llm: [gradients.integrated_gradients(llm, CORRUPTED, metric, CLEAN, n_steps=2)],
}


@pytest.mark.parametrize("name", ESTIMATES)
def test_texts_one_at_a_time(llm, little, name, monkeypatch):
    """A metric of one group alone, a gradient or an embedding of another text, a sum of absolute effects."""
    expected, runs = [*ESTIMATES[name](llm)], []
    little(llm)
    run = memory_batches.TextRows.of
    monkeypatch.setattr(memory_batches.TextRows, "of", lambda texts: runs.append(len(texts)) or run(texts))
    for found, want in zip(ESTIMATES[name](llm), expected, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())
    assert set(runs) == {1}


def test_texts_share_groups_while_they_fit(llm, monkeypatch):
    """A text that is lost between groups, groups that ignore lengths."""
    texts = [np.zeros(n, np.int32) for n in (5, 5, 40, 5, 5)]
    size = memory_batches.text_groups

    def with_room_for(n_tokens):
        one = 4 * (3 * sum(llm.interp.trace.widths.values()) + 2 * llm.interp.config.n_vocab)
        monkeypatch.setattr(llm.interp.texts.backend, "free_bytes", lambda: int(n_tokens * one / 0.4))
        return [(group.start, group.stop) for group in size(llm.interp, texts)]

    assert with_room_for(1000) == [(0, 5)]
    assert with_room_for(15) == [(0, 2), (2, 3), (3, 5)]
    assert with_room_for(1) == [(i, i + 1) for i in range(5)]


@pytest.mark.parametrize(("name", "axes"), [("resid_pre", "layer pos"), ("z", "layer head")])
def test_cells_one_at_a_time(llm, little, name, axes, monkeypatch):
    """Pages that are reserved for cells that do not run, or cells that take each other's."""
    _, clean = llm.interp.run_with_cache(CLEAN)
    pages, reserve = [], TextRunner.reserve
    monkeypatch.setattr(
        TextRunner, "reserve", lambda own, n, *more: pages.append(n) or reserve(own, n, *more)
    )

    def swept():
        return patching.sweep(
            llm, CORRUPTED, lambda logits: logits[:, -1, 7].sum(), name, lambda i: clean[name, i], axes
        )

    expected = swept()
    most = max(pages)
    pages.clear()
    little(llm)
    np.testing.assert_array_equal(swept(), expected)
    assert max(pages) == 2 * len(CLEAN) < most
