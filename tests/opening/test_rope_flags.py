"""A context that the user stretches: `rope_scaling` and `rope_factor`, in Python and on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kukri import LLM
from kukri.cli import app
from kukri.errors import ConfigError
from kukri.models.rope import rope_frequencies
from tests.lazy_imports import lazy_imports
from tests.test_llm_safetensors import TINY, make, theirs
from tests.tiny_gguf import write_tiny

with lazy_imports():
    import torch
    import transformers as tr
    from transformers import modeling_rope_utils

CONTEXT = TINY["max_position_embeddings"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("llama"), "llama")[0]


def stretched(directory: Path, kind: str, factor: float) -> tr.LlamaConfig:
    """The configuration that asks transformers for the same."""
    config = tr.LlamaConfig.from_pretrained(directory)
    config.rope_parameters = {**config.rope_parameters, "rope_type": kind, "factor": factor}
    if kind == "yarn":
        config.rope_parameters["original_max_position_embeddings"] = CONTEXT
    return config


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_tables_and_logits_are_those_of_transformers(llama: Path, kind: str) -> None:
    """A flag that is taken and not used, or used on a wrong context: 300 tokens in a model for 128."""
    config = stretched(llama, kind, 4.0)
    init = modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind]
    frequencies, factor = init(config, torch.device("cpu"), seq_len=4 * CONTEXT)
    with LLM(llama, backend="reference", rope_scaling=kind, rope_factor=4.0) as llm:
        assert llm.config.max_context == 4 * CONTEXT
        rope = rope_frequencies(llm.config.rope, llm.config.max_context)
        np.testing.assert_allclose(rope.inverse, frequencies.numpy(), rtol=2e-7)
        assert rope.scale == pytest.approx(factor)
        ids = np.random.default_rng(0).integers(0, 256, 300).tolist()
        got = llm.logits(ids)
    if kind == "dynamic":  # transformers' table is that of the length seen: let it see all
        config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    model = tr.LlamaForCausalLM.from_pretrained(llama, config=config, attn_implementation="eager").eval()
    if kind == "dynamic":
        model.model.rotary_emb.inv_freq = frequencies
    want = theirs(model, ids)
    assert np.abs(got - want).max() < 0.05  # LLM's cache is float16
    with LLM(llama, backend="reference", max_context=CONTEXT) as plain:
        assert np.abs(plain.logits(ids[:100]) - want[:100]).max() > 0.5  # so the flag matters


def test_in_a_gguf_file(tmp_path: Path) -> None:
    """A flag for directories alone."""
    path = write_tiny(tmp_path / "tiny.gguf")
    with LLM(path, backend="reference", rope_scaling="linear", rope_factor=2.0) as llm:
        assert llm.config.max_context == 256
        assert len(llm.generate(list(range(200)), max_tokens=2, temperature=0).token_ids) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rope_scaling": "yarn"}, "'rope_scaling' and 'rope_factor' are required together"),
        ({"rope_factor": 2.0}, "'rope_scaling' and 'rope_factor' are required together"),
        ({"rope_scaling": "ntk", "rope_factor": 2.0}, "must be one of linear, dynamic, yarn, not 'ntk'"),
        ({"rope_scaling": "yarn", "rope_factor": 0.5}, "must be from 1 to"),
    ],
)  # fmt: skip
def test_what_cannot_be(llama: Path, options: dict, message: str) -> None:
    """A kind that does not exist, run as if there were none."""
    with pytest.raises(ConfigError, match=message):
        LLM(llama, **options)


@pytest.mark.full
def test_on_the_command_line(llama: Path) -> None:
    """A flag that one of the commands does not hand on: 300 tokens fit only when it does."""
    flags = ["-m", str(llama), "--rope-scaling", "yarn", "--rope-factor", "4"]
    prompt = "x" * 300
    done = CliRunner().invoke(app, ["run", "--raw", prompt, "-n", "1", "--json", *flags])
    assert json.loads(done.stdout)["n_prompt_tokens"] == 301
    done = CliRunner().invoke(app, ["bench", "-p", "300", "-g", "1", "-r", "1", "--json", *flags])
    assert json.loads(done.stdout)["rope_scaling"] == "yarn"
    done = CliRunner().invoke(app, ["chat", *flags[:-1], "0.1"], input="hello\n")
    assert "must be from 1 to" in str(done.exception) + done.output
