"""Presets that clients created (`/api/create`, `/api/copy`), kept in a file of the user's cache."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kukri.errors import ConfigError, KukriError
from kukri.formats.hub import models_dir
from kukri.host.private_files import make_private, open_private, write_private
from kukri.server.preset import Preset

MAX_PRESETS = 1000  # presets in one file
_MAX_BYTES = 64 << 20
log = logging.getLogger("kukri.server")


def presets_file() -> Path:
    """Where they are kept."""
    return models_dir().parent / "presets.json"


def read_presets() -> list[tuple[str, Preset]]:
    """(name of the model, preset) of each, none without the file; a broken file is logged and left alone."""
    path = presets_file()
    try:
        with open_private(path) as file:
            found = json.loads(file.read(_MAX_BYTES))
        return [_preset(one) for one in found]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError) as error:
        log.warning("presets cannot be read", extra={"file": str(path), "reason": str(error)[:200]})
        return []


def write_presets(presets: Sequence[tuple[str, Preset]]) -> None:
    """Replaces the file. Raises KukriError if it cannot be written."""
    path = presets_file()
    records = [{"model": model, **asdict(preset)} for model, preset in presets]
    try:
        make_private(path.parent)
        write_private(path, json.dumps(records).encode())
    except OSError as error:
        raise KukriError(f"the preset cannot be saved: {error.strerror}") from None


def _preset(record: Mapping[str, Any]) -> tuple[str, Preset]:
    fields = {**record}
    model = fields.pop("model")
    preset = Preset(**fields | {"messages": tuple(fields["messages"])})
    if not (isinstance(model, str) and isinstance(preset.name, str) and isinstance(preset.sampling, dict)):
        raise ValueError("a preset must have a model, a name and parameters")
    return model, preset
