"""A tiny random model that sees, saved as a checkpoint is: weights, tokenizer, processor, chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import AddedToken

from tests.lazy_imports import lazy_imports
from tests.test_llm_safetensors import byte_tokenizer
from tests.vision.tiny_vision import SIGLIP, TEXT

with lazy_imports():
    import torch
    import transformers as tr
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

# as SmolVLM's
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'][0]"
    "['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}{% if "
    "line['type'] == 'text' %}{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
MARKS = [
    "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    *(f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)),
]  # fmt: skip
SIZES = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
N_TILE = 4  # tokens


def save_seeing(directory: Path, n_layers: int | None = None) -> tuple[Any, Any]:
    """Saves the model, of so many layers in text and encoder; returns transformers' own and its processor."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(mark, normalized=False) for mark in MARKS]}
    )
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    text = {**TEXT, "vocab_size": len(tokenizer), "max_position_embeddings": 1024}
    seen = dict(SIGLIP)
    if n_layers is not None:
        text["num_hidden_layers"] = seen["num_hidden_layers"] = n_layers
    torch.manual_seed(7)
    config = tr.Idefics3Config(text_config=text, vision_config=seen, scale_factor=2, image_token_id=image_id)
    model = tr.Idefics3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "vision" in name or "connector" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    stated = {"image_processor_type": "Idefics3ImageProcessor", **SIZES}
    (directory / "preprocessor_config.json").write_text(json.dumps(stated))
    own = {"processor_class": "Idefics3Processor", "image_seq_len": N_TILE}
    (directory / "processor_config.json").write_text(json.dumps(own))
    processor = tr.Idefics3Processor(
        Idefics3ImageProcessorPil(**SIZES), tokenizer, image_seq_len=N_TILE, chat_template=TEMPLATE
    )
    return model, processor


def their_answer(model: Any, processor: Any, messages: list[Any], n_tokens: int) -> list[int]:
    """The likeliest tokens after messages whose pictures are arrays."""
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
    images = [
        Image.fromarray(part["image"]) for one in messages for part in one["content"] if "image" in part
    ]
    inputs = processor(text=prompt, images=images, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=n_tokens, do_sample=False, eos_token_id=None)
    return ids[0, inputs["input_ids"].shape[1] :].tolist()
