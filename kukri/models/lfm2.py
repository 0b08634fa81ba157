"""LFM2 (Liquid AI 2025): short convolutions in most layers, attention with head norms in some.

A convolution looks at three inputs; two gates, linear in the stream, multiply its input and its output.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace
from typing import Any

from kukri.config import ModelConfig
from kukri.kernels.cache import KVLayer, StateLayer
from kukri.kernels.op_set import Ops, Tensor
from kukri.models.architecture import Architecture, RecurrentKeys
from kukri.models.keys import Keys
from kukri.models.layers import GatedMLP, Linear
from kukri.models.lenses import Format, Lens
from kukri.models.llama import Block, Llama
from kukri.models.qwen3 import Qwen3Attention
from kukri.models.recurrent import Convolution
from kukri.models.stored import CHANNELS, Stored
from kukri.models.weights import WeightSource


class ShortConv:
    """out(c * conv(b * x)), with b, c and x linear in the layer's input.

    An encoder's middle tap is the token's own, unless tokens see earlier ones alone; it keeps nothing.
    """

    conv_name = "conv"

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        assert config.recurrent is not None, "the configuration's readers see to that"
        n = config.d_model
        self.layer = layer
        self.into = Linear(source, [f"{name}.in_proj"], (n, n, n), n)
        self.conv = Convolution(source, {f"{name}.{self.conv_name}": n}, config.recurrent.n_taps, layer)
        self.out = Linear(source, [f"{name}.out_proj"], (n,), n)
        self.cache_layer: KVLayer | StateLayer = StateLayer(self.conv.states)
        if not config.is_causal:
            n_after = self.conv.spec.n_taps // 2 if config.sees_later else 0
            self.conv.spec = replace(self.conv.spec, n_after=n_after)
            self.cache_layer = KVLayer(0, config.d_head)

    def __call__(self, ops: Ops, x: Tensor, residual: Tensor, batch: Any) -> Tensor:
        """residual + this of x, both [T, D]. Writes the layer's state."""
        b, c, x = ops.split(ops.tap("conv.hook_in_proj", self.layer, self.into(ops, x)), self.into.n_outs)
        x = ops.tap("conv.hook_conv_in", self.layer, ops.map("gated_itself", x, b))
        y = ops.tap("conv.hook_conv_out", self.layer, self.conv(ops, x, batch))
        y = ops.tap("conv.hook_gated", self.layer, ops.map("gated_itself", y, c))
        return self.out(ops, y, residual, ("hook_mixer_out", self.layer))


_ATTENTION = Qwen3Attention.of(out_name="out_proj", q_norm_name="q_layernorm", k_norm_name="k_layernorm")
Lfm2MLP = GatedMLP.of(in_names=("w1", "w3"), out_name="w2")


class Lfm2Block(Block):
    """A layer: a convolution or attention, and an MLP, each after its norm."""

    attention_type, recurrent_type = _ATTENTION, ShortConv
    mlp_type: Callable[..., Any] = Lfm2MLP
    attention_norm_name, mlp_norm_name = "operator_norm", "ffn_norm"
    recurrent_name, mlp_name = "conv", "feed_forward"


Lfm2 = Llama.of(block_type=Lfm2Block, norm_name="model.embedding_norm")
_ADJUSTS, _MULTIPLIER, _STEP = "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"
_ATTENDING = "full_attn_idxs"


class Older(Lens):
    """The width of an MLP from its width before an adjustment; which layers attend in older files."""

    def keys(self, form: Format) -> Set[str]:
        return {_ADJUSTS, _MULTIPLIER, _STEP, _ATTENDING} if form == "hf" else frozenset()

    def read(self, keys: Keys, form: Format, facts: dict[str, Any]) -> None:
        if form == "hf" and keys.flag(_ADJUSTS):
            width = int(2 * facts["d_ffn"] / 3)
            if keys.value(_MULTIPLIER) is not None:
                width = int(keys.positive(_MULTIPLIER) * width)
            step = keys.whole(_STEP)
            facts["d_ffn"] = -(-width // step) * step
        if form == "hf" and keys.value("layer_types") is None:
            n = facts["n_layers"]
            attending = {*range(n)} if keys.value(_ATTENDING) is None else {*keys.items(_ATTENDING, int)}
            if not attending <= set(range(n)):
                raise keys.error(_ATTENDING, f"must name layers from 0 to {n - 1}")
            facts["layers"] = tuple(
                replace(layer, is_recurrent=i not in attending) for i, layer in enumerate(facts["layers"])
            )

    def write(self, config: ModelConfig, form: Format, keys: dict[str, Any]) -> None:
        if form == "hf":
            keys[_ADJUSTS] = False


LFM2 = Architecture(
    "lfm2",
    Lfm2,
    "Lfm2ForCausalLM",
    n_dense=1,
    tensor_names={
        "model.embedding_norm": "token_embd_norm",
        "operator_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "self_attn.out_proj": "attn_output",
        "self_attn.q_layernorm": "attn_q_norm",
        "self_attn.k_layernorm": "attn_k_norm",
        "conv.in_proj": "shortconv.in_proj",
        "conv.conv": Stored("shortconv.conv", hf=CHANNELS, is_small=True),
        "conv.out_proj": "shortconv.out_proj",
        "feed_forward.w1": "ffn_gate",
        "feed_forward.w2": "ffn_down",
        "feed_forward.w3": "ffn_up",
    },
    hf_epsilon="norm_eps",
    ignores={
        *("block_dim", "block_norm_eps", "block_mlp_init_scale", "block_out_init_scale"),
        "block_use_swiglu",
        *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads"),
        "use_pos_enc",
    },
    aliases={"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"},
    defaults={
        **{"num_key_value_heads": 8, "norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 1000000.0},
        **{"conv_L_cache": 3, "conv_bias": False, _ADJUSTS: True, _MULTIPLIER: 1.0, _STEP: 256},
    },
    biases={"conv": "conv_bias"},
    lenses=(Older(),),
    recurrent=RecurrentKeys(
        ("conv",), {"n_taps": "shortconv.l_cache"}, {"n_taps": "conv_L_cache"}, activation=""
    ),
)
