"""Any small language model: it drafts by the larger model's tokens, or by tokens of its own.

With tokens of its own it reads the request's text in these, and what it drafts is encoded again in the
larger model's tokens. Texts are cut into tokens in more than one way, so fewer drafts are accepted than with
the same tokens, and no answer differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from kukri.engine.draft_kinds.kind import DraftKind, LargerModel
from kukri.engine.draft_model import DraftModel, DraftSetup, DraftSource, ModelDrafts
from kukri.errors import ConfigError
from kukri.formats.checkpoint import open_checkpoint
from kukri.kernels.arrays import IntArray
from kukri.models import Model, load_model
from kukri.tokenizer import Tokenizer, load_tokenizer
from kukri.tokenizer.translation import TranslatedText, Translation


class TextDrafts(ModelDrafts):
    """One request's drafts: its tokens, positions and pages are of the small model's text."""

    def __init__(self, *args: Any) -> None:
        """`args` are ModelDrafts' arguments, the translation, the prompt's text, and its number of tokens."""
        *others, translation, text, n_read = args
        super().__init__(*others)
        self.tokens: IntArray = np.empty(self._max_context, np.int32)
        self._back, self._text = translation.back, text
        self._n_read = n_read  # the request's tokens that it has read
        self._proposed: list[int] = []  # the last drafts in the request's tokens
        self._length: float = max(len(text.ids) / n_read, 1.0)  # own tokens for one of the request's
        self.cost_factor = self._length
        self._take(0)

    def follow(self, tokens: IntArray, n_tokens: int) -> None:
        new: list[int] = tokens[self._n_read : n_tokens].tolist()
        self._count(self._proposed, new)
        self._n_read, self.n_to_come = n_tokens, len(tokens) - n_tokens
        self._proposed, self.drafts = [], []
        self._take(self._text.push(new))

    def chances(self, n: int) -> Iterator[float]:
        return super().chances(n if self.n_tokens and self._text.is_complete else 0)

    def propose(self, n: int) -> list[int]:
        self._proposed = self._back(self.drafts)[:n]
        return self._proposed

    def n_own(self, n: int) -> int:
        """How many tokens of its own it takes to draft `n` of the request's."""
        return min(ceil(n * self._length), self._max_context - self.n_tokens)

    def _take(self, start: int) -> None:
        """Takes the text's tokens from `start` on. Those that are as they were in the cache stay there."""
        ids = self._text.ids
        self._is_readable = self._is_readable and len(ids) < self._max_context
        if not ids or not self._is_readable:
            return
        new = np.array(ids[start:], np.int32)
        stop = min(self.n_cached, len(ids) - 1)  # the last one gives the first draft
        differs = np.flatnonzero(self.tokens[start:stop] != new[: max(stop - start, 0)])
        self.n_cached = start + int(differs[0]) if len(differs) else stop
        self.tokens[start : len(ids)] = new
        self.n_tokens = len(ids)


class TextDraftModel(DraftModel):
    """Computes drafts by a model with another tokenizer."""

    kind = TextDrafts

    def __init__(self, translation: Translation, small: Model, setup: DraftSetup) -> None:
        """`translation` is from the larger model's tokens to the small one's, which may be more."""
        super().__init__(small, replace(setup, max_context=2 * setup.max_context))
        self._translation, self._n_vocab = translation, small.config.n_vocab

    def drafts_for(self, prompt: IntArray) -> Callable[[], ModelDrafts]:
        """See DraftModel.drafts_for. Translates the prompt, once for all answers."""
        text = TranslatedText(self._translation)
        text.push(prompt[: 2 * self._max_context].tolist())  # a longer one has too many tokens here too
        return lambda: self.drafts(self._translation, text.copy(), len(prompt))

    def compute(self, wanted: Sequence[tuple[Any, int]]) -> None:
        super().compute([(drafts, drafts.n_own(n)) for drafts, n in wanted])


def _read(path: Path, larger: LargerModel) -> DraftSource:
    """Raises ConfigError if it is not a language model.

    Ids that only one of the two has a token for, as they pad their vocabularies differently, do not matter.
    """
    with open_checkpoint(path, None) as checkpoint:
        config, own = checkpoint.config, load_tokenizer(checkpoint.tokenizer)
        if config.head.kind != "language_model":
            raise ConfigError(f"{path} cannot draft, because it generates no text")
        model = load_model(checkpoint.weights(config), config)
    texts = zip(_texts(own), _texts(larger.tokenizer), strict=False)
    if all(a == b for a, b in texts if a and b):
        return DraftSource(model, DraftModel)
    return DraftSource(model, partial(TextDraftModel, Translation(larger.tokenizer, own)))


def _texts(tokenizer: Tokenizer) -> list[str]:
    """The text of each id, "" for rows that are padding: see the writers of GGUF files."""
    tokens = tokenizer.vocabulary.tokens
    return ["" if text == f"[PAD{i}]" else text for i, text in enumerate(tokens)]


LANGUAGE_MODEL = DraftKind(_read)
