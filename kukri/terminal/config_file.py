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
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from kukri.errors import ConfigError
from kukri.loading import ModelOptions
from kukri.server.settings import ServedModel, duration_s
from kukri.terminal.options import ManyOptions, size_bytes

_MOST_BYTES = 1 << 20
_OWN_KEYS = ("model", "aliases", "pinned", "keep-alive", "chat-template-file")
_KINDS = {"max_context": int, "n_threads": int, "max_requests": int, "rope_factor": float}


def option_defaults(file: Path, parameters: Sequence[Any]) -> dict[str, Any]:
    """The options of a file, by the names of the command's click `parameters`. Raises ConfigError."""
    names = {flag.removeprefix("--"): parameter for parameter in parameters for flag in parameter.opts}
    found: dict[str, Any] = {}
    for key, value in _read(file).items():
        parameter = names.get(key.replace("_", "-"))
        if key == "models":
            continue
        if parameter is None or key in ("config", "model"):
            hint = ": models have a table, [models]" if key == "model" else ""
            raise ConfigError(f"{file}: there is no option {key!r}{hint}")
        if isinstance(value, list) != bool(parameter.multiple) or isinstance(value, dict):
            kind = "a list" if parameter.multiple else "one value"
            raise ConfigError(f"{file}: {key} must be {kind}")
        if isinstance(value, bool) != bool(parameter.is_flag):
            raise ConfigError(f"{file}: {key} must {'' if parameter.is_flag else 'not '}be true or false")
        found[parameter.name] = value if isinstance(value, bool | list) else str(value)
    return found


def configured_models(file: Path) -> list[ServedModel]:
    """The models of a file's table `models`. Raises ConfigError."""
    tables = _read(file).get("models", {})
    if not isinstance(tables, dict):
        raise ConfigError(f"{file}: models must be a table: [models]")
    return [_model(file, name, table) for name, table in tables.items()]


def _model(file: Path, name: str, table: Any) -> ServedModel:
    if isinstance(table, str):
        table = {"model": table}
    where = f"{file}: models.{name}"
    if not isinstance(table, dict) or not isinstance(table.get("model"), str):
        raise ConfigError(f"{where} needs a model: a name, a path or a repository")
    flags = _flags()
    aliases, pinned = table.get("aliases", []), table.get("pinned", False)
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise ConfigError(f"{where}.aliases must be a list of names")
    if not isinstance(pinned, bool):
        raise ConfigError(f"{where}.pinned must be true or false")
    options: dict[str, Any] = {}
    for key, value in table.items():
        if key in _OWN_KEYS:
            continue
        if key.replace("_", "-") not in flags:
            known = ", ".join([*_OWN_KEYS, *flags])
            raise ConfigError(f"{where} has no option {key!r}: there are {known}")
        field = flags[key.replace("_", "-")]
        options[field] = _value(f"{where}.{key}", field, value)
    template = table.get("chat-template-file")
    if template is not None:
        options["chat_template"] = _text(file.parent / str(template))
    keep_alive = table.get("keep-alive")
    return ServedModel(
        (name, *cast("list[str]", aliases)),
        ModelOptions(model=table["model"], **options),
        is_pinned=pinned,
        keep_alive_s=None if keep_alive is None else duration_s(keep_alive, f"{where}.keep-alive"),
    )


def _value(where: str, field: str, value: Any) -> Any:
    """The value of an option of LLM."""
    if field == "kv_bytes":
        return size_bytes(str(value), where)
    kind = _KINDS.get(field, str)
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise ConfigError(f"{where} must be {'a number' if kind is not str else 'a text'}, not {value!r}")
    return value


def _flags() -> dict[str, str]:
    """The options of loading a model: name without dashes -> field of ModelOptions."""
    found = {}
    for one in fields(ManyOptions):
        info = one.metadata["option"]
        declared = [info.default, *(info.param_decls or ())]  # typer takes the first flag for a default
        flags = [flag for flag in declared if isinstance(flag, str) and flag.startswith("--")]
        found[flags[0].removeprefix("--") if flags else one.name.replace("_", "-")] = one.name
    return found


def _read(file: Path) -> dict[str, Any]:
    text = _text(file)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is no TOML: {error}") from None


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{file} is larger than {_MOST_BYTES} bytes")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
