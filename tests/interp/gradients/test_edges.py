"""Edges between heads and MLPs, against patches of small changes; AtP*, against patches."""

from __future__ import annotations

import numpy as np
import pytest

from kukri import LLM
from kukri.errors import RequestError
from kukri.interp.gradients import attribution_patch, logit_difference, run_with_gradients
from kukri.interp.gradients.atp_star import atp_star
from kukri.interp.gradients.edges import _Pair, edge_attribution_patch, patch_edge, patch_edges
from kukri.interp.hooks.head_inputs import gradient, head_steps, through
from tests.interp.tl_models import session
from tests.tiny_gguf import write_tiny

METRIC = logit_difference([5, 9], [6, 11])
RNG = np.random.default_rng(4)
CLEAN = RNG.integers(3, 250, (2, 8)).tolist()


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = write_tiny(tmp_path_factory.mktemp("edges") / "tiny.gguf")
    with LLM(path, backend="reference", kv_type="f32") as opened:
        yield opened


@pytest.fixture(scope="module")
def corrupted(llm):
    """Texts that differ in a token."""
    texts = [[*ids] for ids in CLEAN]
    texts[0][3], texts[1][5] = 77, 78
    return texts


def test_every_edge_is_a_derivative(llm, corrupted, monkeypatch):
    """A path that passes by the target, a norm without its derivative, heads of another group: by the slope
    of exact patches of a small part of each edge.
    """
    found = edge_attribution_patch(llm, corrupted, CLEAN, METRIC)
    assert found.sources[:7] == ("embed", "a0.h0", "a0.h1", "a0.h2", "a0.h3", "m0", "a1.h0")
    heads = [*(f"a1.h{h}<q>" for h in range(4)), *(f"a1.h{h}<{end}>" for end in "kv" for h in range(2))]
    assert [*found.targets[9:]] == [*heads, "m1", "logits"]
    edges = [("embed", "a0.h1<v>"), ("a0.h1", "m0"), ("a0.h2", "a1.h1<q>"), ("m0", "a1.h1<k>"),
             ("a0.h0", "a1.h0<v>"), ("embed", "m1"), ("a1.h2", "m1"), ("m1", "logits")]  # fmt: skip
    small, sources = 0.02, _Pair.sources
    monkeypatch.setattr(_Pair, "sources", lambda pair: [(name, small * x) for name, x in sources(pair)])
    exact = [one / small for one in patch_edges(llm, corrupted, CLEAN, edges, METRIC)]
    scores = [found.scores[found.targets.index(t), found.sources.index(s)] for s, t in edges]
    np.testing.assert_allclose(scores, exact, rtol=0.05, atol=2e-3 * np.abs(exact).max())
    assert not found.exists[found.targets.index("a0.h0<q>"), 1:].any()
    source, target, score = found.largest(1)[0]
    assert score == found.scores[found.targets.index(target), found.sources.index(source)]


def test_edges_of_the_embeddings_add_up(llm, corrupted):
    """A target that is missing or counted twice: edges of the embeddings add up to their gradient."""
    found = edge_attribution_patch(llm, corrupted, CLEAN, METRIC)
    _, _, grads = run_with_gradients(llm, corrupted, METRIC, ["resid_pre0"])
    change = [llm.run_with_cache(texts, names="resid_pre0")[1]["resid_pre0"] for texts in (CLEAN, corrupted)]
    by_embed = ((change[0] - change[1]) * grads["resid_pre0"]).sum()
    np.testing.assert_allclose(found.scores[:, 0].sum(), by_embed, rtol=1e-4)


def test_steps_between_the_runs(llm, corrupted):
    """Gradients of one end alone: with steps, edges of the embeddings add up to the whole change."""
    found = edge_attribution_patch(llm, corrupted, CLEAN, METRIC, n_steps=24)
    values = [METRIC(llm.run_with_hooks(texts))[0] for texts in (CLEAN, corrupted)]
    np.testing.assert_allclose(found.scores[:, 0].sum(), values[0] - values[1], rtol=0.03)


def test_edges_that_do_not_exist(llm, corrupted):
    """An index error, or an edge that is measured to be nothing."""
    for edge, words in [
        (("a9.h0", "m0"), "the source 'a9.h0' was not found"),
        (("embed", "x"), "the target 'x' was not found"),
        (("embed", "a0.h3<k>"), "no such head"),
        (("embed", "m2"), "the target 'm2' was not found"),
    ]:
        with pytest.raises(RequestError, match=words):
            patch_edge(llm, corrupted, CLEAN, *edge, METRIC)
    with pytest.raises(RequestError, match="'clean_tokens' must be as long as the corrupted texts"):
        edge_attribution_patch(llm, corrupted, [ids[:5] for ids in CLEAN], METRIC)
    with pytest.raises(RequestError, match="n_steps"):
        edge_attribution_patch(llm, corrupted, CLEAN, METRIC, n_steps=0)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nodes_by_what_heads_then_write(llm, corrupted, name):
    """A pattern of both runs' queries, keys of another group, a softmax whose other keys do not give way: by
    the outputs of heads after each patch, times the gradient there.
    """
    found = getattr(atp_star(llm, corrupted, CLEAN, METRIC, grad_drop=False), name)
    assert found.shape == (2, 8, 4 if name == "q" else 2)
    _, before, grads = run_with_gradients(llm, corrupted, METRIC, ["z0", "z1"])
    for layer in range(2):
        clean = llm.run_with_cache(CLEAN, names=f"{name}{layer}")[1][f"{name}{layer}"]
        expected = np.empty_like(found[layer])
        for position, head in np.ndindex(expected.shape):
            after = []

            def patch(value, hook, at=(slice(None), position, head), clean=clean):
                value[at] = clean[at]

            hooks = [
                (f"{name}{layer}", patch),
                (f"z{layer}", lambda value, hook, after=after: after.append(value + 0)),
            ]
            llm.run_with_hooks(corrupted, fwd_hooks=hooks, return_type=None)
            expected[position, head] = abs(((after[0] - before["z", layer]) * grads["z", layer]).sum())
        np.testing.assert_allclose(found[layer], expected, atol=2e-4 * expected.max())


def test_a_dropped_layer_takes_no_gradient(llm, corrupted):
    """GradDrop that leaves the layer in, or counts a node's own layer."""
    plain = atp_star(llm, corrupted, CLEAN, METRIC, grad_drop=False)
    found = atp_star(llm, corrupted, CLEAN, METRIC)
    heads = attribution_patch(llm, corrupted, CLEAN, METRIC, "z", "layer pos head")
    np.testing.assert_allclose(plain.z, abs(heads), atol=1e-5)
    # nothing lies between the last layer and the logits; after the first, what passes by the last is left
    np.testing.assert_allclose(found.z[1], plain.z[1], atol=1e-5)
    np.testing.assert_allclose(found.mlp_out[1], plain.mlp_out[1], atol=1e-5)
    names = ["resid_post1", "mlp_out0"]
    changes = [llm.run_with_cache(texts, names="mlp_out0")[1]["mlp_out0"] for texts in (CLEAN, corrupted)]
    by = run_with_gradients(llm, corrupted, METRIC, names)[2]["resid_post1"]
    expected = abs(((changes[0] - changes[1]) * by).sum(axis=(0, 2)))
    np.testing.assert_allclose(found.mlp_out[0], expected, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "letter"),
    [("phi", "q"), ("falcon_h1", "k"), ("gemma4_text-keys", "v"), ("deepseek_v3", "q")],
)
def test_gradients_of_a_heads_input(name, letter):
    """A norm with a mean, a factor, a norm of values, or a narrow row between two matrices, backwards."""
    own = session(name)
    point = own.point((f"{letter}_input", 1))
    d_head = own.trace.head_width(point.edit_tap)
    shared, of_heads = head_steps(point.steps, d_head, own.trace.widths[point.edit_tap] // d_head)
    steps = [*shared, *of_heads[-1]]
    rng = np.random.default_rng(3)
    x, change = rng.standard_normal((2, 5, own.config.d_model)).astype(np.float32)
    grad = rng.standard_normal((5, d_head)).astype(np.float32)
    after, before = (through(steps, x + np.float32(step) * change) for step in (1e-2, -1e-2))
    slope = ((after - before) * grad).sum(axis=1) / 2e-2
    found = (gradient(steps, x, grad) * change).sum(axis=1)
    np.testing.assert_allclose(found, slope, rtol=1e-2, atol=1e-2 * np.abs(slope).max())
