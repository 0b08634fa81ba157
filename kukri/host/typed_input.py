"""What a person types at a terminal: editing of lines, pastes, and keys that are not echoed."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

_HISTORY_LINES = 1000
_LONGEST_LINE = 10_000  # characters of a line of the history file


@contextmanager
def no_echo(descriptor: int) -> Iterator[None]:
    """Within the block the terminal does not echo keys, and passes them on before a line is complete."""
    if sys.platform == "win32":
        yield
        return
    import termios

    before = termios.tcgetattr(descriptor)
    quiet = [*before[:3], before[3] & ~(termios.ECHO | termios.ICANON), *before[4:]]
    termios.tcsetattr(descriptor, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


def has_typed(descriptor: int, wait_s: float) -> bool:
    """Return whether a terminal has input that nobody has read, at the latest after `wait_s` seconds."""
    if sys.platform == "win32":
        return False
    with no_echo(descriptor):
        return bool(select.select([descriptor], [], [], wait_s)[0])


def drop_typed(descriptor: int, wait_s: float) -> None:
    """Drop what waits on a terminal, until nothing more comes for `wait_s` seconds."""
    with no_echo(descriptor):
        while has_typed(descriptor, wait_s) and os.read(descriptor, 1 << 16):
            pass


def marks_pastes() -> bool:
    """Return whether readline is told where a paste begins and ends: GNU's is, on most terminals."""
    readline = sys.modules.get("readline")
    is_dumb = os.environ.get("TERM", "dumb") == "dumb"
    return readline is not None and not _is_libedit(readline) and not is_dumb and sys.stdout.isatty()


def _is_libedit(readline: ModuleType) -> bool:
    return "libedit" in (readline.__doc__ or "")


def input_again(prompt: str, text: str) -> str | None:
    """A line that was typed, typed over. None on a system without line editing; raises as `input` does."""
    if sys.platform == "win32":
        return None
    try:
        import readline
    except ImportError:
        return None
    readline.set_startup_hook(lambda: readline.insert_text(text))
    try:
        return input(prompt)
    finally:
        readline.set_startup_hook(None)


@contextmanager
def line_editing(history: Path, complete: Callable[[str, int], str | None]) -> Iterator[None]:
    """Within the block `input` has editing, the lines of a file to go back to, and Tab, which asks
    `complete` as readline does; where a system has them.
    """
    if sys.platform == "win32":
        yield
        return
    try:
        import readline
    except ImportError:  # a Python without it: plain input still works
        yield
        return
    with suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(_HISTORY_LINES)
    readline.set_completer(complete)
    readline.set_completer_delims(" \t\n")
    readline.parse_and_bind("bind ^I rl_complete" if _is_libedit(readline) else "tab: complete")
    if marks_pastes():
        readline.parse_and_bind("set enable-bracketed-paste on")
    try:
        yield
    finally:
        for i in reversed(range(readline.get_current_history_length())):
            if "\n" in (item := readline.get_history_item(i + 1) or "") or len(item) > _LONGEST_LINE:
                readline.remove_history_item(i)  # the file would have each line of a paste as an entry
        with suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(history)
            os.chmod(history, 0o600)  # prompts are private
