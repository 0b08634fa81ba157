"""Opens a model, whatever its format: a .gguf file, or a directory as transformers saves it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kukri.config import EmbeddingConfig, ModelConfig
from kukri.errors import ConfigError, brief, brief_list, reading
from kukri.formats.gguf.config import model_config, unknown_keys
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.weights import GGUFWeights
from kukri.formats.huggingface.config import check_biases, text_config, unknown_config_keys
from kukri.formats.huggingface.directory import TokenizerFiles, directory_config, tokenizer_files
from kukri.formats.huggingface.vision import VisionWeights, vision_config, vision_family
from kukri.formats.huggingface.weights import SafetensorsWeights, packed_type
from kukri.formats.json_files import read_json
from kukri.formats.sampling_advice import gguf_advice, huggingface_advice
from kukri.formats.sentence_transformers import DenseLayer, directory_embedding, gguf_dense, gguf_embedding
from kukri.models import ARCHITECTURES
from kukri.models.weights import WeightSource
from kukri.vision.config import VisionConfig
from kukri.vision.encoder import VisionModel, load_vision

_log = logging.getLogger("kukri.formats")


@dataclass(frozen=True)
class Checkpoint:
    """An open model. `weights(config)` is a WeightSource for `config`, or for one with a shorter context."""

    path: Path
    config: ModelConfig
    tokenizer: GGUFFile | TokenizerFiles
    weights: Callable[[ModelConfig], WeightSource]
    sampling: Mapping[str, Any]  # fields of SamplingParams that the files advise, unchecked
    embedding: EmbeddingConfig
    dense: tuple[DenseLayer, ...] = ()  # on top of pooled vectors
    vision: VisionConfig | None = None  # the encoder of images, if one runs
    load_vision: Callable[[], VisionModel | None] = lambda: None


@contextmanager
def open_checkpoint(path: Path, quantize: str | None = None) -> Iterator[Checkpoint]:
    """The model at a path, open within the `with` block; weights taken in it stay valid after.

    `quantize` names the type that the matrices of a directory are packed to. Raises ConfigError for one that
    cannot be had, and what the files' readers raise.
    """
    if quantize is not None:
        packed_type(quantize)
    if path.is_dir():
        with reading(path):
            directory = _open_directory(path, quantize)
        yield directory
        return
    if quantize is not None:
        raise ConfigError(f"{path} is packed already: quantize is for safetensors directories")
    with GGUFFile(path) as gguf:
        with reading(path):
            opened = _open_gguf(gguf, path)
        yield opened


def _open_gguf(gguf: GGUFFile, path: Path) -> Checkpoint:
    _report_unknown(path, unknown_keys(gguf))
    advice = gguf_advice(gguf.metadata)
    embedding = gguf_embedding(gguf.metadata, str(gguf.metadata.get("general.architecture")))
    config = model_config(gguf)
    dense = gguf_dense(gguf) if ARCHITECTURES[config.architecture].has_dense else ()
    return Checkpoint(path, config, gguf, partial(GGUFWeights, gguf), advice, embedding, dense)


def _open_directory(directory: Path, quantize: str | None) -> Checkpoint:
    whole = read_json(directory / "config.json")
    stated = text_config(whole)
    config = directory_config(directory, stated)
    family = vision_family(whole)
    vision = vision_config(whole, directory / "config.json", config.d_model)
    generation = directory / "generation_config.json"
    _report_unknown(directory, unknown_config_keys(stated, directory / "config.json"))
    return Checkpoint(
        directory,
        config,
        tokenizer_files(directory, stated, config.n_vocab),
        lambda used: _weights(directory, stated, used, quantize, leaves_images=vision is None),
        huggingface_advice(read_json(generation) if generation.is_file() else {}),
        *directory_embedding(directory, stated),
        vision=vision,
        load_vision=lambda: (
            None
            if family is None or vision is None
            else load_vision(VisionWeights(directory, family, quantize), family, vision)
        ),
    )


def _weights(
    directory: Path, stated: dict[str, Any], config: ModelConfig, quantize: str | None, *, leaves_images: bool
) -> SafetensorsWeights:
    source = SafetensorsWeights(directory, config, quantize)
    if source.n_of_images and leaves_images:
        _log.warning(
            "%s: %d tensors of images are left out: kukri runs the text", directory, source.n_of_images
        )
    check_biases(stated, source.names, directory)
    return source


def _report_unknown(path: Path, keys: list[str]) -> None:
    """Logs the keys that are left out, in one line, which Python prints to stderr unless told otherwise."""
    if keys:
        _log.warning("%s: unknown keys are left out: %s", path, brief_list([*map(brief, keys)]))
