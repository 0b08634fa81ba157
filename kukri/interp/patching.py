"""Activation patching and ablation: how a metric changes if one activation comes from another run.

A cell of a sweep is one such run. The unpatched text is run once. A cell then computes only the layers and
the tokens from its own on, with the stream and the cached keys and values of the unpatched run before them.
The cells of a layer are sequences of one batch. Names are as in `transformer_lens.patching`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol, get_args

import numpy as np

from kukri.dataclass import dataclass
from kukri.errors import RequestError
from kukri.interp.cache import ActivationCache
from kukri.interp.hooks.hook_values import Rows
from kukri.interp.memory_batches import most_that_fit
from kukri.interp.session import Session
from kukri.interp.text_runner import Piece
from kukri.kernels.arrays import FloatArray, IntArray

Axes = Literal["layer pos", "layer head", "layer pos head"]
Metric = Callable[[FloatArray], Any]
_STEP_TOKENS, _STEP_CELLS = 512, 64  # cells that run at a time, if memory has room for them


class HasInterp(Protocol):
    """An LLM."""

    @property
    def interp(self) -> Session:
        """The session of the model."""


def sweep(
    llm: HasInterp,
    tokens: Any,
    metric: Metric,
    name: str,
    values: Callable[[int], FloatArray],
    axes: Axes = "layer pos",
    *,
    logits: Literal["all", "last"] = "all",
    layers: Sequence[int] | None = None,
    progress: bool = False,
) -> FloatArray:
    """The metric of each cell, float32 [layer, pos], [layer, head] or [layer, pos, head].

    In a cell, the activation `name` (a short one: resid_pre, resid_mid, resid_post, attn_out, mlp_out, z, q,
    k, v, pattern) of that layer, position and head is that of `values(layer)`, an array of TransformerLens'
    shape. Texts of `tokens` [batch, pos] must be of one length. `metric(logits)` gets [batch, pos, V]; with
    `logits` "last" only the last position is computed: [batch, 1, V]. `layers` None is all; `progress` shows
    a bar on a terminal.
    """
    wanted = range(llm.interp.config.n_layers) if layers is None else layers
    run = _Sweep(llm.interp, tokens, name, axes, logits, wanted)
    with run.session.alone():
        run.prepare()
        return np.array(
            [run.layer(layer, values(layer), metric) for layer in _shown(wanted, name, progress)], np.float32
        )


def ablate(
    llm: HasInterp,
    tokens: Any,
    metric: Metric,
    name: str,
    axes: Axes = "layer head",
    *,
    by: Literal["zero", "mean", "resample"] = "zero",
    reference: ActivationCache | None = None,
    **options: Any,
) -> FloatArray:
    """Return the metric if each activation is replaced: by zeros, by its mean over the texts and positions of
    `reference`, or by the activation of the text before it in `reference`, which has as many texts. Options
    are `sweep`'s.
    """
    if by not in ("zero", "mean", "resample"):
        raise RequestError.of("by", f"must be zero, mean or resample, not {by!r}")
    if by != "zero" and reference is None:
        raise RequestError.of("reference", f"is required to ablate by {by}: the cache of a run")
    shape = np.array(llm.interp.tokens(tokens)).shape

    def values(layer: int) -> FloatArray:
        if reference is None or by == "zero":
            return np.zeros((*shape, 1), np.float32)
        found: FloatArray = reference[name, layer]
        if by == "resample":
            return np.roll(found, 1, axis=0)
        return np.broadcast_to(found.mean(axis=(0, 1)), (*shape, *found.shape[2:]))

    return sweep(llm, tokens, metric, name, values, axes, **options)


def _patch(name: str, axes: Axes) -> Callable[..., FloatArray]:
    def get_act_patch(
        llm: HasInterp,
        corrupted_tokens: Any,
        clean_cache: ActivationCache,
        patching_metric: Metric,
        **options: Any,
    ) -> FloatArray:
        return sweep(
            llm, corrupted_tokens, patching_metric, name, lambda i: clean_cache[name, i], axes, **options
        )

    shape = ", ".join(axes.split())
    get_act_patch.__doc__ = f"The metric if {name} of a {axes} comes from the clean run: float32 [{shape}]."
    return get_act_patch


get_act_patch_resid_pre = _patch("resid_pre", "layer pos")
get_act_patch_resid_mid = _patch("resid_mid", "layer pos")
get_act_patch_resid_post = _patch("resid_post", "layer pos")
get_act_patch_attn_out = _patch("attn_out", "layer pos")
get_act_patch_mlp_out = _patch("mlp_out", "layer pos")
get_act_patch_attn_head_out_all_pos = _patch("z", "layer head")
get_act_patch_attn_head_q_all_pos = _patch("q", "layer head")
get_act_patch_attn_head_k_all_pos = _patch("k", "layer head")
get_act_patch_attn_head_v_all_pos = _patch("v", "layer head")
get_act_patch_attn_head_pattern_all_pos = _patch("pattern", "layer head")
get_act_patch_attn_head_out_by_pos = _patch("z", "layer pos head")
get_act_patch_attn_head_q_by_pos = _patch("q", "layer pos head")
get_act_patch_attn_head_k_by_pos = _patch("k", "layer pos head")
get_act_patch_attn_head_v_by_pos = _patch("v", "layer pos head")


def get_act_patch_block_every(
    llm: HasInterp, corrupted_tokens: Any, clean_cache: ActivationCache, metric: Metric, **options: Any
) -> FloatArray:
    """resid_pre, attn_out and mlp_out: [3, layer, pos]."""
    sweeps = (get_act_patch_resid_pre, get_act_patch_attn_out, get_act_patch_mlp_out)
    return np.stack([one(llm, corrupted_tokens, clean_cache, metric, **options) for one in sweeps])


def check_axes(session: Session, name: str, axes: Axes, layer: int = 0) -> None:
    """Raises RequestError unless the activation `name` of a layer has these axes."""
    if axes not in get_args(Axes):
        raise RequestError.of("axes", f"must be 'layer pos', 'layer head' or 'layer pos head', not {axes!r}")
    form = session.point((name, layer)).form
    if form != ("plain" if axes == "layer pos" else "heads") and (form, axes) != ("pattern", "layer head"):
        raise RequestError(f"{name!r} cannot be patched by {axes}", param="axes")


@dataclass(frozen=True)
class _Cell:
    """A run with other values from token `start` on, of it or of all, in these columns of the tap."""

    start: int
    is_one_token: bool
    columns: slice


class _Sweep:
    """The unpatched run, and the cells that differ from it."""

    def __init__(
        self, session: Session, tokens: Any, name: str, axes: Axes, logits: str, layers: Iterable[int]
    ) -> None:
        self.session, self.name, self.axes = session, name, axes
        # a state in the middle of a text is nowhere: cells of recurrent models compute all tokens
        self.is_recurrent = session.config.recurrent is not None
        texts = session.tokens(tokens)
        if len({len(ids) for ids in texts}) > 1:
            raise RequestError.of("tokens", "must be texts of the same length")
        if logits not in ("all", "last"):
            raise RequestError.of("logits", f"must be all or last, not {logits!r}")
        self.edits = {i: session.point((name, i)).edit_tap for i in layers}
        for i in self.edits:
            check_axes(session, name, axes, i)
        self.ids = np.stack(texts)  # [B, T]
        self.n_batch, self.n_tokens = len(texts), len(texts[0])
        self.is_last = logits == "last"
        starts = [f"blocks.{i}.hook_resid_pre" for i in range(session.config.n_layers)]
        self.taps = frozenset([*starts, *self.edits.values()])
        self.starts = starts
        self.streams: dict[str, FloatArray] = {}  # from the unpatched run, [B, T, D]
        self.logits: FloatArray = np.empty((0, 0, 0), np.float32)

    def prepare(self) -> None:
        """Run the unpatched text, whose keys and values stay in the first pages."""
        texts, n, b = self.session.texts, self.n_tokens, self.n_batch
        self.base_pages = texts.pages_for(n)
        self.n_cells = most_that_fit(self.session, self._cell_bytes(), self._most_cells())
        texts.reserve(self.base_pages * b * (1 + self.n_cells), b * self.n_cells)
        pieces = texts.whole(list(self.ids))

        def keep(tap: str, x: FloatArray) -> None:
            if tap in self.starts:
                self.streams[tap] = x.reshape(b, n, -1).copy()

        logits = texts.run(pieces, self.taps, keep, logit_rows=self._last_rows([n] * b))
        self.logits = logits.reshape(b, -1, logits.shape[1])

    def _most_cells(self) -> int:
        """Cells that run at a time in a step of a good size."""
        shortest = 1 if "pos" in self.axes and not self.is_recurrent else self.n_tokens
        return min(max(_STEP_TOKENS // (shortest * self.n_batch), 1), _STEP_CELLS)

    def _cell_bytes(self) -> int:
        """Return the most bytes that a cell takes: pages, activations and logits, which are copied once."""
        texts, config = self.session.texts, self.session.config
        rows = self.n_tokens * self.n_batch
        page = texts.backend.page_bytes(self.session.model.cache_layout, texts.kv_type)
        n_logits = self.n_batch * (1 if self.is_last else self.n_tokens)
        widest = max(self.session.trace.widths.values())
        return page * self.base_pages * self.n_batch + 4 * (2 * n_logits * config.n_vocab + 8 * rows * widest)

    def layer(self, layer: int, values: FloatArray, metric: Metric) -> Any:
        """The metric of the layer's cells, [pos], [head] or [pos, head]."""
        values, width = self._tap_values(layer, values)
        n_heads = self._n_heads(layer)
        columns = [slice(i * width, (i + 1) * width) for i in range(n_heads)]
        if self.axes == "layer pos":
            cells = [_Cell(p, True, slice(None)) for p in range(self.n_tokens)]
            shape: tuple[int, ...] = (self.n_tokens,)
        elif self.axes == "layer head":
            cells = [_Cell(0, False, c) for c in columns]
            shape = (n_heads,)
        else:
            cells = [_Cell(p, True, c) for p in range(self.n_tokens) for c in columns]
            shape = (self.n_tokens, n_heads)
        found: list[float] = []
        for group in self._groups(cells):
            found += [float(metric(logits)) for logits in self._run(layer, group, values)]
        return np.array(found, np.float32).reshape(shape)

    def _n_heads(self, layer: int) -> int:
        if self.axes == "layer pos":
            return 1
        spec = self.session.trace.heads[layer].spec
        return spec.n_kv_heads if self.name in ("k", "v") else spec.n_heads

    def _tap_values(self, layer: int, values: FloatArray) -> tuple[FloatArray, int]:
        """Values in the form of the tap, [B, T, width], and the width of a head there."""
        session = self.session
        if self.name == "pattern":  # the values of the unpatched text, mixed by another pattern
            values = self._mixed(layer, np.asarray(values, np.float32))
        values = np.asarray(values, np.float32)
        is_plain, tap = self.axes == "layer pos", self.edits[layer]
        width, d_head = session.config.d_model, 0
        if not is_plain:
            width, d_head = session.trace.widths[tap], session.trace.head_width(tap)
        if values.shape[:2] != (self.n_batch, self.n_tokens):
            raise RequestError.of(
                "values", f"must be of {self.n_batch} x {self.n_tokens} tokens, not {list(values.shape)}"
            )
        flat = values.reshape(self.n_batch, self.n_tokens, -1)
        return np.broadcast_to(flat, (self.n_batch, self.n_tokens, width)), d_head

    def _mixed(self, layer: int, pattern: FloatArray) -> FloatArray:
        """Return z [B, T, H*K] of the unpatched text with this pattern [B, H, T, T]."""
        tap = self.session.point(("pattern", layer)).values_tap
        kept: dict[str, FloatArray] = {}

        def listen(name: str, x: FloatArray) -> None:
            if name == self.starts[layer]:
                x[...] = self.streams[name].reshape(x.shape)
            elif name == tap:
                kept[name] = x.copy()

        texts = self.session.texts
        pieces = [Piece(ids, 0, self._base(b)) for b, ids in enumerate(self.ids)]
        none = np.zeros(0, np.int32)
        taps = frozenset([self.starts[layer], tap])
        texts.run(pieces, taps, listen, logit_rows=none, start=self.starts[layer], stop=tap)
        rows = Rows(np.full(self.n_batch, self.n_tokens, np.int32))
        z = self.session.values.mixed(layer, pattern, kept[tap], rows)
        return z.reshape(self.n_batch, self.n_tokens, -1)

    def _base(self, b: int) -> range:
        return range(b * self.base_pages, (b + 1) * self.base_pages)

    def _groups(self, cells: list[_Cell]) -> Iterator[list[_Cell]]:
        """Cells of one step."""
        group: list[_Cell] = []
        n = 0
        for cell in cells:
            size = (self.n_tokens - self._first(cell)) * self.n_batch
            if group and (n + size > _STEP_TOKENS or len(group) == self.n_cells):
                yield group
                group, n = [], 0
            group.append(cell)
            n += size
        yield group

    def _run(self, layer: int, cells: list[_Cell], values: FloatArray) -> Iterator[FloatArray]:
        """The logits of each cell, [B, T or 1, V]."""
        texts = self.session.texts
        pieces, first_rows = self._pieces(cells)
        start, edit = self.starts[layer], self.edits[layer]
        stream = self.streams[start]

        def listen(tap: str, x: FloatArray) -> None:
            if tap == start:
                for i, piece in enumerate(pieces):
                    row = first_rows[i]
                    x[row : row + len(piece.ids)] = stream[i % self.n_batch, piece.start :]
            if tap == edit:
                for i, piece in enumerate(pieces):
                    cell, b = cells[i // self.n_batch], i % self.n_batch
                    n = 1 if cell.is_one_token else len(piece.ids)
                    at, row = slice(cell.start, cell.start + n), first_rows[i] + cell.start - piece.start
                    x[row : row + n, cell.columns] = values[b, at, cell.columns]

        rows = self._last_rows([len(piece.ids) for piece in pieces])
        found = texts.run(pieces, self.taps, listen, logit_rows=rows, start=start)
        begin = 0
        for cell in cells:
            n = 1 if self.is_last else self.n_tokens - self._first(cell)
            own = found[begin : begin + n * self.n_batch].reshape(self.n_batch, n, -1)
            begin += n * self.n_batch
            if n == self.logits.shape[1]:
                yield own
            else:  # earlier tokens are as they were
                yield np.concatenate([self.logits[:, : cell.start], own], axis=1)

    def _pieces(self, cells: list[_Cell]) -> tuple[list[Piece], IntArray]:
        """The sequences of cells, a text after another, and the first row of each.

        Whole pages before a cell's first token are shared with the unpatched text; the next page is copied.
        """
        texts = self.session.texts
        pieces: list[Piece] = []
        page = self.base_pages * self.n_batch
        for cell in cells:
            first = self._first(cell)
            n_shared = first // texts.page_tokens
            for b, ids in enumerate(self.ids):
                base = self._base(b)
                own = list(range(page, page + self.base_pages - n_shared))
                page += len(own)
                for pool in range(len(texts.cache.n_pages)):
                    texts.cache.copy_page(base[n_shared], own[0], pool)
                pieces.append(Piece(ids[first:], first, [*base[:n_shared], *own]))
        return pieces, np.cumsum([0, *(len(piece.ids) for piece in pieces)], dtype=np.int32)

    def _first(self, cell: _Cell) -> int:
        """The first token that a cell computes."""
        return 0 if self.is_recurrent else cell.start

    def _last_rows(self, lengths: list[int]) -> IntArray | None:
        """The last row of each sequence, or None for all."""
        return np.cumsum(lengths, dtype=np.int32) - 1 if self.is_last else None


def _shown(layers: Sequence[int], name: str, progress: bool) -> Iterable[int]:
    """The layers, with a bar on a terminal that follows them."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(layers, f"patching {name}", console=console, transient=True, disable=not progress)
