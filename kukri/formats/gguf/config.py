"""`ModelConfig` from a GGUF file's metadata (key names: docs/gguf.md of ggml, and gguf-py's constants.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.config import (
    MAX_CONTEXT,
    MAX_HEAD,
    PROBLEM_TYPES,
    HeadConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
    RopeScaling,
)
from kukri.errors import ConfigError, FormatError, UnsupportedError, brief
from kukri.formats.gguf.reader import GGUFFile
from kukri.quant.per_token import ACTIVATIONS_KEY, PER_TOKEN


@dataclass(frozen=True)
class GGUFArchitecture:
    """What a GGUF file of an architecture does not say.

    `interleaved_rope`: the rows of q and k are ordered so that dimensions 2i and 2i + 1 rotate together.
    `nope_interval`: where the file does not list them, every so many layers the last one is NoPE; 0: none is.
    """

    architecture: str  # kukri's name, which is transformers' model_type
    interleaved_rope: bool = False
    nope_interval: int = 0
    epsilon_key: str = "attention.layer_norm_rms_epsilon"
    biases: frozenset[str] = frozenset()  # matrices of a layer that never are without


_PHI_BIASES = frozenset(["attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_up", "ffn_down"])

GGUF_ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture("llama", interleaved_rope=True),  # Mistral's files say llama as well
    "smollm3": GGUFArchitecture("smollm3", interleaved_rope=True, nope_interval=4),
    "qwen2": GGUFArchitecture("qwen2", biases=frozenset(["attn_q", "attn_k", "attn_v"])),
    "qwen3": GGUFArchitecture("qwen3"),
    "phi2": GGUFArchitecture("phi", epsilon_key="attention.layer_norm_epsilon", biases=_PHI_BIASES),
    "phi3": GGUFArchitecture("phi3"),
    "starcoder2": GGUFArchitecture("starcoder2", epsilon_key="attention.layer_norm_epsilon"),
}

# Tensors that are configuration: divisors of RoPE's frequencies.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
# kukri's own key, which its writer adds: the indices of the layers without RoPE.
NOPE_KEY = "attention.nope_layers"
# Heads. Labels are GGUF's own; kukri's keys say which task, how scores are meant, and what pads look like.
LABELS_KEY = "classifier.output_labels"
HEAD_KEY = "head.kind"
PROBLEM_KEY = "head.problem_type"
PAD_KEY = "head.pad_token_id"

# Keys below the architecture's prefix that `model_config` reads.
_READ = frozenset(
    (
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.layer_norm_epsilon",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        NOPE_KEY,
        LABELS_KEY,
        HEAD_KEY,
        PROBLEM_KEY,
        PAD_KEY,
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.finetuned",
    )
)
# Keys that change nothing, whatever they hold, and keys that change nothing while they hold this.
_IGNORED = frozenset(["vocab_size", "tensor_data_layout"])
_NEUTRAL: dict[str, int | float | bool] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "rope.scale_linear": 1.0,
    "use_parallel_residual": False,
}


def model_config(gguf: GGUFFile) -> ModelConfig:
    """The configuration of a GGUF file's model.

    Raises FormatError naming the key that is missing, of another type or nonsense, and UnsupportedError for
    an architecture, or a feature of one, that kukri does not run: a key it does not know included.
    """
    architecture = _Keys(gguf, "general").text("architecture")
    if architecture not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise UnsupportedError(
            f"{gguf.path}: architecture {brief(architecture)} is not supported: kukri runs {known}"
        )
    fixed = GGUF_ARCHITECTURES[architecture]
    keys = _Keys(gguf, architecture)
    keys.refuse_unknown()
    n_vocab, d_model = _embedding_shape(gguf)
    keys.expect("embedding_length", d_model, "the width of tensor 'token_embd.weight'")
    n_layers = keys.whole("block_count", most=len(gguf.tensors))
    n_heads = keys.whole("attention.head_count")
    d_head = _d_head(keys, d_model, n_heads)
    max_context = keys.whole("context_length", most=MAX_CONTEXT)
    rope = _rope(keys, d_head, max_context)
    return ModelConfig(
        architecture=fixed.architecture,
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=_n_kv_heads(keys, n_heads),
        d_head=d_head,
        d_ffn=keys.whole("feed_forward_length"),
        n_vocab=n_vocab,
        norm_eps=keys.positive(fixed.epsilon_key, most=1.0),
        max_context=_stretched(rope.scaling, max_context),
        tie_embeddings="output.weight" not in gguf.tensors,
        rope=rope,
        layers=_layers(keys, n_layers, fixed.nope_interval),
        name=_Keys(gguf, "general").text("name", gguf.path.stem),
        head=_head(keys, n_vocab),
    )


def activations_per_token(gguf: GGUFFile) -> bool:
    """True where the file wants one activation scale a token. Raises UnsupportedError for other wishes."""
    if ACTIVATIONS_KEY not in gguf.metadata:
        return False
    wanted = gguf.metadata[ACTIVATIONS_KEY]
    if not isinstance(wanted, str) or wanted != PER_TOKEN:
        raise UnsupportedError(f"{gguf.path}: key {ACTIVATIONS_KEY!r} is {brief(wanted)}, not {PER_TOKEN!r}")
    return True


def _head(keys: _Keys, n_vocab: int) -> HeadConfig:
    """A language model's, or what the keys say; labels alone mean a sequence's, as in llama.cpp."""
    labels = keys.text_list(LABELS_KEY) if keys.has(LABELS_KEY) else []
    kind = keys.text(HEAD_KEY, "sequence_classification" if labels else "language_model")
    problem = keys.text(PROBLEM_KEY) if keys.has(PROBLEM_KEY) else None
    if problem not in (None, *PROBLEM_TYPES):
        raise keys.unsupported(PROBLEM_KEY, f"is {brief(problem)}: kukri knows {', '.join(PROBLEM_TYPES)}")
    pad_id = keys.whole(PAD_KEY, least=0, most=n_vocab - 1) if keys.has(PAD_KEY) else None
    try:
        return HeadConfig(kind, tuple(labels), problem, pad_id)
    except ConfigError as error:
        raise FormatError(str(error), path=keys.gguf.path) from None


class _Keys:
    """Typed access to the keys below a prefix."""

    def __init__(self, gguf: GGUFFile, prefix: str) -> None:
        self.gguf, self.prefix = gguf, prefix

    def error(self, key: str, message: str) -> FormatError:
        """A FormatError about a key."""
        return FormatError(f"key {brief(f'{self.prefix}.{key}')} {message}", path=self.gguf.path)

    def unsupported(self, key: str, message: str) -> UnsupportedError:
        """An UnsupportedError about a key."""
        return UnsupportedError(f"{self.gguf.path}: key {brief(f'{self.prefix}.{key}')} {message}")

    def value(self, key: str, default: object = None) -> object:
        """What the key holds. Raises FormatError if there is neither key nor default."""
        value = self.gguf.metadata.get(f"{self.prefix}.{key}", default)
        if value is None:
            raise self.error(key, "is missing")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self.value(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be text, not {type(value).__name__}")
        return value

    def whole(self, key: str, default: int | None = None, *, least: int = 1, most: int = 2**31 - 1) -> int:
        """A whole number between bounds, both included."""
        value = self.value(key, default)
        if type(value) is not int:
            raise self.error(key, f"must be a whole number, not {type(value).__name__}")
        if not least <= value <= most:
            raise self.error(key, f"is {value}, not between {least} and {most}")
        return value

    def positive(self, key: str, default: float | None = None, *, most: float = math.inf) -> float:
        """A finite number above 0."""
        value = self.value(key, default)
        if type(value) is not float and type(value) is not int:
            raise self.error(key, f"must be a number, not {type(value).__name__}")
        if not 0 < value <= most or math.isinf(value):
            raise self.error(
                key, f"is {value}, not a finite number above 0" + f" up to {most:g}" * (most < math.inf)
            )
        return float(value)

    def has(self, key: str) -> bool:
        """True if the file has the key."""
        return f"{self.prefix}.{key}" in self.gguf.metadata

    def whole_list(self, key: str) -> list[int]:
        """Whole numbers (or truths, as 0 and 1); empty where the list is."""
        value = self.value(key)
        if (
            isinstance(value, np.ndarray)
            and value.ndim == 1
            and (value.dtype.kind in "iub" or not len(value))
        ):
            return [int(number) for number in value]
        if isinstance(value, list) and all(isinstance(number, int) for number in value):
            return [int(number) for number in value]
        raise self.error(key, "must be a list of whole numbers")

    def text_list(self, key: str) -> list[str]:
        """Strings."""
        value = self.value(key)
        if isinstance(value, list) and all(isinstance(text, str) for text in value):
            return value
        raise self.error(key, "must be a list of texts")

    def expect(self, key: str, value: int, what: str) -> None:
        """Raises FormatError unless the key holds `value`, which is that of `what`."""
        if (found := self.whole(key)) != value:
            raise self.error(key, f"is {found}, but {what} is {value}")

    def refuse_unknown(self) -> None:
        """Raises UnsupportedError for a key under the prefix that might change the model's arithmetic."""
        for full_key in self.gguf.metadata:
            key = full_key.removeprefix(f"{self.prefix}.")
            if key == full_key or key in _READ | _IGNORED:
                continue
            if key not in _NEUTRAL:
                raise self.unsupported(key, "is unknown, and may change what the model computes")
            elif not np.array_equal(self.gguf.metadata[full_key], _NEUTRAL[key]):
                raise self.unsupported(key, f"must be {_NEUTRAL[key]}: kukri runs nothing else")


def _embedding_shape(gguf: GGUFFile) -> tuple[int, int]:
    """n_vocab, d_model."""
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise FormatError("is missing", path=gguf.path, tensor="token_embd.weight")
    if len(embedding.shape) != 2:
        raise FormatError(
            f"has shape {embedding.shape}, not (vocabulary, width)", path=gguf.path, tensor=embedding.name
        )
    return embedding.shape[0], embedding.shape[1]


def _d_head(keys: _Keys, d_model: int, n_heads: int) -> int:
    has_key = f"{keys.prefix}.attention.key_length" in keys.gguf.metadata
    if not has_key and d_model % n_heads:
        raise keys.error("attention.head_count", f"is {n_heads}, which does not divide the width {d_model}")
    d_head = keys.whole("attention.key_length", most=MAX_HEAD) if has_key else d_model // n_heads
    if d_head > MAX_HEAD:
        raise keys.error("attention.head_count", f"is {n_heads}, which makes heads wider than {MAX_HEAD}")
    d_value = keys.whole("attention.value_length", d_head)
    if d_value != d_head:
        raise keys.unsupported(
            "attention.value_length", f"is {d_value}: kukri runs values as wide as keys ({d_head})"
        )
    return d_head


def _n_kv_heads(keys: _Keys, n_heads: int) -> int:
    n_kv_heads = keys.whole("attention.head_count_kv", n_heads, most=n_heads)
    if n_heads % n_kv_heads:
        raise keys.error("attention.head_count_kv", f"is {n_kv_heads}, which does not divide {n_heads} heads")
    return n_kv_heads


def _layers(keys: _Keys, n_layers: int, nope_interval: int) -> tuple[LayerConfig, ...]:
    """Which layers rotate, and which see a window only."""
    nope = {i for i in range(n_layers) if nope_interval and i % nope_interval == nope_interval - 1}
    if keys.has(NOPE_KEY):
        nope = set(keys.whole_list(NOPE_KEY))
        if not nope <= set(range(n_layers)):
            raise keys.error(NOPE_KEY, f"names layers outside 0 to {n_layers - 1}")
    window = keys.whole("attention.sliding_window", 0, least=0) or None
    windowed = _windowed(keys, n_layers)
    return tuple(
        LayerConfig(use_rope=i not in nope, window=window if windowed[i] else None) for i in range(n_layers)
    )


def _windowed(keys: _Keys, n_layers: int) -> list[bool]:
    """Which layers the window is for: a truth for each, or n, where every n-th layer sees everything."""
    key = "attention.sliding_window_pattern"
    if not keys.has(key):
        return [True] * n_layers
    if type(keys.value(key)) is int:
        n = keys.whole(key, least=0)
        return [n == 0 or i % n < n - 1 for i in range(n_layers)]
    pattern = keys.whole_list(key)
    if len(pattern) != n_layers:
        raise keys.error(key, f"has {len(pattern)} entries for {n_layers} layers")
    return [bool(entry) for entry in pattern]


def _rope(keys: _Keys, d_head: int, max_context: int) -> RopeConfig:
    rotary_dim = keys.whole("rope.dimension_count", d_head, most=d_head)
    if rotary_dim % 2:
        raise keys.error("rope.dimension_count", f"is {rotary_dim}, which is odd")
    theta = keys.positive("rope.freq_base", 10000.0)
    try:
        return RopeConfig(theta, rotary_dim, _rope_scaling(keys, max_context))
    except ConfigError as error:
        raise FormatError(str(error), path=keys.gguf.path) from None


def _stretched(scaling: RopeScaling | None, max_context: int) -> int:
    """max_context, or where YaRN reaches further, that: some files give the context before it."""
    if scaling is None or scaling.kind != "yarn":
        return max_context
    return max(max_context, min(int(scaling.original_context * scaling.factor), MAX_CONTEXT))


def _rope_scaling(keys: _Keys, max_context: int) -> RopeScaling | None:
    kind = _scaling_kind(keys)
    if kind == "none":
        return None
    if kind == "llama3":
        return RopeScaling(kind, factors=_factors(keys, ROPE_TENSORS[0]))
    original = keys.whole("rope.scaling.original_context_length", max_context, most=MAX_CONTEXT)
    if kind == "longrope":
        return RopeScaling(
            kind,
            max_context / original,
            original,
            attention_factor=_attention_factor(keys, 1.0),
            short_factors=_factors(keys, ROPE_TENSORS[1]),
            long_factors=_factors(keys, ROPE_TENSORS[2]),
        )
    factor = keys.positive("rope.scaling.factor")
    if kind == "linear":
        return RopeScaling(kind, factor)
    if kind == "dynamic":
        return RopeScaling(kind, factor, original)
    return RopeScaling(
        kind,
        factor,
        original,
        attention_factor=_attention_factor(keys, 0.1 * math.log(max(factor, 1.0)) + 1),
        beta_fast=keys.positive("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.positive("rope.scaling.yarn_beta_slow", 1.0),
    )


def _scaling_kind(keys: _Keys) -> str:
    """What the file names, or what tensors with factors imply: converters then write no kind."""
    tensors = keys.gguf.tensors.keys()
    by_tensors = "llama3" if ROPE_TENSORS[0] in tensors else ""
    by_tensors = by_tensors or ("longrope" if tensors & set(ROPE_TENSORS[1:]) else "")
    default = "linear" if keys.has("rope.scaling.factor") else "none"  # llama.cpp's
    kind = keys.text("rope.scaling.type", by_tensors or default)
    if by_tensors:
        if kind not in (by_tensors, "none"):
            raise keys.unsupported(
                "rope.scaling.type", f"is {brief(kind)} in a file with {by_tensors} factors"
            )
        return by_tensors
    if kind not in ("none", "linear", "dynamic", "yarn"):
        raise keys.unsupported(
            "rope.scaling.type",
            f"is {brief(kind)}: kukri runs none, linear, dynamic and yarn, and others by their factors",
        )
    return kind


def _attention_factor(keys: _Keys, base: float) -> float | None:
    """The file's attention factor, which multiplies `base`; None where it says nothing."""
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        if keys.has(key):
            return keys.positive(key) * base
    return None


def _factors(keys: _Keys, name: str) -> tuple[float, ...]:
    """The divisors in a tensor."""
    tensor = keys.gguf.tensors.get(name)
    if tensor is None:
        raise FormatError("is missing", path=keys.gguf.path, tensor=name)
    if len(tensor.shape) != 1 or tensor.type.name != "F32" or tensor.shape[0] > MAX_HEAD:
        raise FormatError("must be a list of F32 factors", path=keys.gguf.path, tensor=name)
    return tuple(keys.gguf.array(name).tolist())


_GGUF_OF = {fixed.architecture: name for name, fixed in GGUF_ARCHITECTURES.items()} | {"mistral": "llama"}


def gguf_architecture(config: ModelConfig) -> tuple[str, GGUFArchitecture]:
    """GGUF's name for an architecture, and what its files leave unsaid."""
    name = _GGUF_OF[config.architecture]
    return name, GGUF_ARCHITECTURES[name]


def model_metadata(config: ModelConfig) -> dict[str, Any]:
    """The keys of a configuration. Raises UnsupportedError for what no key can say."""
    name, fixed = gguf_architecture(config)
    keys: dict[str, Any] = {
        "block_count": config.n_layers,
        "context_length": config.max_context,
        "embedding_length": config.d_model,
        "feed_forward_length": config.d_ffn,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.d_head,
        "attention.value_length": config.d_head,
        fixed.epsilon_key: float(config.norm_eps),
        "rope.freq_base": float(config.rope.theta),
        "rope.dimension_count": config.rope.rotary_dim,
        "vocab_size": config.n_vocab,
        **_window_keys(config, name),
        **(_scaling_keys(config.rope.scaling, config.max_context) if config.rope.scaling else {}),
    }
    nope = [i for i, layer in enumerate(config.layers) if not layer.use_rope]
    if fixed.nope_interval or nope:
        keys[NOPE_KEY] = np.array(nope, np.int32)
    keys |= _head_keys(config)
    return {
        "general.architecture": name,
        "general.type": "model",
        "general.name": config.name or name,
        **{f"{name}.{key}": value for key, value in keys.items()},
    }


def _head_keys(config: ModelConfig) -> dict[str, Any]:
    head = config.head
    if head.kind == "language_model":
        return {}
    keys: dict[str, Any] = {HEAD_KEY: head.kind}
    if head.labels:
        keys[LABELS_KEY] = list(head.labels)
    if head.problem_type is not None:
        keys[PROBLEM_KEY] = head.problem_type
    if head.pad_id is not None and 0 <= head.pad_id < config.n_vocab:  # another is in no text
        keys[PAD_KEY] = head.pad_id
    return keys


def rope_tensors(config: ModelConfig) -> dict[str, npt.NDArray[np.float32]]:
    """The tensors that are configuration: what RoPE's frequencies are divided by, for llama3 and longrope."""
    scaling = config.rope.scaling
    if scaling is None or scaling.kind not in ("llama3", "longrope"):
        return {}
    if scaling.kind == "longrope":
        return {
            ROPE_TENSORS[1]: np.array(scaling.short_factors, np.float32),
            ROPE_TENSORS[2]: np.array(scaling.long_factors, np.float32),
        }
    factors = scaling.factors or _llama3_factors(config.rope.theta, config.rope.rotary_dim, scaling)
    return {ROPE_TENSORS[0]: np.array(factors, np.float32)}


def _llama3_factors(theta: float, rotary_dim: int, scaling: RopeScaling) -> npt.NDArray[np.float64]:
    """Slow frequencies divided by the factor, fast ones by 1, a blend between (Llama 3.1)."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    turns = scaling.original_context / wavelengths
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    factors: npt.NDArray[np.float64] = 1 / ((1 - kept) / scaling.factor + kept)
    return factors


def _window_keys(config: ModelConfig, name: str) -> dict[str, Any]:
    windows = {layer.window for layer in config.layers}
    if windows == {None}:
        return {"attention.sliding_window": 0} if name == "phi3" else {}
    sizes = windows - {None}
    if len(sizes) > 1:
        raise UnsupportedError(f"GGUF has no key for windows of several sizes: {sorted(sizes, key=str)}")
    keys: dict[str, Any] = {"attention.sliding_window": sizes.pop()}
    if None in windows:
        keys["attention.sliding_window_pattern"] = np.array(
            [layer.window is not None for layer in config.layers]
        )
    return keys


def _scaling_keys(scaling: RopeScaling, max_context: int) -> dict[str, Any]:
    if scaling.kind == "llama3":
        return {}  # its tensor says all
    if scaling.kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling.factor)}
    keys: dict[str, Any] = {"rope.scaling.original_context_length": scaling.original_context}
    if scaling.kind == "longrope":
        factor, original = max(scaling.factor, 1.0), scaling.original_context
        by_paper = math.sqrt(1 + math.log(factor) / math.log(original))
        return {**keys, "rope.scaling.attn_factor": float(scaling.attention_factor or by_paper)}
    keys |= {"rope.scaling.type": scaling.kind, "rope.scaling.factor": float(scaling.factor)}
    return keys | _yarn_keys(scaling) if scaling.kind == "yarn" else keys


def _yarn_keys(scaling: RopeScaling) -> dict[str, Any]:
    if not scaling.truncate:
        raise UnsupportedError("GGUF has no key for YaRN without rounded bounds (truncate: false)")
    log = math.log(max(scaling.factor, 1.0))
    base = 0.1 * log + 1  # what readers multiply the key by
    wanted = scaling.attention_factor
    if wanted is None and scaling.mscale and scaling.mscale_all_dim:
        wanted = (0.1 * scaling.mscale * log + 1) / (0.1 * scaling.mscale_all_dim * log + 1)
    keys = {
        "rope.scaling.yarn_beta_fast": float(scaling.beta_fast),
        "rope.scaling.yarn_beta_slow": float(scaling.beta_slow),
    }
    return keys if wanted is None else {**keys, "rope.scaling.attn_factor": wanted / base}
