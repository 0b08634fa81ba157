"""Graphs and features compared with circuit-tracer 0.5 and SAELens 6, which are not dependencies.

`pip install --no-deps circuit-tracer sae-lens transformer-lens` and what these import, in an environment of
their own: they want an older transformers.
"""

from __future__ import annotations

import numpy as np
import pytest

from kukri import LLM
from kukri.interp import SparseAutoencoder
from kukri.interp.features.transcoders import Transcoders
from kukri.interp.gradients.circuits import attribute
from kukri.interp.gradients.graph_effects import GraphMeasure
from tests.lazy_imports import lazy_imports
from tests.tiny_gguf import write_tiny

with lazy_imports():
    import torch

pytestmark = pytest.mark.slow
D, L, F = 64, 2, 60
IDS = np.random.default_rng(1).integers(3, 250, 9).tolist()


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = write_tiny(tmp_path_factory.mktemp("tracer") / "tiny.gguf")
    with LLM(path, backend="reference", kv_type="f32") as opened:
        yield opened


def hooked(llm, transcoders):
    """circuit-tracer's model with kukri's weights."""
    lens = pytest.importorskip("transformer_lens")
    made_by = pytest.importorskip("circuit_tracer.replacement_model.replacement_model_transformerlens")
    spec, config, points = llm.interp.trace.heads[0].spec, llm.config, llm.interp.points
    norms = [points[f"blocks.{i}.ln{n}.hook_normalized"].norm for i in range(L) for n in (1, 2)]
    w = llm.weights
    cfg = lens.HookedTransformerConfig(
        n_layers=L, d_model=D, n_ctx=64, d_head=spec.d_head, n_heads=spec.n_heads, d_vocab=config.n_vocab,
        n_key_value_heads=spec.n_kv_heads, d_mlp=w.W_in.shape[-1], act_fn="silu", gated_mlp=True,
        eps=norms[0].eps,
        normalization_type="RMS", positional_embedding_type="rotary", rotary_dim=spec.d_head, final_rms=True,
        rotary_base=10000, device="cpu", dtype=torch.float32, init_weights=True,
    )  # fmt: skip
    model = made_by.TransformerLensReplacementModel(cfg)
    state = model.state_dict()
    given = {
        "embed.W_E": w.W_E,
        "unembed.W_U": w.W_U,
        "ln_final.w": points["ln_final.hook_normalized"].norm.weight.data,
    }
    for i in range(L):
        block = f"blocks.{i}."
        given |= {block + f"ln{n}.w": norms[2 * i + n - 1].weight.data for n in (1, 2)}
        given |= {block + f"mlp.{name}": getattr(w, name)[i] for name in ("W_in", "W_gate", "W_out")}
        given |= {block + f"attn.{name}": getattr(w, name)[i] for name in ("W_Q", "W_O")}
        given |= {block + f"attn._{name}": getattr(w, name)[i] for name in ("W_K", "W_V")}
    assert given.keys() <= state.keys(), sorted(given.keys() - state.keys())
    state |= {name: torch.from_numpy(np.array(array, np.float32)) for name, array in given.items()}
    for name in state:  # biases
        if ".b_" in name or name.endswith("._b_K") or name.endswith("._b_V"):
            state[name] = torch.zeros_like(state[name])
    model.load_state_dict(state)
    model._configure_replacement_model(transcoders)
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = {f"t{i}": i for i in range(config.n_vocab)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    special = {"bos_token": f"t{IDS[0]}", "eos_token": "t1", "pad_token": "t1", "unk_token": "t0"}
    model.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    return model


def random_set(folder, form):
    """Transcoders of circuit-tracer's own classes, saved by them."""
    single = pytest.importorskip("circuit_tracer.transcoder.single_layer_transcoder")
    across = pytest.importorskip("circuit_tracer.transcoder.cross_layer_transcoder")
    jump = pytest.importorskip("circuit_tracer.transcoder.activation_functions").JumpReLU
    torch.manual_seed(0)
    hooks, cpu = ("mlp.hook_in", "hook_mlp_out"), torch.device("cpu")
    if form == "across":
        made = across.CrossLayerTranscoder(
            L, F, D, "jump_relu", lazy_decoder=False, feature_input_hook=hooks[0],
            feature_output_hook=hooks[1], scan="tiny", device=cpu, dtype=torch.float32,
        )  # fmt: skip
    else:
        layers = {
            i: single.SingleLayerTranscoder(
                D, F, jump(torch.zeros(F), 0.1), i, form == "skip", device=cpu, dtype=torch.float32
            )
            for i in range(L)
        }
        made = single.TranscoderSet(layers, *hooks, "tiny")
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(
                torch.rand_like(parameter) / 3 if "threshold" in name else torch.randn_like(parameter) / 8
            )
    made.to_safetensors(str(folder))
    return made


@pytest.mark.parametrize("form", ["single", "skip", "across"])
def test_graphs_are_circuit_tracers(llm, tmp_path, form):
    """Features, errors, edges or pruned graphs that differ from those of the package whose form they have."""
    tracer = pytest.importorskip("circuit_tracer.attribution.attribute")
    pruning = pytest.importorskip("circuit_tracer.graph")
    models = pytest.importorskip("circuit_tracer.frontend.graph_models")
    model = hooked(llm, random_set(tmp_path / "t", form))
    theirs = tracer.attribute(torch.tensor(IDS), model, max_n_logits=5, desired_logit_prob=0.5)
    ours = attribute(llm, IDS, tmp_path / "t", max_logits=5, logit_share=0.5, max_features=10_000)
    np.testing.assert_array_equal(ours.logit_tokens, theirs.logit_token_ids)
    np.testing.assert_allclose(ours.probabilities, theirs.logit_probabilities, rtol=1e-3)
    active = theirs.active_features[theirs.selected_features].numpy()
    order = np.lexsort(active.T[::-1])
    own = np.lexsort(ours.features.T[::-1])
    np.testing.assert_array_equal(ours.features[own], active[order])
    values = theirs.activation_values[theirs.selected_features].detach().numpy()
    np.testing.assert_allclose(ours.activations[own], values[order], rtol=1e-3, atol=1e-4)
    n, size = len(own), len(ours.edges)
    order, own = (np.concatenate([one, np.arange(n, size)]) for one in (order, own))
    edges, expected = ours.edges[own][:, own], theirs.adjacency_matrix.detach().numpy()[order][:, order]
    np.testing.assert_allclose(edges, expected, atol=1e-3 * abs(expected).max())
    masks = pruning.prune_graph(theirs, 0.8, 0.98)
    nodes, links = ours.prune(0.8, 0.98)
    assert (nodes[own] == masks[0].numpy()[order]).mean() > 0.99
    assert (links[own][:, own] == masks[1].numpy()[order][:, order]).mean() > 0.999
    made = models.Model(**ours.as_json(llm.tokenizer.token_text, "tiny"))
    assert len(made.nodes) == nodes.sum()


@pytest.mark.parametrize("form", ["single", "skip", "across"])
def test_interventions_are_circuit_tracers(llm, tmp_path, form):
    """Effects with other things held than the package holds: all but direct effects, or patterns alone."""
    model = hooked(llm, random_set(tmp_path / "t", form))
    transcoders = llm.interp.catalog.transcoders["mine"] = Transcoders.load(tmp_path / "t")
    graph = attribute(llm, IDS, transcoders, max_logits=4, max_features=10_000)
    measure = GraphMeasure(llm, graph, "mine")
    n, ids = len(graph.features), torch.tensor(IDS)
    layers, positions, numbers = torch.from_numpy(graph.features.T)

    def run(node, factor, **options):
        """Features [n], and logits less their mean."""
        given = [*graph.features[node].tolist(), factor * float(graph.activations[node])]
        logits, features = model.feature_intervention(ids, [tuple(given)], **options)
        lead = logits[0, -1] - logits[0, -1].mean()
        return torch.cat([features[layers, positions, numbers], lead[graph.logit_tokens]]).numpy()

    for held, options in (
        ("features", {"constrained_layers": range(L), "apply_activation_function": False}),
        ("patterns", {}),
    ):
        before = run(0, 1.0, **options)
        for node, factor in ((0, 0.0), (n // 3, 30.0), (n // 2, -20.0), (n - 1, 0.0)):
            expected = run(node, factor, **options) - before
            found = measure.effects({node: factor}, held=held)
            found = np.concatenate([found[:n], found[-len(graph.logit_tokens) :]])
            others = np.arange(len(found)) != node  # the package shows it as if it had not been set
            assert expected[others].any()
            tolerance = max(1e-3 * abs(expected[others]).max(), 5e-6)  # of float32 numbers of about 1
            np.testing.assert_allclose(found[others], expected[others], rtol=1e-3, atol=tolerance)


def fill(made):
    """Random weights, thresholds above zero."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = torch.rand_like(parameter) / 3 if "threshold" in name else torch.randn_like(parameter) / 8
            parameter.copy_(noise)
    return made


@pytest.mark.parametrize(
    "kind", ["Transcoder", "SkipTranscoder", "JumpReLUTranscoder", "JumpReLUSkipTranscoder"]
)
def test_transcoders_are_saelens(tmp_path, kind):
    """A folder as SAELens writes it, read with a part left out."""
    lens = pytest.importorskip("sae_lens")
    saved = pytest.importorskip("sae_lens.saes.sae")
    names = {"hook_name": "blocks.1.mlp.hook_in", "hook_name_out": "blocks.1.hook_mlp_out"}
    config = getattr(lens, f"{kind}Config")(
        d_in=D, d_sae=F, d_out=D, apply_b_dec_to_input=False, metadata=saved.SAEMetadata(**names)
    )
    made = fill(getattr(lens, kind)(config))
    made.save_model(tmp_path)
    found = Transcoders.load(tmp_path).reader(1)
    x = torch.randn(7, D)
    np.testing.assert_allclose(found.features(x.numpy()), made.encode(x).detach(), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found.reconstruct(x.numpy())[0], made(x).detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "kind", ["Standard", "Gated", "JumpReLU", "TopK", "BatchTopK", "MatryoshkaBatchTopK"]
)
def test_autoencoders_are_saelens(tmp_path, kind):
    """A form of training that is saved as another, read as if it were itself."""
    lens = pytest.importorskip("sae_lens")
    saved = pytest.importorskip("sae_lens.saes.sae")
    more = {"k": 6} if kind.endswith("TopK") else {}
    if kind.startswith("Matryoshka"):
        more["matryoshka_widths"] = [20, F]
    config = getattr(lens, f"{kind}TrainingSAEConfig")(
        d_in=D, d_sae=F, metadata=saved.SAEMetadata(hook_name="blocks.1.hook_resid_pre"), **more
    )
    made = fill(getattr(lens, f"{kind}TrainingSAE")(config))
    if hasattr(made, "topk_threshold"):
        made.topk_threshold.fill_(0.2)
    made.save_inference_model(tmp_path)
    theirs = lens.SAE.load_from_disk(tmp_path, device="cpu")
    ours = SparseAutoencoder.load(tmp_path)
    x = torch.randn(7, D)
    features = theirs.encode(x).detach()
    np.testing.assert_allclose(ours.features(x.numpy()), features, rtol=1e-3, atol=1e-4)
    out = theirs.decode(features).detach()
    np.testing.assert_allclose(ours.reconstruct(x.numpy())[0], out, rtol=1e-3, atol=1e-4)
