"""The kinds of draft models. Each file here that defines a `DraftKind` adds one.

Engine and loading know no kind by name. Drafts looked up in texts need no model, so requests have them with
every kind (`kukri.engine.lookup_drafts`).
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from pathlib import Path

from kukri.engine.draft_kinds.kind import DraftKind, LargerModel
from kukri.engine.draft_kinds.language_model import LANGUAGE_MODEL
from kukri.engine.draft_model import DraftSource
from kukri.formats import hub

__all__ = ["LargerModel", "is_own_part", "read_draft_source"]


def read_draft_source(name: str | os.PathLike[str], larger: LargerModel) -> DraftSource:
    """Return the draft model that the option draft_model names. Raises KukriError if it cannot draft."""
    for kind in _kinds():
        if kind.word == name:
            return kind.read(larger.path, larger)
    path = hub.resolve(name)
    kinds = (kind for kind in _kinds() if kind.is_at(path))
    return next(kinds, LANGUAGE_MODEL).read(path, larger)


def is_own_part(name: str | os.PathLike[str]) -> bool:
    """Return whether the option draft_model names a part of the larger model, not files of another."""
    return any(kind.word == name for kind in _kinds())


@cache
def _kinds() -> tuple[DraftKind, ...]:
    files = sorted(Path(__file__).parent.glob("*.py"))
    modules = [import_module(f"{__name__}.{file.stem}") for file in files if file.stem != "__init__"]
    return tuple(row for module in modules for row in vars(module).values() if isinstance(row, DraftKind))
