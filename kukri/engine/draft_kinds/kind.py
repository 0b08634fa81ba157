"""What says of a kind of draft model which option or file asks for it, and what makes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kukri.dataclass import dataclass
from kukri.engine.draft_model import DraftSource
from kukri.models import Model
from kukri.tokenizer import Tokenizer


@dataclass(frozen=True)
class LargerModel:
    """The model that is drafted for, as it was read from its files."""

    path: Path
    quantize: str | None
    model: Model
    tokenizer: Tokenizer


@dataclass(frozen=True)
class DraftKind:
    """A kind of draft model: `read` reads the one at a path, for a larger model.

    `is_at` says whether a path has one. `word` is the value of the option draft_model that asks for one in
    the larger model's own files.
    """

    read: Callable[[Path, LargerModel], DraftSource]
    is_at: Callable[[Path], bool] = lambda path: False
    word: str | None = None
