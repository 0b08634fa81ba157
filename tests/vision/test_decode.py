"""Decoding of pictures: what clients and files may hold, and what is refused before it takes memory."""

from __future__ import annotations

import base64
import io
import re
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from PIL import Image

from benchmarks.pictures import HOSTILE, encoded, picture
from kukri.errors import RequestError
from kukri.vision import decode as decoding
from kukri.vision.decode import base64_bytes, data_url_bytes, decode
from tests.stopwatch import within

PHOTO = picture(48, 64)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP", "GIF"])
def test_formats_without_loss_give_the_pixels(kind):
    """Catches colours in another order, and a format that is missing."""
    image = PHOTO if kind != "GIF" else np.array(Image.fromarray(PHOTO).quantize().convert("RGB"))
    options = {"lossless": True} if kind == "WEBP" else {}
    np.testing.assert_array_equal(decode(encoded(image, kind, **options)), image)


def test_jpeg_is_decoded_as_pillow_does():
    """Catches a faster, smaller decoding, which changes pixels."""
    data = encoded(PHOTO, "JPEG", quality=80, progressive=True)
    with Image.open(io.BytesIO(data)) as image:
        np.testing.assert_array_equal(decode(data), np.asarray(image))


def test_every_source_gives_the_same(tmp_path):
    """Catches a source that is turned or read in another way."""
    data = encoded(PHOTO)
    path = tmp_path / "a.png"
    path.write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for source in (data, bytearray(data), path, str(path), url, PHOTO, Image.fromarray(PHOTO)):
        np.testing.assert_array_equal(decode(source), PHOTO)


@pytest.mark.parametrize("turn", range(1, 9))
def test_photos_are_turned_upright(turn):
    """Catches a phone's portrait that lies on its side."""
    exif = Image.Exif()
    exif[0x0112] = turn
    steps = {
        1: PHOTO, 2: PHOTO[:, ::-1], 3: PHOTO[::-1, ::-1], 4: PHOTO[::-1], 5: PHOTO.transpose(1, 0, 2),
        6: np.rot90(PHOTO, -1), 7: PHOTO[::-1, ::-1].transpose(1, 0, 2), 8: np.rot90(PHOTO),
    }  # fmt: skip
    np.testing.assert_array_equal(decode(encoded(PHOTO, exif=exif.tobytes())), steps[turn])


def test_alpha_is_laid_on_white_as_transformers_does():
    """Catches black or the hidden colours where nothing is to be seen."""
    from transformers.image_transforms import convert_to_rgb

    alpha = np.dstack([PHOTO, picture(48, 64, 1)[..., 0]])
    palette = Image.fromarray(PHOTO).quantize(8)
    palette.info["transparency"] = 3
    for image in (Image.fromarray(alpha), Image.fromarray(alpha).convert("LA"), palette):
        with Image.open(io.BytesIO(encoded(image))) as opened:
            expected = convert_to_rgb(opened, return_numpy=True)
        np.testing.assert_array_equal(decode(encoded(image)), expected)
    np.testing.assert_array_equal(decode(alpha), convert_to_rgb(Image.fromarray(alpha), return_numpy=True))


def test_other_modes_are_converted_as_transformers_does():
    """Catches a gray, 16-bit, CMYK or 1-bit picture that fails, or differs from the reference."""
    deep = (np.arange(48 * 64).reshape(48, 64) * 20).astype(np.uint16)
    for image, kind in (
        (Image.fromarray(deep), "PNG"), (Image.fromarray(PHOTO).convert("CMYK"), "JPEG"),
        (Image.fromarray(PHOTO).convert("L"), "PNG"), (Image.fromarray(PHOTO).convert("1"), "PNG"),
    ):  # fmt: skip
        data = encoded(image, kind)
        with Image.open(io.BytesIO(data)) as opened:
            np.testing.assert_array_equal(decode(data), np.asarray(opened.convert("RGB")))


def test_an_animation_is_its_first_frame():
    """Catches the last frame, or an error."""
    frames = [Image.fromarray(picture(20, 20, i)).quantize() for i in range(3)]
    for kind in ("GIF", "PNG", "WEBP"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        np.testing.assert_array_equal(decode(data), np.array(frames[0].convert("RGB")))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_images_are_refused_in_time(name):
    """Catches a picture that takes memory or time, or whose error is not the client's."""
    file = HOSTILE[name]()
    tracemalloc.start()
    try:
        with within(2), pytest.raises(RequestError, match=r"^messages\[0\]: the image") as caught:
            decode(file, "messages[0]")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20
    assert (caught.value.param, "\n" in str(caught.value)) == ("messages[0]", False)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_changed_bytes_are_a_picture_or_an_error_without_an_address(kind):
    """Catches an error of a parser that tells where in memory something is."""
    whole, random, said = encoded(picture(16, 16), kind), np.random.default_rng(0), []
    for _ in range(40):
        changed = bytearray(whole[: random.integers(len(whole) // 2, len(whole) + 1)])
        for place in random.integers(0, len(changed), 3):
            changed[place] = random.integers(0, 256)
        try:
            decode(bytes(changed))
        except RequestError as error:
            said.append(str(error))
    assert said
    assert not [text for text in said if re.search(r"0x[0-9a-f]{4}|<.*object", text)]


@pytest.mark.parametrize(
    "text",
    [
        "cannot identify image file <_io.BytesIO object at 0x7f3a5c0d1e90>",
        "bad chunk <PIL.PngImagePlugin.PngStream object at 0x00007f3a5c0d1e90> after b'IDAT'",
        "read failed at 0x7F3A5C0D1E90",
    ],
)
def test_a_parsers_error_has_no_address(text, monkeypatch):
    """Catches a client that learns by a broken picture where the heap lies."""

    def fail(*_, **__):
        raise OSError(text)

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(RequestError, match="the image cannot be read: ") as caught:
        decode(encoded(PHOTO))
    assert not re.search("3a5c0d1e90|object", str(caught.value), re.IGNORECASE)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4, 3)), np.zeros((4, 4, 2), np.uint8), np.zeros(4, np.uint8),
        np.zeros((0, 4, 3), np.uint8), np.broadcast_to(np.uint8(0), (60_000, 60_000, 3)), 17, None, ["a"],
    ],
)  # fmt: skip
def test_what_is_no_picture_is_refused(array):
    """Catches float pixels read as bytes, and an array that is copied before its size is looked at."""
    with pytest.raises(RequestError):
        decode(array)


def test_a_missing_file_is_named(tmp_path):
    """Catches a traceback for a wrong path."""
    with pytest.raises(RequestError, match=r"gone.png.*No such file"):
        decode(tmp_path / "gone.png")
    with pytest.raises(RequestError, match="directory"):
        decode(tmp_path)


def test_large_files_and_sides_have_bounds(monkeypatch, tmp_path):
    """Catches a bound that holds for one source only."""
    monkeypatch.setattr(decoding, "MAX_FILE_BYTES", 100)
    path = tmp_path / "a.png"
    path.write_bytes(encoded(PHOTO))
    for source in (path, encoded(PHOTO)):
        with pytest.raises(RequestError, match="must be at most 0 MiB"):
            decode(source)
    monkeypatch.setattr(decoding, "MAX_PIXELS", 1000)
    with pytest.raises(RequestError, match="64 x 48"):
        decode(Image.fromarray(PHOTO))


def test_base64_is_read_as_clients_write_it():
    """Catches line ends, missing padding and the alphabet of URLs taken for errors, and garbage taken."""
    data = np.random.default_rng(0).bytes(100_000)  # more than one call decodes
    text = base64.b64encode(data).decode()
    for form in (
        text,
        text.rstrip("="),
        "\n".join([text[:76], text[76:]]),
        base64.urlsafe_b64encode(data).decode(),
    ):
        assert base64_bytes(form) == data
    for wrong in ("", "!!!", "abcde", "data:,x", "é", "QUI=QUI=", "A" * (1 << 16) + "=AAA"):
        with pytest.raises(RequestError):
            base64_bytes(wrong)
    assert data_url_bytes("DATA:image/PNG;charset=x;BASE64," + text) == data
    for wrong in ("data:image/png," + text, "data:" + text, "http://x/a.png", "file:///etc/passwd"):
        with pytest.raises(RequestError, match="data URL"):
            data_url_bytes(wrong)


def test_pillow_is_imported_when_an_image_comes():
    """Catches a start that pays for Pillow without an image."""
    code = (
        "import sys, kukri.vision.decode, kukri.vision.processors, kukri.llm, kukri.cli\n"
        "assert not any(name.split('.')[0] == 'PIL' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
