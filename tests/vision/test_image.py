"""`ImageInput` and `ImagePrompt`: what the engine takes."""

from __future__ import annotations

import numpy as np
import pytest

from kukri.errors import RequestError
from kukri.vision.image import ImageInput, ImagePrompt, ImageSpan


def an_image(n_tokens=4):
    return ImageInput(np.zeros((1, 3, 8, 8), np.float32), (0, 0), n_tokens, bytes(32))


def test_a_prompt_holds_images_in_several_runs():
    """Catches a check that wants one run for an image: tiles have text between them."""
    spans = (ImageSpan(1, 3, 0), ImageSpan(5, 1, 0), ImageSpan(7, 4, 1))
    assert len(ImagePrompt([0] * 12, (an_image(), an_image()), spans)) == 12


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([], "image 0 becomes 4 rows and has 0"),
        ([(0, 4, 0)], "image 1 becomes 4 rows and has 0"),
        ([(0, 4, 0), (3, 4, 1)], "not in order"),
        ([(0, 4, 1), (4, 4, 0)], "not in order"),
        ([(0, 4, 0), (4, 4, 2)], "not in order"),
        ([(-1, 4, 0), (4, 4, 1)], "not in order"),
        ([(0, 0, 0), (4, 4, 1)], "not in order"),
        ([(0, 4, 0), (9, 4, 1)], "beyond its tokens"),
        ([(0, 4, 0), (4, 5, 1)], "image 1 becomes 4 rows and has 5"),
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
