"""Encoders of images, one file for each family of models of images and text.

Each file that defines a `VisionFamily` adds one to `vision_families()`: nothing else lists them.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kukri.vision.encoder import VisionFamily


def family_of(hf_type: Any) -> VisionFamily | None:
    """The family of the models whose config.json has this model_type; None if no such encoder runs."""
    return next((family for family in vision_families().values() if hf_type in family.hf_types), None)


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
