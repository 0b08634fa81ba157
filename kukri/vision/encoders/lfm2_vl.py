"""LFM2-VL's eyes (Liquid AI 2025): a SigLIP 2 encoder (Tschannen et al. 2025) of any proportions.

Learned positions are resized to an image's own. The hidden states of neighbouring patches, side by side, go
through an MLP.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt
from typing import Any

from kukri.errors import RequestError
from kukri.kernels.arrays import FloatArray
from kukri.kernels.op_set import Tensor
from kukri.models.keys import Keys
from kukri.models.layers import LayerNorm, Linear
from kukri.models.weights import WeightSource
from kukri.vision.config import SIGLIP_DEFAULTS, VisionConfig, siglip_config
from kukri.vision.encoder import ImagePart, VisionFamily
from kukri.vision.encoders.placed import PlacedEncoder, averaged
from kukri.vision.encoders.siglip import TOWER_HEAD, SiglipBlock, from_squares, squares_of, tower_names
from kukri.vision.image import ImageInput

_MOST_PATCHES = 16384  # that are computed at once


class Lfm2Vision(PlacedEncoder):
    """The encoder and its projector. An image's grid is (rows, columns) of square tiles, (1, 1) for none, and
    (height, width) in patches of the whole picture that follows them, (0, 0) for none.
    """

    block_type, norm_type = SiglipBlock, LayerNorm

    def __init__(self, config: VisionConfig, source: WeightSource) -> None:
        super().__init__(config, source)
        self.norm_merged: LayerNorm | None = None
        if source.has("projector.layer_norm.weight"):
            self.norm_merged = LayerNorm(source, "projector.layer_norm", self.width, 1e-5)
        self.hidden = Linear(source, ["projector.linear_1"], (config.d_projector,), self.width)
        self.projector = Linear(source, ["projector.linear_2"], (config.d_text,), config.d_projector)

    def places(self, grid: tuple[int, int]) -> FloatArray:
        """See PlacedEncoder.places."""
        return averaged(self.learned, grid).reshape(grid[0] * grid[1], -1)

    def merged(self, hidden: FloatArray, grid: tuple[int, int]) -> FloatArray:
        """A square's hidden states side by side."""
        return squares_of(hidden, grid, self.config.merge).reshape(-1, self.width)

    def unmerged(self, grad: FloatArray, grid: tuple[int, int]) -> FloatArray:
        """See VisionModel.unmerged."""
        return from_squares(grad, grid, self.config.merge)

    def project(self, ops: Any, batch: Any) -> Tensor:
        """See VisionModel.project."""
        x = ops.activations(batch, self.width)
        x = x if self.norm_merged is None else self.norm_merged(ops, x)
        return self.projector(ops, ops.gelu(self.hidden(ops, x), is_exact=True))

    def check(self, image: ImageInput) -> None:
        """See VisionModel.check."""
        grids = list(_grids(image))
        n_patches, merge = [height * width for height, width in grids], self.config.merge
        values = self.config.patch_values
        is_well = bool(grids) and image.pixels.ndim == 2 and image.pixels.shape == (sum(n_patches), values)
        is_well = is_well and all(n > 0 and n % merge == 0 for grid in grids for n in grid)
        if not is_well or sum(n_patches) != image.n_tokens * merge**2 or max(n_patches) > _MOST_PATCHES:
            raise RequestError(
                f"the model sees patches of {values} numbers, up to {_MOST_PATCHES} of a tile, not an image "
                f"{list(image.pixels.shape)} with {image.n_tokens} tokens and a grid {image.grid}",
                param="images",
            )

    def parts(self, image: ImageInput) -> Iterator[ImagePart]:
        """Each tile, then the whole picture."""
        first = 0
        for grid in _grids(image):
            patches = image.pixels[first : first + grid[0] * grid[1]]
            first += len(patches)
            yield ImagePart(self.values(patches, grid), grid)


def _grids(image: ImageInput) -> Iterator[tuple[int, int]]:
    """The (height, width) of each tile, and of the whole picture, in patches; none if that cannot be."""
    if len(image.grid) != 4:
        return
    rows, columns, height, width = image.grid
    n_tiles = rows * columns if rows * columns > 1 or not height else 0
    if min(rows, columns) < 1 or min(height, width) < 0 or n_tiles > len(image.pixels):
        return
    if n_tiles:
        side = isqrt(max(len(image.pixels) - height * width, 0) // n_tiles)
        yield from [(side, side)] * n_tiles
    if height:
        yield height, width


def _read_hf(keys: Keys, vision: Keys, d_text: int) -> VisionConfig:
    patch_size, n_positions = (
        vision.whole("patch_size", most=1 << 10),
        vision.whole("num_patches", most=1 << 16),
    )
    side = isqrt(n_positions)
    if side * side != n_positions:
        raise vision.error("num_patches", f"is {n_positions}, which is no square")
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
    names={
        "model.embed_patches": tower_names("embeddings.patch_embedding"),
        "model.embed_positions": tower_names("embeddings.position_embedding"),
        "model.layers": tower_names("encoder.layers"),
        "model.norm": tower_names("post_layernorm"),
        "projector": ("multi_modal_projector",),
    },
    unused=TOWER_HEAD,
    defaults={
        "image_token_id": 396,
        "projector_hidden_act": "gelu",
        "projector_hidden_size": 2560,
        "downsample_factor": 2,
    },
    vision_defaults={
        **SIGLIP_DEFAULTS,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_patches": 256,
        "patch_size": 16,
    },
)
