"""GGUF files of true dimensions and random weights, to measure with: `python -m benchmarks.make_model`.

Every block of the file is valid and finite: quants are random bits, scales such that weights have a deviation
of 0.02 and a mean near 0, so that activations stay sane. The tokenizer is a byte-level BPE with made-up
merges that covers any text. One tensor is in memory at a time. kukri and llama.cpp both run these files.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness import run
from kukri.formats.gguf.writer import TensorSource, write_gguf
from kukri.quant.blocks import FLOAT_BYTES, dequantize
from kukri.quant.mixes import MIXES, mix_types
from kukri.quant.types import QUANT_TYPES, QuantType

DEVIATION = 0.02
_SPECIAL = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"),
    *("<image>", "<fake_token_around_image>", "<global-img>", "<|image_pad|>"),  # of images
)
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """A model's dimensions. The embedding is the head too."""

    architecture: str
    d_model: int
    d_ffn: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    n_vocab: int
    context: int
    rope_theta: float
    n_experts: int = 0  # in place of each MLP
    n_experts_used: int = 0
    d_expert: int = 0
    window: int = 0  # in the layers that the architecture gives one
    attending: tuple[int, ...] = ()  # a hybrid's layers that attend; gemma4's that see all
    n_taps: int = 0  # in their convolutions
    # heads of the delta rule and groups that share keys, and their width; or those of a state space, and
    # the width of its keys
    state: tuple[int, int, int, int] = (0, 0, 0, 0)
    mixed: tuple[int, ...] = ()  # nemotron_h's layers that are a mixture
    d_shared: int = 0  # width of a mixture's expert for all tokens
    has_next_token: bool = False  # the last layer is for multi-token prediction
    n_shared: int = 0  # gemma4's last layers, which read the keys of others, with MLPs of twice the width
    d_per_layer: int = 0  # and the width of each layer's embeddings
    # latent attention: the latent, a head's key, of it what rotates, its value, and what queries are made of
    latent: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    n_dense: int = 0  # leading layers with an MLP in place of a mixture


SHAPES = {
    "lfm2-1.2b": Shape(
        *("lfm2", 2048, 8192, 16, 32, 8, 64, 65536, 32768, 1e6), attending=(2, 5, 8, 10, 12, 14), n_taps=3
    ),
    "qwen3.5-0.8b": Shape(
        *("qwen35", 1024, 3584, 24, 8, 2, 256, 248320, 32768, 1e7),
        attending=tuple(range(3, 24, 4)),
        n_taps=4,
        state=(16, 16, 128, 128),
    ),
    "qwen3.5-35b-a3b-4l": Shape(
        *("qwen35moe", 2048, 512, 4, 16, 2, 256, 248320, 32768, 1e7),
        n_experts=256,
        n_experts_used=8,
        d_expert=512,
        d_shared=512,
        attending=(3,),
        n_taps=4,
        state=(32, 16, 128, 128),
    ),
    "nemotron-3-nano-6l": Shape(
        *("nemotron_h_moe", 2688, 1856, 6, 32, 2, 128, 131072, 32768, 1e4),
        n_experts=128,
        n_experts_used=6,
        d_expert=1856,
        d_shared=3712,
        attending=(5,),
        mixed=(1, 3),
        n_taps=4,
        state=(64, 8, 64, 128),
    ),
    "qwen3.5-2b": Shape(
        *("qwen35", 2048, 6144, 25, 8, 2, 256, 248320, 32768, 1e7),
        attending=(*range(3, 24, 4), 24),
        n_taps=4,
        state=(16, 16, 128, 128),
        has_next_token=True,
    ),
    "qwen3-30b-a3b-4l": Shape(
        *("qwen3moe", 2048, 6144, 4, 32, 4, 128, 151936, 32768, 1e6),
        n_experts=128,
        n_experts_used=8,
        d_expert=768,
    ),
    "glm-4.7-flash-4l": Shape(
        *("deepseek2", 2048, 10240, 4, 20, 1, 576, 154880, 202752, 1e6),
        n_experts=64,
        n_experts_used=4,
        d_expert=1536,
        d_shared=1536,
        latent=(512, 256, 64, 256, 768),
        n_dense=1,
    ),
    "gemma4-e2b": Shape(
        *("gemma4", 1536, 6144, 35, 8, 1, 512, 262144, 32768, 1e6),
        window=512,
        attending=tuple(range(4, 35, 5)),
        n_shared=20,
        d_per_layer=256,
    ),
    "gemma3-1b": Shape("gemma3", 1152, 6912, 26, 4, 1, 256, 262144, 32768, 1e6, window=512),
    "gemma3-270m": Shape("gemma3", 640, 2048, 18, 4, 1, 256, 262144, 32768, 1e6, window=512),
    "qwen3-8b": Shape("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 32768, 1e6),  # Bonsai-8B's too
    "qwen2.5-0.5b": Shape("qwen2", 896, 4864, 24, 14, 2, 64, 151936, 32768, 1e6),
    "smollm3-3b": Shape("smollm3", 2048, 11008, 36, 16, 4, 128, 128256, 65536, 5e6),
    "smollm2-1.7b": Shape("llama", 2048, 8192, 24, 32, 32, 64, 49152, 8192, 130000.0),
    "smollm2-360m": Shape("llama", 960, 2560, 32, 15, 5, 64, 49152, 8192, 100000.0),
    "smollm2-135m": Shape("llama", 576, 1536, 30, 9, 3, 64, 49152, 8192, 100000.0),
    "tiny": Shape("smollm3", 256, 512, 4, 4, 2, 64, 1024, 512, 10000.0),
}


def make_model(
    path: Path, shape: Shape, mix: str, name: str, seed: int = 0, keys: Mapping[str, Any] | None = None
) -> None:
    """Writes the file, with further keys; it appears complete or not at all."""
    shapes = tensor_shapes(shape)
    types = mix_types(mix, shapes, shape.n_heads // shape.n_kv_heads)
    random = np.random.default_rng(seed)
    tensors: dict[str, TensorSource] = {}
    for tensor, dims in shapes.items():
        if len(dims) == 1 or tensor.endswith((".ssm_a", ".ssm_d", ".ssm_norm.weight")):
            sign = -1 if tensor.endswith(".ssm_a") else 1
            tensors[tensor] = (QUANT_TYPES["F32"], np.full(dims, sign, np.float32), dims)
        else:
            type = types.get(tensor, QUANT_TYPES["F32"])  # routers
            type = QUANT_TYPES["F32"] if "conv" in tensor.split(".")[-2] else type
            tensors[tensor] = (type, _maker(random, type, dims), dims)
    write_gguf(path, {**_metadata(shape, mix, name), **(keys or {})}, tensors)


def tensor_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the file by its GGUF name, (out, in)."""
    d, n_q, n_kv = shape.d_model, shape.n_heads * shape.d_head, shape.n_kv_heads * shape.d_head
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (d,),
        "attn_q": (n_q, d),
        "attn_k": (n_kv, d),
        "attn_v": (n_kv, d),
        "attn_output": (d, n_q),
        "ffn_norm": (d,),
    }
    if shape.architecture == "qwen2":
        layer |= {"attn_q.bias": (n_q,), "attn_k.bias": (n_kv,), "attn_v.bias": (n_kv,)}
    if shape.architecture.startswith(("qwen3", "gemma3")):
        layer |= {"attn_q_norm": (shape.d_head,), "attn_k_norm": (shape.d_head,)}
    if shape.architecture == "gemma3":
        layer |= {"post_attention_norm": (d,), "post_ffw_norm": (d,)}
    n, f = shape.n_experts, shape.d_expert
    if n:
        layer |= {"ffn_gate_inp": (n, d), "ffn_gate_exps": (n, f, d), "ffn_up_exps": (n, f, d)}
        layer |= {"ffn_down_exps": (n, d, f), **_shared_expert(shape)}
    else:
        layer |= {"ffn_gate": (shape.d_ffn, d), "ffn_up": (shape.d_ffn, d), "ffn_down": (d, shape.d_ffn)}
    last = "token_embd_norm" if shape.architecture == "lfm2" else "output_norm"
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (shape.n_vocab, d), f"{last}.weight": (d,)}
    if shape.d_per_layer:
        width = shape.n_layers * shape.d_per_layer
        shapes |= {
            "per_layer_token_embd.weight": (shape.n_vocab, width),
            "rope_freqs.weight": (shape.d_head // 2,),
        }
        shapes |= {
            "per_layer_model_proj.weight": (width, d),
            "per_layer_proj_norm.weight": (shape.d_per_layer,),
        }
    for i in range(shape.n_layers):
        parts = layer
        if shape.latent[0]:
            parts = _latent_layer(shape, layer, i)
        if shape.attending:
            maker = {"gemma4": _gemma4_layer, "nemotron_h_moe": _layer_of_one_part}
            parts = maker.get(shape.architecture, _hybrid_layer)(shape, layer, i)
        if shape.has_next_token and i == shape.n_layers - 1:
            parts |= {"nextn.eh_proj": (d, 2 * d), "nextn.enorm": (d,), "nextn.hnorm": (d,)}
            parts |= {"nextn.shared_head_norm": (d,)}
        shapes |= {f"blk.{i}.{part}{_ENDINGS.get(part, '.weight')}": dims for part, dims in parts.items()}
    return shapes


def _latent_layer(shape: Shape, layer: dict[str, tuple[int, ...]], i: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer of latent attention: an MLP in the first ones, a shared expert in the others."""
    d, h, (rank, d_key, n_rotary, d_value, q_rank) = shape.d_model, shape.n_heads, shape.latent
    parts = {part: dims for part, dims in layer.items() if part in ("attn_norm", "ffn_norm")}
    parts |= {"attn_q_a": (q_rank, d), "attn_q_a_norm": (q_rank,), "attn_q_b": (h * d_key, q_rank)}
    parts |= {"attn_kv_a_mqa": (rank + n_rotary, d), "attn_kv_a_norm": (rank,)}
    parts |= {"attn_k_b": (h, rank, d_key - n_rotary), "attn_v_b": (h, d_value, rank)}
    parts |= {"attn_output": (d, h * d_value)}
    if i < shape.n_dense:
        return parts | {
            "ffn_gate": (shape.d_ffn, d),
            "ffn_up": (shape.d_ffn, d),
            "ffn_down": (d, shape.d_ffn),
        }
    parts |= {part: dims for part, dims in layer.items() if part.endswith(("_exps", "_inp", "_shexp"))}
    return parts | {"exp_probs_b": (shape.n_experts,)}


def _shared_expert(shape: Shape) -> dict[str, tuple[int, ...]]:
    """The tensors of a mixture's expert for all tokens, if it has one."""
    d, f = shape.d_model, shape.d_shared
    if not f:
        return {}
    gate = {"ffn_gate_inp_shexp": (d,)} if shape.architecture == "qwen35moe" else {}
    return {"ffn_gate_shexp": (f, d), "ffn_up_shexp": (f, d), "ffn_down_shexp": (d, f), **gate}


def _layer_of_one_part(shape: Shape, layer: dict[str, tuple[int, ...]], i: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer of Nemotron-H: attention, a mixture without gates, or a state space."""
    norm = {"attn_norm": layer["attn_norm"]}
    if i in shape.attending:
        return norm | {part: dims for part, dims in layer.items() if part.startswith("attn_")}
    if i in shape.mixed:
        plain = {part: dims for part, dims in layer.items() if part.endswith(("_exps", "_inp", "_shexp"))}
        del plain["ffn_gate_exps"], plain["ffn_gate_shexp"]
        return norm | plain | {"exp_probs_b": (shape.n_experts,)}
    d, (n, n_groups, width, d_key) = shape.d_model, shape.state
    inner, n_conv = n * width, n * width + 2 * n_groups * d_key
    parts: dict[str, tuple[int, ...]]
    parts = {"ssm_in": (inner + n_conv + n, d), "ssm_out": (d, inner), "ssm_conv1d": (n_conv, shape.n_taps)}
    parts |= {"ssm_conv1d.bias": (n_conv,), "ssm_dt": (n,), "ssm_norm": (n_groups, inner // n_groups)}
    return norm | parts | {"ssm_a": (n, 1), "ssm_d": (n, 1)}


def _gemma4_layer(shape: Shape, layer: dict[str, tuple[int, ...]], i: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer of Gemma 4: heads of half the size in a window, no keys if it reads others'."""
    d, width, d_ffn = shape.d_model, shape.d_per_layer, shape.d_ffn
    d_head = shape.d_head if i in shape.attending else shape.d_head // 2
    n_q, n_kv, is_shared = (
        shape.n_heads * d_head,
        shape.n_kv_heads * d_head,
        i >= shape.n_layers - shape.n_shared,
    )
    d_ffn *= 2 if is_shared else 1
    parts = layer | {"attn_q": (n_q, d), "attn_output": (d, n_q), "attn_q_norm": (d_head,)}
    parts |= {"attn_k": (n_kv, d), "attn_v": (n_kv, d), "attn_k_norm": (d_head,)}
    if is_shared:
        parts = {part: dims for part, dims in parts.items() if not part.startswith(("attn_k", "attn_v"))}
    parts |= {"ffn_gate": (d_ffn, d), "ffn_up": (d_ffn, d), "ffn_down": (d, d_ffn)}
    parts |= {"post_attention_norm": (d,), "post_ffw_norm": (d,), "layer_output_scale": (1,)}
    return parts | {"inp_gate": (width, d), "proj": (d, width), "post_norm": (d,)}


_ENDINGS = {
    "exp_probs_b": ".bias",
    "ssm_a": "",
    "ssm_d": "",
    "ssm_dt": ".bias",
    "ssm_conv1d.bias": "",
    "attn_q.bias": "",
    "attn_k.bias": "",
    "attn_v.bias": "",
}


def _hybrid_layer(
    shape: Shape, attention: dict[str, tuple[int, ...]], layer: int
) -> dict[str, tuple[int, ...]]:
    """The tensors of a hybrid's layer, from those of one that attends."""
    d, attends = shape.d_model, layer in shape.attending
    parts = {p: dims for p, dims in attention.items() if attends or not p.startswith("attn_")}
    parts["attn_norm"] = (d,)
    if attends:
        parts |= {"attn_q_norm": (shape.d_head,), "attn_k_norm": (shape.d_head,)}
    if shape.architecture == "lfm2":
        if not attends:
            parts |= {"shortconv.conv": (d, shape.n_taps), "shortconv.in_proj": (3 * d, d)}
            parts["shortconv.out_proj"] = (d, d)
        return parts
    parts["post_attention_norm"] = parts.pop("ffn_norm")
    if attends:
        parts["attn_q"] = (2 * shape.n_heads * shape.d_head, d)  # with gates
        return parts
    n, n_groups, width, d_key = shape.state
    n_conv = n * width + 2 * n_groups * d_key
    parts |= {"attn_qkv": (n_conv, d), "attn_gate": (n * width, d), "ssm_out": (d, n * width)}
    parts |= {"ssm_conv1d": (n_conv, shape.n_taps), "ssm_alpha": (n, d), "ssm_beta": (n, d)}
    return parts | {"ssm_a": (n,), "ssm_dt": (n,), "ssm_norm": (width,)}


def random_rows(random: np.random.Generator, type: QuantType, dims: tuple[int, ...]) -> npt.NDArray[Any]:
    """uint8 [out, row_bytes]: weights of about DEVIATION."""
    row_bytes = type.row_bytes(dims[-1])
    if type.block_size == 1:
        drawn = (DEVIATION * random.standard_normal(1 << 16)).astype(np.float32)
        table = FLOAT_BYTES[type.name](drawn.reshape(-1, 1)).view(f"u{type.block_bytes}")
        chosen = np.frombuffer(random.bytes(2 * prod(dims)), np.uint16)
        return table.reshape(-1)[chosen].view(np.uint8).reshape(-1, row_bytes)
    blocks = np.frombuffer(bytearray(random.bytes(prod(dims[:-1]) * row_bytes)), np.uint8)
    blocks = blocks.reshape(-1, type.block_bytes)
    if type.name == "MXFP4":  # 2^-8 and 2^-9, as often as gives the deviation
        blocks[:, 0] = np.where(random.random(len(blocks)) < 0.685, 120, 119)
        return blocks.reshape(-1, row_bytes)
    _drop_twos(blocks, type)
    for at, value in zip(type.layout.halves, _scales(type), strict=True):
        blocks[:, at : at + 2] = np.array([value], np.float16).view(np.uint8)
    return blocks.reshape(-1, row_bytes)


def _drop_twos(blocks: npt.NDArray[np.uint8], type: QuantType) -> None:
    """Makes weights of 2 d in blocks of 2 bits zeros, so that the mean is 0."""
    if type.name in ("Q2_0", "TQ2_0"):
        blocks &= ~((blocks & blocks << 1) & 0xAA)


def _maker(
    random: np.random.Generator, type: QuantType, dims: tuple[int, ...]
) -> Callable[[], npt.NDArray[Any]]:
    return lambda: random_rows(random, type, dims)


def _scales(type: QuantType) -> list[float]:
    """The scale, and the minimum, that give random quants the deviation, and the mean 0."""
    halves = type.layout.halves
    sample = np.random.default_rng(0).integers(0, 256, (1 << 12, type.block_bytes), np.uint8)
    _drop_twos(sample, type)

    def weights(*values: float) -> npt.NDArray[np.float32]:
        for at, value in zip(halves, values, strict=True):
            sample[:, at : at + 2] = np.array([value], np.float16).view(np.uint8)
        return dequantize(sample, type)

    if len(halves) == 1:
        return [float(DEVIATION / weights(1.0).std())]
    minimum = float(weights(1.0, 0.0).mean() / -weights(0.0, 1.0).mean())
    scale = float(DEVIATION / weights(1.0, minimum).std())
    return [scale, scale * minimum]


def _metadata(shape: Shape, mix: str, name: str) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "block_count": shape.n_layers,
        "context_length": shape.context,
        "embedding_length": shape.d_model,
        "feed_forward_length": shape.d_ffn,
        "attention.head_count": shape.n_heads,
        "attention.head_count_kv": shape.n_kv_heads,
        "attention.key_length": shape.d_head,
        "attention.value_length": shape.d_head,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": shape.rope_theta,
        "rope.dimension_count": shape.d_head,
        "vocab_size": shape.n_vocab,
    }
    if shape.n_experts:
        keys |= {"expert_count": shape.n_experts, "expert_used_count": shape.n_experts_used}
        keys |= {"expert_feed_forward_length": shape.d_expert}
    if shape.d_shared:
        keys["expert_shared_feed_forward_length"] = shape.d_shared
    if shape.latent[0] or shape.mixed:
        keys["expert_shared_count"] = 1
    if shape.latent[0]:
        rank, d_key, n_rotary, d_value, q_rank = shape.latent
        keys |= {"attention.value_length": rank, "rope.dimension_count": n_rotary}
        keys |= {"attention.key_length_mla": d_key, "attention.value_length_mla": d_value}
        keys |= {"attention.kv_lora_rank": rank, "attention.q_lora_rank": q_rank, "expert_gating_func": 2}
        keys["leading_dense_block_count"] = shape.n_dense
        keys |= {"expert_weights_norm": True, "expert_weights_scale": 1.8}
    if shape.architecture == "lfm2":
        counts = [shape.n_kv_heads * (i in shape.attending) for i in range(shape.n_layers)]
        keys |= {"attention.head_count_kv": np.array(counts, np.int32), "shortconv.l_cache": shape.n_taps}
    if shape.state[0]:
        n, n_groups, width, d_key = shape.state
        keys |= {"ssm.conv_kernel": shape.n_taps, "ssm.state_size": d_key, "ssm.inner_size": n * width}
        keys |= {"ssm.time_step_rank": n, "ssm.group_count": n_groups}
    if shape.mixed:
        lists = {"attention.head_count_kv": (shape.n_kv_heads, shape.attending)}
        lists["feed_forward_length"] = shape.d_ffn, shape.mixed
        for key, (n, layers) in lists.items():
            keys[key] = np.array([n * (i in layers) for i in range(shape.n_layers)], np.int32)
        keys |= {"attention.layer_norm_epsilon": 1e-5, "expert_group_count": 1, "expert_group_used_count": 1}
        keys |= {"expert_weights_norm": True, "expert_weights_scale": 2.5, "expert_gating_func": 2}
    if shape.architecture.startswith("qwen35"):
        keys |= {"full_attention_interval": 4, "rope.dimension_count": shape.d_head // 4}
        keys |= {"rope.dimension_sections": np.array([11, 11, 10, 0], np.int32)}
    if shape.has_next_token:
        keys["nextn_predict_layers"] = 1
    if shape.window:
        keys["attention.sliding_window"] = shape.window
    if shape.architecture == "gemma4":
        half, first_shared = shape.d_head // 2, shape.n_layers - shape.n_shared
        widths = [shape.d_ffn * (2 if i >= first_shared else 1) for i in range(shape.n_layers)]
        keys |= {"feed_forward_length": np.array(widths, np.int32), "rope.freq_base_swa": 1e4}
        keys |= {f"attention.{part}_length_swa": half for part in ("key", "value")}
        keys |= {"rope.dimension_count_swa": half, "attention.shared_kv_layers": shape.n_shared}
        keys["embedding_length_per_layer_input"] = shape.d_per_layer
        keys["attention.sliding_window_pattern"] = np.array(
            [i not in shape.attending for i in range(shape.n_layers)]
        )
    tokens, merges = _vocabulary(shape.n_vocab)
    first_special = len(tokens) - len(_SPECIAL)
    return {
        "general.architecture": shape.architecture,
        "general.name": name,
        "general.file_type": MIXES[mix][1],
        "general.quantization_version": 2,
        **{f"{shape.architecture}.{key}": value for key, value in keys.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe" if shape.architecture == "smollm3" else "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * first_special + [3] * len(_SPECIAL),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": first_special,
        "tokenizer.ggml.eos_token_id": first_special + 3,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": _TEMPLATE,
    }


def _vocabulary(n: int) -> tuple[list[str], list[str]]:
    """`n` tokens and the merges that lead to them: bytes, then ever longer words, then special tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    tokens = [letters[byte] for byte in range(256)]
    merges: list[str] = []
    for word, letter in _words(letters[0x20]):
        if len(tokens) == n - len(_SPECIAL):
            break
        tokens.append(word + letter)
        merges.append(f"{word} {letter}")
    return [*tokens, *_SPECIAL], merges


def _words(space: str) -> Iterator[tuple[str, str]]:
    """Words of small letters, with a space before them or not, short ones first: all but the end, the end."""
    alphabet = "etaoinshrdlcumwfgypbvkjxqz"
    words = [space, *alphabet]
    for _ in count():
        longer = [(word, letter) for word in words for letter in alphabet]
        yield from longer
        words = [word + letter for word, letter in longer]


def main() -> None:
    """Writes the file that the command line describes."""
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.make_model", description="Write a GGUF file of random weights."
    )
    options.add_argument("shape", choices=SHAPES, help="the model whose dimensions it has")
    options.add_argument("path", type=Path, help="the .gguf file to write")
    options.add_argument("--type", choices=MIXES, default="Q4_K_M", help="llama.cpp's name of a mix (Q4_K_M)")
    options.add_argument("--seed", type=int, default=0, help="of the random weights (0)")
    given = options.parse_args()
    make_model(given.path, SHAPES[given.shape], given.type, f"random-{given.shape}", given.seed)
    print(f"{given.path}: {given.path.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    run(main)
