"""Measures what interventions on the nodes of an attribution graph do, to check the graph's predictions.

A graph is a linear model of one run, which holds some things constant. Releasing these one after the other
shows how far it can be trusted: see `Held`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kukri.errors import RequestError
from kukri.interp.features.transcoders import Layer, Transcoders
from kukri.interp.gradients.circuits import AttributionGraph, Held, check_held, mean_direction, stream_tap
from kukri.interp.hooks.hook_names import FINAL
from kukri.interp.memory_batches import most_that_fit
from kukri.interp.patching import HasInterp
from kukri.interp.tapes.frozen_tape import FrozenTape, ReplayedTape
from kukri.interp.tapes.tape import TextRows
from kukri.kernels.arrays import FloatArray

_FINAL_POINT = "ln_final.hook_out"


class GraphMeasure:
    """Measures in an LLM's model what interventions on a graph's nodes do.

    `transcoder` is the name that the LLM has for the graph's transcoders: `LLM(transcoders={name: DIR})`.
    Raises RequestError if the graph is not of this model and these transcoders.
    """

    def __init__(self, llm: HasInterp, graph: AttributionGraph, transcoder: str) -> None:
        self._session, self._graph, self._name = llm.interp, graph, transcoder
        found: Transcoders = self._session.catalog.known("transcoder", transcoder)
        found.check(self._session.config.n_layers, self._session.config.d_model)
        self._transcoders = found
        layers, positions, numbers = graph.features.T
        sizes = np.array([found.layers[i].n_features for i in range(graph.n_layers)])
        if (
            graph.n_layers != self._session.config.n_layers
            or graph.token_ids.max() >= self._session.config.n_vocab
            or (numbers >= sizes[layers]).any()
        ):
            raise RequestError.of("graph", "must be of this model and these transcoders")
        self._nodes = {i: np.flatnonzero(layers == i) for i in range(graph.n_layers)}
        self._places = positions, numbers
        weights = self._session.weights
        self._directions = weights.unembedding_rows(graph.logit_tokens) - mean_direction(self._session)
        self._first: FrozenTape | None = None
        self._before: tuple[Mapping[int, FloatArray], FloatArray] | None = None

    def effects(self, factors: Mapping[int, float], held: Held = "nothing") -> FloatArray:
        """Measure the change of each node, [nodes], if features are multiplied: see
        `AttributionGraph.effects`.

        With `held` "nothing" the model runs with `AttributionGraph.interventions`, on the LLM's backend and
        weights; else it runs in float32, with the held parts frozen. Nodes of errors and tokens are 0.
        """
        check_held(held)
        self._graph.check_factors(factors)
        return self._in_the_model(factors) if held == "nothing" else self._replayed(factors, held)

    def _replayed(self, factors: Mapping[int, float], held: Held) -> FloatArray:
        first = self._first_run()
        session, transcoders = self._session, self._transcoders
        reads, writes = first.reads, first.writes
        changes: dict[int, FloatArray] = {}
        shape = first.value(writes[0]).shape
        features: dict[int, FloatArray] = {}  # how the graph's features change

        def output(tap: str, own: FloatArray) -> FloatArray:
            i = writes.index(tap)
            layer = transcoders.layers[i]
            x, before = tape.value(reads[i]), first.value(reads[i])
            now, others = self._changes(i, before, x, factors, held)
            features[i] = now
            positions, numbers = np.nonzero(others)
            written = others[positions, numbers][:, None, None] * layer.decoders(numbers)
            for j in range(layer.n_written):
                change = changes.setdefault(i + j, np.zeros(shape, np.float32))
                np.add.at(change, positions, written[:, j])
            if held == "patterns":  # the MLP answers itself
                return own + changes[i]
            found: FloatArray = first.value(tap) + changes[i]
            if layer.skip is not None:
                found += (x - before) @ layer.skip.T
            return found

        tape = ReplayedTape(first, output, holds_patterns_alone=held == "patterns")
        with session.alone():
            tape.run(session.model, TextRows.of([self._graph.token_ids.astype(np.int32)]))
        return self._by_node(features, tape.value(FINAL)[-1] - first.value(FINAL)[-1])

    def _changes(
        self, i: int, before: FloatArray, x: FloatArray, factors: Mapping[int, float], held: Held
    ) -> tuple[FloatArray, FloatArray]:
        """Return how a layer's features change with the MLP's input: the features of its nodes [n], and all
        features that write something else, [T, F].
        """
        layer, nodes = self._transcoders.layers[i], self._nodes[i]
        positions, numbers = (place[nodes] for place in self._places)
        given = np.array([node in factors for node in nodes.tolist()], np.bool_)
        targets = np.array([factors.get(node, 1.0) for node in nodes.tolist()], np.float32)
        change = np.zeros((len(x), layer.n_features), np.float32)
        if held != "features" and not np.array_equal(x, before):
            was = layer.features(before)
            change = _of_active(layer, was, x - before) if held == "choice" else layer.features(x) - was
        places = positions[given], numbers[given]
        moved, wanted = change[positions, numbers], ((targets - 1) * self._graph.activations[nodes])[given]
        if held == "features":
            moved = _products(layer, positions, numbers, x - before)
        moved[given] = wanted
        if held == "patterns":  # the MLP's output has the other changes in it, and the feature's own
            wanted = wanted - change[places]
            change[:] = 0
        change[places] = wanted
        return moved, change

    def _in_the_model(self, factors: Mapping[int, float]) -> FloatArray:
        if self._before is None:
            self._before = self._run({})
        (reads, final), (before, final_before) = self._run(factors), self._before
        features: dict[int, FloatArray] = {}
        for i, nodes in self._nodes.items():
            positions, numbers = (place[nodes] for place in self._places)
            layer = self._transcoders.layers[i]
            change = layer.features(reads[i]) - layer.features(before[i])
            features[i] = change[positions, numbers]
            for row, node in enumerate(nodes.tolist()):
                if node in factors:
                    features[i][row] = (factors[node] - 1) * self._graph.activations[node]
        return self._by_node(features, final - final_before)

    def _run(self, factors: Mapping[int, float]) -> tuple[dict[int, FloatArray], FloatArray]:
        """What MLPs read in the model under interventions, [T, D], and the last position's final norm."""
        names = {i: f"blocks.{i}.{self._transcoders.reads}" for i in self._nodes}
        _, cache = self._session.run_with_cache(
            self._graph.token_ids,
            names=[*names.values(), _FINAL_POINT],
            return_type=None,
            interventions=self._graph.interventions(factors, self._name),
        )
        return {i: cache[name][0] for i, name in names.items()}, cache[_FINAL_POINT][0, -1]

    def _first_run(self) -> FrozenTape:
        """The run that the graph is of."""
        if self._first is None:
            session, transcoders = self._session, self._transcoders
            reads = [stream_tap(session, transcoders.reads, i) for i in self._nodes]
            writes = [stream_tap(session, transcoders.writes, i) for i in self._nodes]
            skips = {i: one.skip for i, one in transcoders.layers.items() if one.skip is not None}
            self._first = session.frozen_tape(reads, writes, skips)
            room = most_that_fit(session, 1, 1 << 62)
            self._first.keeps_matrices = 4 * session.model.n_parameters < room
            with session.alone():
                self._first.run(session.model, TextRows.of([self._graph.token_ids.astype(np.int32)]))
        return self._first

    def _by_node(self, features: Mapping[int, FloatArray], final: FloatArray) -> FloatArray:
        found = np.zeros(len(self._graph.edges), np.float32)
        for i, nodes in self._nodes.items():
            found[nodes] = features[i]
        found[-len(self._directions) :] = self._directions @ final
        return found


def _products(layer: Layer, positions: Any, numbers: Any, x: FloatArray) -> FloatArray:
    """Return the products of features' encoders and rows of x, [n]."""
    found: FloatArray = np.einsum("nd,nd->n", layer.encoders(numbers), x[positions])
    return found


def _of_active(layer: Layer, was: FloatArray, moved: FloatArray) -> FloatArray:
    """Return how features [T, F] change if their input changes by `moved` and no other becomes active."""
    positions, numbers = np.nonzero(was)
    values = was[positions, numbers]
    change = np.zeros_like(was)
    change[positions, numbers] = np.maximum(_products(layer, positions, numbers, moved), -values)
    return change
