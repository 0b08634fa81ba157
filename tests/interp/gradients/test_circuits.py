"""Attribution graphs, against PyTorch's gradients through transformers' model with all else frozen."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import MethodType

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from kukri import LLM
from kukri.cli import app
from kukri.errors import ConfigError, FormatError, RequestError
from kukri.interp.features.transcoders import Transcoders
from kukri.interp.gradients.circuits import attribute
from kukri.interp.gradients.graph_effects import GraphMeasure
from tests.lazy_imports import lazy_imports
from tests.models.tiny_llama import make_pair
from tests.tiny_gguf import write_tiny

with lazy_imports():
    import torch
    from transformers.models.llama import modeling_llama
    from transformers.models.llama.modeling_llama import ALL_ATTENTION_FUNCTIONS, repeat_kv

D, L, F = 48, 3, 40
IDS = np.random.default_rng(1).integers(3, 80, 9).tolist()


def arrays_of(layer: int, is_across: bool = False, with_skip: bool = False) -> dict[str, np.ndarray]:
    """A random transcoder's, as circuit-tracer has them."""
    rng = np.random.default_rng(layer)
    shape = (F, L - layer, D) if is_across else (F, D)
    found = {
        "W_enc": rng.standard_normal((F, D)) / 7,
        "W_dec": rng.standard_normal(shape) / 7,
        "b_enc": rng.standard_normal(F) / 4,
        "b_dec": rng.standard_normal(D) / 7,
        "threshold": rng.random(F) / 3,
    }
    if with_skip:
        found["W_skip"] = rng.standard_normal((D, D)) / 20
    return {name: array.astype(np.float32) for name, array in found.items()}


def save_single(folder, with_skip=False):
    folder.mkdir(exist_ok=True)
    for i in range(L):
        arrays = arrays_of(i, with_skip=with_skip)
        arrays["activation_function.threshold"] = arrays.pop("threshold")
        save_file(arrays, folder / f"layer_{i}.safetensors")
    return folder


def save_across(folder):
    folder.mkdir(exist_ok=True)
    for i in range(L):
        arrays = {f"{name}_{i}": array for name, array in arrays_of(i, is_across=True).items()}
        save_file({f"W_dec_{i}": arrays.pop(f"W_dec_{i}")}, folder / f"W_dec_{i}.safetensors")
        save_file(arrays, folder / f"W_enc_{i}.safetensors")
    return folder


@pytest.fixture(scope="module")
def pair():
    return make_pair(n_layers=L, d_model=D, n_vocab=80, bias=True)


class FrozenTorch:
    """transformers' Llama in which patterns, norms' scales and MLPs' outputs are constants of the run.

    `outputs` are the MLPs', leaves that gradients reach; `inputs` what they read.
    """

    def __init__(self, model, skips):
        self.inputs, self.outputs, self.embedded = [], [], None
        old = modeling_llama.LlamaRMSNorm.forward

        def norm(module, x):
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
            return module.weight * (x * scale.detach())

        def mix(module, query, key, value, attention_mask, scaling, dropout=0.0, **options):
            key, value = (
                repeat_kv(key, module.num_key_value_groups),
                repeat_kv(value, module.num_key_value_groups),
            )
            scores = query @ key.transpose(2, 3) * scaling
            n = query.shape[2]
            scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
            pattern = torch.softmax(scores, -1).detach()
            return (pattern @ value).transpose(1, 2).contiguous(), pattern

        def mlp(module, x, i):
            plain = type(module).forward(module, x).detach()
            skip = None if skips is None else torch.from_numpy(skips[i])
            leaf = (plain - (0 if skip is None else (x.detach() @ skip.T))).requires_grad_()
            self.inputs.append(x)
            self.outputs.append(leaf)
            return leaf if skip is None else leaf + x @ skip.T

        ALL_ATTENTION_FUNCTIONS.register("frozen", mix)
        model.config._attn_implementation = "frozen"
        try:
            modeling_llama.LlamaRMSNorm.forward = norm
            for i, layer in enumerate(model.model.layers):
                layer.mlp.forward = MethodType(lambda module, x, i=i: mlp(module, x, i), layer.mlp)
            embeds = model.model.embed_tokens(torch.tensor([IDS])).detach().requires_grad_()
            self.embedded = embeds
            self.hidden = model.model(inputs_embeds=embeds).last_hidden_state
        finally:
            modeling_llama.LlamaRMSNorm.forward = old
            for layer in model.model.layers:
                del layer.mlp.forward
            model.config._attn_implementation = "eager"

    def gradients(self, target):
        """By the embeddings and each MLP's output, zeros where there is no way."""
        leaves = [*self.outputs, self.embedded]
        found = torch.autograd.grad(target, leaves, retain_graph=True, allow_unused=True)
        return [np.zeros((len(IDS), D), np.float32) if g is None else g[0].numpy() for g in found]


@pytest.mark.parametrize("form", ["single", "skip", "across"])
def test_edges_are_torchs_gradients_times_sources(pair, tmp_path, form):
    """A path through attention that is lost or taken twice, a norm that is not frozen, a wrong decoder."""
    model, _, _ = pair
    is_across, with_skip = form == "across", form == "skip"
    folder = save_across(tmp_path / "t") if is_across else save_single(tmp_path / "t", with_skip)
    parts = [arrays_of(i, is_across, with_skip) for i in range(L)]
    session = llama_session(pair)
    graph = attribute(session, IDS, folder, max_features=10_000, n_ignored=1, logit_share=0.9)
    frozen = FrozenTorch(model, [p["W_skip"] for p in parts] if with_skip else None)
    read = [x.detach()[0].numpy() for x in frozen.inputs]
    active = []
    for i, part in enumerate(parts):
        before = read[i] @ part["W_enc"].T + part["b_enc"]
        on = (before > part["threshold"]) & (before > 0) & (np.arange(len(IDS)) >= 1)[:, None]
        active += [(i, p, f, before[p, f]) for p, f in zip(*np.nonzero(on))]
    assert [tuple(row) for row in graph.features.tolist()] == [one[:3] for one in active]
    np.testing.assert_allclose(graph.activations, [one[3] for one in active], rtol=2e-4, atol=1e-5)
    errors = [leaf.detach()[0].numpy() - part["b_dec"] for leaf, part in zip(frozen.outputs, parts)]
    for i, p, f, value in active:
        for j, direction in enumerate(parts[i]["W_dec"][f].reshape(-1, D)):
            errors[i + j][p] -= value * direction
    n, n_tokens = len(active), len(IDS)
    unembedding = model.lm_head.weight.detach().numpy()
    rng = np.random.default_rng(0)
    for row in [
        *rng.choice(n, 12, replace=False),
        len(graph.edges) - 1,
        len(graph.edges) - len(graph.logit_tokens),
    ]:
        if row < n:
            i, p, f, _ = active[row]
            target = frozen.inputs[i][0, p] @ torch.from_numpy(parts[i]["W_enc"][f])
        else:
            token = graph.logit_tokens[row - len(graph.edges)]
            direction = unembedding[token] - unembedding.mean(axis=0)
            target = frozen.hidden[0, -1] @ torch.from_numpy(direction)
        *by_output, by_embedding = frozen.gradients(target)
        wanted = np.zeros(len(graph.edges))
        for column, (i, p, f, value) in enumerate(active):
            for j, direction in enumerate(parts[i]["W_dec"][f].reshape(-1, D)):
                wanted[column] += value * (by_output[i + j][p] @ direction)
        sums = [(g * e).sum(-1) * (np.arange(n_tokens) >= 1) for g, e in zip(by_output, errors)]
        wanted[n : n + L * n_tokens] = np.concatenate(sums)
        wanted[n + L * n_tokens :][:n_tokens] = (by_embedding * frozen.embedded.detach()[0].numpy()).sum(-1)
        np.testing.assert_allclose(graph.edges[row], wanted, rtol=1e-3, atol=1e-3 * np.abs(wanted).max())


class llama_session:
    """What `attribute` needs of an LLM."""

    def __init__(self, pair):
        from contextlib import nullcontext

        from kukri.interp import Session
        from kukri.kernels import make_backend
        from kukri.models import load_model

        _, config, source = pair
        model = load_model(source, config)
        self.interp = Session(model, make_backend("reference"), list, bytes, nullcontext)
        self.config = config


def test_edges_and_constants_add_up(pair, tmp_path):
    """Completeness: a source that is forgotten makes a row's sum another number than the pre-activation.

    Without biases in attention and decoders, and with no position left out, only the encoder's bias is left.
    """
    pair = make_pair(n_layers=L, d_model=D, n_vocab=80)
    folder = tmp_path / "t"
    folder.mkdir()
    for i in range(L):
        arrays = arrays_of(i) | {"b_dec": np.zeros(D, np.float32)}
        del arrays["threshold"]
        save_file(arrays, folder / f"layer_{i}.safetensors")
    session = llama_session(pair)
    graph = attribute(session, IDS, folder, max_features=10_000, n_ignored=0)
    kept = sum(matrix.size for matrix in session.interp._matrices().values())
    assert kept == L * sum(session.interp.weights.layer(name, 0).size for name in ("W_V", "W_O")), (
        "MLPs are not"
    )
    n = len(graph.features)
    biases = [arrays_of(layer)["b_enc"][f] for layer, _, f in graph.features]
    np.testing.assert_allclose(graph.edges[:n].sum(1) + biases, graph.activations, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(graph.constants[:n], biases, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(graph.constants[-len(graph.logit_tokens) :], 0, atol=1e-3)


def test_the_most_influential_features_are_traced(pair, tmp_path):
    """A bound that cuts features by their number, and edges that differ from those without a bound."""
    folder, session = save_single(tmp_path / "t"), llama_session(pair)
    whole = attribute(session, IDS, folder, max_features=10_000)
    seen = []
    some = attribute(
        session, IDS, folder, max_features=70, progress=lambda done, total: seen.append((done, total))
    )
    assert len(some.features) == 70
    assert some.n_active == len(whole.features) == whole.n_active
    n_logits = len(some.logit_tokens)
    assert seen[-1] == (70 + n_logits, 70 + n_logits)
    place = {tuple(row): i for i, row in enumerate(whole.features.tolist())}
    rows = [place[tuple(row)] for row in some.features.tolist()]
    np.testing.assert_allclose(some.edges[:70, :70], whole.edges[np.ix_(rows, rows)], rtol=1e-3, atol=1e-5)
    kept = np.sort(whole.influence()[rows])[::-1]
    best = np.sort(whole.influence()[: len(whole.features)])[::-1][:70]
    assert kept.sum() >= 0.9 * best.sum()


def test_targets_one_at_a_time(pair, tmp_path, monkeypatch):
    """A gradient that is left from the target before, or rows of a target of another length."""
    folder, session = save_across(tmp_path / "t"), llama_session(pair)
    expected, seen = attribute(session, IDS, folder, max_features=40), []
    monkeypatch.setattr(session.interp.texts.backend, "free_bytes", lambda: 1)
    found = attribute(session, IDS, folder, max_features=40, progress=lambda done, total: seen.append(done))
    assert np.diff(seen).tolist() == [1] * 39
    np.testing.assert_array_equal(found.features, expected.features)
    np.testing.assert_allclose(found.edges, expected.edges, atol=1e-5)


def test_pruning_keeps_what_leads_to_logits(pair, tmp_path):
    """Nodes that lead nowhere, features made of nothing, thresholds that are taken the other way round."""
    graph = attribute(llama_session(pair), IDS, save_single(tmp_path / "t"), max_features=10_000)
    n, n_end = len(graph.features), len(IDS) + len(graph.logit_tokens)
    sizes = []
    for share in (0.3, 0.8, 1.0):
        nodes, edges = graph.prune(share, 0.9)
        assert nodes[-n_end:].all()
        assert not edges[~nodes].any()
        assert not edges[:, ~nodes].any()
        assert edges[:, :-n_end][:, nodes[:-n_end]].any(axis=0).all()
        assert edges[:n][nodes[:n]].any(axis=1).all()
        sizes.append(int(nodes.sum()))
    assert sizes[0] < sizes[1] < sizes[2]
    whole = graph.as_json(str, "a", 1.0, 1.0)
    assert {(0, 1), (0, 2)} & {(layer, feature) for layer, _, feature in graph.features.tolist()}
    for key in ("node_id", "jsNodeId"):  # feature 1 of layer 0 is not the error of layer 1
        kinds = [(node[key], node["feature_type"]) for node in whole["nodes"]]
        assert len({name for name, _ in kinds}) == len(set(kinds))
    assert len({node["node_id"] for node in whole["nodes"]}) == len(whole["nodes"])
    with pytest.raises(RequestError, match="'node_threshold' must be from 0 to 1"):
        graph.prune(1.5)


def test_forms_of_files_are_the_same_transcoder(tmp_path):
    """A matrix read by rows where it has columns: SAELens and Gemma Scope 2 store encoders transposed."""
    x = np.random.default_rng(5).standard_normal((4, D)).astype(np.float32)
    single = Transcoders.load(save_single(tmp_path / "a", with_skip=True))
    sae, scope = tmp_path / "b", tmp_path / "c"
    for i in range(L):
        arrays = arrays_of(i, with_skip=True)
        arrays["W_enc"] = np.ascontiguousarray(arrays["W_enc"].T)
        for folder in (sae / f"layer_{i}", scope / f"layer_{i}_width_40"):
            folder.mkdir(parents=True)
        save_file(arrays, sae / f"layer_{i}" / "sae_weights.safetensors")
        facts = {
            "architecture": "jumprelu_skip_transcoder",
            "metadata": {"hook_name": f"blocks.{i}.hook_resid_mid"},
        }
        (sae / f"layer_{i}" / "cfg.json").write_text(json.dumps(facts))
        arrays["affine_skip_connection"] = np.ascontiguousarray(arrays.pop("W_skip").T)
        names = {"W_enc": "w_enc", "W_dec": "w_dec"}
        renamed = {names.get(name, name): array for name, array in arrays.items()}
        save_file(renamed, scope / f"layer_{i}_width_40" / "params.safetensors")
    (scope / "config.yaml").write_text("feature_input_hook: 'ln2.hook_normalized'\nscan: org/scope\n")
    others = [Transcoders.load(sae), Transcoders.load(scope)]
    assert [one.reads for one in others] == ["hook_resid_mid", "ln2.hook_normalized"]
    assert [one.scan for one in others] == ["b", "org/scope"]
    for i, layer in single.layers.items():
        active = layer.encode(x)
        assert len(active.values)
        for other in others:
            same = other.layers[i].encode(x)
            for mine, theirs in zip(active, same):
                np.testing.assert_allclose(mine, theirs, rtol=1e-5)
            chosen = active.features[:5]
            np.testing.assert_array_equal(layer.encoders(chosen), other.layers[i].encoders(chosen))
            np.testing.assert_array_equal(layer.decoders(chosen), other.layers[i].decoders(chosen))
            np.testing.assert_array_equal(layer.skip, other.layers[i].skip)


def test_topk_keeps_k_features(tmp_path):
    """All features of a TopK transcoder."""
    (tmp_path / "layer_0").mkdir()
    arrays = arrays_of(0)
    del arrays["threshold"]
    arrays["W_enc"] = np.ascontiguousarray(arrays["W_enc"].T)
    save_file(arrays, tmp_path / "layer_0" / "sae_weights.safetensors")
    facts = {"architecture": "transcoder", "activation_fn_kwargs": {"k": 3}}
    (tmp_path / "layer_0" / "cfg.json").write_text(json.dumps(facts))
    x = np.random.default_rng(5).standard_normal((4, D)).astype(np.float32)
    found = Transcoders.load(tmp_path).layers[0].encode(x)
    assert np.bincount(found.positions).tolist() == [3] * 4


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"W_dec": np.zeros((F, D + 1), np.float32)}, "must fit 40 biases"),
        ({"W_enc": np.zeros((D, F), np.float32)}, "must fit 40 biases"),
        ({"b_dec": None}, "must hold b_dec"),
        ({"activation_function.threshold": np.zeros(3, np.float32)}, "must fit 40 features"),
        ({"W_skip": np.zeros((D, 3), np.float32)}, "must fit 40 features"),
        ({"b_enc": np.full(F, np.nan, np.float32)}, "must hold finite"),
    ],
)  # fmt: skip
def test_wrong_files_are_one_clear_error(pair, tmp_path, change, error):
    """A broadcast, an index error, or numbers of nothing."""
    folder = save_single(tmp_path / "t")
    arrays = arrays_of(1) | change
    arrays.pop("threshold", None)
    arrays = {name: array for name, array in arrays.items() if array is not None}
    save_file(arrays, folder / "layer_1.safetensors")
    with pytest.raises(FormatError, match=error):
        attribute(llama_session(pair), IDS, folder)


def test_transcoders_of_another_model(pair, tmp_path):
    """A graph of a model with another depth; a directory without transcoders; a layer that is missing."""
    folder = save_single(tmp_path / "t")
    (folder / f"layer_{L - 1}.safetensors").unlink()
    with pytest.raises(ConfigError, match="must have 3 layers of width 48, as the model, not 2 of 48"):
        attribute(llama_session(pair), IDS, folder)
    (folder / "layer_0.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"must have 3 layers of width 48, as the model, not some \(\[1\]\)"
    ):
        attribute(llama_session(pair), IDS, folder)
    (folder / "layer_1.safetensors").unlink()
    with pytest.raises(FormatError, match=r"must have layer_0\.safetensors,"):
        Transcoders.load(folder)


@pytest.mark.parametrize("form", ["skip", "across"])
def test_effects_are_those_of_the_graph_taken_as_a_model(pair, tmp_path, form):
    """A path of features that is lost or taken twice, a feature below zero, a factor that is a difference."""
    folder = save_across(tmp_path / "t") if form == "across" else save_single(tmp_path / "t", True)
    session = llama_session(pair)
    graph = attribute(session, IDS, folder, max_features=10_000)
    n = len(graph.features)
    through = np.eye(n) - graph.edges[:n, :n] / graph.activations  # a change of each by a change of others
    for node, factor in ((0, 1.001), (n // 2, 0.999)):
        change = np.zeros(n)
        change[node] = (factor - 1) * graph.activations[node]
        expected = np.linalg.solve(through, change)
        logits = graph.edges[-len(graph.logit_tokens) :, :n] @ (expected / graph.activations)
        found = graph.effects({node: factor})
        np.testing.assert_allclose(found[:n], expected, rtol=1e-3, atol=1e-7)
        np.testing.assert_allclose(found[-len(logits) :], logits, rtol=1e-3, atol=1e-7)
    off = graph.effects(dict.fromkeys(range(n), 0.0))
    np.testing.assert_allclose(off[:n], -graph.activations, rtol=1e-6)
    assert (graph.effects({0: 50.0})[:n] >= -graph.activations * 1.0001).all()
    with pytest.raises(RequestError, match=f"nodes 0 to {n - 1}"):
        graph.effects({n: 0.0})


def measured(pair, folder, **options):
    """(session, graph, what measures effects of its nodes)."""
    llm, transcoders = llama_session(pair), Transcoders.load(folder)
    llm.interp.catalog.transcoders["mine"] = transcoders
    graph = attribute(llm, IDS, transcoders, **{"max_features": 10_000, **options})
    return llm, graph, GraphMeasure(llm, graph, "mine")


@pytest.mark.parametrize("form", ["single", "skip", "across"])
def test_measured_effects_are_the_graphs(pair, tmp_path, form):
    """An edge that the model does not have: runs of it with other features, and all else held as it was."""
    folder = save_across(tmp_path / "t") if form == "across" else save_single(tmp_path / "t", form == "skip")
    _, graph, measure = measured(pair, folder)
    n = len(graph.features)
    for node in (0, n // 3, n // 2, n - 1):
        for factors in ({node: 2.0}, {node: 0.0, n // 4: 3.0}):
            expected, found = (one.effects(factors, held="features") for one in (graph, measure))
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
            expected, found = (one.effects(factors, held="choice") for one in (graph, measure))
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
        expected, found = (one.effects({node: 1.001}, held="attention") for one in (graph, measure))
        np.testing.assert_allclose(found, expected, rtol=1e-2, atol=5e-3 * np.abs(expected).max())
    before, after = (measure.effects({0: factor}, held="attention") for factor in (1.0, -5.0))
    assert not before.any()
    assert (after[:n] + graph.activations >= -1e-5)[1:].all(), "features answer, and are not below zero"
    assert (graph.features[after[:n] != 0, 1] >= graph.features[0, 1]).all(), "of no earlier token"


def test_effects_in_the_model(pair, tmp_path):
    """Attention or norms that are held where nothing is to be, logits of another position or token."""
    llm, graph, measure = measured(pair, save_single(tmp_path / "t"))
    for node in (0, len(graph.features) - 1):
        found = measure.effects({node: 0.0})
        edits = graph.interventions({node: 0.0}, "mine")
        runs = [llm.interp.run_with_hooks(IDS, interventions=each)[0, -1] for each in ([], edits)]
        leads = [(logits - logits.mean())[graph.logit_tokens] for logits in runs]
        n_logits = len(graph.logit_tokens)
        np.testing.assert_allclose(found[-n_logits:], leads[1] - leads[0], atol=1e-4)
        assert found[node] == -graph.activations[node]
    with pytest.raises(
        RequestError, match="'held' must be one of features, choice, attention, patterns, nothing, not"
    ):
        measure.effects({0: 0.0}, held="norms")
    with pytest.raises(RequestError, match="'factors' must be of nodes 0 to"):
        measure.effects({len(graph.edges): 0.0})


@pytest.mark.parametrize("form", ["single", "across"])
def test_effects_in_the_model_with_its_patterns(pair, tmp_path, form):
    """Norms or MLPs that do not answer, patterns that do: the model, with each layer's pattern put back."""
    folder = save_across(tmp_path / "t") if form == "across" else save_single(tmp_path / "t")
    llm, graph, measure = measured(pair, folder)
    names = [f"blocks.{i}.attn.hook_pattern" for i in range(graph.n_layers)]
    before, cache = llm.interp.run_with_cache(IDS, names)

    def put_back(value, hook):
        return cache[hook.name]

    hooks = [(name, put_back) for name in names]
    for node in (0, len(graph.features) // 2, len(graph.features) - 1):
        edits = graph.interventions({node: 0.0}, "mine")
        after = llm.interp.run_with_hooks(IDS, hooks, interventions=edits)
        leads = [(one[0, -1] - one[0, -1].mean())[graph.logit_tokens] for one in (before, after)]
        found = measure.effects({node: 0.0}, held="patterns")
        np.testing.assert_allclose(found[-len(leads[0]) :], leads[1] - leads[0], atol=1e-4)
        assert found[node] == -graph.activations[node]
    assert not measure.effects({0: 1.0}, held="patterns").any()


def test_a_graph_of_another_model_is_not_measured(pair, tmp_path):
    """Numbers of features that the transcoders do not have."""
    llm, graph, _ = measured(pair, save_single(tmp_path / "t"))
    wrong = graph.features.copy()
    wrong[0, 2] = F
    with pytest.raises(RequestError, match="'graph' must be of this model"):
        GraphMeasure(llm, replace(graph, features=wrong), "mine")


def test_interventions_are_on_the_features_of_the_nodes(pair, tmp_path):
    """An intervention at another position, layer or feature than its node's."""
    llm, transcoders = llama_session(pair), Transcoders.load(save_single(tmp_path / "t"))
    session = llm.interp
    session.catalog.transcoders["mine"] = transcoders
    graph = attribute(llm, IDS, transcoders, max_features=10_000)
    node = next(i for i, (layer, _, _) in enumerate(graph.features.tolist()) if layer == L - 1)
    layer, position, feature = graph.features[node].tolist()
    (edit,) = graph.interventions({node: 3.0}, "mine")
    name = f"blocks.{layer}.hook_mlp_out"
    _, before = session.run_with_cache(IDS, names=[name])
    _, after = session.run_with_cache(IDS, names=[name], interventions=[edit])
    expected = np.zeros((len(IDS), D), np.float32)
    decoder = transcoders.layers[layer].decoders(np.array([feature]))[0, 0]
    expected[position] = 2 * graph.activations[node] * decoder
    np.testing.assert_allclose(after[name][0] - before[name][0], expected, atol=1e-4)


def test_what_is_refused(pair, tmp_path):
    """Several prompts, tokens that are not tokens, hooks that are of another width, recurrent layers."""
    session, transcoders = llama_session(pair), Transcoders.load(save_single(tmp_path / "t"))
    with pytest.raises(RequestError, match="requires a single prompt"):
        attribute(session, [IDS, IDS], transcoders)
    with pytest.raises(RequestError, match="token ids from 0 to 79"):
        attribute(session, IDS, transcoders, targets=[80])
    wrong = Transcoders(transcoders.layers, reads="mlp.hook_post")
    with pytest.raises(RequestError, match="cannot read or write"):
        attribute(session, IDS, wrong)


def test_the_command_writes_a_graph(tmp_path):
    """A file that viewers do not read: ids that no link has, numbers as texts."""
    path = write_tiny(tmp_path / "tiny.gguf")
    with LLM(path, n_threads=1) as llm:
        d, n_layers = llm.config.d_model, llm.config.n_layers
    rng = np.random.default_rng(0)
    (tmp_path / "t").mkdir()
    for i in range(n_layers):
        arrays = {"W_enc": (F, d), "W_dec": (F, d), "b_enc": (F,), "b_dec": (d,)}
        made = {name: rng.standard_normal(shape).astype(np.float32) / 5 for name, shape in arrays.items()}
        save_file(made, tmp_path / "t" / f"layer_{i}.safetensors")
    out = tmp_path / "graph.json"
    command = [
        "circuit",
        str(path),
        "Once upon a time",
        "--transcoders",
        str(tmp_path / "t"),
        "-o",
        str(out),
        "--json",
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    told, found = json.loads(done.stdout), json.loads(out.read_text())
    assert (told["nodes"], told["links"]) == (len(found["nodes"]), len(found["links"]))
    names = {node["node_id"] for node in found["nodes"]}
    assert len(names) == len(found["nodes"])
    assert all({link["source"], link["target"]} <= names for link in found["links"])
    assert {node["feature_type"] for node in found["nodes"]} >= {
        "embedding",
        "logit",
        "cross layer transcoder",
    }
    assert found["metadata"]["slug"] == "graph"
    assert found["metadata"]["prompt"] == "Once upon a time"
    command[2], command[6] = "Once </script><b>upon", str(tmp_path / "graph.html")
    assert CliRunner().invoke(app, command).exit_code == 0
    page = (tmp_path / "graph.html").read_text()
    (data,) = re.findall(r"const graph = (.*);", page)
    assert "<" not in data
    shown = json.loads(data)
    assert shown["metadata"]["prompt"] == "Once </script><b>upon"
    features = [n for n in shown["nodes"] if n["feature_type"] == "cross layer transcoder"]
    assert sum("top_tokens" in node for node in shown["nodes"]) == len(features)
    with LLM(path, n_threads=1) as llm:
        layer, feature, _ = map(int, features[0]["node_id"].split("_"))
        decoder = Transcoders.load(tmp_path / "t").layers[layer].decoders(np.array([feature]))[0, 0]
        best = llm.tokenizer.decode([int(np.argmax(decoder @ llm.weights.W_U))], continues=True)
    assert features[0]["top_tokens"][0] == best
    wrong = CliRunner().invoke(app, ["circuit", str(path), "Once", "--json"])
    assert wrong.exit_code == 2
    assert "--transcoders DIR --out" in wrong.output
