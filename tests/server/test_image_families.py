"""Images over HTTP to tiny models of the families whose pictures keep their proportions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks.pictures import picture
from kukri import LLM
from tests.lazy_imports import lazy_imports
from tests.server.live_server import serving
from tests.server.test_images import sent, shown, user
from tests.test_llm_safetensors import byte_tokenizer
from tests.vision.test_processors import reference
from tests.vision.tiny_checkpoints import FAMILIES, MEAN, STD, save_with_processor
from tests.vision.tiny_vision import IMAGE_TOKEN, PIXTRALS

with lazy_imports():
    import torch

N = 8  # tokens of an answer
BREAK, END = 260, 261
WIDE = picture(40, 70, 3)


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma4", "lighton_ocr", "paddleocr_vl")),
        pytest.param("lfm3_vl", marks=pytest.mark.full),
        "mistral3",
        "qwen2_5_vl",
        "qwen3_vl",
        "qwen3_5",
    ],
)
def seeing(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """A family's name, transformers' model, and its directory."""
    directory = tmp_path_factory.mktemp(request.param)
    return request.param, save_with_processor(directory, request.param), directory


def their_answer(name: str, model: Any, before: str, after: str) -> list[int]:
    """The likeliest tokens after two texts with WIDE between them, by transformers' processor and model."""
    stated = {**FAMILIES[name][1], "image_mean": MEAN, "image_std": STD}
    stated["image_processor_type"] += "ImageProcessor"
    more = {"patch_size": 8} if name in PIXTRALS else {}  # a square of 2 x 2 patches of 4
    made = reference({**stated, **more})(images=[Image.fromarray(WIDE)], return_tensors="pt")
    keys = ("pixel_values", "image_sizes", "image_grid_thw", "image_position_ids")
    inputs = {key: made[key] for key in keys if key in made}
    if name == "mistral3":
        rows, columns = (int(side) // 8 for side in made["image_sizes"][0])
        shown_as = ([IMAGE_TOKEN] * columns + [BREAK]) * rows
        shown_as[-1] = END
    elif name == "lighton_ocr":
        rows, columns = (int(side) // 8 for side in made["image_sizes"][0])
        shown_as = [IMAGE_TOKEN] * (rows * columns)
    elif name == "gemma4":
        shown_as = [BREAK, *[IMAGE_TOKEN] * int(made["num_soft_tokens_per_image"][0]), END]
    else:
        shown_as = [IMAGE_TOKEN] * (int(made["image_grid_thw"].prod()) // 4)
    of_before, of_after = byte_tokenizer()([before, after])["input_ids"]
    ids = [*of_before, *shown_as, *of_after[1:]]  # without a second BOS
    found: list[int] = []
    with torch.no_grad():
        for _ in range(N):
            asked = torch.tensor([[*ids, *found]])
            types = (
                {} if name in ("gemma4", *PIXTRALS) else {"mm_token_type_ids": (asked == IMAGE_TOKEN).long()}
            )
            found.append(int(model(input_ids=asked, **inputs, **types).logits[0, -1].argmax()))
    return found


@pytest.mark.full(only=["qwen3_5"])
def test_openai_s_client_gets_transformers_answer(seeing: tuple[str, Any, Path]) -> None:
    """Catches a picture of another size or order, or tokens around it that the model does not know."""
    name, model, directory = seeing
    before, after = "Is it ", " or not, and why is it so?"
    with LLM(directory, backend="reference", kv_type="f32") as llm, serving(llm, any_model=True) as served:
        own = llm.chat([user(shown(before, WIDE, after))], temperature=0, max_tokens=N, ignore_eos=True)
        assert own.token_ids == their_answer(name, model, before, after)
        answer = served.client.chat.completions.create(
            model="m",
            messages=[user(sent(before, WIDE, after))],
            temperature=0,
            max_tokens=N,
            extra_body={"ignore_eos": True},
        )
        assert answer.choices[0].message.content == own.text
        assert answer.usage.prompt_tokens == len(own.prompt_token_ids)
        assert answer.usage.prompt_tokens_details.tokens_per_image == own.image_tokens
