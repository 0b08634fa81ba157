"""The image encoder of LightOnOCR (LightOn 2025): Pixtral's encoder and projector under other names."""

from __future__ import annotations

from dataclasses import replace

from kukri.models.keys import Keys
from kukri.vision.config import VisionConfig
from kukri.vision.encoders.pixtral import PIXTRAL_VISION, read_pixtral


def _read_hf(keys: Keys, vision: Keys, d_text: int) -> VisionConfig:
    return replace(read_pixtral(keys, vision, d_text), family="lighton_ocr")


LIGHTON_OCR_VISION = replace(
    PIXTRAL_VISION,
    name="lighton_ocr",
    hf_types=("lighton_ocr",),
    read_hf=_read_hf,
    names={
        "model.embed_patches": ("vision_encoder.patch_conv",),
        "model.ln_pre": ("vision_encoder.ln_pre",),
        "model.layers": ("vision_encoder.transformer.layers",),
        "model.norm": ("vision_projection.norm",),
        "projector": ("vision_projection",),
    },
    defaults={**PIXTRAL_VISION.defaults, "image_token_id": 151655},
    vision_defaults={**PIXTRAL_VISION.vision_defaults, "hidden_act": "silu", "patch_size": 14},
)
