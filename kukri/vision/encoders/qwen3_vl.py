"""Qwen3-VL's eyes, and Qwen3.5's (Qwen team 2025): a vision transformer of any proportions.

Heads rotate by row and column; learned positions are resized. Squares of patches go through an MLP, and so do
those of earlier layers, for the text's first layers to add (DeepStack, Meng et al. 2024).
"""

from __future__ import annotations

from math import isqrt
from typing import Any, Literal

import numpy as np

from kukri.kernels.arrays import FloatArray
from kukri.kernels.op_set import Tensor
from kukri.models.keys import Keys
from kukri.models.layers import MLP, Embedding, LayerNorm, Linear
from kukri.models.weights import WeightSource
from kukri.quant.blocks import dequantize
from kukri.vision.config import VisionConfig
from kukri.vision.encoder import VisionFamily
from kukri.vision.encoders.rotated import RotatedBlock, RotatedEncoder, grid_of_blocks, read_rotated


class _TwoMatrices(MLP):
    up_name, down_name = "linear_fc1", "linear_fc2"


class _Block(RotatedBlock):
    norm_type, mlp_type = LayerNorm, _TwoMatrices


class _Merger:
    """The MLP of merged patches; before it states of layers before the last are normed."""

    def __init__(self, source: WeightSource, name: str, width: int, d_text: int, eps: float) -> None:
        self.norm = LayerNorm(source, f"{name}.norm", width, eps) if name != "projector" else None
        self.hidden = Linear(source, [f"{name}.linear_fc1"], (width,), width)
        self.out = Linear(source, [f"{name}.linear_fc2"], (d_text,), width)

    def __call__(self, ops: Any, x: Tensor) -> Tensor:
        """x [R, width] -> [R, d_text]."""
        x = x if self.norm is None else self.norm(ops, x)
        return self.out(ops, ops.gelu(self.hidden(ops, x), is_exact=True))


class Qwen3Vision(RotatedEncoder):
    """The encoder and its mergers."""

    block_type, norm_type, adds_places = _Block, LayerNorm, True

    def __init__(self, config: VisionConfig, source: WeightSource) -> None:
        super().__init__(config, source)
        encoder = config.encoder
        learned = Embedding(source, "model.embed_positions", encoder.n_positions, encoder.d_model).weight
        self._learned = dequantize(learned.data, learned.type).reshape(config.side, config.side, -1)
        names = ["projector", *(f"deep.{i}" for i in range(len(config.deep_layers)))]
        self.mergers = [_Merger(source, name, self.width, config.d_text, encoder.norm_eps) for name in names]

    def project(self, ops: Any, batch: Any) -> Tensor:
        """See VisionModel.project."""
        widths = (self.width,) * len(self.mergers)
        parts = ops.split(ops.activations(batch, sum(widths)), widths)
        rows = [merger(ops, part) for merger, part in zip(self.mergers, parts, strict=True)]
        return ops.join_heads(rows, 1) if len(rows) > 1 else rows[0]

    def values(self, patches: FloatArray, grid: tuple[int, int]) -> FloatArray:
        """See RotatedEncoder.values."""
        places = between(self._learned, grid, "corners")[tuple(grid_of_blocks(grid, self.config.merge))]
        return np.concatenate([patches, places], axis=1)


def between(grid: FloatArray, shape: tuple[int, int], aligned: Literal["corners", "centres"]) -> FloatArray:
    """Numbers [height, width, D] of a grid at the places of another, bilinearly.

    Both grids' corners are the centres of their first and last cells, or the cells' own corners.
    """
    (rows, row_shares), (columns, column_shares) = (
        _taps(n, size, aligned) for n, size in zip(grid.shape[:2], shape)
    )
    found = np.zeros((*shape, grid.shape[2]), np.float32)
    for y, down in zip(rows, row_shares):
        for x, along in zip(columns, column_shares):
            found += grid[y[:, None], x] * (down[:, None] * along)[..., None]
    return found


def _taps(n: int, size: int, aligned: Literal["corners", "centres"]) -> tuple[Any, Any]:
    """The two of `n` numbers between which each of `size` lies, and their shares: [2, size] each."""
    places = np.arange(size, dtype=np.float32)
    if aligned == "corners":
        places = places * np.float32(n - 1) / np.float32(max(size - 1, 1))
    else:
        half = np.float32(0.5)
        places = (places + half) * np.float32(n) / np.float32(size) - half
    first = np.floor(places)
    indices = np.stack([first, first + 1]).astype(np.int32).clip(0, n - 1)
    return indices, np.stack([1 - (places - first), places - first]).astype(np.float32)


def _read_hf(keys: Keys, vision: Keys, d_text: int) -> VisionConfig:
    side = isqrt(vision.whole("num_position_embeddings", most=1 << 16))
    layers = tuple(vision.items("deepstack_visual_indexes", int))
    vision.expect("hidden_act", "gelu_pytorch_tanh")
    return read_rotated(keys, vision, d_text, "qwen3_vl", side=side, deep_layers=layers)


QWEN3_VISION = VisionFamily(
    "qwen3_vl",
    Qwen3Vision,
    hf_types=("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    read_hf=_read_hf,
    names={
        "model.embed_patches": ("visual.patch_embed.proj",),
        "model.embed_positions": ("visual.pos_embed",),
        "model.layers": ("visual.blocks",),
        "model.norm": ("visual.merger.norm",),
        "projector": ("visual.merger",),
        "deep": ("visual.deepstack_merger_list",),
    },
    defaults={"image_token_id": 151655},
    vision_defaults={
        **{"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16},
        **{"hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "spatial_merge_size": 2},
        **{"temporal_patch_size": 2, "num_position_embeddings": 2304, "deepstack_visual_indexes": []},
    },
)
