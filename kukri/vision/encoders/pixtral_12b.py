"""The image encoder of Pixtral-12B (Agrawal et al. 2024): each patch is a row, without a norm before its MLP.

Its checkpoints have LLaVA's class and Pixtral's encoder. LLaVA checkpoints with other encoders are not read.
"""

from __future__ import annotations

from dataclasses import replace

from kukri.models.keys import Keys
from kukri.models.layers import NoNorm
from kukri.vision.config import VisionConfig
from kukri.vision.encoders.pixtral import PIXTRAL_VISION, Pixtral, read_pixtral


class Pixtral12(Pixtral):
    """The encoder and its projector."""

    norm_type, merges = NoNorm, False


def _read_hf(keys: Keys, vision: Keys, d_text: int) -> VisionConfig:
    vision.expect("model_type", "pixtral")
    keys.expect("vision_feature_select_strategy", "full")
    token = "image_token_id" if keys.has("image_token_id") else "image_token_index"
    own = {"image_token_id": keys.whole(token, least=0), "spatial_merge_size": 1}
    keys.values = {**keys.values, **own}
    return replace(read_pixtral(keys, vision, d_text), family="llava")


PIXTRAL_12B_VISION = replace(
    PIXTRAL_VISION,
    name="llava",
    model=Pixtral12,
    hf_types=("llava",),
    read_hf=_read_hf,
    defaults={
        **PIXTRAL_VISION.defaults,
        **{
            "image_token_index": 32000,
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
        },
    },
    vision_defaults={**PIXTRAL_VISION.vision_defaults, "model_type": "pixtral"},
)
