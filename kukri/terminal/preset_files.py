"""Files of `kukri serve --preset`: TOML, or Ollama's Modelfiles."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kukri.dataclass import dataclass
from kukri.errors import ConfigError, RequestError
from kukri.sampling import SamplingParams
from kukri.server.body import refusal_of
from kukri.server.ollama.schema import Options
from kukri.server.preset import Preset
from kukri.terminal.config_file import MAX_BYTES, read_config
from kukri.terminal.files import read_text

_KEYS = ("model", "system", "parameters", "messages", "template", "adapter", "max-context")
_ROLES = ("system", "user", "assistant")
_INSTRUCTION = re.compile(r"(?P<name>[A-Za-z]+)(?:[ \t]+(?P<rest>.*))?")
_IGNORED = ("LICENSE", "REQUIRES", "RENDERER", "PARSER")  # tell nothing that changes an answer here
# features of Go's templates that Jinja lacks
_GO = re.compile(r"\{\{-?\s*(?:[.$]|(?:if|range|end|else|with|template|define|block)\b)")


@dataclass(frozen=True)
class PresetFile:
    """A preset as a file has it: with its model, and perhaps a chat template and the path of an adapter."""

    preset: Preset
    model: str
    template: str | None = None
    adapter: Path | None = None


def preset_file(text: str) -> PresetFile:
    """The preset of FILE or NAME=FILE; without a name, it is the file's. Raises ConfigError."""
    name, separator, path = text.partition("=")
    file = Path(path if separator and not Path(text).exists() else text).expanduser()
    if file == Path(text).expanduser():
        name = file.stem
        if name.lower() == "modelfile":
            raise ConfigError(f"--preset {text} must have a name, as in --preset NAME={text}")
    if not name:
        raise ConfigError(f"a preset must be FILE or NAME=FILE, not {text!r}")
    if file.suffix == ".toml":
        return _from_toml(file, name, read_config(file))
    return _from_modelfile(file, name, read_text(file, MAX_BYTES, holds="preset"))


def _from_toml(file: Path, name: str, table: Mapping[str, Any]) -> PresetFile:
    unknown = next((key for key in table if key not in _KEYS), None)
    if unknown is not None:
        raise ConfigError(f"{file}: {unknown!r} is not supported: use {', '.join(_KEYS)}")
    for key in ("model", "system", "template", "adapter"):
        if not isinstance(table.get(key, ""), str):
            raise ConfigError(f"{file}: {key!r} must be a text")
    limit = table.get("max-context")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ConfigError(f"{file}: 'max-context' must be a number of tokens, at least 1")
    sampling, messages = table.get("parameters", {}), table.get("messages", [])
    if not isinstance(sampling, dict):
        raise ConfigError(f"{file}: 'parameters' must be a table")
    if not isinstance(messages, list) or not all(_is_message(one) for one in messages):
        raise ConfigError(f"{file}: 'messages' must be a list of tables with 'role' and 'content'")
    try:
        SamplingParams(**sampling)
    except (RequestError, TypeError) as error:
        raise ConfigError(f"{file}: 'parameters' cannot be used: {error}") from None
    preset = Preset(name, table.get("system"), sampling, tuple(messages), max_context=limit)
    return _made(file, preset, table.get("model"), table.get("template"), table.get("adapter"))


def _from_modelfile(file: Path, name: str, source: str) -> PresetFile:
    given: dict[str, str] = {}
    options: dict[str, Any] = {}
    messages: list[dict[str, str]] = []
    for instruction, value in _instructions(file, source):
        if instruction == "PARAMETER":
            option, _, text = value.partition(" ")
            parameter = _unquoted(text.strip())
            if option == "stop":
                options.setdefault("stop", []).append(parameter)
            else:
                options[option] = parameter
        elif instruction == "MESSAGE":
            role, _, content = value.partition(" ")
            message = {"role": role.lower(), "content": _unquoted(content.strip())}
            if not _is_message(message):
                raise ConfigError(f"{file}: MESSAGE must have a role of {', '.join(_ROLES)} and a text")
            messages.append(message)
        elif instruction in ("FROM", "SYSTEM", "TEMPLATE", "ADAPTER"):
            given[instruction] = _unquoted(value)
        elif instruction not in _IGNORED:
            raise ConfigError(f"{file}: the instruction {instruction} is not supported")
    try:
        read = Options.model_validate(options)
    except ValidationError as error:
        said = str(refusal_of(error.errors()) or error)
        raise ConfigError(f"{file}: PARAMETER cannot be used: {' '.join(said.split())[:300]}") from None
    sampling = {key: value for key, value in read.sampling().items() if value is not None}
    preset = Preset(name, given.get("SYSTEM"), sampling, tuple(messages), max_context=read.num_ctx)
    return _made(file, preset, given.get("FROM"), given.get("TEMPLATE"), given.get("ADAPTER"))


def _made(
    file: Path, preset: Preset, model: str | None, template: str | None, adapter: str | None
) -> PresetFile:
    if not model:
        raise ConfigError(f"{file} must name a model: FROM in a Modelfile, model in TOML")
    if template is not None and _GO.search(template):
        raise ConfigError(f"{file}: the template must be Jinja, not Go: leave it out for the model's own")
    sibling = file.parent / model
    is_path = model.startswith((".", "/", "~")) or sibling.exists()
    found = str(sibling) if is_path and not model.startswith(("/", "~")) else model
    path = None if adapter is None else file.parent / Path(adapter).expanduser()
    return PresetFile(preset, found, template, path)


def _instructions(file: Path, source: str) -> Iterator[tuple[str, str]]:
    """(name in capitals, value) of each instruction; a value in triple quotes may have several lines."""
    lines = iter(source.splitlines())
    for line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _INSTRUCTION.fullmatch(line.strip())
        if match is None:
            raise ConfigError(f"{file}: {line[:50]!r} must be an instruction of a Modelfile")
        value = match["rest"] or ""
        if value.count('"""') == 1:
            for more in lines:
                value += "\n" + more
                if '"""' in more:
                    break
            else:
                raise ConfigError(f'{file}: the """ after {match["name"]} must be closed')
        yield match["name"].upper(), value.strip()


def _unquoted(text: str) -> str:
    for quote in ('"""', '"'):
        if len(text) >= 2 * len(quote) and text.startswith(quote) and text.endswith(quote):
            return text[len(quote) : -len(quote)]
    return text


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and value["role"] in _ROLES
        and isinstance(value["content"], str)
    )
