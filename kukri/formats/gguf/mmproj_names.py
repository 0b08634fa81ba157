"""The families of llama.cpp's encoders of images (`mmproj`): names and layouts of their tensors, and keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.dataclass import dataclass, replace
from kukri.errors import FormatError, UnsupportedError
from kukri.formats.gguf.reader import GGUFFile
from kukri.models.keys import Keys
from kukri.vision.config import VisionConfig
from kukri.vision.encoders import vision_families

MERGE, SCALE = "spatial_merge_size", "projector.scale_factor"  # two names of the same
_SHARED = {
    "model.embed_patches": "v.patch_embd",
    "model.embed_positions": "v.position_embd",
    "model.ln_pre": "v.pre_ln",
    "model.norm": "v.post_ln",
}
_IN_LAYER = {  # by the last part of a name: families have their own ones
    **dict.fromkeys(("layer_norm1", "norm1", "attention_norm", "input_layernorm"), "ln1"),
    **dict.fromkeys(("layer_norm2", "norm2", "ffn_norm", "pre_feedforward_layernorm"), "ln2"),
    **{"post_attention_layernorm": "attn_post_norm", "post_feedforward_layernorm": "ffn_post_norm"},
    **{"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"},
    **{"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "qkv": "attn_qkv"},
    **dict.fromkeys(("out_proj", "o_proj", "proj"), "attn_out"),
    "gate_proj": "ffn_gate",
    **dict.fromkeys(("up_proj", "fc1", "linear_fc1"), "ffn_up"),
    **dict.fromkeys(("down_proj", "fc2", "linear_fc2"), "ffn_down"),
}
_LAYER = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.(?:\w+\.)??(?P<module>\w+)(?:\.linear)?"
    r"\.(?P<kind>weight|bias|(?:input|output)_(?:min|max))"
)
_OUTSIDE = re.compile(r"(?P<module>.+)(?P<kind>\.(?:weight(?:\.1)?|bias))")  # .1: of the second frame
_DEEP = re.compile(r"deep\.(?P<index>\d+)\.(?:linear_)?(?P<module>norm|fc1|fc2)\.(?P<kind>weight|bias)")


@dataclass(frozen=True)
class Clip:
    """How llama.cpp writes a family: the names of its tensors besides the shared ones, and their layouts."""

    projector: str  # clip.projector_type
    processor: str  # image_processor_type
    merge: str  # the key of `VisionConfig.merge`
    names: Mapping[str, str]
    read: Callable[[Keys, GGUFFile], dict[str, Any]] = lambda keys, file: {}  # config.json's further keys
    activation: str = "gelu"
    colour_last: bool = False  # here; a convolution has the colours first
    interleaved: bool = False  # q and k have the rows of a head's pairs one after another
    states_activation: bool = True  # False: files need not
    flat: bool = (
        False  # patches are a matrix, its columns and their norm by colour; tables of positions apart
    )
    splits_qkv: bool = False  # q, k and v are tensors of their own
    unread: frozenset[str] = frozenset()  # tensors that llama.cpp needs and the text's embedding has


def _idefics3(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    return {"scale_factor": keys.whole(SCALE, 2)}


def _gemma3(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    side = keys.whole("image_size") // keys.whole("patch_size") // keys.whole(SCALE, 4)
    return {"mm_tokens_per_image": side * side}


def _lfm2(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    hidden = _shape_of(file, "mm.1.weight")[0]
    return {"downsample_factor": keys.whole(SCALE, 2), "projector_hidden_size": hidden}


def _pixtral(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    return {"spatial_merge_size": keys.whole(MERGE, 1)}


_MISTRAL3 = Clip(
    "pixtral",
    "Pixtral",
    MERGE,
    {
        **{"projector.linear_1": "mm.1", "projector.linear_2": "mm.2", "model.norm": "mm.input_norm"},
        "projector.patch_merger.merging_layer": "mm.patch_merger",
    },
    _pixtral,
    activation="silu",
    interleaved=True,
    unread=frozenset({"v.token_embd.img_break"}),
)
FAMILIES = {
    "idefics3": Clip("idefics3", "Idefics3", SCALE, {"projector": "mm.model.fc"}, _idefics3),
    "gemma3": Clip(
        "gemma3",
        "Gemma3",
        SCALE,
        {"projector.norm": "mm.soft_emb_norm", "projector": "mm.input_projection"},
        _gemma3,
    ),
    "gemma4": Clip(
        "gemma4v",
        "Gemma4",
        SCALE,
        {
            **{"model.std_bias": "v.std_bias", "model.std_scale": "v.std_scale"},
            "projector": "mm.input_projection",
        },
        colour_last=True,
        states_activation=False,
    ),
    "gemma4_unified": Clip(
        "gemma4uv",
        "Gemma4Unified",
        SCALE,
        {
            **{"model.patch_ln1": "v.patch_norm.1", "model.patch_ln2": "v.patch_norm.2"},
            **{"model.pos_norm": "v.patch_norm.3", "projector": "mm.input_projection"},
        },
        colour_last=True,
        states_activation=False,
        flat=True,
    ),
    "lfm2_vl": Clip(
        "lfm2",
        "Lfm2Vl",
        SCALE,
        {
            **{"projector.linear_1": "mm.1", "projector.linear_2": "mm.2"},
            "projector.layer_norm": "mm.input_norm",
        },
        _lfm2,
        colour_last=True,
    ),
    "lighton_ocr": replace(_MISTRAL3, projector="lightonocr", unread=frozenset()),
    "mistral3": _MISTRAL3,
    "llava": replace(  # Pixtral-12B, whose files name the same projector
        _MISTRAL3,
        names={"projector.linear_1": "mm.1", "projector.linear_2": "mm.2"},
        read=lambda keys, file: {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "paddleocr_vl": Clip(
        "paddleocr",
        "PaddleOCRVL",
        MERGE,
        {
            **{"projector.linear_1": "mm.1", "projector.linear_2": "mm.2"},
            "projector.pre_norm": "mm.input_norm",
        },
    ),
    "qwen2_5_vl": Clip(
        "qwen2.5vl_merger",
        "Qwen2VL",
        MERGE,
        {"projector.0": "mm.0", "projector.2": "mm.2"},
        activation="silu",
        splits_qkv=True,
    ),
    "qwen3_vl": Clip(
        "qwen3vl_merger",
        "Qwen2VL",
        MERGE,
        {"projector.linear_fc1": "mm.0", "projector.linear_fc2": "mm.2"},
    ),
}


def stored_name(name: str, config: VisionConfig) -> str:
    """The name in files of a tensor; itself if they know none."""
    if layer := _LAYER.fullmatch(name):
        module = _IN_LAYER.get(layer["module"], layer["module"])
        return f"v.blk.{layer['layer']}.{module}.{layer['kind']}"
    if deep := _DEEP.fullmatch(name):
        return f"v.deepstack.{config.deep_layers[int(deep['index'])]}.{deep['module']}.{deep['kind']}"
    outside = _OUTSIDE.fullmatch(name)
    names = {**_SHARED, **clip_of(config).names}
    if name in names:
        return names[name]
    return f"{names[outside['module']]}{outside['kind']}" if outside and outside["module"] in names else name


def clip_of(config: VisionConfig) -> Clip:
    """Return how llama.cpp writes the family of an encoder. Raises UnsupportedError if it has none."""
    for name in vision_families()[config.family].hf_types:
        if name in FAMILIES:
            return FAMILIES[name]
    raise UnsupportedError(f"encoder '{config.family}' is not supported by GGUF")


def colour_order(n: int, *, writes: bool) -> npt.NDArray[np.int64]:
    """The numbers of a patch, colour last, in the order of a file that has the colours first, or back."""
    size = isqrt(n // 3)
    order: npt.NDArray[np.int64] = np.arange(n).reshape(size, size, 3).transpose(2, 0, 1).reshape(-1)
    return order if writes else np.argsort(order)


def interleaved_rows(n_rows: int, n_heads: int) -> npt.NDArray[np.int64]:
    """The half-split rows of a matrix of heads in the order in which a head's pairs are neighbours."""
    rows: npt.NDArray[np.int64] = np.arange(n_rows).reshape(n_heads, 2, -1).swapaxes(1, 2).reshape(-1)
    return rows


def _shape_of(file: GGUFFile, name: str) -> tuple[int, ...]:
    tensor = file.tensors.get(name)
    if tensor is None:
        raise FormatError("is missing", path=file.path, tensor=name)
    return tensor.shape
