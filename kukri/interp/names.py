"""TransformerLens' names of activations, and their values by kukri's taps.

A tap shows [rows, width], a row a token. A `Point` is one name of TransformerLens: the tap it is read from,
and the form it has there. Both generations of names are listed: those of `TransformerBridge`
(`blocks.0.attn.q.hook_out`) and the older ones of `HookedTransformer` (`blocks.0.attn.hook_q`), which mean
the same.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kukri.errors import HookError
from kukri.interp.trace import Matrix, Norm, Trace
from kukri.kernels.arrays import FloatArray

Form = Literal[
    "plain",  # [.., width], as the tap has it
    "heads",  # [.., head, d_head]
    "head_inputs",  # [.., head, d_model]: the stream, once for each head that reads it
    "scale",  # [.., 1]: what a norm divides by
    "normalized",  # [.., width]: divided, before the norm's weight
    "norm_out",  # [.., width]: with the weight and the bias
    "head_in", "head_scale", "head_normalized", "head_out",  # of a norm of heads: [batch, head, pos, ..]
    "scores", "pattern",  # [batch, head, query, key]
    "result",  # [.., head, d_model]: each head's part of the attention's output
    "cos", "sin",  # [1, pos, rotary_dim]
    "tokens",  # [batch, pos]
    "expert_indices", "expert_scores",  # [.., n_used]: of the experts used, the largest weight first
    "logits",  # [.., n_vocab]
]  # fmt: skip
# the dimension of positions, if it is not the second
POS_AXIS: dict[Form, int] = {
    "scores": 2, "pattern": 2, "head_in": 2, "head_scale": 2, "head_normalized": 2, "head_out": 2,
}  # fmt: skip
LOGITS = "unembed.hook_out"  # a point without a tap: the program's result
TOKENS = "embed.hook_in"
FINAL = "ln_final.hook_normalized"  # kukri's tap, which sees the rows with logits, after the norm's weight

# (name, tap, form, whether an edit of it means what it says)
_Row = tuple[str, str, Form, bool]
_BlockRow = tuple[str, str, Form, bool, Norm | None]
_ATTENTION: tuple[_Row, ...] = (
    ("attn.q.hook_out", "attn.hook_q", "heads", True),
    ("attn.hook_q", "attn.hook_q", "heads", True),
    ("attn.k.hook_out", "attn.hook_k", "heads", True),
    ("attn.hook_k", "attn.hook_k", "heads", True),
    ("attn.v.hook_out", "attn.hook_v", "heads", True),
    ("attn.hook_v", "attn.hook_v", "heads", True),
    ("attn.hook_rot_q", "attn.hook_rot_q", "heads", True),
    ("attn.hook_rot_k", "attn.hook_rot_k", "heads", True),
    ("attn.hook_attn_scores", "attn.hook_rot_q", "scores", True),
    ("attn.hook_pattern", "attn.hook_rot_q", "pattern", True),
    ("attn.o.hook_in", "attn.hook_z", "heads", True),
    ("attn.hook_z", "attn.hook_z", "heads", True),
    ("attn.hook_ungated_z", "attn.hook_ungated_z", "heads", True),
    ("attn.hook_q_gate", "attn.hook_gate", "plain", True),
    ("attn.hook_result", "attn.hook_z", "result", False),
    ("attn.o.hook_out", "hook_attn_out", "plain", True),
    ("attn.hook_out", "hook_attn_out", "plain", True),
    ("hook_attn_out", "hook_attn_out", "plain", True),
)
_GATED_MLP: tuple[_Row, ...] = (
    ("mlp.gate.hook_out", "mlp.hook_pre", "plain", True),
    ("mlp.hook_pre", "mlp.hook_pre", "plain", True),
    ("mlp.in.hook_out", "mlp.hook_pre_linear", "plain", True),
    ("mlp.hook_pre_linear", "mlp.hook_pre_linear", "plain", True),
)
_MLP: tuple[_Row, ...] = (
    ("mlp.in.hook_out", "mlp.hook_pre", "plain", True),
    ("mlp.hook_pre", "mlp.hook_pre", "plain", True),
)
_EXPERTS: tuple[_Row, ...] = (
    ("mlp.hook_router_logits", "mlp.hook_router_logits", "plain", True),
    ("mlp.gate.hook_out", "mlp.hook_router_logits", "plain", True),
    ("mlp.router.hook_out", "mlp.hook_router_logits", "plain", True),
    ("mlp.hook_expert_weights", "mlp.hook_expert_weights", "plain", True),
    ("mlp.gate.hook_expert_weights", "mlp.hook_expert_weights", "plain", True),
    ("mlp.router.hook_expert_weights", "mlp.hook_expert_weights", "plain", True),
    ("mlp.hook_expert_indices", "mlp.hook_expert_weights", "expert_indices", False),
    ("mlp.gate.hook_expert_indices", "mlp.hook_expert_weights", "expert_indices", False),
    ("mlp.router.hook_expert_indices", "mlp.hook_expert_weights", "expert_indices", False),
    ("mlp.hook_router_scores", "mlp.hook_expert_weights", "expert_scores", False),
    ("mlp.experts.hook_pre", "mlp.experts.hook_pre", "plain", True),
    ("mlp.experts.hook_pre_linear", "mlp.experts.hook_pre_linear", "plain", True),
    ("mlp.experts.hook_post", "mlp.experts.hook_post", "plain", True),
    ("mlp.hook_post", "hook_mlp_out", "plain", True),
)
_CONVOLUTION: tuple[_Row, ...] = (
    ("conv.in.hook_out", "conv.hook_in_proj", "plain", True),
    ("conv.hook_in_proj", "conv.hook_in_proj", "plain", True),
    ("conv.hook_conv_in", "conv.hook_conv_in", "plain", True),
    ("conv.hook_conv_out", "conv.hook_conv_out", "plain", True),
    ("conv.out.hook_in", "conv.hook_gated", "plain", True),
    ("conv.hook_gated", "conv.hook_gated", "plain", True),
    ("conv.out.hook_out", "hook_mixer_out", "plain", True),
    ("conv.hook_out", "hook_mixer_out", "plain", True),
    ("hook_mixer_out", "hook_mixer_out", "plain", True),
)
_DELTA_RULE: tuple[_Row, ...] = (
    ("linear_attn.hook_qkv", "linear_attn.hook_qkv", "plain", True),
    ("linear_attn.hook_read", "linear_attn.hook_read", "plain", True),
    ("linear_attn.hook_out", "hook_mixer_out", "plain", True),
    ("linear_attn.hook_linear_attn_out", "hook_mixer_out", "plain", True),
    ("linear_attn.hook_ssm_out", "hook_mixer_out", "plain", True),
    ("hook_mixer_out", "hook_mixer_out", "plain", True),
)
_MLP_OUT: tuple[_Row, ...] = (
    ("mlp.out.hook_in", "mlp.hook_post", "plain", True),
    ("mlp.hook_post", "mlp.hook_post", "plain", True),
    ("mlp.out.hook_out", "hook_mlp_out", "plain", True),
    ("mlp.hook_out", "hook_mlp_out", "plain", True),
    ("hook_mlp_out", "hook_mlp_out", "plain", True),
    ("hook_out", "hook_resid_post", "plain", True),
    ("hook_resid_post", "hook_resid_post", "plain", True),
)
_KINDS = {"attn": "pattern", "attn_logits": "attn_scores", "key": "k", "query": "q", "value": "v"}
_PARTS = {"a": "attn", "attention": "attn", "m": "mlp", "b": "", "block": "", "blocks": ""}
_IN_ATTENTION = {"k", "v", "q", "z", "result", "pattern", "attn_scores", "rot_q", "rot_k"}
_IN_MLP = {"pre", "post", "mid", "pre_linear"}


@dataclass(frozen=True)
class Point:
    """One name. `tap` is the full name of the tap it is read from, "" for what needs none; `edit_tap` of the
    tap that an edit changes, "" if an edit would not mean what it says; `layer` None outside the blocks.
    """

    name: str
    tap: str
    form: Form
    layer: int | None = None
    edit_tap: str = ""
    norm: Norm | None = None  # of the forms that need one
    matrix: Matrix | None = None  # that the tap is multiplied by first, for a product that no tap shows

    @property
    def needs(self) -> tuple[str, ...]:
        """The taps that its value is computed from."""
        if self.form in ("scores", "pattern"):
            return self.tap, self.tap.replace("hook_rot_q", "hook_rot_k")
        return (self.tap,) if self.tap else ()

    @property
    def edit_needs(self) -> tuple[str, ...]:
        """The taps that a hook on it needs beside `edit_tap`, all before that."""
        if self.form in ("scores", "pattern"):
            return *self.needs, self.tap.replace("hook_rot_q", "hook_v")
        return () if self.tap == self.edit_tap else self.needs


def points(trace: Trace, n_layers: int) -> dict[str, Point]:
    """Every point of a model by its name, in the order of a step."""
    found: dict[str, Point] = {}

    def add(
        name: str, tap: str | None, form: Form, edits: str, layer: int | None, norm: Norm | None = None
    ) -> None:
        # a norm may stand between the heads' matrix and the stream
        is_lacking = form == "result" and f"blocks.{layer}.hook_attn_out" not in trace.matrices
        if tap is not None and (not tap or tap in taps) and not is_lacking:
            found[name] = Point(name, tap, form, layer, edits, norm)

    def add_products(layer: int) -> None:
        """Outputs of attention and MLP before a norm or a factor, and that norm: no tap shows them."""
        prefix = f"blocks.{layer}."
        parts = [("hook_attn_out", "attn", "attn.o", "ln1"), ("hook_mlp_out", "mlp", "mlp.out", "ln2")]
        for tap, part, last, ln in parts:
            matrix = trace.products.get(prefix + tap)
            if matrix is None or matrix.source is None or prefix + tap in trace.matrices:
                continue
            rows: list[tuple[str, Form, Norm | None]]
            rows = [(f"{last}.hook_out", "plain", None), (f"{part}.hook_out", "plain", None)]
            for tapped in (f"{prefix}{ln}_post.hook_normalized", f"{prefix}{ln}.hook_normalized"):
                norm = trace.norms.get(tapped)
                if norm is not None and norm.source is None:
                    rows.append((f"{ln}_post.hook_in", "plain", None))
                    rows.append((f"{ln}_post.hook_scale", "scale", norm))
                    rows.append((f"{ln}_post.hook_normalized", "normalized", norm))
                    found[f"{prefix}{ln}_post.hook_out"] = Point(
                        f"{prefix}{ln}_post.hook_out", tapped, "plain", layer, tapped
                    )
            for name, form, of_norm in rows:
                found[prefix + name] = Point(prefix + name, matrix.source, form, layer, "", of_norm, matrix)

    def add_head_inputs(layer: int) -> None:
        """Inputs of each head's query, key and value, before the norm: an edit makes these anew."""
        for x in "qkv":
            edit_tap = f"blocks.{layer}.attn.hook_{x}"
            matrix = trace.matrices.get(edit_tap)
            if matrix is None or matrix.source is None:
                continue
            norm = trace.norms.get(matrix.source)
            tap = matrix.source if norm is None else norm.source
            for name in (f"{edit_tap}_input", f"blocks.{layer}.hook_{x}_input"):
                if tap is not None:
                    found[name] = Point(name, tap, "head_inputs", layer, edit_tap, norm, matrix)

    taps = set(trace.taps)
    add(TOKENS, "", "tokens", "", None)
    first = "embed_ln.hook_out" if "hook_embed" in trace.norms else "embed.hook_out"
    for name in (first, "hook_embed"):
        add(name, "hook_embed", "plain", "hook_embed", None)
    if any(heads.rope is not None for heads in trace.heads.values()):
        add("rotary_emb.hook_in", "hook_embed", "plain", "", None)
        add("rotary_emb.hook_cos", "", "cos", "", None)
        add("rotary_emb.hook_sin", "", "sin", "", None)
    for layer in range(n_layers):
        prefix = f"blocks.{layer}."
        block = _post_norm_block if f"{prefix}ln2.hook_in" in taps else _block
        for name, tap, form, is_editable, norm in block(trace, layer):
            full_tap = f"{prefix}{tap}" if tap else ""
            edit_tap = full_tap if is_editable else ""
            if form in ("scores", "pattern"):
                edit_tap = f"{prefix}attn.hook_ungated_z"
                if edit_tap not in taps:
                    edit_tap = f"{prefix}attn.hook_z"
            read_tap = norm.source if form == "normalized" and norm is not None else full_tap
            add(f"{prefix}{name}", read_tap, form, edit_tap, layer, norm)
        add_products(layer)
        add_head_inputs(layer)
        for tap in trace.taps:  # taps that the tables do not know have their own name
            if tap.startswith(prefix) and tap not in found:
                add(tap.replace("hook_normalized", "hook_out"), tap, "plain", tap, layer)
    final = trace.norms.get(FINAL)
    if final is not None:
        add("ln_final.hook_in", final.source, "plain", "", None)
        add("ln_final.hook_scale", final.source, "scale", "", None, final)
        add("ln_final.hook_normalized", final.source, "normalized", FINAL, None, final)
        add("ln_final.hook_out", final.source, "norm_out", FINAL, None, final)
        add("unembed.hook_in", final.source, "norm_out", FINAL, None, final)
    for name in (LOGITS, "hook_unembed"):
        add(name, "", "logits", LOGITS, None)
    return found


def _block(trace: Trace, layer: int) -> list[_BlockRow]:
    """(name, tap, form, is editable, norm) of a layer's points, without their prefix."""
    prefix = f"blocks.{layer}."
    is_parallel = f"{prefix}hook_resid_mid" not in trace.taps
    rows: list[_BlockRow] = []

    def extend(table: tuple[_Row, ...]) -> None:
        rows.extend((*row, None) for row in table)

    def norm(name: str, source: str) -> None:
        found = trace.norms.get(f"{prefix}{name}.hook_normalized")
        if found is not None and found.source is not None:
            tap = f"{name}.hook_normalized"
            rows.append((f"{name}.hook_in", source, "plain", False, None))
            rows.append((f"{name}.hook_scale", source, "scale", False, found))
            rows.append((f"{name}.hook_normalized", tap, "normalized", True, found))
            rows.append((f"{name}.hook_out", tap, "plain", True, None))

    rows.append(("hook_in", "hook_resid_pre", "plain", True, None))
    rows.append(("hook_resid_pre", "hook_resid_pre", "plain", True, None))
    norm("ln1", "hook_resid_pre")
    read = _read_by("ln1", trace, prefix) or "hook_resid_pre"
    is_read_once = not is_parallel and read != "hook_resid_pre"
    if layer in trace.heads:
        rows.append(("attn.hook_in", read, "plain", is_read_once, None))
        rows.extend(_attention(trace, layer, read))
    elif f"{prefix}conv.hook_in_proj" in trace.taps:
        rows.append(("conv.hook_in", read, "plain", is_read_once, None))
        rows.append(("conv.in.hook_in", read, "plain", False, None))
        extend(_CONVOLUTION)
    elif f"{prefix}linear_attn.hook_qkv" in trace.taps:
        rows += [
            (f"linear_attn.{name}", read, "plain", is_read_once, None)
            for name in ("hook_in", "hook_linear_attn_in")
        ]
        extend(_DELTA_RULE)
    if not is_parallel:
        rows.append(("hook_resid_mid", "hook_resid_mid", "plain", True, None))
        norm("ln2", "hook_resid_mid")
    stream = "ln1.hook_normalized" if is_parallel else "hook_resid_mid"
    read = _read_by("ln2", trace, prefix) or stream
    rows.append(("mlp.hook_in", read, "plain", read != stream, None))
    is_gated = f"{prefix}mlp.hook_pre_linear" in trace.taps
    if f"{prefix}mlp.hook_router_logits" in trace.taps:  # hook_pre and hook_post are TransformerLens' aliases
        rows.append(("mlp.hook_pre", read, "plain", False, None))
        rows += [(f"mlp.{router}.hook_in", read, "plain", False, None) for router in ("gate", "router")]
        extend(_EXPERTS)
        extend(_MLP_OUT[3:])
        return rows
    if is_gated:
        rows.append(("mlp.gate.hook_in", read, "plain", False, None))
    rows.append(("mlp.in.hook_in", read, "plain", False, None))
    extend(_GATED_MLP if is_gated else _MLP)
    extend(_MLP_OUT)
    return rows


def _post_norm_block(trace: Trace, layer: int) -> list[_BlockRow]:
    """The rows of a block whose norms follow each sum, as in BERT: its stream is what the second makes."""
    prefix = f"blocks.{layer}."
    rows: list[_BlockRow] = [
        ("hook_in", "hook_resid_pre", "plain", True, None),
        ("hook_resid_pre", "hook_resid_pre", "plain", True, None),
        ("attn.hook_in", "hook_resid_pre", "plain", False, None),
    ]
    normed = {"attn.hook_out", "hook_attn_out"}  # TransformerLens' attention has the norm in it
    rows += [row for row in _attention(trace, layer, "hook_resid_pre") if row[0] not in normed]
    for name, source, tap in (
        ("ln1", "ln1.hook_in", "ln1.hook_normalized"),
        ("ln2", "ln2.hook_in", "hook_resid_post"),
    ):
        norm = trace.norms[prefix + tap]
        rows.append((f"{name}.hook_in", source, "plain", True, None))
        rows.append((f"{name}.hook_scale", source, "scale", False, norm))
        rows.append((f"{name}.hook_normalized", tap, "normalized", True, norm))
        rows.append((f"{name}.hook_out", tap, "plain", True, None))
    rows += [(name, "ln1.hook_normalized", "plain", True, None) for name in sorted(normed)]
    reads = ["mlp.hook_in", "hook_mlp_in", "mlp.in.hook_in"]
    is_gated = f"{prefix}mlp.hook_pre_linear" in trace.taps
    reads += ["mlp.gate.hook_in"] if is_gated else []
    rows += [(name, "ln1.hook_normalized", "plain", False, None) for name in reads]
    rows += [(*row, None) for row in (*(_GATED_MLP if is_gated else _MLP), *_MLP_OUT[:5])]
    rows.append(("hook_resid_mid", "ln2.hook_in", "plain", True, None))
    rows += [(name, "hook_resid_post", "plain", True, None) for name in ("hook_out", "hook_resid_post")]
    return rows


def _attention(trace: Trace, layer: int, read: str) -> list[_BlockRow]:
    """The rows of a layer's attention, which reads the tap `read`."""
    prefix = f"blocks.{layer}."
    rows: list[_BlockRow] = []
    query = trace.matrices.get(f"{prefix}attn.hook_q")
    if query is not None and len(query.weights) == 1:  # q, k and v are one matrix
        rows.append(("attn.hook_hidden_states", "hook_attn_out", "plain", False, None))
    rows += [(f"attn.{x}.hook_in", read, "plain", False, None) for x in "qkv"]
    rows += [(*row, None) for row in _ATTENTION[:4]]
    for x in "qk":
        found = trace.head_norms.get(f"{prefix}attn.hook_{x}")
        if found is not None:
            tap = f"attn.hook_{x}"
            forms: tuple[Form, ...] = ("head_in", "head_scale", "head_normalized", "head_out")
            if len(found.weight) != trace.heads[layer].spec.d_head:  # one norm for all heads together
                forms = ("plain", "scale", "normalized", "norm_out")
            names = [f"attn.{x}_norm.hook_{what}" for what in ("in", "scale", "normalized", "out")]
            rows += [(name, tap, form, False, found) for name, form in zip(names, forms)]
            rows.append((f"attn.hook_{x}_normed", tap, forms[3], False, found))
    if trace.heads[layer].rope is not None:
        rows.append(("attn.hook_cos", "", "cos", False, None))
        rows.append(("attn.hook_sin", "", "sin", False, None))
    return [*rows, *((*row, None) for row in _ATTENTION[4:])]


def _read_by(name: str, trace: Trace, prefix: str) -> str:
    """The tap of a norm's result that the next matrix reads; "" if the layer has no norm there."""
    found = trace.norms.get(f"{prefix}{name}.hook_normalized")
    return f"{name}.hook_normalized" if found is not None and found.source is not None else ""


def full_name(key: str | tuple[object, ...], n_layers: int) -> str:
    """The full name of a short one, as TransformerLens' `get_act_name`.

    ("q", 3), ("resid_pre", -1), ("scale", 2, "ln1"), ("normalized", None), "k6", "scale4ln1", "embed", or a
    full name, which is left as it is.
    """
    if isinstance(key, str):
        if "." in key or key.startswith("hook_"):
            return key
        parts = re.fullmatch(r"([a-z_]+?)(\d+)([a-z]?.*)", key)
        key = (key,) if parts is None else (parts[1], int(parts[2]), parts[3] or None)
    name, layer, part = (*key, None, None)[:3]
    name = _KINDS.get(str(name), str(name))
    part = _PARTS.get(str(part), part)
    if name in _IN_ATTENTION:
        part = "attn"
    elif name in _IN_MLP:
        part = "mlp"
    elif name in ("scale", "normalized") and layer is None and not part:
        part = "ln_final"
    if isinstance(layer, int) and layer < 0:
        layer += n_layers
    prefix = "" if layer is None else f"blocks.{layer}."
    return prefix + (f"{part}." if part else "") + f"hook_{name}"


def find(name: str, known: Mapping[str, Point]) -> Point:
    """The point of a full name. Raises HookError with near names."""
    point = known.get(name)
    if point is None:
        close = difflib.get_close_matches(name, known, n=3)
        hint = f": did you mean {' or '.join(close)}?" if close else ""
        raise HookError(f"the model has no hook {name!r}{hint}")
    return point


def norm_scale(norm: Norm, x: FloatArray) -> FloatArray:
    """The divisor of a norm's input x [.., width]: [.., 1]. A LayerNorm subtracts the mean first."""
    centred = x - x.mean(axis=-1, keepdims=True) if norm.centers else x
    scale: FloatArray = np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + np.float32(norm.eps))
    return scale


def normalized(norm: Norm, x: FloatArray) -> FloatArray:
    """x [.., width] centred if the norm does that, and divided: before the weight."""
    centred = x - x.mean(axis=-1, keepdims=True) if norm.centers else x
    divided: FloatArray = centred / norm_scale(norm, x)
    return divided


def apply_norm(norm: Norm, x: FloatArray) -> FloatArray:
    """The norm of x [.., width], its weight and bias applied."""
    return scaled(norm, normalized(norm, x))


def scaled(norm: Norm, x: FloatArray) -> FloatArray:
    """A normalized x [.., width] times the weight, and with the bias added."""
    y: FloatArray = x * norm.weight.data
    return y if norm.bias is None else y + norm.bias.data
