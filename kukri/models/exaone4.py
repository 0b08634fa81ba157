"""EXAONE 4 (LG AI Research 2025): OLMo 2's blocks with heads normed as in Qwen3.

The larger model has windows in three of four layers; there the fourth does not rotate.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kukri.config import ModelConfig
from kukri.models.architecture import Architecture, drop_rotating_windows, set_rotating_windows
from kukri.models.keys import Keys
from kukri.models.llama import Llama
from kukri.models.olmo2 import Olmo2Block
from kukri.models.qwen3 import Qwen3Attention


def _read(key: str, keys: Keys, facts: dict[str, Any]) -> None:
    """The key of windows decides whether layers without one rotate."""
    if keys.value(key):
        set_rotating_windows(facts)


def _write_hf(config: ModelConfig, keys: dict[str, Any]) -> None:
    """Write that there is no window, because a missing key would mean one."""
    keys.setdefault("sliding_window", None)


EXAONE4 = Architecture(
    "exaone4",
    Llama.of(block_type=Olmo2Block.of(attention_type=Qwen3Attention)),
    "Exaone4ForCausalLM",
    full_interval=4,
    tensor_names={
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    reads={"sliding_window", "sliding_window_pattern", "layer_types"},
    defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096},
    read_hf=partial(_read, "sliding_window"),
    write_hf=_write_hf,
    read_gguf=partial(_read, "attention.sliding_window"),
    write_gguf=drop_rotating_windows,
)
