"""`ImageInput` and `ImagePrompt`: what the engine takes."""

from __future__ import annotations

import numpy as np
import pytest

from kukri.engine.pages import ROOT, page_key
from kukri.engine.spans.embedding_spans import EmbeddingSpans
from kukri.engine.spans.encoder import SpanEncoder
from kukri.errors import RequestError
from kukri.vision.image import ImageInput, ImagePrompt, ImageSpan


def an_image(n_tokens=4, digest=bytes(32)):
    return ImageInput(np.zeros((1, 3, 8, 8), np.float32), (0, 0), n_tokens, digest)


class Encoder(SpanEncoder):
    """An encoder that encodes nothing."""


def test_a_prompt_holds_images_in_several_runs():
    """Catches a check that wants one run for an image: tiles have text between them."""
    spans = (ImageSpan(1, 3, 0), ImageSpan(5, 1, 0), ImageSpan(7, 4, 1))
    assert len(ImagePrompt([0] * 12, (an_image(), an_image()), spans)) == 12


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([], "image 0 must have 4 tokens in the prompt, not 0"),
        ([(0, 4, 0)], "image 1 must have 4 tokens in the prompt, not 0"),
        ([(0, 4, 0), (3, 4, 1)], "the spans of a prompt must be in order"),
        ([(0, 4, 1), (4, 4, 0)], "the spans of a prompt must be in order"),
        ([(0, 4, 0), (4, 4, 2)], "the spans of a prompt must be in order"),
        ([(-1, 4, 0), (4, 4, 1)], "the spans of a prompt must be in order"),
        ([(0, 0, 0), (4, 4, 1)], "the spans of a prompt must be in order"),
        ([(0, 4, 0), (9, 4, 1)], "the spans of a prompt must end within its tokens"),
        ([(0, 4, 0), (4, 5, 1)], "image 1 must have 4 tokens in the prompt, not 5"),
    ],
)
def test_spans_that_do_not_fit_are_refused(spans, message):
    """Catches spans from which a step would write rows to wrong tokens, or beyond its arrays."""
    with pytest.raises(RequestError, match=message):
        ImagePrompt([0] * 12, (an_image(), an_image()), tuple(ImageSpan(*span) for span in spans))


@pytest.mark.parametrize(
    "change",
    [
        {"pixels": np.zeros((1, 3, 8, 8))},
        {"pixels": np.zeros((3, 8, 8), np.float32)},
        {"pixels": np.zeros((0, 3, 8, 8), np.float32)},
        {"n_tokens": 0},
        {"digest": b"short"},
    ],
)
def test_an_image_of_another_form_is_refused(change):
    """Catches pixels of another type or shape, and a short digest, which would find another image's pages."""
    fields = {
        "pixels": np.zeros((1, 3, 8, 8), np.float32),
        "grid": (0, 0),
        "n_tokens": 4,
        "digest": bytes(32),
    }
    with pytest.raises(RequestError, match="an image"):
        ImageInput(**fields | change)


def test_the_keys_of_saved_pages_stay():
    """Catches pages with images that an earlier version saved and that are never found again."""
    images = tuple(an_image(digest=bytes([i]) * 32) for i in (1, 2))
    spans = (ImageSpan(1, 3, 0), ImageSpan(5, 1, 0), ImageSpan(10, 4, 1))
    rows = EmbeddingSpans(images, spans, [Encoder(), Encoder()])
    ids = np.arange(16, dtype=np.int32)
    keys = [page_key(ids[start : start + 8], ROOT, rows.identity(start, start + 8)).hex() for start in (0, 8)]
    assert keys == [
        "ada82a6a67f9f1f61373559b628650f746f33c649befa880014bb59a8c06a437",
        "4d326079545a5f506839265d2e7c70cb83048a91207563b8f8286036d24282a2",
    ]
