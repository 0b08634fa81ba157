"""`ActivationCache`: the activations of a run by TransformerLens' names, and its methods on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kukri.config import ModelConfig
from kukri.errors import HookError, RequestError
from kukri.interp.hooks.hook_names import POS_AXIS, Form, Point, apply_norm, find, full_name
from kukri.interp.hooks.hook_values import Model, Rows, Taps
from kukri.kernels.arrays import FloatArray, IntArray

PosSlice = int | slice | None | list[int]


class ActivationCache(Mapping[str, Any]):
    """Values of a run by name: float32 NumPy arrays [batch, pos, ...], padded on the right with zeros.

    `cache["blocks.3.attn.hook_q"]`, `cache["q", 3]` and `cache["q3"]` are the same. It holds the values of
    taps, and computes all others from them when asked. `lengths` has the tokens of each text; `tokens`
    [batch, pos] the ids. Arrays are NumPy's, which `torch.from_dlpack` takes without a copy.

    A cache can be pickled. The unpickled cache has the values of its names but no model, so methods
    that need weights raise RequestError.
    """

    def __init__(
        self,
        model: Model | _KeptValues,
        taps: dict[str, FloatArray],
        rows: Rows,
        ids: IntArray,
        names: list[str],
    ) -> None:
        self._model, self._taps, self._rows, self._ids, self._names = model, taps, rows, ids, names
        self.has_batch_dim = True

    @property
    def lengths(self) -> IntArray:
        """Tokens of each text, [batch]."""
        return self._rows.lengths

    @property
    def tokens(self) -> IntArray:
        """Token ids [batch, pos]."""
        return self._rows.padded(self._ids)  # type: ignore[arg-type,return-value]

    def __getitem__(self, key: Any) -> Any:
        """The activations of a name. Raises KeyError if they were not captured, HookError on others."""
        model = self._model
        point = find(full_name(key, model.config.n_layers), model.points)
        if not model.has(point, self._taps):
            raise KeyError(f"{point.name!r} was not captured: add it to 'names'")
        value = model.value(point, self._taps, self._rows, self._ids)
        return value if self.has_batch_dim or point.form in ("cos", "sin") else value[0]

    def form(self, name: str) -> Form:
        """The form of a full name's activations, from which its shape follows."""
        return find(name, self._model.points).form

    def __contains__(self, key: object) -> bool:
        """True if the value was captured, or can be computed from captured values."""
        try:
            name = full_name(key, self._model.config.n_layers)  # type: ignore[arg-type]
            return self._model.has(find(name, self._model.points), self._taps)
        except (HookError, TypeError):
            return False

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        """Names that were asked for."""
        return len(self._names)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the values of its names, as rows, and of the model only the configuration."""
        model, rows, kept = self._model, self._rows, dict[Any, str]()
        for name in filter(self.__contains__, self):
            kept.setdefault(_source(model.points[name]), name)
        points = {
            point.name: Point(point.name, kept[_source(point)], point.form, point.layer)
            for point in model.points.values()
            if _source(point) in kept
        }
        values = {}
        for name in kept.values():
            point = model.points[name]
            x = np.moveaxis(model.value(point, self._taps, rows, self._ids), POS_AXIS.get(point.form, 1), 1)
            values[name] = rows.rows(
                np.broadcast_to(x, (rows.n_batch, *x.shape[1:]))
            )  # angles are of all texts
        parts = values, rows.lengths, self._ids, self._names, self.has_batch_dim
        return _restored, (_KeptValues(model.config, points), *parts)

    def __copy__(self) -> ActivationCache:
        return self._with(self._taps, self._rows, self._ids, has_batch_dim=self.has_batch_dim)

    def __deepcopy__(self, memo: Any) -> ActivationCache:
        taps = {tap: x.copy() for tap, x in self._taps.items()}
        return self._with(taps, self._rows, self._ids, has_batch_dim=self.has_batch_dim)

    def __repr__(self) -> str:
        return f"ActivationCache({len(self)} names, {self._rows.n_batch} x {self._rows.n_tokens} tokens)"

    def remove_batch_dim(self) -> ActivationCache:
        """Removes the batch dimension. Raises RequestError if there is more than one text."""
        if self._rows.n_batch > 1:
            raise RequestError(f"'remove_batch_dim' requires a batch of one text, not {self._rows.n_batch}")
        return self._with(self._taps, self._rows, self._ids, has_batch_dim=False)

    def apply_slice_to_batch_dim(self, batch_slice: int | slice) -> ActivationCache:
        """Return the cache of some of the texts; an index gives one text, without the batch dimension."""
        is_one = not isinstance(batch_slice, slice)
        chosen = np.arange(self._rows.n_batch)[batch_slice].reshape(-1)
        ends = np.cumsum(self.lengths)
        at = np.concatenate([np.arange(ends[i] - self.lengths[i], ends[i]) for i in chosen])
        taps = {  # experts have several rows a token
            tap: x.reshape(self._rows.n_rows, -1, *x.shape[1:])[at].reshape(-1, *x.shape[1:])
            for tap, x in self._taps.items()
        }
        spans = [self._rows.spans[i] for i in chosen.tolist()] if self._rows.spans else []
        rows = Rows(self.lengths[chosen], spans)
        return self._with(taps, rows, self._ids[at], has_batch_dim=not is_one)

    def _with(
        self, taps: dict[str, FloatArray], rows: Rows, ids: IntArray, *, has_batch_dim: bool
    ) -> ActivationCache:
        made = ActivationCache(self._model, taps, rows, ids, self._names)
        made.has_batch_dim = has_batch_dim
        return made

    def accumulated_resid(
        self,
        layer: int | None = None,
        incl_mid: bool = False,
        apply_ln: bool = False,
        pos_slice: PosSlice = None,
        mlp_input: bool = False,
        return_labels: bool = False,
    ) -> Any:
        """The residual stream before each layer up to `layer`, [components, batch, pos, D]; None: to the end.

        `incl_mid` adds the stream between attention and MLP, `mlp_input` the MLP's input in `layer` itself.
        `apply_ln` applies the norm that reads the stream at `layer`: the final norm whole, with each
        component's own scale; another divides by the scale it had. With `return_labels`, (stack, labels).
        """
        n_layers = self._model.config.n_layers
        layer = self._layer(layer)
        parts: dict[str, FloatArray] = {}  # by label
        for i in range(layer + 1):
            if i == n_layers:
                parts["final_post"] = self["resid_post", n_layers - 1]
                continue
            parts[f"{i}_pre"] = self["resid_pre", i]
            if (incl_mid and i < layer) or (mlp_input and i == layer):
                parts[f"{i}_mid"] = self["resid_mid", i]
        stack = np.stack([_at(x, pos_slice) for x in parts.values()])
        if apply_ln and layer == n_layers:
            stack = apply_norm(self._final_norm, stack)
        elif apply_ln:
            stack = self.apply_ln_to_stack(stack, layer, mlp_input=mlp_input, pos_slice=pos_slice)
        return (stack, [*parts]) if return_labels else stack

    def decompose_resid(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        mode: str = "all",
        apply_ln: bool = False,
        pos_slice: PosSlice = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
    ) -> Any:
        """The summands of the stream before `layer`: embedding, attentions or recurrent layers, MLPs.

        [components, batch, pos, D]; they sum to the stream. `mode` "attn" or "mlp" leaves the others out.
        """
        self._check_sum()
        if mode not in ("all", "attn", "mlp"):
            raise RequestError.of("mode", f"must be all, attn or mlp, not {mode!r}")
        layer = self._layer(layer)
        parts = {"embed": self["embed"]} if incl_embeds else {}  # by label
        for i in range(layer):
            for part, name in (("attn", self._mixer(i)), ("mlp", "mlp_out")):
                if mode in ("all", part):
                    parts[f"{i}_{name}"] = self[name, i]
        if mlp_input and mode in ("all", "attn"):
            parts[f"{layer}_{self._mixer(layer)}"] = self[self._mixer(layer), layer]
        stack = np.stack([_at(x, pos_slice) for x in parts.values()])
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, layer, mlp_input=mlp_input, pos_slice=pos_slice)
        return (stack, [*parts]) if return_labels else stack

    def _stack(
        self,
        parts: list[FloatArray],
        labels: list[str],
        layer: int,
        pos_slice: PosSlice,
        incl_remainder: bool,
        apply_ln: bool,
    ) -> FloatArray:
        """Return the summands of the stream before `layer`, and on request the remainder."""
        if incl_remainder:
            at = ("resid_post", layer - 1) if layer else ("resid_pre", 0)
            stream = _at(self[at], pos_slice)
            parts.append((stream - sum(part.sum(axis=0) for part in parts))[None])
            labels.append("remainder")
        if not parts:
            raise RequestError.of("layer", f"must be above {layer}, because no layer before has such parts")
        stack = np.concatenate(parts)
        return self.apply_ln_to_stack(stack, layer, pos_slice=pos_slice) if apply_ln else stack

    def stack_activation(
        self, name: str, layer: int | None = None, sublayer_type: str | None = None
    ) -> FloatArray:
        """The activations of a short name, of each layer before `layer`: [layer, batch, pos, ...]."""
        keys = [(name, i, sublayer_type) for i in range(self._layer(layer))]
        return np.stack([self[key] for key in keys])

    def stack_head_results(
        self,
        layer: int | None = None,
        return_labels: bool = False,
        incl_remainder: bool = False,
        pos_slice: PosSlice = None,
        apply_ln: bool = False,
    ) -> Any:
        """The summand of each head of the layers before `layer`: [layer * head, batch, pos, D].

        Labels are L0H0, L0H1 and so on. `incl_remainder` adds the rest of the stream: MLPs, embedding,
        biases.
        """
        self._check_sum()
        layer = self._layer(layer)
        parts: list[FloatArray] = []
        labels: list[str] = []
        model = self._model
        for i in range(layer):
            if i not in model.trace.heads:
                continue
            z = _at(self["z", i], pos_slice, from_end=3)
            if f"blocks.{i}.hook_attn_out" not in model.trace.matrices:
                raise RequestError(
                    f"splitting layer {i} into heads is not supported: a norm lies between the heads and "
                    "the stream"
                )
            w_o = model.weights.layer("W_O", i)  # [H, K, D]
            parts.append(np.einsum("...hk,hkd->h...d", z, w_o, optimize=True))
            labels += [f"L{i}H{head}" for head in range(len(w_o))]
        stack = self._stack(parts, labels, layer, pos_slice, incl_remainder, apply_ln)
        return (stack, labels) if return_labels else stack

    def get_full_resid_decomposition(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        expand_neurons: bool = False,
        apply_ln: bool = False,
        pos_slice: PosSlice = None,
        return_labels: bool = False,
    ) -> Any:
        """The stream before `layer` as heads, recurrent layers, MLPs, embedding and the biases of attention,
        which sum to it. With `expand_neurons` (which takes D floats a neuron and position) MLPs are neurons,
        and their biases join those of attention.
        """
        layer = self._layer(layer)
        stack, labels = self.stack_head_results(layer + mlp_input, pos_slice=pos_slice, return_labels=True)
        parts = [stack]
        with_heads = [i for i in range(layer + mlp_input) if i in self._model.trace.heads]
        for i in range(layer + mlp_input):
            names = [] if i in with_heads else ["mixer_out"]
            for name in [*names, "mlp_out"] if i < layer and not expand_neurons else names:
                parts.append(_at(self[name, i], pos_slice)[None])
                labels.append(f"{i}_{name}")
        if expand_neurons:
            stack, names = self.stack_neuron_results(layer, pos_slice, return_labels=True)
            parts.append(stack)
            labels += names
        parts.append(_at(self["embed"], pos_slice)[None])
        weights = self._model.weights
        biases = sum((weights.layer("b_O", i) for i in with_heads), np.float32(0))
        if expand_neurons:
            biases = sum((weights.layer("b_out", i) for i in range(layer)), biases)
        parts.append(np.broadcast_to(biases, parts[-1].shape))
        stack = np.concatenate(parts).astype(np.float32)
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, layer, mlp_input=mlp_input, pos_slice=pos_slice)
        return (stack, [*labels, "embed", "bias"]) if return_labels else stack

    def get_neuron_results(
        self, layer: int, neuron_slice: Any = None, pos_slice: PosSlice = None
    ) -> FloatArray:
        """The summand of each neuron of a layer's MLP: [batch, pos, neuron, D]."""
        post = _at(self["post", layer], pos_slice)
        w_out = self._model.weights.layer("W_out", layer)
        chosen = slice(None) if neuron_slice is None else neuron_slice
        results: FloatArray = post[..., chosen][..., None] * w_out[chosen]
        return results

    def stack_neuron_results(
        self,
        layer: int | None = None,
        pos_slice: PosSlice = None,
        neuron_slice: Any = None,
        return_labels: bool = False,
        incl_remainder: bool = False,
        apply_ln: bool = False,
    ) -> Any:
        """The summand of each neuron of the MLPs before `layer`: [layer * neuron, batch, pos, D].

        Labels are L0N0, L0N1 and so on. `incl_remainder` adds the rest of the stream: attention,
        embedding, biases, neurons that `neuron_slice` leaves out. Raises RequestError if the stream is no sum
        of neurons: mixtures, norms after the MLP.
        """
        self._check_sum()
        layer = self._layer(layer)
        parts: list[FloatArray] = []
        labels: list[str] = []
        for i in range(layer):
            if f"blocks.{i}.hook_mlp_out" not in self._model.trace.matrices:
                raise RequestError(
                    f"splitting layer {i} into neurons is not supported: it adds no sum of neurons to the "
                    "stream"
                )
            parts.append(np.moveaxis(self.get_neuron_results(i, neuron_slice, pos_slice), -2, 0))
            numbers = np.arange(self._model.weights.layer("W_out", i).shape[0])
            chosen = numbers if neuron_slice is None else np.atleast_1d(numbers[neuron_slice])
            labels += [f"L{i}N{number}" for number in chosen]
        stack = self._stack(parts, labels, layer, pos_slice, incl_remainder, apply_ln)
        return (stack, labels) if return_labels else stack

    def apply_ln_to_stack(
        self,
        residual_stack: FloatArray,
        layer: int | None = None,
        mlp_input: bool = False,
        pos_slice: PosSlice = None,
    ) -> FloatArray:
        """Components [..., batch, pos, D] divided by the scale that the norm before `layer` had.

        A LayerNorm's centring is applied. The norm's weight is not: see `logit_attrs`.
        """
        self._check_sum()
        n_layers, trace = self._model.config.n_layers, self._model.trace
        layer = self._layer(layer)
        part = "ln_final" if layer == n_layers else f"blocks.{layer}.ln{2 if mlp_input else 1}"
        scale = _at(self[f"{part}.hook_scale"], pos_slice)
        if trace.norms[f"{part}.hook_normalized"].centers:
            residual_stack = residual_stack - residual_stack.mean(axis=-1, keepdims=True)
        divided: FloatArray = residual_stack / scale
        return divided

    def logit_attrs(
        self,
        residual_stack: FloatArray,
        tokens: Any,
        incorrect_tokens: Any = None,
        pos_slice: PosSlice = None,
    ) -> FloatArray:
        """The share of each component in the logits of `tokens`, or to their lead over `incorrect_tokens`.

        [components, batch, pos]. Tokens are ids [batch] or [batch, pos], one id, or the text of one token.
        The final norm's scale and weight are applied, so the parts of a decomposition sum to the logits (less
        the bias of a LayerNorm and of the head), as in TransformerLens with the norm folded into the
        unembedding.
        """
        directions = self._directions(tokens)
        if incorrect_tokens is not None:
            directions = directions - self._directions(incorrect_tokens)
        scaled = self.apply_ln_to_stack(residual_stack, pos_slice=pos_slice) * self._final_norm.weight.data
        if self.has_batch_dim and scaled.ndim == 4 and directions.ndim == 2:
            directions = directions[:, None]  # a token for all positions of a text
        attributed: FloatArray = (scaled * directions).sum(axis=-1)
        return attributed

    def logit_lens(
        self,
        layer: int | None = None,
        pos_slice: PosSlice = -1,
        translators: Sequence[tuple[FloatArray, FloatArray]] | None = None,
    ) -> FloatArray:
        """Logits of the stream before each layer, by the final norm and the head: [layer, batch, V].

        Of the last position; with another `pos_slice` than an index [layer, batch, pos, V]. They are capped
        or divided as the model's logits are. `translators` belong to a tuned lens (Belrose et al. 2023):
        (weight [D, D], bias [D]) of each layer, whose x W^T + b is added to the stream before it.
        """
        stack = self.accumulated_resid(layer, pos_slice=pos_slice)
        for i, (weight, bias) in enumerate(translators or ()):
            if i < len(stack):
                stack[i] += stack[i] @ weight.T + bias
        weights = self._model.weights
        logits: FloatArray = apply_norm(self._final_norm, stack) @ weights.W_U + weights.b_U
        return self._model.adjust_logits(logits)

    def to_transformer_lens(self, model: Any) -> Any:
        """TransformerLens' ActivationCache of the same arrays, for its `model`. Needs that package."""
        import torch
        from transformer_lens import ActivationCache as TheirCache

        arrays = {name: torch.from_numpy(np.array(self[name])) for name in self}
        return TheirCache(arrays, model, has_batch_dim=self.has_batch_dim)

    @property
    def _final_norm(self) -> Any:
        return self._model.trace.norms["ln_final.hook_normalized"]

    def _check_sum(self) -> None:
        """Raises RequestError if the stream is not the sum of the layers' outputs."""
        if "blocks.0.ln2.hook_in" in self._model.trace.taps:
            raise RequestError("splitting the stream is not supported where norms follow each sum")

    def _mixer(self, layer: int) -> str:
        """Return the name of a layer's output before its MLP: attn_out, or mixer_out of a recurrent layer."""
        return "attn_out" if layer in self._model.trace.heads else "mixer_out"

    def _layer(self, layer: int | None) -> int:
        n_layers = self._model.config.n_layers
        if layer is None or layer == -1:
            return n_layers
        if not 0 <= layer <= n_layers:
            raise RequestError.of("layer", f"must be from 0 to {n_layers}, not {layer}")
        return layer

    def _directions(self, tokens: Any) -> FloatArray:
        """Rows of the unembedding [..., D]."""
        if isinstance(tokens, str):
            ids = self._model.encode(tokens, False)
            if len(ids) != 1:
                raise RequestError(f"{tokens!r} must be one token, not {len(ids)}", param="tokens")
            tokens = ids[0]
        found = self._model.weights.unembedding_rows(np.asarray(tokens))
        return found


class _KeptValues:
    """Replaces the model in an unpickled cache, whose taps are the values of names, as rows."""

    def __init__(self, config: ModelConfig, points: Mapping[str, Point]) -> None:
        self.config, self.points = config, points

    def has(self, point: Point, taps: Taps) -> bool:
        return point.tap in taps

    def value(self, point: Point, taps: Taps, rows: Rows, ids: IntArray) -> FloatArray:
        found, longest = rows.padded(taps[point.tap]), int(rows.lengths.argmax())
        if point.form in ("cos", "sin"):
            return found[longest : longest + 1]
        found = np.moveaxis(found, 1, POS_AXIS.get(point.form, 1))
        return found[..., : rows.n_tokens] if point.form in ("scores", "pattern") else found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RequestError(
            "this requires the model's weights, which a pickled cache does not have: compute it where the "
            "model is loaded"
        )


def _restored(
    model: _KeptValues,
    values: dict[str, FloatArray],
    lengths: IntArray,
    ids: IntArray,
    names: list[str],
    has_batch_dim: bool,
) -> ActivationCache:
    """Return a cache from its pickled parts."""
    found = ActivationCache(model, values, Rows(lengths), ids, names)
    found.has_batch_dim = has_batch_dim
    return found


def _source(point: Point) -> tuple[Any, ...]:
    """Return the key of a point's computation, which all names of one value share."""
    return point.tap, point.form, point.layer, id(point.norm), id(point.matrix)


def _at(x: FloatArray, pos_slice: PosSlice, from_end: int = 2) -> FloatArray:
    """The positions of x [..., pos, D]; an index takes the dimension away. `from_end` says where pos is."""
    if pos_slice is None:
        return x
    chosen = (..., pos_slice, *[slice(None)] * (from_end - 1))
    return x[chosen]
