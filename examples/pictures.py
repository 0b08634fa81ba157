"""Pictures of one prompt: the logit lens, a layer's heads, and its strongest neurons token by token.

`python examples/pictures.py DIR` writes them there; in a notebook each call shows its picture. Needs
matplotlib: `pip install ".[plots]"`.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from kukri import LLM
from kukri.interp import plots

PROMPT = "When Mary and John went to the store, John gave a drink to"
LAYER = 5

with LLM() as llm, tempfile.TemporaryDirectory() as scratch:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else scratch)
    _, cache = llm.run_with_cache(PROMPT, return_type=None)
    words = [llm.tokenizer.decode([token]) for token in cache.tokens[0]]

    plots.logit_lens(cache, lambda token: llm.tokenizer.decode([token]), folder / "lens.svg")
    plots.attention_heads(cache["pattern", LAYER][0], words, folder / "heads.png", title=f"Layer {LAYER}")

    neurons = cache["post", LAYER][0]  # [pos, neuron]
    strongest = np.argsort(-neurons.max(axis=0))[:6]
    names = [f"neuron {i}" for i in strongest]
    plots.feature_timeline(neurons[:, strongest], words, folder / "neurons.png", names=names)
    print("pictures:", ", ".join(sorted(path.name for path in folder.iterdir())))
