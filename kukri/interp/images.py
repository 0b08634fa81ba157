"""Runs of prompts with images, and of the encoder that reads these: activations of both, and edits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isqrt
from typing import Any, Protocol

import numpy as np

from kukri.engine import Engine, Request
from kukri.engine.spans.images import ImageEncoder
from kukri.errors import RequestError
from kukri.interp.cache import ActivationCache
from kukri.interp.hooks.hook_names import Point
from kukri.interp.hooks.hook_values import Model as Values
from kukri.interp.hooks.hook_values import Rows
from kukri.interp.hooks.listening import FwdHooks, Names, NamesFilter, StepListener
from kukri.interp.session import Interventions, ReturnType, Session, require_return_type, text_loss
from kukri.interp.tapes.image_tapes import EncoderTape
from kukri.interp.tapes.tape import Matrices, Shared
from kukri.kernels.arrays import FloatArray
from kukri.kernels.rope_rows import RopeRows
from kukri.kernels.weight_handles import RopeFrequencies
from kukri.models.trace import Trace
from kukri.vision.decode import decode
from kukri.vision.encoder import ImagePart
from kukri.vision.image import ImageInput, ImagePrompt
from kukri.vision.processors import ImageProcessor

PREFIX = "vision."  # begins names of the encoder, where names of the text may be too


class Seeing(Protocol):
    """The part of an LLM that runs with images need."""

    image_processor: ImageProcessor | None

    @property
    def engine(self) -> Engine:
        """See LLM."""

    @property
    def interp(self) -> Session:
        """See LLM."""

    @property
    def vision(self) -> EncoderSession:
        """See LLM."""


class EncoderSession(Names):
    """The encoder of a model that sees: `LLM.vision`.

    Names and shapes are TransformerLens', as of a text. A batch has an entry for each part of each image (a
    tile, or the whole image), and positions are patches, in the encoder's order.

    Attributes: config, of the blocks; points; values; weights; trace; model, the encoder; session, the
    text's.
    """

    def __init__(self, llm: Seeing) -> None:
        """Raises RequestError for a model that reads text alone."""
        encoder = llm.engine.maker.encoders.get(ImageInput)
        if not isinstance(encoder, ImageEncoder):
            raise RequestError.of("images", "is not supported by this model, which reads only text")
        self._llm, self._encoder, self.model, self.session = llm, encoder, encoder.model, llm.interp
        self.vision_config, self.config = self.model.config, self.model.config.encoder
        self.trace = Trace(self.model.encode)
        kv_type = self.session.texts.backend.exact_kv_type
        self.values = Values(self.config, self.trace, kv_type, _no_text, lambda x: x)
        self.values.points = {n: p for n, p in self.values.points.items() if self._exists(p)}
        self.points, self.weights = self.values.points, self.values.weights
        self._matrices = Shared(Matrices, sum(each.n_parameters for each in self.model.parameters))
        self._ropes: dict[RopeFrequencies, RopeRows] = {}

    def run_with_cache(
        self, images: Any, names: NamesFilter = None, fwd_hooks: FwdHooks = ()
    ) -> tuple[Any, ActivationCache]:
        """Encodes images; returns (rows, activations). Rows, which the text reads, are float32 [n_tokens, D].

        An image is a path, the bytes of a file, an array uint8, one of Pillow's, or an `ImageInput`; the rows
        of a list are a list. `names` and `fwd_hooks` are as in `LLM.run_with_cache`; a hook is called once
        for each part. Nothing is looked up or kept. Raises HookError, RequestError.
        """
        prepared, is_one = self.prepared(images)
        hooks, wanted = self.listen(fwd_hooks), self.select(names)
        keep = {tap for point in wanted for tap in point.needs}
        parts: list[StepListener] = []
        lengths: list[int] = []

        def listened(image: ImageInput) -> Iterator[tuple[ImagePart, StepListener]]:
            for part in self.model.parts(image):
                lengths.append(len(part.patches))
                parts.append(
                    StepListener(self.values, _row_counts(lengths[-1:]), _ids(lengths[-1:]), hooks, keep)
                )
                yield part, parts[-1]

        with self._llm.interp.alone():
            rows = [self._encoder.listen(listened(image)) for image in prepared]
        kept = {tap: np.concatenate([part.kept[tap] for part in parts]) for tap in keep if parts}
        cache = ActivationCache(
            self.values, kept, _row_counts(lengths), _ids(lengths), [point.name for point in wanted]
        )
        return rows[0] if is_one else rows, cache

    def run_with_hooks(self, images: Any, fwd_hooks: FwdHooks = ()) -> Any:
        """Encodes images with hooks that read and edit; returns the rows: see `run_with_cache`."""
        return self.run_with_cache(images, (), fwd_hooks)[0]

    def run_with_gradients(
        self,
        images: Any,
        metric: Callable[[Any], tuple[float, Any]],
        names: NamesFilter = None,
        *,
        of: str | None = None,
    ) -> tuple[float, ActivationCache, ActivationCache]:
        """(the metric, the activations, the gradient of the metric by each), as of a text:
        `kukri.interp.gradients.attribution.run_with_gradients`.

        `metric` takes the rows that `run_with_cache` returns, or the activations `of` a name [batch, pos,
        ...], and returns a number and its gradient by them, of the same shape.
        `kukri.interp.gradients.image_gradients.of_answer` makes one of the text's logits. Raises HookError,
        and RequestError for names without a gradient, one of another shape, and images too large for memory.
        """
        from kukri.interp.gradients.image_gradients import encoder_gradients

        return encoder_gradients(self, images, metric, names, of)

    def tape(self, given: Mapping[str, FloatArray] | None = None) -> EncoderTape:
        """A run of a part of an image with gradients, in NumPy, whatever the LLM runs on."""
        return EncoderTape(self._matrices(), self._ropes, self.model, given)

    def attention(
        self, cache: ActivationCache, prompt: ImagePrompt, layer: int, *, query: int = -1, image: int = 0
    ) -> FloatArray:
        """How much a token of a text attends to each place of an image: [head, rows, columns].

        `cache` comes from `LLM.run_with_cache(prompt)` and has the pattern of the layer; `query` the token's
        position. Of an image in tiles it is the tile that shows all of it. Raises KeyError without the
        pattern, RequestError for tokens that do not lie in rows and columns.
        """
        seen, merge = prompt.images[image], self.vision_config.merge
        runs = [range(span.start, span.start + span.n_tokens) for span in prompt.spans if span.image == image]
        rows, columns = (side // merge for side in seen.grid[-2:])
        places = [place for run in runs for place in run]
        if len(seen.grid) < 3 or rows * columns != len(places):
            places = [*runs[seen.whole]]
            rows = columns = isqrt(len(places))
        if rows * columns != len(places):
            raise RequestError.of("images", f"must have rows and columns of tokens, not {len(places)} tokens")
        found: FloatArray = cache["pattern", layer][0][:, query, places].reshape(-1, rows, columns)
        return found

    def prepared(self, images: Any) -> tuple[list[ImageInput], bool]:
        """Return the images ready for the encoder, and True if one image was given without a list.

        Raises RequestError on what the encoder cannot see.
        """
        is_one = not isinstance(images, list | tuple)
        found = [self._prepared(image) for image in ([images] if is_one else images)]
        for image in found:
            self.model.check(image)
        return found, is_one

    def _prepared(self, image: Any) -> ImageInput:
        if isinstance(image, ImageInput):
            return image
        processor = self._llm.image_processor
        if processor is None:
            raise RequestError.of("images", "is not supported: the model's files do not describe the images")
        return processor.prepare(decode(image, "images"))

    def _exists(self, point: Point) -> bool:
        """False for points that only texts have, and for patterns of patches that see only a window."""
        if point.form in ("scores", "pattern"):
            return not self.vision_config.window or point.layer in self.vision_config.full_layers
        return point.form not in ("tokens", "logits", "cos", "sin")


def run_images(
    llm: Seeing,
    compute: Callable[[list[Request]], list[FloatArray]],
    session: Session,
    prompt: ImagePrompt,
    names: NamesFilter,
    fwd_hooks: FwdHooks,
    return_type: ReturnType,
    interventions: Interventions,
    adapter: str | None,
) -> tuple[FloatArray | None, ActivationCache]:
    """Run one prompt with images in the engine, where hooks see it in chunks: see `LLM.run_with_cache`.

    Hooks whose names begin with `vision.` are the encoder's. Raises HookError, RequestError.
    """
    require_return_type(return_type)
    of_encoder, of_text = _split(fwd_hooks)
    request = llm.engine.maker.make_output_request(prompt, "logits", adapter=adapter)
    ids = request.prompt
    steered = session.steered([ids], interventions)
    for edits in steered:
        request.listen(edits)
    taps = session.listen_to([request], names, of_text)
    if of_encoder:
        request.sequence.spans.give(llm.vision.run_with_hooks(list(prompt.images), of_encoder))
        request.sequence.is_cacheable = False
    (logits,) = compute([request])
    cache = taps.cache(request)
    if return_type == "loss":
        return text_loss(logits, [ids]), cache
    return (logits[None] if return_type == "logits" else None), cache


def _split(fwd_hooks: FwdHooks) -> tuple[list[Any], list[Any]]:
    """Return the encoder's hooks, without the prefix, and the text's hooks."""
    of_encoder, of_text = [], []
    for name, hook in fwd_hooks:
        if isinstance(name, str) and name.startswith(PREFIX):
            of_encoder.append((name.removeprefix(PREFIX), hook))
        else:
            of_text.append((name, hook))
    return of_encoder, of_text


def _row_counts(lengths: Sequence[int]) -> Rows:
    return Rows(np.array(lengths, np.int32))


def _ids(lengths: Sequence[int]) -> Any:
    """Patches have no tokens."""
    return np.zeros(sum(lengths), np.int32)


def _no_text(text: str, add_special: bool = True) -> list[int]:
    raise RequestError.of("images", "must be given without text to an encoder of images")
