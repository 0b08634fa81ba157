"""Tiny random models of images and text as transformers saves them, and prompts with images for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from kukri.engine import Engine
from kukri.vision.image import ImageInput, ImagePrompt, ImageSpan
from tests.lazy_imports import lazy_imports
from tests.test_llm_safetensors import GEMMA, GEMMA4, TINY, byte_tokenizer

with lazy_imports():
    import torch
    import transformers as tr

IMAGE_TOKEN, PAD_ID = 271, 7
TEXT = {**TINY, "model_type": "llama", "max_position_embeddings": 512}
SIGLIP = {
    **{"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 3, "num_hidden_layers": 3},
    **{"image_size": 32, "patch_size": 8},
}


@dataclass(frozen=True)
class TinyVision:
    """Names of transformers' classes of a model, its configuration, and the rows of embeddings of a tile."""

    config: str
    model: str
    parts: dict[str, Any]
    tile_tokens: int
    size: int = 32  # pixels of a tile's side


GEMMA3_TEXT = {
    **{**TEXT, **GEMMA, "model_type": "gemma3_text", "sliding_window": 24, "attention_bias": False},
}
QWEN_VISION = {
    **{"depth": 4, "hidden_size": 48, "intermediate_size": 80, "num_heads": 3, "out_hidden_size": 64},
    **{"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2},
}
QWEN_IDS = {
    **{"image_token_id": IMAGE_TOKEN, "video_token_id": 268, "vision_start_token_id": 270},
    "vision_end_token_id": 269,
}
MODELS = {
    "gemma3": TinyVision(
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        {
            "text_config": GEMMA3_TEXT,
            "vision_config": {**SIGLIP, "model_type": "siglip_vision_model", "image_size": 64},
            "mm_tokens_per_image": 16,
            "image_token_index": IMAGE_TOKEN,
            "boi_token_index": 270,
            "eoi_token_index": 269,
        },
        tile_tokens=16,
        size=64,
    ),
    "gemma4": TinyVision(
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        {
            "text_config": {
                **{**TEXT, **GEMMA4, "model_type": "gemma4_text", "sliding_window": 24},
                **{"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2, "pad_token_id": PAD_ID},
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            "vision_config": {
                **{"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "patch_size": 4},
                **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 24},
                **{"position_embedding_size": 64, "use_clipped_linears": True, "standardize": True},
            },
            "audio_config": None,
            **{"image_token_id": IMAGE_TOKEN, "boi_token_id": 270, "eoi_token_id": 269},
        },
        tile_tokens=6,
    ),
    "gemma4-whole": TinyVision(  # whose images see themselves, in layers with a window
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        {
            "text_config": {
                **{**TEXT, **GEMMA4, "model_type": "gemma4_text", "sliding_window": 25},
                **{"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "pad_token_id": PAD_ID},
                **{"num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"},
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            "vision_config": {
                **{"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "patch_size": 4},
                **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 24},
                "position_embedding_size": 64,
            },
            "audio_config": None,
            **{"image_token_id": IMAGE_TOKEN, "boi_token_id": 270, "eoi_token_id": 269},
        },
        tile_tokens=6,
    ),
    "gemma4-unified": TinyVision(
        "Gemma4UnifiedConfig",
        "Gemma4UnifiedForConditionalGeneration",
        {
            "text_config": {
                **{**TEXT, **GEMMA4, "model_type": "gemma4_unified_text", "sliding_window": 25},
                **{"attention_k_eq_v": True, "num_global_key_value_heads": 1, "pad_token_id": PAD_ID},
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            "vision_config": {
                **{"patch_size": 4, "mm_embed_dim": 48, "output_proj_dims": 48, "mm_posemb_size": 40},
            },
            "audio_config": None,
            **{"image_token_id": IMAGE_TOKEN, "boi_token_id": 270, "eoi_token_id": 269},
        },
        tile_tokens=6,
    ),
    "idefics3": TinyVision(
        "Idefics3Config",
        "Idefics3ForConditionalGeneration",
        {
            "text_config": TEXT,
            "vision_config": SIGLIP,
            "scale_factor": 2,
            "image_token_id": IMAGE_TOKEN,
        },
        tile_tokens=4,
    ),
    "lfm2_vl": TinyVision(
        "Lfm2VlConfig",
        "Lfm2VlForConditionalGeneration",
        {
            "text_config": {
                **{**TEXT, "model_type": "lfm2", "full_attn_idxs": [2], "block_auto_adjust_ff_dim": False},
            },
            "vision_config": {
                **{**SIGLIP, "model_type": "siglip2_vision_model", "vision_use_head": False},
                **{"num_patches": 64, "patch_size": 4},
            },
            "projector_hidden_size": 56,
            "image_token_id": IMAGE_TOKEN,
        },
        tile_tokens=9,
    ),
    "lfm3_vl": TinyVision(
        "Lfm3VlConfig",
        "Lfm3VlForConditionalGeneration",
        {
            **{**QWEN_IDS, "projector_hidden_size": 56},
            "text_config": {
                **{**TEXT, "model_type": "lfm3", "head_dim": 16, "sliding_window": 24},
                "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
            },
            "vision_config": {
                **{"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "patch_size": 4},
                **{"num_attention_heads": 4, "num_key_value_heads": 2},
                "layer_types": ["conv", "full_attention"] * 2,
            },
        },
        tile_tokens=15,
    ),
    "lighton_ocr": TinyVision(
        "LightOnOcrConfig",
        "LightOnOcrForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "qwen3", "head_dim": 16},
            "vision_config": {
                **{**SIGLIP, "model_type": "pixtral", "patch_size": 4, "hidden_act": "silu", "head_dim": 16},
                **{"image_size": 64, "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0}},
            },
            "image_token_id": IMAGE_TOKEN,
            "spatial_merge_size": 2,
        },
        tile_tokens=15,
    ),
    "mistral3": TinyVision(
        "Mistral3Config",
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "mistral", "head_dim": 16, "sliding_window": None},
            "vision_config": {
                **{**SIGLIP, "model_type": "pixtral", "patch_size": 4, "hidden_act": "silu"},
                **{"image_size": 64, "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0}},
            },
            "image_token_id": IMAGE_TOKEN,
            "spatial_merge_size": 2,
        },
        tile_tokens=15,
    ),
    "llava": TinyVision(  # as Pixtral-12B is
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "mistral", "head_dim": 16, "sliding_window": None},
            "vision_config": {
                **{**SIGLIP, "model_type": "pixtral", "patch_size": 4, "hidden_act": "silu"},
                **{"image_size": 64, "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0}},
            },
            **{"image_token_id": IMAGE_TOKEN, "vision_feature_layer": -1},
            "vision_feature_select_strategy": "full",
        },
        tile_tokens=60,
    ),
    "paddleocr_vl": TinyVision(
        "PaddleOCRVLConfig",
        "PaddleOCRVLForConditionalGeneration",
        {
            **QWEN_IDS,
            "tie_word_embeddings": False,
            "text_config": {
                **{**TEXT, "model_type": "paddleocr_vl_text", "head_dim": 16, "tie_word_embeddings": False},
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
            },
            "vision_config": {**SIGLIP, "image_size": 30, "patch_size": 4},  # 7 x 7 positions
        },
        tile_tokens=15,
    ),
    "qwen2_5_vl": TinyVision(
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        {
            **QWEN_IDS,
            "text_config": {
                **{**TEXT, "model_type": "qwen2_5_vl_text"},
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
            },
            "vision_config": {**QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1, 3]},
        },
        tile_tokens=15,
    ),
    "qwen3_vl": TinyVision(
        "Qwen3VLConfig",
        "Qwen3VLForConditionalGeneration",
        {
            **QWEN_IDS,
            "text_config": {
                **{**TEXT, "model_type": "qwen3_vl_text", "head_dim": 16},
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
            },
            "vision_config": {
                **{**QWEN_VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]},
            },
        },
        tile_tokens=15,
    ),
    "qwen3_5": TinyVision(
        "Qwen3_5Config",
        "Qwen3_5ForConditionalGeneration",
        {
            **QWEN_IDS,
            "text_config": {
                **{**TEXT, "model_type": "qwen3_5_text", "head_dim": 32, "linear_key_head_dim": 16},
                **{"linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
                "rope_parameters": {
                    **{"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
                    **{"partial_rotary_factor": 0.25, "mrope_interleaved": True},
                },
                "layer_types": ["linear_attention", "full_attention"] * 2,
            },
            "vision_config": {**QWEN_VISION, "num_position_embeddings": 64},
        },
        tile_tokens=15,
    ),
    "smolvlm": TinyVision(
        "SmolVLMConfig",
        "SmolVLMForConditionalGeneration",
        {
            "text_config": TEXT,
            "vision_config": {**SIGLIP, "image_size": 36, "patch_size": 4},
            "scale_factor": 3,
            "image_token_id": IMAGE_TOKEN,
        },
        tile_tokens=9,
        size=36,
    ),
}


QWENS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
AS_QWENS = ("lfm3_vl", *QWENS)  # which read two frames, square by square
OF_SQUARES = ("paddleocr_vl", *QWENS)  # of patches, whose rows have three positions
PIXTRALS = ("mistral3", "lighton_ocr", "llava")


def save(directory: Path, name: str) -> Any:
    """transformers' model in float32, saved with a tokenizer; norms and biases are not ones and zeros."""
    from tests.models import token_by_token  # noqa: F401

    tiny = MODELS[name]
    torch.manual_seed(5)
    model = getattr(tr, tiny.model)(getattr(tr, tiny.config)(**tiny.parts)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if name.startswith("gemma4") and key.endswith("q_norm.weight"):  # scores are not scaled
                parameter.mul_(0.5)
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif any(part in key for part in ("vision", "connector", "projector", "visual")):
                parameter.add_(0.1 * torch.randn_like(parameter))
        for key, buffer in model.named_buffers():  # Gemma 4's bounds, and what its pools are scaled by
            if key.endswith(("_min", "_max")):
                size = 1.1 if "v_proj" in key else 1.4  # q and k read the same
                buffer.fill_(-0.8 * size if key.endswith("_min") else size)
            elif ".std_" in key:
                buffer.copy_(1 + 0.3 * torch.randn_like(buffer))
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return model


def image(name: str, n_tiles: int = 1, seed: int = 0) -> ImageInput:
    """Tiles of random numbers, and the digest of them."""
    tiny = MODELS[name]
    if name in (*AS_QWENS, *OF_SQUARES, *PIXTRALS):  # 10 x 6 patches, of more tiles wider and less tall ones
        grid = (1, 10, 6) if n_tiles == 1 else (1, 6, 10 * n_tiles)
        values = 96 if name in AS_QWENS else 48  # two frames or one
        pixels = np.random.default_rng(seed).uniform(-1, 1, (grid[1] * grid[2], values)).astype(np.float32)
        n_tokens = len(pixels) // (1 if name == "llava" else 4)
        return ImageInput(pixels, grid, n_tokens, sha256(pixels.tobytes()).digest())
    if name == "gemma4-unified":  # squares of 3 x 3 patches
        grid = (1, 3, 2) if n_tiles == 1 else (1, 2, 3 * n_tiles)
        pixels = np.random.default_rng(seed).uniform(0, 1, (grid[1] * grid[2], 9 * 48)).astype(np.float32)
        return ImageInput(pixels, grid, len(pixels), sha256(pixels.tobytes()).digest())
    if name.startswith("gemma4"):  # 9 x 6 patches, of more tiles wider and less tall ones
        grid = (1, 9, 6) if n_tiles == 1 else (1, 6, 9 * n_tiles)
        pixels = np.random.default_rng(seed).uniform(0, 1, (grid[1] * grid[2], 48)).astype(np.float32)
        return ImageInput(pixels, grid, len(pixels) // 9, sha256(pixels.tobytes()).digest())
    if name == "lfm2_vl":  # square tiles, and a picture of 4 x 8 patches
        n_patches = 36 * n_tiles if n_tiles > 1 else 0
        pixels = np.random.default_rng(seed).uniform(-1, 1, (n_patches + 4 * 8, 48)).astype(np.float32)
        grid = (1, n_tiles, 4, 8)
        return ImageInput(pixels, grid, len(pixels) // 4, sha256(pixels.tobytes()).digest())
    pixels = np.random.default_rng(seed).uniform(-1, 1, (n_tiles, 3, tiny.size, tiny.size)).astype(np.float32)
    grid = (0, 0) if n_tiles == 1 else (1, n_tiles - 1)
    return ImageInput(pixels, grid, n_tiles * tiny.tile_tokens, sha256(pixels.tobytes()).digest())


def prompt(name: str, *parts: str | ImageInput) -> ImagePrompt:
    """Texts, a token a byte, and images in order; a tile's run of tokens stands between two of text."""
    ids: list[int] = [256]
    images: list[ImageInput] = []
    spans: list[ImageSpan] = []
    n = MODELS[name].tile_tokens
    for part in parts:
        if isinstance(part, str):
            ids += part.encode()
            continue
        n = part.n_tokens if len(part.grid) == 3 else n
        whole, rest = divmod(part.n_tokens, n)
        for n_rows in [n] * whole + [rest] * (rest > 0):
            ids.append(200)
            spans.append(ImageSpan(len(ids), n_rows, len(images)))
            ids += [IMAGE_TOKEN] * n_rows
        images.append(part)
    return ImagePrompt(ids, tuple(images), tuple(spans))


def their_inputs(asked_of: str, asked: ImagePrompt) -> dict[str, torch.Tensor]:
    """A prompt as transformers' model takes it."""
    inputs = {"input_ids": torch.tensor([list(asked.token_ids)])}
    if asked.images and asked_of == "lfm2_vl":
        parts, shapes = [], []
        for one in asked.images:
            n_tiles = one.grid[1] if one.grid[1] > 1 else 0
            own = [(6, 6)] * n_tiles + [one.grid[2:]]
            parts += np.split(one.pixels, np.cumsum([h * w for h, w in own])[:-1])
            shapes += own
        inputs["pixel_values"] = torch.zeros(len(parts), 36, 48)
        inputs["pixel_attention_mask"] = torch.zeros(len(parts), 36, dtype=torch.long)
        for i, part in enumerate(parts):
            inputs["pixel_values"][i, : len(part)] = torch.from_numpy(part)
            inputs["pixel_attention_mask"][i, : len(part)] = 1
        inputs["spatial_shapes"] = torch.tensor(shapes)
    elif asked.images and asked_of.startswith("gemma4"):
        n_images, most = len(asked.images), max(len(one.pixels) for one in asked.images)
        inputs["pixel_values"] = torch.zeros(n_images, most, asked.images[0].pixels.shape[1])
        inputs["image_position_ids"] = torch.full((n_images, most, 2), -1)
        for i, one in enumerate(asked.images):
            places = np.indices(one.grid[1:]).reshape(2, -1)[::-1].T  # (column, row)
            inputs["pixel_values"][i, : len(places)] = torch.from_numpy(one.pixels)
            inputs["image_position_ids"][i, : len(places)] = torch.from_numpy(places.copy())
    elif asked.images and asked_of in PIXTRALS:
        sizes = [(4 * one.grid[1], 4 * one.grid[2]) for one in asked.images]
        inputs["pixel_values"] = torch.zeros(len(sizes), 3, *map(max, zip(*sizes)))
        for into, one, (height, width) in zip(inputs["pixel_values"], asked.images, sizes):
            cut = torch.from_numpy(one.pixels).reshape(one.grid[1], one.grid[2], 3, 4, 4)
            into[:, :height, :width] = cut.permute(2, 0, 3, 1, 4).reshape(3, height, width)
        inputs["image_sizes"] = torch.tensor(sizes)
    elif asked.images and asked_of in (*AS_QWENS, *OF_SQUARES):
        inputs["pixel_values"] = torch.from_numpy(np.concatenate([one.pixels for one in asked.images]))
        if asked_of == "paddleocr_vl":  # row by row, where Qwen's lie square by square
            parts = [
                one.pixels.reshape(one.grid[1] // 2, one.grid[2] // 2, 2, 2, -1).transpose(0, 2, 1, 3, 4)
                for one in asked.images
            ]
            inputs["pixel_values"] = torch.from_numpy(np.concatenate([p.reshape(-1, 3, 4, 4) for p in parts]))
        inputs["image_grid_thw"] = torch.tensor([one.grid for one in asked.images])
    elif asked.images:
        pixels = np.concatenate([one.pixels for one in asked.images])
        inputs["pixel_values"] = torch.from_numpy(pixels)
        if asked_of != "gemma3":
            inputs["pixel_values"] = inputs["pixel_values"][None]
    if asked_of in (*OF_SQUARES, "gemma4-whole", "gemma4-unified"):
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE_TOKEN).long()
    if asked_of == "gemma3":
        inputs["token_type_ids"] = (inputs["input_ids"] == IMAGE_TOKEN).long()
    return inputs


_TIE = 3e-5  # of the largest logit: random models have two tokens that are so close


def their_tokens(theirs: Any, name: str, asked: ImagePrompt, ours: Sequence[int]) -> list[int]:
    """The likeliest tokens after a prompt, as many as ours, which is taken if it is as likely within `_TIE`.

    Those of Qwen's models by whole passes: after an image that ends the prompt, `generate` (5.23) continues
    from the last row's place, where `get_rope_index` of the longer text says the largest position and one.
    """

    def favor_ours(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        token = ours[ids.shape[1] - len(asked)]
        if logits.max() - logits[0, token] <= _TIE * logits.abs().max():
            logits[0, token] = torch.inf
        return logits

    inputs, n = their_inputs(name, asked), len(ours)
    if name not in OF_SQUARES or not asked.images:
        more = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "logits_processor": [favor_ours]}
        found: list[int] = theirs.generate(**inputs, max_new_tokens=n, **more)[0, len(asked) :].tolist()
        return found
    for _ in range(n):
        token = favor_ours(inputs["input_ids"], theirs(**inputs).logits[:, -1]).argmax(-1, keepdim=True)
        inputs["input_ids"] = torch.cat([inputs["input_ids"], token], dim=1)
        types = inputs["mm_token_type_ids"]
        inputs["mm_token_type_ids"] = torch.cat([types, torch.zeros_like(token)], dim=1)
    return inputs["input_ids"][0, len(asked) :].tolist()


def our_logits(engine: Engine, asked: Any) -> np.ndarray:
    """Logits [T, V] of each token, by the engine's steps."""
    request = engine.maker.make_output_request(asked, "logits")
    engine.add_request(request)
    while not request.has_ended:
        engine.step()
    assert request.answer.error is None
    return request.answer.rows


def our_tokens(engine: Engine, asked: Any, n: int, **more: Any) -> list[int]:
    """The greedy answer's tokens."""
    from kukri import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **more)
    request = engine.maker.make_request(asked, params)
    engine.add_request(request)
    while not request.has_ended:
        engine.step()
    assert request.answer.error is None
    return request.output_ids


def relative(ours: np.ndarray, theirs: Sequence[Any]) -> float:
    """The largest error as a share of the largest number."""
    want = np.asarray(theirs)
    return float(np.abs(ours - want).max() / np.abs(want).max())
