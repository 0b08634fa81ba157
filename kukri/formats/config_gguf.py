"""`ModelConfig` from a GGUF file's metadata (key names: docs/gguf.md of ggml, and gguf-py's constants.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kukri.config import LayerConfig, ModelConfig, RopeConfig
from kukri.errors import FormatError, UnsupportedError
from kukri.formats.gguf import GGUFFile, brief


@dataclass(frozen=True)
class GGUFArchitecture:
    """What a GGUF file of an architecture does not say.

    `interleaved_rope`: the rows of q and k are ordered so that dimensions 2i and 2i + 1 rotate together.
    """

    interleaved_rope: bool


GGUF_ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture(interleaved_rope=True),
}

# Larger claims are damage, and memory is reserved by these.
MAX_CONTEXT = 1 << 24  # tokens
MAX_HEAD = 1 << 10  # d_head

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
        "attention.sliding_window",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
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
    keys = _Keys(gguf, architecture)
    keys.refuse_unknown()
    n_vocab, d_model = _embedding_shape(gguf)
    keys.expect("embedding_length", d_model, "the width of tensor 'token_embd.weight'")
    n_layers = keys.whole("block_count", most=len(gguf.tensors))
    n_heads = keys.whole("attention.head_count")
    d_head = _d_head(keys, d_model, n_heads)
    layer = LayerConfig(window=keys.whole("attention.sliding_window", 0, least=0) or None)
    return ModelConfig(
        architecture=architecture,
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=_n_kv_heads(keys, n_heads),
        d_head=d_head,
        d_ffn=keys.whole("feed_forward_length"),
        n_vocab=n_vocab,
        norm_eps=keys.positive("attention.layer_norm_rms_epsilon", most=1.0),
        max_context=keys.whole("context_length", most=MAX_CONTEXT),
        tie_embeddings="output.weight" not in gguf.tensors,
        rope=_rope(keys, d_head),
        layers=(layer,) * n_layers,
        name=_Keys(gguf, "general").text("name", gguf.path.stem),
    )


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

    def expect(self, key: str, value: int, what: str) -> None:
        """Raises FormatError unless the key holds `value`, which is that of `what`."""
        if (found := self.whole(key)) != value:
            raise self.error(key, f"is {found}, but {what} is {value}")

    def refuse_unknown(self) -> None:
        """Raises UnsupportedError for a key under the prefix that might change the model's arithmetic."""
        scaled = self.text("rope.scaling.type", "") != "none"
        for full_key in self.gguf.metadata:
            key = full_key.removeprefix(f"{self.prefix}.")
            if key == full_key or key in _READ | _IGNORED:
                continue
            if key.startswith("rope.scaling."):
                if scaled:
                    raise self.unsupported(key, "scales RoPE, which kukri does not run yet")
            elif key not in _NEUTRAL:
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


def _rope(keys: _Keys, d_head: int) -> RopeConfig:
    scaling = keys.text("rope.scaling.type", "none")
    if scaling != "none":
        raise keys.unsupported("rope.scaling.type", f"is {brief(scaling)}: kukri does not scale RoPE yet")
    rotary_dim = keys.whole("rope.dimension_count", d_head, most=d_head)
    if rotary_dim % 2:
        raise keys.error("rope.dimension_count", f"is {rotary_dim}, which is odd")
    return RopeConfig(theta=keys.positive("rope.freq_base", 10000.0), rotary_dim=rotary_dim)
