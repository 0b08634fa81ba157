"""A checkpoint directory as transformers saves it: its configuration, and the files of its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kukri.config import ModelConfig
from kukri.dataclass import dataclass
from kukri.errors import FormatError, brief, reading
from kukri.formats.huggingface.config import hf_model_config
from kukri.formats.json_files import read_json


@dataclass(frozen=True)
class TokenizerFiles:
    """Text settings of a directory: the contents of its JSON files, and its chat template's source.

    `eos_ids` end a generation by generation_config.json, or config.json if that is silent; `n_vocab` is
    the number of rows of the embedding, which may be more than there are tokens.
    """

    path: Path  # where tokenizer.json is
    tokenizer: dict[str, Any]
    settings: dict[str, Any]  # tokenizer_config.json over special_tokens_map.json
    chat_template: str | None
    eos_ids: tuple[int, ...]
    n_vocab: int


def directory_config(directory: Path, stated: dict[str, Any]) -> ModelConfig:
    """The configuration that `stated`, the contents of a directory's config.json, describes."""
    return hf_model_config(stated, directory / "config.json", _name_of(directory))


def _name_of(directory: Path) -> str:
    """A readable name: the repository's for a directory in the hub's cache, else the directory's."""
    resolved = directory.resolve()
    if resolved.parent.name == "snapshots":
        return resolved.parent.parent.name.rpartition("--")[2]
    return resolved.name


def tokenizer_files(directory: Path, stated: dict[str, Any], n_vocab: int) -> TokenizerFiles:
    """Text settings of a directory whose config.json holds `stated`. Raises FormatError for broken files."""
    with reading(directory):
        return _tokenizer_files(directory, stated, n_vocab)


def _tokenizer_files(directory: Path, stated: dict[str, Any], n_vocab: int) -> TokenizerFiles:
    if not (directory / "tokenizer.json").is_file():
        raise FormatError("must hold tokenizer.json", path=directory)
    special = _optional(directory / "special_tokens_map.json")
    settings = special | _optional(directory / "tokenizer_config.json")
    generation = _optional(directory / "generation_config.json")
    source = "generation_config.json" if generation.get("eos_token_id") is not None else "config.json"
    ends = (generation if source == "generation_config.json" else stated).get("eos_token_id")
    return TokenizerFiles(
        path=directory / "tokenizer.json",
        tokenizer=read_json(directory / "tokenizer.json"),
        settings=settings,
        chat_template=_chat_template(directory, settings),
        eos_ids=_eos_ids(ends, n_vocab, directory / source),
        n_vocab=n_vocab,
    )


def chat_template_of(directory: Path) -> str | None:
    """Return the source of a directory's chat template. Raises FormatError for broken files."""
    return _chat_template(directory, _optional(directory / "tokenizer_config.json"))


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _eos_ids(stated: Any, n_vocab: int, path: Path) -> tuple[int, ...]:
    """One id, several, or none."""
    ids = [] if stated is None else stated if isinstance(stated, list) else [stated]
    for i in ids:
        if type(i) is not int or not 0 <= i < n_vocab:
            raise FormatError(f"key 'eos_token_id' must hold ids below {n_vocab}, not {brief(i)}", path=path)
    return tuple(ids)


def _chat_template(directory: Path, settings: dict[str, Any]) -> str | None:
    """The source in chat_template.jinja, chat_template.json or tokenizer_config.json.

    Of several it is the one named default. The second file is of models of images.
    """
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FormatError(f"cannot be read: {error}", path=path) from None
    stated = _optional(directory / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(stated, list):
        named = {item.get("name"): item.get("template") for item in stated if isinstance(item, dict)}
        stated = named.get("default")
    if stated is not None and not isinstance(stated, str):
        raise FormatError("key 'chat_template' must be text", path=directory / "tokenizer_config.json")
    return stated
