"""`ModelConfig` from a GGUF file's metadata and back (keys: docs/gguf.md of ggml, gguf-py's constants.py)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kukri.config import PROBLEM_TYPES, HeadConfig, LayerConfig, ModelConfig, RopeConfig
from kukri.errors import FormatError, UnsupportedError, brief
from kukri.formats.facts import (
    EXPERT_FUNCTION,
    EXPERT_NORM,
    INTERVAL,
    RECURRENT,
    SIGMOID,
    by_layer,
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
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.rope_keys import ROPE_KEYS, SECTIONS_KEY, has_sections, read_rope, rope_keys
from kukri.formats.layer_patterns import Pattern, interval, layers_of, local_rope, spread, with_local_rope
from kukri.models import ARCHITECTURES, Architecture
from kukri.models.architecture import ExpertKeys
from kukri.models.keys import Keys
from kukri.models.lenses import NOPE_KEY
from kukri.quant.per_token import ACTIVATIONS_KEY, PER_TOKEN

# kukri's own keys, of heads.
HEAD_KEY, PROBLEM_KEY, PAD_KEY = "head.kind", "head.problem_type", "head.pad_token_id"
LABELS_KEY = "classifier.output_labels"  # GGUF's own
CAUSAL_KEY, POOLING_KEY, RANK = "attention.causal", "pooling_type", 4  # llama.cpp's number of rank pooling
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_LOCAL_THETA = "rope.freq_base_swa"
_KV_HEADS = "attention.head_count_kv"
_NEXT_TOKEN = "nextn_predict_layers"

READ = ROPE_KEYS | {
    *("attention.value_length", _WINDOW, _PATTERN, NOPE_KEY),
    *(LABELS_KEY, HEAD_KEY, PROBLEM_KEY, PAD_KEY),
}
# Keys that change nothing about these architectures, whatever they hold: bookkeeping; pooling, which callers
# choose; and other architectures' keys, which llama.cpp's own saver writes into every file (softcaps of 50).
IGNORED_KEYS = frozenset(
    [
        *("tensor_data_layout", "rope.scaling.finetuned", POOLING_KEY, "decoder_start_token_id"),
        *("features_length", "embedding_length_out", "attn_logit_softcapping", "final_logit_softcapping"),
        *("router_logit_softcapping", "token_shift_count", "swin_norm", "rescale_every_n_layers"),
        *("time_decay_extra_dim", "time_mix_extra_dim", "deepstack_mapping", "attention.rope_pattern"),
    ]
)
# In these families one key below says how many there are, and the others nothing while that is 0.
IGNORED_FAMILIES = re.compile(
    r"(expert|moe|ssm|wkv|kda|posnet|convnext|shortconv|altup|hrm|hyper_connection|attention\.indexer"
    r"|swiglu_clamp|activation|dense_\d)[._a-z].*|interleave_moe_layer_step"
)
# Keys that change the computation unless they hold 0 or false, which say "none", or this.
_ZERO_COUNTS = ("attention.causal", "rope.scaling.yarn_ext_factor")
NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(
        (
            *("expert_count", "leading_dense_block_count", "nextn_predict_layers", "n_deepstack_layers"),
            *("hrm.layers_per_stack", "hyper_connection.count", "hash_layer_count", "attn_res.block_size"),
            *("ssm.inner_size", "wkv.head_size", "kda.head_dim", "shortconv.l_cache", "altup.num_inputs"),
            *("decoder_block_count", "full_attention_interval", "use_parallel_residual"),
            *("embedding_length_per_layer_input", "rope.dimension_sections", "rope.scaling.alpha"),
            *("rope.scaling.yarn_log_multiplier", "attention.indexer.head_count", "attention.scale"),
            *("attention.clamp_kqv", "attention.max_alibi_bias", "attention.output_scale"),
            *("attention.value_scale", "attention.temperature_length", "attention.temperature_scale"),
            *("attention.shared_kv_layers", "attention.recurrent_layers", "attention.compress_ratios"),
            *("attention.compress_rope_freq_base", "attention.output_group_count"),
            *("attention.relative_buckets_count", "attention.group_norm_groups"),
            *("attention.group_norm_epsilon", "attention.value_residual_mix_lora_rank"),
            *(f"attention.{part}_lora_rank" for part in ("q", "kv", "decay", "iclr", "gate", "output")),
            *(f"attention.{part}_length_mla{swa}" for part in ("key", "value") for swa in ("", "_swa")),
            "attention.kv_lora_rank_swa",
        ),
        0,
    ),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale", "rope.scale_linear"), 1.0),
    "attention.causal": True,
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),  # -1: as the kind of scaling has it
}
# Keys of mixtures that must hold 0, or this.
NEUTRAL_OF_MIXTURES: dict[str, Any] = {
    **dict.fromkeys(
        (
            *("expert_shared_count", "expert_shared_feed_forward_length", "expert_latent_length"),
            *("expert_chunk_feed_forward_length", "moe_every_n_layers", "moe_latent_size"),
        ),
        0,
    ),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count", "interleave_moe_layer_step"), 1),
    "expert_weights_scale": 1.0,
}
# Keys of layers with a window that must say what the others do.
AS_WITHOUT_WINDOW = {
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.key_length",
    "rope.dimension_count_swa": "rope.dimension_count",
    _LOCAL_THETA: "rope.freq_base",
}


def model_config(gguf: GGUFFile) -> ModelConfig:
    """The configuration of a GGUF file's model.

    Raises FormatError naming the key that is missing, of another type or nonsense, and UnsupportedError for
    an architecture, or a feature of one, that kukri does not run. `unknown_keys` lists the keys left out.
    """
    architecture, keys = _architecture(gguf)
    with keys.reading():
        return _model_config(gguf, architecture, keys)


def _model_config(gguf: GGUFFile, architecture: Architecture, keys: Keys) -> ModelConfig:
    _check_neutral(keys, architecture)
    n_vocab, d_model = _embedding_shape(gguf)
    n_layers = keys.whole("block_count", most=len(gguf.tensors))
    if architecture.next_token:
        n_layers -= keys.whole(_NEXT_TOKEN, 0, least=0, most=n_layers - 1)
    known = {"n_vocab": n_vocab, "n_layers": n_layers}
    numbers = read_numbers(keys, "gguf", architecture, known)
    if numbers["d_model"] != d_model:
        message = f"is {numbers['d_model']}, but the width of tensor 'token_embd.weight' is {d_model}"
        raise keys.error("embedding_length", message)
    d_value = keys.whole("attention.value_length", numbers["d_head"])
    own = keys_of(architecture, "gguf")
    if d_value != numbers["d_head"] and "attention.value_length" not in own:
        message = f"is {d_value}, and must be the width of keys, {numbers['d_head']}"
        raise keys.unsupported("attention.value_length", message)
    rope = RopeConfig()
    if architecture.has_rope:
        rope = read_rope(keys, gguf, architecture, numbers["d_head"], numbers["max_context"])
    if rope.scaling is not None:
        numbers["max_context"] = rope.scaling.reach(numbers["max_context"])
    layers = _layers(keys, architecture, numbers)
    if architecture.local_rope:
        theta = keys.positive(_LOCAL_THETA, architecture.local_theta or rope.theta)
        layers = with_local_rope(layers, RopeConfig(theta, rope.rotary_dim))
    found = dict(
        **numbers,
        architecture=architecture.name,
        activation=architecture.activation_op,
        tie_embeddings="output.weight" not in gguf.tensors,
        rope=rope,
        layers=layers,
        name=Keys(gguf.metadata, gguf.path, "general.").text("name", gguf.path.stem),
        head=_head(keys, n_vocab, architecture),
        mixture=read_mixture(keys, "gguf", architecture, numbers["d_ffn"]),
        recurrent=read_recurrent(keys, "gguf", architecture, d_model),
        is_causal=architecture.is_causal,
        n_token_types=_n_rows(gguf, "token_types.weight"),
        n_positions=_n_rows(gguf, "position_embd.weight"),
    )
    architecture.read_gguf(keys, found)
    for lens in architecture.lenses:
        lens.read(keys, "gguf", found)
    if keys.has(NOPE_KEY):
        found["layers"] = _without_rope(keys, found["layers"])
    return ModelConfig(**found)


def model_metadata(config: ModelConfig, *, has_next_token: bool = False) -> dict[str, Any]:
    """The keys of a configuration, of a file that also has the layer for multi-token prediction if told so.

    Raises UnsupportedError for settings without a key.
    """
    architecture = ARCHITECTURES[config.architecture]
    local = local_rope(config, architecture)
    nope = [i for i, layer in enumerate(config.layers) if not layer.use_rope]
    keys: dict[str, Any] = {
        **write_numbers(config, "gguf", architecture),
        **write_activation(config, "gguf", architecture),
        "attention.value_length": config.d_head,
        **(rope_keys(config, architecture) if architecture.has_rope else {}),
        **({} if config.is_causal else {CAUSAL_KEY: False}),
        **_window_keys(config, architecture),
        **({_LOCAL_THETA: float(local.theta)} if local else {}),
        **({NOPE_KEY: np.array(nope, np.int32)} if nope and architecture.has_rope else {}),
        **_head_keys(config),
        **write_mixture(config, "gguf", architecture),
        **_recurrent_keys(config, architecture),
    }
    if has_next_token:
        keys |= {"block_count": config.n_layers + 1, _NEXT_TOKEN: 1}
    architecture.write_gguf(config, keys)
    for lens in architecture.lenses:
        lens.write(config, "gguf", keys)
    name = gguf_architecture(config)
    return {
        "general.architecture": name,
        "general.type": "model",
        "general.name": config.name or name,
        **{f"{name}.{key}": value for key, value in keys.items()},
    }


def gguf_architecture(config: ModelConfig) -> str:
    """The value of general.architecture, and what keys begin with."""
    architecture = ARCHITECTURES[config.architecture]
    return (config.rope.axes and architecture.gguf_seeing) or architecture.gguf


def deep_keys(config: ModelConfig, n_layers: int) -> dict[str, Any]:
    """The key of a text to whose first layers an encoder of images adds rows."""
    return {f"{gguf_architecture(config)}.n_deepstack_layers": n_layers}


def unknown_keys(gguf: GGUFFile) -> list[str]:
    """The keys of the file's architecture that `model_config` left out because it does not know them.

    Raises UnsupportedError for an architecture that kukri does not run.
    """
    architecture, keys = _architecture(gguf)
    stated = (key.removeprefix(keys.prefix) for key in gguf.metadata if key.startswith(keys.prefix))
    return [keys.prefix + key for key in stated if not is_known(key, architecture)]


def is_known(key: str, architecture: Architecture) -> bool:
    """True for a key, without its prefix, that is read, checked or ignored by name."""
    listed = READ | IGNORED_KEYS | NEUTRAL.keys() | AS_WITHOUT_WINDOW.keys()
    epsilons = ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon")  # savers write both
    of_numbers = keys_of(architecture, "gguf")
    if architecture.experts is not None and key.startswith(("expert", "moe", "interleave_moe")):
        others = (
            *(EXPERT_NORM, EXPERT_FUNCTION, "expert_group_scale", "experts_per_group"),  # Grove's alone
            ExpertKeys.gguf_d_ffn,  # if another key is read, shapes of tensors say whether that is right
        )
        return key in of_numbers or key in NEUTRAL_OF_MIXTURES or key in others
    return key in listed or key in of_numbers or key in epsilons or bool(IGNORED_FAMILIES.fullmatch(key))


def architecture_of(gguf: GGUFFile) -> Architecture:
    """The architecture of a file. Raises FormatError and UnsupportedError unless kukri runs it."""
    return _architecture(gguf)[0]


def activations_per_token(gguf: GGUFFile) -> bool:
    """True if the file wants one activation scale a token. Raises UnsupportedError for other wishes."""
    if ACTIVATIONS_KEY not in gguf.metadata:
        return False
    wanted = gguf.metadata[ACTIVATIONS_KEY]
    if not isinstance(wanted, str) or wanted != PER_TOKEN:
        raise UnsupportedError(
            f"{gguf.path}: key {ACTIVATIONS_KEY!r} must be {PER_TOKEN!r}, not {brief(wanted)}"
        )
    return True


def _architecture(gguf: GGUFFile) -> tuple[Architecture, Keys]:
    """The architecture, and its keys."""
    name = Keys(gguf.metadata, gguf.path, "general.").text("architecture")
    # several may go by one name in GGUF: one with experts if the file has some, or without, that scores them
    # as the file says, and of these the one whose own it is, which says what the files leave unsaid
    has_experts = bool(np.any(gguf.metadata.get(f"{name}.expert_count", 0)))

    by_sigmoid = gguf.metadata.get(f"{name}.{EXPERT_FUNCTION}") == SIGMOID

    is_causal = gguf.metadata.get(f"{name}.{CAUSAL_KEY}") is not False

    def fits(architecture: Architecture) -> tuple[bool, bool, bool, bool]:
        own = architecture.experts
        return (
            architecture.is_causal == is_causal,
            (own is not None) == has_experts,
            own is None or own.by_sigmoid == by_sigmoid,
            architecture.name == name,
        )

    named = [a for a in ARCHITECTURES.called(name) if a.in_gguf and name in (a.gguf, a.gguf_seeing)]
    if not named:
        known = ", ".join(sorted({a.gguf for a in ARCHITECTURES.values() if a.in_gguf}))
        if name == "clip":
            known += "; an encoder of images is opened with its text model, by --mmproj"
        message = f"architecture {brief(name)} is not supported: use {known}"
        raise UnsupportedError(f"{gguf.path}: {message}")
    architecture = max(named, key=fits)
    return architecture, Keys(
        gguf.metadata, gguf.path, f"{name}.", architecture.gguf_defaults, gguf.tensors.keys()
    )


def _check_neutral(keys: Keys, architecture: Architecture) -> None:
    """Raises UnsupportedError for a key that changes the computation in a way that kukri does not run."""
    neutral = {key: values if isinstance(values, tuple) else (values,) for key, values in NEUTRAL.items()}
    if architecture.experts is not None:
        neutral |= {key: (value,) for key, value in NEUTRAL_OF_MIXTURES.items()}
        neutral.pop("expert_count")
    else:  # the first MoE layer would come after the last layer: there is no MoE
        neutral["leading_dense_block_count"] = (0, keys.value("block_count"))
    neutral[CAUSAL_KEY] = (architecture.is_causal,)
    if keys.value(_WINDOW, 0):
        neutral |= {key: (keys.value(base),) for key, base in AS_WITHOUT_WINDOW.items() if keys.has(base)}
    read_here = keys_of(architecture, "gguf")
    read_here |= {_LOCAL_THETA} if architecture.local_rope else set()
    read_here |= {_NEXT_TOKEN} if architecture.next_token else set()
    read_here |= {SECTIONS_KEY} if has_sections(architecture, keys.prefix[:-1]) else set()
    neutral = {key: values for key, values in neutral.items() if key not in read_here}
    for key, values in neutral.items():
        if not keys.has(key):
            continue
        value = keys.value(key)
        says_none = key not in _ZERO_COUNTS and not np.any(value)
        if not says_none and not (np.ndim(value) == 0 and value in values):
            raise keys.unsupported(key, f"must be {values[0]}, not {brief(value)}")


def _recurrent_keys(config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    """The keys of recurrent layers, and of which layers they are."""
    if config.recurrent is None or architecture.recurrent is None:
        return {}
    recurrent = [layer.is_recurrent for layer in config.layers]
    keys = write_recurrent(config.recurrent, "gguf", architecture, config.d_model)
    if not architecture.recurrent.gguf_interval:
        heads = (config.attention(i).n_kv_heads for i in range(config.n_layers))
        counts = [0 if is_recurrent else n for n, is_recurrent in zip(heads, recurrent)]
        return keys | {_KV_HEADS: np.array(counts, np.int32)}
    n = interval(recurrent, range(2, len(recurrent) + 1))
    return keys | ({RECURRENT: np.array(recurrent)} if n is None else {INTERVAL: n})


def _recurrent(keys: Keys, architecture: Architecture, n_layers: int) -> Pattern | None:
    """Which layers are recurrent."""
    own = architecture.recurrent
    if own is None:
        return None
    if not own.gguf_interval:
        return [count == 0 for count in keys.each(_KV_HEADS, n_layers, least=0)]
    if keys.has(RECURRENT):
        return [bool(entry) for entry in keys.each(RECURRENT, n_layers, least=0, most=1)]
    return keys.whole(INTERVAL, own.gguf_interval)


def _n_rows(gguf: GGUFFile, name: str) -> int:
    """Rows of a matrix; 0 if there is none."""
    tensor = gguf.tensors.get(name)
    return 0 if tensor is None else tensor.shape[0]


def _head(keys: Keys, n_vocab: int, architecture: Architecture) -> HeadConfig:
    """The head of the keys; labels alone mean a sequence classification, as in llama.cpp."""
    labels = keys.items(LABELS_KEY, str) if keys.has(LABELS_KEY) else []
    default = "language_model" if architecture.is_causal else "none"
    if keys.value(POOLING_KEY, 0) == RANK and not labels:
        labels = ["LABEL_0"]
    kind = keys.text(HEAD_KEY, "sequence_classification" if labels else default)
    problem = keys.text(PROBLEM_KEY) if keys.has(PROBLEM_KEY) else None
    if problem not in (None, *PROBLEM_TYPES):
        raise keys.unsupported(
            PROBLEM_KEY, f"is {brief(problem)}: only {', '.join(PROBLEM_TYPES)} are supported"
        )
    pad_id = keys.whole(PAD_KEY, least=0, most=n_vocab - 1) if keys.has(PAD_KEY) else None
    return HeadConfig(kind, tuple(labels), problem, pad_id)


def _head_keys(config: ModelConfig) -> dict[str, Any]:
    head = config.head
    if head.kind == "language_model" or (head.kind == "none" and not config.is_causal):
        return {}
    keys: dict[str, Any] = {HEAD_KEY: head.kind}
    if head.labels:
        keys[LABELS_KEY] = list(head.labels)
    if head.problem_type is not None:
        keys[PROBLEM_KEY] = head.problem_type
    if head.pad_id is not None and 0 <= head.pad_id < config.n_vocab:  # another is in no text
        keys[PAD_KEY] = head.pad_id
    return keys


def _embedding_shape(gguf: GGUFFile) -> tuple[int, int]:
    """n_vocab, d_model."""
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise FormatError("is missing", path=gguf.path, tensor="token_embd.weight")
    if len(embedding.shape) != 2:
        message = f"has shape {embedding.shape}, not (vocabulary, width)"
        raise FormatError(message, path=gguf.path, tensor=embedding.name)
    return embedding.shape[0], embedding.shape[1]


def _layers(keys: Keys, architecture: Architecture, numbers: Mapping[str, Any]) -> tuple[LayerConfig, ...]:
    n_layers: int = numbers["n_layers"]
    if not architecture.has_rope:  # BERT's kind, whose files say nothing of layers
        return (LayerConfig(use_rope=False),) * n_layers
    sizes = {
        field: [
            None if n in (0, numbers[field]) else n
            for n in by_layer(keys, "gguf", architecture, field, numbers)
        ]
        for field in ("n_kv_heads", "d_ffn")
    }
    return layers_of(
        architecture,
        n_layers,
        window=keys.whole(_WINDOW, 0, least=0) or None,
        windowed=_windowed(keys, architecture, n_layers),
        recurrent=_recurrent(keys, architecture, n_layers),
        dense=dense_layers(keys, "gguf", architecture, n_layers),
        sizes=[dict(zip(sizes, own)) for own in zip(*sizes.values())],
    )


def _without_rope(keys: Keys, layers: Sequence[LayerConfig]) -> tuple[LayerConfig, ...]:
    """The layers; the layers that kukri's key lists have no RoPE, and all others have it."""
    nope = set(keys.items(NOPE_KEY, int))
    if not nope <= set(range(len(layers))):
        raise keys.error(NOPE_KEY, f"must name layers from 0 to {len(layers) - 1}")
    return tuple(replace(layer, use_rope=i not in nope) for i, layer in enumerate(layers))


def _windowed(keys: Keys, architecture: Architecture, n_layers: int) -> Pattern:
    """Which layers the window is for: a truth for each, or n, if every n-th layer sees everything."""
    if not keys.has(_PATTERN):
        return architecture.full_interval
    if type(keys.value(_PATTERN)) is int:
        return keys.whole(_PATTERN, least=0)
    pattern = keys.items(_PATTERN, int)
    if len(pattern) != n_layers:
        raise keys.error(_PATTERN, f"must have {n_layers} entries, not {len(pattern)}")
    return [bool(entry) for entry in pattern]


def _window_keys(config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    windows = [layer.window for layer in config.layers]
    sizes = set(windows) - {None}
    if not sizes:
        return {_WINDOW: 0} if _WINDOW in architecture.gguf_defaults else {}
    if len(sizes) > 1:
        raise UnsupportedError(
            f"windows of different sizes are not supported in GGUF: {sorted(sizes, key=str)}"
        )
    size = sizes.pop()
    stated = size if size is None or config.is_causal else 2 * (size - 1)
    return {_WINDOW: stated, **_pattern_key([window is not None for window in windows], architecture)}


def _pattern_key(windowed: list[bool], architecture: Architecture) -> dict[str, Any]:
    """The key of the layers with a window, if it says more than its absence; n, if each n-th has none.

    A reader that knows no key for an architecture takes its usual layers; where it knows one it takes n.
    """
    if windowed == spread(architecture.full_interval, len(windowed), architecture.is_full_first):
        return {}
    known = (0, *range(2, len(windowed))) if architecture.full_interval else ()
    n = interval(windowed, known, architecture.is_full_first)
    return {_PATTERN: np.array(windowed) if n is None else n}
