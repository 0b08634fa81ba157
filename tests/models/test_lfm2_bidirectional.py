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
from kukri.errors import UnsupportedError
from kukri.formats.checkpoint import open_checkpoint
from kukri.interp import gradients
from kukri.interp.session import Session
from kukri.kernels import make_backend
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


def test_texts_in_a_batch_are_those_alone_to_the_bit(tmp_path: Path) -> None:
    """A convolution that reaches a neighbour in the step."""
    test_encoders.test_texts_in_a_batch_are_those_alone_to_the_bit(NAME, "cls", tmp_path)


@pytest.mark.parametrize("backend", ["reference", "cpu", "torch"])
def test_vectors_of_colbert(backend: Any, tmp_path: Path) -> None:
    """Tokens of an expanded query that convolutions see."""
    hf = tiny_colbert.save_late(tmp_path, NAME)
    with LLM(tmp_path, backend=backend, n_threads=1) as llm:
        for name, text in (("query", "cats sat"), ("document", "the cat sat on the mat.")):
            want = tiny_colbert.defined(tmp_path, hf, text, name == "query")
            got = llm.embed_tokens(text, prompt_name=name)
            np.testing.assert_allclose(got, want, atol=2e-3 if backend == "cpu" else 2e-5)
        llm.engine.check_integrity()


def test_a_converted_file_is_the_same(tmp_path: Path) -> None:
    """A file that says LFM2 and is taken for the causal model."""
    test_encoders.test_a_converted_encoder_is_the_same(NAME, "Model", tmp_path)


def test_convolutions_without_a_middle_are_refused(tmp_path: Path) -> None:
    """Four taps, of which either of two may be the token's own."""
    save(tmp_path, NAME)
    stated = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stated, "conv_L_cache": 4}))
    with (
        pytest.raises(UnsupportedError, match=r"conv_L_cache' is 4: .* have a middle"),
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
