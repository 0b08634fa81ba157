"""The configuration file of `kukri serve`: its options in TOML, and a table for each model.

    port = 9000
    idle-unload = "10m"

    [models]
    embed = "smollm2-135m"

    [models.chat]
    model = "org/repo:Q4_K_M"
    pinned = true
    kv-memory = "1GiB"

Keys are the names of options without dashes in front. What the command line says comes first.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kukri.errors import ConfigError
from kukri.terminal.files import read_text

MAX_BYTES = 1 << 20  # largest configuration file, and template that it names


def option_defaults(file: Path, parameters: Sequence[Any]) -> dict[str, Any]:
    """The options of a file, by the names of the command's click `parameters`. Raises ConfigError."""
    names = {flag.removeprefix("--"): parameter for parameter in parameters for flag in parameter.opts}
    found: dict[str, Any] = {}
    for key, value in read_config(file).items():
        parameter = names.get(key.replace("_", "-"))
        if key == "models":
            continue
        if parameter is None or key in ("config", "model"):
            hint = ": models have a table, [models]" if key == "model" else ""
            raise ConfigError(f"{file}: {key!r} is not supported{hint}")
        if isinstance(value, list) != bool(parameter.multiple) or isinstance(value, dict):
            kind = "a list" if parameter.multiple else "one value"
            raise ConfigError(f"{file}: {key!r} must be {kind}")
        if isinstance(value, bool) != bool(parameter.is_flag):
            raise ConfigError(f"{file}: {key!r} must {'' if parameter.is_flag else 'not '}be true or false")
        found[parameter.name] = value if isinstance(value, bool | list) else str(value)
    return found


def read_config(file: Path) -> dict[str, Any]:
    """The contents of a file. Raises ConfigError if it is not valid TOML."""
    try:
        return tomllib.loads(read_text(file, MAX_BYTES))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} must be TOML: {error}") from None
