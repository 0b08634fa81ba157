"""`Architecture`: one architecture's class, and the facts about its files that the files leave unsaid."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any, Literal

from kukri.config import ModelConfig
from kukri.dataclass import dataclass, field
from kukri.models.keys import ACTIVATIONS, Keys
from kukri.models.lenses import Lens
from kukri.models.stored import Stored
from kukri.models.weights import WeightSource


@dataclass(frozen=True)
class ExpertKeys:
    """The keys of config.json that describe a mixture of experts, and what GGUF files leave unsaid."""

    n_experts: str  # "num_experts" or "num_local_experts", which files have in each other's place
    d_ffn: str  # width of an expert's MLP
    normalized: str | bool  # a token's weights have the sum 1: always, never, or a key that says
    gguf_normalized: bool  # the same in GGUF, where no key says so
    gguf_d_ffn: str = "expert_feed_forward_length"
    gguf_fused: bool = False  # GGUF has the rows of an expert's gate and of its up in one tensor
    # safetensors hold one tensor of all experts (experts, in, out), or MXFP4 blocks of (experts, out, in),
    # with gate's and up's outputs in turns
    is_interleaved: bool = False
    n_used: str = "num_experts_per_tok"
    by_sigmoid: bool = False  # scores are sigmoids
    bias: str | bool = False  # scores have a bias to choose by: always, never, or a key that says
    scale: str = ""  # factor of a token's weights; "": none
    groups: tuple[str, str] | None = None  # numbers of groups, and of those used
    d_shared: str = ""  # width of the MLP that each token passes too; "": see `n_shared`
    d_latent: str = ""  # width of the experts' inputs and outputs; "": the model's
    n_shared: str = ""  # the same as `d_shared`, in widths of an expert; "": no such MLP
    n_dense: str = ""  # leading layers with an MLP in place of a mixture; "": none
    interval: str = ""  # n: all layers but each n-th have an MLP; "": none besides those first ones
    last: str = ""  # the last layer with a mixture; -1 or 0 for the model's
    dense: str = ""  # a list of layers with an MLP


@dataclass(frozen=True)
class RecurrentKeys:
    """The keys of recurrent layers, by the fields of `RecurrentConfig`.

    `layer_types` are their names in config.json's list of that name. GGUF lists no key heads for them, or,
    with a `gguf_interval`, says that each n-th layer attends: its default.
    """

    layer_types: tuple[str, ...]
    gguf: Mapping[str, str]
    hf: Mapping[str, str]
    gguf_interval: int = 0
    attention_type: str = "full_attention"  # the other name in config.json's list
    activation: str = "hidden_act"  # the key of the convolution's activation; "": it has none


@dataclass(frozen=True)
class Architecture:
    """An architecture, as the object next to its model states it; `kukri.models.ARCHITECTURES` finds all.

    Modules of `tensor_names` and `biases` are named as in transformers: inside a layer without its prefix
    (`mlp.fc1`), others in full (`model.final_layernorm`). `defaults` and `reads` follow transformers'
    configuration class.
    """

    name: str  # transformers' model_type
    model: Callable[[ModelConfig, WeightSource], Any]
    hf_class: str  # transformers' class with the language model's head, or without any
    is_causal: bool = True  # False: an encoder, whose tokens see the whole text; windows have two sides
    has_rope: bool = True  # False: positions are embedded
    layers: str = "model.layers"  # the list of layers
    embedding: str = "model.embed_tokens"  # the token embedding
    unused: str = ""  # pattern of names: tensors that files carry and the model may leave
    # files may have a layer for multi-token prediction after the last; "mtp": safetensors call it so
    next_token: Literal["", "layer", "mtp"] = ""

    numbers: Set[str] = frozenset()  # fields of ModelConfig that only some have: `facts.OPTIONAL_FACTS`
    # fields of ModelConfig whose keys are others than usual: GGUF's and config.json's
    keys: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    # GGUF
    gguf: str = ""  # general.architecture; "": the name
    in_gguf: bool = True  # False: no other program has it there, and kukri does not write it
    gguf_seeing: str = ""  # and where tokens of images have several positions, if that is another
    gguf_epsilon: str = "attention.layer_norm_rms_epsilon"
    interleaved_rope: bool = (
        False  # rows of q and k are ordered so that dimensions 2i and 2i + 1 rotate together
    )
    n_dense: int = 0  # dense layers that files may hold on top of vectors
    gguf_defaults: Mapping[str, Any] = field(default_factory=dict)  # for absent keys, without their prefix
    gguf_reads: Set[str] = frozenset()  # keys that `read_gguf` reads, or that change nothing here
    # GGUF's names of modules, and what files do to their tensors, if they differ from Llama's
    tensor_names: Mapping[str, str | Stored] = field(default_factory=dict)

    # layers with a window, in both formats
    full_interval: int = 0  # each n-th layer has none if a file does not list them; 0: all have one
    is_full_first: bool = False  # the full layer is the first of each interval, not the last, in GGUF too
    local_rope: bool = False  # they rotate unscaled, by a base of their own if a file has one
    local_theta: float | None = None  # the base in files without it; None: the model's base

    # config.json
    hf_type: str = ""  # its model_type; "": the name
    hf_mark: tuple[str, Any] | None = None  # a key and its value in files of this kind of the model_type
    hf_prefix: str = "model."  # before the names of tensors below the head
    hf_names: Mapping[str, str] = field(default_factory=dict)  # beginnings of names that differ after it
    hf_when: Callable[[Mapping[str, Any]], bool] | None = None  # tells such files if no single key does
    first_position: int = 0  # unused rows before position 0, in positions of safetensors
    # modules of a layer in safetensors that hold the rows of several, or have another name there
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hf_epsilon: str = "rms_norm_eps"
    hf_interleaved_rope: bool = False  # rows of q and k in safetensors are ordered in pairs too
    hf_norm_offset: float = 0.0  # added to norms' weights, which GGUF files hold with it added
    hf_activation: str = "hidden_act"
    hf_quantized: str = ""  # the quant_method of packed weights that are read
    activation: str = "silu"
    reads: Set[str] = frozenset()  # keys beyond the common ones
    ignores: Set[str] = frozenset()  # keys that files carry and the class does not read
    defaults: Mapping[str, Any] = field(default_factory=dict)  # for absent keys; None: it follows from others
    fixed: Mapping[str, Any] = field(default_factory=dict)  # keys that must hold this, or be absent
    biases: Mapping[str, str | bool] = field(
        default_factory=dict
    )  # by module or part: always, or a key that says
    partial_rotary: bool = False  # RoPE without scaling reads partial_rotary_factor
    experts: ExpertKeys | None = None  # for mixtures
    recurrent: RecurrentKeys | None = None  # for layers that keep a state
    aliases: Mapping[str, str] = field(default_factory=dict)  # older keys of config.json, which win
    respelled: Callable[[dict[str, Any]], dict[str, Any]] = dict  # config.json in one of several spellings
    # the factor, or a factor for each row, by which GGUF files multiply a module's matrix
    gguf_factors: Callable[[ModelConfig, str], Any] | None = None
    hf_layers: Set[str] = frozenset()  # fields of LayerConfig that `write_hf` writes

    lenses: tuple[Lens, ...] = ()  # further facts, each read from both formats and written to both
    # facts without a lens: they change fields of `ModelConfig` from the common keys, or the keys to write
    read_hf: Callable[[Keys, dict[str, Any]], None] = lambda keys, facts: None
    read_gguf: Callable[[Keys, dict[str, Any]], None] = lambda keys, facts: None
    write_hf: Callable[[ModelConfig, dict[str, Any]], None] = lambda config, keys: None
    write_gguf: Callable[[ModelConfig, dict[str, Any]], None] = lambda config, keys: None

    def __post_init__(self) -> None:
        """Sets GGUF's name to the architecture's if none is given."""
        if not self.gguf:
            object.__setattr__(self, "gguf", self.name)

    @property
    def activation_op(self) -> str:
        """The element-wise op of `activation`."""
        return ACTIVATIONS.get(self.activation, self.activation)

    def in_pairs(self, config: ModelConfig) -> bool:
        """True if rows of q and k in GGUF are ordered so that dimensions 2i and 2i + 1 rotate together.

        In files of `gguf_seeing` they never are.
        """
        return self.interleaved_rope and not (config.rope.axes and self.gguf_seeing)

    def bias_rule(self, module: str) -> str | bool:
        """Bias of a layer's matrix: True, False, or the key of config.json that says so."""
        return self.biases.get(module, self.biases.get(module.partition(".")[0], False))
