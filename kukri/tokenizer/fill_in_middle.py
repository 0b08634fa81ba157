"""Prompts that ask a model to fill in the middle of a text."""

from __future__ import annotations

from collections.abc import Sequence

from kukri.dataclass import dataclass
from kukri.tokenizer.tokenizer import Tokenizer

# tokens before the prefix, before the suffix, and before the middle, by family
_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder 2, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
)
_REPOSITORIES = ("<|repo_name|>", "<repo_name>", "<reponame>")
_FILES = ("<|file_sep|>", "<file_sep>")
_REPOSITORY_NAME = "project"  # a placeholder: the real name is unknown


@dataclass(frozen=True)
class FillInMiddle:
    """The tokens of a model that fills in the middle.

    `repository_id` and `file_id` stand before the names of a repository and of its files; None if the model
    has none.
    """

    tokenizer: Tokenizer
    prefix_id: int
    suffix_id: int
    middle_id: int
    repository_id: int | None
    file_id: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> FillInMiddle | None:
        """Return the tokens by which a model fills in the middle; None if it has no such tokens."""
        id_of = tokenizer.vocabulary.id_of
        for family in _FAMILIES:
            if all(token in id_of for token in family):
                prefix_id, suffix_id, middle_id = (id_of[token] for token in family)
                repository_id = next((id_of[token] for token in _REPOSITORIES if token in id_of), None)
                file_id = next((id_of[token] for token in _FILES if token in id_of), None)
                return cls(tokenizer, prefix_id, suffix_id, middle_id, repository_id, file_id)
        return None

    def prompt(
        self,
        prefix: str,
        suffix: str,
        *,
        middle: str = "",
        files: Sequence[tuple[str, str]] = (),
        max_tokens: int | None = None,
    ) -> list[int]:
        """The token ids that ask for the text between `prefix` and `suffix`, which begins with `middle`.

        `files` are names and texts of other files. Control tokens spelled out in any text stay text. Raises
        ContextLengthError as `Tokenizer.encode` does.
        """

        def encode(text: str) -> list[int]:
            return self.tokenizer.encode_inside(text, max_tokens=max_tokens)

        bos_id = self.tokenizer.bos_id if self.tokenizer.add_bos else None
        ids = [] if bos_id is None else [bos_id]
        if files and self.file_id is None:
            ids += encode("".join(f"{text}\n" for _, text in files))
        elif files and self.file_id is not None:
            if self.repository_id is not None:
                ids += [self.repository_id, *encode(f"{_REPOSITORY_NAME}\n")]
            for name, text in files:
                ids += [self.file_id, *encode(f"{name}\n{text}\n")]
            ids.append(self.file_id)
        ids += [self.prefix_id, *encode(prefix), self.suffix_id, *encode(suffix)]
        return [*ids, self.middle_id, *encode(middle)]
