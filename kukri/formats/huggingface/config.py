"""`ModelConfig` from a checkpoint's `config.json`, as transformers 4 and 5 write it, and back."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kukri.config import MAX_TOKEN_TYPES, PROBLEM_TYPES, HeadConfig, LayerConfig, ModelConfig, RopeConfig
from kukri.errors import FormatError, UnsupportedError, brief, reading
from kukri.formats.facts import (
    INTERVAL,
    dense_layers,
    keys_of,
    read_mixture,
    read_numbers,
    read_recurrent,
    write_activation,
    write_mixture,
    write_numbers,
    write_recurrent,
)
from kukri.formats.huggingface.rope_keys import LAYER_TYPES, local_rope_keys, read_ropes, scaling_keys
from kukri.formats.layer_patterns import Pattern, layers_of, with_local_rope
from kukri.models import ARCHITECTURES, Architecture
from kukri.models.keys import Keys
from kukri.vision.encoders import family_of

_POSITIONS = "max_position_embeddings"
# Keys of every architecture that are read and are not numbers.
_READ = frozenset(
    [
        *("model_type", "hidden_act", "tie_word_embeddings", "partial_rotary_factor"),
        *("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"),
    ]
)

# Keys that change nothing about what a trained model computes; docs/formats/details.md says why.
IGNORED_KEYS = frozenset(
    [
        # where the file comes from; of `architectures` the head is read
        *("_name_or_path", "architectures", "auto_map", "transformers_version", "transformers.js_config"),
        *("is_llama_config", "unsloth_fixed", "unsloth_version", "name_or_path", "_commit_hash"),
        # training
        *("initializer_range", "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"),
        *("hidden_dropout", "gradient_checkpointing", "pretraining_tp", "finetuning_task"),
        # how transformers runs it: kukri has its own ways
        *("torch_dtype", "dtype", "use_cache", "_attn_implementation", "attn_implementation"),
        *("_attn_implementation_autoset", "output_attentions", "output_hidden_states", "return_dict"),
        *("torchscript", "use_return_dict", "chunk_size_feed_forward", "keys_to_ignore_at_inference"),
        # tokens: generation_config.json and the tokenizer's files say more; eos_token_id is read with them
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
        *("tokenizer_class", "prefix", "unk_token_id"),
        # read if a head has labels, and defaults for tasks
        *("id2label", "label2id", "num_labels", "problem_type", "task_specific_params"),
        *("classifier_dropout", "token_classification_bias"),  # a bias is taken if there is one
    ]
)

# Keys that change nothing while they hold this.
_NEUTRAL: dict[str, Any] = {
    "rope_interleaved": False,
    "is_encoder_decoder": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "use_bfloat16": False,
    "quantization_config": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "use_mrope": False,
}


# Types of texts in models of images and text that go by another's name
_TEXT_TYPES = {
    "gemma4_unified_text": "gemma4_text",
    "paddleocr_vl": "llama",  # a file that states text and images in one, as below
    "paddleocr_vl_text": "llama",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}

# Keys of its first files that say what its class does in any case
_PADDLEOCR_UNREAD = ("rope_is_neox_style", "use_3d_rope", "use_flash_attention", "weight_share_add_bias")

# The environment variable with keys, separated by commas, of which the user knows that they change nothing
IGNORED_VARIABLE = "KUKRI_IGNORE_CONFIG_KEYS"

# Words between the underscores of keys that change the computation of some architecture, and words made of
# several, such as layernorm: such a key is refused unless it says "none".
_CHANGES = re.compile(
    r"(?:^|_)(?:rms|l\d|pre|post|sub|multi|un|re)?(?:softcap(?:ping)?|logit|multiplier|scal(?:e|ed|ing)|expert|moe"
    r"|alibi|lora|rope|rotary|position|window|sliding|interleaved?|parallel|qk|norm(?:aliz(?:e|ation))?|temperature"
    r"|clamp|bias|attention|head|layer|residual|ssm|conv(?:\dd|olution)?|mamba\d?|mla|sparse|clip(?:ped|ping)?)+"
    r"(?:s|es|ed|al)?(?:$|_)"
)


def hf_model_config(config: Mapping[str, Any], path: Path, name: str = "") -> ModelConfig:
    """The configuration of the model that `config`, the contents of the config.json at `path`, describes.

    Raises FormatError naming the key that is missing, of another type or nonsense, and UnsupportedError for a
    model_type, or a feature of one, that kukri does not run. `unknown_config_keys` lists the keys left out.
    """
    with reading(path):
        architecture, keys = _architecture(config, path)
    with keys.reading():
        return _model_config(keys, architecture, name)


def _model_config(keys: Keys, architecture: Architecture, name: str) -> ModelConfig:
    _check_neutral(keys, architecture)
    numbers = read_numbers(keys, "hf", architecture, {})
    if architecture.first_position:
        keys.expect("pad_token_id", architecture.first_position - 1)  # its position is the one before
        numbers["max_context"] -= architecture.first_position
        if numbers["max_context"] < 1:
            raise keys.error(_POSITIONS, f"must be more than {architecture.first_position}")
    rope, local = RopeConfig(), None
    if architecture.has_rope:
        rope, local = read_ropes(keys, architecture, numbers["d_head"], numbers["max_context"])
    if rope.scaling is not None:
        numbers["max_context"] = rope.scaling.reach(numbers["max_context"])
    layers = _layers(keys, architecture, numbers["n_layers"])
    has_types = "type_vocab_size" in architecture.reads
    found = dict(
        **numbers,
        architecture=architecture.name,
        activation=_activation(keys, architecture),
        tie_embeddings=keys.flag("tie_word_embeddings"),
        rope=rope,
        layers=layers if local is None else with_local_rope(layers, local),
        name=name or keys.path.parent.name,
        head=_head(keys, architecture),
        mixture=read_mixture(keys, "hf", architecture, numbers["d_ffn"]),
        recurrent=read_recurrent(keys, "hf", architecture, numbers["d_model"]),
        is_causal=architecture.is_causal,
        n_token_types=keys.whole("type_vocab_size", most=MAX_TOKEN_TYPES) if has_types else 0,
        n_positions=0 if architecture.has_rope else numbers["max_context"],
    )
    architecture.read_hf(keys, found)
    for lens in architecture.lenses:
        lens.read(keys, "hf", found)
    return ModelConfig(**found)


def _activation(keys: Keys, architecture: Architecture) -> str:
    """The op of MLPs' activation, which some classes do not read."""
    key, own = architecture.hf_activation, architecture.activation
    is_own = key in architecture.ignores or keys.value(key, own) == own
    return architecture.activation_op if is_own else keys.activation(key)


def text_config(stated: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the language model in a model of images and text; of any other, as it is."""
    own = stated.get("text_config")
    if stated.get("model_type") == "paddleocr_vl":
        keys = {
            **(own if isinstance(own, dict) else stated),
            "tie_word_embeddings": stated.get("tie_word_embeddings", True),
        }
        biases = dict.fromkeys(("attention_bias", "mlp_bias"), keys.pop("use_bias", False))
        return {**biases, **{key: value for key, value in keys.items() if key not in _PADDLEOCR_UNREAD}}
    outer = stated.get("model_type")
    if not isinstance(own, dict) or (own.get("model_type") != f"{outer}_text" and family_of(outer) is None):
        return dict(stated)
    above = {key: stated[key] for key in ("tie_word_embeddings", "eos_token_id") if key in stated}
    return {**own, **above}


def hf_config(config: ModelConfig, names: Collection[str]) -> dict[str, Any]:
    """The contents of config.json; `names` are the checkpoint's tensors, Hugging Face's names.

    Raises UnsupportedError for settings without a key.
    """
    if config.head.kind != "language_model":
        raise UnsupportedError(
            f"a head of kind {config.head.kind} is not supported in safetensors: transformers names its "
            "tensors differently in each architecture"
        )
    windows = [layer.window for layer in config.layers]
    architecture = _writable(config.architecture, any(windows))
    made: dict[str, Any] = {
        "model_type": architecture.hf_type or architecture.name,
        "architectures": [architecture.hf_class],
        **write_numbers(config, "hf", architecture),
        **write_activation(config, "hf", architecture),
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope.theta,
        "rope_scaling": scaling_keys(config.rope) if config.rope.scaling else None,
        **local_rope_keys(config, architecture),
        # the tokenizer's files say them; left out, each class has ids of its own that the vocabulary may lack
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **_window_keys(architecture, windows),
        **_recurrent_keys(config, architecture),
        **write_mixture(config, "hf", architecture),
    }
    if architecture.partial_rotary:
        made["partial_rotary_factor"] = config.rope.rotary_dim / config.d_head
    elif config.latent is None and config.rope.rotary_dim != config.d_head:
        raise UnsupportedError(f"heads that rotate in part are not supported in {architecture.name}")
    if architecture.hf_mark:
        made |= dict([architecture.hf_mark])
    if "original_max_position_embeddings" in architecture.reads:
        scaling = config.rope.scaling
        made["original_max_position_embeddings"] = scaling.original_context if scaling else config.max_context
    for part, key in architecture.biases.items():
        if isinstance(key, str):
            biases = (name for name in names if name.endswith(".bias") and ".e_score_correction." not in name)
            of_part = (name for name in biases if f".{part}." in f".{name}")
            made[key] = made.get(key, False) or any(of_part)
    architecture.write_hf(config, made)
    for lens in architecture.lenses:
        lens.write(config, "hf", made)
    _check_written(config, made, architecture)
    return made


def _check_written(config: ModelConfig, made: Mapping[str, Any], architecture: Architecture) -> None:
    """Raises UnsupportedError unless the keys say what the configuration does: some have no key."""
    again = hf_model_config(made, Path("config.json"), config.name)
    lost = [part for (part, want), (_, got) in zip(_said(config), _said(again)) if want != got]
    scales = [(c.attention(i).scale for i in range(c.n_layers)) for c in (config, again)]
    lost += ["scale of scores" for want, got in zip(*scales) if not math.isclose(want, got, rel_tol=1e-5)]
    if lost:
        raise UnsupportedError(f"these {lost[0]} are not supported by config.json of {architecture.name}")


def _said(config: ModelConfig) -> Iterator[tuple[str, Any]]:
    """Return the required values of config.json, by name."""
    for part in (
        "d_model",
        "n_heads",
        "n_vocab",
        "max_context",
        "mixture",
        "is_causal",
        "has_gates",
        "latent",
        "activation",
    ):
        yield part, getattr(config, part)
    for i, layer in enumerate(config.layers):
        this = config.attention(i)
        yield "layers without RoPE", this.rope is None
        yield "windows", this.window
        for part in ("d_head", "n_kv_heads", "kv_from", "keys_are_values"):
            yield f"{part} by layer", getattr(this, part)
        yield "layers of one part", layer.is_mlp
        yield "dense layers", layer.is_dense
        yield "MLPs by layer", config.mlp_width(i)
        yield "recurrent layers", layer.is_recurrent


def unknown_config_keys(config: Mapping[str, Any], path: Path) -> list[str]:
    """The keys that neither kukri nor transformers' class of this model_type reads.

    Raises UnsupportedError for a model_type that kukri does not run.
    """
    with reading(path):
        architecture, keys = _architecture(config, path)
    known = _known(architecture) | _NEUTRAL.keys() | architecture.fixed.keys()
    ignored = [] if architecture.partial_rotary else ["partial_rotary_factor"]
    return [key for key in keys.values if key not in known or (key in ignored and config[key] != 1)]


def _architecture(config: Mapping[str, Any], path: Path) -> tuple[Architecture, Keys]:
    """The architecture, and its keys."""
    model_type = _TEXT_TYPES.get(str(stated := config.get("model_type")), stated)
    named = [one for one in ARCHITECTURES.called(model_type) if (one.hf_type or one.name) == model_type]
    marked = [one for one in named if one.hf_mark and _holds(config, *one.hf_mark)]
    marked += [one for one in named if one.hf_when and one.hf_when(config)]
    found = marked or [one for one in named if not (one.hf_mark or one.hf_when)]
    if not found:
        known = ", ".join(dict.fromkeys(one.hf_type or name for name, one in ARCHITECTURES.items()))
        raise UnsupportedError(f"{path}: 'model_type' {brief(model_type)} is not supported: use {known}")
    architecture = found[0]
    with reading(path):
        config = architecture.respelled({key: _infinite(value) for key, value in config.items()})
    if architecture.aliases:
        newer = {
            architecture.aliases[key]: value for key, value in config.items() if key in architecture.aliases
        }
        config = {key: value for key, value in config.items() if key not in architecture.aliases} | newer
    if architecture.experts is not None:  # transformers writes either name and reads both
        other = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
        own = architecture.experts.n_experts
        name = other.get(own)
        if name in config and own not in config:
            config = {own if key == name else key: value for key, value in config.items()}
    return architecture, Keys(config, path, defaults=architecture.defaults)


def _holds(config: Mapping[str, Any], key: str, value: Any) -> bool:
    """True if a key is there and holds a value, of its type."""
    stated = config.get(key)
    return type(stated) is type(value) and stated == value


def _infinite(value: Any) -> Any:
    """A value, its infinite numbers as such: transformers 5 writes them as objects."""
    if isinstance(value, list):
        return [_infinite(item) for item in value]
    return math.inf if value == {"__float__": "Infinity"} else value


def _known(architecture: Architecture) -> set[str]:
    """The keys that are read or ignored, whatever they hold."""
    own = keys_of(architecture, "hf") | {key for key in architecture.biases.values() if isinstance(key, str)}
    if architecture.experts is not None:
        own |= {"output_router_logits", "router_aux_loss_coef"}  # for training
    return own | _READ | IGNORED_KEYS | architecture.ignores


def _check_neutral(keys: Keys, architecture: Architecture) -> None:
    """Raises UnsupportedError for a key that changes the computation in a way that kukri does not run."""
    if (quantized := keys.value("quantization_config")) is not None and not _is_read(quantized, architecture):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        message = "is without quant_method, which says how the weights are packed"
        if method is not None:
            message = f"says that the weights are packed by {brief(method)}, which is not supported"
        remedy = "take the original checkpoint, or a GGUF file"
        raise keys.unsupported("quantization_config", f"{message}: {remedy}")
    known = _known(architecture)
    harmless = os.environ.get(IGNORED_VARIABLE, "").split(",")
    for key, value in keys.values.items():
        if key in known:
            continue
        if key in architecture.fixed:
            if value is not None:
                keys.expect(key, architecture.fixed[key])
        elif key in _NEUTRAL:
            if value != _NEUTRAL[key] and not (key == "is_decoder" and architecture.is_causal):
                raise keys.unsupported(key, f"must be {_NEUTRAL[key]!r}, and nothing else is supported")
        elif key in harmless or not _CHANGES.search(key):
            continue
        elif value and not (type(value) is float and value == 1):
            message = "is unknown and may change what the model computes: if not, take it out of the file"
            raise keys.unsupported(key, f"{message} or set {IGNORED_VARIABLE}={key}")


def _is_read(quantized: Any, architecture: Architecture) -> bool:
    """True for weights that are packed in a form which is read: gpt-oss's experts, BitNet's matrices."""
    method = architecture.hf_quantized
    return method != "" and isinstance(quantized, dict) and quantized.get("quant_method") == method


def _writable(name: str, has_windows: bool) -> Architecture:
    """The architecture that a configuration is written as: GGUF's one name may stand for several."""
    own = ARCHITECTURES[name]
    if has_windows and "sliding_window" not in own.reads:
        own = next(
            (a for a in ARCHITECTURES.called(own.gguf) if a.gguf == own.gguf and "sliding_window" in a.reads),
            own,
        )
    return own


_MATRIX = re.compile(
    r"(?:.*\.)?(?:layers\.\d+\.(?P<module>\w+\.\w+(?<!norm))"
    r"|encoder\.layer\.\d+\.(?P<encoder_module>\w+(?:\.\w+)+(?<!LayerNorm)))\.weight"
)


def check_biases(config: Mapping[str, Any], names: Collection[str], path: Path) -> None:
    """Raises FormatError unless the tensors of a directory have the biases that its config.json promises.

    `config` holds a model_type that runs, `names` are the names of all tensors, `path` is the directory.
    """
    with reading(path):
        architecture, keys = _architecture(config, path / "config.json")
    for name in names:
        match = _MATRIX.fullmatch(name)
        if match is None:
            continue
        rule = architecture.bias_rule(match["module"] or match["encoder_module"])
        expected = keys.rule(rule)
        bias = name.removesuffix("weight") + "bias"
        if expected != (bias in names):
            problem = "is missing" if expected else "is there"
            stated = f"{'every' if expected else 'no'} {architecture.name} has it"
            if isinstance(rule, str):
                value = str(expected).lower() if rule in config else "absent, which means false"
                stated = f"key {rule!r} of config.json is {value}"
            raise FormatError(
                f"{problem}, but {stated}: correct the one that is wrong", path=path, tensor=bias
            )


_HEAD_CLASSES = {
    "ForQuestionAnswering": "question_answering",
    "ForSequenceClassification": "sequence_classification",
    "ForTokenClassification": "token_classification",
    "Model": "none",
}
_MAX_LABELS = 1 << 20


def _head(keys: Keys, architecture: Architecture) -> HeadConfig:
    """The head of the class that wrote the checkpoint; if that is not known a language model's, or none."""
    default = "language_model" if architecture.is_causal else "none"
    classes = keys.value("architectures")
    if not isinstance(classes, list) or not classes or not isinstance(classes[0], str):
        return HeadConfig(default)
    if architecture.is_causal and "Bidirectional" in classes[0]:
        raise keys.unsupported("architectures", f"is {brief(classes[0])}: only the causal model is supported")
    if not architecture.is_causal and classes[0].endswith("ForCausalLM"):
        raise keys.unsupported(
            "architectures", f"is {brief(classes[0])}: a head for the next token is not supported"
        )
    kind = next((kind for ending, kind in _HEAD_CLASSES.items() if classes[0].endswith(ending)), None)
    if kind is None or not kind.endswith("classification"):
        return HeadConfig(kind or default)
    if kind == "sequence_classification" and "classifier_pooling" in architecture.reads:
        keys.expect("classifier_pooling", "cls")
    problem_type, pad_id = keys.value("problem_type"), keys.value("pad_token_id")
    if problem_type is not None and problem_type not in PROBLEM_TYPES:
        raise keys.unsupported("problem_type", f"must be in {PROBLEM_TYPES}, not {brief(problem_type)}")
    if pad_id is not None and type(pad_id) is not int:
        raise keys.error("pad_token_id", f"must be a token id, not {brief(pad_id)}")
    return HeadConfig(kind, _labels(keys), problem_type, pad_id)


def _labels(keys: Keys) -> tuple[str, ...]:
    """`id2label` in the order of its ids; LABEL_0, LABEL_1 … if it is absent."""
    stated = keys.value("id2label")
    if stated is None:
        n_labels = 2 if keys.value("num_labels") is None else keys.whole("num_labels", most=_MAX_LABELS)
        return tuple(f"LABEL_{i}" for i in range(n_labels))
    if not isinstance(stated, dict) or set(stated) != {str(i) for i in range(len(stated))} or not stated:
        raise keys.error("id2label", "must name a label for each id from 0 on")
    labels = [stated[str(i)] for i in range(len(stated))]
    if not all(isinstance(label, str) for label in labels):
        raise keys.error("id2label", "must hold only strings")
    return tuple(labels)


def _layers(keys: Keys, architecture: Architecture, n_layers: int) -> tuple[LayerConfig, ...]:
    window = _window(keys, architecture)
    return layers_of(
        architecture,
        n_layers,
        window=window,
        windowed=0 if window is None else _windowed(keys, architecture, n_layers),
        recurrent=_recurrent(keys, architecture, n_layers),
        dense=dense_layers(keys, "hf", architecture, n_layers),
    )


def _recurrent(keys: Keys, architecture: Architecture, n_layers: int) -> Pattern | None:
    """Which layers are recurrent, by the rules of each configuration class."""
    own = architecture.recurrent
    if own is None:
        return None
    if (types := _layer_types(keys, architecture, n_layers)) is not None:
        return [kind in own.layer_types for kind in types]
    return keys.whole(INTERVAL, 4) if INTERVAL in architecture.reads else 0


def _layer_types(keys: Keys, architecture: Architecture, n_layers: int) -> Sequence[str] | None:
    """The kind of each layer; None if config.json does not list them."""
    own = architecture.recurrent
    known = {} if own is None else dict.fromkeys([own.attention_type, *own.layer_types])
    known |= dict.fromkeys(LAYER_TYPES if "layer_types" in architecture.reads else ())
    if not known or keys.value("layer_types") is None:
        return None
    types = keys.first("layer_types", str, n_layers)
    if unknown := set(types) - known.keys() - ({"full_attention", "attention"} if own else set()):
        message = f"names {brief(min(unknown))}: only {', '.join(known)} are supported"
        raise keys.unsupported("layer_types", message)
    return types


def _recurrent_keys(config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    """The keys of recurrent layers, and of which layers they are."""
    if config.recurrent is None or architecture.recurrent is None:
        return {}
    own = architecture.recurrent
    types = [
        own.layer_types[0] if layer.is_recurrent else LAYER_TYPES[1] if layer.window else own.attention_type
        for layer in config.layers
    ]
    return write_recurrent(config.recurrent, "hf", architecture, config.d_model) | {"layer_types": types}


def _window(keys: Keys, architecture: Architecture) -> int | None:
    """The size of windows, None if no layer has one."""
    reads = architecture.reads
    if "sliding_window" not in reads or keys.value("sliding_window") is None:
        return None
    if "use_sliding_window" in reads and not keys.flag("use_sliding_window"):
        return None
    return keys.whole("sliding_window")


def _windowed(keys: Keys, architecture: Architecture, n_layers: int) -> Pattern:
    """Which layers have the window, by the rules of each configuration class."""
    reads = architecture.reads
    if "layer_types" in reads and (types := _layer_types(keys, architecture, n_layers)) is not None:
        return [kind == "sliding_attention" for kind in types]
    if "max_window_layers" in reads:
        first = keys.whole("max_window_layers", least=0)
        return [layer >= first for layer in range(n_layers)]
    stated, usual = "sliding_window_pattern" in reads, architecture.full_interval
    return keys.whole("sliding_window_pattern", usual) if stated else usual


def _window_keys(architecture: Architecture, windows: list[int | None]) -> dict[str, Any]:
    sizes = {window for window in windows if window is not None}
    if len(sizes) > 1:
        raise UnsupportedError(f"windows of several sizes are not supported by config.json: {sorted(sizes)}")
    size = min(sizes, default=None)
    if "layer_types" in architecture.reads:
        switch = (
            {"use_sliding_window": size is not None} if "use_sliding_window" in architecture.reads else {}
        )
        if size is None and switch:
            return switch
        types = ["full_attention" if window is None else "sliding_attention" for window in windows]
        stated_size = {} if size is None else {"sliding_window": size}  # a class without one may not run
        return {**switch, **stated_size, "layer_types": types}
    if "sliding_window" not in architecture.reads:
        if size is not None:
            raise UnsupportedError(f"windows are not supported by config.json of {architecture.name}")
        return {}
    if size is not None and None in windows:
        raise UnsupportedError(f"windows in only some layers are not supported by {architecture.name}")
    return {"sliding_window": size}
