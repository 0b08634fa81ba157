"""Files as every system allows them: replaced, deleted, named and written as text.

Windows keeps a file that any process has open or mapped, so who would replace or delete it waits a little.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PureWindowsPath

_PATIENCE_S, _STEP_S = 0.5, 0.02
_IN_USE = (5, 32)  # Windows' errors: access is denied, and a sharing violation
_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)\s*(\..*)?", re.IGNORECASE)  # in every folder of Windows


def replace_file(source: str | Path, target: Path) -> None:
    """Rename a file or directory; a file that is at `target` is replaced. Raises OSError."""
    _patiently(lambda: os.replace(source, target))


def remove_file(path: str | Path) -> None:
    """Delete a file, if it is there. Raises OSError, on Windows also if it stays open or mapped."""
    with suppress(FileNotFoundError):
        _patiently(lambda: os.unlink(path))


def remove_tree(path: Path) -> None:
    """Delete a directory with all in it, or nothing if the system keeps a file of it. Raises OSError."""
    away = path.with_name(f".{path.name}.{os.getpid()}.removed")
    replace_file(path, away)
    shutil.rmtree(away)


def clear(path: Path) -> None:
    """Delete a leftover, a file or a directory, as far as the system allows it."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            remove_file(path)


def _patiently(act: Callable[[], None]) -> None:
    until_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return act()
        except PermissionError as error:
            if getattr(error, "winerror", None) not in _IN_USE or time.monotonic() >= until_s:
                raise
        time.sleep(_STEP_S)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, with the text's own ends of lines. Raises OSError."""
    path.write_text(text, "utf-8", newline="")


def stays_inside(name: str) -> bool:
    """Return whether a relative path that a downloaded file or a server states stays within its folder, on
    Windows too, where `C:x` and `\\\\x` lead out and `NUL` is a device.
    """
    path = PureWindowsPath(name)  # a Windows path is divided by `/` too
    is_plain = not path.anchor and ".." not in path.parts and not re.search(r"[:\x00]", name)
    return is_plain and not any(map(_DEVICE.fullmatch, path.parts))
