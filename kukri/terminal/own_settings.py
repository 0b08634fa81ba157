"""An agent's settings in the user's own file, for `kukri launch --install` and `--uninstall`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kukri.errors import ConfigError
from kukri.host.files import remove_file
from kukri.host.private_files import write_private
from kukri.terminal.files import read_text

_MOST_BYTES = 1 << 20
_BACKUP = ".before-kukri"  # ends the name of the original's copy, which is empty if there was no file


def install(file: Path, settings: Mapping[str, Any]) -> Path:
    """Add settings to a JSON file, whole or not at all, and return the backup of the file as it was.

    Only the user may read the file afterwards, because settings hold a key. Raises ConfigError if the file is
    not a JSON object, or a backup is there already, which is never overwritten; OSError.
    """
    file = file.resolve()  # a link stays one
    own, backup = _read(file), file.with_name(file.name + _BACKUP)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(f"the backup {backup} must not be overwritten: use --uninstall first") from None
    with os.fdopen(descriptor, "wb") as kept:
        kept.write(file.read_bytes() if file.exists() else b"")
    _write(file, _merged(own, settings))
    return backup


def uninstall(file: Path, settings: Mapping[str, Any]) -> None:
    """Give the settings of a file that `install` changed the values of the backup, and remove the backup.

    What the user has changed besides stays. Raises ConfigError if there is no backup; OSError.
    """
    file = file.resolve()
    backup = file.with_name(file.name + _BACKUP)
    if not backup.exists():
        raise ConfigError(f"the backup {backup} was not found: --install has not changed {file}")
    had_file = backup.stat().st_size > 0
    restored = _restored(_read(file), settings, _read(backup))
    if restored or had_file:
        _write(file, restored)
    else:
        remove_file(file)
    remove_file(backup)


def _read(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty without a file, or with an empty one."""
    text = read_text(file, _MOST_BYTES) if file.exists() else ""
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"{file} must be JSON without comments: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file} must be a JSON object")
    return found


def _write(file: Path, settings: Mapping[str, Any]) -> None:
    write_private(file, (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode())


def _merged(own: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(own)
    for name, value in settings.items():
        are_objects = isinstance(value, Mapping) and isinstance(own.get(name), Mapping)
        merged[name] = _merged(own[name], value) if are_objects else value
    return merged


def _restored(now: Mapping[str, Any], settings: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    restored = dict(now)
    for name, value in settings.items():
        mine: Any = now.get(name)
        is_shared = isinstance(value, Mapping) and isinstance(mine, Mapping)
        if name not in old and not (is_shared and mine.keys() - value.keys()):
            restored.pop(name, None)
        elif is_shared and isinstance(old.get(name, {}), Mapping):
            restored[name] = _restored(mine, value, old.get(name, {}))
        else:
            restored[name] = old[name]
    return restored
