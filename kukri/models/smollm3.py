"""SmolLM3 (Hugging Face 2025): Llama with layers that do not rotate, which are configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kukri.config import ModelConfig
from kukri.models.architecture import Architecture
from kukri.models.keys import Keys
from kukri.models.lenses import NOPE_KEY, Format, Lens, set_rotating
from kukri.models.llama import Llama


class _Rotation(Lens):
    """Which layers rotate: those with a 1 in `no_rope_layers`, despite its name, or all but each n-th."""

    def read(self, keys: Keys, form: Format, facts: dict[str, Any]) -> None:
        n_layers = facts["n_layers"]
        if form == "hf" and keys.value("no_rope_layers") is not None:
            rotating = keys.first("no_rope_layers", int, n_layers)
            if not set(rotating) <= {0, 1}:
                raise keys.error("no_rope_layers", "must hold only 0 and 1")
        else:
            interval = keys.whole("no_rope_layer_interval", 4) if form == "hf" else 4
            rotating = [(i + 1) % interval != 0 for i in range(n_layers)]
        set_rotating(facts, map(bool, rotating))
        if form == "hf" and keys.value("layer_types") is None:  # then layers without RoPE have the windows
            facts["layers"] = tuple(
                replace(layer, window=None) if layer.use_rope else layer for layer in facts["layers"]
            )

    def write(self, config: ModelConfig, form: Format, keys: dict[str, Any]) -> None:
        if form == "hf":
            keys["no_rope_layers"] = [int(layer.use_rope) for layer in config.layers]
        else:
            keys.setdefault(NOPE_KEY, np.zeros(0, np.int32))  # without the key each fourth would not


SMOLLM3 = Architecture(
    "smollm3",
    Llama,
    "SmolLM3ForCausalLM",
    interleaved_rope=True,
    lenses=(_Rotation(),),
    reads={
        *("sliding_window", "use_sliding_window", "layer_types"),
        *("no_rope_layers", "no_rope_layer_interval"),
    },
    ignores={"max_window_layers"},
    defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6},
    biases={"self_attn": "attention_bias", "mlp": "mlp_bias"},
)
