"""Importance matrices: what transformers' layers read, files that others read, what they are good for."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner

from kukri import LLM
from kukri.cli import app
from kukri.errors import ConfigError, FormatError
from kukri.evaluate.importance import importance_matrix
from kukri.evaluate.text import prose
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.tensor_names import gguf_name
from kukri.formats.gguf.writer import write_gguf
from kukri.formats.imatrix import ImportanceMatrix, read_imatrix, write_imatrix
from kukri.kernels.quantize import quantize, requantize
from kukri.models.trace import Trace
from kukri.quant.blocks import dequantize
from kukri.quant.types import QUANT_TYPES
from tests.lazy_imports import lazy_imports
from tests.test_llm_safetensors import make
from tests.tiny_gguf import tiny_config, write_tiny

with lazy_imports():
    import torch

BOS, CHUNK = 256, 40
IDS = np.random.default_rng(2).integers(0, 250, 100).tolist()


def inputs_by_transformers(model) -> dict[str, np.ndarray]:
    """Sums of squares of what each nn.Linear of the layers reads, by Hugging Face's names."""
    sums: dict[str, np.ndarray] = {}

    def listen(name):
        def hook(module, args):
            x = args[0][0].double().numpy()
            sums[name] = sums.get(name, 0) + (x**2).sum(0)

        return hook

    handles = [
        module.register_forward_pre_hook(listen(f"{name}.weight"))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in name
    ]
    with torch.no_grad():
        for start in range(0, len(IDS), CHUNK - 1):
            model(torch.tensor([[BOS, *IDS[start : start + CHUNK - 1]]]))
    for handle in handles:
        handle.remove()
    return sums


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi", "phi3", "starcoder2", "smollm3"])
def test_sums_are_those_of_transformers_layers(kind: str, tmp_path: Path) -> None:
    """A matrix that is given another one's inputs, tokens left out or counted twice, in any architecture."""
    path, model = make(tmp_path / "hf", kind)
    want = {gguf_name(name, kind): sums for name, sums in inputs_by_transformers(model).items()}
    with LLM(path, backend="reference", max_context=CHUNK) as llm:
        found = importance_matrix(llm, IDS, CHUNK, "text")
    assert set(found.sums) == set(want)
    for name, sums in want.items():
        np.testing.assert_allclose(found.sums[name], sums, rtol=2e-3, atol=1e-4 * sums.max())
    assert set(found.counts.values()) == {103}  # 100 tokens, and BOS before each of 3 chunks
    assert found.n_chunks == 3


def test_every_matrix_has_its_hook(tmp_path: Path) -> None:
    """A hook that shows the sum before the residual taken for the stream itself."""
    with LLM(write_tiny(tmp_path / "m.gguf", tiny_config()), backend="reference") as llm:
        trace = Trace(llm.model)
        inputs = trace.inputs
        assert inputs["model.layers.1.self_attn.v_proj.weight"] == "blocks.1.ln1.hook_normalized"
        assert inputs["model.layers.1.self_attn.o_proj.weight"] == "blocks.1.attn.hook_z"
        assert inputs["model.layers.0.mlp.up_proj.weight"] == "blocks.0.ln2.hook_normalized"
        assert inputs["model.layers.0.mlp.down_proj.weight"] == "blocks.0.mlp.hook_post"
        assert inputs["model.embed_tokens.weight"] == "ln_final.hook_normalized"
        assert set(inputs.values()) <= set(trace.taps)


def made_matrix() -> ImportanceMatrix:
    rng = np.random.default_rng(0)
    sums = {f"blk.{i}.attn_q.weight": rng.random(64).astype(np.float32) for i in range(3)}
    return ImportanceMatrix(sums, dict.fromkeys(sums, 96.0), ("text.txt",), 3, 32)


def legacy(matrix: ImportanceMatrix, with_end: bool = True) -> bytes:
    """The older form, written as llama.cpp's documents describe it."""
    data = struct.pack("<i", len(matrix.sums))
    for name, sums in matrix.sums.items():
        data += (
            struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 3, len(sums)) + sums.tobytes()
        )
    return data + (struct.pack("<ii", 3, 8) + b"text.txt" if with_end else b"")


def test_the_gguf_package_reads_it(tmp_path: Path) -> None:
    """Keys, names, shapes or types other than llama.cpp's."""
    matrix = made_matrix()
    write_imatrix(tmp_path / "i.gguf", matrix)
    reader = gguf.GGUFReader(tmp_path / "i.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert fields == {
        "general.type": "imatrix",
        "imatrix.datasets": ["text.txt"],
        "imatrix.chunk_count": 3,
        "imatrix.chunk_size": 32,
    }
    for key in ("imatrix.chunk_count", "imatrix.chunk_size"):
        assert reader.fields[key].types == [gguf.GGUFValueType.UINT32]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert set(tensors) == {name + end for name in matrix.sums for end in (".in_sum2", ".counts")}
    for name, sums in matrix.sums.items():
        np.testing.assert_array_equal(tensors[f"{name}.in_sum2"].data.reshape(-1), sums)
        assert tensors[f"{name}.counts"].data.reshape(-1).tolist() == [96]
        assert tensors[f"{name}.in_sum2"].tensor_type == gguf.GGMLQuantizationType.F32


def test_both_forms_are_read(tmp_path: Path) -> None:
    """The older form's chunks taken for tokens; GGUF files of two dimensions, as other writers make them."""
    matrix = made_matrix()
    write_imatrix(tmp_path / "i.gguf", matrix)
    (tmp_path / "i.dat").write_bytes(legacy(matrix))
    (tmp_path / "old.dat").write_bytes(legacy(matrix, with_end=False))
    f32 = QUANT_TYPES["F32"]
    tensors = {}
    for name, sums in matrix.sums.items():
        tensors[f"{name}.in_sum2"] = (f32, sums, (1, 64))
        tensors[f"{name}.counts"] = (f32, np.array([96], np.float32), (1, 1))
        tensors[f"{name}.in_sum"] = (f32, sums, (1, 64))  # newer writers add it
    write_gguf(tmp_path / "two.gguf", {"general.type": "imatrix"}, tensors)
    for name in ("i.gguf", "i.dat", "old.dat", "two.gguf"):
        found = read_imatrix(tmp_path / name)
        assert set(found.sums) == set(matrix.sums)
        for tensor, sums in matrix.sums.items():
            want = sums / sums.mean()
            got = found.importance(tensor, 64)
            assert got is not None
            np.testing.assert_allclose(got, want, rtol=1e-5)
    assert read_imatrix(tmp_path / "i.dat").datasets == ("text.txt",)
    with pytest.raises(ConfigError, match=r"must have 32 columns, not 64"):
        found.importance("blk.0.attn_q.weight", 32)
    assert found.importance("blk.9.attn_q.weight", 64) is None


def test_files_that_are_cut_or_lie(tmp_path: Path) -> None:
    """A traceback, or gigabytes for a file of a few bytes."""
    whole, path = legacy(made_matrix(), with_end=False), tmp_path / "i.dat"
    for n in range(0, len(whole), 7):
        path.write_bytes(whole[:n])
        with pytest.raises(FormatError, match="cut"):
            read_imatrix(path)
    for bad in (struct.pack("<i", 1 << 30), struct.pack("<iii", 1, -5, 0), struct.pack("<ii", 1, 1 << 30)):
        path.write_bytes(bad)
        with pytest.raises(FormatError):
            read_imatrix(path)
    nan = made_matrix()
    nan.sums["blk.0.attn_q.weight"][3] = np.nan
    path.write_bytes(legacy(nan))
    with pytest.raises(FormatError, match="must hold sums of squares that are at least 0"):
        read_imatrix(path)
    with pytest.raises(FormatError, match="must be an importance matrix, not another GGUF file"):
        read_imatrix(write_tiny(tmp_path / "m.gguf", tiny_config()))
    with pytest.raises(FormatError, match="No such file"):
        read_imatrix(tmp_path / "nowhere.gguf")


@pytest.mark.parametrize(
    "name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
)
def test_every_type_listens_to_importances(name: str) -> None:
    """A type that rounds as if there were none, or to weights of the wrong columns."""
    rng = np.random.default_rng(1)
    rows, columns = rng.standard_normal((64, 512)).astype(np.float32), rng.random(512).astype(np.float32) ** 6
    f32, type = QUANT_TYPES["F32"], QUANT_TYPES[name]
    errors = []
    for importance in (None, columns):
        made = requantize(quantize(rows, f32), f32, type, importance)
        errors.append(float(((dequantize(made, type) - rows) ** 2 @ columns).sum()))
    assert errors[1] < 0.95 * errors[0]


def test_the_commands(tmp_path: Path) -> None:
    """Importances that are made and not used, or used for another tensor; a foreign file taken."""
    source, text = write_tiny(tmp_path / "m.gguf", tiny_config()), tmp_path / "text.txt"
    text.write_text(prose()[:400])

    def call(*arguments: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, [*arguments])
        assert done.exit_code == code, done.output
        return done.stderr if code else done.stdout

    matrix = tmp_path / "i.gguf"
    made = json.loads(call("imatrix", str(source), str(text), "-o", str(matrix), "--chunk", "100", "--json"))
    assert made["n_tensors"] == 14
    plain, weighed = tmp_path / "plain.gguf", tmp_path / "weighed.gguf"
    call("quantize", str(source), str(plain), "IQ4_NL")
    call("quantize", str(source), str(weighed), "IQ4_NL", "--imatrix", str(matrix))
    importances, iq4 = read_imatrix(matrix), QUANT_TYPES["IQ4_NL"]
    with GGUFFile(source) as exact, GGUFFile(plain) as a, GGUFFile(weighed) as b:
        assert b.metadata["quantize.imatrix.file"] == "i.gguf"
        assert b.metadata["quantize.imatrix.entries_count"] == 14
        name = "blk.1.ffn_down.weight"
        columns = importances.importance(name, 96)
        want = requantize(quantize(exact.array(name), QUANT_TYPES["F32"]), QUANT_TYPES["F32"], iq4, columns)
        np.testing.assert_array_equal(b.data(name), want)
        assert (b.data("token_embd.weight") == a.data("token_embd.weight")).all()

        def error(file: GGUFFile) -> float:
            changed = dequantize(file.data(name), file.tensors[name].type) - exact.array(name)
            return float((changed**2 @ columns).sum())

        assert error(b) < 0.97 * error(a)
    foreign = tmp_path / "foreign.gguf"
    write_imatrix(foreign, ImportanceMatrix({"blk.77.x": np.ones(3, np.float32)}, {"blk.77.x": 1.0}))
    refused = call(
        "quantize", str(source), str(tmp_path / "x.gguf"), "Q4_K", "--imatrix", str(foreign), code=2
    )
    assert "made with another" in refused
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize("n_measured", [1, 14])
def test_matrices_without_importances_are_named(tmp_path: Path, n_measured: int) -> None:
    """Catches a file for 1 of 14 tensors that is used without a word, and a word about one for all."""
    source, matrix = write_tiny(tmp_path / "m.gguf", tiny_config()), tmp_path / "i.gguf"
    with GGUFFile(source) as file:
        shapes = {name: tensor.shape for name, tensor in file.tensors.items() if len(tensor.shape) == 2}
    names = [name for name in shapes if name.startswith("blk.")][:n_measured]
    sums = {name: np.ones(shapes[name][1], np.float32) for name in names}
    write_imatrix(matrix, ImportanceMatrix(sums, dict.fromkeys(sums, 1.0)))
    done = CliRunner().invoke(
        app, ["quantize", str(source), str(tmp_path / "q.gguf"), "IQ4_NL", "--imatrix", str(matrix), "--json"]
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["written"]
    if n_measured == 14:
        assert "importances" not in done.stderr
    else:
        assert f"{matrix} has importances for 1 of 14 matrices that are quantized" in done.stderr
        assert "blk.0.attn_k.weight" in done.stderr
        assert "and 10 more" in done.stderr
