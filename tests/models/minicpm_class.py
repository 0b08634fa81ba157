"""MiniCPM for transformers, whose class is on the hub alone: Granite, its multipliers made of other keys."""

from __future__ import annotations

import transformers as tr
from huggingface_hub.dataclasses import strict


@strict
class MiniCPMConfig(tr.LlamaConfig):
    """MiniCPM's keys and their defaults, and Granite's multipliers as properties."""

    model_type = "minicpm"
    scale_emb: float | int = 1
    scale_depth: float | int = 1
    dim_model_base: int = 1
    tie_word_embeddings: bool = True

    attention_multiplier = property(lambda self: self.head_dim**-0.5)
    embedding_multiplier = property(lambda self: self.scale_emb)
    residual_multiplier = property(lambda self: self.scale_depth / self.num_hidden_layers**0.5)
    logits_scaling = property(lambda self: self.hidden_size / self.dim_model_base)


class MiniCPMModel(tr.GraniteModel):
    """Granite without its head."""

    config_class = MiniCPMConfig


class MiniCPMForCausalLM(tr.GraniteForCausalLM):
    """Granite."""

    config_class = MiniCPMConfig


tr.AutoConfig.register("minicpm", MiniCPMConfig)
tr.AutoModel.register(MiniCPMConfig, MiniCPMModel)
tr.AutoModelForCausalLM.register(MiniCPMConfig, MiniCPMForCausalLM)
