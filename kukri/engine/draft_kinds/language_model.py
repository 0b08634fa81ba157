"""Any small language model: it drafts by the larger model's tokens, or by tokens of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from kukri.engine.draft_kinds.kind import DraftKind, LargerModel
from kukri.engine.draft_model import DraftModel, DraftSource
from kukri.engine.text_drafts import TextDraftModel
from kukri.errors import ConfigError
from kukri.formats.checkpoint import open_checkpoint
from kukri.models import load_model
from kukri.tokenizer import Tokenizer, load_tokenizer
from kukri.tokenizer.translation import Translation


def _read(path: Path, larger: LargerModel) -> DraftSource:
    """Raises ConfigError if it is not a language model.

    Ids that only one of the two has a token for, as they pad their vocabularies differently, do not matter.
    """
    with open_checkpoint(path, None) as checkpoint:
        config, own = checkpoint.config, load_tokenizer(checkpoint.tokenizer)
        if config.head.kind != "language_model":
            raise ConfigError(f"{path} cannot draft, because it generates no text")
        model = load_model(checkpoint.weights(config), config)
    texts = zip(_texts(own), _texts(larger.tokenizer), strict=False)
    if all(a == b for a, b in texts if a and b):
        return DraftSource(model, DraftModel)
    return DraftSource(model, partial(TextDraftModel, Translation(larger.tokenizer, own)))


def _texts(tokenizer: Tokenizer) -> list[str]:
    """The text of each id, "" for rows that are padding: see the writers of GGUF files."""
    tokens = tokenizer.vocabulary.tokens
    return ["" if text == f"[PAD{i}]" else text for i, text in enumerate(tokens)]


LANGUAGE_MODEL = DraftKind(_read)
