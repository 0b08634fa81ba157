"""The models of `kukri serve`, from the command line and from its configuration file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, replace
from pathlib import Path
from typing import Any, cast

from kukri.errors import ConfigError
from kukri.formats.digests import split_digest
from kukri.opening.model_options import READERS, ModelOptions, option_fields
from kukri.opening.option_fields import duration_s, flag_of, option_facts, read_option
from kukri.server.settings import ModelSpec, default_name
from kukri.terminal.config_file import MAX_BYTES, read_config
from kukri.terminal.files import read_text
from kukri.terminal.preset_files import PresetFile, preset_file
from kukri.terminal.serve_options import ServeOptions

_OWN_KEYS = ("model", "aliases", "pinned", "keep-alive", "chat-template-file")


def served_models(
    models: Sequence[str], options: ServeOptions, loading: Mapping[str, Any]
) -> list[ModelSpec]:
    """The models of the command line, NAME=MODEL or MODEL, and of the configuration file.

    Without any, the default model. Options of loading hold for all models but the file's models.
    """
    served = [] if options.config is None else configured_models(options.config)
    settings = options.settings()
    presets = [preset_file(text) for text in options.preset or []]
    has_others = bool(served or presets or "model_dir" in settings or "manages_models" in settings)
    given: list[tuple[str, str | None]] = [_name_and_model(text) for text in models]
    if not given and not has_others:
        given = [(default_name(None), None)]
    is_alone = len(given) == 1 and not has_others
    if not is_alone and "adapters" in loading:
        raise ConfigError(
            "--adapter is not supported with several models: give their adapters in a file, --config"
        )
    shared = {n: v for n, v in loading.items() if is_alone or n != "kv_bytes"}  # else of all together
    named = [ModelSpec((name,), ModelOptions(model=model, **shared)) for name, model in given]
    no_readers: dict[str, Any] = dict.fromkeys(READERS)
    for i, one in enumerate(named[1:], 1):  # files are made for one model: the first
        options_left = replace(one.options, **no_readers)
        named[i] = replace(one, options=options_left)
    served = named + served
    for preset in presets:
        _add_preset(served, preset, shared)
    if served and options.alias:
        aliased = dict.fromkeys([*options.alias, *served[0].names])
        served[0] = replace(served[0], names=tuple(aliased))
    names = [name for model in served for name in (*model.names, *model.options.adapters)]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise ConfigError(
            f"two models cannot have the name {doubled!r}: rename one, as in --model NAME=MODEL"
        )
    for name in options.pin or []:
        if name not in names:
            raise ConfigError(f"the model {name!r} of --pin was not found: use {', '.join(names)}")
    pinned = set(options.pin or [])
    return [replace(one, is_pinned=one.is_pinned or bool(pinned & set(one.names))) for one in served]


def _add_preset(served: list[ModelSpec], file: PresetFile, loading: Mapping[str, Any]) -> None:
    """Gives a preset's name to the model that it is of, which is served for it if it is not yet.

    One with a template of its own has a model of its own.
    """
    preset = file.preset
    if file.adapter is not None:
        preset = replace(preset, adapter=f"{preset.name}-adapter")
    i = next(
        (i for i, one in enumerate(served) if file.model in (*one.names, one.options.model)), len(served)
    )
    if i == len(served) or file.template is not None:
        name = default_name(file.model)
        taken = {known for one in served for known in one.names}
        names = () if name in taken or name == preset.name else (name,)
        options = ModelOptions(**{**loading, "model": file.model})
        if file.template is not None:
            options = replace(options, chat_template=file.template)
        i = len(served)
        served.append(ModelSpec(names, options))
    base = served[i]
    options = base.options
    if file.adapter is not None and preset.adapter is not None:
        options = replace(options, adapters={**options.adapters, preset.adapter: str(file.adapter)})
    served[i] = replace(
        base, names=(*base.names, preset.name), options=options, presets=(*base.presets, preset)
    )


def _name_and_model(text: str) -> tuple[str, str]:
    """The name and the model of NAME=MODEL; of a model alone, the name that it has by itself."""
    name, separator, model = text.partition("=")
    if not separator or Path(split_digest(text)[0]).exists():
        return default_name(text), text
    if not name or not model:
        raise ConfigError(f"a model must be given as NAME=MODEL, not {text!r}")
    return name, model


def configured_models(file: Path) -> list[ModelSpec]:
    """The models of a file's table `models`. Raises ConfigError."""
    tables = read_config(file).get("models", {})
    if not isinstance(tables, dict):
        raise ConfigError(f"{file}: 'models' must be a table: [models]")
    return [_model(file, name, table) for name, table in tables.items()]


def _model(file: Path, name: str, table: Any) -> ModelSpec:
    if isinstance(table, str):
        table = {"model": table}
    where = f"{file}: models.{name}"
    if not isinstance(table, dict) or not isinstance(table.get("model"), str):
        raise ConfigError(f"{where}.model is required: a name, a path or a repository")
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
            raise ConfigError(f"{where}.{key} is not supported: use {known}")
        one = flags[key.replace("_", "-")]
        if option_facts(one).repeats and not isinstance(value, dict):
            raise ConfigError(f'{where}.{key} must be a table of files: {{name = "path"}}')
        options[one.name] = read = read_option(one, value, f"{where}.{key}")
        if option_facts(one).group == "readers":
            options[one.name] = {name: str(file.parent / path) for name, path in read.items()}
    template = table.get("chat-template-file")
    if template is not None:
        options["chat_template"] = read_text(file.parent / str(template), MAX_BYTES)
    keep_alive = table.get("keep-alive")
    return ModelSpec(
        (name, *cast("list[str]", aliases)),
        ModelOptions(model=table["model"], **options),
        is_pinned=pinned,
        keep_alive_s=None if keep_alive is None else duration_s(keep_alive, f"{where}.keep-alive"),
    )


def _flags() -> dict[str, Field[Any]]:
    """The options of loading a model that have flags, by their names without dashes."""
    found = ((flag_of(one).removeprefix("--"), one) for one in option_fields().values())
    return {name: one for name, one in found if name}
