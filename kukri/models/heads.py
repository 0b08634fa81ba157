"""Output heads: a language model's, a task's, or none.

Tensors are named as in transformers' `...ForQuestionAnswering`, `...ForSequenceClassification` and
`...ForTokenClassification` (modeling_layers.py, version 5).
"""

from __future__ import annotations

from typing import Protocol

from kukri.config import ModelConfig
from kukri.kernels.op_set import Ops, Tensor
from kukri.models.layers import Linear, PlainLayerNorm
from kukri.models.weights import WeightSource


class Head(Protocol):
    """The head that turns the last hidden states into the model's outputs."""

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """x [N, D] -> [N, outputs]."""


class PooledHead:
    """A classification of the pooled first token: classifier(tanh(dense(x)))."""

    def __init__(self, source: WeightSource, config: ModelConfig, pooler: str, classifier: str) -> None:
        d_model = config.d_model
        self.pooler = Linear(source, [pooler], (d_model,), d_model)
        source.vector(f"{pooler}.bias", d_model)  # not optional, as biases are elsewhere
        self.classifier = Linear(source, [classifier], (len(config.head.labels),), d_model)

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """x [N, D] -> [N, labels]."""
        return self.classifier(ops, ops.map("tanh", self.pooler(ops, x)))


class PredictionHead:
    """A classification of the first token, or of each: classifier(norm(gelu(dense(x))))."""

    def __init__(self, source: WeightSource, config: ModelConfig) -> None:
        d_model = config.d_model
        self.dense = Linear(source, ["head.dense"], (d_model,), d_model)
        self.norm = PlainLayerNorm(source, "head.norm", d_model, config.norm_eps)
        self.classifier = Linear(source, ["classifier"], (len(config.head.labels),), d_model)

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """x [N, D] -> [N, labels]."""
        return self.classifier(ops, self.norm(ops, ops.map("gelu_exact", self.dense(ops, x))))


def encoder_head(source: WeightSource, config: ModelConfig, pooler: str, classifier: str) -> Head | None:
    """The head of an encoder; the classification of a text is `classifier`, after `pooler`."""
    kind = config.head.kind
    if kind == "sequence_classification":
        return PooledHead(source, config, pooler, classifier)
    if kind == "token_classification":
        return Linear(source, ["classifier"], (len(config.head.labels),), config.d_model)
    return output_head(source, config)


def output_head(source: WeightSource, config: ModelConfig, name: str = "lm_head") -> Linear | None:
    """The matrix from the last norm to the model's outputs; `name` is a language model's name for it.

    None if there is none, or if it is the embedding's own.
    """
    kind, n_labels = config.head.kind, len(config.head.labels)
    if kind == "question_answering":
        head = Linear(source, ["qa_outputs"], (2,), config.d_model)
        source.vector("qa_outputs.bias", 2)  # not optional, as biases are elsewhere
        return head
    if kind in ("sequence_classification", "token_classification"):
        return Linear(source, ["score"], (n_labels,), config.d_model)
    if kind == "none" or config.tie_embeddings:
        return None
    return Linear(source, [name], (config.n_vocab,), config.d_model)
