"""SmolLM3 (Hugging Face 2025): Llama with layers that do not rotate, which are configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kukri.config import ModelConfig
from kukri.models.architecture import Architecture
from kukri.models.keys import Keys
from kukri.models.lenses import NOPE_KEY, set_rotating
from kukri.models.llama import Llama

_INTERVAL = 4  # from one layer without RoPE to the next, unless a file lists them


def _each_fourth(keys: Keys, facts: dict[str, Any]) -> None:
    """What a GGUF file without kukri's key means."""
    set_rotating(facts, [(i + 1) % _INTERVAL != 0 for i in range(facts["n_layers"])])


def _list_none(config: ModelConfig, keys: dict[str, Any]) -> None:
    """An empty list, where no key would mean each fourth layer."""
    keys.setdefault(NOPE_KEY, np.zeros(0, np.int32))


def _read_rotating(keys: Keys, facts: dict[str, Any]) -> None:
    """Despite its name, a 1 in `no_rope_layers` means that the layer does use RoPE."""
    n_layers = facts["n_layers"]
    if keys.value("no_rope_layers") is None:
        interval = keys.whole("no_rope_layer_interval", _INTERVAL)
        rotating = [(i + 1) % interval != 0 for i in range(n_layers)]
    else:
        stated = keys.first("no_rope_layers", int, n_layers)
        if not set(stated) <= {0, 1}:
            raise keys.error("no_rope_layers", "must hold only 0 and 1")
        rotating = [use == 1 for use in stated]
    set_rotating(facts, rotating)
    if keys.value("layer_types") is None:  # then windows are for the layers without RoPE
        facts["layers"] = tuple(
            replace(layer, window=None) if layer.use_rope else layer for layer in facts["layers"]
        )


def _write_rotating(config: ModelConfig, keys: dict[str, Any]) -> None:
    keys["no_rope_layers"] = [int(layer.use_rope) for layer in config.layers]


SMOLLM3 = Architecture(
    "smollm3",
    Llama,
    "SmolLM3ForCausalLM",
    interleaved_rope=True,
    read_gguf=_each_fourth,
    write_gguf=_list_none,
    read_hf=_read_rotating,
    write_hf=_write_rotating,
    reads={
        *("sliding_window", "use_sliding_window", "layer_types"),
        *("no_rope_layers", "no_rope_layer_interval"),
    },
    ignores={"max_window_layers"},
    defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6},
    biases={"self_attn": "attention_bias", "mlp": "mlp_bias"},
)
