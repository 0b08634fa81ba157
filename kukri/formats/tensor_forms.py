"""How the files of each format hold a model's tensors: the rows of one table, and what both formats order.

A name is a model's own: Hugging Face's, in canonical form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from kukri.config import ModelConfig
from kukri.dataclass import dataclass
from kukri.errors import UnsupportedError
from kukri.models import ARCHITECTURES
from kukri.models.rope import rope_row_order
from kukri.models.stored import BIAS_PARAMETER, ONE_ROW, SAME, Order, Stored, Transform, added

# Llama's modules without `.weight` or `.bias`; modules of a layer without its prefix. An architecture's
# `tensor_names` replace or add some.
_NAMES: dict[str, str | Stored] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "score": "cls.output",
    "qa_outputs": "qa_output",  # kukri's own: GGUF has no name for it
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": Stored("ffn_gate_inp", is_small=True),
    "mlp.gate.e_score_correction": Stored("exp_probs_b", BIAS_PARAMETER),
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": Stored("ffn_gate_inp_shexp", hf=ONE_ROW),
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    # the layer for multi-token prediction has these besides
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
    "embed_tokens": "nextn.embed_tokens",
}
_NAME = re.compile(r"(?:(?P<layers>.+?)\.(?P<layer>\d+)\.)?(?P<module>.+)\.(?P<kind>weight|bias)")
_PLAIN = Stored("")


@cache
def table(architecture: str) -> Mapping[str, Stored]:
    """The rows of an architecture, by module; its own come last, and win."""
    own = ARCHITECTURES[architecture]
    of_norms = added(own.hf_norm_offset) if own.hf_norm_offset else SAME

    def row(module: str, stored: str | Stored) -> Stored:
        if isinstance(stored, Stored):
            return stored
        return Stored(stored, hf=of_norms if module.endswith("norm") else SAME)

    return {module: row(module, stored) for module, stored in {**_NAMES, **own.tensor_names}.items()}


def row_of(name: str, architecture: str) -> Stored:
    """The row of a tensor; a plain one for a bias of a module whose weight alone is changed."""
    match = _NAME.fullmatch(name)
    row = _PLAIN if match is None else table(architecture).get(match["module"], _PLAIN)
    is_of_bias = row.ending is not None and row.ending[0].endswith("bias")
    return row if name.endswith("bias") == is_of_bias else Stored(row.gguf, tiles=row.tiles)


@cache
def parameters(architecture: str) -> Mapping[str, str]:
    """Names in a layer that safetensors end otherwise: their names, by the names that modules give them."""
    stored = {module: name for name, parts in ARCHITECTURES[architecture].joined.items() for module in parts}
    found = {}
    for module, row in table(architecture).items():
        if row.ending is not None:
            ours, theirs = row.ending
            name = f"{stored.get(module, module)}.{'bias' if ours.endswith('bias') else 'weight'}"
            found[name] = name.removesuffix(ours) + theirs
    return found


@dataclass(frozen=True)
class Form:
    """How the files of one format hold a tensor."""

    transform: Transform
    rows: Order
    columns: Order


def hf_form(name: str, config: ModelConfig, n_rows: int = 0) -> Form:
    """How safetensors hold a tensor of `n_rows` rows; 0 if their order does not matter."""
    architecture = ARCHITECTURES[config.architecture]
    row = row_of(name, architecture.name)
    rows, columns = _tiled(row, config) if config.recurrent and config.recurrent.are_tiled else (None, None)
    if architecture.hf_interleaved_rope and n_rows:
        rows = rope_row_order(name, n_rows, config) if rows is None else rows
    return Form(row.hf, rows, columns)


def gguf_form(name: str, config: ModelConfig, n_rows: int = 0) -> Form:
    """The same for GGUF. A model read from a file of either format has heads in that file's order."""
    architecture = ARCHITECTURES[config.architecture]
    row = row_of(name, architecture.name)
    rows, columns = (None, None)
    if config.recurrent is not None and not config.recurrent.are_tiled:
        rows, columns = (inverse(order) for order in _tiled(row, config))
    if architecture.in_pairs(config) and n_rows:
        rows = rope_row_order(name, n_rows, config) if rows is None else rows
    factors = row_factors(config, name)
    return Form(row.in_gguf if factors is None else _multiplied(factors), rows, columns)


def row_factors(config: ModelConfig, name: str) -> Any:
    """What GGUF files have a matrix, or each of its rows, multiplied by; None if by nothing."""
    factors_of = ARCHITECTURES[config.architecture].gguf_factors
    if factors_of is None:
        return None
    factors = factors_of(config, re.sub(r"model\.layers\.\d+\.|\.(?:weight|bias)$", "", name))
    if np.all(np.equal(factors, 1)):
        return None
    if name.endswith(".bias"):
        raise UnsupportedError(f"tensor '{name}' is not supported by GGUF: its matrix has a multiplier")
    return factors


def _multiplied(factors: Any) -> Transform:
    """A matrix, or each of its rows, has been multiplied; a model takes it as it is."""
    return Transform(store=lambda values: values * np.float32(factors).reshape(-1, 1))


def _tiled(row: Stored, config: ModelConfig) -> tuple[Order, Order]:
    """The rows and columns of safetensors in the order of GGUF files."""
    own = config.recurrent
    if row.tiles is None or own is None or own.n_heads == own.n_groups:
        return None, None
    return row.tiles(own)


def inverse(order: Order) -> Order:
    """For each row of a file's matrix, the row of the model's."""
    return None if order is None else np.argsort(order)


def taken(values: Any, rows: Order, columns: Order = None) -> Any:
    """Rows and columns of a matrix in this order, the matrix itself if both are as they are."""
    values = values if rows is None else values[rows]
    return values if columns is None else np.take(values, columns, axis=1)
