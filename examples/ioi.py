"""Which position and layer carry a name? Patching and its gradient estimate on indirect objects.

After Wang et al. (2022): in "When Mary and John went to the store, John gave a drink to" the answer is Mary.
`python examples/ioi.py DIR` also draws heat maps there.
"""

import sys
from pathlib import Path

import numpy as np

from kukri import LLM
from kukri.interp import gradients, patching, plots

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPT = "When Mary and John went to the store, Mary gave a drink to"

with LLM() as llm:
    clean, corrupt = llm.tokenizer.encode(CLEAN), llm.tokenizer.encode(CORRUPT)
    mary, john = llm.tokenizer.encode(" Mary")[0], llm.tokenizer.encode(" John")[0]
    words = [llm.tokenizer.decode([i]) for i in clean]
    lead = gradients.logit_difference(mary, john)  # a number, and its gradient by the logits

    _, cache = llm.run_with_cache(clean, names=lambda name: name.endswith("hook_resid_pre"), return_type=None)
    patched = patching.get_act_patch_resid_pre(
        llm, corrupt, cache, lambda logits: lead(logits)[0], logits="last", layers=range(0, 30, 3)
    )
    value = lead(llm.run_with_cache(corrupt, names=())[0])[0]
    moved = patched - value  # by each patch, exactly
    estimated = gradients.attribution_patch(llm, corrupt, clean, lead)[::3]  # all of them at once
    layer, pos = np.unravel_index(moved.argmax(), moved.shape)
    print(f"patching {words[pos]!r} before layer {3 * layer} moves the lead of Mary by {moved.max():.1f}")
    print(f"estimates and patches correlate: {np.corrcoef(moved.ravel(), estimated.ravel())[0, 1]:.2f}")

    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
        rows = [str(i) for i in range(0, 30, 3)]
        title = "stream before a layer patched: change of the lead of Mary"
        plots.heat_map(moved, folder / "patching.png", title=title, x_labels=words, y_labels=rows)
        title = "the same, estimated by attribution patching"
        plots.heat_map(estimated, folder / "attribution.png", title=title, x_labels=words, y_labels=rows)
