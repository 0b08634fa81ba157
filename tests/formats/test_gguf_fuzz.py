"""Damaged GGUF files: whatever happens to the bytes, a KukriError or a file that is safe to read."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kukri.errors import FormatError, KukriError
from kukri.formats.gguf.config import model_config
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.weights import GGUFWeights
from kukri.formats.gguf.writer import write_gguf
from kukri.kernels.quantize import quantize
from kukri.quant.blocks import BLOCKS
from kukri.quant.types import QUANT_TYPES
from tests.stopwatch import within

WIDTH, N_VOCAB = 32, 5


def our_file(path: Path) -> None:
    """A small llama by kukri's writer: keys of many types, then tensors."""
    rng = np.random.default_rng(1)
    metadata = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": 32,
        "llama.attention.head_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "split.count": 1,
        "text": "héllo",
        "bools": [True, False],
        "tokenizer.ggml.tokens": ["a", "", "Ġb", "x" * 260, "🐈"],
        "tokenizer.ggml.scores": np.arange(5, dtype=np.float64),
    }
    tensors = {"output_norm.weight": (QUANT_TYPES["F32"], np.ones(WIDTH, np.float32), (WIDTH,))}
    for name, weight_type in [("token_embd.weight", "Q4_1"), ("output.weight", "Q8_0")]:
        matrix = rng.standard_normal((N_VOCAB, WIDTH)).astype(np.float32)
        data = quantize(matrix, QUANT_TYPES[weight_type])
        tensors[name] = (QUANT_TYPES[weight_type], data, (N_VOCAB, WIDTH))
    write_gguf(path, metadata, tensors)


def their_file(path: Path) -> None:
    """A small file by the gguf package."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_float64("f64", 0.1)
    writer.add_int8("i8", -1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b\0", "ccc"])
    writer.add_array("tokenizer.ggml.token_type", [1, 2, 3])
    writer.add_tensor("token_embd.weight", np.ones((N_VOCAB, WIDTH), np.float16))
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module", params=[our_file, their_file])
def valid(request, tmp_path_factory) -> tuple[Path, bytes, int, int]:
    """A path to write to, a valid file's bytes, where its header ends, and where its last tensor ends."""
    path = tmp_path_factory.mktemp("fuzz") / "model.gguf"
    request.param(path)
    with GGUFFile(path) as file:
        header_end = min(t.offset for t in file.tensors.values())
        data_end = max(t.offset + t.n_bytes for t in file.tensors.values())
    return path, path.read_bytes(), header_end, data_end


def survives(path: Path, data: bytes) -> bool:
    """Whether the file opens; anything but a KukriError, from opening or from using it, fails the test."""
    overwrite(path, data)
    with within(1):
        try:
            file = GGUFFile(path)
        except KukriError as error:
            check_message(error, path)
            return False
    read_everything(file, len(data))
    return True


def overwrite(path: Path, data: bytes) -> None:
    """Replaces a file's contents in place: emptying it first makes some file systems wait for the disk."""
    with open(path, "r+b") as file:
        file.write(data)
        file.truncate()


def check_message(error: KukriError, path: Path) -> None:
    """One line of sensible length that names the file."""
    assert "\n" not in str(error)
    assert str(path) in str(error)
    assert len(str(error)) < 2000


def read_everything(file: GGUFFile, size: int) -> None:
    """Everything a caller may do with a file that opened, and what it promises then."""
    end = 0
    for tensor in sorted(file.tensors.values(), key=lambda t: t.offset):
        assert tensor.offset >= end
        assert tensor.offset % file.alignment == 0
        end = tensor.offset + tensor.n_bytes
        assert end <= size
        assert file.data(tensor.name).nbytes == tensor.n_bytes
        if tensor.type.name in BLOCKS:
            assert file.array(tensor.name).shape == tensor.shape
    for key in file.metadata:
        try:
            file.metadata[key]
        except FormatError as error:
            check_message(error, file.path)
    try:
        config = model_config(file)
        GGUFWeights(file, config).done()
    except KukriError as error:
        check_message(error, file.path)


def test_the_files_are_valid_before_they_are_damaged(valid):
    """A fuzz test that finds nothing because its files never open."""
    path, data, header_end, data_end = valid
    assert survives(path, data)
    assert 400 < header_end < data_end <= len(data)


def test_cut_at_any_byte(valid):
    """A file that a broken download left short, accepted: its last tensors would be zeros or a crash."""
    path, data, _, data_end = valid
    for size in range(data_end):
        overwrite(path, data[:size])
        with pytest.raises(FormatError):
            GGUFFile(path)


@pytest.mark.full
def test_every_single_bit_of_the_header(valid):
    """One flipped bit: a crash, a hang, or tensors that lie outside the file or on top of each other."""
    path, data, header_end, _ = valid
    for position in range(header_end):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            survives(path, bytes(damaged))


NASTY = [0, 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]


@pytest.mark.full
def test_extreme_numbers_anywhere_in_the_header(valid):
    """A count, length, size or offset at the edge of its type: overflow, or memory for what is claimed."""
    path, data, header_end, _ = valid
    for position in range(4, header_end - 8):
        for number in NASTY:
            damaged = bytearray(data)
            struct.pack_into("<Q", damaged, position, number)
            survives(path, bytes(damaged))


def edits() -> st.SearchStrategy[list[tuple[str, float, bytes]]]:
    """Edits as (kind, place from 0 to 1, bytes)."""
    kind = st.sampled_from(["flip", "cut", "insert", "repeat", "overwrite"])
    return st.lists(
        st.tuples(kind, st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=9)), max_size=5
    )


def damage(data: bytes, changes: list[tuple[str, float, bytes]], limit: int) -> bytes:
    damaged = bytearray(data)
    for kind, place, payload in changes:
        at = int(place * min(limit, len(damaged)))
        if kind == "flip" and at < len(damaged):
            damaged[at] ^= payload[0]
        elif kind == "cut":
            del damaged[at : at + payload[0]]
        elif kind == "insert":
            damaged[at:at] = payload
        elif kind == "repeat":
            damaged[at:at] = damaged[at : at + payload[0]]
        elif kind == "overwrite":
            damaged[at : at + len(payload)] = payload
    return bytes(damaged)


@pytest.mark.representative(2)
@pytest.mark.full(but=["our_file-anywhere"])
@pytest.mark.parametrize("where", ["header", "anywhere"])
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=edits())
@example(changes=[])
def test_any_damage(valid, where, changes):
    """Several changes together that pass each check by themselves."""
    path, data, header_end, _ = valid
    survives(path, damage(data, changes, header_end if where == "header" else len(data)))


@settings(max_examples=200)
@given(data=st.binary(max_size=300))
def test_any_bytes_after_the_magic(tmp_path_factory, data):
    """Files that share nothing with a valid one but their first bytes."""
    path = tmp_path_factory.getbasetemp() / "random.gguf"
    path.touch()
    survives(path, b"GGUF" + struct.pack("<I", 3) + data)
    survives(path, data)


def fields(n_keys: int, n_tensors: int) -> Iterator[bytes]:
    """The head of a file that claims so much, and nothing else."""
    for version in (2, 3):
        yield b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys)


@pytest.mark.full
def test_a_large_file_of_zeros_is_refused_in_time(tmp_path):
    """Millions of empty keys, tensors or strings walked one by one."""
    path = tmp_path / "zeros.gguf"
    n_bytes = 32 << 20
    strings = struct.pack("<Q1sIIQ", 1, b"k", 9, 8, n_bytes // 8 - 100)
    heads = [*fields(2**16, 0), *fields(0, 2**17), next(fields(1, 0)) + strings]
    for head in heads:
        with open(path, "wb") as file:
            file.write(head)
            file.truncate(n_bytes)
        with within(2), suppress(KukriError):
            GGUFFile(path)
