"""Files and directories that appear under their names whole or not at all."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kukri.host.files import clear, replace_file
from kukri.host.os_calls import locked, sync_directory

_SUFFIX = ".kukri-part"  # no other program's
_ABANDONED_S = 24 * 3600.0  # without locks: a file that nobody has written to for so long


@contextmanager
def unfinished(target: Path, *, is_directory: bool = False) -> Iterator[Path]:
    """A path next to the target to write to, which becomes the target at the end of the block.

    If the block raises it is removed, as is what killed processes left in the same directory: a lock, which
    ends with its process, tells theirs from those at work. Raises OSError.
    """
    _remove_abandoned(target.parent)
    path = target.with_name(f".{target.name}.{os.getpid()}{_SUFFIX}")
    if is_directory:
        path.mkdir()
    else:
        path.touch()
    try:
        with locked(path):
            yield path
            replace_file(path, target)
            sync_directory(target.parent)
    finally:
        clear(path)


def _remove_abandoned(directory: Path) -> None:
    for path in directory.glob(f".*{_SUFFIX}"):
        with suppress(OSError), locked(path, wait=False) as is_abandoned:
            if is_abandoned or (is_abandoned is None and time.time() - path.stat().st_mtime > _ABANDONED_S):
                clear(path)
