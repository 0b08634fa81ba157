"""The numbers of a configuration and their keys in both formats: one table, read and written from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from kukri.config import MAX_CONTEXT, MixtureConfig, ModelConfig, RecurrentConfig, RopeScaling
from kukri.dataclass import dataclass, replace
from kukri.errors import UnsupportedError, brief
from kukri.formats.tensor_forms import table
from kukri.kernels.cache import MAX_HEAD
from kukri.models.architecture import Architecture, ExpertKeys
from kukri.models.keys import Keys, activation_name
from kukri.models.lenses import Format

MAX_LAYERS = 1 << 12
MAX_STATE = 1 << 16  # a size of a recurrent state


@dataclass(frozen=True)
class Fact:
    """A number: its field in `ModelConfig` or `RopeScaling`, its keys ("" for none), its bounds."""

    field: str
    gguf: str
    hf: str
    kind: type = int
    most: float = 2**31 - 1

    def key(self, form: Format) -> str:
        """The key in a format."""
        return self.gguf if form == "gguf" else self.hf

    def read(self, keys: Keys, form: Format, default: Any = None, most: float | None = None) -> Any:
        """The value under the format's key. Raises FormatError naming the key."""
        most = self.most if most is None else most
        if self.kind is int:
            return keys.whole(self.key(form), default, most=most)
        # GGUF files have two epsilons, and savers write 0 for the epsilon that does not count
        if form == "hf" and self.field == "norm_eps" and keys.value(self.hf) == 0:
            return 0.0
        return keys.positive(self.key(form), default, most=most)


_FACTS = (
    Fact("n_layers", "block_count", "num_hidden_layers", most=MAX_LAYERS),
    Fact("d_model", "embedding_length", "hidden_size"),
    Fact("n_heads", "attention.head_count", "num_attention_heads"),
    Fact("d_head", "attention.key_length", "head_dim", most=MAX_HEAD),
    Fact("n_kv_heads", "attention.head_count_kv", "num_key_value_heads"),
    Fact("d_ffn", "feed_forward_length", "intermediate_size"),
    Fact("n_vocab", "vocab_size", "vocab_size"),
    Fact("max_context", "context_length", "max_position_embeddings", most=MAX_CONTEXT),
)

# For architectures that have them (`Architecture.numbers`). Absent, or 0 in GGUF: ModelConfig's default.
OPTIONAL_FACTS = (
    Fact("attention_scale", "attention.scale", "attention_multiplier", float),
    Fact("embedding_scale", "embedding_scale", "embedding_multiplier", float),
    Fact("residual_scale", "residual_scale", "residual_multiplier", float),
    Fact("logits_divisor", "logit_scale", "logits_scaling", float),
    Fact("attention_softcap", "attn_logit_softcapping", "attn_logit_softcapping", float),
    Fact("logit_softcap", "final_logit_softcapping", "final_logit_softcapping", float),
    Fact("qkv_clip", "attention.clamp_kqv", "clip_qkv", float),
)

SCALING_FACTS = {
    fact.field: fact
    for fact in (
        Fact("factor", "rope.scaling.factor", "factor", float),
        Fact(
            "original_context",
            "rope.scaling.original_context_length",
            "original_max_position_embeddings",
            most=MAX_CONTEXT,
        ),
        # GGUF's multiplies the papers' formula instead
        Fact("attention_factor", "", "attention_factor", float),
        Fact("beta_fast", "rope.scaling.yarn_beta_fast", "beta_fast", float),
        Fact("beta_slow", "rope.scaling.yarn_beta_slow", "beta_slow", float),
        Fact("truncate", "", "truncate", bool),
        Fact("mscale", "", "mscale", float),
        Fact("mscale_all_dim", "", "mscale_all_dim", float),
        # GGUF has the divisors that they make, in a tensor
        Fact("low_freq_factor", "", "low_freq_factor", float),
        Fact("high_freq_factor", "", "high_freq_factor", float),
        Fact("factors", "rope_freqs.weight", "", tuple),
        Fact("short_factors", "rope_factors_short.weight", "short_factor", tuple),
        Fact("long_factors", "rope_factors_long.weight", "long_factor", tuple),
    )
}

# The fields that a kind of scaling reads, of the kinds in `kukri.config.ROPE_SCALINGS`.
SCALING_FIELDS = {
    "linear": ("factor",),
    "dynamic": ("factor", "original_context"),
    "yarn": (
        *("factor", "original_context", "attention_factor", "beta_fast", "beta_slow"),
        *("truncate", "mscale", "mscale_all_dim"),
    ),
    "llama3": ("factor", "original_context", "low_freq_factor", "high_freq_factor", "factors"),
    "longrope": ("factor", "original_context", "attention_factor", "short_factors", "long_factors"),
}


def facts(architecture: Architecture) -> tuple[Fact, ...]:
    """The numbers that every model of an architecture has."""
    epsilon = Fact("norm_eps", architecture.gguf_epsilon, architecture.hf_epsilon, float, most=1.0)
    common = (
        replace(fact, gguf=own[0], hf=own[1]) if (own := architecture.keys.get(fact.field)) else fact
        for fact in _FACTS
    )
    return (*common, epsilon, *(fact for fact in OPTIONAL_FACTS if fact.field in architecture.numbers))


def keys_of(architecture: Architecture, form: Format) -> set[str]:
    """Return the keys that an architecture reads besides the common keys."""
    is_gguf = form == "gguf"
    numbers = (*facts(architecture), *mixture_facts(architecture))
    own = {fact.key(form) for fact in numbers}.union(*(lens.keys(form) for lens in architecture.lenses))
    own |= architecture.gguf_reads if is_gguf else architecture.reads | {architecture.hf_activation}
    if (recurrent := architecture.recurrent) is not None:
        named = recurrent.gguf if is_gguf else recurrent.hf
        more = (INTERVAL, RECURRENT) if is_gguf else ("layer_types", recurrent.activation)
        own |= {*named.values(), *more}
    if (experts := architecture.experts) is not None and is_gguf:
        own |= {LEADING_DENSE} if experts.n_dense else set()
        own |= {SHARED_COUNT, SHARED_WIDTH} if experts.n_shared else set()
    elif experts is not None:
        stated = [experts.normalized, experts.bias, experts.n_shared, experts.n_dense]
        stated += [experts.interval, experts.last, experts.dense]
        own |= {key for key in stated if isinstance(key, str)}
    return own


def read_numbers(
    keys: Keys, form: Format, architecture: Architecture, known: Mapping[str, int]
) -> dict[str, Any]:
    """The fields of `ModelConfig` that are numbers; those in `known` follow from elsewhere.

    Raises FormatError for a number that is missing, of another type, out of bounds or contradicts another.
    """
    found: dict[str, Any] = dict(known)
    for fact in facts(architecture):
        key = fact.key(form)
        if fact.field in found:
            continue
        if fact.field in BY_LAYER:
            found[fact.field] = max(by_layer(keys, form, architecture, fact.field, found))
        elif fact.field == "d_head" and keys.value(key) is None:
            found["d_head"] = _equal_heads(keys, form, found)
        elif fact.field == "norm_eps" and form == "hf":
            found["norm_eps"] = fact.read(keys, form, 1e-6)
        elif fact in OPTIONAL_FACTS:
            value = keys.value(key)
            if value is not None and not (form == "gguf" and value == 0):
                found[fact.field] = fact.read(keys, form)
        else:
            found[fact.field] = fact.read(keys, form)
    return found


# Numbers of which GGUF files may list one for each layer.
BY_LAYER = ("n_heads", "n_kv_heads", "d_ffn")


def by_layer(
    keys: Keys, form: Format, architecture: Architecture, field: str, found: Mapping[str, int]
) -> list[int]:
    """One of the numbers `BY_LAYER` for each layer; `found` has the numbers that come before it.

    A recurrent layer that lacks heads has 0 of them. Raises FormatError and UnsupportedError.
    """
    fact = next(fact for fact in facts(architecture) if fact.field == field)
    key, n_layers, n_heads = fact.key(form), found["n_layers"], found.get("n_heads", 0)
    if field == "n_kv_heads" and keys.value(key) is None:  # absent, or null as transformers saves BERT
        counts = [n_heads] * n_layers
    elif form == "hf":
        counts = [fact.read(keys, form)] * n_layers
    else:
        counts = keys.each(key, n_layers, least=0 if architecture.recurrent else 1, most=fact.most)
    present = set(counts) - {0}
    if not present and field == "n_kv_heads":  # no layer attends
        return [n_heads] * n_layers
    if not present:
        raise keys.error(key, "is 0 in each layer")
    if field == "n_heads" and len(present) > 1:
        raise keys.unsupported(key, f"is {brief(sorted(present))}: layers must have the same")
    for n in present if field == "n_kv_heads" else ():
        if n_heads % n:  # the list has more numbers than heads alone
            raise keys.error(key, f"must divide the number of heads, {n_heads}, which {n} does not")
    return counts


def read_recurrent(
    keys: Keys, form: Format, architecture: Architecture, d_model: int
) -> RecurrentConfig | None:
    """The recurrent layers of an architecture that has them.

    Raises FormatError for a number that is missing, of another type, or contradicts another.
    """
    if architecture.recurrent is None:
        return None
    named = architecture.recurrent.gguf if form == "gguf" else architecture.recurrent.hf
    found: dict[str, Any] = {field: keys.whole(key, most=MAX_STATE) for field, key in named.items()}
    if "expansion" in found:
        found["d_inner"] = found.pop("expansion") * d_model
    if "d_inner" in found:
        d_inner, n_heads = found.pop("d_inner"), found["n_heads"]
        if d_inner % n_heads:
            if "d_inner" in named:
                raise keys.error(named["d_inner"], f"must be a multiple of {n_heads} heads, not {d_inner}")
            raise keys.error(named["n_heads"], f"must divide the width {d_inner}, which {n_heads} does not")
        found["d_head"] = d_inner // n_heads
    if form == "hf" and architecture.recurrent.activation:
        found["activation"] = keys.activation(architecture.recurrent.activation, "silu")
    are_tiled = form == "gguf" and any(row.tiles for row in table(architecture.name).values())
    return RecurrentConfig(**found, are_tiled=are_tiled and found["n_heads"] != found["n_groups"])


def write_recurrent(
    recurrent: RecurrentConfig, form: Format, architecture: Architecture, d_model: int
) -> dict[str, Any]:
    """The keys of recurrent layers."""
    assert architecture.recurrent is not None, "the model has such layers"
    named = architecture.recurrent.gguf if form == "gguf" else architecture.recurrent.hf
    d_inner = recurrent.n_heads * recurrent.d_head
    if form == "gguf" and recurrent.activation != "silu":
        raise UnsupportedError(
            f"activation '{recurrent.activation}' of a convolution is not supported by GGUF"
        )
    values = {**vars(recurrent), "d_inner": d_inner, "expansion": d_inner // d_model}
    if "expansion" in named and d_inner % d_model:
        raise UnsupportedError(
            f"a width of {d_inner} in recurrent layers is not supported by config.json of "
            f"{architecture.name}, only multiples of the model's, {d_model}"
        )
    made = {key: values[field] for field, key in named.items()}
    if form == "hf" and architecture.recurrent.activation:
        made[architecture.recurrent.activation] = activation_name(recurrent.activation)
    return made


def write_activation(config: ModelConfig, form: Format, architecture: Architecture) -> dict[str, str]:
    """The key of the activation. Raises UnsupportedError for GGUF, which has none, if it is not the usual."""
    if config.activation == architecture.activation_op:
        return {architecture.hf_activation: architecture.activation} if form == "hf" else {}
    if form == "gguf":
        raise UnsupportedError(
            f"activation '{config.activation}' is not supported by GGUF for {architecture.name}"
        )
    return {architecture.hf_activation: activation_name(config.activation)}


MAX_EXPERTS = 1 << 12
SHARED_WIDTH, SHARED_COUNT = "expert_shared_feed_forward_length", "expert_shared_count"
LEADING_DENSE = "leading_dense_block_count"
# Normalized weights, which follow from the architecture (llama.cpp's saver writes false), and the function
# that makes them of logits: 1 softmax, 3 softmax of the chosen ones; 0 says nothing.
EXPERT_NORM, EXPERT_FUNCTION = "expert_weights_norm", "expert_gating_func"
_FUNCTIONS = {False: (0, 1), True: (0, 1, 3)}
SIGMOID = 2
INTERVAL, RECURRENT = "full_attention_interval", "attention.recurrent_layers"
_GROUPS = ("expert_group_count", "expert_group_used_count")


def mixture_facts(architecture: Architecture) -> tuple[Fact, ...]:
    """The numbers of a mixture of experts, by the fields of `MixtureConfig`, if it has one."""
    keys = architecture.experts
    if keys is None:
        return ()
    found = [
        Fact("n_experts", "expert_count", keys.n_experts, most=MAX_EXPERTS),
        Fact("n_used", "expert_used_count", keys.n_used, most=MAX_EXPERTS),
        Fact("d_ffn", keys.gguf_d_ffn, keys.d_ffn),
    ]
    if keys.groups is not None:
        for field, gguf, hf in zip(("n_groups", "n_groups_used"), _GROUPS, keys.groups):
            found.append(Fact(field, gguf, hf, most=MAX_EXPERTS))
    if keys.scale:
        found.append(Fact("scale", "expert_weights_scale", keys.scale, float))
    if keys.d_shared:
        found.append(Fact("d_shared", SHARED_WIDTH, keys.d_shared))
    if keys.d_latent:
        found.append(Fact("d_latent", "moe_latent_size", keys.d_latent))
    return tuple(found)


def read_mixture(keys: Keys, form: Format, architecture: Architecture, d_ffn: int) -> MixtureConfig | None:
    """The mixture of an architecture that has one; `d_ffn` is the width of experts if no key says it.

    Raises FormatError for a number that is missing, of another type, or contradicts another.
    """
    own = architecture.experts
    if own is None:
        return None
    found: dict[str, Any] = {}
    needed = {"n_experts", "n_used", "d_ffn"}
    if form == "hf":  # config.json has null, not 0, for no mixture
        needed |= {fact.field for fact in mixture_facts(architecture) if keys.value(fact.hf) == 0} - {
            "d_shared"
        }
    for fact in mixture_facts(architecture):
        stated = keys.value(fact.key(form))
        if fact.field == "d_ffn" and not stated:  # llama.cpp's saver writes 0 for none
            found["d_ffn"] = d_ffn
        elif fact.field in needed or stated:
            found[fact.field] = fact.read(keys, form)
    if found["n_used"] > found["n_experts"]:
        key = mixture_facts(architecture)[1].key(form)
        raise keys.error(key, f"must be at most {found['n_experts']}, the experts, not {found['n_used']}")
    if own.n_shared:
        found["d_shared"] = _shared_width(keys, form, own, found["d_ffn"])
    if form == "gguf":
        has_bias = any(name.endswith(".exp_probs_b.bias") for name in keys.tensors) or own.bias is True
    else:
        has_bias = keys.rule(own.bias)
    found["normalized"] = _normalized(keys, form, architecture.name, own)
    return MixtureConfig(**found, by_sigmoid=own.by_sigmoid, has_bias=has_bias)


def _normalized(keys: Keys, form: Format, name: str, own: ExpertKeys) -> bool:
    """True if the weights of a token's experts have the sum 1."""
    if form == "hf":
        return keys.rule(own.normalized)
    function = keys.whole(EXPERT_FUNCTION, 0, least=0)
    if own.by_sigmoid:
        if function not in (0, SIGMOID):
            raise keys.unsupported(EXPERT_FUNCTION, f"is {function}: only a sigmoid (2) is supported")
        return keys.flag(EXPERT_NORM, own.gguf_normalized)
    if keys.flag(EXPERT_NORM) and not own.gguf_normalized:
        raise keys.unsupported(EXPERT_NORM, f"is true, which no {name} is")
    if function not in _FUNCTIONS[own.gguf_normalized]:
        raise keys.unsupported(EXPERT_FUNCTION, f"is {function}: only a softmax (1) is supported")
    return own.gguf_normalized


def _shared_width(keys: Keys, form: Format, own: ExpertKeys, d_ffn: int) -> int:
    """The width of the MLP of all tokens, which counts in widths of an expert."""
    if form == "gguf" and keys.value(SHARED_WIDTH):
        return keys.whole(SHARED_WIDTH)
    return d_ffn * keys.whole(SHARED_COUNT if form == "gguf" else own.n_shared, 0, least=0, most=MAX_EXPERTS)


def write_mixture(config: ModelConfig, form: Format, architecture: Architecture) -> dict[str, Any]:
    """The keys of a mixture, if there is one. Raises UnsupportedError for what no key can say."""
    mixture, own = config.mixture, architecture.experts
    if mixture is None or own is None:
        return {}
    stated = {fact.key(form): getattr(mixture, fact.field) for fact in mixture_facts(architecture)}
    made = {key: value for key, value in stated.items() if value is not None}
    made |= _dense_keys(config, form, architecture)
    if own.n_shared:
        count, rest = divmod(mixture.d_shared, mixture.d_ffn)
        if rest:
            raise UnsupportedError(
                f"an MLP for all tokens of width {mixture.d_shared} is not supported, only multiples of "
                "the experts'"
            )
        made |= {SHARED_COUNT: count} if form == "gguf" else {own.n_shared: count}
        if form == "gguf":
            made[SHARED_WIDTH] = mixture.d_shared
    if form == "hf" and isinstance(own.bias, str):
        made[own.bias] = mixture.has_bias
    normalized = own.gguf_normalized if form == "gguf" else own.normalized
    if form == "gguf" and mixture.by_sigmoid:
        made |= {EXPERT_FUNCTION: SIGMOID, EXPERT_NORM: mixture.normalized}
    elif isinstance(normalized, str):
        made[normalized] = mixture.normalized
    elif normalized != mixture.normalized:
        usual = "normalized" if normalized else "not normalized"
        raise UnsupportedError(
            f"weights of experts of {architecture.name} must be {usual}, as readers expect"
        )
    return made


def dense_layers(keys: Keys, form: Format, architecture: Architecture, n_layers: int) -> Collection[int]:
    """The layers with an MLP where others have a mixture."""
    own = architecture.experts
    if own is None:
        return ()
    first_key = LEADING_DENSE if form == "gguf" else own.n_dense
    first = keys.whole(first_key, 0, least=0, most=n_layers) if own.n_dense else 0
    if form == "gguf":
        return range(first)
    last = keys.whole(own.last, -1, least=-1) if own.last else -1
    step = keys.whole(own.interval, 1) if own.interval else 1
    listed = keys.items(own.dense, int) if own.dense and keys.value(own.dense) is not None else []
    last = n_layers if last in (-1, 0) else last
    return [i for i in range(n_layers) if i < first or i > last or (i + 1) % step or i in listed]


def _dense_keys(config: ModelConfig, form: Format, architecture: Architecture) -> dict[str, Any]:
    """The keys of these layers. Raises UnsupportedError if the format has none for them."""
    own, dense = architecture.experts, [i for i, layer in enumerate(config.layers) if layer.is_dense]
    if own is None or not (own.n_dense or dense):
        return {}
    if form == "hf" and own.dense:
        return {own.dense: dense}
    made: dict[str, Any] = {LEADING_DENSE if form == "gguf" else own.n_dense: len(dense)}
    if form == "hf" and own.last and len(dense) < config.n_layers:
        last = next(i for i in range(config.n_layers - 1, -1, -1) if i not in dense)
        made = {own.n_dense: sum(i < last for i in dense), own.last: last}
        dense = [i for i in dense if i < last]
    if dense != [*range(len(dense))] or not own.n_dense:
        raise UnsupportedError(f"these dense layers are not supported by files of {architecture.name}")
    return made


def write_numbers(config: ModelConfig, form: Format, architecture: Architecture) -> dict[str, Any]:
    """The keys of a configuration's numbers."""
    written: dict[str, Any] = {}
    for fact in facts(architecture):
        value = getattr(config, fact.field)
        scaling = config.rope.scaling
        if fact.field == "max_context" and scaling is not None and scaling.kind == "dynamic":
            value = scaling.original_context  # readers stretch this context
        if value is None and fact.field == "attention_scale":
            value = config.d_head**-0.5
        if not fact.key(form):
            continue
        if value == 0 and fact.field == "norm_eps" and form == "gguf":
            raise UnsupportedError("a norm's epsilon of 0 is not supported by GGUF")
        if value is None:  # none, where an absent key would mean a default
            written[fact.key(form)] = 0.0 if form == "gguf" else None
        else:
            written[fact.key(form)] = fact.kind(value)
    return written | _differing(config, form, architecture)


def _differing(config: ModelConfig, form: Format, architecture: Architecture) -> dict[str, Any]:
    """The keys of numbers that differ from layer to layer, as lists."""
    lists = {
        "n_kv_heads": [config.attention(i).n_kv_heads for i in range(config.n_layers)],
        "d_ffn": [config.mlp_width(i) for i in range(config.n_layers)],
    }
    named = {fact.field: fact.key(form) for fact in facts(architecture)}
    found = {
        named[field]: values
        for field, values in lists.items()
        if len(set(values)) > 1 and not (form == "hf" and field in architecture.hf_layers)
    }
    if found and form == "hf":
        names = ", ".join(found)
        raise UnsupportedError(f"{names} of single layers are not supported by {architecture.name}'s config")
    return {key: np.array(values, np.int32) for key, values in found.items()}


def write_scaling(scaling: RopeScaling, form: Format, fields: tuple[str, ...]) -> dict[str, Any]:
    """The keys of a scaling's fields, those left out that are None or that the format has no key for."""
    values = {name: getattr(scaling, name) for name in fields}
    return {
        SCALING_FACTS[name].key(form): list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value is not None and value != () and SCALING_FACTS[name].key(form)
    }


def _equal_heads(keys: Keys, form: Format, found: Mapping[str, int]) -> int:
    """The width of a head if no key says it."""
    heads_key = next(fact for fact in _FACTS if fact.field == "n_heads").key(form)
    d_model, n_heads = found["d_model"], found["n_heads"]
    if d_model % n_heads and form == "gguf":
        raise keys.error(heads_key, f"must divide the width {d_model}, which {n_heads} does not")
    if d_model // n_heads > MAX_HEAD:
        raise keys.error(heads_key, f"must be larger than {n_heads}, which makes heads wider than {MAX_HEAD}")
    return d_model // n_heads
