"""Files that a user names: read and written whole, with errors that name them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kukri.errors import ConfigError


def read_text(file: Path, max_bytes: int | None = None, *, holds: str = "") -> str:
    """The text of a file. Raises ConfigError if it cannot be read, or is larger than `max_bytes`.

    `holds` names what the file is to hold, for the error.
    """
    try:
        if max_bytes is not None and file.stat().st_size > max_bytes:
            raise ConfigError(f"{file} must be at most {max_bytes} bytes")
        return file.read_text(encoding="utf-8-sig")  # editors of Windows mark UTF-8
    except (OSError, UnicodeDecodeError) as error:
        wanted = f"{holds}: " if holds else ""
        raise ConfigError(f"{wanted}{file} cannot be read: {error}") from None


def check_parent(file: Path) -> None:
    """Raises ConfigError if the directory of a file to write does not exist."""
    if not file.parent.is_dir():
        raise ConfigError(f"the directory {file.parent} was not found")


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Within the block an error of the system, such as a full disk, is a ConfigError about the file."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None
