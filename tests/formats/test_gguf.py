"""The GGUF reader and writer against the `gguf` package, and on files made wrong one field at a time.

Times are of the processor, so that a busy machine does not fail them.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kukri.errors import FormatError, KukriError, UnsupportedError
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.writer import write_gguf
from kukri.kernels.quantize import quantize
from kukri.quant.types import QUANT_TYPES, QUANT_TYPES_BY_ID
from tests.stopwatch import keeps, stopwatch, within

F32, Q8_0 = QUANT_TYPES["F32"], QUANT_TYPES["Q8_0"]


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, type_id: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", type_id) + value


def info(name: str | bytes, dims: tuple[int, ...], type_id: int = 0, offset: int = 0) -> bytes:
    dims_bytes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + dims_bytes + struct.pack("<IQ", type_id, offset)


def build(
    keys: list[bytes] = (),
    infos: list[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_keys: int | None = None,
    n_infos: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file put together by hand, right or wrong."""
    counts = (len(infos) if n_infos is None else n_infos, len(keys) if n_keys is None else n_keys)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(infos)
    return head + b"\0" * (-len(head) % alignment) + data


@pytest.fixture
def save(tmp_path):
    def write(data: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return path

    return write


def write_theirs(path: Path, strings: list[str], version: int = 3) -> None:
    """A file by the gguf package, with one key of every type."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "naïve 🐈\n")
    writer.add_array("strings", strings)
    writer.add_array("numbers", [3, -1, 2**31 - 1])
    writer.add_array("floats", [0.5, -2.0])
    writer.add_array("bools", [True, False])
    writer.add_tensor("one", np.arange(5, dtype=np.float32))
    writer.add_tensor("two", np.arange(6, dtype=np.float16).reshape(2, 3))
    quantized = gguf.quants.quantize(np.ones((3, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("three", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("four", np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if version != 3:
        with open(path, "r+b") as file:
            file.seek(4)
            file.write(struct.pack("<I", version))


STRINGS = [
    "",
    "a",
    "Ġthe",
    "🐈" * 100,
    "x" * 255,
    "y" * 256,
    "z" * 70000,
    "nul\0",
    "\0" * 9,
    "",
    "",
    "end",
    "é",
]


@pytest.mark.parametrize("version", [2, 3])
def test_reads_what_the_gguf_package_writes(tmp_path, version):
    """A value type, shape order, offset or string length read differently from the reference reader."""
    path = tmp_path / "theirs.gguf"
    write_theirs(path, STRINGS, version)
    reader = gguf.GGUFReader(path)
    with GGUFFile(path) as ours:
        assert ours.version == version
        assert ours.path == path
        for name, field in reader.fields.items():
            if not name.startswith("GGUF."):
                value = ours.metadata[name]
                assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), name
        assert list(ours.tensors) == [t.name for t in reader.tensors]
        for theirs in reader.tensors:
            tensor = ours.tensors[theirs.name]
            assert tensor.shape == tuple(int(n) for n in theirs.shape[::-1])
            assert (tensor.offset, tensor.n_bytes) == (theirs.data_offset, theirs.n_bytes)
            assert tensor.type.ggml_id == theirs.tensor_type.value
            assert ours.data(theirs.name).tobytes() == theirs.data.tobytes()
            expected = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
            np.testing.assert_array_equal(ours.array(theirs.name), expected)
        assert ours.metadata["strings"] == STRINGS
        assert ours.metadata.n_items("strings") == len(STRINGS)
        assert ours.metadata.n_items("numbers") == 3
        assert ours.metadata.n_items("text") is None
        assert type(ours.metadata["u64"]) is int
        assert type(ours.metadata["yes"]) is bool
        assert type(ours.metadata["f32"]) is float
        assert ours.data("three").shape == (3, 68)
        assert ours.data("four").shape == (6, 16)
        assert not ours.data("three").flags.writeable


@given(
    strings=st.lists(st.text(max_size=12) | st.sampled_from(STRINGS), max_size=200),
    n_plain=st.integers(0, 40),
)
@settings(max_examples=60)
def test_any_string_array_comes_back(tmp_path_factory, strings, n_plain):
    """The vectorised walk over strings joins, splits or loses strings: empty, long, or full of NULs."""
    strings = ["plain"] * n_plain + strings + ["plain"] * n_plain
    path = tmp_path_factory.mktemp("strings") / "a.gguf"
    write_gguf(path, {"before": 1, "strings": strings, "after": "still here"}, {})
    metadata = GGUFFile(path).metadata
    assert metadata["strings"] == strings
    assert metadata["after"] == "still here"


@pytest.mark.full
def test_a_vocabulary_larger_than_the_window_comes_back(tmp_path):
    """Strings lost where one window of the vectorised walk ends and the next begins."""
    rng = np.random.default_rng(3)
    alphabet = [chr(c) for c in range(0x21, 0x180)] + ["界", "🐈"]
    strings = ["".join(rng.choice(alphabet, n)) for n in rng.integers(0, 40, 20000)]
    strings[777] = "w" * 100_000
    path = tmp_path / "a.gguf"
    write_gguf(path, {"strings": strings}, {})
    assert GGUFFile(path).metadata["strings"] == strings


def test_the_gguf_package_reads_what_we_write(tmp_path):
    """A file that only kukri can read: types, padding, shapes or offsets off the specification."""
    path = tmp_path / "ours.gguf"
    rng = np.random.default_rng(5)
    matrix = rng.standard_normal((6, 64)).astype(np.float32)
    metadata = {
        "general.architecture": "llama",
        "general.alignment": 64,
        "count": 7,
        "negative": -7,
        "large": 2**40,
        "largest": 2**64 - 1,
        "most negative": -(2**63),
        "fraction": 0.25,
        "yes": True,
        "exact": np.float64(0.1),
        "byte": np.uint8(9),
        "strings": STRINGS,
        "no strings": [],
        "ids": [1, 2, 3],
        "scores": [0.5, 1.5],
        "flags": [True, False],
        "array": np.arange(4, dtype=np.uint16),
    }
    sizes_seen = []

    def lazily() -> np.ndarray:
        sizes_seen.append(len(os.listdir(tmp_path)))
        return quantize(matrix, Q8_0)

    write_gguf(
        path,
        metadata,
        {
            "norm": (F32, np.arange(5, dtype=np.float32), (5,)),
            "matrix": (Q8_0, lazily, (6, 64)),
            "half": (QUANT_TYPES["F16"], matrix.astype(np.float16), (6, 64)),
            "cube": (F32, matrix.reshape(2, 3, 64), (2, 3, 64)),
        },
    )
    assert sizes_seen == [1]  # the unfinished file, and nothing under the real name yet
    assert os.listdir(tmp_path) == ["ours.gguf"]
    reader = gguf.GGUFReader(path)
    types = {name: [t.name for t in field.types] for name, field in reader.fields.items()}
    assert types["count"] == ["UINT32"]
    assert types["negative"] == ["INT32"]
    assert types["large"] == ["UINT64"]
    assert types["most negative"] == ["INT64"]
    assert types["fraction"] == ["FLOAT32"]
    assert types["exact"] == ["FLOAT64"]
    assert types["byte"] == ["UINT8"]
    assert types["ids"] == ["ARRAY", "INT32"]
    assert types["scores"] == ["ARRAY", "FLOAT32"]
    assert types["array"] == ["ARRAY", "UINT16"]
    for name, value in metadata.items():
        expected = value.tolist() if isinstance(value, np.ndarray) else value
        if name != "no strings":  # the package makes no list of these
            assert reader.fields[name].contents() == expected, name
    tensors = {t.name: t for t in reader.tensors}
    assert list(tensors) == ["norm", "matrix", "half", "cube"]
    assert all(t.data_offset % 64 == 0 for t in reader.tensors)
    np.testing.assert_array_equal(tensors["matrix"].data, quantize(matrix, Q8_0))
    np.testing.assert_array_equal(tensors["half"].data, matrix.astype(np.float16))
    np.testing.assert_array_equal(tensors["cube"].data, matrix.reshape(2, 3, 64))
    assert len(path.read_bytes()) % 64 == 0


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path):
    """Half a file under the model's name, or a stray temporary one, after an error in the middle."""
    path = tmp_path / "a.gguf"
    write_gguf(path, {"kept": "yes"}, {})

    def fails() -> np.ndarray:
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError):
        write_gguf(path, {}, {"a": (F32, np.zeros(4, np.float32), (4,)), "b": (F32, fails, (4,))})
    assert os.listdir(tmp_path) == ["a.gguf"]
    assert GGUFFile(path).metadata["kept"] == "yes"


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"a": None}, {}, "'a'.*cannot hold None"),
        ({"a": [1, "b"]}, {}, "'a'.*cannot hold"),
        ({"a": [[1], [2, 3]]}, {}, "'a'.*cannot hold"),
        ({"a": np.zeros((2, 2))}, {}, "'a'.*cannot hold"),
        ({"a": 2**64}, {}, "'a'.*cannot hold"),
        ({"a": "\ud800"}, {}, "surrogates"),
        ({"general.alignment": 48}, {}, "power of two"),
        ({}, {"t": (Q8_0, np.zeros((1, 34), np.uint8), (1, 33))}, "'t'.*33 weights"),
        ({}, {"t": (Q8_0, np.zeros((1, 33), np.uint8), (1, 32))}, "'t'.*33 bytes"),
        ({}, {"t": (F32, np.zeros(4, np.int32), (4,))}, "'t'.*int32"),
        ({}, {"t": (F32, np.zeros(1, np.float32), (1, 1, 1, 1, 1))}, "'t'.*4 dimensions"),
        ({}, {"t" * 256: (F32, np.zeros(1, np.float32), (1,))}, "must be at most 255"),
    ],
)
def test_the_writer_refuses_what_gguf_cannot_hold(tmp_path, metadata, tensors, message):
    """A broken file written without a word."""
    with pytest.raises(FormatError, match=message):
        write_gguf(tmp_path / "a.gguf", metadata, tensors)
    assert os.listdir(tmp_path) == []


ONE = info("t", (8,))  # 32 bytes of F32
HUGE = 2**63
U32, STRING, ARRAY = 4, 8, 9


def array(item_type: int, n: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", item_type, n) + items


BROKEN = {
    "cut magic": (b"GG", "not a GGUF"),
    "only magic": (b"GGUF", "version.*ends after 0"),
    "no counts": (b"GGUF\3\0\0\0", "number of tensors"),
    "zip": (b"PK\x03\x04" + bytes(100), "zip"),
    "old ggml": (b"tjgg" + bytes(100), "before GGUF"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "LFS"),
    "web page": (b"<!DOCTYPE html><html>", "web page"),
    "safetensors": (struct.pack("<Q", 60) + b'{"a":{"dtype":"F32","shape":[1]}}', "safetensors"),
    "text": (b"once upon a time", "does not start"),
    "tensor count": (build(n_infos=HUGE), "byte 8.*9223372036854775808 tensors"),
    "key count": (build(n_keys=HUGE), "byte 16.*9223372036854775808 keys"),
    "one key too many": (build([key("a" * 30, U32, bytes(4))], n_keys=2, alignment=1), "a key.*ends after 0"),
    "one tensor too many": (build([], [ONE], n_infos=2, data=bytes(64)), "tensor"),
    "key length": (build([struct.pack("<Q", HUGE) + bytes(40)]), "byte 24.*longer than 65535"),
    "key past the end": (
        build([struct.pack("<Q", 100) + bytes(40)], alignment=1),
        "byte 32.*takes 100 bytes",
    ),
    "value type": (build([key("a", 13, bytes(40))]), "'a'.*unknown value type 13"),
    "item type": (build([key("a", ARRAY, array(13, 1, bytes(40)))]), "'a'.*unknown item type 13"),
    "string length": (
        build([key("a", STRING, struct.pack("<Q", HUGE))]),
        "'a'.*takes 9223372036854775808 bytes",
    ),
    "number count": (build([key("a", ARRAY, array(U32, HUGE))]), "'a'.*takes 36893488147419103232 bytes"),
    "string count": (build([key("a", ARRAY, array(STRING, HUGE))]), "9223372036854775808 strings in key 'a'"),
    "string count below the limit": (
        build([key("a", ARRAY, array(STRING, 2**22))]),
        "4194304 strings in key",
    ),
    "last string cut": (
        build([key("a", ARRAY, array(STRING, 2, text("ab") + struct.pack("<Q", 3) + b"ab"))], alignment=1),
        "byte 59: a string of key 'a' runs past the end",
    ),
    "last long string cut": (
        build([key("a", ARRAY, array(STRING, 1, text("q" * 300)[:-1]))], alignment=1),
        "byte 49.*past the end",
    ),
    "string in array": (
        build([key("a", ARRAY, array(STRING, 1, struct.pack("<Q", HUGE)))]),
        "'a'.*past the end",
    ),
    "nested array": (
        build([key("a", ARRAY, array(ARRAY, 1, array(U32, 1, bytes(4))))]),
        "'a'.*array of arrays",
    ),
    "key not UTF-8": (build([key(b"a\xff", U32, bytes(4))]), "byte 33: a key is not UTF-8"),
    "key twice": (build([key("a", U32, bytes(4))] * 2), "'a' appears twice"),
    "alignment 0": (
        build([key("general.alignment", U32, struct.pack("<I", 0))]),
        "alignment.*0, not a power",
    ),
    "alignment 48": (
        build([key("general.alignment", U32, struct.pack("<I", 48))]),
        "alignment.*48, not a power",
    ),
    "alignment text": (build([key("general.alignment", STRING, text("32"))]), "alignment.*'32', not a power"),
    "split text": (build([key("split.count", STRING, text("2"))]), "split.count.*'2'"),
    "name length": (build([], [info("n" * 256, (8,))], bytes(32)), "name of 256 bytes"),
    "name not UTF-8": (build([], [info(b"\xff", (8,))], bytes(32)), "name is not UTF-8"),
    "name twice": (build([], [ONE, info("t", (8,), offset=32)], bytes(64)), "tensor 't'.*same name"),
    "no dims": (
        build([], [info("t", ()) + bytes(8)], bytes(32)),
        "tensor 't' must have 1 to 4 dimensions, not 0",
    ),
    "five dims": (
        build([], [info("t", (1,) * 5)], bytes(32)),
        "tensor 't' must have 1 to 4 dimensions, not 5",
    ),
    "many dims": (
        build([], [text("t") + struct.pack("<I", 2**32 - 1) + bytes(40)]),
        "tensor 't'.*4294967295",
    ),
    "dim 0": (build([], [info("t", (8, 0))], bytes(32)), "tensor 't'.*no weights"),
    "product overflow": (
        build([], [info("t", (2**32, 2**32))], bytes(32)),
        "tensor 't'.*73786976294838206464 bytes",
    ),
    "wraps to 32 bytes": (build([], [info("t", (2**62 + 8,))], bytes(32)), "tensor 't'.*do not fit"),
    "half a block": (
        build([], [info("t", (48, 2), 8)], bytes(128)),
        "tensor 't'.*48 weights.*Q8_0 blocks of 32",
    ),
    "misaligned": (
        build([], [info("t", (8,), offset=4)], bytes(64)),
        "tensor 't'.*4 is not a multiple of 32",
    ),
    "outside": (build([], [info("t", (8,), offset=32)], bytes(32)), "tensor 't'.*do not fit"),
    "far outside": (build([], [info("t", (8,), offset=2**64 - 32)], bytes(32)), "tensor 't'.*do not fit"),
    "overlap": (
        build([], [info("a", (16,)), info("b", (8,), offset=32)], bytes(64)),
        "'b'.*overlaps tensor 'a'",
    ),
    "same place": (build([], [info("a", (8,)), info("b", (8,))], bytes(64)), "overlaps"),
    "data cut": (build([], [ONE], bytes(31)), "tensor 't'.*cut"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_named(save, name):
    """Each way a file can be wrong: accepted, reported without its place, or reported as another thing."""
    data, message = BROKEN[name]
    path = save(data)
    with pytest.raises(FormatError, match=message) as caught:
        GGUFFile(path)
    assert str(caught.value).startswith(str(path))
    assert caught.value.path == str(path)
    assert "\n" not in str(caught.value)
    if "tensor 't'" in message:
        assert caught.value.tensor == "t"
        assert caught.value.offset is not None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (build(version=1), "version 1 is not supported: use version 2"),
        (build(version=0), "version 0 is not supported"),
        (build(version=4), "version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    ],
)
def test_valid_files_of_other_kinds_are_unsupported(save, data, message):
    """A byte-swapped file reported as damaged, which sends its owner to download it again."""
    with pytest.raises(UnsupportedError, match=message):
        GGUFFile(save(data))


def test_weight_types_that_kukri_does_not_know_are_not_damage(save):
    """A file of next year called broken, and a type's number not said."""
    path = save(build([], [info("t", (8,), 77)], bytes(32)))
    with pytest.raises(
        UnsupportedError, match="tensor 't' is of weight type 77, which this version does not support"
    ):
        GGUFFile(path)


# the package's block of Q8_1, which no file holds, is that of an older GGML
@pytest.mark.parametrize("weight_type", set(gguf.GGMLQuantizationType) - {gguf.GGMLQuantizationType.Q8_1})
def test_every_weight_type_of_the_gguf_package_is_known(weight_type):
    """A type whose blocks have another size here, or that is called damage."""
    known = QUANT_TYPES_BY_ID[weight_type.value]
    assert (known.name, (known.block_size, known.block_bytes)) == (
        weight_type.name,
        gguf.GGML_QUANT_SIZES[weight_type],
    )


def test_paths_that_are_no_files(tmp_path):
    """A bare OSError, a hang on a pipe, or a crash of mmap on an empty file."""
    (tmp_path / "empty").touch()
    for path, message in [
        (tmp_path, "is a directory"),
        (tmp_path / "missing", "was not found"),
        (tmp_path / "empty", "empty"),
        (tmp_path / "empty" / "below", "Not a directory"),
        ("a\0b", "cannot be read"),
    ]:
        with pytest.raises(FormatError, match=message):
            GGUFFile(path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(FormatError, match="must be a regular file"):
            GGUFFile(tmp_path / "pipe")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_one_may_not_read(save):
    """A bare PermissionError."""
    path = save(build())
    path.chmod(0)
    with pytest.raises(FormatError, match="Permission denied"):
        GGUFFile(path)


def test_array_text_that_is_not_utf8_is_found_when_it_is_read(save):
    """A UnicodeDecodeError in the tokenizer, without a file or a place; invalid bytes replaced in silence."""
    strings = [b"fine", b"not\xff", b"fine"]
    path = save(build([key("a", ARRAY, array(STRING, 3, b"".join(map(text, strings))))]))
    metadata = GGUFFile(path).metadata
    with pytest.raises(FormatError, match="byte 72: a string of key 'a' is not UTF-8"):
        metadata["a"]
    # the halves of one character, in two strings that are neighbours in the file
    path = save(build([key("a", ARRAY, array(STRING, 2, text(b"\xc3") + text(b"\xa9")))]))
    with pytest.raises(FormatError, match="not UTF-8"):
        GGUFFile(path).metadata["a"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (key("a", 7, b"\2"), "byte 59: key 'a' has a boolean that is neither 0 nor 1"),
        (key("a", STRING, text(b"ok\xc3")), "byte 69: key 'a' is not UTF-8"),
    ],
    ids=["boolean", "text"],
)
def test_values_that_mean_nothing_are_errors_when_read(save, entry, message):
    """A file refused for a key that nobody reads; a value made up where somebody does."""
    file = GGUFFile(save(build([key("before", U32, bytes(4)), entry, key("after", 7, b"\1")])))
    assert list(file.metadata) == ["before", "a", "after"]
    assert file.metadata["before"] == 0
    assert file.metadata["after"] is True
    for _ in range(2):
        with pytest.raises(FormatError, match=message):
            file.metadata["a"]
    assert file.metadata.n_items("a") is None


def test_array_booleans_are_checked_when_read(save):
    """A NumPy boolean that is neither true nor false, which breaks arithmetic far away."""
    path = save(build([key("a", ARRAY, array(7, 3, b"\1\0\5"))]))
    with pytest.raises(FormatError, match=r"'a'.*neither 0 nor 1"):
        GGUFFile(path).metadata["a"]


def test_closed_files_say_so_and_views_outlive_them(tmp_path):
    """A crash on memory that was unmapped under a weight still in use."""
    path = tmp_path / "a.gguf"
    write_gguf(path, {"n": 1, "s": ["a"]}, {"t": (F32, np.arange(4, dtype=np.float32), (4,))})
    with GGUFFile(path) as file:
        view = file.data("t")
        with pytest.raises(FormatError, match=r"'u'.*was not found in the file"):
            file.data("u")
    assert view.view(np.float32).tolist() == [[0, 1, 2, 3]]
    assert file.metadata["n"] == 1
    with pytest.raises(FormatError, match="closed"):
        file.data("t")
    with pytest.raises(FormatError, match="closed"):
        file.metadata["s"]
    with pytest.raises(KeyError):
        file.metadata["missing"]


def test_alignment_of_the_file_holds(save):
    """Tensor data read from the wrong place when a file does not use the default alignment."""
    keys = [key("general.alignment", U32, struct.pack("<I", 256))]
    payload = np.arange(8, dtype=np.float32).tobytes()
    path = save(build(keys, [info("t", (8,), offset=256)], bytes(256) + payload, alignment=256))
    assert GGUFFile(path).array("t").tolist() == list(range(8))


def test_hostile_claims_allocate_nothing(save):
    """Memory reserved for what a header claims before looking at how long the file is."""
    for data, _ in BROKEN.values():
        path = save(data)
        tracemalloc.start()
        with pytest.raises(KukriError):
            GGUFFile(path)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20


@pytest.mark.parametrize("unit", [b"", b"\0", b"ab", b"q" * 300, b"\0\0\0\0\0\0\0\1"])
def test_no_string_array_makes_the_reader_slow(save, unit):
    """Contents that defeat the vectorised walk: a scan of a whole window for every string."""
    n = 200_000
    path = save(build([key("a", ARRAY, array(STRING, n, text(unit) * n))]))
    with within(2):  # a plain loop takes some 0.1 s
        file = GGUFFile(path)
        assert file.metadata["a"] == [unit.decode()] * n


def test_alternating_strings_do_not_make_the_reader_slow(save):
    """Short and long strings in turn, so that every window breaks after a few strings."""
    n = 20_000
    path = save(build([key("a", ARRAY, array(STRING, 18 * n, (text(b"ab") * 17 + text(b"q" * 256)) * n))]))
    with within(2):
        assert GGUFFile(path).metadata.n_items("a") == 18 * n


def test_reads_the_real_model(smollm2_path):
    """The file everyone runs first read wrongly, or slowly enough to be felt at every start."""
    seconds = []
    for _ in range(5):
        with stopwatch() as took:
            file = GGUFFile(smollm2_path)
            tokens, merges = file.metadata["tokenizer.ggml.tokens"], file.metadata["tokenizer.ggml.merges"]
            types = file.metadata["tokenizer.ggml.token_type"]
        seconds.append(took.seconds)
    assert keeps(min(seconds), 0.06)
    assert (len(tokens), len(merges), types.shape) == (49152, 48900, (49152,))
    assert tokens[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert merges[:2] == ["Ġ t", "Ġ a"]
    assert len(file.tensors) == 272
    assert file.tensors["token_embd.weight"].shape == (49152, 576)
    raw = smollm2_path.read_bytes()
    for tensor in file.tensors.values():
        stored = raw[tensor.offset : tensor.offset + tensor.n_bytes]
        assert file.data(tensor.name).tobytes() == stored
    expected = gguf.quants.dequantize(file.data("blk.7.ffn_up.weight"), gguf.GGMLQuantizationType.Q4_1)
    np.testing.assert_array_equal(file.array("blk.7.ffn_up.weight"), expected)


@pytest.mark.full
def test_a_152k_vocabulary_opens_in_time(tmp_path):
    """Work for each token in Python, which makes models with large vocabularies slow to start."""
    rng = np.random.default_rng(0)
    alphabet = np.array([chr(c) for c in range(0x21, 0x7F)] + ["Ġ", "é", "界"])
    letters = "".join(rng.choice(alphabet, 2_500_000))
    bounds = np.cumsum(rng.integers(2, 12, 303_000))
    pieces = [letters[a:b] for a, b in pairwise(bounds.tolist())]
    keys = {
        "tokenizer.ggml.tokens": pieces[:152_000],
        "tokenizer.ggml.merges": [f"{p[:1]} {p[1:]}" for p in pieces[152_000 : 152_000 + 150_900]],
        "tokenizer.ggml.token_type": np.ones(152_000, np.int32),
    }
    path = tmp_path / "large.gguf"
    write_gguf(path, keys, {})
    seconds = []
    for _ in range(5):
        with stopwatch() as took:
            metadata = GGUFFile(path).metadata
            values = [metadata[name] for name in keys]
        seconds.append(took.seconds)
    assert keeps(min(seconds), 0.2)
    assert values[0] == keys["tokenizer.ggml.tokens"]
    assert values[1] == keys["tokenizer.ggml.merges"]


def test_the_reader_stands_alone():
    """Reading a file's metadata made to wait for Numba or torch to load."""
    heavy = "('numba', 'torch', 'tokenizers')"
    code = f"import sys, kukri.formats.gguf.reader; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
