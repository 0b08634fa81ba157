"""Gemma 4's assistants (`kukri.models.assistant`)."""

from __future__ import annotations

from pathlib import Path

from kukri.engine.assistant_drafts import AssistantModel
from kukri.engine.draft_kinds.kind import DraftKind, LargerModel
from kukri.engine.draft_model import DraftSource
from kukri.formats.huggingface.assistant import is_assistant, read_assistant


def _read(path: Path, larger: LargerModel) -> DraftSource:
    return DraftSource(read_assistant(path, larger.model), AssistantModel)


ASSISTANT = DraftKind(_read, is_assistant)
