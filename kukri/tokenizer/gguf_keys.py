"""The keys `tokenizer.*` of a GGUF file, checked as they are read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.errors import FormatError, brief


class TokenizerKeys:
    """Keys of one file, by their names after `tokenizer.ggml.`.

    Methods raise FormatError, naming the file, for a value of another type.
    """

    def __init__(self, metadata: Mapping[str, Any], path: str | os.PathLike[str] | None) -> None:
        self._metadata, self._path = metadata, path
        self.last: str | None = None  # the key that was read last

    def error(self, message: str) -> FormatError:
        """An error about the file."""
        return FormatError(message, path=self._path)

    def get(self, name: str) -> Any:
        """A key as it is stored; None if it is missing."""
        self.last = f"tokenizer.ggml.{name}"
        return self._metadata.get(self.last)

    def text(self, name: str) -> str | None:
        """A string, None if it is missing."""
        return self._text(f"tokenizer.ggml.{name}")

    @property
    def chat_template(self) -> str | None:
        """The chat template, whose key is not a tokenizer's own."""
        return self._text("tokenizer.chat_template")

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        stored = self.get(name)
        if not isinstance(stored, bool | np.bool_ | None):
            raise self.error(f"tokenizer.ggml.{name} must be a boolean")
        return default if stored is None else bool(stored)

    def texts(self, name: str) -> list[str]:
        """A list of strings, empty if the key is missing."""
        stored = self.get(name)
        if stored is not None and (not isinstance(stored, list) or not set(map(type, stored)) <= {str}):
            raise self.error(f"tokenizer.ggml.{name} must be an array of strings")
        return stored or []

    def types(self, n_tokens: int) -> list[int]:
        """The type of each token, empty if the key is missing."""
        stored = self.get("token_type")
        if stored is None:
            return []
        types = np.asarray(stored)
        if types.ndim != 1 or types.dtype.kind not in "iu":
            raise self.error("tokenizer.ggml.token_type must be an array of integers")
        if len(types) != n_tokens:
            raise self.error(f"tokenizer.ggml.token_type must have {n_tokens} entries, not {len(types)}")
        ids: list[int] = types.tolist()
        return ids

    def token_id(self, name: str, default: int | None, n_tokens: int) -> int | None:
        """The id of a special token; None if there is none, or a default is no token."""
        key = f"tokenizer.ggml.{name}_token_id"
        stored = self._metadata.get(key, default)
        if stored is None or (key not in self._metadata and stored >= n_tokens):
            return None
        if isinstance(stored, bool) or not isinstance(stored, int | np.integer):
            raise self.error(f"{key} must be a token id, not {brief(stored)}")
        if stored in (-1, 0xFFFFFFFF):  # how converters write "none"
            return None
        if not 0 <= stored < n_tokens:
            raise self.error(f"{key} must be below {n_tokens}, the size of the vocabulary, not {stored}")
        return int(stored)

    def token_ids(self, name: str, n_tokens: int) -> frozenset[int]:
        """A list of token ids, empty if the key is missing."""
        stored = self.get(name)
        ids = np.zeros(0, np.int32) if stored is None else np.asarray(stored)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not ((ids >= 0) & (ids < n_tokens)).all():
            raise self.error(f"{self.last} must be a list of token ids below {n_tokens}")
        return frozenset(ids.tolist())

    def scores(self, n_tokens: int) -> npt.NDArray[np.floating[Any]]:
        """A finite score for each token, [n_tokens]."""
        stored = self.get("scores")
        scores = np.asarray(() if stored is None else stored)
        if scores.shape != (n_tokens,) or scores.dtype.kind not in "fiu" or not np.isfinite(scores).all():
            raise self.error("tokenizer.ggml.scores must be one finite number for each token")
        return scores

    def merges(self) -> list[tuple[str, str]]:
        """Pairs of tokens to merge, best first; empty if the key is missing."""
        merges = list(map(tuple, map(str.split, self.texts("merges"), repeat(" "))))
        if not set(map(len, merges)) <= {2}:
            wrong = next(i for i, merge in enumerate(merges) if len(merge) != 2)
            raise self.error(f"entry {wrong} of tokenizer.ggml.merges must be two tokens")
        return merges  # type: ignore[return-value]  # checked: pairs

    def charsmap(self) -> bytes:
        """SentencePiece's compiled normalization, empty if there is none; its contents are not checked."""
        stored = self.get("precompiled_charsmap")
        array = np.zeros(0, np.uint8) if stored is None else np.asarray(stored)
        if array.ndim != 1 or array.dtype not in (np.uint8, np.int8):
            raise self.error("tokenizer.ggml.precompiled_charsmap must be an array of bytes")
        return array.tobytes()

    def _text(self, key: str) -> str | None:
        stored = self._metadata.get(key)
        if not isinstance(stored, str | None):
            raise self.error(f"{key} must be a string")
        return stored
