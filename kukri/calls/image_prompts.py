"""From a conversation with images to a prompt with images, for one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from kukri.engine import Request
from kukri.errors import FormatError, RequestError
from kukri.models.spans import SpanPrompt
from kukri.tokenizer import Tokenizer, note
from kukri.tokenizer.image_marks import ImageMarks, ImagePart, has_images
from kukri.vision.decode import Picture, data_url_bytes
from kukri.vision.image import ImageInput, ImagePrompt, ImageSpan
from kukri.vision.prepared import PreparedImages

if TYPE_CHECKING:
    from kukri.vision.processors import ImageProcessor

MAX_IMAGES = 64  # in a request
_DETAILS = ("auto", "low", "high")
Prompt = list[int] | ImagePrompt
Encode = Callable[[Sequence[Mapping[str, Any]], ImageMarks | None], list[int]]
Read = Callable[[ImagePart], Picture]


class ImagePrompts:
    """Prepares the images of conversations; without a `processor`, of a model that reads text alone.

    `read` finds the picture of a part, which by default is a part of this program's own messages: a path,
    bytes, an array or an image of Pillow under the key `image`, or a data URL under `image_url`.
    """

    def __init__(self, tokenizer: Tokenizer, processor: ImageProcessor | None) -> None:
        self._tokenizer, self._processor = tokenizer, processor
        self._token_id, self._pictures = -1, PreparedImages()
        if processor is not None:
            token_id = tokenizer.vocabulary.id_of.get(processor.token)
            if token_id is None:
                raise FormatError(f"the tokenizer must have the token {processor.token}, of images")
            self._token_id = token_id

    @property
    def sees(self) -> bool:
        """True if images are read."""
        return self._processor is not None

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], encode: Encode, read: Read | None = None
    ) -> Prompt:
        """The prompt of a conversation, whose texts `encode` makes token ids of.

        The images of a model without a processor stay in the messages, for the template to refuse or to note.
        Raises RequestError on images that cannot be read, and what `encode` raises.
        """
        if self._processor is None or not has_images(messages):
            return encode(messages, None)
        processor = self._processor
        marks = ImageMarks(processor.placeholder, processor.written, (processor.placeholder, processor.token))
        told, parts = marks.taken(messages)
        if len(parts) > MAX_IMAGES:
            raise RequestError.of("messages", f"must have at most {MAX_IMAGES} images, not {len(parts)}")
        images = [self._prepared(processor, part, read or picture_of) for part in parts]
        marks.texts = [processor.text(image) for image in images]
        ids = encode(told, marks)
        ordered = tuple(images[i] for i in marks.order)
        places = [i for i, one in enumerate(ids) if one == self._token_id]
        return ImagePrompt(ids, ordered, _spans(places, ordered))

    def joined(self, pieces: Sequence[list[int] | ImagePart], read: Read) -> Prompt:
        """The prompt of token ids and images in turn. Raises RequestError for a model that sees none."""
        ids: list[int] = []
        images: list[ImageInput] = []
        places: list[int] = []
        for piece in pieces:
            if not isinstance(piece, ImagePart):
                ids += piece
                continue
            processor = self._processor
            if processor is None:
                note("image", piece.param, is_new=True)
                continue
            images.append(self._prepared(processor, piece, read))
            text = processor.written.replace(processor.placeholder, processor.text(images[-1]))
            more = self._tokenizer.encode_inside(text, parse_special=True)
            places += [len(ids) + i for i, one in enumerate(more) if one == self._token_id]
            ids += more
        return ImagePrompt(ids, tuple(images), _spans(places, images)) if images else ids

    def _prepared(self, processor: ImageProcessor, image: ImagePart, read: Read) -> ImageInput:
        """The image of a part. Raises RequestError that names it."""
        detail, n_tokens = wishes_of(image)
        try:
            made = self._pictures.prepare(read(image), processor.budgeted(detail, n_tokens), image.param)
            if n_tokens is not None and made.n_tokens > n_tokens:  # a thin image that has to grow
                from kukri.vision.processors.processor import too_few

                raise too_few(made.n_tokens, n_tokens)
            return made
        except RequestError as error:
            if error.param in ("image", "image_tokens"):
                raise RequestError(f"{image.param}: {error}", param=image.param, code=error.code) from None
            raise


def picture_of(image: ImagePart) -> Picture:
    """The picture of a part of this program's own messages."""
    part = image.part
    if part["type"] == "image" and part.get("image") is not None:
        return part["image"]
    url = url_of(image)
    if url is None:
        raise RequestError.of(
            image.param, 'must be {"type": "image", "image": path, bytes, array or Pillow\'s}'
        )
    return data_url_bytes(url, image.param)


def url_of(image: ImagePart) -> str | None:
    """The URL of a part, as OpenAI's APIs have it; None without."""
    given = image.part.get("image_url")
    given = given.get("url") if isinstance(given, Mapping) else given
    return given if isinstance(given, str) else None


def wishes_of(image: ImagePart) -> tuple[Any, int | None]:
    """The detail and the most tokens that a part asks for. Raises RequestError."""
    part, param = image.part, image.param
    inner = part.get("image_url")
    given = {**(inner if isinstance(inner, Mapping) else {}), **part}
    detail, n_tokens = given.get("detail") or "auto", given.get("image_tokens")
    detail = "high" if detail == "original" else detail
    if detail not in _DETAILS:
        raise RequestError(f"'{param}.detail' must be {', '.join(_DETAILS)}", param=f"{param}.detail")
    if n_tokens is not None and (isinstance(n_tokens, bool) or not isinstance(n_tokens, int)):
        raise RequestError(f"'{param}.image_tokens' must be a number", param=f"{param}.image_tokens")
    return detail, n_tokens


def ids_of(prompt: Sequence[int] | SpanPrompt) -> Sequence[int]:
    """The token ids of a prompt."""
    return prompt.token_ids if isinstance(prompt, SpanPrompt) else prompt


def image_tokens(request: Request) -> list[int]:
    """Tokens of the prompt that each image takes."""
    inputs = request.sequence.spans.inputs
    return [given.n_tokens for given in inputs if isinstance(given, ImageInput)]


def extended(prompt: Sequence[int] | SpanPrompt, more: Sequence[int]) -> list[int] | SpanPrompt:
    """A prompt with more tokens after it."""
    if isinstance(prompt, SpanPrompt):
        longer: SpanPrompt = replace(cast(Any, prompt), token_ids=[*prompt.token_ids, *more])
        return longer
    return [*prompt, *more]


def _spans(places: Sequence[int], images: Sequence[ImageInput]) -> tuple[ImageSpan, ...]:
    """The runs of image tokens at these places, cut where one image ends and the next begins."""
    spans: list[ImageSpan] = []
    image, left = 0, images[0].n_tokens
    for i in places:
        if left == 0 and image + 1 < len(images):
            image += 1
            left = images[image].n_tokens
        last = spans[-1] if spans else None
        if last is not None and last.image == image and last.start + last.n_tokens == i:
            spans[-1] = last._replace(n_tokens=last.n_tokens + 1)
        else:
            spans.append(ImageSpan(i, 1, image))
        left -= 1
    return tuple(spans)
