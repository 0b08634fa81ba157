"""The positions of a request at which an intervention works, as data.

A place is "all", "prompt", "last" (of the prompt) or "generated"; a number, from the prompt's end if it is
negative; a list of numbers and of spans [first, stop], whose stop may be None; {"text": "Paris"}, the tokens
of a text wherever the prompt has it, with "tokens": "first" or "last" one of each, with "occurrence": 0 only
those of the first; or {"steps": [0, 5]}, the steps that choose the answer's tokens 0 to 4, a single number
for one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kukri.dataclass import dataclass
from kukri.errors import RequestError, brief
from kukri.kernels.arrays import IntArray

Positions = (
    Literal["all", "prompt", "last", "generated"]
    | int
    | Sequence[int | Sequence[int | None]]
    | Mapping[str, Any]
)
TokenBytes = Callable[[int], bytes]
END = 1 << 31
MAX_PLACES = 4096  # numbers and spans of an intervention
MAX_TEXT = 1000  # characters of a text to find


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens, and the UTF-8 bytes of each token."""

    ids: IntArray
    token_bytes: TokenBytes


NO_PROMPT = Prompt(np.zeros(0, np.int32), lambda token_id: b"")


class Spans:
    """Positions as spans first to stop - 1, in order and without overlap."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        merged: list[tuple[int, int]] = []
        for first, stop in sorted(spans):
            if merged and first <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(stop, merged[-1][1])
            elif first < stop:
                merged.append((first, stop))
        self.spans = tuple(merged)

    def __len__(self) -> int:
        return sum(stop - first for first, stop in self.spans)

    def split(self) -> Iterator[Spans]:
        """Each position by itself, in order."""
        for first, stop in self.spans:
            yield from (Spans([(i, i + 1)]) for i in range(first, stop))

    def mask(self, start: int, n: int) -> npt.NDArray[np.bool_]:
        """Which of the positions `start` to `start + n - 1` belong to it, [n]."""
        found = np.zeros(n, np.bool_)
        for first, stop in self.spans:
            if first < start + n and stop > start:
                found[max(first - start, 0) : stop - start] = True
        return found


def find_places(given: Any, prompt: Prompt) -> Spans:
    """Return the positions of a place. Raises RequestError for others, and places outside the prompt."""
    n = len(prompt.ids)
    named = {"all": (0, END), "prompt": (0, n), "last": (n - 1, n), "generated": (n, END)}
    if isinstance(given, str):
        if given not in named:
            raise RequestError(f"'positions' must be one of {', '.join(named)}, not {brief(given)}")
        return Spans([named[given]])
    if isinstance(given, Mapping):
        return Spans(_named_places(given, prompt))
    many = [given] if type(given) is int else given
    if not isinstance(many, Sequence) or isinstance(many, bytes) or not 1 <= len(many) <= MAX_PLACES:
        raise RequestError(
            f"'positions' must be a name, a number, a list of at most {MAX_PLACES} numbers and spans, "
            f'{{"text": ...}} or {{"steps": ...}}, not {brief(given)}'
        )
    return Spans(_span(one, n, n) for one in many)


def _span(given: Any, n: int, end: int) -> tuple[int, int]:
    """Return the span of a number or of [first, stop]; negative numbers, to -n, count from `end`."""
    first, stop = given if isinstance(given, (list, tuple)) and len(given) == 2 else (given, given)
    if type(first) is not int or (stop is not None and type(stop) is not int):
        raise RequestError(f"a position must be a number or [first, stop], not {brief(given)}")
    if min(first, stop or 0) < -n or max(first, stop or 0) >= END:
        raise RequestError(f"position {brief(given)} must be within the prompt of {n} tokens and its answer")
    first += end if first < 0 else 0
    if stop is given:
        return first, first + 1
    stop = END if stop is None else stop + (end if stop < 0 else 0)
    if first >= stop:
        raise RequestError(f"span {brief(given)} must have positions")
    return first, stop


def _named_places(given: Mapping[str, Any], prompt: Prompt) -> list[tuple[int, int]]:
    if given.keys() == {"steps"}:
        first, stop = _span(given["steps"], 0, 0)
        before = len(prompt.ids) - 1  # the prompt's last token chooses the answer's first
        return [(first + before, min(stop + before, END))]
    if not {"text"} <= given.keys() <= {"text", "tokens", "occurrence"}:
        raise RequestError(f"'positions' must have text or steps, not {brief(sorted(map(str, given)))}")
    text, which = given["text"], given.get("tokens", "all")
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_TEXT:
        raise RequestError(f"'text' must have 1 to {MAX_TEXT} characters, not be {brief(text)}")
    if which not in ("all", "first", "last"):
        raise RequestError(f"'tokens' must be all, first or last, not {brief(which)}")
    found = _occurrences(text.encode(errors="surrogatepass"), prompt)
    if not found:
        raise RequestError(f"the text {brief(text)} was not found in the prompt")
    if (number := given.get("occurrence")) is not None:
        if type(number) is not int or not -len(found) <= number < len(found):
            raise RequestError(f"'occurrence' must be a number within {len(found)}, not {brief(number)}")
        found = [found[number]]
    if which == "all":
        return found
    return [(first, first + 1) if which == "first" else (stop - 1, stop) for first, stop in found]


def _occurrences(text: bytes, prompt: Prompt) -> list[tuple[int, int]]:
    """The spans of tokens that have a byte of each occurrence of a text, which do not overlap."""
    pieces = [prompt.token_bytes(int(i)) for i in prompt.ids]
    ends = np.fromiter(accumulate(map(len, pieces)), np.int64, len(pieces))
    whole, found, at = b"".join(pieces), [], 0
    while (at := whole.find(text, at)) >= 0:
        first = np.searchsorted(ends, at, "right")
        at += len(text)
        found.append((int(first), int(np.searchsorted(ends, at, "left")) + 1))
    return found
