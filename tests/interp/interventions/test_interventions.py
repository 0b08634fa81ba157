"""Interventions: control vectors, edits, captures and readouts that are data, next to other requests."""

from __future__ import annotations

import json
from ctypes import POINTER, c_float

import gguf
import numpy as np
import pytest
import safetensors.numpy

from kukri import LLM
from kukri.errors import ConfigError, FormatError, KukriError, RequestError, UnsupportedError
from kukri.interp import ControlVector, Intervention, Probe, SparseAutoencoder
from kukri.sampling import SamplingParams
from tests.tiny_gguf import write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
D, F = 64, 96
RNG = np.random.default_rng(3)
DIRECTION = RNG.standard_normal(D).astype(np.float32)
PROBE = Probe("blocks.0.hook_resid_post", RNG.standard_normal((2, D)), [0.5, -1], ["yes", "no"])


def sae_files(folder, kind="standard", name="blocks.1.hook_resid_pre", width=D, n=40, **facts):
    """A directory as SAELens writes it, and its arrays."""
    rng = np.random.default_rng(5)
    arrays = {
        "W_enc": rng.standard_normal((width, n)).astype(np.float32),
        "W_dec": rng.standard_normal((n, width)).astype(np.float32),
        "b_dec": rng.standard_normal(width).astype(np.float32),
    }
    biases = {"gated": ["b_gate", "b_mag", "r_mag"], "jumprelu": ["b_enc", "threshold"]}
    for part in biases.get(kind, ["b_enc"]):
        arrays[part] = rng.random(n).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(arrays, folder / "sae_weights.safetensors")
    config = {"architecture": kind, "d_in": width, "d_sae": n, "metadata": {"hook_name": name}, **facts}
    (folder / "cfg.json").write_text(json.dumps(config))
    return arrays


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("steer") / "tiny.gguf")


@pytest.fixture(scope="module", params=["reference", "cpu"])
def llm(request, path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    ControlVector({1: DIRECTION, 0: 2 * DIRECTION}).save(folder / "happy.gguf", "llama")
    sae_files(folder / "sae")
    with LLM(
        path,
        backend=request.param,
        n_threads=2,
        max_step_tokens=24,
        max_requests=8,
        control_vectors={"happy": folder / "happy.gguf", "sad": {1: -DIRECTION}},
        probes={"truth": PROBE},
        saes={"sae": folder / "sae"},
    ) as opened:
        yield opened


def prompt(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, n).tolist()


def hooked(llm, ids, *hooks):
    """The tokens with hooks of Python, which have tests of their own."""
    result, cache = llm.generate_with_hooks(ids, GREEDY, fwd_hooks=list(hooks), names=["resid_post1"])
    return result.token_ids, cache["resid_post1"]


@pytest.mark.parametrize("positions", ["all", "prompt", "last", "generated"])
def test_edits_are_those_of_hooks(llm, positions):
    """An edit of other rows, columns or layers than it says; a strength that is lost."""
    ids = prompt(30, 1)
    spans = {"all": (0, 99), "prompt": (0, 30), "last": (29, 30), "generated": (30, 99)}
    first, stop = spans[positions]

    def hook(change):
        def edit(value, hook):
            at = hook.start + np.arange(value.shape[1])
            rows = (at >= first) & (at < stop)
            value[:, rows] = change(value[:, rows])

        return edit

    unit = DIRECTION / np.linalg.norm(DIRECTION)
    half = DIRECTION[:16]
    half_unit = half / np.linalg.norm(half)

    def project(x):
        return x - (x @ half_unit)[..., None] * half_unit

    def of_head(change, head):
        def edit(x):
            x[..., head, :] = change(x[..., head, :])
            return x

        return edit

    cases = [
        (
            {"op": "add", "name": "resid_post1", "vector": DIRECTION.tolist(), "strength": 3},
            ("resid_post1", lambda x: x + 3 * DIRECTION),
        ),
        ({"op": "scale", "name": "mlp_out0", "strength": 0.25}, ("mlp_out0", lambda x: x * 0.25)),
        (
            {"op": "replace", "name": "resid_mid0", "vector": DIRECTION},
            ("resid_mid0", lambda x: 0 * x + DIRECTION),
        ),
        ({"op": "ablate", "name": "attn_out1"}, ("attn_out1", lambda x: x * 0)),
        (
            {"op": "ablate", "name": "blocks.0.hook_resid_post", "vector": DIRECTION},
            ("resid_post0", lambda x: x - (x @ unit)[..., None] * unit),
        ),
        ({"op": "ablate", "name": "z0", "heads": [2]}, ("z0", of_head(lambda x: x * 0, 2))),
        ({"op": "add", "name": "v1", "heads": [1], "vector": half}, ("v1", of_head(lambda x: x + half, 1))),
        ({"op": "ablate", "name": "q1", "heads": [3], "vector": half}, ("q1", of_head(project, 3))),
    ]
    for given, (name, change) in cases:
        given = {**given, "positions": positions}
        result = llm.generate(ids, GREEDY, interventions=[given, {"op": "capture", "name": "resid_post1"}])
        tokens, stream = hooked(llm, ids, (name, hook(change)))
        assert result.token_ids == tokens, given
        np.testing.assert_allclose(
            result.activations["blocks.1.hook_resid_post"], stream, atol=2e-4, rtol=1e-4, err_msg=str(given)
        )


def test_control_vectors_work_on_their_layers(llm):
    """Directions of another layer, an order that counts, strengths and layers that are ignored."""
    ids = prompt(20, 2)

    def add(vector):
        def edit(value, hook):
            value += vector

        return edit

    both = llm.generate(
        ids, GREEDY, interventions=[{"op": "add", "control_vector": "happy", "strength": 1.5}]
    )
    by_hooks = [("resid_post0", add(3 * DIRECTION)), ("resid_post1", add(1.5 * DIRECTION))]
    assert both.token_ids == hooked(llm, ids, *by_hooks)[0]
    one = llm.generate(
        ids, GREEDY, interventions=[Intervention(op="add", control_vector="happy", layers=[1, 5], strength=4)]
    )
    assert one.token_ids == hooked(llm, ids, ("resid_post1", add(4 * DIRECTION)))[0]
    plain = llm.generate(ids, GREEDY).token_ids
    assert one.token_ids != plain
    none = [{"op": "add", "control_vector": name, "layers": [1, 1]} for name in ("happy", "sad")]
    assert llm.generate(ids, GREEDY, interventions=none).token_ids == plain
    # answers that share a prompt are all steered; a batch is
    many = llm.generate([ids, ids[:9]], GREEDY, n=2, interventions=[{"op": "ablate", "name": "resid_pre1"}])
    assert {tuple(o.token_ids) for r in many for o in r.outputs} == {tuple(many[0].token_ids)}


def test_others_keep_their_tokens_drafts_and_prefixes(llm):
    """A steered request that changes its neighbours, or whose keys become their prefix."""
    prompts = [prompt(30 + i, i) for i in range(6)]
    alone = [llm.generate(ids, GREEDY).token_ids for ids in prompts]
    steer = [{"op": "add", "control_vector": "happy", "strength": 2}]
    capture = [{"op": "capture", "name": "resid_pre1"}, {"op": "read", "probe": "truth"}]
    wanted = [steer, capture, steer + capture, [], [], []]
    llm.engine.pool.forget()
    requests = [llm.engine.maker.make_request(ids, GREEDY) for ids in prompts]
    for request, interventions in zip(requests, wanted):
        if interventions:
            llm.interp.intervene([request], interventions)
        llm.engine.add_request(request)
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    found = [request.output_ids for request in requests]
    assert found[1] == alone[1]
    assert found[3:] == alone[3:]
    assert found[0] != alone[0]
    assert [llm.generate(ids, GREEDY).token_ids for ids in prompts] == alone


def test_captures_and_readouts(llm, monkeypatch):
    """A readout of another token, of a value before the edits, or one that comes twice or never."""
    monkeypatch.setattr(
        "kukri.interp.interventions.read_limiter._FREE_S", 60.0
    )  # a busy machine makes small readings long
    ids = prompt(40, 5)  # two chunks
    steer = {"op": "add", "name": "resid_post0", "vector": DIRECTION}
    read = [
        {"op": "read", "probe": "truth"},
        {"op": "read", "sae": "sae", "top_k": 3, "positions": "generated"},
    ]
    captures = [
        {"op": "capture", "name": "resid_post0"},
        {"op": "capture", "name": "blocks.1.attn.hook_pattern", "positions": "last"},
    ]
    chunks = list(llm.stream(ids, GREEDY, interventions=[steer, *read, *captures]))
    result = chunks[-1].result
    stream = result.activations["blocks.0.hook_resid_post"]
    assert stream.shape == (1, 47, D)
    pattern = result.activations["blocks.1.attn.hook_pattern"]
    assert pattern.shape == (1, 4, 1, 47)
    np.testing.assert_allclose(pattern.sum(-1), 1, rtol=1e-5)
    assert pattern[..., 40:].max() == 0
    readouts = [one for chunk in chunks for one in chunk.readouts]
    assert readouts == result.readouts
    assert len({len(chunk.readouts) for chunk in chunks[1:]}) == 1, "they come with their tokens"
    assert [one.position for one in readouts] == list(range(47))
    assert [one.token_id for one in readouts] == [*ids, *result.token_ids[:-1]]
    expected = stream[0] @ PROBE.weight.T + PROBE.bias
    sae = llm.interp.catalog.saes["sae"]
    features = sae.features(stream[0])  # before layer 1 the stream is that after layer 0
    for one in readouts:
        np.testing.assert_allclose(list(one.values["truth"].values()), expected[one.position], rtol=1e-4)
        assert list(one.values["truth"]) == ["yes", "no"]
        if one.position < 40:
            assert "sae" not in one.values
            continue
        top = np.argsort(-features[one.position])[:3]
        assert list(one.values["sae"]) == [str(i) for i in top]
        np.testing.assert_allclose(list(one.values["sae"].values()), features[one.position][top], rtol=1e-4)
    chosen = llm.generate(
        ids, GREEDY, interventions=[{"op": "read", "sae": "sae", "features": [7, 1], "positions": "last"}]
    ).readouts
    assert [(one.position, list(one.values["sae"])) for one in chosen] == [(39, ["7", "1"])]


def test_a_preempted_request_is_captured_once(path):
    """Rows of the time before a request lost its pages, next to those after."""
    with LLM(path, backend="reference", max_step_tokens=16, max_requests=4) as llm:
        ids = prompt(30, 7)
        request = llm.engine.maker.make_request(ids, GREEDY)
        (taps,) = llm.interp.intervene([request], [{"op": "capture", "name": "resid_post0"}])
        llm.engine.add_request(request)
        for _ in range(4):
            llm.engine.step()
        llm.engine.scheduler.preempt(request)
        while llm.engine.has_work:
            llm.engine.step()
        assert request.sequence.n_preemptions == 1
        found = taps.activations(request)["blocks.0.hook_resid_post"]
        _, whole = llm.run_with_cache([*ids, *request.output_ids[:-1]], names="resid_post0")
        np.testing.assert_array_equal(found, whole["resid_post0"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"op": "jump"}, "'op' must be one of"),
        ({"op": []}, "'op' must be one of"),
        ({"op": "capture", "name": "z0", "positions": []}, "'positions' must be"),
        ({"name": "z0"}, "requires 'op'"),
        ({"op": "add", "name": "z0", "code": "1"}, "cannot have 'code'"),
        ({"op": "add", "name": "resid_post9", "vector": DIRECTION}, "was not found"),
        ({"op": "add", "name": "resid_post1"}, "requires 'vector', or the name of a 'control_vector'"),
        ({"op": "add", "name": "resid_post1", "vector": [1, 2]}, "list of 64 numbers"),
        ({"op": "add", "name": "resid_post1", "vector": [float("nan")] * D}, "finite"),
        ({"op": "add", "name": "resid_post1", "vector": [[1.0]] * D}, "one for each position: 64 for all"),
        (
            {"op": "add", "name": "resid_post1", "vector": [[1.0], []]},
            "must have as many numbers for each position",
        ),
        ({"op": "add", "name": "resid_post1", "vector": "x"}, "list of 64"),
        ({"op": "add", "name": "resid_post1", "vector": DIRECTION, "strength": 1e9}, "within 1e6"),
        (
            {"op": "add", "name": "resid_post1", "vector": DIRECTION, "heads": [0]},
            "'heads' is not supported by",
        ),
        ({"op": "scale", "name": "z0", "heads": [4]}, "from 0 to 3"),
        ({"op": "scale", "name": "z0", "heads": [True]}, "from 0 to 3"),
        ({"op": "scale", "name": "z0", "heads": [1, 1]}, "twice"),
        ({"op": "scale", "name": "blocks.0.attn.hook_pattern"}, "cannot be edited, only captured"),
        ({"op": "scale", "name": "ln_final.hook_normalized"}, "cannot be edited, only captured"),
        ({"op": "capture", "name": "resid_post1", "vector": DIRECTION}, "'vector' is not supported"),
        ({"op": "ablate", "name": "resid_post1", "vector": DIRECTION * 0}, "must not be zero"),
        (
            {"op": "add", "control_vector": "none"},
            "the control vector 'none' was not found: there are happy, sad",
        ),
        ({"op": "add", "control_vector": "sad", "layers": [0, 0]}, "'layers' from 0 to 0 were not found"),
        ({"op": "add", "control_vector": "sad", "layers": [2, 1]}, "first and the last"),
        ({"op": "add", "control_vector": "sad", "name": "z0"}, "cannot be combined with 'name'"),
        ({"op": "capture", "name": "unembed.hook_out"}, "is not supported in requests"),
        ({"op": "capture", "name": "resid_post1", "positions": "first"}, "'positions' must be"),
        ({"op": "capture", "name": 3}, "'name' is required, such as blocks.3.hook_resid_post"),
        ({"op": "capture", "name": "x" * 300}, "'name' is required, such as blocks.3.hook_resid_post"),
        ({"op": "read"}, "read requires a probe, an sae"),
        ({"op": "read", "probe": "truth", "features": [1]}, "'features' requires an sae or a transcoder"),
        ({"op": "read", "sae": "sae", "features": [40]}, "from 0 to 39"),
        ({"op": "read", "sae": "sae", "top_k": 0}, "'top_k' must be"),
        ([], "must be a mapping"),
    ],
)
def test_wrong_interventions_are_refused(llm, given, words):
    """A field that is ignored, a shape that fails in the middle of an answer, an error that names nothing."""
    with pytest.raises(RequestError, match=words) as caught:
        llm.generate([5, 6], GREEDY, interventions=[{"op": "scale", "name": "z0"}, given])
    assert caught.value.param == "interventions[1]"


def test_wrong_uses_are_refused(llm):
    """A capture of many answers, and lists that are not lists."""
    capture = {"op": "capture", "name": "z0"}
    for given, words in [
        ([capture] * 2, "must be captured once"),
        ([{"op": "scale", "name": "z0"}] * 65, "must be at most 64"),
        ("capture", "must be a list"),
        ({"op": "capture"}, "must be a list"),
    ]:
        with pytest.raises(RequestError, match=words):
            llm.generate([5, 6], GREEDY, interventions=given)
    with pytest.raises(RequestError, match="require 'n' and 'best_of' to be 1"):
        llm.generate([5, 6], GREEDY, n=2, interventions=[capture])


@pytest.mark.parametrize("kind", ["standard", "jumprelu", "topk", "gated"])
@pytest.mark.parametrize("normalization", ["none", "layer_norm", "constant_norm_rescale"])
def test_autoencoders_are_saelens(tmp_path, kind, normalization):
    """A bias on the wrong side, a threshold that counts elsewhere, another norm: by the formulas in torch."""
    torch = pytest.importorskip("torch")
    facts = {"normalize_activations": normalization, "apply_b_dec_to_input": kind != "topk", "k": 6}
    w = {name: torch.from_numpy(x) for name, x in sae_files(tmp_path, kind, **facts).items()}
    x = torch.randn(11, D, generator=torch.Generator().manual_seed(0)) * 3
    found = SparseAutoencoder.load(tmp_path).features(x.numpy())
    if normalization == "layer_norm":
        x = (x - x.mean(-1, keepdim=True)) / ((x - x.mean(-1, keepdim=True)).std(-1, keepdim=True) + 1e-5)
    elif normalization == "constant_norm_rescale":
        x = x * D**0.5 / x.norm(dim=-1, keepdim=True)
    x = x - w["b_dec"] * (kind != "topk")
    if kind == "gated":
        size = torch.relu(x @ (w["W_enc"] * w["r_mag"].exp()) + w["b_mag"])
        expected = (x @ w["W_enc"] + w["b_gate"] > 0) * size
    else:
        pre = x @ w["W_enc"] + w["b_enc"]
        expected = torch.relu(pre)
        if kind == "jumprelu":
            expected = expected * (pre > w["threshold"])
        elif kind == "topk":
            best = torch.topk(pre, 6)
            expected = torch.zeros_like(pre).scatter_(-1, best.indices, torch.relu(best.values))
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-3, atol=1e-4)
    assert (found > 0).any()


def test_control_vector_files(tmp_path):
    """A file that llama.cpp and repeng would not read, or theirs, read otherwise."""
    path = tmp_path / "v.gguf"
    writer = gguf.GGUFWriter(path, "controlvector")
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_uint32("controlvector.layer_count", 1)
    writer.add_tensor("direction.3", DIRECTION)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = ControlVector.load(path)
    assert list(loaded.directions) == [3]
    np.testing.assert_array_equal(loaded.directions[3], DIRECTION)
    loaded.save(tmp_path / "again.gguf", "llama")
    again = gguf.GGUFReader(tmp_path / "again.gguf")
    assert again.fields["general.architecture"].contents() == "controlvector"
    assert [(t.name, t.data.tolist()) for t in again.tensors] == [("direction.3", DIRECTION.tolist())]


def test_wrong_files_are_refused(path, tmp_path):
    """A file of something else, taken for what it is not; a width found out in the middle of an answer."""
    with pytest.raises(FormatError, match="must be a control vector"):
        ControlVector.load(path)
    for bad in ({}, {0: [[1.0]]}, {-1: [1.0]}, {"a": [1.0]}, {0: [float("inf")]}, {0: [1.0], 1: [1.0, 2]}, 3):
        with pytest.raises(ConfigError):
            ControlVector(bad)
    good = {"weight": np.ones((2, 4), np.float32)}
    for name, arrays, metadata in [
        ("none", {"w": good["weight"]}, {"hook_name": "resid_post0"}),
        ("nameless", good, {}),
        ("labels", good, {"hook_name": "resid_post0", "labels": "[1]"}),
        ("few", good, {"hook_name": "resid_post0", "labels": '["a"]'}),
        ("integers", {"weight": np.ones(4, np.int32)}, {"hook_name": "x"}),
        ("nan", {"weight": np.full(4, np.nan, np.float32)}, {"hook_name": "x"}),
    ]:
        safetensors.numpy.save_file(arrays, tmp_path / name, metadata)
        with pytest.raises(FormatError):
            Probe.load(tmp_path / name)
    for i, facts in enumerate(
        [
            {"architecture": "transformer"},
            {"hook_head_index": 1},
            {"normalize_activations": "batch"},
            {"metadata": {}},
            {"k": "many"},
            {"architecture": "topk", "k": 0},
            {"architecture": "gated"},
        ]
    ):
        sae_files(tmp_path / f"sae{i}", **facts) if "architecture" not in facts else None
        folder = tmp_path / f"sae{i}"
        if "architecture" in facts:
            sae_files(folder)
            (folder / "cfg.json").write_text(json.dumps({"hook_name": "resid_post0", **facts}))
        with pytest.raises((FormatError, UnsupportedError)):
            SparseAutoencoder.load(folder)
    sae_files(tmp_path / "wide", width=32)
    sae_files(tmp_path / "other", name="blocks.7.hook_resid_pre")
    for options, words in [
        ({"control_vectors": {"v": {9: DIRECTION}}}, "cannot be used with this model"),
        ({"control_vectors": {"v": {1: DIRECTION[:8]}}}, "cannot be used with this model"),
        ({"control_vectors": {"a b": {1: DIRECTION}}}, "letters, digits"),
        ({"probes": {"p": Probe("resid_post0", np.ones(8))}}, "must have .* width, .*, not 8"),
        ({"saes": {"s": tmp_path / "wide"}}, "must have .* width, .*, not 32"),
        ({"saes": {"s": tmp_path / "other"}}, "was not found"),
        ({"saes": {"s": tmp_path / "absent"}}, "was not found"),
    ]:
        with pytest.raises(KukriError, match=words):
            LLM(path, backend="reference", **options)


def test_control_vectors_are_llama_cpps(smollm2_path):
    """A layer that is one off, or a vector before the norm, next to llama.cpp with the same vector."""
    llama_cpp = pytest.importorskip("llama_cpp")
    rng = np.random.default_rng(0)
    directions = rng.standard_normal((29, 576)).astype(np.float32) * 4
    ids = [1, 504, 3575, 282, 4649, 314, 260, 1109]
    theirs = llama_cpp.Llama(str(smollm2_path), n_ctx=64, n_threads=2, logits_all=True, verbose=False)

    def logits():
        theirs.reset()
        theirs.eval(ids)
        return np.array(theirs.scores[len(ids) - 1])

    plain = logits()
    context = theirs.ctx
    data = np.ascontiguousarray(directions.reshape(-1))
    status = llama_cpp.llama_set_adapter_cvec(
        context, data.ctypes.data_as(POINTER(c_float)), data.size, 576, 10, 14
    )
    assert status == 0
    expected = logits()
    with LLM(smollm2_path, max_context=64, control_vectors={"v": dict(enumerate(directions, 1))}) as llm:
        request = llm.engine.maker.make_output_request(ids, "logits", first_row=len(ids) - 1)
        llm.interp.intervene([request], [{"op": "add", "control_vector": "v", "layers": [10, 14]}])
        (found,) = llm.calls.compute([request])
    moved = np.abs(expected - plain).mean()
    assert np.abs(found[0] - expected).mean() < 0.05 * moved
