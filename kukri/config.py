"""Configuration: of a model (`ModelConfig`) and of the engine that runs it (`EngineConfig`)."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping
from typing import Literal, get_args

from kukri.dataclass import dataclass, field
from kukri.errors import ConfigError

ROPE_SCALINGS = ("linear", "dynamic", "yarn", "llama3", "longrope")
MAX_ROPE_FACTOR = 1 << 20
NO_ROTATION = 1e30  # a divisor of a frequency that stands for none at all, as in GGUF
# Larger claims of a file are damage, and memory is reserved by these.
MAX_CONTEXT = 1 << 24  # tokens
MAX_TOKEN_TYPES = 1 << 10


@dataclass(frozen=True)
class RopeScaling:
    """RoPE scaling beyond the context that a model was trained on. `kukri.models.rope` has the formulas.

    Field names follow transformers where it has them (`rope_parameters`); each kind reads only its own.
    """

    kind: str  # one of ROPE_SCALINGS
    factor: float = (
        1.0  # linear, dynamic, yarn, llama3: the stretch; longrope: what its attention factor uses
    )
    original_context: int = 0  # tokens the model was trained on; 0 for linear, which needs none
    attention_factor: float | None = None  # yarn, longrope: multiplies cos and sin; None: the papers' formula
    beta_fast: float = 32.0  # yarn: rotations in the original context above which nothing is interpolated
    beta_slow: float = 1.0  # yarn: rotations below which everything is
    truncate: bool = True  # yarn: round those bounds to whole dimensions
    mscale: float = (
        0.0  # yarn: DeepSeek's attention factor is get_mscale(mscale) / get_mscale(mscale_all_dim)
    )
    mscale_all_dim: float = 0.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    factors: tuple[float, ...] = ()  # llama3: divisors of each frequency if a file gives them
    short_factors: tuple[float, ...] = ()  # longrope: divisors up to original_context
    long_factors: tuple[float, ...] = ()  # longrope: divisors beyond

    def reach(self, max_context: int) -> int:
        """`max_context`, or the stretched original context if that is more, which some files leave unsaid."""
        if self.kind not in ("yarn", "dynamic"):
            return max_context
        return max(max_context, int(min(self.original_context * self.factor, MAX_CONTEXT)))

    def __post_init__(self) -> None:
        """Raises ConfigError on an unknown kind or numbers without a meaning."""
        if self.kind not in ROPE_SCALINGS:
            raise ConfigError(f"RoPE scaling {self.kind!r} is not supported: use {', '.join(ROPE_SCALINGS)}")
        least, most = 1 / MAX_ROPE_FACTOR, MAX_ROPE_FACTOR
        rotating = (factor for factor in self.factors if not math.isclose(factor, NO_ROTATION, rel_tol=1e-6))
        divisors = (*rotating, *self.short_factors, *self.long_factors)
        if not all(least <= number <= most for number in (self.factor, *divisors)):
            raise ConfigError(f"the factors of {self.kind} RoPE scaling must be above 0 and at most {most}")
        if self.attention_factor is not None and not 0 < self.attention_factor <= MAX_ROPE_FACTOR:
            raise ConfigError(f"the attention factor must be above 0, not {self.attention_factor:g}")
        if self.kind != "linear" and not self.factors and self.original_context < 1:
            raise ConfigError(f"{self.kind} RoPE scaling requires the context length of the training")
        if self.kind == "longrope" and not (self.short_factors and self.long_factors):
            raise ConfigError("longrope RoPE scaling requires short and long factors")
        if self.kind == "longrope" and self.original_context < 2:
            raise ConfigError("longrope RoPE scaling requires an original context above 1 token")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError("'low_freq_factor' of llama3 RoPE must be above 0 and below 'high_freq_factor'")
        if self.kind == "yarn" and not 0 < self.beta_slow <= self.beta_fast:
            raise ConfigError("'beta_slow' of yarn RoPE scaling must be above 0 and at most 'beta_fast'")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base frequency, how many of a head's dimensions rotate, and the scaling.

    kukri always rotates dimension i with i + rotary_dim / 2 (half-split, as transformers does);
    files with interleaved rows are brought to that order when their weights are loaded.
    """

    theta: float = 10000.0
    rotary_dim: int = 0  # dimensions of a head that rotate, even
    scaling: RopeScaling | None = None
    # by which each pair of dimensions turns, if tokens have several positions (M-RoPE); (): they have one
    axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises ConfigError unless the scaling fits theta and the number of frequencies."""
        s = self.scaling
        if not 1e-3 <= self.theta <= 1e18:  # frequencies are float32
            raise ConfigError(f"the base of RoPE (theta) must be from 0.001 to 1e18, not {self.theta:g}")
        if s and s.kind == "yarn" and self.theta <= 1:
            raise ConfigError(f"the base (theta) of yarn RoPE scaling must be above 1, not {self.theta}")
        if s and s.kind == "dynamic" and self.rotary_dim < 4:
            raise ConfigError("dynamic RoPE scaling requires at least 4 rotary dimensions")
        for factors in (s.factors, s.short_factors, s.long_factors) if s else ():
            if factors and len(factors) != self.rotary_dim // 2:
                raise ConfigError(f"RoPE must have {self.rotary_dim // 2} factors, not {len(factors)}")


@dataclass(frozen=True)
class LayerConfig:
    """Facts that may differ from layer to layer."""

    use_rope: bool = True  # False: a NoPE layer
    window: int | None = None  # visible tokens, the current one included; None sees the whole context
    # None: the model's
    rope: RopeConfig | None = None
    n_kv_heads: int | None = None
    d_head: int | None = None
    d_ffn: int | None = None
    attention_scale: float | None = None  # multiplies scores; the model's is d_head ** -0.5
    is_recurrent: bool = False  # True: keeps a state in place of keys and values
    has_state: bool = False  # True: keeps a state besides keys and values
    is_mlp: bool = False  # True: is an MLP or a mixture, and nothing else
    is_dense: bool = False  # True: has an MLP where the model's other layers have a mixture
    kv_from: int | None = None  # an earlier layer whose keys and values it reads; None: its own
    keys_are_values: bool = False  # True: the keys' matrix makes the values too


@dataclass(frozen=True)
class AttentionConfig:
    """One layer's attention: see `ModelConfig.attention`."""

    n_kv_heads: int
    d_head: int
    scale: float  # multiplies scores
    window: int | None  # visible tokens, the current one included; None sees the whole context
    rope: RopeConfig | None  # None: a NoPE layer
    softcap: float | None  # bounds scores
    kv_from: int | None = None  # the layer whose keys and values it reads; None: its own
    keys_are_values: bool = False


@dataclass(frozen=True)
class MixtureConfig:
    """A mixture of experts in place of the MLP of each layer that is not dense."""

    n_experts: int
    n_used: int  # experts per token
    d_ffn: int  # width of an expert's MLP
    normalized: bool  # a token's weights are divided by their sum; if not, they are the experts' scores
    by_sigmoid: bool = False  # scores are sigmoids of the router's logits; if not, shares in their softmax
    has_bias: bool = False  # scores with a bias choose the experts
    n_groups: int = 1  # groups of neighbouring experts
    n_groups_used: int = 1  # that a token's experts are in
    scale: float = 1.0  # multiplies a token's weights
    tolerance: float = 0.0  # an expert's weight is its share among as good ones (`Routing`); 0: as above
    d_shared: int = 0  # width of an MLP that each token passes too; 0: none
    d_latent: int | None = None  # width of the experts' inputs and outputs; None: the model's
    alpha: float = 1.702  # gpt-oss's activation has it and the limit
    limit: float = 7.0

    def __post_init__(self) -> None:
        """Raises ConfigError on sizes that no mixture can have."""
        if not 1 <= self.n_used <= self.n_experts:
            raise ConfigError(
                f"experts per token ({self.n_used}) must be from 1 to the number of experts "
                f"({self.n_experts})"
            )
        if self.d_ffn < 1:
            raise ConfigError(f"the width of experts must be at least 1, not {self.d_ffn}")
        if self.n_experts % self.n_groups or not 1 <= self.n_groups_used <= self.n_groups:
            groups = f"{self.n_groups_used} used of {self.n_groups} groups"
            raise ConfigError(f"{self.n_experts} experts must be in groups of one size ({groups})")
        if self.n_used > self.n_experts // self.n_groups * self.n_groups_used:
            raise ConfigError(f"experts per token ({self.n_used}) must fit into {self.n_groups_used} groups")


@dataclass(frozen=True)
class RecurrentConfig:
    """The layers that keep a state: a convolution and, of some kinds, heads with a matrix each."""

    n_taps: int  # inputs that an output of the convolution depends on
    n_heads: int = 0
    n_groups: int = 0  # groups of heads that share keys and queries
    d_state: int = 0  # width of keys and queries
    d_head: int = 0  # width of a head's values
    are_tiled: bool = False  # heads of a group lie n_groups apart, as in GGUF, not side by side
    has_norm: bool = True  # a state space's result is normed
    norm_first: bool = False  # before its gate, not after it
    d_vector: int | None = None  # width of an encoder's vectors; None: d_model
    activation: str = "silu"  # the row of `kukri.kernels.activations` that follows the convolution
    steps: tuple[float, float] = (0.0, math.inf)  # the least and the largest step of a state space

    def __post_init__(self) -> None:
        """Raises ConfigError on sizes that no layer can have."""
        if self.n_taps < 2:
            raise ConfigError(f"a recurrent layer's convolution must have 2 taps or more, not {self.n_taps}")
        if self.n_heads and (self.n_groups < 1 or self.n_heads % self.n_groups):
            raise ConfigError(f"recurrent groups ({self.n_groups}) must divide the heads ({self.n_heads})")


@dataclass(frozen=True)
class MultiplierConfig:
    """What the inputs and results of a layer's parts are multiplied by (Falcon-H1)."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    # a state space's gate, its convolution's inputs (values, keys and queries), and its steps
    state_inputs: tuple[float, ...] = (1.0,) * 5
    state_out: float = 1.0
    gate: float = 1.0  # an MLP's, before the activation
    down: float = 1.0


@dataclass(frozen=True)
class LatentConfig:
    """Attention whose keys and values are made of one narrow row a token, the latent (DeepSeek-V2).

    A head's query and key are `d_nope` numbers and then those that rotate (`RopeConfig.rotary_dim`). What is
    cached, and what heads attend to, is the latent and one rotated key for all heads: with `n_kv_heads` 1 and
    `d_head` as wide as both.
    """

    rank: int  # width of the latent
    d_nope: int
    d_value: int  # width of a head's values
    q_rank: int  # width of what queries are made of; 0: the model's

    def __post_init__(self) -> None:
        """Raises ConfigError on widths that no layer can have."""
        if min(self.rank, self.d_nope, self.d_value) < 1 or self.q_rank < 0:
            raise ConfigError(
                f"the widths of latent attention must be positive: {self.rank}, {self.d_nope} and "
                f"{self.d_value}"
            )


HEADS = (
    "language_model",
    "question_answering",
    "sequence_classification",
    "token_classification",
    "none",
)


PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


@dataclass(frozen=True)
class HeadConfig:
    """The output head, on top of the last norm; `labels` are the labels of a classification."""

    kind: str = "language_model"  # one of HEADS
    labels: tuple[str, ...] = ()
    problem_type: str | None = None  # one of PROBLEM_TYPES, for sequence classification
    pad_id: int | None = None  # a sequence classification looks at the last token that is another

    def __post_init__(self) -> None:
        """Raises ConfigError on an unknown kind, or a classification without labels."""
        if self.kind not in HEADS:
            raise ConfigError(f"head {self.kind[:60]!r} is not supported: use {', '.join(HEADS)}")
        if self.kind.endswith("classification") != bool(self.labels):
            raise ConfigError(f"a {self.kind} head cannot have {len(self.labels)} labels")


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
    head: HeadConfig = HeadConfig()
    mixture: MixtureConfig | None = None
    recurrent: RecurrentConfig | None = None
    latent: LatentConfig | None = None
    multipliers: MultiplierConfig = MultiplierConfig()
    has_gates: bool = False  # attention's result is gated, by further rows of q's matrix
    # numbers that only some architectures have (`Architecture.numbers`)
    attention_scale: float | None = None  # multiplies scores; None: d_head ** -0.5
    # queries are multiplied by 1 + this * log(1 + position // the context that YaRN stretches)
    query_growth: float = 0.0
    embedding_scale: float = 1.0  # multiplies embeddings
    residual_scale: float = 1.0  # multiplies what attention and MLP add to the residual stream
    logits_divisor: float = 1.0
    attention_softcap: float | None = None  # scores become cap * tanh(score / cap)
    logit_softcap: float | None = None  # and so do logits
    qkv_clip: float | None = None  # bounds the numbers of queries, keys and values
    is_causal: bool = True  # False: an encoder, whose tokens see the whole text
    sees_later: bool = True  # False: an encoder whose tokens see earlier ones alone
    n_token_types: int = 0  # embeddings that tell the texts of a pair apart; 0: none
    n_positions: int = 0  # rows of an embedding of positions; 0: none
    n_sound: int = 0  # places of a sound, with which each sequence then begins; 0: none
    n_sound_rows: int = 0  # how many of them hold rows that the text attends to
    # MLPs read what attention added to, where they usually read what attention reads, or the other way round
    is_reordered: bool = False
    is_rounded: bool = False  # files hold weights that are rounded to ternary ones as they are loaded
    d_per_layer: int = 0  # width of a second embedding of tokens, one for each layer; 0: none
    d_vector: int | None = None  # width of an encoder's vectors; None: d_model
    activation: str = "silu"  # the row of `kukri.kernels.activations` in MLPs and experts

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
                raise ConfigError(f"{name!r} must be at least 1, not {getattr(self, name)}")
        if len(self.layers) != self.n_layers:
            raise ConfigError(f"{self.n_layers} layers cannot have {len(self.layers)} configurations")
        _check_heads(self.n_heads, self.n_kv_heads, self.d_head, self.rope)
        for i, layer in enumerate(map(self.attention, range(self.n_layers))):
            _check_heads(self.n_heads, layer.n_kv_heads, layer.d_head, layer.rope)
            if layer.kv_from is not None:
                self._check_shared(i, layer, layer.kv_from)
        if not self.norm_eps >= 0:
            raise ConfigError(f"'norm_eps' must be at least 0, not {self.norm_eps}")
        if self.recurrent is None and any(layer.is_recurrent or layer.has_state for layer in self.layers):
            raise ConfigError("recurrent layers require their sizes")

    def _check_shared(self, i: int, layer: AttentionConfig, source: int) -> None:
        """Raises ConfigError unless layer `i` can read the keys and values of layer `source`."""
        if not 0 <= source < i:
            raise ConfigError(f"layer {i} cannot share the keys of layer {source}, which is not before it")
        other = self.attention(source)
        if other.kv_from is not None or self.layers[source].is_recurrent:
            raise ConfigError(f"layer {i} cannot share the keys of layer {source}, which has none of its own")
        if any(getattr(layer, part) != getattr(other, part) for part in ("n_kv_heads", "d_head", "window")):
            raise ConfigError(
                f"layer {i} cannot share the keys of layer {source}, whose heads or window differ"
            )

    def attention(self, layer: int) -> AttentionConfig:
        """The attention of a layer: its own numbers, else the model's."""
        this = self.layers[layer]
        d_head = this.d_head or self.d_head
        return AttentionConfig(
            n_kv_heads=this.n_kv_heads or self.n_kv_heads,
            d_head=d_head,
            scale=this.attention_scale or self.attention_scale or d_head**-0.5,
            window=this.window,
            rope=(this.rope or self.rope) if this.use_rope else None,
            softcap=self.attention_softcap,
            kv_from=this.kv_from,
            keys_are_values=this.keys_are_values,
        )

    def mlp_width(self, layer: int) -> int:
        """The width of a layer's MLP: its own, else the model's."""
        return self.layers[layer].d_ffn or self.d_ffn


def _check_heads(n_heads: int, n_kv_heads: int, d_head: int, rope: RopeConfig | None) -> None:
    if n_kv_heads < 1 or n_heads % n_kv_heads:
        raise ConfigError(f"'n_heads' ({n_heads}) must be a multiple of 'n_kv_heads' ({n_kv_heads})")
    if rope is not None and (not 0 <= rope.rotary_dim <= d_head or rope.rotary_dim % 2):
        raise ConfigError(f"'rotary_dim' ({rope.rotary_dim}) must be even and at most 'd_head' ({d_head})")


Pooling = Literal["mean", "last", "cls"]


@dataclass(frozen=True)
class LateInteraction:
    """How a text becomes a vector for each token (ColBERT), according to the model's files.

    A prefix is a token that follows the first; "" for none. `query_tokens` and `document_tokens` are the
    longest, prefix included.
    """

    query_prefix: str = "[Q] "
    document_prefix: str = "[D] "
    query_tokens: int = 32
    document_tokens: int = 180
    expands: bool = True  # queries, with mask tokens up to `query_tokens`
    sees_expansion: bool = False  # True: those are seen by other tokens
    skipped: tuple[str, ...] = tuple(string.punctuation)  # tokens of documents that have no vector


@dataclass(frozen=True)
class EmbeddingConfig:
    """How a text becomes a vector, according to the model's files."""

    pooling: Pooling = "mean"  # how the tokens' hidden states become one; "cls" takes the first
    normalizes: bool = True  # to length 1
    max_tokens: int | None = None  # longest text; None: the model's context
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name: put before a text
    default_prompt: str | None = None  # the name of the one that is used unless another is chosen
    score: str = "sigmoid"  # what makes a score of a cross-encoder's output: sigmoid or identity
    # for language models that rank: a prompt with {query} and {document}, which they answer with yes or no
    pair_template: str = ""
    late: LateInteraction | None = None  # for models with a vector for each token


KVType = Literal["f16", "q8_0", "q4", "fp8", "f32"]
KV_TYPE_SIZES = "q8_0 and fp8 (GPUs only) take half the memory, q4 a quarter, f32 twice (exact)"
Speculation = Literal["ngram", "draft", "off"]


@dataclass(frozen=True)
class EngineConfig:
    """Options of the engine. Sizes in bytes, contexts and steps in tokens.

    Attributes:
        backend: "cpu", "portable", "torch", "gpu" or "reference".
        device: Device of the torch and gpu backends: cpu, cuda:0, mps ...
        max_context: Longest request, prompt and answer together; None for the model's own limit.
        max_requests: Most requests that hold pages at a time.
        max_step_tokens: Most tokens of a step, and so of a prompt's chunk.
        max_prompt_tokens: Most prompt tokens of a step in which others decode, which bounds their delay.
        max_step_ms: Most milliseconds that the prompts of a step should take, by what those before took; 0
            for no bound. Deep in a long prompt this allows fewer tokens than `max_step_tokens`.
        kv_bytes: Size of the KV pool; None for room for `max_requests` of `max_context`.
        caches_prefixes: Reuses keys and values of past requests with equal prefixes.
        snapshot_bytes: Size of all snapshots of recurrent states after such prefixes.
        n_threads: Threads of the CPU backend; None for the cores this process may use.
        speculation: Source of draft tokens, unless a request says otherwise.
        max_draft_tokens: Most draft tokens of a request in a step.
        kv_type: Type of the KV cache; of float16's memory q8_0 takes 53%, fp8 50%, q4 27%, f32 200%.
        max_in_flight: Steps under way at a time: as many as a model has stages.
        prefix_dir: Directory of saved prefixes, which outlive the process; None saves none.
        prefix_bytes: Most bytes saved there.
    """

    backend: str = "cpu"
    device: str | None = None
    max_context: int | None = None
    max_requests: int = 1
    max_step_tokens: int = 512
    max_prompt_tokens: int = 64
    max_step_ms: int = 150
    kv_bytes: int | None = None
    caches_prefixes: bool = True
    snapshot_bytes: int = 1 << 29
    n_threads: int | None = None
    speculation: Speculation = "ngram"
    max_draft_tokens: int = 15
    kv_type: KVType = "f16"
    max_in_flight: int = 1
    prefix_dir: str | None = None
    prefix_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        """Raises ConfigError on values out of range."""
        for name, kind in (("kv_type", KVType), ("speculation", Speculation)):
            if getattr(self, name) not in get_args(kind):
                names = ", ".join(get_args(kind))
                raise ConfigError(f"{name!r} must be one of {names}, not {getattr(self, name)!r}")
        for name in (
            "max_requests",
            "max_step_tokens",
            "max_prompt_tokens",
            "max_draft_tokens",
            "max_in_flight",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name!r} must be at least 1, not {getattr(self, name)}")
        for name in ("max_context", "n_threads", "kv_bytes", "prefix_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name!r} must be at least 1, not {value}")
        for name in ("snapshot_bytes", "max_step_ms"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name!r} must be at least 0, not {getattr(self, name)}")
