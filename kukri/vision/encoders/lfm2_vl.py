"""The image encoder of LFM2-VL (Liquid AI 2025): a SigLIP 2 encoder (Tschannen et al. 2025) of any
proportions.

Learned positions are resized to an image's own. The hidden states of neighbouring patches, side by side, go
through an MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Any

from kukri.kernels.arrays import FloatArray
from kukri.kernels.op_set import Tensor
from kukri.models.keys import Keys
from kukri.models.layers import LayerNorm, Linear
from kukri.models.weights import WeightSource
from kukri.vision.config import SIGLIP_DEFAULTS, VisionConfig, siglip_config
from kukri.vision.encoder import VisionFamily
from kukri.vision.encoders.placed import PlacedEncoder, averaged
from kukri.vision.encoders.siglip import TOWER_HEAD, TOWER_NAMES, SiglipBlock
from kukri.vision.image import ImageInput


class Lfm2Vision(PlacedEncoder):
    """The encoder and its projector. An image's grid is (rows, columns) of square tiles, (1, 1) for none, and
    (height, width) in patches of the whole picture that follows them, (0, 0) for none.
    """

    block_type, norm_type, by_rows = SiglipBlock, LayerNorm, True

    def __init__(self, config: VisionConfig, source: WeightSource) -> None:
        super().__init__(config, source)
        self.norm_merged: LayerNorm | None = None
        if source.has("projector.layer_norm.weight"):
            self.norm_merged = LayerNorm(source, "projector.layer_norm", self.width, 1e-5)
        self.hidden = Linear(source, ["projector.linear_1"], (config.d_projector,), self.width)
        self.projector = Linear(source, ["projector.linear_2"], (config.d_text,), config.d_projector)

    def resized(self, grid: tuple[int, int]) -> FloatArray:
        return averaged(self.learned, grid)

    def project(self, ops: Any, batch: Any) -> Tensor:
        x = ops.activations(batch, self.width)
        x = x if self.norm_merged is None else self.norm_merged(ops, x)
        return self.projector(ops, ops.map("gelu_exact", self.hidden(ops, x)))

    def grids(self, image: ImageInput) -> Sequence[tuple[int, int]]:
        """Return the grid of each tile, and then the grid of the whole picture."""
        if len(image.grid) != 4:
            return []
        rows, columns, height, width = image.grid
        n_tiles = rows * columns if rows * columns > 1 or not height else 0
        if min(rows, columns) < 1 or min(height, width) < 0 or n_tiles > len(image.pixels):
            return []
        side = isqrt(max(len(image.pixels) - height * width, 0) // max(n_tiles, 1))
        return [(side, side)] * n_tiles + [(height, width)] * (height > 0)


def _read_hf(keys: Keys, vision: Keys, d_text: int) -> VisionConfig:
    patch_size = vision.whole("patch_size", most=1 << 10)
    side = isqrt(n_positions := vision.whole("num_patches", most=1 << 16))
    if side * side != n_positions:
        raise vision.error("num_patches", f"must be a square, not {n_positions}")
    keys.expect("projector_hidden_act", "gelu")
    vision.values = {**vision.values, "image_size": side * patch_size}
    return VisionConfig(
        "lfm2_vl",
        siglip_config(vision, "lfm2_vl"),
        image_size=side * patch_size,
        patch_size=patch_size,
        merge=keys.whole("downsample_factor", most=64),
        d_text=d_text,
        image_token_id=keys.whole("image_token_id", least=0),
        d_projector=keys.whole("projector_hidden_size", most=1 << 18),
    )


LFM2_VISION = VisionFamily(
    "lfm2_vl",
    Lfm2Vision,
    hf_types=("lfm2_vl", "lfm2-vl"),
    read_hf=_read_hf,
    names={**TOWER_NAMES, "projector": ("multi_modal_projector",)},
    unused=TOWER_HEAD,
    defaults={
        "image_token_id": 396,
        "projector_hidden_act": "gelu",
        "projector_hidden_size": 2560,
        "downsample_factor": 2,
    },
    vision_defaults={**SIGLIP_DEFAULTS, "num_patches": 256},
)
