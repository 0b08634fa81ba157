"""EAGLE-3's layers (`kukri.models.eagle3`)."""

from __future__ import annotations

from pathlib import Path

from kukri.engine.draft_kinds.kind import DraftKind, LargerModel
from kukri.engine.draft_model import DraftSource
from kukri.engine.next_token_drafts import EagleModel
from kukri.formats.huggingface.eagle3 import is_eagle3, read_eagle3

LAYER_TYPE: str | None = "Q8_0"  # the layer is packed to it: half the bytes, and no answer differs


def _read(path: Path, larger: LargerModel) -> DraftSource:
    return DraftSource(read_eagle3(path, larger.model, LAYER_TYPE), EagleModel)


EAGLE3 = DraftKind(_read, is_eagle3)
