"""EmbeddingGemma against transformers on tiny random models: both sides of a window, dense layers, GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri import LLM
from kukri.errors import FormatError, UnsupportedError
from kukri.formats.gguf.reader import GGUFFile
from kukri.kernels import make_backend
from kukri.terminal.convert import convert_model
from tests.lazy_imports import lazy_imports
from tests.models.tiny_encoders import load
from tests.models.tiny_llama import Driver

with lazy_imports():
    import torch
    import transformers as tr
    from safetensors.torch import load_file, save_file

V, WINDOW = 272, 10  # a token sees 5 before and 5 after it
IDS = np.random.default_rng(5).integers(0, 256, 37).tolist()
TEXTS = ["The cat sat on the mat, and the dog lay beside it.", "a", "Dense layers come last."]


def save(directory: Path, **more: Any) -> Any:
    """transformers' model, saved with a tokenizer and the files of sentence-transformers."""
    from tests.test_llm_safetensors import byte_tokenizer

    torch.manual_seed(4)
    config = tr.Gemma3TextConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, vocab_size=V, max_position_embeddings=128, initializer_range=0.2,
        sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=32, use_bidirectional_attention=True, attn_implementation="eager",
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        bos_token_id=256, eos_token_id=257, pad_token_id=None, **more,
    )  # fmt: skip
    hf = tr.Gemma3TextModel(config).eval()
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    hf.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    listed = ["", "1_Pooling", "2_Dense", "3_Dense", "4_Normalize"]
    modules = [
        {"name": str(i), "path": path, "type": f"sentence_transformers.models.{path[2:] or 'Transformer'}"}
        for i, path in enumerate(listed)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    prompts = {"prompts": {"query": "task: search | query: "}}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    for name, n_in, n_out in (("2_Dense", 64, 128), ("3_Dense", 128, 64)):
        dense(directory / name, torch.randn(n_out, n_in) * 0.2)
    return hf


def dense(directory: Path, weight: torch.Tensor, **more: Any) -> None:
    directory.mkdir(exist_ok=True)
    stated = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": False}
    identity = {"activation_function": "torch.nn.modules.linear.Identity"}
    (directory / "config.json").write_text(json.dumps({**stated, **identity, **more}))
    save_file({"linear.weight": weight.contiguous()}, directory / "model.safetensors")


def hidden(hf: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return hf(torch.tensor([ids])).last_hidden_state[0].numpy()


@pytest.mark.parametrize("backend", ["reference", "cpu", "torch"])
def test_hidden_states_match_transformers(backend: str, tmp_path: Path) -> None:
    """A causal mask, a window of one side or another size, a RoPE of the other kind of layer."""
    hf = save(tmp_path)
    model = load(tmp_path)
    assert [layer.window for layer in model.config.layers] == [6, None, 6]
    made = make_backend(backend)  # type: ignore[arg-type]
    try:
        got = Driver(model, made, kv_type=made.exact_kv_type).run(IDS, [len(IDS)])
    finally:
        getattr(made, "close", lambda: None)()
    want = hidden(hf, IDS)
    np.testing.assert_allclose(got, want, atol=(3e-3 if backend == "cpu" else 1e-4) * np.abs(want).max())
    changed = [*IDS[:-1], (IDS[-1] + 1) % 256]  # the premise: the first token sees the last one
    assert np.abs(hidden(hf, changed)[0] - want[0]).max() > 1e-3


def wanted(hf: Any, llm: LLM, directory: Path, texts: list[str]) -> np.ndarray:

    layers = [
        load_file(directory / n / "model.safetensors")["linear.weight"].numpy()
        for n in ("2_Dense", "3_Dense")
    ]
    rows = []
    for text in texts:
        row = hidden(hf, llm.tokenizer.encode(text, add_special=True)).mean(0)
        row = layers[1] @ (layers[0] @ row)
        rows.append(row / np.linalg.norm(row))
    return np.array(rows)


def test_embeddings_from_a_directory_and_from_gguf(tmp_path: Path) -> None:
    """A dense layer, a prompt or a window that one of the formats loses."""
    source, file = tmp_path / "source", tmp_path / "tiny.gguf"
    hf = save(source)
    convert_model(source, file, None, dry_run=False, as_json=True)
    with GGUFFile(file) as gguf:
        assert gguf.metadata["general.architecture"] == "gemma-embedding"
        assert gguf.metadata["gemma-embedding.attention.sliding_window"] == WINDOW
        assert gguf.metadata["gemma-embedding.dense_2_feat_out"] == 128
        assert gguf.tensors["dense_3.weight"].shape == (64, 128)
    with LLM(source, n_threads=2) as first, LLM(file, n_threads=2) as second:
        vectors = first.embed(TEXTS)
        np.testing.assert_allclose(vectors, wanted(hf, first, source, TEXTS), atol=3e-3)
        np.testing.assert_allclose(second.embed(TEXTS), vectors, atol=1e-5)
        np.testing.assert_array_equal(vectors, [first.embed(text) for text in TEXTS])
        asked = first.embed("cat", prompt_name="query")
        np.testing.assert_allclose(
            asked, wanted(hf, first, source, ["task: search | query: cat"])[0], atol=3e-3
        )
        with pytest.raises(UnsupportedError, match="does not support generation"):
            first.generate("a")


def test_dense_layers_that_gguf_cannot_hold_are_refused(tmp_path: Path) -> None:
    """A layer that a converted file loses in silence."""
    save(tmp_path)
    dense(tmp_path / "2_Dense", torch.randn(128, 64), activation_function="torch.nn.modules.activation.Tanh")
    with pytest.raises(UnsupportedError, match="these 2 dense layers are not supported in GGUF"):
        convert_model(tmp_path, tmp_path / "tiny.gguf", None, dry_run=False, as_json=True)


def test_a_causal_gemma_stays_one(tmp_path: Path) -> None:
    """The flag taken from another key, or a value that is no flag."""
    save(tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text())
    for value, error in ((False, None), (None, None), ("yes", UnsupportedError)):
        (tmp_path / "config.json").write_text(json.dumps({**stated, "use_bidirectional_attention": value}))
        if error is None:
            assert load(tmp_path).config.is_causal
        else:
            with pytest.raises((UnsupportedError, FormatError), match="use_bidirectional_attention"):
                load(tmp_path)
