"""Llama and all built like it: SmolLM2 and 3, TinyLlama, Llama 2 and 3, Mistral, Qwen2 (Touvron et al. 2023).

A token's vector of D numbers, the residual stream, passes through L blocks. Each block reads the stream
through a norm, and adds what attention found in earlier tokens, then what the MLP makes of it. The last
norm and the head turn the stream into V logits.

Taps carry TransformerLens names; what a listener sees is [T, width], heads side by side. `hook_normalized` is
a norm's result, its weight applied: what the next matrix reads. After the last block only the rows that need
logits remain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kukri.config import ModelConfig
from kukri.errors import KukriError
from kukri.kernels.arrays import FloatArray
from kukri.kernels.backend import Backend
from kukri.kernels.cache import KVLayer, StateLayer
from kukri.kernels.op_set import Ops, Tensor
from kukri.kernels.weight_handles import Vector
from kukri.models.architecture import Architecture
from kukri.models.forward import Forward, KVCache
from kukri.models.heads import Head, output_head
from kukri.models.layers import Attention, Composite, Embedding, GatedMLP, RMSNorm, optional_bias
from kukri.models.weights import Parameter, WeightSource


class Block(Composite):
    """One layer: attention and MLP, each after its norm, each added to the residual stream."""

    norm_type: Callable[..., Any] = RMSNorm
    attention_type: Callable[..., Any] = Attention
    mlp_type: Callable[..., Any] = GatedMLP
    dense_type: Callable[..., Any] = GatedMLP  # takes the place of a mixture in dense layers
    recurrent_type: Callable[..., Any] | None = None  # takes the place of attention in recurrent layers
    attention_norm_name, mlp_norm_name = "input_layernorm", "post_attention_layernorm"
    attention_name, recurrent_name, mlp_name = "self_attn", "", "mlp"

    def __init__(self, source: WeightSource, config: ModelConfig, layer: int) -> None:
        name, eps = f"model.layers.{layer}", config.norm_eps
        self.layer = layer
        self.attention_norm = self.norm_type(
            source, f"{name}.{self.attention_norm_name}", config.d_model, eps
        )
        if self.recurrent_type is not None and config.layers[layer].is_recurrent:
            self.attention = self.recurrent_type(source, f"{name}.{self.recurrent_name}", config, layer)
        else:
            self.attention = self.attention_type(source, f"{name}.{self.attention_name}", config, layer)
        self.mlp_norm = self.norm_type(source, f"{name}.{self.mlp_norm_name}", config.d_model, eps)
        mlp_type = self.dense_type if config.layers[layer].is_dense else self.mlp_type
        self.mlp = mlp_type(source, f"{name}.{self.mlp_name}".rstrip("."), config, layer)

    def __call__(self, ops: Ops, x: Tensor, batch: Any) -> Tensor:
        """x [T, D] -> [T, D]."""
        x = ops.tap("hook_resid_pre", self.layer, x)
        normed = ops.tap("ln1.hook_normalized", self.layer, self.attention_norm(ops, x))
        x = ops.tap("hook_resid_mid", self.layer, self.attention(ops, normed, x, batch))
        normed = ops.tap("ln2.hook_normalized", self.layer, self.mlp_norm(ops, x))
        return ops.tap("hook_resid_post", self.layer, self.mlp(ops, normed, x))


class Llama(Composite):
    """The whole model: `model(ops, batch)` runs one step. Attributes: config; parameters, in order."""

    parameters: Sequence[Parameter] = ()  # the parameters that `load_model` saw it take
    block_type: Callable[..., Any] = Block
    reordered_type: Callable[..., Any] = Block  # takes its place in a model that `is_reordered`
    embedding_name, norm_name, head_name = "model.embed_tokens", "model.norm", "lm_head"
    head_bias: Vector | None = None  # next to tied embeddings
    _forward: Forward | None = None  # while a backend is bound

    def __init__(self, config: ModelConfig, source: WeightSource) -> None:
        self.config = config
        self.embedding: Any = Embedding(source, self.embedding_name, config.n_vocab, config.d_model)
        block_type = self.reordered_type if config.is_reordered else self.block_type
        self.blocks = [block_type(source, config, layer) for layer in range(config.n_layers)]
        norm_type = getattr(self.block_type, "norm_type", RMSNorm)
        self.norm = norm_type(source, self.norm_name, config.d_model, config.norm_eps)
        self.head: Head | None = output_head(source, config, self.head_name)
        if self.head is None and config.head.kind == "language_model":
            self.head_bias = optional_bias(source, self.head_name, config.n_vocab)

    def __call__(self, ops: Ops, batch: Any) -> Tensor:
        """Logits [N, V] of the rows that the batch lists. Writes the batch's tokens to the cache.

        With a head for a task, that head's outputs; without any, the hidden states.
        """
        x = self.hidden(ops, batch)
        kind = self.config.head.kind
        if kind == "none":
            return x
        y = self.embedding.logits(ops, x, self.head_bias) if self.head is None else self.head(ops, x)
        return self.adjust_logits(ops, y) if kind == "language_model" else y

    def embed(self, ops: Ops, batch: Any) -> Tensor:
        """The residual stream before the first block [T, D]."""
        return self.embedding(ops, batch)

    def adjust_logits(self, ops: Ops, logits: Tensor) -> Tensor:
        """Return the head's logits [N, V] unchanged. Architectures that scale or cap them override it."""
        return logits

    def hidden(self, ops: Ops, batch: Any) -> Tensor:
        """Hidden states after the last norm [N, D], the head's input."""
        x = ops.tap("hook_embed", None, self.embed(ops, batch))
        x = self.through_blocks(ops, x, batch)
        return ops.tap("ln_final.hook_normalized", None, self.norm(ops, ops.logit_rows(x, batch)))

    def through_blocks(self, ops: Ops, x: Tensor, batch: Any) -> Tensor:
        """The residual stream after the last block [T, D]."""
        for block in self.blocks:
            x = block(ops, x, batch)
        return x

    @property
    def cache_layout(self) -> tuple[KVLayer | StateLayer, ...]:
        """The cache entry of each layer."""
        return tuple(block.attention.cache_layer for block in self.blocks)

    def forward(
        self, token_ids: Any, attention_mask: Any = None, positions: Any = None, cache: KVCache | None = None
    ) -> FloatArray:
        """Logits float32 [B, T, V] of each token, as transformers' model gives them; zeros for padding.

        `token_ids` [B, T] or [T]. `attention_mask` [B, T_total] of 1 for tokens and 0 for padding, on either
        side, or [B or 1, H or 1, T, T_total], boolean or to be added to scores, in place of causality and
        windows; T_total counts cached tokens too. `positions` [B, T] or [T] is what RoPE rotates by: columns,
        counted from the cached tokens on, with padding, if it is not given. With a `cache` (`new_cache`) the
        tokens go there, and the next call continues after them. A head for a task gives its outputs instead.

        Arrays, lists and CPU tensors of PyTorch are taken. Raises RequestError on anything that does not fit.
        """
        return self.bound(token_ids, attention_mask, positions, cache)

    def new_cache(self, batch_size: int = 1, max_tokens: int | None = None) -> KVCache:
        """An empty cache for `forward`; `max_tokens` a row, padding included, None for the whole context."""
        return self.bound.new_cache(batch_size, max_tokens)

    def bind(self, backend: Backend | None) -> None:
        """Makes `forward` run on a backend; None ends that."""
        self._forward = None if backend is None else Forward(self, backend)

    @property
    def bound(self) -> Forward:
        """The runner of `forward`. Raises KukriError if no backend is bound."""
        if self._forward is None:
            raise KukriError("the model must have a backend: use the model of an open LLM, or bind() one")
        return self._forward

    @property
    def n_parameters(self) -> int:
        """Numbers in the model; tied embeddings count once."""
        return sum(parameter.n_parameters for parameter in self.parameters)


LLAMA = Architecture(
    "llama",
    Llama,
    "LlamaForCausalLM",
    gguf_seeing="paddleocr",
    interleaved_rope=True,
    biases={"self_attn": "attention_bias", "mlp": "mlp_bias"},
)
