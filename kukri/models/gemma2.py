"""Gemma 2 (Gemma team 2024): norms on both sides of attention and MLP, GeGLU, softcaps, windows.

Every other layer sees a window.
Embeddings are multiplied by the square root of the width. The norms' weights are stored in safetensors as
what is added to 1, and in GGUF files as they multiply, which is how they come here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from typing import Any

from kukri.config import ModelConfig
from kukri.dataclass import dataclass
from kukri.kernels.op_set import Ops, Tensor
from kukri.models.architecture import Architecture
from kukri.models.keys import Keys
from kukri.models.layers import PostNormed, RMSNorm
from kukri.models.lenses import Format, Lens
from kukri.models.llama import Block, Llama
from kukri.models.weights import WeightSource


class Gemma2Block(Block):
    """One layer: attention and MLP, each between two norms, each added to the residual stream."""

    mlp_norm_name = "pre_feedforward_layernorm"
    post_norm_names = ("post_attention_layernorm", "post_feedforward_layernorm")

    def __init__(self, source: WeightSource, config: ModelConfig, layer: int) -> None:
        super().__init__(source, config, layer)
        name, d_model, eps = f"model.layers.{layer}", config.d_model, config.norm_eps
        self.post_norms = [RMSNorm(source, f"{name}.{norm}", d_model, eps) for norm in self.post_norm_names]
        first, second = self.post_norms
        self.attention.out = PostNormed(self.attention.out, first, "ln1_post.hook_normalized")
        self.norm_mlp(second)

    def norm_mlp(self, norm: RMSNorm) -> None:
        """Has the MLP's result normed before it joins the stream."""
        self.mlp.down = PostNormed(self.mlp.down, norm, "ln2_post.hook_normalized")


class Gemma2(Llama):
    """The whole model."""

    block_type: Callable[..., Any] = Gemma2Block

    def embed(self, ops: Ops, batch: Any) -> Tensor:
        """The embeddings, multiplied [T, D]."""
        return ops.scale(self.embedding(ops, batch), self.config.d_model**0.5)

    def adjust_logits(self, ops: Ops, logits: Tensor) -> Tensor:
        """The logits, capped [N, V]."""
        cap = self.config.logit_softcap
        return logits if cap is None else ops.map("softcap", logits, a=cap)


@dataclass(frozen=True)
class QueryScalar(Lens):
    """The number, a whole one, by whose root scores are divided: a head's width, but for the largest model.

    llama.cpp knows that model by its number of layers, `wide_layers`.
    """

    wide_layers: int

    def keys(self, form: Format) -> Set[str]:
        return {"attention.scale" if form == "gguf" else "query_pre_attn_scalar"}

    def read(self, keys: Keys, form: Format, facts: dict[str, Any]) -> None:
        (key,) = self.keys(form)
        if form == "hf":
            scalar = keys.positive(key)
            facts["attention_scale"] = None if scalar == facts["d_head"] else scalar**-0.5
        else:
            facts["attention_scale"] = keys.positive(key) if keys.value(key) else self._of_wide(facts)

    def write(self, config: ModelConfig, form: Format, keys: dict[str, Any]) -> None:
        (key,), scale = self.keys(form), config.attention(0).scale
        usual = self._of_wide(vars(config)) or config.d_head**-0.5
        if form == "hf":
            keys[key] = round(scale**-2)
        elif not math.isclose(scale, usual, rel_tol=1e-5):
            keys[key] = scale

    def _of_wide(self, facts: Mapping[str, Any]) -> float | None:
        if facts["n_layers"] != self.wide_layers:
            return None
        return float((facts["d_model"] // facts["n_heads"]) ** -0.5)


GEMMA2 = Architecture(
    "gemma2",
    Gemma2,
    "Gemma2ForCausalLM",
    numbers={"attention_softcap", "logit_softcap"},
    gguf_defaults={
        "attention.sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    lenses=(QueryScalar(46),),
    full_interval=2,
    tensor_names={
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    hf_norm_offset=1.0,
    hf_activation="hidden_activation",
    activation="gelu_pytorch_tanh",
    reads={"sliding_window", "layer_types"},
    ignores={"cache_implementation"},
    fixed={"use_bidirectional_attention": False},
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    biases={"self_attn": "attention_bias"},
)
