"""Pictures of activations as PNG or SVG (by matplotlib: the extra `plots`), attention patterns also as a page
and as text.
"""

from __future__ import annotations

import html
import io
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kukri.errors import RequestError, UnsupportedError
from kukri.host.files import write_text
from kukri.host.installed import needs_package
from kukri.interp.cache import ActivationCache
from kukri.kernels.arrays import ByteArray, FloatArray

_FORMATS = (".png", ".svg")
_SHADES = " ░▒▓█"
_MAX_CELLS = 20_000  # with a text in each
_HEADS_PER_ROW = 4
_PAGE = Path(__file__).with_name("attention.html")
PathLike = str | os.PathLike[str]


class Picture:
    """A drawing, which notebooks show, and its matplotlib `figure`."""

    def __init__(self, figure: Any, path: PathLike | None = None) -> None:
        self.figure = figure
        if path is not None:
            self.save(path)

    def save(self, path: PathLike) -> None:
        """Writes a .png or .svg file. Raises RequestError for another ending."""
        self._write(path, require_format(path))

    def _repr_png_(self) -> bytes:
        written = io.BytesIO()
        self._write(written, "png")
        return written.getvalue()

    def _write(self, target: Any, form: str) -> None:
        with warnings.catch_warnings():  # a token in a script that the font lacks is drawn as a box
            warnings.filterwarnings("ignore", message="Glyph")
            self.figure.savefig(target, format=form, dpi=120)


def require_format(path: PathLike) -> str:
    """The format of a picture's file, png or svg. Raises RequestError for another ending."""
    ending = Path(path).suffix.lower()
    if ending not in _FORMATS:
        raise RequestError(f"a picture must be {' or '.join(_FORMATS)}, not {Path(path).name}", param="path")
    return ending[1:]


def heat_map(
    values: FloatArray,
    path: PathLike | None = None,
    *,
    title: str = "",
    x_labels: Sequence[str] = (),
    y_labels: Sequence[str] = (),
    x_title: str = "",
    y_title: str = "",
    texts: Sequence[Sequence[str]] = (),
    are_shares: bool = False,
) -> Picture:
    """A picture of values [rows, columns], red above zero and blue below; of shares (0 to 1) in
    one colour.

    `texts` [rows][columns] are written into the cells. With a `path` it is saved too. Raises RequestError.
    """
    if values.ndim != 2:
        raise RequestError.of("values", f"must be [rows, columns], not {list(values.shape)}")
    n_rows, n_columns = values.shape
    if texts and values.size > _MAX_CELLS:
        raise RequestError.of("texts", f"must be at most {_MAX_CELLS:,} cells, not {values.size:,}")
    cell_width = 0.85 if texts else 0.35
    figure = _figure(2 + cell_width * n_columns, 1.5 + 0.22 * n_rows)
    axes = figure.subplots()
    image = _draw_values(axes, values, are_shares)
    figure.colorbar(image)
    axes.set(title=title, xlabel=x_title, ylabel=y_title)
    if x_labels:
        axes.set_xticks(range(n_columns), _written(x_labels), rotation=90)
    if y_labels:
        axes.set_yticks(range(n_rows), _written(y_labels))
    top = image.norm.vmax
    for i, row in enumerate(texts):
        for j, text in enumerate(_written(row)):
            color = "white" if abs(values[i, j]) > 0.6 * top else "black"
            axes.text(j, i, text[:12], ha="center", va="center", fontsize=7, color=color)
    return Picture(figure, path)


def logit_lens(
    cache: ActivationCache, token_text: Callable[[int], str], path: PathLike | None = None, *, text: int = 0
) -> Picture:
    """The likeliest next token after each position, read from the stream before each layer and at the end,
    and its probability. `text` is one of the batch; `token_text` gives the text of a token id.
    """
    one = cache.apply_slice_to_batch_dim(slice(text, text + 1))
    names, columns = [], []
    for position in range(int(one.lengths[0])):  # one at a time: V numbers a layer
        logits = one.logit_lens(pos_slice=position)[::-1, 0]  # the last layer on top
        best = logits.argmax(axis=-1)
        names.append([token_text(int(token)) for token in best])
        top = np.take_along_axis(logits, best[:, None], axis=-1)
        columns.append(1 / np.exp(logits - top).sum(axis=-1))
    n_layers = len(names[0]) - 1
    return heat_map(
        np.array(columns).T,
        path,
        title="Likeliest next token, and its probability",
        x_labels=[token_text(int(token)) for token in one.tokens[0]],
        y_labels=["end", *(str(layer) for layer in reversed(range(n_layers)))],
        y_title="before layer",
        texts=[list(row) for row in zip(*names)],
        are_shares=True,
    )


def attention_heads(
    pattern: FloatArray, tokens: Sequence[str], path: PathLike | None = None, *, title: str = ""
) -> Picture:
    """The patterns [head, query, key] of one text's heads, each a square: a row a query."""
    _check_pattern(pattern, tokens)
    n_columns = min(len(pattern), _HEADS_PER_ROW)
    n_rows, side = -(-len(pattern) // n_columns), 1.2 + 0.16 * len(tokens)
    figure = _figure(side * n_columns, side * n_rows)
    figure.suptitle(title)
    for i, (axes, own) in enumerate(zip(figure.subplots(n_rows, n_columns, squeeze=False).flat, pattern)):
        _draw_values(axes, own, are_shares=True)
        axes.set_title(f"head {i}", fontsize=8)
        axes.set_xticks(range(len(tokens)), _written(tokens), rotation=90, fontsize=6)
        axes.set_yticks(range(len(tokens)), _written(tokens), fontsize=6)
    for axes in figure.axes[len(pattern) :]:
        axes.remove()
    return Picture(figure, path)


def image_attention(
    weights: FloatArray, picture: ByteArray, path: PathLike | None = None, *, title: str = ""
) -> Picture:
    """Draw what heads look at: weights [head, rows, columns], of `LLM.vision.attention`, over the picture
    uint8 [height, width, 3]. Each head has colours of its own, from none to its largest weight.
    """
    if weights.ndim != 3 or picture.ndim != 3:
        raise RequestError.of(
            "weights",
            f"must be [head, rows, columns] and a picture [height, width, 3], not {list(weights.shape)} "
            f"and {list(picture.shape)}",
        )
    n_columns = min(len(weights), _HEADS_PER_ROW)
    n_rows = -(-len(weights) // n_columns)
    height, width = picture.shape[:2]
    figure = _figure(2.4 * n_columns, (2.4 * height / width + 0.4) * n_rows)
    figure.suptitle(title)
    gray = picture.mean(axis=2)
    for i, (axes, own) in enumerate(zip(figure.subplots(n_rows, n_columns, squeeze=False).flat, weights)):
        axes.imshow(gray, cmap="gray", vmin=0, vmax=255, extent=(0, width, height, 0))
        axes.imshow(own, cmap="inferno", alpha=0.6, vmin=0, extent=(0, width, height, 0))
        axes.set_title(f"head {i}, at most {own.max():.2f}", fontsize=8)
        axes.set_axis_off()
    for axes in figure.axes[len(weights) :]:
        axes.remove()
    return Picture(figure, path)


def feature_timeline(
    values: FloatArray,
    tokens: Sequence[str],
    path: PathLike | None = None,
    *,
    names: Sequence[str] = (),
    title: str = "",
) -> Picture:
    """How strong each feature is at each token of a text: values [pos, feature], a line a feature."""
    if values.ndim != 2 or len(values) != len(tokens) or not values.size:
        raise RequestError.of("values", f"must be [{len(tokens)}, feature], not {list(values.shape)}")
    n_features = values.shape[1]
    figure = _figure(2 + 0.3 * len(tokens), 1 + 0.6 * n_features)
    rows = figure.subplots(n_features, 1, sharex=True, squeeze=False)[:, 0]
    for i, axes in enumerate(rows):
        axes.bar(range(len(tokens)), values[:, i], width=0.9)
        axes.set_ylabel(names[i] if names else str(i), rotation=0, ha="right", va="center", fontsize=8)
        axes.tick_params(labelsize=6)
    rows[-1].set_xticks(range(len(tokens)), _written(tokens), rotation=90, fontsize=8)
    figure.suptitle(title)
    return Picture(figure, path)


def attribution_graph(graph: Mapping[str, Any], path: PathLike | None = None) -> Picture:
    """A graph in circuit-tracer's JSON (`AttributionGraph.as_json`): nodes by position and layer, links by
    their weight, red if they raise their target and blue if they lower it.
    """
    tokens, nodes = graph["metadata"]["prompt_tokens"], graph["nodes"]
    n_layers = max((int(node["layer"]) for node in nodes if node["layer"] != "E"), default=0)
    figure = _figure(2 + 0.8 * len(tokens), 2 + 0.35 * n_layers)
    axes = figure.subplots()
    places = _places(nodes)
    heaviest = max((abs(link["weight"]) for link in graph["links"]), default=1.0) or 1.0
    for link in graph["links"]:
        share = abs(link["weight"]) / heaviest
        ends = zip(places[link["source"]], places[link["target"]])
        color = "#c0392b" if link["weight"] > 0 else "#2e6db4"
        axes.plot(*ends, color=color, alpha=min(1.0, 0.05 + share), linewidth=0.3 + 2 * share, zorder=1)
    for kind in dict.fromkeys(node["feature_type"] for node in nodes):
        own = [places[node["node_id"]] for node in nodes if node["feature_type"] == kind]
        axes.scatter(*zip(*own), s=14, label=kind, zorder=2)
    for node in nodes:
        if node["clerp"]:
            x, y = places[node["node_id"]]
            axes.text(x, y + 0.5, _written([node["clerp"]])[0], rotation=90, ha="center", fontsize=6)
    axes.set_xticks(range(len(tokens)), _written(tokens), rotation=90)
    axes.set(ylabel="layer", title=graph["metadata"]["slug"])
    figure.legend(loc="outside lower center", ncols=4, fontsize=7, frameon=False)
    return Picture(figure, path)


def _places(nodes: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return (x, y) of each node: those of a position and layer are side by side, embeddings below."""
    together: dict[tuple[int, int], list[str]] = {}
    for node in nodes:
        layer = -1 if node["layer"] == "E" else int(node["layer"])
        together.setdefault((int(node["ctx_idx"]), layer), []).append(node["node_id"])
    return {
        name: (position + 0.7 * ((i + 0.5) / len(names) - 0.5), layer)
        for (position, layer), names in together.items()
        for i, name in enumerate(names)
    }


def _figure(width: float, height: float) -> Any:
    """An empty figure, in inches. Raises UnsupportedError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError(needs_package("a picture", "matplotlib", "plots")) from None
    return Figure(figsize=(min(width, 100), min(height, 100)), layout="constrained")


def _draw_values(axes: Any, values: FloatArray, are_shares: bool) -> Any:
    if are_shares:
        return axes.imshow(values, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    top = float(np.abs(values[np.isfinite(values)]).max(initial=1e-9))
    return axes.imshow(values, cmap="RdBu_r", vmin=-top, vmax=top, aspect="auto")


def _written(texts: Sequence[str]) -> list[str]:
    """Texts on one line each. A lone space is marked, and a formula's signs are plain text."""
    return [repr(text)[1:-1].replace("$", r"\$") if text.strip(" ") else "␣" for text in texts]


def _check_pattern(pattern: FloatArray, tokens: Sequence[str]) -> None:
    if pattern.ndim != 3 or pattern.shape[1:] != (len(tokens), len(tokens)) or not len(pattern):
        raise RequestError.of(
            "pattern", f"must be [head, query, key] of {len(tokens)}, not {list(pattern.shape)}"
        )


def attention_text(pattern: FloatArray, tokens: Sequence[str]) -> str:
    """A head's pattern [query, key] in characters: darker is more, a line a query."""
    names = [repr(token)[1:-1] for token in tokens]
    width = max(map(len, names), default=0)
    levels = np.clip((np.nan_to_num(pattern) * len(_SHADES)).astype(int), 0, len(_SHADES) - 1)
    lines = ["".join(2 * _SHADES[level] for level in row[: i + 1]) for i, row in enumerate(levels)]
    return "\n".join(f"{name:>{width}} {line}" for name, line in zip(names, lines))


def attention_page(
    pattern: FloatArray, tokens: Sequence[str], path: str | os.PathLike[str], title: str = ""
) -> None:
    """Writes a page that shows the patterns [head, query, key] of one text: one file, without a server.

    Choose a head; pointing at a token shows what it attends to.
    """
    _check_pattern(pattern, tokens)
    data = json.dumps({"tokens": list(tokens), "pattern": np.round(pattern, 3).tolist()})
    page = _PAGE.read_text("utf-8").replace("TITLE", html.escape(title or "Attention"))
    write_text(Path(path), page.replace("DATA", data.replace("<", "\\u003c")))
