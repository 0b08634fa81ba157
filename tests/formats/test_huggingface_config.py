"""config.json: what transformers reads from it, kukri reads too, and what it would guess at is an error."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kukri.errors import FormatError, UnsupportedError
from kukri.formats.huggingface.config import hf_model_config, unknown_config_keys
from kukri.models import ARCHITECTURES
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import torch
    import transformers as tr


PATH = Path("dir/config.json")
# decoders; tests/models/test_encoders.py reads the others' files
KINDS = [
    name
    for name, architecture in ARCHITECTURES.items()
    if architecture.is_causal and not architecture.hf_type and name != "whisper"  # tests/sound
]
# whose heads and rotation differ by layer: tests/models/test_gemma4.py; whose layers are of one part
ALIKE = [kind for kind in KINDS if kind not in ("gemma4_text", "nemotron_h", "mamba2", "smallthinker")]
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
}
# what a class has no usable default of
NEEDED = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 4},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
}
MINIMAL = {"model_type": "llama", **TINY}


def config_class(kind):
    """Return the class that transformers has for a kind."""
    from tests.models import bailing_class, exaone_class, minicpm_class, smallthinker_class  # noqa: F401

    return type(tr.AutoConfig.for_model(kind))


def read(**keys):
    return hf_model_config(
        {key: value for key, value in {**MINIMAL, **keys}.items() if value != "absent"}, PATH
    )


@pytest.mark.parametrize("kind", ALIKE)
@pytest.mark.parametrize("full", [True, False], ids=["all keys", "only what differs"])
def test_transformers_own_files_are_read(kind, full):
    """Catches a key of transformers' that is taken for unknown, and a default that is another there."""
    needed = NEEDED.get(kind, {})
    config = config_class(kind)(**TINY, **needed, pad_token_id=0, eos_token_id=1, bos_token_id=1)
    stated = config.to_dict() if full else {"model_type": kind, **TINY, **needed}
    ours = hf_model_config(stated, PATH)
    heads = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # lfm2: two thirds of what is stated, in whole multiples of 256; others: a key of their own
    d_ffn = {"lfm2": 256, "granitemoehybrid": 1024, "qwen3_5_moe_text": 512}.get(kind, 96)
    assert (ours.architecture, ours.n_layers, ours.d_model, ours.d_ffn) == (kind, 8, 64, d_ffn)
    n_kv_heads = 4 if kind == "gpt_neox" else 2  # whose class has as many as queries
    kv_heads = (n_kv_heads, heads) if ours.latent is None else (1, heads + config.kv_lora_rank)
    assert (ours.n_heads, ours.n_kv_heads, ours.d_head, ours.n_vocab) == (4, *kv_heads, 300)
    assert ours.norm_eps == getattr(config, ARCHITECTURES[kind].hf_epsilon, 1e-5)  # OLMo has no key
    assert ours.tie_embeddings == config.tie_word_embeddings
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    assert ours.rope.theta == rope["rope_theta"]
    local = {layer.rope.theta for layer in ours.layers if layer.rope}
    assert local == ({config.rope_parameters["sliding_attention"]["rope_theta"]} if local else set())
    assert bool(local) == ("full_attention" in config.rope_parameters)
    assert [layer.window for layer in ours.layers] == windows_of(config)
    is_share = rope["rope_type"] == "proportional"  # of a whole head's frequencies, which is kept as divisors
    assert ours.rope.rotary_dim == int(heads * (1 if is_share else rope.get("partial_rotary_factor", 1)))
    scaling = ours.rope.scaling.kind if ours.rope.scaling else "default"
    assert scaling == ("llama3" if is_share else rope["rope_type"])
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * 8
    assert [layer.is_recurrent or layer.has_state for layer in ours.layers] == [
        "attention" not in k or "linear" in k for k in kinds
    ]
    assert ours.name == "dir"


def windows_of(config):
    """The windows that transformers' masks have, by layer."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    return [
        window if types is None or kind == "sliding_attention" else None
        for kind in types or [None] * config.num_hidden_layers
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_transformers_classes_counts_or_is_ignored_by_name(kind):
    """Catches a key that a class computes with, and that is left out as unknown."""
    fields = {field.name for field in dataclasses.fields(config_class(kind)) if field.init}
    general = set(tr.PretrainedConfig().to_dict())  # how a class is saved, run and labelled
    keys = {key for key in fields - general if not key.startswith("_")} - {"model_type"}
    assert len(keys) > 12
    stated = {**TINY, "model_type": kind, **dict.fromkeys(keys - TINY.keys())}
    assert unknown_config_keys(stated, PATH) == []


@pytest.mark.parametrize("spelling", ["layers_block_type", "layer_types", "hybrid_override_pattern"])
def test_layers_of_one_part(spelling):
    """Catches a layer that is taken for another, or a mixture's file for one with MLPs."""
    parts = ["linear_attention", "full_attention", "mlp", "linear_attention"]
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}

    def read_types(types):
        stated = "".join(letters[kind] for kind in types) if "pattern" in spelling else types
        keys = {**TINY, "model_type": "nemotron_h", "head_dim": 16, spelling: stated}
        return hf_model_config(keys, PATH)

    ours = read_types(parts)
    assert ours.architecture == "nemotron_h"
    assert [layer.is_recurrent for layer in ours.layers] == [True, False, False, True]
    assert [layer.is_mlp for layer in ours.layers] == [False, False, True, False]
    assert read_types(["moe" if kind == "mlp" else kind for kind in parts]).architecture == "nemotron_h_moe"
    with pytest.raises(UnsupportedError, match="names 'mlp' next to moe: several kinds of MLP"):
        read_types([*parts, "moe"])


PARTIAL = (
    "phi",
    "phi3",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "glm4",
    "glm4_moe",
    "bailing_moe",
    "stablelm",
    "nemotron",
    "gpt_neox",
)


@pytest.mark.parametrize("kind", ALIKE)
def test_partial_rotary_factor_is_read_where_transformers_reads_it(kind):
    """Catches half a head rotated in a model that rotates all of it, and the other way round."""
    reads = ARCHITECTURES[kind].reads
    rotates = {"position_embedding_type": "rope"} if "position_embedding_type" in reads else {}
    needed = {"model_type": kind, **TINY, **NEEDED.get(kind, {}), "partial_rotary_factor": 0.5}
    rotates |= NEEDED.get(kind, {})
    config = config_class(kind)(**TINY, pad_token_id=0, partial_rotary_factor=0.5, **rotates)
    with torch.device("meta"):  # no numbers are drawn
        model = tr.AutoModel.from_config(config)
    rotary = model.pos_emb if kind == "lfm2_moe" else model.rotary_emb
    frequencies = dict(rotary.named_buffers())
    rotated = 2 * len(frequencies.get("inv_freq", frequencies.get("full_attention_inv_freq")))
    if kind in (
        "gpt_oss",
        "ministral3",
        "apertus",
    ):  # scaled if it says nothing: transformers makes too few frequencies, and cannot run
        with pytest.raises(UnsupportedError, match="partial_rotary_factor"):
            hf_model_config({"model_type": kind, **TINY, "partial_rotary_factor": 0.5}, PATH)
        return
    if (
        kind == "glm4_moe_lite"
    ):  # rotates a part of its heads as it is; transformers cannot run a part of that
        with pytest.raises(UnsupportedError, match="partial_rotary_factor"):
            hf_model_config(needed, PATH)
        return
    ours = hf_model_config(needed, PATH)
    assert ours.rope.rotary_dim == rotated
    is_part = rotated < (ours.d_head if ours.latent is None else config.qk_rope_head_dim)
    assert is_part == (kind in PARTIAL)
    listed = unknown_config_keys(needed, PATH)
    assert listed == ([] if is_part else ["partial_rotary_factor"])


def test_unknown_keys_are_left_out_and_listed_or_refused():
    """Catches a model refused for a note, and one that runs without its multiplier."""
    assert read(mascot="a llama", max_seq_len=4) == read()
    assert unknown_config_keys({**MINIMAL, "mascot": 1}, PATH) == ["mascot"]
    assert read(logits_scaling=1.0, num_local_experts=0, final_logit_softcapping=None) == read()
    for key, value in (("logits_scaling", 8.0), ("num_local_experts", 8), ("residual_multiplier", 0.2)):
        with pytest.raises(UnsupportedError, match=f"'{key}' is unknown and may change"):
            read(**{key: value})
    # a word within a word says nothing
    assert read(header="h", normalized_by="team", conversation_template="chatml", overlap=7) == read()
    for key in ("use_layernorm", "attn_rescale", "l2norm", "my_scaled_heads", "clipped_bias", "pre_norms"):
        with pytest.raises(UnsupportedError, match=f"'{key}' is unknown and may change"):
            read(**{key: "yes"})
    with pytest.raises(UnsupportedError, match=r"'partial_rotary_factor' is 0\.5 together with a scaling"):
        read(partial_rotary_factor=0.5, rope_scaling={"type": "linear", "factor": 2.0})


def test_keys_that_the_user_knows_to_be_harmless(monkeypatch):
    """Catches a note that nobody can get past without a change of the file, and a key that kukri knows to
    matter and that is passed over with it.
    """
    notes = {"layer_note": "x", "training_temperature": 0.5}
    with pytest.raises(UnsupportedError, match="or set KUKRI_IGNORE_CONFIG_KEYS=layer_note"):
        read(**notes)
    monkeypatch.setenv(
        "KUKRI_IGNORE_CONFIG_KEYS", "training_temperature,layer_note,is_encoder_decoder,sliding_window"
    )
    assert read(**notes) == read()
    assert unknown_config_keys({**MINIMAL, **notes}, PATH) == [*notes]
    for key, value in (("is_encoder_decoder", True), ("residual_multiplier", 0.2)):
        with pytest.raises(UnsupportedError, match=f"'{key}'"):
            read(**notes, **{key: value})


@pytest.mark.parametrize("interval", [2, 4, 5])
def test_smollm3_layers_without_rope(interval):
    """Catches the inverted name: a 1 in no_rope_layers means that the layer does rotate."""
    config = tr.SmolLM3Config(**TINY, no_rope_layer_interval=interval)
    want = [bool(use) for use in config.no_rope_layers]
    assert want.count(False) == 8 // interval
    by_interval = read(model_type="smollm3", no_rope_layer_interval=interval)
    by_list = read(model_type="smollm3", no_rope_layers=config.no_rope_layers)
    assert [layer.use_rope for layer in by_interval.layers] == want
    assert [layer.use_rope for layer in by_list.layers] == want


def smollm3_windows(**keys):
    return [layer.window for layer in read(model_type="smollm3", **keys).layers]


def test_windows_are_those_of_each_class():
    """Catches a window on the wrong layers, or one that a switch has turned off."""
    qwen = {"sliding_window": 16, "max_window_layers": 5}
    for kind in ("qwen2", "qwen3"):
        config = config_class(kind)(**TINY, **qwen, use_sliding_window=True)
        want = [16 if t == "sliding_attention" else None for t in config.layer_types]
        assert want == [None] * 5 + [16] * 3
        on = read(model_type=kind, **qwen, use_sliding_window=True)
        assert [layer.window for layer in on.layers] == want
        stated = read(model_type=kind, **qwen, use_sliding_window=True, layer_types=config.layer_types[::-1])
        assert [layer.window for layer in stated.layers] == want[::-1]
        off = read(model_type=kind, **qwen, use_sliding_window=False)
        assert [layer.window for layer in off.layers] == [None] * 8
    assert {layer.window for layer in read(model_type="mistral", sliding_window=16).layers} == {16}
    assert {layer.window for layer in read(model_type="mistral", sliding_window=None).layers} == {None}
    assert {layer.window for layer in read(model_type="phi3", sliding_window=16).layers} == {16}
    config = tr.SmolLM3Config(**TINY, use_sliding_window=True, sliding_window=16)
    want = [16 if t == "sliding_attention" else None for t in config.layer_types]
    assert smollm3_windows(use_sliding_window=True, sliding_window=16) == want
    assert want.count(16) == 2


LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("parameters", "more", "facts"),
    [
        ({"rope_type": "linear", "factor": 2.0}, {}, {"kind": "linear", "factor": 2.0}),
        ({"rope_type": "dynamic", "factor": 2.0}, {}, {"kind": "dynamic", "original_context": 256}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16},
            {},
            {"kind": "yarn", "factor": 4.0, "original_context": 64, "beta_fast": 16.0, "beta_slow": 1.0},
        ),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            | {"original_max_position_embeddings": 32},
            {},
            {"kind": "llama3", "factor": 8.0, "original_context": 32, "high_freq_factor": 4.0},
        ),
        (
            {"rope_type": "longrope", **LONG},
            {"model_type": "phi3", "original_max_position_embeddings": 64},
            {"kind": "longrope", "factor": 4.0, "original_context": 64, "long_factors": (2.0,) * 8},
        ),
        (
            {"rope_type": "su", **LONG},
            {"model_type": "phi3", "original_max_position_embeddings": 64},
            {"kind": "longrope"},
        ),
    ],
    ids=lambda value: value.get("kind", "") if isinstance(value, dict) else "",
)
def test_rope_scaling_of_both_generations(parameters, more, facts):
    """Catches a scaling that is dropped, or one of the two ways to write it misread."""
    five = read(**more, rope_parameters={"rope_theta": 5e5, **parameters}).rope
    old = {("type" if key == "rope_type" else key): value for key, value in parameters.items()}
    four = read(**more, rope_theta=5e5, rope_scaling=old).rope
    assert four == five
    assert four.theta == 5e5
    assert {name: getattr(four.scaling, name) for name in facts} == facts


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"model_type": "gpt9"}, UnsupportedError, "'model_type' 'gpt9' is not supported: use .*llama"),
        ({"model_type": ["llama"]}, UnsupportedError, "is not supported"),
        ({"model_type": "absent"}, UnsupportedError, "'model_type' None"),
        ({"logit_softcap": 3}, UnsupportedError, "'logit_softcap' is unknown .* take it out of the file"),
        ({"quantization_config": {"bits": 4}}, UnsupportedError, "is without quant_method, .* GGUF file"),
        ({"quantization_config": []}, UnsupportedError, "is without quant_method"),
        ({"quantization_config": {"quant_method": "awq"}}, UnsupportedError, "packed by 'awq', which is not"),
        ({"rope_interleaved": True}, UnsupportedError, "'rope_interleaved' must be False"),
        ({"sliding_window": 5}, UnsupportedError, "'sliding_window' must be None"),
        ({"hidden_act": "mish"}, UnsupportedError, "'hidden_act' is 'mish': only silu, "),
        ({"hidden_act": "xielu"}, UnsupportedError, "'hidden_act' is 'xielu': only"),
        ({"hidden_size": "absent"}, FormatError, "'hidden_size' is missing"),
        ({"hidden_size": "64"}, FormatError, "'hidden_size' must be a whole number"),
        ({"hidden_size": True}, FormatError, "'hidden_size' must be a whole number"),
        ({"num_hidden_layers": 10**9}, FormatError, "'num_hidden_layers' must be from .*, not 1000000000"),
        ({"num_key_value_heads": 3}, FormatError, "must divide the number of heads, 4"),
        ({"rms_norm_eps": -1e-6}, FormatError, "'rms_norm_eps' must be a finite number above 0"),
        ({"rms_norm_eps": float("nan")}, FormatError, "'rms_norm_eps' must be a finite number"),
        ({"tie_word_embeddings": 1}, FormatError, "must be true or false"),
        ({"rope_scaling": "yarn"}, FormatError, "must be an object"),
        ({"rope_scaling": {"type": "ntk9"}}, UnsupportedError, "'rope_type' 'ntk9': only default"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "x": 1}}, UnsupportedError, "parameter 'x'"),
        ({"rope_scaling": {"type": "linear"}}, FormatError, r"'rope_scaling\.factor' must be"),
        ({"rope_scaling": {"full_attention": {}}}, UnsupportedError, "differs between layers"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}},
            FormatError,
            "RoPE must have 8 factors, not 1",
        ),
        ({"partial_rotary_factor": 1.5}, FormatError, "'partial_rotary_factor'"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, FormatError, "must have 8 entries, not 2"),
        ({"model_type": "smollm3", "no_rope_layers": [2] * 8}, FormatError, "only 0 and 1"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["chunked_attention"] * 8},
            UnsupportedError,
            "'chunked_attention': only full_attention, sliding_attention",
        ),
        ({"model_type": "gemma2", "layer_types": ["mamba"] * 8}, UnsupportedError, "'mamba': only"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"] * 3}, FormatError, "8 entries, not 3"),
        ({"model_type": "gemma2", "attn_logit_softcapping": -1.0}, FormatError, "must be a finite number"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, FormatError, "finite number above 0"),
        ({"model_type": "gemma2", "hidden_activation": "mish"}, UnsupportedError, "only silu"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, UnsupportedError, "only False"),
        ({"model_type": "gemma3_text", "rope_local_base_freq": -1.0}, FormatError, "above 0"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, FormatError, "must be from 1"),
        ({"model_type": "gemma3_text", "rope_parameters": {"full_attention": 3}}, FormatError, "an object"),
        (
            {"model_type": "olmo3", "rope_parameters": {"full_attention": {}, "mamba": {}}},
            UnsupportedError,
            "'mamba' as a type of layers",
        ),
        ({"model_type": "minicpm", "sparse_config": {"x": 8192}}, UnsupportedError, "only None is supported"),
        ({"model_type": "mamba2", "num_heads": 8, "head_dim": 32}, FormatError, "8 heads .* have 16"),
        ({"model_type": "mamba2", "num_heads": 3}, FormatError, "must divide the width 128"),
        (
            {"model_type": "mamba2", "num_heads": 8, "head_dim": 16, "time_step_limit": [0.0]},
            FormatError,
            "must be the least and the largest step",
        ),
        (
            {"model_type": "mamba2", "num_heads": 8, "head_dim": 16, "time_step_limit": [0.0, 10**400]},
            FormatError,
            "must be the least and the largest step",
        ),
        (
            {"model_type": "smallthinker", "sliding_window_layout": 3},
            FormatError,
            "must be a list of whole numbers, not 3",
        ),
        ({"model_type": "phimoe", "num_experts_per_tok": 3}, UnsupportedError, "only 2 is supported"),
        ({"model_type": "phimoe", "router_jitter_noise": 0}, FormatError, "must be a finite number above 0"),
        (
            {
                "model_type": "phimoe",
                "rope_scaling": {
                    **{"type": "longrope", "short_factor": [1] * 8, "long_factor": [1] * 8},
                    **{"short_mscale": 1.0, "long_mscale": 1.25},
                },
            },
            UnsupportedError,
            "'short_mscale' of 1 and a 'long_mscale' of 1.25",
        ),
        ({"model_type": "minicpm", "scale_emb": 0}, FormatError, "must be a finite number above 0"),
        ({"model_type": "granite", "residual_multiplier": 0}, FormatError, "must be a finite number above 0"),
        ({"model_type": "granite", "logits_scaling": "8"}, FormatError, "must be a number"),
    ],
    ids=str,
)  # fmt: skip
def test_what_makes_no_sense_is_one_clear_line(keys, error, message):
    """Catches a model that runs and is wrong, and a traceback for a file that is."""
    with pytest.raises(error, match=message) as caught:
        read(**keys)
    assert "dir/config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_published_files_of_lfm3_rotate_half_of_each_head():
    """Catches whole heads rotated, as transformers 5.24 does: files name no "proportional" rotation."""
    kinds = ["conv", "conv", "full_attention", "conv", "sliding_attention", "conv", "full_attention", "conv"]
    full, windowed = (
        {"partial_rotary_factor": 0.5, "rope_theta": 1e6, "rope_type": "default"},
        {"rope_theta": 10000, "rope_type": "default"},
    )
    found = [
        read(
            model_type="lfm3",
            layer_types=kinds,
            rope_parameters={"full_attention": {**full, **more}, "sliding_attention": windowed},
        )
        for more in ({}, {"rope_type": "proportional"})
    ]
    assert found[0] == found[1] == read(model_type="lfm3")


def test_first_files_of_exaone_say_the_same():
    """Catches a key of the publisher's own class that is refused or left out."""
    older = {"num_layers": 8, "layer_norm_epsilon": 1e-6, "activation_function": "silu", "embed_dropout": 0.0}
    usual = {"rms_norm_eps": 1e-6, "hidden_act": "silu"}
    assert read(model_type="exaone", **older, num_hidden_layers="absent") == read(
        model_type="exaone", **usual
    )


def test_keys_that_change_nothing_are_ignored_by_name():
    """Catches real files refused for the bookkeeping in them."""
    config = read(
        torch_dtype="bfloat16",
        rope_interleaved=False,
        is_llama_config=True,
        pretraining_tp=1,
        **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
    )
    assert config == read()
