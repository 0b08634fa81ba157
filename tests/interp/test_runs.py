"""Runs with a cache and with hooks: whole texts, batches, edits, errors, and the cache's methods."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from kukri import LLM
from kukri.errors import ContextLengthError, HookError, KukriError, RequestError
from kukri.interp.hooks.hook_names import POS_AXIS
from tests.interp.tl_models import IDS, session
from tests.lazy_imports import lazy_imports
from tests.tiny_gguf import write_tiny

with lazy_imports():
    import torch


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = write_tiny(tmp_path_factory.mktemp("interp") / "tiny.gguf")
    with LLM(path, n_threads=2, max_step_tokens=32) as opened:
        yield opened


def ids(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 80, n).astype(np.int32)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_texts_of_a_batch_are_as_alone(backend):
    """Texts that see each other, padding that is not zero, or a chunk captured without the others."""
    own = session("smollm3", backend)
    texts = [ids(7), ids(200, 1), ids(31, 2)]
    names = ["blocks.2.hook_resid_post", "blocks.1.attn.hook_pattern", "ln_final.hook_scale"]
    logits, cache = own.run_with_cache([text.tolist() for text in texts], names)
    assert logits.shape == (3, 200, 80)
    assert cache.lengths.tolist() == [7, 200, 31]
    for i, text in enumerate(texts):
        alone, own_cache = own.run_with_cache(text, names)
        n = len(text)
        np.testing.assert_array_equal(logits[i, :n], alone[0])
        assert not logits[i, n:].any()
        for name in names:
            want, found = own_cache[name][0], cache.apply_slice_to_batch_dim(i)[name]
            np.testing.assert_array_equal(found, want)
        np.testing.assert_allclose(cache["attn", 1][i, :, :n, :n], own_cache["attn", 1][0], atol=1e-6)
        assert not cache["attn", 1][i, :, n:].any()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("name", "letters"),
    [
        *((name, "qkv") for name in ("smollm3", "qwen3", "phi", "olmo2", "falcon_h1", "gemma4_text-keys")),
        *((name, "q") for name in ("deepseek_v2", "deepseek_v3", "minicpm3", "glm4_moe_lite")),
    ],
)
def test_inputs_of_single_heads(name, letters, backend):
    """An input that another head reads too, one after the norm, a bias, a factor or a later norm that is
    lost.
    """
    own = session(name, backend)
    _, other = own.run_with_cache(
        IDS[:, ::-1], ["blocks.1.hook_resid_pre", *(f"blocks.1.attn.hook_{x}" for x in letters)]
    )
    for x in letters:
        made, head = other[x, 1], other[x, 1].shape[2] - 1

        def patch_input(value, hook):
            value[:, 2:9, head] = other["resid_pre", 1][:, 2:9]  # noqa: B023

        def patch(value, hook):
            value[:, 2:9, head] = made[:, 2:9, head]  # noqa: B023

        _, inputs = own.run_with_cache(IDS, [f"blocks.1.attn.hook_{x}_input", "blocks.1.hook_resid_pre"])
        value = inputs[f"blocks.1.attn.hook_{x}_input"]
        np.testing.assert_array_equal(value[:, :, head], inputs["resid_pre", 1])
        assert value.shape[2] == made.shape[2]
        found = own.run_with_hooks(IDS, [(f"blocks.1.hook_{x}_input", patch_input)])
        expected = own.run_with_hooks(IDS, [(f"blocks.1.attn.hook_{x}", patch)])
        assert not np.array_equal(expected, own.run_with_hooks(IDS))
        np.testing.assert_allclose(found, expected, atol=1e-4 if backend == "reference" else 2e-2)


@pytest.mark.parametrize("name", ["phi", "qwen3"])
def test_one_input_of_a_heads_query_key_and_value(name):
    """A key or value of the input before the edit, or a hook that is called three times."""
    own, calls = session(name), []
    other = own.run_with_cache(IDS[:, ::-1], ["blocks.1.hook_resid_pre"])[1]["resid_pre", 1]

    def patch(value, hook):
        calls.append((hook.name, value.shape))
        value[:, 2:9, 0] = other[:, 2:9]
        value[:, 4, -1] *= 2

    def patch_first(value, hook):  # keys and values have copies of the first heads
        value[:, 2:9, 0] = other[:, 2:9]
        if value.shape[2] == calls[0][1][2]:
            value[:, 4, -1] *= 2

    found = own.run_with_hooks(IDS, [(("attn_in", 1), patch)])
    expected = own.run_with_hooks(IDS, [(f"blocks.1.hook_{x}_input", patch_first) for x in "qkv"])
    np.testing.assert_array_equal(found, expected)
    assert not np.array_equal(found, own.run_with_hooks(IDS))
    n_heads, d_model = own.trace.heads[1].spec.n_heads, own.config.d_model
    assert calls == [("blocks.1.hook_attn_in", (1, IDS.shape[1], n_heads, d_model))]
    cache = own.run_with_cache(IDS, ["blocks.1.attn.hook_attn_in", "resid_pre1"])[1]
    np.testing.assert_array_equal(cache["attn_in", 1][:, :, -1], cache["resid_pre", 1])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_run_may_stop(backend):
    """A stream of another layer, or layers that are computed for nothing."""
    own = session("llama", backend)
    _, cache = own.run_with_cache(IDS)
    for layer, name in [
        (0, "blocks.0.hook_resid_pre"),
        (2, "blocks.2.hook_resid_pre"),
        (-1, "blocks.3.hook_in"),
    ]:
        stream, part = own.run_with_cache(IDS, stop_at_layer=layer)
        np.testing.assert_array_equal(stream, cache[name])
        assert not any(f"blocks.{i}." in key for key in part for i in range(layer % 4, 4))
    stream = own.run_with_hooks(IDS, stop_at_layer=4)
    np.testing.assert_array_equal(stream, cache["blocks.3.hook_resid_post"])
    nothing, part = own.run_with_cache(IDS, lambda name: name.endswith("1.hook_resid_mid"), return_type=None)
    assert nothing is None
    assert list(part) == ["blocks.1.hook_resid_mid"]
    np.testing.assert_array_equal(part["resid_mid", 1], cache["resid_mid", 1])
    assert "blocks.3.hook_resid_post" not in part
    with pytest.raises(KeyError, match="was not captured"):
        part["resid_pre", 3]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_mixture_shows_its_experts(backend):
    """Rows of experts taken for tokens, or names of a plain MLP for them."""
    own = session("qwen3_moe", backend)
    logits, cache = own.run_with_cache([ids(9).tolist(), ids(12, 1).tolist()])
    n_used = cache["blocks.1.mlp.experts.hook_post"].shape[2]
    assert cache["blocks.1.mlp.experts.hook_post"].shape[:2] == (2, 12)
    assert cache["blocks.1.mlp.hook_router_logits"].shape[2] > n_used > 1
    assert "blocks.1.mlp.in.hook_in" not in cache
    indices, scores = cache["blocks.1.mlp.hook_expert_indices"], cache["blocks.1.mlp.hook_router_scores"]
    weights = cache["blocks.1.mlp.hook_expert_weights"]
    np.testing.assert_array_equal(np.take_along_axis(weights, indices, -1)[0, :9], scores[0, :9])
    assert (scores[..., :-1] >= scores[..., 1:]).all()

    def silence(value, hook):
        value[:, 3:] = 0

    edited, after = own.run_with_cache(
        [ids(9).tolist(), ids(12, 1).tolist()], fwd_hooks=[("blocks.1.mlp.experts.hook_post", silence)]
    )
    np.testing.assert_array_equal(edited[:, :3], logits[:, :3])
    assert not after["mlp_out", 1][:, 3:].any()


def test_an_encoder_has_no_parts_that_sum_to_its_stream():
    """Parts whose sum was normalized since, taken for what the stream is made of."""
    own = session("bert")
    _, cache = own.run_with_cache(IDS)
    np.testing.assert_array_equal(cache["resid_post", 0], cache["resid_pre", 1])
    np.testing.assert_array_equal(cache["resid_post", 0], cache["blocks.0.ln2.hook_out"])
    for method in (
        cache.decompose_resid,
        cache.stack_head_results,
        cache.stack_neuron_results,
        cache.get_full_resid_decomposition,
    ):
        with pytest.raises(RequestError, match="norms follow each sum"):
            method()


def test_the_loss_is_the_mean_of_the_cross_entropies():
    """A loss that counts the first token, or the row after the last."""
    own = session("llama")
    logits = torch.from_numpy(own.run_with_hooks(IDS))
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], torch.from_numpy(IDS[0, 1:]).long())
    assert own.run_with_hooks(IDS, return_type="loss") == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_patterns_are_edited_head_by_head(backend):
    """A pattern's edit that is lost, reaches another head, or recomputes the heads that were left alone."""
    own = session("qwen3", backend)
    _, before = own.run_with_cache(IDS)

    def look_at_first(x, hook):
        assert (hook.name, hook.layer(), hook.start) == ("blocks.1.attn.hook_pattern", 1, 0)
        x[:, 2] = 0
        x[:, 2, :, 0] = 1

    _, after = own.run_with_cache(IDS, fwd_hooks=[(("pattern", 1), look_at_first)])
    z, v = after["z", 1], before["v", 1]
    for head in (0, 1, 3):
        np.testing.assert_array_equal(z[:, :, head], before["z", 1][:, :, head])
    np.testing.assert_allclose(z[0, :, 2], np.broadcast_to(v[0, 0, 1], z[0, :, 2].shape), atol=2e-3)
    assert np.abs(after["resid_post", 1] - before["resid_post", 1]).max() > 0.01


@pytest.mark.parametrize("name", ["smollm3", "phi"])
@pytest.mark.parametrize(
    "point",
    [
        "hook_embed",
        "blocks.1.attn.hook_z",
        "blocks.2.ln1.hook_normalized",
        "ln_final.hook_out",
        "hook_unembed",
    ],
)
def test_edits_by_what_they_do(name, point):
    """An edit of one name that is another's: each is undone by what must follow from it."""
    own = session(name)
    _, cache = own.run_with_cache(IDS)
    edited = cache[point] * 0
    logits, after = own.run_with_cache(IDS, fwd_hooks=[(point, lambda x, hook: x * 0)])
    w = own.weights
    if point == "hook_unembed":
        np.testing.assert_array_equal(logits, edited)
    elif point == "ln_final.hook_out":
        np.testing.assert_allclose(logits, np.broadcast_to(w.b_U, logits.shape), atol=1e-5)
    elif point == "blocks.2.ln1.hook_normalized":
        bias = own.trace.norms["blocks.2.ln1.hook_normalized"].bias
        q = np.einsum("d,hdk->hk", np.zeros(64) if bias is None else bias.data, w.W_Q[2]) + w.b_Q[2]
        np.testing.assert_allclose(after["q", 2], np.broadcast_to(q, after["q", 2].shape), atol=1e-4)
    elif point == "blocks.1.attn.hook_z":
        np.testing.assert_allclose(after["attn_out", 1], np.broadcast_to(w.b_O[1], (1, 40, 64)), atol=1e-5)
    else:
        np.testing.assert_array_equal(after["resid_pre", 0], edited)


def test_parts_of_the_stream_sum_to_it():
    """A part that is missing, counted twice, or of another layer; directions without the norm's weight."""
    for name in ("smollm3", "phi"):
        own = session(name)
        logits, cache = own.run_with_cache(IDS)
        for layer, stream in ((None, cache["resid_post", 3]), (2, cache["resid_pre", 2])):
            parts, labels = cache.decompose_resid(layer, return_labels=True)
            assert len(parts) == len(labels)
            np.testing.assert_allclose(parts.sum(0), stream, atol=1e-4)
            heads, names = cache.stack_head_results(layer, incl_remainder=True, return_labels=True)
            assert names[5] == "L1H1"
            np.testing.assert_allclose(heads.sum(0), stream, atol=1e-4)
            neurons, names = cache.stack_neuron_results(
                layer, neuron_slice=slice(3, 5), incl_remainder=True, return_labels=True
            )
            assert names[:4] == ["L0N3", "L0N4", "L1N3", "L1N4"]
            np.testing.assert_array_equal(neurons[2], cache.get_neuron_results(1, 3))
            np.testing.assert_allclose(neurons.sum(0), stream, atol=1e-4)
            for expand in (False, True):
                full, names = cache.get_full_resid_decomposition(
                    layer, expand_neurons=expand, return_labels=True
                )
                assert len(full) == len(names)
                np.testing.assert_allclose(full.sum(0), stream, atol=1e-4)
        stacked, labels = cache.accumulated_resid(
            incl_mid="hook_resid_mid" in own.trace.taps, return_labels=True
        )
        np.testing.assert_array_equal(stacked[-1], cache["resid_post", 3])
        assert labels[0] == "0_pre"
        assert labels[-1] == "final_post"
        norm = own.trace.norms["ln_final.hook_normalized"]
        offset = own.weights.b_U + (0 if norm.bias is None else norm.bias.data @ own.weights.W_U)
        attributed = cache.logit_attrs(cache.decompose_resid(pos_slice=-1), np.array([7]), pos_slice=-1).sum(
            0
        )
        assert attributed == pytest.approx(logits[0, -1, 7] - offset[7], abs=1e-4)
        lead = cache.logit_attrs(cache.decompose_resid(), 7, 9).sum(0)
        expected = logits[0, :, 7] - logits[0, :, 9] - offset[7] + offset[9]
        np.testing.assert_allclose(lead[0], expected, atol=2e-4)
        np.testing.assert_allclose(cache.logit_lens()[-1], logits[:, -1], atol=1e-4)
        results = cache["blocks.1.attn.hook_result"].sum(2) + own.weights.b_O[1]
        np.testing.assert_allclose(results, cache["attn_out", 1], atol=1e-4)
        neurons = cache.get_neuron_results(1, pos_slice=-1).sum(-2) + own.weights.b_out[1]
        np.testing.assert_allclose(neurons, cache["mlp_out", 1][:, -1], atol=1e-4)


def test_streams_that_are_no_sum_of_neurons_are_not_split():
    """Neurons whose sum is normalized before it joins the stream, or that only the chosen experts have."""
    for name in ("gemma2", "qwen3_moe"):
        _, cache = session(name).run_with_cache(IDS)
        with pytest.raises(RequestError, match="splitting layer 0 into neurons is not supported"):
            cache.stack_neuron_results()


def test_arrays_are_for_others_too():
    """Arrays that are views of memory which the next run overwrites, or that DLPack refuses."""
    own = session("llama", "cpu")
    _, cache = own.run_with_cache(IDS)
    stream = cache["resid_post", 2]
    kept = stream.copy()
    tensor = torch.from_dlpack(stream)
    own.run_with_cache(IDS[:, ::-1])
    np.testing.assert_array_equal(tensor.numpy(), kept)
    assert cache.remove_batch_dim()["q", 1].shape == (40, 4, 16)


def without_padding(cache, name):
    """The values of each text."""
    form, values = cache.form(name), cache[name]
    for text, n in zip(values if cache.has_batch_dim else [values], cache.lengths):
        axis = POS_AXIS.get(form, 1) - 1
        text = np.moveaxis(text, axis, 0)[:n]
        yield text[..., :n] if form in ("scores", "pattern") else text


@pytest.mark.full(but=["gemma2"])
@pytest.mark.parametrize("name", ["gemma2", "qwen3", "gpt_oss", "qwen3_5_text", "phi"])
def test_a_cache_is_pickled_without_its_model(name):
    """Catches weights and hooks of a whole model in a pickle, values of other names or positions in what
    comes out of it, and a slice that is padded otherwise.
    """
    texts = [ids(n, n) for n in (7, 12, 3)]
    _, cache = session(name).run_with_cache(texts)
    data = pickle.dumps(cache)
    assert b"kukri.interp.cache" in data
    for part in (b"kukri.engine", b"kukri.models", b"kukri.kernels", b"Weights"):
        assert part not in data
    other = pickle.loads(pickle.dumps(pickle.loads(data)))
    assert [*other] == [*cache]
    np.testing.assert_array_equal(other.tokens, cache.tokens)
    for taken in (slice(None), slice(0, 3, 2), 2):
        want, got = (one.apply_slice_to_batch_dim(taken) for one in (cache, other))
        assert want.has_batch_dim == got.has_batch_dim
        assert want.lengths.tolist() == got.lengths.tolist()
        for point in cache:
            assert got[point].dtype == want[point].dtype
            assert got[point].shape == want[point].shape
            for mine, theirs in zip(without_padding(got, point), without_padding(want, point), strict=True):
                # of other texts, with other padding, products and softmaxes round otherwise
                close = {"rtol": 0} if taken == slice(None) else {"rtol": 1e-4, "atol": 1e-5}
                np.testing.assert_allclose(mine, theirs, **close, err_msg=point)
        stacks = [one.accumulated_resid() for one in (want, got)]
        np.testing.assert_array_equal(*stacks)
    assert ("resid_pre", 1) in other
    assert other.form("blocks.0.hook_resid_pre") == "plain"
    with pytest.raises(RequestError, match="this requires the model's weights, which a pickled cache"):
        other.logit_lens()
    for copied in (copy.copy(cache), copy.deepcopy(cache)):
        np.testing.assert_array_equal(copied.logit_lens(), cache.logit_lens())


def test_the_pickle_of_a_cache_has_what_was_asked_for():
    """Catches names that were not asked for, and values that several names have written several times."""
    _, cache = session("llama").run_with_cache(ids(50), names=["q0", "blocks.0.attn.q.hook_out", "pattern1"])
    data = pickle.dumps(cache)
    other = pickle.loads(data)
    n_bytes = cache["q0"].nbytes + cache["pattern1"].nbytes
    assert n_bytes < len(data) < n_bytes + 5000
    np.testing.assert_array_equal(other["q", 0], cache["q", 0])
    assert "k0" not in other


def test_wrong_hooks_are_refused():
    """A hook that never fires, or an error without the name of its hook."""
    own = session("llama")
    with pytest.raises(HookError, match="does not support hooks"):
        own.run_with_hooks(IDS, [("blocks.0.attn.q.hook_in", lambda x, hook: None)])
    with pytest.raises(HookError, match="must be callable"):
        own.run_with_hooks(IDS, [("hook_embed", 3)])
    with pytest.raises(HookError, match="hook on hook_embed raised ZeroDivisionError"):
        own.run_with_hooks(IDS, [("hook_embed", lambda x, hook: 1 / 0)])
    with pytest.raises(HookError, match=r"must return float32 \[1, 40, 4, 16\]"):
        own.run_with_hooks(IDS, [(("z", 0), lambda x, hook: x[0])])
    with pytest.raises(HookError, match="hook on hook_embed raised ValueError"):
        own.run_with_hooks(IDS, [("hook_embed", lambda x, hook: x.resize(3, refcheck=False))])
    with pytest.raises(HookError, match="must be a hook of a layer"):
        own.run_with_hooks(IDS, [("hook_embed", lambda x, hook: hook.layer())])
    for prompt in ([], [[]], [1, 900], [0.5], [[[1]]]):
        with pytest.raises(RequestError):
            own.run_with_hooks(prompt)
    with pytest.raises(ContextLengthError):
        own.run_with_hooks([5] * 300)
    with pytest.raises(RequestError, match="'stop_at_layer' must be from"):
        own.run_with_hooks(IDS, stop_at_layer=9)
    nan = own.run_with_hooks(IDS, [("hook_embed", lambda x, hook: x * np.nan)])
    assert np.isnan(nan).all()
    assert np.isfinite(own.run_with_hooks(IDS)).all()


def test_an_llm_has_them(llm: LLM):
    """A run next to the engine that disturbs it, hooks that stay, a chunked text that is captured in part."""
    text = ids(100, 3).tolist()
    before = llm.generate(text, max_tokens=4, temperature=0).token_ids
    logits, cache = llm.run_with_cache(text, names="resid_post1")
    assert cache["resid_post", 1].shape == (1, 100, 64)
    np.testing.assert_array_equal(logits[0], llm.logits(text))
    llm.add_hook(("resid_post", 1), lambda x, hook: x * 0)
    assert np.abs(llm.run_with_hooks(text)).max() < 1e-4
    llm.reset_hooks()
    np.testing.assert_array_equal(llm.run_with_hooks(text), logits)
    assert llm.generate(text, max_tokens=4, temperature=0).token_ids == before
    assert llm.weights.W_E.shape == (259, 64)

    def calls_back(x, hook):
        llm.logits(text)

    with pytest.raises(HookError, match="a hook or logits processor cannot call the LLM that runs"):
        llm.run_with_hooks(text, fwd_hooks=[("hook_embed", calls_back)])
    llm_closed = LLM(llm.path, n_threads=1)
    llm_closed.close()
    with pytest.raises(KukriError, match="closed"):
        llm_closed.run_with_cache(text)


@pytest.mark.parametrize("name", ["gemma2", "granite", "llama"])
def test_the_logit_lens_ends_with_the_models_logits(name):
    """A cap or a factor that is left out; a tuned lens that moves another layer."""
    own = session(name)
    logits, cache = own.run_with_cache(IDS)
    lens = cache.logit_lens(pos_slice=slice(None))
    np.testing.assert_allclose(lens[-1], logits, atol=1e-4)
    n, d = len(lens), own.config.d_model
    nothing = (np.zeros((d, d), np.float32), np.zeros(d, np.float32))
    np.testing.assert_array_equal(cache.logit_lens(translators=[nothing] * n), cache.logit_lens())
    doubled = cache.logit_lens(
        translators=[(np.eye(d, dtype=np.float32), np.ones(d, np.float32)), *[nothing] * 2]
    )
    changed = np.abs(doubled - cache.logit_lens()).max(axis=(1, 2)) > 1e-4
    assert changed.tolist() == [True] + [False] * (n - 1)
