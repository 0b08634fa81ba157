"""Names of GGUF files: the parts of a split model, `name-00001-of-00003.gguf`, and encoders of images."""

from __future__ import annotations

import re
from pathlib import Path

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def part_of(file: str) -> tuple[str, int, int] | None:
    """(the name before the numbers, the part's own from 1 up, how many there are), from a part's name."""
    match = _PART.fullmatch(file)
    return None if match is None else (match["stem"], int(match["number"]), int(match["count"]))


def part_name(stem: str, number: int, count: int) -> str:
    """`m`, 1, 3 -> `m-00001-of-00003.gguf`."""
    return f"{stem}-{number:05}-of-{count:05}.gguf"


def part_paths(path: Path, count: int) -> list[Path] | None:
    """The paths of all `count` parts, one of which is `path`; None if its name is not that of a part."""
    named = part_of(path.name)
    if named is None or named[2] != count:
        return None
    return [path.with_name(part_name(named[0], number, count)) for number in range(1, count + 1)]


def is_mmproj(name: str) -> bool:
    """True for the name of a file that holds an encoder of images."""
    return name.lower().endswith(".gguf") and "mmproj" in name.lower()
