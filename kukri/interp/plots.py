"""Heat maps as PNG (by matplotlib: the extra `plots`), attention patterns as a page and as text."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kukri.errors import RequestError
from kukri.kernels.arrays import FloatArray

_SHADES = " ░▒▓█"


def heat_map(
    values: FloatArray,
    path: str | os.PathLike[str],
    *,
    title: str = "",
    x_labels: Sequence[str] = (),
    y_labels: Sequence[str] = (),
    x_title: str = "",
    y_title: str = "",
) -> None:
    """Writes a picture of values [rows, columns], red above zero and blue below. Raises RequestError."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RequestError("a heat map needs matplotlib: pip install 'kukri[plots]'") from None
    if values.ndim != 2:
        raise RequestError(f"a heat map takes [rows, columns], not {list(values.shape)}", param="values")
    n_rows, n_columns = values.shape
    figure = Figure(figsize=(2 + 0.35 * n_columns, 1.5 + 0.22 * n_rows), layout="constrained")
    axes = figure.subplots()
    top = float(np.abs(values[np.isfinite(values)]).max(initial=1e-9))
    image = axes.imshow(values, cmap="RdBu_r", vmin=-top, vmax=top, aspect="auto")
    figure.colorbar(image)
    axes.set(title=title, xlabel=x_title, ylabel=y_title)
    if x_labels:
        axes.set_xticks(range(n_columns), [repr(label)[1:-1] for label in x_labels], rotation=90)
    if y_labels:
        axes.set_yticks(range(n_rows), y_labels)
    figure.savefig(path, format="png", dpi=120)


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
    if pattern.ndim != 3 or pattern.shape[1:] != (len(tokens), len(tokens)):
        raise RequestError(
            f"a page takes a pattern [head, query, key] of {len(tokens)} tokens, not {list(pattern.shape)}",
            param="pattern",
        )
    data = json.dumps({"tokens": list(tokens), "pattern": np.round(pattern, 3).tolist()})
    page = _PAGE.replace("TITLE", html.escape(title or "Attention")).replace(
        "DATA", data.replace("<", "\\u003c")
    )
    Path(path).write_text(page, encoding="utf-8")


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>TITLE</title>
<style>
body { font: 15px system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
#text span { padding: 2px 0; white-space: pre-wrap; cursor: pointer }
#text span.at { outline: 2px solid #c33 }
button { margin: 2px; font: inherit } button.at { background: #357; color: #fff }
canvas { image-rendering: pixelated; width: 24em; height: 24em; border: 1px solid #999; margin-top: 1em }
</style>
<h1>TITLE</h1><div id="heads"></div><p id="text"></p><canvas id="map"></canvas>
<script>
const data = DATA, n = data.tokens.length
let head = 0, query = n - 1
const heads = document.getElementById("heads"), text = document.getElementById("text")
data.pattern.forEach((_, h) => {
  const button = document.createElement("button")
  button.textContent = h
  button.onclick = () => { head = h; draw() }
  heads.append(button)
})
data.tokens.forEach((token, i) => {
  const span = document.createElement("span")
  span.textContent = token
  span.onmouseenter = () => { query = i; draw() }
  text.append(span)
})
function draw() {
  [...heads.children].forEach((button, h) => button.classList.toggle("at", h === head));
  [...text.children].forEach((span, i) => {
    const weight = data.pattern[head][query][i]
    span.style.background = `rgba(50, 110, 220, ${weight})`
    span.classList.toggle("at", i === query)
    span.title = weight.toFixed(3)
  })
  const canvas = document.getElementById("map"), pen = canvas.getContext("2d")
  canvas.width = canvas.height = n
  data.pattern[head].forEach((row, q) => row.forEach((weight, k) => {
    pen.fillStyle = `rgba(50, 110, 220, ${weight})`
    pen.fillRect(k, q, 1, 1)
  }))
}
draw()
</script>
</html>
"""
