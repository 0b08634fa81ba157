"""A tiny Llama in a GGUF file: random or given weights, and a tokenizer with a token for each byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kukri.config import LayerConfig, ModelConfig, RopeConfig
from kukri.formats.gguf.writer import write_gguf
from kukri.kernels.quantize import quantize
from kukri.quant.types import QUANT_TYPES

START, END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CONTROL = (TEXT_END, START, END)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
N_VOCAB = 256 + len(CONTROL)
START_ID, END_ID = 257, 258

_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def tiny_config(max_context: int = 128) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        n_layers=2,
        d_model=64,
        n_heads=4,
        n_kv_heads=2,
        d_head=16,
        d_ffn=96,
        n_vocab=N_VOCAB,
        norm_eps=1e-5,
        max_context=max_context,
        tie_embeddings=True,
        rope=RopeConfig(10000.0, 16),
        layers=(LayerConfig(),) * 2,
        name="tiny",
    )


def random_arrays(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights under Hugging Face names, large enough for attention that is far from flat."""
    random = np.random.default_rng(seed)
    d, f = config.d_model, config.d_ffn
    n_q, n_kv = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (config.n_vocab, d), "model.norm": (d,)}
    for i in range(config.n_layers):
        shapes |= {
            f"model.layers.{i}.{name}": shape
            for name, shape in {
                "input_layernorm": (d,),
                "self_attn.q_proj": (n_q, d),
                "self_attn.k_proj": (n_kv, d),
                "self_attn.v_proj": (n_kv, d),
                "self_attn.o_proj": (d, n_q),
                "post_attention_layernorm": (d,),
                "mlp.gate_proj": (f, d),
                "mlp.up_proj": (f, d),
                "mlp.down_proj": (d, f),
            }.items()
        }
    if not config.tie_embeddings:
        shapes["lm_head"] = (config.n_vocab, d)
    arrays = {}
    for name, shape in shapes.items():
        normal = random.standard_normal(shape).astype(np.float32)
        arrays[f"{name}.weight"] = 1 + 0.2 * normal if len(shape) == 1 else 0.2 * normal
    return arrays


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[rest]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


def _interleaved(rows: np.ndarray, d_head: int) -> np.ndarray:
    """Rows of q or k as llama.cpp keeps them: dimension i next to i + d_head / 2."""
    return rows.reshape(-1, 2, d_head // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_tiny(
    path: Path,
    config: ModelConfig | None = None,
    arrays: Mapping[str, np.ndarray] | None = None,
    weight_type: str = "F32",
    control: Sequence[str] = CONTROL,
    plain: Sequence[str] = (),
    **metadata: Any,
) -> Path:
    """Writes the file and gives its path; `metadata` sets keys, `.` written `__`, and None removes one.

    After the bytes come control tokens, the last of which ends a text, and `plain` ones that every text has.
    """
    config = config or tiny_config()
    letters = [chr(b) for b in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]]
    bytes_left = [b for b in range(256) if chr(b) not in letters]
    letter_of = {ord(letter): letter for letter in letters} | {
        b: chr(256 + i) for i, b in enumerate(bytes_left)
    }
    tokens = [letter_of[b] for b in range(256)] + [*control, *plain]
    tokens += [f"<|unused{i}|>" for i in range(config.n_vocab - len(tokens))]
    keys: dict[str, Any] = {
        "general.architecture": "llama",
        "general.name": config.name or "tiny",
        "llama.block_count": config.n_layers,
        "llama.context_length": config.max_context,
        "llama.embedding_length": config.d_model,
        "llama.feed_forward_length": config.d_ffn,
        "llama.attention.head_count": config.n_heads,
        "llama.attention.head_count_kv": config.n_kv_heads,
        "llama.attention.key_length": config.d_head,
        "llama.attention.value_length": config.d_head,
        "llama.attention.layer_norm_rms_epsilon": config.norm_eps,
        "llama.rope.freq_base": config.rope.theta,
        "llama.rope.dimension_count": config.rope.rotary_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens[: config.n_vocab],
        "tokenizer.ggml.token_type": [
            1 if i < 256 else 4 if token in plain else 3 for i, token in enumerate(tokens[: config.n_vocab])
        ],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": min(255 + len(control), config.n_vocab - 1),
        "tokenizer.chat_template": TEMPLATE,
    }
    keys |= {name.replace("__", "."): value for name, value in metadata.items()}
    tensors = {}
    for name, array in (arrays or random_arrays(config)).items():
        if "q_proj" in name or "k_proj" in name:
            array = _interleaved(array, config.d_head)
        kind = QUANT_TYPES["F32" if array.ndim == 1 else weight_type]
        tensors[_gguf_name(name)] = (kind, quantize(np.atleast_2d(array), kind), array.shape)
    write_gguf(path, {key: value for key, value in keys.items() if value is not None}, tensors)
    return path
