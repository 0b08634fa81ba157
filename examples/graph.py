"""An attribution graph over small transcoders that it fits: which features and tokens make the answer.

`python examples/graph.py DIR` draws it there, and saves it for the viewers of circuit-tracer and Neuronpedia.
Real transcoders are trained on many millions of tokens; these show the way. Needs matplotlib and
safetensors: `pip install ".[plots]" safetensors`.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from kukri import LLM
from kukri.interp import plots

PROMPT = "The capital of France is"
N_FEATURES, N_TOKENS = 96, 512
TEXT = Path(__file__).read_text(encoding="utf-8")  # any text will do, and millions of tokens are better
ENDS = ("mlp.hook_in", "hook_mlp_out")


def fit(x, y, rng):
    """A layer's transcoder: features find activations of the text, and least squares say what they write."""
    centred = x - x.mean(axis=0)
    chosen = centred[rng.choice(len(x), N_FEATURES, replace=False)]
    encoder = chosen / (chosen**2).sum(axis=1, keepdims=True)  # 1 at the activation itself
    bias = -encoder @ x.mean(axis=0) - 0.2
    features = np.maximum(x @ encoder.T + bias, 0)
    ridge = np.eye(N_FEATURES) * 0.1
    decoder = np.linalg.solve(features.T @ features + ridge, features.T @ (y - y.mean(axis=0)))
    arrays = {"W_enc": encoder, "b_enc": bias, "W_dec": decoder, "b_dec": y.mean(axis=0)}
    return {name: np.ascontiguousarray(array, np.float32) for name, array in arrays.items()}


with LLM() as llm, tempfile.TemporaryDirectory() as scratch:
    folder, transcoders = Path(sys.argv[1] if len(sys.argv) > 1 else scratch), Path(scratch) / "transcoders"
    transcoders.mkdir()
    tokens = llm.tokenizer.encode(PROMPT + "\n" + TEXT)[:N_TOKENS]
    _, cache = llm.run_with_cache(tokens, names=lambda name: name.endswith(ENDS), return_type=None)
    rng = np.random.default_rng(0)
    for layer in range(llm.config.n_layers):
        x, y = (cache[f"blocks.{layer}.{end}"][0, 1:] for end in ENDS)  # the first token is unlike all others
        save_file(fit(x, y, rng), transcoders / f"layer_{layer}.safetensors")

    graph = llm.attribute(PROMPT, transcoders, max_features=256)
    drawn = graph.save(
        folder / "graph.json",
        lambda token: llm.tokenizer.decode([token], continues=True),
        edge_threshold=0.8,  # fewer links than circuit-tracer's 0.98: a picture shows no more
    )
    plots.attribution_graph(drawn, folder / "graph.svg")
    strongest = graph.influence()[: len(graph.features)].argmax()
    layer, position, feature = graph.features[strongest]
    print(f"feature {feature} of layer {layer} at token {position} has the most influence")
    print(f"graph.svg: {len(drawn['nodes'])} nodes, {len(drawn['links'])} links")
