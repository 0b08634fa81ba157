"""Sweeps of patches and ablations, against one run with a hook for each cell; pictures of them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kukri.errors import HookError, RequestError
from kukri.interp import patching, plots
from tests.interp.tl_models import session

RNG = np.random.default_rng(3)
CLEAN = RNG.integers(3, 80, (2, 19), np.int32)
CORRUPT = CLEAN.copy()
CORRUPT[:, 4] = 60
SWEEPS = [
    ("resid_pre", "layer pos"),
    ("resid_mid", "layer pos"),
    ("attn_out", "layer pos"),
    ("mlp_out", "layer pos"),
    ("resid_post", "layer pos"),
    ("z", "layer head"),
    ("k", "layer head"),
    ("pattern", "layer head"),
    ("q", "layer pos head"),
    ("v", "layer pos head"),
]


def metric(logits):
    """A number that depends on the last position of every text."""
    return logits[0, -1, 7] - logits[1, -1, 9]


def everything(logits):
    return float(np.abs(logits).sum())


def cell_by_cell(own, name, axes, values, layer, metric):
    """The same of one layer, a whole run for each cell."""
    point = own.point((name, layer))
    shape = values.shape[1:2] if axes == "layer pos" else values.shape[2:3]
    if axes == "layer head" and name == "pattern":
        shape = values.shape[1:2]
    if axes == "layer pos head":
        shape = values.shape[1:3]
    found = np.empty(shape, np.float32)
    for index in np.ndindex(*shape):

        def hook(value, hook, index=index):
            at = (slice(None), *index)
            if axes == "layer head" and name != "pattern":
                at = (slice(None), slice(None), *index)
            value[at] = values[at]

        found[index] = metric(own.run_with_hooks(CORRUPT, [(point.name, hook)]))
    return found


@pytest.mark.full(only=["reference-* pos", "reference-v-*", "reference-q-layer pos head"])
@pytest.mark.parametrize(("name", "axes"), SWEEPS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_sweep_is_its_cells_one_by_one(name, axes, backend):
    """A cell that sees another's keys, a stream of another layer, a page copied too late, a wrong head."""
    check_sweep("smollm3", name, axes, backend)


@pytest.mark.full(only=["reference-*"])
@pytest.mark.parametrize(("name", "axes"), [SWEEPS[1], SWEEPS[5], *SWEEPS[7:9]])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_sweep_over_latent_attention(name, axes, backend):
    """Heads that are as wide in one place as in another, values that have no tap of their own."""
    check_sweep("deepseek_v2", name, axes, backend)


@pytest.mark.full(only=["v-*-reference", "*layers1-reference"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("name", "axes", "layers"),
    [
        ("resid_pre", "layer pos", (0, 2)),
        ("mixer_out", "layer pos", (0, 2)),
        ("mlp_out", "layer pos", (1, 3)),
        ("z", "layer head", (3,)),
        ("v", "layer pos head", (3,)),
    ],
)
def test_a_sweep_over_recurrent_layers(name, axes, layers, backend):
    """A state that begins at a cell's token, or that cells share; a layer without this activation."""
    check_sweep("qwen3_5_text", name, axes, backend, layers)
    if name == "z":
        llm = SimpleNamespace(interp=session("qwen3_5_text", backend))
        with pytest.raises(HookError, match=r"blocks.0.attn.hook_z"):
            patching.sweep(llm, CORRUPT, metric, name, lambda i: None, axes)


def check_sweep(model, name, axes, backend, layers=(0, 2)):
    own = session(model, backend)
    llm = SimpleNamespace(interp=own)
    _, clean = own.run_with_cache(CLEAN)
    for layer in layers:
        expected = cell_by_cell(own, name, axes, clean[name, layer], layer, metric)
        found = patching.sweep(
            llm, CORRUPT, metric, name, lambda i: clean[name, i], axes, logits="last", layers=[layer]
        )
        # patterns are mixed in another order than the kernel's
        tolerance = 2e-2 if name == "pattern" and backend == "cpu" else 1e-5
        np.testing.assert_allclose(found[0], expected, atol=tolerance)
        assert np.ptp(found) > 1e-3


@pytest.mark.full
def test_all_logits_and_all_layers():
    """Positions before a cell's that are another cell's, or a layer left out."""
    own = session("phi")
    llm = SimpleNamespace(interp=own)
    _, clean = own.run_with_cache(CLEAN)
    found = patching.get_act_patch_resid_pre(llm, CORRUPT, clean, everything)
    assert found.shape == (4, 19)
    expected = cell_by_cell(own, "resid_pre", "layer pos", clean["resid_pre", 3], 3, everything)
    np.testing.assert_allclose(found[3], expected, rtol=1e-5)
    assert patching.get_act_patch_block_every(llm, CORRUPT, clean, metric, logits="last").shape == (3, 4, 19)


@pytest.mark.full
def test_ablations():
    """A mean over one text, a resample that is the same text, zeros in another layer."""
    own = session("qwen3")
    llm = SimpleNamespace(interp=own)
    _, cache = own.run_with_cache(CLEAN)
    for by, value in [
        ("zero", np.zeros_like(cache["z", 1])),
        ("mean", np.broadcast_to(cache["z", 1].mean((0, 1)), cache["z", 1].shape)),
        ("resample", cache["z", 1][::-1]),
    ]:
        found = patching.ablate(llm, CORRUPT, metric, "z", by=by, reference=cache, logits="last")
        np.testing.assert_allclose(
            found[1], cell_by_cell(own, "z", "layer head", value, 1, metric), atol=1e-5
        )


def test_wrong_sweeps_are_refused():
    """A sweep that patches nothing, or another shape than it says."""
    own = session("llama")
    llm = SimpleNamespace(interp=own)
    _, clean = own.run_with_cache(CLEAN[:, :5])
    with pytest.raises(RequestError, match="the same length"):
        patching.get_act_patch_resid_pre(llm, [[5, 6], [5]], clean, metric)
    with pytest.raises(RequestError, match=r"'values' must be of .* tokens, not \[2, 5, 64\]"):
        patching.get_act_patch_resid_pre(llm, CORRUPT, clean, metric)
    with pytest.raises(RequestError, match="cannot be patched by layer head"):
        patching.sweep(llm, CORRUPT, metric, "resid_pre", lambda i: clean["resid_pre", i], "layer head")
    with pytest.raises(RequestError, match="'reference' is required to ablate by"):
        patching.ablate(llm, CORRUPT, metric, "z", by="mean")


@pytest.mark.full
def test_plots_are_written_as_png_svg_and_html(tmp_path):
    """A file that is no picture, a page with a script in a token, a row too few."""
    values = RNG.normal(size=(4, 3)).astype(np.float32)
    labels = ["a", "$x_$", "\n"]
    picture = plots.heat_map(values, tmp_path / "map.png", title="resid_pre", x_labels=labels)
    assert (tmp_path / "map.png").read_bytes()[:8] == picture._repr_png_()[:8] == b"\x89PNG\r\n\x1a\n"
    picture.save(tmp_path / "map.svg")
    assert "<svg" in (tmp_path / "map.svg").read_text()
    with pytest.raises(RequestError, match=r"must be .png or .svg, not map.gif"):
        plots.heat_map(values, tmp_path / "map.gif")
    with pytest.raises(RequestError, match="at most 20,000 cells"):
        plots.heat_map(np.zeros((2, 10_001), np.float32), texts=[[""] * 10_001] * 2)
    timeline = plots.feature_timeline(values, ["a", "b", "c", "d"], names=["1", "2", "3"])
    assert [axes.get_ylabel() for axes in timeline.figure.axes] == ["1", "2", "3"]
    assert [bar.get_height() for bar in timeline.figure.axes[1].patches] == pytest.approx(values[:, 1])
    with pytest.raises(RequestError, match=r"must be .3, feature., not"):
        plots.feature_timeline(values, labels)
    pattern = np.array([[[1, 0], [0.25, 0.75]]], np.float32)
    plots.attention_page(pattern, ["</script><b>", "x"], tmp_path / "page.html", "a < b")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("</script>") == 1
    assert "a &lt; b" in page
    assert plots.attention_text(pattern[0], ["a", "bc"]).splitlines() == [" a ██", "bc ░░▓▓"]
    with pytest.raises(RequestError, match="of 2, not"):
        plots.attention_page(pattern[0], ["a", "b"], tmp_path / "page.html")
    heads = plots.attention_heads(np.repeat(pattern, 5, axis=0), ["a", "b"])
    assert [axes.get_title() for axes in heads.figure.axes] == [f"head {i}" for i in range(5)]
    np.testing.assert_array_equal(heads.figure.axes[4].images[0].get_array(), pattern[0])


def test_the_picture_of_a_lens_is_its_logits():
    """A layer in another's row, a probability of another token, a position of another text."""
    own = session("llama")
    _, cache = own.run_with_cache([CLEAN[0, :5], CORRUPT[0, :7]])
    axes = plots.logit_lens(cache, str, text=1).figure.axes[0]
    shares = np.asarray(axes.images[0].get_array())
    assert [label.get_text() for label in axes.get_yticklabels()] == ["end", "3", "2", "1", "0"]
    assert [label.get_text() for label in axes.get_xticklabels()] == [str(i) for i in CORRUPT[0, :7]]
    logits = cache.logit_lens(pos_slice=slice(None))[::-1, 1]
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(shares, expected[:, :7].max(-1), rtol=1e-4)
    written = [text.get_text() for text in axes.texts]
    assert written == [str(i) for i in logits[:, :7].argmax(-1).ravel()]
