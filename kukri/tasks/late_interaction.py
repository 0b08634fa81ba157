"""Late interaction (ColBERT): a vector for each token of queries and documents, compared by MaxSim.

Tokens, prefixes, expansion and skipped tokens are PyLate's, which trains such models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kukri.config import HeadConfig, LateInteraction, ModelConfig
from kukri.errors import UnsupportedError
from kukri.kernels.arrays import FloatArray
from kukri.tokenizer import Tokenizer


def as_encoder(config: ModelConfig, late: LateInteraction | None) -> ModelConfig:
    """Return the model as an encoder whose tokens see only earlier tokens, if expansion tokens are to be
    hidden.

    Convolutions leave hidden tokens out. A causal model that keeps other states is returned unchanged.
    """
    hides = late is not None and late.expands and not late.sees_expansion
    has_states = config.recurrent is not None and config.recurrent.n_heads > 0
    has_head = config.head.kind != "none" and not config.tie_embeddings
    if not (hides and config.is_causal) or has_states or has_head:
        return config
    return replace(config, is_causal=False, sees_later=False, head=HeadConfig("none"))


class LateEncoder:
    """Prepares texts whose tokens have a vector each: prefixes, expansion, skipped tokens."""

    def __init__(
        self, tokenizer: Tokenizer, config: LateInteraction, model: ModelConfig, max_context: int | None
    ) -> None:
        """`max_context` is the user's own limit of documents. Raises UnsupportedError for a prefix that is no
        token, and for an expansion that the model's attention cannot hide.
        """
        self.config = config
        vocabulary = tokenizer.vocabulary
        self._prefix = {
            True: _token(vocabulary.id_of, config.query_prefix),
            False: _token(vocabulary.id_of, config.document_prefix),
        }
        longest = max_context or min(config.document_tokens, model.max_context)
        self._most = {True: min(config.query_tokens, model.max_context), False: longest}
        self._skipped = np.array([vocabulary.id_of.get(word, -1) for word in config.skipped], np.int64)
        self._added = vocabulary.mask_id if vocabulary.mask_id is not None else vocabulary.eos_id
        if not config.expands:
            return
        if self._added is None:
            raise UnsupportedError("expanding queries requires a mask token or EOS in the tokenizer")
        windows = [layer.window for layer in model.layers if layer.window is not None]
        reaches = min(windows, default=config.query_tokens) >= config.query_tokens
        if not config.sees_expansion and (model.is_causal or not reaches):
            raise UnsupportedError(
                "queries expanded by tokens that others do not see are not supported by models with states, "
                "or with windows shorter than a query"
            )

    def room(self, is_query: bool) -> int:
        """The most tokens of a text, its prefix left out."""
        return self._most[is_query] - (self._prefix[is_query] is not None)

    def marked(self, ids: Sequence[int], is_query: bool) -> tuple[list[int], int]:
        """Return a text's ids with its prefix, a query expanded, and how many at its end are hidden."""
        prefix = self._prefix[is_query]
        found = [*ids[:1], *([] if prefix is None else [prefix]), *ids[1:]]
        if not (is_query and self.config.expands):
            return found, 0
        n_added = max(self._most[True] - len(found), 0)
        assert self._added is not None, "checked when it was made"
        return found + [self._added] * n_added, 0 if self.config.sees_expansion else n_added

    def kept(self, ids: Sequence[int], vectors: FloatArray, is_query: bool) -> FloatArray:
        """Return the vectors [T, width] of a text, a document's without the vectors of skipped tokens."""
        return vectors if is_query else vectors[~np.isin(ids, self._skipped)]


def max_sim(query: FloatArray, document: FloatArray) -> float:
    """The sum over the query's vectors [Q, width] of their best products with the document's [T, width]."""
    return float((query @ document.T).max(axis=1, initial=-np.inf).sum()) if len(document) else 0.0


def _token(id_of: dict[str, int], prefix: str) -> int | None:
    if prefix == "":
        return None
    if prefix not in id_of:
        raise UnsupportedError(
            f"the prefix {prefix!r} of queries or documents must be a token of the tokenizer"
        )
    return id_of[prefix]
