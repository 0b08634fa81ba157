"""LFM2 as an encoder: hidden states, batches, ColBERT with tokens that nobody sees, GGUF."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kukri import LLM
from kukri.config import LateInteraction
from kukri.errors import UnsupportedError
from kukri.formats.checkpoint import open_checkpoint
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.writer import write_gguf
from kukri.formats.sentence_transformers import LATE_KEY
from kukri.interp import gradients
from kukri.interp.session import Session
from kukri.kernels import make_backend
from kukri.terminal.convert import convert_model
from tests.models import test_encoders, tiny_colbert
from tests.models.tiny_encoders import hf_states, load, save
from tests.models.tiny_llama import Driver

NAME = "lfm2_bidirectional"


@pytest.mark.parametrize("backend", ["reference", "cpu", "torch"])
def test_hidden_states_are_those_of_the_definition(backend: Any, tmp_path: Path) -> None:
    """A causal mask or convolution, a tap on the wrong side."""
    hf, ids = save(tmp_path, NAME), test_encoders.IDS
    made = make_backend(backend)
    try:
        got = Driver(load(tmp_path), made, kv_type=made.exact_kv_type).run(ids, [len(ids)])
    finally:
        getattr(made, "close", lambda: None)()
    want = hf_states(hf, ids)[-1]
    np.testing.assert_allclose(got, want, atol=test_encoders.TOLERANCES[backend] * np.abs(want).max())
    changed = hf_states(hf, [*ids[:-1], ids[-1] - 1])[-1]
    assert np.abs(changed[0] - want[0]).max() > 1e-3, "the premise: the first token sees the last one"


@pytest.mark.full
def test_texts_in_a_batch_are_those_alone_to_the_bit(tmp_path: Path) -> None:
    """A convolution that reaches a neighbour in the step."""
    test_encoders.test_texts_in_a_batch_are_those_alone_to_the_bit(NAME, "cls", tmp_path)


@pytest.mark.parametrize("backend", ["reference", "cpu", "torch"])
@pytest.mark.parametrize("name", [NAME, "lfm2"])
def test_vectors_of_colbert(name: str, backend: Any, tmp_path: Path) -> None:
    """Tokens of an expanded query that convolutions see, by both kinds; a causal model that looks ahead."""
    hf = tiny_colbert.save_late(tmp_path, name)
    with LLM(tmp_path, backend=backend, n_threads=1) as llm:
        for name, text in (("query", "cats sat"), ("document", "the cat sat on the mat.")):
            want = tiny_colbert.defined(tmp_path, hf, text, name == "query")
            got = llm.embed_tokens(text, prompt_name=name)
            np.testing.assert_allclose(got, want, atol=2e-3 if backend == "cpu" else 2e-5)
        llm.engine.check_integrity()


def test_a_converted_file_is_the_same(tmp_path: Path) -> None:
    """A file that says LFM2 and is taken for the causal model."""
    test_encoders.test_a_converted_encoder_is_the_same(NAME, "Model", tmp_path)


@pytest.mark.full
def test_stages_know_that_a_causal_model_is_an_encoder(tmp_path: Path) -> None:
    """A stage that keeps states, and caches prefixes, of a model that is read as the files say."""
    tiny_colbert.save_late(tmp_path, "lfm2")
    with LLM(tmp_path, n_threads=1) as llm:
        whole = llm.embed_tokens("cats sat", prompt_name="query")
    with LLM(tmp_path, n_threads=1, stages=2) as llm:
        np.testing.assert_array_equal(llm.embed_tokens("cats sat", prompt_name="query"), whole)


@pytest.mark.parametrize("name", [NAME, "lfm2"])
@pytest.mark.parametrize("settings", [{}, {"do_query_expansion": False, "document_length": 30}], ids=str)
def test_colbert_in_gguf(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """A file that loses the settings, the dense layer or that the model is causal; one of llama.cpp's
    converter, which has no settings.
    """
    tiny_colbert.save_late(tmp_path / "hf", name, **settings)
    convert_model(tmp_path / "hf", tmp_path / "m.gguf", None, dry_run=False, as_json=True)
    with GGUFFile(tmp_path / "m.gguf") as file:
        stated = {key: value for key, value in file.metadata.items() if key != LATE_KEY}
        assert len(stated) == len(file.metadata) - 1
        assert stated.get("lfm2.attention.causal") == (False if name == NAME else None)
        assert stated["lfm2.embedding_length_out"] == tiny_colbert.WIDTH
        tensors = {t.name: (t.type, file.data(t.name).copy(), t.shape) for t in file.tensors.values()}
    write_gguf(tmp_path / "theirs.gguf", stated, tensors)
    found = []
    for path in ("hf", "m.gguf"):
        with LLM(tmp_path / path, backend="reference") as llm:
            vectors = [llm.embed_tokens("the cat sat.", prompt_name=kind) for kind in ("query", "document")]
            found.append([*vectors, llm.rerank("cats", ["the cat", "mats"])])
    for ours, theirs in zip(*(each[:2] for each in found), strict=True):
        np.testing.assert_allclose(theirs, ours, atol=1e-6)
    assert [one.index for one in found[0][2]] == [one.index for one in found[1][2]]
    with LLM(tmp_path / "theirs.gguf", backend="reference") as llm:
        late = llm.text_encoder.late
        assert late is not None
        assert late.config == LateInteraction()


@pytest.mark.slow
@pytest.mark.parametrize("name", [NAME, "lfm2"])
def test_llama_cpp_gives_the_same_vectors_of_tokens(name: str, tmp_path: Path) -> None:
    """A dense layer, or a key of its width, that only kukri finds."""
    llama_cpp = pytest.importorskip("llama_cpp")
    plain = {"query_prefix": "", "document_prefix": "", "do_query_expansion": False}
    tiny_colbert.save_late(tmp_path / "hf", name, **plain)
    convert_model(tmp_path / "hf", tmp_path / "m.gguf", None, dry_run=False, as_json=True)
    text = "the cat sat on the mat sitting"
    with LLM(tmp_path / "m.gguf", backend="reference") as llm:
        want = llm.embed_tokens(text, prompt_name="query")
    none = llama_cpp.LLAMA_POOLING_TYPE_NONE
    theirs = llama_cpp.Llama(str(tmp_path / "m.gguf"), embedding=True, pooling_type=none, verbose=False)
    # the package cuts what llama.cpp gives into rows of the model's width
    got = np.array(theirs.embed(text)).reshape(-1)[: want.size].reshape(want.shape)
    np.testing.assert_allclose(got / np.linalg.norm(got, axis=1, keepdims=True), want, atol=2e-3)
    theirs.close()


def test_convolutions_without_a_middle_are_refused(tmp_path: Path) -> None:
    """Four taps, of which either of two may be the token's own."""
    save(tmp_path, NAME)
    stated = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stated, "conv_L_cache": 4}))
    with (
        pytest.raises(UnsupportedError, match=r"conv_L_cache' must be odd, .* have a middle, not 4"),
        open_checkpoint(tmp_path),
    ):
        pass


@pytest.mark.parametrize("name", [NAME, "mpnet"])
def test_gradients_go_both_ways(name: str, tmp_path: Path) -> None:
    """A derivative that reaches earlier inputs alone, or of scores without their biases."""
    save(tmp_path, name)

    def run(backend: Any) -> tuple[Any, Any]:
        own = Session(
            load(tmp_path), make_backend(backend), lambda text, add_special=True: [], bytes, nullcontext
        )
        ids = np.array([test_encoders.IDS], np.int32)
        held: Any = SimpleNamespace(interp=own)
        value, _, grads = gradients.run_with_gradients(held, ids, gradients.logit_difference(3, 5))
        return value, grads

    (value, found), (want_value, want) = run("reference"), run("torch")
    assert value == pytest.approx(want_value, abs=1e-4)
    assert found.keys() == want.keys()
    for name, grad in want.items():
        np.testing.assert_allclose(found[name], grad, atol=2e-4 * np.abs(grad).max(), err_msg=name)
