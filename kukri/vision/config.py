"""`VisionConfig`: the sizes and facts of an encoder of images, and of where its rows go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kukri.config import LayerConfig, ModelConfig, RopeConfig
from kukri.dataclass import dataclass
from kukri.errors import ConfigError
from kukri.models.both_ways import BothWaysLayers
from kukri.models.keys import Keys


@dataclass(frozen=True)
class VisionConfig:
    """An encoder of images. Sizes in pixels, patches or elements.

    `encoder` has the shape of its blocks, as of a text model that is not causal; its `max_context` is the
    patches of a tile. `merge`^2 neighbouring patches become one row of embeddings, of width `d_text`.
    """

    family: str  # the name of its `VisionFamily`
    encoder: ModelConfig
    image_size: int  # side of a tile
    patch_size: int  # side of a patch
    merge: int
    d_text: int
    image_token_id: int  # marks the places in a prompt that become rows of embeddings
    # layers of the text where the rows of a run (`ImageSpan`) attend to each other both ways: it is never cut
    attends_both_ways: BothWaysLayers = ""
    whole_tokens: int = 0  # most rows of such a run; 0: the rows of a tile
    d_projector: int = 0  # width of the projector's MLP, if it is one
    projector_eps: float = 0.0  # epsilon of the projector's norm, if it differs from the encoder's
    n_frames: int = 1  # times that a patch repeats its picture, in families that also read videos
    # in the text a row has three positions: of the image, and of its place there (M-RoPE)
    has_places: bool = False
    deep_layers: tuple[int, ...] = ()  # their states are rows for the text's first layers too (DeepStack)
    window: int = 0  # side, in rows of embeddings, of the squares that most layers attend within; 0: none
    full_layers: tuple[int, ...] = ()  # layers that attend to all patches in spite of a window
    # the token that stands for a row in texts whose layers have embeddings of their own
    blank_id: int | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError unless tiles consist of whole patches, and rows of whole squares of patches."""
        if self.image_size % self.patch_size or (self.image_size // self.patch_size) % self.merge:
            raise ConfigError(
                f"tiles of {self.image_size} pixels must consist of squares of {self.merge} x {self.merge} "
                f"patches of {self.patch_size}"
            )

    def has_windows(self, layer: int) -> bool:
        """True if a layer sees patches by the windows of their part: attends within them, or convolves."""
        return self.convolves(layer) or (self.window > 0 and layer not in self.full_layers)

    def convolves(self, layer: int) -> bool:
        """True if a layer convolves over the grid of patches, whose rows are its windows."""
        return self.encoder.layers[layer].is_recurrent

    @property
    def side(self) -> int:
        """Patches along a side of a tile."""
        return self.image_size // self.patch_size

    @property
    def n_patches(self) -> int:
        """Patches of a tile."""
        return self.side**2

    @property
    def patch_values(self) -> int:
        """Numbers of a patch: its red, green and blue."""
        return 3 * self.n_frames * self.patch_size**2

    @property
    def most_run_rows(self) -> int:
        """Rows that a run has at most, if it is never cut."""
        return self.whole_tokens or self.tile_tokens

    @property
    def tile_tokens(self) -> int:
        """Rows of embeddings that a tile becomes."""
        return (self.side // self.merge) ** 2


def read_blocks(
    keys: Keys,
    name: str,
    norm_eps: float,
    max_patches: int,
    n_positions: int,
    *,
    n_layers: str = "num_hidden_layers",
    n_heads: str = "num_attention_heads",
    activation: str = "hidden_act",
    rotates: bool = False,
) -> ModelConfig:
    """An encoder's blocks by the keys of `vision_config`; families name the numbers of layers and heads
    and the activation.

    Up to `max_patches` are computed at once, with learned embeddings of `n_positions`. A head that rotates
    does so in four parts.
    """
    d_model, heads = keys.whole("hidden_size", most=1 << 16), keys.whole(n_heads, most=1 << 12)
    if d_model % ((4 if rotates else 1) * heads):
        parts = " of 4 parts" if rotates else ""
        raise keys.error("hidden_size", f"must be a multiple of {heads} heads{parts}, not {d_model}")
    d_head, layers = d_model // heads, keys.whole(n_layers, most=1 << 10)
    return ModelConfig(
        architecture=name,
        n_layers=layers,
        d_model=d_model,
        n_heads=heads,
        n_kv_heads=heads,
        d_head=d_head,
        d_ffn=keys.whole("intermediate_size", most=1 << 18),
        n_vocab=1,
        norm_eps=norm_eps,
        max_context=max_patches,
        tie_embeddings=False,
        rope=RopeConfig(rotary_dim=d_head) if rotates else RopeConfig(),
        layers=(LayerConfig(use_rope=rotates),) * layers,
        is_causal=False,
        n_positions=n_positions,
        activation=keys.activation(activation),
    )


def siglip_config(keys: Keys, name: str) -> ModelConfig:
    """The blocks of a SigLIP encoder (Zhai et al. 2023), by the keys of config.json's `vision_config`."""
    image_size, patch_size = keys.whole("image_size", most=1 << 13), keys.whole("patch_size", most=1 << 10)
    keys.expect("num_channels", 3)
    n_patches = max((image_size // patch_size) ** 2, 1)
    return read_blocks(keys, name, keys.positive("layer_norm_eps"), n_patches, n_patches)


# For keys that `vision_config` leaves out: the values of transformers' classes
SIGLIP_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
