"""A tiny model of each architecture as a GGUF file, a directory, and a GGUF file again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri.config import EmbeddingConfig, ModelConfig
from kukri.errors import UnsupportedError
from kukri.formats.checkpoint import open_checkpoint
from kukri.formats.convert import of_directory, write
from kukri.formats.gguf.config import model_config, model_metadata
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.huggingface.directory import directory_config
from kukri.formats.huggingface.weights import SafetensorsWeights
from kukri.formats.huggingface.writer import write_directory
from kukri.formats.losses import losses
from kukri.models import load_model
from kukri.models.weights import TakenWeights
from tests.models.made_models import make
from tests.models.tiny_models import IN_GGUF
from tests.models.written_models import write as write_tiny
from tests.quick import some

# keys that no model reads: llama.cpp's other epsilon, Mamba's RoPE; and keys that say what is usual
UNREAD = ("layer_norm_epsilon", "layer_norm_rms_epsilon", "rope.dimension_count")
USUAL = ("expert_gating_func", "sliding_window_pattern", "head_count_kv")


def through_a_directory(source: Path, target: Path) -> tuple[ModelConfig, list[str]]:
    """Writes a GGUF file by way of a directory -> the source's configuration, and what may be lost."""
    folder = target.with_suffix("")
    with open_checkpoint(source) as checkpoint:
        weights = TakenWeights(checkpoint.weights(checkpoint.config))
        load_model(weights, checkpoint.config)
        write_directory(folder, checkpoint.config, weights, "F32", {}, lambda name: None)
        config = checkpoint.config
    again = directory_config(folder, json.loads((folder / "config.json").read_text()))
    write(of_directory(folder, again, SafetensorsWeights(folder, again), {}, {}), target, lambda step: None)
    return config, losses(config, EmbeddingConfig(), "hf")


def rows_alone(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without what a single group adds."""
    return shape[1:] if len(shape) == 2 and shape[0] == 1 else shape


@pytest.mark.full(but=some())
@pytest.mark.parametrize("name", IN_GGUF)
def test_tensors_and_keys_come_back_to_the_bit(name: str, tmp_path: Path) -> None:
    """Catches a transform without its inverse, a key that one format reads and the other does not write."""
    _, config, source = make(name)
    first_path = write_tiny(tmp_path / "tiny.gguf", name, config, source)
    want_config, lost = through_a_directory(first_path, tmp_path / "again.gguf")
    with GGUFFile(first_path) as first, GGUFFile(tmp_path / "again.gguf") as again:
        assert again.tensors.keys() == first.tensors.keys()
        for key, tensor in first.tensors.items():
            other = again.tensors[key]
            assert (rows_alone(other.shape), other.type) == (rows_alone(tensor.shape), tensor.type), key
            if not np.array_equal(again.data(key), first.data(key)):
                assert key.endswith(".ssm_a"), key
                assert any("decays" in loss for loss in lost)
                np.testing.assert_array_almost_equal_nulp(again.array(key), first.array(key), 8)
        for key in set(first.metadata) - {"general.name"}:
            if key in again.metadata or not key.endswith((*UNREAD, *USUAL)):
                want: Any = first.metadata[key]
                if name != "mamba2" or not key.endswith(UNREAD):
                    np.testing.assert_array_equal(again.metadata[key], want, err_msg=key)
        got = model_config(again)
    if name == "phi3":  # whose factor of attention the second file states
        assert got.rope.scaling is not None
        scaling = replace(got.rope.scaling, attention_factor=None)
        got = replace(got, rope=replace(got.rope, scaling=scaling))
    assert replace(got, name="tiny") == want_config


@pytest.mark.parametrize(
    ("name", "facts", "message"),
    [
        ("afmoe", {"embedding_scale": 1.0}, "a mup_enabled other than 1"),
        ("minicpm3", {"embedding_scale": 3.0}, "a scale_emb other than 12"),
        ("minicpm3", {"logits_divisor": 0.5}, "a dim_model_base other than 256"),
        ("phimoe", {}, "a router_jitter_noise other than 0.01"),
    ],
)
def test_a_number_without_a_key_in_gguf_is_refused(name: str, facts: dict[str, Any], message: str) -> None:
    """Catches a file that another program reads with the number that GGUF files mean."""
    config = replace(make(name)[1], **facts)
    if not facts:
        assert config.mixture is not None
        config = replace(config, mixture=replace(config.mixture, tolerance=0.1))
    with pytest.raises(UnsupportedError, match=f"{message}.* is not supported in GGUF"):
        model_metadata(config)


@pytest.mark.parametrize("name", ["exaone4", "smallthinker"])
def test_layers_that_do_not_rotate_are_listed_where_no_window_says_it(name: str) -> None:
    """Catches a file of a family whose windows say which layers rotate, read as one in which all do."""
    config = make(name)[1]
    layers = tuple(replace(layer, window=None, use_rope=False) for layer in config.layers)
    keys = model_metadata(replace(config, layers=layers))
    assert keys[f"{name}.attention.nope_layers"].tolist() == [*range(config.n_layers)]


def test_what_a_model_loses_is_told() -> None:
    """Catches a loss that the list has and no model, or a model with all of them."""
    told = {
        name: losses(make(name)[1], EmbeddingConfig(), "gguf") for name in ("llama", "gemma", "falcon_h1")
    }
    assert told["llama"] == []
    assert [loss[:7] for loss in told["gemma"]] == ["weights"]
    assert [loss[:7] for loss in told["falcon_h1"]] == ["decays ", "multipl"]
