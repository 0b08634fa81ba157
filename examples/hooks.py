"""Reads and edits activations of the engine that also serves.

First the logit lens (nostalgebraist 2020): what would the model say if it stopped after a layer? Then the MLP
of each layer is silenced in turn, to see which of them the answer needs.
"""

import numpy as np

from kukri import LLM

PROMPT = "The capital of France is"

with LLM() as llm:
    ids = llm.tokenizer.encode(PROMPT)
    last_layer = llm.config.n_layers - 1
    activations: dict[str, np.ndarray] = {}

    def keep(name: str, x: np.ndarray) -> None:
        """A hook gets a view, [tokens of the step, width], and copies what it wants to keep."""
        activations[name] = x.copy()

    def next_token() -> str:
        return llm.tokenizer.decode([int(llm.logits(ids)[-1].argmax())])

    points = [
        f"blocks.{i}.{point}"
        for i in range(last_layer + 1)
        for point in ("hook_resid_mid", "hook_resid_post")
    ]
    with llm.hooks(dict.fromkeys(points, keep)):
        print(f"{PROMPT!r}: {next_token()!r}")

    # The array that a hook returns replaces the one it saw: here, the input of the final norm and the head.
    for layer in range(0, last_layer + 1, 3):
        after_layer = activations[f"blocks.{layer}.hook_resid_post"]
        with llm.hooks({f"blocks.{last_layer}.hook_resid_post": lambda name, x, y=after_layer: y}):
            print(f"  stopped after layer {layer:2}: {next_token()!r}")

    def silenced(layer: int) -> str:
        """The next token if this layer's MLP adds nothing: the stream after it is the stream before it."""
        before: dict[str, np.ndarray] = {}
        hooks = {
            f"blocks.{layer}.hook_resid_mid": lambda name, x: before.update(x=x.copy()),
            f"blocks.{layer}.hook_resid_post": lambda name, x: before["x"],
        }
        with llm.hooks(hooks):
            return next_token()

    for layer in range(last_layer + 1):
        if (token := silenced(layer)) != " Paris":
            print(f"  without the MLP of layer {layer:2}: {token!r}")
