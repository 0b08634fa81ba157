"""JSON files that hold one object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kukri.errors import FormatError, MissingFileError, brief, reading
from kukri.formats.file_kinds import file_kind


def read_json(path: Path, *, max_bytes: int = 100_000_000) -> dict[str, Any]:
    """The object in a JSON file. Raises FormatError for anything else, duplicate keys included."""
    with reading(path):
        try:
            if path.stat().st_size > max_bytes:
                raise FormatError(f"must be at most {max_bytes} bytes", path=path)
            return parse_json(path.read_bytes(), path)
        except FileNotFoundError:
            raise MissingFileError("was not found", path=path) from None


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
    """The object in JSON text. Raises FormatError for anything else, duplicate keys included."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            keys = [key for key, _ in pairs]
            again = next(key for i, key in enumerate(keys) if key in keys[:i])
            raise FormatError(f"the key {brief(again)} appears twice", path=path)
        return made

    try:
        value = json.loads(data.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        if (kind := file_kind(data[:32])) is not None:
            raise FormatError(f"must be JSON, not {kind}", path=path) from None
        raise FormatError(f"must be JSON: {' '.join(str(error).split())[:100]}", path=path) from None
    if not isinstance(value, dict):
        raise FormatError(f"must hold a JSON object, not {type(value).__name__}", path=path)
    return value
