"""Images in messages, on their way through a chat template: marks in texts, parts, placeholders, tokens."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from kukri.dataclass import dataclass
from kukri.errors import RequestError

IMAGE_TYPES = ("image", "image_url", "input_image")  # the types of a content's parts
_END = "\ufdd2"  # not a character


@dataclass(frozen=True)
class ImagePart:
    """An image among the parts of a message: the part, and what errors call it."""

    part: Mapping[str, Any]
    param: str


def is_image(part: Any) -> bool:
    """True for a part that is an image."""
    return isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES


def has_images(messages: Any) -> bool:
    """True if images are among the parts of messages, which may be malformed."""
    if not isinstance(messages, list | tuple):
        return False
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    return any(is_image(part) for one in contents if isinstance(one, list | tuple) for part in one)


class ImageMarks:
    """The images of a conversation.

    `taken` replaces each image by a secret mark, so that the conversation consists of texts. Before the
    template runs, `pieces` finds them again. In the prompt the template's `placeholder` stands for each
    image, and `expanded` puts one of `texts` there. `written` is what to write where the template knows no
    images. `tokens` are the texts of control tokens that count nowhere else.
    """

    def __init__(self, placeholder: str, written: str, tokens: Sequence[str]) -> None:
        self.placeholder, self.written, self.tokens = placeholder, written, tuple(tokens)
        self.texts: list[str] = []  # the text of each image in the prompt
        self.order: list[int] = []  # numbers of images as they stand in the prompt
        self._mark = f"{_END}{secrets.token_hex(8)}"
        self._finder = re.compile(f"{self._mark}([0-9]+){_END}")

    def taken(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[ImagePart]]:
        """The messages with marks in place of images, and the images in order. Errors are `check`'s."""
        told: list[Any] = []
        images: list[ImagePart] = []
        for i, message in enumerate(messages):
            content = message.get("content") if isinstance(message, Mapping) else None
            if isinstance(content, list | tuple) and any(map(is_image, content)):
                pieces: list[Any] = []
                for j, part in enumerate(content):
                    if is_image(part):
                        param = part.get("param") or f"messages[{i}].content[{j}]"
                        pieces.append(f"{self._mark}{len(images)}{_END}")
                        images.append(ImagePart(part, param))
                    else:
                        pieces.append(part)
                message = {**message, "content": _joined(pieces)}
            told.append(message)
        return told, images

    def pieces(self, text: str) -> list[str | int]:
        """A text as texts and the numbers of images between them."""
        parts = self._finder.split(text)
        return [int(part) if i % 2 else part for i, part in enumerate(parts) if part or i % 2]

    def expanded(self, prompt: str) -> str:
        """The prompt with the text of each image. Raises RequestError if the template left one out."""
        parts = prompt.split(self.placeholder)
        if len(parts) - 1 != len(self.order) or sorted(self.order) != list(range(len(self.texts))):
            raise RequestError(
                f"the model's chat template must show all {len(self.texts)} images of these messages, not "
                f"{len(parts) - 1}: put images into the user's messages",
                param="messages",
            )
        texts = [self.texts[i] for i in self.order]
        return "".join(a + b for a, b in zip(parts, [*texts, ""], strict=True))


def _joined(pieces: list[Any]) -> Any:
    """Join a content of texts and marks into one text, with neighbouring texts on separate lines.

    Parts of another kind stay, for the check of the messages.
    """
    texts = [{"type": "text", "text": piece} if isinstance(piece, str) else piece for piece in pieces]
    if not all(isinstance(one, Mapping) and isinstance(one.get("text"), str) for one in texts):
        return texts
    joined, was_text = "", False
    for piece, one in zip(pieces, texts, strict=True):
        is_text = not isinstance(piece, str)
        joined += ("\n" if is_text and was_text else "") + one["text"]
        was_text = is_text
    return joined
