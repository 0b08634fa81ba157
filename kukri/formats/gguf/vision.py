"""The encoder of images in a GGUF file of its own, as llama.cpp has it (`mmproj`).

Keys get the names of config.json and preprocessor_config.json, so that a family reads both formats alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kukri.errors import FormatError, UnsupportedError, UnusedTensorError, brief, brief_list
from kukri.formats.gguf.mmproj_names import (
    FAMILIES,
    MERGE,
    SCALE,
    Clip,
    clip_of,
    colour_order,
    interleaved_rows,
    stored_name,
)
from kukri.formats.gguf.reader import GGUFFile, GGUFTensor
from kukri.formats.huggingface.vision import EncoderWeights, vision_config
from kukri.kernels.arrays import ByteArray, FloatArray
from kukri.kernels.weight_handles import Weight
from kukri.models.keys import Keys
from kukri.quant.blocks import dequantize
from kukri.vision.config import VisionConfig
from kukri.vision.encoder import VisionFamily
from kukri.vision.encoders import vision_families
from kukri.vision.processors import ImageProcessor, image_processor

_LAYER = re.compile(r"v\.blk\.\d+")


def width_of(file: GGUFFile) -> int:
    """The width of the rows of embeddings that an encoder makes. Raises FormatError, UnsupportedError."""
    keys = Keys(file.metadata, file.path, "")
    if keys.text("general.architecture") != "clip" or not keys.flag("clip.has_vision_encoder"):
        raise UnsupportedError(f"{file.path} must hold an encoder of images: give an mmproj file (--mmproj)")
    return keys.whole("clip.vision.projection_dim")


class Mmproj(NamedTuple):
    """What a file states: the family and the encoder, and how pictures come to it."""

    family: VisionFamily
    config: VisionConfig
    processor: ImageProcessor


def read_mmproj(
    file: GGUFFile, d_text: int, text: Mapping[str, Any], token_id: Callable[[str], int]
) -> Mmproj:
    """What a file states, before a text of the width `d_text`, of whose config.json `text` are keys.

    `token_id` finds a token among the text's. Raises FormatError on keys that are missing or nonsense, and
    UnsupportedError for other families.
    """
    keys, whole = Keys(file.metadata, file.path, "clip.vision."), Keys(file.metadata, file.path, "clip.")
    with keys.reading(), whole.reading():
        if (width := width_of(file)) != d_text:
            raise keys.error("projection_dim", f"is {width}, and rows of the text have {d_text} numbers")
        projector = (keys if keys.has("projector_type") else whole).text("projector_type")
        named = [(name, clip) for name, clip in FAMILIES.items() if clip.projector == projector]
        if not named:
            known = ", ".join(one.projector for one in FAMILIES.values())
            raise whole.unsupported("projector_type", f"is {brief(projector)}: only {known} are supported")
        # the first of two with this name has tensors that the last lacks
        name, clip = next((one for one in named if _has_all(file, one[1])), named[-1])
        if not whole.flag(f"use_{clip.activation}", not clip.states_activation):
            raise whole.unsupported(f"use_{clip.activation}", "is not true, and nothing else is supported")
        vision = _vision_config(keys, file, clip)
        own = clip.read(keys, file)
        stated = {
            "model_type": name,
            "vision_config": vision,
            "text_config": text,
            "image_token_id": 0,
            **own,
        }
        config = vision_config(stated, file.path, d_text)
        assert config is not None, "the family is known"
        processor = image_processor(_preprocessor(keys, clip, vision), {}, stated)
    config = replace(config, image_token_id=token_id(processor.token))
    return Mmproj(vision_families()[config.family], config, processor)


def _has_all(file: GGUFFile, clip: Clip) -> bool:
    return all(f"{tensor}.weight" in file.tensors for tensor in clip.names.values())


def _vision_config(keys: Keys, file: GGUFFile, clip: Clip) -> dict[str, Any]:
    """The keys of config.json's `vision_config`, of all families."""
    n_layers = keys.whole("block_count", least=0, most=1 << 10)  # 0: there is no encoder
    n_heads = keys.whole("attention.head_count", least=0)
    pattern = keys.whole("n_wa_pattern", n_layers + 1)
    is_deep = keys.items("is_deepstack_layers", int) if keys.has("is_deepstack_layers") else []
    positions = file.tensors.get("v.position_embd.weight")
    n_positions = positions.shape[-2] if positions is not None and len(positions.shape) > 1 else 0
    d_model, eps = keys.whole("embedding_length"), keys.positive("attention.layer_norm_epsilon")
    return {
        "hidden_size": d_model,
        "intermediate_size": keys.whole("feed_forward_length", least=0),
        "image_size": keys.whole("image_size"),
        "patch_size": keys.whole("patch_size"),
        **{"layer_norm_eps": eps, "rms_norm_eps": eps},
        "hidden_act": "gelu_pytorch_tanh" if clip.activation == "gelu" else clip.activation,
        **{"num_hidden_layers": n_layers, "depth": n_layers},
        **{"num_attention_heads": n_heads, "num_heads": n_heads},
        **{"num_key_value_heads": n_heads, "head_dim": d_model // max(n_heads, 1)},
        **{"mm_embed_dim": d_model, "output_proj_dims": d_model, "mm_posemb_size": n_positions},
        **{"pooling_kernel_size": keys.whole(SCALE, 3), "position_embedding_size": n_positions},
        **{"spatial_merge_size": keys.whole(MERGE, 2), "temporal_patch_size": 2},
        **{"num_patches": n_positions, "num_position_embeddings": n_positions},
        "window_size": keys.whole("window_size", 112),
        "fullatt_block_indexes": list(range(pattern - 1, n_layers, pattern)),
        "deepstack_visual_indexes": [i for i, is_one in enumerate(is_deep[:n_layers]) if is_one],
    }


def _preprocessor(keys: Keys, clip: Clip, vision: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of preprocessor_config.json; what files leave unsaid is as llama.cpp has it."""
    size, patch = vision["image_size"], vision["patch_size"]
    edges = {"height": size, "width": size, "longest_edge": size}
    stated: dict[str, Any] = {
        "image_processor_type": clip.processor,
        "image_mean": keys.items("image_mean", object),
        "image_std": keys.items("image_std", object),
        **{"patch_size": patch, "encoder_patch_size": patch, "size": edges, "max_image_size": edges},
        **{"merge_size": vision["spatial_merge_size"], "downsample_factor": keys.whole(clip.merge, 2)},
    }
    if clip.processor == "Idefics3":
        stated["size"] = {"longest_edge": keys.whole("preproc_image_size", 4 * size)}
    if clip.processor.startswith("Gemma4"):
        token = (patch * vision["pooling_kernel_size"]) ** 2
        stated["max_soft_tokens"] = keys.whole("image_max_pixels", 280 * token) // token
        stated |= {"pooling_kernel_size": vision["pooling_kernel_size"], "do_normalize": True}
    if clip.processor in ("Qwen2VL", "PaddleOCRVL"):
        token = (patch * vision["spatial_merge_size"]) ** 2
        stated["min_pixels"] = keys.whole("image_min_pixels", 8 * token)
        stated["max_pixels"] = keys.whole("image_max_pixels", 4096 * token)
    return stated


class MmprojWeights(EncoderWeights):
    """The `WeightSource` of the encoder in an mmproj file."""

    def __init__(self, file: GGUFFile, config: VisionConfig) -> None:
        self.path, self._file, self._config = file.path, file, config
        self._clip, self._taken = clip_of(config), set[str]()
        biases = {_LAYER.sub("*", name) for name in file.tensors if name.endswith(".bias")}
        for name in [name for name in file.tensors if _LAYER.match(name) and name.endswith(".weight")]:
            bias = f"{name.removesuffix('weight')}bias"
            if bias not in file.tensors and _LAYER.sub("*", bias) in biases:
                raise FormatError("is missing, but other layers have it", path=self.path, tensor=bias)

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        """A matrix (out, in), as stored but for the layouts of convolutions. Raises FormatError."""
        if name == "model.embed_patches.weight":
            return self._patches(name, shape)
        if name == "model.embed_positions.weight" and self._clip.flat:
            n, width = shape
            tensor, data = self._take(name, (2, n * width // 2))
            data = np.ascontiguousarray(data.reshape(2, n, -1).swapaxes(0, 1)).reshape(n, -1)
            return Weight(data, tensor.type, shape, name)
        is_turned = name == "projector.weight" and self._config.family == "gemma3"
        tensor, data = self._take(name, shape[::-1] if is_turned else shape)
        if is_turned:
            numbers = _numbers(data, tensor, self.path).reshape(tensor.shape)
            data = np.ascontiguousarray(numbers.T).view(np.uint8).reshape(shape[0], -1)
        order = self._order(name, shape[0])
        return Weight(data.reshape(shape[0], -1), tensor.type, shape, name, row_order=order)

    def vector(self, name: str, size: int) -> FloatArray:
        tensor, data = self._take(name, (size,))
        values: FloatArray = dequantize(data, tensor.type).reshape(size)
        order = self._order(name, size)
        if self._clip.flat and name.startswith("model.patch_ln1."):
            order = colour_order(size, writes=False)
        return np.ascontiguousarray(values if order is None else values[order])

    def has(self, name: str) -> bool:
        return stored_name(name, self._config) in self._file.tensors

    def done(self) -> None:
        left = [name for name in self._file.tensors if name not in self._taken | self._clip.unread]
        unused = [name for name in left if not name.startswith(("a.", "mm.a."))]  # tensors of sound
        if unused:
            message = f"holds tensors that no layer of {self._config.family}'s encoder takes: "
            raise UnusedTensorError(message + brief_list([*map(brief, unused)]), path=self.path)

    def _patches(self, name: str, shape: tuple[int, int]) -> Weight:
        """The convolution of patches: a tensor (out, 3, height, width) for each frame."""
        size, n_frames = self._config.patch_size, self._config.n_frames
        stored = [f"{name}.{i}" if i else name for i in range(n_frames)]
        whole = shape[0], 3, size, size
        taken = [self._take(one, shape if self._clip.flat else whole) for one in stored]
        kind = taken[0][0].type
        frames = [_numbers(data, tensor, self.path).reshape(whole) for tensor, data in taken]
        if any(tensor.type != kind for tensor, _ in taken):
            raise FormatError(
                f"is not of the type {kind.name}, as its first part is", path=self.path, tensor=name
            )
        data = np.stack(frames, axis=2)
        data = data.transpose(0, 2, 3, 4, 1) if self._clip.colour_last else data
        rows = np.ascontiguousarray(data).reshape(shape[0], -1).view(np.uint8)
        return Weight(rows, kind, shape, name)

    def _take(self, name: str, shape: tuple[int, ...]) -> tuple[GGUFTensor, ByteArray]:
        stored = stored_name(name, self._config)
        tensor = self._file.readable(stored)
        last = len(shape) - 1  # axes that the file has more, as tables of columns and rows, are one here
        if (*tensor.shape[:last], prod(tensor.shape[last:])) != shape:
            message = f"has shape {tensor.shape} where the configuration asks for {shape}"
            raise FormatError(message, path=self.path, offset=tensor.offset, tensor=stored)
        self._taken.add(stored)
        return tensor, self._file.data(stored)

    def _order(self, name: str, n_rows: int) -> npt.NDArray[Any] | None:
        """The rows of q and k in half-split order, None if the file's order is right."""
        if not self._clip.interleaved or not re.search(r"\.[qk]_proj\.", name):
            return None
        return np.argsort(interleaved_rows(n_rows, self._config.encoder.n_heads))


def _numbers(data: ByteArray, tensor: GGUFTensor, path: Path) -> npt.NDArray[Any]:
    """The numbers of a tensor that is not in blocks, as integers of their size. Raises FormatError."""
    if tensor.type.block_size != 1:
        message = f"is of type {tensor.type.name}, not F32, F16 or BF16"
        raise FormatError(message, path=path, offset=tensor.offset, tensor=tensor.name)
    return np.ascontiguousarray(data).view(f"u{tensor.type.block_bytes}")
