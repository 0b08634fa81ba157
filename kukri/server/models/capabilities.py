"""What a model is for, by the headers of its files, in the words of Ollama's API."""

from __future__ import annotations

from pathlib import Path

from kukri.dialects.families import dialect_of
from kukri.errors import KukriError
from kukri.formats.gguf.split import find_mmproj
from kukri.formats.headers import Headers, read_headers
from kukri.formats.huggingface.directory import chat_template_of
from kukri.formats.huggingface.vision import vision_family
from kukri.formats.json_files import read_json
from kukri.opening.model_options import ModelOptions

_POOLED, _RANKS = (1, 2, 3), 4  # what GGUF's pooling_type says of models that are not for texts


def file_capabilities(path: Path, options: ModelOptions) -> tuple[str, ...] | None:
    """Return what the model at a path is for, opened with these options; None if it cannot be read."""
    try:
        headers = read_headers(path)
        template = options.chat_template or stated_template(headers) or ""
        found = capabilities(headers, template)
        return found if options.mmproj is None else tuple(dict.fromkeys([*found, "vision"]))
    except (KukriError, OSError, ValueError):
        return None


def stated_template(headers: Headers) -> str | None:
    """Return the chat template that a model's files have. Raises FormatError for broken files."""
    if headers.form == "safetensors":
        return chat_template_of(headers.path)
    found = headers.stated.get("tokenizer.chat_template")
    return found if isinstance(found, str) else None


def capabilities(headers: Headers, template: str) -> tuple[str, ...]:
    """Return what a model with this chat template is for: Ollama's words, "rerank" and "transcription".

    A language model has vectors too. One whose files say how they are pooled is for them alone.
    """
    config = headers.config
    if config is None:
        return ()
    if config.n_sound:
        return ("transcription",)
    pooling = headers.stated.get(f"{headers.stated.get('general.architecture')}.pooling_type")
    kind = config.head.kind
    if pooling == _RANKS or (kind == "sequence_classification" and not config.is_causal):
        return ("rerank",)
    if kind not in ("language_model", "none"):
        return ()
    if kind == "none" or pooling in _POOLED or (headers.path / "modules.json").is_file():
        return ("embedding",)
    found = ["completion", "embedding"]
    if template:
        found.append("tools")
    if dialect_of(template, ()).can_reason(template):
        found.append("thinking")
    is_directory = headers.form == "safetensors"
    if vision_family(read_json(headers.path / "config.json")) if is_directory else find_mmproj(headers.path):
        found.append("vision")
    return tuple(found)
