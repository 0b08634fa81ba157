"""safetensors files: read like the library reads them, refused when they lie."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kukri import LLM
from kukri.config import LayerConfig, ModelConfig, RopeConfig
from kukri.errors import ConfigError, FormatError, KukriError, UnsupportedError, UnusedTensorError
from kukri.formats.huggingface.safetensors import SafetensorsFile, open_files
from kukri.formats.huggingface.weights import SafetensorsWeights
from kukri.kernels.quantize import quantize
from kukri.quant.blocks import dequantize
from kukri.quant.types import QUANT_TYPES
from tests.lazy_imports import lazy_imports
from tests.test_llm_safetensors import make

with lazy_imports():
    import torch
    from safetensors import torch as safetensors_torch

CONFIG = ModelConfig(
    architecture="llama",
    n_layers=1,
    d_model=64,
    n_heads=2,
    n_kv_heads=2,
    d_head=32,
    d_ffn=64,
    n_vocab=10,
    norm_eps=1e-5,
    max_context=32,
    tie_embeddings=True,
    rope=RopeConfig(10000.0, 32),
    layers=(LayerConfig(),),
)


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "a": torch.randn(6, 64),
        "b": torch.randn(6, 64).to(torch.bfloat16),
        "c": torch.randn(5, 7).to(torch.float16),
        "d": torch.randn(9).to(torch.bfloat16),
    }


def save(directory: Path, contents: dict[str, torch.Tensor] | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    safetensors_torch.save_file(contents or tensors(), directory / "model.safetensors", {"format": "pt"})
    return directory


def shard(directory: Path) -> Path:
    """Two shards and their index."""
    directory.mkdir(exist_ok=True)
    all_of = tensors()
    parts = {"model-00001-of-00002.safetensors": "ab", "model-00002-of-00002.safetensors": "cd"}
    for name, letters in parts.items():
        safetensors_torch.save_file({letter: all_of[letter] for letter in letters}, directory / name)
    weight_map = {letter: name for name, letters in parts.items() for letter in letters}
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )
    return directory


def edit_index(directory: Path, **places: str) -> Path:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= places
    path.write_text(json.dumps(index))
    return directory


def raw_file(path: Path, header: str | bytes | dict, data: bytes = b"", n_bytes: int | None = None) -> Path:
    text = (
        header
        if isinstance(header, bytes)
        else (header if isinstance(header, str) else json.dumps(header)).encode()
    )
    path.write_bytes((len(text) if n_bytes is None else n_bytes).to_bytes(8, "little") + text + data)
    return path


def entry(shape=(2,), start=0, stop=8, dtype="F32") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "a Git LFS pointer: fetch"),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "a web page"),
        (b"PK\x03\x04" + bytes(40), "a zip archive or PyTorch checkpoint"),
        (b"GGUF" + bytes(40), "a GGUF file"),
    ],
)
def test_files_that_are_something_else_are_named(tmp_path, name, data, kind):
    """A pointer of Git LFS called a header of many bytes, a web page called JSON with a fault in column 1."""
    make(tmp_path, "llama")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(FormatError, match=f"{re.escape(name)}.*must be .*, not {kind}") as caught:
        LLM(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [save, shard])
def test_values_are_those_of_the_library(tmp_path, make):
    """Catches a wrong offset, type or byte order, and a shard taken for another."""
    source = SafetensorsWeights(make(tmp_path / "m"), CONFIG)
    want = tensors()
    for name in "abc":
        weight = source.matrix(name, tuple(want[name].shape))
        np.testing.assert_array_equal(dequantize(weight.data, weight.type), want[name].float().numpy())
    np.testing.assert_array_equal(source.vector("d", 9), want["d"].float().numpy())
    assert source.vector("d", 9).dtype == np.float32
    assert source.has("a")
    assert not source.has("z")
    source.done()


def test_a_matrix_is_a_view_of_the_mapped_file(tmp_path):
    """Catches weights that lie in memory twice."""
    source = SafetensorsWeights(save(tmp_path / "m"), CONFIG)
    data = source.matrix("b", (6, 64)).data
    assert not data.flags.owndata
    assert not data.flags.writeable
    assert np.shares_memory(data, open_and_keep(source)._bytes)


def open_and_keep(source: SafetensorsWeights) -> SafetensorsFile:
    return next(iter(source._files.values()))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_matrices_are_packed_while_loading(tmp_path, kind):
    """Catches packing from rounded values, of vectors, or of rows that are no whole blocks."""
    source = SafetensorsWeights(save(tmp_path / "m"), CONFIG, kind)
    want = tensors()
    for name in "ab":
        weight = source.matrix(name, (6, 64))
        assert weight.type.name == kind
        np.testing.assert_array_equal(weight.data, quantize(want[name].float().numpy(), QUANT_TYPES[kind]))
    assert source.matrix("c", (5, 7)).type.name == "F16"
    np.testing.assert_array_equal(source.vector("d", 9), want["d"].float().numpy())


def test_a_type_that_cannot_be_packed_is_refused(tmp_path):
    """Catches a promise of a type that runs as something else."""
    with pytest.raises(
        ConfigError, match="'Q8_K' is not supported for packing weights while loading: use one of Q4_0"
    ):
        SafetensorsWeights(save(tmp_path / "m"), CONFIG, "Q8_K")


def test_missing_misshapen_and_unused_tensors(tmp_path):
    """Catches an error that does not say which tensor, or none at all."""
    source = SafetensorsWeights(save(tmp_path / "m"), CONFIG)
    with pytest.raises(FormatError, match="tensor 'z' is missing"):
        source.matrix("z", (1, 1))
    with pytest.raises(FormatError, match=r"tensor 'a' has shape \(6, 64\) where .* asks for \(64, 6\)"):
        source.matrix("a", (64, 6))
    source.matrix("a", (6, 64))
    with pytest.raises(UnusedTensorError, match="llama takes: 'b', 'd', 'c'; check 'model_type'"):
        source.done()


def test_known_leftovers_are_ignored_by_name(tmp_path):
    """Catches old checkpoints refused for tensors that follow from their configuration, and no others."""
    leftovers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "model.rotary_emb.inv_freq": torch.ones(2),
        "lm_head.weight": torch.ones(2, 2),
    }
    SafetensorsWeights(save(tmp_path / "m", leftovers), CONFIG).done()
    untied = ModelConfig(**{**vars(CONFIG), "tie_embeddings": False})
    with pytest.raises(UnusedTensorError, match="lm_head"):
        SafetensorsWeights(save(tmp_path / "m", leftovers), untied).done()


def test_types_that_do_not_run_are_refused_when_taken(tmp_path):
    """Catches F64 or integers read as something else."""
    source = SafetensorsWeights(save(tmp_path / "m", {"a": torch.ones(2, 2, dtype=torch.float64)}), CONFIG)
    with pytest.raises(UnsupportedError, match="'a' must be of type F32, F16, BF16, not F64"):
        source.matrix("a", (2, 2))


def test_a_tensor_off_its_boundary_is_still_right(tmp_path):
    """Catches kernels given addresses that their loads cannot take."""
    values = np.arange(4, dtype="<f4")
    header = json.dumps({"x": entry((1,), 0, 1, "U8"), "y": entry((2, 2), 1, 17)})
    raw_file(tmp_path / "model.safetensors", header, b"\0" + values.tobytes())
    weight = SafetensorsWeights(tmp_path, CONFIG).matrix("y", (2, 2))
    assert weight.data.ctypes.data % 4 == 0
    np.testing.assert_array_equal(dequantize(weight.data, weight.type).ravel(), values)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ("[1]", b"", "must begin with"),
        ("{", b"", "must be JSON"),
        (b"{\xff}", b"", "must be JSON"),
        pytest.param("{" + '"a":{' * 5000, b"", "must be JSON", id="5000 levels"),
        ('{"a": %s, "a": %s}' % ((json.dumps(entry()),) * 2), b"\0" * 8, "'a' appears twice"),
        ({"a": []}, b"", "dtype, shape and 'data_offsets'"),
        ({"a": {**entry(), "more": 1}}, b"\0" * 8, "dtype, shape and 'data_offsets'"),
        ({"a": entry(dtype="F3")}, b"\0" * 8, "unknown type 'F3'"),
        ({"a": entry(dtype=["F32"])}, b"\0" * 8, "unknown type"),
        ({"a": entry((-2,))}, b"\0" * 8, "has shape"),
        ({"a": entry((True,))}, b"\0" * 8, "has shape"),
        ({"a": entry((2.0,))}, b"\0" * 8, "has shape"),
        ({"a": entry([1] * 9)}, b"\0" * 8, "has shape"),
        ({"a": entry((2,), 8, 0)}, b"\0" * 8, "data_offsets"),
        ({"a": entry((2,), -8, 0)}, b"\0" * 8, "data_offsets"),
        ({"a": entry((3,))}, b"\0" * 8, "takes 8 bytes where F32"),
        ({"a": entry((1 << 62, 1 << 62))}, b"\0" * 8, "takes 8 bytes where F32"),
        ({"a": entry()}, b"\0" * 7, "is cut short"),
        ({"a": entry()}, b"\0" * 9, "1 bytes that belong to no tensor"),
        ({"a": entry(), "b": entry()}, b"\0" * 8, "overlaps"),
        ({"a": entry(), "b": entry((2,), 4, 12)}, b"\0" * 12, "overlaps"),
        ({"a": entry((2,), 4, 12)}, b"\0" * 12, "leaves a gap"),
    ],
    ids=str,
)  # fmt: skip
def test_a_header_that_lies_is_one_clear_line(tmp_path, header, data, message):
    """Catches a traceback, or bytes of another tensor or of nothing taken for weights."""
    path = raw_file(tmp_path / "x.safetensors", header, data)
    with pytest.raises(FormatError, match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_safetensors_file(tmp_path):
    """Catches reserving what a length field claims."""
    path = tmp_path / "x.safetensors"
    for data, message in (
        (b"", "cut short"),
        (b"GGUF", "cut short"),
        (b"\xff" * 20, "claims a header"),
        ((1000).to_bytes(8, "little") + b"{}", "does not fit"),
    ):
        path.write_bytes(data)
        with pytest.raises(FormatError, match=message):
            SafetensorsFile(path)
    with pytest.raises(FormatError, match="was not found"):
        SafetensorsFile(tmp_path / "absent.safetensors")
    with pytest.raises(FormatError):
        SafetensorsFile(tmp_path)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", "", 7]
)
def test_hostile_shard_names_are_refused(tmp_path, name):
    """Catches an index that reads files outside its directory."""
    directory = edit_index(shard(tmp_path / "m"), a=name)
    safetensors_torch.save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(FormatError, match=r"index\.json names"):
        open_files(directory)


def test_absent_cut_and_contradicting_shards(tmp_path):
    """Catches a half-downloaded checkpoint that runs."""
    directory = shard(tmp_path / "m")
    last = directory / "model-00002-of-00002.safetensors"
    data = last.read_bytes()
    last.write_bytes(data[:-1])
    with pytest.raises(FormatError, match=r"00002\.safetensors.*is cut short"):
        open_files(directory)
    last.unlink()
    with pytest.raises(FormatError, match=r"'model-00002-of-00002\.safetensors', which was not found"):
        open_files(directory)
    last.write_bytes(data)
    edit_index(directory, a=last.name)
    with pytest.raises(FormatError, match="tensor 'a': the index places it in model-00002"):
        open_files(directory)
    edit_index(directory, a="model-00001-of-00002.safetensors")
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    del index["weight_map"]["c"]
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match=r"tensor 'c' is missing from model\.safetensors\.index\.json"):
        open_files(directory)


def test_a_directory_without_weights_says_what_is_wanted(tmp_path):
    """Catches a pickle being read, or no word about why not."""
    with pytest.raises(FormatError, match=r"must hold model\.safetensors or"):
        open_files(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FormatError, match="pickles are not supported"):
        open_files(tmp_path)


@cache
def whole_file():
    return safetensors_torch.save(tensors())


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_is_refused_or_harmless(tmp_path, data):
    """Catches any exception but ours, and views outside the file, for files cut or with bytes changed."""
    damaged = bytearray(whole_file())
    header_end = 8 + int.from_bytes(damaged[:8], "little")
    for _ in range(data.draw(st.integers(0, 4))):
        damaged[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))))]
    path = tmp_path / "model.safetensors"
    path.write_bytes(damaged)
    try:
        file = SafetensorsFile(path)
    except KukriError:
        return
    for tensor in file.tensors.values():
        assert len(file.data(tensor)) == tensor.n_bytes
    assert sum(t.n_bytes for t in file.tensors.values()) + int.from_bytes(damaged[:8], "little") + 8 == len(
        damaged
    )
