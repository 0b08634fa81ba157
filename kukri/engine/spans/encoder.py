"""`SpanEncoder`: what the engine asks of an encoder whose rows replace embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from kukri.config import ModelConfig
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.models.both_ways import BothWaysLayers
from kukri.models.spans import SpanInput


class SpanEncoder(Protocol):
    """Makes rows of inputs of one class. A kind of spans is one implementation, in a file next to this one.

    `Encodings` keeps the rows, within a budget; an encoder manages its other memory itself.
    """

    input_type: type[SpanInput]
    attends_both_ways: BothWaysLayers = ""  # layers where the rows of a span see each other: it is never cut
    most_run_rows: int = 0  # rows that such a span has at most
    n_deep: int = 0  # first layers to whose results rows are added: a row has (1 + n_deep) * D numbers
    blank_id: int | None = None  # the token that a step reads in place of placeholders; None: they stay

    def check(self, given: Any, text: ModelConfig) -> None:
        """Raise RequestError on an input that was made for another encoder, or that this text cannot read."""

    def places(self, given: Any) -> IntArray | None:
        """Return the positions [3, n_tokens] by which an input's rows rotate, from 0; None: as text does."""
        return None

    def encode(self, given: Any, is_brief: Callable[[], bool]) -> Iterator[FloatArray | None]:
        """Encode an input, part by part or, while `is_brief()`, in slices of some milliseconds: yields None
        after each, and at last the rows [n_tokens, (1 + n_deep) * D], float32.
        """
