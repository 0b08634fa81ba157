"""Gradients of encoders of images, and of answers about images: see `kukri.interp.gradients.attribution`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from kukri.engine import Engine
from kukri.errors import RequestError
from kukri.interp.cache import ActivationCache
from kukri.interp.hooks.hook_names import Point
from kukri.interp.hooks.hook_values import Model as Values
from kukri.interp.hooks.hook_values import Rows
from kukri.interp.hooks.listening import NamesFilter, usable_points
from kukri.interp.memory_batches import most_that_fit
from kukri.interp.session import Session
from kukri.interp.tapes.image_tapes import EncoderTape, SeeingTape
from kukri.interp.tapes.tape import TextRows, Variable
from kukri.kernels.arrays import FloatArray
from kukri.models.trace import Trace
from kukri.vision.encoder import ImagePart, VisionModel
from kukri.vision.image import ImageInput, ImagePrompt

# a number of an encoder's rows or activations, and its gradient by them
EncoderMetric = Callable[[Any], tuple[float, Any]]
Metric = Callable[[FloatArray], tuple[float, FloatArray]]  # a number of logits, and its gradient
_KEPT = 3  # memory of a tape with gradients, as a multiple of the memory of its taps
_PATTERNS = 5  # patterns of a layer that are alive at a time


class Encoder(Protocol):
    """The part of an `EncoderSession` that gradients need."""

    trace: Trace
    values: Values
    model: VisionModel
    session: Session

    def select(self, names: NamesFilter) -> list[Point]:
        """See Names."""

    def prepared(self, images: Any) -> tuple[list[ImageInput], bool]:
        """See EncoderSession."""

    def tape(self) -> EncoderTape:
        """See EncoderSession."""

    def run_with_hooks(self, images: Any) -> Any:
        """See EncoderSession."""


class Seeing(Protocol):
    """The part of an LLM that gradients need."""

    @property
    def engine(self) -> Engine:
        """See LLM."""

    @property
    def interp(self) -> Session:
        """See LLM."""

    @property
    def vision(self) -> Encoder:
        """See LLM."""


def encoder_gradients(
    encoder: Encoder, images: Any, metric: EncoderMetric, names: NamesFilter, of: str | None
) -> tuple[float, ActivationCache, ActivationCache]:
    """See EncoderSession.run_with_gradients."""
    points = usable_points(encoder, names)
    end = None if of is None else usable_points(encoder, [of])[0]
    taps = {point.tap for point in points}
    prepared, is_one = encoder.prepared(images)
    parts = [part for image in prepared for part in encoder.model.parts(image)]
    rows = Rows(np.array([len(part.patches) for part in parts], np.int32))
    ids = np.zeros(rows.n_rows, np.int32)
    _require_room(encoder, rows, sum(encoder.trace.widths[tap] for tap in taps))

    def run(part: ImagePart) -> tuple[EncoderTape, Variable]:
        tape = encoder.tape()
        held[:] = [tape.matrices]  # for the next part's tape
        return tape, tape.see(part, None if end is None else end.tap)

    held: list[Any] = []
    found: list[FloatArray] = []
    for part in parts:
        last: Any = None  # its tape is not needed any more
        last = run(part)
        found.append(last[1].x)
    joined = np.concatenate(found)
    if end is not None:
        shown = encoder.values.value(end, {end.tap: joined}, rows, ids)
        value, given = metric(shown)
        grad = rows.rows(_checked(given, shown)).reshape(joined.shape)
    else:
        of_images = np.split(joined, np.cumsum([image.n_tokens for image in prepared])[:-1])
        value, given = metric(of_images[0] if is_one else of_images)
        many = [given] if is_one else list(given)
        grad = np.concatenate([_checked(one, own) for one, own in zip(many, of_images, strict=True)])
    values: dict[str, list[FloatArray]] = {tap: [] for tap in taps}
    grads: dict[str, list[FloatArray]] = {tap: [] for tap in taps}
    for part, own in zip(parts, np.split(grad, np.cumsum([len(x) for x in found])[:-1])):
        if len(parts) > 1:
            last = None
            last = run(part)
        tape, result = last
        tape.backward(result, own)
        for tap in taps:
            values[tap].append(tape.value(tap))
            grads[tap].append(tape.gradient(tap))
    wanted = [point.name for point in points]
    caches = [
        ActivationCache(encoder.values, {tap: np.concatenate(one[tap]) for tap in taps}, rows, ids, wanted)
        for one in (values, grads)
    ]
    return value, caches[0], caches[1]


def text_gradients(
    llm: Seeing, prompt: ImagePrompt, metric: Metric, names: NamesFilter = None
) -> tuple[float, ActivationCache, ActivationCache]:
    """`gradients.run_with_gradients` of a prompt with images: by the text's activations."""
    points = usable_points(llm.interp, names)
    taps = {point.tap for point in points}
    value, tape = _text_run(llm, prompt, llm.vision.run_with_hooks(list(prompt.images)), metric)
    rows, ids = Rows(np.array([len(prompt)], np.int32)), np.array(prompt.token_ids, np.int32)
    wanted = [point.name for point in points]
    caches = [
        ActivationCache(llm.interp.values, {tap: one(tap) for tap in taps}, rows, ids, wanted)
        for one in (tape.value, tape.gradient)
    ]
    return value, caches[0], caches[1]


def of_answer(llm: Seeing, prompt: ImagePrompt, metric: Metric) -> EncoderMetric:
    """Turn a metric of the logits of a prompt with images into a metric of its images' rows.

    `llm.vision.run_with_gradients(list(prompt.images), of_answer(llm, prompt, metric))` gives its gradient by
    the encoder's activations; called with the rows of all images, [n_tokens, width] each, it returns the
    number and its gradient by the rows.
    """

    def found(rows: Any) -> tuple[float, Any]:
        is_one = not isinstance(rows, list)
        value, tape = _text_run(llm, prompt, [rows] if is_one else rows, metric)
        return value, tape.row_grads[0] if is_one else tape.row_grads

    return found


def _text_run(
    llm: Seeing, prompt: ImagePrompt, rows: Sequence[FloatArray], metric: Metric
) -> tuple[float, SeeingTape]:
    """Return the metric of a prompt whose images have these rows, and the tape after its backward pass."""
    session, n = llm.interp, len(prompt)
    spans = llm.engine.maker.make_output_request(prompt, "logits").sequence.spans
    if len(rows) != len(prompt.images):
        raise RequestError.of(
            "images", f"must be as many as in the prompt, {len(prompt.images)}, not {len(rows)}"
        )
    spans.give(rows)
    ids = np.array(prompt.token_ids, np.int32)
    spans.blank(ids, 0)
    tape = session.seeing_tape(spans)
    result = tape.run(session.model, TextRows.of([ids], spans.positions(0, n)))
    value, grad = metric(tape.values(result)[None])
    tape.backward(result, np.asarray(grad, np.float32)[0])
    return value, tape


def _checked(grad: Any, of: Any) -> FloatArray:
    found = np.asarray(grad, np.float32)
    if found.shape != of.shape:
        raise RequestError(
            f"the metric's gradient must have the shape {list(of.shape)}, not {list(found.shape)}",
            param="metric",
        )
    return found


def _require_room(encoder: Encoder, rows: Rows, width: int) -> None:
    """Raises RequestError if gradients of parts with these patches need more memory than is free. Gradients
    by `width` numbers of a patch are returned.
    """
    n, widths = rows.n_tokens, encoder.trace.widths.values()
    n_heads = max((one.spec.n_heads for one in encoder.trace.heads.values()), default=0)
    n_bytes = 4 * (n * (_KEPT * sum(widths) + _PATTERNS * n_heads * n) + 2 * rows.n_rows * width)
    room = most_that_fit(encoder.session, 1, 1 << 62)
    if n_bytes > room:
        raise RequestError(
            f"gradients of {n:,} patches at once must take at most {room / 1e9:.1f} GB, not about "
            f"{n_bytes / 1e9:.1f} GB: give smaller images, or fewer names",
            param="images",
        )
