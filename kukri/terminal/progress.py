"""How far something is that takes a while."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kukri.terminal.output import printable


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int, str], None]]:
    """A bar on a terminal, nothing elsewhere; what is told to it is under way."""
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
