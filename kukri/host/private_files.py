"""Cache directories and files that only their owner may write.

Machine code is run, and saved keys and values are believed, because of where they lie, so the owner and the
mode of the directory and of the opened file are checked first. What root wrote is trusted too.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkstemp
from typing import BinaryIO

from kukri.errors import ConfigError
from kukri.host.files import remove_file, replace_file
from kukri.host.os_calls import open_carefully, sync_directory, user_id

UNFINISHED = ".new-"  # begins the names of files that are being written


def make_private(directory: Path) -> None:
    """Makes a directory that only its owner may enter (0700), with its parents; checks one that is there.

    Raises ConfigError if another user owns it or may write to it, OSError if it cannot be made.
    """
    try:
        directory.mkdir(parents=True, mode=0o700)
    except FileExistsError:
        check_private(directory)


def check_private(directory: Path) -> None:
    """Raises ConfigError if another user owns a directory or may write to it, OSError if it is not there."""
    found = directory.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{directory} must be a directory: choose another path")
    _check(found, directory)


def open_private(path: Path) -> BinaryIO:
    """A file opened to read, unbuffered.

    Raises ConfigError if it is not a regular file, another user owns it or may write to it; OSError.
    """
    descriptor = open_carefully(path)
    try:
        found = os.fstat(descriptor)  # the file that is open: the path may name another one by now
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{path} must be a regular file: remove it")
        _check(found, path)
        return os.fdopen(descriptor, "rb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def _check(found: os.stat_result, path: Path) -> None:
    user = user_id()
    if user is None:
        return
    if found.st_uid not in (user, 0):
        raise ConfigError(
            f"{path} must not belong to another user (uid {found.st_uid}), who could put anything there: "
            "use a directory of your own"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{path} must not be writable by other users (mode {stat.S_IMODE(found.st_mode):04o}): run "
            f"`chmod go-w {path}`, if you trust what is there, or use another directory"
        )


def write_private(path: Path, data: bytes, *, is_lasting: bool = True) -> None:
    """Writes a file that only its owner may read, whole or not at all. Raises OSError.

    Unless it `is_lasting`, a power cut may damage it, and nothing waits for the disk.
    """
    with writing_private(path, is_lasting=is_lasting) as file:
        file.write(data)


@contextmanager
def writing_private(path: Path, *, is_lasting: bool = True) -> Iterator[BinaryIO]:
    """Open a file to write to, which appears at `path` if the block ends without an exception. Raises
    OSError.
    """
    handle, temporary = mkstemp(prefix=UNFINISHED, dir=path.parent)  # with mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            if is_lasting:
                os.fsync(file.fileno())
        replace_file(temporary, path)
    except BaseException:
        remove_file(temporary)
        raise
    if is_lasting:
        sync_directory(path.parent)
