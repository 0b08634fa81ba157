"""The encoder of images of a directory as a GGUF file of its own (`mmproj`), in llama.cpp's layouts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.errors import UnsupportedError
from kukri.formats.gguf.mmproj_names import clip_of, colour_order, interleaved_rows, stored_name
from kukri.formats.gguf.writer import TensorSource, write_gguf
from kukri.formats.huggingface.vision import VisionWeights, vision_config, vision_family
from kukri.formats.json_files import read_json
from kukri.kernels.arrays import FloatArray
from kukri.models.weights import TakenWeights, WeightSource
from kukri.quant.blocks import dequantize
from kukri.quant.types import QUANT_TYPES, QuantType
from kukri.vision.config import VisionConfig
from kukri.vision.encoder import VisionFamily
from kukri.vision.pixels import Scale
from kukri.vision.processors import ImageProcessor
from kukri.vision.processors.gemma4 import Gemma4Processor
from kukri.vision.processors.idefics3 import Idefics3Processor
from kukri.vision.processors.pixtral import PixtralProcessor
from kukri.vision.processors.qwen import QwenProcessor


def write_mmproj(
    directory: Path,
    d_text: int,
    target: Path,
    processor: ImageProcessor,
    others: Mapping[str, FloatArray],
) -> None:
    """Writes the encoder of a directory that sees, before a text of the width `d_text`.

    `processor` is the directory's, and `others` are further tensors, by llama.cpp's names. Convolutions and
    positions become float32; other matrices stay as they are. Raises FormatError and UnsupportedError for
    what cannot be read or written.
    """
    stated = read_json(directory / "config.json")
    family, config = vision_family(stated), vision_config(stated, directory / "config.json", d_text)
    assert family is not None, "the directory sees"
    assert config is not None, "and its family is known"
    write_encoder(target, VisionWeights(directory, family), family, config, processor, others)


def write_encoder(
    target: Path,
    source: WeightSource,
    family: VisionFamily,
    config: VisionConfig,
    processor: ImageProcessor,
    others: Mapping[str, FloatArray],
) -> None:
    """Writes an encoder with the weights of `source`; see `write_mmproj`."""
    weights = TakenWeights(source)
    family.model(config, weights)
    weights.done()
    tensors: dict[str, TensorSource] = {}
    for name, values in {**others, **weights.vectors}.items():
        tensors |= _written(name, values, QUANT_TYPES["F32"], values.shape, config)
    for name, weight in weights.matrices.items():
        tensors |= _written(name, weight.data, weight.type, weight.shape, config)
    write_gguf(target, _metadata(config, processor), tensors)


def _metadata(config: VisionConfig, processor: ImageProcessor) -> dict[str, Any]:
    clip, encoder = clip_of(config), config.encoder
    if encoder.activation != clip.activation and not clip.flat:
        raise UnsupportedError(
            f"activation '{encoder.activation}' of an encoder of {config.family} is not supported by GGUF"
        )
    keys: dict[str, Any] = {
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "embedding_length": encoder.d_model,
        "feed_forward_length": 0 if clip.flat else encoder.d_ffn,  # there is no encoder
        "block_count": 0 if clip.flat else encoder.n_layers,
        "attention.head_count": 0 if clip.flat else encoder.n_heads,
        "attention.layer_norm_epsilon": encoder.norm_eps,
        "projection_dim": config.d_text,
        clip.merge: config.merge,
        **_processor_keys(processor),
    }
    if config.window:
        keys["n_wa_pattern"] = config.full_layers[0] + 1
        keys["window_size"] = config.window * config.patch_size * config.merge
    if config.family == "qwen3_vl":
        keys["is_deepstack_layers"] = np.array([i in config.deep_layers for i in range(encoder.n_layers)])
    return {
        **{"general.architecture": "clip", "general.type": "mmproj", "clip.has_vision_encoder": True},
        **{"clip.projector_type": clip.projector, f"clip.use_{clip.activation}": True},
        **{f"clip.vision.{key}": value for key, value in keys.items()},
    }


def _processor_keys(processor: ImageProcessor) -> dict[str, Any]:
    scale: Scale = processor.scale  # type: ignore[attr-defined]
    keys: dict[str, Any] = {"image_mean": list(scale.mean), "image_std": list(scale.std)}
    if isinstance(processor, Idefics3Processor):
        keys["preproc_image_size"] = processor.longest_edge
    if isinstance(processor, PixtralProcessor):
        keys["image_size"] = processor.longest_edge
    if isinstance(processor, Gemma4Processor):
        keys["image_max_pixels"] = processor.max_tokens * (processor.pool * processor.patch) ** 2
    if isinstance(processor, QwenProcessor):
        keys |= {"image_min_pixels": processor.min_pixels, "image_max_pixels": processor.max_pixels}
    return keys


def _written(
    name: str, data: npt.NDArray[Any], kind: QuantType, shape: tuple[int, ...], config: VisionConfig
) -> dict[str, TensorSource]:
    """The tensors of llama.cpp's that hold one of these, in its layout."""
    clip, stored, f32 = clip_of(config), stored_name(name, config), QUANT_TYPES["F32"]
    if name in ("model.embed_patches.weight", "model.embed_positions.weight"):
        data, kind = dequantize(data, kind).reshape(shape), f32  # llama.cpp's convolutions read float32
    if name == "model.embed_positions.weight":  # several tables have an axis of their own
        data = data.reshape(shape[0], -1, config.encoder.d_model)
        data = np.ascontiguousarray(data.swapaxes(0, 1)) if clip.flat else data
        shape = data.shape if data.shape[1] > 1 else shape
    if clip.flat and name.startswith(("model.embed_patches.weight", "model.patch_ln1.")):
        return {stored: (f32, np.ascontiguousarray(data[..., colour_order(shape[-1], writes=True)]), shape)}
    if name == "model.embed_patches.weight":
        size, n_frames = config.patch_size, config.n_frames
        if clip.colour_last:
            frames = data.reshape(-1, n_frames, size, size, 3).transpose(0, 4, 1, 2, 3)
        else:
            frames = data.reshape(-1, 3, n_frames, size, size)
        return {
            f"{stored}.{i}" if i else stored: (
                kind,
                np.ascontiguousarray(frames[:, :, i]),
                (shape[0], 3, size, size),
            )
            for i in range(n_frames)
        }
    if name == "projector.weight" and config.family == "gemma3":
        data = np.ascontiguousarray(dequantize(data, kind).T)
        return {stored: (f32, data, shape[::-1])}
    if clip.interleaved and re.search(r"\.[qk]_proj\.", name):
        data = data[interleaved_rows(shape[0], config.encoder.n_heads)]
    if clip.splits_qkv and ".attn_qkv." in stored:
        n = shape[0] // 3
        return {
            stored.replace("_qkv", f"_{part}"): (kind, data[i * n :][:n], (n, *shape[1:]))
            for i, part in enumerate("qkv")
        }
    return {stored: (kind, data, shape)}
