"""Whisper's decoder (Radford et al. 2022): a text that attends to a sound, and to itself.

A sequence begins with the sound: its first `n_sound` places in the cache hold, in each layer, the keys and
values that the layer's cross-attention reads, and the places after them belong to the text. So a sound is
found again by its pages, and shared, as any prefix is. `keep_rows` fills the places of a sound from the rows
of the encoder (`kukri.sound.whisper`); the program itself computes text alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kukri.config import ModelConfig
from kukri.errors import UnsupportedError
from kukri.kernels.op_set import Ops, Tensor
from kukri.kernels.paged_kv import PAGE_TOKENS
from kukri.models.architecture import Architecture
from kukri.models.forward import Forward
from kukri.models.keys import Keys
from kukri.models.layers import MLP, Attention, Embedding, LayerNorm, Linear
from kukri.models.llama import Block, Llama
from kukri.models.weights import WeightSource

MAX_SOUND = 1 << 14  # rows of a sound: a larger claim of a file is damage


class TextAttention(Attention):
    """Attention of the text to itself: the places before it are the sound's."""

    out_name = "out_proj"

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, layer: int) -> None:
        super().__init__(source, name, config, layer)
        # keys have no bias, by which their range would be known
        self.spec = replace(self.spec, first_key=config.n_sound, key_range=None)


class CrossAttention:
    """Attention of the text to the sound, whose keys and values `keep` has stored."""

    def __init__(self, source: WeightSource, name: str, config: ModelConfig, own: Attention) -> None:
        d, self.layer = config.d_model, own.layer
        self.query = Linear(source, [f"{name}.q_proj"], (d,), d)
        self.kv = Linear(source, [f"{name}.k_proj", f"{name}.v_proj"], (d, d), d)
        self.out = Linear(source, [f"{name}.out_proj"], (d,), d)
        self.spec = replace(
            own.spec, is_causal=False, first_key=0, stop_key=config.n_sound_rows, reads=own.layer
        )
        # a row sees itself alone, because only what it stores is wanted
        self._stored = replace(own.spec, first_key=0, window=1)

    def __call__(self, ops: Ops, x: Tensor, residual: Tensor, batch: Any) -> Tensor:
        """residual + attention(x): [T, D]."""
        q = ops.tap("cross_attn.hook_q", self.layer, self.query(ops, x))
        z = ops.tap("cross_attn.hook_z", self.layer, ops.attention(q, None, None, self.spec, batch))
        return self.out(ops, z, residual, ("hook_cross_attn_out", self.layer))

    def keep(self, ops: Ops, rows: Tensor, batch: Any) -> None:
        """Stores the keys and values of a sound's rows [T, D]."""
        k, v = self.kv.parts(ops, rows)
        k = ops.tap("cross_attn.hook_k", self.layer, k)
        ops.attention(ops.scale(k, 1.0), k, v, self._stored, batch)


class WhisperBlock(Block):
    """One layer: attention to the text, attention to the sound, and an MLP, each after its norm."""

    norm_type: Callable[..., Any] = LayerNorm
    attention_type = TextAttention
    mlp_type = MLP
    attention_norm_name, mlp_norm_name, mlp_name = "self_attn_layer_norm", "final_layer_norm", ""

    def __init__(self, source: WeightSource, config: ModelConfig, layer: int) -> None:
        super().__init__(source, config, layer)
        name = f"model.layers.{layer}.encoder_attn"
        self.cross_norm = LayerNorm(source, f"{name}_layer_norm", config.d_model, config.norm_eps)
        self.cross = CrossAttention(source, name, config, self.attention)

    def __call__(self, ops: Ops, x: Tensor, batch: Any) -> Tensor:
        """x [T, D] -> [T, D]."""
        x = ops.tap("hook_resid_pre", self.layer, x)
        x = self.attention(ops, self.attention_norm(ops, x), x, batch)
        x = ops.tap("hook_resid_mid", self.layer, self.cross(ops, self.cross_norm(ops, x), x, batch))
        return ops.tap("hook_resid_post", self.layer, self.mlp(ops, self.mlp_norm(ops, x), x))


class Whisper(Llama):
    """The decoder. Its tokens are placed after the sound, and their learned positions counted from there."""

    block_type = WhisperBlock
    norm_name = "model.layer_norm"

    def __init__(self, config: ModelConfig, source: WeightSource) -> None:
        super().__init__(config, source)
        learned = Embedding(source, "model.embed_positions", config.n_positions, config.d_model).weight
        rows = np.maximum(np.arange(config.n_sound + config.n_positions) - config.n_sound, 0)
        shape = (len(rows), config.d_model)
        self.positions = replace(learned, stored=learned.stored[rows], shape=shape)

    def embed(self, ops: Ops, batch: Any) -> Tensor:
        return ops.embed(self.positions, batch, "positions", self.embedding(ops, batch))

    def keep_rows(self, ops: Ops, batch: Any) -> Tensor:
        """The program of a sound's rows, which are written over the embeddings at the first tap."""
        rows = ops.tap("hook_embed", None, self.embedding(ops, batch))
        for block in self.blocks:
            block.cross.keep(ops, rows, batch)
        return self.embedding.logits(ops, ops.logit_rows(rows, batch))

    @property
    def bound(self) -> Forward:
        raise UnsupportedError("forward() is not supported by a model that hears: use transcribe()")


def sound_places(n_rows: int) -> int:
    """Return how many places a sound of `n_rows` takes, which are whole pages."""
    return -(-n_rows // PAGE_TOKENS) * PAGE_TOKENS


def _read_hf(keys: Keys, facts: dict[str, Any]) -> None:
    """The places of the sound come before the places of the text."""
    n_rows = keys.whole("max_source_positions", most=MAX_SOUND)
    facts["n_sound_rows"], facts["n_sound"] = n_rows, sound_places(n_rows)
    facts["max_context"] += facts["n_sound"]


WHISPER = Architecture(
    "whisper",
    Whisper,
    "WhisperForConditionalGeneration",
    has_rope=False,
    in_gguf=False,
    hf_prefix="model.decoder.",
    unused=r"(?:model\.)?encoder\..+|model\.encoder\..+|proj_out\.weight",
    keys={
        "n_layers": ("block_count", "decoder_layers"),
        "d_model": ("embedding_length", "d_model"),
        "n_heads": ("attention.head_count", "decoder_attention_heads"),
        "d_ffn": ("feed_forward_length", "decoder_ffn_dim"),
        "max_context": ("context_length", "max_target_positions"),
    },
    hf_epsilon="layer_norm_eps",
    hf_activation="activation_function",
    activation="gelu",
    reads={
        *("max_source_positions", "num_mel_bins"),
        *("encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"),
    },
    ignores={
        *("is_encoder_decoder", "num_hidden_layers", "dropout", "activation_dropout", "encoder_layerdrop"),
        *("decoder_layerdrop", "init_std", "use_weighted_layer_sum", "classifier_proj_size"),
        *("apply_spec_augment", "mask_time_prob", "mask_time_length", "mask_time_min_masks"),
        *("mask_feature_prob", "mask_feature_length", "mask_feature_min_masks", "median_filter_width"),
        *("suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids", "max_length"),
        *("layer_norm_eps", "lang_ids", "suppress_ids", "suppress_ids_begin", "alignment_heads"),
    },
    defaults={
        "layer_norm_eps": 1e-5,
        "vocab_size": 51865,
        "num_mel_bins": 80,
        "encoder_layers": 4,
        "encoder_attention_heads": 6,
        "decoder_layers": 4,
        "decoder_attention_heads": 6,
        "decoder_ffn_dim": 1536,
        "encoder_ffn_dim": 1536,
        "d_model": 384,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "tie_word_embeddings": True,
    },
    fixed={"scale_embedding": False},
    biases={
        "self_attn": True,
        "self_attn.k_proj": False,
        "encoder_attn": True,
        "encoder_attn.k_proj": False,
    },
    read_hf=_read_hf,
)
