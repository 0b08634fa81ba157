"""The language model in a directory of a model of images and text, as transformers saves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri import LLM
from kukri.errors import UnusedTensorError
from kukri.formats.headers import read_headers
from kukri.formats.huggingface.config import hf_model_config, text_config
from kukri.terminal.convert import convert_model
from tests.lazy_imports import lazy_imports
from tests.test_llm_safetensors import GEMMA, GEMMA4, N_VOCAB, TINY, byte_tokenizer, exact_logits

with lazy_imports():
    import torch
    import transformers as tr

IDS = np.random.default_rng(0).integers(0, 200, 30).tolist()
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        {"text_config": {**TINY, **GEMMA}, "vision_config": {**VISION, "image_size": 28, "patch_size": 14}},
        {"mm_tokens_per_image": 4, "image_token_id": 271, "boi_token_id": 270, "eoi_token_id": 269},
    ),
    "gemma4": (
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        {
            "text_config": {
                **TINY,
                **GEMMA4,
                "pad_token_id": 0,
                "hidden_size_per_layer_input": 32,
                "num_kv_shared_layers": 0,
            },
            "vision_config": {**VISION, "num_key_value_heads": 2, "head_dim": 16},
            "audio_config": None,
        },
        {"image_token_id": 271, "boi_token_id": 270, "eoi_token_id": 269, "audio_token_id": 268},
    ),
    "gemma4_unified": (
        "Gemma4UnifiedConfig",
        "Gemma4UnifiedForConditionalGeneration",
        {
            "text_config": {
                **TINY,
                **GEMMA4,
                "pad_token_id": 0,
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
            },
            "vision_config": {"mm_embed_dim": 64, "output_proj_dims": 64, "mm_posemb_size": 8},
            "audio_config": None,
        },
        {"image_token_id": 271, "boi_token_id": 270, "eoi_token_id": 269, "audio_token_id": 268},
    ),
    "qwen3_5": (
        "Qwen3_5Config",
        "Qwen3_5ForConditionalGeneration",
        {
            "text_config": {
                **{**TINY, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "head_dim": 32},
                **{"linear_key_head_dim": 32, "linear_value_head_dim": 32},
            },
            "vision_config": {"hidden_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
        },
        {},
    ),
}


SEES = ("gemma3", "gemma4", "gemma4_unified", "qwen3_5")  # whose encoders run


def save(directory: Path, name: str) -> Any:
    """transformers' model, saved with a tokenizer."""
    from tests.models import token_by_token  # noqa: F401

    config_class, model_class, parts, more = MODELS[name]
    torch.manual_seed(3)
    model = getattr(tr, model_class)(getattr(tr, config_class)(**parts, **more)).eval()
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_the_text_runs_and_is_converted(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tensors of images that are an error or are written; text without its own model's configuration."""
    model = save(tmp_path / "hf", name)
    with torch.no_grad():
        want = model(torch.tensor([IDS])).logits[0].numpy()
    np.testing.assert_allclose(
        exact_logits(tmp_path / "hf", IDS), want, atol=2e-4 * max(1, np.abs(want).max())
    )
    assert ("tensors of images are left out, because only the text" in caplog.text) == (name not in SEES)
    convert_model(tmp_path / "hf", tmp_path / "m.gguf", None, dry_run=False, as_json=True)
    assert ("is left out: " in capsys.readouterr().err) == (name in SEES), (
        "nothing says how to prepare images"
    )
    assert not list(tmp_path.glob("mmproj*"))
    np.testing.assert_allclose(
        exact_logits(tmp_path / "m.gguf", IDS), want, atol=2e-4 * max(1, np.abs(want).max())
    )
    headers = read_headers(tmp_path / "hf")
    assert headers.problem is None
    assert not [t.name for t in headers.tensors if "vis" in t.name]
    with LLM(tmp_path / "hf", backend="reference") as llm:
        assert llm.config.architecture == f"{name.removesuffix('_unified')}_text"
        assert llm.config.n_vocab == N_VOCAB


def test_what_the_text_leaves_out_is_transformers_own() -> None:
    """Published configurations of Gemma 3 that name few keys of their text."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "sliding_window": 1024,
    }
    text |= {"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    stated = {"model_type": "gemma3", "text_config": text, "vision_config": {}, "eos_token_id": [1, 106]}
    ours = hf_model_config(text_config(json.loads(json.dumps(stated))), Path("config.json"))
    theirs = tr.Gemma3Config(text_config=dict(text)).text_config
    assert (ours.n_vocab, ours.n_heads, ours.n_kv_heads, ours.d_head, ours.max_context) == (
        *(theirs.vocab_size, theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim),
        theirs.max_position_embeddings,
    )
    assert ours.tie_embeddings
    assert [layer.window for layer in ours.layers] == [
        1024 if kind == "sliding_attention" else None for kind in theirs.layer_types
    ]


def test_other_tensors_are_still_an_error(tmp_path: Path) -> None:
    """A lost part of the text, taken for one of images."""
    from safetensors.numpy import load_file, save_file

    save(tmp_path, "gemma3")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["speech_tower.conv.weight"] = np.zeros(3, np.float32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnusedTensorError, match=r"takes: 'speech_tower\.conv\.weight'"):
        LLM(tmp_path, backend="reference")
