"""all-MiniLM-L6-v2 itself: transformers' vectors, its limits, and a converted file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kukri import LLM
from kukri.errors import ContextLengthError
from kukri.formats import hub
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import torch
    import transformers

STRANGE = ["Straße", "naïve", "東京", "don't", "(2026)", "e.g.", "co-operate", "3.14", "€"]
WORDS = [*Path(__file__).read_text().split(), *STRANGE]


def texts_of(n_texts: int, n_most: int) -> list[str]:
    """Texts of some 1 to `n_most` tokens."""
    random = np.random.default_rng(0)
    lengths = np.geomspace(1, n_most / 2.5, n_texts).astype(int)
    return [" ".join(random.choice(WORDS, n)) for n in lengths]


@pytest.fixture(scope="module")
def minilm() -> Path:
    return hub.pull("minilm")


@pytest.mark.full
def test_fifty_texts_have_transformers_vectors(minilm: Path) -> None:
    """Any difference that tiny models do not show: word pieces of real text, 512 positions, truncation."""
    texts = texts_of(50, 500)
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    theirs = transformers.AutoModel.from_pretrained(minilm).eval()
    n_tokens = []
    with LLM(minilm, n_threads=2, max_context=512) as llm:
        ours = llm.embed(texts, truncate=True)
    for text, vector in zip(texts, ours, strict=True):
        encoded = tokenizer(text, return_tensors="pt", truncation=True, max_length=512)
        n_tokens.append(encoded.input_ids.shape[1])
        with torch.inference_mode():
            mean = theirs(**encoded).last_hidden_state[0].mean(0)
        assert vector @ torch.nn.functional.normalize(mean, dim=0).numpy() >= 0.9999
    assert min(n_tokens) <= 4
    assert max(n_tokens) > 400


@pytest.mark.full
def test_the_limit_is_that_of_its_files(minilm: Path) -> None:
    """A text cut in silence, as sentence-transformers does at 256 tokens."""
    long = "cat " * 300
    with LLM(minilm, n_threads=1, backend="reference") as llm:
        with pytest.raises(ContextLengthError, match="256"):
            llm.embed(long)
        np.testing.assert_array_equal(llm.embed(long, truncate=True), llm.embed("cat " * 254))
        best = llm.rerank(
            "What is the capital of France?", ["Berlin is large.", "Paris is France's capital."]
        )
        assert best[0].index == 1


def test_llama_cpp_reads_the_converted_file(minilm: Path, tmp_path: Path) -> None:
    """Names, shapes, word pieces or a pooling that only kukri reads as they are meant."""
    llama_cpp = pytest.importorskip("llama_cpp")
    from kukri.terminal.convert import convert_model

    convert_model(minilm, tmp_path / "minilm.gguf", None, dry_run=False, as_json=True)
    texts = ["Hello world, this is a test.", "naïve café 日本 don't", "a"]
    theirs = llama_cpp.Llama(str(tmp_path / "minilm.gguf"), embedding=True, verbose=False, n_ctx=512)
    with LLM(tmp_path / "minilm.gguf", n_threads=1) as llm:
        for text, vector in zip(texts, llm.embed(texts), strict=True):
            assert theirs.tokenize(text.encode()) == llm.tokenizer.encode(text, add_special=True)
            other = np.array(theirs.embed(text))
            assert vector @ other / np.linalg.norm(other) > 0.9999
