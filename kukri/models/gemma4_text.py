"""Gemma 4's text models (Google 2026): Gemma 3 with wider heads and other RoPE in layers that see all.

Values are normed without a weight, scores are not scaled, and each layer's result is multiplied by a number
of its own. Of some sizes:

- the last layers read the keys and values of the last layer of their kind that has some, and may have MLPs
  of twice the width;
- in layers that see all the keys' matrix makes the values too;
- each layer has embeddings of its own (Gemma 3n): a row of one table for all, added to a projection of the
  token's usual embedding, and mixed into the stream after the MLP.

A GGUF file has divisors of frequencies where config.json has the share of a head that rotates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kukri.config import LayerConfig, ModelConfig, RopeConfig
from kukri.errors import UnsupportedError, brief
from kukri.kernels.op_set import Ops, Tensor
from kukri.kernels.weight_handles import Vector, Weight
from kukri.models.architecture import Architecture, ExpertKeys
from kukri.models.gemma2 import GEMMA2, Gemma2, Gemma2Block
from kukri.models.keys import Keys
from kukri.models.layers import Composite, Embedding, HeadNorm, Linear, NoNorm, RMSNorm
from kukri.models.mixture import Mixture, SharedMLP
from kukri.models.qwen3 import Qwen3Attention
from kukri.models.stored import PARAMETER, Stored
from kukri.models.weights import WeightSource


class Gemma4Attention(Qwen3Attention):
    """Attention with a norm on each query and key head, and one without a weight on each value head."""

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        super().__init__(source, name, config, layer)
        self.ones, self.eps = Vector(np.ones(self.spec.d_head, np.float32)), config.norm_eps

    def normalize_values(self, ops: Ops, v: Tensor) -> Tensor:
        """v [T, G*K] normed head by head."""
        return ops.head_norm(v, self.ones, self.eps)


class LayerInput:
    """A layer's branch for its own embeddings: norm(project(gelu(gate(x)) * embedding))."""

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        d_model, width = config.d_model, config.d_per_layer
        self.layer, self.activation = layer, f"gated_{config.activation}"
        self.gate = Linear(source, [f"{name}.per_layer_input_gate"], (width,), d_model)
        self.projection = Linear(source, [f"{name}.per_layer_projection"], (d_model,), width)
        self.norm = RMSNorm(source, f"{name}.post_per_layer_input_norm", d_model, config.norm_eps)

    def __call__(self, ops: Ops, x: Tensor, given: Tensor) -> Tensor:
        """Return x [T, D] plus the branch of x and of the layer's embeddings `given` [T, W]."""
        given = ops.tap("hook_per_layer_input", self.layer, given)
        hidden = ops.map(self.activation, given, self.gate(ops, x))
        made = self.norm(ops, self.projection(ops, hidden))
        return ops.add(ops.tap("hook_per_layer_out", self.layer, made), x)


class Gemma4Block(Gemma2Block):
    """A layer: attention, MLP, its own embeddings, and its factor."""

    attention_type = Gemma4Attention
    input_name = ""  # between the layer's name and the names of the branch for its own embeddings

    def __init__(self, source: WeightSource, config: ModelConfig, layer: int) -> None:
        super().__init__(source, config, layer)
        name = f"model.layers.{layer}"
        self.input: LayerInput | None = None
        if config.d_per_layer:
            self.input = LayerInput(source, f"{name}{self.input_name}", config, layer)
        scalar = f"{name}.layer_scalar.weight"
        self.factor = float(source.vector(scalar, 1)[0]) if source.has(scalar) else 1.0

    def __call__(self, ops: Ops, x: Tensor, batch: Any, given: Tensor | None = None) -> Tensor:
        """x [T, D] -> [T, D], with the layer's embeddings `given` [T, W]."""
        x = ops.tap("hook_resid_pre", self.layer, x)
        normed = ops.tap("ln1.hook_normalized", self.layer, self.attention_norm(ops, x))
        x = ops.tap("hook_resid_mid", self.layer, self.attention(ops, normed, x, batch))
        normed = ops.tap("ln2.hook_normalized", self.layer, self.mlp_norm(ops, x))
        x = self.mlp(ops, normed, x)
        if self.input is not None:
            x = self.input(ops, x, given)
        if self.factor != 1:
            x = ops.scale(x, self.factor)
        return ops.tap("hook_resid_post", self.layer, x)


class ProjectedEmbeddings(Composite):
    """Each layer's embeddings of the tokens, a projection of the usual embeddings."""

    module = "model"
    tables: Sequence[Weight] = ()

    def __init__(self, source: WeightSource, config: ModelConfig) -> None:
        self.width, self.n_layers, self.d_model = config.d_per_layer, config.n_layers, config.d_model
        width = self.width * self.n_layers
        names = [f"{self.module}.per_layer_model_projection"]
        self.projection = Linear(source, names, (width,), config.d_model)
        self.norm = HeadNorm(source, f"{self.module}.per_layer_projection_norm", self.width, config.norm_eps)

    def __call__(self, ops: Ops, x: Tensor, batch: Any) -> Sequence[Tensor]:
        """x [T, D], the usual embeddings, multiplied -> [T, W] of each layer."""
        projected = self.norm(ops, ops.scale(self.projection(ops, x), self.d_model**-0.5))
        return ops.split(self.with_table(ops, projected, batch), [self.width] * self.n_layers)

    def with_table(self, ops: Ops, projected: Tensor, batch: Any) -> Tensor:
        """Return the projections [T, layers * W] unchanged."""
        return projected


class LayerEmbeddings(ProjectedEmbeddings):
    """Each layer's embeddings of the tokens, rows of one table plus a projection of the usual embeddings."""

    def __init__(self, source: WeightSource, config: ModelConfig) -> None:
        super().__init__(source, config)
        self.table = Embedding(
            source, "model.embed_tokens_per_layer", config.n_vocab, self.width * self.n_layers
        )
        self.tables = self.table.tables

    def with_table(self, ops: Ops, projected: Tensor, batch: Any) -> Tensor:
        """The projections and the table's rows, [T, layers * W]."""
        own = ops.scale(self.table(ops, batch), self.width**0.5)
        return ops.scale(ops.add(own, projected), 0.5**0.5)


class Gemma4Mixture(Mixture):
    """The sum of an MLP for all tokens and a mixture of experts, each with a norm before and a norm after it.

    The router reads the stream itself, normed and multiplied; each expert's weight has a factor.
    """

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        super().__init__(source, name, config, layer)
        block, d_model, eps = name.removesuffix(".mlp"), config.d_model, config.norm_eps
        self.dense = SharedMLP(source, name, config, layer)
        self.norms = [
            RMSNorm(source, f"{block}.{norm}", d_model, eps)
            for norm in (
                "post_feedforward_layernorm_1",
                "pre_feedforward_layernorm_2",
                "post_feedforward_layernorm_2",
            )
        ]
        scale, per_expert = f"{block}.router.scale.weight", f"{block}.router.per_expert_scale.weight"
        self.router_scale = Vector(source.vector(scale, d_model) * np.float32(d_model**-0.5), scale)
        factors = Vector(source.vector(per_expert, self.routing.n_experts), per_expert)
        self.routing, self.eps = replace(self.routing, scales=factors), eps
        self.post_norm: Any = NoNorm()  # the block's

    def __call__(self, ops: Ops, x: Tensor, residual: Tensor) -> Tensor:
        """residual + norm(norm(mlp(x)) + norm(mixture(residual))), all [T, D]."""
        after_shared, before, after = self.norms
        shared = after_shared(ops, self.dense(ops, x))
        logits = self.router(ops, ops.rms_norm(residual, self.router_scale, self.eps))
        found = after(ops, self.chosen(ops, before(ops, residual), logits, None, "mlp.hook_experts_out"))
        both = self.post_norm(ops, ops.add(found, shared))
        both = ops.tap("ln2_post.hook_normalized", self.layer, both)
        return ops.add(ops.tap("hook_mlp_out", self.layer, both), residual)


class Gemma4MoeBlock(Gemma4Block):
    """A layer with a mixture in addition to its MLP."""

    mlp_type = Gemma4Mixture

    def norm_mlp(self, norm: RMSNorm) -> None:
        """Has the sum of both normed."""
        self.mlp.post_norm = norm


class Gemma4(Gemma2):
    """The whole model."""

    block_type: Callable[..., Any] = Gemma4Block
    inputs_type: Callable[..., ProjectedEmbeddings] = LayerEmbeddings

    def __init__(self, config: ModelConfig, source: WeightSource) -> None:
        super().__init__(config, source)
        self.inputs = self.inputs_type(source, config) if config.d_per_layer else None

    def through_blocks(self, ops: Ops, x: Tensor, batch: Any) -> Tensor:
        given = [None] * len(self.blocks) if self.inputs is None else self.inputs(ops, x, batch)
        for block, own in zip(self.blocks, given):
            x = block(ops, x, batch, own)
        return x


_FULL, _WINDOWED = "full_attention", "sliding_attention"
_THETAS = {_FULL: 1e6, _WINDOWED: 1e4}
_SHARED, _WIDE, _FULL_KV = "num_kv_shared_layers", "use_double_wide_mlp", "num_global_key_value_heads"
_GGUF_SHARED, _GGUF_WIDTH = "attention.shared_kv_layers", "embedding_length_per_layer_input"
_WINDOWED_HEAD, _WINDOWED_ROTARY = "attention.key_length_swa", "rope.dimension_count_swa"


def _respelled(config: dict[str, Any]) -> dict[str, Any]:
    """The older spelling: transformers 5 has the heads of layers that see all in `per_layer_config`."""
    unread = {"per_layer_config", *(() if config.get("attention_k_eq_v") else (_FULL_KV,))}
    made = {key: value for key, value in config.items() if key not in unread}
    if config.get("model_type") == "gemma4_unified_text":
        usual = {"hidden_size_per_layer_input": 0, "sliding_window": 1024, "max_position_embeddings": 262144}
        made = {**usual, **made}
    if made.get("rope_parameters") is None:
        made["rope_parameters"] = {
            _WINDOWED: {"rope_type": "default", "rope_theta": _THETAS[_WINDOWED]},
            _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": _THETAS[_FULL]},
        }
    layers = config.get("per_layer_config") or {}
    if not isinstance(layers, dict) or not all(isinstance(own, dict) for own in layers.values()):
        raise UnsupportedError(
            f"key 'per_layer_config' must hold an object for each layer, not {brief(layers)}"
        )
    names = {"head_dim": "global_head_dim", "num_key_value_heads": _FULL_KV}
    for own in layers.values():
        for key, value in own.items():
            if key not in names or made.setdefault(names[key], value) != value:
                raise UnsupportedError(
                    f"key 'per_layer_config' has {brief(key)}: different values in layers are not supported"
                )
    return made


def _share(keys: Keys, key: str, n_shared: int, facts: dict[str, Any]) -> None:
    """The last `n_shared` layers read the keys and values of the last layer before them all that has the same
    window.
    """
    layers: list[LayerConfig] = list(facts["layers"])
    first = len(layers) - n_shared
    for i in range(first, len(layers)):
        own = [j for j in range(first) if layers[j].window == layers[i].window]
        if not own:
            raise keys.error(key, f"is {n_shared}, which leaves no layer for layer {i} to read keys of")
        layers[i] = replace(layers[i], kv_from=own[-1], keys_are_values=False)
    facts["layers"] = tuple(layers)


def _set_windowed(facts: dict[str, Any], d_head: int, rotary_dim: int) -> None:
    """Sets the heads of layers with a window, if they differ from the model's."""
    own = None if d_head == facts["d_head"] else d_head
    facts["layers"] = tuple(
        replace(layer, d_head=own, rope=layer.rope and RopeConfig(layer.rope.theta, rotary_dim))
        if layer.window
        else layer
        for layer in facts["layers"]
    )


def _read_hf(keys: Keys, facts: dict[str, Any]) -> None:
    if keys.value("use_bidirectional_attention") not in (None, "vision"):  # "vision": within an image
        raise keys.unsupported("use_bidirectional_attention", "must be null: attention must be causal")
    n_layers = facts["n_layers"]
    facts["layers"] = (*facts["layers"][:-1], LayerConfig())  # the last sees all, whatever a file says
    d_head = keys.whole("head_dim", most=1 << 10)
    _set_windowed(facts, d_head, d_head)
    facts["attention_scale"] = 1.0
    facts["d_per_layer"] = keys.whole("hidden_size_per_layer_input", least=0, most=1 << 16)
    if facts["d_per_layer"] and keys.whole("vocab_size_per_layer_input") != facts["n_vocab"]:
        raise keys.unsupported("vocab_size_per_layer_input", f"must be {facts['n_vocab']}, as 'vocab_size'")
    are_values = keys.flag("attention_k_eq_v")
    n_kv, full_kv = facts["n_kv_heads"], facts["n_kv_heads"]
    if keys.value(_FULL_KV) is not None:
        full_kv = keys.whole(_FULL_KV)
        if facts["n_heads"] % full_kv:
            raise keys.error(_FULL_KV, f"must divide {facts['n_heads']} heads, which {full_kv} does not")
    most = max(n_kv, full_kv) if any(layer.window for layer in facts["layers"]) else full_kv
    facts["n_kv_heads"] = most
    facts["layers"] = tuple(
        replace(
            layer,
            n_kv_heads=None if (own := n_kv if layer.window else full_kv) == most else own,
            keys_are_values=are_values and not layer.window,
        )
        for layer in facts["layers"]
    )
    n_shared = keys.whole(_SHARED, least=0, most=n_layers - 1)
    _share(keys, _SHARED, n_shared, facts)
    if keys.flag(_WIDE) and n_shared:
        narrow = facts["d_ffn"]
        facts["d_ffn"] = 2 * narrow
        facts["layers"] = tuple(
            replace(layer, d_ffn=narrow) if layer.kv_from is None else layer for layer in facts["layers"]
        )


def _write_hf(config: ModelConfig, keys: dict[str, Any]) -> None:
    windowed = [i for i, layer in enumerate(config.layers) if layer.window]
    full = next((i for i, layer in enumerate(config.layers) if not layer.window), config.n_layers - 1)
    first = windowed[0] if windowed else full
    n_shared = sum(layer.kv_from is not None for layer in config.layers)
    if any(layer.kv_from is None for layer in config.layers[config.n_layers - n_shared :]):
        raise UnsupportedError("layers in the middle that share keys are not supported by config.json")
    are_values = config.layers[full].keys_are_values
    keys |= {
        "head_dim": config.attention(first).d_head,
        "num_key_value_heads": config.attention(first).n_kv_heads,
        "intermediate_size": config.mlp_width(0),
        _SHARED: n_shared,
        _WIDE: config.mlp_width(config.n_layers - 1) == 2 * config.mlp_width(0),
        "attention_k_eq_v": are_values,
        "hidden_size_per_layer_input": config.d_per_layer,
        "vocab_size_per_layer_input": config.n_vocab,
    }
    if are_values:
        keys[_FULL_KV] = config.attention(full).n_kv_heads
    theta, scaling = keys.pop("rope_theta"), keys.pop("rope_scaling") or {"rope_type": "default"}
    full_rope, windowed_rope = {**scaling, "rope_theta": theta}, {"rope_type": "default", "rope_theta": theta}
    keys.setdefault("rope_parameters", {_FULL: full_rope, _WINDOWED: windowed_rope})


def _read_gguf(keys: Keys, facts: dict[str, Any]) -> None:
    d_head = keys.whole(_WINDOWED_HEAD, facts["d_head"], most=1 << 10)
    if keys.whole("attention.value_length_swa", d_head) != d_head:
        raise keys.unsupported("attention.value_length_swa", f"must be {d_head}, as wide as keys")
    _set_windowed(facts, d_head, keys.whole(_WINDOWED_ROTARY, d_head, most=d_head))
    facts["attention_scale"] = 1.0
    facts["d_per_layer"] = keys.whole(_GGUF_WIDTH, 0, least=0, most=1 << 16)
    facts["layers"] = tuple(
        replace(layer, keys_are_values=f"blk.{i}.attn_v.weight" not in keys.tensors)
        for i, layer in enumerate(facts["layers"])
    )
    n_shared = keys.whole(_GGUF_SHARED, 0, least=0, most=facts["n_layers"] - 1)
    _share(keys, _GGUF_SHARED, n_shared, facts)


def _write_gguf(config: ModelConfig, keys: dict[str, Any]) -> None:
    windowed = next((i for i, layer in enumerate(config.layers) if layer.window), 0)
    this = config.attention(windowed)
    keys |= {
        _WINDOWED_HEAD: this.d_head,
        "attention.value_length_swa": this.d_head,
        _WINDOWED_ROTARY: this.rope.rotary_dim if this.rope else this.d_head,
        _GGUF_SHARED: sum(layer.kv_from is not None for layer in config.layers),
        _GGUF_WIDTH: config.d_per_layer,
        "attention.sliding_window_pattern": np.array([bool(layer.window) for layer in config.layers]),
    }


GEMMA4_TEXT = Architecture(
    "gemma4_text",
    Gemma4,
    "Gemma4ForCausalLM",
    gguf="gemma4",
    # tensors that files carry and transformers leaves: of layers that read other layers'
    unused=r"model\.layers\.\d+\.self_attn\.(?:k_proj|v_proj|k_norm|v_norm)\.weight",
    numbers={"logit_softcap"},
    keys={"d_head": ("attention.key_length", "global_head_dim")},
    gguf_defaults={"rope.freq_base_swa": 1e4},
    gguf_reads={
        *(_GGUF_SHARED, _GGUF_WIDTH, _WINDOWED_HEAD, _WINDOWED_ROTARY, "attention.value_length_swa"),
        "attention.scale",
    },
    tensor_names={
        **GEMMA2.tensor_names,
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "layer_scalar": Stored("layer_output_scale", PARAMETER),
        "model.embed_tokens_per_layer": "per_layer_token_embd",
        "model.per_layer_model_projection": "per_layer_model_proj",
        "model.per_layer_projection_norm": "per_layer_proj_norm",
    },
    full_interval=6,
    local_rope=True,
    local_theta=1e4,
    hf_activation="hidden_activation",
    activation="gelu_pytorch_tanh",
    respelled=_respelled,
    hf_layers={"n_kv_heads", "d_ffn"},
    reads={
        *("sliding_window", "layer_types", "head_dim", _SHARED, _WIDE, _FULL_KV),
        *("attention_k_eq_v", "hidden_size_per_layer_input", "vocab_size_per_layer_input"),
        "use_bidirectional_attention",
    },
    ignores={
        *("num_experts", "top_k_experts", "moe_intermediate_size"),
        "expert_intermediate_size",
    },
    fixed={"enable_moe_block": False},
    defaults={
        **{"num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "vocab_size": 262144},
        **{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "sliding_window": 512},
        **{"num_attention_heads": 8, "max_position_embeddings": 131072, "tie_word_embeddings": True},
        **{"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, _SHARED: 0},
    },
    biases={"self_attn": "attention_bias"},
    read_hf=_read_hf,
    write_hf=_write_hf,
    read_gguf=_read_gguf,
    write_gguf=_write_gguf,
)


GEMMA4_MOE_TEXT = replace(
    GEMMA4_TEXT,
    name="gemma4_moe_text",
    model=Gemma4.of(block_type=Gemma4MoeBlock),
    hf_type="gemma4_text",
    hf_mark=("enable_moe_block", True),
    tensor_names={
        **GEMMA4_TEXT.tensor_names,
        "router.scale": Stored("ffn_gate_inp.scale", PARAMETER, is_bare=True),
        "router.per_expert_scale": Stored("ffn_down_exps.scale", PARAMETER, is_bare=True),
        "mlp.experts.gate_proj": Stored("ffn_gate_exps", PARAMETER),
        "mlp.experts.up_proj": Stored("ffn_up_exps", PARAMETER),
        "mlp.experts.down_proj": Stored("ffn_down_exps", PARAMETER),
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
    },
    joined={
        "router.proj": ("mlp.gate",),
        "experts.gate_up_proj": ("mlp.experts.gate_proj", "mlp.experts.up_proj"),
        "experts.down_proj": ("mlp.experts.down_proj",),
    },
    ignores=frozenset(),
    fixed={},
    reads=GEMMA4_TEXT.reads | {"enable_moe_block"},
    aliases={"expert_intermediate_size": "moe_intermediate_size"},
    experts=ExpertKeys(
        *("num_experts", "moe_intermediate_size", True),
        gguf_normalized=True,
        gguf_fused=True,
        n_used="top_k_experts",
    ),
)
