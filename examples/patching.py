"""Interpretability by TransformerLens' names: logit lens, attribution, induction heads, patching, steering.

The patching follows Meng et al. (2022) and Wang et al. (2022): where in the model does the answer become what
it is?
"""

import numpy as np

from kukri import LLM
from kukri.interp import patching, plots

with LLM() as llm:

    def ids(text: str) -> list[int]:
        return llm.tokenizer.encode(text)

    paris, rome = ids(" Paris")[0], ids(" Rome")[0]
    france, italy = ids("The capital of France is"), ids("The capital of Italy is")

    # the stream after each layer, read by the final norm and the head
    _, clean = llm.run_with_cache(france)
    for layer, logits in enumerate(clean.logit_lens()[:, 0]):
        if layer % 6 == 0:
            print(f"before layer {layer:2}: {llm.tokenizer.decode([int(logits.argmax())])!r}")

    # which part adds most to the lead of Paris?
    parts, labels = clean.decompose_resid(pos_slice=-1, return_labels=True)
    lead = clean.logit_attrs(parts, paris, rome, pos_slice=-1)[:, 0]
    print("most of the lead of Paris is added by", ", ".join(labels[i] for i in np.argsort(-lead)[:3]))

    # heads that look at the token after the last time that this one came
    rng = np.random.default_rng(0)
    half = rng.integers(100, 40000, 20)
    _, repeated = llm.run_with_cache(np.concatenate([half, half]), names=lambda n: n.endswith("hook_pattern"))
    scores = np.stack(
        [np.diagonal(repeated["pattern", i][0], -19, 1, 2).mean(-1) for i in range(llm.config.n_layers)]
    )
    layer, head = np.unravel_index(scores.argmax(), scores.shape)
    print(f"the strongest induction head is L{layer}H{head}: {scores.max():.2f} of its attention")

    # what if one position of the stream were France's, in the run about Italy?
    def lead_of_paris(logits: np.ndarray) -> float:
        return float(logits[0, -1, paris] - logits[0, -1, rome])

    found = patching.get_act_patch_resid_pre(llm, italy, clean, lead_of_paris, logits="last")
    for i in range(0, llm.config.n_layers, 6):
        print(f"  patched before layer {i:2}: " + " ".join(f"{x:6.2f}" for x in found[i]))
    print(plots.attention_text(clean["pattern", 5][0, 0], [llm.tokenizer.decode([i]) for i in france]))

    # add to each token what tells the two countries apart
    _, other = llm.run_with_cache(italy)
    direction = (clean["resid_post", 12] - other["resid_post", 12])[0, 3]

    def steer(value: np.ndarray, hook: object) -> None:
        value += direction

    plain = llm.generate(italy, max_tokens=8, temperature=0)
    steered, _ = llm.generate_with_hooks(
        italy, max_tokens=8, temperature=0, fwd_hooks=[("resid_post12", steer)]
    )
    print(f"plain: {plain.text!r}, steered: {steered.text!r}")
