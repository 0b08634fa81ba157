"""Features of autoencoders and transcoders that are read, steered by, and put in place of MLPs."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from kukri import LLM
from kukri.errors import ConfigError, FormatError, RequestError, UnsupportedError
from kukri.interp import SparseAutoencoder
from kukri.interp.features.readers import keep_largest
from kukri.interp.features.transcoders import Transcoders
from kukri.sampling import SamplingParams
from tests.interp.interventions.test_interventions import sae_files
from tests.tiny_gguf import write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
D, L, F = 64, 2, 40
IDS = np.random.default_rng(1).integers(3, 250, 30).tolist()


def arrays_of(layer: int, is_across: bool = False) -> dict[str, np.ndarray]:
    """A random transcoder's, as circuit-tracer has them."""
    rng = np.random.default_rng(layer)
    found = {
        "W_enc": rng.standard_normal((F, D)) / 8,
        "W_dec": rng.standard_normal((F, L - layer, D) if is_across else (F, D)) / 4,
        "b_enc": rng.standard_normal(F) / 4,
        "b_dec": rng.standard_normal(D) / 8,
        "threshold": rng.random(F) / 3,
    }
    if not is_across:
        found["W_skip"] = rng.standard_normal((D, D)) / 20
    return {name: array.astype(np.float32) for name, array in found.items()}


def save_transcoders(folder, is_across: bool):
    folder.mkdir()
    for i in range(L):
        arrays = arrays_of(i, is_across)
        if is_across:
            arrays = {f"{name}_{i}": array for name, array in arrays.items()}
            save_file({f"W_dec_{i}": arrays.pop(f"W_dec_{i}")}, folder / f"W_dec_{i}.safetensors")
            save_file(arrays, folder / f"W_enc_{i}.safetensors")
        else:
            arrays["activation_function.threshold"] = arrays.pop("threshold")
            save_file(arrays, folder / f"layer_{i}.safetensors")
    return folder


def activations(arrays, x):
    """By circuit-tracer's formula."""
    found = x @ arrays["W_enc"].T + arrays["b_enc"]
    return np.where(found > arrays["threshold"], np.maximum(found, 0), 0)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    save_transcoders(folder / "single", False)
    save_transcoders(folder / "across", True)
    for kind in ("standard", "jumprelu", "topk", "gated"):
        normalization = {"jumprelu": "layer_norm", "gated": "constant_norm_rescale"}.get(kind, "none")
        sae_files(folder / kind, kind, k=6, normalize_activations=normalization)
    write_tiny(folder / "tiny.gguf")
    return folder


SAES = ("standard", "jumprelu", "topk", "gated")


@pytest.fixture(scope="module", params=["reference", "cpu"])
def llm(request, files):
    with LLM(
        files / "tiny.gguf",
        backend=request.param,
        n_threads=2,
        max_step_tokens=24,
        max_requests=8,
        saes={kind: files / kind for kind in SAES},
        transcoders={name: files / name for name in ("single", "across")},
    ) as opened:
        yield opened


def stream_of(llm, interventions, hooks=()):
    """(tokens, what the last layer leaves) of an answer with interventions, or with hooks."""
    if hooks:
        result, cache = llm.generate_with_hooks(IDS, GREEDY, fwd_hooks=list(hooks), names=["resid_post1"])
        return result.token_ids, cache["resid_post1"]
    capture = {"op": "capture", "name": "resid_post1"}
    result = llm.generate(IDS, GREEDY, interventions=[*interventions, capture])
    return result.token_ids, result.activations["blocks.1.hook_resid_post"]


def assert_same(llm, interventions, hooks):
    (tokens, stream), (expected_tokens, expected) = stream_of(llm, interventions), stream_of(llm, (), hooks)
    np.testing.assert_allclose(stream, expected, atol=1e-3 * abs(expected).max(), err_msg=str(interventions))
    assert tokens == expected_tokens
    return stream


def changed(op, strength, f):
    return {"add": f + strength, "scale": f * strength, "clamp": 0 * f + strength, "ablate": 0 * f}[op]


@pytest.mark.parametrize("kind", SAES)
@pytest.mark.parametrize("op", ["add", "scale", "clamp", "ablate"])
def test_an_autoencoders_features_are_steered(llm, kind, op):
    """A target that is added to the feature, a decoder without the input's norm, other positions."""
    sae: SparseAutoencoder = llm.interp.catalog.saes[kind]
    x = llm.run_with_cache(IDS, names="resid_pre1")[1]["resid_pre1"][0]
    features = np.argsort(-sae.features(x).mean(axis=0))[:3].tolist()
    is_normed = {"jumprelu": x.std(-1, ddof=1), "gated": np.linalg.norm(x, axis=-1) / 8}.get(kind)
    decoder = sae._arrays["W_dec"]

    def steer(value, hook):
        f = sae.features(value[0])[:, features]
        scale = {
            "jumprelu": value[0].std(-1, ddof=1),
            "gated": np.linalg.norm(value[0], axis=-1) / D**0.5,
        }.get(kind, np.ones(len(f)))
        value[0] += ((changed(op, 3, f) - f) * scale[:, None]) @ decoder[features]

    assert is_normed is None or is_normed.min() > 0
    given = {"op": op, "sae": kind, "features": features}
    if op != "ablate":
        given["strength"] = 3
    stream = assert_same(llm, [given], [("resid_pre1", steer)])
    assert abs(stream - stream_of(llm, ())[1]).max() > 1e-3


@pytest.mark.parametrize("name", ["single", "across"])
@pytest.mark.parametrize("op", ["add", "scale", "clamp", "ablate"])
def test_a_transcoders_features_are_steered(llm, name, op):
    """A decoder of another layer, a feature of another token, the output of a layer that it leaves alone."""
    arrays, features, seen = arrays_of(0, name == "across"), [3, 7, 8], {}
    decoders = arrays["W_dec"].reshape(F, -1, D)[features]

    def read(value, hook):
        seen["f"] = activations(arrays, value[0])[:, features]

    def write(j):
        def edit(value, hook):
            value[0] += (changed(op, 2, seen["f"]) - seen["f"]) @ decoders[:, j]

        return edit

    given = {"op": op, "transcoder": name, "layer": 0, "features": features}
    if op != "ablate":
        given["strength"] = 2
    hooks = [(f"mlp_out{j}", write(j)) for j in range(decoders.shape[1])]
    assert_same(llm, [given], [("blocks.0.mlp.hook_in", read), *hooks])


@pytest.mark.parametrize("name", ["single", "across"])
def test_transcoders_take_the_place_of_mlps(llm, name):
    """Outputs that lack the bias, the skip, or what features of earlier layers write; a feature that is
    steered before its MLP is replaced.
    """
    arrays, seen = [arrays_of(i, name == "across") for i in range(L)], {}

    def read(i):
        def keep(value, hook):
            seen[i] = value[0].copy()

        return keep

    def write(j, ablated=()):
        def edit(value, hook):
            out = arrays[j]["b_dec"] + (seen[j] @ arrays[j]["W_skip"].T if name == "single" else 0)
            for i in range(j + 1) if name == "across" else [j]:
                f = activations(arrays[i], seen[i])
                if i == 0:
                    f[:, ablated] = 0
                out = out + f @ arrays[i]["W_dec"].reshape(F, -1, D)[:, j - i]
            value[0] = out

        return edit

    reads = [(f"blocks.{i}.mlp.hook_in", read(i)) for i in range(L)]
    whole = [{"op": "replace", "transcoder": name}]
    assert_same(llm, whole, [*reads, *((f"mlp_out{j}", write(j)) for j in range(L))])
    one = [{"op": "replace", "transcoder": name, "layers": [1, 1]}]
    assert_same(llm, one, [*reads, ("mlp_out1", write(1))])
    ablate = {"op": "ablate", "transcoder": name, "layer": 0, "features": [1, 2, 3, 4]}
    hooks = [*reads, *((f"mlp_out{j}", write(j, [1, 2, 3, 4])) for j in range(L))]
    assert_same(llm, [*whole, ablate], hooks)
    # with whole texts too
    logits = llm.run_with_hooks(IDS, interventions=whole)
    seen.clear()
    hooks = [*reads, *((f"mlp_out{j}", write(j)) for j in range(L))]
    expected = llm.run_with_hooks(IDS, fwd_hooks=hooks)
    np.testing.assert_allclose(logits, expected, atol=1e-3 * abs(expected).max())


@pytest.mark.parametrize("kind", SAES)
def test_an_autoencoder_takes_the_place_of_the_stream(llm, kind):
    """A reconstruction without the bias or the norm: against SAELens' formulas for decode."""
    sae = llm.interp.catalog.saes[kind]

    def edit(value, hook):
        x = value[0].copy()
        out = sae.features(x) @ sae._arrays["W_dec"] + sae._arrays["b_dec"]
        if kind == "jumprelu":
            out = out * x.std(-1, ddof=1, keepdims=True) + x.mean(-1, keepdims=True)
        elif kind == "gated":
            out = out * np.linalg.norm(x, axis=-1, keepdims=True) / D**0.5
        value[0] = out

    assert_same(llm, [{"op": "replace", "sae": kind}], [("resid_pre1", edit)])


def test_features_are_read_while_serving(llm):
    """Features of another layer, of the activation after the MLP, or of a token that was not asked for."""
    read = [
        {"op": "read", "transcoder": "single", "layer": 1, "top_k": 3},
        {"op": "read", "transcoder": "across", "layer": 0, "features": [5, 2], "positions": "last"},
    ]
    result = llm.generate(IDS, GREEDY, interventions=read)
    ids = [*IDS, *result.token_ids[:-1]]
    cache = llm.run_with_cache(ids, names=["blocks.0.mlp.hook_in", "blocks.1.mlp.hook_in"])[1]
    expected = activations(arrays_of(1), cache["blocks.1.mlp.hook_in"][0])
    of_last = activations(arrays_of(0, True), cache["blocks.0.mlp.hook_in"][0, len(IDS) - 1])
    assert [one.position for one in result.readouts] == list(range(len(ids)))
    for one in result.readouts:
        row = expected[one.position]
        top = {str(i): row[i] for i in np.argsort(-row)[:3] if row[i] > 0}
        assert list(one.values["single.1"]) == list(top)
        np.testing.assert_allclose(list(one.values["single.1"].values()), list(top.values()), rtol=2e-2)
        assert ("across.0" in one.values) == (one.position == len(IDS) - 1)
    found = result.readouts[len(IDS) - 1].values["across.0"]
    assert list(found) == ["5", "2"]
    np.testing.assert_allclose(list(found.values()), of_last[[5, 2]], rtol=2e-2, atol=1e-3)


def test_readouts_that_wait_come_with_the_end(llm, monkeypatch):
    """Tokens that are lost while their readings wait for others."""
    read = [{"op": "read", "transcoder": "single", "layer": 1, "top_k": 3}]
    whole = llm.generate(IDS, GREEDY, interventions=read).readouts
    monkeypatch.setattr(
        "kukri.interp.interventions.read_limiter.ReadLimiter.allows", lambda limiter, request: False
    )
    chunks = list(llm.stream(IDS, GREEDY, interventions=read))
    assert [len(chunk.readouts) for chunk in chunks[:-1]] == [0] * (len(chunks) - 1)
    assert [one.position for one in chunks[-1].readouts] == [one.position for one in whole]


def test_a_condition_on_a_transcoders_feature(llm):
    """An edit that is made everywhere, or whose condition is that of another token."""
    x = llm.run_with_cache(IDS, names="blocks.0.mlp.hook_in")[1]["blocks.0.mlp.hook_in"][0]
    feature = int(np.argmax(activations(arrays_of(0), x).std(axis=0)))
    when = {"transcoder": "single", "layer": 0, "feature": feature, "above": 0.1}

    def read(value, hook):
        read.chosen = activations(arrays_of(0), value[0])[:, feature] > 0.1

    def edit(value, hook):
        value[0][read.chosen] *= 3

    given = {"op": "scale", "name": "mlp_out0", "strength": 3, "when": when}
    assert_same(llm, [given], [("blocks.0.mlp.hook_in", read), ("mlp_out0", edit)])


def test_others_keep_their_tokens(llm):
    """Features that are read or steered for one request and change another's tokens."""
    prompts = [np.random.default_rng(i).integers(3, 250, 20 + i).tolist() for i in range(8)]
    alone = [llm.generate(ids, GREEDY).token_ids for ids in prompts]
    read = {"op": "read", "transcoder": "single", "layer": 1}
    wanted = [
        [read],
        [read, {"op": "read", "sae": "topk"}],
        [{"op": "clamp", "transcoder": "across", "layer": 0, "features": [1, 2], "strength": 40}],
        [{"op": "replace", "transcoder": "single"}],
    ]
    llm.engine.pool.forget()
    requests = [llm.engine.maker.make_request(ids, GREEDY) for ids in prompts]
    for request, interventions in zip(requests, wanted):
        llm.interp.intervene([request], interventions)
    for request in requests:
        llm.engine.add_request(request)
    while llm.engine.has_work:
        llm.engine.step()
    found = [request.output_ids for request in requests]
    assert found[:2] == alone[:2], "reading changes nothing"
    assert found[2] != alone[2]
    assert found[3] != alone[3]
    assert found[4:] == alone[4:]


LATE = {"transcoder": "single", "layer": 1, "feature": 1, "above": 0}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"op": "clamp"}, "clamp requires either an sae or a transcoder"),
        ({"op": "clamp", "sae": "topk", "transcoder": "single", "features": [1]}, "not both"),
        ({"op": "clamp", "sae": "topk"}, "'features' must be numbers from 0 to 39"),
        ({"op": "scale", "sae": "topk", "features": [40]}, "'features' must be numbers from 0 to 39"),
        ({"op": "ablate", "transcoder": "single", "features": [1]}, r"must be one of transcoder .* \(0, 1\)"),
        ({"op": "ablate", "transcoder": "single", "layer": 2, "features": [1]}, "must be one of transcoder"),
        ({"op": "ablate", "transcoder": "none", "layer": 0, "features": [1]}, "transcoder 'none' was not"),
        ({"op": "ablate", "sae": "topk", "layer": 1, "features": [1]}, "not supported with an sae"),
        ({"op": "add", "sae": "topk", "features": [1], "vector": [1]}, "'vector' is not supported"),
        ({"op": "add", "sae": "topk", "features": [1], "name": "z0"}, "'name' is not supported"),
        ({"op": "scale", "name": "z0", "features": [1]}, "'features' and 'layer' require an sae"),
        ({"op": "ablate", "sae": "topk", "features": [1], "layers": [0, 1]}, "'layers' is not supported"),
        ({"op": "ablate", "name": "z0", "layers": [0, 1]}, "'layers' requires a 'control_vector'"),
        ({"op": "replace", "transcoder": "single", "layers": [5, 6]}, "'layers' from 5 to 6 were not found"),
        ({"op": "replace", "transcoder": "single", "layers": [1]}, "first and the last"),
        ({"op": "add", "sae": "topk", "features": list(range(30)) * 9}, "must be at most 256"),
        ({"op": "read", "transcoder": "single", "layer": 0, "features": [99]}, "from 0 to 39"),
        ({"op": "scale", "name": "z0", "when": LATE}, "'when' must read what comes before the edit of"),
    ],
)  # fmt: skip
def test_wrong_features_are_refused(llm, given, words):
    """A feature of another place, or an error that names nothing."""
    with pytest.raises(RequestError, match=words) as caught:
        llm.generate([5, 6], GREEDY, interventions=[given])
    assert caught.value.param == "interventions[0]"


def test_files_of_other_models_are_refused(files, tmp_path):
    """Transcoders of another width or depth, or that read a hook of another width."""
    path = files / "tiny.gguf"
    arrays = arrays_of(0)
    wide = Transcoders.load(files / "single").layers[0]
    for transcoders, words in [
        (Transcoders({5: wide}), r"must have 2 layers of width 64, as the model, not some \(\[5\]\)"),
        (
            Transcoders({0: wide}, writes="mlp.hook_post"),
            "must have blocks.0.mlp.hook_post's width, 96, not 64",
        ),
        (Transcoders({0: wide}, reads="nothing"), "was not found"),
    ]:
        with pytest.raises(ConfigError, match=words):
            LLM(path, n_threads=1, transcoders={"t": transcoders})
    (tmp_path / "narrow").mkdir()
    narrow = {"W_enc": arrays["W_enc"][:, :8], "W_dec": arrays["W_dec"][:, :8], "b_enc": arrays["b_enc"]}
    narrow = {name: np.ascontiguousarray(array) for name, array in narrow.items()}
    save_file(narrow | {"b_dec": arrays["b_dec"][:8].copy()}, tmp_path / "narrow" / "layer_0.safetensors")
    with pytest.raises(ConfigError, match="must have 2 layers of width 64, as the model, not"):
        LLM(path, n_threads=1, transcoders={"t": tmp_path / "narrow"})
    kept = {name: array for name, array in sae_files(tmp_path / "nodec").items() if name != "W_dec"}
    save_file(kept, tmp_path / "nodec" / "sae_weights.safetensors")
    with (
        LLM(path, n_threads=1, saes={"s": tmp_path / "nodec"}) as llm,
        pytest.raises(RequestError, match="the features cannot be steered, only read: the autoencoder"),
    ):
        llm.generate([5], GREEDY, interventions=[{"op": "add", "sae": "s", "features": [1]}])


def saelens_folder(folder, layer, **facts):
    """A transcoder as SAELens saves it."""
    arrays = arrays_of(layer)
    arrays["W_enc"] = np.ascontiguousarray(arrays["W_enc"].T)
    folder.mkdir(parents=True)
    save_file(arrays, folder / "sae_weights.safetensors")
    facts = {"architecture": "jumprelu_skip_transcoder", **facts}
    facts.setdefault("metadata", {"hook_name": f"blocks.{layer}.ln2.hook_normalized"})
    (folder / "cfg.json").write_text(json.dumps(facts))
    return folder


def test_one_layers_folder(tmp_path):
    """A folder of one transcoder whose layer is taken for the first; a norm that is left out in silence."""
    found = Transcoders.load(saelens_folder(tmp_path / "mine", 1))
    assert [*found.layers] == [1]
    assert found.reads == "ln2.hook_normalized"
    reader = found.reader(1)
    assert (reader.name, reader.writes) == ("blocks.1.ln2.hook_normalized", ("blocks.1.hook_mlp_out",))
    x = np.random.default_rng(3).standard_normal((5, D)).astype(np.float32)
    expected = activations(arrays_of(1), x)
    np.testing.assert_allclose(reader.features(x), expected, atol=1e-5)
    np.testing.assert_allclose(reader.chooser([4, 9])(x), expected[:, [4, 9]], atol=1e-5)
    out = expected @ arrays_of(1)["W_dec"] + arrays_of(1)["b_dec"] + x @ arrays_of(1)["W_skip"].T
    np.testing.assert_allclose(reader.reconstruct(x)[0], out, atol=1e-4)
    with pytest.raises(FormatError, match="must have a 'hook_name', which says of which layer"):
        Transcoders.load(saelens_folder(tmp_path / "other", 1, metadata={}))
    with pytest.raises(UnsupportedError, match="normalize_activations"):
        Transcoders.load(saelens_folder(tmp_path / "normed", 1, normalize_activations="layer_norm"))


def test_gemma_scope_2_across_layers(tmp_path):
    """Decoders of all layers, of which those before a feature's own are not its."""
    for i in range(L):
        folder = tmp_path / f"layer_{i}_width_40"
        folder.mkdir()
        arrays = arrays_of(i, is_across=True)
        whole = np.full((F, L, D), 9, np.float32)
        whole[:, i:] = arrays.pop("W_dec")
        encoder = np.ascontiguousarray(arrays.pop("W_enc").T)
        save_file(arrays | {"w_enc": encoder, "w_dec": whole}, folder / "params.safetensors")
    found = Transcoders.load(tmp_path)
    found.check(L, D)
    for i, layer in found.layers.items():
        assert layer.n_written == L - i
        np.testing.assert_array_equal(layer.decoders(np.array([3, 5])), arrays_of(i, True)["W_dec"][[3, 5]])


@pytest.mark.parametrize(("n", "k"), [(40, 5), (40, 40), (1000, 1), (1003, 13), (5000, 32)])
def test_the_largest_of_each_row_are_kept(n, k):
    """A bound of columns that is above the k-th, numbers after the last whole column, equal ones."""
    x = np.random.default_rng(n).integers(-(10**6), 10**6, (20, n)).astype(np.float32)
    x[1, -3:] = 2e6
    x[2] = 1
    x[3, :k] = 3e6  # side by side
    expected = np.where(x >= np.sort(x, axis=1)[:, -k, None], x, 0)
    keep_largest(x, k)
    np.testing.assert_array_equal(x, expected)
    unknown = np.full((1, n), np.nan, np.float32)
    keep_largest(unknown, k)
    assert np.isnan(unknown).all()


def test_topk_by_the_lengths_of_decoders(tmp_path):
    """SAELens' default for TopK: features chosen by activations that are not those of its formula."""
    arrays = sae_files(tmp_path, "topk", k=5, rescale_acts_by_decoder_norm=True)
    x = np.random.default_rng(2).standard_normal((7, D)).astype(np.float32)
    sae = SparseAutoencoder.load(tmp_path)
    lengths = np.linalg.norm(arrays["W_dec"], axis=1)
    found = ((x - arrays["b_dec"]) @ arrays["W_enc"] + arrays["b_enc"]) * lengths
    least = np.sort(found, axis=1)[:, -5, None]
    expected = np.where(found >= least, np.maximum(found, 0), 0)
    np.testing.assert_allclose(sae.features(x), expected, rtol=1e-4)
    out = (expected / lengths) @ arrays["W_dec"] + arrays["b_dec"]
    np.testing.assert_allclose(sae.reconstruct(x)[0], out, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["standard", "jumprelu", "gated"])
@pytest.mark.parametrize("key", ["activation_fn_str", "activation_fn"])
def test_tanh_of_features(tmp_path, kind, key):
    """Catches an autoencoder of SAELens' tanh-relu that is run with ReLU."""
    x = np.random.default_rng(2).standard_normal((7, D)).astype(np.float32)
    sae_files(tmp_path / "relu", kind, **{key: "relu"})
    sae_files(tmp_path / "tanh", kind, **{key: "tanh-relu"})
    plain, sae = (SparseAutoencoder.load(tmp_path / name) for name in ("relu", "tanh"))
    found = sae.features(x)
    np.testing.assert_allclose(found, np.tanh(plain.features(x)), rtol=1e-6)
    assert found.max() > 0.5
    np.testing.assert_allclose(sae.chooser([3, 1])(x), found[:, [3, 1]], rtol=1e-4, atol=1e-6)


def test_what_would_change_features_is_refused_by_name(tmp_path):
    """Catches an unknown activation or a factor of features that is passed over."""
    sae_files(tmp_path / "gelu", "standard", activation_fn="gelu")
    with pytest.raises(
        UnsupportedError, match="'activation_fn' 'gelu' is not supported: use relu, tanh-relu or topk"
    ):
        SparseAutoencoder.load(tmp_path / "gelu")
    with pytest.raises(UnsupportedError, match="'activation_fn' 'tanh-relu' is not supported"):
        Transcoders.load(saelens_folder(tmp_path / "transcoder", 1, activation_fn="tanh-relu"))
    arrays = sae_files(tmp_path / "scaled", "standard")
    for factor in (1, 2):
        arrays["scaling_factor"] = np.full(arrays["W_enc"].shape[1], factor, np.float32)
        save_file(arrays, tmp_path / "scaled" / "sae_weights.safetensors")
        if factor == 1:
            SparseAutoencoder.load(tmp_path / "scaled")
    with pytest.raises(UnsupportedError, match=r"'scaling_factor' .* is not supported"):
        SparseAutoencoder.load(tmp_path / "scaled")
