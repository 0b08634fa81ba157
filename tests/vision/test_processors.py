"""Processors of images against those of transformers: pixel values, grids, texts, budgets."""

from __future__ import annotations

import dataclasses
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from benchmarks.pictures import SIZES, picture
from kukri.errors import FormatError, RequestError, UnsupportedError
from kukri.vision.processors import image_processor
from tests.stopwatch import within

SMOLVLM = {
    "image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 2048},
    "max_image_size": {"longest_edge": 512},
}  # fmt: skip
IDEFICS3 = {"image_processor_type": "Idefics3ImageProcessor"}  # with the sizes of the class
GEMMA3 = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}}
GEMMA3_CROPS = GEMMA3 | {
    "size": {"height": 64, "width": 64},
    "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 150, "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}  # fmt: skip
GEMMA4 = {"image_processor_type": "Gemma4ImageProcessor"}
QWEN25 = {
    "image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 1_003_520,
}  # fmt: skip
QWEN3 = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3, "size": {"shortest_edge": 65536, "longest_edge": 1_048_576},
}  # fmt: skip
PADDLEOCR = {"image_processor_type": "PaddleOCRVLImageProcessor"}
PIXTRAL = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 1024}}
LFM2 = {"image_processor_type": "Lfm2VlImageProcessorFast"}


def reference(stated):
    """transformers' image processor, of Pillow."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
        PaddleOCRVLImageProcessorPil,
    )
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    options = dict(stated)
    name = options.pop("image_processor_type").removesuffix("Fast")
    classes = {
        "Idefics3ImageProcessor": Idefics3ImageProcessorPil, "Gemma3ImageProcessor": Gemma3ImageProcessorPil,
        "Gemma4ImageProcessor": Gemma4ImageProcessorPil, "Qwen2VLImageProcessor": Qwen2VLImageProcessorPil,
        "PixtralImageProcessor": PixtralImageProcessorPil,
        "PaddleOCRVLImageProcessor": PaddleOCRVLImageProcessorPil,
    }  # fmt: skip
    return classes[name](**options)


@pytest.mark.full(only=["*-square", "*-large", "*-one above", "smolvlm-tiny", "smolvlm-photo"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stated", [SMOLVLM, IDEFICS3], ids=["smolvlm", "idefics3"])
def test_tiles_are_those_of_idefics3(stated, size):
    """Catches a wrong filter, order of tiles, size or rounding, to the bit."""
    image = picture(*SIZES[size])
    theirs = reference(stated)(images=[Image.fromarray(image)], return_row_col_info=True)
    own = image_processor(stated, {"image_seq_len": 64}, {}).prepare(image)
    assert own.grid == (theirs["rows"][0][0], theirs["cols"][0][0])
    assert own.n_tokens == 64 * len(own.pixels)
    np.testing.assert_array_equal(own.pixels, theirs["pixel_values"][0])


EVERY = {
    "smolvlm": SMOLVLM, "idefics3": IDEFICS3, "gemma3": GEMMA3, "gemma4": GEMMA4, "qwen2.5": QWEN25,
    "gemma4 unified": {"image_processor_type": "Gemma4UnifiedImageProcessor"}, "qwen3": QWEN3,
    "paddleocr": PADDLEOCR, "pixtral": PIXTRAL, "lfm2": LFM2,
}  # fmt: skip


@pytest.mark.parametrize(
    "size",
    [(1, 1), (1, 2), (2, 1), (1, 199), (27, 1), (1, 5000), (65536, 1), (1, 65536), (3, 20000)],
    ids=str,
)
@pytest.mark.parametrize("name", EVERY)
def test_odd_sizes_are_prepared_within_bounds_or_refused(name, size):
    """Catches a division by zero, patches without end, and memory that a side decides."""
    processor = image_processor(EVERY[name], {"image_seq_len": 64}, {"spatial_merge_size": 2})
    tracemalloc.start()
    try:
        with within(2):
            made = processor.prepare(np.full((*size, 3), 7, np.uint8))
    except RequestError as error:
        refused = str(error)
    else:
        refused = ""
        assert 1 <= made.n_tokens <= 8192
        assert np.isfinite(made.pixels).all()
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 128 << 20
    assert not refused or f"{size[1]} x {size[0]} pixels" in refused, "it names the picture's own size"


@pytest.mark.parametrize("size", SIZES)
def test_squares_are_those_of_gemma3(size):
    """Catches a wrong filter or size, to the bit."""
    image = picture(*SIZES[size])
    own = image_processor(GEMMA3, {}, {}).prepare(image)
    assert (own.grid, own.n_tokens) == ((0, 0), 256)
    np.testing.assert_array_equal(
        own.pixels, np.array(reference(GEMMA3)(images=[Image.fromarray(image)])["pixel_values"])
    )


@pytest.mark.full(only=["large"])
@pytest.mark.parametrize("size", SIZES)
def test_crops_are_those_of_gemma3(size):
    """Catches another number of crops, their order, an edge that two crops have, and words left out."""
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    image = picture(*SIZES[size])
    made = image_processor(GEMMA3_CROPS, {}, {})
    own, theirs = made.prepare(image), reference(GEMMA3_CROPS)(images=[Image.fromarray(image)])
    n_crops = theirs["num_crops"][0]
    assert n_crops == {"tall": 3, "wide": 4, "large": 2, "photo": 2}.get(size, 0)
    rows, columns = own.grid
    assert (rows * columns, own.n_tokens, own.whole) == (n_crops, 256 * (1 + n_crops), 0)
    np.testing.assert_array_equal(own.pixels, np.array(theirs["pixel_values"]))
    whole = SimpleNamespace(full_image_sequence=made.text(made.budgeted("low").prepare(image)))
    assert made.text(own) == Gemma3Processor.replace_image_token(whole, theirs, 0)
    assert made.budgeted(image_tokens=1024).prepare(image).n_tokens <= 1024


@pytest.mark.parametrize("size", [size for size in SIZES if size != "tiny"])
@pytest.mark.parametrize(
    ("stated", "budget"),
    [(GEMMA4, 70), (GEMMA4, 280), ({**GEMMA4, "image_mean": [0.5] * 3, "do_normalize": True}, 1120)],
    ids=["low", "usual", "high"],
)
def test_patches_are_those_of_gemma4(stated, budget, size):
    """Catches a wrong size, order of patches or of their values, to the bit; padding is left out."""
    image = picture(*SIZES[size])
    theirs = reference({**stated, "max_soft_tokens": budget})(
        images=[Image.fromarray(image)], return_tensors="np"
    )
    own = image_processor(stated, {}, {}).budgeted(image_tokens=budget).prepare(image)
    assert own.n_tokens == theirs["num_soft_tokens_per_image"][0]
    places = theirs["image_position_ids"][0]
    is_real = places[:, 0] >= 0
    assert own.grid == (1, places[:, 1].max() + 1, places[:, 0].max() + 1)
    np.testing.assert_array_equal(own.pixels, theirs["pixel_values"][0][is_real])


@pytest.mark.parametrize("size", ["photo", "tall", "line"])
def test_squares_are_those_of_gemma4_unified(size):
    """Catches pixels of a square in another order. transformers resizes for it by torchvision; here it is
    Gemma 4's processor for Pillow whose patches are put together.
    """
    image = picture(*SIZES[size])
    theirs = reference(GEMMA4)(images=[Image.fromarray(image)], return_tensors="np")
    own = image_processor({"image_processor_type": "Gemma4UnifiedImageProcessor"}, {}, {}).prepare(image)
    _, rows, columns = own.grid
    assert own.n_tokens == rows * columns == theirs["num_soft_tokens_per_image"][0]
    real = theirs["pixel_values"][0][: 9 * own.n_tokens]
    cut = real.reshape(rows, 3, columns, 3, 16, 16, 3).transpose(0, 2, 1, 4, 3, 5, 6)
    np.testing.assert_array_equal(own.pixels, cut.reshape(rows * columns, -1))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stated", [QWEN25, QWEN3], ids=["qwen2.5-vl", "qwen3-vl"])
def test_patches_are_those_of_qwen(stated, size):
    """Catches height and width swapped, and patches in another order, to the bit."""
    image = picture(*SIZES[size])
    theirs = reference(stated)(images=[Image.fromarray(image)], return_tensors="np")
    own = image_processor(stated, {}, {}).prepare(image)
    assert own.grid == tuple(theirs["image_grid_thw"][0])
    assert own.n_tokens == theirs["image_grid_thw"][0].prod() // 4
    np.testing.assert_array_equal(own.pixels, theirs["pixel_values"])


@pytest.mark.parametrize("size", [*SIZES, (20, 300), (300, 9)], ids=str)
def test_patches_are_those_of_paddleocr_vl(size):
    """Catches a narrow picture that is not widened, to the bit. Theirs lie row by row, ours by squares."""
    image = picture(*(SIZES[size] if isinstance(size, str) else size))
    theirs = reference(PADDLEOCR)(images=[Image.fromarray(image)], return_tensors="np")
    own = image_processor(PADDLEOCR, {}, {}).prepare(image)
    _, rows, columns = own.grid
    assert own.grid == tuple(theirs["image_grid_thw"][0])
    assert own.n_tokens == rows * columns // 4
    squares = own.pixels.reshape(rows // 2, columns // 2, 2, 2, 3, 14, 14).swapaxes(1, 2)
    np.testing.assert_array_equal(squares.reshape(-1, 3, 14, 14), theirs["pixel_values"])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("merge", [1, 2])
def test_patches_are_those_of_pixtral(merge, size):
    """Catches a size that is rounded down, or no multiple of a token's."""
    image = picture(*SIZES[size])
    theirs = reference(PIXTRAL)(
        images=[Image.fromarray(image)], patch_size={"height": 16 * merge, "width": 16 * merge}
    )
    own = image_processor(PIXTRAL, {"patch_size": 16, "spatial_merge_size": merge}, {}).prepare(image)
    planes = theirs["pixel_values"][0]
    _, rows, columns = own.grid
    assert (rows * 16, columns * 16) == planes.shape[1:]
    assert own.n_tokens == rows * columns // merge**2
    found = own.pixels.reshape(rows, columns, 3, 16, 16).transpose(2, 0, 3, 1, 4).reshape(planes.shape)
    np.testing.assert_array_equal(found, planes)


@pytest.mark.parametrize("size", SIZES)
def test_patches_are_those_of_lfm2_vl(size):
    """Catches a wrong grid of tiles. The reference resizes by torchvision: one step of 255 apart at most."""
    pytest.importorskip("torchvision", reason="transformers has this processor for torchvision alone")
    from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor

    image = picture(*SIZES[size])
    theirs = Lfm2VlImageProcessor()(
        images=[Image.fromarray(image)], return_row_col_info=True, return_tensors="np"
    )
    own = image_processor(LFM2, {}, {}).prepare(image)
    assert own.grid[:2] == (theirs["image_rows"][0], theirs["image_cols"][0])
    assert own.grid[2:] == tuple(theirs["spatial_shapes"][-1])
    real = theirs["pixel_values"][theirs["pixel_attention_mask"] == 1]
    assert np.abs(own.pixels - real).max() <= 2 / 255 + 1e-6  # the scale makes a step of 255 twice as large


@pytest.mark.parametrize(
    ("size", "grid", "n_tokens"),
    [
        ("tiny", (1, 1, 16, 16), 64), ("photo", (1, 1, 26, 36), 234), ("large", (3, 2, 36, 26), 1770),
        ("wide", (1, 1, 12, 82), 246), ("tall", (1, 1, 56, 18), 252),
    ],
)  # fmt: skip
def test_sizes_are_those_of_lfm2_vl(size, grid, n_tokens):
    """Catches another grid where torchvision is missing; the numbers are transformers'."""
    own = image_processor(LFM2, {}, {}).prepare(picture(*SIZES[size]))
    assert (own.grid, own.n_tokens) == (grid, n_tokens)
    n_small = grid[2] * grid[3]
    n_tiles = 1024 * grid[0] * grid[1] if grid[0] * grid[1] > 1 else 0
    assert own.pixels.shape == (n_small + n_tiles, 16 * 16 * 3)


@pytest.mark.full(only=["smolvlm", "gemma4", "paddleocr-vl", "lfm2-vl"])
@pytest.mark.parametrize(
    ("stated", "processor", "token"),
    [
        (SMOLVLM, {"image_seq_len": 64}, "<image>"), (GEMMA3_CROPS, {}, "<image_soft_token>"),
        (GEMMA4, {}, "<|image|>"), (QWEN3, {}, "<|image_pad|>"), (PIXTRAL, {"patch_size": 16}, "[IMG]"),
        (LFM2, {}, "<image>"), (PADDLEOCR, {}, "<|IMAGE_PLACEHOLDER|>"),
    ],
    ids=["smolvlm", "gemma3", "gemma4", "qwen3-vl", "pixtral", "lfm2-vl", "paddleocr-vl"],
)  # fmt: skip
def test_a_text_has_a_token_for_each_row(stated, processor, token):
    """Catches a prompt whose places do not match the rows that the encoder makes."""
    made = image_processor(stated, processor, {})
    for size in ("photo", "tall", "large"):
        image = made.prepare(picture(*SIZES[size]))
        assert made.token == token
        assert made.text(image).count(token) == image.n_tokens


@pytest.mark.full
@pytest.mark.parametrize(
    ("stated", "processor", "least"),
    [
        (SMOLVLM, {"image_seq_len": 64}, 64), (GEMMA3, {}, 256), (GEMMA4, {}, 70), (QWEN25, {}, 4),
        (QWEN3, {}, 64), (PIXTRAL, {"patch_size": 14, "spatial_merge_size": 2}, 1), (LFM2, {}, 64),
    ],
    ids=["smolvlm", "gemma3", "gemma4", "qwen2.5-vl", "qwen3-vl", "pixtral", "lfm2-vl"],
)  # fmt: skip
def test_a_budget_is_kept_and_used(stated, processor, least):
    """Catches an image with more tokens than its request allows, and a budget that is no reduction at all."""
    made = image_processor(stated, processor, {})
    with pytest.raises(RequestError, match=r"image_tokens"):
        made.budgeted(image_tokens=least - 1)
    for n_tokens in (300, 1200):
        for size in ("photo", "tall", "wide", "small"):
            if n_tokens > least:
                image = made.budgeted(image_tokens=n_tokens).prepare(picture(*SIZES[size]))
                assert image.n_tokens <= n_tokens
    large = picture(*SIZES["large"])
    low, auto = (made.budgeted(detail).prepare(large).n_tokens for detail in ("low", "auto"))
    assert low < auto or stated is GEMMA3
    assert made.budgeted("high").prepare(large).n_tokens >= auto


def test_a_digest_is_of_the_image_and_the_settings():
    """Catches a prefix that is read for another image, or for the same one of another size."""
    made = image_processor(QWEN3, {}, {})
    image = picture(64, 64)
    digests = {made.prepare(image).digest, made.prepare(image.copy()).digest}
    assert len(digests) == 1
    other = image.copy()
    other[5, 5, 1] ^= 1
    digests |= {
        made.prepare(other).digest, made.prepare(image.reshape(32, 128, 3)).digest,
        made.budgeted(image_tokens=100).prepare(image).digest,
        dataclasses.replace(made, resample=2).prepare(image).digest,
    }  # fmt: skip
    assert len(digests) == 5


def test_what_no_encoder_reads_is_refused():
    """Catches a division by nothing for lines of pixels."""
    with pytest.raises(RequestError, match="30000 x 2"):
        image_processor(QWEN3, {}, {}).prepare(picture(2, 30000))
    tokens = image_processor(SMOLVLM, {"image_seq_len": 64}, {}).prepare(picture(2, 30000)).n_tokens
    assert tokens == 5 * 64
    assert image_processor(GEMMA4, {}, {}).prepare(picture(2, 30000)).n_tokens == 280


@pytest.mark.parametrize(
    "change",
    [
        {"size": {"longest_edge": 10**9}}, {"size": {"longest_edge": -1}}, {"size": "large"},
        {"image_mean": [0.5]}, {"image_std": [0, 0, 0]}, {"image_mean": "x"}, {"rescale_factor": "x"},
        {"resample": 17}, {"do_resize": False}, {"max_image_size": {"longest_edge": 0}},
        {"rescale_factor": float("nan")},
    ],
)  # fmt: skip
def test_broken_settings_are_named(change):
    """Catches a hostile checkpoint that takes memory, or an image of NaN."""
    with pytest.raises(FormatError):
        image_processor(SMOLVLM | change, {}, {})


def test_a_crop_of_pixtral_is_refused():
    """Catches a picture shown whole whose checkpoint crops it."""
    with pytest.raises(FormatError, match="'do_center_crop' of the image processor is not supported"):
        image_processor(PIXTRAL | {"do_center_crop": True}, {}, {})


def test_an_unknown_processor_is_refused():
    """Catches another family's pixels for a model that is not known."""
    with pytest.raises(UnsupportedError, match="FooImageProcessor"):
        image_processor({"image_processor_type": "FooImageProcessor"}, {}, {})


def test_the_file_of_the_whole_processor_wins():
    """Catches the older file read where a checkpoint has both."""
    made = image_processor(SMOLVLM, {"image_processor": {"do_image_splitting": False}}, {})
    assert made.prepare(picture(*SIZES["large"])).grid == (0, 0)
