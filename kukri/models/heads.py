"""Output heads: that of a language model, one for a task, or none.

Tensors are those of transformers' `...ForQuestionAnswering`, `...ForSequenceClassification` and
`...ForTokenClassification` (modeling_layers.py, version 5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kukri.config import ModelConfig
from kukri.models.layers import Linear

if TYPE_CHECKING:
    from kukri.models.weights import WeightSource


def output_head(source: WeightSource, config: ModelConfig) -> Linear | None:
    """The matrix from the last norm to the model's outputs.

    None if there is none, or if it is the embedding's own.
    """
    kind, n_labels = config.head.kind, len(config.head.labels)
    if kind == "question_answering":
        source.vector("qa_outputs.bias", 2)  # not optional, as biases are elsewhere
        return Linear(source, ["qa_outputs"], (2,), config.d_model)
    if kind in ("sequence_classification", "token_classification"):
        return Linear(source, ["score"], (n_labels,), config.d_model)
    if kind == "none" or config.tie_embeddings:
        return None
    return Linear(source, ["lm_head"], (config.n_vocab,), config.d_model)
