"""What a model is (`ModelConfig`) and how it is run (`EngineConfig`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kukri.errors import ConfigError


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base frequency, and how many of a head's dimensions rotate.

    kukri always rotates dimension i with i + rotary_dim / 2 (half-split, as transformers does);
    files with interleaved rows are brought to that order when their weights are loaded.
    """

    theta: float = 10000.0
    rotary_dim: int = 0  # dimensions of a head that rotate, even


@dataclass(frozen=True)
class LayerConfig:
    """Facts that may differ from layer to layer."""

    use_rope: bool = True  # False: a NoPE layer
    window: int | None = None  # visible tokens, the current one included; None sees the whole context


@dataclass(frozen=True)
class ModelConfig:
    """A model's shape, read from GGUF metadata or config.json. Sizes in elements, contexts in tokens."""

    architecture: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ffn: int
    n_vocab: int
    norm_eps: float
    max_context: int
    tie_embeddings: bool
    rope: RopeConfig
    layers: tuple[LayerConfig, ...]
    name: str = ""

    def __post_init__(self) -> None:
        """Raises ConfigError on shapes no transformer can have."""
        for name in (
            "n_layers",
            "d_model",
            "n_heads",
            "n_kv_heads",
            "d_head",
            "d_ffn",
            "n_vocab",
            "max_context",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        if len(self.layers) != self.n_layers:
            raise ConfigError(f"{len(self.layers)} layer configs for {self.n_layers} layers")
        if not 0 <= self.rope.rotary_dim <= self.d_head or self.rope.rotary_dim % 2:
            raise ConfigError(
                f"rotary_dim {self.rope.rotary_dim} must be even and at most d_head {self.d_head}"
            )
        if not self.norm_eps > 0:
            raise ConfigError(f"norm_eps must be above 0, not {self.norm_eps}")

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes one token takes in an fp16 KV cache, all layers."""
        return 2 * self.n_layers * self.n_kv_heads * self.d_head * 2


PAGE_TOKENS = 16  # tokens per KV page: one SIMD vector of scores


@dataclass(frozen=True)
class EngineConfig:
    """How a model is run. Defaults are what `kukri run` uses."""

    backend: Literal["cpu", "reference"] = "cpu"
    max_context: int | None = None  # tokens of the longest request; None: the model's own limit
    max_requests: int = 1  # requests that hold pages at a time
    max_step_tokens: int = 512  # prompt chunk and step size
    n_threads: int | None = None  # None: the cores this process may use
    kv_type: Literal["f16"] = field(default="f16")

    def __post_init__(self) -> None:
        """Raises ConfigError on values out of range."""
        for name in ("max_requests", "max_step_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("max_context", "n_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
