"""Translates the tokens of one tokenizer into tokens of another, as a text grows, and back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy

from kukri.tokenizer.stream import TextStream
from kukri.tokenizer.tokenizer import Tokenizer

# where a text is cut: no tokenizer of words, and few others, would join the two sides
_CUT = re.compile(r"(?<=\w)(?= \S)")
_SHORT, _LONG = 64, 512  # characters of the end that stay open to change, if it can be cut, and at most


class Translation:
    """Translates between the tokens of `source` and of `target`.

    A special token becomes the special token of the same text, and an end of text the other's end of text.
    Special tokens that `target` does not have are left out.
    """

    def __init__(self, source: Tokenizer, target: Tokenizer) -> None:
        self.source, self.target = source, target
        self.specials = _specials(source, target)
        self._specials_back = _specials(target, source)

    def back(self, ids: Sequence[int]) -> list[int]:
        """Tokens of `source` for `target`'s that continue a text: whole characters, up to an unknown special
        token.
        """
        found: list[int] = []
        text, stream = "", TextStream(self.target, skip_special=False, continues=True)
        for i in ids:
            if i not in self.target.special_ids:
                text += stream.push(i)
                continue
            found, text = found + self.source.encode_inside(text), ""
            if i not in self._specials_back:
                break
            found.append(self._specials_back[i])
        return found + self.source.encode_inside(text)


class TranslatedText:
    """A text that grows by tokens of `source`, as `ids` of `target`, with BOS as that model wants it.

    The end is encoded again as the text grows. Earlier tokens stay, so that they can be kept in a cache, and
    may therefore differ a little from the tokens of the whole text.
    """

    def __init__(self, translation: Translation) -> None:
        self._translation, target = translation, translation.target
        self.ids = [target.bos_id] if target.add_bos and target.bos_id is not None else []
        self._n_bos = self._n_fixed = len(self.ids)  # ids that stay
        self._end = ""  # the text of the others
        self._stream = TextStream(translation.source, skip_special=False)

    @property
    def is_complete(self) -> bool:
        """False if the last token ends within a character, which `ids` do not have then."""
        return self._stream.is_complete

    def copy(self) -> TranslatedText:
        """The same text, to grow by itself."""
        made = copy(self)
        made.ids, made._stream = list(self.ids), copy(self._stream)
        return made

    def push(self, ids: Sequence[int]) -> int:
        """Reads further tokens. Gives the place from which on `self.ids` are new, or may have changed."""
        first, parts, source = self._n_fixed, [self._end], self._translation.source
        for i in ids:
            if i not in source.special_ids:
                parts.append(self._stream.push(i))
                continue
            self._fix("".join(parts) + self._stream.flush())
            parts = []
            if i in self._translation.specials:
                self.ids.append(self._translation.specials[i])
                self._n_fixed += 1
        self._end = "".join(parts)
        if len(self._end) > _SHORT:
            at = max((match.start() for match in _CUT.finditer(self._end, len(self._end) - _LONG)), default=0)
            if len(self._end) - at > _LONG:
                at = len(self._end) - _SHORT
            end = self._end[at:]
            self._fix(self._end[:at])
            self._end = end
        self.ids[self._n_fixed :] = self._encoded(self._end)
        return first

    def _fix(self, text: str) -> None:
        """Append the ids of a text to the ids that no longer change."""
        self.ids[self._n_fixed :] = self._encoded(text)
        self._n_fixed = len(self.ids)

    def _encoded(self, text: str) -> list[int]:
        target = self._translation.target
        return target.encode(text) if self._n_fixed == self._n_bos else target.encode_inside(text)


def _specials(source: Tokenizer, target: Tokenizer) -> dict[int, int]:
    """Return the special tokens of `target` by the special tokens of `source` with the same text."""
    known = {target.token_text(i): i for i in target.special_ids}
    found = {i: known[text] for i in source.special_ids if (text := source.token_text(i)) in known}
    if target.vocabulary.eos_id is not None:
        found |= {i: target.vocabulary.eos_id for i in source.eos_ids if i not in found}
    return found
