"""An attribution graph as an HTML page of its own: nodes by layer and position, links of the one that is
pointed at, and the tokens that a feature writes for. It loads nothing, and shows texts as texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kukri.interp.features.transcoders import Transcoders
from kukri.interp.session import Session
from kukri.kernels.arrays import FloatArray

VIEWER = Path(__file__).parent / "viewer"  # the files of the page, of which a server's page has two
_N_TOKENS = 8  # tokens that are named for a feature
_BATCH = 64  # features whose logits are computed at a time


def add_written_tokens(
    session: Session, transcoders: Transcoders, graph: Mapping[str, Any], token_text: Callable[[int], str]
) -> None:
    """Gives each feature's node of a graph's JSON `top_tokens`, the tokens whose logits it raises most: its
    decoders, summed over the layers that it writes, times the unembedding.
    """
    nodes = [n for n in graph["nodes"] if n["feature_type"] == "cross layer transcoder"]
    keys = [tuple(map(int, node["node_id"].split("_")[:2])) for node in nodes]  # (layer, feature)
    unembedding = session.weights.unembedding_rows(np.arange(session.config.n_vocab)).T
    found: dict[tuple[int, ...], list[str]] = {}
    unique = sorted(set(keys))
    for start in range(0, len(unique), _BATCH):
        part = unique[start : start + _BATCH]
        directions = np.stack([_direction(transcoders, *key) for key in part])
        logits = directions @ unembedding
        best = np.argpartition(-logits, min(_N_TOKENS, logits.shape[1] - 1), axis=1)[:, :_N_TOKENS]
        for key, row, own in zip(part, logits, best):
            found[key] = [token_text(int(i)) for i in own[np.argsort(-row[own], kind="stable")]]
    for node, key in zip(nodes, keys):
        node["top_tokens"] = found[key]


def _direction(transcoders: Transcoders, layer: int, feature: int) -> FloatArray:
    direction: FloatArray = transcoders.layers[layer].decoders(np.array([feature]))[0].sum(axis=0)
    return direction


def graph_page(graph: Mapping[str, Any]) -> str:
    """Return the page of a graph in circuit-tracer's JSON, with tokens of `add_written_tokens`, if any."""
    data = json.dumps(graph, ensure_ascii=True)
    for character in "<>&":  # in a text that would end the script
        data = data.replace(character, f"\\u{ord(character):04x}")
    page = (VIEWER / "page.html").read_text("utf-8")
    for mark, name in (("STYLE", "graph.css"), ("SCRIPT", "graph.js")):
        page = page.replace(mark, (VIEWER / name).read_text("utf-8"), 1)
    return page.replace("DATA", data, 1)
