"""Pictures of a few shapes or digits of one colour, and what is in them: for a model that learns to see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from kukri.kernels.arrays import ByteArray

SIDE = 96  # pixels
COUNTS = ("one", "two", "three", "four")
COLOURS = {
    "red": (200, 30, 30), "green": (30, 150, 40), "blue": (40, 60, 210), "yellow": (225, 205, 40),
    "purple": (140, 40, 160), "black": (20, 20, 20),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "cross")
KINDS = (*SHAPES, *map(str, range(10)))
QUESTION = "What is in the picture?"


@dataclass(frozen=True)
class Contents:
    """What a picture shows: `count`, `colour` and `kind` (a shape or a digit), as words."""

    count: str
    colour: str
    kind: str

    def __str__(self) -> str:
        """As an answer says it: `two red circles`."""
        ending = "" if self.count == "one" else "es" if self.kind == "cross" else "s"
        return f"{self.count} {self.colour} {self.kind}{ending}"


_KIND_OF = {str(Contents(count, "red", kind)).split()[2]: kind for kind in KINDS for count in COUNTS[:2]}


def read(answer: str) -> Contents | None:
    """What an answer says; None if it is no three words."""
    words = answer.lower().strip(" .\n").split()
    return Contents(words[0], words[1], _KIND_OF.get(words[2], words[2])) if len(words) == 3 else None


def draw(random: np.random.Generator) -> tuple[ByteArray, Contents]:
    """A picture uint8 [SIDE, SIDE, 3], and what is in it."""
    contents = Contents(*(str(random.choice(words)) for words in (COUNTS, [*COLOURS], KINDS)))
    ground = 255 - random.integers(0, 50, 3)
    picture = Image.new("RGB", (SIDE, SIDE), tuple(ground.tolist()))
    places = random.permutation(4)[: COUNTS.index(contents.count) + 1]
    for place in places:
        size = int(random.integers(20, 37))
        corner = np.array(divmod(place, 2)) * (SIDE // 2) + random.integers(0, SIDE // 2 - size, 2) + 3
        colour = np.clip(np.array(COLOURS[contents.colour]) + random.integers(-20, 21, 3), 0, 255)
        _draw_one(picture, contents.kind, corner.tolist(), size, tuple(colour.tolist()))
    noise = random.normal(0, 6, (SIDE, SIDE, 3))
    return np.clip(np.asarray(picture) + noise, 0, 255).astype(np.uint8), contents


def _draw_one(
    picture: Image.Image, kind: str, corner: Sequence[int], size: int, colour: tuple[int, ...]
) -> None:
    pen = ImageDraw.Draw(picture)
    x, y = corner
    box = [x, y, x + size, y + size]
    if kind == "circle":
        pen.ellipse(box, fill=colour)
    elif kind == "square":
        pen.rectangle(box, fill=colour)
    elif kind == "triangle":
        pen.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill=colour)
    elif kind == "cross":
        third = size // 3
        pen.rectangle([x + third, y, x + 2 * third, y + size], fill=colour)
        pen.rectangle([x, y + third, x + size, y + 2 * third], fill=colour)
    else:
        pen.text(
            (x + size // 2, y + size // 2), kind, fill=colour, font=ImageFont.load_default(size), anchor="mm"
        )
