"""Digests that pin a model, `NAME@sha256:HEX`: the loaded files are compared with the digest."""

from __future__ import annotations

import re
from hashlib import file_digest, sha256
from pathlib import Path

from kukri.errors import FormatError, reading
from kukri.formats.gguf.split import find_mmproj, part_of, part_paths
from kukri.formats.repos import RepoName, choose, files_in

_PIN = re.compile(r"(?P<name>.+)@sha256:(?P<digest>[0-9a-fA-F]{64})", re.DOTALL)


def split_digest(text: str) -> tuple[str, str | None]:
    """Return a model's name and the digest that pins it, in lower case; None without one."""
    match = _PIN.fullmatch(text)
    return (text, None) if match is None else (match["name"], match["digest"].lower())


def model_digest(path: Path) -> str:
    """Return the SHA-256 of a model at a path, in hexadecimal.

    A file's digest is printed by `sha256sum`. A model of several files (a directory, parts of a
    GGUF file, an encoder of images next to it) has the digest of the lines that `sha256sum` prints of them,
    sorted by their names in its folder. Reads all files. Raises FormatError if one cannot be read.
    """
    with reading(path):
        folder = path if path.is_dir() else path.parent
        digests = {name: file_sha256(folder / name) for name in _model_files(path)}
    if len(digests) == 1 and path.is_file():
        return next(iter(digests.values()))
    lines = (f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return sha256("".join(lines).encode()).hexdigest()


def check_digest(path: Path, digest: str) -> None:
    """Raise FormatError unless the model at a path has a digest. Reads all its files."""
    found = model_digest(path)
    if found != digest:
        raise FormatError(
            f"has the digest sha256:{found}, not sha256:{digest} as its name asks: remove it with `kukri rm` "
            "and fetch it again, or correct the name",
            path=path,
        )


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _model_files(path: Path) -> list[str]:
    """The files that a model is read from, by their names in its folder."""
    if path.is_dir():
        return choose(RepoName(str(path)), files_in(path))
    split, encoder = part_of(path.name), find_mmproj(path)
    parts = (part_paths(path, split[2]) if split else None) or [path]
    return [part.name for part in (*parts, *([encoder] if encoder else []))]
