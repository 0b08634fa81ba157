"""Files and directories that appear under their names whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from kukri.host.os_calls import locked, sync_directory


@contextmanager
def unfinished(target: Path, *, is_directory: bool = False) -> Iterator[Path]:
    """A path beside the target to write to, which becomes the target at the end of the block.

    If the block raises it is removed, as is what killed processes left of the same target: a lock, which ends
    with its process, tells theirs from those at work. Raises OSError.
    """
    _remove_abandoned(target)
    path = target.with_name(f".{target.name}.{os.getpid()}.part")
    if is_directory:
        path.mkdir()
    else:
        path.touch()
    try:
        with locked(path):
            yield path
            os.replace(path, target)
            sync_directory(target.parent)
    finally:
        _remove(path)


def _remove_abandoned(target: Path) -> None:
    for path in target.parent.glob(f".{escape(target.name)}.*.part"):
        with suppress(OSError), locked(path, wait=False) as is_abandoned:
            if is_abandoned:
                _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
