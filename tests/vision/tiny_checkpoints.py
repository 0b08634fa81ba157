"""Tiny random models that see, with what else their checkpoints hold: a processor, its tokens, a template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.test_llm_safetensors import byte_tokenizer
from tests.vision.tiny_vision import IMAGE_TOKEN, PAD_ID, save

MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]  # CLIP's
# the token of images, and the facts of preprocessor_config.json
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("<image_soft_token>", {"image_processor_type": "Gemma3", "size": {"height": 64, "width": 64}}),
    "gemma4": (
        "<|image|>",
        {"image_processor_type": "Gemma4", "patch_size": 4, "max_soft_tokens": 70},
    ),
    "gemma4-whole": (
        "<|image|>",
        {"image_processor_type": "Gemma4", "patch_size": 4, "max_soft_tokens": 140},
    ),
    "gemma4-unified": (
        "<|image|>",
        {"image_processor_type": "Gemma4Unified", "patch_size": 4, "max_soft_tokens": 140},
    ),
    "idefics3": (
        "<image>",
        {
            "image_processor_type": "Idefics3",
            **{"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}},
        },
    ),
    "lfm2_vl": (
        "<image>",
        {"image_processor_type": "Lfm2Vl", "encoder_patch_size": 4, "downsample_factor": 2},
    ),
    "lfm3_vl": (
        "<|image|>",
        {
            "image_processor_type": "Qwen2VL",
            **{"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 4096},
        },
    ),
    "lighton_ocr": ("<|image_pad|>", {"image_processor_type": "Pixtral", "size": {"longest_edge": 48}}),
    "llava": ("[IMG]", {"image_processor_type": "Pixtral", "size": {"longest_edge": 48}}),
    "mistral3": ("[IMG]", {"image_processor_type": "Pixtral", "size": {"longest_edge": 48}}),
    "paddleocr_vl": (
        "<|IMAGE_PLACEHOLDER|>",
        {
            "image_processor_type": "PaddleOCRVL",
            **{"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 4096},
        },
    ),
    "qwen2_5_vl": (
        "<|image_pad|>",
        {
            "image_processor_type": "Qwen2VL",
            **{"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 4096},
        },
    ),
    "qwen3_vl": (
        "<|image_pad|>",
        {
            "image_processor_type": "Qwen2VL",
            **{"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 4096},
        },
    ),
    "qwen3_5": (
        "<|image_pad|>",
        {
            "image_processor_type": "Qwen2VL",
            **{"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 4096},
        },
    ),
}


# of a text's pictures and words, as they come
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ IMAGE }}{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def save_with_processor(directory: Path, name: str) -> Any:
    """As `save`, with a token of images at its place, a processor and a template."""
    theirs = save(directory, name)
    token, stated = FAMILIES[name]
    tokenizer = byte_tokenizer()
    others = [f"<other {i}>" for i in range(IMAGE_TOKEN - len(tokenizer))]
    if name in ("llava", "mistral3"):
        others[:2] = "[IMG_BREAK]", "[IMG_END]"
    if name.startswith("gemma4"):
        others[:2] = "<|image>", "<image|>"
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(PAD_ID)
    tokenizer.add_special_tokens({"additional_special_tokens": [*others, token]})
    assert tokenizer.convert_tokens_to_ids(token) == IMAGE_TOKEN
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", repr(token))
    tokenizer.save_pretrained(directory)
    stated = {**stated, "image_mean": MEAN, "image_std": STD}
    (directory / "preprocessor_config.json").write_text(json.dumps(stated))
    (directory / "processor_config.json").write_text(
        json.dumps(
            {"spatial_merge_size": 1 if name == "llava" else 2, "image_seq_length": 16, "patch_size": 4}
        )
    )
    return theirs
