"""safetensors: one file, or shards that an index names, mapped and checked; and the weights they hold.

A file is 8 bytes with the length of a JSON header, the header, and the tensors, row after row, without gaps
(https://github.com/huggingface/safetensors, "Format"). The header is read here and not by the `safetensors`
library, whose NumPy reader copies every tensor and knows no BF16.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from kukri.dataclass import dataclass
from kukri.errors import FormatError, brief, reading
from kukri.formats.file_kinds import file_kind
from kukri.formats.json_files import parse_json, read_json
from kukri.host.mapped_files import map_file
from kukri.quant.blocks import ByteArray

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

MAX_HEADER_BYTES = 100_000_000  # the limit of the `safetensors` library
_MAX_DIMENSIONS = 8

# bytes of a number in each type of the format; types that run are below
DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True)
class SafeTensor:
    """One tensor: where it lies in its file. `offset` is in bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


class SafetensorsFile:
    """A .safetensors file, mapped and checked: its tensors fill it without gap or overlap.

    Attributes: path, tensors (name -> SafeTensor, in file order), metadata (texts by name). Raises
    FormatError for a file that is broken or cannot be read. The file must not shrink while it is in use.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with reading(self.path):
            self._bytes = map_file(self.path, "safetensors")
            entries, start = _read_header(self._bytes, self.path)
            self.tensors = _read_tensors(entries, start, len(self._bytes), self.path)
            self.metadata = _read_metadata(entries)

    def data(self, tensor: SafeTensor) -> ByteArray:
        """A tensor as stored: uint8 [n_bytes], a read-only view of the mapped file."""
        return self._bytes[tensor.offset : tensor.offset + tensor.n_bytes]


def safetensors_start(path: Path) -> int:
    """Return where the tensors of one file begin, in bytes. Raises FormatError for a broken header."""
    return min((tensor.offset for tensor in SafetensorsFile(path).tensors.values()), default=0)


def open_files(directory: Path) -> dict[str, SafetensorsFile]:
    """The file of each tensor in a directory: of `model.safetensors`, or of the shards that the index names.

    Raises FormatError when neither is there, a shard is absent, or index and shards contradict each other.
    """
    single, index = directory / SINGLE_NAME, directory / INDEX_NAME
    if single.exists():
        file = SafetensorsFile(single)
        return dict.fromkeys(file.tensors, file)
    if index.exists():
        return _open_shards(directory, index)
    pickled = any(directory.glob("*.bin")) or any(directory.glob("*.pt*"))
    way_out = ": pickles are not supported, so save the model as safetensors" if pickled else ""
    raise FormatError(f"must hold {SINGLE_NAME} or {INDEX_NAME}{way_out}", path=directory)


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], Callable[[], ByteArray]]]
) -> None:
    """Writes a file from (dtype, shape, a function that gives the bytes), one tensor in memory at a time."""
    header = _header({name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()}, {})
    with open(path, "wb") as file:
        file.write(header)
        for _, _, make in tensors.values():
            file.write(np.ascontiguousarray(make()).reshape(-1).data)
        file.flush()
        os.fsync(file.fileno())


def safetensors_bytes(
    arrays: Mapping[str, np.ndarray[Any, Any]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The bytes of a file of arrays: float16, float32, int32 or int64."""
    kept = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    header = _header(
        {name: (_NAMES[array.dtype.name], array.shape) for name, array in kept.items()}, metadata or {}
    )
    return header + b"".join(array.tobytes() for array in kept.values())


_NAMES = {"float16": "F16", "float32": "F32", "int32": "I32", "int64": "I64"}


def _header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a file whose tensors (dtype, shape) follow one another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_metadata(entries: dict[str, Any]) -> dict[str, str]:
    """The texts under `__metadata__`; anything else there is left out."""
    given = entries.get("__metadata__")
    return {k: v for k, v in given.items() if isinstance(v, str)} if isinstance(given, dict) else {}


def _read_header(data: ByteArray, path: Path) -> tuple[dict[str, Any], int]:
    """The header's entries, and where the tensors begin in the file."""
    if len(data) < 8:
        raise FormatError(f"is cut short: {len(data)} bytes are not a safetensors file", path=path)
    head = data[:32].tobytes()
    if head[8:9] != b"{" and (kind := file_kind(head)) is not None:
        raise FormatError(f"must be a safetensors file, not {kind}", path=path, offset=0)
    n_bytes = int.from_bytes(data[:8].tobytes(), "little")
    if n_bytes > MAX_HEADER_BYTES:
        raise FormatError(f"claims a header of {n_bytes} bytes: not a safetensors file", path=path, offset=0)
    if 8 + n_bytes > len(data):
        message = f"is cut short: a header of {n_bytes} bytes does not fit into {len(data)}"
        raise FormatError(message, path=path, offset=0)
    text = data[8 : 8 + n_bytes].tobytes()
    if not text.startswith(b"{"):
        raise FormatError("the header must begin with '{'", path=path, offset=8)
    return parse_json(text, path), 8 + n_bytes


def _read_tensors(entries: dict[str, Any], start: int, file_bytes: int, path: Path) -> dict[str, SafeTensor]:
    entries = {name: entry for name, entry in entries.items() if name != "__metadata__"}
    tensors = [_tensor(name, entry, start, path) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.n_bytes))
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            problem = "overlaps the tensor before it" if tensor.offset < end else "leaves a gap before it"
            raise FormatError(problem, path=path, offset=tensor.offset, tensor=tensor.name)
        end += tensor.n_bytes
        if end > file_bytes:
            message = f"is cut short: the tensor ends at byte {end} of {file_bytes}"
            raise FormatError(message, path=path, offset=tensor.offset, tensor=tensor.name)
    if end != file_bytes:
        raise FormatError(f"has {file_bytes - end} bytes that belong to no tensor", path=path, offset=end)
    return {tensor.name: tensor for tensor in tensors}


def _tensor(name: str, entry: Any, start: int, path: Path) -> SafeTensor:
    def error(message: str) -> FormatError:
        return FormatError(message, path=path, tensor=name if len(name) <= 200 else name[:200] + "...")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise error("must have dtype, shape and 'data_offsets', and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise error(f"is of unknown type {brief(dtype)}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise error(f"has shape {brief(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise error(f"has 'data_offsets' {brief(offsets)}")
    n_bytes = prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != n_bytes:
        raise error(f"takes {offsets[1] - offsets[0]} bytes where {dtype} {shape} takes {n_bytes}")
    return SafeTensor(name, dtype, tuple(shape), start + offsets[0], n_bytes)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 1 << 63 for number in value)


def _open_shards(directory: Path, index: Path) -> dict[str, SafetensorsFile]:
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise FormatError("must have a 'weight_map' from tensors to files", path=index)
    shards = {name: _open_shard(directory, index, name) for name in _unique_texts(shard_of.values(), index)}
    for tensor, name in shard_of.items():
        if tensor not in shards[name].tensors:
            raise FormatError(
                f"the index places it in {name}, which does not hold it", path=index, tensor=tensor
            )
    for name, shard in shards.items():
        for tensor in shard.tensors:
            if shard_of.get(tensor) != name:
                raise FormatError(
                    f"is missing from {INDEX_NAME}, or is in another file there",
                    path=shard.path,
                    tensor=tensor,
                )
    return {tensor: shards[name] for tensor, name in shard_of.items()}


def _unique_texts(values: Iterable[Any], index: Path) -> list[str]:
    names: dict[str, None] = {}
    for value in values:
        if not isinstance(value, str):
            raise FormatError(f"names {brief(value)} as a file", path=index)
        names[value] = None
    return list(names)


def _open_shard(directory: Path, index: Path, name: str) -> SafetensorsFile:
    # a name from a download must not lead out of its directory
    if not re.fullmatch(r"[^/\\:\x00]+\.safetensors", name):
        raise FormatError(
            f"names {brief(name)}, but a shard must be a .safetensors file in the same directory", path=index
        )
    if not (directory / name).exists():
        raise FormatError(f"names the shard {brief(name)}, which was not found: fetch it again", path=index)
    return SafetensorsFile(directory / name)
