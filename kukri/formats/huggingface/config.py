"""`ModelConfig` from a checkpoint's `config.json`, as transformers 4 and 5 write it."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kukri.config import (
    MAX_CONTEXT,
    MAX_HEAD,
    PROBLEM_TYPES,
    ROPE_SCALINGS,
    HeadConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
    RopeScaling,
)
from kukri.errors import ConfigError, FormatError, UnsupportedError, brief
from kukri.formats.gguf.config import rope_tensors

MAX_LAYERS = 1 << 12


@dataclass(frozen=True)
class HFArchitecture:
    """What transformers assumes of a model_type (its configuration class) where config.json is silent.

    `reads`: keys beyond the common ones; `ignores`: keys that files of this type carry and its class does not
    read; `defaults`: values of absent keys, None for one that follows from others; `biases`: which matrices
    of a layer have a bias, all of a module or one, always (True) or where a key says so.
    """

    reads: frozenset[str] = frozenset()
    ignores: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activation: str = "silu"
    norm_eps_key: str = "rms_norm_eps"
    biases: Mapping[str, str | bool] = field(default_factory=dict)


_BY_KEYS = {"self_attn": "attention_bias", "mlp": "mlp_bias"}
_WINDOWED = frozenset(["sliding_window", "use_sliding_window", "max_window_layers", "layer_types"])

HF_ARCHITECTURES: dict[str, HFArchitecture] = {
    "llama": HFArchitecture(
        reads=frozenset(["attention_bias", "mlp_bias"]),
        defaults={"num_key_value_heads": None},
        biases=_BY_KEYS,
    ),
    "mistral": HFArchitecture(
        reads=frozenset(["sliding_window"]),
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": HFArchitecture(
        reads=_WINDOWED,
        ignores=frozenset(["attention_bias"]),
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        biases={f"self_attn.{part}_proj": True for part in "qkv"},
    ),
    "qwen3": HFArchitecture(
        reads=_WINDOWED | {"attention_bias"},
        defaults={
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "head_dim": 128,
        },
        biases={"self_attn": "attention_bias"},
    ),
    "smollm3": HFArchitecture(
        reads=frozenset(
            [
                *("sliding_window", "use_sliding_window", "layer_types"),
                *("no_rope_layers", "no_rope_layer_interval", "attention_bias", "mlp_bias"),
            ]
        ),
        ignores=frozenset(["max_window_layers"]),
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6},
        biases=_BY_KEYS,
    ),
    "phi3": HFArchitecture(
        reads=frozenset(["sliding_window", "original_max_position_embeddings"]),
        ignores=frozenset(["attention_bias"]),
        defaults={
            "num_key_value_heads": None,
            "rms_norm_eps": 1e-5,
            "original_max_position_embeddings": 4096,
        },
    ),
    "phi": HFArchitecture(
        reads=frozenset(["qk_layernorm"]),
        defaults={"num_key_value_heads": None, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
        activation="gelu_new",
        norm_eps_key="layer_norm_eps",
        biases={"self_attn": True, "mlp": True},
    ),
    "starcoder2": HFArchitecture(
        reads=frozenset(["sliding_window", "use_bias"]),
        ignores=frozenset(
            [
                *("residual_dropout", "embedding_dropout", "activation_function", "layer_norm_epsilon"),
                *("norm_type", "mlp_type", "attention_softmax_in_fp32", "scale_attn_weights"),
                "scale_attention_softmax_in_fp32",
            ]
        ),
        defaults={
            **{"num_key_value_heads": 2, "norm_epsilon": 1e-5},
            **{"tie_word_embeddings": True, "use_bias": True},
        },
        activation="gelu_pytorch_tanh",
        norm_eps_key="norm_epsilon",
        biases={"self_attn": "use_bias", "mlp": "use_bias"},
    ),
}

# Keys of every architecture that `hf_model_config` reads.
_READ = frozenset(
    [
        *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
        *("hidden_act", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters"),
        "partial_rotary_factor",
    ]
)

# Keys that change nothing about what a trained model computes; docs/formats.md says why.
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
        # read where a head has labels, and defaults for tasks
        *("id2label", "label2id", "num_labels", "problem_type", "task_specific_params"),
        *("classifier_dropout", "token_classification_bias"),  # a bias is taken where there is one
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


def hf_model_config(config: Mapping[str, Any], path: Path, name: str = "") -> ModelConfig:
    """The configuration of the model that `config`, the contents of the config.json at `path`, describes.

    Raises FormatError naming the key that is missing, of another type or nonsense, and UnsupportedError for a
    model_type, or a feature of one, that kukri does not run: a key it does not know included.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in HF_ARCHITECTURES:
        known = ", ".join(HF_ARCHITECTURES)
        raise UnsupportedError(f"{path}: model_type {brief(model_type)} is not supported: kukri runs {known}")
    architecture = HF_ARCHITECTURES[model_type]
    keys = _Keys(config, path, architecture)
    keys.refuse_unknown()
    keys.expect("hidden_act", architecture.activation)
    if model_type == "phi":
        keys.expect("qk_layernorm", False)
    n_layers = keys.whole("num_hidden_layers", most=MAX_LAYERS)
    n_heads = keys.whole("num_attention_heads")
    n_kv_heads = n_heads if keys.value("num_key_value_heads") is None else keys.whole("num_key_value_heads")
    d_model = keys.whole("hidden_size")
    max_context = keys.whole("max_position_embeddings", most=MAX_CONTEXT)
    if n_heads % n_kv_heads:
        raise keys.error("num_key_value_heads", f"is {n_kv_heads}, which does not divide {n_heads} heads")
    d_head = _d_head(keys, d_model, n_heads)
    return ModelConfig(
        architecture=model_type,
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_head=d_head,
        d_ffn=keys.whole("intermediate_size"),
        n_vocab=keys.whole("vocab_size"),
        norm_eps=keys.positive(architecture.norm_eps_key, 1e-6),
        max_context=max_context,
        tie_embeddings=keys.flag("tie_word_embeddings"),
        rope=_rope(keys, model_type, d_head, max_context),
        layers=_layers(keys, model_type, n_layers),
        name=name or path.parent.name,
        head=_head(keys),
    )


_MATRIX = re.compile(r"(?:.*\.)?layers\.\d+\.(?P<module>(?P<part>self_attn|mlp)\.\w+(?<!norm))\.weight")


def check_biases(config: Mapping[str, Any], names: Collection[str], path: Path) -> None:
    """Raises FormatError unless the tensors of a directory have the biases that its config.json promises.

    `config` holds a model_type that runs, `names` are those of all tensors, `path` is the directory.
    """
    architecture = HF_ARCHITECTURES[config["model_type"]]
    keys = _Keys(config, path / "config.json", architecture)
    for name in names:
        match = _MATRIX.fullmatch(name)
        if match is None:
            continue
        rule = architecture.biases.get(match["module"], architecture.biases.get(match["part"], False))
        expected = keys.flag(rule) if isinstance(rule, str) else rule
        bias = name.removesuffix("weight") + "bias"
        if expected != (bias in names):
            problem = "is missing" if expected else "is there"
            stated = f"{'every' if expected else 'no'} {config['model_type']} has it"
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


def _head(keys: _Keys) -> HeadConfig:
    """The head of the class that wrote the checkpoint; a language model's where that is not known."""
    classes = keys.value("architectures")
    if not isinstance(classes, list) or not classes or not isinstance(classes[0], str):
        return HeadConfig()
    kind = next((kind for ending, kind in _HEAD_CLASSES.items() if classes[0].endswith(ending)), None)
    if kind is None or not kind.endswith("classification"):
        return HeadConfig(kind or "language_model")
    problem_type, pad_id = keys.value("problem_type"), keys.value("pad_token_id")
    if problem_type is not None and problem_type not in PROBLEM_TYPES:
        raise keys.unsupported("problem_type", f"is {brief(problem_type)}: kukri knows {PROBLEM_TYPES}")
    if pad_id is not None and type(pad_id) is not int:
        raise keys.error("pad_token_id", f"must be a token id, not {brief(pad_id)}")
    return HeadConfig(kind, _labels(keys), problem_type, pad_id)


def _labels(keys: _Keys) -> tuple[str, ...]:
    """`id2label` in the order of its ids; LABEL_0, LABEL_1 … where it is absent."""
    stated = keys.value("id2label")
    if stated is None:
        n_labels = 2 if keys.value("num_labels") is None else keys.whole("num_labels", most=_MAX_LABELS)
        return tuple(f"LABEL_{i}" for i in range(n_labels))
    if not isinstance(stated, dict) or set(stated) != {str(i) for i in range(len(stated))} or not stated:
        raise keys.error("id2label", "must name a label for each id from 0 on")
    labels = [stated[str(i)] for i in range(len(stated))]
    if not all(isinstance(label, str) for label in labels):
        raise keys.error("id2label", "must hold texts alone")
    return tuple(labels)


class _Keys:
    """Typed access to config.json, with the defaults of an architecture."""

    def __init__(self, config: Mapping[str, Any], path: Path, architecture: HFArchitecture) -> None:
        self.config, self.path, self.architecture = config, path, architecture

    def error(self, key: str, message: str) -> FormatError:
        """A FormatError about a key."""
        return FormatError(f"key {brief(key)} {message}", path=self.path)

    def unsupported(self, key: str, message: str) -> UnsupportedError:
        """An UnsupportedError about a key."""
        return UnsupportedError(f"{self.path}: key {brief(key)} {message}")

    def value(self, key: str, default: Any = None) -> Any:
        """What the key holds, the architecture's default, or `default`."""
        if key in self.config:
            return self.config[key]
        return self.architecture.defaults.get(key, default)

    def whole(self, key: str, default: int | None = None, *, least: int = 1, most: int = 2**31 - 1) -> int:
        """A whole number between bounds, both included."""
        value = self.value(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if type(value) is not int:
            raise self.error(key, f"must be a whole number, not {brief(value)}")
        if not least <= value <= most:
            raise self.error(key, f"is {brief(value)}, not between {least} and {most}")
        return int(value)

    def positive(self, key: str, default: float) -> float:
        """A finite number above 0."""
        return self.as_positive(key, self.value(key, default))

    def as_positive(self, key: str, value: Any) -> float:
        """`value`, which `key` holds, as a finite number above 0."""
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.error(key, f"must be a finite number above 0, not {brief(value)}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {brief(value)}")
        return value

    def numbers(self, key: str, kind: type, n: int) -> list[Any]:
        """A list of at least `n` values of a type, cut to `n`."""
        value = self.value(key)
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise self.error(key, f"must be a list of {kind.__name__}, not {brief(value)}")
        if len(value) < n:
            raise self.error(key, f"has {len(value)} entries for {n} layers")
        return value[:n]

    def expect(self, key: str, value: Any) -> None:
        """Raises UnsupportedError if the key is there and holds anything but `value`."""
        if self.value(key, value) != value:
            raise self.unsupported(key, f"is {brief(self.config[key])}: kukri runs {value!r} alone")

    def refuse_unknown(self) -> None:
        """Raises UnsupportedError for a key that might change the model's arithmetic."""
        if self.config.get("quantization_config") is not None:
            raise self.unsupported(
                "quantization_config",
                "says that the weights are quantized: take the original checkpoint, or a GGUF file",
            )
        known = _READ | IGNORED_KEYS | self.architecture.reads | self.architecture.ignores
        for key, value in self.config.items():
            if key in known or key == self.architecture.norm_eps_key:
                continue
            if key not in _NEUTRAL:
                raise self.unsupported(
                    key,
                    "is unknown and may change what the model computes: if not, take it out of the file",
                )
            if value != _NEUTRAL[key]:
                raise self.unsupported(key, f"must be {_NEUTRAL[key]!r}: kukri runs nothing else")


def _d_head(keys: _Keys, d_model: int, n_heads: int) -> int:
    if keys.value("head_dim") is not None:
        return keys.whole("head_dim", most=MAX_HEAD)
    if d_model % n_heads or d_model // n_heads > MAX_HEAD:
        raise keys.error("num_attention_heads", f"is {n_heads}, which does not fit the width {d_model}")
    return d_model // n_heads


def _layers(keys: _Keys, model_type: str, n_layers: int) -> tuple[LayerConfig, ...]:
    """Which layers rotate and which see a window, by the rules of each configuration class."""
    use_rope, windows = [True] * n_layers, _windows(keys, model_type, n_layers)
    if model_type == "smollm3":
        use_rope = _smollm3_rope(keys, n_layers)
        if keys.value("layer_types") is None:  # then windows are for the layers without RoPE
            windows = [None if rope else window for rope, window in zip(use_rope, windows)]
    return tuple(LayerConfig(rope, window) for rope, window in zip(use_rope, windows))


def _smollm3_rope(keys: _Keys, n_layers: int) -> list[bool]:
    """Despite its name, a 1 in `no_rope_layers` means that the layer does use RoPE."""
    if keys.value("no_rope_layers") is None:
        interval = keys.whole("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(n_layers)]
    stated = keys.numbers("no_rope_layers", int, n_layers)
    if not set(stated) <= {0, 1}:
        raise keys.error("no_rope_layers", "must hold 0 and 1 alone")
    return [use == 1 for use in stated]


def _windows(keys: _Keys, model_type: str, n_layers: int) -> list[int | None]:
    """Visible tokens of each layer, None for all."""
    reads = keys.architecture.reads
    if "sliding_window" not in reads or keys.value("sliding_window") is None:
        return [None] * n_layers
    if "use_sliding_window" in reads and not keys.flag("use_sliding_window"):
        return [None] * n_layers
    window = keys.whole("sliding_window")
    if "layer_types" in reads and keys.value("layer_types") is not None:
        types = keys.numbers("layer_types", str, n_layers)
        if unknown := set(types) - {"full_attention", "sliding_attention"}:
            raise keys.unsupported("layer_types", f"names {brief(min(unknown))}: kukri runs full and sliding")
        return [window if kind == "sliding_attention" else None for kind in types]
    if "max_window_layers" in reads:
        first = keys.whole("max_window_layers", least=0)
        return [window if layer >= first else None for layer in range(n_layers)]
    return [window] * n_layers


def _rope(keys: _Keys, model_type: str, d_head: int, max_context: int) -> RopeConfig:
    """RoPE from `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4)."""
    where = "rope_parameters" if keys.value("rope_parameters") is not None else "rope_scaling"
    stated = keys.value(where)
    if stated is None:
        stated = {}
    if not isinstance(stated, dict):
        raise keys.error(where, f"must be an object, not {brief(stated)}")
    older = keys.value("rope_scaling") or {}
    if where == "rope_parameters" and isinstance(older, dict):
        older = {"rope_type" if key == "type" else key: value for key, value in older.items()}
        if any(value != stated.get(key) for key, value in older.items()):
            raise keys.error(where, "and 'rope_scaling' say different things: keep the one that is right")
    if any(isinstance(value, dict) for value in stated.values()):
        raise keys.unsupported(where, "differs from layer to layer, which kukri does not run")
    parameters = _Parameters(keys, where, stated)
    theta = parameters.positive("rope_theta", keys.value("rope_theta", 10000.0))
    share = parameters.positive("partial_rotary_factor", keys.value("partial_rotary_factor", 1.0))
    rotary_dim = int(d_head * share)
    if share > 1 or rotary_dim % 2 or rotary_dim == 0:
        raise keys.error("partial_rotary_factor", f"of {share:g} leaves {rotary_dim} of {d_head} dimensions")
    scaling = _scaling(parameters, model_type, max_context)
    parameters.refuse_unknown()
    try:
        return RopeConfig(theta, rotary_dim, scaling)
    except ConfigError as error:
        raise keys.error(where, f"makes no sense: {error}") from None


def _scaling(parameters: _Parameters, model_type: str, max_context: int) -> RopeScaling | None:
    kind = parameters.take("rope_type", parameters.take("type", "default"))
    if model_type == "phi3" and kind in ("su", "yarn"):  # older names of the same thing
        kind = "longrope"
    if kind == "default":
        parameters.take("original_max_position_embeddings", None)
        return None
    if kind not in ROPE_SCALINGS:
        known = ", ".join(("default", *ROPE_SCALINGS))
        raise parameters.unsupported(f"has rope_type {brief(kind)}: kukri runs {known}")
    try:
        return _READERS[kind](parameters, max_context)
    except ConfigError as error:
        raise parameters.keys.error(parameters.where, f"makes no sense: {error}") from None


class _Parameters:
    """The RoPE parameters, each taken once."""

    def __init__(self, keys: _Keys, where: str, stated: Mapping[str, Any]) -> None:
        self.keys, self.where, self.left = keys, where, dict(stated)

    def unsupported(self, message: str) -> UnsupportedError:
        """An UnsupportedError about the object as a whole."""
        return self.keys.unsupported(self.where, message)

    def take(self, name: str, default: Any) -> Any:
        """A parameter as it stands; null counts as absent."""
        value = self.left.pop(name, None)
        return default if value is None else value

    def positive(self, name: str, default: Any) -> float:
        """A finite number above 0."""
        return self.keys.as_positive(f"{self.where}.{name}", self.take(name, default))

    def optional(self, name: str) -> float | None:
        """A finite number above 0, or None where the file has none."""
        value = self.take(name, None)
        return None if value is None else self.keys.as_positive(f"{self.where}.{name}", value)

    def factors(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers above 0."""
        value = self.take(name, None)
        if not isinstance(value, list):
            raise self.keys.error(f"{self.where}.{name}", f"must be a list of numbers, not {brief(value)}")
        return tuple(self.keys.as_positive(f"{self.where}.{name}", number) for number in value)

    def original_context(self, default: int) -> int:
        """Tokens the model was trained on, wherever the file says so."""
        inside = self.take("original_max_position_embeddings", default)
        value = self.keys.value("original_max_position_embeddings", inside)
        if type(value) is not int or not 1 <= value <= MAX_CONTEXT:
            name = f"{self.where}.original_max_position_embeddings"
            raise self.keys.error(name, f"must be a number of tokens, not {brief(value)}")
        return value

    def refuse_unknown(self) -> None:
        """Raises UnsupportedError for a parameter that nothing read."""
        if self.left:
            raise self.unsupported(f"has the unknown parameter {brief(min(self.left))}")


def _linear(parameters: _Parameters, max_context: int) -> RopeScaling:
    parameters.take("original_max_position_embeddings", None)
    return RopeScaling("linear", factor=parameters.positive("factor", None))


def _dynamic(parameters: _Parameters, max_context: int) -> RopeScaling:
    # transformers stretches from max_position_embeddings, whatever else the file says
    parameters.take("original_max_position_embeddings", None)
    return RopeScaling("dynamic", factor=parameters.positive("factor", None), original_context=max_context)


def _yarn(parameters: _Parameters, max_context: int) -> RopeScaling:
    original = parameters.original_context(max_context)
    return RopeScaling(
        "yarn",
        factor=parameters.positive("factor", max_context / original),
        original_context=original,
        attention_factor=parameters.optional("attention_factor"),
        beta_fast=parameters.positive("beta_fast", 32.0),
        beta_slow=parameters.positive("beta_slow", 1.0),
        truncate=bool(parameters.take("truncate", True)),
        mscale=parameters.optional("mscale") or 0.0,
        mscale_all_dim=parameters.optional("mscale_all_dim") or 0.0,
    )


def _llama3(parameters: _Parameters, max_context: int) -> RopeScaling:
    return RopeScaling(
        "llama3",
        factor=parameters.positive("factor", None),
        original_context=parameters.original_context(max_context),
        low_freq_factor=parameters.positive("low_freq_factor", None),
        high_freq_factor=parameters.positive("high_freq_factor", None),
    )


def _longrope(parameters: _Parameters, max_context: int) -> RopeScaling:
    original = parameters.original_context(max_context)
    return RopeScaling(
        "longrope",
        factor=parameters.positive("factor", max_context / original),
        original_context=original,
        attention_factor=parameters.optional("attention_factor"),
        short_factors=parameters.factors("short_factor"),
        long_factors=parameters.factors("long_factor"),
    )


_READERS = {"linear": _linear, "dynamic": _dynamic, "yarn": _yarn, "llama3": _llama3, "longrope": _longrope}


_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phi": "PhiForCausalLM",
}


def hf_config(config: ModelConfig, names: Collection[str]) -> dict[str, Any]:
    """The contents of config.json; `names` are the checkpoint's tensors, Hugging Face's names.

    Raises UnsupportedError for what no key can say.
    """
    if config.head.kind != "language_model":
        raise UnsupportedError(
            f"kukri writes directories of language models, and this one's head is {config.head.kind}:"
            " transformers names such a model's tensors otherwise in each architecture"
        )
    windows = [layer.window for layer in config.layers]
    kind = config.architecture
    if kind == "llama" and any(windows):
        kind = "mistral"  # its GGUF files say llama
    if kind not in _CLASSES:
        raise UnsupportedError(f"kukri writes no config.json for {kind}: it does for {', '.join(_CLASSES)}")
    known = HF_ARCHITECTURES[kind]
    made: dict[str, Any] = {
        "model_type": kind,
        "architectures": [_CLASSES[kind]],
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ffn,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.d_head,
        "vocab_size": config.n_vocab,
        "max_position_embeddings": config.max_context,
        "hidden_act": known.activation,
        known.norm_eps_key: config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope.theta,
        "rope_scaling": _scaling_keys(config) if config.rope.scaling else None,
        # the tokenizer's files say them; left out, each class has ids of its own that the vocabulary may lack
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **_window_keys(kind, windows),
    }
    if config.rope.rotary_dim != config.d_head or "partial_rotary_factor" in known.defaults:
        made["partial_rotary_factor"] = config.rope.rotary_dim / config.d_head
    if kind == "smollm3":
        made["no_rope_layers"] = [int(layer.use_rope) for layer in config.layers]
    if kind == "phi3":
        scaling = config.rope.scaling
        made["original_max_position_embeddings"] = scaling.original_context if scaling else config.max_context
    for module, key in (("self_attn", "attention_bias"), ("mlp", "mlp_bias")):
        if key in known.reads:
            made[key] = any(f".{module}." in name and name.endswith(".bias") for name in names)
    return made


def _window_keys(kind: str, windows: list[int | None]) -> dict[str, Any]:
    sizes = {window for window in windows if window is not None}
    if len(sizes) > 1:
        raise UnsupportedError(f"config.json has no key for windows of several sizes: {sorted(sizes)}")
    size = min(sizes, default=None)
    if kind in ("mistral", "phi3"):
        if size is not None and None in windows:
            raise UnsupportedError(f"{kind} has no key for a window in some layers alone")
        return {"sliding_window": size}
    if "layer_types" not in HF_ARCHITECTURES[kind].reads or size is None:
        return {"use_sliding_window": False} if "layer_types" in HF_ARCHITECTURES[kind].reads else {}
    types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {"use_sliding_window": True, "sliding_window": size, "layer_types": types}


def _scaling_keys(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope.scaling
    assert scaling is not None
    if scaling.kind == "llama3":
        scaling = _llama3_parameters(config, scaling)
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    made: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("yarn", "longrope"):
        made["original_max_position_embeddings"] = scaling.original_context
        if scaling.attention_factor is not None:
            made["attention_factor"] = scaling.attention_factor
    if scaling.kind == "yarn":
        made |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    if scaling.kind == "longrope":
        made |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
        del made["factor"]
    return made


def _llama3_parameters(config: ModelConfig, scaling: RopeScaling) -> RopeScaling:
    """The parameters that give the divisors of a GGUF file, which holds those alone."""
    if not scaling.factors:
        return scaling
    for power in range(3, 21):
        trial = RopeScaling("llama3", round(max(scaling.factors), 3), 1 << power)
        rope = RopeConfig(config.rope.theta, config.rope.rotary_dim, trial)
        made = rope_tensors(replace(config, rope=rope))["rope_freqs.weight"]
        if np.allclose(made, scaling.factors, rtol=1e-5):
            return trial
    raise UnsupportedError("the divisors in rope_freqs.weight are not those of Llama 3's formula")
