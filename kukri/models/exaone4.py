"""EXAONE 4 (LG AI Research 2025): OLMo 2's blocks with heads normed as in Qwen3.

The larger model has windows in three of four layers; there the fourth does not rotate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kukri.config import ModelConfig
from kukri.models.architecture import Architecture
from kukri.models.keys import Keys
from kukri.models.llama import Llama
from kukri.models.olmo2 import Olmo2Block
from kukri.models.qwen3 import Qwen3Attention


class Exaone4Block(Olmo2Block):
    """A layer with these heads."""

    attention_type = Qwen3Attention


class Exaone4(Llama):
    """The whole model."""

    block_type = Exaone4Block


def _rotate_windows(facts: dict[str, Any], window: Any) -> None:
    if window:
        facts["layers"] = tuple(replace(layer, use_rope=bool(layer.window)) for layer in facts["layers"])


def _read_hf(keys: Keys, facts: dict[str, Any]) -> None:
    _rotate_windows(facts, keys.value("sliding_window"))


def _read_gguf(keys: Keys, facts: dict[str, Any]) -> None:
    _rotate_windows(facts, keys.value("attention.sliding_window", 0))


def _write_gguf(config: ModelConfig, keys: dict[str, Any]) -> None:
    """Which layers rotate follows from their windows."""
    if all(layer.use_rope == bool(layer.window) for layer in config.layers):
        keys.pop("attention.nope_layers", None)


def _write_hf(config: ModelConfig, keys: dict[str, Any]) -> None:
    """Says that there is no window, where its absence would mean one."""
    keys.setdefault("sliding_window", None)


EXAONE4 = Architecture(
    "exaone4",
    Exaone4,
    "Exaone4ForCausalLM",
    full_interval=4,
    tensor_names={
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    reads={"sliding_window", "sliding_window_pattern", "layer_types"},
    defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096},
    read_hf=_read_hf,
    write_hf=_write_hf,
    read_gguf=_read_gguf,
    write_gguf=_write_gguf,
)
