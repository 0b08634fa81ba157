"""Attribution graphs: how features, errors and tokens contribute to each feature and logit of a prompt.

Transcoders replace the MLPs, what they miss is kept as errors, and attention patterns and norms are frozen to
this run. Each node then adds a number to each later node, exactly (Ameisen et al. 2025). Graphs are pruned by
influence on the logits, and saved in circuit-tracer's JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from kukri.dataclass import dataclass
from kukri.errors import RequestError, brief
from kukri.host.files import write_text
from kukri.interp.features.transcoders import Transcoders
from kukri.interp.hooks.hook_names import FINAL
from kukri.interp.memory_batches import most_that_fit
from kukri.interp.patching import HasInterp
from kukri.interp.session import Session
from kukri.interp.tapes.tape import TextRows
from kukri.kernels.arrays import FloatArray

Indices = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]  # (targets done, targets in all)
Held = Literal["features", "choice", "attention", "patterns", "nothing"]
_BATCH = 64  # targets that go back at once, if memory has room for them
_GRADIENTS = 8  # gradients in memory at a time, for each row of a target
_UPDATES = 8  # times that the most influential features are chosen
_PRUNED_BYTES = 32  # for each pair of nodes while the graph is pruned
_VOCAB_BLOCK = 8192  # tokens
_BLOCK = 256  # rows of edges that are made absolute at a time


@dataclass(frozen=True, eq=False)
class AttributionGraph:
    """The graph of one prompt. Nodes are in this order: features, errors (layer by layer, for all positions
    each), tokens, logits.

    `features` [n, 3] are layer, position and number, `activations` [n] their values; `edges` [nodes, nodes]
    is the number that the column adds to the row: to a feature's pre-activation, to a logit less the mean of
    all. Rows of errors, of tokens and of less influential features are zero. `constants` [nodes] are what
    biases add, so that a row's sum and its constant are the target's value.
    """

    prompt: str
    token_ids: Indices
    n_layers: int
    features: Indices
    activations: FloatArray
    logit_tokens: Indices
    probabilities: FloatArray
    edges: FloatArray
    constants: FloatArray
    scan: str
    n_active: int  # features, traced or not

    @property
    def n_tokens(self) -> int:
        """Positions of the prompt."""
        return len(self.token_ids)

    def influence(self) -> FloatArray:
        """How much of the logits comes through each node, [nodes]: shares of absolute edges, over all paths
        to the logits, which count by their probability.
        """
        return self._node_influence

    @cached_property
    def _node_influence(self) -> FloatArray:
        return _influence(_shares(self.edges), self._weights)

    @property
    def _weights(self) -> FloatArray:
        """The nodes' own weights: the logits' probabilities, [nodes]."""
        weights = np.zeros(len(self.edges), np.float32)
        weights[-len(self.logit_tokens) :] = self.probabilities
        return weights

    def prune(self, node_threshold: float = 0.8, edge_threshold: float = 0.98) -> tuple[Any, Any]:
        """(nodes, edges) to keep, as masks: the fewest that hold these shares of the influence on the logits.

        Tokens and logits stay. A feature or error without a way to a logit goes, as does a feature that
        nothing leads to.
        """
        for name, threshold in (("node_threshold", node_threshold), ("edge_threshold", edge_threshold)):
            if not 0 <= threshold <= 1:
                raise RequestError.of(name, f"must be from 0 to 1, not {threshold}")
        n_features, n_kept = len(self.features), self.n_tokens + len(self.logit_tokens)
        nodes = _largest(self.influence(), node_threshold)
        nodes[-n_kept:] = True
        shares = _shares(self.edges * nodes * nodes[:, None])
        through = _influence(shares, self._weights) + self._weights
        edges = _largest((shares * through[:, None]).reshape(-1), edge_threshold).reshape(shares.shape)
        edges &= shares > 0
        while True:
            before = nodes.copy()
            edges &= nodes & nodes[:, None]
            nodes[:-n_kept] &= edges[:, :-n_kept].any(axis=0)
            nodes[:n_features] &= edges[:n_features].any(axis=1)
            if (nodes == before).all():
                return nodes, edges

    def effects(self, factors: Mapping[int, float], held: Held = "attention") -> FloatArray:
        """Predict the change of each node, [nodes], if features are multiplied.

        Changes are of features' activations, and of logits less their mean. `factors` are by node: 0
        ablates, 2 doubles.

        A feature changes later features that were traced, which do not fall below 0, and through them the
        logits; attention, norms and errors stay. With `held` "features" the features stay too, so that only
        direct effects are seen, before the features' activation function.
        `kukri.interp.gradients.graph_effects.GraphMeasure` measures the change in the model. Raises
        RequestError for a node that is no feature.
        """
        check_held(held)
        self.check_factors(factors)
        n = len(self.features)
        shares = np.zeros(n, np.float32)  # each feature gains or loses this share of its activation
        if held == "features":
            shares[[*factors]] = [factor - 1 for factor in factors.values()]
            direct: FloatArray = self.edges[:, :n] @ shares
            direct[[*factors]] = (shares * self.activations)[[*factors]]
            return direct
        layers = self.features[:, 0]
        for layer in np.unique(layers):
            own = np.flatnonzero(layers == layer)
            gained = self.edges[own, :n] @ shares / self.activations[own]
            shares[own] = np.maximum(gained, -1)
            given = [node for node in factors if layers[node] == layer]
            shares[given] = [factors[node] - 1 for node in given]
        found = np.zeros(len(self.edges), np.float32)
        found[:n] = shares * self.activations
        found[-len(self.logit_tokens) :] = self.edges[-len(self.logit_tokens) :, :n] @ shares
        return found

    def check_factors(self, factors: Mapping[int, float]) -> None:
        """Raises RequestError for a node that is no feature."""
        n = len(self.features)
        if wrong := [node for node in factors if not 0 <= node < n]:
            raise RequestError.of("factors", f"must be of nodes 0 to {n - 1}, features, not {brief(wrong)}")

    def interventions(self, factors: Mapping[int, float], transcoder: str) -> list[dict[str, Any]]:
        """The same as interventions of a request, on the transcoders that an LLM has under this name."""
        places = {node: self.features[node].tolist() for node in factors}
        return [
            {
                "op": "scale",
                "transcoder": transcoder,
                "layer": layer,
                "features": [feature],
                "positions": [position],
                "strength": factors[node],
            }
            for node, (layer, position, feature) in places.items()
        ]

    def as_json(
        self,
        token_text: Callable[[int], str],
        slug: str,
        node_threshold: float = 0.8,
        edge_threshold: float = 0.98,
    ) -> dict[str, Any]:
        """The pruned graph in the form that circuit-tracer's and Neuronpedia's viewers read."""
        nodes, edges = self.prune(node_threshold, edge_threshold)
        influence = self.influence()
        order = np.argsort(-influence, kind="stable")
        cumulative = np.zeros_like(influence)
        cumulative[order] = np.cumsum(influence[order]) / max(float(influence.sum()), 1e-30)
        kept = {int(i): self._node(int(i), token_text, cumulative) for i in np.flatnonzero(nodes)}
        rows, columns = np.nonzero(edges)
        links = [
            {
                "source": kept[j]["node_id"],
                "target": kept[i]["node_id"],
                "weight": float(self.edges[i, j]),
            }
            for i, j in zip(rows.tolist(), columns.tolist())
        ]
        return {
            "metadata": {
                "slug": slug,
                "scan": self.scan,
                "transcoder_list": [],
                "prompt_tokens": [token_text(int(i)) for i in self.token_ids],
                "prompt": self.prompt,
                "node_threshold": node_threshold,
                "schema_version": 1,
            },
            "qParams": {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""},
            "nodes": list(kept.values()),
            "links": links,
        }

    def save(
        self, path: str | os.PathLike[str], token_text: Callable[[int], str], **options: Any
    ) -> dict[str, Any]:
        """Writes and returns `as_json`, whose options it takes; the slug is the file's name."""
        found = self.as_json(token_text, Path(path).stem, **options)
        write_text(Path(path), json.dumps(found, ensure_ascii=False))
        return found

    def _node(self, i: int, token_text: Callable[[int], str], cumulative: FloatArray) -> dict[str, Any]:
        """A node of the JSON."""
        n_features, n_tokens = len(self.features), self.n_tokens
        more: dict[str, Any] = {"influence": float(cumulative[i])}
        errors, tokens = n_features + self.n_layers * n_tokens, n_features + (self.n_layers + 1) * n_tokens
        if i < n_features:
            layer, position, feature = self.features[i].tolist()
            total = layer + feature
            number = total * (total + 1) // 2 + feature  # one number of two, as Cantor pairs them
            kind, name, js = "cross layer transcoder", f"{layer}_{feature}_{position}", f"{layer}_{feature}-0"
            more["activation"] = float(self.activations[i])
        elif i < errors:
            layer, position = divmod(i - n_features, n_tokens)
            kind, name, js, number = (
                "mlp reconstruction error",
                f"{layer}_-1_{position}",
                f"{layer}_-1-{position}",
                -1,
            )
        elif i < tokens:
            layer, position = "E", i - errors
            token = int(self.token_ids[position])
            kind, name, js, number = "embedding", f"E_{token}_{position}", f"E_{token}-{position}", position
        else:
            layer, position, which = self.n_layers + 1, n_tokens - 1, i - tokens
            number, share = int(self.logit_tokens[which]), float(self.probabilities[which])
            kind, name, js = "logit", f"{layer}_{number}_{position}", f"L_{number}-{position}"
            more = {"token_prob": share, "is_target_logit": which == 0}
            more["clerp"] = f'Output "{token_text(number)}" (p={share:.3f})'
        return {
            "node_id": name,
            "feature": number,
            "layer": str(layer),
            "ctx_idx": position,
            "feature_type": kind,
            "token_prob": 0.0,
            "is_target_logit": False,
            "run_idx": 0,
            "reverse_ctx_idx": 0,
            "jsNodeId": js,
            "clerp": "",
            **more,
        }


def attribute(
    llm: HasInterp,
    prompt: Any,
    transcoders: Transcoders | str | os.PathLike[str],
    *,
    targets: Sequence[int] | None = None,
    max_logits: int = 10,
    logit_share: float = 0.95,
    max_features: int = 2048,
    n_ignored: int = 1,
    max_bytes: int | None = None,
    progress: Progress | None = None,
) -> AttributionGraph:
    """The attribution graph of a text, or of token ids [T].

    The logits belong to `targets` (token ids), or the likeliest at the end that have `logit_share` of the
    probability, at most `max_logits`. Edges into features are computed for the `max_features` features with
    the most influence on the logits. Positions before `n_ignored` have no features or errors, as in
    circuit-tracer, because a first token's activations say nothing about the text. A graph that would take
    more memory than `max_bytes` is refused before memory is taken. Raises RequestError, ConfigError and
    UnsupportedError.
    """
    session = llm.interp
    if not isinstance(transcoders, Transcoders):
        transcoders = Transcoders.load(transcoders)
    transcoders.check(session.config.n_layers, session.config.d_model)
    texts = session.tokens(prompt)
    if len(texts) != 1:
        raise RequestError("an attribution graph requires a single prompt", param="prompt")
    if max_features < 0 or not max_logits >= 1 or not n_ignored >= 0:
        raise RequestError("'max_features' and 'n_ignored' must not be negative, 'max_logits' at least 1")
    run = _Run(session, texts[0], transcoders, n_ignored, max_bytes)
    tokens, shares = run.logits(targets, max_logits, logit_share)
    return run.graph(prompt if isinstance(prompt, str) else "", tokens, shares, max_features, progress)


def check_held(held: str) -> None:
    """Raises RequestError for a `held` that does not exist."""
    if held not in get_args(Held):
        raise RequestError.of("held", f"must be one of {', '.join(get_args(Held))}, not {held!r}")


def likeliest(logits: FloatArray, most: int, share: float) -> tuple[Indices, FloatArray]:
    """Return the fewest tokens with a share of the probability, at most `most`, and their probabilities."""
    shares = _probabilities(logits)
    tokens = np.argsort(-shares, kind="stable")[:most]
    n = int(np.searchsorted(np.cumsum(shares[tokens]), share)) + 1
    return tokens[:n], shares[tokens[:n]].astype(np.float32)


def _probabilities(logits: FloatArray) -> npt.NDArray[np.float64]:
    shares = np.exp(logits.astype(np.float64) - logits.max())
    found: npt.NDArray[np.float64] = shares / shares.sum()
    return found


class _Run:
    """The frozen run of a text, its sources, and their contributions to targets."""

    def __init__(
        self, session: Session, ids: Any, transcoders: Transcoders, n_ignored: int, max_bytes: int | None
    ) -> None:
        n_layers = session.config.n_layers
        self.session, self.ids, self.transcoders = session, ids, transcoders
        self.max_bytes, self.n_bytes = max_bytes, 0
        width, n_vocab = session.config.d_model, session.config.n_vocab
        self._take(4 * width * (n_vocab + 4 * n_layers * width))  # the unembedding, then what attention keeps
        self.reads = [stream_tap(session, transcoders.reads, i) for i in range(n_layers)]
        self.writes = [stream_tap(session, transcoders.writes, i) for i in range(n_layers)]
        skips = {i: one.skip for i, one in transcoders.layers.items() if one.skip is not None}
        self.tape = session.frozen_tape(self.reads, self.writes, skips)
        with session.alone():
            self.result = self.tape.run(session.model, TextRows.of([ids])).x
        n_tokens = len(ids)
        self.errors = np.stack([self.tape.value(tap) for tap in self.writes])  # [L, T, D]
        self.written: list[FloatArray] = []  # activations times decoders, [n, layers, D]
        self.slices: list[list[slice]] = []  # where each layer's features are, by position
        rows, values, self.encoders, biases = [], [], [], []
        for i, layer in transcoders.layers.items():
            x = self.tape.value(self.reads[i])
            active = layer.encode(x)
            chosen = active.positions >= n_ignored
            positions, features = active.positions[chosen], active.features[chosen]
            self._take(4 * len(features) * (layer.n_written + 1) * layer.width)
            sizes = active.values[chosen]
            self.written.append(sizes[:, None, None] * layer.decoders(features))
            ends = np.searchsorted(positions, np.arange(n_tokens + 1))
            self.slices.append([slice(a, b) for a, b in zip(ends[:-1].tolist(), ends[1:].tolist())])
            for j in range(layer.n_written):
                np.subtract.at(self.errors[i + j], positions, self.written[i][:, j])
            self.errors[i] -= layer.bias
            if layer.skip is not None:
                self.errors[i] -= x @ layer.skip.T
            rows.append(np.stack([np.full_like(positions, i), positions, features], axis=1))
            values.append(sizes)
            self.encoders.append(layer.encoders(features))
            biases.append(layer.biases(features))
        self.errors[:, :n_ignored] = 0
        self.features, self.activations = np.concatenate(rows), np.concatenate(values)
        self.biases = np.concatenate(biases)
        self.starts = np.cumsum([0, *map(len, rows)])
        self.embedded = self.tape.value("hook_embed")

    def _take(self, n_bytes: int) -> None:
        """Counts memory that is about to be taken. Raises RequestError if all is more than may be."""
        self.n_bytes += n_bytes
        if self.max_bytes is not None and self.n_bytes > self.max_bytes:
            raise RequestError(
                f"the graph must take at most {self.max_bytes >> 20:,} MiB of memory, not "
                f"{self.n_bytes >> 20:,} or more: shorten the prompt, trace fewer features or raise "
                "'max_bytes' (--max-graph)"
            )

    def logits(
        self, targets: Sequence[int] | None, max_logits: int, logit_share: float
    ) -> tuple[Indices, FloatArray]:
        """The tokens whose logits are nodes, and their probabilities."""
        if targets is None:
            return likeliest(self.result[-1], max_logits, logit_share)
        tokens, n_vocab = np.asarray(targets, np.int64), self.result.shape[1]
        if tokens.ndim != 1 or not len(tokens) or not ((tokens >= 0) & (tokens < n_vocab)).all():
            raise RequestError.of("targets", f"must be token ids from 0 to {n_vocab - 1}")
        return tokens, _probabilities(self.result[-1])[tokens].astype(np.float32)

    def graph(
        self, prompt: str, tokens: Indices, shares: FloatArray, max_features: int, progress: Progress | None
    ) -> AttributionGraph:
        """Edges into the logits, then into the features that matter most to them."""
        n, n_logits = len(self.features), len(tokens)
        n_sources = n + self.errors.shape[0] * len(self.ids) + len(self.ids)
        n_rows = n_logits + min(max_features, n)
        n_nodes = n_rows + n_sources - n
        self._take(4 * n_rows * (n_sources + n_logits) + _PRUNED_BYTES * n_nodes**2)
        edges = np.zeros((n_rows, n_sources + n_logits), np.float32)
        node_of = np.full(n_rows, -1, np.int64)  # each row's node
        node_of[:n_logits] = n_sources + np.arange(n_logits)
        directions = self.session.weights.unembedding_rows(tokens)
        directions = directions - mean_direction(self.session)
        last = len(self.ids) - 1
        edges[:n_logits, :n_sources] = self._sources([(FINAL, last, one) for one in directions])
        n_targets = self._targets_at_once()
        done, is_visited = n_logits, np.zeros(n, np.bool_)
        weights = np.zeros(n_sources + n_logits, np.float32)
        weights[n_sources:] = shares
        while done < n_rows:
            rank = np.argsort(-_partial(edges[:done], node_of[:done], weights)[:n], kind="stable")
            rank = rank[~is_visited[rank]][: max(-(-(n_rows - n_logits) // _UPDATES), _BATCH)]
            for batch in _batches(self.features, rank[: n_rows - done], n_targets):
                edges[done : done + len(batch), :n_sources] = self._sources([self._target(f) for f in batch])
                node_of[done : done + len(batch)] = batch
                is_visited[batch] = True
                done += len(batch)
                if progress is not None:
                    progress(done, n_rows)
        kept = np.concatenate([np.flatnonzero(is_visited), np.arange(n, n_sources + n_logits)])
        place = np.empty(n_sources + n_logits, np.int64)
        place[kept] = np.arange(len(kept))
        square = np.zeros((len(kept), len(kept)), np.float32)
        square[place[node_of]] = edges[:, kept]
        constants = np.zeros(len(kept), np.float32)
        constants[place[node_of]] = self._values(node_of, directions, n_sources) - edges.sum(axis=1)
        chosen = kept[: is_visited.sum()]
        return AttributionGraph(
            prompt, self.ids.astype(np.int64), len(self.errors), self.features[chosen],
            self.activations[chosen], tokens, shares, square, constants, self.transcoders.scan, n,
        )  # fmt: skip

    def _targets_at_once(self) -> int:
        """How many gradients memory has room for."""
        widths = [heads.spec.n_heads * heads.spec.d_head for heads in self.session.trace.heads.values()]
        of_target = 4 * len(self.ids) * _GRADIENTS * max(self.session.config.d_model, *widths)
        left = None if self.max_bytes is None else max(self.max_bytes - self.n_bytes, 0)
        return most_that_fit(self.session, of_target, _BATCH, left)

    def _target(self, feature: int) -> tuple[str, int, FloatArray]:
        layer, position, _ = self.features[feature].tolist()
        return self.reads[layer], position, self.encoders[layer][feature - self.starts[layer]]

    def _values(self, nodes: Indices, directions: FloatArray, n_sources: int) -> FloatArray:
        """Return the values of targets: pre-activations, and logits less their mean."""
        final = self.tape.value(FINAL)[-1]
        found = np.empty(len(nodes), np.float32)
        for row, node in enumerate(nodes.tolist()):
            if node >= n_sources:
                found[row] = directions[node - n_sources] @ final
            else:
                tap, position, direction = self._target(node)
                found[row] = direction @ self.tape.value(tap)[position] + self.biases[node]
        return found

    def _sources(self, targets: Sequence[tuple[str, int, FloatArray]]) -> FloatArray:
        """Return how much every source adds to each target (tap, position, direction), [targets, sources]."""
        n_rows = max(position for _, position, _ in targets) + 1
        begin: dict[str, FloatArray] = {}
        for i, (tap, position, direction) in enumerate(targets):
            if tap not in begin:
                begin[tap] = np.zeros((len(targets), n_rows, len(direction)), np.float32)
            begin[tap][i, position] = direction
        n, n_tokens, n_layers = len(self.features), len(self.ids), len(self.errors)
        found = np.zeros((len(targets), n + (n_layers + 1) * n_tokens), np.float32)
        by_position = found[:, n:].reshape(len(targets), n_layers + 1, n_tokens)
        for tap, grad in self.tape.pull_back(begin):
            layer = self.writes.index(tap) if tap in self.writes else n_layers
            x = self.embedded if layer == n_layers else self.errors[layer]
            by_position[:, layer, :n_rows] = np.einsum("btd,td->bt", grad, x[:n_rows])
            if layer < n_layers:
                self._add_features(found, layer, grad)
        return found

    def _add_features(self, found: FloatArray, layer: int, grad: FloatArray) -> None:
        """Add to `found` what features write to a layer's output, whose gradient is [targets, rows, D]."""
        for i, written in enumerate(self.written[: layer + 1]):
            if layer - i >= written.shape[1]:
                continue
            for position, own in enumerate(self.slices[i][: grad.shape[1]]):
                if own.stop > own.start:
                    columns = slice(self.starts[i] + own.start, self.starts[i] + own.stop)
                    found[:, columns] += grad[:, position] @ written[own, layer - i].T


def mean_direction(session: Session) -> FloatArray:
    """The mean of the unembedding's directions, [D], read in blocks: the whole may be a third of a model."""
    total = np.zeros(session.config.d_model, np.float64)
    for start in range(0, session.config.n_vocab, _VOCAB_BLOCK):
        block = np.arange(start, min(start + _VOCAB_BLOCK, session.config.n_vocab))
        total += session.weights.unembedding_rows(block).sum(axis=0, dtype=np.float64)
    return (total / session.config.n_vocab).astype(np.float32)


def stream_tap(session: Session, hook: str, layer: int) -> str:
    """The tap of a hook in the residual stream or around an MLP. Raises HookError and RequestError."""
    point = session.point(f"blocks.{layer}.{hook}")
    if point.form != "plain" or session.trace.widths[point.tap] != session.config.d_model:
        raise RequestError(f"transcoders cannot read or write {point.name}")
    return point.tap


def _batches(features: Indices, chosen: Indices, n: int) -> Iterator[Indices]:
    """Features in batches of n that end at about the same layer and position."""
    order = chosen[np.lexsort((features[chosen, 1], features[chosen, 0]))]
    for start in range(0, len(order), n):
        yield order[start : start + n]


def _shares(edges: FloatArray) -> FloatArray:
    """Absolute edges, each row's with the sum 1, or 0."""
    found = np.abs(edges)
    found /= np.maximum(found.sum(axis=1, keepdims=True), 1e-10)
    return found


def _influence(shares: FloatArray, weights: FloatArray) -> FloatArray:
    """The sum of weights @ shares^k over the paths' lengths k from 1 on; a graph without circles ends it."""
    total, now = np.zeros_like(weights), weights
    for _ in range(len(weights)):
        now = now @ shares
        if not now.any():
            break
        total += now
    return total


def _partial(edges: FloatArray, node_of: Indices, weights: FloatArray) -> FloatArray:
    """`_influence` of the rows that are known, [nodes]."""
    sums = np.array([np.abs(row).sum() for row in edges])
    total, now = np.zeros_like(weights), weights
    for _ in range(len(edges)):
        own = (now[node_of] / np.maximum(sums, 1e-10)).astype(np.float32)
        if not own.any():
            break
        now = np.zeros_like(weights)
        for start in range(0, len(edges), _BLOCK):
            block = slice(start, start + _BLOCK)
            if own[block].any():
                now += own[block] @ np.abs(edges[block])
        total += now
    return total


def _largest(scores: FloatArray, share: float) -> npt.NDArray[np.bool_]:
    """The fewest scores that have a share of the sum."""
    order = np.argsort(-scores, kind="stable")
    sums = np.cumsum(scores[order], dtype=np.float64)
    found = np.zeros(len(scores), np.bool_)
    if len(sums) and sums[-1] > 0:
        n = int(np.searchsorted(sums, share * sums[-1])) + 1
        found[order[:n]] = True
    return found
