"""What Gemma 4 alone has: files that contradict themselves, hooks, patterns and gradients of shared keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers as tr

from kukri.errors import ConfigError, FormatError, KukriError, UnsupportedError
from kukri.formats.huggingface.config import hf_config, hf_model_config
from kukri.quant.mixes import mix_types
from tests.models.tiny_models import make
from tests.test_llm_safetensors import GEMMA4, TINY

PATH = Path("config.json")
SHARED = {"hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
TYPES = ["sliding_attention", "full_attention"] * 2


def stated(**keys: Any) -> dict[str, Any]:
    return {**TINY, **GEMMA4, "model_type": "gemma4_text", "layer_types": TYPES, **SHARED, **keys}


@pytest.mark.parametrize(
    ("keys", "error", "what"),
    [
        ({"num_kv_shared_layers": 4}, FormatError, "num_kv_shared_layers.*between 0 and 3"),
        ({"num_kv_shared_layers": 3}, FormatError, "leaves no layer for layer 1"),
        ({"vocab_size_per_layer_input": 9}, UnsupportedError, "vocab_size_per_layer_input"),
        ({"use_bidirectional_attention": "all"}, UnsupportedError, "use_bidirectional_attention"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, FormatError, "does not divide 4"),
        (
            {"per_layer_config": {"1": {"head_dim": 64}, "3": {"head_dim": 32}}},
            KukriError,
            "per_layer_config",
        ),
        ({"per_layer_config": 3}, KukriError, "per_layer_config"),
        ({"hidden_size_per_layer_input": -1}, FormatError, "hidden_size_per_layer_input"),
    ],
)
def test_wrong_keys_are_named(keys: dict[str, Any], error: type[KukriError], what: str) -> None:
    """A layer that would read keys of a layer that has none, tables of another size, a crash."""
    given = stated(**keys)
    given.pop("global_head_dim") if "per_layer_config" in keys else None
    with pytest.raises(error, match=what):
        hf_model_config(given, PATH)


@pytest.mark.parametrize(("layer", "source"), [(2, 2), (2, 3), (3, 2), (2, 1), (1, -1)])
def test_a_layer_reads_an_earlier_one_of_its_kind(layer: int, source: int) -> None:
    """A layer that reads itself, a later layer, one that reads another itself, or one with other heads."""
    config = make("gemma4_text")[1]
    layers = [*config.layers]
    layers[layer] = replace(layers[layer], kv_from=source)
    with pytest.raises(ConfigError, match=f"layer {layer} reads the keys and values of layer {source}"):
        replace(config, layers=tuple(layers))


@pytest.mark.parametrize("is_old", [True, False])
@pytest.mark.parametrize("name", ["shared", "keys"])
def test_both_spellings_are_read_and_written(name: str, is_old: bool) -> None:
    """transformers 5's `per_layer_config` ignored, a fact that one of the two loses, or one not written."""
    keys = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
    given = stated(**(keys | {"num_kv_shared_layers": 0, "layer_types": None} if name == "keys" else {}))
    want = hf_model_config(given, PATH)
    full = want.attention(3)
    assert (full.d_head, want.attention(0).d_head) == (32, 16)
    assert [layer.kv_from for layer in want.layers] == ([None] * 4 if name == "keys" else [None, None, 0, 1])
    assert full.keys_are_values == (name == "keys")
    assert full.n_kv_heads == (1 if name == "keys" else 2)
    again = tr.Gemma4TextConfig(**given).to_dict() if not is_old else hf_config(want, ())
    assert ("per_layer_config" in again) != is_old
    assert replace(hf_model_config(again, PATH), name=want.name) == want


def test_tables_of_layers_keep_8_bits() -> None:
    """The table of all layers' embeddings, or what reads it, at 4 bits."""
    shapes = {
        **{"per_layer_token_embd.weight": (512, 256), "per_layer_model_proj.weight": (256, 256)},
        **{"blk.0.inp_gate.weight": (256, 256), "blk.0.proj.weight": (256, 256)},
        **{"blk.0.ffn_up.weight": (256, 256), "token_embd.weight": (512, 256)},
    }
    for mix in ("Q4_K_M", "Q4_0", "IQ4_XS", "Q2_K"):
        types = {name: kind.name for name, kind in mix_types(mix, shapes, 2).items()}
        of_layers = {
            kind for name, kind in types.items() if "per_layer" in name or name[6:9] in ("inp", "pro")
        }
        assert of_layers == {"Q8_0"}
        assert types["blk.0.ffn_up.weight"] != "Q8_0"
    assert set(mix_types("F16", shapes, 2).values()) == {mix_types("F16", shapes, 2)["token_embd.weight"]}
