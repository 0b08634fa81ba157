"""TransformerLens' names of activations, and their values by kukri's taps.

A tap shows [rows, width], a row a token. A `Point` is one name of TransformerLens: the tap it is read from,
and the form it has there. Both generations of names are listed: those of `TransformerBridge`
(`blocks.0.attn.q.hook_out`) and the older ones of `HookedTransformer` (`blocks.0.attn.hook_q`), which mean
the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import numpy as np

from kukri.dataclass import dataclass, replace
from kukri.errors import HookError, close_matches
from kukri.kernels.arrays import FloatArray
from kukri.models.trace import Matrix, Norm, Step, Trace

Form = Literal[
    "plain",  # [.., width], as the tap has it
    "heads",  # [.., head, d_head]
    "head_inputs",  # [.., head, d_model]: the stream, once for each head that reads it
    "scale",  # [.., 1]: the divisor of a norm
    "normalized",  # [.., width]: divided, before the norm's weight
    "norm_out",  # [.., width]: with the weight and the bias
    "head_in", "head_scale", "head_normalized", "head_out",  # a norm of heads: [batch, head, pos, ..]
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


class _Row(NamedTuple):
    """One name of a block's activation, without the block's prefix, as the tap too."""

    name: str
    tap: str
    form: Form = "plain"
    is_editable: bool = True  # an edit of it means what it says
    norm: Norm | None = None


def _rows(tap: str, *names: str, form: Form = "plain", is_editable: bool = True) -> tuple[_Row, ...]:
    """Return all names of one tap."""
    return tuple(_Row(name, tap, form, is_editable) for name in names)


_QUERY_AND_KEY = (
    *_rows("attn.hook_q", "attn.q.hook_out", "attn.hook_q", form="heads"),
    *_rows("attn.hook_k", "attn.k.hook_out", "attn.hook_k", form="heads"),
)
_ATTENTION = (
    *_rows("attn.hook_v", "attn.v.hook_out", "attn.hook_v", form="heads"),
    *_rows("attn.hook_rot_q", "attn.hook_rot_q", form="heads"),
    *_rows("attn.hook_rot_k", "attn.hook_rot_k", form="heads"),
    *_rows("attn.hook_rot_q", "attn.hook_attn_scores", form="scores"),
    *_rows("attn.hook_rot_q", "attn.hook_pattern", form="pattern"),
    *_rows("attn.hook_z", "attn.o.hook_in", "attn.hook_z", form="heads"),
    *_rows("attn.hook_ungated_z", "attn.hook_ungated_z", form="heads"),
    *_rows("attn.hook_latent_z", "attn.hook_latent_z", form="heads"),
    *_rows("attn.hook_gate", "attn.hook_q_gate"),
    *_rows("attn.hook_z", "attn.hook_result", form="result", is_editable=False),
    *_rows("hook_attn_out", "attn.o.hook_out", "attn.hook_out", "hook_attn_out"),
)
_MLP = _rows("mlp.hook_pre", "mlp.in.hook_out", "mlp.hook_pre")
_GATED_MLP = (
    *_rows("mlp.hook_pre", "mlp.gate.hook_out", "mlp.hook_pre"),
    *_rows("mlp.hook_pre_linear", "mlp.in.hook_out", "mlp.hook_pre_linear"),
)
_MLP_END = (
    *_rows("mlp.hook_post", "mlp.out.hook_in", "mlp.hook_post"),
    *_rows("hook_mlp_out", "mlp.out.hook_out", "mlp.hook_out", "hook_mlp_out"),
)
_ROUTERS = ("mlp", "mlp.gate", "mlp.router")  # where TransformerLens' classes have the router
_EXPERTS = (
    *_rows("mlp.hook_router_logits", "mlp.hook_router_logits", "mlp.gate.hook_out", "mlp.router.hook_out"),
    *_rows("mlp.hook_expert_weights", *(f"{router}.hook_expert_weights" for router in _ROUTERS)),
    *_rows(
        "mlp.hook_expert_weights",
        *(f"{router}.hook_expert_indices" for router in _ROUTERS),
        form="expert_indices",
        is_editable=False,
    ),
    *_rows("mlp.hook_expert_weights", "mlp.hook_router_scores", form="expert_scores", is_editable=False),
    *_rows("mlp.experts.hook_pre", "mlp.experts.hook_pre"),
    *_rows("mlp.experts.hook_pre_linear", "mlp.experts.hook_pre_linear"),
    *_rows("mlp.experts.hook_post", "mlp.experts.hook_post"),
    *_rows("hook_mlp_out", "mlp.hook_post", "mlp.hook_out", "hook_mlp_out"),
)
_CONVOLUTION = (
    *_rows("conv.hook_in_proj", "conv.in.hook_out", "conv.hook_in_proj"),
    *_rows("conv.hook_conv_in", "conv.hook_conv_in"),
    *_rows("conv.hook_conv_out", "conv.hook_conv_out"),
    *_rows("conv.hook_gated", "conv.out.hook_in", "conv.hook_gated"),
    *_rows("hook_mixer_out", "conv.out.hook_out", "conv.hook_out", "hook_mixer_out"),
)
_DELTA_RULE = (
    *_rows("linear_attn.hook_qkv", "linear_attn.hook_qkv"),
    *_rows("linear_attn.hook_read", "linear_attn.hook_read"),
    *_rows(
        "hook_mixer_out",
        *(f"linear_attn.{name}" for name in ("hook_out", "hook_linear_attn_out", "hook_ssm_out")),
        "hook_mixer_out",
    ),
)
_BLOCK_OUT = _rows("hook_resid_post", "hook_out", "hook_resid_post")
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
    norm: Norm | None = None  # for the forms that need one
    matrix: Matrix | None = None  # multiplies the tap first, for a product that no tap shows
    steps: tuple[Step, ...] = ()  # for heads' inputs: what makes a query, key or value of one
    # for scores and patterns: the layer whose keys and values it reads, and the tap of these values
    kv_layer: int | None = None
    values_tap: str = ""
    then: tuple[Point, ...] = ()  # for heads' inputs: points that the first heads of its value are also for

    @property
    def needs(self) -> tuple[str, ...]:
        """The taps that its value is computed from."""
        if self.form in ("scores", "pattern"):
            return self.tap, f"blocks.{self.kv_layer}.attn.hook_rot_k"
        return (self.tap,) if self.tap else ()

    @property
    def edit_needs(self) -> tuple[str, ...]:
        """The taps that a hook on it needs besides `edit_tap`, all before that."""
        if self.form in ("scores", "pattern"):
            return *self.needs, self.values_tap
        return () if self.tap == self.edit_tap else self.needs


def points(trace: Trace, n_layers: int) -> dict[str, Point]:
    """Every point of a model by its name, in the order of a step."""
    taps = set(trace.taps)
    found: dict[str, Point] = {}

    def add(of_a_part: Iterable[Point]) -> None:
        found.update((point.name, point) for point in of_a_part if not point.tap or point.tap in taps)

    add(_embedding_points(trace))
    for layer in range(n_layers):
        add(_block_points(trace, layer))
        add(_product_points(trace, layer))
        add(_head_input_points(trace, layer))
        for tap in trace.taps:  # a tap that the tables do not know keeps its name
            if tap.startswith(f"blocks.{layer}.") and tap not in found:
                add([Point(tap.replace("hook_normalized", "hook_out"), tap, "plain", layer, tap)])
    add(_final_points(trace))
    return found


def _embedding_points(trace: Trace) -> Iterator[Point]:
    yield Point(TOKENS, "", "tokens")
    first = "embed_ln.hook_out" if "hook_embed" in trace.norms else "embed.hook_out"
    for name in (first, "hook_embed"):
        yield Point(name, "hook_embed", "plain", edit_tap="hook_embed")
    if any(heads.rope is not None for heads in trace.heads.values()):
        yield Point("rotary_emb.hook_in", "hook_embed", "plain")
        yield Point("rotary_emb.hook_cos", "", "cos")
        yield Point("rotary_emb.hook_sin", "", "sin")


def _final_points(trace: Trace) -> Iterator[Point]:
    """The points of the last norm and of the logits."""
    norm = trace.norms.get(FINAL)
    if norm is not None and norm.source is not None:
        yield Point("ln_final.hook_in", norm.source, "plain")
        yield Point("ln_final.hook_scale", norm.source, "scale", norm=norm)
        yield Point("ln_final.hook_normalized", norm.source, "normalized", edit_tap=FINAL, norm=norm)
        for name in ("ln_final.hook_out", "unembed.hook_in"):
            yield Point(name, norm.source, "norm_out", edit_tap=FINAL, norm=norm)
    for name in (LOGITS, "hook_unembed"):
        yield Point(name, "", "logits", edit_tap=LOGITS)


def _block_points(trace: Trace, layer: int) -> Iterator[Point]:
    """The points of a layer that the tables list."""
    prefix = f"blocks.{layer}."
    block = _post_norm_block if f"{prefix}ln2.hook_in" in trace.taps else _block
    for name, tap, form, is_editable, norm in block(trace, layer):
        full_tap = f"{prefix}{tap}" if tap else ""
        edit_tap = full_tap if is_editable else ""
        kv_layer, values_tap = None, ""
        if form in ("scores", "pattern"):
            reads = trace.heads[layer].spec.reads
            kv_layer = layer if reads is None else reads
            values_tap = trace.heads[kv_layer].values_tap or ""
            mixed = (f"{prefix}attn.hook_{name}" for name in ("ungated_z", "latent_z", "z"))
            edit_tap = next(tap for tap in mixed if tap in trace.taps)
        elif form == "result" and f"{prefix}hook_attn_out" not in trace.matrices:
            continue  # a norm may stand between the heads' matrix and the stream
        read_tap = norm.source if form == "normalized" and norm is not None else full_tap
        if read_tap is not None:
            full = f"{prefix}{name}"
            yield Point(full, read_tap, form, layer, edit_tap, norm, kv_layer=kv_layer, values_tap=values_tap)


def _product_points(trace: Trace, layer: int) -> Iterator[Point]:
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
                yield Point(f"{prefix}{ln}_post.hook_out", tapped, "plain", layer, tapped)
        for name, form, of_norm in rows:
            yield Point(prefix + name, matrix.source, form, layer, "", of_norm, matrix)


def _head_input_points(trace: Trace, layer: int) -> Iterator[Point]:
    """Inputs of each head's query, key and value, before the norm; an edit recomputes these."""
    prefix = f"blocks.{layer}."
    found: dict[str, Point] = {}
    for x in "qkv":
        edit_tap = f"{prefix}attn.hook_{x}"
        if edit_tap not in trace.paths:
            continue
        tap, steps = trace.paths[edit_tap]
        norm = trace.norms.get(tap)
        if norm is not None:
            tap, steps = norm.source or "", (norm, *steps)
        if tap:
            name = f"hook_{x}_input"
            found[x] = Point(f"{prefix}attn.{name}", tap, "head_inputs", layer, edit_tap, steps=steps)
            yield from (found[x], replace(found[x], name=prefix + name))
    if len(found) == 3:  # one input for all three: grouped keys and values have the first copies
        for name in (f"{prefix}attn.hook_attn_in", f"{prefix}hook_attn_in"):
            yield replace(found["q"], name=name, then=(found["k"], found["v"]))


def _block(trace: Trace, layer: int) -> list[_Row]:
    """The rows of a layer whose norms precede what reads the stream, or that has none."""
    prefix = f"blocks.{layer}."
    is_parallel = f"{prefix}hook_resid_mid" not in trace.taps
    rows = [
        *_rows("hook_resid_pre", "hook_in", "hook_resid_pre"),
        *_norm(trace, prefix, "ln1", "hook_resid_pre"),
    ]
    read = _read_by("ln1", trace, prefix) or "hook_resid_pre"
    is_read_once = not is_parallel and read != "hook_resid_pre"
    if layer in trace.heads:
        rows += _rows(read, "attn.hook_in", is_editable=is_read_once)
        rows += _attention(trace, layer, read)
    elif f"{prefix}conv.hook_in_proj" in trace.taps:
        rows += _rows(read, "conv.hook_in", is_editable=is_read_once)
        rows += _rows(read, "conv.in.hook_in", is_editable=False)
        rows += _CONVOLUTION
    elif f"{prefix}linear_attn.hook_qkv" in trace.taps:
        reads = ("linear_attn.hook_in", "linear_attn.hook_linear_attn_in")
        rows += _rows(read, *reads, is_editable=is_read_once)
        rows += _DELTA_RULE
    if not is_parallel:
        rows += _rows("hook_resid_mid", "hook_resid_mid")
        rows += _norm(trace, prefix, "ln2", "hook_resid_mid")
    elif f"{prefix}ln2.hook_normalized" in trace.norms:  # another norm of the same stream
        rows += _norm(trace, prefix, "ln2", "hook_resid_pre")
    stream = "ln1.hook_normalized" if is_parallel else "hook_resid_mid"
    read = _read_by("ln2", trace, prefix) or stream
    rows += _rows(read, "mlp.hook_in", is_editable=read != stream)
    if f"{prefix}mlp.hook_router_logits" in trace.taps:  # hook_pre and hook_post are TransformerLens' aliases
        rows += _rows(read, "mlp.hook_pre", "mlp.gate.hook_in", "mlp.router.hook_in", is_editable=False)
        rows += _EXPERTS
    elif f"{prefix}mlp.hook_pre_linear" in trace.taps:
        rows += _rows(read, "mlp.gate.hook_in", "mlp.in.hook_in", is_editable=False)
        rows += _GATED_MLP + _MLP_END
    else:
        rows += _rows(read, "mlp.in.hook_in", is_editable=False)
        rows += _MLP + _MLP_END
    return [*rows, *_BLOCK_OUT]


def _norm(trace: Trace, prefix: str, name: str, source: str) -> list[_Row]:
    """The rows of a norm of the tap `source`; none if the layer lacks it."""
    norm = trace.norms.get(f"{prefix}{name}.hook_normalized")
    if norm is None or norm.source is None:
        return []
    return [
        _Row(f"{name}.hook_in", source, is_editable=False),
        *_normed(name, source, f"{name}.hook_normalized", norm),
    ]


def _normed(name: str, source: str, tap: str, norm: Norm) -> list[_Row]:
    """Return the rows of a norm of `source` whose result is `tap`."""
    return [
        _Row(f"{name}.hook_scale", source, "scale", False, norm),
        _Row(f"{name}.hook_normalized", tap, "normalized", True, norm),
        _Row(f"{name}.hook_out", tap),
    ]


def _post_norm_block(trace: Trace, layer: int) -> list[_Row]:
    """Return the rows of a block whose norms follow each sum, as in BERT: the second gives its stream."""
    prefix = f"blocks.{layer}."
    rows = [
        *_rows("hook_resid_pre", "hook_in", "hook_resid_pre"),
        *_rows("hook_resid_pre", "attn.hook_in", is_editable=False),
    ]
    normed = ("attn.hook_out", "hook_attn_out")  # TransformerLens' attention has the norm in it
    rows += [row for row in _attention(trace, layer, "hook_resid_pre") if row.name not in normed]
    for name, tap in (("ln1", "ln1.hook_normalized"), ("ln2", "hook_resid_post")):
        source = f"{name}.hook_in"
        rows += [_Row(source, source), *_normed(name, source, tap, trace.norms[prefix + tap])]
    rows += _rows("ln1.hook_normalized", *normed)
    reads = ["mlp.hook_in", "hook_mlp_in", "mlp.in.hook_in"]
    is_gated = f"{prefix}mlp.hook_pre_linear" in trace.taps
    reads += ["mlp.gate.hook_in"] if is_gated else []
    rows += _rows("ln1.hook_normalized", *reads, is_editable=False)
    rows += (_GATED_MLP if is_gated else _MLP) + _MLP_END
    return [*rows, *_rows("ln2.hook_in", "hook_resid_mid"), *_BLOCK_OUT]


def _attention(trace: Trace, layer: int, read: str) -> list[_Row]:
    """The rows of a layer's attention, which reads the tap `read`."""
    prefix = f"blocks.{layer}."
    rows: list[_Row] = []
    query = trace.matrices.get(f"{prefix}attn.hook_q")
    stores = trace.heads[layer].spec.reads is None
    if stores and query is not None and len(query.weights) == 1:  # q, k and v are one matrix
        rows += _rows("hook_attn_out", "attn.hook_hidden_states", is_editable=False)
    rows += _rows(read, *(f"attn.{x}.hook_in" for x in ("qkv" if stores else "q")), is_editable=False)
    rows += _QUERY_AND_KEY
    for x in "qk":
        found = trace.head_norms.get(f"{prefix}attn.hook_{x}")
        if found is not None:
            tap = f"attn.hook_{x}"
            forms: tuple[Form, ...] = ("head_in", "head_scale", "head_normalized", "head_out")
            if len(found.weight) != trace.heads[layer].spec.d_head:  # one norm for all heads together
                forms = ("plain", "scale", "normalized", "norm_out")
            names = [f"attn.{x}_norm.hook_{what}" for what in ("in", "scale", "normalized", "out")]
            rows += [_Row(name, tap, form, False, found) for name, form in zip(names, forms)]
            rows.append(_Row(f"attn.hook_{x}_normed", tap, forms[3], False, found))
    if trace.heads[layer].rope is not None:
        rows += _rows("", "attn.hook_cos", form="cos", is_editable=False)
        rows += _rows("", "attn.hook_sin", form="sin", is_editable=False)
    return [*rows, *_ATTENTION]


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
        raise HookError(f"the hook {name!r} was not found{close_matches(name, known)}")
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
