"""The processor of images in a checkpoint's directory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from kukri.errors import UnsupportedError
from kukri.formats.json_files import read_json
from kukri.vision.processors import ImageProcessor, image_processor

_log = logging.getLogger("kukri.formats")


def read_image_processor(directory: Path) -> ImageProcessor | None:
    """The processor of a model that sees, by preprocessor_config.json and processor_config.json.

    None, with a warning, if there is neither, or if it is of a kind that is not known here. Raises
    FormatError on values that no checkpoint has.
    """
    stated, processor, model = (
        _read(directory / name)
        for name in ("preprocessor_config.json", "processor_config.json", "config.json")
    )
    try:
        if not stated and not processor:
            raise UnsupportedError("preprocessor_config.json was not found")
        return image_processor(stated, processor, model)
    except UnsupportedError as error:
        _log.warning("%s: images are not read: %s", directory, error)
        return None


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
