"""The larger model's own layer for multi-token prediction (`kukri.models.next_token`)."""

from __future__ import annotations

from pathlib import Path

from kukri.engine.draft_kinds.kind import DraftKind, LargerModel
from kukri.engine.draft_model import DraftSource
from kukri.engine.next_token_drafts import NextTokenDraftModel
from kukri.errors import ConfigError, UnsupportedError
from kukri.formats.checkpoint import open_checkpoint
from kukri.models.llama import Llama
from kukri.models.next_token import NextTokenLayer


def _read(path: Path, larger: LargerModel) -> DraftSource:
    """Raises ConfigError if the files of the model have no such layer."""
    model = larger.model
    try:
        if not isinstance(model, Llama):
            raise UnsupportedError("its kind of model has none that kukri runs")
        with open_checkpoint(path, larger.quantize) as checkpoint:
            layer = NextTokenLayer(checkpoint.weights(model.config), model)
    except UnsupportedError as error:
        option = f"--draft-model {NEXT_TOKEN.word}"
        raise ConfigError(
            f"{path} cannot draft for itself ({option}): {error}; leave draft_model out"
        ) from None
    return DraftSource(layer, NextTokenDraftModel)


NEXT_TOKEN = DraftKind(_read, word="mtp")
