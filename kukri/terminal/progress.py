"""Progress bars for slow work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from kukri.errors import printable
from kukri.terminal.output import say

_PATIENCE_S = 1.0  # loading may take this long without a bar


def loading_bar() -> AbstractContextManager[Callable[[int, int], None]]:
    """Yields a `progress` for `LLM`: a bar on a terminal, once loading has taken a second."""
    return _bar_of_both("loading", "DownloadColumn", _PATIENCE_S)


def counting_bar(what: str = "tokens") -> AbstractContextManager[Callable[[int, int], None]]:
    """Yields a function of (tokens done, all of them), which moves a bar on a terminal."""
    return _bar_of_both(what, "MofNCompleteColumn", 0.0)


@contextmanager
def _bar_of_both(title: str, amounts: str, patience_s: float) -> Iterator[Callable[[int, int], None]]:
    """Yields a function of (amount done, all of it), which shows a bar once `patience_s` seconds are over."""
    started_s = time.monotonic()
    with ExitStack() as stack:
        bars: list[Any] = []

        def show(done: int, total: int) -> None:
            if not bars and time.monotonic() - started_s >= patience_s:
                columns = title, "BarColumn", amounts, "TimeRemainingColumn"
                bars.append(_opened(stack, *columns, total=total))
            for bar in bars:
                bar.update(0, completed=done, total=total)

        yield show if sys.stderr.isatty() else lambda done, total: None


@contextmanager
def waiting(title: str) -> Iterator[Callable[[str], None]]:
    """Yields a function of a text, which shows the title, seconds since its first call and the text.

    Without a terminal, the first call prints the title.
    """
    with ExitStack() as stack:
        shows: list[Callable[[str], None]] = []

        def show(text: str) -> None:
            if not shows:
                shows.append(_seconds(stack, title))
            shows[0](text)

        yield show


def _seconds(stack: ExitStack, title: str) -> Callable[[str], None]:
    """Shows a title, seconds and a text until the stack is closed; the function given changes the text."""
    if not sys.stderr.isatty():
        say(title)
        return lambda text: None
    bar = _opened(stack, title, "TimeElapsedColumn", "{task.description}")
    return lambda text: bar.update(0, description=printable(text))


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int, str], None]]:
    """A progress bar on a terminal, nothing elsewhere; each call names the work that begins."""
    if not sys.stderr.isatty():
        yield lambda amount, text: None
        return
    with ExitStack() as stack:
        columns = "{task.description}", "BarColumn", "TaskProgressColumn", "TimeRemainingColumn"
        bar, under_way = _opened(stack, *columns, total=total), [0]

        def advance(amount: int, text: str) -> None:
            bar.update(0, advance=under_way[0], description=printable(text))
            under_way[0] = amount

        yield advance


def _opened(stack: ExitStack, *columns: str, total: int | None = None) -> Any:
    """Show a bar with the task 0 until the stack is closed; columns are rich's, by name, or texts."""
    from rich import progress
    from rich.console import Console

    made = [
        getattr(progress, one)() if one.endswith("Column") else progress.TextColumn(one, markup=False)
        for one in columns
    ]
    bar = stack.enter_context(progress.Progress(*made, console=Console(stderr=True), transient=True))
    bar.add_task("", total=total)
    return bar
