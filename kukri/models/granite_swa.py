"""Granite Swash (IBM 2026): Granite with windows in three of four layers, a sink for each head, and a RoPE
base for each layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kukri.config import ModelConfig
from kukri.models.gpt_oss import GPT_OSS, GptOssAttention
from kukri.models.granite import GRANITE, Granite, GraniteBlock
from kukri.models.granitemoe import GRANITEMOESHARED, GraniteMoeBlock
from kukri.models.keys import Keys
from kukri.models.lenses import Format, Lens
from kukri.models.stored import PARAMETER, Stored

_BASES = "layer_rope_theta"


class _Bases(Lens):
    """The RoPE base of each layer, 0 for a layer without rotation; without the list all have the model's."""

    def read(self, keys: Keys, form: Format, facts: dict[str, Any]) -> None:
        if keys.value(_BASES) is None:
            return
        layers, rope = facts["layers"], facts["rope"]
        stated = keys.first(_BASES, object, len(layers))
        bases = [0.0 if base == 0 else keys.as_positive(_BASES, base) for base in stated]
        ropes = [None if base in (0, rope.theta) else replace(rope, theta=base) for base in bases]
        facts["layers"] = tuple(
            replace(layer, use_rope=base != 0, rope=own)
            for layer, base, own in zip(layers, bases, ropes, strict=True)
        )

    def write(self, config: ModelConfig, form: Format, keys: dict[str, Any]) -> None:
        ropes = [config.attention(layer).rope for layer in range(config.n_layers)]
        keys[_BASES] = [0 if rope is None else rope.theta for rope in ropes]


_SINKS = {"self_attn.sinks": GPT_OSS.tensor_names["self_attn.sinks"]}
_OWN: dict[str, Any] = {
    "in_gguf": False,  # the gguf package has no names for it yet
    "full_interval": 4,
    "is_full_first": True,
    "reads": {"sliding_window", "layer_types", _BASES},
    "lenses": (_Bases(),),
}
_DEFAULTS = {"sliding_window": 128, "tie_word_embeddings": True}

GRANITE_SWA = replace(
    GRANITE,
    name="granite_swa",
    model=Granite.of(block_type=GraniteBlock.of(attention_type=GptOssAttention)),
    hf_class="GraniteSWAForCausalLM",
    defaults={**GRANITE.defaults, **_DEFAULTS, "num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    gguf="",
    tensor_names=_SINKS,
    **_OWN,
)

# Files have the names of transformers' class, other than files of the older mixtures.
_EXPERTS = {
    "block_sparse_moe.experts.gate_up_proj": ("mlp.experts.gate_proj", "mlp.experts.up_proj"),
    "block_sparse_moe.experts.down_proj": ("mlp.experts.down_proj",),
}

GRANITEMOE_SWA = replace(
    GRANITEMOESHARED,
    name="granitemoe_swa",
    model=Granite.of(block_type=GraniteMoeBlock.of(attention_type=GptOssAttention)),
    hf_class="GraniteMoeSWAForCausalLM",
    defaults={**GRANITEMOESHARED.defaults, "sliding_window": 128},
    gguf="",
    joined={
        "block_sparse_moe.router": ("mlp.gate",),
        **_EXPERTS,
        **{stored: modules for stored, modules in GRANITEMOESHARED.joined.items() if "shared" in stored},
    },
    tensor_names={**_SINKS, **dict.fromkeys(_EXPERTS, Stored("", PARAMETER))},
    **_OWN,
)
