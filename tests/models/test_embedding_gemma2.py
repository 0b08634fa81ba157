"""EmbeddingGemma 2 against transformers on tiny random models: windows, heads by layer, its projections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri import LLM
from kukri.kernels import make_backend
from tests.lazy_imports import lazy_imports
from tests.models.tiny_encoders import load
from tests.models.tiny_llama import Driver

with lazy_imports():
    import torch
    import transformers as tr

V, RADIUS = 272, 5
IDS = np.random.default_rng(5).integers(0, 256, 37).tolist()
TEXTS = ["The cat sat on the mat, and the dog lay beside it.", "a", "Projections come last."]


def save(directory: Path, *, whole: bool = False) -> Any:
    """transformers' text model, saved with a tokenizer, alone or as a part of a model of images."""
    from tests.test_llm_safetensors import byte_tokenizer

    torch.manual_seed(4)
    config = tr.EmbeddingGemma2TextConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, global_head_dim=64, vocab_size=V, max_position_embeddings=128,
        initializer_range=0.1, sliding_window=RADIUS, hidden_size_per_layer_input=32, embedding_dim=48,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        bos_token_id=256, eos_token_id=257, pad_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    if whole:
        outer = tr.EmbeddingGemma2Config(text_config=config.to_dict(), vision_config=None, audio_config=None)
        saved = tr.EmbeddingGemma2Model(outer).eval()
        hf = saved.language_model
    else:
        saved = hf = tr.EmbeddingGemma2TextModel(config).eval()
    with torch.no_grad():
        for name, parameter in saved.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            if "q_norm" in name:  # scores are not scaled, so that trained norms of queries are small
                parameter.mul_(0.2)
        for layer in hf.layers:
            layer.layer_scalar.fill_(0.75)
    saved.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return hf


def vectors(hf: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return hf(torch.tensor([ids])).last_hidden_state[0].numpy()


@pytest.mark.parametrize("backend", ["reference", "cpu", "torch"])
def test_vectors_of_tokens_are_those_of_transformers(backend: str, tmp_path: Path) -> None:
    """Catches a window of one side, another radius, heads of wrong layers, and a table of embeddings."""
    hf = save(tmp_path)
    made = make_backend(backend)  # type: ignore[arg-type]
    try:
        got = Driver(load(tmp_path), made, {}, kv_type=made.exact_kv_type).run(IDS, [len(IDS)])
    finally:
        getattr(made, "close", lambda: None)()
    wanted = vectors(hf, IDS)
    assert got.shape == wanted.shape == (37, 48)
    np.testing.assert_allclose(
        got, wanted, atol=(2e-3 if backend == "cpu" else 1e-4) * np.abs(wanted).max(), rtol=0
    )
    changed = [*IDS[:20], (IDS[20] + 1) % 256, *IDS[21:]]  # the premise: tokens see what follows them
    assert np.abs(vectors(hf, changed)[0] - wanted[0]).max() > 1e-3


@pytest.mark.parametrize("whole", [False, True])
def test_texts_get_the_mean_of_their_tokens(whole: bool, tmp_path: Path) -> None:
    """Catches a width that is the model's, names below the text's part, and neighbours in a batch."""
    hf = save(tmp_path, whole=whole)
    with LLM(tmp_path, n_threads=2) as llm:
        together = llm.embed(TEXTS, pooling="mean")
        ids = [llm.tokenizer.encode(text, add_special=True) for text in TEXTS]
        wanted = np.array([vectors(hf, each).mean(0) for each in ids])
        wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
        assert together.shape == (3, 48)
        np.testing.assert_allclose(together, wanted, atol=2e-3, rtol=0)
        np.testing.assert_array_equal(together, [llm.embed(text, pooling="mean") for text in TEXTS])
        assert llm.embed(TEXTS[0], pooling="mean", dimensions=16).shape == (16,)
