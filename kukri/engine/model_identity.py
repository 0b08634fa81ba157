"""A hash of all that keys and values depend on besides tokens: saved pages are shared by equal hashes.

That is the contents of the model's files, how they were loaded, the code that runs the model, and the
arithmetic of the backend on this processor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from kukri.config import ModelConfig
from kukri.errors import ConfigError
from kukri.formats.gguf.split import part_of, part_paths
from kukri.host.private_files import make_private, open_private, write_private
from kukri.kernels.backend import Backend
from kukri.kernels.cache import KVType

_DIGESTS = "models.json"
_MAX_DIGESTS = 64
_N_SAMPLES, _SAMPLE_BYTES = 1024, 4096
_CODE = ("config.py", "formats", "kernels", "models", "quant", "stages", "vision")


def model_identity(
    paths: Sequence[Path],
    config: ModelConfig,
    quantize: str | None,
    kv_type: KVType,
    backend: Backend,
    directory: Path,
) -> bytes:
    """The hash of a model at these paths.

    `directory` keeps the digests of model files, so that each is read once. Raises ConfigError if it
    cannot be trusted.
    """
    scaling = config.rope.scaling
    has_fixed_context = scaling is None or scaling.kind in ("linear", "yarn", "llama3")
    facts = replace(config, name="", max_context=1 if has_fixed_context else config.max_context)
    digest = sha256(f"{backend.arithmetic}\n{kv_type}\n{quantize}\n{facts!r}\n".encode())
    digest.update(code_digest())
    for path in paths:
        digest.update(_files_digest(path, directory))
    return digest.digest()


def weights_identity(path: Path, config: ModelConfig, quantize: str | None) -> str:
    """A hash of a model's configuration and of samples of its files, for processes that must agree.

    Fine-tunes of one model have files of the same sizes, so bytes of all tensors that are not tiny are in it;
    a file of gigabytes is not read whole.
    """
    samples = [(file.name, _sample(file)) for file in _files(path)]
    return sha256(repr((code_digest(), config, samples, quantize)).encode()).hexdigest()[:16]


def _sample(file: Path) -> str:
    """A hash of a file's size and of blocks that lie evenly over it, the first and the last among them."""
    size = file.stat().st_size
    digest = sha256(str(size).encode())
    with file.open("rb", buffering=0) as contents:
        if size <= _N_SAMPLES * _SAMPLE_BYTES:
            digest.update(contents.read())
        else:
            for i in range(_N_SAMPLES):
                contents.seek(i * (size - _SAMPLE_BYTES) // (_N_SAMPLES - 1))
                digest.update(contents.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def code_digest() -> bytes:
    """The hash of the sources that decide what a model computes."""
    package, digest = Path(__file__).parents[1], sha256()
    for part in _CODE:
        source = package / part
        for file in [source] if source.is_file() else sorted(source.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.digest()


def _files_digest(path: Path, directory: Path) -> bytes:
    """The hash of a model's files; files that have not changed since they were hashed are not read again."""
    try:
        make_private(directory)
        known = _known_digests(directory / _DIGESTS)
        total, is_new = sha256(), False
        for file in _files(path):
            found = file.stat()
            stamp = [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]
            key = str(file.resolve())
            entry = known.pop(key, None)
            if not isinstance(entry, dict) or entry.get("stamp") != stamp:
                with file.open("rb") as contents:
                    entry = {"stamp": stamp, "sha256": file_digest(contents, "sha256").hexdigest()}
                is_new = True
            known[key] = entry
            total.update(bytes.fromhex(entry["sha256"]))
        if is_new:
            kept = dict(list(known.items())[-_MAX_DIGESTS:])
            write_private(directory / _DIGESTS, json.dumps(kept).encode())
    except OSError as error:
        raise ConfigError(f"prefixes cannot be saved in {directory}: {error}") from None
    return total.digest()


def _files(path: Path) -> Iterator[Path]:
    """The files that a model's weights and configuration are read from."""
    if path.is_dir():
        yield from sorted(file for file in path.iterdir() if file.suffix == ".safetensors")
        yield path / "config.json"
        return
    part = part_of(path.name)
    yield from (part_paths(path, part[2]) if part else None) or [path]


def _known_digests(file: Path) -> dict[str, Any]:
    try:
        with open_private(file) as opened:
            data = opened.read()
    except FileNotFoundError:
        return {}
    try:
        known = json.loads(data)
    except ValueError:
        return {}
    return known if isinstance(known, dict) else {}
