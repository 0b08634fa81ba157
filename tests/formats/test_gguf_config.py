"""`model_config` on good keys and bad."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kukri.config import LayerConfig, ModelConfig, RecurrentConfig, RopeConfig, RopeScaling
from kukri.errors import FormatError, UnsupportedError
from kukri.formats.gguf.config import (
    IGNORED_FAMILIES,
    IGNORED_KEYS,
    NEUTRAL,
    READ,
    is_known,
    model_config,
    model_metadata,
    unknown_keys,
)
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.writer import write_gguf
from kukri.formats.huggingface.config import hf_config
from kukri.models import ARCHITECTURES
from kukri.quant.types import QUANT_TYPES

F32 = QUANT_TYPES["F32"]
KEYS: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "tiny",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 48,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 2.0**-17,
    "llama.rope.freq_base": 5e5,
    "llama.rope.dimension_count": 12,
    "llama.vocab_size": 7,
}


@pytest.fixture
def config_of(tmp_path: Path):
    """A function: keys to change (None removes one), tensors -> the ModelConfig."""

    def read(
        changes: dict[str, Any] | None = None, tensors: dict[str, tuple[int, ...]] | None = None
    ) -> ModelConfig:
        keys = {k: v for k, v in {**KEYS, **(changes or {})}.items() if v is not None}
        shapes = {"token_embd.weight": (7, 48), "output_norm.weight": (48,)} if tensors is None else tensors
        path = tmp_path / "model.gguf"
        write_gguf(path, keys, {n: (F32, np.ones(s, np.float32), s) for n, s in shapes.items()})
        return model_config(GGUFFile(path))

    return read


def test_every_key_lands_in_its_field(config_of):
    """Two numbers swapped, or one taken from the wrong key."""
    assert config_of() == ModelConfig(
        architecture="llama",
        n_layers=2,
        d_model=48,
        n_heads=4,
        n_kv_heads=2,
        d_head=12,
        d_ffn=96,
        n_vocab=7,
        norm_eps=2.0**-17,
        max_context=128,
        tie_embeddings=True,
        rope=RopeConfig(theta=5e5, rotary_dim=12),
        layers=(LayerConfig(), LayerConfig()),
        name="tiny",
    )


def test_defaults_of_the_format(config_of):
    """An optional key treated as required, or another default than llama.cpp's."""
    optional = [
        "general.name",
        "llama.attention.head_count_kv",
        "llama.rope.freq_base",
        "llama.rope.dimension_count",
    ]
    config = config_of(dict.fromkeys(optional))
    assert config.name == "model"
    assert config.n_kv_heads == 4
    assert config.rope == RopeConfig(theta=10000.0, rotary_dim=12)


def test_heads_may_be_wider_than_the_model_divided(config_of):
    """key_length ignored: Mistral Nemo and others have heads that do not add up to the width."""
    wide = {"llama.attention.key_length": 20, "llama.attention.value_length": 20}
    config = config_of({**wide, "llama.rope.dimension_count": None})
    assert (config.d_head, config.rope.rotary_dim) == (20, 20)
    assert config_of({**wide, "llama.rope.dimension_count": 10}).rope.rotary_dim == 10


def test_an_output_tensor_unties_the_embeddings(config_of):
    """The output matrix ignored, or a tied model asked for one."""
    shapes = {"token_embd.weight": (7, 48), "output.weight": (7, 48)}
    assert not config_of(tensors=shapes).tie_embeddings


def test_a_sliding_window_reaches_the_layers(config_of):
    """A window in the file dropped, so that long prompts are answered wrongly."""
    assert config_of({"llama.attention.sliding_window": 64}).layers == (LayerConfig(window=64),) * 2
    assert config_of({"llama.attention.sliding_window": 0}).layers == (LayerConfig(),) * 2


def test_keys_that_change_nothing_are_accepted(config_of):
    """Files refused for keys at their neutral values, which converters write."""
    neutral = {
        "llama.expert_count": 0,
        "llama.attention.causal": True,
        "llama.rope.scaling.type": "none",
        "llama.rope.scaling.factor": 8.0,
        "llama.rope.scale_linear": 1.0,
        "llama.tensor_data_layout": "Meta AI original pth",
        "other.key": 3,
        "general.file_type": 3,
    }
    assert config_of(neutral) == config_of()


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"factor": 4.0}, RopeScaling("linear", 4.0)),  # llama.cpp's default kind
        ({"type": "linear", "factor": 2}, RopeScaling("linear", 2.0)),
        ({"type": "none", "factor": 2.0}, None),
        ({"original_context_length": 64}, None),  # Phi-3 mini 4k
        ({"type": "dynamic", "factor": 2.0}, RopeScaling("dynamic", 2.0, 128)),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64},
            RopeScaling("yarn", 4.0, 64),
        ),
        (
            {
                "type": "yarn",
                "factor": 1.0,
                "attn_factor": 0.5,
                "yarn_beta_fast": 16.0,
                "yarn_beta_slow": 2.0,
            },
            RopeScaling("yarn", 1.0, 128, attention_factor=0.5, beta_fast=16.0, beta_slow=2.0),
        ),
    ],
)
def test_rope_scaling(config_of, changes, want):
    """A scaling dropped, taken for another kind, or with another default than llama.cpp's."""
    assert config_of({f"llama.rope.scaling.{k}": v for k, v in changes.items()}).rope.scaling == want


def test_yarn_reaches_beyond_the_files_context(config_of):
    """A stretched model held to the context that it had before."""
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    assert config_of(yarn).max_context == 512
    assert config_of({**yarn, "llama.rope.scaling.original_context_length": 16}).max_context == 128


BASE = {"token_embd.weight": (7, 48), "output_norm.weight": (48,)}


def test_dynamic_scaling_reaches_as_far_as_its_factor(config_of):
    """A scaling that a context of the trained length never uses."""
    dynamic = {"llama.rope.scaling.dynamic_factor": 4.0}
    config = config_of(dynamic)
    assert (config.max_context, config.rope.scaling) == (512, RopeScaling("dynamic", 4.0, 128))
    written = model_metadata(config)
    assert written["llama.context_length"] == 128  # where readers that know no such scaling stop
    assert config_of(written | {"general.name": "tiny"}) == config


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_says_whether_its_bounds_are_rounded(config_of, truncate):
    """A scaling that comes back with other frequencies."""
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    config = config_of({**yarn, "llama.rope.scaling.yarn_truncate": truncate})
    assert config.rope.scaling.truncate is truncate
    written = model_metadata(config)
    assert ("llama.rope.scaling.yarn_truncate" in written) is not truncate  # others round
    assert config_of(written) == config


def test_rope_factors_are_tensors(config_of):
    """Llama 3's or Phi-3's factors ignored: fluent text that drifts with the length of the context."""
    ones = (1.0,) * 6
    llama3 = config_of(tensors={**BASE, "rope_freqs.weight": (6,)})
    assert llama3.rope.scaling == RopeScaling("llama3", factors=ones)
    both = {"rope_factors_short.weight": (6,), "rope_factors_long.weight": (6,)}
    longrope = config_of({"llama.rope.scaling.original_context_length": 32}, {**BASE, **both})
    assert longrope.rope.scaling == RopeScaling("longrope", 4.0, 32, short_factors=ones, long_factors=ones)
    keys = {"llama.rope.scaling.original_context_length": 32, "llama.rope.scaling.attn_factor": 1.5}
    assert config_of(keys, {**BASE, **both}).rope.scaling.attention_factor == 1.5


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        ({"type": "yarn"}, {}, "'llama.rope.scaling.factor' is missing"),
        ({"type": "yarn", "factor": -1.0}, {}, "above 0"),
        ({"type": "linear", "factor": 1e30}, {}, "at most 1048576"),
        ({"type": "yarn", "factor": 2.0, "yarn_beta_slow": 64.0}, {}, "beta_slow"),
        ({}, {"rope_freqs.weight": (5,)}, "RoPE must have 6 factors, not 5"),
        ({}, {"rope_freqs.weight": (2, 3)}, "must be a list"),
        ({}, {"rope_factors_long.weight": (6,)}, "rope_factors_short.weight' is missing"),
    ],
)
def test_rope_scaling_without_sense(config_of, changes, tensors, message):
    """NaN angles, or factors of another head size broadcast."""
    with pytest.raises(FormatError, match=message):
        config_of({f"llama.rope.scaling.{k}": v for k, v in changes.items()}, {**BASE, **tensors})


def test_factors_and_another_kind_contradict(config_of):
    """One of two scalings applied in silence."""
    with pytest.raises(UnsupportedError, match="'yarn' in a file with llama3 factors"):
        config_of({"llama.rope.scaling.type": "yarn"}, {**BASE, "rope_freqs.weight": (6,)})


def renamed(architecture: str) -> dict[str, Any]:
    """Changes that make KEYS those of another architecture."""
    moved = {k.replace("llama.", f"{architecture}."): v for k, v in KEYS.items() if k.startswith("llama.")}
    return {**dict.fromkeys(k for k in KEYS if k.startswith("llama.")), **moved} | {
        "general.architecture": architecture
    }


@pytest.mark.parametrize(
    ("layers", "want"), [(None, [3]), ([0, 2], [0, 2]), ([], [])], ids=["no key", "listed", "none"]
)
def test_nope_layers(config_of, layers, want):
    """SmolLM3 with RoPE on every layer, or on the wrong three quarters; our key not read."""
    keys = {**renamed("smollm3"), "smollm3.block_count": 6, "smollm3.attention.nope_layers": layers}
    shapes = {"token_embd.weight": (7, 48)} | {f"t{i}": (7,) for i in range(5)}
    found = config_of(keys, shapes).layers
    assert [i for i, layer in enumerate(found) if not layer.use_rope] == want
    for wrong in ([6], [-1], 3, [1.5], "1"):
        with pytest.raises(FormatError, match="nope_layers"):
            config_of({**keys, "smollm3.attention.nope_layers": wrong}, shapes)


@pytest.mark.parametrize("rotating", [(True, True), (False, False), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("name", ["llama", "smollm3", "cohere2", "exaone4", "granitemoehybrid_dense"])
def test_layers_that_rotate_survive(config_of, name, rotating):
    """Catches an empty list of layers without RoPE that is not written, where no key means another list."""
    windows = (64, None) if "sliding_window" in ARCHITECTURES[name].reads else (None, None)
    layers = tuple(LayerConfig(*each) for each in zip(rotating, windows))
    recurrent = RecurrentConfig(4, 2, 1, 8, 48) if ARCHITECTURES[name].recurrent else None
    config = replace(config_of(), architecture=name, layers=layers, recurrent=recurrent)
    shapes = {"token_embd.weight": (7, 48), "output_norm.weight": (48,)}
    found = config_of({**dict.fromkeys(KEYS), **model_metadata(config)}, shapes)
    assert found.layers == layers


def test_an_activation_without_a_key_is_refused(config_of):
    """Catches a GGUF file whose readers compute another activation."""
    config = config_of()
    assert config.activation == "silu"
    with pytest.raises(
        UnsupportedError, match="activation 'relu_squared' is not supported by GGUF for llama"
    ):
        model_metadata(replace(config, activation="relu_squared"))


@pytest.mark.parametrize(
    ("pattern", "want"),
    [([True, False], [64, None]), ([0, 1], [None, 64]), (2, [64, None]), (1, [None, None]), (0, [64, 64])],
)
def test_windows_of_single_layers(config_of, pattern, want):
    """A window on every layer of a model that has it on some."""
    keys = {"llama.attention.sliding_window": 64, "llama.attention.sliding_window_pattern": pattern}
    assert [layer.window for layer in config_of(keys).layers] == want
    with pytest.raises(FormatError, match="must have 2 entries, not 3"):
        config_of({**keys, "llama.attention.sliding_window_pattern": [1, 0, 1]})


def test_numbers_listed_for_each_layer(config_of):
    """A list where files usually have one number refused; a layer given another's size."""
    shapes = {"token_embd.weight": (7, 48)} | {f"t{i}": (7,) for i in range(2)}
    keys = {"llama.block_count": 3, "llama.attention.head_count": [4, 4, 4]}
    lists = {"llama.attention.head_count_kv": [2, 4, 2], "llama.feed_forward_length": [32, 64, 32]}
    config = config_of({**keys, **lists}, shapes)
    assert (config.n_heads, config.n_kv_heads, config.d_ffn) == (4, 4, 64)
    assert [config.attention(i).n_kv_heads for i in range(3)] == [2, 4, 2]
    assert [config.mlp_width(i) for i in range(3)] == [32, 64, 32]
    equal = config_of({**keys, "llama.feed_forward_length": [96] * 3}, shapes)
    assert equal == config_of({"llama.block_count": 3}, shapes)
    with pytest.raises(UnsupportedError, match=r"head_count' is \[2, 4\]: layers must have the same"):
        config_of({**keys, "llama.attention.head_count": [4, 2, 4]}, shapes)
    written = model_metadata(config)
    for key, numbers in lists.items():
        assert written[key].tolist() == numbers
    with pytest.raises(
        UnsupportedError, match=r"num_key_value_heads.* of single layers are not supported by llama's config"
    ):
        hf_config(config, [])


def test_phi2_has_its_own_names(config_of):
    """The epsilon of LayerNorm looked for under RMSNorm's key; GGUF's name for the architecture kept."""
    keys = {**renamed("phi2"), "phi2.attention.layer_norm_rms_epsilon": None}
    config = config_of({**keys, "phi2.attention.layer_norm_epsilon": 0.25})
    assert (config.architecture, config.norm_eps) == ("phi", 0.25)
    with pytest.raises(FormatError, match="layer_norm_epsilon' is missing"):
        config_of(keys)


def test_minicpm_files_without_multipliers_are_the_first_ones(config_of):
    """Multipliers of 1 where llama.cpp takes those of MiniCPM-2B."""
    config = config_of(renamed("minicpm"))
    found = (config.embedding_scale, config.residual_scale, config.logits_divisor)
    assert found == pytest.approx((12, 1.4 / 2**0.5, 48 / 256))


@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
@pytest.mark.parametrize(
    "value",
    [None, 0, -1, 2**40, "12", True, [12, 12, 12], [12.5, 12.5], [0, 0], float("nan"), float("inf"), -0.5],
)
def test_required_numbers_are_checked(config_of, key, value):
    """A missing, ill-typed or absurd number that surfaces later as a TypeError or a huge allocation."""
    with pytest.raises(FormatError, match=re.escape(f"'llama.{key}'")):
        config_of({f"llama.{key}": value})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", None, "is missing"),
        ("general.architecture", 5, "must be text, not int"),
        ("general.name", 5, "must be text"),
        ("llama.block_count", 3, "must be from 1 to 2"),
        ("llama.context_length", 2**25, "must be from 1 to"),
        ("llama.embedding_length", 64, r"is 64, but the width of tensor 'token_embd.weight' is 48"),
        ("llama.attention.head_count", 5, "must divide the width 48"),
        ("llama.attention.head_count_kv", 3, "must divide the number of heads, 4"),
        ("llama.attention.head_count_kv", 8, "must divide the number of heads, 4"),
        ("llama.attention.head_count_kv", [2, 3], "must divide the number of heads, 4, which 3 does"),
        ("llama.attention.key_length", 2**20, "must be from 1 to 1024"),
        ("llama.attention.key_length", 12.0, "whole number, not float"),
        ("llama.attention.sliding_window", -5, "must be from 0 to"),
        ("llama.rope.dimension_count", 11, "odd"),
        ("llama.rope.dimension_count", 14, "must be from 1 to 12"),
        ("llama.rope.freq_base", 0.0, "above 0"),
        ("llama.rope.freq_base", float("inf"), "above 0"),
        ("llama.rope.freq_base", "1e4", "must be a number"),
        ("llama.rope.scaling.type", 1, "must be text"),
        ("llama.attention.layer_norm_rms_epsilon", 1.5, "up to 1"),
    ],
)
def test_nonsense_is_named(config_of, key, value, message):
    """A configuration error without the key that caused it."""
    with pytest.raises(FormatError, match=message) as caught:
        config_of({key: value})
    assert f"'{key}'" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "clip", "'clip' is not supported: use .*llama"),
        ("llama.rope.scaling.type", "ntk", "'ntk': only none, linear"),
        ("llama.rope.scaling.type", "llama3", "'llama3'"),  # GGUF has it as a tensor
        ("llama.rope.scaling.alpha", 1000.0, "must be 0"),
        ("llama.rope.scale_linear", 2.0, "must be 1.0"),
        ("llama.expert_count", 8, "must be 0"),
        ("llama.attention.causal", False, "must be True"),
        ("llama.attention.causal", [1, 1], "must be True"),
        ("llama.attention.value_length", 24, "is 24"),
        ("llama.logit_scale", 0.5, "must be 1.0"),
    ],
)
def test_features_that_kukri_lacks_are_refused(config_of, key, value, message):
    """A key that changes the arithmetic ignored in silence: the model runs and is wrong."""
    with pytest.raises(UnsupportedError, match=message) as caught:
        config_of({key: value})
    assert key.removeprefix("general.") in str(caught.value)


def test_keys_that_say_none_are_read_as_none(config_of):
    """Files refused for zeros, which llama.cpp's own saver writes for all that a model has not."""
    zeros = {
        f"llama.{key}": 0
        for key in NEUTRAL
        if key not in ("attention.causal", "rope.scaling.yarn_ext_factor", "rope.dimension_sections")
    }
    scaling = {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 0.0}
    sections = {"llama.rope.dimension_sections": [0, 0, 0, 0]}
    assert config_of({**zeros, **scaling, **sections, "llama.attention.causal": True}) == config_of()
    ones = dict.fromkeys(("llama.logit_scale", "llama.embedding_scale", "llama.residual_scale"), 1.0)
    assert config_of(ones) == config_of()


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_scaling_by_zero_is_none(config_of, kind):
    """rope.scaling.factor 0 refused, or divided by; llama.cpp takes it for none."""
    keys = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 0.0}
    keys["llama.rope.scaling.original_context_length"] = 0
    assert config_of(keys) == config_of()


@pytest.mark.parametrize("key", sorted(NEUTRAL))
def test_keys_that_change_the_computation_are_refused(config_of, key):
    """A model of another kind that runs and is wrong."""
    value = False if key == "attention.causal" else 3
    with pytest.raises(UnsupportedError, match=f"'llama.{re.escape(key)}' must be .*, not {value}"):
        config_of({f"llama.{key}": value})


def test_keys_of_layers_with_a_window_must_say_what_the_others_do(config_of):
    """Two sizes of heads run as one; a file refused that says the same twice."""
    same = {
        "llama.attention.key_length": 12,
        "llama.attention.key_length_swa": 12,
        "llama.rope.freq_base_swa": 5e5,
    }
    assert config_of(same) == config_of()
    assert config_of({"llama.rope.freq_base_swa": 1e4}) == config_of()
    with pytest.raises(UnsupportedError, match=r"'llama.rope.freq_base_swa' must be 500000.0, not 10000.0"):
        config_of({"llama.rope.freq_base_swa": 1e4, "llama.attention.sliding_window": 64})


def test_unknown_keys_are_listed_and_left_out(tmp_path, config_of):
    """A file refused for a key that changes nothing, or a key left out in silence."""
    keys = {"llama.mascot": "llama", "llama.notes.colour": [1, 2], "other.key": 3}
    assert config_of(keys) == config_of()
    config_of(keys)
    with GGUFFile(tmp_path / "model.gguf") as file:
        assert unknown_keys(file) == ["llama.mascot", "llama.notes.colour"]
    config_of()
    with GGUFFile(tmp_path / "model.gguf") as file:
        assert unknown_keys(file) == []


def test_every_key_of_the_gguf_package_is_read_refused_or_ignored():
    """A key that changes what a model computes, and that is taken for a stranger's note."""
    listed = [
        value.removeprefix("{arch}.")
        for group in vars(gguf.Keys).values()
        if isinstance(group, type)
        for value in vars(group).values()
        if isinstance(value, str) and value.startswith("{arch}.") and "{dense}" not in value
    ]
    assert len(listed) > 90
    for architecture in ARCHITECTURES.values():
        assert [key for key in listed if not is_known(key, architecture)] == []
    assert not READ & NEUTRAL.keys()
    assert not IGNORED_KEYS & (READ | NEUTRAL.keys())
    assert not [key for key in READ if IGNORED_FAMILIES.fullmatch(key)]


def test_the_embedding_must_be_there_and_a_matrix(config_of):
    """An IndexError on a file without a vocabulary matrix, such as an adapter."""
    with pytest.raises(FormatError, match=r"'token_embd.weight' is missing"):
        config_of(tensors={"a": (7,)})
    with pytest.raises(FormatError, match=r"'token_embd.weight' has shape \(48,\)"):
        config_of(tensors={"token_embd.weight": (48,)})


def test_the_real_model(smollm2_path):
    """SmolLM2's configuration read wrongly."""
    config = model_config(GGUFFile(smollm2_path))
    assert (config.n_layers, config.d_model, config.d_ffn, config.n_vocab) == (30, 576, 1536, 49152)
    assert (config.n_heads, config.n_kv_heads, config.d_head, config.max_context) == (9, 3, 64, 8192)
    assert config.rope == RopeConfig(theta=100000.0, rotary_dim=64)
    assert config.tie_embeddings
    assert config.norm_eps == pytest.approx(1e-5)
