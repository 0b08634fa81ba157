"""Names of GGUF files: the parts of a split model, `name-00001-of-00003.gguf`, and encoders of images."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
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
    """The paths of all `count` parts, one of which is `path`; None if its name is no part's."""
    named = part_of(path.name)
    if named is None or named[2] != count:
        return None
    return [path.with_name(part_name(named[0], number, count)) for number in range(1, count + 1)]


def is_mmproj(name: str) -> bool:
    """True for the name of a file that holds an encoder of images."""
    return name.lower().endswith(".gguf") and "mmproj" in name.lower()


_ENCODER_TYPES = ("f16", "bf16", "q8_0", "f32")  # the first that there is


def fitting_mmproj(model: str, files: Iterable[str]) -> str | None:
    """The one of a folder's files that holds a model's encoder: `mmproj` in its name, and else nothing but
    what the model's begins with, and a type. The one that has most in common, and of these the first type.
    """
    found: list[tuple[int, int, str]] = []
    for file in sorted(files):
        name = re.sub(r"[-_.]?mmproj[-_.]?", "", Path(file).stem.lower())
        stem, _, kind = re.fullmatch(rf"(.*?)(?:(^|[-_.])({'|'.join(_ENCODER_TYPES)}))?", name).groups()  # type: ignore[union-attr]
        if is_mmproj(file) and file != model and model.lower().startswith(stem):
            found.append((-len(stem), _ENCODER_TYPES.index(kind) if kind else len(_ENCODER_TYPES), file))
    return min(found)[2] if found else None


def find_mmproj(model: Path) -> Path | None:
    """The file next to a model's with its encoder, by their names."""
    try:
        files = os.listdir(model.parent) if model.is_file() else []
    except OSError:  # a folder may be opened and not listed
        files = []
    found = fitting_mmproj(model.name, files)
    return None if found is None else model.with_name(found)
