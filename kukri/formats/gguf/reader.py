"""GGUF files: a memory-mapped reader that believes nothing a file claims.

The layout (docs/gguf.md of ggml; versions 2 and 3 are the same), little-endian throughout:

    | "GGUF" | u32 version | u64 n_tensors | u64 n_keys |
    n_keys times      | string key | u32 value type | value |
    n_tensors times   | string name | u32 n_dims | n_dims u64, innermost first | u32 type | u64 offset |
    padding to `general.alignment`, then tensor data; tensor offsets count from here

    string  | u64 n_bytes | UTF-8 |
    array   | u32 item type | u64 n_items | items |
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kukri.dataclass import dataclass, replace
from kukri.errors import FormatError, UnsupportedError, brief, reading
from kukri.formats.file_kinds import file_kind
from kukri.formats.gguf.split import part_name, part_paths
from kukri.host.mapped_files import map_file
from kukri.quant.blocks import BLOCKS, ByteArray, dequantize
from kukri.quant.types import QUANT_TYPES_BY_ID, QuantType

Scalar = str | int | float | bool
Value = Scalar | list[str] | npt.NDArray[Any]

# Bounds no real file comes near; they keep the time a hostile one can take below a second or so.
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_ARRAY_STRINGS = 1 << 22
MAX_KEY_BYTES = 65535  # the specification's
MAX_NAME_BYTES = 255  # the specification says 64
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32

BOOL_ID, STRING_ID, ARRAY_ID = 7, 8, 9
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    BOOL_ID: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
NUMBER_IDS = {dtype: number_id for number_id, dtype in _NUMBERS.items()}


@dataclass(frozen=True)
class GGUFTensor:
    """The location of a tensor: `offset` in bytes from the file's start; `shape` is (out, in) or (n,)."""

    name: str
    type: QuantType
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


class GGUFFile:
    """A GGUF model, mapped and checked: nothing it points to lies outside, no bytes belong to two tensors.

    A model in several files is opened by the path of any of them: its keys come from the first part, its
    tensors from all parts.

    Attributes: path (of the first part), files (of all), version, metadata (see `Metadata`), tensors
    (name -> GGUFTensor, in file order), alignment (bytes). Raises FormatError for files that are broken,
    cannot be read or are not parts of one model, UnsupportedError for versions and byte orders that kukri
    does not read. The files must not shrink while open.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with reading(path):
            self._parts = _open_parts(_Part(Path(path)))
        first = self._parts[0]
        self.path, self.files = first.path, tuple(part.path for part in self._parts)
        self.version, self.metadata, self.alignment = first.version, first.metadata, first.alignment
        self.tensors: dict[str, GGUFTensor] = {}
        self._part_of: dict[str, _Part] = {}
        for part in self._parts:
            self.tensors |= part.tensors
            self._part_of |= dict.fromkeys(part.tensors, part)

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor; the first if none does."""
        return self._part_of[name].path if name in self._part_of else self.path

    def readable(self, name: str) -> GGUFTensor:
        """A tensor of a type that is read. Raises FormatError if it is missing, else UnsupportedError."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise FormatError("is missing", path=self.path, tensor=name)
        if tensor.type.name not in BLOCKS:
            message = f"must be of type {', '.join(BLOCKS)}, not {tensor.type.name}"
            raise UnsupportedError(f"{self.file_of(name)}: tensor {name!r} {message}")
        return tensor

    def data(self, name: str) -> ByteArray:
        """A tensor as stored: uint8 [rows, row_bytes], a read-only view of the mapped file."""
        if name not in self.tensors:
            raise FormatError("was not found in the file", path=self.path, tensor=name)
        part, tensor = self._part_of[name], self.tensors[name]
        if part.bytes is None:
            raise FormatError("the file has been closed", path=part.path, tensor=name)
        stored = part.bytes[tensor.offset : tensor.offset + tensor.n_bytes]
        return stored.reshape(-1, tensor.type.row_bytes(tensor.shape[-1]))

    def array(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor dequantized: float32 in the tensor's shape, a read-only view of the file for F32."""
        stored = self.data(name)
        return dequantize(stored, self.tensors[name].type).reshape(self.tensors[name].shape)

    def close(self) -> None:
        """Drops the mapping, which the system releases once the last view of it is gone."""
        for part in self._parts:
            part.bytes = None
            part.metadata.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Part:
    """One file, mapped: all of a model, or one part of a split one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes: ByteArray | None = map_file(path, "GGUF")
        cursor = _Cursor(self.bytes, path)
        self.version, n_tensors, n_keys = _read_header(cursor)
        self.metadata = Metadata(cursor, n_keys)
        self.alignment = alignment_of(self.metadata, path)
        self.tensors = _read_tensors(cursor, n_tensors, self.alignment)
        end = max((t.offset + t.n_bytes for t in self.tensors.values()), default=cursor.position)
        for start in (end, aligned(end, self.alignment)):  # writers add different keys
            if self.bytes[start : start + 4].tobytes() == b"GGUF":
                raise FormatError(
                    "holds another GGUF file after its own tensors, as `cat` joins files: keep the parts, or "
                    "join them with `llama-gguf-split --merge`",
                    path=path,
                    offset=start,
                )

    def whole(self, key: str) -> int:
        """A count of the file's own, from 0 up."""
        value = self.metadata.get(key)
        if type(value) is not int or value < 0:
            found = "missing" if value is None else f"{brief(value)}, not a whole number"
            raise FormatError(f"key {key!r} is {found}", path=self.path)
        return value


def gguf_start(path: Path) -> int:
    """Return where the tensors of one file begin, in bytes. Raises FormatError for a broken header."""
    return min((tensor.offset for tensor in _Part(path).tensors.values()), default=0)


@dataclass(frozen=True, eq=False)
class _StringArray:
    """A string array that is still in the file: `starts` [n + 1] are its strings' offsets and its end."""

    starts: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _NumberArray:
    """A number array that is still in the file."""

    dtype: np.dtype[Any]
    offset: int
    n_items: int


_Entry = Scalar | _StringArray | _NumberArray | FormatError  # the error that an access raises


class Metadata(Mapping[str, Value]):
    """A file's keys in its order. Arrays are lists of str, or NumPy arrays of the file's number type.

    Arrays are checked when the file is opened and decoded at *each* access: a vocabulary costs nothing until
    it is wanted and is not kept, so take it once. Text that is not UTF-8 and booleans other than 0 and 1
    raise FormatError when their key is accessed, and not before: it may never be read.
    """

    def __init__(self, cursor: _Cursor, n_keys: int) -> None:
        self._cursor: _Cursor | None = cursor
        self._entries: dict[str, _Entry] = {}
        for _ in range(n_keys):
            start = cursor.position
            key = cursor.text("a key", MAX_KEY_BYTES)
            if key in self._entries:
                raise cursor.error(f"key {brief(key)} appears twice", start)
            self._entries[key] = _read_value(cursor, key)

    def __getitem__(self, key: str) -> Value:
        entry = self._entries[key]
        if isinstance(entry, FormatError):
            raise entry
        if not isinstance(entry, _StringArray | _NumberArray):
            return entry
        if self._cursor is None:
            raise FormatError(f"key {brief(key)} cannot be read: the file has been closed")
        if isinstance(entry, _StringArray):
            return self._cursor.decode_strings(entry.starts, key)
        return self._cursor.decode_numbers(entry, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def n_items(self, key: str) -> int | None:
        """Items of an array without decoding it; None when the key holds a single value."""
        entry = self._entries[key]
        if isinstance(entry, _StringArray):
            return len(entry.starts) - 1
        return entry.n_items if isinstance(entry, _NumberArray) else None

    def close(self) -> None:
        """Releases the file; single values stay readable."""
        self._cursor = None


class _Cursor:
    """A place in a mapped file from which values are read, each checked against the file's end first."""

    def __init__(self, data: ByteArray, path: Path) -> None:
        self.data, self.path, self.size, self.position = data, path, len(data), 0
        self._view = data.data

    def error(self, message: str, offset: int, tensor: str | None = None) -> FormatError:
        """A FormatError about this file."""
        return FormatError(message, path=self.path, offset=offset, tensor=tensor)

    def take(self, n_bytes: int, what: str) -> int:
        """Moves past `n_bytes` and returns where they start."""
        start = self.position
        if n_bytes > self.size - start:
            left = self.size - start
            raise self.error(
                f"{what} takes {n_bytes} bytes and the file ends after {left}: it is cut or damaged", start
            )
        self.position = start + n_bytes
        return start

    def u32(self, what: str) -> int:
        """The next unsigned 32-bit number."""
        return int(_U32.unpack_from(self._view, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        """The next unsigned 64-bit number."""
        return int(_U64.unpack_from(self._view, self.take(8, what))[0])

    def number(self, dtype: np.dtype[Any], what: str) -> int | float:
        """The next number of a type, as a Python one."""
        start = self.take(dtype.itemsize, what)
        value: int | float = np.frombuffer(self._view, dtype, 1, start)[0].item()
        return value

    def text(self, what: str, max_bytes: int | None = None) -> str:
        """The next string."""
        start = self.position
        n_bytes = self.u64(f"the length of {what}")
        if max_bytes is not None and n_bytes > max_bytes:
            raise self.error(f"{what} of {n_bytes} bytes is longer than {max_bytes}", start)
        return self.decode(self.take(n_bytes, what), n_bytes, what)

    def decode(self, start: int, n_bytes: int, what: str) -> str:
        """A string. Raises FormatError unless it is UTF-8."""
        try:
            return str(self._view[start : start + n_bytes], "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8", start + error.start) from None

    def skip_strings(self, n: int, what: str) -> npt.NDArray[np.int64]:
        """Moves past `n` strings and returns where each starts, and the end: int64 [n + 1].

        Where a string starts depends on the one before, but nearly all are shorter than 256 bytes and
        hold no NUL, so their lengths stand out: one byte, then seven zeros. NumPy finds such places
        and checks that they form a chain. Where they do not, strings are walked one by one, for longer
        each time, so that no contents make this much slower than a plain loop.
        """
        starts = np.empty(n + 1, np.int64)
        n_done, patience = 0, 16
        while n_done < n:
            chain, next_start = self._chain_of_short_strings()
            chain, next_start = chain[: n - n_done], next_start[: n - n_done]
            starts[n_done : n_done + len(chain)] = chain
            n_done += len(chain)
            if len(chain):
                self._check_end(int(next_start[-1]), int(chain[-1]), what)
                self.position = int(next_start[-1])
            if len(chain) < patience:
                n_walked = min(patience, n - n_done)
                starts[n_done : n_done + n_walked] = self._walk_strings(n_walked, what)
                n_done += n_walked
                patience *= 2
        starts[n] = self.position
        return starts

    def _chain_of_short_strings(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Starts and ends of the strings that follow one another from here, as far as lengths stand out."""
        window = self.data[self.position : self.position + _WINDOW_BYTES]
        zeros = window[1:] == 0
        zeros = zeros[:-1] & zeros[1:]  # 2 in a row
        zeros = zeros[:-2] & zeros[2:]  # 4
        zeros = zeros[:-3] & zeros[3:]  # 7
        starts = np.flatnonzero(zeros)
        if len(starts) == 0 or starts[0] != 0:
            return starts[:0], starts[:0]
        ends = starts + 8 + window[starts]
        breaks = np.flatnonzero(ends[:-1] != starts[1:])
        n = int(breaks[0]) + 1 if len(breaks) else len(starts)
        return starts[:n] + self.position, ends[:n] + self.position

    def _walk_strings(self, n: int, what: str) -> list[int]:
        starts, position, size, view, unpack = [], self.position, self.size, self._view, _U64.unpack_from
        for _ in range(n):
            end = position + 8
            if end <= size:
                end += unpack(view, position)[0]
            self._check_end(end, position, what)
            starts.append(position)
            position = end
        self.position = position
        return starts

    def _check_end(self, end: int, start: int, what: str) -> None:
        if end > self.size:
            raise self.error(f"a string of {what} runs past the end of the file: it is cut or damaged", start)

    def decode_strings(self, starts: npt.NDArray[np.int64], key: str) -> list[str]:
        """The strings at `starts`, all at once: their lengths become NULs, at which the text is split."""
        first, end, n = int(starts[0]), int(starts[-1]), len(starts) - 1
        text = self.data[first:end].copy()
        lengths = starts[:-1] - first
        text[lengths] = 0
        long = lengths[np.diff(starts) >= 8 + 256]  # the others' upper bytes are 0 already
        for i in range(1, 8):
            text[long + i] = 0
        # true unless a string holds a NUL itself: then the zeros do not tell where it ends
        if np.count_nonzero(text) == len(text) - 8 * n:
            try:
                strings = str(text.data, "utf-8").split("\0" * 8)
            except UnicodeDecodeError:
                pass  # the loop below says where
            else:
                return strings[1:]
        what = f"a string of key {brief(key)}"
        return [self.decode(a + 8, b - a - 8, what) for a, b in pairwise(starts.tolist())]

    def decode_numbers(self, entry: _NumberArray, key: str) -> npt.NDArray[Any]:
        """A copy of the numbers."""
        if entry.dtype.kind == "b":
            self.check_booleans(entry.offset, entry.n_items, key)
        return np.frombuffer(self._view, entry.dtype, entry.n_items, entry.offset).copy()

    def check_booleans(self, start: int, n: int, key: str) -> None:
        """Raises FormatError unless the bytes are 0 or 1."""
        wrong = np.flatnonzero(self.data[start : start + n] > 1)
        if len(wrong):
            raise self.error(f"key {brief(key)} has a boolean that is neither 0 nor 1", start + int(wrong[0]))


_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_WINDOW_BYTES = 1 << 16


def _read_header(cursor: _Cursor) -> tuple[int, int, int]:
    """Version, number of tensors, number of keys."""
    _check_magic(cursor)
    cursor.take(4, "the magic number")
    version = cursor.u32("the version")
    if version not in (2, 3):
        if version and version & 0xFFFF == 0:
            raise UnsupportedError(f"{cursor.path}: big-endian GGUF files are not supported")
        raise UnsupportedError(f"{cursor.path}: GGUF version {version} is not supported: use version 2 or 3")
    n_tensors = _count(cursor, "tensors", MAX_TENSORS, least_bytes=32)
    n_keys = _count(cursor, "keys", MAX_KEYS, least_bytes=13)
    return version, n_tensors, n_keys


def _check_magic(cursor: _Cursor) -> None:
    head = cursor.data[:32].tobytes()
    if head[:4] == b"GGUF":
        return
    kind = file_kind(head)
    raise cursor.error("not a GGUF file" + (f" but {kind}" if kind else ": it does not start with 'GGUF'"), 0)


def _count(cursor: _Cursor, what: str, limit: int, least_bytes: int) -> int:
    """A number of entries, refused if the rest of the file is too short for them."""
    start = cursor.position
    n = cursor.u64(f"the number of {what}")
    if n > min(limit, (cursor.size - cursor.position) // least_bytes):
        raise cursor.error(f"claims {n} {what}, more than the file has room for or any model has", start)
    return n


def _read_value(cursor: _Cursor, key: str) -> _Entry:
    what, start = f"key {brief(key)}", cursor.position
    value_type = cursor.u32(f"the type of {what}")
    if value_type == STRING_ID:
        n_bytes = cursor.u64(f"the length of {what}")
        text_start = cursor.take(n_bytes, what)
        try:
            return cursor.decode(text_start, n_bytes, what)
        except FormatError as error:
            return error
    if value_type == ARRAY_ID:
        return _read_array(cursor, what)
    if value_type not in _NUMBERS:
        raise cursor.error(f"{what} has the unknown value type {value_type}", start)
    if value_type == BOOL_ID:
        offset = cursor.take(1, what)
        try:
            cursor.check_booleans(offset, 1, key)
        except FormatError as error:
            return error
        return bool(cursor.data[offset])
    return cursor.number(_NUMBERS[value_type], what)


def _read_array(cursor: _Cursor, what: str) -> _StringArray | _NumberArray:
    start = cursor.position
    item_type = cursor.u32(f"the item type of {what}")
    if item_type == ARRAY_ID:
        raise cursor.error(f"{what} is an array of arrays, which no model needs", start)
    if item_type == STRING_ID:
        n = _count(cursor, f"strings in {what}", MAX_ARRAY_STRINGS, least_bytes=8)
        return _StringArray(cursor.skip_strings(n, what))
    if item_type not in _NUMBERS:
        raise cursor.error(f"{what} has the unknown item type {item_type}", start)
    dtype = _NUMBERS[item_type]
    n = cursor.u64(f"the number of items of {what}")
    return _NumberArray(dtype, cursor.take(n * dtype.itemsize, what), n)


def alignment_of(metadata: Mapping[str, Any], path: Path) -> int:
    """Bytes to a multiple of which tensors are placed. Raises FormatError unless it is a power of two."""
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    alignment = int(alignment) if isinstance(alignment, np.integer) else alignment
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise FormatError(f"key 'general.alignment' is {brief(alignment)}, not a power of two", path=path)
    return alignment


def _open_parts(part: _Part) -> list[_Part]:
    """All parts of the model that one belongs to, in order: the part alone unless it says otherwise."""
    n_parts = part.whole("split.count") if "split.count" in part.metadata else 1
    if n_parts <= 1:
        return [part]
    paths = part_paths(part.path, n_parts)
    if paths is None:
        name = part_name("name", part.whole("split.no") + 1, n_parts)
        raise FormatError(
            f"is one of {n_parts} parts of a split model: it must be named like {name}, next to the others",
            path=part.path,
        )
    for path in paths:
        if not path.exists():
            raise FormatError(f"is missing: the model is split into {n_parts} files", path=path)
    parts = [part if path == part.path else _Part(path) for path in paths]
    _check_parts(parts)
    return parts


def _check_parts(parts: Sequence[_Part]) -> None:
    """Raises FormatError unless the parts make one model."""
    first, holders = parts[0], dict[str, _Part]()
    n_tensors = first.whole("split.tensors.count")
    for number, part in enumerate(parts):
        for key, value in (
            ("split.count", len(parts)), ("split.no", number), ("split.tensors.count", n_tensors)
        ):  # fmt: skip
            if part.whole(key) != value:
                message = (
                    f"key {key!r} is {part.whole(key)} where part {number + 1} of this model has {value}"
                )
                raise FormatError(message, path=part.path)
        for key in part.metadata:
            if key in first.metadata and not key.startswith("split.") and not _same(first, part, key):
                raise FormatError(
                    f"is of another model than {first.path.name}: they differ in {brief(key)}", path=part.path
                )
        for name in part.tensors:
            if name in holders:
                raise FormatError(f"is in {holders[name].path.name} too", path=part.path, tensor=name)
            holders[name] = part
    if len(holders) != n_tensors:
        raise FormatError(
            f"key 'split.tensors.count' is {n_tensors}, but the {len(parts)} parts hold {len(holders)}",
            path=first.path,
        )


def _same(first: _Part, part: _Part, key: str) -> bool:
    return part is first or bool(np.array_equal(first.metadata[key], part.metadata[key]))  # type: ignore[arg-type]


def _read_tensors(cursor: _Cursor, n_tensors: int, alignment: int) -> dict[str, GGUFTensor]:
    tensors: dict[str, GGUFTensor] = {}
    for _ in range(n_tensors):
        start = cursor.position
        tensor = _read_tensor_info(cursor)
        if tensor.name in tensors:
            raise cursor.error("an earlier tensor has the same name", start, tensor.name)
        if tensor.offset % alignment:
            raise cursor.error(f"offset {tensor.offset} is not a multiple of {alignment}", start, tensor.name)
        tensors[tensor.name] = tensor
    data_start = aligned(cursor.position, alignment)
    placed = {name: replace(tensor, offset=data_start + tensor.offset) for name, tensor in tensors.items()}
    _check_extents(cursor, placed)
    return placed


def _read_tensor_info(cursor: _Cursor) -> GGUFTensor:
    """A tensor as described, its offset still relative to the start of the data."""
    name = cursor.text("a tensor's name", MAX_NAME_BYTES)
    start, what = cursor.position, f"the description of tensor {name!r}"
    n_dims = cursor.u32(what)
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.error(f"must have 1 to {MAX_DIMS} dimensions, not {n_dims}", start, name)
    shape = tuple(cursor.u64(what) for _ in range(n_dims))[::-1]
    type_id, offset = cursor.u32(what), cursor.u64(what)
    if type_id not in QUANT_TYPES_BY_ID:
        message = f"tensor {brief(name)} is of weight type {type_id}, which this version does not support"
        raise UnsupportedError(f"{cursor.path}: {message}: the file is newer, or damaged")
    weight_type = QUANT_TYPES_BY_ID[type_id]
    if reason := impossible_shape(weight_type, shape):
        raise cursor.error(reason, start, name)
    return GGUFTensor(name, weight_type, shape, offset, n_bytes_of(weight_type, shape))


def impossible_shape(type: QuantType, shape: Sequence[int]) -> str | None:
    """Why no tensor of this type has this shape, or None."""
    if not 1 <= len(shape) <= MAX_DIMS or min(shape) < 1:
        return f"shape {tuple(shape)} holds no weights or has more than {MAX_DIMS} dimensions"
    if shape[-1] % type.block_size:
        return (
            f"rows of {shape[-1]} weights are not a whole number of {type.name} blocks of {type.block_size}"
        )
    return None


def n_bytes_of(type: QuantType, shape: Sequence[int]) -> int:
    """Bytes of a tensor; exact, whatever the shape."""
    n = type.row_bytes(shape[-1])
    for size in shape[:-1]:
        n *= size
    return n


def _check_extents(cursor: _Cursor, tensors: Mapping[str, GGUFTensor]) -> None:
    """Raises FormatError unless all tensors lie in the file and apart."""
    previous: GGUFTensor | None = None
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        if tensor.offset + tensor.n_bytes > cursor.size:
            message = f"{tensor.n_bytes} bytes do not fit into a file of {cursor.size}: it is cut or damaged"
            raise cursor.error(message, tensor.offset, tensor.name)
        if previous is not None and tensor.offset < previous.offset + previous.n_bytes:
            raise cursor.error(f"overlaps tensor {previous.name!r}", tensor.offset, tensor.name)
        previous = tensor


def aligned(position: int, alignment: int) -> int:
    """The next multiple of `alignment` from a position on, both in bytes."""
    return -(-position // alignment) * alignment
