"""Opens a model, whatever its format: a .gguf file, or a directory as transformers saves it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kukri.config import EmbeddingConfig, ModelConfig
from kukri.dataclass import dataclass, replace
from kukri.errors import ConfigError, FormatError, UnsupportedError, brief, brief_list, reading
from kukri.formats.gguf.config import model_config, unknown_keys
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.split import find_mmproj
from kukri.formats.gguf.weights import GGUFWeights
from kukri.formats.json_files import read_json
from kukri.formats.sampling_advice import gguf_advice, huggingface_advice
from kukri.formats.sentence_transformers import DenseLayer, directory_embedding, gguf_dense, gguf_embedding
from kukri.models import ARCHITECTURES
from kukri.models.keys import Keys
from kukri.models.weights import WeightSource

if TYPE_CHECKING:  # what only directories or models that see need is imported where it is made
    from kukri.formats.huggingface.directory import TokenizerFiles
    from kukri.sound.whisper import WhisperEncoder
    from kukri.vision.config import VisionConfig
    from kukri.vision.encoder import VisionModel
    from kukri.vision.processors import ImageProcessor

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
    load_sound: Callable[[], WhisperEncoder | None] = lambda: None  # the encoder of sound, if there is one
    image_processor: Callable[[], ImageProcessor | None] = lambda: None
    mmproj: Path | None = None  # the file of the encoder, if it has one of its own


def check_packing(path: Path, quantize: str | None, mmproj: str | Path | None) -> None:
    """Raise ConfigError on an option that a GGUF file or a directory does not take."""
    if quantize is not None:
        from kukri.formats.huggingface.weights import packed_type

        packed_type(quantize)
    if path.is_dir() and mmproj is not None:
        raise ConfigError(f"'mmproj' (--mmproj) is not supported: {path} has its encoder in its own files")
    if not path.is_dir() and quantize is not None:
        raise ConfigError(f"'quantize' is not supported: {path} is packed already")


@contextmanager
def open_checkpoint(
    path: Path, quantize: str | None = None, mmproj: Path | None = None
) -> Iterator[Checkpoint]:
    """The model at a path, open within the `with` block; weights taken in it stay valid after.

    `quantize` names the type that the matrices of a directory are packed to, and `mmproj` the file of a GGUF
    model's encoder of images, which is else found by its name. Raises ConfigError for one that cannot be had,
    and what the files' readers raise.
    """
    check_packing(path, quantize, mmproj)
    if path.is_dir():
        with reading(path):
            directory = _open_directory(path, quantize)
        yield directory
        return
    with ExitStack() as files:
        gguf = files.enter_context(GGUFFile(path))
        with reading(path):
            opened = _open_gguf(gguf, path)
        named = mmproj or find_mmproj(path)
        if named is not None:
            try:
                with reading(named):
                    encoder = files.enter_context(GGUFFile(named))
                    opened = _with_mmproj(opened, gguf, encoder, is_named=bool(mmproj))
            except UnsupportedError as error:
                if mmproj is not None:
                    raise
                _log.warning("%s; the model is opened without it", error)
        yield opened


def _open_gguf(gguf: GGUFFile, path: Path) -> Checkpoint:
    _report_unknown(path, unknown_keys(gguf))
    advice = gguf_advice(gguf.metadata)
    embedding = gguf_embedding(gguf, str(gguf.metadata.get("general.architecture")))
    config = model_config(gguf)
    dense = gguf_dense(gguf) if ARCHITECTURES[config.architecture].n_dense else ()
    return Checkpoint(path, config, gguf, partial(GGUFWeights, gguf), advice, embedding, dense)


def _with_mmproj(opened: Checkpoint, gguf: GGUFFile, file: GGUFFile, *, is_named: bool) -> Checkpoint:
    """The checkpoint with the encoder of a file; without it if that was found by name and is another's."""
    from kukri.formats.gguf.vision import MmprojWeights, read_mmproj, width_of
    from kukri.vision.encoder import load_vision

    text, d_text = opened.config, opened.config.d_model
    if not is_named and width_of(file) != d_text:
        _log.warning("%s is of another model than %s, which is opened without it", file.path, opened.path)
        return opened

    keys = Keys(gguf.metadata, gguf.path)
    windows = [layer.window for layer in text.layers if layer.window]
    stated = {
        **{
            "rms_norm_eps": text.norm_eps,
            "vocab_size": text.n_vocab,
            "sliding_window": min(windows, default=1),
        },
        "pad_token_id": keys.whole("tokenizer.ggml.padding_token_id", 0, least=0),
        # Gemma 4's larger sizes: no key says it, and those with embeddings by layer are causal
        "use_bidirectional_attention": None if text.d_per_layer else "vision",
    }

    def token_id(token: str) -> int:
        tokens = keys.items("tokenizer.ggml.tokens", str)
        if token not in tokens:
            raise FormatError(f"must have the token {token!r}, for images, as in {file.path}", path=gguf.path)
        return tokens.index(token)

    family, config, processor = read_mmproj(file, d_text, stated, token_id)
    return replace(
        opened,
        vision=config,
        load_vision=lambda: load_vision(MmprojWeights(file, config), family, config),
        image_processor=lambda: processor,
        mmproj=file.path,
    )


def _open_directory(directory: Path, quantize: str | None) -> Checkpoint:
    from kukri.formats.huggingface.config import text_config, unknown_config_keys
    from kukri.formats.huggingface.directory import directory_config, tokenizer_files
    from kukri.formats.huggingface.vision import (
        VisionWeights,
        read_image_processor,
        vision_config,
        vision_family,
    )
    from kukri.vision.encoder import load_vision

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
        load_sound=lambda: _load_sound(directory, whole, config, quantize),
        image_processor=lambda: None if vision is None else read_image_processor(directory),
    )


def _load_sound(
    directory: Path, stated: Mapping[str, Any], config: ModelConfig, quantize: str | None
) -> WhisperEncoder | None:
    """The encoder of sound in a directory whose config.json holds `stated`; None for a model without one."""
    if not config.n_sound:
        return None
    from kukri.formats.huggingface.vision import VisionWeights
    from kukri.sound.whisper import FAMILY, WhisperEncoder
    from kukri.vision.encoder import load_vision

    keys = Keys(stated, directory / "config.json", defaults=ARCHITECTURES[config.architecture].defaults)
    with keys.reading():
        made = FAMILY.read_hf(keys, keys, config.d_model)
    encoder = load_vision(VisionWeights(directory, FAMILY, quantize), FAMILY, made)
    assert isinstance(encoder, WhisperEncoder), "the family makes it"
    return encoder


def _weights(
    directory: Path, stated: dict[str, Any], config: ModelConfig, quantize: str | None, *, leaves_images: bool
) -> WeightSource:
    from kukri.formats.huggingface.config import check_biases
    from kukri.formats.huggingface.weights import SafetensorsWeights

    source = SafetensorsWeights(directory, config, quantize)
    if source.n_of_images and leaves_images:
        _log.warning(
            "%s: %d tensors of images are left out, because only the text is supported",
            directory,
            source.n_of_images,
        )
    check_biases(stated, source.names, directory)
    return source


def _report_unknown(path: Path, keys: list[str]) -> None:
    """Logs the keys that are left out, in one line, which Python prints to stderr unless told otherwise."""
    if keys:
        _log.warning("%s: unknown keys are left out: %s", path, brief_list([*map(brief, keys)]))
