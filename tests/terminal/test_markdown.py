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
