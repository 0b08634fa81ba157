"""Types of tensors in llama.cpp's mixes, against files that llama.cpp has quantized."""

from __future__ import annotations

import ctypes
import os

import gguf
import pytest

from benchmarks.make_model import SHAPES, Shape, make_model, tensor_shapes
from kukri.formats.gguf.reader import GGUFFile
from kukri.quant.mixes import FILE_TYPES, MIXES, mix_types

DEEP = Shape("llama", 256, 512, 24, 4, 1, 64, 512, 128, 10000.0)
# llama.cpp's mixes (llama-cpp-python 0.3.36) of DEEP: the type of the embedding, then
# those of attn_q, attn_v, attn_output and ffn_down in each of 24 layers; Qn_K by its digit, x is IQ4_XS.
THEIRS = {
    "Q2_K": "6 222222222222222222222222 444444444444444444444444 "
    "333333333333333333333333 333333333333333333333333",
    "Q3_K_S": "6 333333333333333333333333 333333333333333333333333 "
    "333333333333333333333333 333333333333333333333333",
    "Q3_K_M": "6 333333333333333333333333 554444444444444444444444 "
    "444444444444444444444444 544444444444444444444444",
    "Q3_K_L": "6 333333333333333333333333 555555555555555555555555 "
    "555555555555555555555555 555555555555555555555555",
    "Q4_K_S": "6 444444444444444444444444 555544444444444444444444 "
    "444444444444444444444444 555444444444444444444444",
    "Q4_K_M": "6 444444444444444444444444 666446446446446446446666 "
    "444444444444444444444444 666446446446446446446666",
    "Q5_K_S": "6 555555555555555555555555 555555555555555555555555 "
    "555555555555555555555555 555555555555555555555555",
    "Q5_K_M": "6 555555555555555555555555 666556556556556556556666 "
    "555555555555555555555555 666556556556556556556666",
    "Q6_K": "6 666666666666666666666666 666666666666666666666666 "
    "666666666666666666666666 666666666666666666666666",
    "IQ4_XS": "6 xxxxxxxxxxxxxxxxxxxxxxxx 555555555555555555555555 "
    "xxxxxxxxxxxxxxxxxxxxxxxx 555xxxxxxxxxxxxxxxxxxxxx",
}


@pytest.mark.parametrize("mix", THEIRS)
def test_mixes_are_those_of_llama_cpp(mix):
    """A layer too early or late in a rule; a type for a tensor that the mix leaves as it is."""
    types = mix_types(mix, tensor_shapes(DEEP), queries_per_key=4)
    letters = {name: "x" if type.name == "IQ4_XS" else type.name[1] for name, type in types.items()}
    kinds = ("attn_q", "attn_v", "attn_output", "ffn_down")
    layers = ["".join(letters[f"blk.{i}.{kind}.weight"] for i in range(24)) for kind in kinds]
    assert " ".join([letters["token_embd.weight"], *layers]) == THEIRS[mix]
    assert set(types) == {name for name, shape in tensor_shapes(DEEP).items() if len(shape) == 2}


def test_a_head_of_its_own_gets_the_bits_and_rows_of_576_their_stand_ins():
    """Q6_K for the embedding of an untied model; K-quants for rows that are no multiple of 256."""
    shapes = {**tensor_shapes(DEEP), "output.weight": (512, 256), "blk.0.attn_q.bias": (256,)}
    types = mix_types("Q4_K_M", shapes, 4)
    assert types["output.weight"].name == "Q6_K"
    assert types["token_embd.weight"].name == "Q4_K"
    assert "blk.0.attn_q.bias" not in types
    small = mix_types("Q4_K_M", tensor_shapes(SHAPES["smollm2-135m"]), 3)
    names = ("token_embd", "blk.0.attn_q", "blk.0.attn_v", "blk.0.ffn_down", "blk.5.ffn_down")
    assert [small[f"{name}.weight"].name for name in names] == ["Q8_0", "Q5_0", "Q8_0", "Q6_K", "Q6_K"]
    assert mix_types("Q8_0", {"output.weight": (8, 40)}, 1)["output.weight"].name == "F16"


@pytest.mark.slow
@pytest.mark.parametrize(("d_model", "n_kv_heads"), [(256, 1), (256, 2), (288, 1)])
@pytest.mark.parametrize(
    "mix", [mix for mix in MIXES if mix != "Q2_K_S"]
)  # llama.cpp wants an imatrix for it
def test_mixes_are_those_that_llama_cpp_makes(mix, d_model, n_kv_heads, tmp_path):
    """The recorded types out of date; rules that depend on heads or on the width of rows."""
    api = pytest.importorskip("llama_cpp")
    silence = api.llama_log_callback(lambda level, text, data: None)
    api.llama_log_set(silence, ctypes.c_void_p(0))
    source, made = tmp_path / "f16.gguf", tmp_path / "made.gguf"
    make_model(source, Shape("llama", d_model, 512, 24, 4, n_kv_heads, 64, 512, 128, 10000.0), "F16", "deep")
    params = api.llama_model_quantize_default_params()
    params.ftype, params.nthread = MIXES[mix][1], 2
    assert api.llama_model_quantize(os.fsencode(source), os.fsencode(made), ctypes.byref(params)) == 0
    with GGUFFile(made) as file:
        theirs = {name: tensor.type for name, tensor in file.tensors.items()}
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        assert file.metadata["general.file_type"] == MIXES[mix][1]
    ours = mix_types(mix, shapes, 4 // n_kv_heads)
    assert {name: type.name for name, type in theirs.items() if len(shapes[name]) == 2} == {
        name: type.name for name, type in ours.items()
    }


def test_numbers_of_file_types_are_ggufs():
    """Catches a number that names another mix, as /api/show would tell it."""
    theirs = {int(one): one.name.removeprefix("MOSTLY_").removeprefix("ALL_") for one in gguf.LlamaFileType}
    assert {number: name for number, name in FILE_TYPES.items() if number in theirs} == {
        number: name for number, name in theirs.items() if name != "GUESSED"
    }
