"""Processors of images: from the pixels of a picture to what a model's encoder reads, family by family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kukri.errors import UnsupportedError
from kukri.vision.processors.gemma3 import Gemma3Processor
from kukri.vision.processors.gemma4 import Gemma4Processor, Gemma4UnifiedProcessor
from kukri.vision.processors.idefics3 import Idefics3Processor
from kukri.vision.processors.lfm2_vl import Lfm2VlProcessor
from kukri.vision.processors.pixtral import LightOnOcrProcessor, PixtralProcessor
from kukri.vision.processors.processor import Detail, ImageProcessor
from kukri.vision.processors.qwen import Lfm3VlProcessor, PaddleOcrProcessor, QwenProcessor

_BY_TYPE: dict[str, type[ImageProcessor]] = {
    "Gemma3": Gemma3Processor,
    "Gemma4": Gemma4Processor,
    "Gemma4Unified": Gemma4UnifiedProcessor,
    "Idefics3": Idefics3Processor,
    "Lfm2Vl": Lfm2VlProcessor,
    "PaddleOCRVL": PaddleOcrProcessor,
    "Pixtral": PixtralProcessor,
    "Qwen2VL": QwenProcessor,
    "Qwen2_5_VL": QwenProcessor,
    "SmolVLM": Idefics3Processor,
}

# Models whose files name another family's, or code of their own
_BY_MODEL: dict[Any, type[ImageProcessor]] = {
    "lfm3_vl": Lfm3VlProcessor,
    "lighton_ocr": LightOnOcrProcessor,
}


def image_processor(
    preprocessor: Mapping[str, Any], processor: Mapping[str, Any], model: Mapping[str, Any]
) -> ImageProcessor:
    """The image processor of a checkpoint.

    `preprocessor` is its preprocessor_config.json, `processor` its processor_config.json, which wins, and
    `model` its config.json; the first two are empty if there is no such file. Raises UnsupportedError for a
    family that is not known here, FormatError on values that no checkpoint has.
    """
    own = processor.get("image_processor")
    by_model = _BY_MODEL.get(model.get("model_type"))
    stated = {**preprocessor, **(own if isinstance(own, Mapping) else {})}
    kind = str(stated.get("image_processor_type") or stated.get("processor_class") or "")
    name = kind.removesuffix("Pil").removesuffix("Fast").removesuffix("Processor").removesuffix("Image")
    if by_model is None and name not in _BY_TYPE:
        raise UnsupportedError(
            f"the image processor {kind[:100]!r} is not supported: use {', '.join(_BY_TYPE)}"
        )
    return (by_model or _BY_TYPE[name]).of(stated, processor, model)


__all__ = ["Detail", "ImageProcessor", "image_processor"]
