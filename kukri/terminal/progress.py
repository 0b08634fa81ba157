"""Progress bars for slow work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from kukri.errors import printable

_PATIENCE_S = 1.0  # loading may take this long without a bar


@contextmanager
def loading_bar() -> Iterator[Callable[[int, int], None]]:
    """Yields a `progress` for `LLM`: a bar on a terminal, once loading has taken a second."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    started_s = time.monotonic()
    with ExitStack() as stack:
        bars: list[Callable[[int], None]] = []

        def progress(done: int, total: int) -> None:
            if not bars and time.monotonic() - started_s > _PATIENCE_S:
                bars.append(_byte_bar(stack, total))
            for show in bars:
                show(done)

        yield progress


def _byte_bar(stack: ExitStack, total: int) -> Callable[[int], None]:
    """Shows a bar of bytes until the stack is closed; the function given moves it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
    task = bar.add_task("loading", total=total)
    return lambda done: bar.update(task, completed=done)


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
        print(title, file=sys.stderr, flush=True)
        return lambda text: None
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(title), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    bar = stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
    task = bar.add_task("", total=None)
    return lambda text: bar.update(task, description=printable(text))


@contextmanager
def counting_bar(what: str = "tokens") -> Iterator[Callable[[int, int], None]]:
    """Yields a function of (tokens done, all of them), which moves a bar on a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int, str], None]]:
    """A progress bar on a terminal, nothing elsewhere; each call names the work that begins."""
    if not sys.stderr.isatty():
        yield lambda amount, text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, under_way = bar.add_task("", total=total), [0]

        def advance(amount: int, text: str) -> None:
            bar.update(task, advance=under_way[0], description=printable(text))
            under_way[0] = amount

        yield advance
