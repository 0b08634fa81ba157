"""Encoders of images, one file for each family of models of images and text.

Each file that defines a `VisionFamily` adds one to `vision_families()`: nothing else lists them.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kukri.vision.encoder import VisionFamily


@cache
def vision_families() -> dict[str, VisionFamily]:
    """The objects in the files of this folder, by name."""
    from kukri.vision.encoder import VisionFamily

    found = {}
    for file in iter_modules(__path__):
        for value in vars(import_module(f"{__name__}.{file.name}")).values():
            if isinstance(value, VisionFamily):
                found[value.name] = value
    return found
