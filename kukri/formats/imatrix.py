"""Importance matrices: how large the inputs of each matrix are, column by column, in llama.cpp's files.

The GGUF form has `general.type` "imatrix" and, for each tensor, NAME.in_sum2, the sums of squares of its
inputs, and NAME.counts, over how many tokens. The older form, mostly called .dat, is read too: it counts
chunks of tokens (llama.cpp, tools/imatrix/imatrix.cpp).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kukri.dataclass import dataclass
from kukri.errors import ConfigError, FormatError, UnsupportedError, reading
from kukri.formats.gguf.reader import MAX_NAME_BYTES, GGUFFile
from kukri.formats.gguf.writer import write_gguf
from kukri.kernels.arrays import FloatArray
from kukri.quant.types import QUANT_TYPES

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAX_ENTRIES = 1 << 17
_LEAST = 1e-7  # least importance, relative to the mean: columns that were never used still count a little


@dataclass(frozen=True)
class ImportanceMatrix:
    """`sums` of squared inputs, float32 [columns], by GGUF's names, over `counts` tokens (or chunks) each."""

    sums: Mapping[str, FloatArray]
    counts: Mapping[str, float]
    datasets: tuple[str, ...] = ()
    n_chunks: int = 0
    chunk_tokens: int = 0  # 0: not known

    def importance(self, name: str, n_columns: int) -> FloatArray | None:
        """The importance of each column of a tensor, float32 [n_columns] of mean 1; None if not measured.

        Raises ConfigError if the tensor had another number of columns.
        """
        sums = self.sums.get(name)
        if sums is None:
            return None
        if sums.shape != (n_columns,):
            raise ConfigError(f"the importances of {name!r} must have {n_columns} columns, not {len(sums)}")
        mean = float(sums.mean(dtype=np.float64))
        return np.maximum(sums / mean, _LEAST).astype(np.float32) if mean > 0 else None


def read_imatrix(path: Path) -> ImportanceMatrix:
    """An importance matrix in either form. Raises FormatError for a broken file or one of another kind."""
    with reading(path):
        with open(path, "rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        return _read_gguf(path) if is_gguf else _read_legacy(path)


def write_imatrix(path: Path, matrix: ImportanceMatrix) -> None:
    """Writes the GGUF form; the file appears complete or not at all."""
    metadata = {
        "general.type": "imatrix",
        "imatrix.datasets": list(matrix.datasets),
        "imatrix.chunk_count": matrix.n_chunks,
        "imatrix.chunk_size": matrix.chunk_tokens,
    }
    f32 = QUANT_TYPES["F32"]
    tensors = {}
    for name in sorted(matrix.sums):
        sums = np.ascontiguousarray(matrix.sums[name], np.float32)
        tensors[name + _SUMS] = (f32, sums, sums.shape)
        tensors[name + _COUNTS] = (f32, np.array([matrix.counts[name]], np.float32), (1,))
    write_gguf(path, metadata, tensors)


def _read_gguf(path: Path) -> ImportanceMatrix:
    sums: dict[str, FloatArray] = {}
    counts: dict[str, float] = {}
    with GGUFFile(path) as file:
        if file.metadata.get("general.type") != "imatrix":
            raise FormatError("must be an importance matrix, not another GGUF file", path=path)
        for stored in file.tensors:
            name = stored.removesuffix(_SUMS)
            if name == stored:
                continue
            if name + _COUNTS not in file.tensors:
                raise FormatError("must have counts", path=path, tensor=stored)
            for tensor in (file.tensors[stored], file.tensors[name + _COUNTS]):
                if tensor.type.name != "F32":
                    raise FormatError(
                        f"must be of type F32, not {tensor.type.name}", path=path, tensor=tensor.name
                    )
            count = file.array(name + _COUNTS).reshape(-1)
            if count.size != 1:
                raise UnsupportedError(f"{path}: importance matrices of experts are not supported ({name!r})")
            sums[name], counts[name] = file.array(stored).reshape(-1).copy(), float(count[0])
        datasets = file.metadata.get("imatrix.datasets", [])
        stated = [file.metadata.get(f"imatrix.chunk_{what}", 0) for what in ("count", "size")]
    n_chunks, chunk_tokens = (value if isinstance(value, int) else 0 for value in stated)
    names = tuple(datasets) if isinstance(datasets, list) else ()
    return _checked(path, ImportanceMatrix(sums, counts, names, n_chunks, chunk_tokens))


def _read_legacy(path: Path) -> ImportanceMatrix:
    """n, then for each of n tensors: its name, a number of chunks, sums divided by a chunk's tokens."""
    data = path.read_bytes()
    position = 0

    def take(n_bytes: int, what: str) -> bytes:
        nonlocal position
        if not 0 <= n_bytes <= len(data) - position:
            raise FormatError(f"must be an importance matrix: {what} is missing", path=path, offset=position)
        position += n_bytes
        return data[position - n_bytes : position]

    def whole(what: str, most: int) -> int:
        start = position
        (value,) = struct.unpack("<i", take(4, what))
        if not 1 <= value <= most:
            raise FormatError(f"must be an importance matrix: {what} is {value}", path=path, offset=start)
        return int(value)

    sums: dict[str, FloatArray] = {}
    counts: dict[str, float] = {}
    for _ in range(whole("the number of tensors", _MAX_ENTRIES)):
        name = take(whole("the length of a name", MAX_NAME_BYTES), "a name").decode("utf-8", "replace")
        counts[name] = whole("a number of chunks", 1 << 30)
        n_values = whole("a number of columns", 1 << 28)
        sums[name] = np.frombuffer(take(4 * n_values, "a tensor's sums"), "<f4").astype(np.float32)
    n_chunks, datasets = int(max(counts.values())), ()
    if len(data) - position >= 8:  # files of before May 2024 end here
        n_chunks = max(0, struct.unpack("<i", take(4, "the number of chunks"))[0])
        (length,) = struct.unpack("<i", take(4, "the length of the data set's name"))
        datasets = (take(length, "the data set's name").decode("utf-8", "replace"),)  # type: ignore[assignment]
    return _checked(path, ImportanceMatrix(sums, counts, datasets, n_chunks))


def _checked(path: Path, matrix: ImportanceMatrix) -> ImportanceMatrix:
    if not matrix.sums:
        raise FormatError("must hold importances", path=path)
    for name, sums in matrix.sums.items():
        if not np.isfinite(sums).all() or (sums < 0).any():
            raise FormatError("must hold sums of squares that are at least 0", path=path, tensor=name)
        if not 0 < matrix.counts[name] < np.inf:
            raise FormatError(f"must count tokens, not {matrix.counts[name]:g}", path=path, tensor=name)
    return matrix
