"""Questions about activations, answered in words by a model that reads them at placeholder tokens.

An activation oracle (Karvonen et al. 2025), mostly the same model with an adapter, was trained to answer:
each vector is added, at the length of the row, to its placeholder's row after an early block. Patchscopes
(Ghandeharioun et al. 2024) ask an untrained model, by a prompt whose placeholder's row is replaced.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from kukri.dataclass import dataclass
from kukri.errors import RequestError
from kukri.interp.interventions.intervention import MAX_VECTORS, Intervention


@dataclass(frozen=True, kw_only=True)
class OracleForm:
    """How an oracle is asked.

    `template` has {layer}, where the activations come from, {activations}, where a `placeholder`, one token,
    stands for each, and {question}; it is a user's message, or with `is_chat` False the text itself. After
    block `after_block` each activation is added to the row of its placeholder, or replaces it; with
    `match_norm` it has that row's length.
    """

    template: str = "Layer: {layer}\n{activations}\n{question}"
    placeholder: str = " ?"
    is_chat: bool = True
    after_block: int = 1
    op: Literal["add", "replace"] = "add"
    match_norm: bool = True

    def text(self, n: int, question: str, layer: int | None) -> str:
        """The template, filled in for n activations. Raises RequestError."""
        try:
            placeholders = self.placeholder * n
            return self.template.format(layer=layer, activations=placeholders, question=question)
        except (IndexError, KeyError, ValueError, AttributeError):
            raise RequestError.of(
                "form", "must have {layer}, {activations} and {question}, and no other braces"
            ) from None

    def injection(self, activations: Any) -> Intervention:
        """The edit that gives the oracle the activations, [n, D] or [D]. Raises RequestError."""
        vectors = np.atleast_2d(np.asarray(activations, np.float32))
        if vectors.ndim != 2 or not 1 <= len(vectors) <= MAX_VECTORS:
            raise RequestError.of(
                "activations", f"must be [n, d_model], n from 1 to {MAX_VECTORS}, not {list(vectors.shape)}"
            )
        place = {"text": self.placeholder * len(vectors), "occurrence": 0}
        name = f"blocks.{self.after_block}.hook_resid_post"
        return Intervention(
            op=self.op, name=name, vector=vectors, positions=place, match_norm=self.match_norm
        )


ACTIVATION_ORACLE = OracleForm()
