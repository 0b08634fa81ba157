"""An activation store: a model's activations on many texts, in files for training autoencoders.

A directory has `store.json` and shards in safetensors. A shard holds, row by row, `tokens` and `positions`
(int32) and each hook's activations, float16 [rows, width], under its full name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from kukri.dataclass import dataclass
from kukri.errors import ConfigError, FormatError
from kukri.formats.huggingface.safetensors import SafetensorsFile, safetensors_bytes
from kukri.formats.json_files import read_json
from kukri.formats.unfinished import unfinished
from kukri.interp.hooks.hook_names import Point
from kukri.interp.hooks.hook_values import Rows
from kukri.interp.patching import HasInterp
from kukri.kernels.arrays import FloatArray, IntArray

_INDEX = "store.json"
_HEAD_FORMS = ("head_in", "head_scale", "head_normalized", "head_out")
_NO_ROWS = ("scores", "pattern", "cos", "sin", "tokens", "logits", *_HEAD_FORMS)


@dataclass(frozen=True)
class StoreReport:
    """The contents of a store."""

    names: list[str]
    n_tokens: int
    n_shards: int
    n_written: int  # how many of these shards were not there before
    n_bytes: int


def write_store(
    llm: HasInterp,
    texts: Sequence[str],
    names: Any,
    folder: str | os.PathLike[str],
    *,
    model: str = "",
    context: int = 128,
    shard_bytes: int = 128 << 20,
    shuffle: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> StoreReport:
    """Writes the activations of `names` on texts, which are read in windows of `context` tokens.

    A store that was begun with the same texts and options resumes where it stopped; each shard, of about
    `shard_bytes`, appears whole or not at all. `shuffle` is the seed of a random order of windows, and of
    rows within a shard; None keeps the order of the texts. `model` is noted. `progress(done, total)` counts
    tokens. Raises ConfigError on a directory with another store, names without rows of tokens, no texts.
    """
    session, target = llm.interp, Path(folder)
    points = session.select(names)
    for point in points:
        if point.form in _NO_ROWS:
            raise ConfigError(f"{point.name} cannot be stored, because it has no row for each token")
    if not points or context < 1 or shard_bytes < 1:
        raise ConfigError("a store requires names, and a context and shards of at least 1")
    windows = _windows([np.array(session.values.encode(text), np.int32) for text in texts], context)
    if not windows:
        raise ConfigError("the texts must not be empty")
    if shuffle is not None:
        order = np.random.default_rng(shuffle).permutation(len(windows))
        windows = [windows[i] for i in order]
    row_bytes = 8 + sum(session.values.n_bytes(point, Rows(np.ones(1, np.int32))) // 2 for point in points)
    per_shard = max(1, shard_bytes // (row_bytes * context))
    n_tokens = sum(map(len, windows))
    facts = {
        "format": 1, "model": model, "names": [point.name for point in points], "context": context,
        "shuffle": shuffle, "windows_per_shard": per_shard, "n_tokens": n_tokens,
        "tokens_sha256": sha256(b"".join(ids.tobytes() for ids in windows)).hexdigest(),
    }  # fmt: skip
    groups = [windows[i : i + per_shard] for i in range(0, len(windows), per_shard)]
    _begin(target, facts)
    done = n_written = 0
    for i, group in enumerate(groups):
        path = target / _shard_name(i)
        if not path.exists():
            seed = None if shuffle is None else [shuffle, i]
            _write(path, safetensors_bytes(_shard(session, group, points, seed)))
            n_written += 1
        done += sum(map(len, group))
        if progress is not None:
            progress(done, n_tokens)
    n_bytes = sum((target / _shard_name(i)).stat().st_size for i in range(len(groups)))
    return StoreReport([point.name for point in points], done, len(groups), n_written, n_bytes)


class ActivationStore:
    """A store to read. Attributes: folder, names, n_tokens, shards (paths). Raises FormatError."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        facts = read_json(self.folder / _INDEX)
        names, n_tokens = facts.get("names"), facts.get("n_tokens")
        if facts.get("format") != 1 or not isinstance(names, list) or not isinstance(n_tokens, int):
            raise FormatError("must be a store of activations", path=self.folder / _INDEX)
        self.names: list[str] = [str(name) for name in names]
        self.n_tokens = n_tokens
        self.shards = sorted(self.folder.glob("activations-*.safetensors"))
        if not self.shards:
            raise FormatError("must hold a shard", path=self.folder)

    def shard(self, path: Path, name: str) -> FloatArray:
        """The activations of a shard [rows, width] in float32; or its tokens or positions."""
        file = SafetensorsFile(path)
        if name not in file.tensors:
            raise FormatError(f"must be there, not only {', '.join(file.tensors)}", path=path, tensor=name)
        tensor = file.tensors[name]
        dtype = "<f2" if tensor.dtype == "F16" else "<i4"
        return file.data(tensor).view(dtype).reshape(tensor.shape).astype(np.float32)

    def batches(self, name: str, size: int, *, seed: int | None = None) -> Iterator[FloatArray]:
        """Batches [size, width] of a hook, float32; with a seed, shards and their rows in random order.

        The rest of a shard that is smaller than a batch comes with the next shard; the last rows are left
        out.
        """
        rng = None if seed is None else np.random.default_rng(seed)
        order = np.arange(len(self.shards)) if rng is None else rng.permutation(len(self.shards))
        left: FloatArray | None = None
        for i in order:
            rows = self.shard(self.shards[i], name)
            if rng is not None:
                rows = rows[rng.permutation(len(rows))]
            rows = rows if left is None else np.concatenate([left, rows])
            n_whole = len(rows) - len(rows) % size
            yield from np.split(rows[:n_whole], range(size, n_whole, size)) if n_whole else ()
            left = rows[n_whole:]


def _windows(texts: Sequence[IntArray], context: int) -> list[IntArray]:
    """The texts in windows of at most `context` tokens."""
    return [ids[i : i + context] for ids in texts for i in range(0, len(ids), context)]


def _shard(
    session: Any, windows: Sequence[IntArray], points: Sequence[Point], seed: list[int] | None
) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a shard."""
    _, cache = session.run_with_cache(windows, [point.name for point in points], return_type=None)
    rows = Rows(np.array([len(ids) for ids in windows], np.int32))
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "tokens": np.concatenate(windows),
        "positions": np.concatenate([np.arange(len(ids), dtype=np.int32) for ids in windows]),
    }
    with np.errstate(over="ignore"):  # beyond float16 a number is infinite
        for name in cache:
            arrays[name] = rows.rows(cache[name]).reshape(rows.n_rows, -1).astype(np.float16)
    if seed is not None:
        order = np.random.default_rng(seed).permutation(rows.n_rows)
        arrays = {name: array[order] for name, array in arrays.items()}
    return arrays


def _begin(folder: Path, facts: dict[str, Any]) -> None:
    """Make the directory, or check that an existing one was begun with the same facts."""
    index = folder / _INDEX
    if index.exists():
        if read_json(index) != facts:
            raise ConfigError(f"{folder} must not hold a store of other texts or options: use another")
        return
    folder.mkdir(parents=True, exist_ok=True)
    _write(index, json.dumps(facts, indent=2).encode())


def _write(path: Path, data: bytes) -> None:
    try:
        with unfinished(path) as part, open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def _shard_name(i: int) -> str:
    return f"activations-{i:05}.safetensors"
