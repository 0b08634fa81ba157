"""Markdown in the terminal: styles, and the same text however it is cut."""

from __future__ import annotations

import re

import pytest

from kukri.terminal.markdown import MarkdownStream

TEXT = """# A *head*
Plain **bold and `code*` here**, *italic*; 2 * 3, 2**3 and a*b.

* one
  - two
1. three
> quoted
```python
x = "**" * 2  # not a head
# neither
```
~~~
```
~~~
**never closed
"""
SHOWN = """# A head
Plain bold and code* here, italic; 2 * 3, 2**3 and a*b.

• one
  • two
1. three
> quoted
```python
x = "**" * 2  # not a head
# neither
```
~~~
```
~~~
never closed
"""


def rendered(text: str, size: int) -> str:
    stream = MarkdownStream()
    pieces = [stream.push(text[i : i + size]) for i in range(0, len(text), size)]
    return "".join(pieces) + stream.flush()


def test_styles_are_marks_and_nothing_is_lost():
    """Catches a character that is swallowed with a mark, and code whose stars are taken for marks."""
    whole = rendered(TEXT, len(TEXT))
    assert re.sub(r"\x1b\[[0-9;]*m", "", whole) == SHOWN
    assert "\x1b[1mbold and " in whole
    assert "\x1b[3mitalic" in whole
    assert whole.endswith("\x1b[0m\n")  # a style ends with its line


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_the_same_however_it_is_cut(size):
    """Catches ** that comes as two pieces and is taken for two *."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", rendered(TEXT, size))
    assert plain == SHOWN
    assert rendered(TEXT, size) == rendered(TEXT, len(TEXT))


def test_text_is_not_held_back_for_a_line():
    """Catches a paragraph that appears only at its end."""
    stream = MarkdownStream()
    assert stream.push("Once upon a") == "Once upon a"
    assert stream.push(" time") == " time"


class Counted(str):
    """A text that counts the characters that are copied out of it, and out of such copies."""

    n_copied = 0

    def __radd__(self, other):
        return Counted(other + str(self))

    def __getitem__(self, key):
        part = super().__getitem__(key)
        Counted.n_copied += len(part)
        return Counted(part)

    def partition(self, mark):
        Counted.n_copied += len(self)
        return tuple(map(Counted, super().partition(mark)))


@pytest.mark.parametrize("piece", ["prose ", "a\n", "* a\n", "# a\n", "```\n", "**b** `c` "])
def test_the_work_on_a_piece_grows_with_its_length(piece, monkeypatch):
    """Catches a long piece whose rest is copied for each of its characters."""
    n_copied = []
    for n in (500, 1000):
        monkeypatch.setattr(Counted, "n_copied", 0)
        stream = MarkdownStream()
        shown = stream.push(Counted(piece * n)) + stream.flush()
        assert shown == rendered(piece * n, 1)
        n_copied.append(Counted.n_copied)
    assert 0 < n_copied[1] < 2.1 * n_copied[0]
